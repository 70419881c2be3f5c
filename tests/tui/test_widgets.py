"""``LineView``, ``Form`` and ``Menu`` in an app of their own, and the terminal's profile."""

from __future__ import annotations

import dataclasses
import locale
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.geometry import Region

from dstui.errors import DstuiError
from dstui.session.model import FieldView, Option
from dstui.tui import actions, terminal
from dstui.tui.screens.prompt import Prompt
from dstui.tui.text import line, line_width
from dstui.tui.widgets.form import Form
from dstui.tui.widgets.lines import LineView
from dstui.tui.widgets.menu import Item, Menu
from tests.tui.conftest import plain_text


class Host(App[None]):
    """One widget, its messages kept."""

    got: ClassVar[list[Any]] = []

    def __init__(self, widget: LineView) -> None:
        super().__init__(ansi_color=True)
        self.widget = widget
        self.got = []

    def compose(self) -> ComposeResult:
        yield self.widget

    def on_mount(self) -> None:
        self.widget.focus()

    def on_form_changed(self, m: Form.Changed) -> None:
        self.got.append((m.field_id, m.value))

    def on_form_finished(self) -> None:
        self.got.append("finished")

    def on_menu_chosen(self, m: Menu.Chosen) -> None:
        self.got.append(m.item.id)


def choice(value: Any = 1, **changes: Any) -> FieldView:
    options = (
        Option(0, "zero", "plain"),
        Option(1, "one", "sharded"),
        Option(2, "two", "", False, "needs two cards"),
    )
    view = FieldView("stage", "stage", "Stage", "choice", value, str(value), 1, "good", options)
    return dataclasses.replace(view, **changes)


def number(value: int = 4, **changes: Any) -> FieldView:
    return dataclasses.replace(
        FieldView("micro", "batch", "Micro batch", "int", value, str(value), value, unit="samples"), **changes
    )


@contextmanager
def counted(view: LineView) -> Iterator[list[int]]:
    """The rows that are asked to be repainted."""
    rows: list[int] = []
    real = view.refresh

    def refresh(*regions: Region, **options: Any) -> Any:
        rows.extend(y for r in regions for y in range(r.y, r.bottom))
        if not regions:
            rows.append(-1)
        return real(*regions, **options)

    view.refresh = refresh  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del view.refresh


async def test_only_changed_rows_are_repainted() -> None:
    view = LineView()
    async with Host(view).run_test(size=(40, 10)) as pilot:
        view.show([line(str(n)) for n in range(8)])
        await pilot.pause()
        with counted(view) as rows:
            view.show([line(str(n)) for n in range(8)])
            assert rows == []
            view.show([line("x" if n in (2, 5) else str(n)) for n in range(8)])
            assert rows == [2, 5]


async def test_scrolling_marks_where_more_is() -> None:
    view = LineView(keys=True)
    async with Host(view).run_test(size=(20, 5)) as pilot:
        view.show([line(f"row {n}") for n in range(12)])
        await pilot.pause()
        assert plain_text(view._painted).splitlines()[-1].endswith("↓")
        await pilot.press("end")
        assert view.top == 7
        assert plain_text(view._painted).splitlines()[0].endswith("↑")
        await pilot.press("home")
        assert view.top == 0
        view.reveal(9)
        assert view.top == 5


async def test_form_chooses_with_space_and_enter() -> None:
    form = Form()
    app = Host(form)
    async with app.run_test(size=(60, 12)) as pilot:
        form.load("s", [choice(), number()])
        await pilot.press("enter")
        assert app.got == ["finished"], "Enter on what is chosen goes on"
        await pilot.press("up", "space")
        assert app.got[-1] == ("stage", 0)
        form.load("s", [choice(0), number()])
        await pilot.press("down", "down", "space")
        assert app.got[-1] == ("stage", 0), "a disabled option is not chosen"
        assert form.option is not None and form.option.why_not
        await pilot.press("up", "enter")
        assert app.got[-1] == ("stage", 1)
        form.load("s", [choice(1), number()])
        assert form.field is not None and form.field.id == "micro", "and Enter moves to the next field"


async def test_form_edits_a_number() -> None:
    form = Form()
    app = Host(form)
    async with app.run_test(size=(60, 12)) as pilot:
        form.load("s", [number()])
        await pilot.press("x")
        assert not form.editing, "a letter is no number"
        await pilot.press("1", "2", "left", "5", "backspace", "home", "delete", "end", "8")
        assert form.editing
        await pilot.press("enter")
        assert app.got == [("micro", "28")]
        await pilot.press("9", "escape")
        assert not form.editing and len(app.got) == 1
        await pilot.press("backspace")
        assert form.editing, "Backspace edits what is there"
        await pilot.press("down")
        assert not form.editing and app.got[-1] == ("micro", "")


@pytest.mark.parametrize("free", range(-4, 5))
def test_the_caret_of_a_pane_without_room_ends(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Form, "glyphs", terminal.UNICODE)
    form = Form()
    form._buffer, form._caret = "一/path/that/is/long", 9
    assert "".join(text for text, _role in form._caret_spans(free)) != ""


