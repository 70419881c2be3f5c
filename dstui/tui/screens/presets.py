"""Presets: look at them, use one in the wizard, edit, copy, rename, delete. Shipped ones are read-only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.widgets import TextArea

from dstui.config import presets
from dstui.config.presets import Preset
from dstui.config.schema import newest
from dstui.errors import DstuiError
from dstui.i18n import N_, _, ngettext
from dstui.rules.diagnostic import Finding
from dstui.tui import actions
from dstui.tui.actions import Action
from dstui.tui.screens.ask import Ask
from dstui.tui.screens.base import BaseScreen
from dstui.tui.screens.prompt import Prompt
from dstui.tui.text import BLANK, SEVERITY_ROLE, Line, line, pad, width, wrapped
from dstui.tui.widgets.dashboard import rule
from dstui.tui.widgets.lines import LineView
from dstui.tui.widgets.panel import json_lines
from dstui.tui.widgets.table import Column, Row, Table

actions.register(
    "presets",
    N_("presets"),
    [
        Action("presets", "use", "enter", N_("use it in the wizard")),
        Action("presets", "edit", "e", N_("edit it (a shipped one: a copy under a new name)")),
        Action("presets", "copy", "c", N_("save a copy under a new name")),
        Action("presets", "keep", "n", N_("save what the wizard has now as a new preset")),
        Action("presets", "rename", "r", N_("rename yours")),
        Action("presets", "delete", "d,delete", N_("delete yours (asks)")),
        Action("presets", "pane", "tab", N_("list, text")),
        Action("presets", "back", "escape,left,left_square_bracket", N_("start")),
    ],
)
actions.register(
    "editor",
    N_("editor of a preset"),
    [
        Action("editor", "save", "f3,ctrl+s", N_("check and save")),
        Action("editor", "check", "f5,ctrl+t", N_("check only")),
        Action("editor", "pane", "tab", N_("text, findings")),
        Action("editor", "back", "escape,f10,ctrl+g", N_("back (asks when something was typed)")),
    ],
)


class PresetsScreen(BaseScreen):
    """The list, and the preset under the cursor with its config."""

    CSS_PATH = "presets.tcss"
    MESSAGE_ROWS = 2
    HELP_SCOPE = "presets"
    BINDINGS: ClassVar[list[BindingType]] = actions.bindings("presets")

    def __init__(self) -> None:
        super().__init__()
        self._presets: tuple[Preset, ...] = ()
        self._wanted: str | None = None

    def compose_body(self) -> ComposeResult:
        with Container(id="body"):
            yield Table(id="table")
            yield LineView(id="about", keys=True)

    @property
    def table(self) -> Table:
        return self.query_one("#table", Table)

    @property
    def preset(self) -> Preset | None:
        """The preset under the cursor."""
        row = self.table.row
        return next((p for p in self._presets if row is not None and p.name == row.id), None)

    def on_mount(self) -> None:
        self.set_focus(self.table)

    def on_screen_resume(self) -> None:
        self.reload()

    def reload(self, at: str | None = None) -> None:
        """Read the presets again (in the background); the cursor goes to ``at``."""
        self._wanted = at or self._wanted

        def done(found: tuple[Preset, ...]) -> None:
            self._presets = found
            self.redraw()
            if self._wanted is not None:
                self.table.select(self._wanted)
                self._wanted = None

        self.dstui.jobs.run("presets", presets.list_presets, done)

    # ---- drawing

    def on_line_view_resized(self) -> None:
        self._draw_about()

    def help_text(self) -> str:
        return _(
            "Presets are complete configs. The wizard starts from one and adapts it to the machine; n keeps what "
            "you made of it there as a preset of yours, e edits the text."
        )

    def redraw(self) -> None:
        if self.tiny or not self.size:
            return
        mine = sum(1 for p in self._presets if not p.shipped)
        right = ngettext("{n} of yours", "{n} of yours", mine).format(n=mine)
        self.set_title(_("presets"), right if self._presets else "")
        rows = [
            Row(
                p.name,
                (p.name, _("shipped") if p.shipped else _("yours"), p.engine, p.problem or p.title),
                "bad" if p.problem else "",
            )
            for p in self._presets
        ]
        columns = [
            Column(_("preset")),
            Column(_("whose")),
            Column(_("engine"), weight=1),
            Column(_("title"), grow=True),
        ]
        self.table.load(rows, columns)
        self._draw_about()
        self._draw_keys()

    def _draw_keys(self) -> None:
        p = self.preset
        keys = [("Enter", _("use")), ("e", _("edit")), ("c", _("copy"))]
        if p is not None and not p.shipped:
            keys += [("r", _("rename")), ("d", _("delete"))]
        if self.dstui.has_session:
            keys.append(("n", _("new from the wizard")))
        self.set_keys([*keys, ("Tab", _("text")), ("Left", _("start"))])

    def _draw_about(self) -> None:
        view = self.view("about")
        p = self.preset
        if p is None or not view.size:
            view.show([])
            return
        cells, g = view.size.width - 2, self.glyphs
        rows: list[Line] = [rule(p.name, cells, g)]
        if p.problem:
            rows += wrapped(p.problem, cells - 2, "bad", " ", cut=g.cut)
            rows += wrapped(_("e opens its text to repair it; d deletes it"), cells - 2, "dim", " ")
            view.show(rows)
            return
        rows += wrapped(p.title, cells - 2, "strong", " ", cut=g.cut)
        about = (
            (_("when"), p.when),
            (_("needs"), p.needs),
            (_("source"), p.source),
            (_("file"), _("shipped, read-only") if p.shipped else str(p.path)),
        )
        size = max(width(label) for label, _t in about)
        for label, text in about:
            if text:
                for n, r in enumerate(wrapped(text, cells - size - 4, cut=g.cut)):
                    rows.append(line((f" {pad(label if n == 0 else '', size)}  ", "dim"), *r))
        rows.append(BLANK)
        rows += [
            line(" ", *r)
            for r in json_lines(json.dumps(dict(p.config), indent=2, ensure_ascii=False), cells - 2, g)
        ]
        view.show(rows)

    def on_table_moved(self, message: Table.Moved) -> None:
        self.view("about").scroll_rows(-(1 << 30))
        self._draw_about()
        self._draw_keys()
        if message.by_key:
            self.say("")

    # ---- actions

    def action_pane(self) -> None:
        about = self.view("about")
        self.set_focus(self.table if self.focused is about else about)

    def action_back(self) -> None:
        if self.focused is not self.table:
            self.set_focus(self.table)
        else:
            self.app.switch_mode("start")

    def action_use(self) -> None:
        p = self.preset
        if p is None:
            return
        if p.problem:
            self.say(p.problem, "bad", "! ")
            return
        self.dstui.begin(preset=p)

    def _refuse_shipped(self, p: Preset) -> bool:
        """Whether ``p`` is shipped; says why that cannot be changed."""
        if not p.shipped:
            return False
        text = _("{name} is shipped with dstui and read-only; c makes a copy that is yours")
        self.say(text.format(name=p.name), "warn")
        return True

    def action_edit(self) -> None:
        p = self.preset
        if p is None:
            return
        if p.shipped:
            self._ask_name(
                _("{name} is read-only: edit a copy named").format(name=p.name), p, self._edit_copy
            )
        else:
            self.app.push_screen(PresetEditor(p, p.name, self._edited))

    def _edit_copy(self, p: Preset, name: str) -> None:
        self.app.push_screen(PresetEditor(p, name, self._edited))

    def _edited(self, name: str) -> None:
        if name:
            self.say(_("saved: {name}").format(name=name))
        self.reload(name or None)

    def action_copy(self) -> None:
        p = self.preset
        if p is not None:
            self._ask_name(_("copy {name} to").format(name=p.name), p, self._copy)

    def _copy(self, p: Preset, name: str) -> None:
        self._change(lambda: presets.copy(p.name, name), _("copied: {name}").format(name=name), name)

    def action_keep(self) -> None:
        if not self.dstui.has_session:
            self.say(_("the wizard has no config yet: Enter on a preset opens it there"))
            return
        offered = new_name("mine", {x.name for x in self._presets})
        self._ask(_("save the wizard's config as"), offered, self._keep)

    def _keep(self, name: str) -> None:
        session = self.dstui.session.fork()

        self._change(lambda: session.save_preset(name), _("saved: {name}").format(name=name), name)

    def action_rename(self) -> None:
        p = self.preset
        if p is not None and not self._refuse_shipped(p):
            self._ask_name(_("rename {name} to").format(name=p.name), p, self._rename)

    def _rename(self, p: Preset, name: str) -> None:
        self._change(lambda: presets.rename(p.name, name), _("renamed: {name}").format(name=name), name)

    def action_delete(self) -> None:
        p = self.preset
        if p is None or self._refuse_shipped(p):
            return
        question = _("Delete the preset {name}?").format(name=p.name)
        self.app.push_screen(
            Ask(question, [("d", _("delete it"))], str(p.path)), partial(self._delete_answered, p)
        )

    def _delete_answered(self, p: Preset, answer: str | None) -> None:
        if answer == "d":
            self._change(lambda: presets.delete(p.name), _("deleted: {name}").format(name=p.name), None)

    def _ask_name(self, question: str, p: Preset, then: Callable[[Preset, str], None]) -> None:
        self._ask(question, new_name(p.name, {x.name for x in self._presets}), partial(then, p))

    def _ask(self, question: str, offered: str, then: Callable[[str], None]) -> None:
        """Ask for the name of a new preset; one that cannot be is refused with the reason."""

        def answered(name: str | None) -> None:
            if not name:
                return
            try:
                presets.free(name)
            except DstuiError as e:
                self.say(e.message + (f": {e.hint}" if e.hint else ""), "bad", "! ")
                return
            then(name)

        self.app.push_screen(Prompt(question, offered, name_rule()), answered)

    def _change(self, work: Callable[[], object], text: str, at: str | None) -> None:
        def done(_result: object) -> None:
            self.say(text)
            self.reload(at)

        def failed(error: BaseException) -> None:
            if isinstance(error, DstuiError):
                self.say(error.message + (f": {error.hint}" if error.hint else ""), "bad", "! ")
                self.reload()
            else:
                self.dstui.fail(error)

        self.dstui.jobs.run("preset-change", work, done, failed)


def name_rule() -> str:
    """What a preset's name may hold."""
    return _("letters, digits, '.', '_' and '-'")


