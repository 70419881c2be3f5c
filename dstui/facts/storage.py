"""Folders that could hold NVMe offload files: where they are mounted and whether DeepSpeed's I/O works there.

DeepSpeed's async_io op opens its swap files with O_DIRECT, so that is tried for real with a temporary file.
Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import tempfile
from pathlib import Path

from dstui.facts.host import Mount, mounts
from dstui.facts.model import Storage
from dstui.facts.system import System
from dstui.i18n import _

USUAL = ("/local_nvme", "/scratch", "/nvme", "/mnt/nvme", "/mnt/nvme0", "/raid", "/local")
"""Folders where clusters and cloud images put a local disk."""
MOST = 8
_BLOCK = 4096
_MEMORY = ("tmpfs", "ramfs")


def candidates(system: System, table: list[Mount]) -> list[str]:
    """Existing folders worth showing: the working directory, temporary folders, usual places, NVMe mounts."""
    wanted = [system.cwd, system.environ.get("TMPDIR", ""), "/tmp", *USUAL]
    wanted += [m.point for m in table if re.match(r"/dev/(nvme|md)\d", m.source) and _is_data(m.point)]
    found: list[str] = []
    for name in wanted:
        if not name:
            continue
        path = os.path.normpath(name)
        if path not in found and system.path(path).is_dir():
            found.append(path)
    return found[:MOST]


def _is_data(point: str) -> bool:
    return not re.match(r"/(boot|efi|etc|proc|sys|dev|run)(/|$)", point) and point != "/"


def mount_of(path: str, table: list[Mount]) -> Mount | None:
    """The mount that holds ``path`` (longest mount point; of equal ones the latest)."""
    best: Mount | None = None
    for m in table:
        inside = m.point == "/" or path == m.point or path.startswith(m.point + "/")
        if inside and (best is None or len(m.point) >= len(best.point)):
            best = m
    return best


def rotational(system: System, mount: Mount) -> bool | None:
    """Whether a disk below ``mount`` spins, through partitions, device mapper and md; None when unknown."""
    name = ""
    if system.exists(f"/sys/dev/block/{mount.device}"):
        name = system.path(f"/sys/dev/block/{mount.device}").resolve().name
    elif mount.source.startswith("/dev/"):  # btrfs and friends have a device number of their own
        name = Path(os.path.realpath(system.path(mount.source))).name
    return _spins(system, name, 0) if name else None


def _spins(system: System, name: str, depth: int) -> bool | None:
    node = system.path(f"/sys/class/block/{name}")
    if depth > 8 or not node.exists():
        return None
    try:
        below = [p.name for p in (node / "slaves").iterdir()]
    except OSError:
        below = []
    if below:
        answers = [_spins(system, b, depth + 1) for b in below]
        return None if None in answers else any(answers)
    real = node.resolve()
    for folder in (real, real.parent):  # a partition has no queue of its own
        try:
            spins = (folder / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
        # A hypervisor's disk says 1 when nobody told it otherwise: that is no answer.
        return None if spins and re.match(r"(vd|xvd)[a-z]", folder.name) else spins
    return None


def try_direct(folder: str) -> tuple[bool | None, bool | None, str | None]:
    """(writable, O_DIRECT works, reason when one is not True): opens and writes a temporary file, removed after."""
    try:
        fd, name = tempfile.mkstemp(prefix=".dstui-", dir=folder)
    except OSError as e:
        return False, None, e.strerror or str(e)
    try:
        os.close(fd)
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return True, None, _("this system has no O_DIRECT")
        try:
            fd = os.open(name, os.O_RDWR | flag)
        except OSError as e:
            return True, False, e.strerror or str(e)
        block = mmap.mmap(-1, _BLOCK)  # page aligned, as O_DIRECT demands
        try:
            os.write(fd, block)
            return True, True, None
        except OSError as e:
            # EINVAL on write: some file systems accept the flag and refuse the transfer.
            known = e.errno in (errno.EINVAL, errno.EOPNOTSUPP)
            return True, False if known else None, e.strerror or str(e)
        finally:
            block.close()
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def read_storage(system: System | None = None) -> tuple[tuple[Storage, ...], dict[str, str]]:
    """Candidate folders and the reasons for unknown fields (keys ``storage.<position>.<field>``)."""
    system = system or System()
    table = mounts(system)
    found: list[Storage] = []
    unknown: dict[str, str] = {}
    for position, path in enumerate(candidates(system, table)):
        at = f"storage.{position}"
        m = mount_of(os.path.realpath(path), table)
        total = free = None
        try:
            s = os.statvfs(system.path(path))
            total, free = s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize
        except OSError as e:
            unknown[f"{at}.free"] = e.strerror or str(e)
        spins = rotational(system, m) if m else None
        if m is None:
            unknown[f"{at}.mount"] = _("the mount table cannot be read")
        elif m.kind in _MEMORY:
            spins = False
        elif spins is None:
            unknown[f"{at}.rotational"] = _("no disk that tells its kind is seen behind this mount")
        writable, direct, why = try_direct(str(system.path(path)))
        if why and direct is None:
            unknown[f"{at}.o_direct"] = why
        found.append(
            Storage(
                path=path,
                mount=m.point if m else None,
                filesystem=m.kind if m else None,
                device=m.source if m else None,
                total=total,
                free=free,
                rotational=spins,
                writable=writable,
                o_direct=direct,
            )
        )
    return tuple(found), unknown
