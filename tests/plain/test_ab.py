"""``dstui ab`` with real runs of a script that only pretends to train: order, verdict, failures, and losing the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.errors import DstuiError
from dstui.runs import ab, store
from dstui.runs.ab import AbDir, Controller, Plan, Taken
from dstui.runs.preflight import Problem
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir

SCRIPT = """
import argparse, datetime, json, os, time
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()
config = json.load(open(args.deepspeed_config))
each = config["gradient_clipping"]
if each < 0:
    raise RuntimeError("this config cannot train")
for step in range(1, args.steps + 1):
    time.sleep(each)
    now = datetime.datetime.now()
    stamp = now.strftime("%Y-%m-%d %H:%M:%S") + f",{now.microsecond // 1000:03d}"
    print(f"[{stamp}] [INFO] [logging.py:1:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.1], mom=[(0.9, 0.999)]")
    print(f"step {step} loss {3 - step / 100:.4f} secret {os.environ.get('MY_TOKEN', '')}", flush=True)
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def config(name: str, seconds: float) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"train_batch_size": 4, "gradient_clipping": seconds}))
        return path

    return config


def words(a: Path, b: Path, *more: str, steps: int = 12) -> list[str]:
    head = ["ab", "--config", str(a), "--config", str(b), "--launcher", "python", "--no-probe", *more]
    return [*head, "--", "train.py", "--steps", str(steps)]


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def names() -> list[str]:
    return [str(RunDir(r.path).name).partition(" ")[2] for r in reversed(store.list_runs())]


