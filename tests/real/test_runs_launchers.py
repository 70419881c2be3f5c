"""Every launcher, really started: what it is given, how its ranks' ends read, and that a stop ends all of it.

deepspeed, torchrun and accelerate are the installed ones. LLaMA-Factory and ms-swift are stand-ins: packages of their
names that write down what they were given and start the script as their originals do. The script needs no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.facts.detect import detect
from dstui.facts.model import Facts
from dstui.plain import logs
from dstui.runs import ranklogs
from dstui.runs.control import stop
from dstui.runs.processes import marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SCRIPT = """
import os, sys, time
rank, how = int(os.environ["RANK"]), os.environ["HOW"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is up", flush=True)
print(f"rank {rank} complains", file=sys.stderr, flush=True)
last = rank == int(os.environ["WORLD_SIZE"]) - 1
if how == "wait":
    time.sleep(300)
if how == "code" and last:
    time.sleep(2)
    sys.exit(3)
if how == "kill" and last:
    time.sleep(2)
    os.kill(os.getpid(), 9)
time.sleep(60 if how in ("code", "kill") else 2)
"""
RECORD = """
import json, os, sys
with open(os.environ["GIVEN"], "a") as f:
    names = ("FORCE_TORCHRUN", "NPROC_PER_NODE", "MASTER_PORT", "RANK", "DSTUI_CONFIG")
    f.write(json.dumps({"argv": sys.argv[1:], **{n: os.environ.get(n) for n in names}}) + "\\n")
"""
LLAMAFACTORY = RECORD + "import runpy\nrunpy.run_path(os.environ['SCRIPT'], run_name='__main__')\n"
SWIFT = (
    RECORD
    + """
import subprocess
program = [sys.executable]
if os.environ.get("NPROC_PER_NODE"):
    program += ["-m", "torch.distributed.run", "--nproc_per_node", os.environ["NPROC_PER_NODE"]]
    program += ["--master_port", os.environ["MASTER_PORT"]]
done = subprocess.run([*program, os.environ["SCRIPT"], *sys.argv[2:]])
if done.returncode:
    sys.exit(done.returncode)
"""
)
ENGINES = {"accelerate": "accelerate", "llamafactory": "llamafactory", "swift": "swift"}
OWN = ("deepspeed", "torchrun")
ALL = (
    *OWN,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("python", "accelerate", "llamafactory", "swift")),
)
"""The slow ones start torchrun's own processes (``make long``)."""
TORCHRUN = ("torchrun", "accelerate", "llamafactory", "swift")


@pytest.fixture(scope="module")
def facts() -> Facts:
    return detect(python=sys.executable)


@pytest.fixture
def started(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.yaml").write_text("stage: sft\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    for name, text in (("llamafactory/launcher.py", LLAMAFACTORY), ("swift/cli/main.py", SWIFT)):
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True)
        for folder in {path.parent, (tmp_path / "packages" / name.split("/")[0])}:
            (folder / "__init__.py").touch()
        path.write_text(text)
    runs: list[RunDir] = []

    def go(launcher: str, how: str, **more: Any) -> RunDir:
        script = {"llamafactory": "train.yaml", "swift": "sft"}.get(launcher, "train.py")
        env = {"HOW": how, "GIVEN": str(tmp_path / "given"), "SCRIPT": str(tmp_path / "train.py")}
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
        spec = RunSpec(
            script,
            engine=ENGINES.get(launcher, "plain"),
            launcher=launcher,
            num_gpus=1 if launcher == "python" else 2,
            cwd=str(tmp_path),
            env=env,
            **more,
        )
        runs.append(start(spec, facts, preflight=False))
        return runs[-1]

    yield go
    for run in runs:
        stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def until(condition: Callable[[], Any], run: RunDir, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(run.out_log.read_text()[-3000:])


def ended(run: RunDir) -> dict[str, Any]:
    return until(lambda: run.exit, run)


@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_fails_is_named_with_its_own_code(started: Callable[..., RunDir], launcher: str) -> None:
    last = ended(started(launcher, "code"))
    rank = 0 if launcher == "python" else 1
    assert (last["outcome"], last["rank_code"], last["first_rank"]) == ("failed", 3, rank)
    assert last["code"] == (1 if launcher in TORCHRUN else 3)  # the launcher's own
    assert last["signal"] is None and f"rank {rank} exited with code 3" in last["reason"]


@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_is_killed_is_named(started: Callable[..., RunDir], launcher: str) -> None:
    run = started(launcher, "kill")
    last = ended(run)
    rank = 0 if launcher == "python" else 1
    assert (last["outcome"], last["rank_code"], last["signal"]) == ("failed", -9, "SIGKILL")
    assert last["first_rank"] == rank
    expected = {"deepspeed": 247, "python": None}  # 247 = -9 as an exit code; python itself was killed
    assert last["code"] == expected.get(launcher, 1)
    assert marked(run.id) == []


@pytest.mark.parametrize("launcher", ALL)
def test_a_stop_ends_every_process_of_it(started: Callable[..., RunDir], launcher: str) -> None:
    run = started(launcher, "wait")
    ranks = 1 if launcher == "python" else 2
    until(lambda: run.out_log.read_text().count("is up") == ranks, run)
    until(lambda: len((run.heartbeat or {}).get("ranks", {})) == ranks, run)
    assert stop(run).state == "stopped"
    assert marked(run.id) == []
    signals = [e["signal"] for e in run.events() if e["event"] == "signal"]
    assert signals[0] == "SIGINT"
    assert (run.exit or {})["stopped_by"]["pid"] == os.getpid()


def test_what_llamafactory_and_swift_are_given(started: Callable[..., RunDir], tmp_path: Path) -> None:
    run = started("llamafactory", "finish")
    assert ended(run)["outcome"] == "finished", run.out_log.read_text()
    given = [json.loads(x) for x in (tmp_path / "given").read_text().splitlines()]
    assert sorted(g["RANK"] for g in given) == [
        "0",
        "1",
    ]  # under torchrun already, as FORCE_TORCHRUN makes it
    assert {g["FORCE_TORCHRUN"] for g in given} == {"1"}
    assert given[0]["argv"] == [str(run.path / "train.yaml")]
    assert f'deepspeed: "{run.config_path}"' in (run.path / "train.yaml").read_text()
    (tmp_path / "given").unlink()
    run = started("swift", "finish", config_source="ds.json")
    assert ended(run)["outcome"] == "finished", run.out_log.read_text()
    (one,) = [json.loads(x) for x in (tmp_path / "given").read_text().splitlines()]
    assert one["argv"] == ["sft", "--deepspeed", str(run.config_path)]
    assert one["NPROC_PER_NODE"] == "2" and one["MASTER_PORT"] == str(run.manifest["master_port"])


@pytest.mark.parametrize("launcher", ALL)
def test_rank_logs(started: Callable[..., RunDir], launcher: str) -> None:
    """Each rank's lines in its own log, and all of them in the common one."""
    run = started(launcher, "finish", rank_logs=True)
    assert ended(run)["outcome"] == "finished", run.out_log.read_text()
    ranks = range(1 if launcher == "python" else 2)
    whole = run.out_log.read_text()
    for rank in ranks:
        assert whole.count(f"rank {rank} of {len(ranks)} is up") == 1, whole
        assert whole.count(f"rank {rank} complains") == 1, whole
    if launcher == "python":
        assert ranklogs.ranks_of(run) == []
        return
    assert ranklogs.ranks_of(run) == [0, 1]
    for rank in ranks:
        seen: list[bytes] = []
        logs.copy_rank(run, rank, seen.append)
        own = b"".join(seen).decode()
        assert f"rank {rank} of 2 is up" in own and f"rank {rank} complains" in own
        assert f"rank {1 - rank}" not in own
