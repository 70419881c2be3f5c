"""A real terminal for tests: a child on a pty, its screen kept by pyte, every byte counted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "enter": "\r", "esc": "\x1b", "tab": "\t", "space": " ", "backspace": "\x7f",
    "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D",
    "pageup": "\x1b[5~", "pagedown": "\x1b[6~", "f1": "\x1bOP", "f2": "\x1bOQ",
    **{f"ctrl+{c}": chr(ord(c) - 96) for c in "abcdefghijklmnopqrstuvwxyz"},
}  # fmt: skip


class Terminal:
    """``dstui`` on a pty of ``columns`` x ``rows``. Use as a context manager."""

    def __init__(
        self,
        args: Sequence[str] = (),
        *,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        environ = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        for name in ("COLORTERM", "NO_COLOR", "LC_ALL", "LC_CTYPE", "TMUX", "DSTUI_LANG", "LANGUAGE"):
            environ.pop(name, None)
        for name, value in (env or {}).items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        words = list(command or (sys.executable, "-m", "dstui")) + list(args)
        self.started = time.monotonic()
        self.child = pexpect.spawn(
            words[0],
            words[1:],
            env=environ,
            cwd=str(cwd) if cwd else None,
            dimensions=(rows, columns),
            timeout=10,
        )
        self.child.delaybeforesend = None
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        """All bytes written so far."""
        self.first_byte: float | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc: object) -> None:
        if not self.child.closed:
            if self.child.isalive():
                self.child.kill(signal.SIGKILL)
            self.child.close(force=True)

    # ---- output

    def read(self, seconds: float = 0.0) -> int:
        """Take what comes within ``seconds``; returns the number of bytes."""
        count = 0
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                data = self.child.read_nonblocking(65536, timeout=max(0.0, min(0.02, left)))
            except pexpect.TIMEOUT:
                data = b""
            except pexpect.EOF:
                return count
            if data:
                if self.first_byte is None:
                    self.first_byte = time.monotonic() - self.started
                count += len(data)
                self.raw += data
                self.stream.feed(data)
            elif left <= 0:
                return count

    def read_some(self, seconds: float = 0.02) -> bool:
        """Take what is there, waiting ``seconds`` for the first byte; False when nothing came."""
        try:
            data = self.child.read_nonblocking(65536, timeout=seconds)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def settle(self, quiet: float = 0.3, limit: float = 10.0) -> int:
        """Read until nothing came for ``quiet`` seconds; returns the bytes."""
        count = 0
        end = time.monotonic() + limit
        while time.monotonic() < end:
            got = self.read(quiet)
            count += got
            if not got:
                break
        return count

    def wait(self, text: str, limit: float = 10.0) -> float:
        """Read until ``text`` is on the screen; returns the seconds it took. Fails with the screen."""
        start = time.monotonic()
        while time.monotonic() - start < limit:
            if text in self.text:
                return time.monotonic() - start
            if not self.child.isalive() and not self.read(0.05):
                break
            self.read(0.01)
        raise AssertionError(f"{text!r} did not appear within {limit} s:\n{self.text}")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    # ---- input

    def press(self, *keys: str) -> None:
        """Send keys by name (``KEYS``) or as they are."""
        for key in keys:
            self.child.send(KEYS.get(key, key))

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    # ---- the process

    def kill(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def hang_up(self) -> None:
        """Close the master side, as a terminal that dies does."""
        self.child.ptyproc.fileobj.close()
        self.child.ptyproc.closed = self.child.closed = True

    def gone(self, limit: float = 5.0) -> float:
        """Wait for the process to end; returns the seconds it took."""
        start = time.monotonic()
        while time.monotonic() - start < limit:
            self.read(0.02)
            if not self.child.isalive():
                return time.monotonic() - start
        raise AssertionError(f"still alive after {limit} s")

    @property
    def code(self) -> int:
        """Exit code of the ended process, 128 + signal when killed."""
        self.child.close()
        if self.child.signalstatus is not None:
            return 128 + int(self.child.signalstatus)
        return int(self.child.exitstatus or 0)

    @property
    def rss(self) -> int:
        """Resident bytes of the process now."""
        for row in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if row.startswith("VmRSS:"):
                return int(row.split()[1]) * 1024
        raise AssertionError("no VmRSS")
