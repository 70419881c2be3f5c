"""Real DeepSpeed runs on this machine's CPU, started, watched and judged by dstui."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from dstui.cli import main
from dstui.examples import tiny_gpt_script
from dstui.runs.diagnose import diagnose_run
from dstui.runs.store import find_run
from dstui.runs.view import RunView, Snapshot

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).parent.parent / "data" / "scripts"
PYTHON = ["--python", sys.executable]


def config(tmp_path: Path, **more: object) -> str:
    path = tmp_path / "ds.json"
    data = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        **more,
    }
    path.write_text(json.dumps(data))
    return str(path)


def last() -> Snapshot:
    return RunView(find_run("last")).poll()


@pytest.mark.slow
def test_the_demo_with_everything_offloaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--plain", "--ranks", "2", "--stage", "3", "--offload", "both", "--steps", "30"]
    assert main(["demo", *words, *PYTHON]) == 0
    out = capsys.readouterr().out
    assert "finished after 30 steps" in out
    shot = last()
    assert (shot.state, shot.step, shot.total, shot.stage, shot.world_size) == ("finished", 30, 30, 3, 2)
    losses = [y for _x, y in shot.losses]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    assert shot.batch == 8 * 2 * 2
    assert [r.rank for r in shot.ranks] == [0, 1]
    assert all(r.code == 0 and r.rss_peak and r.rss_peak > 200 << 20 for r in shot.ranks)
    assert shot.step_time is not None and len(shot.lrs) > 10
    run = find_run("last")
    assert diagnose_run(run).cause is None
    # The same directory plays back, packs into a bundle, and is compared with what the bundle unpacks to.
    assert main(["watch", "--replay", "--speed", "500", "--plain"]) == 0
    assert "finished after 30 steps" in capsys.readouterr().out
    bundle = tmp_path / "r.tar.gz"
    assert main(["report", run.id, "-o", str(bundle)]) == 0
    with tarfile.open(bundle) as tar:
        tar.extractall(tmp_path, filter="data")
    capsys.readouterr()
    assert main(["compare", run.id, str(tmp_path / run.id), "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)["runs"]
    same = ("run", "state", "steps", "loss", "host_peak", "seconds", "batch", "deepspeed")
    assert [a[k] for k in same] == [
        b[k] for k in same
    ]  # speeds may move by a sample: redaction moves the log's bytes
    assert a["steps"] == 30 and a["step_time"] > 0 and a["host_peak"] > 400 << 20


@pytest.mark.slow
def test_a_foreign_plain_script(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain_ds.py")
    assert (
        main(["run", "--config", config(tmp_path), "--num-gpus", "2", *PYTHON, "--wait", "--", script]) == 0
    )
    shot = last()
    assert shot.state == "finished"
    assert shot.loss is not None and shot.step is not None and shot.step > 20
    assert shot.losses[-1][1] < shot.losses[0][1]


def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    path = tmp_path / "hf.json"
    path.write_text(json.dumps(auto))
    words = [
        "--engine",
        "hf",
        "--config",
        str(path),
        "--num-gpus",
        "2",
        *PYTHON,
        "--wait",
        "--",
        str(tiny_gpt_script().with_name("hf_trainer_tiny.py")),
    ]
    arguments = f"--output_dir {tmp_path}/out --max_steps 12 --logging_steps 1 --learning_rate 3e-3 --use_cpu --report_to none --save_strategy no"
    assert main(["run", *words, *arguments.split()]) == 0
    shot = last()
    assert (shot.state, shot.step, shot.total) == ("finished", 12, 12)
    assert len(shot.losses) == 12 and shot.losses[-1][1] < shot.losses[0][1]
    assert shot.grad_norm is not None
    assert "trained by DeepSpeedEngine on 2 rank(s)" in "\n".join(shot.log)


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("raise", {"DR710"}),
        pytest.param("kill", {"DR721", "DR401"}, marks=pytest.mark.slow),  # DR401: the kernel tells no count
        pytest.param("exit", {"DR711"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_fails_is_judged_with_certainty(tmp_path: Path, how: str, codes: set[str]) -> None:
    words = [
        "--config",
        config(tmp_path, train_micro_batch_size_per_gpu=4),
        "--num-gpus",
        "2",
        *PYTHON,
        "--wait",
    ]
    assert main(["run", *words, "--", str(SCRIPTS / "failing.py"), "--how", how]) == 1
    shot = last()
    assert shot.state == "failed"
    assert shot.ending is not None and shot.ending.cause in codes
    if how == "kill":
        assert shot.ending.signal == "SIGKILL"
    else:
        assert shot.ending.certainty == "certain"
    found = diagnose_run(find_run("last"))
    assert found.evidence


def test_a_refused_config(tmp_path: Path) -> None:
    bad = config(tmp_path, zero_optimization={"stage": 2, "overlap_com": True})
    words = ["--config", bad, "--num-gpus", "2", *PYTHON, "--no-preflight", "--wait"]
    assert main(["run", *words, "--", str(SCRIPTS / "failing.py"), "--how", "ok"]) == 1
    found = diagnose_run(find_run("last"))
    assert found.cause is not None
    assert (found.cause.code, found.cause.certainty) == ("DR705", "certain")
    assert [dict(e) for f in found.fixes for e in f.edits] == [
        {"op": "remove", "path": "/zero_optimization/overlap_com"}
    ]
