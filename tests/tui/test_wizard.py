"""Walks through the wizard by keys alone, at 80x24 and 120x40; the written file is what counts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dstui.config import presets
from dstui.config.document import Document
from dstui.facts.model import Facts
from dstui.session.model import STEPS
from dstui.tui.app import DstuiApp
from tests.tui.conftest import Walk, cpu_facts, gpu_facts

SIZES = [(80, 24), (120, 40)]
MakeApp = Callable[..., DstuiApp]


@asynccontextmanager
async def walking(app: DstuiApp, size: tuple[int, int] = (80, 24), start: bool = True) -> AsyncIterator[Walk]:
    async with app.run_test(size=size) as pilot:
        walk = Walk(app, pilot)
        await pilot.pause()
        if start:
            await walk.press("enter")
            await walk.settle()
            assert walk.step == "machine"
        yield walk


async def write(walk: Walk, path: Path) -> Any:
    """Write from the review and read the file back."""
    await walk.to(10)
    await walk.settle()
    await walk.press("f3")
    await walk.settle()
    assert "written" in walk.text, walk.text
    return json.loads(path.read_text())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("facts", [cpu_facts(), gpu_facts(2)], ids=["cpu", "gpu"])
async def test_accept_all(make_app: MakeApp, tmp_path: Path, size: tuple[int, int], facts: Facts) -> None:
    """Recommended, accept all, write: four keys."""
    async with walking(make_app(facts), size) as walk:
        await walk.press("A")
        await walk.settle()
        assert walk.step == "review"
        await walk.press("w")
        await walk.settle()
        data = json.loads((tmp_path / "ds_config.json").read_text())
        assert data["train_micro_batch_size_per_gpu"] >= 1
        assert data == walk.wizard.report.config


@pytest.mark.parametrize("size", SIZES)
async def test_enter_through_every_step(make_app: MakeApp, tmp_path: Path, size: tuple[int, int]) -> None:
    async with walking(make_app(gpu_facts(4)), size) as walk:
        seen = []
        for _n in range(9):
            seen.append(walk.step)
            assert f"step {len(seen)} of 10" in walk.text
            await walk.press("enter")
            if walk.step == seen[-1]:  # a list where the cursor stood on another option
                await walk.press("enter")
        assert seen == [s.id for s in STEPS[:-1]]
        assert walk.step == "review"
        data = await write(walk, tmp_path / "ds_config.json")
        assert "zero_optimization" in data


async def test_skip_and_back(make_app: MakeApp, tmp_path: Path) -> None:
    """Right leaves a step undecided, Left comes back; nothing changes by it."""
    async with walking(make_app(gpu_facts(2))) as walk:
        before = walk.wizard.report
        await walk.press("right", "right", "right")
        assert walk.step == "stage"
        await walk.press("left", "left")
        assert walk.step == "script"
        await walk.press("left", "left")
        assert walk.app.screen.__class__.__name__ == "StartScreen"
        assert "Continue" in walk.text
        await walk.press("enter")
        await walk.settle()
        assert walk.step == "machine"
        assert walk.wizard.report == before


async def test_stage_three_with_both_offloads(make_app: MakeApp, tmp_path: Path) -> None:
    async with walking(make_app(cpu_facts())) as walk:
        await walk.press("4")
        await walk.on_field("stage", 3)
        await walk.press("space", "enter")
        assert walk.step == "offload"
        await walk.on_field("offload", "both")
        await walk.press("space")
        data = await write(walk, tmp_path / "ds_config.json")
        zero = data["zero_optimization"]
        assert zero["stage"] == 3
        assert zero["offload_optimizer"]["device"] == "cpu"
        assert zero["offload_param"]["device"] == "cpu"


async def test_going_back_changes_an_earlier_answer(make_app: MakeApp, tmp_path: Path) -> None:
    """Stage 3 with parameter offload, then stage 2: the parameter offload goes."""
    async with walking(make_app(cpu_facts())) as walk:
        await walk.press("4")
        await walk.on_field("stage", 3)
        await walk.press("space")
        await walk.press("5")
        await walk.on_field("offload", "both")
        await walk.press("space")
        await walk.press("left")
        await walk.on_field("stage", 2)
        await walk.press("space")
        await walk.settle()
        if walk.app.session.problems("offload"):
            await walk.press("5")
            await walk.on_field("offload", "optimizer")
            await walk.press("space")
        data = await write(walk, tmp_path / "ds_config.json")
        assert data["zero_optimization"]["stage"] == 2
        assert "offload_param" not in data["zero_optimization"]


@pytest.mark.parametrize("size", SIZES)
async def test_numbers_are_typed(make_app: MakeApp, tmp_path: Path, size: tuple[int, int]) -> None:
    async with walking(make_app(cpu_facts()), size) as walk:
        await walk.to(6)
        await walk.on_field("micro_batch")
        await walk.type("3")
        assert "Esc" in walk.text and "undo" in walk.text
        await walk.press("enter")
        await walk.on_field("accumulation")
        await walk.type("5")
        await walk.press("enter")
        await walk.settle()
        assert "micro 3 x accumulation 5 x 2 ranks = 30" in walk.text
        data = await write(walk, tmp_path / "ds_config.json")
        assert data["train_micro_batch_size_per_gpu"] == 3
        assert data["gradient_accumulation_steps"] == 5


async def test_wrong_number_stays_with_its_reason(make_app: MakeApp, tmp_path: Path) -> None:
    async with walking(make_app(cpu_facts())) as walk:
        await walk.to(6)
        await walk.on_field("micro_batch")
        await walk.type("0")
        await walk.press("enter")
        await walk.settle()
        assert "must be 1 or more" in walk.text
        await walk.press("enter")
        assert walk.step == "batch", "Enter must not pass a wrong value silently"
        assert "this step has a problem" in walk.text
        await walk.press("right")
        assert walk.step == "pinned", "but it can be left for later"
        await walk.to(10)
        await walk.settle()
        await walk.press("w")
        await walk.settle()
        assert "not written" in walk.text
        assert not (tmp_path / "ds_config.json").exists()
        await walk.to(6)
        await walk.on_field("micro_batch")
        await walk.press("r")
        await walk.settle()
        assert "must be 1 or more" not in walk.text
        assert await write(walk, tmp_path / "ds_config.json")


async def test_escape_undoes_an_edit(make_app: MakeApp) -> None:
    async with walking(make_app(cpu_facts())) as walk:
        await walk.to(6)
        await walk.on_field("micro_batch")
        before = walk.app.session.field("micro_batch").text
        await walk.type("77")
        await walk.press("escape")
        assert walk.step == "batch"
        assert walk.app.session.field("micro_batch").text == before


async def test_cards_are_ticked_with_space(make_app: MakeApp, tmp_path: Path) -> None:
    """Busy cards are unticked and name their owner; Space changes the choice and the world size."""
    async with walking(make_app(gpu_facts(4, busy=(1,)))) as walk:
        assert "ann" in walk.text
        assert walk.app.session.field("cards").value == ("0", "2", "3")
        await walk.on_field("cards", "3")
        await walk.press("space")
        await walk.settle()
        assert walk.app.session.field("cards").value == ("0", "2")
        assert walk.wizard.report.world_size == 2
        await walk.on_field("cards", "1")
        await walk.press("space")
        assert walk.app.session.field("cards").value == ("0", "1", "2")


async def test_describe_another_machine(make_app: MakeApp, tmp_path: Path) -> None:
    async with walking(make_app(cpu_facts())) as walk:
        await walk.on_field("machine", "describe")
        await walk.press("space")
        await walk.on_field("gpus")
        await walk.type("8x80GiB")
        await walk.press("enter")
        await walk.settle()
        assert walk.wizard.report.world_size == 8
        data = await write(walk, tmp_path / "ds_config.json")
        assert data
        await walk.press("enter")
        await walk.settle()
        assert "another machine" in walk.text


async def test_plain_script_and_typed_model(make_app: MakeApp, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\ndeepspeed.initialize()\n")
    async with walking(make_app(gpu_facts(4))) as walk:
        await walk.press("2")
        await walk.on_field("engine", "plain")
        await walk.press("enter")
        assert walk.wizard.form.field.id == "script", "the field that the choice opened comes next"
        await walk.type("train.py")
        await walk.press("enter")
        await walk.to(3)
        await walk.on_field("model")
        await walk.type("7B")
        await walk.press("enter")
        await walk.settle()
        assert walk.wizard.report.shape.params == 7_000_000_000
        assert "7B" in walk.text or "7.00B" in walk.text
        data = await write(walk, tmp_path / "ds_config.json")
        assert data["zero_optimization"]["stage"] in (1, 2, 3)


async def test_missing_model_directory(make_app: MakeApp, tmp_path: Path) -> None:
    async with walking(make_app(gpu_facts(4))) as walk:
        await walk.press("2")
        await walk.on_field("engine", "plain")
        await walk.press("enter")
        await walk.to(3)
        await walk.on_field("model")
        await walk.type("./no-such-model")
        await walk.press("enter")
        await walk.settle()
        assert walk.app.session.problems("model")
        assert "no-such-model" in walk.text


async def test_open_a_file_and_keep_what_it_says(make_app: MakeApp, tmp_path: Path) -> None:
    """A config in the directory is offered; unknown keys and comments survive; the old file is kept."""
    path = tmp_path / "ds_config.json"
    old = '{\n  // mine\n  "train_micro_batch_size_per_gpu": 2,\n  "my_own_key": {"a": 1},\n  "zero_optimization": {"stage": 2}\n}\n'
    path.write_text(old)
    async with walking(make_app(gpu_facts(2)), start=False) as walk:
        assert "ds_config.json is in this directory" in walk.text
        await walk.press("down", "down", "enter")
        await walk.pilot.pause()
        await walk.press("enter")
        await walk.settle()
        assert walk.step == "machine"
        await walk.to(6)
        await walk.on_field("micro_batch")
        await walk.type("4")
        await walk.press("enter")
        await walk.to(10)
        await walk.settle()
        assert '-  "train_micro_batch_size_per_gpu": 2' in walk.text
        await walk.press("w")
        await walk.pilot.pause()
        assert "Replace" in walk.text
        await walk.press("w")
        await walk.settle()
        new = path.read_text()
        assert "// mine" in new and '"my_own_key"' in new
        assert '"train_micro_batch_size_per_gpu": 4' in new
        backups = [p for p in tmp_path.iterdir() if p.name.startswith("ds_config.json.bak")]
        assert len(backups) == 1 and backups[0].read_text() == old


async def test_refused_replacement_changes_nothing(make_app: MakeApp, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{}")
    document = Document.parse("{}", path=str(path))
    async with walking(make_app(gpu_facts(2), document=document), start=False) as walk:
        await walk.settle()
        await walk.press("4")
        await walk.on_field("stage", 2)
        await walk.press("space")
        await walk.to(10)
        await walk.settle()
        await walk.press("w")
        await walk.press("x")
        await walk.settle()
        assert path.read_text() == "{}"
        assert walk.step == "review"


async def test_preset(make_app: MakeApp, tmp_path: Path) -> None:
    async with walking(make_app(gpu_facts(4)), start=False) as walk:
        await walk.press("down", "enter")
        assert "ZeRO-2" in walk.text
        for _n in range(20):
            item = walk.app.screen.query_one("#menu").item  # type: ignore[attr-defined]
            if item.id == "zero3-offload":
                break
            await walk.press("down")
        await walk.press("enter")
        await walk.settle()
        assert walk.step == "machine"
        data = await write(walk, tmp_path / "ds_config.json")
        assert data["zero_optimization"]["stage"] == 3
        assert data["zero_optimization"]["offload_param"]["device"] == "cpu"


async def test_panel_pages_at_80x24(make_app: MakeApp) -> None:
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.press("v")
        await walk.settle()
        assert "Findings" in walk.text and "step 1 of 10" not in walk.text
        await walk.press("v", "v")
        await walk.settle()
        assert '"train_micro_batch_size_per_gpu"' in walk.text
        await walk.press("v")
        await walk.settle()
        assert "step 1 of 10" in walk.text and walk.app.focused is walk.wizard.form


async def test_panel_is_beside_the_fields_at_120x40(make_app: MakeApp) -> None:
    async with walking(make_app(gpu_facts(2)), (120, 40)) as walk:
        assert "step 1 of 10" in walk.text
        assert '"train_micro_batch_size_per_gpu"' in walk.text
        await walk.press("4")
        await walk.on_field("stage", 3)
        await walk.press("space")
        await walk.settle()
        assert "fits" in walk.text
        await walk.press("v", "v", "v")
        await walk.settle()
        assert '"stage": 3' in walk.text and "step 4 of 10" in walk.text


async def test_keys_work_on_a_text_field(make_app: MakeApp) -> None:
    """Letters are text there, so each action has a second key that never is."""
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.press("2")
        await walk.on_field("args")
        await walk.type("q?")
        await walk.press("escape")
        await walk.press("f1")
        assert "help" in walk.text and "accept all" in walk.text
        await walk.press("x")
        await walk.press("f2")
        assert walk.app.focused is walk.wizard.view("panel")
        await walk.press("f2", "f2", "f2")
        await walk.on_field("args")
        await walk.press("ctrl+a")
        assert walk.step == "review"


async def test_list_of_steps_by_tab(make_app: MakeApp) -> None:
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.press("tab")
        await walk.press("down", "down")
        assert walk.step == "model"
        await walk.press("enter")
        assert walk.app.focused is walk.wizard.form


async def test_wizard_before_detection_ends(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wizard opens at once; the facts arrive later and nothing typed is lost."""
    app = make_app()
    app._given = None
    monkeypatch.setattr(DstuiApp, "detect", lambda self: None)
    async with walking(app) as walk:
        assert "Looking at this machine" in walk.text
        await walk.to(6)
        await walk.on_field("micro_batch")
        await walk.type("6")
        await walk.press("enter")
        app.facts = gpu_facts(4)
        await walk.settle()
        assert walk.wizard.report.world_size == 4
        assert walk.wizard.report.batch.micro == 6


