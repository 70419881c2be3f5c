"""Runs side by side: what differs in their configs, and what that did. Figures come from real runs only.

A column is one run, or several runs of one kind (an A/B of several pairs). Speeds are those of the steps after the
warm-up (``dstui.runs.pace``). Unknown is None; nothing is estimated.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _, listed
from dstui.runs import pace, store
from dstui.runs.pace import Pace
from dstui.runs.samples import Peaks, read_history, read_peaks
from dstui.runs.state import read_config
from dstui.runs.store import RunDir

SCHEMA_VERSION = 1
FEW = 5
"""Steps whose loss all runs logged, below which the losses are compared over a stretch instead."""
RELEVANT = 0.005
"""A difference below half a per cent is of no use even where it is certain."""


@dataclass(frozen=True)
class Figures:
    """One column. Sizes in bytes, times in seconds, shares 0-1. Of several runs: medians of their figures, the
    highest peaks, and of ``seconds``, ``gpu_hours`` and ``price`` the mean of a run."""

    run: str
    """The id; of several runs the first one's."""
    name: str | None
    runs: tuple[str, ...]
    state: str
    """The worst, where several runs ended differently."""
    deepspeed: str | None
    torch: str | None
    gpu: str | None
    ranks: int | None
    batch: int | None
    steps: int | None
    seconds: float | None
    """From start to end, loading included."""
    before_first_step: float | None
    """From start to the first step: loading, building, the first step itself."""
    step_time: float | None
    """Median after the warm-up."""
    step_time_spread: float | None
    """Median distance from the median; of several runs the median of theirs."""
    step_time_low: float | None
    """The 95 % interval of the median: from the steps of one run, or from the runs where there are several."""
    step_time_high: float | None
    step_time_from: str | None
    """What tells it (``dstui.runs.pace.SOURCES``)."""
    step_time_resolution: float | None
    """By how much it may be wrong because of how it was taken."""
    steps_measured: int
    warmup_steps: int
    tokens_per_second: float | None
    samples_per_second: float | None
    gpu_peak: int | None
    """Most memory in use on one card, as the driver counts."""
    allocated_peak: int | None
    host_peak: int | None
    """Sum of the ranks' peak RSS."""
    gpu_utilisation: float | None
    """Mean over cards and seconds from the first step to the last."""
    gpu_power: float | None
    """Mean watts of one card, likewise."""
    communication: float | None
    """Time in collectives as a share of the steps' (comms_logger); None when it was off."""
    gradient_reduction: float | None
    """Gradient reduction as a share of forward + backward + step (wall_clock_breakdown); None when it was off.
    What overlaps with backward, and at ZeRO-3 the gathering of parameters, is not in it."""
    loss: float | None
    loss_at: float | None
    """Mean loss around the last step that every run logged (``Comparison.equal_step``)."""
    gpu_hours: float | None
    """Cards x time from start to end."""
    price: float | None
    """GPU-hours times what was given for one."""
    gpu_hours_per_million_samples: float | None
    """At the pace after the warm-up, so a short run tells what a long one will take."""
    price_per_million_samples: float | None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "runs": list(self.runs)}


@dataclass(frozen=True)
class Measured:
    """One run as read from its folder."""

    run: RunDir
    pace: Pace
    figures: Figures

    @property
    def per_sample(self) -> float | None:
        """Seconds a sample, from the median step."""
        each, batch = self.pace.step_time, self.pace.progress.batch
        return each / batch if each and batch else None


