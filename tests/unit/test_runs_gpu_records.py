"""Runs recorded on an H200 (``tests/tools/provoke_gpu.py``): what the samples of a real stall say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstui.runs import stall, state
from dstui.runs.diagnose import diagnose, diagnose_run
from dstui.runs.view import RunView
from tests.run_tools import FakeRun

DATA = Path(__file__).parent.parent / "data"
GPU = DATA / "gpu"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("oom-forward", "DR102"),
        ("oom-init", "DR101"),
        ("oom-offload-forward", "DR102"),
        ("scale-floor", "DR602"),
        ("nan-fp16", "DR601"),
        ("nan-fp16-dynamic", "DR602"),
        ("no-nvcc-fused-adam", "DR702"),
        ("wrong-arch", "DR703"),
        ("client-optimizer", "DR201"),
        ("index", "DR801"),
        ("dtype", "DR603"),
        ("host-oom", "DR401"),
        ("killed", "DR401"),  # a log alone cannot tell who killed it
        ("rank-killed", "DR401"),
        ("oom-step", "DR103"),
        ("oom-step-2", "DR103"),
        ("scale-floor-2", "DR602"),
        ("no-card", "DR707"),
        ("nccl-timeout", "DR501"),
        ("fewer-batches", "DR501"),
        ("fewer-batches-stage3", "DR501"),
        ("oom-whole-card", "DR102"),
        ("oom-occupied", "DR104"),
        ("rank-raises", "DR710"),
    ],
)
def test_the_log_of_a_failure(name: str, code: str) -> None:
    found = diagnose(DATA / "logs" / "gpu" / f"{name}.log")
    assert found.cause is not None and found.evidence
    assert found.cause.code == code
    assert found.cause.certainty != "certain"


def test_a_limit_of_the_process_is_not_called_the_size_of_the_card() -> None:
    found = diagnose(DATA / "logs" / "gpu" / "oom-step.log")
    assert found.cause is not None
    assert "0.2 GiB more were asked for, this process may take 7.0 GiB of the card" in found.cause.detail


def replay(
    name: str,
    seconds: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cards: int = 1,
    longer: float = 0,
) -> FakeRun:
    """A living run with the log, config and first ``seconds`` of samples of a recorded one, ending now.

    ``longer``: the last ten samples go on for that many seconds, as a wait does that nobody ends."""
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    head, *rows = [json.loads(x) for x in (GPU / name / "1s.jsonl").read_text().splitlines()]
    begin = rows[0]["t"]
    rows = [r for r in rows if r["t"] <= begin + seconds]
    still, end = rows[-10:], rows[-1]["t"]
    rows += [{**still[i % 10], "t": end + 1 + i} for i in range(round(longer))]
    fake = FakeRun(gpus=cards, ranks=cards, total=0)
    late = fake.now - rows[-1]["t"]
    sized = [r for r in rows if r.get("sizes")]
    size = sized[-1]["sizes"][0]
    last = next(r["t"] for r in sized if r["sizes"][0] == size)
    fake.run.out_log.write_bytes((GPU / name / "out.log").read_bytes()[:size])
    os.utime(fake.run.out_log, (last + late, last + late))
    fake.run.config_path.write_text((GPU / name / "config.json").read_text())
    manifest = fake.run.manifest
    manifest["created_at"] = manifest["started_at"] = fake.now - 300
    fake.run.manifest_path.write_text(json.dumps(manifest))
    lines = [head, *({**r, "t": r["t"] + late} for r in rows)]
    (fake.run.samples_dir / "1s.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return fake


def test_an_optimizer_step_in_host_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 micro steps of 1.4 s, then one step of 3.0e9 offloaded parameters with a single thread: 47 s."""
    monkeypatch.setattr(state, "NAMED_SECONDS", 4.0)
    monkeypatch.setattr(state, "STALL_SECONDS", 20.0)
    working = replay("offload-stall", 45, tmp_path / "a", monkeypatch)
    shot = RunView(working.run).poll()
    assert (shot.state, shot.stall) == ("running", None)
    waiting = replay("offload-stall", 79, tmp_path / "b", monkeypatch)
    shot = RunView(waiting.run).poll()
    assert shot.state == "stalled" and shot.stall is not None
    assert (shot.stall.kind, shot.stall.code, shot.stall.ranks) == ("offload", "DR202", (0,))
    found = diagnose_run(waiting.run)
    assert found.cause is not None and (found.outcome, found.cause.code) == ("stalled", "DR202")
    edits = [dict(e) for f in found.fixes for e in f.edits]
    assert {"op": "remove", "path": "/zero_optimization/offload_optimizer"} in edits
    assert {"op": "replace", "path": "/gradient_accumulation_steps", "value": 120} in edits
    assert stall.WINDOW == 20.0  # the evidence was not shortened