def new_name(name: str, taken: Collection[str]) -> str:
    """A free name to offer: ``zero3-2``, ``zero3-3`` ..."""
    stem, _dash, last = name.rpartition("-")
    stem = stem if stem and last.isdigit() else name
    return next(c for n in range(2, 1000) if (c := f"{stem}-{n}") not in taken)


class PresetEditor(BaseScreen):
    """The text of one preset of the user's. Saving checks it first."""

    CSS_PATH = "presets.tcss"
    MESSAGE_ROWS = 2
    HELP_SCOPE = "editor"
    BINDINGS: ClassVar[list[BindingType]] = actions.bindings("editor")

    def __init__(self, preset: Preset, name: str, left: Callable[[str], None]) -> None:
        """``name``: another than the preset's own makes a new one. ``left`` gets it, or ``""`` when nothing
        was saved."""
        super().__init__()
        self._preset = preset
        self._name_of = name
        self._left = left
        self._text = _source(preset, name)
        self._saved = self._text if preset.name == name else ""
        self._kept = False
        self._findings: tuple[Finding, ...] | None = None

    def compose_body(self) -> ComposeResult:
        area = TextArea(self._text, id="text", soft_wrap=False, show_line_numbers=True, theme="css")
        area.cursor_blink = False
        area.highlight_cursor_line = False
        yield area
        yield LineView(id="findings", keys=True)

    @property
    def area(self) -> TextArea:
        return self.query_one("#text", TextArea)

    @property
    def changed(self) -> bool:
        return self.area.text != self._saved

    def on_mount(self) -> None:
        self.set_focus(self.area)

    def help_text(self) -> str:
        return _(
            "The whole preset as it is saved: title, when, needs, source, and under config the ds_config.json."
        )

    # ---- drawing

    def redraw(self) -> None:
        if self.tiny or not self.size:
            return
        self.set_title(_("preset {name}").format(name=self._name_of), self._preset.engine)
        keys = [("F3", _("check and save")), ("F5", _("check")), ("F10", _("back")), ("Tab", _("findings"))]
        self.set_keys(keys, typing=True)
        self._draw_findings()

    def _draw_findings(self) -> None:
        view = self.view("findings")
        cells, g = self.size.width - 2, self.glyphs
        rows: list[Line] = []
        if self._findings is None:
            rows += wrapped(_("F5 or saving checks it; the findings come here"), cells - 2, "dim", " ")
        elif not self._findings:
            rows.append(line((" " + _("no findings"), "good")))
        for f in self._findings or ():
            letter = f.severity.letter
            at = f"{f.line}: " if f.line else ""
            head = f"{letter} {f.code}  {at}{f.path or '-'}: {f.message}"
            rows += wrapped(head, cells - 2, SEVERITY_ROLE[letter], " ", limit=2, cut=g.cut)
            if f.hint:
                rows += wrapped(f"{g.arrow} {f.hint}", cells - 4, "dim", "   ", limit=1, cut=g.cut)
        view.show([rule(_("findings"), cells, g), *rows])

    # ---- actions

    def action_pane(self) -> None:
        view = self.view("findings")
        self.set_focus(self.area if self.focused is view else view)

    def action_check(self) -> None:
        self._check(lambda preset, findings: None)

    def action_save(self) -> None:
        self._check(self._save)

    def _check(self, then: Callable[[Preset, tuple[Finding, ...]], None]) -> None:
        text, name = self.area.text, self._name_of

        def work() -> tuple[Preset, tuple[Finding, ...]]:
            preset = presets.parse(text, name)
            return preset, _findings(text, preset)

        def done(found: tuple[Preset, tuple[Finding, ...]]) -> None:
            self._findings = found[1]
            self._draw_findings()
            counts = ngettext("{n} finding", "{n} findings", len(found[1])).format(n=len(found[1]))
            self.say(counts)
            then(*found)

        def failed(error: BaseException) -> None:
            if not isinstance(error, DstuiError):
                self.dstui.fail(error)
                return
            at = getattr(error, "line", None)
            if isinstance(at, int):
                self.area.move_cursor((max(0, at - 1), max(0, (getattr(error, "column", None) or 1) - 1)))
            self.say(error.message + (f". {error.hint}" if error.hint else ""), "bad", "! ")

        self.dstui.jobs.run("preset-check", work, done, failed)

    def _save(self, preset: Preset, findings: tuple[Finding, ...]) -> None:
        bad = sum(1 for f in findings if f.severity.letter in "ES")
        if not bad:
            self._write()
            return
        question = ngettext(
            "DeepSpeed {release} refuses this config: {n} error. Save it all the same?",
            "DeepSpeed {release} refuses this config: {n} errors. Save it all the same?",
            bad,
        ).format(n=bad, release=newest())
        self.app.push_screen(Ask(question, [("s", _("save it"))], findings[0].message), self._save_answered)

    def _save_answered(self, answer: str | None) -> None:
        if answer == "s":
            self._write()

    def _write(self) -> None:
        text, name = self.area.text, self._name_of

        def done(_preset: Preset) -> None:
            self._saved, self._kept = text, True
            count = len(self._findings or ())
            said = _("saved as {name}").format(name=name)
            if count:
                said += "; " + ngettext("{n} finding", "{n} findings", count).format(n=count)
            self.say(said + ". " + _("F10 goes back"), "good")

        def failed(error: BaseException) -> None:
            if isinstance(error, DstuiError):
                self.say(error.message + (f". {error.hint}" if error.hint else ""), "bad", "! ")
            else:
                self.dstui.fail(error)

        self.dstui.jobs.run("preset-save", lambda: presets.save_text(name, text), done, failed)

    def action_back(self) -> None:
        if not self.changed or (not self._saved and self.area.text == self._text):
            self._leave()
            return
        self.app.push_screen(
            Ask(
                _("Leave without saving what was typed?"),
                [("s", _("save first")), ("x", _("drop it"))],
            ),
            self._back_answered,
        )

    def _back_answered(self, answer: str | None) -> None:
        if answer == "x":
            self._leave()
        elif answer == "s":
            self.action_save()

    def _leave(self) -> None:
        self.dismiss()
        self._left(self._name_of if self._kept else "")


def _source(preset: Preset, name: str) -> str:
    """The text to edit: the user's own file as it is; for a copy, a file that says the same."""
    if preset.name == name and not preset.shipped and preset.path is not None:
        try:
            return preset.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            pass
    data = dataclasses.replace(preset, name=name, source=preset.source or preset.name).to_json()
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _findings(text: str, preset: Preset) -> tuple[Finding, ...]:
    """What the rules say about the preset's config, with places in the preset's text."""
    from dstui.config.document import Document
    from dstui.session.check import check_text

    config = json.dumps(dict(preset.config), indent=2)
    found = check_text(config, engine=preset.engine, path=preset.name).findings
    whole = Document.parse(text)
    placed = []
    for f in found:
        place = whole.place("/config" + (f.pointer or ""))
        placed.append(dataclasses.replace(f, line=place[0] if place else None, column=None))
    return tuple(sorted(placed, key=lambda f: f.severity.rank))
