from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstui.cli import main
from dstui.errors import DstuiError
from dstui.facts.model import Facts, Gpu, Host, Interpreter
from dstui.plain import demo
from dstui.runs.control import stop
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir, state

LOGS = Path(__file__).parent.parent / "data" / "logs"
REPO = Path(__file__).parent.parent.parent
TALKER = """
import os, sys, time
os.environ["RANK"] = "0"
for step in range(1, int(sys.argv[1]) + 1):
    print(f"step {step} loss {10 / step:.3f} lr 0.1", flush=True)
    time.sleep(float(sys.argv[2]))
if len(sys.argv) > 3:
    raise ValueError(sys.argv[3])
"""


def facts() -> Facts:
    return Facts(gpus=(), host=Host(cores_usable=2), interpreters=(Interpreter(sys.executable, "own"),))


def talk(tmp_path: Path, *args: str) -> RunDir:
    """A supervised process that talks like a training."""
    script = tmp_path / "talker.py"
    script.write_text(TALKER)
    spec = RunSpec(script=str(script), args=args, launcher="python", python=sys.executable, name="talk")
    return start(spec, facts(), preflight=False)


def over(run: RunDir) -> str:
    deadline = time.monotonic() + 20
    while state(run) in ("starting", "running") and time.monotonic() < deadline:
        time.sleep(0.05)
    return state(run)


def test_watch_follows_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = talk(tmp_path, "5", "0.3")
    assert main(["watch", run.id, "--plain"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
    assert "step 5" in out
    assert out.rstrip().endswith("finished after 5 steps")


def test_watch_tells_why_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = talk(tmp_path, "2", "0", "row 17 is too long")
    assert over(run) == "failed"
    assert main(["watch", "--plain"]) == 1
    out = capsys.readouterr().out
    assert "DR710 python-exception (certain)" in out
    assert "row 17 is too long" in out
    assert main(["watch", run.id, "--once"]) == 1


def test_watch_once_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = talk(tmp_path, "200", "0.1")
    try:
        deadline = time.monotonic() + 10
        shot = {}
        while not shot.get("step") and time.monotonic() < deadline:
            assert main(["watch", run.id, "--once", "--json"]) == 0
            shot = json.loads(capsys.readouterr().out)
        assert shot["schema_version"] == 1
        assert shot["state"] == "running"
        assert shot["step"] >= 1
        assert shot["loss"] <= 10
        assert main(["watch", run.id, "--once"]) == 0
        assert run.id in capsys.readouterr().out
    finally:
        stop(run, now=True)


def test_ctrl_c_leaves_the_run_alive(tmp_path: Path) -> None:
    run = talk(tmp_path, "300", "0.1")
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "dstui", "watch", run.id],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        )
        assert watcher.stdout is not None
        assert "step" in watcher.stdout.readline() + watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        _out, err = watcher.communicate(timeout=10)
        assert watcher.returncode == 130
        assert f"dstui watch {run.id}" in err
        assert state(run) == "running"
    finally:
        stop(run, now=True)
    assert main(["watch", run.id, "--plain"]) == 1


def test_watch_without_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--plain"]) == 2
    assert "no runs" in capsys.readouterr().err


def test_without_a_change_the_page_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(LOGS / "exit.log")]) == 0
    out = capsys.readouterr().out
    assert "DR711" in out and "what to do: see the last lines" in out and "what to change" not in out
    assert main(["diagnose", str(LOGS / "batch.log")]) == 0
    out = capsys.readouterr().out
    assert "what to change" in out and "what to do" not in out


