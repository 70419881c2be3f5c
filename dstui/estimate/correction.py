"""What measured runs say about an estimate: the same question was answered by the machine itself, or a near one.

Pure: the measurements are an argument (``dstui.runs.calibration`` keeps them). A record counts

- *exactly*, for the very same settings: its figures replace the prediction, and the range becomes what was measured
  with the spread of repeated runs around it (never narrower than the measurements, never below a phase that the run
  did not reach, such as save);
- *nearly*, for another placement or size of the same model: only what does not depend on them is used, the device
  memory beside PyTorch's (same number of ranks), and the size of the interpreter (no offload on either side). Ranges
  then move or widen, they do not narrow, but for the device overhead, which was measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dstui.estimate.result import GpuFit, HostFit, Range
from dstui.estimate.settings import Settings
from dstui.estimate.subject import settings_class
from dstui.i18n import _
from dstui.units import GiB, MiB, gib

SPREAD = {"allocated": 0.005, "reserved": 0.02, "device": 0.02, "overhead": 0.05, "host": 0.04}
"""Relative half-width beyond the measurements: what a repetition of the same run moves."""
_LEAST_OVERHEAD = 64 * MiB
_INTERPRETER = GiB
"""A larger difference of a rank's RSS is no interpreter but something that the prediction lacks."""


@dataclass(frozen=True)
class Record:
    """One measured run. Bytes; GPU figures of the worst rank, ``host`` and ``pinned`` summed over the node's ranks."""

    run: str
    at: float
    """Epoch seconds."""
    kind: str
    """``trial`` or ``run``."""
    dstui: str
    settings: str
    """``settings_class`` of its settings."""
    summary: Mapping[str, Any]
    measured: Mapping[str, float | None]
    """``allocated reserved device overhead host pinned step_time``; None where it was not measured."""
    predicted: Mapping[str, float | None]
    """The same, as that release of dstui predicted them without any correction."""
    phases: tuple[str, ...] = ()
    """Phases that were measured."""
    seen: bool = False
    """The probe saw rows and tokens of the batches, so the settings are those that really ran. Otherwise the data may
    have been shorter than assumed: such a record raises a figure, or widens a range, and lowers nothing."""

    @property
    def ranks(self) -> int:
        return int(self.summary.get("processes") or self.summary.get("ranks") or 1)

    @property
    def offloads(self) -> bool:
        return any(self.summary.get(k) not in (None, "none") for k in ("offload_optimizer", "offload_param"))

    def value(self, what: str) -> int | None:
        value = self.measured.get(what)
        return None if value is None else int(value)

    def ratio(self, what: str) -> float | None:
        """Measured / predicted."""
        measured, predicted = self.measured.get(what), self.predicted.get(what)
        return None if measured is None or not predicted else measured / predicted


