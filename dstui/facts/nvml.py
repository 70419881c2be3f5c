"""NVIDIA devices through NVML, read in a child process so that a hung driver cannot hang dstui.

``read(nvml)`` turns NVML's answers into plain data (what the child prints as JSON); ``devices(data)`` turns
that into ``Gpu`` records in the parent. NVML numbers devices in PCI bus order. Calls and meanings: NVIDIA's
NVML API reference; ``nvml`` is the ``pynvml`` module of nvidia-ml-py (12.535 and 13 were read).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from dstui.facts.model import Gpu, GpuProcess
from dstui.i18n import _

CHILD = "import sys; sys.path[:] = sys.argv[1].split('\\n'); from dstui.facts.nvml import child; child(sys.argv[2])"
"""Run with ``python -I -S -c``: no site start-up, the caller's own ``sys.path``."""

_KINDS = {
    2: "argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    9: "driver_not_loaded",
    12: "no_library",
    13: "not_supported",
    15: "gpu_lost",
    16: "reset_required",
    18: "version_mismatch",
}
"""NVML_ERROR_* codes (nvml.h) that get a text of their own."""

MEMORY_HELD_UNSEEN = 512 << 20
"""More used bytes than an idle card with a desktop's leftovers shows; used without any visible process."""


def child(proc: str) -> None:
    """Entry point of the child: one line of JSON on stdout."""
    import json

    try:
        import pynvml
    except ImportError:
        print(json.dumps({"error": {"kind": "no_binding", "text": ""}}))
        return
    print(json.dumps(read(pynvml, proc)))


class _Asker:
    """Calls NVML functions; remembers why one failed."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.error: dict[str, str] | None = None

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The function's answer, or None (then ``error`` says why)."""
        self.error = None
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:  # an older nvidia-ml-py
            self.error = {"kind": "not_supported", "text": name}
            return None
        try:
            return function(*args, **kwargs)
        except self.nvml.NVMLError as e:
            code = getattr(e, "value", None)
            self.error = {
                "kind": _KINDS.get(code, "other") if isinstance(code, int) else "other",
                "text": str(e),
            }
        except Exception as e:  # NVMLLibraryMismatchError, text that is not UTF-8, another signature
            self.error = {"kind": "other", "text": f"{type(e).__name__}: {e}"}
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value) if value else None


def read(nvml: Any, proc: str = "/proc") -> dict[str, Any]:
    """Everything NVML tells, as JSON data: ``{"error": ...}`` or ``{"driver", "cuda", "devices": [...]}``.

    Each device carries its values (None when NVML refused) and ``errors``: value name -> error.
    """
    ask = _Asker(nvml)
    ask("nvmlInit")
    if ask.error:
        return {"error": ask.error}
    try:
        return _read_open(nvml, ask, proc)
    finally:
        ask("nvmlShutdown")


def _read_open(nvml: Any, ask: _Asker, proc: str) -> dict[str, Any]:
    driver = _text(ask("nvmlSystemGetDriverVersion"))
    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    if not isinstance(cuda, int):
        cuda = ask("nvmlSystemGetCudaDriverVersion")
    count = ask("nvmlDeviceGetCount")
    if ask.error:
        return {"error": ask.error, "driver": driver, "cuda": cuda}
    handles: list[Any] = []
    devices: list[dict[str, Any]] = []
    for index in range(count):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        handles.append(handle)
        if handle is None:
            devices.append({"index": index, "errors": {"": ask.error}})
        else:
            devices.append(_device(nvml, ask, handle, index, proc))
    _peers(nvml, ask, handles, devices)
    return {"driver": driver, "cuda": cuda, "devices": devices}


def _memory(nvml: Any, ask: _Asker, handle: Any) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Total, free and reserved as nvidia-smi shows them: v2 where the driver has it (>= 510), else v1."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        m = ask("nvmlDeviceGetMemoryInfo", handle, version=version)
        if m is not None:
            return {
                "memory_total": int(m.total),
                "memory_free": int(m.free),
                "memory_reserved": int(m.reserved),
                "memory_used": int(m.used),
            }, None
    m = ask("nvmlDeviceGetMemoryInfo", handle)
    if m is None:
        return {
            "memory_total": None,
            "memory_free": None,
            "memory_reserved": None,
            "memory_used": None,
        }, ask.error
    return {
        "memory_total": int(m.total),
        "memory_free": int(m.free),
        "memory_reserved": None,
        "memory_used": int(m.used),
    }, None


