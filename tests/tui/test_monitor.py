"""The monitor, the list of runs and the presets, driven by keys on runs that only a trainer is missing from."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from dstui import i18n
from dstui.config import presets
from dstui.runs import store
from dstui.runs.state import Phase
from dstui.runs.view import Comparison, Ending, GpuRow, RankRow, RunView, Snapshot
from dstui.tui.app import DstuiApp
from dstui.tui.screens import runs as runs_screen
from dstui.tui.screens.monitor import MonitorScreen
from dstui.tui.screens.presets import PresetEditor, PresetsScreen
from dstui.tui.screens.runs import RunsScreen
from dstui.tui.terminal import ASCII, UNICODE, Profile, notification
from dstui.tui.text import line, line_width
from dstui.tui.widgets.curves import CurvesPage, axis_of, columns_of, drawn
from dstui.tui.widgets.dashboard import asleep, checkpoint_row, gpu_rows, overview, phase_rows
from dstui.tui.widgets.health import health_page
from dstui.tui.widgets.lines import changed_until
from dstui.tui.widgets.runpages import plan_page
from dstui.tui.widgets.spark import chart, spark
from tests.run_tools import OOM, FakeRun
from tests.tui.conftest import Walk, plain_text

SIZES = [(80, 24), (120, 40)]
MakeApp = Callable[..., DstuiApp]


@asynccontextmanager
async def opened(app: DstuiApp, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Walk]:
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Walk(app, pilot)


async def until(walk: Walk, text: str, seconds: float = 90.0) -> str:
    """Wait for ``text`` on the screen; returns the screen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await walk.pilot.pause(0.03)
        if text in walk.text:
            return walk.text
    raise AssertionError(f"{text!r} is not on the screen:\n{walk.text}")


def monitor(walk: Walk) -> MonitorScreen:
    screen = walk.app.screen
    assert isinstance(screen, MonitorScreen)
    return screen


def ticked(gpus: int = 8, ticks: int = 12, **options: Any) -> FakeRun:
    run = FakeRun(gpus, now=time.time() - ticks - 1, **options)
    for _n in range(ticks):
        run.tick()
    return run


# ---- lines


def test_spark_uses_the_whole_scale_and_ignores_what_is_not_finite() -> None:
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8, UNICODE.levels) == UNICODE.levels
    assert spark([3.0, math.nan, math.inf, 1.0], 10, "ab") == "ba"
    assert spark([2.0, 2.0], 10, "ab") == "aa"
    assert spark([], 10, "ab") == ""
    assert len(spark(list(range(1000)), 30, ASCII.levels)) == 30
    assert spark([0.5], 5, "abcdefgh", 0.0, 1.0) == "e"


def test_chart_falls_from_the_left_top_to_the_right_bottom() -> None:
    rows = chart([9, 7, 5, 3, 1], 5, 3, UNICODE.levels)
    assert len(rows) == 3
    assert rows[0].startswith("█") and len(rows[0]) < len(rows[2]) == 5
    assert chart([], 5, 3, UNICODE.levels) == []


def test_changed_until_covers_every_difference_and_ignores_invisible_ones() -> None:
    assert changed_until(line("abc def"), line("abX def")) == 3
    assert changed_until(line("abc"), line(("abc", "bad"))) == 3
    assert changed_until(line("abc"), line("ab", "c")) == 0
    assert changed_until(line("abc"), line("abc   ")) == 0
    assert changed_until(line("abc   "), line("abc", ("   ", "cursor"))) == 6
    assert changed_until(line("运行中"), line("运好中")) == 4
    assert changed_until(line("运"), line("x")) == 2


@pytest.mark.parametrize("language", ["en", "zh_CN"])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize(("cells", "height"), [(80, 21), (60, 12), (120, 37), (200, 57)])
@pytest.mark.parametrize("gpus", [0, 1, 8, 16, 64])
def test_overview_fits_whatever_the_size(
    gpus: int, cells: int, height: int, glyphs: Any, language: str
) -> None:
    run = ticked(gpus, ticks=3, ranks=gpus or 4)
    shot = RunView(run.run).poll()
    i18n.set_language(language)
    rows = overview(shot, cells, height, glyphs, time.time())
    assert len(rows) <= height
    assert max(line_width(r) for r in rows) <= cells, plain_text(rows)
    if glyphs is ASCII and language == "en":
        assert plain_text(rows).isascii()


