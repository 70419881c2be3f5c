"""``dstui plan``: text, JSON, the file it writes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main

SMALL = ["--model", "qwen2.5-0.5b", "--seq", "512"]
CARDS = ["--gpus", "4x4090", "--ram", "128GiB"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer(capsys, *SMALL, *CARDS, "--global-batch", "32")
    assert code == 0 and data["schema_version"] == 1 and data["verdict"] == "fits" and data["goal"] == "fit"
    assert data["config"]["train_batch_size"] == 32
    assert data["batch"] == {"micro": 1, "accumulation": 8, "ranks": 4, "global": 32}
    assert all(set(c) == {"what", "value", "reason"} and c["reason"] for c in data["choices"])
    assert {c["what"] for c in data["choices"]} >= {
        "stage",
        "offload_optimizer",
        "micro_batch",
        "checkpointing",
    }
    parts = ("recompute", "communication", "pcie", "cpu_adam", "nvme")
    assert data["cost"]["lost"] == pytest.approx(sum(data["cost"][k] for k in parts))
    assert data["cost"]["samples"] == 32 and not data["cost"]["relative_only"]
    assert data["estimate"]["verdict"] == "fits" and data["changes"] == [] and data["rates"]


def test_the_config_is_on_stdout_and_the_reasons_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *CARDS]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["zero_optimization"]["stage"] == 0
    assert "Chosen" in out.err and "torch DDP" in out.err
    assert max(len(line) for line in out.err.splitlines()) <= 80


def test_it_writes_the_file_and_keeps_the_old_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("old")
    assert main(["plan", *SMALL, *CARDS, "-o", str(path)]) == 0
    out = capsys.readouterr()
    assert out.out == "" and str(path) in out.err
    assert "zero_optimization" in json.loads(path.read_text())
    assert (tmp_path / "ds_config.json.bak").read_text() == "old"
    assert main(["estimate", str(path), *SMALL, *CARDS]) == 0


def test_nothing_is_written_that_cannot_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    code = main(["plan", "--model", "llama-2-7b", "--gpus", "1x4090", "--ram", "32GiB", "-o", str(path)])
    out = capsys.readouterr()
    assert code == 1 and not path.exists() and out.out == ""
    assert "nothing fits this machine" in out.err and "LoRA" in out.err


def test_a_missing_fact_is_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    code = main(["plan", "--model", "llama-2-7b", "--gpus", "1x4090", "-o", str(path)])
    assert code == 2 and not path.exists()
    assert "--ram" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--global-batch", "0"],
        ["--global-batch", "7"],
        ["--network", "-1"],
        ["--micro-batch", "0"],
        ["--world-size", "0"],
        ["--network", "nan"],
        ["--quant", "nf4"],
    ],
)
def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert main(["plan", *SMALL, *CARDS, *wrong]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 2


def test_a_release_with_a_silent_fault_is_planned_around(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-2-7b", "--gpus", "4x4090", "--ram", "256GiB", "--global-batch", "64"]
    code, data = answer(capsys, *args, "--deepspeed", "0.16.0", "--goal", "speed")
    assert code == 0 and data["stage"] == 3
    assert any(
        r["what"] == "ZeRO stage 2 with the optimizer on cpu" and "DS805" in r["reason"]
        for r in data["rejected"]
    )


def test_what_check_warns_of_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-2-7b", "--gpus", "8xA100-80G", "--ram", "512GiB"]
    code, data = answer(capsys, *args, "--deepspeed", "0.16.0")
    assert code == 0 and [f["code"] for f in data["findings"]] == ["DS810"]
    assert answer(capsys, *args, "--deepspeed", "0.19.8")[1]["findings"] == []
    main(["plan", *args, "--deepspeed", "0.16.0"])
    assert "DS810" in capsys.readouterr().err


def test_what_is_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *CARDS, "--deepspeed", "9.9.9"]) == 0
    err = capsys.readouterr().err
    assert "9.9.9" in err and "512 tokens" in err


def test_more_ranks_than_cards_is_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    code = main(["plan", *SMALL, "--gpus", "8x80GiB", "--ram", "1TiB", "--world-size", "9", "-o", str(path)])
    assert code == 2 and not path.exists() and "--world-size" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ds_config.json"
    assert main(["plan", *SMALL, *CARDS, "-o", str(path)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and str(path) in out.err and "make the folder" in out.err
