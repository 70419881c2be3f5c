"""A question with a few answers on letters, at the bottom of the screen."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.events import Key
from textual.screen import ModalScreen

from dstui.i18n import _
from dstui.tui.text import Line, line, wrapped
from dstui.tui.widgets.lines import LineView, profile_of


class Ask(ModalScreen[str]):
    """Dismisses with the key of the answer, or ``""`` (any other key: nothing happens).

    ``answers``: (key as Textual names it, label).
    """

    def __init__(
        self, question: str, answers: Sequence[tuple[str, str]], detail: str = "", *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._question = question
        self._answers = tuple(answers)
        self._detail = detail

    def compose(self) -> ComposeResult:
        view = LineView(id="ask")
        view.styles.height = len(self._rows(self.app.size.width))
        yield view

    def on_mount(self) -> None:
        self.call_after_refresh(self._show)

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        rows = self._rows(self.size.width)
        view = self.query_one("#ask", LineView)
        view.styles.height = len(rows)
        view.show(rows)

    def _rows(self, cells: int) -> list[Line]:
        g = profile_of(self).glyphs
        rows: list[Line] = [line((g.hline * cells, "dim"))]
        rows += wrapped(self._question, cells - 2, "strong", " ", cut=g.cut)
        if self._detail:
            rows += wrapped(self._detail, cells - 2, "", " ", limit=8, cut=g.cut)
        rows.append(())
        for key, label in self._answers:
            rows.append(line("   ", (key.capitalize() if len(key) > 1 else key, "key"), f"  {label}"))
        rows.append(line("   ", (_("any other key"), "dim"), ("  " + _("back"), "dim")))
        rows.append(())
        return rows

    def on_key(self, event: Key) -> None:
        event.stop()
        event.prevent_default()
        key = event.key
        self.dismiss(key if key in {k for k, _label in self._answers} else "")
