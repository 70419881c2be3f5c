"""DeepSpeed over two nodes with pdsh and ssh: started, stopped, hurt. Two real nodes on one machine (tests/tools/nodes.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.runs.store import RunDir
from tests.conftest import EXTENSIONS, REPO
from tests.supervised import until
from tests.tools.nodes import Nodes, lacks, two_nodes

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.slow]

TINY = REPO / "dstui" / "examples" / "tiny_gpt.py"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
SMALL = ("--hidden", "64", "--layers", "2")
FAILS = """\
import os, time
print("rank", os.environ["RANK"], "is up", flush=True)
time.sleep(5)
if os.environ["RANK"] == "2":
    raise ValueError("the third rank does not like its data")
time.sleep(100000)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    why = lacks() or (None if shutil.which("pdsh") else "needs pdsh")
    if why:
        pytest.skip(why)
    with two_nodes(tmp_path_factory.mktemp("nodes") / "two") as made:
        yield made


class Shell:
    """dstui on the node `one`, as from a terminal there."""

    def __init__(self, nodes: Nodes, work: Path) -> None:
        self.nodes, self.work = nodes, work
        (work / "hosts").write_text("one slots=2\ntwo slots=2\n")
        (work / "ds.json").write_text(json.dumps(CONFIG))
        (work / "fails.py").write_text(FAILS)
        names = ("HOME", "LANG")
        self.env = {n: os.environ[n] for n in names} | {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(REPO),
            "DSTUI_STATE_HOME": str(work / "state"),
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        }

    def __call__(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "dstui", *words]
        done = self.nodes.run("one", ["sh", "-c", f'cd {self.work}; exec "$@"', "-", *argv], env=self.env)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *words: str) -> RunDir:
        done = self("run", "--hostfile", "hosts", "--json", *words)
        return RunDir(Path(json.loads(done.stdout.splitlines()[-1])["dir"]))

    def train(self) -> RunDir:
        run = self.start("--config", "ds.json", "--", str(TINY), "--steps", "1000000", *SMALL)
        until(lambda: self.step(run), 300)
        return run

    def step(self, run: RunDir) -> int:
        if run.exit is not None:
            raise AssertionError(run.out_log.read_text(errors="replace")[-3000:])
        return int(json.loads(self("watch", "--once", "--json", run.id).stdout).get("step") or 0)

    def ranks(self, node: str, run: RunDir) -> list[str]:
        """Processes of the run on a node, by their environment."""
        found = self.nodes.run(node, ["sh", "-c", f"grep -lsz DSTUI_RUN_ID={run.id} /proc/[0-9]*/environ"])
        return found.stdout.split()

    def end(self, run: RunDir) -> dict[str, Any]:
        return dict(until(lambda: run.exit, 180))


@pytest.fixture
def shell(nodes: Nodes, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(nodes, tmp_path)
    yield made
    for folder in (tmp_path / "state" / "runs").glob("*"):
        made("stop", "--now", folder.name, code=None)


def test_start_look_and_stop(shell: Shell, nodes: Nodes) -> None:
    # What DeepSpeed's own kill would find on that node: another training of this user with the same Python.
    named = [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    other = subprocess.Popen(nodes.command("two", ["bash", "-c", f"exec -a '{' '.join(named)}' sleep 1000"]))
    try:
        run = shell.train()
        assert (run.manifest["world_size"], run.manifest["nodes"]) == (4, 2)
        shown = shell("watch", "--once", run.id).stdout
        assert "rank 0" in shown and "rank 1" in shown and "rank 2" not in shown
        assert "2 of 4 ranks are on other nodes, not sampled: two" in shown
        assert len(shell.ranks("two", run)) >= 2
        shell("stop", run.id)
        for node in ("one", "two"):
            assert shell.ranks(node, run) == []
        log = run.out_log.read_text(errors="replace")
        assert "KeyboardInterrupt" in log, "the ranks were asked politely"
        assert all(r["left"] == 0 for r in shell.end(run)["nodes"])
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_rank_on_the_other_node_raises(shell: Shell) -> None:
    run = shell.start("--", "fails.py")
    end = shell.end(run)  # the ranks on `one` would sleep on: they are ended
    assert (end["outcome"], end["first_node"], end["rank_code"]) == ("failed", "two", 1)
    said = json.loads(shell("diagnose", "--json", run.id).stdout)
    assert said["cause"]["code"] == "DR710" and "ValueError" in json.dumps(said["evidence"])
    assert "on node two" in json.dumps(said["evidence"])
    for node in ("one", "two"):
        assert shell.ranks(node, run) == []


def test_a_rank_on_the_other_node_is_killed(shell: Shell, nodes: Nodes) -> None:
    run = shell.train()
    nodes.run(
        "two",
        [
            "sh",
            "-c",
            "for p in $(pgrep -f tiny_gpt.py); do grep -qsz ^RANK=3$ /proc/$p/environ && kill -9 $p; done",
        ],
    )
    end = shell.end(run)
    assert (end["outcome"], end["first_node"], end["rank_code"]) == ("failed", "two", -9)
    assert json.loads(shell("diagnose", "--json", run.id).stdout)["cause"]["code"] == "DR721"


def test_before_the_start(shell: Shell) -> None:
    (shell.work / "hosts").write_text("one slots=2\nnobody slots=2\n")
    done = shell("run", "--hostfile", "hosts", "--", "fails.py", code=2)
    assert "node nobody: cannot be reached by ssh" in done.stderr and "node one" not in done.stderr
    (shell.work / "hosts").write_text("one slots=2\ntwo slots=2\n")
    done = shell("run", "--hostfile", "hosts", "--env", "GLOO_SOCKET_IFNAME=eth7", "--", "fails.py", code=2)
    assert "GLOO_SOCKET_IFNAME=eth7, but its network interfaces are lo, veth" in done.stderr


def test_the_network_of_the_other_node_fails_and_a_stop_says_so(shell: Shell, nodes: Nodes) -> None:
    run = shell.train()
    nodes.cut("two")
    try:
        done = shell("stop", "--now", run.id, code=2)
        assert "node two does not answer" in done.stderr
        assert shell.ranks("one", run) == [] and shell.ranks("two", run)
    finally:
        nodes.mend("two")
    until(lambda: nodes.run("one", ["ssh", "two", "true"]).returncode == 0)
    shell("stop", run.id)
    assert shell.ranks("two", run) == []


def test_the_other_node_vanishes(shell: Shell, nodes: Nodes) -> None:
    """The last one here: there is one node less afterwards."""
    run = shell.train()
    nodes.vanish("two")
    end = shell.end(run)
    assert (end["outcome"], end["first_node"]) == ("failed", "two")
    assert json.loads(shell("diagnose", "--json", run.id).stdout)["cause"]["code"] == "DR723"
    assert "node two does not answer" in shell("stop", run.id, code=2).stderr