async def test_small_terminal_recovers(make_app: MakeApp) -> None:
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.pilot.resize_terminal(40, 10)
        await walk.pilot.pause()
        assert "40x10" in walk.text and "60x15" in walk.text
        await walk.pilot.resize_terminal(80, 24)
        await walk.pilot.pause()
        assert "step 1 of 10" in walk.text
        assert "Plan for" in walk.text


@pytest.mark.parametrize("key", ["enter", "t"])
async def test_launch_opens_the_monitor(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Three keys from the first paint to the start of a run, or of a trial; the spec is the session's."""
    from textual.screen import Screen

    from dstui.runs import start as starting

    started = []

    class Run:
        id = "run-1"

    def start(spec: Any, facts: Facts, **_options: Any) -> Run:
        started.append((spec, facts))
        return Run()

    monkeypatch.setattr(starting, "start", start)
    monkeypatch.setitem(DstuiApp.MODES, "monitor", lambda: Screen(id="monitor"))
    app = make_app(cpu_facts())
    async with walking(app, start=False) as walk:
        await walk.press("enter", "A")
        await walk.settle()
        await walk.press(key)
        for _n in range(100):
            await walk.pilot.pause(0.02)
            if app.current_mode == "monitor":
                break
        assert app.current_mode == "monitor" and app.run_id == "run-1"
        spec, facts = started[0]
        assert spec.script.endswith("tiny_gpt.py") and facts == cpu_facts()
        assert json.loads(spec.config_text)["train_micro_batch_size_per_gpu"] >= 1
        assert (spec.trial, spec.measure) == ((True, 5) if key == "t" else (False, None))
        assert spec.subject["shape"]["name"] == "tiny GPT" and spec.prediction is not None


async def test_failed_start_stays_in_review(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstui.errors import DstuiError
    from dstui.runs import start as starting

    def start(*_args: Any, **_options: Any) -> None:
        raise DstuiError("port 29500 is taken by python", "end it or give another port")

    monkeypatch.setattr(starting, "start", start)
    async with walking(make_app(cpu_facts())) as walk:
        await walk.press("A")
        await walk.settle()
        await walk.press("l")
        await walk.settle()
        assert "port 29500 is taken" in walk.text and "another port" in walk.text
        assert walk.step == "review"


async def test_presets_and_runs_are_modes_of_their_own(make_app: MakeApp) -> None:
    """A mode's screen is made when it is first entered; the wizard comes back as it was left."""
    async with walking(make_app(cpu_facts())) as walk:
        await walk.to(6)
        await walk.press("ctrl+r")
        assert walk.app.current_mode == "runs"
        await walk.press("ctrl+w")
        assert walk.step == "batch"


async def test_a_step_reached_from_the_panel_has_its_width(make_app: MakeApp) -> None:
    """The pane is hidden while the panel is open at 80 columns: what is drawn then must be drawn again."""
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.press("right", "right", "right")
        await walk.press("v", "5")
        assert walk.step == "offload"
        straight = walk.text
        await walk.press("left", "right")
        assert walk.text == straight
        assert "states left on the card" in straight and "Culprit when: Host memory high" in straight


async def test_review_saves_a_preset(make_app: MakeApp) -> None:
    async with walking(make_app(gpu_facts(2))) as walk:
        await walk.press("A")
        await walk.settle()
        assert "save as preset" in walk.text
        await walk.press("s")
        await walk.settle()
        assert "mine-2" in walk.text
        await walk.type("own")
        await walk.press("enter")
        await walk.settle()
        assert "saved: own" in walk.text
        kept = presets.load("own")
        assert not kept.shipped and kept.config == walk.wizard.report.config
        await walk.press("s")
        await walk.settle()
        await walk.type("own")
        await walk.press("enter")
        await walk.settle()
        assert "own" in walk.text and "saved" not in walk.text
        assert presets.load("own").config == kept.config


async def test_cards_that_others_use_are_shared_only_when_asked(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    from textual.screen import Screen

    from dstui.runs import start as starting
    from dstui.runs.preflight import Problem

    started: list[bool] = []
    busy = Problem("device-busy", "error", "GPU 0 is in use by python (pid 77, bob)", "wait for it")
    others: list[Problem] = [Problem("port-busy", "error", "port 29500 is in use", "leave it out")]

    class Run:
        id = "run-1"

    def start(spec: Any, _facts: Facts, **_options: Any) -> Run:
        started.append(spec.share_gpus)
        if others or not spec.share_gpus:
            raise starting.PreflightFailed((busy, *others))
        return Run()

    monkeypatch.setattr(starting, "start", start)
    monkeypatch.setitem(DstuiApp.MODES, "monitor", lambda: Screen(id="monitor"))
    app = make_app(cpu_facts())
    async with walking(app) as walk:
        await walk.press("A")
        await walk.settle()
        await walk.press("l")
        await walk.settle()
        assert "port 29500 is in use" in walk.text and "Start all the same?" not in walk.text
        others.clear()
        await walk.press("l")
        await walk.settle()
        assert "Start all the same?" in walk.text and "pid 77, bob" in walk.text
        await walk.press("escape")
        await walk.settle()
        assert started == [False, False] and walk.step == "review"
        await walk.press("l")
        await walk.settle()
        await walk.press("s")
        for _n in range(100):
            await walk.pilot.pause(0.02)
            if app.current_mode == "monitor":
                break
        assert app.run_id == "run-1" and started == [False, False, False, True]
