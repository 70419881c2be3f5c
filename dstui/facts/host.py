"""RAM, cgroup, limits and cores of this machine, read from ``/proc`` and ``/sys``.

Sizes are bytes. Formats: proc(5), cgroups(7), kernel Documentation/admin-guide/cgroup-v1/memory.rst and
cgroup-v2.rst.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple

from dstui.facts.model import UNLIMITED, Cgroup, Host
from dstui.facts.system import System
from dstui.i18n import _

_V1_UNLIMITED = 1 << 62
"""A v1 memory limit that is not set reads as 2**63 rounded down to a page; no machine has 4 EiB."""
_CAP_IPC_LOCK = 14
"""linux/capability.h"""


class Mount(NamedTuple):
    """One line of ``/proc/self/mountinfo``."""

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: str


def mounts(system: System) -> list[Mount]:
    """The mount table of this process, oldest first; empty when it cannot be read."""
    found = []
    for line in (system.read("/proc/self/mountinfo") or "").splitlines():
        left, dash, right = line.partition(" - ")
        a, b = left.split(), right.split()
        if not dash or len(a) < 6 or len(b) < 2:
            continue
        found.append(
            Mount(a[2], _unescape(a[3]), _unescape(a[4]), b[0], _unescape(b[1]), b[2] if len(b) > 2 else "")
        )
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


def _pairs(text: str | None) -> dict[str, int]:
    """``name 12`` or ``name: 12 kB`` lines as numbers (kB already times 1024)."""
    out: dict[str, int] = {}
    for line in (text or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            out[words[0]] = int(words[1]) * (1024 if len(words) > 2 and words[2] == "kB" else 1)
    return out


def _own_cgroups(system: System, pid: str) -> tuple[dict[str, str], str | None]:
    """(v1 controller -> path, v2 path) of a process."""
    v1: dict[str, str] = {}
    v2: str | None = None
    for line in (system.read(f"/proc/{pid}/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and parts[1] == "":
            v2 = parts[2]
        else:
            for controller in parts[1].split(","):
                v1[controller] = parts[2]
    return v1, v2


def _folders(system: System, table: list[Mount], kind: str, controller: str | None, path: str) -> list[str]:
    """Folders of the cgroup and its parents that this process can see, the own one first."""
    for m in reversed(table):
        if m.kind != kind or (controller and controller not in m.options.split(",")):
            continue
        own = PurePosixPath(path)
        if m.root != "/" and own.is_relative_to(m.root):
            own = PurePosixPath("/") / own.relative_to(m.root)
        elif m.root != "/":
            own = PurePosixPath("/")
        chain = [own, *own.parents]
        found = [str(PurePosixPath(m.point) / str(c).lstrip("/")) for c in chain]
        found = [f for f in found if system.exists(f)]
        if found:
            return found
    return []


def read_cgroup(system: System | None = None, pid: str = "self") -> tuple[Cgroup | None, str | None]:
    """The memory cgroup of process ``pid`` and, when it is None, the reason.

    ``limit``/``usage``/``reclaimable`` belong to the tightest limit among the cgroup and its visible
    parents (the one that kills first); ``oom_kills`` to the process's own cgroup.
    """
    system = system or System()
    table = mounts(system)
    v1, v2 = _own_cgroups(system, pid)
    if "memory" in v1:
        folders = _folders(system, table, "cgroup", "memory", v1["memory"])
        if folders:
            return _read_v1(system, folders), None
    if v2 is not None:
        folders = _folders(system, table, "cgroup2", None, v2)
        if folders:
            return _read_v2(system, folders)
    return None, _("no memory cgroup is mounted that holds this process")


def _read_v1(system: System, folders: list[str]) -> Cgroup:
    best, at = UNLIMITED, folders[0]
    for folder in folders:
        limit = system.number(f"{folder}/memory.limit_in_bytes")
        if limit is not None and limit < _V1_UNLIMITED and (best == UNLIMITED or limit < best):
            best, at = limit, folder
    stat = _pairs(system.read(f"{at}/memory.stat"))
    return Cgroup(
        version=1,
        limit=best,
        usage=system.number(f"{at}/memory.usage_in_bytes"),
        reclaimable=_clean_cache(
            stat, "total_inactive_file", "total_active_file", "total_dirty", "total_writeback"
        ),
        oom_kills=_pairs(system.read(f"{folders[0]}/memory.oom_control")).get("oom_kill"),
        path=at,
    )


def _read_v2(system: System, folders: list[str]) -> tuple[Cgroup | None, str | None]:
    if not any(system.exists(f"{f}/memory.max") or system.exists(f"{f}/memory.current") for f in folders):
        root_only = len(folders) == 1
        if root_only and system.exists(f"{folders[0]}/cgroup.controllers"):
            controllers = (system.read(f"{folders[0]}/cgroup.controllers") or "").split()
            if "memory" in controllers:  # the real root cgroup has no memory.max: nothing limits it
                return Cgroup(version=2, limit=UNLIMITED, path=folders[0]), None
        return None, _("the memory controller is not enabled in this cgroup")
    best, at = UNLIMITED, folders[0]
    for folder in folders:
        limit = system.number(f"{folder}/memory.max")  # "max" is no number: not set
        if limit is not None and (best == UNLIMITED or limit < best):
            best, at = limit, folder
    stat = _pairs(system.read(f"{at}/memory.stat"))
    found = Cgroup(
        version=2,
        limit=best,
        usage=system.number(f"{at}/memory.current"),
        reclaimable=_clean_cache(stat, "inactive_file", "active_file", "file_dirty", "file_writeback"),
        oom_kills=_pairs(system.read(f"{folders[0]}/memory.events")).get("oom_kill"),
        path=at,
    )
    return found, None


def _clean_cache(stat: dict[str, int], inactive: str, active: str, dirty: str, writeback: str) -> int | None:
    if inactive not in stat:
        return None
    return max(0, stat[inactive] + stat.get(active, 0) - stat.get(dirty, 0) - stat.get(writeback, 0))


def _cpu_quota(system: System) -> float | None:
    """CPUs' worth of time; the tightest of the cgroup and its parents."""
    table = mounts(system)
    v1, v2 = _own_cgroups(system, "self")
    quotas: list[float] = []
    seen = False
    if "cpu" in v1:
        for f in _folders(system, table, "cgroup", "cpu", v1["cpu"]):
            quota, period = system.number(f"{f}/cpu.cfs_quota_us"), system.number(f"{f}/cpu.cfs_period_us")
            seen = seen or quota is not None
            if quota and period and quota > 0:
                quotas.append(quota / period)
    elif v2 is not None:
        for f in _folders(system, table, "cgroup2", None, v2):
            text = system.read(f"{f}/cpu.max")
            seen = seen or text is not None
            words = (text or "").split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
        seen = seen or system.exists("/sys/fs/cgroup/cgroup.controllers")
    if quotas:
        return min(quotas)
    return float(UNLIMITED) if seen else None


