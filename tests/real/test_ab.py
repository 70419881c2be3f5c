"""A/B of real DeepSpeed runs on this machine's CPU, measured by the probe in each rank."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.examples import OFFLOADS, demo_config, tiny_gpt_script

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]
SMALL = ["--hidden", "32", "--layers", "2", "--seq", "16", "--vocab", "64", "--steps", "1000"]


def config(path: Path, stage: int, offload: str = "none") -> str:
    assert offload in OFFLOADS
    data = demo_config(stage=stage, offload=offload, steps=30, precision="fp32", torch_adam=offload == "none")
    path.write_text(json.dumps(data))
    return str(path)


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    argv = ["ab", *words, "--num-gpus", "2", "--json", "--", str(tiny_gpt_script()), *SMALL]
    code = main(argv)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    data: dict[str, Any] = json.loads(shown.out)
    return data


def test_two_stages_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = config(tmp_path / "plain.json", 0), config(tmp_path / "split.json", 1)
    data = compared(capsys, "--config", a, "--config", b, "--python", sys.executable, "--steps", "6")
    assert [r["kind"] for r in data["ab"]["runs"]] == [0, 1]
    assert [side["steps"] for side in data["runs"]] == [6, 6] and data["loss_gap"] < 1e-3
    assert {c["path"]: c["values"] for c in data["config"]}["zero_optimization.stage"] == [0, 1]


@pytest.mark.slow
def test_stage_0_against_stage_3_with_all_offloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = config(tmp_path / "plain.json", 0), config(tmp_path / "offloaded.json", 3, "both")
    data = compared(capsys, "--config", a, "--config", b, "--python", sys.executable,
                    "--pairs", "2", "--steps", "12", "--breakdown")  # fmt: skip
    plain, offloaded = data["runs"]
    assert [(r["kind"], r["breakdown"]) for r in data["ab"]["runs"]] == [
        (0, False), (1, False), (1, False), (0, False), (0, True), (1, True)
    ]  # fmt: skip
    for side in (plain, offloaded):
        assert side["step_time_from"] == "probe" and side["steps"] == 12 and side["warmup_steps"] == 2
        assert side["steps_measured"] == 20 and side["host_peak"] > 300 << 20
        assert side["tokens_per_second"] > 0 and side["samples_per_second"] > 0
        assert 0 < side["gradient_reduction"] < 1 and 0 < side["communication"] < 1
    assert {c["path"]: c["values"] for c in data["config"]}["zero_optimization.stage"] == [0, 3]
    assert data["loss_gap"] < 1e-3, "the same model, data and arithmetic"
    assert "all_gather_into_tensor" in data["operations"][1] and data["operations"][0]
    (v,) = data["verdicts"]
    assert v["method"] == "pairs" and v["low"] < v["ratio"] < v["high"]


@pytest.mark.slow
def test_one_config_under_two_interpreters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    other = tmp_path / "other" / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "other" / "lib" / version / "site-packages"
    (site / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    a = config(tmp_path / "ds.json", 1)
    data = compared(capsys, "--config", a, "--python", sys.executable, "--python", str(other), "--steps", "6")
    first, second = data["runs"]
    assert data["ab"]["pythons"] == [sys.executable, str(other)] and data["config"] == []
    assert first["deepspeed"] == second["deepspeed"] is not None
    assert first["steps"] == second["steps"] == 6 and data["loss_gap"] < 1e-3
