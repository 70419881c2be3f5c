"""A thread that looks at something again and again and hands over what it saw, one look at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from textual.app import App

from dstui.tui.jobs import JobDone

T = TypeVar("T")


class Poller(Generic[T]):
    """Calls ``take()`` in a daemon thread, then ``took(result)`` or ``failed(error)`` on the event loop.

    The next look waits until the last one was shown and ``interval()`` seconds have passed: a slow disk or a
    slow terminal delays the looks, it never piles them up. ``close()`` (if given) runs in the thread at its end.
    """

    def __init__(
        self,
        app: App[Any],
        take: Callable[[], T],
        took: Callable[[T], None],
        failed: Callable[[Exception], None],
        interval: Callable[[], float],
        *,
        close: Callable[[], None] | None = None,
        name: str = "poll",
    ) -> None:
        self._app = app
        self._take, self._took, self._failed = take, took, failed
        self._interval, self._close = interval, close
        self._name = name
        self._over = threading.Event()
        self._awake = threading.Event()
        self._wake = threading.Event()
        self._shown = threading.Event()
        self._awake.set()

    def start(self) -> None:
        threading.Thread(target=self._loop, name=f"dstui-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """No result is delivered any more; the thread ends after the look that it is in."""
        self._over.set()
        self._awake.set()
        self._shown.set()
        self._wake.set()

    def pause(self) -> None:
        """No further look until ``resume``; a look in progress is still delivered."""
        self._awake.clear()

    def resume(self) -> None:
        """Go on, with a look at once."""
        if not self._awake.is_set():
            self._awake.set()
            self._wake.set()

    def poke(self) -> None:
        """Look now."""
        self._wake.set()

    def _loop(self) -> None:
        try:
            while True:
                self._awake.wait()
                if self._over.is_set():
                    return
                self._wake.clear()
                self._look()
                while not self._over.is_set() and not self._shown.wait(5.0):
                    if not self._app.is_running:
                        return
                if self._over.is_set():
                    return
                self._wake.wait(self._interval())
        finally:
            if self._close is not None:
                self._close()

    def _look(self) -> None:
        deliver: Callable[[], None]
        try:
            result = self._take()
        except Exception as e:
            error = e
            deliver = lambda: self._failed(error)  # noqa: E731
        else:
            deliver = lambda: self._took(result)  # noqa: E731

        def show() -> None:
            try:
                if not self._over.is_set():
                    deliver()
            finally:
                self._shown.set()

        self._shown.clear()
        if not self._app.post_message(JobDone(show)):
            self._over.set()
