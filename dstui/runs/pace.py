"""How fast a run went: the time of its steps from the best witness that its records hold, losses, communication.

``read(run)`` goes once through the log. Where several witnesses tell the time of a step, the first of ``SOURCES``
that says enough counts. The samples, one a second, are only the last resort: DeepSpeed 0.17.6-0.19.2 prints no step
line, and a script need not print anything.
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dstui.runs.events import Event, parser_of
from dstui.runs.measured import FOLDER, Measured, read_probe
from dstui.runs.replay import ReplayView
from dstui.runs.samples import Sample, read_history
from dstui.runs.state import Progress, batch_of, read_config, steps_asked
from dstui.runs.store import RunDir
from dstui.runs.tail import Line, LogFile, Tail

SOURCES = ("probe", "stamps", "script", "throughput", "timers", "bar", "trainer", "samples")
"""``probe``: measured from inside the rank (``dstui.runs.probe``), on the card's own clock where there is one, from the
end of one step to the end of the next. ``stamps``: DeepSpeed's step lines, to the millisecond, everything between two steps included. ``script``: what the
script says a step took. ``throughput``: CurrSamplesPerSec (utils/timer.py ThroughputTimer: forward to step, the device
synchronised; the data between two steps is not in it). ``timers``: fwd + bwd + step of wall_clock_breakdown. ``bar``:
tqdm's smoothed time. ``trainer``: the Trainer's last line, a mean over the whole run. ``samples``: which step the log or
csv_monitor had reached at each second."""
ENOUGH = 3
"""Intervals after the warm-up that a witness must have to be preferred over a later one."""
WARMUP = 10
"""Steps that are left out at the start: builds, the allocator, autotuning; a fifth of a run that is shorter than 50."""
SAMPLE_SECONDS = 1.0
WHOLE, END = 24 << 20, 4 << 20
PIECES, PIECE = 64, 128 << 10
"""Bytes of a log that is read whole; of a larger one END at both ends, and PIECES of PIECE between."""
CHUNK_SECONDS = 20.0
"""Sampled steps are averaged over at least this long, which keeps the error of the two ends below a tenth."""
BACKWARD_COMMUNICATION = ("bwd_allreduce", "bwd_allreduce_microstep")


class Interval(NamedTuple):
    """``steps`` steps, of which ``step`` was the last, took ``seconds`` each."""

    step: int
    seconds: float
    steps: int


@dataclass(frozen=True)
class Pace:
    """Times in seconds, losses by optimizer step, shares 0-1. Unknown is None or empty."""

    source: str | None
    """One of SOURCES; None: nothing tells."""
    resolution: float
    """By how much the mean time of a step may be wrong because of how it was taken, seconds."""
    warmup: int
    """Steps left out at the start."""
    steps: tuple[Interval, ...]
    """After the warm-up."""
    losses: tuple[tuple[int, float], ...]
    tokens: tuple[float, ...]
    """Tokens/s as the script printed them, after the warm-up."""
    reduction: float | None
    """Gradient reduction as a share of forward + backward + step (wall_clock_breakdown, ``runtime/engine.py``)."""
    communication: float | None
    """Time in collectives as a share of the steps' (comms_logger): each op is waited for, so nothing overlaps."""
    operations: Mapping[str, float]
    """Collective -> seconds a step (comms_logger)."""
    first_at: float | None
    """Epoch seconds of the first step, as precise as ``source``; the end of loading and building."""
    last_at: float | None
    allocated: int | None
    """Peak that torch allocated, of the worst rank: from the probe, else from the log."""
    rss: int | None
    """Sum of the ranks' peak RSS, as the probe saw it."""
    total: int | None
    """Optimizer steps done."""
    progress: Progress

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(i.seconds for i in self.steps)

    @property
    def step_time(self) -> float | None:
        """Median over the intervals."""
        return statistics.median(self.times) if self.steps else None

    @property
    def spread(self) -> float | None:
        """Median distance from the median."""
        if len(self.steps) < ENOUGH:
            return None
        middle = statistics.median(self.times)
        return statistics.median(abs(t - middle) for t in self.times)


