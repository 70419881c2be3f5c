"""From events to the state of a run: phase, step, loss, speed. No clock of its own; the one file read is a config.

Two counters exist. The engine's (DeepSpeed's ``step=`` lines and csv_monitor) counts optimizer steps; the
script's own number may count micro batches or start at 0. The engine's wins wherever it is known.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstui.runs import stall
from dstui.runs.events import Event
from dstui.runs.samples import Sample
from dstui.runs.stall import Stall

SERIES_LENGTH = 512
"""Points of a series; when it is full every second one is dropped, so the whole run stays visible."""
RECENT = 24
"""Step times that the mean speed and the ETA are taken from."""
STALL_SECONDS = 120.0
NAMED_SECONDS = 30.0
STALL_INTERVALS = 10
"""A stall is looked for from this many times the usual gap between reports on, and not before STALL_SECONDS; before
NAMED_SECONDS where ranks are seen to wait for something that has a name."""
SURVIVED = 3
"""Steps after an error from which on it was none: more than the ranks' buffers can hold back."""
CURED = 5
"""Healthy reports that end a streak of others."""
PACES = 240
"""Step times that a change of pace is looked for in."""
TIMED = 24
"""Lines of wall_clock_breakdown that the share of a part is taken from: one line is as noisy as its step."""
PHASES = ("preflight", "launch", "loading", "building", "first-step", "training")


class Series:
    """A bounded curve ``(x, y)``: appended at the end, thinned when full, never reordered."""

    def __init__(self, length: int = SERIES_LENGTH) -> None:
        self._length = length
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._skipped = 0

    def add(self, x: float, y: float | None) -> None:
        if y is None:
            return
        if self._points and x <= self._points[-1][0]:
            if x == self._points[-1][0]:
                self._points[-1] = (x, y)
                return
            self._points = [p for p in self._points if p[0] < x]  # resumed from an earlier checkpoint
        self._skipped += 1
        if self._skipped < self._stride and self._points:
            return
        self._skipped = 0
        self._points.append((x, y))
        if len(self._points) >= self._length:
            self._points = self._points[::2]
            self._stride *= 2

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        return tuple(self._points)

    def __len__(self) -> int:
        return len(self._points)


@dataclass(frozen=True)
class Phase:
    """Where a run is before its first step. ``since``: epoch seconds. ``detail``: the op being built."""

    name: str
    since: float
    detail: str | None = None


@dataclass
class Streak:
    """Reports of one kind in a row. It is over after ``CURED`` others, so that what comes and goes stays one streak."""

    count: int = 0
    step: float | None = None
    """Where it began, by the counter of the reports."""
    at: float | None = None
    """Epoch seconds at which it began; None when nobody saw it happen."""
    good: int = 0
    """Other reports since the last of the kind."""

    def add(self, hit: bool, step: float | None, at: float | None) -> None:
        if hit:
            if not self.count:
                self.step, self.at = step, at
            self.count += 1
            self.good = 0
        elif self.count:
            self.good += 1
            if self.good >= CURED:
                self.count = self.good = 0
                self.step = self.at = None


@dataclass(frozen=True)
class Pace:
    """The time of a step, seconds, as it was at ``step``."""

    step: int
    seconds: float
    at: float
    """Epoch seconds."""


@dataclass
class _Mark:
    """When a counter was last seen to move."""

    step: int
    at: float


