"""Runs on the real thing: two gloo ranks of DeepSpeed ZeRO-3 with CPU offload, started, hurt and ended."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.facts.detect import detect
from dstui.facts.model import Facts
from dstui.runs import shm, store
from dstui.runs.control import orphans, stop
from dstui.runs.processes import Process, alive, descendants, marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

TINY = Path(__file__).resolve().parents[2] / "dstui" / "examples" / "tiny_gpt.py"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}
SMALL = ("--hidden", "64", "--layers", "2")


@pytest.fixture(scope="module")
def facts() -> Facts:
    return detect(python=sys.executable)


@pytest.fixture
def started(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    """Starts runs and ends whatever a test leaves behind."""
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    runs: list[RunDir] = []

    def go(
        steps: int = 1_000_000, *, script: str = str(TINY), before: tuple[str, ...] = (), **more: Any
    ) -> RunDir:
        words = (*before, "--steps", str(steps), *SMALL)
        spec = RunSpec(script, words, config=CONFIG, num_gpus=2, cwd=str(tmp_path), **more)
        runs.append(start(spec, facts))
        return runs[-1]

    yield go
    for run in runs:
        stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], seconds: float, what: str, run: RunDir) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds} s\n" + run.out_log.read_text()[-3000:])


def training(run: RunDir) -> dict[int, Process]:
    """Waits until it trains; the ranks' processes. A cold op cache builds for a minute or two."""
    wait_for(lambda: "step 5 " in run.out_log.read_text() or run.exit, 300, "step 5", run)
    assert run.exit is None, run.out_log.read_text()[-3000:]

    def both() -> Any:
        beat = run.heartbeat or {}
        return beat if len(beat.get("ranks", {})) == 2 else None

    beat = wait_for(both, 10, "two ranks in the heartbeat", run)
    starts = dict(beat["processes"])
    return {int(rank): Process(pid, starts[pid]) for rank, pid in beat["ranks"].items()}


def ended(run: RunDir, seconds: float = 60) -> dict[str, Any]:
    return wait_for(lambda: run.exit, seconds, "exit.json", run)


def goes_on(run: RunDir) -> None:
    size = run.out_log.stat().st_size
    wait_for(lambda: run.out_log.stat().st_size > size + 200, 20, "new log lines", run)
    assert store.state(run) == "running"


def _tail(run: RunDir) -> str:
    return run.out_log.read_text()[-6000:]


def nothing_left(run: RunDir) -> None:
    assert marked(run.id) == []


@pytest.mark.slow
def test_finishes(started: Callable[..., RunDir]) -> None:
    run = started(steps=4)
    last = ended(run, 300)
    assert (last["outcome"], last["code"], last["rank_code"]) == ("finished", 0, None), _tail(run)
    assert [(r["rank"], r["code"]) for r in last["ranks"]] == [(0, 0), (1, 0)]
    assert store.state(run) == "finished"
    assert "step 4 loss" in run.out_log.read_text()
    assert list(run.metrics_dir.rglob("*.csv")), "csv_monitor wrote nothing into the run"
    nothing_left(run)


def test_killed_rank_is_named(started: Callable[..., RunDir]) -> None:
    run = started()
    ranks = training(run)
    send(ranks[1], signal.SIGKILL)
    last = ended(run)
    assert (last["outcome"], last["code"], last["rank_code"], last["first_rank"]) == ("failed", 247, -9, 1)
    assert last["signal"] == "SIGKILL"
    nothing_left(run)
    # 66 MiB a rank of shared memory, which DeepSpeed leaves behind
    port = run.manifest["master_port"]
    assert [p for p in shm.FOLDER.glob("deepspeed_allreduce_buffer_*") if f"_{port}_" in p.name] == []
    freed = [
        x
        for x in map(json.loads, run.events_path.read_text().splitlines())
        if x["event"] == "shared_memory_freed"
    ]
    assert [x["files"] for x in freed] == [2]


