"""What goes wrong while a run goes on: numbers that a person would stop it for, and what the machine complains of.

``AlertBook.look`` takes what is known at one moment and gives the alerts that stand. Each has a threshold to enter
and a weaker one to leave, so that a figure at the border does not flicker; each is judged over a window or a streak,
never over one reading, and none of it needs a clock of its own: a run that is joined or played back tells the same.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dstui.i18n import _, clauses, language, listed, ngettext, phrases
from dstui.runs.samples import Sample
from dstui.runs.stall import Stall
from dstui.runs.state import Progress, Streak
from dstui.units import GiB, gib

KINDS = (
    "loss-not-finite",
    "loss-zero",
    "grad-not-finite",
    "grad-zero",
    "scale-floor",
    "overflows",
    "stall",
    "slower",
    "throttling",
    "gpu-memory-climbs",
    "host-memory-climbs",
    "uneven-memory",
    "disk-full",
)
"""In the order in which they are shown."""
LASTING = ("slower", "gpu-memory-climbs", "host-memory-climbs", "uneven-memory", "disk-full")
"""What is still worth saying once the run is over."""
ZEROS = 3
"""Reports of exactly 0 in a row: one may be a rounded one."""
NORMS = 3
SEARCH = 17
"""Overflows in a row that no search for the first loss scale makes: from 2**32 to 2**16 are 16 (DeepSpeed
runtime/fp16/loss_scaler.py halves it each time)."""
SKIPPED, SKIPPED_STEPS = 0.2, 100
"""Share of all steps that were skipped, from that many steps on."""
SLOWER, SLOWER_STAYS = 1.6, 1.25
LATEST, USUAL = 8, 24
"""Steps compared, and the least number before them."""
LEAST_LATEST, LEAST_USUAL = 4, 10
"""And so many readings at least, where each is the mean of several steps (steps_per_print)."""
SLOWER_SECONDS = 0.05
HOT = frozenset({"hw-slowdown", "sw-thermal", "hw-thermal", "power-brake"})
"""nvml.h clocks event reasons that nobody chose. A power cap is how a busy card runs."""
HOT_SECONDS = 30.0
CLIMB_SECONDS = 300.0
CLIMB, CLIMB_LEFT = 0.03, 3600.0
"""Share of the capacity gained through the window, and the seconds to a full one at that rate."""
UNEVEN, UNEVEN_STAYS, UNEVEN_OF_CAPACITY = 0.25, 0.18, 0.05
FULL, FULL_STAYS, FULL_HARD = 4 * GiB, 6 * GiB, 1 * GiB
EVERY = 5.0
"""Seconds between two looks at long windows."""


@dataclass(frozen=True)
class Alert:
    """``level``: ``bad`` (the run is being lost) or ``warn``. ``since``: epoch seconds, ``step``: counter, where known.

    ``cause``: the page that explains it (``dstui.runs.causes``); ``checkpoint``: its place among the five.
    """

    kind: str
    level: str
    since: float | None = None
    step: int | None = None
    cause: str | None = None
    checkpoint: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> str:
        """One translated sentence with its evidence."""
        return _TEXTS[self.kind](self)

    @property
    def advice(self) -> str:
        """What to look at or to change next, translated."""
        return _ADVICE[self.kind](self)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "level": self.level,
            "since": self.since,
            "step": self.step,
            "cause": self.cause,
            "checkpoint": self.checkpoint,
            "text": self.text,
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Disk:
    """Room where a run writes, bytes. ``total``: None where only the run's samples tell."""

    path: str
    free: int
    total: int | None = None


@dataclass(frozen=True)
class Moment:
    """What the alerts are judged by. ``now``: epoch seconds of the run, the time of its end for one that is over."""

    now: float
    progress: Progress
    samples: Sequence[Sample] = ()
    stall: Stall | None = None
    disks: tuple[Disk, ...] = ()
    over: bool = False


