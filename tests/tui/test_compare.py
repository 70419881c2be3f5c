"""Two runs marked in the list and compared, by keys."""

from __future__ import annotations

import json

import pytest

from dstui.tui.screens.compare import CompareScreen
from dstui.tui.screens.runs import RunsScreen
from tests.run_tools import CONFIG, FakeRun
from tests.tui.test_monitor import SIZES, MakeApp, opened, ticked, until


def ended(name: str, ticks: int, stage: int) -> FakeRun:
    run = ticked(2, ticks, name=name)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    run.run.config_path.write_text(json.dumps(config))
    run.end()
    return run


@pytest.mark.parametrize("size", SIZES)
async def test_mark_and_compare(make_app: MakeApp, size: tuple[int, int]) -> None:
    a, b = ended("stage-2", 40, 2), ended("stage-3", 40, 3)
    async with opened(make_app(), size) as walk:
        await walk.press("ctrl+r")
        await until(walk, "stage-3")
        screen = walk.app.screen
        assert isinstance(screen, RunsScreen)
        await walk.press("c")
        assert "mark two runs" in walk.text
        screen.table.select(a.id)
        await walk.press("space")
        mark = walk.app.profile.glyphs.ticked
        assert f"{mark} D finished" in walk.text
        await walk.press("space")  # and off again
        assert f"{mark} D finished" not in walk.text
        await walk.press("space")
        screen.table.select(b.id)
        await walk.press("space", "c")
        text = await until(walk, "step time")
        assert isinstance(walk.app.screen, CompareScreen)
        assert "stage-2" in text and "GPU memory, peak" in text
        await walk.press("pagedown", "pagedown")
        assert "zero_optimization" in walk.text and "careful" in walk.text
        await walk.press("escape")
        assert walk.app.screen is screen


async def test_the_cursor_is_the_second_run(make_app: MakeApp) -> None:
    a, b = ended("one", 12, 2), ended("two", 12, 2)
    async with opened(make_app()) as walk:
        await walk.press("ctrl+r")
        await until(walk, "two")
        screen = walk.app.screen
        assert isinstance(screen, RunsScreen)
        screen.table.select(a.id)
        await walk.press("space")
        screen.table.select(b.id)
        await walk.press("c")
        assert "one" in await until(walk, "loss at step 12")
        a.run.manifest_path.unlink()  # forgotten elsewhere
        await walk.press("escape", "c")
        await until(walk, "there is no run")
