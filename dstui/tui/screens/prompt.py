"""One line to type at the bottom of the screen: a name, a word to search."""

from __future__ import annotations

from textual.events import Key, Paste

from dstui.i18n import _
from dstui.tui.screens.ask import Ask
from dstui.tui.text import Line, line, width, wrapped
from dstui.tui.widgets.lines import profile_of


class Prompt(Ask):
    """Dismisses with the text; ``""`` when it was left (Esc, or Enter on nothing)."""

    def __init__(self, question: str, text: str = "", detail: str = "") -> None:
        super().__init__(question, (), detail)
        self._text = text
        self._fresh = bool(text)

    def _rows(self, cells: int) -> list[Line]:
        g = profile_of(self).glyphs
        rows: list[Line] = [line((g.hline * cells, "dim"))]
        rows += wrapped(self._question, cells - 2, "strong", " ", cut=g.cut)
        if self._detail:
            rows += wrapped(self._detail, cells - 2, "dim", " ", limit=4, cut=g.cut)
        shown = self._text
        while shown and width(shown) > cells - 6:
            shown = shown[1:]
        keys = [("Enter", _("take it")), ("Esc", _("back")), ("^U", _("clear"))]
        rows.append(line((f" {g.cursor} ", "key"), shown, (" ", "cursor")))
        rows.append(line("   ", *((p, r) for k, t in keys for p, r in ((k, "key"), (f" {t}   ", "dim")))))
        return rows

    def on_key(self, event: Key) -> None:
        event.stop()
        event.prevent_default()
        key = event.key
        if key == "enter":
            self.dismiss(self._text.strip())
            return
        if key in ("escape", "ctrl+q"):
            self.dismiss("")
            return
        if key in ("backspace", "ctrl+h"):
            self._text = self._text[:-1]
        elif key == "ctrl+u":
            self._text = ""
        elif event.is_printable and event.character:
            # The first letter replaces what was offered, as a selected text would be.
            self._text = event.character if self._fresh else self._text + event.character
        else:
            return
        self._fresh = False
        self._show()

    def on_paste(self, event: Paste) -> None:
        event.stop()
        self._text = ("" if self._fresh else self._text) + "".join(event.text.splitlines())
        self._fresh = False
        self._show()
