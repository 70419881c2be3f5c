"""Processes by identity (pid and start time), read from ``/proc``: what survives pid reuse and namespaces."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

RUN_ID_VARIABLE = "DSTUI_RUN_ID"
"""Set in the environment of every process of a run, so that a rank can be found when its parents died."""


SUPERVISES_VARIABLE = "DSTUI_SUPERVISES"
"""Set for a supervisor alone: the run that it is for. One that was started inside another run belongs to no run."""

STOP_NOW = signal.SIGUSR2
"""To a supervisor: SIGTERM asks it to stop the run, this one to stop it at once. For a disk that takes no request."""


def for_supervisor(environ: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The environment of a supervisor of ``run_id``, whoever starts it: a training may start runs as well."""
    return {k: v for k, v in environ.items() if k != RUN_ID_VARIABLE} | {SUPERVISES_VARIABLE: run_id}


class Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number.

    ``start`` is field 22 of ``/proc/PID/stat``: clock ticks after boot.
    """

    pid: int
    start: int


class Place(NamedTuple):
    """Where a pid means something: host name, boot and pid namespace."""

    host: str
    boot_id: str | None
    pid_namespace: str | None


def here() -> Place:
    """This host, boot and pid namespace (containers on one host share the first two)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = None
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None
    return Place(socket.gethostname(), boot, namespace)


class Stat(NamedTuple):
    name: str
    state: str
    parent: int
    group: int
    session: int
    start: int


def stat(pid: int) -> Stat | None:
    """``/proc/PID/stat``, None when there is no such process."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    name = head.partition(b"(")[2].decode(errors="replace")
    return Stat(name, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def identify(pid: int) -> Process | None:
    """``pid`` with its start time; None when it is gone."""
    found = stat(pid)
    return None if found is None else Process(pid, found.start)


def alive(process: Process) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    found = stat(process.pid)
    return found is not None and found.start == process.start and found.state not in "ZX"


def all_stats() -> dict[int, Stat]:
    found: dict[int, Stat] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            s = stat(int(entry.name))
            if s is not None:
                found[int(entry.name)] = s
    return found


class Family:
    """The descendants of one process, looked at again and again on a machine with thousands of others.

    A process that is no descendant never becomes one (only descendants are given a new parent within the family), so
    its ``stat`` is read once; all are read anew every ``ANEW`` seconds, for numbers that were used again.
    """

    ANEW = 60.0

    def __init__(self, root: int) -> None:
        self._root = root
        self._strangers: set[int] = set()
        self._read_at = -self.ANEW

    def stats(self, now: float) -> dict[int, Stat]:
        """Of every descendant (zombies too) and of processes that are new. ``now``: seconds of any steady clock."""
        pids = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()}
        if now - self._read_at >= self.ANEW:
            self._read_at = now
            self._strangers.clear()
        self._strangers &= pids
        found = {pid: s for pid in pids - self._strangers if (s := stat(pid)) is not None}
        own = _below(self._root, found)
        self._strangers |= found.keys() - own - {self._root}
        return found


def _below(root: int, stats: dict[int, Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, s in stats.items():
        children.setdefault(s.parent, []).append(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        new = [c for c in children.get(queue.pop(), ()) if c not in found]
        found.update(new)
        queue += new
    return found


def descendants(root: int, stats: dict[int, Stat] | None = None) -> list[Process]:
    """Every living child of ``root``, and theirs, parents before children; ``root`` itself left out."""
    stats = all_stats() if stats is None else stats
    children: dict[int, list[int]] = {}
    for pid, s in stats.items():
        children.setdefault(s.parent, []).append(pid)
    found: list[Process] = []
    queue = list(children.get(root, ()))
    seen = {root}
    while queue:
        pid = queue.pop(0)
        if pid in seen:
            continue
        seen.add(pid)
        if stats[pid].state not in "ZX":
            found.append(Process(pid, stats[pid].start))
        queue.extend(children.get(pid, ()))
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment that ``pid`` was started with; empty when it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def marked(run_id: str, strangers: set[int] | None = None) -> list[Process]:
    """Living processes of ours that carry the run's id in their environment, wherever they hang in the tree.

    ``strangers``: pids that were looked at before and do not; they are left out, and the new ones added.
    """
    needle = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found: list[Process] = []
    pids = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()}
    if strangers is not None:
        strangers &= pids
        pids -= strangers
    for pid in pids:
        s = stat(pid)
        if s is None or s.state in "ZX" or pid == os.getpid():
            continue
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if needle in raw.split(b"\0"):
            found.append(Process(pid, s.start))
        elif strangers is not None and raw:
            strangers.add(pid)
    return found


def send(process: Process, number: int) -> bool:
    """Signal this very process; False when it is gone. Raises PermissionError.

    The pid is pinned by a pidfd before its start time is compared, so a reused number cannot be hit.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except (ProcessLookupError, AttributeError):
        return False
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        return _send_by_number(process, number)  # Linux before 5.3
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _send_by_number(process: Process, number: int) -> bool:
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def still_alive(processes: Iterable[Process]) -> list[Process]:
    return [p for p in processes if alive(p)]


def signal_name(number: int) -> str:
    """``9`` -> ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
