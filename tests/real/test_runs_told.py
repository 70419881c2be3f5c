"""The supervisor of a real DeepSpeed run: names a stall without any screen, and leaves no lock of a dead op build."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.facts.detect import detect
from dstui.facts.model import Facts
from dstui.runs import store
from dstui.runs.control import stop
from dstui.runs.ops import find_locks
from dstui.runs.processes import marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
STALLS = Path(__file__).parent.parent / "data" / "scripts" / "stalls.py"
TINY = Path(__file__).resolve().parents[2] / "dstui" / "examples" / "tiny_gpt.py"
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
OFFLOAD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}


@pytest.fixture(scope="module")
def facts() -> Facts:
    return detect(python=sys.executable)


@pytest.fixture
def started(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    runs: list[RunDir] = []

    def go(script: Path, *args: str, **more: Any) -> RunDir:
        spec = RunSpec(str(script), args, num_gpus=2, cwd=str(tmp_path), **more)
        runs.append(start(spec, facts, preflight=False))
        return runs[-1]

    yield go
    for run in runs:
        stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def until(condition: Callable[[], Any], seconds: float, run: RunDir) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert run.exit is None, run.out_log.read_text()[-3000:]
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s\n" + run.out_log.read_text()[-3000:])


def of(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [e for e in run.events() if e["event"] == name]


@pytest.mark.slow
def test_a_stall_is_told_with_no_screen_open_and_so_is_its_end(
    started: Callable[..., RunDir], tmp_path: Path
) -> None:
    command = 'cat > "told-$DSTUI_EVENT"; echo "$DSTUI_EVENT $DSTUI_STATE $DSTUI_CAUSE" >> said'
    run = started(STALLS, "--how", "asleep", "--at", "60", "--seconds", "75", config=PLAIN, on_event=command)
    (named,) = until(lambda: of(run, "stall"), 400, run)
    assert (named["kind"], named["code"], named["ranks"]) == ("collective", "DR506", [1])
    until(lambda: (tmp_path / "told-stall").exists() and of(run, "hook"), 30, run)
    told = json.loads((tmp_path / "told-stall").read_text())
    assert told["stall"]["kind"] == "collective" and "rank 1" in told["message"]
    assert (run.heartbeat or {})["stall"]["code"] == "DR506"
    until(lambda: of(run, "stall_over"), 200, run)  # the rank wakes up and training goes on
    assert store.state(run) == "running"
    assert stop(run).state == "stopped"
    deadline = time.monotonic() + 30
    while len(of(run, "hook")) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    first, second = (tmp_path / "said").read_text().splitlines()
    assert first == "stall stalled DR506" and second.startswith("end stopped")


def test_a_stop_while_an_op_is_built_leaves_no_lock(
    started: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    run = started(TINY, "--steps", "5", "--hidden", "64", "--layers", "2", config=OFFLOAD)
    (lock, *_more) = until(lambda: find_locks(root), 200, run)
    assert lock.holder is not None
    assert stop(run, now=True).state == "stopped"
    assert find_locks(root) == []
    assert (run.exit or {})["locks_removed"] == [str(lock.path)]
    assert marked(run.id) == []
