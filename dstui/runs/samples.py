"""What a run uses, once a second: GPUs, host RAM, cgroup, each rank. Written by the supervisor, read by anyone.

Files in ``<run>/samples/``, JSON lines, append-only; a file that is full becomes ``<tier>.old.jsonl``, so at
any time between one and two lengths of each tier are kept::

    1s.jsonl  10s.jsonl  60s.jsonl  600s.jsonl     one record per second, 10 s, minute, 10 minutes
    peaks.json                                     the highest values ever seen

A record: ``{"t": epoch seconds, "gpus": [[...], ...], "host": [...], "ranks": [[...], ...], "build": name,
"lock": [op, path, pid of its holder], "saving": path, "sizes": [bytes of out.log, bytes of csv_monitor's files]}``,
the last ones only when there is something;
its columns are named by ``GPU_COLUMNS``, ``HOST_COLUMNS``, ``RANK_COLUMNS`` (each file's first line repeats
them). Sizes are bytes, shares 0-1, power in watts, temperature in degrees Celsius, clocks in MHz, links in bytes
per second. Unknown is null.
In the slower tiers sizes are the largest of the interval, everything else is its mean.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dstui.facts.system import System
from dstui.runs import processes
from dstui.runs.ops import HeldLock, find_locks, held_by, waiting_for
from dstui.runs.processes import Process
from dstui.runs.store import write_json

SCHEMA_VERSION = 1
GPU_COLUMNS = (
    "index",
    "utilisation",
    "memory_used",
    "memory_total",
    "power",
    "power_limit",
    "temperature",
    "throttle",
    "clock_sm",
    "clock_mem",
    "pcie_rx",
    "pcie_tx",
    "nvlink_rx",
    "nvlink_tx",
)
HOST_COLUMNS = ("used", "capacity", "cgroup", "cpu", "shm", "swap", "locked", "disk")
RANK_COLUMNS = ("rank", "pid", "rss", "cpu", "helpers", "wait")
_LARGEST = frozenset(
    {
        "memory_used",
        "memory_total",
        "used",
        "capacity",
        "cgroup",
        "rss",
        "shm",
        "swap",
        "locked",
        "index",
        "rank",
        "pid",
        "power_limit",
    }
)
TIERS: tuple[tuple[str, int, int], ...] = (
    ("1s", 1, 1800),
    ("10s", 10, 2160),
    ("60s", 60, 2880),
    ("600s", 600, 8640),
)
"""Name, seconds, records a file: half an hour, 6 hours, 2 days, 60 days; at most 2 x 15480 records in all."""
LOOK_EVERY = 5.0
"""Seconds between two looks at locks and open files, which cost more than counters."""
HIGH_WATER_EVERY = 5.0
"""Seconds between two looks at VmHWM, a file that costs the kernel more than ``statm``."""
GPU_STALE = 5.0
"""An NVML answer older than this (a driver that hangs) is not shown as the present."""
SETTLED = 5
"""Looks at a new process before it counts as one without a rank."""
COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cc1plus", "cc1", "hipcc"})
BUILD_TOOLS = COMPILERS | {
    "c++",
    "g++",
    "gcc",
    "cc",
    "clang",
    "clang++",
    "cudafe++",
    "fatbinary",
    "as",
    "ld",
    "collect2",
}
"""What an op's build starts below a rank: two compilers of torch's headers hold 2.5 GiB, none of it the training's."""


@dataclass(frozen=True)
class GpuUse:
    """One card, whoever uses it. ``throttle``: what holds its clocks down (``sw-thermal,power-cap``), ``""`` = nothing.

    ``clock_sm clock_mem``: MHz. ``pcie_rx pcie_tx``: bytes per second into and out of the card over PCIe,
    ``nvlink_rx nvlink_tx`` over all its NVLinks; None where the driver does not count. Files written before these
    columns existed are read with None.
    """

    index: int
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    throttle: str | None = None
    clock_sm: float | None = None
    clock_mem: float | None = None
    pcie_rx: float | None = None
    pcie_tx: float | None = None
    nvlink_rx: float | None = None
    nvlink_tx: float | None = None