@dataclass
class Collectives:
    """Seconds a step that rank 0 spent in collectives, from the lines of ``comms_logger``.

    Each line's time is the *sum* of all so far of that name (see ``dstui.runs.pace``); where it falls, they are
    single times. What is printed after step n belongs to step n + 1.
    """

    spent: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED))
    _last: dict[str, float] = field(default_factory=dict)
    _closed: dict[str, float] = field(default_factory=dict)
    _single: float = 0.0
    _sums: bool = True
    _step: int | None = None

    def add(self, op: str, seconds: float) -> None:
        if op == "barrier":
            return
        if self._sums and seconds < self._last.get(op, 0.0):
            self._sums = False
            self.spent.clear()
        self._last[op] = seconds
        self._single += seconds

    def close(self, step: int) -> None:
        """The engine's counter stands at ``step``."""
        if not self._last:
            return
        if self._step is not None and step > self._step and self._closed:
            whole = sum(self._last.values()) - sum(self._closed.values()) if self._sums else self._single
            self.spent.append(max(0.0, whole) / (step - self._step))
        if self._step != step:
            self._step, self._closed, self._single = step, dict(self._last), 0.0

    @property
    def seconds(self) -> float | None:
        """Median of the last steps; None without such lines."""
        values = sorted(self.spent)
        return values[len(values) // 2] if len(values) >= 3 else None


@dataclass
class Progress:
    """Everything that the log and csv_monitor told so far. ``apply`` and ``csv`` feed it."""

    batch: int | None = None
    """train_batch_size."""
    total_hint: int | None = None
    """Number of steps that the command line asked for."""
    losses: Series = field(default_factory=Series)
    lrs: Series = field(default_factory=Series)
    step_times: Series = field(default_factory=Series)
    grad_norms: Series = field(default_factory=Series)
    speeds: Series = field(default_factory=Series)
    """Tokens per second, or samples per second where the log tells no tokens."""
    speed_unit: str = ""
    """``tokens`` or ``samples``: what ``speeds`` counts."""
    paces: deque[Pace] = field(default_factory=lambda: deque(maxlen=PACES))
    bad_loss: Streak = field(default_factory=Streak)
    """Reports of a loss that is NaN or infinite."""
    zero_loss: Streak = field(default_factory=Streak)
    """Reports of a loss of exactly 0 after one that was not small."""
    bad_norm: Streak = field(default_factory=Streak)
    zero_norm: Streak = field(default_factory=Streak)
    overflow_streak: Streak = field(default_factory=Streak)
    floor: Streak = field(default_factory=Streak)
    """Overflows at the smallest loss scale."""
    engine_step: int | None = None
    script_step: int | None = None
    bar_step: int | None = None
    total: int | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    epoch: float | None = None
    skipped: int | None = None
    loss_scale: float | None = None
    overflows: int = 0
    flushes: int = 0
    allocated: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None
    pinned: int | None = None
    """Bytes of host memory that a rank said it has pinned, at most."""
    ooms: int = 0
    """CUDA out of memory in the log: with a run that goes on, somebody caught it."""
    timeouts: int = 0
    """Collectives that timed out."""
    timed_out_at: float | None = None
    """Epoch seconds of the first such word after which training did not go on."""
    samples_a_step: int | None = None
    """By which csv_monitor's ``global_samples`` grows from one optimizer step to the next."""
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    timers: dict[str, float] = field(default_factory=dict)
    timed: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=TIMED))
    collectives: Collectives = field(default_factory=lambda: Collectives())
    world: int | None = None
    spawned: dict[int, int] = field(default_factory=dict)
    """local rank -> pid, from the launcher's lines."""
    rank_codes: dict[int, int] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    """Kind of event -> epoch seconds of the first (its own stamp, else when it was read)."""
    building: str | None = None
    evals: dict[str, float] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    reported_at: float | None = None
    """Epoch seconds of the last sign of progress."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _places: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Where in the log the last reports lie that were read after the fact, without a time of their own."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _stamped: _Mark | None = None
    _observed: _Mark | None = None
    _precise: bool = False
    _bar_total: int | None = None
    _script_total: int | None = None
    _script_seen: tuple[float | None, int, int | None] | None = None
    """Epoch, step and total of the script's last line."""
    _script_offset: int = 0
    _script_counts_other: bool = False
    _bar_counts_other: bool = False
    _loss_count: int = 0
    _lr_at: float | None = None
    """Last x of csv_monitor's learning rate."""
    _last_loss: float | None = None
    """The last that was neither 0 nor NaN."""
    _steps_since: int = 0
    """Reports of a step since a collective timed out."""
    _overflowed: bool = False
    """An overflow was reported since the last step."""

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """Optimizer steps done; the script's own number where the engine's is unknown."""
        bar = None if self._bar_counts_other else self.bar_step
        engine = [s for s in (self.engine_step, bar) if s is not None]
        if engine:
            return max(engine)
        return self.script_step

    @property
    def total_steps(self) -> int | None:
        script = None if self._script_counts_other else self._script_total
        bar = None if self._bar_counts_other else self._bar_total
        known = self.total or script or bar or self.total_hint
        return known if known and known >= (self.step or 0) else None

    @property
    def step_time(self) -> float | None:
        """Mean seconds of the last steps; the first one (builds, warm-up) does not count once others exist."""
        values = list(self._recent)
        if not values:
            if self.samples_per_second and self.batch:
                return self.batch / self.samples_per_second
            return None
        return sum(values) / len(values)

    @property
    def parts(self) -> dict[str, float]:
        """Median seconds of the parts of a step over the last lines of wall_clock_breakdown; {} without it."""
        found: dict[str, list[float]] = {}
        for row in self.timed:
            for name, seconds in row.items():
                found.setdefault(name, []).append(seconds)
        return {name: sorted(values)[len(values) // 2] for name, values in found.items()}

    @property
    def micro_steps(self) -> float | None:
        """How many numbers the script counts for one optimizer step; None while one of the counters is unknown."""
        if self.engine_step is None or self.script_step is None or self.engine_step < 3:
            return None
        return self.script_step / self.engine_step

    @property
    def eta(self) -> float | None:
        """Seconds to go."""
        total, step, each = self.total_steps, self.step, self.step_time
        if total is None or step is None or each is None:
            return None
        return max(0, total - step) * each

    @property
    def stepped(self) -> bool:
        """Whether the first optimizer step is done."""
        return (self.step or 0) > 0 or self.loss is not None

    # -- feeding -----------------------------------------------------------------------------------------------

    def apply_all(self, events: Iterable[Event], now: float, *, live: bool = True) -> None:
        for e in events:
            self.apply(e, now, live=live)

    def apply(self, e: Event, now: float, *, live: bool = True) -> None:
        """``live``: the event was read as it happened, so ``now`` can stand in for a missing stamp."""
        self.seen.setdefault(e.kind, e.time if e.time is not None else now)
        if e.kind == "step" and self.timed_out_at is not None:
            self._steps_since += 1
            if self._steps_since >= SURVIVED:
                self.timed_out_at = None
        handler = getattr(self, f"_on_{e.kind}", None)
        if handler is not None:
            handler(e, now, live)

    def _on_step(self, e: Event, now: float, live: bool) -> None:
        v = e.values
        source = v.get("source")
        step = v.get("step")
        if source == "deepspeed":
            if step is not None:
                self._engine(int(step), e.time, now, live)
                if v.get("lr") is not None and step > 0:
                    self.lrs.add(step, v["lr"])
            self.skipped = v.get("skipped", self.skipped)
        elif source == "trainer":
            step = step if step is not None else self.bar_step
            if v.get("step") is not None:
                self._engine(int(v["step"]), e.time, now, live)
        elif step is not None:
            step = self._script(int(step), v.get("epoch"), v.get("total"))
            if self.engine_step is None and self.bar_step is None:
                self._moved(step, e.time, now, live)
        if v.get("total") and source != "script":
            self.total = int(v["total"])
        for name in ("lr", "grad_norm", "epoch", "tokens_per_second", "samples_per_second"):
            if v.get(name) is not None:
                setattr(self, name, v[name])
        at = e.time if e.time is not None else now if live else None
        self._judge_overflow(at)
        if v.get("step_time") is not None:
            self._recent.append(float(v["step_time"]))
        loss = v.get("loss")
        if loss is not None:
            self.loss = loss
            self._loss_count += 1
            x = step if step is not None else self.engine_step
            x = self._loss_count if x is None else x
            self._judge_loss(loss, x, at)
            if math.isfinite(loss):
                self.losses.add(x, loss)
            if source != "deepspeed" and v.get("lr") is not None and self.engine_step is None:
                self.lrs.add(x, v["lr"])
        place = step if step is not None else self.engine_step
        if v.get("grad_norm") is not None:
            self._judge_norm(v["grad_norm"], place, at)
        speed = v.get("tokens_per_second") or v.get("samples_per_second")
        if speed and place is not None:
            self._speed(place, speed, "tokens" if v.get("tokens_per_second") else "samples")
        if live:
            self._report(now)
        elif e.offset:
            self._places.append(e.offset)

    def _judge_loss(self, loss: float, x: float | None, at: float | None) -> None:
        self.bad_loss.add(not math.isfinite(loss), x, at)
        # A loss that sank and is printed with four digits ends at 0.0000 in all health.
        self.zero_loss.add(loss == 0 and not (self._last_loss is not None and self._last_loss < 0.01), x, at)
        if loss and math.isfinite(loss):
            self._last_loss = loss

    def _judge_norm(self, norm: float, x: float | None, at: float | None) -> None:
        self.bad_norm.add(not math.isfinite(norm), x, at)
        self.zero_norm.add(norm == 0, x, at)
        if x is not None and math.isfinite(norm):
            self.grad_norms.add(x, norm)

    def _judge_overflow(self, at: float | None) -> None:
        if not self._overflowed:
            self.overflow_streak.add(False, None, at)
            self.floor.add(False, None, at)
        self._overflowed = False

    def _speed(self, x: float, speed: float, unit: str) -> None:
        if unit == "tokens" and self.speed_unit == "samples":
            self.speeds = Series()
        if not self.speed_unit or unit == "tokens":
            self.speed_unit = unit
        if unit == self.speed_unit and math.isfinite(speed):
            self.speeds.add(x, speed)

    def _on_throughput(self, e: Event, now: float, live: bool) -> None:
        v = e.values
        self.samples_per_second = v.get("samples_per_second") or self.samples_per_second
        self.allocated = v.get("allocated", self.allocated)
        self.peak_allocated = max(v.get("peak_allocated") or 0, self.peak_allocated or 0) or None
        if v.get("step") is not None:
            self._engine(int(v["step"]), e.time, now, live)
            if v.get("samples_per_second"):
                self._speed(v["step"], v["samples_per_second"], "samples")

    def _on_memory(self, e: Event, now: float, live: bool) -> None:
        self.allocated = e.values.get("allocated")
        self.peak_allocated = max(e.values.get("peak_allocated") or 0, self.peak_allocated or 0) or None
        self.reserved = e.values.get("reserved")
        self.peak_reserved = max(e.values.get("peak_reserved") or 0, self.peak_reserved or 0) or None

    def _on_pinned(self, e: Event, now: float, live: bool) -> None:
        self.pinned = max(e.values.get("bytes") or 0, self.pinned or 0) or None

    def _on_oom(self, e: Event, now: float, live: bool) -> None:
        self.ooms += 1

    def _on_error(self, e: Event, now: float, live: bool) -> None:
        if "out of memory" in e.values["failure"].text:
            self.ooms += 1

    def _on_collective(self, e: Event, now: float, live: bool) -> None:
        if e.values.get("timeout"):
            self.timeouts += 1
            if self.timed_out_at is None:
                self.timed_out_at, self._steps_since = e.time if e.time is not None else now, 0

    def _on_comm(self, e: Event, now: float, live: bool) -> None:
        self.collectives.add(e.values["op"], e.values["seconds"])

    def _on_timers(self, e: Event, now: float, live: bool) -> None:
        v = e.values
        if "fwd" in v:
            self.timers = dict(v)
            self.timed.append(self.timers)
            if not self._precise:
                self._recent.append(v.get("fwd", 0) + v.get("bwd", 0) + v.get("step", 0))
        if live:
            self._report(now)

    def _on_progress(self, e: Event, now: float, live: bool) -> None:
        v = e.values
        whole_run = not v["desc"] or v["desc"].lower().startswith(("train", "step"))
        if whole_run and self._bar_total is None and v["total"] > 1:
            self._bar_total = v["total"]
        if whole_run and v["total"] == self._bar_total:  # else another bar: evaluation, data, one epoch
            if v["done"] != self.bar_step:
                self.bar_step = v["done"]
                if live:
                    self._report(now)
            if v.get("seconds") and not self._precise:
                self._recent.append(v["seconds"])
        elif not v["desc"].lower().startswith("epoch"):
            return
        if v.get("loss") is not None and v["loss"] != self.loss:
            self.loss = v["loss"]
            self._loss_count += 1
            if math.isfinite(v["loss"]):
                step = self.bar_step if whole_run else self.engine_step
                self.losses.add(self._loss_count if step is None else step, v["loss"])
            if live:
                self._report(now)
        if v.get("lr") is not None:
            self.lr = v["lr"]

    def _on_total(self, e: Event, now: float, live: bool) -> None:
        self.total = int(e.values["total"])

    def _on_eval(self, e: Event, now: float, live: bool) -> None:
        self.evals = {k: v for k, v in e.values.items() if k.startswith("eval_")}

    def _on_summary(self, e: Event, now: float, live: bool) -> None:
        self.summary = dict(e.values)

    def _on_overflow(self, e: Event, now: float, live: bool) -> None:
        self.overflows += 1
        if e.values.get("new_scale") is not None:
            self.loss_scale = e.values["new_scale"]
        at = e.time if e.time is not None else now if live else None
        self._overflowed = True
        self.overflow_streak.add(True, self.step, at)
        if e.values.get("floor"):
            self.floor.add(True, self.step, at)

    def _on_pressure(self, e: Event, now: float, live: bool) -> None:
        self.flushes += int(e.values["flushes"])

    def _on_world(self, e: Event, now: float, live: bool) -> None:
        self.world = int(e.values["size"])

    def _on_spawn(self, e: Event, now: float, live: bool) -> None:
        if e.values.get("local_rank") is not None:
            self.spawned[e.values["local_rank"]] = e.values["pid"]

    def _on_rank_exit(self, e: Event, now: float, live: bool) -> None:
        if e.values.get("rank") is not None:
            self.rank_codes.setdefault(e.values["rank"], e.values["code"])

    def _on_ops(self, e: Event, now: float, live: bool) -> None:
        if e.values.get("done"):
            self.building = None
        elif e.values.get("name"):
            self.building = e.values["name"]

    def _script(self, step: int, epoch: float | None, total: float | None) -> int:
        """The script's own counter, carried on where it begins again with the next epoch."""
        if self._script_seen is not None and epoch is not None:
            before, counted, length = self._script_seen
            if before is not None and epoch > before and step < counted:
                self._script_offset += max(length or 0, counted)
        elif self._script_seen is not None and step < self._script_seen[1]:
            self._script_offset = 0  # resumed
        self._script_seen = (epoch, step, None if total is None else int(total))
        # beside an epoch the total is that of one epoch, which says nothing about the run
        self._script_total = int(total) if total and epoch is None else None
        self.script_step = step + self._script_offset
        return self.script_step

    def _engine(self, step: int, stamp: float | None, now: float, live: bool) -> None:
        if self.engine_step is not None and step < self.engine_step - 1 and live:
            self._stamped = self._observed = None  # resumed
        self.engine_step = step
        self.collectives.close(step)
        # far ahead of the optimizer steps: that counter counts micro batches or samples
        far = step + max(20, step // 2)
        self._script_counts_other = self.script_step is not None and self.script_step > far
        self._bar_counts_other = self.bar_step is not None and self.bar_step > far
        self._moved(step, stamp, now, live)

    def _moved(self, step: int, stamp: float | None, now: float, live: bool) -> None:
        """A counter stands at ``step``: derive the time of a step from its own stamps, else from ours."""
        if stamp is not None:
            if self._stamped is None or step < self._stamped.step:
                self._stamped = _Mark(step, stamp)
            elif step > self._stamped.step:
                each = (stamp - self._stamped.at) / (step - self._stamped.step)
                if self._stamped.step > 0 and each >= 0:  # step 0 is printed before the slow first step
                    if not self._precise:
                        self._precise = True
                        self._recent.clear()
                    self._recent.append(each)
                    self.step_times.add(step, each)
                    self.paces.append(Pace(step, each, stamp))
                self._stamped = _Mark(step, stamp)
        elif live and not self._precise:
            if self._observed is None or step < self._observed.step:
                self._observed = _Mark(step, now)
            elif step > self._observed.step and now - self._observed.at >= 0.5:
                each = (now - self._observed.at) / (step - self._observed.step)
                if self._observed.step > 0:
                    self._recent.append(each)
                    self.step_times.add(step, each)
                    self.paces.append(Pace(step, each, now))
                self._observed = _Mark(step, now)
        if live:
            self._report(now)

    def _report(self, now: float) -> None:
        if self.reported_at is not None and now > self.reported_at:
            self.gaps.append(now - self.reported_at)
        self.reported_at = now

    def csv(self, metric: str, rows: Sequence[tuple[float, float]], now: float, *, live: bool = True) -> None:
        """Rows ``(x, value)`` of csv_monitor. x is ``global_samples``: samples seen by all ranks together
        (runtime/engine.py, ``Train/Samples/...``); it grows by train_batch_size an optimizer step."""
        if not rows:
            return
        if metric in ("lr", "train_loss", "loss_scale"):
            self._learn_batch(rows)
            if metric == "lr":
                xs = [*([] if self._lr_at is None else [self._lr_at]), *(x for x, _y in rows)]
                strides = [b - a for a, b in itertools.pairwise(xs) if b > a]
                if strides:
                    self.samples_a_step = min(round(min(strides)), self.samples_a_step or round(max(strides)))
                self._lr_at = xs[-1]
        per_step = self.batch
        for x, y in rows:
            step = round(x / per_step) if per_step else None
            if metric == "lr":
                self.lr = y
                if step:
                    self.lrs.add(step, y)
            elif metric == "train_loss":
                self.loss = y
                self._judge_loss(y, step, now if live else None)
                if step and math.isfinite(y):
                    self.losses.add(step, y)
            elif metric == "loss_scale":
                self.loss_scale = y
        if per_step and metric in ("lr", "train_loss"):
            last = round(rows[-1][0] / per_step)
            if self.engine_step is None or last > self.engine_step:
                self.engine_step = last
                self._moved(last, None, now, live)

    def _learn_batch(self, rows: Sequence[tuple[float, float]]) -> None:
        if self.batch is None and len(rows) > 1:
            steps = [b[0] - a[0] for a, b in itertools.pairwise(rows) if b[0] > a[0]]
            if steps:
                self.batch = round(min(steps))

    # -- phase and stall ---------------------------------------------------------------------------------------

    def phase(self, started: float, launched: float | None, samples: Sequence[Sample]) -> Phase | None:
        """The phase before the first step; None once training goes on.

        ``started``: when the run was created; ``launched``: when the launcher came up, None before.
        """
        if self.stepped:
            return None
        if launched is None:
            return Phase("preflight", started)
        last = samples[-1] if samples else None
        if last is not None and last.build is not None:
            since = last.t
            for s in reversed(samples):
                if s.build is None:
                    break
                since = s.t
            return Phase("building", since, last.build or self.building)
        begun = [self.seen[k] for k in ("init", "ready") if k in self.seen]
        if self.engine_step == 0 or self.bar_step == 0 or "ready" in self.seen:
            at = max(begun) if begun else self.reported_at or launched
            return Phase("first-step", at)
        alive = next((s.t for s in samples if s.ranks), None)
        spawned = self.seen.get("spawn", alive)
        if spawned is not None:
            return Phase("loading", spawned if alive is None else min(spawned, alive))
        return Phase("launch", launched)

    @property
    def usual_gap(self) -> float | None:
        """Seconds between two signs of progress; the time of a step for a run that was joined just now."""
        if self.gaps:
            return sorted(self.gaps)[len(self.gaps) // 2]
        return self.step_time

    def _gap_by_growth(self, samples: Sequence[Sample]) -> float | None:
        """The usual gap of a run that was joined just now and whose lines have no stamps: the sampler noted each
        second how long the log was."""
        times: list[float] = []
        rest, before, first = list(self._places), None, None
        for s in samples:
            if s.sizes is None:
                continue
            passed = [x for x in rest if x < s.sizes[0]]
            if passed:
                rest = rest[len(passed) :]
                first = before if not times else first
                times.append(s.t)
            before = s.t
        gaps = sorted(b - a for a, b in itertools.pairwise(times[1:]))  # the first may stand for many
        if len(gaps) >= 3:
            return gaps[len(gaps) // 2]
        if len(self._places) >= 3 and not rest and first is not None:  # steps came faster than samples
            return (times[-1] - first) / (len(self._places) - 1)
        return None

    def stall(self, now: float, samples: Sequence[Sample], *, offload: bool = False) -> Stall | None:
        """Why the run stands still; None when it may well be working.

        Silence alone is never a stall (releases 0.17.6-0.19.2 print no step line, scripts may print nothing):
        progress must have been reported before, its usual gap must be far exceeded, and the ranks must look like
        waiting all through the last seconds (``dstui.runs.stall``). Only a dead build's lock needs no step before,
        and a collective that timed out needs no silence: its process ends as soon as it has written its records.
        """
        found = stall.on_lock(samples, now)
        if found is not None and (found.kind == "op-lock" or self.stepped):
            return found
        if self.timed_out_at is not None:
            since = self.reported_at or self.timed_out_at
            return stall.told(stall.name(samples, now, since, offload=offload, world=self.world), since)
        usual = self.usual_gap or self._gap_by_growth(samples)
        if self.reported_at is None or not self.stepped or usual is None:
            return None
        quiet = now - self.reported_at
        if quiet < max(NAMED_SECONDS, STALL_INTERVALS * usual):
            return None
        found = stall.name(samples, now, self.reported_at, offload=offload, world=self.world)
        if found is not None and found.kind in ("op-build", "checkpoint", "offload", "idle"):
            return found if quiet >= STALL_SECONDS else None  # these mostly end by themselves
        if found is not None or quiet < STALL_SECONDS:
            return found
        window = [s for s in samples if s.t > now - 60]
        if len(window) < 30 or not all(idle(s) or spinning(s) for s in window):
            return None
        return Stall("idle", "DR507", self.reported_at)


def idle(s: Sample) -> bool:
    """No rank computes: CPU under 5 % of a core a rank and every GPU under 5 %."""
    if not s.ranks or any(r.cpu is None or r.cpu > 0.05 for r in s.ranks):
        return False
    return all(g.utilisation is not None and g.utilisation < 0.05 for g in s.gpus)


def spinning(s: Sample) -> bool:
    """Every GPU busy on paper and cool in fact: NCCL kernels that wait for a rank that does not come."""
    return bool(s.gpus) and all(
        g.utilisation is not None
        and g.utilisation >= 0.99
        and g.power is not None
        and g.power_limit is not None
        and g.power < 0.45 * g.power_limit
        for g in s.gpus
    )


_STEP_OPTIONS = frozenset(
    {"--steps", "--max_steps", "--max-steps", "--num_steps", "--num-steps", "--train_steps", "--total_steps",
     "--train-iters", "--train_iters", "--max_train_steps", "--num_training_steps"}
)  # fmt: skip


def steps_asked(argv: Sequence[str]) -> int | None:
    """The number of steps that a command line names; None for ``-1`` (Trainer: by epochs) and absence."""
    words = list(argv)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _STEP_OPTIONS:
            text = value if equals else (words[i + 1] if i + 1 < len(words) else "")
            if text.isdigit() and int(text) > 0:
                return int(text)
    return None


def batch_of(config: Mapping[str, Any] | None, world: int | None) -> int | None:
    """train_batch_size as DeepSpeed will derive it (runtime/config.py ``_set_batch_related_parameters``)."""
    if not isinstance(config, Mapping):
        return None
    whole = config.get("train_batch_size")
    if isinstance(whole, int) and not isinstance(whole, bool):
        return whole
    micro = config.get("train_micro_batch_size_per_gpu")
    gas = config.get("gradient_accumulation_steps", 1)
    if isinstance(micro, int) and isinstance(gas, int) and world:
        return micro * gas * world
    return None


def read_config(path: Path) -> Mapping[str, Any] | None:
    """A run's copy of its config (comments are legal in it); None when there is none or it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        import hjson

        try:
            data = hjson.loads(text)
        except (ValueError, RecursionError):
            return None
    return data if isinstance(data, Mapping) else None