def measure(run: RunDir, price_per_gpu_hour: float | None = None) -> Measured:
    """Raises DstuiError when the run's manifest cannot be read."""
    found = pace.read(run)
    manifest = run.manifest
    samples = read_history(run.samples_dir)
    peaks = read_peaks(run.samples_dir) or Peaks()
    for s in samples:  # the file is written every few seconds only, and may be missing
        peaks.add(s)
    progress = found.progress
    started = manifest.get("started_at")
    ended = (run.exit or {}).get("ended_at")
    seconds = float(ended) - float(started) if ended and started else None
    cards = max([len(s.gpus) for s in samples[-60:]] + [len(peaks.gpu_used)])
    names = [g.get("name") for g in (manifest.get("facts") or {}).get("gpus") or () if isinstance(g, dict)]
    use, power = [], []
    for s in samples:
        if found.first_at is not None and found.first_at < s.t <= (found.last_at or s.t):
            use += [g.utilisation for g in s.gpus if g.utilisation is not None]
            power += [g.power for g in s.gpus if g.power is not None]
    each, low, high = found.step_time, None, None
    if each is not None and len(found.times) >= pace.ENOUGH:
        low, high = pace.within(pace.medians(found.times, random.Random(0)))
        low, high = low - found.resolution, high + found.resolution
    rate = progress.batch / each if progress.batch and each else progress.samples_per_second
    hours = cards * seconds / 3600 if cards and seconds is not None else None
    per_million = cards * 1e6 / rate / 3600 if cards and rate else None
    price = price_per_gpu_hour
    versions = manifest.get("versions") or {}
    figures = Figures(
        run=run.id,
        name=manifest.get("name"),
        runs=(run.id,),
        state=store.state(run),
        deepspeed=versions.get("deepspeed"),
        torch=versions.get("torch"),
        gpu=f"{cards}x{names[0]}" if cards and names and names[0] else None,
        ranks=progress.world or manifest.get("world_size"),
        batch=progress.batch,
        steps=found.total,
        seconds=seconds,
        before_first_step=found.first_at - float(started) if found.first_at and started else None,
        step_time=each,
        step_time_spread=found.spread,
        step_time_low=low,
        step_time_high=high,
        step_time_from=found.source,
        step_time_resolution=found.resolution if found.source else None,
        steps_measured=sum(i.steps for i in found.steps),
        warmup_steps=found.warmup,
        tokens_per_second=statistics.median(found.tokens) if found.tokens else None,
        samples_per_second=rate,
        gpu_peak=max(peaks.gpu_used.values(), default=None),
        allocated_peak=found.allocated if cards else None,
        host_peak=max(sum(peaks.rank_rss.values()), found.rss or 0) or None,
        gpu_utilisation=statistics.fmean(use) if use else None,
        gpu_power=statistics.fmean(power) if power else None,
        communication=found.communication,
        gradient_reduction=found.reduction,
        loss=progress.loss,
        loss_at=None,
        gpu_hours=hours,
        price=hours * price if hours is not None and price is not None else None,
        gpu_hours_per_million_samples=per_million,
        price_per_million_samples=per_million * price
        if per_million is not None and price is not None
        else None,
    )
    return Measured(run, found, figures)


# -- how sure ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How the pace of one column relates to the first's. ``ratio``: its time a sample (or, where a batch is unknown,
    a step) divided by the first's; 0.8 = a fifth less time. ``low``, ``high``: its 95 % interval."""

    column: int
    ratio: float
    low: float
    high: float
    per: str
    """``sample`` or ``step``."""
    method: str
    """``pairs``: t interval over the log ratios of the pairs, which holds what differs from run to run. ``runs``:
    Welch's t interval over the runs. ``steps``: block bootstrap over the steps of one run each, which does not."""
    count: int
    """Pairs, or runs of the smaller side."""

    @property
    def outcome(self) -> str:
        """``faster``, ``slower``, ``noise`` (the interval holds 1), ``same`` (certain, and below RELEVANT)."""
        if self.low <= 1 <= self.high:
            return "noise"
        if abs(self.ratio - 1) < RELEVANT:
            return "same"
        return "faster" if self.ratio < 1 else "slower"

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "outcome": self.outcome}