@pytest.mark.parametrize("cells", range(1, 9))
def test_the_line_of_a_question_without_room_ends(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstui.tui.screens.prompt.profile_of", lambda _widget: terminal.Profile())
    assert plain_text(Prompt("name?", text="一个很长的名字")._rows(cells)) != ""


async def test_form_takes_a_paste_and_completes_a_path(tmp_path: Any) -> None:
    from textual.events import Paste

    (tmp_path / "training_script.py").write_text("")
    form = Form()
    app = Host(form)
    async with app.run_test(size=(100, 12)) as pilot:
        form.load("s", [FieldView("script", "s", "Script", "path", "", "")])
        form.post_message(Paste(f"{tmp_path}/trai\n"))
        await pilot.pause()
        await pilot.press("tab", "enter")
        assert app.got == [("script", f"{tmp_path}/training_script.py")]


@pytest.mark.parametrize("cells", [48, 60, 100])
async def test_form_stays_aligned_with_wide_characters(cells: int) -> None:
    options = (
        Option(0, "普通数据并行", "每张卡都放得下"),
        Option(1, "切分优化器状态", "几乎免费", False, "需要两张卡以上才有意义"),
    )
    fields = [
        FieldView("stage", "s", "ZeRO 阶段", "choice", 0, "0", 0, "", options),
        FieldView("micro", "s", "微批量", "int", 4, "4", 8, unit="样本"),
        FieldView("bad", "s", "时限", "int", 0, "0", 10, error="必须大于等于 1"),
    ]
    form = Form()
    async with Host(form).run_test(size=(cells, 14)):
        form.load("s", fields)
        assert all(line_width(row) <= cells for row in form.content)
        at = [row[0][0] for row in form.content if row]
        from dstui.tui.text import width

        assert len({width(text) for text in at[:3]}) == 1, "labels and their blanks have one width"
        assert "必须大于等于" in plain_text(form.content)


async def test_form_folds_lists_that_have_no_room() -> None:
    many = tuple(Option(n, f"card {n}") for n in range(12))
    cards = FieldView("cards", "s", "Cards", "multi", (0, 1, 2), "0,1,2", None, "", many)
    form = Form()
    async with Host(form).run_test(size=(60, 8)) as pilot:
        form.load("s", [choice(), cards])
        assert "3 of 12" in plain_text(form.content)
        await pilot.press("down", "down")
        await pilot.pause()
        assert "card 11" in plain_text(form.content)
        for _n in range(11):
            await pilot.press("down")
        assert form.option is not None and form.option.value == 11
        assert form.top > 0


async def test_menu_skips_what_is_disabled() -> None:
    menu = Menu()
    app = Host(menu)
    async with app.run_test(size=(60, 10)) as pilot:
        menu.load([Item("a", "First"), Item("b", "Second", "none yet", enabled=False)])
        await pilot.press("down", "enter")
        assert app.got == []
        await pilot.press("up", "enter")
        assert app.got == ["a"]


def test_every_binding_has_an_id_and_no_key_twice_in_a_scope() -> None:
    seen: dict[tuple[str, str], str] = {}
    for action in actions.ACTIONS:
        for key in action.keys.split(","):
            assert (action.scope, key) not in seen, f"{key} twice in {action.scope}"
            seen[action.scope, key] = action.id
            assert key not in ("ctrl+m", "ctrl+i", "ctrl+h", "ctrl+j"), "the same byte as another key"


def test_every_action_has_a_method() -> None:
    from dstui.tui.app import DstuiApp
    from dstui.tui.screens.wizard import WizardScreen

    owners: dict[str, type] = {"app": DstuiApp, "start": Menu, "wizard": WizardScreen, "form": Form}
    for action in actions.ACTIONS:
        if action.scope in owners:
            assert hasattr(owners[action.scope], f"action_{action.id}"), action.id


def test_glyphs_are_one_cell_and_ascii_is_ascii() -> None:
    from dstui.tui.text import width

    for field in dataclasses.fields(terminal.Glyphs):
        for glyphs in (terminal.UNICODE, terminal.ASCII):
            value = getattr(glyphs, field.name)
            assert width(value) == (8 if field.name == "levels" else 1), field.name
        assert getattr(terminal.ASCII, field.name).isascii()


@pytest.mark.parametrize(
    ("env", "unicode"),
    [
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "C"}, False),
        ({"LANG": "xx_YY.UTF-8"}, False),
        ({}, False),
        ({"LC_ALL": "C", "LANG": "C.UTF-8"}, False),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True),
        ({"LANG": "C.UTF-8", "DSTUI_ASCII": "1"}, False),
        ({"LANG": "C", "DSTUI_ASCII": "0"}, True),
    ],
)
def test_profile_follows_the_locale(env: dict[str, str], unicode: bool) -> None:
    before = locale.setlocale(locale.LC_CTYPE)
    assert terminal.profile(environ=env).unicode is unicode
    assert locale.setlocale(locale.LC_CTYPE) == before


def test_low_profile() -> None:
    low = terminal.profile(True, {"LANG": "C.UTF-8"})
    assert low.low and low.tick > terminal.profile(environ={}).tick
    assert terminal.profile(environ={"DSTUI_LOW": "1"}).low


def test_textual_settings_are_set_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEXTUAL_ANIMATIONS", "TEXTUAL_FPS", "TEXTUAL_SMOOTH_SCROLL", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    terminal.prepare_environment(terminal.Profile(low=True))
    assert os.environ["TEXTUAL_ANIMATIONS"] == "none" and int(os.environ["TEXTUAL_FPS"]) <= 15


def test_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DstuiError) as e:
        terminal.require_terminal()
    assert e.value.code == 2 and "dstui init" in (e.value.hint or "")
