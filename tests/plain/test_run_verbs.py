"""run, runs, stop, logs, rm as a user types them (a plain Python script stands for the training)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstui import cli
from dstui.facts.model import Facts, Gpu, Interpreter
from dstui.plain import logs
from dstui.plain.runs import table
from dstui.runs import store
from dstui.runs.control import stop


@pytest.fixture(autouse=True)
def no_run_survives() -> Iterator[None]:
    yield
    for run in store.list_runs():
        stop(run, now=True)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.py").write_text("print('one')\nprint('two')\nprint('three')\n")
    (tmp_path / "long.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    return tmp_path


def dstui(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.main(list(argv))
    out, err = capfd.readouterr()
    return code, out, err


RUN = ("run", "--launcher", "python", "--python", sys.executable)


def begin(capfd: pytest.CaptureFixture[str], *argv: str) -> store.RunDir:
    code, out, err = dstui(capfd, *RUN, "--json", *argv)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["schema_version"] == 1
    run = store.find_run(answer["run"])
    assert str(run.path) == answer["dir"]
    return run


def test_wait_tells_the_fate(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _err = dstui(capfd, *RUN, "--wait", "--", "short.py")
    assert code == 0 and "finished" in out
    assert "diagnose" not in dstui(capfd, "runs")[2]
    code, out, _err = dstui(capfd, *RUN, "--wait", "--", "bad.py")
    assert code == 1 and "failed" in out
    assert "dstui diagnose last" in dstui(capfd, "runs")[2]
    (work / "oom.py").write_text(
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB')\n"
    )
    code, out, _err = dstui(capfd, *RUN, "--wait", "--", "oom.py")
    _code, watched, _err = dstui(capfd, "watch", "--plain")
    cause = re.search(r"^  (DR\d{3} \S+ \(\w+\))$", out, re.M)
    assert code == 1 and cause is not None and cause.group() in watched
    assert f"dstui diagnose {store.list_runs()[0].id}" in out


def test_a_remembered_option_is_said(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "ds.json").write_text('{"train_batch_size": 1}')
    command = [*RUN, "--no-preflight", "--config", "ds.json", "--", "short.py"]
    _code, _out, err = dstui(capfd, *command, "--cfg", "{config}")
    assert "--cfg" not in err
    _code, _out, err = dstui(capfd, *command)
    assert "the config goes in by --cfg {config}, as short.py got it before" in err


def test_of_runs_of_one_name_the_newest_is_read(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "other.py").write_text("print('four')\n")
    old = begin(capfd, "--name", "mine", "--", "short.py")
    new = begin(capfd, "--name", "mine", "--", "other.py")
    while store.state(new) != "finished" or store.state(old) != "finished":
        time.sleep(0.05)
    for verb in (
        ["logs"],
        ["watch", "--once"],
        ["watch", "--plain"],
        ["diagnose"],
        ["report"],
        ["compare", old.id],
    ):
        code, out, err = dstui(capfd, *verb, "mine")
        assert code == 0, (verb, err)
        assert f"2 runs are named 'mine'; this is the newest, {new.id}" in err
    code, out, _err = dstui(capfd, "logs", "mine")
    assert out == "four\n"
    for verb in (["stop"], ["rm"]):  # what changes something never guesses
        code, _out, err = dstui(capfd, *verb, "mine")
        assert code == 2 and old.id in err and new.id in err
    assert old.path.exists() and new.path.exists()


def test_an_event_and_a_rank_s_log_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    words = ("run", "--launcher", "python", "--python", sys.executable, "--no-preflight", "--wait")
    code, _out, err = dstui(
        capfd, *words, "--rank-logs", "--on-event", "echo $DSTUI_EVENT $DSTUI_RUN > said", "--", "train.py"
    )
    assert code == 0, err
    run = store.find_run("last")
    deadline = time.monotonic() + 30
    while not [e for e in run.events() if e["event"] == "hook"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "said").read_text() == f"end {run.id}\n"
    code, _out, err = dstui(capfd, "logs", "last", "--rank", "0")
    assert code == 2 and "no log of rank 0" in err and "python" in err
    (run.rank_logs).mkdir()
    for rank in (0, 1):
        (run.rank_logs / f"2026_rank{rank}.log").write_text(f"one of {rank}\ntwo of {rank}\n")
    code, out, _err = dstui(capfd, "logs", "last", "--rank", "1", "-n", "1")
    assert (code, out) == (0, "two of 1\n")
    code, _out, err = dstui(capfd, "logs", "last", "--rank", "7")
    assert code == 2 and "0, 1" in err


def test_the_way_of_a_run(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = begin(capfd, "--name", "mine", "--env", "A=b", "--", "long.py", "--x", "1")
    assert run.manifest["name"] == "mine" and run.manifest["env"]["A"] == "b"
    assert run.manifest["command"][-3:] == ["long.py", "--x", "1"]
    code, out, _err = dstui(capfd, "runs")
    assert code == 0 and run.id in out and "running" in out and "mine" in out
    code, _out, err = dstui(capfd, "rm", "mine")
    assert code == 2 and "dstui stop" in err and run.path.exists()
    code, out, _err = dstui(capfd, "stop", "mine")
    assert code == 0 and "stopped" in out
    code, out, _err = dstui(capfd, "stop", run.id, "--json")
    (answer,) = json.loads(out)["runs"]
    said = {"run": run.id, "ended": True, "state": "stopped", "already": True, "locks_removed": []}
    assert said.items() <= answer.items() and answer["problem"] is None
    code, out, _err = dstui(capfd, "logs", "mine")
    assert code == 0 and out.startswith("up\n")
    code, _out, _err = dstui(capfd, "rm", "last")
    assert code == 0 and not run.path.exists()
    code, out, _err = dstui(capfd, "runs", "--json")
    assert json.loads(out) == {"schema_version": 1, "runs": []}


def test_logs(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = begin(capfd, "--", "short.py")
    code, out, _err = dstui(capfd, "logs", "-f")  # ends with the run
    assert code == 0 and out == "one\ntwo\nthree\n" and run.has_ended()
    assert dstui(capfd, "logs", "-n", "1")[1] == "three\n"
    assert dstui(capfd, "logs", "-n", "2")[1] == "two\nthree\n"
    assert dstui(capfd, "logs", "-n", "99")[1] == "one\ntwo\nthree\n"
    assert dstui(capfd, "logs", "-n", "0")[1] == ""
    run.out_log.unlink()
    code, _out, err = dstui(capfd, "logs")
    assert code == 2 and "out.log" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run",), "no script"),
        (("run", "--", "none.py"), "none.py"),
        (("run", "--env", "X", "--", "short.py"), "NAME=VALUE"),
        (("run", "--master-port", "x", "--", "short.py"), "auto"),
        (("run", "--python", "/nowhere/python", "--", "short.py"), "/nowhere/python"),
        (("run", "--config", "none.json", "--", "short.py"), "none.json"),
        (("run", "--name", "a\nb", "--", "short.py"), "one line"),
        (("run", "--name", "\x1b[31mred", "--", "short.py"), "one line"),
        (("run", "--name", "n" * 300, "--", "short.py"), "100 characters"),
        (("stop", "nobody"), "no runs yet"),
        (("logs",), "no runs yet"),
        (("rm", "x"), "no runs yet"),
    ],
)
def test_bad_input(work: Path, capfd: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str) -> None:
    code, out, err = dstui(capfd, *argv)
    assert code == 2 and out == "" and words in err and err.startswith("error: ")
    assert store.list_runs() == []


def test_usage_errors_are_2(work: Path) -> None:
    for argv in (
        ("run", "--wait", "--watch", "--", "short.py"),
        ("stop",),
        ("run", "--engine", "x", "--", "a.py"),
    ):
        with pytest.raises(SystemExit) as e:
            cli.main(list(argv))
        assert e.value.code == 2


def test_problems_as_json(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _err = dstui(capfd, "run", "--json", "--", "none.py")
    answer = json.loads(out)
    assert code == 2 and answer["run"] is None
    assert "script-missing" in [p["code"] for p in answer["problems"]]


def test_ctrl_c_while_waiting_leaves_the_run(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import signal

    command = [sys.executable, "-m", "dstui", *RUN, "--json", "--wait", "--", "long.py"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    run = store.find_run(json.loads(waiting.stdout.readline())["run"])
    time.sleep(0.5)
    waiting.send_signal(signal.SIGINT)
    _out, err = waiting.communicate(timeout=10)
    assert waiting.returncode == 130 and f"dstui watch {run.id}" in err
    assert store.state(run) == "running"


def test_table_fits_80_columns() -> None:
    row: dict[str, Any] = {
        "run": "kfw7-1129-1920", "state": "running", "created_at": 0.0, "started_at": 1.0, "ended_at": None,
        "world_size": 8, "name": None, "script": "/a/b/finetune_lora.py", "problem": None,
    }  # fmt: skip
    text = table([row, row | {"state": "lost", "name": "x"}], now=90000.0)
    assert all(len(line) <= 80 for line in text.splitlines()) and "finetune_lora.py" in text
    odd = table([row | {"script": "/a/x\n\x1b[31my.py"}], now=90000.0)
    assert len(odd.splitlines()) == 2 and "\x1b" not in odd
    assert "?" in text.splitlines()[2]  # nobody knows how long a lost run ran


def test_a_damaged_run_is_listed_and_can_be_removed(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = store.create({})
    run.manifest_path.write_text("{")
    code, out, _err = dstui(capfd, "runs")
    assert code == 0 and run.id in out
    code, _out, _err = dstui(capfd, "rm", run.id)
    assert code == 0 and not run.path.exists()


NASTY = (
    b"\xff\xfe ok \x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m \x1bP1$r\x1b\\ \xc2\x9b31m \x07 b\x08 \x0e \r over\n"
    + "\u202e rtl \u4e2d\u6587\n".encode()
    + b"\x1b]52;c;aGVsbG8=\x07end\x1b(B\x1bcX\x1b7\n\x1b[38;5"
)


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([NASTY, b"\x1b", b"\x1b]", b"\xc2", b"a\tb"])))
)
def test_a_terminal_gets_no_control_characters_of_a_log(parts: list[bytes]) -> None:
    out: list[bytes] = []
    write = logs.Tame(out.append)
    for part in parts:
        write(part)
    text = b"".join(out).decode()
    assert not {
        c for c in text if c not in "\t\n\r" and (unicodedata.category(c) == "Cc" or c in "\u202e\u2066")
    }


def test_logs_on_a_terminal_and_in_a_file(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file gets the very bytes, a terminal what is harmless of them."""
    (work / "nasty.py").write_text(f"import sys; sys.stdout.buffer.write({NASTY!r})")
    assert dstui(capfd, *RUN, "--wait", "--", "nasty.py")[0] == 0
    command = [sys.executable, "-m", "dstui", "logs"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == NASTY
    master, slave = os.openpty()
    try:
        subprocess.run(command, stdout=slave, check=True)
        shown = os.read(master, 1 << 16)
    finally:
        os.close(master)
        os.close(slave)
    assert b"\x1b" not in shown and b"\x07" not in shown and b"\xc2\x9b" not in shown
    assert b"red" in shown and "\u4e2d\u6587".encode() in shown and b"endX" in shown


def test_more_ranks_than_gpus_are_said_whatever_the_checks(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three ranks on two cards: refused with both numbers; without checks never two in silence."""
    stand_in = work / "python"
    stand_in.write_text("#!/bin/sh\necho started\n")
    stand_in.chmod(0o755)
    cards = tuple(Gpu(i, uuid=f"GPU-{i}", name="H", processes=()) for i in range(2))
    packages = {"deepspeed": "0.19.8", "torch": "2.13.0"}
    it = Interpreter(str(stand_in), "option", "3.11.2", packages, torch_cuda="13.0")
    monkeypatch.setattr("dstui.facts.detect.detect", lambda **_k: Facts(gpus=cards, interpreters=(it,)))
    words = ("run", "--python", str(stand_in), "--num-gpus", "3")
    for more in ((), ("--no-preflight",)):
        code, _out, err = dstui(capfd, *words, *more, "--", "short.py")
        assert code == 2 and "3 ranks on 2 GPUs" in err and "--num-gpus 2" in err, err
    assert store.list_runs() == []
    code, _out, err = dstui(capfd, *words, "--launcher", "torchrun", "--", "short.py")
    assert code == 2 and "3 ranks on 2 GPUs" in err
    code, out, err = dstui(
        capfd, *words, "--launcher", "torchrun", "--no-preflight", "--json", "--wait", "--", "short.py"
    )
    assert code == 0 and "warning: 3 ranks on 2 GPUs" in err
    manifest = store.find_run(json.loads(out)["run"]).manifest
    argv = manifest["command"]
    assert manifest["world_size"] == 3 and argv[argv.index("--nproc_per_node") + 1] == "3"