@dataclass(frozen=True)
class HostUse:
    """``capacity``: RAM, or the cgroup limit when that is tighter. ``cpu``: share of all usable cores.

    ``shm``: bytes in shared memory, /dev/shm included; ``swap``: swap in use; ``locked``: pages that ``mlock`` holds
    (CUDA's pinned blocks are not among them, the kernel does not count those); ``disk``: bytes free where the run's
    folder is.
    """

    used: int | None = None
    capacity: int | None = None
    cgroup: int | None = None
    cpu: float | None = None
    shm: int | None = None
    swap: int | None = None
    locked: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class RankUse:
    """``rss``: the rank's process and its children (data loaders); ``cpu``: cores' worth of time of all of them,
    ``helpers``: of the children alone. ``wait``: what the rank's main thread does, see ``waiting``."""

    rank: int
    pid: int
    rss: int | None = None
    cpu: float | None = None
    helpers: float | None = None
    wait: str | None = None


@dataclass(frozen=True)
class Sample:
    t: float
    gpus: tuple[GpuUse, ...] = ()
    host: HostUse = field(default_factory=HostUse)
    ranks: tuple[RankUse, ...] = ()
    build: str | None = None
    """Name of the DeepSpeed op that a compiler works on just now (``cpu_adam``); ``""`` = some other compile."""
    lock: tuple[str, str, int | None] | None = None
    """A lock on an op of this config that no process of the run holds: op, path, pid of its holder (None: nobody)."""
    saving: str | None = None
    """A checkpoint file that a rank has open for writing."""
    sizes: tuple[int, int] | None = None
    """Bytes of ``out.log`` and of csv_monitor's files at that moment: what a replay shows by then."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "t": round(self.t, 2),
            "gpus": [_row(g, GPU_COLUMNS) for g in self.gpus],
            "host": _row(self.host, HOST_COLUMNS),
            "ranks": [_row(r, RANK_COLUMNS) for r in self.ranks],
        }
        if self.build is not None:
            data["build"] = self.build
        if self.lock is not None:
            data["lock"] = list(self.lock)
        if self.saving is not None:
            data["saving"] = self.saving
        if self.sizes is not None:
            data["sizes"] = list(self.sizes)
        return data

    @classmethod
    def from_json(cls, data: Any) -> Sample | None:
        """None for a header, a torn line or a record of another format."""
        if not isinstance(data, dict) or not _sound(data.get("t")) or not 0 < (data.get("t") or 0) < 1e11:
            return None
        try:
            gpus = [_read_row(row, GPU_COLUMNS) for row in data.get("gpus", ())]
            ranks = [_read_row(row, RANK_COLUMNS) for row in data.get("ranks", ())]
            return cls(
                t=float(data["t"]),
                gpus=tuple(GpuUse(*row) for row in gpus if row[0] is not None),
                host=HostUse(*_read_row(data.get("host", ()), HOST_COLUMNS)),
                ranks=tuple(RankUse(*row) for row in ranks if row[0] is not None),
                build=_word(data.get("build")),
                lock=_lock(data.get("lock")),
                saving=_word(data.get("saving")),
                sizes=_sizes(data.get("sizes")),
            )
        except (TypeError, ValueError, IndexError, OverflowError):
            return None


_WORDS = frozenset({"throttle", "wait"})
"""Columns that hold text."""


def _sound(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and -1e18 < value < 1e18)


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_row(row: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    """The figures of one card, host or rank; what is neither a finite number nor, where that belongs, a text is None."""
    if not isinstance(row, (list, tuple)):
        raise TypeError(row)
    return [
        _word(v) if name in _WORDS else v if _sound(v) else None
        for name, v in zip(columns, row, strict=False)
    ]


def _lock(value: Any) -> tuple[str, str, int | None] | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    return str(value[0]), str(value[1]), value[2] if isinstance(value[2], int) else None


def _sizes(value: Any) -> tuple[int, int] | None:
    return (int(value[0]), int(value[1])) if isinstance(value, list) and len(value) == 2 else None


def _row(item: Any, columns: Sequence[str]) -> list[Any]:
    values = [getattr(item, name) for name in columns]
    return [round(v, 3) if isinstance(v, float) else v for v in values]


class GpuSource(Protocol):
    """Where GPU figures come from; may raise anything and may take its time."""

    def sample(self) -> Sequence[GpuUse]: ...

    def close(self) -> None: ...


class NvmlSource:
    """``dstui.facts.gpu.NvmlSession`` as a GpuSource. ``devices``: UUIDs or physical indices; None = all."""

    def __init__(self, devices: Sequence[str | int] | None = None) -> None:
        from dstui.facts.gpu import NvmlSession

        self._session = NvmlSession(devices)
        if not self._session.open():
            raise OSError(self._session.problem)

    def sample(self) -> list[GpuUse]:
        return [
            GpuUse(
                index=g.index,
                utilisation=g.utilisation,
                memory_used=g.memory_used,
                memory_total=g.memory_total,
                power=g.power,
                power_limit=g.power_limit,
                temperature=g.temperature,
                throttle=None if g.throttle is None else ",".join(g.throttle),
                clock_sm=g.sm_clock,
                clock_mem=g.memory_clock,
                pcie_rx=g.pcie_rx,
                pcie_tx=g.pcie_tx,
                nvlink_rx=g.nvlink_rx,
                nvlink_tx=g.nvlink_tx,
            )
            for g in self._session.sample()
        ]

    def close(self) -> None:
        self._session.close()


class _GpuThread:
    """Asks the source once a second in a daemon thread of its own: a driver that hangs stops nobody else."""

    def __init__(self, make: Callable[[], GpuSource], interval: float) -> None:
        self._make = make
        self._interval = interval
        self._stop = threading.Event()
        self._latest: tuple[float, tuple[GpuUse, ...]] = (0.0, ())
        self.problem: str | None = None
        threading.Thread(target=self._loop, name="dstui-gpu", daemon=True).start()

    def _loop(self) -> None:
        source: GpuSource | None = None
        while not self._stop.is_set():
            wait = self._interval
            try:
                source = source or self._make()
                self._latest = (time.monotonic(), tuple(source.sample()))
                self.problem = None
            except Exception as e:  # no driver, a lost GPU, a restarted driver: try again, slowly
                self.problem = f"{type(e).__name__}: {e}"
                source, wait = None, 30.0
            self._stop.wait(wait)
        if source is not None:
            source.close()

    def latest(self) -> tuple[GpuUse, ...]:
        at, gpus = self._latest
        return gpus if time.monotonic() - at <= GPU_STALE else ()

    def stop(self) -> None:
        self._stop.set()


@dataclass(frozen=True)
class _Member:
    """A process of the run: the rank it belongs to (None = launcher, compiler...), and whether it is that rank's own."""

    process: Process
    name: str
    rank: int | None
    main: bool


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The global rank that a launcher gave this process (torch's and DeepSpeed's ``RANK``)."""
    try:
        return int(environment["RANK"])
    except (KeyError, ValueError):
        return None


class Members:
    """The run's processes with their ranks. Environments are read once a process."""

    def __init__(self) -> None:
        self._known: dict[Process, int] = {}
        self._looks: dict[Process, int] = {}
        self._pids: frozenset[int] = frozenset()
        self.all: tuple[_Member, ...] = ()

    def update(self, pids: Iterable[int]) -> bool:
        """Whether the set of processes changed."""
        wanted = frozenset(pids)
        if wanted == self._pids and all(n >= SETTLED for n in self._looks.values()):
            return False
        self._pids = wanted
        stats = {pid: s for pid in wanted if (s := processes.stat(pid)) is not None and s.state not in "ZX"}
        known: dict[Process, int] = {}
        looks: dict[Process, int] = {}
        ranks: dict[int, int | None] = {}
        for pid, s in stats.items():
            p = Process(pid, s.start)
            rank = self._known.get(p)
            seen = self._looks.get(p, 0)
            if rank is None and seen < SETTLED:  # before exec it still shows its parent's environment
                rank = rank_of(processes.environment(pid))
            looks[p] = SETTLED if rank is not None else seen + 1
            if rank is not None:
                known[p] = rank
            ranks[pid] = rank
        self._known, self._looks = known, looks
        # A data loader inherits its rank's environment: the rank itself is the topmost that carries it.
        self.all = tuple(
            _Member(
                Process(pid, s.start),
                s.name,
                ranks[pid],
                ranks[pid] is not None and ranks.get(s.parent) != ranks[pid],
            )
            for pid, s in stats.items()
        )
        return True

    @property
    def build(self) -> str | None:
        for m in self.all:
            if m.name in COMPILERS:
                try:
                    folder = Path(f"/proc/{m.process.pid}/cwd").readlink().name
                except OSError:
                    folder = ""
                return folder if _is_op(folder) else ""
        return None