@dataclass(frozen=True)
class Calibration:
    """The records of one model on one machine, newest first."""

    records: tuple[Record, ...] = ()
    dstui: str = ""
    """This release: a near record's *prediction* is comparable only with one of the same release."""
    _exact: dict[str, tuple[Record, ...]] = field(default_factory=dict, compare=False, repr=False)

    def exact(self, settings: Settings) -> tuple[Record, ...]:
        key = settings_class(settings)
        if key not in self._exact:
            self._exact[key] = tuple(r for r in self.records if r.settings == key)
        return self._exact[key]

    def gpu(self, fit: GpuFit, s: Settings) -> tuple[GpuFit, list[str]]:
        """``fit`` corrected, with what to say about it."""
        if fit.allocated is None or fit.reserved is None or fit.device is None:
            return fit, []
        same = self.exact(s)
        before = fit.device.expected - fit.reserved.expected
        width = (
            before - (fit.device.low - fit.reserved.low),
            (fit.device.high - fit.reserved.high) - before,
        )
        notes: list[str] = []
        allocated = self._replaced(same, "allocated", fit.allocated, _unreached(fit, same))
        reserved = self._replaced(same, "reserved", fit.reserved, 0)
        if reserved is not None and allocated is not None:
            reserved = Range(
                max(allocated.low, reserved.low),
                max(allocated.expected, reserved.expected),
                max(allocated.high, reserved.high),
            )
        over = [r for r in same if r.value("overhead")] or [
            r for r in self.records if r.ranks == s.processes and r.value("overhead")
        ]
        sizes = [n for n in (r.value("overhead") for r in over) if n]
        if sizes:
            mid = max(sizes)
            room = max(_LEAST_OVERHEAD, round(SPREAD["overhead"] * mid) * (1 if over[0] in same else 2))
            overhead = Range(max(0, min(sizes) - room), mid, mid + room)
        else:
            overhead = Range(max(0, before - width[0]), before, before + width[1])
        a, r = allocated or fit.allocated, reserved or fit.reserved
        device = Range(r.low + overhead.low, r.expected + overhead.expected, r.high + overhead.high)
        whole = None if reserved is not None else self._replaced(same, "device", device, 0)
        if allocated is None and reserved is None and whole is None and not sizes:
            return fit, []
        device = whole or device
        if allocated is not None or reserved is not None or whole is not None:
            parts = []
            if allocated is not None:
                parts.append(
                    _("allocated x{ratio:.3f}").format(ratio=allocated.expected / fit.allocated.expected)
                )
            if reserved is not None:
                parts.append(
                    _("reserved x{ratio:.3f}").format(ratio=reserved.expected / fit.reserved.expected)
                )
            if whole is not None:
                parts.append(_("device x{ratio:.3f}").format(ratio=whole.expected / fit.device.expected))
            notes.append(_said(same[0], parts))
        if sizes:
            notes.append(
                _("beside PyTorch's memory the device holds {size}, measured by {run}").format(
                    size=gib(overhead.expected), run=_name(over[0])
                )
            )
        return replace(fit, allocated=a, reserved=r, device=device), notes

    def host(self, fit: HostFit, s: Settings) -> tuple[HostFit, list[str]]:
        """``fit`` corrected. Its peak is that of training: saving is told apart, in ``phases``."""
        if fit.peak is None:
            return fit, []
        same = self.exact(s)
        predicted: Range = fit.peak
        peak = self._replaced(same, "host", predicted, 0)
        if peak is not None:
            pinned = next((n for n in (r.value("pinned") for r in same) if n is not None), None)
            fit = replace(fit, peak=peak, pinned=fit.pinned if pinned is None else pinned)
            ratio = _("host x{ratio:.3f}").format(ratio=peak.expected / max(1, predicted.expected))
            return fit, [_said(same[0], [ratio])]
        if s.offload_optimizer != "none" or s.offload_param != "none":
            return fit, []
        moves = []
        for r in self.records:
            measured, thought = r.value("host"), r.predicted.get("host")
            if r.dstui == self.dstui and not r.offloads and measured is not None and thought:
                each = (measured - int(thought)) // max(1, r.ranks)
                if abs(each) <= _INTERPRETER:
                    moves.append((each, r))
        if not moves:
            return fit, []
        each, record = moves[0]
        shift = each * min(s.processes, s.ranks_per_node)
        moved = Range(
            max(0, predicted.low + min(0, shift)),
            max(1, predicted.expected + shift),
            predicted.high + max(0, shift),
        )
        note = _("a rank's interpreter differs by {size} from the usual, measured by {run}").format(
            size=("-" if each < 0 else "+") + gib(abs(each)), run=_name(record)
        )
        return replace(fit, peak=moved), [note]

    @staticmethod
    def _replaced(same: Sequence[Record], what: str, predicted: Range, floor: int) -> Range | None:
        """The range of what was measured under the same settings; None without a measurement."""
        measured = [(n, r.seen) for r in same if (n := r.value(what))]
        if not measured:
            return None
        spread = SPREAD[what]
        sure = [n for n, seen in measured if seen]
        if not sure:
            values = [n for n, _seen in measured]
            return Range(
                min(predicted.low, round(min(values) * (1 - spread))),
                max(predicted.expected, *values),
                max(predicted.high, round(max(values) * (1 + spread))),
            )
        expected = max(*sure, floor)
        high = round(expected * (1 + spread))
        if floor > max(sure):  # a phase that was predicted only keeps its doubt
            high = max(high, predicted.high)
        return Range(round(min(sure) * (1 - spread)), expected, high)


def _unreached(fit: GpuFit, same: Sequence[Record]) -> int:
    """Predicted bytes of the phases that no record has seen."""
    seen = {p for r in same for p in r.phases}
    return max((p.total for p in fit.phases if p.phase not in seen), default=0)


def _name(r: Record) -> str:
    day = time.strftime("%Y-%m-%d", time.localtime(r.at))
    text = _("trial {run} of {date}") if r.kind == "trial" else _("run {run} of {date}")
    return text.format(run=r.run, date=day)


def _said(r: Record, parts: Sequence[str]) -> str:
    return _("corrected by {run}: {parts}").format(run=_name(r), parts=", ".join(parts))