class AlertBook:
    """Remembers which alerts stand. One call costs a pass over at most the samples of the last minutes."""

    def __init__(self) -> None:
        self._standing: dict[str, Alert] = {}
        self._looked = -math.inf

    def look(self, m: Moment) -> tuple[Alert, ...]:
        """The alerts at ``m``, the worst first."""
        found: dict[str, Alert] = {}
        for alert in _numbers(m.progress):
            found[alert.kind] = alert
        if not m.over:
            self._look_at_machine(m, found)
        else:  # what the machine did at its end stays said
            seen = dict(self._standing)
            if self._looked == -math.inf:  # joined when it was over
                self._look_at_machine(m, seen)
            found.update({kind: seen[kind] for kind in LASTING if kind in seen})
        for kind, alert in found.items():
            before = self._standing.get(kind)
            if before is not None and before.since is not None and alert.since is not None:
                found[kind] = _keep_since(alert, before)
        self._standing = found
        return tuple(sorted(found.values(), key=lambda a: (a.level != "bad", KINDS.index(a.kind))))

    def _look_at_machine(self, m: Moment, found: dict[str, Alert]) -> None:
        if m.stall is not None:
            found["stall"] = Alert(
                "stall", "bad", m.stall.since, None, m.stall.code, values={"text": m.stall.text}
            )
        if m.now - self._looked < EVERY and m.now >= self._looked:
            for kind in ("slower", "throttling", "gpu-memory-climbs", "host-memory-climbs",
                         "uneven-memory", "disk-full"):  # fmt: skip
                if kind in self._standing:
                    found[kind] = self._standing[kind]
            return
        self._looked = m.now
        stands = self._standing
        for alert in (
            slower(m.progress, "slower" in stands),
            throttling(m.samples, m.now, "throttling" in stands),
            *climbs(m.samples, m.now, m.progress, frozenset(stands)),
            uneven(m.samples, m.now, m.progress, "uneven-memory" in stands),
            disk(m.disks, "disk-full" in stands, m.now),
        ):
            if alert is not None:
                found[alert.kind] = alert


def _keep_since(alert: Alert, before: Alert) -> Alert:
    return replace(alert, since=before.since, step=before.step if before.step is not None else alert.step)


# ---- numbers of the training


def _streak(kind: str, level: str, streak: Streak, cause: str | None = None, **values: Any) -> Alert:
    step = None if streak.step is None else int(streak.step)
    return Alert(kind, level, streak.at, step, cause, values={"count": streak.count, **values})


def _numbers(p: Progress) -> list[Alert]:
    found = []
    if p.bad_loss.count:
        level = "bad" if p.bad_loss.count > 1 else "warn"
        what = "nan" if p.loss is None or p.loss != p.loss or math.isfinite(p.loss) else "inf"
        found.append(
            _streak("loss-not-finite", level, p.bad_loss, "DR601", what=what, again=bool(p.bad_loss.good))
        )
    if p.zero_loss.count >= ZEROS:
        found.append(_streak("loss-zero", "bad", p.zero_loss, "DR601"))
    if p.bad_norm.count >= NORMS:
        found.append(_streak("grad-not-finite", "bad", p.bad_norm, "DR601"))
    if p.zero_norm.count >= NORMS:
        found.append(_streak("grad-zero", "warn", p.zero_norm))
    if p.floor.count:
        found.append(_streak("scale-floor", "bad", p.floor, "DR602", scale=p.loss_scale))
    elif p.overflow_streak.count >= SEARCH:
        found.append(_streak("overflows", "bad", p.overflow_streak, "DR602", scale=p.loss_scale))
    elif p.skipped and (p.step or 0) >= SKIPPED_STEPS and p.skipped > SKIPPED * (p.step or 1):
        values = {"skipped": p.skipped, "step": p.step}
        found.append(Alert("overflows", "warn", None, None, "DR602", values=values))
    return found


