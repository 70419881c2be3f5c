"""``detect()``: the facts of this machine, in a quarter of a second and without importing torch.

Everything that may be slow or hang (the NVIDIA driver, compilers, foreign interpreters, dead network mounts)
runs in a child process or a daemon thread of its own and is given up at the time-out, with the reason kept.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dstui.facts import nvml
from dstui.facts.host import read_host
from dstui.facts.interpreters import InterpreterReader
from dstui.facts.model import Facts, Gpu
from dstui.facts.scheduler import read_scheduler
from dstui.facts.storage import read_storage
from dstui.facts.system import Child, System
from dstui.facts.toolchain import ToolchainReader
from dstui.facts.visible import select
from dstui.i18n import _

T = TypeVar("T")

NVIDIA, AMD = "0x10de", "0x1002"
_NVML_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/aarch64-linux-gnu/nvidia",
)


def detect(
    python: str | None = None, *, cwd: str | os.PathLike[str] | None = None, timeout: float = 3.0
) -> Facts:
    """The facts of this machine; never raises for what cannot be read (that is None with a reason).

    ``python``: the training interpreter asked for (path, venv folder or name on PATH); DstuiError when it
    does not exist. ``cwd``: where ./.venv, ./hostfile and the NVMe candidate are looked for. ``timeout``:
    seconds after which slow questions are given up.
    """
    system = System(cwd=os.path.abspath(cwd)) if cwd is not None else System()  # noqa: PTH100
    return read_facts(system, python=python, timeout=timeout)


def read_facts(
    system: System,
    *,
    python: str | None = None,
    timeout: float = 3.0,
    nvml_command: list[str] | None = None,
) -> Facts:
    """``detect`` on a given ``System``. ``nvml_command`` replaces the NVML child (tests)."""
    deadline = time.monotonic() + timeout
    interpreter_reader = InterpreterReader(system, python)  # first: a wrong --python raises here
    cards = pci_cards(system)
    gpu_child = None
    if nvml_command or driver_traces(system) or NVIDIA in cards:
        gpu_child = Child(
            nvml_command or nvml.command(sys.executable, str(system.path("/proc"))), system.environ
        )
    tool_reader = ToolchainReader(system)
    storage_job = _Job(lambda: read_storage(system))
    host, unknown = read_host(system)
    storage = storage_job.result(deadline)
    if storage is None:
        unknown["storage"] = _("a file system did not answer in time")
    else:
        unknown.update(storage[1])
    interpreters = interpreter_reader.finish(deadline)
    for i, it in enumerate(interpreters):
        if it.problem:
            unknown[f"interpreters.{i}"] = it.problem
    facts = Facts(interpreters=interpreters)
    toolchain, reasons = tool_reader.finish(facts.interpreter, deadline)
    unknown.update(reasons)
    gpus, driver, cuda, reasons = _gpus(system, gpu_child, cards, deadline, timeout)
    unknown.update(reasons)
    return Facts(
        gpus=None if gpus is None else tuple(gpus),
        driver=driver,
        cuda_driver=cuda,
        visible_devices=system.environ.get("CUDA_VISIBLE_DEVICES"),
        device_order=system.environ.get("CUDA_DEVICE_ORDER"),
        host=host,
        storage=storage[0] if storage else (),
        toolchain=toolchain,
        interpreters=interpreters,
        scheduler=read_scheduler(system, gpus, NVIDIA in cards),
        unknown=unknown,
    )


class _Job:
    """A function in a daemon thread whose answer is awaited only until a deadline."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._answer: list[T] = []
        self._error: list[BaseException] = []

        def body() -> None:
            try:
                self._answer.append(function())
            except BaseException as e:
                self._error.append(e)

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> Any:
        """The answer; None when it did not come. An error of the function is raised here."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._error:
            raise self._error[0]
        return self._answer[0] if self._answer else None


def pci_cards(system: System) -> set[str]:
    """Vendor numbers of the display and 3D controllers on the PCI bus (class 0x03xxxx)."""
    found: set[str] = set()
    try:
        nodes = list(system.path("/sys/bus/pci/devices").iterdir())
    except OSError:
        return found
    for node in nodes:
        try:
            if (node / "class").read_text().startswith("0x03"):
                found.add((node / "vendor").read_text().strip())
        except OSError:
            continue
    return found


def driver_traces(system: System) -> bool:
    """Whether anything of an NVIDIA driver is here, so that NVML is worth a process."""
    if any(system.exists(p) for p in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvmap")):
        return True
    folders = [p for p in system.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    return any(system.exists(f"{folder}/libnvidia-ml.so.1") for folder in (*_NVML_PLACES, *folders))


def numa_node(system: System, bus: str) -> int | None:
    """NUMA node of a PCI device; None when the kernel says -1 (no affinity) or nothing."""
    node = system.number(f"/sys/bus/pci/devices/{bus}/numa_node")
    return node if node is not None and node >= 0 else None


def _gpus(
    system: System, child: Child | None, cards: set[str], deadline: float, timeout: float
) -> tuple[list[Gpu] | None, str | None, str | None, dict[str, str]]:
    """(gpus, driver, CUDA of the driver, reasons)."""
    driver = _kernel_driver(system)
    if child is None:
        if system.exists("/dev/kfd") or (AMD in cards and system.exists("/opt/rocm")):
            return None, None, None, {"gpus": _("an AMD GPU is here; dstui reads NVIDIA GPUs only")}
        none = _("no NVIDIA driver and no NVIDIA card on this machine")
        return [], None, None, {"driver": none, "cuda_driver": none}
    text = child.output(deadline)
    if text is None:
        if child.timed_out:
            reason = _("the NVIDIA driver did not answer within {seconds:g} s").format(seconds=timeout)
        else:
            reason = _("NVML: {text}").format(text=child.failure or "?")
        return None, driver, None, {"gpus": reason, "cuda_driver": reason}
    try:
        data: Mapping[str, Any] = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        reason = _("NVML: {text}").format(text=text.strip()[-200:])
        return None, driver, None, {"gpus": reason, "cuda_driver": reason}
    driver = data.get("driver") or driver
    cuda = nvml.cuda_version(data.get("cuda"))
    if "error" in data:
        reason = nvml.reason(data["error"])
        kind = data["error"].get("kind")
        if kind in ("no_library", "driver_not_loaded") and NVIDIA in cards:
            reason = _("an NVIDIA card is in this machine, but {reason}").format(reason=reason)
        if kind in ("no_library", "driver_not_loaded") and NVIDIA not in cards and driver is None:
            return [], None, None, {"driver": reason, "cuda_driver": reason}  # leftovers of a driver, no card
        return None, driver, cuda, {"gpus": reason, "cuda_driver": reason}
    found, raw = nvml.devices(data, lambda bus: numa_node(system, bus))
    chosen, remark = select(system.environ.get("CUDA_VISIBLE_DEVICES"), found)
    reasons = {"visible_devices": remark} if remark else {}
    position = {id(g): i for i, g in enumerate(found)}
    visible = {g.index for g in chosen}
    out: list[Gpu] = []
    for new, gpu in enumerate(chosen):
        old = str(position[id(gpu)])
        for key, why in raw.items():
            head, _dot, rest = key.partition(".")
            if head == old:
                reasons[f"gpus.{new}.{rest}" if rest else f"gpus.{new}"] = why
        out.append(_only_visible_peers(gpu, visible))
    if sum(g.mig_parent is not None for g in out) > 1:
        reasons["gpus.mig"] = _(
            "a process can use one MIG instance only: each rank needs CUDA_VISIBLE_DEVICES of its own"
        )
    order = system.environ.get("CUDA_DEVICE_ORDER")
    if len({(g.name or "").partition(" MIG ")[0] for g in found}) > 1 and order != "PCI_BUS_ID":
        reasons["device_order"] = _(
            "the cards differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA may number them in another order "
            "than nvidia-smi and dstui; set CUDA_DEVICE_ORDER=PCI_BUS_ID or choose cards by UUID"
        )
    return out, driver, cuda, reasons


def _only_visible_peers(gpu: Gpu, visible: set[int]) -> Gpu:
    import dataclasses

    def keep(peers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if peers is None else tuple(p for p in peers if p in visible)

    return dataclasses.replace(gpu, nvlink_peers=keep(gpu.nvlink_peers), p2p_peers=keep(gpu.p2p_peers))


def _kernel_driver(system: System) -> str | None:
    """Version of the loaded NVIDIA kernel module."""
    m = re.search(r"Kernel Module\D*?([0-9]+(?:\.[0-9]+)+)", system.read("/proc/driver/nvidia/version") or "")
    return m.group(1) if m else None
