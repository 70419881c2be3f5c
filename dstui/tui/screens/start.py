"""The first screen: where to begin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import ComposeResult

from dstui.errors import DstuiError
from dstui.i18n import _, ngettext
from dstui.session.model import FieldView
from dstui.tui.machine import summary, title_right
from dstui.tui.screens.base import BaseScreen
from dstui.tui.text import Line, line, pad, width, wrapped
from dstui.tui.widgets.form import Form
from dstui.tui.widgets.lines import LineView
from dstui.tui.widgets.menu import Item, Menu

if TYPE_CHECKING:
    from dstui.runs.store import RunDir

CONFIG_NAMES = (
    "ds_config.json",
    "deepspeed_config.json",
    "deepspeed.json",
    "ds_config_zero3.json",
    "ds_config_zero2.json",
)
"""Names of a config that is offered when it lies in the working directory."""


class StartScreen(BaseScreen):
    """Recommended, preset, file or run. Presets and a file replace the menu in place; Left goes back."""

    def __init__(self) -> None:
        super().__init__()
        self._level = "main"
        self._at = "recommended"

    def compose_body(self) -> ComposeResult:
        yield LineView(id="intro")
        yield Menu(id="menu")
        yield Form(id="file")
        yield LineView(id="machine")

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Menu))
        self.query_one("#file").display = False
        self.watch(self.app, "facts", self._facts_changed, init=False)

    def _facts_changed(self) -> None:
        self.redraw()

    def on_screen_resume(self) -> None:
        if self._level == "main" and self.size:
            self.redraw()

    # ---- drawing

    def redraw(self) -> None:
        facts = self.dstui.facts
        self.set_title(_("start"), title_right(facts))
        intro = _("Set up, check, launch and watch DeepSpeed training.")
        self.view("intro").show([(), line(("  " + intro, "strong")), ()])
        if self._level == "main":
            self.query_one(Menu).load(self._main_items(), at=self._at)
        self._draw_machine()
        self._draw_keys()

    def _draw_keys(self) -> None:
        keys = [("Enter", _("choose")), ("Up/Down", _("move"))]
        if self._level != "main":
            keys.append(("Left", _("back")))
            if self._level == "preset":
                keys.append(("^E", _("edit presets")))
        else:
            keys.append(("^R", _("runs")))
        self.set_keys(keys)

    def _draw_machine(self) -> None:
        facts = self.dstui.facts
        g = self.glyphs
        cells = self.size.width - 4
        rows: list[Line] = [
            line(
                ("  " + _("This machine") + " ", "title"),
                (g.hline * max(0, cells - width(_("This machine")) - 1), "dim"),
            )
        ]
        if facts is None:
            rows.append(line(("  " + _("looking ..."), "dim")))
        else:
            table = summary(facts, g)
            names = max(width(name) for name, _value in table)
            for name, value in table:
                lines = wrapped(value, cells - names - 2, cut=g.cut, limit=2)
                for n, row in enumerate(lines):
                    rows.append(((f"  {pad(name if n == 0 else '', names)}  ", "dim"), *row))
        view = self.view("machine")
        view.styles.height = min(len(rows), max(1, self.size.height - 12))
        self.call_after_refresh(view.show, rows)

    # ---- items

    def _main_items(self) -> list[Item]:
        found = self._config_here()
        resume = (
            [Item("continue", _("Continue"), _("the wizard as you left it"))]
            if self.dstui.has_session
            else []
        )
        return [
            *resume,
            Item(
                "recommended",
                _("Recommended"),
                _("every step filled in for this machine; begins with the demo"),
            ),
            Item("preset", _("Preset"), _("start from a proven config and adapt it")),
            Item(
                "file",
                _("Open file"),
                _("{name} is in this directory").format(name=found)
                if found
                else _("check and change a ds_config.json"),
            ),
            self._runs_item(),
        ]

    def _config_here(self) -> str | None:
        cwd = self.dstui.cwd
        for name in CONFIG_NAMES:
            if (cwd / name).is_file():
                return name
        return None

    def _runs_item(self) -> Item:
        from dstui.runs import store

        try:
            runs = store.list_runs()
        except DstuiError as e:
            return Item("join", _("Join a run"), e.message, enabled=False)
        if not runs:
            return Item("join", _("Join a run"), _("there are no runs yet"), enabled=False)
        newest = runs[0]
        note = ngettext("{n} run", "{n} runs", len(runs)).format(n=len(runs))
        note += f"; {_name(newest)} {_state(newest)}"
        return Item("join", _("Join a run"), note)

    def _preset_items(self) -> list[Item]:
        from dstui.config import presets

        return [
            Item(
                p.name,
                p.title,
                p.problem or p.when,
                not p.problem,
                p.problem or _("When: {when} Needs: {needs}").format(when=p.when, needs=p.needs),
            )
            for p in presets.list_presets()
        ]

    # ---- levels

    def _enter(self, level: str, items: list[Item]) -> None:
        self._level = level
        self.query_one(Menu).load(items, at=items[0].id if items else None)
        self._draw_keys()

    def on_menu_chosen(self, message: Menu.Chosen) -> None:
        try:
            self._chosen(message.item)
        except DstuiError as e:
            self.say(e.message + (". " + e.hint if e.hint else ""), "bad")

    def _chosen(self, item: Item) -> None:
        if self._level == "main":
            self._at = item.id
            if item.id == "recommended":
                self.dstui.begin()
            elif item.id == "continue":
                self.app.switch_mode("wizard")
            elif item.id == "preset":
                self._enter("preset", self._preset_items())
            elif item.id == "join":
                self.dstui.action_runs()
            else:
                self._ask_file()
        elif self._level == "preset":
            from dstui.config import presets

            preset = presets.load(item.id)
            self._leave_level()
            self.dstui.begin(preset=preset)

    def on_menu_moved(self, message: Menu.Moved) -> None:
        self.say(message.item.more if message.item is not None else "")

    def on_menu_back(self) -> None:
        if self._level != "main":
            self._leave_level()

    def _leave_level(self) -> None:
        self._level = "main"
        self.query_one("#file").display = False
        self.query_one(Menu).display = True
        self.set_focus(self.query_one(Menu))
        self.say("")
        self.redraw()

    # ---- a file to open

    def _ask_file(self) -> None:
        self._level = "file"
        self.query_one(Menu).display = False
        form = self.query_one("#file", Form)
        form.display = True
        self.set_focus(form)
        self._load_file(self._config_here() or "", "")
        self.set_keys(
            [("Enter", _("open")), (_("typing"), _("replace")), ("Tab", _("complete")), ("Esc", _("back"))]
        )

    def _load_file(self, text: str, error: str) -> None:
        view = FieldView("file", "start", _("File"), "path", text, text, error=error)
        self.call_after_refresh(self.query_one("#file", Form).load, "file", [view])
        self._file = text

    def on_form_changed(self, message: Form.Changed) -> None:
        self._load_file(str(message.value), "")
        self._open(str(message.value))

    def on_form_finished(self) -> None:
        self._open(self._file)

    def _open(self, text: str) -> None:
        from dstui.config import document

        path = Path(text).expanduser()
        try:
            if not text:
                raise DstuiError(_("type the path of a ds_config.json"))
            parsed = document.read(str(path if path.is_absolute() else self.dstui.cwd / path))
        except DstuiError as e:
            self._load_file(text, e.message + (f" ({e.hint})" if e.hint else ""))
            return
        self._leave_level()
        self.dstui.begin(document=parsed)

    def key_escape(self) -> None:
        if self._level == "file":
            self._leave_level()

    def key_left(self) -> None:
        self.key_escape()


def _name(run: RunDir) -> str:
    try:
        return run.name or run.id
    except DstuiError:  # a damaged manifest
        return run.id


def _state(run: RunDir) -> str:
    from dstui.runs import store

    try:
        state = store.state(run)
    except DstuiError:
        return _("damaged")
    return store.state_word(state)
