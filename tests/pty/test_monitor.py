"""The monitor on a real terminal: bytes a tick, silence, and a run that does not care whether it is watched."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dstui.runs import store
from tests.pty.harness import Terminal
from tests.run_tools import OOM, FakeRun

pytestmark = pytest.mark.pty

BUDGET = 2000
"""Bytes of one tick with 8 GPUs at 80x24 (a tick a second must pass a line of 6 kB/s)."""


@pytest.fixture
def run() -> FakeRun:
    made = FakeRun(8, now=time.time() - 62)
    for _n in range(60):
        made.tick()
    return made


def watching(run: FakeRun, tmp_path: Path, *options: str, **more: object) -> Terminal:
    terminal = Terminal(["watch", run.id, *options], cwd=tmp_path, **more)  # type: ignore[arg-type]
    terminal.wait("tokens/s", 20)
    terminal.settle(1.3)
    return terminal


@pytest.fixture
def term(run: FakeRun, tmp_path: Path) -> Iterator[Terminal]:
    with watching(run, tmp_path) as t:
        yield t


def test_a_tick_with_eight_gpus_is_within_the_budget(term: Terminal, run: FakeRun) -> None:
    """Every card, the host, the ranks, the step, its figures, four curves and the log change in each tick."""
    ticks = []
    for _n in range(5):
        run.now = time.time() - 1
        run.tick()
        ticks.append(term.read(1.0))
    term.settle(1.2)
    assert f"step {run.step}/500" in term.text, term.text
    assert max(ticks) <= BUDGET, ticks
    assert sum(ticks) > 1000  # they were painted


@pytest.mark.parametrize(("key", "text"), [("m", "grad norm"), ("k", "accumulation boundary")])
def test_a_tick_of_the_other_pages_is_within_the_budget(
    term: Terminal, run: FakeRun, key: str, text: str
) -> None:
    """Five charts of which every one has a new column, and five lamps whose figures move."""
    term.press(key)
    term.wait(text)
    term.settle(1.3)
    ticks = []
    for _n in range(6):
        run.now = time.time() - 1
        run.tick()
        ticks.append(term.read(1.0))
    assert max(ticks) <= BUDGET, ticks
    assert key == "k" or sum(ticks) > 500  # lamps change when their evidence does, not with the clock


def test_lamps_and_alerts_do_not_flicker(term: Terminal, run: FakeRun) -> None:
    """A loss that is NaN is said once, and costs no more bytes in the ticks that follow."""
    run.log(*[f"step {run.step} loss nan lr 0.0003"] * 2)
    term.wait("the loss is NaN", 10)
    term.settle(1.3)
    ticks = []
    for _n in range(5):
        run.now = time.time() - 1
        run.tick()
        run.log(f"step {run.step} loss nan lr 0.0003")
        ticks.append(term.read(1.0))
    assert "the loss is NaN" in term.text
    assert max(ticks) <= BUDGET, ticks


def test_end_rings_and_notifies_once(term: Terminal, run: FakeRun) -> None:
    run.log(*OOM.splitlines())
    run.end("failed", code=1, rank_code=1)
    term.wait("F failed", 10)
    term.settle(1.0)
    assert term.raw.count(b"\x1b]9;dstui: run llama-8b: failed DR103 gpu-oom-step\a") == 1


@pytest.mark.parametrize("key", ["o", "m"])
def test_an_hour_of_lines_in_half_a_minute(term: Terminal, run: FakeRun, key: str) -> None:
    """36,000 lines, two minutes of them a tick: the screen costs what it always costs, the process stays as it is."""
    term.press(key)
    term.settle(1.5)
    process = psutil.Process(term.child.pid)
    ticks, before = [], 0
    for n in range(30):
        run.now = time.time() - 1
        run.tick()
        run.log(*[f"step {run.step} loss {2 + i / 1000:.4f} lr 0.0003 tokens/s 24000" for i in range(1198)])
        ticks.append(term.read(1.0))
        if n == 10:
            before = process.memory_info().rss
    assert max(ticks) <= BUDGET, ticks
    assert process.memory_info().rss - before < 8 << 20
    assert f"{run.step}" in term.text or key == "m"


def test_nothing_changed_is_silence_and_so_is_an_ended_run(term: Terminal, run: FakeRun) -> None:
    assert term.read(3.0) <= 40  # the minute of `up 2m` may turn
    run.log(*OOM.splitlines())
    run.end("failed", code=1, rank_code=1)
    term.wait("F failed", 10)
    term.settle(0.5)
    assert term.read(6.0) == 0
    for view, text in (("l", "following"), ("p", "expected"), ("c", '"stage"'), ("d", "what to do")):
        term.press(view)
        term.wait(text)
        assert term.settle(0.4) < 10_000
        assert term.read(1.0) == 0


def test_low_profile_ticks_slower(run: FakeRun, tmp_path: Path) -> None:
    with watching(run, tmp_path, "--low") as t:
        t.settle(1.0)
        count = 0
        for _n in range(6):
            run.now = time.time() - 1
            run.tick()
            count += t.read(1.0)
        assert 0 < count <= 3 * BUDGET


def test_killed_tui_leaves_the_run_as_it_is(term: Terminal, run: FakeRun, tmp_path: Path) -> None:
    before = sorted(p.name for p in run.run.path.rglob("*"))
    term.kill(signal.SIGKILL)
    term.gone()
    assert store.state(run.run) == "running"
    assert sorted(p.name for p in run.run.path.rglob("*")) == before
    with watching(run, tmp_path) as again:
        again.press("q")
        assert again.gone() <= 2.0
        assert again.code == 0
        assert f"dstui watch {run.id}" in again.raw.decode()


def test_plain_c_locale_is_ascii(run: FakeRun, tmp_path: Path) -> None:
    with watching(run, tmp_path, env={"LANG": "C"}) as t:
        assert t.raw.isascii()
        for n in range(8):
            assert f"\n  {n}  " in t.text