def verdict(
    first: Sequence[Measured], other: Sequence[Measured], column: int, paired: bool = False
) -> Verdict | None:
    """None where a side has no step times. ``paired``: run i of each side belongs together."""
    everything = [*first, *other]
    if any(m.pace.step_time is None for m in everything) or not first or not other:
        return None
    per_sample = all(m.per_sample is not None for m in everything)

    def cost(m: Measured) -> float:
        return (m.per_sample if per_sample else m.pace.step_time) or math.nan

    logs_a, logs_b = [math.log(cost(m)) for m in first], [math.log(cost(m)) for m in other]
    count = min(len(first), len(other))
    if paired and len(first) == len(other) and count >= 2:
        method = "pairs"
        each = [b - a for a, b in zip(logs_a, logs_b, strict=True)]
        middle = statistics.fmean(each)
        half = pace.student(count - 1) * statistics.stdev(each) / math.sqrt(count)
    elif count >= 2:
        method = "runs"
        middle = statistics.fmean(logs_b) - statistics.fmean(logs_a)
        errors = [statistics.variance(x) / len(x) for x in (logs_a, logs_b)]
        whole = sum(errors)
        freedom = (
            whole**2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (logs_a, logs_b), strict=True) if e)
            if whole
            else count - 1
        )
        half = pace.student(max(1, int(freedom))) * math.sqrt(whole)
    else:
        method = "steps"
        middle, half = statistics.median(logs_b) - statistics.median(logs_a), 0.0
    low, high = middle - half, middle + half
    if method == "steps":
        rng = random.Random(0)
        a, b = first[0], other[0]
        ratios = [
            math.log(y / x) + middle - math.log((b.pace.step_time or 1) / (a.pace.step_time or 1))
            for x, y in zip(pace.medians(a.pace.times, rng), pace.medians(b.pace.times, rng), strict=True)
        ]
        low, high = pace.within(ratios)
        low, high = min(low, middle), max(high, middle)
    blur = math.hypot(*(max(m.pace.resolution / (m.pace.step_time or 1) for m in s) for s in (first, other)))
    if method == "steps" and any(len(m.pace.steps) < pace.ENOUGH for m in everything):
        blur = max(blur, math.log(2))  # two or three intervals say nothing about their own spread
    return Verdict(
        column,
        math.exp(middle),
        math.exp(low - blur),
        math.exp(high + blur),
        "sample" if per_sample else "step",
        method,
        count,
    )


# -- columns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    figures: tuple[Figures, ...]
    differences: tuple[tuple[str, tuple[Any, ...]], ...]
    """Config key -> its effective value in each column; keys that are equal in all are left out. What dstui itself
    added for the monitor is no difference."""
    warnings: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()
    """Each column against the first."""
    equal_step: int | None = None
    """The last step whose loss every run logged."""
    loss_gap: float | None = None
    """Largest distance between the columns' mean losses over the logged steps they share."""
    labels: tuple[str, ...] = ()
    operations: tuple[Mapping[str, float], ...] = field(default=())
    """Collective -> seconds a step, of each column (comms_logger)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [f.to_json() for f in self.figures],
            "config": [{"path": k, "values": list(v)} for k, v in self.differences],
            "verdicts": [v.to_json() for v in self.verdicts],
            "equal_step": self.equal_step,
            "loss_gap": self.loss_gap,
            "operations": [dict(o) for o in self.operations],
            "warnings": list(self.warnings),
        }


_OURS = ("csv_monitor.", "steps_per_print", "log_level")


@dataclass(frozen=True)
class Column:
    """``runs`` of one kind. ``breakdown``: runs with the timers on, which tell the communication and nothing else."""

    runs: tuple[RunDir, ...]
    label: str | None = None
    breakdown: tuple[RunDir, ...] = ()


def compare(
    columns: Sequence[RunDir | Column], price_per_gpu_hour: float | None = None, *, paired: bool = False
) -> Comparison:
    """``columns`` side by side, the first as the base. ``paired``: run i of each column belongs together (A/B).
    Raises DstuiError."""
    given = [c if isinstance(c, Column) else Column((c,)) for c in columns]
    if any(not c.runs for c in given):
        raise DstuiError(_("nothing to compare: a side has no run"), _("see `dstui runs`"))
    measured = [[measure(run, price_per_gpu_hour) for run in c.runs] for c in given]
    timed = [[measure(run) for run in c.breakdown] for c in given]
    step, gap, losses = _losses([m for column in measured for m in column], [len(c) for c in measured])
    figures = tuple(
        _pool(c, column, extra, loss)
        for c, column, extra, loss in zip(given, measured, timed, losses, strict=True)
    )
    verdicts = [verdict(measured[0], other, n, paired) for n, other in enumerate(measured[1:], 1)]
    return Comparison(
        figures,
        _differences([c.runs[0] for c in given], figures),
        _warnings(figures, measured),
        tuple(v for v in verdicts if v is not None),
        step,
        gap,
        tuple(labels(given, figures)),
        tuple(_operations([*extra, *column]) for column, extra in zip(measured, timed, strict=True)),
    )


def labels(columns: Sequence[Column], figures: Sequence[Figures]) -> list[str]:
    """A word for each column: what was given, else the runs' names, where these are equal their ids."""
    found = [c.label or f.name or f.run for c, f in zip(columns, figures, strict=True)]
    if len(set(found)) == len(found):
        return found
    return [c.label or f.run for c, f in zip(columns, figures, strict=True)]


