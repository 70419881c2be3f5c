"""``Menu``: a list of titled choices, one a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.events import Resize
from textual.message import Message

from dstui.tui import actions
from dstui.tui.text import Line, clip, line, pad, width
from dstui.tui.widgets.lines import LineView


@dataclass(frozen=True)
class Item:
    """``id`` is what ``Menu.Chosen`` carries; a disabled item says in ``note`` why.

    ``more`` is for the message rows of the screen, where the note has no room to be read whole.
    """

    id: str
    title: str
    note: str = ""
    enabled: bool = True
    more: str = ""


class Menu(LineView):
    """Up, Down, Enter. Holds the cursor; the screen gives the items."""

    BINDINGS = actions.bindings("start")

    class Chosen(Message):
        def __init__(self, item: Item) -> None:
            super().__init__()
            self.item = item

    class Back(Message):
        """Left or Esc."""

    class Moved(Message):
        def __init__(self, item: Item | None) -> None:
            super().__init__()
            self.item = item

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, keys=True)
        self._items: tuple[Item, ...] = ()
        self._at = 0

    @property
    def item(self) -> Item | None:
        """The item under the cursor."""
        return self._items[self._at] if self._items else None

    def load(self, items: Sequence[Item], at: str | None = None) -> None:
        """Show ``items``; the cursor stays on its id, or goes to ``at``."""
        wanted = at if at is not None else (self.item.id if self.item else None)
        self._items = tuple(items)
        ids = [i.id for i in items]
        self._at = ids.index(wanted) if wanted in ids else 0
        self._draw()
        self.post_message(self.Moved(self.item))

    def on_resize(self, event: Resize) -> None:
        super().on_resize(event)
        self._draw()

    def _draw(self) -> None:
        g = self.glyphs
        cells = self.size.width
        names = min(max((width(i.title) for i in self._items), default=0), max(12, cells * 2 // 5))
        rows: list[Line] = []
        for n, item in enumerate(self._items):
            on_it = n == self._at
            role = "cursor" if on_it else "strong" if item.enabled else "dim"
            room = cells - names - 7
            rows.append(
                line(
                    (f" {g.cursor if on_it else ' '} ", "key"),
                    (f" {pad(item.title, names, g.cut)} ", role),
                    ("  " + clip(item.note, room, g.cut), "" if on_it else "dim"),
                )
            )
        self.show(rows)
        self.reveal(self._at)

    def _move(self, delta: int) -> None:
        target = self._at + delta
        if 0 <= target < len(self._items):
            self._at = target
            self._draw()
            self.post_message(self.Moved(self.item))

    def action_up(self) -> None:
        self._move(-1)

    def action_down(self) -> None:
        self._move(1)

    def action_choose(self) -> None:
        if self.item is not None and self.item.enabled:
            self.post_message(self.Chosen(self.item))

    def action_back(self) -> None:
        self.post_message(self.Back())
