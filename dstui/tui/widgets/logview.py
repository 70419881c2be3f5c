"""``LogView``: any place of a log of any size, by offset. Reads in the background, holds at most a few screens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len
from textual.message import Message

from dstui.i18n import _
from dstui.runs.tail import Line as LogLine
from dstui.runs.tail import LogFile, clean, settle
from dstui.tui.text import Line, clip, line
from dstui.tui.widgets.lines import LineView
from dstui.units import KiB, MiB, gib

if TYPE_CHECKING:
    from dstui.tui.app import DstuiApp

BLOCK = 300
"""Lines read at a time."""
HELD = 1500
"""Lines held at most; the far end is dropped."""
FAR = 1 << 20
"""Bytes written since the last look from which the end is read afresh instead of caught up with."""
SIDE = 16
"""Cells a step to the side."""


class LogView(LineView):
    """Follows the end, or stays where one scrolled or searched to. The file is never read whole.

    A screen calls ``open`` with a path and ``grew`` when there may be more. ``Moved`` tells that the place or the
    mode changed (see ``status``).
    """

    class Moved(Message):
        """What ``status`` says is different now. ``by_key``: a person went somewhere."""

        def __init__(self, by_key: bool = False) -> None:
            super().__init__()
            self.by_key = by_key

    class Found(Message):
        """A search ended; ``hit``: whether a line was found."""

        def __init__(self, pattern: str, hit: bool, backwards: bool) -> None:
            super().__init__()
            self.pattern, self.hit, self.backwards = pattern, hit, backwards

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, keys=True)
        self._file: LogFile | None = None
        self._raw: list[LogLine] = []
        self._shown: list[LogLine] = []
        self._follow = True
        self._busy = False
        self._wanted = False
        self._mark: int | None = None
        self._pattern = ""
        self._side = 0
        self._at_start = self._at_end = False
        self._bytes = 0

    # ---- state

    @property
    def following(self) -> bool:
        return self._follow

    @property
    def pattern(self) -> str:
        """What was searched last."""
        return self._pattern

    def status(self) -> str:
        """Size, place and mode in a few words."""
        if self._file is None:
            return ""
        parts = [_size(self._bytes)]
        if self._follow:
            parts.append(_("following the end"))
        elif self._shown and self._bytes:
            at = self._shown[min(self.top + self.size.height, len(self._shown)) - 1].offset
            parts.append(_("at {share} %").format(share=min(100, round(100 * at / self._bytes))))
        if self._side:
            parts.append(_("column {n}").format(n=self._side + 1))
        if self._pattern:
            parts.append(f"/{self._pattern}")
        return "  ".join(parts)

    # ---- reading

    def open(self, path: Path) -> None:
        """Show the end of ``path`` and follow it. The same path again changes nothing."""
        if self._file is not None and self._file.path == str(path):
            self.grew()
            return
        self._file = LogFile(path)
        self._raw, self._shown = [], []
        self._mark, self._pattern, self._side = None, "", 0
        self.to_end()

    @property
    def _job(self) -> str:
        return f"log-{id(self)}"

    def _read(
        self, work: Callable[[LogFile], _Window], keep: Callable[[_Window], None], *, instead: bool = False
    ) -> None:
        """One read at a time. ``instead``: of the one under way; else this one is dropped, and ``grew`` made up for."""
        file = self._file
        if file is None or (self._busy and not instead):
            self._wanted = True
            return
        self._busy = True

        def done(window: _Window) -> None:
            self._busy = False
            if file is not self._file:
                return
            self._bytes = window.size
            keep(window)
            self.post_message(self.Moved())
            if self._wanted:
                self._wanted = False
                self.grew()

        def failed(error: BaseException) -> None:
            self._busy = False
            cast("DstuiApp", self.app).fail(error)

        cast("DstuiApp", self.app).jobs.run(self._job, lambda: work(file), done, failed)

    def to_end(self) -> None:
        """Show the end and follow it."""
        self._follow = True
        self.post_message(self.Moved(True))
        self._read(_end, self._take_end, instead=True)

    def to_start(self) -> None:
        self._follow = False
        self.post_message(self.Moved(True))
        self._read(
            lambda file: _Window(file.size, file.after(0, BLOCK), start=True), self._take_start, instead=True
        )

    def grew(self) -> None:
        """There may be more at the end."""
        if self._file is None or not self._follow:
            return
        if not self._raw:
            self._read(_end, self._take_end)
            return
        last = self._raw[-1]

        def more(file: LogFile) -> _Window:
            size = file.size
            if size < last.offset or size - last.offset > FAR:
                return _end(file)
            found = file.after(last.offset, HELD)  # the last line again: it may have been unfinished
            return _Window(size, found, joins=bool(found) and found[0].offset == last.offset, end=True)

        self._read(more, self._take_more)

    def _take_end(self, window: _Window) -> None:
        self._raw = list(window.lines)
        self._at_end, self._at_start = True, window.start
        self._refill()
        self.scroll_rows(len(self._content))

    def _take_start(self, window: _Window) -> None:
        self._raw = list(window.lines)
        self._at_start, self._at_end = True, len(self._raw) < BLOCK
        self._refill()
        self.scroll_rows(-len(self._content))

    def _take_more(self, window: _Window) -> None:
        if not window.joins:
            self._take_end(window)
            return
        self._raw = [*self._raw[:-1], *window.lines]
        if len(self._raw) > HELD:
            self._raw = self._raw[-HELD // 2 :]
            self._at_start = False
        self._refill()
        if self._follow:
            self.scroll_rows(len(self._content))

    def _take_earlier(self, window: _Window) -> None:
        first = self._shown[self._top] if self._shown else None
        self._raw = [*window.lines, *self._raw]
        if len(self._raw) > HELD:
            self._raw = self._raw[:HELD]
            self._at_end = False
        self._at_start = window.start
        self._refill()
        if first is not None:
            self._keep(first.offset)

    def _take_later(self, window: _Window) -> None:
        first = self._shown[self._top] if self._shown else None
        self._raw = [*self._raw[:-1], *window.lines] if window.joins else list(window.lines)
        if len(self._raw) > HELD:
            self._raw = self._raw[-HELD:]
            self._at_start = False
        self._at_end = window.end
        self._refill()
        if first is not None:
            self._keep(first.offset)

    def _keep(self, offset: int) -> None:
        """Put the line at ``offset`` back at the top."""
        row = next((n for n, s in enumerate(self._shown) if s.offset >= offset), 0)
        self.scroll_rows(row - self._top)

    # ---- moving

    def scroll_rows(self, delta: int) -> None:
        super().scroll_rows(delta)
        self._look_ahead()

    def move(self, rows: int) -> None:
        """Scroll by a person's wish: leaves the end, or follows it again when it is reached."""
        before = self._top
        super().scroll_rows(rows)
        at_bottom = self._top + self.size.height >= len(self._content)
        self._follow = self._at_end and at_bottom and (rows > 0 or self._top == before)
        self._look_ahead()
        self.post_message(self.Moved(True))

    def page(self, pages: int) -> None:
        self.move(pages * max(1, self.size.height - 1))

    def key_up(self) -> None:
        self.move(-1)

    def key_down(self) -> None:
        self.move(1)

    def key_home(self) -> None:
        self.to_start()

    def key_end(self) -> None:
        self.to_end()

    def key_left(self) -> None:
        self._sideways(-SIDE)

    def key_right(self) -> None:
        self._sideways(SIDE)

    def _sideways(self, delta: int) -> None:
        self._side = max(0, self._side + delta)
        self._redraw()
        self.post_message(self.Moved())

    def _look_ahead(self) -> None:
        """Read on when the edge of what is held comes near."""
        if not self._raw or self._follow or self._busy:
            return
        height = max(1, self.size.height)
        if self._top < height and not self._at_start:
            first = self._raw[0].offset
            self._read(lambda file: _before(file, first), self._take_earlier)
        elif self._top + 2 * height > len(self._shown) and not self._at_end:
            last = self._raw[-1].offset

            def after(file: LogFile) -> _Window:
                found = file.after(last, BLOCK)
                joins = bool(found) and found[0].offset == last
                return _Window(file.size, found, joins=joins, end=len(found) < BLOCK)

            self._read(after, self._take_later)

    # ---- searching

    def search(self, pattern: str, backwards: bool = False) -> None:
        """Go to the next line that has ``pattern``, from the last hit or from what is shown; ends with ``Found``."""
        self._pattern = pattern
        if not pattern:
            return
        start = self._search_from(backwards)

        def look(file: LogFile) -> _Window:
            at = file.size if start is None else start
            hit = file.search(pattern, at, backwards=backwards)
            if hit is None:
                return _Window(file.size, [])
            earlier = file.before(hit.offset, BLOCK // 2)
            later = file.after(hit.offset, BLOCK // 2)
            return _Window(
                file.size, [*earlier, *later], start=len(earlier) < BLOCK // 2, mark=hit.offset,
                end=len(later) < BLOCK // 2,
            )  # fmt: skip

        def show(window: _Window) -> None:
            if window.mark is not None:
                self._follow = False
                self._raw = list(window.lines)
                self._at_start, self._at_end = window.start, window.end
                self._mark = window.mark
                self._refill()
                row = next((n for n, s in enumerate(self._shown) if s.offset >= window.mark), 0)
                self.scroll_rows(row - self.size.height // 3 - self._top)
            self.post_message(self.Found(pattern, window.mark is not None, backwards))

        self._read(look, show, instead=True)

    def _search_from(self, backwards: bool) -> int | None:
        """Offset to search from; None = the end of the file. Without a mark: from what is on the screen."""
        if self._follow:
            return None
        if self._mark is None:
            return self._shown[self._top].offset if self._shown else 0
        if backwards:
            return self._mark
        return next((x.offset for x in self._raw if x.offset > (self._mark or 0)), None)

    # ---- drawing

    def _refill(self) -> None:
        self._shown = settle(self._raw)
        self._redraw()

    def _redraw(self) -> None:
        self.show(self._rows(self._shown))

    def _rows(self, lines: Sequence[LogLine]) -> list[Line]:
        g = self.glyphs
        marked = next((x.offset for x in lines if self._mark is not None and x.offset >= self._mark), None)
        rows = []
        for x in lines:
            text = clean(x.text[:8192])
            if self._side:
                text = _after(text, self._side)
            if x.offset == marked:
                rows.append(line((g.cursor, "key"), (clip(text, 4000, g.cut), "strong")))
            else:
                rows.append(line(" " + text))
        return rows


def _size(n: int) -> str:
    return f"{n / KiB:.0f} KiB" if n < MiB else gib(n)


def _after(text: str, cells: int) -> str:
    """``text`` without its first ``cells`` cells."""
    if text.isascii():
        return text[cells:]
    n = 0
    while n < len(text) and cells > 0:
        cells -= cell_len(text[n])
        n += 1
    return text[n:]


class _Window:
    """What one read brought. ``joins``: its first line is the last one held. ``mark``: offset of a hit."""

    def __init__(
        self,
        size: int,
        lines: Sequence[LogLine],
        *,
        start: bool = False,
        end: bool = False,
        joins: bool = False,
        mark: int | None = None,
    ) -> None:
        self.size, self.lines = size, lines
        self.start, self.end, self.joins, self.mark = start, end, joins, mark


def _end(file: LogFile) -> _Window:
    size = file.size
    lines = _unsettled(file, size)
    return _Window(size, lines, start=not lines or lines[0].offset == 0, end=True)


def _before(file: LogFile, offset: int) -> _Window:
    lines = _unsettled(file, offset)
    return _Window(file.size, lines, start=not lines or lines[0].offset == 0)


def _unsettled(file: LogFile, offset: int) -> list[LogLine]:
    """About BLOCK lines before ``offset``; of a bar's thousands of redraws only as many as make a block."""
    want = BLOCK
    while True:
        lines = file.before(offset, want)
        settled = settle(lines)
        if len(settled) >= BLOCK or len(lines) < want or want >= 1 << 15:
            return settled if len(settled) < len(lines) else lines
        want *= 4
