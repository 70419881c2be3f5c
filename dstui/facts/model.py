"""The facts of a machine: frozen, JSON round-trip, unknown is ``None`` with a reason.

Sizes are bytes. A field that could not be read is ``None`` and ``Facts.unknown`` maps its dotted path
(``"gpus"``, ``"host.cgroup"``, ``"gpus.0.processes"``) to the reason. Nothing here is guessed.
``dstui detect --json`` prints ``Facts.to_json()``; every verb takes it back with ``--facts FILE``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _

SCHEMA_VERSION = 1
UNLIMITED = -1
"""Value of a limit (memlock, nofile, cgroup) that is set to unlimited."""


@dataclass(frozen=True)
class GpuProcess:
    """A process on a card, from whichever user. ``memory`` in bytes."""

    pid: int
    user: str | None = None
    name: str | None = None
    memory: int | None = None
    kind: str | None = None
    """``compute`` or ``graphics`` (a desktop): only the first makes a card busy."""

    @property
    def computes(self) -> bool:
        """The server of NVIDIA's MPS counts as ``compute`` from its start, with nobody served."""
        return self.kind != "graphics" and not (self.name or "").startswith("nvidia-cuda-mps")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as NVML numbers it (PCI bus order), or a MIG instance."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    memory_reserved: int | None = None
    """Bytes the driver and firmware keep for themselves; neither used nor free."""
    pci_bus: str | None = None
    """``0000:1b:00.0`` as sysfs writes it."""
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlink_peers: tuple[int, ...] | None = None
    p2p_peers: tuple[int, ...] | None = None
    numa_node: int | None = None
    mig_enabled: bool | None = None
    mig_parent: str | None = None
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def busy(self) -> bool | None:
        """Whether another process computes here; ``None`` when NVML would not say."""
        return None if self.processes is None else any(p.computes for p in self.processes)

    @property
    def cuda_id(self) -> str:
        """What names this device in ``CUDA_VISIBLE_DEVICES`` whatever ``CUDA_DEVICE_ORDER`` says."""
        return self.uuid or str(self.index)


@dataclass(frozen=True)
class Cgroup:
    """The memory limit that really applies: the tightest of the cgroup and its parents."""

    version: int
    limit: int | None = None
    """Bytes; UNLIMITED when no limit is set."""
    usage: int | None = None
    """Bytes charged to the cgroup that sets ``limit``, page cache included."""
    reclaimable: int | None = None
    """The part of ``usage`` that is clean page cache: the kernel drops it before it kills anything."""
    oom_kills: int | None = None
    path: str | None = None


@dataclass(frozen=True)
class Host:
    """Memory and limits of this machine. Sizes in bytes, ``None`` where they could not be read, ``UNLIMITED`` for no limit."""

    hostname: str | None = None
    ram_total: int | None = None
    ram_available: int | None = None
    cgroup: Cgroup | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    memlock_soft: int | None = None
    memlock_hard: int | None = None
    nofile_soft: int | None = None
    nofile_hard: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    cores: int | None = None
    cores_usable: int | None = None
    """Cores in this process's affinity mask (and cgroup cpuset)."""
    cpu_quota: float | None = None
    """CPUs' worth of time the cgroup grants; UNLIMITED when no quota is set."""
    ipc_lock: bool | None = None
    """CAP_IPC_LOCK is in effect: RLIMIT_MEMLOCK does not apply."""
    numa_nodes: int | None = None
    container: str | None = None
    """``docker``, ``podman``, ``kubernetes``, ``lxc``, ``singularity``...; ``""`` = none."""
    wsl: bool | None = None

    @property
    def memory_free(self) -> int | None:
        """Bytes that new processes can still use: free RAM, capped by what the cgroup leaves."""
        left: list[int] = [] if self.ram_available is None else [self.ram_available]
        if self.cgroup and self.cgroup.limit not in (None, UNLIMITED) and self.cgroup.usage is not None:
            held = self.cgroup.usage - (self.cgroup.reclaimable or 0)
            left.append(max(0, self.cgroup.limit - max(0, held)))
        return min(left) if left else None

    @property
    def memory_capacity(self) -> int | None:
        """Bytes of RAM, or the cgroup limit if that is tighter."""
        cap: list[int] = [] if self.ram_total is None else [self.ram_total]
        if self.cgroup and self.cgroup.limit not in (None, UNLIMITED):
            cap.append(self.cgroup.limit)
        return min(cap) if cap else None


@dataclass(frozen=True)
class Storage:
    """A folder that could hold NVMe offload files."""

    path: str
    mount: str | None = None
    filesystem: str | None = None
    device: str | None = None
    total: int | None = None
    free: int | None = None
    rotational: bool | None = None
    writable: bool | None = None
    o_direct: bool | None = None