def test_overview_of_nothing_known() -> None:
    """A run seen from another host before its first sample; a loss that is no number."""
    for shot in (
        Snapshot("x", "starting"),
        Snapshot("x", "running", here=False, phase=Phase("loading", time.time())),
        Snapshot("x", "running", step=3, loss=math.nan, lr=0.0, gpus=(GpuRow(0), GpuRow(1))),
        Snapshot("x", "stalled", step=3, ranks=(RankRow(0),)),
        Snapshot("x", "lost", ending=Ending("lost", "the supervisor is gone")),
    ):
        rows = overview(shot, 80, 21, UNICODE, time.time())
        assert rows and all(line_width(r) <= 80 for r in rows)


def test_eight_gpus_have_a_row_each_at_80x24() -> None:
    shot = RunView(ticked(8).run).poll()
    text = plain_text(overview(shot, 80, 21, UNICODE, time.time()))
    for n in range(8):
        assert f"\n  {n}  " in text
    for word in ("loss", "lr", "step time", "tokens/s", "to go", "host RAM", "cgroup", "ranks 8 of 8"):
        assert word in text, text
    assert "device  predicted 76.0 GiB (73.0 - 79.8)  measured 7" in text
    assert text.count("│") >= 3


def test_memory_is_compared_once_it_can_be_at_its_peak() -> None:
    below = (Comparison("host", 3 << 30, 4 << 30, 5 << 30, 2 << 30),)
    above = (Comparison("host", 3 << 30, 4 << 30, 5 << 30, 6 << 30),)
    loading = Phase("loading", time.time())
    plan: dict[str, Any] = {"prediction": {"host": {}}}
    for state, phase, step, found, word, difference in (
        ("running", loading, None, below, "so far", ""),
        ("running", loading, None, above, "higher", "+50.0 %"),
        ("failed", None, None, below, "so far", ""),
        ("running", None, 1, below, "lower", "-50.0 %"),
        ("finished", None, None, below, "lower", "-50.0 %"),  # its script tells no steps
    ):
        shot = Snapshot("x", state, phase=phase, step=step, comparisons=found)
        for rows in (
            overview(shot, 100, 30, UNICODE, time.time()),
            plan_page(shot, plan, 100, UNICODE),
        ):
            (row,) = [r for r in plain_text(rows).splitlines() if "6.0 GiB" in r or "2.0 GiB" in r]
            assert word in row and (difference in row if difference else " %" not in row), row


def test_many_gpus_share_rows_and_the_rest_is_counted() -> None:
    gpus = tuple(GpuRow(n, utilisation=0.5, memory_used=1 << 36, memory_total=1 << 37) for n in range(64))
    rows = gpu_rows(gpus, 80, 8, UNICODE)
    assert len(rows) <= 8
    assert "more" in plain_text(rows)


def test_phases_tell_which_silence_is_normal() -> None:
    now = time.time()
    text = plain_text(phase_rows(Phase("building", now - 42, "cpu_adam"), 80, UNICODE, now))
    assert "building ops cpu_adam 42s" in text and "30-80 s of silence are normal" in text
    assert "✓ loading" in text
    text = plain_text(phase_rows(Phase("loading", now - 3), 80, UNICODE, now))
    assert "▸ loading 3s" in text and "building" not in text
    assert "every rank is idle" in plain_text(phase_rows(Phase("loading", now), 80, UNICODE, now, 61))
    assert "every rank is idle" not in plain_text(
        phase_rows(Phase("loading", now - 300), 80, UNICODE, now, 3)
    )
    waiting = Snapshot(
        "x", "running", phase=Phase("loading", now), ranks=(RankRow(0, cpu=0.0), RankRow(1, cpu=0.01))
    )
    assert asleep(waiting)
    assert not asleep(replace(waiting, ranks=(RankRow(0, cpu=0.0), RankRow(1, cpu=0.9))))
    assert not asleep(replace(waiting, phase=Phase("building", now)))
    assert not asleep(replace(waiting, ranks=()))


def test_failed_checkpoint_is_marked_by_a_sign() -> None:
    assert "! 4 host " in plain_text([checkpoint_row(4, 80, UNICODE)])
    assert "!" not in plain_text([checkpoint_row(None, 80, UNICODE)])
    assert "none of the five" in plain_text([checkpoint_row(None, 80, UNICODE)])


