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
    ],
)
def test_the_log_of_a_failure(name: str, code: str) -> None:
    found = diagnose(DATA / "logs" / "gpu" / f"{name}.log")
    assert found.cause is not None and found.evidence
    assert found.cause.code == code
    assert found.cause.certainty != "certain"


def replay(name: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A living run with the log, config and first ``seconds`` of samples of a recorded one, ending now."""
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    head, *rows = [json.loads(x) for x in (GPU / name / "1s.jsonl").read_text().splitlines()]
    begin = rows[0]["t"]
    rows = [r for r in rows if r["t"] <= begin + seconds]
    fake = FakeRun(gpus=1, ranks=1, total=0)
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
