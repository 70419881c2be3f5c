"""Leaving in every case: signals, a closed terminal, an event loop that no longer turns.

Textual handles neither SIGTERM nor SIGHUP (the alternate screen stays), and it spins at 100 % CPU when the
pty is gone and no signal came. Its output queue blocks the event loop when the terminal stops reading, so
nothing here depends on the loop alone: after ``GRACE`` seconds the process ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

GRACE = 1.2
"""Seconds that a clean exit gets after a signal or a lost terminal."""
CHECK = 0.5
"""Seconds between two looks at the terminal."""
_RESTORE = b"\x1b[?1049l\x1b[?25h\x1b[?2004l\x1b[<u\x1b[?1004l\x1b[0m"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Lifeline:
    """Installs the handlers and the watch; ``leave(code)`` is called once, from any thread or a handler."""

    def __init__(self, leave: Callable[[int], None]) -> None:
        self._leave = leave
        self._left = threading.Event()
        self._done = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._fd = sys.__stdin__.fileno() if sys.__stdin__ is not None else 0
        try:
            self._mode: list[Any] | None = termios.tcgetattr(self._fd)
        except termios.error:
            self._mode = None

    def start(self) -> None:
        """Take the signals and watch the terminal. Main thread only; call before Textual sets the raw mode."""
        for number in _SIGNALS:
            # A signal that the caller had ignored (nohup) is still a reason to leave a screen that nobody sees.
            self._before[number] = signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, name="dstui-tty", daemon=True).start()

    def stop(self) -> None:
        """Give the signals back; the watch ends."""
        self._done.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._go(128 + number)

    def _watch(self) -> None:
        while not self._done.wait(CHECK):
            try:
                termios.tcgetattr(self._fd)
            except termios.error:
                self._go(128 + signal.SIGHUP)
                return

    def _go(self, code: int) -> None:
        if self._left.is_set():
            return
        self._left.set()
        threading.Thread(target=self._last_resort, args=(code,), name="dstui-exit", daemon=True).start()
        self._leave(code)

    def _last_resort(self, code: int) -> None:
        """The process did not end in time (also when the writer thread waits for a terminal that reads no more):
        restore what can be restored and go."""
        time.sleep(GRACE)
        try:
            os.set_blocking(2, False)
            os.write(2, _RESTORE)
            if self._mode is not None:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._mode)
        except (OSError, termios.error):
            pass
        os._exit(code)