def _is_op(folder: str) -> bool:
    """torch.utils.cpp_extension builds an op in ``<extensions root>/<tag>/<op name>``."""
    return bool(folder) and folder.replace("_", "").isalnum() and not folder.startswith("tmp")


def _cpu_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


def _rss(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def _high_water(pid: int) -> int | None:
    """VmHWM: the peak RSS that the kernel itself kept, bytes."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return None


_WAITS: tuple[tuple[str, str], ...] = (
    ("nanosleep", "sleep"),
    ("futex", "lock"),
    ("poll", "poll"),
    ("select", "poll"),
    ("pipe", "poll"),
    ("unix_stream", "poll"),
    ("sk_wait", "poll"),
    ("do_wait", "child"),
)
_DISK = re.compile(
    r"io_schedule|folio|page|jbd2|ext4|xfs|btrfs|nfs|rpc|fsync|writeback|throttle|blk_|fuse|bio_"
)


def waiting(pid: int) -> str | None:
    """What the main thread of ``pid`` is in: ``run``, ``sleep`` (time.sleep), ``lock`` (another thread: gloo, NCCL
    and queues inside a process wait so), ``poll`` (a pipe or socket: data loader workers, the meeting point),
    ``disk``, ``child``, ``other``; None when the kernel does not tell (``/proc/PID/wchan``)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        where = Path(f"/proc/{pid}/wchan").read_text()
    except (OSError, IndexError):
        return None
    if state == b"R":
        return "run"
    if state == b"D":
        return "disk"
    if where in ("", "0"):
        return None
    for part, name in _WAITS:
        if part in where:
            return name
    return "disk" if _DISK.search(where) else "other"


_CHECKPOINT = re.compile(
    r"\.(?:pt|pth|bin|safetensors|ckpt|distcp)(?:\.\w+)?$|/(?:global_step|checkpoint-)\d+[^/]*/[^/]+$"
)


def saving(pid: int) -> str | None:
    """A checkpoint file that ``pid`` has open for writing."""
    try:
        names = [fd.name for fd in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return None
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - hundreds of them
            if not target.startswith("/") or not _CHECKPOINT.search(target):
                continue
            info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
            flags = int(info.partition("flags:")[2].split()[0], 8)
            if flags & os.O_ACCMODE:
                return target
        except (OSError, ValueError, IndexError):
            continue  # closed meanwhile
    return None


_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


_MEMORY = frozenset({b"MemTotal", b"MemAvailable", b"Shmem", b"SwapTotal", b"SwapFree", b"Mlocked"})


class HostReader:
    """RAM, cgroup and CPU of this host. ``None`` where the kernel does not tell."""

    def __init__(self, system: System | None = None, folder: Path | None = None) -> None:
        from dstui.facts.host import read_cgroup

        self._system = system or System()
        group, _why = read_cgroup(self._system)
        self._group = self._system.path(group.path) if group and group.path else None
        self._version = group.version if group else 0
        self._limit = group.limit if group and group.limit and group.limit > 0 else None
        self._busy: tuple[int, int] | None = None
        self._folder = folder

    def _number(self, name: str) -> int | None:
        if self._group is None:
            return None
        try:
            return int((self._group / name).read_text())
        except (OSError, ValueError):
            return None

    def _cgroup(self) -> int | None:
        """Bytes that count against the limit and cannot be given back: usage less inactive page cache."""
        used = self._number("memory.current" if self._version == 2 else "memory.usage_in_bytes")
        if used is None or self._group is None:
            return None
        key = b"inactive_file " if self._version == 2 else b"total_inactive_file "
        try:
            for line in (self._group / "memory.stat").read_bytes().splitlines():
                if line.startswith(key):
                    return max(0, used - int(line.split()[1]))
        except (OSError, ValueError):
            pass
        return used

    def read(self) -> HostUse:
        memory: dict[bytes, int] = {}
        try:
            for line in self._system.path("/proc/meminfo").read_bytes().splitlines():
                name, _, rest = line.partition(b":")
                if name in _MEMORY:
                    memory[name] = int(rest.split()[0]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        total, available = memory.get(b"MemTotal"), memory.get(b"MemAvailable")
        used = total - available if total is not None and available is not None else None
        capacity = total
        group = self._cgroup()
        if self._limit is not None and (total is None or self._limit < total):
            capacity, used = self._limit, group  # what the kernel compares before it kills
        swap = memory.get(b"SwapTotal"), memory.get(b"SwapFree")
        return HostUse(
            used=used,
            capacity=capacity,
            cgroup=group,
            cpu=self._cpu(),
            shm=memory.get(b"Shmem"),
            swap=None if swap[0] is None or swap[1] is None else swap[0] - swap[1],
            locked=memory.get(b"Mlocked"),
            disk=self._disk(),
        )

    def _disk(self) -> int | None:
        if self._folder is None:
            return None
        try:
            s = os.statvfs(self._folder)
        except OSError:
            return None
        return s.f_bavail * s.f_frsize

    def _cpu(self) -> float | None:
        try:
            with self._system.path("/proc/stat").open("rb") as f:
                v = [int(x) for x in f.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        busy, whole = sum(v) - v[3] - v[4], sum(v)
        before, self._busy = self._busy, (busy, whole)
        if before is None or whole <= before[1]:
            return None
        return (busy - before[0]) / (whole - before[1])


class _Tier:
    """One file of records, with the aggregation that feeds it."""

    def __init__(self, folder: Path, name: str, seconds: int, length: int) -> None:
        self.path = folder / f"{name}.jsonl"
        self.old = folder / f"{name}.old.jsonl"
        self.seconds = seconds
        self._length = length
        self._count = -1
        self._torn = False
        self._bin: list[Sample] = []

    def add(self, sample: Sample) -> None:
        if self.seconds == 1:
            self._write(sample)
            return
        if self._bin and sample.t // self.seconds != self._bin[0].t // self.seconds:
            merged, self._bin = merge(self._bin), []
            self._write(merged)
        self._bin.append(sample)

    def flush(self) -> None:
        if self._bin:
            merged, self._bin = merge(self._bin), []
            self._write(merged)

    def _write(self, sample: Sample) -> None:
        if self._count < 0:  # a supervisor that takes over an old run
            try:
                with self.path.open("rb") as f:
                    self._count = sum(1 for _ in f)
            except FileNotFoundError:
                self._count = 0
        if self._count > self._length:
            self.path.replace(self.old)
            self._count = 0
        text = json.dumps(sample.to_json(), separators=(",", ":")) + "\n"
        if self._count == 0:
            head = {
                "schema_version": SCHEMA_VERSION,
                "gpus": GPU_COLUMNS,
                "host": HOST_COLUMNS,
                "ranks": RANK_COLUMNS,
            }
            text = json.dumps(head, separators=(",", ":")) + "\n" + text
        if self._torn:  # the last record was cut short by a full disk
            text = "\n" + text
        self._torn = True
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            data = text.encode()
            self._torn = os.write(fd, data) != len(data)
        finally:
            os.close(fd)
        self._count += 1


def merge(samples: Sequence[Sample]) -> Sample:
    """One record for an interval: sizes at their largest, everything else averaged over the known values."""

    def column(rows: Sequence[Any], name: str) -> Any:
        known = [v for v in (getattr(r, name) for r in rows) if v is not None]
        if not known:
            return None
        if isinstance(known[0], str):
            return max(known, key=lambda v: (known.count(v), len(v)) if name == "wait" else len(v))
        return max(known) if name in _LARGEST else sum(known) / len(known)

    def group(rows: Iterable[Any], key: str, columns: Sequence[str], kind: Any) -> tuple[Any, ...]:
        by: dict[Any, list[Any]] = {}
        for r in rows:
            by.setdefault(getattr(r, key), []).append(r)
        return tuple(kind(*(column(rs, c) for c in columns)) for _k, rs in sorted(by.items()))

    return Sample(
        t=samples[-1].t,
        gpus=group((g for s in samples for g in s.gpus), "index", GPU_COLUMNS, GpuUse),
        host=HostUse(*(column([s.host for s in samples], c) for c in HOST_COLUMNS)),
        ranks=group((r for s in samples for r in s.ranks), "rank", RANK_COLUMNS, RankUse),
        build=next((s.build for s in reversed(samples) if s.build is not None), None),
        lock=next((s.lock for s in reversed(samples) if s.lock is not None), None),
        saving=next((s.saving for s in reversed(samples) if s.saving is not None), None),
        sizes=samples[-1].sizes,
    )


@dataclass
class Peaks:
    """The highest values of a run; ``ranks`` from the kernel's own high-water mark, so no spike is missed."""

    gpu_used: dict[int, int] = field(default_factory=dict)
    rank_rss: dict[int, int] = field(default_factory=dict)
    host_used: int | None = None
    cgroup: int | None = None

    def add(self, sample: Sample) -> bool:
        """Whether anything grew."""
        before = (dict(self.gpu_used), dict(self.rank_rss), self.host_used, self.cgroup)
        for g in sample.gpus:
            _raise(self.gpu_used, g.index, g.memory_used)
        for r in sample.ranks:
            _raise(self.rank_rss, r.rank, r.rss)
        self.host_used = _higher(self.host_used, sample.host.used)
        self.cgroup = _higher(self.cgroup, sample.host.cgroup)
        return before != (self.gpu_used, self.rank_rss, self.host_used, self.cgroup)

    @property
    def rss_total(self) -> int | None:
        """Sum over the ranks here of their peak RSS: what ``estimate``'s ``host.peak`` predicts."""
        return sum(self.rank_rss.values()) if self.rank_rss else None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "gpu_used": {str(k): v for k, v in sorted(self.gpu_used.items())},
            "rank_rss": {str(k): v for k, v in sorted(self.rank_rss.items())},
            "rss_total": self.rss_total,
            "host_used": self.host_used,
            "cgroup": self.cgroup,
        }

    @classmethod
    def from_json(cls, data: Any) -> Peaks:
        def numbers(name: str) -> dict[int, int]:
            entry = data.get(name)
            found = entry.items() if isinstance(entry, dict) else ()
            return {int(k): int(v) for k, v in found if k.isdecimal() and v is not None and _sound(v)}

        if not isinstance(data, dict):
            return cls()
        host, cgroup = (v if _sound(v := data.get(name)) else None for name in ("host_used", "cgroup"))
        return cls(numbers("gpu_used"), numbers("rank_rss"), host, cgroup)


def _raise(table: dict[int, int], key: int, value: int | None) -> None:
    if value is not None and value > table.get(key, 0):
        table[key] = value


def _higher(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def read_peaks(folder: Path) -> Peaks | None:
    """``samples/peaks.json``; None before the first was written."""
    try:
        return Peaks.from_json(json.loads((folder / "peaks.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


class Sampler:
    """Writes one sample of a run into ``folder`` (``<run>/samples``) at each ``sample(pids)``.

    ``pids``: every living process of the run. ``devices``: UUIDs or physical indices of its GPUs (None = all,
    ``()`` = none). ``extensions``: where torch builds ops, ``ops``: those that the config needs. Nothing here raises or waits for the driver: an NVML error, a full disk or a vanished process
    leaves a gap, and ``problem`` says why.
    """

    def __init__(
        self,
        folder: Path,
        *,
        devices: Sequence[str | int] | None = None,
        source: Callable[[], GpuSource] | None = None,
        interval: float = 1.0,
        extensions: Path | None = None,
        ops: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.problem: str | None = None
        self.peaks = read_peaks(folder) or Peaks()
        self._members = Members()
        self._host = HostReader(folder=folder)
        self._tiers = tuple(_Tier(folder, *tier) for tier in TIERS)
        self._high_read = 0.0
        self._ticks: dict[int, tuple[float, int]] = {}
        self._extensions, self._ops = extensions, tuple(ops)
        self._looked = 0.0
        self._lock: tuple[str, str, int | None] | None = None
        self._saving: str | None = None
        self._csv: list[Path] = []
        self.held: set[HeldLock] = set()
        """Locks on ops that processes of the run were seen to hold."""
        self._peaks_changed = False
        self._peaks_written = 0.0
        make = source or (lambda: NvmlSource(devices))
        self._gpus = None if devices is not None and not devices else _GpuThread(make, interval)

    def close(self) -> None:
        """Write what is pending."""
        if self._gpus is not None:
            self._gpus.stop()
        for tier in self._tiers:
            self._guard(tier.flush)
        self._guard(lambda: self._write_peaks(True))

    def _guard(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as e:  # the run must never suffer from being watched
            self.problem = f"{type(e).__name__}: {e}"

    def sample(self, pids: Iterable[int]) -> Sample:
        """Take one sample and write it."""
        now = time.monotonic()
        self.problem = None if self._gpus is None else self._gpus.problem
        changed = False
        try:
            changed = self._members.update(pids)
        except OSError as e:
            self.problem = str(e)
        if changed or now - self._high_read >= HIGH_WATER_EVERY:
            self._high_read = now
            self._read_high_water()
        taken = self._take(now)
        self._peaks_changed |= self.peaks.add(taken)
        for tier in self._tiers:
            self._guard(lambda tier=tier: tier.add(taken))  # type: ignore[misc]
        self._guard(lambda: self._write_peaks(False))
        return taken

    def _read_high_water(self) -> None:
        for m in self._members.all:
            if m.main and m.rank is not None:
                high = _high_water(m.process.pid)
                if high is not None and high > self.peaks.rank_rss.get(m.rank, 0):
                    self.peaks.rank_rss[m.rank] = high
                    self._peaks_changed = True

    def _write_peaks(self, now: bool) -> None:
        if self._peaks_changed and (now or time.monotonic() - self._peaks_written >= 5.0):
            self._peaks_written = time.monotonic()
            write_json(self.folder / "peaks.json", self.peaks.to_json())
            self._peaks_changed = False

    def _take(self, now: float) -> Sample:
        rss: dict[int, int] = {}
        cpu: dict[int, float] = {}
        helpers: dict[int, float] = {}
        main: dict[int, int] = {}
        ticks: dict[int, tuple[float, int]] = {}
        for m in self._members.all:
            if m.rank is None:
                continue
            pid = m.process.pid
            if m.main:
                main.setdefault(m.rank, pid)
            size, spent = _rss(pid), _cpu_ticks(pid)
            if size is not None and m.name not in BUILD_TOOLS:
                rss[m.rank] = rss.get(m.rank, 0) + size
            if spent is not None:
                ticks[pid] = (now, spent)
                before = self._ticks.get(pid)
                if before is not None and now > before[0]:
                    share = (spent - before[1]) / _TICKS / (now - before[0])
                    cpu[m.rank] = cpu.get(m.rank, 0.0) + max(0.0, share)
                    if not m.main:
                        helpers[m.rank] = helpers.get(m.rank, 0.0) + max(0.0, share)
        self._ticks = ticks
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._guard(lambda: self._look(main.values()))
        elif self._members.build is not None:
            self._note_held(main.values())
        gpus: tuple[GpuUse, ...] = ()
        if self._gpus is not None:
            gpus = self._gpus.latest()
        return Sample(
            t=time.time(),
            gpus=gpus,
            host=self._host.read(),
            ranks=tuple(
                RankUse(r, pid, rss.get(r), cpu.get(r), helpers.get(r), waiting(pid))
                for r, pid in sorted(main.items())
            ),
            build=self._members.build,
            lock=self._lock,
            saving=self._saving,
            sizes=self._sizes(),
        )

    def _sizes(self) -> tuple[int, int]:
        sizes = []
        for path in (self.folder.parent / "out.log", *self._csv):
            try:
                sizes.append(os.stat(path).st_size)  # noqa: PTH116 - every second
            except OSError:
                sizes.append(0)
        return sizes[0], sum(sizes[1:])

    def _note_held(self, ranks: Iterable[int]) -> None:
        """While something is compiled, every second: a build that is killed leaves its lock."""
        if self._extensions is not None:
            self.held |= held_by(ranks, self._extensions)

    def _look(self, ranks: Iterable[int]) -> None:
        """Locks on the config's ops, and checkpoint files that are being written."""
        self._note_held(ranks)
        self._csv = sorted(self.folder.parent.glob("metrics/*/Train_Samples_*.csv"))
        self._saving = next(filter(None, map(saving, ranks)), None)
        self._lock = None
        if self._extensions is None or not self._ops:
            return
        members = frozenset(m.process.pid for m in self._members.all)
        found = waiting_for(find_locks(self._extensions), self._ops, members)
        if found is not None and (found.holder is not None or found.gone):
            self._lock = (found.op, str(found.path), found.holder)


def read_samples(folder: Path, limit: int = 600) -> list[Sample]:
    """The newest ``limit`` one-second records, oldest first."""
    found: list[Sample] = []
    for path in (folder / "1s.old.jsonl", folder / "1s.jsonl"):
        found += _records(path)
    return found[-limit:]


def read_history(folder: Path) -> list[Sample]:
    """The whole run at the finest resolution still kept for each time, oldest first."""
    found: list[Sample] = []
    for name, _seconds, _length in TIERS:
        first = found[0].t if found else float("inf")
        older = _records(folder / f"{name}.old.jsonl") + _records(folder / f"{name}.jsonl")
        found = [s for s in older if s.t < first] + found
    return found


def _records(path: Path) -> list[Sample]:
    found = []
    try:
        with path.open("rb") as f:
            for line in f:
                try:
                    sample = Sample.from_json(json.loads(line))
                except (ValueError, RecursionError):
                    continue
                if sample is not None:
                    found.append(sample)
    except OSError:
        pass
    return found