def test_terminal_dies_and_sighup_to_everything(
    started: Callable[..., RunDir], tmp_path: Path, facts: Facts
) -> None:
    """Started by `dstui run` under a shell on a pty; the pty goes, the shell is killed, SIGHUP rains."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    command = [
        sys.executable, "-m", "dstui", "run", "--json", "--config", str(config), "--num-gpus", "2",
        "--python", sys.executable, "--", str(TINY), "--steps", "1000000", *SMALL,
    ]  # fmt: skip
    pid, master = pty.fork()
    if pid == 0:
        shell = ["/bin/sh", "-c", " ".join(command) + f" > {tmp_path}/answer; exec sleep 600"]
        os.execv(shell[0], shell)
    answer = tmp_path / "answer"
    deadline = time.monotonic() + 30
    while not (answer.exists() and answer.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.1)
    run = RunDir(Path(json.loads(answer.read_text())["dir"]))
    try:
        ranks = training(run)
        os.close(master)  # the terminal hangs up
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        goes_on(run)
        supervisor = run.process("supervisor")
        assert supervisor is not None
        everything = [supervisor, *descendants(supervisor.pid)]
        assert len(everything) >= 5  # supervisor, runner, launch, two ranks
        for p in everything:
            send(p, signal.SIGHUP)
        goes_on(run)
        assert all(alive(p) for p in ranks.values())
        for p in everything:
            assert os.getsid(p.pid) != os.getsid(0)
        result = stop(run)
        assert result.ended and result.state == "stopped"
        assert not any(alive(p) for p in ranks.values())
        deadline = time.monotonic() + 10  # the supervisor still frees what the ranks left, then goes
        while any(alive(p) for p in everything) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(alive(p) for p in everything)
        nothing_left(run)
        assert (run.exit or {})["stopped_by"]["pid"] == os.getpid()
    finally:
        stop(run, now=True)


@pytest.mark.slow
def test_killed_launch_does_not_read_as_success(started: Callable[..., RunDir]) -> None:
    """DeepSpeed's runner exits 0 when its `launch` is killed by SIGKILL."""
    run = started()
    ranks = training(run)
    launcher = run.process("launcher")
    assert launcher is not None
    children = [p for p in descendants(launcher.pid) if p not in ranks.values()]
    launch = next(p for p in children if b"deepspeed.launcher.launch" in _cmdline(p.pid))
    send(launch, signal.SIGKILL)
    last = ended(run)
    assert last["outcome"] == "failed"
    assert last["code"] == 0
    assert "was killed" in last["reason"] and "rank(s) 0, 1 still ran" in last["reason"]
    assert {x["rank"] for x in last["leftovers"]} == {0, 1}
    assert not any(alive(p) for p in ranks.values())
    nothing_left(run)


def _cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_runner_alone_terminated(started: Callable[..., RunDir]) -> None:
    """SIGTERM to DeepSpeed's runner alone leaves launch and ranks behind: they are ended, it failed."""
    run = started()
    ranks = training(run)
    launcher = run.process("launcher")
    assert launcher is not None
    send(launcher, signal.SIGTERM)
    last = ended(run)
    assert last["outcome"] == "failed" and last["launcher_signal"] == "SIGTERM"
    assert not any(alive(p) for p in ranks.values())
    nothing_left(run)


