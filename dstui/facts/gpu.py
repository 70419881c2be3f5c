"""Polling the GPUs while a run goes on: one NVML session, opened once, read many times.

``NvmlSession`` never raises; what the driver does not tell is None. It may block as long as the driver
blocks, so a monitor calls it from a thread of its own. Units: bytes, watts, degrees Celsius, MHz, bytes per
second, shares 0-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dstui.facts.nvml import reason as nvml_reason

_SLOW = (
    (0x4, "power-cap"),
    (0x8, "hw-slowdown"),
    (0x20, "sw-thermal"),
    (0x40, "hw-thermal"),
    (0x80, "power-brake"),
    (0x10, "sync-boost"),
    (0x2, "applications-clocks"),
    (0x100, "display-clocks"),
)
"""nvml.h nvmlClocksEventReasons bits; idle (0x1) is no reason to worry and left out."""


@dataclass(frozen=True)
class GpuSample:
    """One reading of one device. ``throttle``: names of the reasons that hold its clocks down, () = none."""

    index: int
    uuid: str | None = None
    utilisation: float | None = None
    memory_controller: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    throttle: tuple[str, ...] | None = None
    pcie_tx: int | None = None
    pcie_rx: int | None = None


class NvmlSession:
    """``with NvmlSession(uuids) as s: s.sample()`` -> one ``GpuSample`` per device.

    ``devices``: UUIDs (cards or MIG instances) or NVML indices, None = all cards. ``problem`` tells why
    nothing can be read. PCIe throughput costs the driver 20 ms a counter, so it is read only with
    ``pcie=True``. ``nvml`` replaces the pynvml module (tests).
    """

    def __init__(
        self, devices: Sequence[str | int] | None = None, *, pcie: bool = False, nvml: Any = None
    ) -> None:
        self.problem: str | None = None
        self._wanted = None if devices is None else list(devices)
        self._pcie = pcie
        self._nvml = nvml
        self._handles: list[tuple[int, str | None, Any]] = []
        self._open = False

    def __enter__(self) -> NvmlSession:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> bool:
        """Start NVML and look the devices up; False (and ``problem``) when it cannot."""
        if self._open:
            return True
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self.problem = nvml_reason({"kind": "no_binding"})
                return False
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except Exception as e:
            self.problem = nvml_reason({"kind": "other", "text": str(e)})
            return False
        self._open = True
        self.problem = None
        self._handles = []
        wanted: Sequence[str | int] = (
            range(self._call("nvmlDeviceGetCount") or 0) if self._wanted is None else self._wanted
        )
        for position, device in enumerate(wanted):
            if isinstance(device, str):
                handle = self._call("nvmlDeviceGetHandleByUUID", device)
                index = self._call("nvmlDeviceGetIndex", handle)
                self._handles.append((position if index is None else index, device, handle))
            else:
                handle = self._call("nvmlDeviceGetHandleByIndex", device)
                self._handles.append((device, self._text(self._call("nvmlDeviceGetUUID", handle)), handle))
        return True

    def close(self) -> None:
        if self._open:
            self._call("nvmlShutdown")
            self._open = False
            self._handles = []

    def sample(self) -> tuple[GpuSample, ...]:
        """One reading of every device, in the order asked for; () when NVML is not there."""
        if not self._open and not self.open():
            return ()
        return tuple(self._read(*h) for h in self._handles)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*args, **kwargs)
        except Exception:  # NVMLError of any kind, a function this pynvml lacks, a lost device
            return None

    @staticmethod
    def _text(value: Any) -> str | None:
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return value if isinstance(value, str) else None

    def _read(self, index: int, uuid: str | None, handle: Any) -> GpuSample:
        if handle is None:
            return GpuSample(index=index, uuid=uuid)
        n = self._nvml
        rates = self._call("nvmlDeviceGetUtilizationRates", handle)
        version = getattr(n, "nvmlMemory_v2", None)
        memory = None
        if version is not None:  # v2 counts the driver's own share apart, as nvidia-smi does
            memory = self._call("nvmlDeviceGetMemoryInfo", handle, version=version)
        if memory is None:
            memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        power = self._call("nvmlDeviceGetPowerUsage", handle)
        bits = self._call("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        limit = self._call("nvmlDeviceGetEnforcedPowerLimit", handle)
        tx = self._call("nvmlDeviceGetPcieThroughput", handle, 0) if self._pcie else None
        rx = self._call("nvmlDeviceGetPcieThroughput", handle, 1) if self._pcie else None
        return GpuSample(
            index=index,
            uuid=uuid,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_controller=None if rates is None else rates.memory / 100,
            memory_total=None if memory is None else int(memory.total),
            memory_used=None if memory is None else int(memory.used),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            temperature=self._call("nvmlDeviceGetTemperature", handle, 0),
            sm_clock=self._call("nvmlDeviceGetClockInfo", handle, 1),
            memory_clock=self._call("nvmlDeviceGetClockInfo", handle, 2),
            throttle=None if bits is None else tuple(name for bit, name in _SLOW if bits & bit),
            pcie_tx=None if tx is None else tx * 1024,  # NVML counts KB/s over 20 ms
            pcie_rx=None if rx is None else rx * 1024,
        )