def test_pairs_in_turn(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow = write("quick.json", 0.02), write("slow.json", 0.2)
    assert main(words(quick, slow, "--pairs", "2", "--json", "--price-per-gpu-hour", "3")) == 0
    data = json.loads(capsys.readouterr().out)
    assert names() == ["A 1", "B 1", "B 2", "A 2"]
    assert [len(r["runs"]) for r in data["runs"]] == [2, 2] and data["ab"]["state"] == "finished"
    (v,) = data["verdicts"]
    assert v["method"] == "pairs" and v["ratio"] > 1
    assert {"path": "gradient_clipping", "values": [0.02, 0.2]} in data["config"]
    assert data["equal_step"] == 12 and data["loss_gap"] == 0
    assert main(["ab", "--join", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 and float(rows[1]["step_time"]) > float(rows[0]["step_time"])
    assert main(["ab", "--join", data["ab"]["id"][:4]]) == 0
    assert "A quick.json" in capsys.readouterr().out


def test_nothing_starts_when_one_side_cannot(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write("good.json", 0.01), tmp_path / "bad.json"
    bad.write_text('{"train_batch_size": ')
    assert main(words(good, bad)) == 2
    assert "bad.json" in capsys.readouterr().err
    assert store.list_runs() == [] and not ab.home().exists()


def test_a_side_that_fails_is_not_tried_again(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write("good.json", 0.01), write("bad.json", -1)
    assert main(words(bad, good, "--pairs", "3")) == 2
    text = capsys.readouterr().err
    assert names() == ["A 1", "B 1"]  # of the good side one run tells what there is to tell
    assert "no run of A bad.json went through" in text and "dstui diagnose" in text


def test_no_secret_on_disk_and_the_run_has_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "verysecretvalue")
    a, b = write("a.json", 0.01), write("b.json", 0.011)
    argv = words(a, b)
    assert main([*argv[:-4], "--env", "OTHER_KEY=evenmoresecret", *argv[-4:]]) == 0
    logs = [r.out_log for r in store.list_runs()]
    assert all("secret verysecretvalue" in p.read_text() for p in logs)  # the caller's whole environment
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file() and path not in logs:
            text = path.read_bytes()
            assert b"verysecretvalue" not in text and b"evenmoresecret" not in text, path


def test_the_terminal_may_die(write: Write, tmp_path: Path) -> None:
    """SIGHUP to all and SIGKILL to the front end in the first run: both runs happen, and the result is there."""
    a, b = write("a.json", 0.1), write("b.json", 0.1)
    front = subprocess.Popen(
        [sys.executable, "-m", "dstui", *words(a, b, steps=25)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: ab.home().exists() and any(ab.home().iterdir()) and store.list_runs())
    os.killpg(front.pid, signal.SIGHUP)
    os.killpg(front.pid, signal.SIGKILL)
    front.wait()
    found = ab.find()
    wait_for(lambda: found.state != "running")
    assert found.state == "finished" and len(store.list_runs()) == 2
    assert len(ab.result(found).figures) == 2


def test_ctrl_c_leaves_it_going_on(write: Write) -> None:
    a, b = write("a.json", 0.1), write("b.json", 0.1)
    front = subprocess.Popen(
        [sys.executable, "-m", "dstui", *words(a, b, steps=30)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert front.stderr is not None
    wait_for(lambda: "started" in front.stderr.readline())  # type: ignore[union-attr]
    os.killpg(front.pid, signal.SIGINT)
    _out, text = front.communicate(timeout=60)
    assert front.returncode == 130 and "goes on" in text and "--join" in text
    found = ab.find()
    assert found.state == "running"
    assert main(["ab", "--stop"]) == 0
    wait_for(lambda: found.state == "stopped")
    assert len(store.list_runs()) == 1 and store.state(store.list_runs()[0]) == "stopped"


def test_a_run_that_hangs_is_bounded(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a.json", 0.01), write("b.json", 0.05)
    assert main(words(a, b, "--minutes", "0.1", steps=100000)) == 0
    assert {store.state(r) for r in store.list_runs()} == {"stopped"}
    assert "A a.json" in capsys.readouterr().out


def test_a_dead_controller_is_said(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a.json", 0.05), write("b.json", 0.05)
    assert main([*words(a, b, "--pairs", "3", "--detach", "--json", steps=20)]) == 0
    found = ab.find(json.loads(capsys.readouterr().out)["ab"])
    wait_for(lambda: len(found.runs(0)) and len(found.runs(1)))
    os.kill(found.data["controller"]["pid"], signal.SIGKILL)
    wait_for(lambda: found.state == "lost")
    wait_for(lambda: all(store.state(r) == "finished" for r in store.list_runs()))
    assert main(["ab", "--join", found.id]) == 1
    shown = capsys.readouterr()
    assert "lost" in shown.err and "step time" in shown.out


def test_a_controller_killed_in_its_first_run(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on and nobody starts another: both are said, and --stop ends what is left."""
    a, b = write("a.json", 0.2), write("b.json", 0.2)
    assert main([*words(a, b, "--detach", "--json", steps=3000)]) == 0
    found = ab.find(json.loads(capsys.readouterr().out)["ab"])
    wait_for(lambda: found.data["runs"] and store.state(store.list_runs()[0]) == "running")
    os.kill(found.data["controller"]["pid"], signal.SIGKILL)
    wait_for(lambda: found.state == "lost")
    (run,) = store.list_runs()
    assert main(["ab", "--join"]) == 2
    shown = capsys.readouterr().err
    assert "controller was killed" in shown and f"dstui ab --stop {found.id}" in shown
    assert shown.count(f"run {run.id} goes on") == 2 and "?" not in shown
    assert main(["ab", "--stop"]) == 0 and store.state(run) == "stopped"
    assert f"left behind: run {run.id}" in capsys.readouterr().out
    assert main(["ab", "--join"]) == 2
    assert "goes on" not in capsys.readouterr().err
    assert main(["ab", "--stop"]) == 0
    assert "is over already: lost" in capsys.readouterr().out


def test_a_controller_killed_between_its_runs(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Held while its first run ends, then killed: what ran is whole, the other side is said to be missing."""
    a, b = write("a.json", 0.1), write("b.json", 0.1)
    assert main([*words(a, b, "--detach", "--json", steps=15)]) == 0
    found = ab.find(json.loads(capsys.readouterr().out)["ab"])
    wait_for(lambda: found.data["runs"])
    pid = found.data["controller"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    (run,) = store.list_runs()
    wait_for(lambda: store.state(run) == "finished")
    assert found.state == "running"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: found.state == "lost")
    assert main(["ab", "--join", found.id]) == 2
    shown = capsys.readouterr().err
    assert f"run {run.id}: finished" in shown and "controller was killed before a run of B b.json" in shown
    assert "begin it anew" in shown and "goes on" not in shown
    assert len(store.list_runs()) == 1


def test_a_run_that_is_stopped_ends_its_ab(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Who stops a run wants the cards back: no other one is started on them."""
    a, b = write("a.json", 0.1), write("b.json", 0.1)
    assert main([*words(a, b, "--pairs", "2", "--detach", "--json", steps=3000)]) == 0
    found = ab.find(json.loads(capsys.readouterr().out)["ab"])
    wait_for(lambda: found.data["runs"] and store.state(store.list_runs()[0]) == "running")
    (run,) = store.list_runs()
    assert main(["stop", run.id]) == 0
    wait_for(lambda: found.state != "running")
    assert found.state == "stopped" and store.list_runs() == [run]
    capsys.readouterr()
    assert main(["ab", "--join"]) in (1, 2)
    assert f"run {run.id} was stopped" in capsys.readouterr().err


def test_an_ab_is_no_run(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a.json", 0.01), write("b.json", 0.01)
    assert main([*words(a, b, "--detach", "--json", steps=3)]) == 0
    name = json.loads(capsys.readouterr().out)["ab"]
    found = ab.find(name)
    wait_for(lambda: found.state == "finished")
    for verb in ("stop", "watch", "logs", "rm"):
        assert main([verb, name]) == 2
        assert f"{name} is an A/B" in (shown := capsys.readouterr().err) and f"ab --stop {name}" in shown


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--config", "a.json"], "nothing to set against each other"),
        (["--config", "a.json", "--config", "a.json", "--config", "a.json"], "more than two kinds"),
        (["--config", "a.json", "--config", "b.json", "--pairs", "0"], "--pairs 0"),
        (["--config", "a.json", "--config", "b.json", "--steps", "3", "--no-probe"], "needs the probe"),
        (["--config", "a.json", "--config", "b.json", "--minutes", "0"], "--minutes"),
        (["--config", "a.json", "--config", "b.json", "--price-per-gpu-hour", "-1"], "not a price"),
    ],
)
def test_wrong_words(write: Write, capsys: pytest.CaptureFixture[str], more: list[str], text: str) -> None:
    write("a.json", 0.01), write("b.json", 0.01)
    assert main(["ab", *more, "--", "train.py"]) == 2
    assert text in capsys.readouterr().err and store.list_runs() == []


def test_nothing_to_join(write: Write) -> None:
    with pytest.raises(DstuiError, match="no A/B yet"):
        ab.find()
    assert main(["ab", "--join"]) == 2


def interpreter(folder: Path, release: str) -> Path:
    """A bare interpreter that says it has this DeepSpeed; the script here imports nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name, number in (("deepspeed", release), ("torch", "2.13.0")):
        info = folder / "lib" / version / "site-packages" / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return folder / "bin" / "python"


def test_two_releases_build_ops_apart(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder each run would build again what the other release had built there, or load it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    config = write("ds.json", 0.01)
    pythons = [str(interpreter(tmp_path / r, r)) for r in ("0.19.8", "0.18.9")]
    argv = ["ab", "--config", str(config), "--python", pythons[0], "--python", pythons[1]]
    argv += ["--launcher", "python", "--no-probe", "--json", "--", "train.py"]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert [r["deepspeed"] for r in data["runs"]] == ["0.19.8", "0.18.9"]
    assert data["ab"]["labels"] == ["A 0.19.8", "B 0.18.9"], "their environments' folders"
    runs = list(reversed(store.list_runs()))
    folders = [r.manifest["env"]["TORCH_EXTENSIONS_DIR"] for r in runs]
    assert folders == [str(tmp_path / "ops" / f"deepspeed-{r}-torch-2.13.0") for r in ("0.19.8", "0.18.9")]
    assert any("releases of DeepSpeed" in w for w in data["warnings"])


def controller(write: Write, total_minutes: float) -> Controller:
    """One of an A/B that was never begun."""
    spec = RunSpec(script="train.py")
    plan = Plan(specs=(spec, spec), labels=("A", "B"), pairs=2, total_minutes=total_minutes)
    folder = ab.home() / "made"
    folder.mkdir(parents=True)
    store.write_json(folder / "ab.json", {"schema_version": 1, "id": "made", "runs": []})
    return Controller(AbDir(folder), plan, {})


def test_no_pair_is_begun_that_would_take_too_long(write: Write) -> None:
    """Of a further run the shortest loading counts, since what was built is there, and the steps of its own kind."""
    c = controller(write, 10)
    c.began -= 400  # 200 seconds are left
    assert c._time_for((0, 1)), "the first run is always tried"
    c.seconds = [Taken(0, 150, 40), Taken(1, 20, 90)]
    assert c._time_for((0, 1)), "20 + 40 and 20 + 90"
    c.seconds.append(Taken(1, 30, 130))
    assert not c._time_for((0, 1)) and c._time_for((0,)) and c._time_for((1,)), "20 + 40 and 20 + 130"


def test_the_time_is_up(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow = write("quick.json", 0.02), write("slow.json", 0.02)
    assert main(words(quick, slow, "--pairs", "3", "--total-minutes", "0.05", steps=100000)) == 2
    data = ab.find().data
    assert (data["state"], len(data["runs"])) == ("finished", 1), "one is begun, and ended at once"
    shown = capsys.readouterr().err
    assert "no run of B slow.json went through" in shown
    assert "minutes are up: no further run was started" in shown


def test_cards_that_somebody_came_to_use_are_waited_for(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy before the first run: that is how this machine is, and it is said. Busy later: free soon, or said."""
    c = controller(write, 10)
    started: list[RunSpec] = []
    looks = 0
    busy_for = 10**9

    def look(*_a: object, **_k: object) -> tuple[Problem, ...]:
        nonlocal looks
        looks += 1
        return (
            (Problem("device-busy", "warning", "GPU 0 is in use by python (pid 7)"),)
            if looks <= busy_for
            else ()
        )

    def begun(spec: RunSpec, *_a: object, **_k: object) -> RunDir:
        started.append(spec)
        return RunDir(ab.home() / "none")

    monkeypatch.setattr(ab, "detect", lambda _spec: None)
    monkeypatch.setattr(ab, "preflight", look)
    monkeypatch.setattr(ab, "start", begun)
    monkeypatch.setattr(ab, "_FREE_POLL", 0.0)
    spec = c.plan.specs[0]
    found = c._start(spec)
    assert found is not None and found[1] == "GPU 0 is in use by python (pid 7)" and looks == 1
    c._put(runs=[{"run": "x", "kind": 0, "pair": 0, "breakdown": False}])
    looks, busy_for = 0, 3
    found = c._start(spec)
    assert found is not None and found[1] is None and looks == 4
    looks, busy_for = 0, 10**9
    monkeypatch.setattr(ab, "FREE_SECONDS", 0.0)
    found = c._start(spec)
    assert found is not None and found[1] is not None and len(started) == 3