@pytest.mark.parametrize(
    ("name", "seconds", "ranks", "how"),
    [
        ("asleep", 60, (1,), "sleep"),  # after 40 steps
        ("never-came", 30, (1,), "sleep"),  # after 3 steps within one second; then other jobs warm the cards
        ("fewer-batches", 30, (), ""),  # rank 1 is in a barrier, rank 0 in an all-reduce
    ],
)
def test_two_cards_in_collectives_that_never_end(
    name: str,
    seconds: float,
    ranks: tuple[int, ...],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded on cards that the three jobs shared: both spin in every one of them, whoever is away."""
    fake = replay(name, seconds, tmp_path, monkeypatch, cards=2, longer=30)
    shot = RunView(fake.run).poll()
    assert shot.stall is not None
    assert (shot.state, shot.stall.kind, shot.stall.code) == ("stalled", "collective", "DR506")
    assert (shot.stall.ranks, shot.stall.how) == (ranks, how)
    found = diagnose_run(fake.run)
    assert found.cause is not None and (found.outcome, found.cause.code) == ("stalled", "DR506")
    assert found.cause.certainty == "likely" and found.evidence


TIMED_OUT = [
    ("nccl-timeout", "rank 1, which sleeps"),
    ("fewer-timeout", "no complaint from rank 1"),  # it left the loop and waits in a barrier
    ("fewer-timeout-stage3", "different operations: ALLREDUCE (1), _ALLGATHER_BASE (1048576)"),
]


@pytest.mark.parametrize(("name", "detail"), TIMED_OUT)
def test_a_collective_that_timed_out_is_named_before_its_process_ends(
    name: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog spoke after 10 s; its process stays a minute longer to write what it knows."""
    fake = replay(name, 55, tmp_path, monkeypatch, cards=2)
    shot = RunView(fake.run).poll()
    assert shot.state == "stalled" and shot.stall is not None
    assert (shot.stall.code, shot.stall.timed_out) == ("DR501", True)
    assert "timed out" in shot.stall.text
    found = diagnose_run(fake.run)
    assert found.cause is not None and (found.outcome, found.cause.code) == ("stalled", "DR501")
    assert detail in found.cause.detail and "waited 10 s" in found.cause.detail
    assert "Watchdog caught collective operation timeout" in found.evidence[0].text
    assert any(e.file == "samples/1s.jsonl" for e in found.evidence)
    early = replay(name, 20, tmp_path / "early", monkeypatch, cards=2)
    assert diagnose_run(early.run).cause is None


@pytest.mark.parametrize(("name", "detail"), TIMED_OUT)
@pytest.mark.parametrize("outcome", ["stopped", "lost"])
def test_the_same_runs_once_they_are_over(
    name: str, detail: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody stopped them while they hung, or their supervisor was gone: the time-out is still the cause."""
    fake = replay(name, 60, tmp_path, monkeypatch, cards=2)
    fake.run.out_log.write_bytes((GPU / name / "out.log").read_bytes())
    by = {"user": "ann", "host": "n1"} if outcome == "stopped" else None
    record = {"schema_version": 1, "outcome": outcome, "code": None, "rank_code": None, "stopped_by": by}
    fake.run.exit_path.write_text(json.dumps(record))
    found = diagnose_run(fake.run)
    assert found.cause is not None and (found.outcome, found.cause.code) == (outcome, "DR501")
    assert detail in found.cause.detail
    if outcome == "stopped":
        assert next(o.code for o in found.others) == "DR720"
        ending = RunView(fake.run).poll().ending
        assert ending is not None and (ending.text, ending.cause) == ("stopped by ann", "DR501")


def test_one_rank_waits_in_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs kept its card at 100 %, cool, while it updated offloaded weights on the host."""
    monkeypatch.setattr(state, "NAMED_SECONDS", 4.0)
    monkeypatch.setattr(state, "STALL_SECONDS", 20.0)
    fake = replay("offload-shared", 60, tmp_path / "a", monkeypatch, longer=15)
    shot = RunView(fake.run).poll()
    assert shot.state == "stalled" and shot.stall is not None
    assert (shot.stall.kind, shot.stall.code, shot.stall.ranks) == ("offload", "DR202", (0,))
    plain = replay("offload-shared", 60, tmp_path / "b", monkeypatch, longer=15)
    config = json.loads(plain.run.config_path.read_text())
    del config["zero_optimization"]["offload_optimizer"]
    plain.run.config_path.write_text(json.dumps(config))
    assert RunView(plain.run).poll().stall is None, "busy on its host, a busy card: it may well be working"


@pytest.mark.parametrize("name", ["asleep", "never-came", "fewer-batches"])
def test_the_same_runs_while_they_still_worked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = replay(name, 10, tmp_path, monkeypatch, cards=2)
    assert RunView(fake.run).poll().stall is None


def test_a_kill_that_the_kernel_did_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its exit record the killed rank of two is no lack of memory, not even a possible one."""
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    fake = FakeRun(gpus=2, ranks=2, total=0)
    fake.run.out_log.write_bytes((DATA / "logs" / "gpu" / "rank-killed.log").read_bytes())
    ended = {
        "schema_version": 1, "outcome": "failed", "code": 247, "signal": "SIGKILL", "rank_code": -9, "first_rank": 1,
        "reason": "rank 1 killed by SIGKILL (launcher exit code 247)", "oom_kills": {"cgroup": 0, "system": 0},
    }  # fmt: skip
    fake.run.exit_path.write_text(json.dumps(ended))
    found = diagnose_run(fake.run)
    assert found.cause is not None and (found.cause.code, found.cause.certainty) == ("DR721", "likely")
    assert "DR401" not in [o.code for o in found.others]
    for count, certainty in (({"cgroup": 1, "system": 1}, "certain"), ({"cgroup": 0, "system": 1}, "likely")):
        fake.run.exit_path.write_text(json.dumps({**ended, "oom_kills": count}))
        found = diagnose_run(fake.run)
        assert found.cause is not None and (found.cause.code, found.cause.certainty) == ("DR401", certainty)