@pytest.mark.slow
def test_a_stop_leaves_ranks_their_time_and_now_does_not(
    started: Callable[..., RunDir], tmp_path: Path
) -> None:
    """DeepSpeed's runner dies of the first SIGINT; ranks that ignore it go on until the ladder's own next step."""
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import runpy, signal, sys\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        f"sys.argv[0] = {str(TINY)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    run = started(script=str(stubborn), before=("--deepspeed", "--deepspeed_config", "{config}"))
    ranks = training(run)
    launcher = run.process("launcher")
    assert launcher is not None
    assert not stop(run, timeout=0).ended
    wait_for(lambda: not alive(launcher), 20, "the runner's end", run)
    goes_on(run)
    assert all(alive(p) for p in ranks.values())
    assert stop(run, now=True).state == "stopped"
    last = ended(run)
    assert (last["outcome"], [r["code"] for r in last["ranks"]]) == ("stopped", [-9, -9])
    names = [x["signal"] for x in run.events() if x["event"] == "signal"]
    assert names == ["SIGINT", "SIGTERM", "SIGKILL"]
    nothing_left(run)


def test_killed_supervisor_is_lost_then_adopted(started: Callable[..., RunDir]) -> None:
    run = started()
    ranks = training(run)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    send(supervisor, signal.SIGKILL)
    wait_for(lambda: store.state(run) == "lost", 10, "lost", run)
    size = run.out_log.stat().st_size
    wait_for(lambda: run.out_log.stat().st_size > size + 200, 20, "the ranks go on", run)
    assert all(alive(p) for p in ranks.values())
    assert set(ranks.values()) <= set(orphans(run))
    removed = _dstui("rm", run.id)
    assert removed.returncode == 2 and "not removed" in removed.stderr and run.path.exists()
    listed = json.loads(_dstui("runs", "--json").stdout)["runs"][0]
    assert listed["state"] == "running"  # this call took it over
    sizes = _samples(run)
    goes_on(run)
    wait_for(lambda: _samples(run) > sizes + 2, 20, "samples go on", run)
    assert set((run.heartbeat or {})["ranks"].values()) == {p.pid for p in ranks.values()}
    adopter = run.process("supervisor")
    assert adopter is not None and adopter != supervisor
    send(adopter, signal.SIGKILL)  # and a lost run can also be ended without one
    wait_for(lambda: store.state(run) == "lost", 10, "lost again", run)
    result = stop(run)
    assert result.ended and result.state == "lost" and set(result.killed) >= {p.pid for p in ranks.values()}
    assert run.exit is None
    nothing_left(run)
    _dstui("runs")  # writes the end that nobody saw
    last = ended(run)
    assert (last["outcome"], last["code"]) == ("lost", None)  # no code is invented
    port = run.manifest["master_port"]
    assert [p for p in shm.FOLDER.glob("deepspeed_allreduce_buffer_*") if f"_{port}_" in p.name] == []


def _dstui(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dstui", *words], capture_output=True, text=True, check=False
    )


def _samples(run: RunDir) -> int:
    return len((run.samples_dir / "1s.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_torchrun_survives_sighup_and_names_the_killed_rank(started: Callable[..., RunDir]) -> None:
    run = started(launcher="torchrun")
    ranks = training(run)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    if any("--signals-to-handle" in a for a in run.manifest["command"]):
        for p in descendants(supervisor.pid):
            send(p, signal.SIGHUP)
        goes_on(run)
    send(ranks[0], signal.SIGKILL)
    last = ended(run)
    assert (last["outcome"], last["rank_code"], last["first_rank"]) == ("failed", -9, 0)
    assert last["code"] == 1  # torchrun's own
    nothing_left(run)


def test_deleted_log_goes_on(started: Callable[..., RunDir]) -> None:
    run = started()
    training(run)
    run.out_log.unlink()
    wait_for(lambda: run.out_log.exists() and "step " in run.out_log.read_text(), 20, "a new log", run)
    first = run.out_log.read_text()
    assert "step 5 " in first  # what was in the deleted file is not lost either
    goes_on(run)
    assert any(json.loads(line)["event"] == "log_gap" for line in run.events_path.read_text().splitlines())
    assert stop(run).state == "stopped"
    text = run.out_log.read_text()
    steps = [int(line.split()[1]) for line in text.splitlines() if line.startswith("step ")]
    assert steps == list(range(1, len(steps) + 1))  # no line twice, none missing
