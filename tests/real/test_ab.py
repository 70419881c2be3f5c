"""A/B of real DeepSpeed runs on this machine's CPU, measured by the probe in each rank."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.examples import OFFLOADS, demo_config, tiny_gpt_script
from dstui.runs import ab, pace, store

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
def test_two_releases_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.18.9 prints no step line and hides the lines of comms_logger: all the same, both shares are there."""
    from .test_config_oracle_releases import place

    folder = place("0.18.9")
    if folder is None:
        pytest.skip("0.18.9 is the environment's own release")
    other = interpreter(tmp_path / "ds0189", str(folder), sysconfig.get_path("purelib"))
    a = config(tmp_path / "ds.json", 0)
    data = compared(capsys, "--config", a, "--python", sys.executable, "--python", str(other),
                    "--steps", "8", "--breakdown")  # fmt: skip
    first, second = data["runs"]
    assert second["deepspeed"] == "0.18.9" != first["deepspeed"] and data["ab"]["labels"][1] == "B ds0189"
    for side in (first, second):
        assert side["steps"] == 8 and side["step_time_from"] == "probe"
        assert 0 < side["communication"] < 1 and 0 < side["gradient_reduction"] < 1
    assert data["loss_gap"] < 1e-3 and data["verdicts"] and data["config"] == []


@pytest.mark.slow
def test_the_terminal_goes_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pseudo-terminal of a waiting `dstui ab --breakdown` is closed in the first run: the kernel hangs it up."""
    a, b = config(tmp_path / "plain.json", 0), config(tmp_path / "split.json", 1)
    words = ["ab", "--config", a, "--config", b, "--python", sys.executable, "--num-gpus", "2"]
    words += ["--steps", "6", "--breakdown", "--", str(tiny_gpt_script()), *SMALL]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "dstui", *words])
    said = b""
    while b"started" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    _pid, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 0
    found = ab.find()
    assert found.state == "running" and len(found.data["runs"]) == 1
    while found.state == "running":
        time.sleep(0.5)
    assert found.state == "finished"
    assert main(["ab", "--join", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(r["kind"], r["breakdown"]) for r in data["ab"]["runs"]] == [
        (0, False), (1, False), (0, True), (1, True)
    ]  # fmt: skip
    assert all(side["steps"] == 6 and 0 < side["communication"] < 1 for side in data["runs"])


@pytest.mark.slow
def test_the_controller_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL while real ranks train: they train on, to the probe's last step; no other run is started."""
    a, b = config(tmp_path / "plain.json", 0), config(tmp_path / "split.json", 1)
    words = ["ab", "--config", a, "--config", b, "--python", sys.executable, "--num-gpus", "2", "--detach"]
    assert main([*words, "--steps", "400", "--", str(tiny_gpt_script()), *SMALL]) == 0
    found = ab.find()
    while not found.data["runs"]:
        time.sleep(0.1)
    run = store.find_run(found.data["runs"][0]["run"])
    while not (run.path / "probe" / "rank-1.jsonl").exists():
        time.sleep(0.1)
    os.kill(found.data["controller"]["pid"], signal.SIGKILL)
    while found.state == "running":
        time.sleep(0.1)
    assert found.state == "lost"
    while not run.has_ended():
        time.sleep(0.5)
    assert store.state(run) == "finished" and store.list_runs() == [run]
    read = pace.read(run)
    assert read.total == 400 and read.source == "probe"
    capsys.readouterr()
    assert main(["ab", "--join"]) == 2
    assert "its controller was killed before a run of B split.json had ended" in capsys.readouterr().err


def interpreter(folder: Path, *packages: str) -> Path:
    """An interpreter of its own that finds its packages in these folders, in this order."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    (site / "all.pth").write_text("".join(f"{p}\n" for p in packages))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_one_config_under_two_interpreters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = interpreter(tmp_path / "other", sysconfig.get_path("purelib"))
    a = config(tmp_path / "ds.json", 1)
    data = compared(capsys, "--config", a, "--python", sys.executable, "--python", str(other), "--steps", "6")
    first, second = data["runs"]
    assert data["ab"]["pythons"] == [sys.executable, str(other)] and data["config"] == []
    assert first["deepspeed"] == second["deepspeed"] is not None
    assert first["steps"] == second["steps"] == 6 and data["loss_gap"] < 1e-3
