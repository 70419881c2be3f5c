"""Progress that trainers keep in files of their own, and the pattern of a person."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstui.errors import DstuiError
from dstui.runs.events import Parser, step_pattern
from dstui.runs.spec import RunSpec
from dstui.runs.tail import split
from dstui.runs.trainer import TrainerFiles, output_folder, read_state
from dstui.runs.view import RunView
from tests.run_tools import FakeRun

ROWS = [
    {"epoch": 0.5, "grad_norm": 1.25, "learning_rate": 4e-05, "loss": 2.5, "step": 10},
    {
        "epoch": "1.0",
        "grad_norm": "1.5",
        "learning_rate": "2e-05",
        "loss": "2.25",
        "step": 20,
    },  # transformers 5
    {"epoch": 1.0, "eval_loss": 2.4, "eval_runtime": 1.0, "step": 20},
    {"epoch": 1.0, "train_loss": 2.4, "train_runtime": 9.0, "step": 20},
]
"""As ``TrainerState.save_to_json`` writes its ``log_history``."""


def test_a_trainer_state(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"global_step": 20, "max_steps": 100, "log_history": ROWS}, indent=2))
    events = read_state(file)
    assert [(e.kind, e.values.get("step"), e.values.get("loss")) for e in events] == [
        ("step", 10, 2.5),
        ("step", 20, 2.25),
        ("eval", None, None),
    ]
    assert events[0].values["total"] == 100 and events[2].values["eval_loss"] == 2.4
    for text in ("", "[1]", '{"log_history": 3}', '{"log_history": [1, {"loss": 2}]}'):
        file.write_text(text)
        assert read_state(file) == []
    assert read_state(tmp_path / "no") == []


def test_a_real_trainer_state(tmp_path: Path) -> None:
    callback = pytest.importorskip("transformers.trainer_callback")
    state = callback.TrainerState(max_steps=40, global_step=20, log_history=ROWS)
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    assert [e.kind for e in read_state(tmp_path / "trainer_state.json")] == ["step", "step", "eval"]


def test_files_are_followed_and_an_older_runs_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    old = out / "checkpoint-500"
    old.mkdir()
    (old / "trainer_state.json").write_text(json.dumps({"max_steps": 9, "log_history": ROWS}))
    os.utime(old / "trainer_state.json", (100, 100))
    files = TrainerFiles(out, since=1000.0)
    assert files.poll(2000.0) == []
    new = out / "checkpoint-20"
    new.mkdir()
    (new / "trainer_state.json").write_text(json.dumps({"max_steps": 100, "log_history": ROWS}))
    assert files.poll(2001.0) == []  # looked a moment ago
    assert len(files.poll(2010.0)) == 3
    assert files.poll(2020.0) == []  # unchanged
    row = '{"current_steps": %d, "total_steps": 100, "loss": 1.5, "lr": 1e-05, "epoch": 0.1, "throughput": 5000.5}\n'
    log = out / "trainer_log.jsonl"  # LLaMA-Factory's own log wins
    log.write_text(row % 30)
    assert [e.values["step"] for e in files.poll(2030.0)] == [30]
    with log.open("a") as f:
        f.write(row % 31)
    (event,) = files.poll(2030.5)
    assert (event.values["step"], event.values["tokens_per_second"]) == (31, 5000.5)
    files.close()


def test_where_the_trainer_writes(tmp_path: Path) -> None:
    manifest = {"cwd": "/w", "command": ["deepspeed", "t.py", "--output_dir", "out", "--bf16"]}
    assert output_folder(manifest, tmp_path) == Path("/w/out")
    assert output_folder({"cwd": "/w", "command": ["t.py", "--output_dir=/abs"]}, tmp_path) == Path("/abs")
    assert output_folder({"cwd": "/w", "command": ["llamafactory-cli", "train", "a.yaml"]}, tmp_path) is None
    (tmp_path / "a.yaml").write_text("model: x\noutput_dir: 'saves/a'  # here\n")
    assert output_folder({"cwd": "/w", "command": []}, tmp_path) == Path("/w/saves/a")


def test_a_pattern_of_a_person() -> None:
    pattern = r"\[(?P<step>\d+)\] L=(?P<loss>[\d.einf]+) lr=(?P<lr>\S+)"
    parser = Parser(pattern)
    lines = split(b"[7] L=2.5 lr=1e-4 zz\n[8] L=2.4 lr=1e-4\nnothing\n", 0, final=True)[0]
    events = parser.feed_all(lines)
    assert [(e.kind, dict(e.values)) for e in events] == [
        ("step", {"step": 7, "loss": 2.5, "lr": 1e-4, "source": "script"}),
        ("step", {"step": 8, "loss": 2.4, "lr": 1e-4, "source": "script"}),
    ]
    assert RunSpec("t.py", progress=pattern).to_json()["progress"] == pattern
    for bad, words in (
        ("(", "regular expression"),
        ("loss (.*)", "named groups"),
        ("(?P<lost>.)", "named groups"),
    ):
        with pytest.raises(DstuiError, match=words):
            step_pattern(bad)
        with pytest.raises(DstuiError):
            RunSpec("t.py", progress=bad)


def test_the_monitor_uses_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    fake = FakeRun(gpus=0, ranks=1, total=0)
    manifest = fake.run.manifest
    manifest["spec"] = {"progress": r"<(?P<step>\d+)> (?P<loss>[\d.]+)"}
    manifest["command"] = ["python", "t.py", "--output_dir", str(tmp_path / "out")]
    fake.run.manifest_path.write_text(json.dumps(manifest))
    fake.log("<5> 2.5", "<6> 2.25")
    view = RunView(fake.run)
    assert view.poll().losses == ((5, 2.5), (6, 2.25))
    view.close()
    folder = tmp_path / "out" / "checkpoint-20"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"max_steps": 100, "log_history": ROWS}))
    view = RunView(fake.run)
    shot = view.poll()
    assert (shot.losses[-1], shot.step) == ((20, 2.25), 20)
    view.close()