def _operations(runs: Sequence[Measured]) -> Mapping[str, float]:
    return next((m.pace.operations for m in runs if m.pace.operations), {})


_WORST = ("failed", "lost", "stalled", "starting", "running", "stopped", "finished")
_HIGHEST = ("gpu_peak", "allocated_peak", "host_peak")
_MEAN = ("seconds", "gpu_hours", "price", "gpu_utilisation", "gpu_power")


def _pool(
    column: Column, runs: Sequence[Measured], breakdown: Sequence[Measured], loss_at: float | None
) -> Figures:
    """The figures of a column."""
    every = [m.figures for m in runs]
    values: dict[str, Any] = dict(every[0].__dict__)
    if len(every) > 1:
        for name in values:
            known = [getattr(f, name) for f in every if getattr(f, name) is not None]
            if known and isinstance(known[0], (int, float)):
                pick: Callable[[Iterable[Any]], Any] = (
                    max if name in _HIGHEST else statistics.fmean if name in _MEAN else statistics.median
                )
                values[name] = pick(known)
        for name in ("steps", "ranks", "batch", "warmup_steps"):
            known = [getattr(f, name) for f in every if getattr(f, name) is not None]
            values[name] = min(known, default=None)
        if (
            values["batch"] and values["step_time"]
        ):  # the median of rates would not be that of the step time beside it
            rate = values["samples_per_second"] = values["batch"] / values["step_time"]
            for name in ("gpu_hours_per_million_samples", "price_per_million_samples"):
                of = [(getattr(f, name), f.samples_per_second) for f in every]
                values[name] = next((x * r / rate for x, r in of if x and r), values[name])
        values["steps_measured"] = sum(f.steps_measured for f in every)
        values["state"] = min((f.state for f in every), key=_WORST.index)
        times = [math.log(f.step_time) for f in every if f.step_time]
        if len(times) > 1:
            half = pace.student(len(times) - 1) * statistics.stdev(times) / math.sqrt(len(times))
            values["step_time_low"] = math.exp(statistics.fmean(times) - half)
            values["step_time_high"] = math.exp(statistics.fmean(times) + half)
        values["runs"] = tuple(f.run for f in every)
    for m in breakdown:
        for name in ("communication", "gradient_reduction"):
            values[name] = getattr(m.figures, name) if values[name] is None else values[name]
    values["loss_at"] = loss_at
    return Figures(**values)


