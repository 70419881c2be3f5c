"""Work off the event loop in daemon threads: a slow or stuck job never holds the quit back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from textual.app import App
from textual.message import Message

T = TypeVar("T")


class JobDone(Message):
    """A job has ended; ``deliver`` runs its callback on the event loop."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        super().__init__()
        self.deliver = deliver


class Jobs:
    """Named background jobs of one app. A later job of the same name wins: the earlier result is dropped.

    Textual's thread workers run in asyncio's executor, for which the interpreter waits at exit (measured:
    6.5 s behind a blocked child); daemon threads are simply left.
    """

    def __init__(self, app: App[Any], failed: Callable[[BaseException], None]) -> None:
        self._app = app
        self._failed = failed
        self._generation: dict[str, int] = {}
        self.running = 0
        """Jobs whose result has not been delivered yet (tests wait for 0)."""

    def run(
        self,
        name: str,
        work: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Run ``work()`` in a thread, then ``done(result)`` or ``failed(error)`` on the event loop."""
        generation = self._generation[name] = self._generation.get(name, 0) + 1
        self.running += 1

        def body() -> None:
            deliver: Callable[[], None]
            try:
                result = work()
            except BaseException as error:
                caught = error
                deliver = lambda: (failed or self._failed)(caught)  # noqa: E731
            else:
                deliver = lambda: done(result)  # noqa: E731

            def finish() -> None:
                self.running -= 1
                if self._generation[name] == generation:
                    deliver()

            self._app.post_message(JobDone(finish))

        threading.Thread(target=body, name=f"dstui-{name}", daemon=True).start()

    def cancel(self, name: str) -> None:
        """Drop the result of the running job ``name``."""
        self._generation[name] = self._generation.get(name, 0) + 1
