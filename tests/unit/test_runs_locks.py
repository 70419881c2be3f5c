"""Locks of op builds that die with a run: its supervisor removes exactly these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstui.runs.adopt import adopt_lost
from dstui.runs.control import stop
from dstui.runs.ops import HeldLock, find_locks, held_by, remove_dead
from dstui.runs.processes import send
from dstui.runs.store import RunDir
from tests.supervised import ended, events, lost, says, until

HOLDS = """
import os, sys, time
folder = os.path.join(os.environ['TORCH_EXTENSIONS_DIR'], 'py311_cpu', 'cpu_adam')
os.makedirs(folder, exist_ok=True)
fd = os.open(os.path.join(folder, 'lock'), os.O_CREAT | os.O_EXCL)  # as torch.utils.file_baton
print('up', flush=True)
time.sleep(99)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "extensions"
    folder.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


def lock(root: Path, op: str = "cpu_adam") -> Path:
    return root / "py311_cpu" / op / "lock"


@pytest.fixture
def other(root: Path) -> Iterator[Path]:
    """A lock that another program holds, and beside it one that a dead one left."""
    code = HOLDS.replace("cpu_adam", "fused_adam").replace("py311_cpu", "py311_cpu")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        dead = lock(root, "async_io")
        dead.parent.mkdir(parents=True)
        dead.touch()
        yield lock(root, "fused_adam")
        assert dead.exists(), "not ours to remove"
        holder.kill()


@pytest.mark.parametrize("now", [True, False])
def test_a_stop_during_a_build_leaves_no_lock(
    begin: Callable[..., RunDir], root: Path, other: Path, now: bool
) -> None:
    run = begin(HOLDS)
    says(run, "up")
    assert lock(root).exists()
    assert stop(run, now=now).state == "stopped"
    assert (run.exit or {})["locks_removed"] == [str(lock(root))]
    assert not lock(root).exists() and other.exists()
    assert events(run).count("op_lock_removed") == 1


def test_a_build_that_was_killed_leaves_no_lock(
    begin: Callable[..., RunDir], root: Path, other: Path
) -> None:
    run = begin(HOLDS)
    until(lambda: "op_lock" in events(run))  # seen within the sampler's interval
    launcher = run.process("launcher")
    assert launcher is not None
    send(launcher, signal.SIGKILL)
    assert ended(run)["outcome"] == "failed"
    assert not lock(root).exists() and other.exists()


def test_the_adopter_removes_what_the_dead_supervisor_had_seen(
    begin: Callable[..., RunDir], root: Path, other: Path
) -> None:
    run = begin(HOLDS)
    until(lambda: "op_lock" in events(run))
    lost(run)
    stop(run, now=True)  # nobody is there to remove it
    assert lock(root).exists()
    assert adopt_lost() == [run]
    assert ended(run)["locks_removed"] == [str(lock(root))]
    assert not lock(root).exists() and other.exists()


def test_a_finished_build_is_nobody_s_business(begin: Callable[..., RunDir], root: Path) -> None:
    run = begin(HOLDS.replace("time.sleep(99)", "os.unlink(os.path.join(folder, 'lock')); os.close(fd)"))
    assert ended(run)["locks_removed"] == [] and "op_lock_removed" not in events(run)


def held(path: Path) -> HeldLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL)
    try:
        (found,) = held_by([os.getpid()], path.parents[2])
    finally:
        os.close(fd)
    return found


def test_one_that_was_made_anew_is_another(root: Path) -> None:
    seen = held(lock(root))
    lock(root).unlink()
    lock(root).touch()
    os.utime(lock(root), ns=(seen.made + 1, seen.made + 1))  # its inode may be the old one's
    assert not remove_dead(seen) and lock(root).exists()


def test_one_that_is_held_again_stays(root: Path) -> None:
    seen = held(lock(root))
    with lock(root).open():
        assert not remove_dead(seen) and lock(root).exists()
    assert remove_dead(seen) and not lock(root).exists()
    assert not remove_dead(seen)


def test_locks_elsewhere_are_not_seen(root: Path, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open():
        assert held_by([os.getpid()], root) == set()
    assert held_by([2**22 + 1], root) == set()  # no such process


def test_a_holder_whose_other_files_come_and_go_is_still_the_holder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that compiles opens and closes files all the time: one that is gone when it is looked at hides no
    other, or a build that goes on would be called dead and its lock removed under it."""
    held = lock(root)
    held.parent.mkdir(parents=True)
    fd = os.open(held, os.O_CREAT | os.O_EXCL)
    real, first = os.readlink, f"/proc/{os.getpid()}/fd/0"

    def gone(path: str) -> str:
        if path == first:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", gone)
    (found,) = find_locks(root)
    assert (found.holder, found.gone) == (os.getpid(), False)
    assert [h.path for h in held_by([os.getpid()], root)] == [str(held)]
    os.close(fd)
