"""``python -m dstui.runs.adopter RUNDIR ACK_FD``: the supervisor of a run whose own was killed (``dstui.runs.adopt``)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dstui.runs import redact, store
from dstui.runs.adopt import is_lost_here
from dstui.runs.control import orphans
from dstui.runs.firstfail import Watched
from dstui.runs.ops import HeldLock
from dstui.runs.processes import Family, Process, Stat, environment, identify, marked, stat
from dstui.runs.store import RunDir
from dstui.runs.supervisor import Supervisor, detach
from dstui.settings import Settings


class Adopter(Supervisor):
    """Supervises processes that are not its children: those that carry the run's id."""

    def __init__(self, run: RunDir, ack_fd: int) -> None:
        manifest = run.manifest
        job: dict[str, Any] = {
            "argv": [],
            "env": {},
            "devices": _devices(manifest),
            "on_event": _on_event(manifest),
        }
        super().__init__(run, job, ack_fd)
        self.held_locks |= _locks(run)
        self.started_at = float(manifest.get("started_at") or run.created_at)
        self.adopted_at = time.time()
        self.before = run.process("launcher")
        self.strangers: set[int] = set()
        self.looked_anew = 0.0

    def members(self, stats: dict[int, Stat] | None = None) -> list[Process]:
        if stats is not None:
            return [Process(pid, s.start) for pid, s in stats.items() if s.state not in "ZX"]
        now = time.monotonic()
        if now - self.looked_anew >= Family.ANEW:
            self.looked_anew = now
            self.strangers.clear()
        return [p for p in marked(self.run.id, self.strangers) if p.pid != os.getpid()]

    def table(self, now: float) -> dict[int, Stat]:
        return {p.pid: s for p in self.members() if (s := stat(p.pid)) is not None and s.start == p.start}

    def take_over(self) -> None:
        found = orphans(self.run)
        if found:
            self.job["env"] = _environment(found, self.run.id)
        own = identify(os.getpid())
        assert own is not None
        self.manifest["supervisor"] = {"pid": own.pid, "start_time": own.start}
        self.manifest.setdefault("adopted", []).append(self.adopted_at)
        store.write_json(self.run.manifest_path, self.manifest)
        self.event("adopted", pid=own.pid, processes=len(found))
        self.scan(time.monotonic())
        self.beat(time.monotonic())
        self.acknowledge(ok=True, pid=own.pid)

    def is_over(self) -> bool:
        return not any(w.ended_at is None for w in self.watched.values()) and not self.scan(time.monotonic())

    def conclude(self) -> None:
        self.end_on_nodes(only_look=self.stop is None)
        self.free_shared_memory()
        self.end_sampling()
        ranks = sorted((w for w in self.watched.values() if w.rank is not None), key=_order)
        outcome = "stopped" if self.stop is not None else "lost"
        removed = self.free_locks()
        self.event("exit", outcome=outcome, code=None, signal=None)
        data = {
            "schema_version": store.SCHEMA_VERSION,
            "outcome": outcome,
            "code": None,
            "signal": None,
            "launcher_signal": None,
            "rank_code": None,
            "first_rank": None,
            "first_node": None,
            "nodes": self.nodes() or None,
            "reason": "its supervisor was killed; the exit code is unknown",
            "ranks": [self.rank_record(w) for w in ranks],
            "leftovers": [],
            "locks_removed": removed,
            "oom_kills": {"cgroup": None, "system": None},
            "started_at": self.started_at,
            "ended_at": time.time() if ranks else None,
            "stopped_by": self.stop.by if self.stop else None,
            "cause": None,
        }
        self.write_exit(data)
        self.tell_end(data)


def _order(w: Watched) -> tuple[int, float]:
    return (w.rank or 0, w.ended_at or 0.0)


def _devices(manifest: dict[str, Any]) -> list[str] | None:
    """As at the start: [] = no cards, None = all that there are."""
    if not (manifest.get("facts") or {}).get("gpus"):
        return []
    devices = manifest.get("devices")
    return [str(d) for d in devices] if devices else None


def _on_event(manifest: dict[str, Any]) -> str:
    """The command as it was given; the settings' where it was not written down whole."""
    command = str(manifest.get("on_event") or "")
    return str(Settings.load().get("on_event")) if redact.REDACTED in command else command


def _locks(run: RunDir) -> set[HeldLock]:
    """What the supervisor before saw ranks hold."""
    found = set()
    for event in run.events():
        if event.get("event") == "op_lock":
            with contextlib.suppress(KeyError, TypeError):
                found.add(HeldLock(*(event[name] for name in HeldLock._fields)))
    return found


def _environment(processes: list[Process], run_id: str) -> dict[str, str]:
    """Where the ranks look for built ops."""
    for p in processes:
        env = environment(p.pid)
        if env:
            return {k: env[k] for k in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME") if k in env}
    return {}


def main(argv: list[str]) -> int:
    run, ack_fd = RunDir(Path(argv[0])), int(argv[1])
    os.set_inheritable(ack_fd, False)
    detach()
    try:
        errors = os.open(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        claim = os.open(run.path / ".adopt", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process is gone
    except OSError as e:  # another one was faster, or the disk is full or read-only
        with contextlib.suppress(OSError):
            os.write(ack_fd, json.dumps({"ok": False, "cause": str(e)}).encode())
        return 0
    if not is_lost_here(run):
        return 0
    try:
        supervisor = Adopter(run, ack_fd)
        supervisor.signals()
        supervisor.reserve()
        supervisor.take_over()
        supervisor.main_loop()
        supervisor.conclude()
    except Exception:
        traceback.print_exc()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
