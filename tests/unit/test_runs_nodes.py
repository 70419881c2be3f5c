"""Runs on several nodes: their environment, what is asked of a node, stops. ssh and DeepSpeed's launcher are stand-ins
here that start and signal real processes; two real nodes are in tests/real/test_runs_nodes.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.facts.model import Facts, Interpreter
from dstui.runs import command as commands
from dstui.runs import nodes, store
from dstui.runs.control import stop
from dstui.runs.diagnose import diagnose_run
from dstui.runs.firstfail import host_named, rank_code_from_log
from dstui.runs.nodes import NODE_VARIABLE, Answer, Reach, ask, environment_file, left_behind, ssh_command
from dstui.runs.preflight import Problem, preflight
from dstui.runs.processes import RUN_ID_VARIABLE, marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir
from dstui.runs.view import RunView
from dstui.tui.terminal import UNICODE
from dstui.tui.widgets.dashboard import overview
from tests.run_tools import FakeRun
from tests.supervised import ended, events, until

SSH = """\
#!{python}
# Runs the last argument here, as the shell of that node would; the node before it says how it fares.
import json, os, sys
host, words = sys.argv[-2:]
with open({folder!r} + "/asked", "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
try:
    sys.stderr.write(open({folder!r} + "/refuses-" + host).read())
    sys.exit(255)
except FileNotFoundError:
    pass
os.execvp("sh", ["sh", "-c", words])
"""
# What stands for `python -m deepspeed.launcher.runner`: ranks in sessions of their own, as sshd gives them.
LAUNCHER = """\
import json, os, signal, subprocess, sys, time
folder = {folder!r}
def told(number, frame):
    open(folder + "/runner-was-told", "a").write(str(number) + "\\n")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
lines = [l.rstrip("\\n").partition("=") for l in open(os.environ["DS_ENV_FILE"]).readlines()]
handed = {{k: v for k, _, v in lines}}
base = {{k: v for k, v in os.environ.items() if not k.startswith("DSTUI_")}}
ranks = []
for rank in range(4):
    env = {{**base, **handed, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4",
           "DSTUI_NODE": str(rank // 2)}}
    ranks.append(subprocess.Popen([sys.executable, folder + "/rank.py"], env=env, start_new_session=True))
while any(p.poll() is None for p in ranks):
    time.sleep(0.05)
sys.exit(max(abs(p.returncode) for p in ranks))
"""
RANK = """\
import os, signal, sys, time
def asked(number, frame):
    open({folder!r} + "/rank-" + os.environ["RANK"], "a").write(str(number) + "\\n")
    sys.exit(1)
if os.environ["RANK"] != "3":
    signal.signal(signal.SIGINT, asked)
print("rank", os.environ["RANK"], "is up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stand-in ssh (and pdsh) that is first on PATH; ``refuses-HOST`` in it is what HOST answers."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(SSH.format(python=sys.executable, folder=str(tools)))
    (tools / "pdsh").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return tools


def asked(ssh: Path) -> list[list[str]]:
    return [json.loads(line) for line in (ssh / "asked").read_text().splitlines()]


# -- the environment -------------------------------------------------------------------------------------


def through_deepspeed(text: bytes, node: int, quotes: str) -> dict[str, str]:
    """What a rank of that node gets: DeepSpeed's ``add_export``, pdsh's ``%n``, and a real shell."""
    exports = ""
    for line in text.decode().splitlines(keepends=True):
        name, value = line.split("=", maxsplit=1)
        value = value.strip()
        if quotes == "always" or (quotes == "special" and re.search(r"[^\w@%+=:,./-]", value)):
            value = f'"{value}"'
        exports += f"export {name.strip()}={value}; "
    exports = re.sub(r"%([%n])", lambda m: "%" if m.group(1) == "%" else str(node), exports)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    out = subprocess.run(
        ["sh", "-c", f"{exports} {sys.executable} -c {shlex.quote(show)}"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(out.stdout))


VALUES = [
    "plain",
    "",
    "two words",
    'a "quote"',
    "$HOME",
    "`date`",
    "50%n %h %%",
    "back\\slash",
    "a'b",
    "*",
    "ü;&|",
]


@pytest.mark.parametrize(
    ("release", "quotes"),
    [
        ("0.14.0", "never"),
        ("0.15.1", "never"),
        ("0.15.2", "always"),
        ("0.19.8+cu", "special"),
        (None, "special"),
    ],
)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_reaches_the_ranks_as_it_is(value: str, release: str | None, quotes: str) -> None:
    text, dropped = environment_file(
        {"MINE": value},
        {"NCCL_X": value},
        cwd="/",
        python="/opt/my venv/bin/python",
        run_id="abc",
        release=release,
    )
    there = through_deepspeed(text, 7, quotes)
    assert (there["MINE"], there["NCCL_X"]) == (value, value)
    assert (there[RUN_ID_VARIABLE], there[NODE_VARIABLE]) == ("abc", "7")
    assert there["PATH"] == "/opt/my venv/bin:/usr/bin:/bin"
    assert not dropped


def test_what_is_handed_on(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text(
        "NCCL_DEBUG=INFO\n\nnonsense\nOWN=yes\nADDED=file\nHF_TOKEN=kept\n"
    )
    caller = {
        "HOME": str(tmp_path / "elsewhere"), "NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret", "EDITOR": "vi", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "4",
        "TORCH_LOGS": "a\nb", "PATH": "/usr/bin",
    }  # fmt: skip
    added = {
        "ADDED": "dstui",
        "DSTUI_CONFIG": "/runs/x/config.json",
        "PYTHONPATH": "/probe",
        "MY_TOKEN": "given",
    }
    text, dropped = environment_file(added, caller, cwd=str(tmp_path), python="/v/bin/python", run_id="r")
    there = dict(line.split("=", 1) for line in text.decode().splitlines())
    assert there["NCCL_DEBUG"] == "INFO", "the user's own file wins over the terminal's environment"
    assert there["ADDED"] == "dstui" and there["MY_TOKEN"] == "given", (
        "what was asked for this run wins over both"
    )
    assert there["NCCL_IB_HCA"] == "mlx5" and there["OMP_NUM_THREADS"] == "4" and there["OWN"] == "yes"
    assert there["HF_TOKEN"] == "kept", "a secret that the user put into the file goes the user's way"
    assert not there.keys() & {"WANDB_API_KEY", "EDITOR", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "nonsense"}
    assert "PYTHONPATH" not in there, (
        "DeepSpeed hands PYTHON* on itself, with the working directory before it"
    )
    assert set(dropped) == {"WANDB_API_KEY", "TORCH_LOGS"}


# -- one question to a node ------------------------------------------------------------------------------


def test_ssh_asks_nothing_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ssh_command("user@node", "python -", {"PDSH_SSH_ARGS_APPEND": "-p 2222 -i 'my key'"})
    assert "-oBatchMode=yes" in argv and any(a.startswith("-oConnectTimeout=") for a in argv)
    assert argv[-7:] == ["-p", "2222", "-i", "my key", "--", "user@node", "python -"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("ssh: connect to host x port 22: Connection refused\n", "unreachable"),
        ("ssh: connect to host x port 22: Connection timed out\n", "unreachable"),
        ("user@x: Permission denied (publickey,password).\n", "key"),
        ("No ED25519 host key is known for x\nHost key verification failed.\n", "host-key"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.\n",
            "host-key-changed",
        ),
        ("ssh: Could not resolve hostname x: Name or service not known\n", "name"),
        ("something new\n", "unreachable"),
    ],
)
def test_why_a_node_says_nothing(ssh: Path, words: str, problem: str) -> None:
    (ssh / "refuses-x").write_text(words)
    answer = ask("x", sys.executable, "signalled", os.environ, run="r", number=0)
    assert (answer.problem, answer.detail) == (problem, words.splitlines()[-1])


def test_a_node_without_that_python_or_without_an_answer(ssh: Path) -> None:
    answer = ask("x", "/no/such/python", "signalled", os.environ, run="r", number=0)
    assert answer.problem == "python" and "/no/such/python" in answer.detail
    (ssh / "slow").write_text("#!/bin/sh\nsleep 60\n")
    (ssh / "slow").chmod(0o755)
    assert (
        ask("x", str(ssh / "slow"), "signalled", os.environ, timeout=1, run="r", number=0).problem == "silent"
    )
    (ssh / "ssh").unlink()
    bare = {"PATH": str(ssh)}
    assert ask("x", sys.executable, "signalled", bare, run="r", number=0).problem == "unreachable"


def test_only_this_runs_processes_on_nodes_are_told(ssh: Path) -> None:
    def sleeper(**env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "1000"], env={**os.environ, **env})

    ours = [sleeper(**{RUN_ID_VARIABLE: "mine", NODE_VARIABLE: "0", "RANK": str(r)}) for r in (2, 3)]
    launcher = sleeper(**{RUN_ID_VARIABLE: "mine"})
    other = sleeper(**{RUN_ID_VARIABLE: "mine-too", NODE_VARIABLE: "0"})
    try:
        reach = Reach(["x"], sys.executable, "mine", os.environ)
        reach.tell(0)
        reach.join()
        assert reach.answers["x"].said["ranks"] == [2, 3] and not reach.clear
        assert left_behind(reach.records())[0]["left"] == 2
        reach.end(((signal.SIGTERM, 10.0),))
        assert reach.clear and left_behind(reach.records()) == []
        assert [p.wait(10) for p in ours] == [-signal.SIGTERM] * 2
        assert launcher.poll() is None and other.poll() is None, "nothing else is signalled"
    finally:
        for p in (*ours, launcher, other):
            p.kill()
            p.wait()


def test_a_node_that_never_let_us_in_has_nothing_of_the_run(ssh: Path) -> None:
    (ssh / "refuses-x").write_text("Host key verification failed.\n")
    reach = Reach(["x"], sys.executable, "mine", os.environ)
    reach.end(((signal.SIGTERM, 0.1),))
    assert reach.silent and reach.hopeless and not reach.clear
    assert left_behind(reach.records()) == []
    (ssh / "refuses-x").write_text("ssh: connect to host x port 22: Connection timed out\n")
    reach.end(((signal.SIGTERM, 0.1),))
    assert reach.silent and not reach.hopeless
    assert [r["host"] for r in left_behind(reach.records())] == ["x"]


# -- before the start ------------------------------------------------------------------------------------


def check(tmp_path: Path, hostfile: str, **more: Any) -> dict[str, Problem]:
    (tmp_path / "hosts").write_text(hostfile)
    (tmp_path / "train.py").write_text("import argparse\n")
    packages: dict[str, str | None] = {"deepspeed": "0.19.8", "torch": "2.13.0"}
    it = Interpreter(sys.executable, "option", "3.11.2", packages)
    facts = Facts(gpus=(), interpreters=(it,))
    spec = RunSpec(
        "train.py", hostfile="hosts", cwd=str(tmp_path), **{"nodes": 2, "launcher": "deepspeed", **more}
    )
    found = preflight(spec, facts)
    return {p.code: p for p in found if p.code.startswith(("node-", "pdsh", "ssh", "hostfile", "two-"))}


@pytest.fixture
def answers(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What each node says to the check; nodes that are not in it answer like this machine, at other places."""
    changed: dict[str, dict[str, Any]] = {}
    real = nodes.ask

    def instead(host: str, python: str, do: str, env: Any, **given: Any) -> Answer:
        answer = real(host, python, do, env, **given)
        if do == "reached":
            return dataclasses.replace(answer, said={"reached": True, **changed.get("to " + host, {})})
        said = {
            **answer.said,
            "packages": {"deepspeed": "0.19.8", "torch": "2.13.0"},
            "place": [host],
            "gpus": 0,
        }
        return dataclasses.replace(answer, said={**said, "address": "10.0.0.1", **changed.get(host, {})})

    monkeypatch.setattr(nodes, "ask", instead)
    return changed


HOSTS = "alpha slots=2\nbeta slots=2\n"


def test_nodes_that_are_all_right_say_nothing(tmp_path: Path, answers: Any, ssh: Path) -> None:
    assert check(tmp_path, HOSTS) == {}
    assert {a[-2] for a in asked(ssh)} == {"alpha", "beta"}


@pytest.mark.parametrize(
    ("host", "said", "code", "words"),
    [
        ("beta", {"cwd": False}, "node-cwd", "node beta: no folder"),
        ("beta", {"packages": {"deepspeed": None, "torch": "2.13.0"}}, "node-package", "has no deepspeed"),
        (
            "beta",
            {"packages": {"deepspeed": "0.19.4"}},
            "node-release",
            "deepspeed 0.19.4 there, 0.19.8 here",
        ),
        ("beta", {"files": {}}, "node-script", "train.py is not there"),
        ("beta", {"place": ["alpha"]}, "node-twice", "alpha and beta are the same machine"),
        ("beta", {"gpus": 1}, "node-slots", "node beta: 2 ranks on 1 GPU"),
        ("alpha", {"address": None}, "node-address", "node alpha: `hostname -I` tells no address"),
        (
            "to beta",
            {"reached": False, "why": "timed out"},
            "node-cannot-meet",
            "cannot reach alpha at 10.0.0.1",
        ),
    ],
)
def test_what_a_node_lacks(
    tmp_path: Path, answers: dict[str, dict[str, Any]], host: str, said: dict[str, Any], code: str, words: str
) -> None:
    answers[host] = said
    if code == "node-slots":
        answers["alpha"] = {"gpus": 2}
    found = check(tmp_path, HOSTS)
    assert list(found) == [code]
    assert words in found[code].message and found[code].severity == "error" and found[code].hint


@pytest.mark.parametrize(
    ("variable", "value", "fine"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "ens,ib", False),
    ],
)
def test_an_interface_that_a_node_does_not_have(
    tmp_path: Path, answers: dict[str, dict[str, Any]], variable: str, value: str, fine: bool
) -> None:
    answers |= {"alpha": {"interfaces": ["lo", "eth0", "ens5"]}, "beta": {"interfaces": ["lo", "eth0"]}}
    if "ens" in value:
        answers["alpha"]["interfaces"] = ["lo", "eth0"]
    found = check(tmp_path, HOSTS, env={variable: value})
    assert list(found) == ([] if fine else ["node-interface"])


def test_a_node_that_cannot_be_reached_and_missing_tools(
    tmp_path: Path, ssh: Path, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ssh / "refuses-beta").write_text("user@beta: Permission denied (publickey).\n")
    found = check(tmp_path, HOSTS)
    assert found["node-key"].severity == "error" and "ssh-copy-id beta" in found["node-key"].hint
    (ssh / "pdsh").unlink()
    path = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(p for p in path if shutil.which("pdsh", path=p) is None))
    if shutil.which("pdsh") is None:
        assert "pdsh-missing" in check(tmp_path, HOSTS)


def test_a_token_is_not_handed_on_in_silence(
    tmp_path: Path, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = check(tmp_path, HOSTS)
    assert list(found) == ["node-environment"] and found["node-environment"].severity == "warning"
    assert "HF_TOKEN" in found["node-environment"].message and "secret" not in str(found)
    assert check(tmp_path, HOSTS, env={"HF_TOKEN": "asked for"}) == {}


def test_a_trainer_on_other_nodes_is_not_told_to_use_the_cpu() -> None:
    facts = Facts(gpus=())
    assert commands.trainer_needs_cpu_flag(RunSpec("t.py", engine="hf"), facts)
    assert not commands.trainer_needs_cpu_flag(RunSpec("t.py", engine="hf", hostfile="hosts"), facts)


def test_hostfiles_and_devices(tmp_path: Path, ssh: Path) -> None:
    assert "a second time" in check(tmp_path, "a slots=1\na slots=1\n")["hostfile-broken"].message
    assert "two-device-lists" in check(tmp_path, HOSTS, devices=("0",))


def argv_of(tmp_path: Path, hostfile: str, **more: Any) -> list[str]:
    (tmp_path / "hosts").write_text(hostfile)
    (tmp_path / "train.py").write_text("")
    facts = Facts(gpus=(), interpreters=(Interpreter(sys.executable, "option", "3.11.2"),))
    spec = RunSpec("train.py", hostfile="hosts", cwd=str(tmp_path), launcher="deepspeed", **more)
    return list(commands.build(spec, facts, tmp_path).argv)


def test_one_node_of_a_hostfile(tmp_path: Path) -> None:
    """DeepSpeed would start it here whatever its name."""
    there = argv_of(tmp_path, "203.0.113.9 slots=2\n")
    assert "--force_multi" in there and "--no_ssh_check" not in there
    here = argv_of(tmp_path, "localhost slots=2\n")
    assert "--force_multi" not in here and "--no_ssh_check" in here
    both = argv_of(tmp_path, "localhost slots=2\n203.0.113.9 slots=2\n", nodes=2, master_addr="10.0.0.1")
    assert "--force_multi" not in both and both[both.index("--master_addr") + 1] == "10.0.0.1"


# -- a whole run -----------------------------------------------------------------------------------------


@pytest.fixture
def on_nodes(tmp_path: Path, ssh: Path) -> Iterator[Callable[..., RunDir]]:
    """A run with two ranks on each of the nodes alpha and beta; the sessions of all are on this machine."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "launcher.py").write_text(LAUNCHER.format(folder=str(ssh)))
    (ssh / "rank.py").write_text(RANK.format(folder=str(ssh)))
    (work / "train.py").write_text("")
    (work / "hosts").write_text(HOSTS)
    wrapper = work / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = - ] && exec {sys.executable} -\nexec {sys.executable} -u {work}/launcher.py\n'
    )
    wrapper.chmod(0o755)
    facts = Facts(gpus=(), interpreters=(Interpreter(sys.executable, "option", "3.11.0"),))
    runs: list[RunDir] = []

    def go(**more: Any) -> RunDir:
        spec = RunSpec(
            "train.py",
            python=str(wrapper),
            launcher="deepspeed",
            hostfile="hosts",
            nodes=2,
            cwd=str(work),
            **more,
        )
        runs.append(start(spec, facts, preflight=False))
        until(lambda: runs[-1].out_log.read_text().count("is up") == 4)
        return runs[-1]

    yield go
    for run in runs:
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def test_a_stop_reaches_every_node_and_never_the_launcher(on_nodes: Callable[..., RunDir], ssh: Path) -> None:
    run = on_nodes()
    m = run.manifest
    assert (m["world_size"], m["nodes"], m["ranks_per_node"]) == (4, 2, 2)
    assert m["hosts"] == [{"name": n, "ranks": 2, "here": False} for n in ("alpha", "beta")]
    done = stop(run, now=False)
    assert (done.state, done.nodes) == ("stopped", ())
    assert not (ssh / "runner-was-told").exists(), "it would end every DeepSpeed training on these nodes"
    told = {p.name: p.read_text().split() for p in ssh.glob("rank-*")}
    assert set(told) == {"rank-0", "rank-1", "rank-2"} and all(set(v) == {"2"} for v in told.values())
    records = (run.exit or {})["nodes"]
    assert [(r["host"], r["left"], r["met"]) for r in records] == [("alpha", 0, True), ("beta", 0, True)]
    assert not marked(run.id)


def test_a_node_that_does_not_answer_is_said_and_asked_again(
    on_nodes: Callable[..., RunDir], ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = on_nodes()
    until(lambda: len(asked(ssh)) >= 2)
    for host in ("alpha", "beta"):
        (ssh / f"refuses-{host}").write_text(f"ssh: connect to host {host} port 22: No route to host\n")
    assert main(["stop", "--now", run.id]) == 2
    out = capsys.readouterr()
    assert "stopped" in out.out
    assert "node beta does not answer" in out.err and f"dstui stop {run.id}" in out.err
    assert (run.exit or {})["outcome"] == "stopped" and "nodes_not_clear" in events(run)
    assert not marked(run.id), "what is on this machine was ended from here"
    assert {r["problem"] for r in (run.exit or {})["nodes"]} == {"unreachable"}

    assert main(["stop", "--json", run.id]) == 2
    assert [r["host"] for r in json.loads(capsys.readouterr().out)["runs"][0]["nodes_left"]] == [
        "alpha",
        "beta",
    ]
    for host in ("alpha", "beta"):
        (ssh / f"refuses-{host}").unlink()
    assert main(["stop", run.id]) == 0
    until(lambda: not marked(run.id))
    capsys.readouterr()
    assert main(["stop", run.id]) == 0 and "had ended" in capsys.readouterr().out


def test_a_supervisor_whose_key_is_gone(
    on_nodes: Callable[..., RunDir], ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent went with the login; who stops the run has another."""
    run = on_nodes()
    until(lambda: len(asked(ssh)) >= 2)
    work = ssh.parent / "with-a-key"
    work.mkdir()
    (work / "ssh").write_text((ssh / "ssh").read_text().replace("refuses-", "refuses-me-"))
    (work / "ssh").chmod(0o755)
    for host in ("alpha", "beta"):
        (ssh / f"refuses-{host}").write_text("Permission denied (publickey).\n")
    monkeypatch.setenv("PATH", f"{work}{os.pathsep}{os.environ['PATH']}")
    before = len(asked(ssh))
    done = stop(run, now=True)
    assert (done.state, done.nodes) == ("stopped", ())
    assert {r["problem"] for r in (run.exit or {})["nodes"]} == {"key"} and len(asked(ssh)) > before
    assert "nodes_cleared" in events(run)
    assert not marked(run.id)


def test_a_run_without_supervisor_and_launcher_is_ended_on_its_nodes(
    on_nodes: Callable[..., RunDir], ssh: Path
) -> None:
    run = on_nodes()
    for role in ("supervisor", "launcher"):
        process = run.process(role)
        assert process is not None
        send(process, signal.SIGKILL)
    until(lambda: store.state(run) == "lost")
    until(lambda: len(marked(run.id)) == 4)
    done = stop(run, now=True)
    assert (done.state, done.nodes) == ("lost", ())
    until(lambda: not marked(run.id))


def test_the_first_node_to_fail(on_nodes: Callable[..., RunDir], ssh: Path) -> None:
    run = on_nodes()
    with run.out_log.open("a") as f:
        f.write(
            "beta: [2026-01-01 00:00:00,000] [ERROR] [launch.py:1:x] ['train.py'] exits with return code = -9\n"
        )
        f.write("pdsh@here: beta: ssh exited with exit code 247\n")
    for p in marked(run.id):
        if b"RANK=" in Path(f"/proc/{p.pid}/environ").read_bytes():
            send(p, signal.SIGKILL)
    end = ended(run)
    assert (end["outcome"], end["first_node"], end["rank_code"]) == ("failed", "beta", -9)
    assert end["first_rank"] is None and end["ended_for_node"] is None
    assert end["reason"].startswith("on node beta: a rank killed by SIGKILL")


def test_pdsh_leaves_the_users_name_out(tmp_path: Path) -> None:
    assert host_named(b"beta", ("ann@alpha", "ann@beta")) == "ann@beta"
    assert host_named(b"gamma", ("ann@alpha",)) is None
    log = tmp_path / "log"
    log.write_bytes(b"beta: [..] exits with return code = -9\n")
    with log.open("rb") as f:
        assert rank_code_from_log(f.fileno()) == -9


# -- why -------------------------------------------------------------------------------------------------


def over_there(kills: int | None, **more: Any) -> FakeRun:
    """A run whose rank on the node beta was killed; this machine's memory and kernel tell nothing about that."""
    made = FakeRun(gpus=0)
    hosts = [{"name": "alpha", "ranks": 2, "here": True}, {"name": "beta", "ranks": 2, "here": False}]
    store.write_json(made.run.manifest_path, {**made.run.manifest, "hosts": hosts})
    made.log(
        "beta: [2026-01-01 00:00:00,000] [ERROR] [launch.py:1:x] ['train.py'] exits with return code = -9"
    )
    beta = {
        "host": "beta",
        "left": 0,
        "ranks": [],
        "oom_kills": kills,
        "met": True,
        "problem": None,
        "detail": None,
    }
    record = {"code": 247, "signal": "SIGKILL", "rank_code": -9, "first_rank": None, "first_node": "beta"}
    record |= {"reason": "on node beta: a rank killed by SIGKILL", "ranks": [], "nodes": [{**beta, **more}]}
    made.end("failed", **record, oom_kills={"cgroup": 3, "system": 3})
    return made


@pytest.mark.parametrize(("kills", "code"), [(0, "DR721"), (1, "DR401"), (None, "DR401")])
def test_a_kill_on_another_node_is_judged_by_that_nodes_kernel(kills: int | None, code: str) -> None:
    found = diagnose_run(over_there(kills).run)
    assert found.cause is not None and (found.cause.code, found.cause.certainty) == (code, "likely")
    assert any("on node beta" in e.text for e in found.evidence)
    assert not any(e.file.startswith("samples") for e in found.evidence)


def test_a_node_that_is_gone() -> None:
    gone = {
        "left": None,
        "problem": "unreachable",
        "detail": "ssh: connect to host beta port 22: No route to host",
    }
    made = over_there(0, **gone)
    data = {**(made.run.exit or {}), "rank_code": None, "signal": None, "code": 255}
    store.write_json(made.run.exit_path, data)
    made.log("pdsh@here: beta: ssh exited with exit code 255")
    found = diagnose_run(made.run)
    assert found.cause is not None and found.cause.code == "DR723"
    assert any("No route to host" in e.text for e in found.evidence)


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_screens_say_what_is_not_seen(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    made = FakeRun(gpus=gpus, ranks=2)
    hosts = [{"name": "alpha", "ranks": 2, "here": True}, {"name": "beta", "ranks": 2, "here": False}]
    store.write_json(made.run.manifest_path, {**made.run.manifest, "hosts": hosts, "world_size": 4})
    made.tick()
    said = "2 of 4 ranks are on other nodes, not sampled: beta"
    view = RunView(made.run)
    try:
        rows = overview(view.poll(), 80, 24, UNICODE, made.now)
    finally:
        view.close()
    assert any(said in "".join(text for text, _role in row) for row in rows)
    main(["watch", "--once", made.id])
    assert said in capsys.readouterr().out