def slower(p: Progress, stands: bool) -> Alert | None:
    """The last steps take clearly longer than the best stretch before them, by medians: an evaluation or a checkpoint
    is one outlier. The best stretch that is remembered, so that a run that is joined late tells the same; slow
    stretches that came and went before are how this run goes."""
    paces = list(p.paces)
    if len(paces) < LEAST_LATEST + LEAST_USUAL:
        return None
    each = max(1.0, statistics.median(b.step - a.step for a, b in itertools.pairwise(paces)))
    newest = max(LEAST_LATEST, math.ceil(LATEST / each))
    enough = max(LEAST_USUAL, math.ceil(USUAL / each))
    if len(paces) < newest + enough:
        return None
    latest = [x.seconds for x in paces[-newest:]]
    before = [x.seconds for x in paces[:-newest]]
    stretches = (before[n : n + enough] for n in range(len(before) - enough + 1))
    # steps of one time stamp take nothing: the log's clock stood still, or was set back
    best = min((s for s in stretches if statistics.median(s) > 0), key=statistics.median, default=None)
    if best is None:
        return None
    usual, now = statistics.median(best), statistics.median(latest)
    spread = 1.4826 * statistics.median([abs(x - usual) for x in best])
    factor = SLOWER_STAYS if stands else SLOWER
    if now < factor * usual or now - usual < max(SLOWER_SECONDS, (2 if stands else 6) * spread):
        return None
    if not stands and min(latest) < SLOWER_STAYS * usual:
        return None
    start = len(paces) - newest
    while start and paces[start - 1].seconds >= SLOWER_STAYS * usual:  # it may be seen late
        start -= 1
    slow = sum(x.seconds >= SLOWER_STAYS * usual for x in paces[:start])
    if not stands and slow > 0.2 * start:
        return None
    first = paces[start]
    values = {"usual": _round(usual), "now": _round(now), "factor": round(now / usual, 1)}
    return Alert("slower", "warn", first.at, first.step, values=values)


# ---- the machine


def _window(samples: Sequence[Sample], now: float, seconds: float) -> list[Sample]:
    found = []
    for s in reversed(samples):
        if s.t <= now - seconds:
            break
        found.append(s)
    return found[::-1]


def _long_enough(window: Sequence[Sample], seconds: float) -> bool:
    return len(window) >= 3 and window[-1].t - window[0].t >= seconds


def throttling(samples: Sequence[Sample], now: float, stands: bool) -> Alert | None:
    """Cards whose clocks heat or a fault holds down through most of the last half minute."""
    window = _window(samples, now, HOT_SECONDS)
    if not _long_enough(window, HOT_SECONDS / 3):
        return None
    hot: dict[int, list[frozenset[str]]] = {}
    for s in window:
        for g in s.gpus:
            if g.throttle is not None:
                hot.setdefault(g.index, []).append(frozenset(g.throttle.split(",")) & HOT)
    limit = 0.1 if stands else 0.6
    cards = {i: rows for i, rows in hot.items() if sum(map(bool, rows)) > limit * len(rows)}
    if not cards:
        return None
    last = {g.index: g for g in window[-1].gpus}
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, rows in sorted(cards.items()):
        groups.setdefault(tuple(sorted({r for row in rows for r in row})), []).append(i)
    reasons = {r for group in groups for r in group}
    heat = {i: last[i].temperature for i in cards if i in last}
    values: dict[str, Any] = {
        "reasons": tuple(sorted(reasons)),
        "groups": tuple(
            (tuple(found), group, max((h for i in found if (h := heat.get(i)) is not None), default=None))
            for group, found in groups.items()
        ),
    }
    level = "bad" if {"hw-thermal", "hw-slowdown", "power-brake"} & reasons else "warn"
    return Alert("throttling", level, window[0].t, values=values)


