"""Keys typed ahead: each acts on the screen that the one before it led to."""

from __future__ import annotations

import asyncio
from collections import deque

from textual.app import App
from textual.events import Event, Key

PATIENCE = 0.25
"""Seconds after which a key is taken as done although its messages have not come back."""


class OrderedKeys(App[None]):
    """Handles one key to its end before the next.

    Textual forwards every key at once to what has the focus, while bindings and messages of the key before are
    still queued: of ``Enter A Enter`` arriving in one packet of a slow line all three reach the first screen. Here
    a key waits until the one before has gone from the focused widget through the screen to the app, twice: once for
    the key, once for the message that it caused.
    """

    def __init__(self) -> None:
        super().__init__(ansi_color=True)
        self._keys: deque[Key] = deque()
        self._turn = 0
        self._key_in_work = False

    async def on_event(self, event: Event) -> None:
        if not isinstance(event, Key) or event.is_forwarded:
            await super().on_event(event)
            return
        self._keys.append(event)
        if not self._key_in_work:
            await self._next_key()

    async def _next_key(self) -> None:
        self._key_in_work = bool(self._keys)
        if not self._keys:
            return
        self._turn += 1
        await super().on_event(self._keys.popleft())
        if self._exit:
            return
        turn = self._turn
        # A widget that goes away takes its queue with it: do not wait for ever.
        asyncio.get_running_loop().call_later(PATIENCE, self.call_later, self._done, turn)
        self._around(turn, 2)

    def _around(self, turn: int, rounds: int) -> None:
        if rounds == 0:
            self.call_later(self._done, turn)
            return
        screen = self.screen
        (self.focused or screen).call_later(
            screen.call_later, self.call_later, self._around, turn, rounds - 1
        )

    async def _done(self, turn: int) -> None:
        if turn == self._turn and self._key_in_work:
            await self._next_key()
