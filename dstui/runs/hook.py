"""The user's own command on a run's end, failure or stall, started by the supervisor: it needs no screen.

``dstui run --on-event CMD``, or the setting ``on_event``. ``/bin/sh -c CMD`` in the training's working directory and with
the environment of the run's caller, in a session of its own, with standard input on a JSON object and output in
``<run>/hook.log``. It belongs to no part of the run: a stop does not reach it, and it delays nothing but the
supervisor's own end, for ``SECONDS`` at most. One at a time; a stall that is over before its turn is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstui.runs import redact
from dstui.runs.processes import (
    RUN_ID_VARIABLE,
    SUPERVISES_VARIABLE,
    Process,
    Stat,
    all_stats,
    environment,
    identify,
    send,
)
from dstui.runs.store import RunDir

SCHEMA_VERSION = 1
SECONDS = 30.0
"""Time limit of one command; then SIGTERM, ``GRACE`` later SIGKILL, to its whole session."""
GRACE = 3.0
OUTPUT = 1 << 20
"""Bytes of ``hook.log`` that are kept; a command that writes ``FLOOD`` is ended."""
FLOOD = 16 << 20
EVENT_VARIABLE = "DSTUI_EVENT"
_ADDRESS = re.compile(r"(\w://[^/\s'\"]+)/[^\s'\"]+")
EVENTS = {"finished": "end", "stopped": "end", "failed": "failure", "lost": "failure", "stalled": "stall"}
"""State of the run -> DSTUI_EVENT."""


class Hooks:
    """``command`` empty: nothing ever happens. ``note(name, **fields)`` records an event of the run."""

    def __init__(
        self, run: RunDir, command: str, manifest: Mapping[str, Any], note: Callable[..., None]
    ) -> None:
        self.run = run
        self.command = command
        self._cwd = str(manifest.get("cwd") or "/")
        self._about = {"name": manifest.get("name"), "host": manifest.get("host")}
        self._note = note
        self._waiting: deque[dict[str, Any]] = deque()
        self._now: dict[str, Any] | None = None
        self._process: Process | None = None
        self._began = 0.0
        self._told: int | None = None
        self._sessions: set[int] = set()
        self._known: dict[Process, bool] = {}

    @property
    def log(self) -> Path:
        return self.run.path / "hook.log"

    @property
    def busy(self) -> bool:
        return self._process is not None or bool(self._waiting)

    def fire(
        self,
        state: str,
        *,
        message: str,
        cause: Mapping[str, Any] | None = None,
        end: Mapping[str, Any] | None = None,
        stall: Mapping[str, Any] | None = None,
    ) -> None:
        """The run is now ``state``. ``end``: the content of exit.json; ``message``: one sentence."""
        if not self.command:
            return
        if state != "stalled":  # what it waited for is of no interest any more
            self._waiting = deque(w for w in self._waiting if w["state"] != "stalled")
        self._waiting.append(
            {
                "schema_version": SCHEMA_VERSION,
                "t": round(time.time(), 3),
                "event": EVENTS[state],
                "state": state,
                "run": self.run.id,
                "dir": str(self.run.path),
                "cause": None if cause is None else dict(cause),
                "message": message,
                "exit": None if end is None else dict(end),
                "stall": None if stall is None else dict(stall),
            }
        )
        self.tick(time.monotonic())

    def calm(self) -> None:
        """A stall is over: one that still waits for its turn is not reported."""
        self._waiting = deque(w for w in self._waiting if w["state"] != "stalled")

    def tick(self, now: float) -> None:
        """Start the next one, or keep the limits of the one that runs."""
        if self._process is None:
            if self._waiting:
                self._start(self._waiting.popleft(), now)
            return
        over = now - self._began > SECONDS or self._size() > FLOOD
        if over and self._told is None:
            self._told = signal.SIGTERM
            self._end(signal.SIGTERM)
        elif self._told == signal.SIGTERM and now - self._began > SECONDS + GRACE:
            self._told = signal.SIGKILL
            self._end(signal.SIGKILL)

    def reaped(self, pid: int, code: int) -> bool:
        """Whether this child was ours."""
        if self._process is None or self._process.pid != pid:
            return False
        told, self._process = self._told, None
        with contextlib.suppress(OSError):
            if self._size() > OUTPUT:
                self._shorten()
        assert self._now is not None
        self._note(
            "hook",
            of=self._now["event"],
            state=self._now["state"],
            code=code,
            seconds=round(time.monotonic() - self._began, 1),
            ended=told is not None,
        )
        return True

    def owns(self, process: Process, stat: Stat) -> bool:
        """Whether a descendant of the supervisor is the user's command, not the training."""
        if not self._sessions:
            return False
        if stat.session in self._sessions:
            return True
        if process not in self._known:  # it may have left the session: its environment tells
            env = environment(process.pid)
            if not env:
                return False
            self._known[process] = EVENT_VARIABLE in env and env.get("DSTUI_RUN") == self.run.id
        return self._known[process]

    # -- one command ----------------------------------------------------------------------------------------------

    def _start(self, job: dict[str, Any], now: float) -> None:
        self._now, self._began, self._told = job, now, None
        job |= self._about
        log = self._open_log(job)
        stdin = _in_memory(json.dumps(job, ensure_ascii=False).encode() + b"\n")
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", self.command],
                cwd=self._cwd if Path(self._cwd).is_dir() else "/",
                env=variables(job, os.environ),
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o077,
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._note("hook", of=job["event"], state=job["state"], code=None, problem=str(e))
            return
        finally:
            os.close(log)
            os.close(stdin)
        child.returncode = 0  # reaped by the supervisor; Popen must not wait for it
        self._process = identify(child.pid) or Process(child.pid, -1)
        self._sessions.add(child.pid)

    def _open_log(self, job: dict[str, Any]) -> int:
        try:
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY)
        head = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {job['event']} ({job['state']})\n"
        with contextlib.suppress(OSError):  # a full disk
            os.write(fd, head.encode())
        return fd

    def _size(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def _shorten(self) -> None:
        """Keep the newest half of what may be kept."""
        with self.log.open("r+b") as f:
            f.seek(-OUTPUT // 2, os.SEEK_END)
            rest = f.read()
            f.seek(0)
            f.write(b"[dstui] older output was given up\n" + rest[rest.find(b"\n") + 1 :])
            f.truncate()

    def _end(self, number: int) -> None:
        process = self._process
        assert process is not None
        for pid, s in all_stats().items():
            if s.session == process.pid:
                with contextlib.suppress(OSError):
                    send(Process(pid, s.start), number)


def redacted(command: str) -> str:
    """As it may be written down: without secrets by name, and of an address its host only (it may be a webhook's)."""
    words = redact.arguments(command.split(" "))
    return _ADDRESS.sub(rf"\1/{redact.REDACTED}", " ".join(words))


def variables(job: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment with what happened; strings only, ``""`` for what does not apply."""
    cause = job.get("cause") or {}
    end = job.get("exit") or {}
    own = (RUN_ID_VARIABLE, SUPERVISES_VARIABLE)  # it is no process of the run
    env = {k: v for k, v in environ.items() if k not in own}
    return env | {
        EVENT_VARIABLE: job["event"],
        "DSTUI_STATE": job["state"],
        "DSTUI_RUN": job["run"],
        "DSTUI_RUN_NAME": job.get("name") or "",
        "DSTUI_RUN_DIR": job["dir"],
        "DSTUI_CAUSE": str(cause.get("code") or ""),
        "DSTUI_CAUSE_NAME": str(cause.get("name") or ""),
        "DSTUI_MESSAGE": job["message"],
        "DSTUI_EXIT_CODE": "" if end.get("code") is None else str(end["code"]),
        "DSTUI_EXIT_SIGNAL": end.get("signal") or "",
    }


def _in_memory(data: bytes) -> int:
    """A descriptor that reads ``data``: no pipe that could block, no file that a full disk could refuse."""
    fd = os.memfd_create("dstui-event", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