def test_diagnose_a_log_a_run_and_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["diagnose", str(LOGS / "batch.log")]) == 0
    out = capsys.readouterr().out
    assert "DR301 batch-identity" in out
    assert "checkpoint 3 of 5: accumulation boundary" in out
    assert "batch.log:30" in out

    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 10, // ten\n "train_micro_batch_size_per_gpu": 4}')
    assert main(["diagnose", str(LOGS / "batch.log"), "--config", str(config), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fixes"][0]["edits"] == [{"op": "replace", "path": "/train_batch_size", "value": 8}]

    class Stdin:
        buffer = io.BytesIO((LOGS / "ok.log").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["diagnose", "-"]) == 0
    assert "no cause found" in capsys.readouterr().out

    run = talk(tmp_path, "1", "0", "boom")
    over(run)
    assert main(["diagnose", "last", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["outcome"], data["cause"]["code"], data["cause"]["certainty"]) == (
        "failed",
        "DR710",
        "certain",
    )

    assert main(["diagnose", str(tmp_path / "nothing.log")]) == 2


def parse(*words: str) -> RunSpec:
    import argparse

    parser = argparse.ArgumentParser()
    demo.configure(parser)
    return demo.demo_spec(parser.parse_args(list(words)), facts())


def test_demo_builds_the_run() -> None:
    spec = parse("--ranks", "2", "--stage", "3", "--offload", "both", "--steps", "7")
    assert spec.num_gpus == 2
    assert spec.config is not None
    zero = spec.config["zero_optimization"]
    assert (zero["stage"], zero["offload_param"], zero["offload_optimizer"]) == (
        3,
        {"device": "cpu"},
        {"device": "cpu"},
    )
    assert "bf16" not in spec.config and "fp16" not in spec.config
    assert spec.args[-1] == "7"
    assert Path(spec.script).is_file()
    assert "torch_adam" not in spec.config["optimizer"]["params"]  # offload is there to show CPU Adam
    spec = parse("--ranks", "2")
    assert spec.config is not None and spec.config["optimizer"]["params"]["torch_adam"] is True


def test_demo_is_predicted_like_any_run() -> None:
    import argparse

    from dstui.facts.model import Host, Interpreter

    packages = {"deepspeed": "0.19.8", "torch": "2.13.0"}
    machine = Facts(
        gpus=(),
        host=Host(ram_total=64 << 30, ram_available=60 << 30),
        interpreters=(Interpreter("/venv/bin/python", "active", packages=packages),),
    )
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    prediction = demo.demo_spec(parser.parse_args(["--ranks", "2", "--stage", "2"]), machine).prediction
    assert prediction is not None
    assert prediction["verdict"] == "fits"
    assert prediction["host"]["peak"]["expected"] > 1 << 29


@pytest.mark.parametrize(
    "words",
    [
        ("--stage", "2", "--offload", "both"),
        ("--stage", "0", "--offload", "optimizer"),
        ("--steps", "0"),
        ("--ranks", "0"),
    ],
)
def test_demo_refuses_what_cannot_be(words: tuple[str, ...]) -> None:
    with pytest.raises(DstuiError) as e:
        parse(*words)
    assert e.value.code == 2


def test_demo_takes_the_free_cards_and_their_precision() -> None:
    from dstui.facts.model import GpuProcess

    def gpu(i: int, capability: tuple[int, int], busy: bool) -> Gpu:
        processes = (GpuProcess(1, memory=1),) if busy else ()
        return Gpu(i, f"GPU-{i}", memory_total=80 << 30, compute_capability=capability, processes=processes)

    machine = Facts(gpus=(gpu(0, (8, 0), True), gpu(1, (8, 0), False), gpu(2, (9, 0), False)))
    assert demo.choose_devices(None, machine) == (("GPU-1", "GPU-2"), 2)
    assert demo.choose_devices(1, machine) == (("GPU-1",), 1)
    assert demo.choose_precision(machine) == "bf16"
    assert demo.choose_precision(Facts(gpus=(gpu(0, (7, 5), False),))) == "fp16"
    assert demo.choose_precision(Facts(gpus=())) == "fp32"
    with pytest.raises(DstuiError):
        demo.choose_devices(4, machine)