def _climb(
    points: Sequence[tuple[float, float]], capacity: float, room: float, stands: bool
) -> tuple[float, float] | None:
    """(bytes gained, seconds until ``room`` is used up) of a series that rises through every quarter of the window."""
    if len(points) < 16 or points[-1][0] - points[0][0] < 0.9 * CLIMB_SECONDS:
        return None
    size = len(points) // 4
    quarters = [statistics.median(y for _t, y in points[n * size : (n + 1) * size]) for n in range(4)]
    steps = [b - a for a, b in itertools.pairwise(quarters)]
    gained = quarters[-1] - quarters[0]
    if min(steps) <= 0 or min(steps) < 0.2 * max(steps):  # a jump and a plateau is how a cache fills
        return None
    if gained < (0.5 if stands else 1.0) * CLIMB * capacity:
        return None
    seconds = 0.75 * (points[-1][0] - points[0][0])
    left = max(0.0, room) / (gained / seconds)
    return (gained, left) if left < (2.0 if stands else 1.0) * CLIMB_LEFT else None


def _at_the_end(points: Sequence[tuple[float, float]]) -> float:
    """Of the last quarter: in the very last sample of a run that ends the ranks may be gone."""
    return max(y for _t, y in points[-max(1, len(points) // 4) :])


def climbs(samples: Sequence[Sample], now: float, p: Progress, stands: frozenset[str]) -> list[Alert]:
    """Memory that grows with the steps until it is full: of a card, or of all ranks on the host."""
    first = p.seen.get("step")
    if not p.stepped or first is None:
        return []
    window = [s for s in _window(samples, now, CLIMB_SECONDS) if s.t > first]
    found = []
    cards: dict[int, list[tuple[float, float]]] = {}
    sizes: dict[int, int] = {}
    host: list[tuple[float, float]] = []
    capacity = others = 0
    for s in window:
        for g in s.gpus:
            if g.memory_used is not None and g.memory_total:
                cards.setdefault(g.index, []).append((s.t, g.memory_used))
                sizes[g.index] = g.memory_total
        rss = [r.rss for r in s.ranks if r.rss is not None]
        if rss and s.host.capacity:
            host.append((s.t, sum(rss)))
            capacity, others = s.host.capacity, s.host.used or sum(rss)
    worst: tuple[float, int, float, float] | None = None
    for index, points in cards.items():
        rise = _climb(points, sizes[index], sizes[index] - points[-1][1], "gpu-memory-climbs" in stands)
        if rise is not None and (worst is None or rise[1] < worst[0]):
            worst = (rise[1], index, rise[0], _at_the_end(points))
    if worst is not None:
        left, index, gained, used = worst
        found.append(_climbing("gpu-memory-climbs", window[0].t, gained, left, used, sizes[index], 1, index))
    rise = _climb(host, capacity, capacity - others, "host-memory-climbs" in stands) if host else None
    if rise is not None:
        found.append(_climbing("host-memory-climbs", window[0].t, *rise, _at_the_end(host), capacity, 4))
    return found


def _climbing(
    kind: str,
    since: float,
    gained: float,
    left: float,
    used: float,
    capacity: int,
    checkpoint: int,
    index: int | None = None,
) -> Alert:
    values = {
        "index": index,
        "gained": round(gained / GiB, 1),
        "used": round(used / GiB, 1),
        "capacity": capacity,
        "minutes": max(1, round(left / 300) * 5),
    }
    return Alert(kind, "warn", since, checkpoint=checkpoint, values=values)


def uneven(samples: Sequence[Sample], now: float, p: Progress, stands: bool) -> Alert | None:
    """Cards of one run that hold very different amounts, through the last half minute of training."""
    if not p.stepped:
        return None
    window = _window(samples, now, HOT_SECONDS)
    if not _long_enough(window, HOT_SECONDS / 3):
        return None
    if any(len(s.gpus) < 2 or len(s.gpus) != len(s.ranks) for s in window):
        return None  # cards that are not this run's would count as empty ones
    used: dict[int, list[int]] = {}
    for s in window:
        for g in s.gpus:
            if g.memory_used is None or not g.memory_total:
                return None
            used.setdefault(g.index, []).append(g.memory_used)
    total = max(g.memory_total or 0 for g in window[-1].gpus)
    typical = {i: statistics.median(rows) for i, rows in used.items()}
    high, low = max(typical, key=lambda i: typical[i]), min(typical, key=lambda i: typical[i])
    gap = typical[high] - typical[low]
    if gap < (UNEVEN_STAYS if stands else UNEVEN) * typical[high] or gap < UNEVEN_OF_CAPACITY * total:
        return None
    values = {
        "high": high,
        "most": round(typical[high] / GiB, 1),
        "low": low,
        "least": round(typical[low] / GiB, 1),
    }
    return Alert("uneven-memory", "warn", window[0].t, checkpoint=1, values=values)


def disk(disks: Sequence[Disk], stands: bool, now: float) -> Alert | None:
    """Little room where the run writes: its folder and its working directory."""
    limit = FULL_STAYS if stands else FULL
    short = [d for d in disks if d.free < limit and (d.total is None or d.free < 0.1 * d.total)]
    if not short:
        return None
    worst = min(short, key=lambda d: d.free)
    level = "bad" if worst.free < FULL_HARD else "warn"
    values = {"path": worst.path, "free": round(worst.free / GiB, 1)}
    return Alert("disk-full", level, now, cause="DR901", values=values)


def _round(seconds: float) -> float:
    return float(f"{seconds:.2g}")


# ---- sentences


def _since(a: Alert) -> str:
    """Where it began; stands behind the sentence in English, before it in Chinese."""
    if a.step is None:
        return ""
    text = _("since step {n}").format(n=a.step)
    return text if language() == "zh_CN" else " " + text


def _reports(a: Alert) -> str:
    n = a.values["count"]
    return ngettext("{n} report", "{n} reports", n).format(n=n)


def _not_finite(a: Alert) -> str:
    what = {"nan": _("NaN"), "inf": _("infinite")}[a.values["what"]]
    if a.values["again"]:
        text = _("the loss was {what}{since} ({reports}); it is finite again")
    else:
        text = _("the loss is {what}{since} ({reports})")
    return text.format(what=what, since=_since(a), reports=_reports(a))


def _scale(a: Alert) -> str:
    scale = a.values.get("scale")
    return "" if scale is None else phrases(["", _("loss scale {x:g}").format(x=scale)])


def _overflows(a: Alert) -> str:
    if "skipped" in a.values:
        return _("{n} of {all} steps were skipped for overflow").format(
            n=a.values["skipped"], all=a.values["step"]
        )
    return _("{n} overflows in a row{since}{scale}: no step is taken").format(
        n=a.values["count"], since=_since(a), scale=_scale(a)
    )


def _cards(cards: Sequence[int]) -> str:
    return ngettext("GPU {list}", "GPUs {list}", len(cards)).format(list=listed(map(str, cards)))


def _throttled(a: Alert) -> str:
    names = {  # as nvidia-smi -q shows them
        "hw-slowdown": _("HW slowdown"),
        "sw-thermal": _("SW thermal slowdown"),
        "hw-thermal": _("HW thermal slowdown"),
        "power-brake": _("HW power brake slowdown"),
    }
    return clauses(
        _("{cards} slowed down: {reasons}").format(
            cards=_cards(cards),
            reasons=phrases(
                [listed(names[r] for r in reasons), *([] if heat is None else [f"{heat:.0f} C"])]
            ),
        )
        for cards, reasons, heat in a.values["groups"]
    )


def _climbing_text(a: Alert) -> str:
    v = a.values
    who = _("the ranks' host memory") if v["index"] is None else _("memory of GPU {n}").format(n=v["index"])
    return _("{who} climbs: +{gained} GiB in 5 min to {used} of {capacity}; full in about {time}").format(
        who=who,
        gained=v["gained"],
        used=v["used"],
        capacity=gib(v["capacity"]),
        time=_("{n} min").format(n=v["minutes"]),
    )


_TEXTS: dict[str, Callable[[Alert], str]] = {
    "loss-not-finite": _not_finite,
    "loss-zero": lambda a: _("the loss is exactly 0{since} ({reports})").format(
        since=_since(a), reports=_reports(a)
    ),
    "grad-not-finite": lambda a: _("the gradient norm is NaN or infinite{since} ({reports})").format(
        since=_since(a), reports=_reports(a)
    ),
    "grad-zero": lambda a: _("the gradient norm is exactly 0{since} ({reports})").format(
        since=_since(a), reports=_reports(a)
    ),
    "scale-floor": lambda a: _("the loss scale is at its minimum and still overflows{since}{scale}").format(
        since=_since(a), scale=_scale(a)
    ),
    "overflows": _overflows,
    "stall": lambda a: _("stalled: {reason}").format(reason=a.values["text"]),
    "slower": lambda a: _("steps take {now:g} s instead of {usual:g} s{since} ({factor:g} times as long)").format(
        now=a.values["now"], usual=a.values["usual"], factor=a.values["factor"], since=_since(a)
    ),
    "throttling": _throttled,
    "gpu-memory-climbs": _climbing_text,
    "host-memory-climbs": _climbing_text,
    "uneven-memory": lambda a: _("memory is uneven: GPU {high} {most} GiB, GPU {low} {least} GiB").format(
        **{k: a.values[k] for k in ("high", "most", "low", "least")}
    ),
    "disk-full": lambda a: _("{free} GiB left at {path}").format(free=a.values["free"], path=a.values["path"]),
}  # fmt: skip


# ---- what to do next


def _not_finite_advice(a: Alert) -> str:
    if a.values["again"]:
        return _("look at the data of that step; if it comes back: clip gradients, or a lower learning rate")
    return _(
        "stop; go on from the last checkpoint before it with gradient clipping, a lower learning rate, or bf16"
    )


def _overflows_advice(a: Alert) -> str:
    if "skipped" in a.values:
        return _("a skipped step trains nothing: bf16, or a lower learning rate")
    return _("stop; bf16 where the cards have it, else a lower learning rate")


def _throttled_advice(a: Alert) -> str:
    if {"hw-slowdown", "power-brake"} & set(a.values["reasons"]):
        return _(
            "its power supply, cable or cooling: tell the machine's owner; `nvidia-smi -q -d PERFORMANCE`"
        )
    return _(
        "its cooling: fans, air, the card beside it; a lower power limit (`nvidia-smi -pl`) costs less speed"
    )


_ADVICE: dict[str, Callable[[Alert], str]] = {
    "loss-not-finite": _not_finite_advice,
    "loss-zero": lambda a: _("stop; are all labels masked (-100), is the loss the model's own, is the batch empty?"),
    "grad-not-finite": lambda a: _("gradient clipping, a lower learning rate, or bf16 in place of fp16"),
    "grad-zero": lambda a: _("if the loss still falls, only this figure is wrong; else: do the parameters require gradients, do labels reach the loss?"),
    "scale-floor": lambda a: _("stop; bf16 where the cards have it, else a lower learning rate: no step is taken any more"),
    "overflows": _overflows_advice,
    "stall": lambda a: _("what every rank does now: `dstui watch --once --stacks`, in the monitor y"),
    "slower": lambda a: _("what came in at that step: other work on the cards or the disk, longer data, heat; see the curves"),
    "throttling": _throttled_advice,
    "gpu-memory-climbs": lambda a: _("does the script keep losses or outputs with their graph (.item(), .detach())? do rows get longer?"),
    "host-memory-climbs": lambda a: _("a list that grows, or data loader workers that copy it: fewer workers, arrays in place of lists"),
    "uneven-memory": lambda a: _("is somebody else's process on the fuller card (`nvidia-smi`)? does one rank alone load, evaluate or keep more?"),
    "disk-full": lambda a: _("delete old checkpoints, or keep fewer of them (`save_total_limit`), before the next one is saved"),
}  # fmt: skip