def _losses(
    runs: Sequence[Measured], sizes: Sequence[int]
) -> tuple[int | None, float | None, list[float | None]]:
    """The last equal step, the largest gap between columns, and each column's loss around that step."""
    nothing: list[float | None] = [None] * len(sizes)
    if not runs or any(not m.pace.losses for m in runs):
        return None, None, nothing
    tables = [dict(m.pace.losses) for m in runs]
    common = sorted(set(tables[0]).intersection(*tables[1:]))
    if (
        len(common) < FEW
    ):  # other intervals of logging, or logs too large to be read whole: the same stretch of steps
        return _stretch(tables, sizes)
    window = common[-max(1, len(common) // 10) :]
    curves: list[dict[int, float]] = []
    at = 0
    for size in sizes:
        part = tables[at : at + size]
        at += size
        curves.append({s: statistics.fmean(t[s] for t in part) for s in common})
    ends: list[float | None] = [statistics.fmean(c[s] for s in window) for c in curves]
    gap = max(max(c[s] for c in curves) - min(c[s] for c in curves) for s in common)
    return common[-1], gap if math.isfinite(gap) else None, ends


def _stretch(
    tables: Sequence[Mapping[int, float]], sizes: Sequence[int]
) -> tuple[int | None, float | None, list[float | None]]:
    """The mean loss over the last tenth of the steps that every run reached."""
    last = min(max(t) for t in tables)
    means: list[float | None] = []
    at = 0
    for size in sizes:
        inside = [loss for t in tables[at : at + size] for s, loss in t.items() if 0.9 * last < s <= last]
        means.append(statistics.fmean(inside) if inside else None)
        at += size
    return last, None, means


def _differences(runs: Sequence[RunDir], found: Sequence[Figures]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    from dstui.config import diff, schema

    configs = [dict(read_config(run.config_path) or {}) for run in runs]
    values: dict[str, list[Any]] = {}
    for n, config in enumerate(configs[1:], 1):
        release = found[0].deepspeed or schema.newest()
        result = diff.compare(configs[0], config, release=release, world_size=found[0].ranks)
        pairs = (
            [(c.path, c.a, c.b) for c in result.effective]
            if result.effective is not None
            else _plain(configs[0], config)
        )
        for path, a, b in pairs:
            if not path.startswith(_OURS):
                values.setdefault(path, [a] * len(runs))[n] = b
    return tuple((k, tuple(v)) for k, v in sorted(values.items()))


def _plain(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """As written, where the release has no schema here."""
    from dstui.config.diff import leaves
    from dstui.config.pointer import dotted

    x, y = dict(leaves(dict(a))), dict(leaves(dict(b)))
    return [(dotted(k), x.get(k), y.get(k)) for k in dict.fromkeys([*x, *y]) if x.get(k) != y.get(k)]


def _warnings(found: Sequence[Figures], measured: Sequence[Sequence[Measured]]) -> tuple[str, ...]:
    """What makes a comparison unfair or coarse."""
    out = []
    if len({f.batch for f in found}) > 1:
        out.append(_("the global batches differ: compare samples/s, not step times"))
    if len({(f.gpu, f.ranks) for f in found}) > 1:
        out.append(_("the cards or the number of ranks differ"))
    if len({(f.deepspeed, f.torch) for f in found}) > 1:
        out.append(_("the releases of DeepSpeed or torch differ"))
    sources = {f.step_time_from for f in found if f.step_time_from}
    if len(sources) > 1:
        out.append(
            _("step times come from different places: {sources}").format(sources=listed(sorted(sources)))
        )
    coarse = [m for column in measured for m in column if m.pace.source == "samples"]
    if coarse:
        worst = max(m.pace.resolution for m in coarse)
        out.append(
            _(
                "the log tells no step times: taken from samples 1 s apart, so the mean step is good to {x:.3g} s"
            ).format(x=worst)
        )
    short = [f.run for f in found if f.steps_measured < 50]
    if short:
        out.append(_("fewer than 50 steps after the warm-up: {runs}").format(runs=listed(short)))
    unended = [
        m.run.id for column in measured for m in column if m.figures.state not in ("finished", "stopped")
    ]
    if unended:
        out.append(_("not finished: {runs}").format(runs=listed(unended)))
    return tuple(out)