@dataclass(frozen=True)
class Toolchain:
    """What DeepSpeed's op builder needs."""

    cuda_home: str | None = None
    """Where a CUDA build of torch looks for the toolkit (a CPU build never does)."""
    nvcc: str | None = None
    nvcc_version: str | None = None
    compiler: str | None = None
    compiler_version: str | None = None
    cxx: str | None = None
    """``CXX`` as set; ``None`` when unset (then ``c++`` is the compiler)."""
    ninja: str | None = None
    ninja_on_path: bool | None = None
    """False: ninja is only beside the training interpreter, so its folder must be put on PATH."""
    libaio: bool | None = None
    """The linker would find ``libaio.so`` (the runtime ``libaio.so.1`` alone is not enough)."""
    libaio_header: bool | None = None
    python_headers: bool | None = None
    """``Python.h`` of the training interpreter exists."""
    package_manager: str | None = None
    """``apt-get dnf yum zypper pacman apk``: the one on PATH."""
    arch_list: str | None = None
    """``TORCH_CUDA_ARCH_LIST`` as set; ``None`` when unset."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that may train, read without importing torch (from its installed metadata)."""

    path: str
    origin: str
    """``option``, ``active`` (venv/conda in use), ``project`` (./.venv), ``conda``, ``own``, ``path``."""
    version: str | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """``deepspeed torch transformers accelerate peft lightning llamafactory ms-swift bitsandbytes
    flash-attn liger-kernel triton`` -> version, None when absent."""
    torch_cuda: str | None = None
    """CUDA release torch was built for (``13.0``); ``""`` for a CPU build; None without torch."""
    prefix: str | None = None
    headers: bool | None = None
    """``Python.h`` exists where this interpreter's ``sysconfig`` says."""
    has_pip: bool | None = None
    externally_managed: bool | None = None
    """The distribution forbids pip here (PEP 668): packages belong into a virtual environment."""
    launchers: tuple[str, ...] = ()
    """Of ``deepspeed torchrun accelerate llamafactory-cli swift``: those beside this interpreter."""
    problem: str | None = None
    """Why it cannot be read or cannot train."""

    @property
    def deepspeed(self) -> str | None:
        return self.packages.get("deepspeed")

    @property
    def torch(self) -> str | None:
        return self.packages.get("torch")

    @property
    def can_train(self) -> bool:
        """DeepSpeed and torch are there, and nothing keeps it from starting."""
        return bool(self.deepspeed and self.torch and not self.problem)


@dataclass(frozen=True)
class Scheduler:
    """What SLURM's variables and DeepSpeed's hostfile say."""

    slurm_job: str | None = None
    slurm_nodes: int | None = None
    slurm_gpus_on_node: int | None = None
    slurm_present: bool = False
    login_node: bool = False
    """SLURM is installed, no job is active, no GPU is here."""
    hostfile: str | None = None


@dataclass(frozen=True)
class Facts:
    """A machine, detected, described or read from a file. Sizes in bytes; unknown is ``None`` with its reason in ``unknown``."""

    schema_version: int = SCHEMA_VERSION
    source: str = "detected"
    """``detected``, ``file`` or ``described`` (typed by a person: only sizes are known)."""
    gpus: tuple[Gpu, ...] | None = None
    """``()`` = surely none; ``None`` = could not look."""
    driver: str | None = None
    cuda_driver: str | None = None
    """Highest CUDA release that the driver supports."""
    visible_devices: str | None = None
    """``CUDA_VISIBLE_DEVICES`` as set; ``gpus`` is already filtered and ordered by it."""
    device_order: str | None = None
    """``CUDA_DEVICE_ORDER`` as set; CUDA's default is FASTEST_FIRST, NVML counts in PCI_BUS_ID order."""
    nodes: int = 1
    host: Host = field(default_factory=Host)
    storage: tuple[Storage, ...] = ()
    toolchain: Toolchain = field(default_factory=Toolchain)
    interpreters: tuple[Interpreter, ...] = ()
    """Best choice first."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def interpreter(self) -> Interpreter | None:
        """The training interpreter: the one asked for (``--python``), else the first that can train, else the first."""
        if self.interpreters and self.interpreters[0].origin == "option":
            return self.interpreters[0]
        for it in self.interpreters:
            if it.can_train:
                return it
        return self.interpreters[0] if self.interpreters else None

    @property
    def deepspeed(self) -> str | None:
        """The release in the interpreter that trains."""
        it = self.interpreter
        return it.deepspeed if it else None

    @property
    def world_size(self) -> int | None:
        """Ranks that a run on everything here would have: GPUs x nodes (1 without GPUs); None when unknown."""
        return None if self.gpus is None else max(1, len(self.gpus)) * self.nodes

    def to_json(self) -> dict[str, Any]:
        return typing.cast("dict[str, Any]", _plain(self))

    @classmethod
    def from_json(cls, data: Any) -> Facts:
        """Inverse of ``to_json``. Unknown keys are ignored (a later release wrote them).

        Raises DstuiError naming the field of wrong type.
        """
        if not isinstance(data, dict) or "schema_version" not in data:
            raise DstuiError(
                _("this is not a facts file"), _("make one with: dstui detect --json > facts.json")
            )
        version = data["schema_version"]
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise DstuiError(
                _("this facts file has version {found}; this dstui reads up to {known}").format(
                    found=version, known=SCHEMA_VERSION
                ),
                _("update dstui, or make the file again with: dstui detect --json > facts.json"),
            )
        return typing.cast(Facts, _load(cls, data, "facts"))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


def _load(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _load(next(a for a in args if a is not type(None)), value, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _wrong(where, "object", value)
        hints = typing.get_type_hints(kind)
        known = {f.name for f in dataclasses.fields(kind)}
        missing = [
            f.name
            for f in dataclasses.fields(kind)
            if f.name not in value
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise DstuiError(
                _("{where}: '{name}' is missing").format(where=where, name=missing[0]),
                _("make a facts file with: dstui detect --json"),
            )
        return kind(**{k: _load(hints[k], v, f"{where}.{k}") for k, v in value.items() if k in known})
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "array", value)
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise _wrong(where, f"array[{len(args)}]", value)
        inner = args[0]
        return tuple(_load(inner, v, f"{where}.{i}") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, "object", value)
        return {k: _load(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(where, "integer", value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(where, "number", value)
        return float(value)
    if kind in (str, bool) and not isinstance(value, kind):
        raise _wrong(where, kind.__name__, value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> DstuiError:
    return DstuiError(
        _("{where}: expected {wanted}, found {value!r}").format(where=where, wanted=wanted, value=value),
        _("make a facts file with: dstui detect --json"),
    )
