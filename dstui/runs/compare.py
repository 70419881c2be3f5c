"""Runs side by side: what differs in their configs, and what that did. Figures come from real runs only.

``figures(run)`` plays the run's records through once (``dstui.runs.replay``), so speeds are those of the steps after
the first, whatever the script prints. Unknown is None; nothing is estimated.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstui.runs.replay import ReplayView
from dstui.runs.state import read_config
from dstui.runs.store import RunDir
from dstui.runs.view import Snapshot

SCHEMA_VERSION = 1
BACKWARD_COMMUNICATION = ("bwd_allreduce", "bwd_allreduce_microstep")


@dataclass(frozen=True)
class Figures:
    """Sizes in bytes, times in seconds, shares 0-1."""

    run: str
    name: str | None
    state: str
    deepspeed: str | None
    torch: str | None
    gpu: str | None
    ranks: int | None
    batch: int | None
    steps: int | None
    seconds: float | None
    """From start to end, loading included."""
    step_time: float | None
    """Median of the steps after the first."""
    step_time_spread: float | None
    """Half of the range between their quartiles."""
    tokens_per_second: float | None
    samples_per_second: float | None
    gpu_peak: int | None
    """Most memory in use on one card, as the driver counts."""
    allocated_peak: int | None
    host_peak: int | None
    """Sum of the ranks' peak RSS."""
    gpu_utilisation: float | None
    """Mean over cards and seconds from the first step on."""
    communication: float | None
    """Gradient reduction as a share of forward + backward + step (wall_clock_breakdown); None when it was off.
    At ZeRO-3 the gathering of parameters happens inside forward and backward and is not in it."""
    loss: float | None
    gpu_hours: float | None
    """Cards x time from start to end."""
    price: float | None
    """GPU-hours times what was given for one."""

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def figures(run: RunDir, price_per_gpu_hour: float | None = None) -> Figures:
    """Raises DstuiError when the run's manifest cannot be read."""
    view = ReplayView(run)
    use: list[float] = []
    times: list[float] = []
    shares: list[float] = []
    shot: Snapshot | None = None
    last_step: int | None = None
    first_at: tuple[int, float] | None = None
    last_at: tuple[int, float] | None = None
    tokens: list[float] = []
    try:
        for moment in view.moments:
            shot = view.at(moment)
            if shot.step:
                use += [g.utilisation for g in shot.gpus if g.utilisation is not None]
            if shot.step and shot.step != last_step:
                last_step = shot.step
                if first_at is None:
                    first_at = (shot.step, moment)
                last_at = (shot.step, moment)
                if shot.tokens_per_second:
                    tokens.append(shot.tokens_per_second)
                share = communication(shot.timers)
                if share is not None:
                    shares.append(share)
    finally:
        view.close()
    assert shot is not None  # there is always the end
    times = [y for x, y in shot.step_times if x > 1]
    spread: float | None = None
    if len(times) >= 4:
        quartiles = statistics.quantiles(times, n=4)
        spread = (quartiles[2] - quartiles[0]) / 2
    each = statistics.median(times) if times else None
    if each is None and first_at and last_at and last_at[0] > first_at[0]:
        each = (last_at[1] - first_at[1]) / (last_at[0] - first_at[0])
    manifest = run.manifest
    ended = shot.ended_at or (view.moments[-1] if shot.over else None)
    seconds = ended - shot.started if ended and shot.started else None
    cards = len(shot.gpus)
    hours = cards * seconds / 3600 if cards and seconds is not None else None
    versions = manifest.get("versions") or {}
    gpu = next((g.name for g in shot.gpus if g.name), None)
    return Figures(
        run=run.id,
        name=shot.name,
        state=shot.state,
        deepspeed=versions.get("deepspeed"),
        torch=versions.get("torch"),
        gpu=f"{cards}x{gpu}" if gpu else None,
        ranks=shot.world_size,
        batch=shot.batch,
        steps=shot.step,
        seconds=seconds,
        step_time=each,
        step_time_spread=spread,
        tokens_per_second=statistics.median(tokens) if tokens else None,
        samples_per_second=shot.batch / each if shot.batch and each else shot.samples_per_second,
        gpu_peak=max((g.memory_peak for g in shot.gpus if g.memory_peak), default=None),
        allocated_peak=view.progress.peak_allocated if cards else None,
        host_peak=sum(r.rss_peak for r in shot.ranks if r.rss_peak) or None,
        gpu_utilisation=statistics.fmean(use) if use else None,
        communication=statistics.median(shares) if shares else None,
        loss=shot.loss,
        gpu_hours=hours,
        price=hours * price_per_gpu_hour if hours is not None and price_per_gpu_hour is not None else None,
    )


def communication(timers: Mapping[str, float]) -> float | None:
    """Share of gradient reduction in one step (DeepSpeed runtime/engine.py timer names)."""
    reduce = next((timers[k] for k in BACKWARD_COMMUNICATION if k in timers), None)
    whole = sum(timers.get(k, 0.0) for k in ("fwd", "bwd", "step"))
    return reduce / whole if reduce is not None and whole > 0 else None


@dataclass(frozen=True)
class Comparison:
    figures: tuple[Figures, ...]
    differences: tuple[tuple[str, tuple[Any, ...]], ...]
    """Config key -> its effective value in each run; keys that are equal in all are left out. What dstui itself
    added for the monitor is no difference."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [f.to_json() for f in self.figures],
            "config": [{"path": k, "values": list(v)} for k, v in self.differences],
            "warnings": list(self.warnings),
        }


_OURS = ("csv_monitor.", "steps_per_print", "log_level")


def compare(runs: Sequence[RunDir], price_per_gpu_hour: float | None = None) -> Comparison:
    """The figures of ``runs`` and the keys in which their configs differ. Raises DstuiError."""
    from dstui.config import diff, schema

    found = tuple(figures(run, price_per_gpu_hour) for run in runs)
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
            if path.startswith(_OURS):
                continue
            values.setdefault(path, [a] * len(runs))[n] = b
    return Comparison(found, tuple((k, tuple(v)) for k, v in sorted(values.items())), _warnings(found))


def _plain(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """As written, where the release has no schema here."""
    from dstui.config.diff import dotted, leaves

    x, y = dict(leaves(dict(a))), dict(leaves(dict(b)))
    return [(dotted(k), x.get(k), y.get(k)) for k in dict.fromkeys([*x, *y]) if x.get(k) != y.get(k)]


def _warnings(found: Sequence[Figures]) -> tuple[str, ...]:
    """What makes a comparison unfair."""
    from dstui.i18n import _

    out = []
    if len({f.batch for f in found}) > 1:
        out.append(_("the global batches differ: compare samples/s, not step times"))
    if len({(f.gpu, f.ranks) for f in found}) > 1:
        out.append(_("the cards or the number of ranks differ"))
    if len({(f.deepspeed, f.torch) for f in found}) > 1:
        out.append(_("the releases of DeepSpeed or torch differ"))
    short = [f.run for f in found if (f.steps or 0) < 50]
    if short:
        out.append(_("fewer than 50 steps: {runs}").format(runs=", ".join(short)))
    unended = [f.run for f in found if f.state != "finished"]
    if unended:
        out.append(_("not finished: {runs}").format(runs=", ".join(unended)))
    return tuple(out)
