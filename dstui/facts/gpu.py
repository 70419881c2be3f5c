"""Polling the GPUs while a run goes on: one NVML session, opened once, read many times.

``NvmlSession`` never raises; what the driver does not tell is None. It may block as long as the driver
blocks, so a monitor calls it from a thread of its own. Units: bytes, watts, degrees Celsius, MHz, bytes per
second, shares 0-1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dstui.facts.nvml import reason as nvml_reason

_REASONS = (
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
_NVLINK_TX, _NVLINK_RX = 138, 139
_ALL_LINKS = 0xFFFFFFFF
_COUNTERS = ((_NVLINK_TX, _ALL_LINKS), (_NVLINK_RX, _ALL_LINKS))
"""nvml.h ``NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*``: KiB without protocol, summed over the links by scope UINT_MAX. On two
H200s they agreed within 0.1 % with a copy of 382 GB/s. (``NVML_FI_DEV_PCIE_COUNT_*_BYTES`` is not used: it wraps within
a tenth of a second of a fast copy; beside 54.6 GB/s it gave 0.24.)"""
_VALUE_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""nvml.h nvmlValueType_t -> member of the union."""
ROUND = 10.0
"""Seconds between two measurements of one card's PCIe throughput: each makes the driver look for 20 ms a direction."""
SLOW = 5.0
"""Seconds between two readings of what changes slowly (temperature, clocks, limits, throttling, NVLink). A reading of all
of it costs 1.2 ms of CPU time a card on an H200, so eight cards a second would be a hundredth of a core."""


@dataclass(frozen=True)
class GpuSample:
    """One reading of one device. ``throttle``: names of the reasons that hold its clocks down, () = none.

    ``pcie_tx nvlink_tx``: bytes per second that left the card, ``pcie_rx nvlink_rx``: that came in; NVLink over the last
    ``SLOW`` seconds, PCIe over 20 ms of the last ``ROUND`` seconds.
    """

    index: int
    uuid: str | None = None
    utilisation: float | None = None
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
    nvlink_tx: int | None = None
    nvlink_rx: int | None = None


