"""``LineView``: rows of styled text, of which only those that changed are repainted."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.segment import Segment
from textual.events import Resize
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dstui import i18n
from dstui.tui.terminal import Glyphs, Profile
from dstui.tui.text import BLANK, ROLES, Line, clip_line, line_width


def profile_of(widget: Widget) -> Profile:
    """The profile of the app that ``widget`` is in."""
    profile: Profile = getattr(widget.app, "profile", None) or Profile()
    return profile


class LineView(Widget):
    """Shows ``rows``; ``show()`` swaps them and repaints the visible rows that differ, nothing else.

    Textual repaints whole widgets: one changed cell of a ``DataTable`` or an equal ``Static.update()``
    rewrites everything. Here an equal update writes no byte. Content longer than the view scrolls by
    ``scroll_rows``; an arrow in the last column says where more is (no scrollbar, which needs
    box characters and a repaint).
    """

    DEFAULT_CSS = """
    LineView { height: 1fr; width: 1fr; }
    """

    class Resized(Message):
        """The view has another size; rows that were made for its width should be made again."""

        def __init__(self, view: LineView) -> None:
            super().__init__()
            self.view = view

    def __init__(
        self,
        rows: Iterable[Line] = (),
        *,
        id: str | None = None,
        classes: str | None = None,
        keys: bool = False,
    ) -> None:
        """``keys``: whether it takes the focus and scrolls by keys."""
        super().__init__(id=id, classes=classes)
        self.can_focus = keys
        self._content: tuple[Line, ...] = tuple(rows)
        self._top = 0
        self._painted: list[Line] = []

    @property
    def glyphs(self) -> Glyphs:
        return profile_of(self).glyphs

    @property
    def content(self) -> tuple[Line, ...]:
        """All rows, also those out of view."""
        return self._content

    @property
    def top(self) -> int:
        """Index of the first visible row."""
        return self._top

    def show(self, rows: Iterable[Line]) -> None:
        """Replace the rows; keeps the scroll position where that is still possible."""
        self._content = tuple(rows)
        self._sync()

    def scroll_rows(self, delta: int) -> None:
        self._top += delta
        self._sync()

    def reveal(self, first: int, last: int | None = None) -> None:
        """Scroll so that rows ``first`` to ``last`` are in view (``first`` wins when they are too many)."""
        height = max(1, self.size.height)
        last = first if last is None else last
        if last >= self._top + height:
            self._top = last - height + 1
        if first < self._top:
            self._top = first
        self._sync()

    def on_resize(self, _event: Resize) -> None:
        self._painted = []
        self._sync()
        self.post_message(self.Resized(self))

    def _window(self) -> list[Line]:
        height, width = self.size.height, self.size.width
        self._top = max(0, min(self._top, len(self._content) - height))
        below = len(self._content) - self._top - height
        rows = list(self._content[self._top : self._top + height])
        glyphs = self.glyphs
        out = []
        for y, row in enumerate(rows):
            mark = ""
            if self._top and y == 0:
                mark = glyphs.up
            if below > 0 and y == height - 1:
                mark = glyphs.down
            if mark:
                row = clip_line(row, width - 2, glyphs.cut)
                row = (*row, (" " * (width - 1 - line_width(row)), ""), (mark, "key"))
            out.append(clip_line(row, width, glyphs.cut))
        out.extend([BLANK] * (height - len(out)))
        return out

    def _sync(self) -> None:
        if not self.is_mounted or not self.size:
            return
        old, new = self._painted, self._window()
        self._painted = new
        if len(old) != len(new):
            self.refresh()
            return
        width = self.size.width
        changed = [
            Region(0, y, min(width, end), 1)
            for y, (a, b) in enumerate(zip(old, new, strict=True))
            if a != b and (end := changed_until(a, b))
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        row: Line = self._painted[y] if 0 <= y < len(self._painted) else BLANK
        plain = not profile_of(self).unicode and i18n.language() == "en"
        segments = [
            Segment(text.encode("ascii", "replace").decode() if plain else text, ROLES[role])
            for text, role in _merged(row)
        ]
        last = segments[-1].style if segments else None
        fill = None if last is None or last.reverse else last  # blanks after a span cost no change of style
        return Strip(segments, line_width(row)).adjust_cell_length(self.size.width, fill)

    def key_up(self) -> None:
        self.scroll_rows(-1)

    def key_down(self) -> None:
        self.scroll_rows(1)

    def key_home(self) -> None:
        self.scroll_rows(-len(self._content))

    def key_end(self) -> None:
        self.scroll_rows(len(self._content))


def _cells(row: Line) -> list[tuple[str, int, str]]:
    """One entry a cell: character, which half of it, style. A blank has no style unless it is reversed."""
    out: list[tuple[str, int, str]] = []
    for text, role in row:
        reverse = bool(ROLES[role].reverse)
        for ch in text:
            shown = role if ch != " " or reverse else ""
            size = cell_len(ch)
            if size == 0 and out:  # a combining mark belongs to the cell before it
                out[-1] = (out[-1][0] + ch, *out[-1][1:])
            out += [(ch, half, shown) for half in range(size)]
    return out


def changed_until(old: Line, new: Line) -> int:
    """Number of cells from the left that cover every difference; 0 when both look the same.

    Textual repaints from a widget's left edge, so what is equal at the end of a row is what can be saved.
    """
    a, b = _cells(old), _cells(new)
    count = max(len(a), len(b))
    blank = (" ", 0, "")
    a += [blank] * (count - len(a))
    b += [blank] * (count - len(b))
    while count and a[count - 1] == b[count - 1]:
        count -= 1
    return count


def _merged(row: Line) -> list[tuple[str, str]]:
    """``row`` with as few changes of style as it looks the same with: each costs about 12 bytes."""
    out: list[tuple[str, str]] = []
    for text, role in row:
        if out:
            before, before_role = out[-1]
            if role == before_role or (
                text.isspace() and not (ROLES[before_role].reverse or ROLES[role].reverse)
            ):
                out[-1] = (before + text, before_role)
                continue
            if before.isspace() and not (ROLES[before_role].reverse or ROLES[role].reverse):
                out[-1] = (before + text, role)
                continue
        out.append((text, role))
    return out
