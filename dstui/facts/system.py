"""The operating system as seen through files and the environment; the root can be moved for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dstui.i18n import _


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - no pathlib object wanted
    except OSError:  # it was deleted under us
        return "/"


@dataclass(frozen=True)
class System:
    """Where facts are read: a root folder (``/``), an environment and a working directory."""

    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cwd: str = field(default_factory=_working_directory)

    def path(self, name: str) -> Path:
        """``/proc/meminfo`` under the root."""
        return Path(self.root) / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Text of a small file; None when it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The whole number in a small file; None when there is none."""
        text = self.read(name)
        try:
            return None if text is None else int(text.strip())
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """Whether ``name`` is there; what may not be looked at is not."""
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def which(self, name: str) -> str | None:
        return shutil.which(name, path=self.environ.get("PATH", os.defpath))


class Child:
    """A helper process started now and read later, so several run side by side.

    Never blocks longer than the deadline and never waits for a process that cannot be killed
    (one stuck in a driver call stays behind, dstui does not).
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], cwd: str | None = None) -> None:
        self.failure: str | None = None
        self.timed_out = False
        self.code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environ),
                cwd=cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            self.failure = getattr(e, "strerror", None) or str(e)

    def output(self, deadline: float) -> str | None:
        """Standard output once it ended with code 0; else None and ``failure``/``timed_out`` say why.

        ``deadline`` is a ``time.monotonic()`` value.
        """
        p = self._process
        if p is None:
            return None
        try:
            out, err = p.communicate(timeout=max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.timed_out = True
            with contextlib.suppress(OSError):  # with what it started itself (a wrapper script's compiler)
                os.killpg(p.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(0.05)
            for pipe in (p.stdout, p.stderr):
                if pipe:
                    pipe.close()
            return None
        self.code = p.returncode
        if p.returncode != 0:
            lines = err.decode("utf-8", "replace").strip().splitlines()
            self.failure = lines[-1] if lines else _("it ended with code {code}").format(code=p.returncode)
            return None
        return out.decode("utf-8", "replace")