def container_kind(system: System) -> str:
    """``kubernetes docker podman singularity lxc systemd-nspawn ...`` or ``""`` outside a container."""
    env = system.environ
    if env.get("KUBERNETES_SERVICE_HOST") or system.exists("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if env.get("APPTAINER_NAME") or env.get("SINGULARITY_NAME") or system.exists("/.singularity.d"):
        return "singularity"
    if system.exists("/run/.containerenv"):
        return "podman"
    if system.exists("/.dockerenv"):
        return "docker"
    declared = env.get("container") or (system.read("/run/systemd/container") or "").strip()
    if declared:
        return declared
    for item in (system.read("/proc/1/environ") or "").split("\0"):
        if item.startswith("container="):
            return item.partition("=")[2]
    groups = system.read("/proc/1/cgroup") or ""
    for word in ("kubepods", "docker", "libpod", "lxc"):
        if f"/{word}" in groups:
            return {"kubepods": "kubernetes", "libpod": "podman"}.get(word, word)
    return ""


def _count_list(text: str | None) -> int | None:
    """``0-3,8`` -> 5 (the kernel's list format)."""
    total = 0
    for part in (text or "").strip().split(","):
        m = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not m:
            return None
        total += int(m.group(2) or m.group(1)) - int(m.group(1)) + 1
    return total


def _limits(name: str) -> tuple[int | None, int | None]:
    import resource

    try:
        soft, hard = resource.getrlimit(getattr(resource, name))
    except (ValueError, OSError, AttributeError):
        return None, None
    unlimited = resource.RLIM_INFINITY
    return (UNLIMITED if soft == unlimited else soft), (UNLIMITED if hard == unlimited else hard)


def _has_capability(system: System, bit: int) -> bool | None:
    m = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", system.read("/proc/self/status") or "", re.M)
    return None if m is None else bool(int(m.group(1), 16) >> bit & 1)


def read_host(system: System | None = None) -> tuple[Host, dict[str, str]]:
    """The host and the reasons for what could not be read (keys ``host.<field>``)."""
    system = system or System()
    unknown: dict[str, str] = {}
    memory = _pairs(system.read("/proc/meminfo"))
    if "MemTotal" not in memory:
        unknown["host.ram_total"] = unknown["host.ram_available"] = _("/proc/meminfo cannot be read")
    cgroup, reason = read_cgroup(system)
    if reason:
        unknown["host.cgroup"] = reason
    shm_total = shm_free = None
    try:
        s = os.statvfs(system.path("/dev/shm"))
        shm_total, shm_free = s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize
    except OSError:
        unknown["host.shm_total"] = unknown["host.shm_free"] = _("there is no /dev/shm")
    try:
        usable: int | None = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        usable = None
        unknown["host.cores_usable"] = _("this system does not tell the affinity of a process")
    node_list = system.read("/sys/devices/system/node/online")
    nodes = _count_list(node_list)
    if nodes is None:
        unknown["host.numa_nodes"] = _("the kernel shows no NUMA nodes in /sys/devices/system/node")
    quota = _cpu_quota(system)
    if quota is None:
        unknown["host.cpu_quota"] = _("no cpu cgroup is mounted that holds this process")
    memlock, nofile = _limits("RLIMIT_MEMLOCK"), _limits("RLIMIT_NOFILE")
    release = system.read("/proc/sys/kernel/osrelease")
    if release is None:
        unknown["host.wsl"] = _("/proc/sys/kernel/osrelease cannot be read")
    host = Host(
        hostname=os.uname().nodename,
        ram_total=memory.get("MemTotal"),
        ram_available=memory.get("MemAvailable"),
        cgroup=cgroup,
        swap_total=memory.get("SwapTotal"),
        swap_free=memory.get("SwapFree"),
        memlock_soft=memlock[0],
        memlock_hard=memlock[1],
        nofile_soft=nofile[0],
        nofile_hard=nofile[1],
        shm_total=shm_total,
        shm_free=shm_free,
        cores=_count_list(system.read("/sys/devices/system/cpu/online")) or os.cpu_count(),
        cores_usable=usable,
        cpu_quota=quota,
        ipc_lock=_has_capability(system, _CAP_IPC_LOCK),
        numa_nodes=nodes,
        container=container_kind(system),
        wsl=None if release is None else "microsoft" in release.lower(),
    )
    return host, unknown