# ---- monitor


@pytest.mark.parametrize("size", SIZES)
async def test_views_of_a_living_run(make_app: MakeApp, size: tuple[int, int]) -> None:
    run = ticked()
    async with opened(make_app(watch=run.id), size) as walk:
        text = await until(walk, "tokens/s")
        assert "R running" in text and "ZeRO 3" in text and "step 12/500" in text
        before = monitor(walk).shot
        run.tick()
        text = await until(walk, "step 13/500")
        assert before is not None and monitor(walk).shot != before
        await walk.press("p")
        text = await until(walk, "expected")
        assert "difference" in text and "activations" in text
        await walk.press("c")
        assert '"stage": 3' in await until(walk, '"bf16"')
        await walk.press("l")
        assert "step 13 loss" in await until(walk, "following the end")
        await walk.press("o")
        await until(walk, "host RAM")
        for view in ("health", "curves", "log", "plan", "config", "overview"):
            await walk.press("tab")
            assert monitor(walk).view_name == view


async def test_equal_snapshots_paint_nothing(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ticked()
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        painted: list[Any] = []
        board = monitor(walk).view("board")
        monkeypatch.setattr(type(board), "refresh", lambda self, *regions, **_k: painted.append(regions))
        shot = monitor(walk).shot
        for _n in range(3):
            monitor(walk)._took(monitor(walk)._look)  # type: ignore[arg-type]
        assert monitor(walk).shot is shot
        assert painted == []


async def test_failed_run_names_cause_checkpoint_evidence_and_fix(make_app: MakeApp) -> None:
    run = ticked()
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        run.log(*OOM.splitlines())
        run.end("failed", code=1, rank_code=1, ranks=[{"rank": n, "code": 1} for n in range(8)])
        text = await until(walk, "F failed")
        assert "DR103" in text and "! 1 stage" in text
        assert "│ torch.OutOfMemoryError" in text
        assert "1. offload the optimizer to the CPU" in text
        await walk.press("d")
        text = await until(walk, "what to do")
        assert "out.log:" in text or "evidence" in text
        await walk.press("escape")
        assert monitor(walk).view_name == "overview"
        await walk.press("s")
        assert "has ended already" in walk.text


async def test_run_that_vanishes_and_comes_back(make_app: MakeApp) -> None:
    run = ticked(2)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        hidden = run.run.path.with_name(".away")
        run.run.path.rename(hidden)
        await until(walk, "is gone")
        hidden.rename(run.run.path)
        run.tick()
        await until(walk, "step 13/500", 12)
        assert "is gone" not in walk.text


async def test_damaged_manifest_is_a_message(make_app: MakeApp) -> None:
    run = ticked(2)
    run.run.manifest_path.write_text("{oops")
    async with opened(make_app(watch=run.id)) as walk:
        text = await until(walk, "not a readable run manifest")
        assert "rm" in text
        await walk.press("ctrl+r")
        await until(walk, "damaged")


async def test_slow_disk_never_holds_the_keys(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ticked(2)
    real = RunView.poll

    def slow(self: RunView) -> Snapshot:
        time.sleep(0.8)
        return real(self)

    monkeypatch.setattr(RunView, "poll", slow)
    async with opened(make_app(watch=run.id)) as walk:
        start = time.monotonic()
        await walk.press("p", "c", "o")
        assert time.monotonic() - start < 0.7
        assert "reading the run" in walk.text
        await until(walk, "tokens/s")


async def test_log_of_many_lines_scrolls_and_searches(make_app: MakeApp) -> None:
    run = ticked(2, ticks=2)
    with run.run.out_log.open("a") as f:
        for n in range(20_000):
            f.write(f"line {n:06d} {'needle' if n in (40, 10_000, 19_000) else ''} 数据 {'x' * 120}\n")
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "line 019999")
        await walk.press("l")
        await until(walk, "following the end")
        log = monitor(walk).log_view
        assert len(log.content) < 2000
        await walk.press("pageup")
        assert not log.following
        for _n in range(40):
            await walk.press("pageup")
            await asyncio.sleep(0.005)
        assert "line 0199" not in walk.text
        await walk.press("slash")
        await walk.type("nEEdle")
        await walk.press("enter")
        await until(walk, "is not found below")
        await walk.press("N")
        await until(walk, "▸line 019000")
        await walk.press("f")
        await until(walk, "following the end")
        await walk.press("slash", "enter")  # from the end upwards
        for hit in ("019000", "010000", "000040"):
            await until(walk, f"▸line {hit}")
            await walk.press("n")
        await until(walk, "is not found above")
        await walk.press("N")
        await until(walk, "▸line 010000")
        assert len(log.content) < 2000
        await walk.press("right")
        await until(walk, "column 17")
        await walk.press("f")
        await until(walk, "following the end")
        assert "019999" not in walk.text  # still 16 columns to the right
        await walk.press("home")
        await until(walk, "at 0 %")
        assert log.content and not log.following


async def test_stop_asks_first(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ticked(2)
    asked: list[tuple[str, bool]] = []

    def stop(target: Any, now: bool = False, timeout: float | None = None) -> Any:
        from dstui.runs.control import Stopped

        asked.append((target.id, now))
        run.end("stopped", stopped_by={"user": "ann"})
        return Stopped(True, "stopped")

    monkeypatch.setattr("dstui.runs.control.stop", stop)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        await walk.press("s")
        assert "all its ranks?" in walk.text and "KILL after 3 s" in walk.text
        await walk.press("x")
        assert asked == []
        await walk.press("s", "S")
        await until(walk, "X stopped")
        assert asked == [(run.id, True)]


async def test_two_quick_keys_on_the_help_page(make_app: MakeApp) -> None:
    run = ticked(2)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        await walk.pilot.press("question_mark")
        await until(walk, "five lamps")
        await walk.pilot.press("x", "z", "u")
        await until(walk, "tokens/s")


@pytest.mark.parametrize("size", [(59, 14), (60, 15), (80, 24), (200, 60)])
async def test_sizes_and_low_ascii_profile(make_app: MakeApp, size: tuple[int, int]) -> None:
    run = ticked()
    async with opened(make_app(watch=run.id, profile=Profile(unicode=False, low=True)), size) as walk:
        text = await until(walk, "enlarge it" if size[0] < 60 else "step 12/500")
        assert text.isascii()


def test_curves_share_one_axis_and_are_whole_at_the_end() -> None:
    """Of many curves only some are drawn anew at a time; none stays behind where the steps of a column change, or
    where nothing will follow."""
    run = ticked(0, ticks=3)
    view, page = RunView(run.run, clock=lambda: run.now), CurvesPage()
    page.rows(view.poll(), 80, 21, UNICODE)
    for _n in range(120):
        run.tick()
        shot = view.poll()
        page.rows(shot, 80, 21, UNICODE)
    fresh = CurvesPage()
    run.tick()
    run.end()
    shot = view.poll()
    assert shot.over
    assert page.rows(shot, 80, 21, UNICODE) == fresh.rows(shot, 80, 21, UNICODE)


# ---- runs


async def test_the_diagnosis_of_a_run_that_vanished_ends_in_words(make_app: MakeApp, tmp_path: Any) -> None:
    run = ticked(0, ticks=3)
    run.end("failed", code=1)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "no cause found")
        run.run.path.rename(tmp_path / "elsewhere")
        await walk.press("d")
        await until(walk, "any other key")
        await walk.press("enter")
        await until(walk, "d diagnosis")
        assert monitor(walk).view_name == "overview" and "looking at the log" not in walk.text


def test_the_list_does_not_wait_for_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read late comes with the next looks, and nothing is left out in the end."""
    ids = [ticked(0, ticks=3).id for _n in range(3)]
    monkeypatch.setattr(runs_screen, "PATIENCE", -1.0)
    lister = runs_screen._Lister()
    lister.wanted = tuple(ids)
    assert {e.id for e in lister.take()} == set(ids)
    assert lister.behind
    monkeypatch.setattr(runs_screen, "PATIENCE", 60.0)
    assert all(e.shot is not None and e.shot.step for e in lister.take()) and not lister.behind
    lister.close()


@pytest.mark.parametrize("size", SIZES)
async def test_runs_table(make_app: MakeApp, size: tuple[int, int]) -> None:
    done = ticked(0, name="长名字的运行")
    done.end()
    failed = ticked(2, name="oom")
    failed.log(*OOM.splitlines())
    failed.end("failed", code=1)
    alive = ticked(2, name="alive")
    damaged = FakeRun(0)
    damaged.run.manifest_path.write_text("[]")
    async with opened(make_app(), size) as walk:
        await walk.press("ctrl+r")
        text = await until(walk, "12/500")
        assert "R running" in text and "D finished" in text and "F failed" in text and "damaged" in text
        assert "长名字的运行" in text and "1 alive" in text
        screen = walk.app.screen
        assert isinstance(screen, RunsScreen)
        screen.table.select(failed.id)
        await until(walk, "DR103")
        await walk.press("s")
        assert "has ended already" in walk.text
        screen.table.select(alive.id)
        await walk.press("x")
        assert "stop it first" in walk.text
        screen.table.select(done.id)
        await walk.press("x")
        assert "Forget the run" in walk.text
        await walk.press("x")
        await until(walk, "is forgotten")
        assert done.id not in [r.id for r in store.list_runs()]
        screen.table.select(alive.id)
        await walk.press("enter")
        await until(walk, "step 12/500")
        assert monitor(walk).shot is not None and monitor(walk).shot.id == alive.id  # type: ignore[union-attr]
        await walk.press("escape")
        assert walk.app.screen is screen


async def test_join_on_the_start_screen_is_the_list_of_runs(make_app: MakeApp) -> None:
    run = ticked(2)
    async with opened(make_app()) as walk:
        await until(walk, "Join a run")
        await walk.press("down", "down", "down", "enter")
        await until(walk, run.id)
        assert isinstance(walk.app.screen, RunsScreen)
        await walk.press("left")
        await until(walk, "Join a run")


async def test_no_runs(make_app: MakeApp) -> None:
    async with opened(make_app()) as walk:
        await walk.press("ctrl+r")
        text = await until(walk, "there are no runs yet")
        assert "dstui demo" in text
        await walk.press("enter", "s", "x", "o", "l")
        assert isinstance(walk.app.screen, RunsScreen)
        await walk.press("left")
        await until(walk, "Recommended")


async def test_config_of_a_run_opens_without_what_we_added(make_app: MakeApp) -> None:
    from dstui.runs.command import instrument
    from tests.run_tools import CONFIG

    run = ticked(0)
    run.run.config_path.write_text(instrument(json.dumps(CONFIG), run.run.metrics_dir, "0.19.8"))
    async with opened(make_app()) as walk:
        await walk.press("ctrl+r")
        await until(walk, "12/500")
        await walk.press("o")
        await until(walk, "step 1 of 10")
        await walk.settle()
        document = walk.app.session.document
        assert document is not None
        assert "csv_monitor" not in document.data and document.data["zero_optimization"]["stage"] == 3
        assert str(run.run.path) not in str(document.path)


async def test_watching_another_run_starts_afresh(make_app: MakeApp) -> None:
    first, second = ticked(2, name="first"), ticked(0, name="second", ticks=5)
    async with opened(make_app(watch=first.id)) as walk:
        await until(walk, "step 12/500")
        walk.app.open_run(second.id)
        text = await until(walk, "step 5/500")
        assert "second" in text and "first" not in text
        shutil.rmtree(first.run.path)
        await walk.pilot.pause(1.2)
        assert "is gone" not in walk.text


# ---- presets


async def on_presets(walk: Walk) -> PresetsScreen:
    await walk.press("ctrl+e")
    await until(walk, "title")
    await walk.settle()
    screen = walk.app.screen
    assert isinstance(screen, PresetsScreen)
    return screen


@pytest.mark.parametrize("size", SIZES)
async def test_preset_life(make_app: MakeApp, size: tuple[int, int]) -> None:
    async with opened(make_app(), size) as walk:
        screen = await on_presets(walk)
        assert "Everything fits on each card" in walk.text and "shipped" in walk.text
        screen.table.select("zero3")
        await walk.press("d")
        assert "read-only" in walk.text
        await walk.press("r")
        assert "read-only" in walk.text
        await walk.press("c")
        await walk.type("mine")
        await walk.press("enter")
        await walk.settle()
        assert screen.preset is not None and screen.preset.name == "mine" and not screen.preset.shipped
        await walk.press("r")
        await walk.type("own.3")
        await walk.press("enter")
        await walk.settle()
        assert presets.find("mine") is None and presets.load("own.3").config == presets.load("zero3").config
        assert screen.preset.name == "own.3"
        await walk.press("c")
        await walk.type("zero2")
        await walk.press("enter")
        assert "exists already" in walk.text
        await walk.press("enter")
        await until(walk, "step 1 of 10")
        screen = await on_presets(walk)
        await walk.press("d", "d")
        await walk.settle()
        assert presets.find("own.3") is None


async def test_preset_editor(make_app: MakeApp) -> None:
    async with opened(make_app()) as walk:
        screen = await on_presets(walk)
        screen.table.select("zero2")
        await walk.press("e")
        await walk.type("work")
        await walk.press("enter")
        editor = walk.app.screen
        assert isinstance(editor, PresetEditor)
        area = editor.area
        good = area.text
        await walk.press("x", "f3")  # not JSON any more
        await walk.settle()
        assert "work.json:2" in "".join(walk.text.split())  # the path wraps where it must
        assert presets.find("work") is None
        area.text = good.replace('"stage": 2', '"stage": 7')
        await walk.press("f3")
        await walk.settle()
        assert "refuses this config" in walk.text
        await walk.press("n")
        assert presets.find("work") is None
        await walk.press("f10")
        assert "Leave without saving" in walk.text
        await walk.press("n")
        area.text = good.replace('"title": "ZeRO-2"', '"title": "第二阶段"')
        await walk.press("ctrl+s")
        await walk.settle()
        assert "saved as work" in walk.text
        await walk.press("f10")
        await walk.settle()
        assert walk.app.screen is screen
        assert presets.load("work").title == "第二阶段" and screen.preset is not None
        assert screen.preset.name == "work"
        await until(walk, "第二阶段")


async def test_wizard_config_becomes_a_preset(make_app: MakeApp) -> None:
    async with opened(make_app()) as walk:
        screen = await on_presets(walk)
        await walk.press("n")
        assert "no config yet" in walk.text
        screen.table.select("zero3-offload")
        await walk.press("enter")
        await until(walk, "step 1 of 10")
        await walk.settle()
        config = walk.wizard.report.config
        await walk.press("ctrl+e")
        await walk.settle()
        await walk.press("n")
        await walk.type("my-offload")
        await walk.press("enter")
        await until(walk, "saved: my-offload")
        assert presets.load("my-offload").config == config
        assert presets.load("my-offload").config["zero_optimization"]["stage"] == 3


async def test_broken_preset_is_repaired_in_the_editor(make_app: MakeApp) -> None:
    made = presets.copy("zero1", "hurt")
    assert made.path is not None
    whole = made.path.read_text()
    made.path.write_text(whole[:-20])
    async with opened(make_app()) as walk:
        screen = await on_presets(walk)
        screen.table.select("hurt")
        await walk.press("enter")
        assert isinstance(walk.app.screen, PresetsScreen)
        await walk.press("e")
        editor = walk.app.screen
        assert isinstance(editor, PresetEditor)
        editor.area.text = whole
        await walk.press("f3")
        await walk.settle()
        assert presets.load("hurt").problem is None


# ---- lamps, curves, stacks, a fix that becomes a run


def test_columns_stand_for_fixed_steps() -> None:
    """A further step changes the last column only, until the page is full."""
    curve = tuple((float(n), 100.0 - n) for n in range(1, 41))
    axis = axis_of([curve, ()], 30)
    assert axis is not None and axis.size == 2
    before = columns_of(curve, axis)
    longer = (*curve, (41.0, 59.0))
    again = axis_of([longer], 30)
    assert again is not None and again.size == 2
    assert columns_of(longer, again)[:-1] == before[:-1]
    assert axis_of([()], 30) is None
    sparse = ((10.0, 1.0), (20.0, 2.0), (50.0, 3.0))
    shared = axis_of([curve, sparse], 30)
    assert shared is not None
    shown = columns_of(sparse, shared)
    assert shown[0] is None and shown[-1] == 3.0 and None not in shown[shared.column(10.0) :]
    rows = drawn([None, 1.0, 2.0, 3.0], 2, "12345678")
    assert [r[:1] for r in rows] == [" ", " "] and rows[0][-1] == "8"


@pytest.mark.parametrize("language", ["en", "zh_CN"])
@pytest.mark.parametrize(("cells", "height"), [(80, 21), (60, 12), (120, 37), (200, 57)])
def test_pages_of_curves_and_lamps_fit(cells: int, height: int, language: str) -> None:
    run = ticked(8)
    run.log("step 12 loss nan", "step 12 loss nan")
    shot = RunView(run.run).poll()
    i18n.set_language(language)
    for glyphs in (UNICODE, ASCII):
        rows = CurvesPage().rows(shot, cells, height, glyphs)
        assert len(rows) <= max(height, 20)
        for page in (rows, health_page(shot, cells, glyphs)):
            assert max(line_width(r) for r in page) <= cells, plain_text(page)
        if glyphs is ASCII and language == "en":
            assert plain_text(rows).isascii()


def test_only_two_curves_are_drawn_anew_at_once() -> None:
    run = FakeRun(2, now=time.time() - 40)
    view, page = RunView(run.run, clock=lambda: run.now), CurvesPage()
    before: list[str] = []
    for n in range(30):
        run.tick()
        text = plain_text(page.rows(view.poll(), 80, 21, UNICODE))
        charts = [row.partition("│")[2] for row in text.splitlines()]
        blocks = [charts[4 * i : 4 * i + 3] for i in range(5)]
        if n > 2:
            old = [before[4 * i : 4 * i + 3] for i in range(5)]
            assert sum(a != b for a, b in zip(blocks, old, strict=True)) <= 2
        before = charts


@pytest.mark.parametrize("size", SIZES)
async def test_lamps_and_alerts_by_keys(make_app: MakeApp, size: tuple[int, int]) -> None:
    run = ticked()
    async with opened(make_app(watch=run.id), size) as walk:
        text = await until(walk, "tokens/s")
        assert "✓ 1 stage" in text and "? 5 comm" in text
        run.log("step 13 loss nan", "step 13 loss nan")
        assert "! the loss is NaN since step 13 (2 reports)" in await until(walk, "the loss is NaN")
        await walk.press("k")
        text = await until(walk, "accumulation boundary")
        assert "held 7" in text and "dstui explain DR601" in text
        assert text.index("the loss is NaN") < text.index("gradient clipping") < text.index("1 ZeRO stage"), (
            "what burns is on the first screen, with what to do"
        )
        await walk.press("G")
        await until(walk, 'switch on "wall_clock_breakdown": true')
        await walk.press("o", "4")
        await until(walk, "▸✓ 4 pinned memory and host RAM")
        await walk.press("m")
        assert "step 1 to" in await until(walk, "grad norm")
        await walk.press("m")
        assert monitor(walk).view_name == "overview"


async def test_fix_becomes_a_run(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    run = ticked(2)
    own = tmp_path / "ds_config.json"
    own.write_text('{\n  // mine\n  "zero_optimization": {"stage": 3}\n}\n')
    manifest = run.run.manifest
    spec = {"script": "train.py", "args": ["--ds", "{config}"], "engine": "plain", "devices": ["0", "1"]}
    config = {**(manifest.get("config") or {}), "source": str(own)}
    store.write_json(
        run.run.manifest_path, {**manifest, "spec": spec, "cwd": str(tmp_path), "config": config}
    )
    started: list[Any] = []
    other = ticked(0, name="second", ticks=5)

    def start(spec: Any, facts: Any, **_more: Any) -> Any:
        started.append((spec, facts))
        return other.run

    monkeypatch.setattr("dstui.runs.start.start", start)
    run.log(*OOM.splitlines())
    run.end("failed", code=1, rank_code=1)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "F failed")
        await walk.press("d")
        await until(walk, "what to do")
        found = monitor(walk)._diagnosis
        assert found is not None
        n = next(i for i, fix in enumerate(found.fixes, 1) if "offload the optimizer" in fix.title)
        await walk.press(str(n))
        text = await until(walk, "Enter start a new run")
        assert '+    "offload_optimizer": {' in text and "---" not in text
        assert started == [] and "// mine" in own.read_text()
        await walk.press("w", "w")
        await until(walk, "written: ")
        assert "// mine" in own.read_text() and "offload_optimizer" in own.read_text()
        assert (tmp_path / "ds_config.json.bak").read_text().count("offload") == 0
        await walk.press("enter")
        await until(walk, "step 5/500")
        assert len(started) == 1
        assert started[0][0].args == ("--ds", "{config}") and started[0][0].devices == ("0", "1")
        assert json.loads(started[0][0].config_text)["zero_optimization"]["offload_optimizer"] == {
            "device": "cpu"
        }
        assert "offload_optimizer" not in run.run.config_path.read_text()


async def test_change_that_is_not_in_the_config_is_said(make_app: MakeApp) -> None:
    run = ticked(2)
    run.log(
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 3, in <module>',
        "    import peft",
        "ModuleNotFoundError: No module named 'peft'",
    )
    run.end("failed", code=1, rank_code=1)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "F failed")
        await walk.press("d")
        await until(walk, "what to do")
        found = monitor(walk)._diagnosis
        assert found is not None
        plain = next(i for i, fix in enumerate(found.fixes, 1) if not fix.edits)
        await walk.press(str(plain))
        await until(walk, "is not one of the config")
        await walk.press("9", "enter", "w")
        assert monitor(walk).view_name == "diagnosis"


async def test_stacks_say_why_there_are_none(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ticked(0)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        await walk.press("y")  # the ranks' pid is the test's own, whose environment names no run
        await until(walk, "no rank of the run is alive here")
        monkeypatch.setattr("dstui.runs.processes.environment", lambda _pid: {"DSTUI_RUN_ID": run.id})
        monkeypatch.setattr("dstui.runs.stacks.find_tool", lambda _python: None)
        await walk.press("y")
        assert "pip install py-spy" in await until(walk, "py-spy is not installed")
        run.end()
        await walk.press("o")
        await until(walk, "D finished")
        await walk.press("y")
        await until(walk, "no rank is alive")


async def test_replay_by_keys(make_app: MakeApp) -> None:
    run = FakeRun(2, now=time.time() - 120)
    manifest = {**run.run.manifest, "started_at": run.now}
    store.write_json(run.run.manifest_path, manifest)
    for _n in range(100):
        run.tick()
    run.end()
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "D finished")
        await walk.press("plus")  # no replay: nothing happens
        await walk.press("r")
        text = await until(walk, "replay x10")
        assert "s stop" not in text and "a replay:" in text
        await walk.press("s")
        await until(walk, "there is nothing to stop")
        await walk.press("plus", "plus", "plus", "plus", "plus")
        await until(walk, "100 %", 20)
        await until(walk, "D finished")
        await walk.press("r")
        await until(walk, "R running")
        await walk.press("minus")
        await until(walk, "replay x")
        await walk.press("ctrl+r")
        await until(walk, "100/500")
        await walk.press("r")
        await until(walk, "replay x10")


async def test_hidden_monitor_still_tells_of_the_end(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ticked(2)
    told: list[str] = []
    monkeypatch.setattr(DstuiApp, "notify_person", lambda _self, text: told.append(text))
    monkeypatch.setattr("dstui.tui.screens.monitor.OVER_TICK", 0.2)
    async with opened(make_app(watch=run.id)) as walk:
        await until(walk, "tokens/s")
        await walk.press("ctrl+e")
        await until(walk, "title")
        run.log(*OOM.splitlines())
        run.end("failed", code=1, rank_code=1)
        end = time.monotonic() + 10
        while not told and time.monotonic() < end:
            await walk.pilot.pause(0.05)
        assert told == ["run llama-8b: failed DR103 gpu-oom-step"]
        await walk.pilot.pause(1.0)
        assert len(told) == 1


def test_notification_knows_the_terminal() -> None:
    assert notification("run x: failed", {"TERM": "xterm"}) == "\a\x1b]9;dstui: run x: failed\a"
    assert notification("x", {"TERM": "linux"}) == "\a"
    assert notification("x", {"TERM": "tmux", "TMUX": "/t,1,0"}) == "\a\x1bPtmux;\x1b\x1b]9;dstui: x\a\x1b\\"
    assert notification("x", {"TERM": "screen", "STY": "1.a"}) == "\a\x1bP\x1b]9;dstui: x\a\x1b\\"
    assert "\x1b[" not in notification("evil \x1b[2J", {"TERM": "xterm"})
