"""DeepSpeed's compiled ops: which ones a config makes the engine load, where they are built, who holds a build's lock.

torch.utils.cpp_extension builds an op in ``<root>/<op>`` or ``<root>/<tag>/<op>`` and guards the folder by a file
``lock`` (torch 2.0-2.13, ``utils/file_baton.py``): created with O_EXCL, kept open by its holder, removed at the end.
Everybody else waits until the file is gone, without end and without a word; a build that was killed leaves it.
The holder's descriptor is what tells a build that goes on from a lock that nobody will ever release.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CPU_COLLECTIVES = "deepspeed_shm_comm"
"""Loaded by every rank on a CPU (deepspeed/comm/torch.py ``build_shm_op``)."""
SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "9p", "afs", "panfs", "wekafs"})  # fmt: skip
"""File systems on which a process of another machine may hold the lock."""
LONG = 1800.0
"""Seconds after which a lock on such a file system counts as left behind too: no op takes so long to build."""


def offload_device(data: Mapping[str, Any], which: str) -> str:
    """``none cpu nvme`` of ``offload_optimizer`` or ``offload_param``, the old boolean forms included."""
    zero = data.get("zero_optimization")
    if not isinstance(zero, dict):
        return "none"
    block = zero.get(which)
    if isinstance(block, dict):
        return str(
            block.get("device", "cpu")
        ).lower()  # the block's default device (runtime/zero/offload_config.py)
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_params"}[which]
    return "cpu" if zero.get(old) is True else "none"


def ops_needed(data: Mapping[str, Any]) -> tuple[str, ...]:
    """DeepSpeed ops that this config makes the engine load (runtime/engine.py ``_configure_basic_optimizer``).

    Offloaded Adam is DeepSpeedCPUAdam, a C++ build; Adam without offload is FusedAdam, a CUDA build on a
    GPU and a C++ one on a CPU; ``torch_adam`` avoids the latter.
    """
    found: list[str] = []
    optimizer = data.get("optimizer")
    kind = str(optimizer.get("type", "")).lower() if isinstance(optimizer, dict) else ""
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    offload = offload_device(data, "offload_optimizer")
    if offload in ("cpu", "nvme"):
        found.append({"adagrad": "cpu_adagrad", "lion": "cpu_lion"}.get(kind, "cpu_adam"))
    elif kind in ("adam", "adamw") and not (isinstance(params, dict) and params.get("torch_adam")):
        found.append("fused_adam")
    if "nvme" in (offload, offload_device(data, "offload_param")):
        found.append("async_io")
    return tuple(found)


def extensions_root(env: Mapping[str, str]) -> Path:
    """Where torch builds ops with this environment (cpp_extension.py ``_get_build_directory``)."""
    cache = env.get("TORCH_EXTENSIONS_DIR")
    if cache:
        return Path(cache).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


@dataclass(frozen=True)
class Lock:
    """A lock file. ``holder``: pid of the process that has it open, None when there is none to be seen.

    ``gone``: the holder is surely or almost surely dead; False with ``holder`` None: it may live where it cannot
    be seen from here (another user's process, another machine on the same file system).
    """

    path: Path
    op: str
    age: float
    holder: int | None
    gone: bool


def find_locks(root: Path, tag: str | None = None) -> list[Lock]:
    """Locks below ``root``, oldest first. ``tag``: only folders ``<tag>*`` (``py311``) beside ``<root>/<op>``."""
    found = []
    for path in _lock_files(root, tag):
        try:
            st = path.stat()
        except OSError:
            continue  # released just now
        holder = _holder(path, st)
        age = max(0.0, time.time() - st.st_mtime)
        gone = (
            holder is None
            and (os.getuid() in (0, st.st_uid))
            and (age > LONG or _filesystem(path) not in SHARED)
        )
        if holder is None and not path.exists():
            continue
        found.append(Lock(path, path.parent.name, age, holder, gone))
    return sorted(found, key=lambda lock: -lock.age)


def _lock_files(root: Path, tag: str | None) -> Iterator[Path]:
    try:
        folders = [Path(e.path) for e in os.scandir(root) if e.is_dir()]
    except OSError:
        return
    for folder in folders:
        if (folder / "lock").is_file():
            yield folder / "lock"
        elif tag is None or folder.name.startswith(tag):
            try:
                names = [e.path for e in os.scandir(folder) if e.is_dir()]
            except OSError:
                continue
            yield from (p for p in (Path(n, "lock") for n in names) if p.is_file())


def _holder(path: Path, st: os.stat_result) -> int | None:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        for _target, there in _open_locks(int(entry.name)):
            if (there.st_dev, there.st_ino) == (st.st_dev, st.st_ino):
                return int(entry.name)
    return None


def _open_locks(pid: int) -> Iterator[tuple[str, os.stat_result]]:
    """Files named ``lock`` that ``pid`` has open; a descriptor that it closes meanwhile hides no other."""
    try:
        descriptors = [fd.path for fd in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return  # ended, or another user's
    for path in descriptors:
        try:
            target = os.readlink(path)  # noqa: PTH115 - thousands of them
            if target.endswith("/lock"):
                yield target, os.stat(path)  # noqa: PTH116
        except OSError:
            continue


class HeldLock(NamedTuple):
    """A lock as a process of the run held it: the file's identity, so that a later one of the same name is not it."""

    path: str
    device: int
    inode: int
    made: int
    """mtime in nanoseconds."""


def held_by(pids: Iterable[int], root: Path) -> set[HeldLock]:
    """The locks below ``root`` that these processes have open."""
    below = os.path.realpath(root) + "/"
    found = set()
    for pid in pids:
        for target, s in _open_locks(pid):
            if target.startswith(below):
                found.add(HeldLock(target, s.st_dev, s.st_ino, s.st_mtime_ns))
    return found


def remove_dead(lock: HeldLock) -> bool:
    """Remove a lock whose holder, a process of the run, is dead; False: it is gone, another one, or held by somebody."""
    path = Path(lock.path)
    try:
        s = path.stat()
        same = (s.st_dev, s.st_ino, s.st_mtime_ns) == (lock.device, lock.inode, lock.made)
        if not same or _holder(path, s) is not None:
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _filesystem(path: Path) -> str:
    """Type of the file system that holds ``path``; ``""`` where the kernel does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        parts = line.split()
        at = parts[1].encode().decode("unicode_escape") if len(parts) > 2 else ""
        if at and (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, kind = at, parts[2]
    return kind.removeprefix("fuse.")


def waiting_for(locks: Iterable[Lock], wanted: Iterable[str], members: frozenset[int]) -> Lock | None:
    """The lock that a run with these processes can be waiting for: not held by one of its own."""
    names = set(wanted)
    for lock in locks:
        if lock.op in names and lock.holder not in members:
            return lock
    return None
