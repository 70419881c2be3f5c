"""From the first paint to a running training, by keys, on the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from dstui.runs import store
from dstui.runs.control import stop
from tests.pty.harness import Terminal

pytestmark = [pytest.mark.pty, pytest.mark.real]


@pytest.fixture(autouse=True)
def ops_of_its_own(isolated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are killed here while they build ops, which leaves locks."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the train extra")
def test_three_keys_in_one_packet_start_a_run_that_outlives_the_screen(tmp_path: Path) -> None:
    """Enter, A, Enter typed ahead: each key acts on the screen that the one before led to."""
    with Terminal(cwd=tmp_path, columns=100, rows=30) as t:
        t.wait("Training Python", 30)
        t.press("enter", "A", "enter")
        t.wait("rank 0", 90)
        runs = store.list_runs()
        assert len(runs) == 1
        run = runs[0]
        try:
            assert run.id in t.text
            os.kill(t.child.pid, signal.SIGKILL)
            t.gone()
            assert store.state(run) in ("starting", "running")
        finally:
            stop(run, now=True)
        assert store.state(run) == "stopped"


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the train extra")
def test_quitting_leaves_the_run_and_says_how_to_rejoin(tmp_path: Path) -> None:
    with Terminal(cwd=tmp_path, columns=100, rows=30) as t:
        t.wait("Training Python", 30)
        t.press("enter", "A", "enter")
        t.wait("rank 0", 90)
        run = store.list_runs()[0]
        try:
            t.press("ctrl+c")
            t.wait(f"does not reach the run {run.id}")
            t.press("q")
            assert t.gone() <= 2.0
            left = t.raw[t.raw.rfind(b"\x1b[?1049l") :]
            assert f"dstui watch {run.id}".encode() in left
            assert store.state(run) in ("starting", "running")
        finally:
            stop(run, now=True)
