"""Each stall that a CPU can show, provoked for real, and named; a silent healthy run is left in peace."""

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
from dstui.runs import stall, state
from dstui.runs.control import stop
from dstui.runs.diagnose import diagnose_run
from dstui.runs.processes import marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir
from dstui.runs.view import RunView, Snapshot

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent.parent / "data" / "scripts" / "stalls.py"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}


@pytest.fixture(scope="module")
def facts() -> Facts:
    return detect(python=sys.executable)


@pytest.fixture
def started(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    """Starts a run of the script; the waits that a person would be given are shortened, the evidence is not."""
    monkeypatch.setattr(state, "NAMED_SECONDS", 4.0)
    monkeypatch.setattr(state, "STALL_SECONDS", 8.0)
    monkeypatch.setattr(stall, "WINDOW", 10.0)
    monkeypatch.setattr(stall, "FEWEST", 6)
    runs: list[RunDir] = []

    def go(how: str, *args: str, config: dict[str, Any] = CONFIG, **more: Any) -> RunDir:
        spec = RunSpec(
            str(SCRIPT),
            ("--how", how, *args),
            config={**CONFIG, **config},
            num_gpus=2,
            cwd=str(tmp_path),
            **more,
        )
        runs.append(start(spec, facts, preflight=False))
        return runs[-1]

    yield go
    for run in runs:
        stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def until_stalled(run: RunDir, seconds: float = 200) -> Snapshot:
    view = RunView(run)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            shot = view.poll()
            assert not shot.over, run.out_log.read_text()[-3000:]
            if shot.state == "stalled":
                return shot
            time.sleep(0.5)
    finally:
        view.close()
    raise AssertionError("not stalled:\n" + run.out_log.read_text()[-2000:] + _samples(run))


def _samples(run: RunDir) -> str:
    return "\n".join((run.samples_dir / "1s.jsonl").read_text().splitlines()[-12:])


def named(run: RunDir) -> stall.Stall:
    shot = until_stalled(run)
    assert shot.stall is not None
    found = diagnose_run(run)
    assert (found.outcome, found.cause and found.cause.code) == ("stalled", shot.stall.code)
    return shot.stall


@pytest.mark.slow
def test_a_data_set_that_blocks(started: Callable[..., RunDir]) -> None:
    found = named(started("loader"))
    assert (found.kind, found.code, found.ranks, found.how) == ("data-loader", "DR505", (0, 1), "sleep")


@pytest.mark.slow
def test_workers_that_are_slow(started: Callable[..., RunDir]) -> None:
    found = named(started("workers"))
    assert (found.kind, found.ranks, found.how) == ("data-loader", (0, 1), "poll"), found


@pytest.mark.slow
def test_one_rank_asleep(started: Callable[..., RunDir]) -> None:
    found = named(started("asleep"))
    assert (found.kind, found.code, found.ranks, found.how) == ("collective", "DR506", (1,), "sleep")


@pytest.mark.slow
def test_unequal_data(started: Callable[..., RunDir]) -> None:
    found = named(started("unequal"))
    assert (found.kind, found.ranks) == ("collective", ())


@pytest.mark.slow
def test_a_slow_checkpoint(started: Callable[..., RunDir]) -> None:
    found = named(started("checkpoint"))
    assert (found.kind, found.code) == ("checkpoint", "DR902")
    assert found.path is not None and found.path.endswith("global_step40/mp_rank_00_model_states.pt")


@pytest.mark.slow
def test_a_silent_healthy_run(started: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed 0.17.6-0.19.2: no step line, no file of the monitor."""
    run = started("silent", instrument=False)
    view = RunView(run)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shot = view.poll()
        assert shot.state in ("starting", "running"), (shot.stall, _samples(run))
        time.sleep(0.5)
    assert "step" not in run.out_log.read_text().rpartition("launch")[2]
    view.close()
    assert diagnose_run(run).cause is None


def test_a_dead_builds_lock(started: Callable[..., RunDir], tmp_path: Path, facts: Facts) -> None:
    """Refused by preflight; started all the same it is named while it waits, and goes on when the lock is deleted."""
    from dstui.runs.preflight import preflight

    extensions = tmp_path / "ext"
    lock = extensions / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    env = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    spec = RunSpec(str(SCRIPT), ("--how", "loader"), config=CONFIG, num_gpus=2, env=env)
    problem = next(p for p in preflight(spec, facts) if p.code == "op-lock-stale")
    assert problem.severity == "error" and f"rm {lock}" in problem.hint
    run = started("loader", "--at", "100000", env=env)
    found = named(run)
    assert (found.kind, found.code, found.path, found.ranks) == ("op-lock", "DR708", str(lock), (0, 1))
    deadline = time.monotonic() + 120
    while True:  # another process, which waits as long as a person would have to
        listed = json.loads(_verb("runs", "--json"))["runs"][0]
        if listed["stall"] is not None or time.monotonic() > deadline:
            break
    assert (listed["state"], listed["stall"]["code"]) == ("stalled", "DR708")
    assert f"rm {lock}" in _verb("watch", "--once", run.id)
    lock.unlink()
    view = RunView(run)
    deadline = time.monotonic() + 30
    while view.poll().state == "stalled" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert view.poll().state != "stalled"


def _verb(*words: str) -> str:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "dstui", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