def _device(nvml: Any, ask: _Asker, handle: Any, index: int, proc: str) -> dict[str, Any]:
    errors: dict[str, Any] = {}

    def value(key: str, name: str, *args: Any) -> Any:
        got = ask(name, *args)
        if ask.error:
            errors[key] = ask.error
        return got

    d: dict[str, Any] = {"index": index, "errors": errors}
    d["uuid"] = _text(value("uuid", "nvmlDeviceGetUUID", handle))
    d["name"] = _text(value("name", "nvmlDeviceGetName", handle))
    memory, error = _memory(nvml, ask, handle)
    d.update(memory)
    if error:
        errors["memory_total"] = errors["memory_free"] = error
    capability = value("compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
    d["compute_capability"] = [int(c) for c in capability] if capability is not None else None
    d["pcie_generation"] = value("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle)
    d["pcie_generation_max"] = value("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    d["pcie_width"] = value("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", handle)
    d["pcie_width_max"] = value("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", handle)
    pci = value("pci_bus", "nvmlDeviceGetPciInfo", handle)
    bus = _text(pci.busId) if pci is not None else None
    # NVML writes an eight-digit domain (00000000:1B:00.0), sysfs a four-digit one in lower case.
    d["pci_bus"] = bus.lower()[-12:] if bus else None
    mode = ask("nvmlDeviceGetMigMode", handle)
    if ask.error and ask.error["kind"] not in ("not_supported", "argument"):
        errors["mig_enabled"] = ask.error
        d["mig_enabled"] = None
    else:  # a card that cannot be split answers "not supported"
        d["mig_enabled"] = bool(mode and mode[0] == 1)
    d["processes"], error = _processes(ask, handle, proc)
    if error:
        errors["processes"] = error
    d["instances"] = _instances(nvml, ask, handle, index, proc) if d["mig_enabled"] else []
    return d


def _instances(nvml: Any, ask: _Asker, handle: Any, index: int, proc: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for slot in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        mig = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        if mig is None:  # an empty slot
            continue
        errors: dict[str, Any] = {}
        d: dict[str, Any] = {"index": index, "errors": errors}
        d["uuid"] = _text(ask("nvmlDeviceGetUUID", mig))
        d["name"] = _text(ask("nvmlDeviceGetName", mig))
        memory, error = _memory(nvml, ask, mig)
        d.update(memory)
        if error:
            errors["memory_total"] = errors["memory_free"] = error
        d["processes"], error = _processes(ask, mig, proc)
        if error:
            errors["processes"] = error
        out.append(d)
    return out


def _processes(
    ask: _Asker, handle: Any, proc: str
) -> tuple[list[dict[str, Any]] | None, dict[str, str] | None]:
    found: dict[int, dict[str, Any]] = {}
    refused: dict[str, str] | None = None
    for kind, name in (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ):
        listed = ask(name, handle)
        if ask.error and ask.error["kind"] == "other":  # a driver before 510 has only the v2 form
            newest = ask.error
            listed = ask(f"{name}_v2", handle)
            if ask.error:
                ask.error = newest
        if ask.error:
            if kind == "compute":
                refused = ask.error
            continue
        for p in listed or []:
            pid = int(p.pid)
            if pid in found:  # C+G in nvidia-smi: it computes
                continue
            used = p.usedGpuMemory
            found[pid] = {"pid": pid, "kind": kind, "memory": None if used is None else int(used)}
    if refused:
        return None, refused
    for pid, record in found.items():
        record["name"] = _process_name(proc, pid) or _text(ask("nvmlSystemGetProcessName", pid))
        record["user"] = _process_user(proc, pid)
    return [found[pid] for pid in sorted(found)], None


def _process_name(proc: str, pid: int) -> str | None:
    """Command line of the process, shortened to the program and its script."""
    import os

    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as f:  # noqa: PTH123 - the child imports no pathlib
            words = [w.decode("utf-8", "replace") for w in f.read(4096).split(b"\0") if w]
    except OSError:
        return None
    if not words:
        return None
    name = os.path.basename(words[0])  # noqa: PTH119
    script = (
        next((w for w in words[1:] if not w.startswith("-")), None) if name.startswith("python") else None
    )
    return f"{name} {os.path.basename(script)}" if script else name  # noqa: PTH119


def _process_user(proc: str, pid: int) -> str | None:
    import os

    try:
        uid = os.stat(f"{proc}/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def _peers(nvml: Any, ask: _Asker, handles: list[Any], devices: list[dict[str, Any]]) -> None:
    """Fill ``p2p_peers`` and ``nvlink_peers`` (NVML indices).

    ``nvmlDeviceGetP2PStatus(a, b, NVLINK)`` answers for direct bridges and for NVSwitch alike; where the
    driver lacks it, the remote PCI address of each active link is compared (direct bridges only).
    """
    read = getattr(nvml, "NVML_P2P_CAPS_INDEX_READ", 0)
    if isinstance(read, tuple):  # nvidia-ml-py ships `NVML_P2P_CAPS_INDEX_READ = 0,`
        read = read[0]
    link = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", 2)
    ok = getattr(nvml, "NVML_P2P_STATUS_OK", 0)
    for i, a in enumerate(handles):
        if a is None:
            continue
        for key, capability in (("p2p_peers", read), ("nvlink_peers", link)):
            peers: list[int] | None = []
            for j, b in enumerate(handles):
                if i == j or b is None or peers is None:
                    continue
                status = ask("nvmlDeviceGetP2PStatus", a, b, capability)
                if ask.error:
                    devices[i]["errors"][key] = ask.error
                    peers = None
                elif status == ok:
                    peers.append(j)
            if peers is None and key == "nvlink_peers":
                peers = _linked(nvml, ask, i, a, devices)
                if peers is not None:
                    devices[i]["errors"].pop(key, None)
            devices[i][key] = peers


def _linked(nvml: Any, ask: _Asker, own: int, handle: Any, devices: list[dict[str, Any]]) -> list[int] | None:
    peers: set[int] = set()
    answered = False
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        active = ask("nvmlDeviceGetNvLinkState", handle, number)
        if ask.error:
            break  # links are numbered without gaps
        answered = True
        if not active:
            continue
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        bus = _text(remote.busId) if remote is not None else None
        peers.update(d["index"] for d in devices if bus and d.get("pci_bus") == bus.lower()[-12:])
    return sorted(peers - {own}) if answered else None


def reason(error: Mapping[str, str]) -> str:
    """An NVML error as a sentence for the user."""
    kind, text = error.get("kind", "other"), error.get("text", "")
    if kind == "not_supported":
        return _("the driver does not tell this for this device")
    if kind == "no_permission":
        return _("the driver does not tell this to this user")
    if kind == "driver_not_loaded":
        return _("the NVIDIA driver is not loaded")
    if kind == "no_library":
        return _("the NVIDIA driver's library libnvidia-ml.so.1 is not installed here")
    if kind == "version_mismatch":
        return _("the NVIDIA driver and its library have different versions (an update without a reboot)")
    if kind == "gpu_lost":
        return _("the GPU has fallen off the bus")
    if kind == "reset_required":
        return _("the GPU must be reset before it can be used")
    if kind == "no_binding":
        return _("the Python package nvidia-ml-py is not installed beside dstui")
    return _("NVML: {text}").format(text=text or kind)


def cuda_version(number: Any) -> str | None:
    """NVML's 12040 -> ``12.4``."""
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) and number > 0 else None


def devices(data: Mapping[str, Any], numa: Callable[[str], int | None]) -> tuple[list[Gpu], dict[str, str]]:
    """Gpu records from ``read``'s data, MIG instances in place of a split card, and reasons by uuid or index.

    ``numa(pci_bus)`` gives the NUMA node of a PCI device. Reason keys are ``(position).(field)``.
    """
    gpus: list[Gpu] = []
    unknown: dict[str, str] = {}
    for d in data.get("devices", []):
        parts = d.get("instances") or []
        if d.get("mig_enabled") and parts:
            for part in parts:
                merged = {**d, **part, "mig_parent": d.get("uuid"), "mig_enabled": True}
                merged["p2p_peers"] = merged["nvlink_peers"] = []
                _add(gpus, unknown, merged, numa)
        else:
            _add(gpus, unknown, d, numa)
    return gpus, unknown


def _add(
    gpus: list[Gpu], unknown: dict[str, str], d: Mapping[str, Any], numa: Callable[[str], int | None]
) -> None:
    at = str(len(gpus))
    for key, error in d.get("errors", {}).items():
        if error:
            unknown[f"{at}.{key}" if key else at] = reason(error)
    processes = d.get("processes")
    used = d.get("memory_used")
    if processes == [] and used is not None and used > MEMORY_HELD_UNSEEN:
        processes = None  # NVML lists no process of another container or PID namespace
        unknown[f"{at}.processes"] = _(
            "memory is in use, but the driver shows no process (another container?)"
        )
    bus = d.get("pci_bus")
    node = numa(bus) if bus else None
    if node is None:
        unknown[f"{at}.numa_node"] = _("the kernel gives no NUMA node for this device")
    capability = d.get("compute_capability")
    gpus.append(
        Gpu(
            index=d["index"],
            uuid=d.get("uuid"),
            name=d.get("name"),
            memory_total=d.get("memory_total"),
            memory_free=d.get("memory_free"),
            memory_reserved=d.get("memory_reserved"),
            pci_bus=bus,
            compute_capability=(capability[0], capability[1]) if capability else None,
            pcie_generation=d.get("pcie_generation"),
            pcie_generation_max=d.get("pcie_generation_max"),
            pcie_width=d.get("pcie_width"),
            pcie_width_max=d.get("pcie_width_max"),
            nvlink_peers=None if d.get("nvlink_peers") is None else tuple(d["nvlink_peers"]),
            p2p_peers=None if d.get("p2p_peers") is None else tuple(d["p2p_peers"]),
            numa_node=node,
            mig_enabled=d.get("mig_enabled"),
            mig_parent=d.get("mig_parent"),
            processes=None
            if processes is None
            else tuple(
                GpuProcess(pid=p["pid"], user=p["user"], name=p["name"], memory=p["memory"], kind=p["kind"])
                for p in processes
            ),
        )
    )


def command(executable: str, proc: str = "/proc") -> list[str]:
    """The child's command line."""
    return [executable, "-I", "-S", "-c", CHILD, "\n".join(p for p in sys.path if p), proc]
