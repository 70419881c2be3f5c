"""``Table``: rows one selects in, with aligned columns. Only rows that changed are painted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.events import Resize
from textual.message import Message

from dstui.tui.text import Line, line, pad, width
from dstui.tui.widgets.lines import LineView

GAP = 2


@dataclass(frozen=True)
class Column:
    """``grow``: takes the room that is left; ``weight`` orders what is dropped where there is none (0 = never)."""

    title: str
    grow: bool = False
    weight: int = 0


@dataclass(frozen=True)
class Row:
    """``id`` names it to the screen; one cell a column."""

    id: str
    cells: tuple[str, ...]
    role: str = ""


class Table(LineView):
    """The first row is the heading. Up, Down, PgUp, PgDn, Home, End move; the screen binds what is done."""

    class Moved(Message):
        """The cursor is on another row. ``by_key``: a person moved it; else its row went away."""

        def __init__(self, row: Row | None, by_key: bool) -> None:
            super().__init__()
            self.row, self.by_key = row, by_key

    def __init__(self, columns: Sequence[Column] = (), *, id: str | None = None) -> None:
        super().__init__(id=id, keys=True)
        self._cols = tuple(columns)
        self._table: tuple[Row, ...] = ()
        self._cursor = 0
        self._first = 0

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        return self._table[self._cursor] if self._table else None

    @property
    def shown_rows(self) -> tuple[Row, ...]:
        """The rows on the screen now."""
        return self._table[self._first : self._first + max(1, self.size.height - 1)]

    def load(self, rows: Sequence[Row], columns: Sequence[Column] | None = None) -> None:
        """Show ``rows``; the cursor stays on its id, or at its place when that is gone."""
        before = self.row
        if columns is not None:
            self._cols = tuple(columns)
        self._table = tuple(rows)
        ids = [r.id for r in rows]
        if before is not None and before.id in ids:
            self._cursor = ids.index(before.id)
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        self._draw()
        after = self.row
        if (before.id if before else None) != (after.id if after else None):
            self.post_message(self.Moved(after, False))

    def select(self, row_id: str) -> None:
        """Put the cursor on a row."""
        for n, r in enumerate(self._table):
            if r.id == row_id:
                self._go(n, False)

    def on_resize(self, event: Resize) -> None:
        super().on_resize(event)
        self._draw()

    def _sizes(self) -> list[int]:
        """Cells of each column; 0 = dropped."""
        sizes = [
            max([width(c.title), *(width(r.cells[n]) for r in self._table)]) for n, c in enumerate(self._cols)
        ]
        room = self.size.width - 5  # the cursor before, the mark of more behind
        least = [min(s, 12) if c.grow else s for s, c in zip(sizes, self._cols, strict=True)]
        for n in sorted(range(len(sizes)), key=lambda n: -self._cols[n].weight):
            if sum(least) + GAP * (sum(1 for x in least if x) - 1) <= room or not self._cols[n].weight:
                break
            least[n] = 0
        spare = room - sum(least) - GAP * (sum(1 for x in least if x) - 1)
        for n, c in enumerate(self._cols):
            if c.grow and least[n]:
                more = min(max(0, spare), sizes[n] - least[n])
                least[n] += more
                spare -= more
        return least

    def _draw(self) -> None:
        if not self.size:
            return
        g = self.glyphs
        height = max(1, self.size.height - 1)
        self._first = max(0, min(self._first, len(self._table) - height))
        if self._cursor < self._first:
            self._first = self._cursor
        elif self._cursor >= self._first + height:
            self._first = self._cursor - height + 1
        sizes = self._sizes()

        def text(cells: Sequence[str]) -> str:
            shown = [pad(c, s, g.cut) for c, s in zip(cells, sizes, strict=True) if s]
            return (" " * GAP).join(shown)

        out: list[Line] = [line(("   " + text([c.title for c in self._cols]), "dim"))]
        for n in range(self._first, min(len(self._table), self._first + height)):
            row = self._table[n]
            on_it = n == self._cursor
            body = text(row.cells)
            out.append(
                line((f" {g.cursor if on_it else ' '} ", "key"), (body, "cursor" if on_it else row.role))
            )
        below = len(self._table) - self._first - height
        if self._first:
            out[0] = _marked(out[0], self.size.width, g.up)
        if below > 0:
            out[-1] = _marked(out[-1], self.size.width, g.down)
        self.show(out)

    def _go(self, index: int, by_key: bool = True) -> None:
        index = max(0, min(index, len(self._table) - 1))
        if self._table and index != self._cursor:
            self._cursor = index
            self._draw()
            self.post_message(self.Moved(self.row, by_key))

    def key_up(self) -> None:
        self._go(self._cursor - 1)

    def key_down(self) -> None:
        self._go(self._cursor + 1)

    def key_pageup(self) -> None:
        self._go(self._cursor - max(1, self.size.height - 2))

    def key_pagedown(self) -> None:
        self._go(self._cursor + max(1, self.size.height - 2))

    def key_home(self) -> None:
        self._go(0)

    def key_end(self) -> None:
        self._go(len(self._table) - 1)


def _marked(row: Line, cells: int, mark: str) -> Line:
    """``row`` with ``mark`` in its last cell: there is more in that direction."""
    text = "".join(t for t, _r in row)
    gap = cells - width(text) - 1
    return (*row, (" " * gap, ""), (mark, "key")) if gap >= 0 else row