def warmup_of(steps: int) -> int:
    """Steps to leave out of a run of so many: WARMUP, of a short one a fifth, and always the first."""
    return max(1, min(WARMUP, steps // 5))


def communication_of(timers: Mapping[str, float]) -> float | None:
    """Share of gradient reduction in one step (DeepSpeed runtime/engine.py timer names)."""
    reduce = next((timers[k] for k in BACKWARD_COMMUNICATION if k in timers), None)
    whole = sum(timers.get(k, 0.0) for k in ("fwd", "bwd", "step"))
    return reduce / whole if reduce is not None and whole > 0 else None


@dataclass
class _Series:
    """Intervals of one witness, as three columns."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))

    def add(self, step: int, seconds: float, count: int = 1) -> None:
        if seconds > 0 and count > 0:
            self.steps.append(step)
            self.seconds.append(seconds)
            self.counts.append(count)

    def after(self, step: int) -> tuple[Interval, ...]:
        """Those that began after ``step``."""
        rows = zip(self.steps, self.seconds, self.counts, strict=True)
        return tuple(Interval(s, t, n) for s, t, n in rows if s - n >= step)


class _Clock:
    """When a byte of the log was written: the first sample by which the log was longer."""

    def __init__(self, samples: Sequence[Sample], begin: float, end: float) -> None:
        known = [(s.sizes[0], s.t) for s in samples if s.sizes is not None]
        self._sizes = [size for size, _t in known]
        self._times = [t for _size, t in known]
        self._begin, self._end = begin, end

    def __call__(self, offset: int) -> float:
        n = bisect.bisect_right(self._sizes, offset)
        return self._times[n] if n < len(self._times) else self._end


class _Reader:
    """One pass over a log."""

    def __init__(self, progress: Progress, clock: _Clock) -> None:
        self.progress, self._clock = progress, clock
        self.series = {name: _Series() for name in SOURCES}
        self.losses: dict[int, float] = {}
        self.tokens: list[tuple[int, float]] = []
        self.timers: list[tuple[int, float]] = []
        self.operations: list[tuple[int, str, float]] = []
        self.probe_tokens: list[tuple[int, float]] = []
        """Of rank 0 alone."""
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self._boundaries = 0
        """Lines of timers with a whole step so far: 0.17.6-0.19.2 print no other line that counts."""
        self._stamp: tuple[int, float] | None = None
        self._seen: int | None = None

    def new_piece(self) -> None:
        """What follows does not join on to what was read."""
        self._stamp = None

    def probe(self, run: RunDir) -> None:
        """The steps that ``dstui.runs.probe`` timed in rank 0; nothing where the run has no probe."""
        tail = Tail(run.path / FOLDER / "rank-0.jsonl")
        try:
            while lines := tail.read():
                for line in lines:
                    if '"step"' in line.text:
                        self._probed(_record(line.text))
        finally:
            tail.close()

    def _probed(self, e: Mapping[str, Any]) -> None:
        if e.get("event") != "step" or float(e["seconds"]) <= 0:
            return
        step, seconds = int(e["step"]), float(e["seconds"])
        self.series["probe"].add(step, seconds)
        if e.get("tokens"):
            self.probe_tokens.append((step, float(e["tokens"]) / seconds))
        self.first = self.first or (step, float(e["t"]))
        self.last = (step, float(e["t"]))

    def event(self, e: Event) -> None:
        p, v = self.progress, e.values
        now = self._clock(e.offset)
        p.apply(e, now)
        if e.kind == "step":
            self._step(e)
        elif e.kind == "comm":
            self.operations.append((self._seen or 0, v["op"], v["seconds"]))
        elif e.kind == "throughput" and v.get("samples_per_second") and v.get("step") and p.batch:
            self.series["throughput"].add(int(v["step"]), p.batch / float(v["samples_per_second"]))
        elif e.kind == "timers" and "fwd" in v:
            self._boundaries += 1
            step = max(p.step or 0, self._boundaries)
            self.series["timers"].add(step, sum(float(v.get(k, 0.0)) for k in ("fwd", "bwd", "step")))
            share = communication_of(v)
            if share is not None:
                self.timers.append((step, share))
        elif e.kind == "progress" and v.get("seconds") and p.bar_step:
            self.series["bar"].add(p.bar_step, float(v["seconds"]))
        if p.step and p.step != self._seen:
            self._seen = p.step
            at = e.time if e.time is not None else now
            if self.first is None or at < self.first[1]:
                self.first = (p.step, at)
            # the probe knows of steps that the script did not come to print
            if self.last is None or (p.step >= self.last[0] and at > self.last[1]):
                self.last = (p.step, at)

    def _step(self, e: Event) -> None:
        p, v = self.progress, e.values
        if v.get("source") == "deepspeed" and e.time is not None and v.get("step") is not None:
            step = int(v["step"])
            if self._stamp is not None and step > self._stamp[0]:
                count = step - self._stamp[0]
                self.series["stamps"].add(step, (e.time - self._stamp[1]) / count, count)
            self._stamp = (step, e.time)
        own = p.script_step if v.get("source") == "script" else v.get("step")
        step = int(own if own is not None else p.step or 0)
        if v.get("step_time") is not None:
            self.series["script"].add(step, float(v["step_time"]))
        if v.get("loss") is not None and step:
            self.losses[step] = float(v["loss"])
        if v.get("tokens_per_second"):
            self.tokens.append((step, float(v["tokens_per_second"])))


def read(run: RunDir) -> Pace:
    """What the records of ``run`` say. Raises DstuiError when its manifest cannot be read."""
    manifest = run.manifest
    samples = read_history(run.samples_dir)
    begin = float(manifest.get("started_at") or run.created_at)
    ended = (run.exit or {}).get("ended_at")
    end = float(ended or (samples[-1].t if samples else begin))
    progress = Progress(
        batch=batch_of(read_config(run.config_path), manifest.get("world_size")),
        world=manifest.get("world_size"),
        total_hint=steps_asked(manifest.get("command") or ()),
    )
    reader = _Reader(progress, _Clock(samples, begin, end))
    reader.probe(run)
    parser = parser_of(manifest)
    for piece in _pieces(LogFile(run.out_log)):
        reader.new_piece()
        for line in piece:
            for event in parser.feed(line):
                reader.event(event)
    for event in parser.finish():
        reader.event(event)
    return _conclude(run, reader)


def _pieces(log: LogFile) -> Iterator[list[Line]]:
    """A log of up to WHOLE bytes; of a larger one its beginning, pieces all over it, and its end: minutes become
    seconds, and thousands of steps are left to take a median of."""
    size = log.size
    if size <= WHOLE:
        yield log.after(0, size)
        return
    yield [line for line in log.after(0, END // 16) if line.offset < END]
    yield from log.probe(PIECES, PIECE, END, size - END)
    yield log.after(size - END, END)


def _conclude(run: RunDir, reader: _Reader) -> Pace:
    progress = reader.progress
    _trainer(reader)
    sampled: list[tuple[int, float]] = []
    if all(len(s.steps) < ENOUGH for s in reader.series.values()):
        sampled = list(_by_samples(run))
        if sampled and reader.last is None:
            reader.first, reader.last = sampled[0], sampled[-1]
        for step, seconds, count in _chunks(sampled):
            reader.series["samples"].add(step, seconds, count)
    total = max(progress.step or 0, reader.last[0] if reader.last else 0)
    warmup = warmup_of(total)
    chosen, steps = _choose(reader, warmup)
    probed = read_probe(run) or Measured()
    operations, share = _communication(reader, warmup, steps)
    return Pace(
        source=chosen,
        resolution=_resolution(chosen, steps),
        warmup=warmup,
        steps=steps,
        losses=tuple(sorted(reader.losses.items())),
        tokens=tuple(rate for step, rate in _tokens(reader) if step > warmup),
        reduction=_median([share for step, share in reader.timers if step > warmup]),
        communication=share,
        operations=operations,
        first_at=reader.first[1] if reader.first else None,
        last_at=reader.last[1] if reader.last else None,
        allocated=probed.allocated or progress.peak_allocated,
        rss=probed.host,
        total=total or None,
        progress=progress,
    )


def _tokens(reader: _Reader) -> list[tuple[int, float]]:
    """(step, tokens/s of all ranks): the script's own figures, else what the probe saw go into rank 0."""
    if reader.tokens:
        return reader.tokens
    world = reader.progress.world
    return [(step, rate * world) for step, rate in reader.probe_tokens] if world else []


def _record(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _choose(reader: _Reader, warmup: int) -> tuple[str | None, tuple[Interval, ...]]:
    """The first witness with enough intervals, else the one with most."""
    best: tuple[str | None, tuple[Interval, ...]] = (None, ())
    for name in SOURCES:
        found = reader.series[name].after(0 if name == "trainer" else warmup)
        if len(found) >= ENOUGH:
            return name, found
        if len(found) > len(best[1]):
            best = (name, found)
    return best


def _trainer(reader: _Reader) -> None:
    """``train_runtime`` of the Trainer's last line is the time of the whole loop."""
    summary, total = reader.progress.summary, reader.progress.step
    rate = summary.get("train_steps_per_second")
    if rate and total:
        reader.series["trainer"].add(total, 1 / rate, total)


def _by_samples(run: RunDir) -> Iterator[tuple[int, float]]:
    """(step, epoch seconds) at each change that one of the samples saw."""
    view = ReplayView(run)
    last = 0
    try:
        for moment in view.moments:
            shot = view.at(moment)
            if shot.step and shot.step > last:
                last = shot.step
                yield shot.step, moment
    finally:
        view.close()


def _chunks(seen: Sequence[tuple[int, float]]) -> Iterator[Interval]:
    """Means over at least CHUNK_SECONDS, what is left at the end with the last."""
    if len(seen) < 2:
        return
    first = seen[0]
    whole = seen[-1][1] - first[1]
    size = max(CHUNK_SECONDS, whole / 200)
    for step, at in seen[1:]:
        if at - first[1] >= size and (seen[-1][1] - at >= size or step == seen[-1][0]):
            yield Interval(step, (at - first[1]) / (step - first[0]), step - first[0])
            first = (step, at)
    if first == seen[0]:  # a short run
        step, at = seen[-1]
        yield Interval(step, (at - first[1]) / (step - first[0]), step - first[0])


def _resolution(source: str | None, steps: Sequence[Interval]) -> float:
    count = sum(i.steps for i in steps)
    if source == "samples" and count:
        return SAMPLE_SECONDS / count
    if source == "bar":
        return 0.005
    if source == "stamps" and count:
        return 0.001 / count
    return 0.0


def _communication(
    reader: _Reader, warmup: int, steps: Sequence[Interval]
) -> tuple[dict[str, float], float | None]:
    """Seconds a step by collective, and their share of the median step.

    Each line's time is the *sum* of all so far of that name: the timer is stopped without a reset and read with
    ``elapsed(reset=False)`` (``comm/comm.py`` timed_op and ``utils/timer.py``, read in 0.18.9 and 0.19.8, executed in 0.19.8). The table
    of ``log_summary()`` adds these sums up again and tells nothing. Where a series falls, they are single times.
    """
    first = min((s for s, _op, _t in reader.operations if s >= warmup), default=0)
    last = max((s for s, _op, _t in reader.operations), default=0)
    series: dict[str, list[tuple[int, float]]] = {}
    for step, op, seconds in reader.operations:  # printed after step n: it belongs to step n + 1
        series.setdefault(op, []).append((step, seconds))
    sums = all(a <= b for rows in series.values() for (_s, a), (_n, b) in itertools.pairwise(rows))
    operations: dict[str, float] = {}
    for op, rows in series.items():
        if op == "barrier" or last <= first:
            continue
        within_window = [t for s, t in rows if first <= s < last]
        if sums:
            before = [t for s, t in rows if s < first]
            spent = within_window[-1] - (before[-1] if before else 0.0) if within_window else 0.0
        else:
            spent = sum(within_window)
        operations[op] = spent / (last - first)
    each = statistics.median(i.seconds for i in steps) if steps else None
    return operations, sum(operations.values()) / each if operations and each else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# -- how sure a difference is -----------------------------------------------------------------------------------

DRAWS = 1000
POINTS = 300
"""Longer series are first averaged over equal stretches, which also keeps what neighbours have in common."""
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
            12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042}  # fmt: skip
"""Two-sided 95 % points of Student's t by degrees of freedom."""


def student(freedom: int) -> float:
    """Two-sided 95 % point of Student's t; between two known ones the larger (wider) one."""
    return next((t for f, t in sorted(_STUDENT.items(), reverse=True) if freedom >= f), _STUDENT[1])


def medians(values: Sequence[float], rng: random.Random, draws: int = DRAWS) -> list[float]:
    """Medians of ``draws`` series made of blocks of ``values`` (moving-block bootstrap): neighbouring steps share
    what the machine did at that moment, so single steps are no independent draws."""
    points = _thinned(values)
    n = len(points)
    length = max(1, min(n, round(2 * n ** (1 / 3))))
    found = []
    for _draw in range(draws):
        picked: list[float] = []
        while len(picked) < n:
            at = rng.randrange(n - length + 1)
            picked += points[at : at + length]
        found.append(statistics.median(picked[:n]))
    return found


def _thinned(values: Sequence[float]) -> list[float]:
    n = len(values)
    if n <= POINTS:
        return list(values)
    edges = [round(i * n / POINTS) for i in range(POINTS + 1)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges)]


def within(values: Iterable[float], share: float = 0.95) -> tuple[float, float]:
    """The middle ``share`` of ``values``."""
    ordered = sorted(values)
    cut = (1 - share) / 2
    low = ordered[max(0, int(cut * len(ordered)))]
    high = ordered[min(len(ordered) - 1, int((1 - cut) * len(ordered)))]
    return low, high
