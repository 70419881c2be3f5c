"""What every screen shares: title bar, message line, key line, and the note on a terminal that is too small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.events import Resize
from textual.screen import Screen

from dstui.i18n import _
from dstui.tui.terminal import MIN_HEIGHT, MIN_WIDTH, Glyphs
from dstui.tui.text import Line, clip, clip_line, line, line_width, width, wrapped
from dstui.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from dstui.tui.app import DstuiApp

WIDE = 110
"""Columns from which a side panel has its place beside the fields."""


class BaseScreen(Screen[None]):
    """Title (1 row), the body of ``compose_body``, a message (``MESSAGE_ROWS``), keys (1 row)."""

    AUTO_FOCUS = ""
    MESSAGE_ROWS = 2

    def compose(self) -> ComposeResult:
        yield LineView(id="title")
        yield from self.compose_body()
        message = LineView(id="message")
        message.styles.height = self.MESSAGE_ROWS
        yield message
        yield LineView(id="keys")
        yield LineView(id="tiny")

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    @property
    def dstui(self) -> DstuiApp:
        """The app, typed."""
        return cast("DstuiApp", self.app)

    @property
    def glyphs(self) -> Glyphs:
        return self.dstui.profile.glyphs

    def view(self, view_id: str) -> LineView:
        return self.query_one(f"#{view_id}", LineView)

    @property
    def tiny(self) -> bool:
        """Too small for anything but the note that it is."""
        return self.size.width < MIN_WIDTH or self.size.height < MIN_HEIGHT

    @property
    def wide(self) -> bool:
        """Room for a second column."""
        return self.size.width >= WIDE

    def on_resize(self, event: Resize) -> None:
        self.fit()

    def on_screen_resume(self) -> None:
        # On a busy machine the terminal's first size can be taken before this screen listens to resizes.
        # Drawing again what is drawn already costs nothing: views compare before they paint.
        self.call_after_refresh(self.fit)

    def fit(self) -> None:
        """Draw for the size as it is now, or say that it is too small."""
        if not self._there:
            return
        self.set_class(self.tiny, "-tiny")
        self.set_class(self.wide, "-wide")
        if self.tiny:
            text = _("the terminal is {w}x{h}; dstui needs {mw}x{mh}: enlarge it, or quit with q").format(
                w=self.size.width, h=self.size.height, mw=MIN_WIDTH, mh=MIN_HEIGHT
            )
            self.view("tiny").show(wrapped(text, max(10, self.size.width), "strong", cut=self.glyphs.cut))
        else:
            self.call_after_refresh(self._redraw)

    @property
    def _there(self) -> bool:
        """False before the first mount and after the screen was left: a late callback has nothing to draw on."""
        return self.is_attached and self.query_one_optional("#title") is not None

    def _redraw(self) -> None:
        if self._there:
            self.redraw()

    def redraw(self) -> None:
        """Draw everything for the size as it is now."""

    def set_title(self, left: str, right: str = "") -> None:
        """The title bar: ``left`` after the program's name, ``right`` at the right edge (dropped first)."""
        cells = self.size.width
        head = f" dstui  {left}"
        room = cells - width(head) - 3
        right = clip(right, room, self.glyphs.cut) if room > 8 else ""
        gap = max(0, cells - width(head) - width(right) - 1)
        self.view("title").show([line((clip(head, cells, self.glyphs.cut) + " " * gap + right + " ", "bar"))])

    def say(self, text: str, role: str = "", prefix: str = "") -> None:
        """Show ``text`` in the message rows, cut to what they hold."""
        rows: list[Line] = wrapped(
            prefix + text,
            max(10, self.size.width - 2),
            role,
            " ",
            limit=self.MESSAGE_ROWS,
            cut=self.glyphs.cut,
        )
        self.view("message").show(rows if text else [])

    def set_keys(self, keys: Iterable[tuple[str, str]], *, typing: bool = False) -> None:
        """The key line; what does not fit at the end is dropped, help and quit stay.

        ``typing``: letters are text now, so those two are named by their other keys.
        """
        cells = self.size.width
        ask, leave = ("F1", "^Q") if typing else ("?", "q")
        fixed = line((ask, "key"), (" " + _("help"), "dim"), "  ", (leave, "key"), (" " + _("quit"), "dim"))
        row: Line = line(" ")
        for key, label in keys:
            part = line((key, "key"), (" " + label, "dim"), "  ")
            if line_width(row) + line_width(part) + line_width(fixed) > cells:
                break
            row = (*row, *part)
        gap = max(0, cells - 1 - line_width(row) - line_width(fixed))
        self.view("keys").show([clip_line((*row, (" " * gap, ""), *fixed), cells, self.glyphs.cut)])
