"""Runs whose supervisor was killed are taken over by the next call of dstui on their host: ``adopt_lost()``.

The new supervisor is no parent of the ranks, so it sees them end but learns no exit code of the launcher: the run's
outcome then is ``lost`` and its code null, whatever the log says. Until then the run counts as running again: it is
sampled, its log kept, and it can be stopped. Codes of ranks are recorded where the kernel still shows them (a zombie
that its launcher has not reaped yet); nothing is guessed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dstui.errors import DstuiError
from dstui.runs import store
from dstui.runs.processes import for_supervisor, here
from dstui.runs.store import RunDir


def is_lost_here(run: RunDir) -> bool:
    """A run of this user on this host, boot and pid namespace whose supervisor is gone without a word."""
    try:
        return (
            run.exit is None
            and run.path.stat().st_uid == os.getuid()
            and run.place() == here()
            and store.state(run) == "lost"
        )
    except (DstuiError, OSError):
        return False


def adopt_lost() -> list[RunDir]:
    """Take over every such run; those that were. Never raises: it is no one's main purpose."""
    try:
        runs = store.list_runs()
    except DstuiError:
        return []
    return [run for run in runs if is_lost_here(run) and adopt(run)]


def is_over(run: RunDir) -> bool:
    """Whether ``run`` has ended. For whoever waits for it: one that lost its supervisor here gets a new one first."""
    state = store.state(run)
    if state == "lost" and is_lost_here(run) and adopt(run):
        state = store.state(run)
    return state not in store.LIVE


def adopt(run: RunDir) -> bool:
    """Start a supervisor for the lost ``run``; True when one is at work (or has just written the end)."""
    from dstui.runs.start import await_answer  # costs what `runs` and `watch` do not need

    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "dstui.runs.adopter", str(run.path), str(write_end)],
            cwd=str(Path(__file__).resolve().parents[2]),
            env=for_supervisor(os.environ, run.id),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    except OSError:
        os.close(read_end)
        return False
    finally:
        os.close(write_end)
    try:
        child.wait(30)
        answer = await_answer(read_end)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        answer = None
    finally:
        os.close(read_end)
    return bool(answer and answer.get("ok"))