class _Card:
    """What is remembered of one card between two readings."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int]] = {}
        self.slow: dict[str, Any] = {}
        self.read_at: float | None = None
        """When ``slow`` was read, on the monotonic clock."""
        self.pcie: tuple[int | None, int | None] = (None, None)
        self.measured_at: float | None = None

    def rates(self, values: Any, now: float) -> dict[int, int]:
        """Bytes per second by field id, of those that the driver counts and that were read before."""
        found = {}
        for v in values or ():
            if v.nvmlReturn != 0 or v.valueType not in _VALUE_TYPES:
                continue
            value = int(getattr(v.value, _VALUE_TYPES[v.valueType])) * 1024
            before = self._before.get(v.fieldId)
            self._before[v.fieldId] = (now, value)
            if before is not None and now > before[0] and value >= before[1]:  # less: a reset
                found[v.fieldId] = int((value - before[1]) / (now - before[0]))
        return found


class NvmlSession:
    """``with NvmlSession(uuids) as s: s.sample()`` -> one ``GpuSample`` per device.

    ``devices``: UUIDs (cards or MIG instances) or NVML indices (``1`` or ``"1"``), None = all cards. ``problem`` tells why
    nothing can be read. Use, memory and power are read each time, the rest of a card every ``slow`` seconds, not all
    cards at once; PCIe of one card at a time, each every ``ROUND`` seconds. ``nvml`` replaces the pynvml module (tests).
    """

    def __init__(
        self, devices: Sequence[str | int] | None = None, *, slow: float = SLOW, nvml: Any = None
    ) -> None:
        self.problem: str | None = None
        self._wanted = None if devices is None else list(devices)
        self._slow = slow
        self._cards: dict[int, _Card] = {}
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
            if isinstance(device, str) and device.isdigit():
                device = int(device)
            if isinstance(device, str):
                handle = self._call("nvmlDeviceGetHandleByUUID", device)
                index = self._call("nvmlDeviceGetIndex", handle)
                self._handles.append((position if index is None else index, device, handle))
            else:
                handle = self._call("nvmlDeviceGetHandleByIndex", device)
                self._handles.append((device, self._text(self._call("nvmlDeviceGetUUID", handle)), handle))
        return True

    def close(self) -> None:
        """Let the driver go; may be called twice."""
        if self._open:
            self._call("nvmlShutdown")
            self._open = False
            self._handles = []
            self._cards = {}

    def sample(self) -> tuple[GpuSample, ...]:
        """One reading of every device, in the order asked for; () when NVML is not there."""
        if not self._open and not self.open():
            return ()
        self._measure_pcie(time.monotonic())
        found = tuple(self._read(position, *h) for position, h in enumerate(self._handles))
        if found and all(g.memory_used is None and g.utilisation is None for g in found):
            self.close()  # a driver that was reloaded forgets its clients: start anew at the next reading
        return found

    def _measure_pcie(self, now: float) -> None:
        """Have the driver measure the card whose turn it is."""
        waiting = [
            (card.measured_at or 0.0, position)
            for position, card in self._cards.items()
            if card.measured_at is None or now - card.measured_at >= ROUND
        ]
        if not waiting:
            return
        position = min(waiting)[1]
        card, handle = self._cards[position], self._handles[position][2]
        card.measured_at = now
        tx = self._call("nvmlDeviceGetPcieThroughput", handle, 0)
        rx = self._call("nvmlDeviceGetPcieThroughput", handle, 1)
        # NVML counts KB/s over 20 ms
        card.pcie = (None if tx is None else tx * 1024, None if rx is None else rx * 1024)

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

    def _read(self, position: int, index: int, uuid: str | None, handle: Any) -> GpuSample:
        if handle is None:
            return GpuSample(index=index, uuid=uuid)
        n = self._nvml
        busy = self._call("nvmlDeviceGetUtilizationRates", handle)
        version = getattr(n, "nvmlMemory_v2", None)
        memory = None
        if version is not None:  # v2 counts the driver's own share apart, as nvidia-smi does
            memory = self._call("nvmlDeviceGetMemoryInfo", handle, version=version)
        if memory is None:
            memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        power = self._call("nvmlDeviceGetPowerUsage", handle)
        card = self._cards.setdefault(position, _Card())
        now = time.monotonic()
        if card.read_at is None or now - card.read_at >= self._slow:
            # the second reading comes sooner, each card at a moment of its own
            early = (
                0.0 if card.read_at is not None else self._slow * (position + 1) / (len(self._handles) + 1)
            )
            card.slow, card.read_at = self._read_slow(card, handle, now), now - early
        return GpuSample(
            index=index,
            uuid=uuid,
            utilisation=None if busy is None else busy.gpu / 100,
            memory_total=None if memory is None else int(memory.total),
            memory_used=None if memory is None else int(memory.used),
            power=None if power is None else power / 1000,
            pcie_tx=card.pcie[0],
            pcie_rx=card.pcie[1],
            **card.slow,
        )

    def _read_slow(self, card: _Card, handle: Any, now: float) -> dict[str, Any]:
        bits = self._call("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        limit = self._call("nvmlDeviceGetEnforcedPowerLimit", handle)
        rates = card.rates(self._call("nvmlDeviceGetFieldValues", handle, list(_COUNTERS)), now)
        return {
            "power_limit": None if limit is None else limit / 1000,
            "temperature": self._call("nvmlDeviceGetTemperature", handle, 0),
            "sm_clock": self._call("nvmlDeviceGetClockInfo", handle, 1),
            "memory_clock": self._call("nvmlDeviceGetClockInfo", handle, 2),
            "throttle": None if bits is None else tuple(name for bit, name in _REASONS if bits & bit),
            "nvlink_tx": rates.get(_NVLINK_TX),
            "nvlink_rx": rates.get(_NVLINK_RX),
        }
