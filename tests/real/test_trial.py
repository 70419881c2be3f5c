"""``dstui trial`` on the real thing: DeepSpeed on gloo ranks, under each launcher, with people's own scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui import cli
from dstui.facts.detect import detect
from dstui.runs import calibration, probe, store, trial
from dstui.runs import measured as measuring
from dstui.runs.control import stop
from dstui.runs.measured import FOLDER
from dstui.runs.processes import marked, send
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "dstui" / "examples"
SCRIPTS = REPO / "tests" / "data" / "scripts"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(autouse=True)
def no_run_survives() -> Iterator[None]:
    yield
    for run in store.list_runs():
        stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


def dstui(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.main(list(argv))
    out, err = capfd.readouterr()
    return code, out, err


def measured(capfd: pytest.CaptureFixture[str], *argv: str, steps: int = 3) -> tuple[dict[str, Any], RunDir]:
    """A trial that must end well on every rank."""
    code, out, err = dstui(capfd, "trial", "--steps", str(steps), "--python", sys.executable, "--json", *argv)
    run = store.list_runs()[0]
    assert code == 0, out + err + run.out_log.read_text()[-3000:]
    answer = json.loads(out)
    assert (answer["run"], answer["state"], answer["dir"]) == (run.id, "finished", str(run.path))
    ended = run.exit or {}
    codes = {r["code"] for r in ended["ranks"]}  # None: reaped by the launcher before anybody could look
    assert ended["code"] == 0 and codes <= {0, None}
    assert ended["leftovers"] == []
    assert run.supervisor_log.read_text() == ""
    assert answer["measured"]["steps"] == steps and answer["measured"]["troubles"] == []
    assert run.out_log.read_text().count(f"[dstui] trial: {steps} steps measured, ending here") == 1
    assert run.manifest["kind"] == "trial"
    return answer, run


def ends(run: RunDir) -> list[tuple[str, int]]:
    found = []
    for path in sorted((run.path / FOLDER).glob("rank-*.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        found.append((last["reason"], last["steps"]))
    return found


def test_two_ranks_of_the_tiny_gpt(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer, run = measured(
        capfd, "--ranks", "2", "--config", str(config), "--", str(EXAMPLES / "tiny_gpt.py"), "--steps", "500"
    )
    assert ends(run) == [("steps", 3), ("steps", 3)]
    phases = {p["phase"]: p["measured"] for p in answer["phases"]}
    assert {"load", "init", "forward", "backward", "step"} <= set(phases)
    assert phases["load"]["host"] < phases["init"]["host"] <= answer["memory"]["host"]["measured"]
    host = answer["memory"]["host"]
    assert host["predicted"]["low"] <= host["measured"] <= host["predicted"]["high"]
    assert answer["memory"]["allocated"] == {
        "predicted": None,
        "measured": None,
        "ratio": None,
    }  # no GPU here
    assert answer["step_time"] > 0
    m = answer["measured"]
    assert (m["ranks"], m["seen"]["micro_batch"], m["seen"]["accumulation"], m["seen"]["stage"]) == (
        2,
        2,
        2,
        2,
    )
    assert m["seen"]["seq"] == 65 and answer["training"]["seq"] == 64

    # the sampler, which knows nothing of the probe, saw the same peak (within its second)
    from dstui.runs.samples import read_peaks

    peaks = read_peaks(run.samples_dir)
    assert peaks is not None and peaks.rss_total is not None
    assert peaks.rss_total <= host["measured"] * 1.02

    # and the next estimate of this model on this machine says so
    assert Path(answer["stored"]).parent == calibration.folder()
    ask = (
        "estimate",
        str(config),
        "--model",
        "tiny-gpt",
        "--seq",
        "64",
        "--no-checkpointing",
        "--world-size",
        "2",
        "--json",
    )
    _code, out, _err = dstui(capfd, *ask)
    found = json.loads(out)
    assert any(f"corrected by trial {run.id} of" in a for a in found["assumptions"])
    assert found["host"]["peak"]["expected"] == host["measured"]
    _code, out, _err = dstui(capfd, *ask, "--no-calibration")
    plain = json.loads(out)
    assert not any("corrected" in a for a in plain["assumptions"])
    assert plain["host"]["peak"]["expected"] == host["predicted"]["expected"]
    _code, out, _err = dstui(capfd, "trial", "--show", run.id)
    assert (
        "3 steps measured on 2 ranks" in out
        and "GiB by phase" in out
        and max(map(len, out.splitlines())) <= 80
    )


def test_the_trainer_under_torchrun(tmp_path: Path, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": 3},
            }
        )
    )
    answer, run = measured(
        capfd, "--launcher", "torchrun", "--ranks", "2", "--config", str(config), "--",
        str(EXAMPLES / "hf_trainer_tiny.py"), "--output_dir", str(tmp_path / "out"), "--max_steps", "200",
        "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "3", "--gradient_checkpointing", "True",
    )  # fmt: skip
    assert ends(run) == [("steps", 3), ("steps", 3)]
    t = answer["training"]
    assert (t["loop"], t["micro_batch"], t["seq"], t["checkpointing"]) == ("hf", 3, 64, True)
    assert answer["model"]["params"] > 2e6 and answer["problem"] is None and answer["stored"]
    # and whoever asks for this model, by its config.json, gets the measured answer
    lines = (run.path / FOLDER / "rank-0.jsonl").read_text().splitlines()
    (seen,) = [e for e in map(json.loads, lines) if e["event"] == "model"]
    assert seen["ds_config"]["train_micro_batch_size_per_gpu"] == 3  # the Trainer's, for "auto"
    (tmp_path / "config.json").write_text(json.dumps(seen["config"]))
    _code, out, _err = dstui(
        capfd, "estimate", str(config), "--model", str(tmp_path / "config.json"), "--seq", "64", "--micro-batch", "3",
        "--loop", "hf", "--checkpointing", "--world-size", "2", "--no-zero-init", "--json",
    )  # fmt: skip
    assert any(f"corrected by trial {run.id}" in a for a in json.loads(out)["assumptions"])
    assert not (tmp_path / "out").exists() or not list(
        (tmp_path / "out").glob("checkpoint-*")
    )  # nothing is saved


def test_a_foreign_script_with_a_sitecustomize_of_its_own(
    tmp_path: Path, config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK'):\n    print('MY SITECUSTOMIZE', os.environ.get('PYTHONPATH'), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(own))
    answer, run = measured(
        capfd,
        "--launcher",
        "python",
        "--config",
        str(config),
        "--",
        str(SCRIPTS / "plain_ds.py"),
        "--epochs",
        "9",
    )
    assert run.out_log.read_text().count(f"MY SITECUSTOMIZE {own}\n") == 1
    assert ends(run) == [("steps", 3)]
    assert answer["model"]["params"] == 4353 and answer["measured"]["seen"]["seq"] is None


HEAD = "    def read(self, whole: bool = False) -> dict[str, Any]:\n"
BROKEN = HEAD + '        raise ValueError("injected")\n'


def test_an_error_of_the_probe_does_not_reach_the_script(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(probe.__file__).read_text()
    assert source.count(HEAD) == 1
    damaged = tmp_path / "runs" / "probe.py"
    damaged.parent.mkdir()
    damaged.write_text(source.replace(HEAD, BROKEN + HEAD.replace("read", "read_as_it_was")))
    monkeypatch.setattr(measuring, "__file__", str(damaged.with_name("measured.py")))
    code, out, err = dstui(
        capfd, "run", "--measure", "--wait", "--python", sys.executable, "--ranks", "2", "--config", str(config), "--",
        str(EXAMPLES / "tiny_gpt.py"), "--steps", "8",
    )  # fmt: skip
    assert code == 0 and "finished" in out, out + err
    run = store.list_runs()[0]
    assert "step 8 loss" in run.out_log.read_text()
    lines = (run.path / FOLDER / "rank-0.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines if '"trouble"' in line]
    assert 1 <= len(told) <= 4 and all("injected" in t["error"] for t in told)
    assert calibration.load(detect(python=sys.executable), None) is None
    assert not calibration.folder().exists()  # nothing is learned from it


@pytest.mark.slow
def test_a_trial_whose_probe_fails_ends_all_the_same(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "probe.py"
    source = Path(probe.__file__).read_text()
    damaged.write_text(source.replace(HEAD, BROKEN + HEAD.replace("read", "read_as_it_was")))
    monkeypatch.setattr(measuring, "__file__", str(damaged.with_name("measured.py")))
    code, out, err = dstui(
        capfd, "trial", "--steps", "4", "--python", sys.executable, "--ranks", "2", "--config", str(config), "--",
        str(EXAMPLES / "tiny_gpt.py"), "--steps", "1000000",
    )  # fmt: skip
    run = store.list_runs()[0]
    assert code == 2 and "the probe failed" in out and "injected" in out, out + err
    assert (run.exit or {})["outcome"] == "finished" and ends(run) == [("steps", 4), ("steps", 4)]


@pytest.mark.slow
def test_a_measured_run_goes_on_after_the_measured_steps(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = dstui(
        capfd, "run", "--measure", "--wait", "--python", sys.executable, "--ranks", "2", "--config", str(config), "--",
        str(EXAMPLES / "tiny_gpt.py"), "--steps", "9",
    )  # fmt: skip
    assert code == 0, out + err
    run = store.list_runs()[0]
    log = run.out_log.read_text()
    assert "step 9 loss" in log and "ending here" not in log
    assert ends(run) == [("steps", 5), ("steps", 5)]
    assert run.manifest["kind"] == "run"
    result = trial.read_result(run) or trial.settle(run)
    assert result is not None


@pytest.mark.slow
def test_a_script_that_dies_keeps_its_own_fate(
    config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "dies.py"
    text = (SCRIPTS / "plain_ds.py").read_text()
    script.write_text(
        text.replace(
            "engine.step()\n",
            "engine.step()\n            if i == 2:\n                raise MemoryError('mine')\n",
        )
    )
    code, out, _err = dstui(
        capfd, "trial", "--steps", "9", "--python", sys.executable, "--launcher", "python", "--config", str(config),
        "--json", "--", str(script),
    )  # fmt: skip
    run = store.list_runs()[0]
    answer = json.loads(out)
    assert code == 1 and answer["state"] == "failed" and (run.exit or {})["code"] == 1
    assert "MemoryError: mine" in run.out_log.read_text()
    assert ends(run) == [("script", 1)]
    assert answer["phases"] and answer["stored"] is None  # shown, but nothing is learned from it


@pytest.mark.parametrize("swallows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_end_runs_what_a_script_does_at_its_end(
    config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, swallows: bool
) -> None:
    """``finally`` and exit handlers run; a loop that catches everything and goes on is ended all the same."""
    text = (SCRIPTS / "plain_ds.py").read_text()
    body = re.search(
        r"^            loss = .*\n            engine.backward.*\n            engine.step.*\n", text, re.M
    )
    assert body is not None
    if swallows:
        inner = "".join("    " + row + "\n" for row in body.group().splitlines())
        caught = "            except BaseException as e:\n                print('CAUGHT', type(e).__name__, flush=True)\n                continue\n"
        text = text.replace(body.group(), "            try:\n" + inner + caught)
    text = text.replace(
        "    main()\n",
        "    import atexit\n    atexit.register(lambda: print('AT EXIT', flush=True))\n"
        "    try:\n        main()\n    finally:\n        print('FINALLY', flush=True)\n",
    )
    script = tmp_path / "ends.py"
    script.write_text(text)
    _answer, run = measured(
        capfd,
        "--launcher",
        "torchrun",
        "--ranks",
        "2",
        "--config",
        str(config),
        "--",
        str(script),
        "--epochs",
        "9",
    )
    log = run.out_log.read_text()
    if swallows:
        # three times each, then it is over; the ranks' words may be mixed
        assert log.count("CAUGHT") == log.count("SystemExit") == 6 and "FINALLY" not in log
    else:
        assert log.count("FINALLY") == 2 and log.count("AT EXIT") == 2


def test_a_process_that_loads_no_site_is_named(
    config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "outer.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'print(1)'], env=env))\n"
    )
    wrapper = tmp_path / "isolated"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E "$@"\n')
    wrapper.chmod(0o755)
    code, _out, err = dstui(
        capfd, "trial", "--launcher", "python", "--python", str(wrapper), "--no-preflight", "--", str(script)
    )
    assert code == 2 and "no rank was measured" in err


def test_interrupting_ends_it(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dstui.plain import trial as verb

    def interrupted(run: RunDir, steps: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_progress", interrupted)  # as ^C during the wait
    code, _out, err = dstui(
        capfd, "trial", "--python", sys.executable, "--ranks", "2", "--config", str(config), "--",
        str(EXAMPLES / "tiny_gpt.py"), "--steps", "500",
    )  # fmt: skip
    run = store.list_runs()[0]
    assert code == 130 and "stopping trial" in err
    assert (run.exit or {})["outcome"] == "stopped"
    assert not [p for p in marked(run.id) if p.pid != os.getpid()]
