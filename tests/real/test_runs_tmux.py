"""A run started in tmux outlives the front end (kill -9) and the tmux server; another terminal joins and ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstui.runs import store
from dstui.runs.processes import alive, descendants, marked
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.pty]
DSTUI = [sys.executable, "-m", "dstui"]


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    tool = shutil.which("tmux")
    if tool is None:
        pytest.skip("needs tmux")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    command = [tool, "-S", str(tmp_path / "sock"), "-f", "/dev/null"]
    yield command
    subprocess.run([*command, "kill-server"], capture_output=True, check=False)
    for run in store.list_runs():
        subprocess.run([*DSTUI, "stop", "--now", run.id], capture_output=True, check=False)


def until(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if callable(condition) and condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


def step(run: RunDir) -> int:
    lines = [x for x in run.out_log.read_text().splitlines() if x.startswith("step ")]
    return int(lines[-1].split()[1]) if lines else 0


def test_front_end_and_tmux_die_the_run_goes_on(tmux: list[str]) -> None:
    demo = [*DSTUI, "demo", "--ranks", "2", "--stage", "3", "--offload", "optimizer", "--steps", "1000000"]
    demo += ["--python", sys.executable]
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "24", *demo], check=True)
    until(lambda: store.list_runs(), 30, "a run")
    run = store.find_run("last")
    until(lambda: step(run) > 2, 300, "training")
    pane = subprocess.run(
        [*tmux, "list-panes", "-F", "#{pane_pid}"], capture_output=True, text=True, check=True
    )
    server = subprocess.run(
        [*tmux, "display-message", "-p", "#{pid}"], capture_output=True, text=True, check=True
    )
    front_end = int(pane.stdout)
    os.kill(front_end, signal.SIGKILL)
    os.kill(int(server.stdout), signal.SIGKILL)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    ranks = descendants(supervisor.pid)
    at = step(run)
    until(lambda: step(run) > at + 3, 60, "more steps")
    joined = subprocess.run([*DSTUI, "watch", "--once", run.id], capture_output=True, text=True, check=False)
    assert joined.returncode == 0 and "running" in joined.stdout, joined.stdout + joined.stderr
    ended = subprocess.run([*DSTUI, "stop", run.id], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "stopped" in ended.stdout, ended.stdout + ended.stderr
    until(lambda: not any(alive(p) for p in [supervisor, *ranks]) and marked(run.id) == [], 5, "the end")
