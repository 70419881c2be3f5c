"""Runs side by side, over the list of runs: the table of ``dstui compare``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from textual.app import ComposeResult
from textual.events import Key

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.runs import store
from dstui.runs.compare import Comparison, compare
from dstui.runs.compared import differences, table, told, verdicts
from dstui.tui.screens.base import BaseScreen
from dstui.tui.text import BLANK, Line, clip_middle, line, pad, width, wrapped
from dstui.tui.widgets.lines import LineView

LABEL = 24
"""Cells of the first column at most; the values have what is left."""


class CompareScreen(BaseScreen):
    """Opened with the ids of two runs or more; any key that does not scroll closes it."""

    MESSAGE_ROWS = 1

    def __init__(self, runs: Sequence[str]) -> None:
        super().__init__()
        self._runs = tuple(runs)
        self._found: Comparison | None = None

    def compose_body(self) -> ComposeResult:
        yield LineView(id="page", keys=True)

    def on_mount(self) -> None:
        self.view("page").focus()
        self.dstui.jobs.run("compare", partial(_compare, self._runs), self._took, self._failed)

    def on_unmount(self) -> None:
        self.dstui.jobs.cancel("compare")

    def _took(self, found: Comparison) -> None:
        self._found = found
        self.redraw()

    def _failed(self, error: BaseException) -> None:
        self.app.pop_screen()
        self.dstui.fail(error)

    def help_text(self) -> str:
        return _("The first run is the base; the values of the others say by how much they differ from it.")

    def redraw(self) -> None:
        if self.tiny or not self.size:
            return
        self.set_title(_("compare"), "  ".join(self._runs))
        self.set_keys([("Up/Down", _("scroll")), (_("any other key"), _("back"))])
        if self._found is None:
            self.view("page").show(wrapped(_("reading the runs ..."), self.size.width - 2, "dim", " "))
            return
        self.view("page").show(self._rows(self._found))

    def _rows(self, found: Comparison) -> list[Line]:
        cells, cut = self.size.width, self.glyphs.cut
        rows: list[Line] = []
        for text in verdicts(found):
            rows += wrapped(text, cells - 2, "strong", " ", cut=cut)
        figures, keys = table(found), differences(found)
        label = min(LABEL, max(width(r[0]) for r in [*figures, *keys]))
        each = max(8, (cells - label - 4) // len(found.figures) - 2)

        def put(row: Sequence[str], role: str = "") -> Line:
            shown = [pad(clip_middle(c, each, cut), each, cut) for c in row[1:]]
            head = pad(clip_middle(row[0], label, cut), label, cut)
            return line(" ", (head, "dim"), "  ", ("  ".join(shown), role))

        rows += [BLANK, put(figures[0], "title"), *(put(r) for r in figures[1:]), BLANK]
        if keys:
            rows += [line((" " + _("config:"), "title")), *(put(r) for r in keys)]
        else:
            rows.append(line(" " + _("the configs mean the same")))
        rows.append(BLANK)
        for text in told(found)[len(verdicts(found)) :]:
            rows += wrapped(text, cells - 2, "dim", " ", cut=cut)
        return rows

    def on_key(self, event: Key) -> None:
        if event.key in ("up", "down", "home", "end", "ctrl+c", "question_mark", "f1", "q", "ctrl+q"):
            return
        if event.key in ("pageup", "pagedown"):
            page = self.view("page")
            page.scroll_rows((page.size.height - 1) * (1 if event.key == "pagedown" else -1))
        elif self.is_current:
            self.app.pop_screen()
        event.stop()
        event.prevent_default()


def _compare(ids: Sequence[str]) -> Comparison:
    try:
        return compare([store.find_run(i) for i in ids])
    except OSError as e:  # a run that was forgotten meanwhile
        raise DstuiError(_("{path}: {cause}").format(path=e.filename, cause=e.strerror or e)) from e
