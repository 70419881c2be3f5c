"""The help page: every key, from the table of actions, and where to read more."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.events import Key

from dstui.i18n import _
from dstui.tui import actions
from dstui.tui.screens.base import BaseScreen
from dstui.tui.text import Line, line, pad, width, wrapped
from dstui.tui.widgets.lines import LineView


class HelpScreen(BaseScreen):
    """Opened by ``?`` over any screen; any key that does not scroll closes it."""

    MESSAGE_ROWS = 1

    def __init__(self, about: str = "", scope: str = "") -> None:
        """``scope``: whose keys come first, those of the screen below."""
        super().__init__()
        self._about = about
        self._scope = scope

    def compose_body(self) -> ComposeResult:
        yield LineView(id="page", keys=True)

    def on_mount(self) -> None:
        self.view("page").focus()

    def redraw(self) -> None:
        self.set_title(_("help"))
        self.set_keys([("Up/Down", _("scroll")), (_("any other key"), _("back"))])
        rows: list[Line] = []
        cells = self.size.width
        if self._about:
            rows += [*wrapped(self._about, cells - 2, "", " ", cut=self.glyphs.cut), ()]
        table = actions.help_rows(self._scope)
        keys = min(34, max(width(k) for _scope, k, _title in table))
        last = ""
        for scope, key, title in table:
            if scope != last:
                rows += [*([()] if last else []), line((" " + scope, "title"))]
                last = scope
            rows.append(line("   ", (pad(key, keys, self.glyphs.cut), "key"), "  " + title))
        rows += [
            (),
            *wrapped(
                _("Every screen has a plain verb too: dstui --help. Runs go on when dstui is closed."),
                cells - 2,
                "dim",
                " ",
                cut=self.glyphs.cut,
            ),
        ]
        self.view("page").show(rows)

    def on_key(self, event: Key) -> None:
        if event.key in ("up", "down", "home", "end"):
            return
        if event.key in ("pageup", "pagedown"):
            page = self.view("page")
            page.scroll_rows((page.size.height - 1) * (1 if event.key == "pagedown" else -1))
        elif event.key == "ctrl+c":
            return
        elif self.is_current:  # a second key may come before the first has closed the page
            self.app.pop_screen()
        event.stop()
        event.prevent_default()
