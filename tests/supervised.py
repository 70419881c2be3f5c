"""Runs under a real supervisor, with scripts of a few lines instead of a training."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.facts.model import Facts, Interpreter
from dstui.runs import store
from dstui.runs.control import stop
from dstui.runs.processes import alive, marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir

FACTS = Facts(gpus=(), interpreters=(Interpreter(sys.executable, "option", "3.11.0"),))
LAUNCHER = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(
        [sys.executable, "-u", sys.argv[1]],
        env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2"},
    )
    for r in range(2)
]
while True:  # as DeepSpeed's launch: the first bad rank ends the others
    codes = [p.poll() for p in ranks]
    bad = next((c for c in codes if c), None)
    if bad is not None:
        for p in ranks:
            p.terminate()
        for p in ranks:
            p.wait()
        sys.exit(bad)
    if codes == [0, 0]:
        sys.exit(0)
    time.sleep(1)  # as DeepSpeed's
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., RunDir]]:
    runs: list[RunDir] = []
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    def go(source: str, *args: str, ranks: bool = False, **more: Any) -> RunDir:
        (tmp_path / "train.py").write_text(source)
        if ranks:  # what stands for torchrun: an interpreter that starts the launcher above
            wrapper = tmp_path / "python"
            wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} -u launcher.py train.py\n")
            wrapper.chmod(0o755)
            more = {"num_gpus": 2, **more, "python": str(wrapper), "launcher": "torchrun"}
        spec = RunSpec("train.py", args, **{"launcher": "python", "cwd": str(tmp_path), **more})
        runs.append(start(spec, FACTS, preflight=False))
        return runs[-1]

    yield go
    for run in runs:
        if run.path.exists() and not run.has_ended():
            stop(run, now=True)
        for p in marked(run.id):
            send(p, signal.SIGKILL)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


def ended(run: RunDir, seconds: float = 90) -> dict[str, Any]:
    return until(lambda: run.exit, seconds)


def says(run: RunDir, text: str) -> None:
    until(lambda: text in run.out_log.read_text(errors="replace"))


def events(run: RunDir) -> list[str]:
    return [json.loads(line)["event"] for line in run.events_path.read_text().splitlines()]


def lost(run: RunDir) -> None:
    """Kill its supervisor."""
    supervisor = run.process("supervisor")
    assert supervisor is not None
    send(supervisor, signal.SIGKILL)
    until(lambda: not alive(supervisor))
    assert store.state(run) == "lost"
