"""The page of curves: loss, learning rate, gradient norm, time of a step, speed, each over the whole run.

A column stands for a fixed number of steps, a power of two that grows only when the page is full, so that a new step
changes the last column and no other; and of the curves that changed only ``PER_TICK`` are drawn anew at once. A page
of five charts thus costs about as much as the overview.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dstui.i18n import _
from dstui.runs.view import Curve, Snapshot
from dstui.tui.terminal import Glyphs
from dstui.tui.text import BLANK, Line, line, pad, width
from dstui.tui.widgets.dashboard import short

PER_TICK = 2
LABEL = 20
"""Cells of the names and figures at the left."""
LEAST = 3
"""Rows of a chart."""


@dataclass(frozen=True)
class Shown:
    """One curve with its texts. ``why``: what to say when there is none."""

    name: str
    value: str
    curve: Curve
    why: str


def shown_curves(shot: Snapshot) -> tuple[Shown, ...]:
    """The five, with the speed derived from the time of a step where the log tells none."""
    speeds, unit = shot.speeds, shot.speed_unit
    value = shot.tokens_per_second if unit == "tokens" else shot.samples_per_second
    if not speeds and shot.batch:
        unit = "samples"
        speeds = tuple((x, shot.batch / y) for x, y in shot.step_times if y > 0)
        value = shot.samples_per_second
    name = _("tokens/s") if unit == "tokens" else _("samples/s")
    silent = _("the log does not tell it") if shot.step else _("no step yet")
    return (
        Shown(_("loss"), "?" if shot.loss is None else f"{shot.loss:.4f}", shot.losses, silent),
        Shown(_("lr"), "?" if shot.lr is None else f"{shot.lr:.3g}", shot.lrs, silent),
        Shown(
            _("grad norm"),
            "?" if shot.grad_norm is None else f"{shot.grad_norm:.3g}",
            shot.grad_norms,
            silent,
        ),
        Shown(
            _("step time"),
            "?" if shot.step_time is None else _("{x:.3g} s").format(x=shot.step_time),
            shot.step_times,
            silent,
        ),
        Shown(name, "?" if not value else short(value), speeds, silent),
    )


@dataclass(frozen=True)
class Axis:
    """The steps of all curves: the first one, and how many a column stands for."""

    first: float
    last: float
    size: float

    def column(self, x: float) -> int:
        return int(x / self.size) - int(self.first / self.size)


def axis_of(curves: Sequence[Curve], cells: int) -> Axis | None:
    """The axis on which every curve fits in ``cells`` columns; None when there is no point."""
    known = [c for c in curves if c]
    if not known or cells <= 0:
        return None
    first, last = min(c[0][0] for c in known), max(c[-1][0] for c in known)
    gap = min((c[-1][0] - c[0][0]) / max(1, len(c) - 1) for c in known)
    axis = Axis(first, last, 2.0 ** math.ceil(math.log2(max(1.0, gap))))
    while axis.column(last) >= cells:
        axis = Axis(first, last, axis.size * 2)
    return axis


def columns_of(curve: Curve, axis: Axis) -> list[float | None]:
    """Means of the columns; one without a point continues the one before, outside of the curve it is None."""
    if not curve:
        return []
    sums = [0.0] * (axis.column(curve[-1][0]) + 1)
    counts = [0] * len(sums)
    for x, y in curve:
        n = axis.column(x)
        sums[n] += y
        counts[n] += 1
    out: list[float | None] = []
    for total, count in zip(sums, counts, strict=True):
        out.append(total / count if count else out[-1] if out else None)
    return out


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, moved outwards to round figures, so that a small change of either keeps the scale."""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return low, high
    unit = 10.0 ** math.floor(math.log10(span)) / 2
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


def drawn(values: Sequence[float | None], rows: int, levels: str) -> list[str]:
    """Columns ``rows`` cells high, topmost row first; the lowest value fills one level, None nothing."""
    known = [v for v in values if v is not None]
    if not known:
        return [""] * rows
    low, high = bounds(known)
    top = rows * len(levels) - 1
    steps = [
        0 if v is None else 1 + (round((v - low) / (high - low) * top) if high > low else 0) for v in values
    ]
    out = []
    for row in range(rows):
        base = (rows - 1 - row) * len(levels)
        cells = "".join(" " if s <= base else levels[min(len(levels), s - base) - 1] for s in steps)
        out.append(cells.rstrip())
    return out


class CurvesPage:
    """Draws the page; keeps what it drew, to change no more than it must."""

    def __init__(self) -> None:
        self._kept: dict[int, list[str]] = {}
        self._size: tuple[int, int, str] = (0, 0, "")
        self._scale: tuple[float, float] | None = None
        self._turn = 0

    def reset(self) -> None:
        """Draw all of them at the next call: the page was opened, or shows another run."""
        self._kept = {}

    def rows(self, shot: Snapshot, cells: int, height: int, g: Glyphs) -> list[Line]:
        """The page in ``height`` rows of ``cells`` cells."""
        if (cells, height, g.levels) != self._size:
            self._size = (cells, height, g.levels)
            self.reset()
        found = shown_curves(shot)
        each = max(LEAST + 1, (height - 1) // len(found))
        tall = each - 1
        axis = axis_of([x.curve for x in found], cells - LABEL - 4)
        scale = None if axis is None else (axis.first, axis.size)
        if shot.over or scale != self._scale:  # nothing follows, or what was drawn stands for other steps
            self._scale = scale
            self.reset()
        fresh = {
            n: drawn([] if axis is None else columns_of(x.curve, axis), tall, g.levels)
            for n, x in enumerate(found)
        }
        changed = [n for n in fresh if self._kept.get(n) != fresh[n]]
        new = [n for n in changed if n not in self._kept]
        turn = sorted((n for n in changed if n in self._kept), key=lambda n: (n - self._turn) % len(found))
        for n in (*new, *turn[:PER_TICK]):
            self._kept[n] = fresh[n]
        if turn:
            self._turn = (turn[:PER_TICK][-1] + 1) % len(found)
        out: list[Line] = []
        for n, x in enumerate(found):
            out += self._block(x, self._kept[n], tall, cells, g)
            out.append(BLANK)
        if axis is not None:
            foot = _("step {a:g} to {b:g}").format(a=axis.first, b=axis.last)
            out[-1] = line((" " * (LABEL + 3) + foot, "dim"))
        return out

    @staticmethod
    def _block(x: Shown, chart: Sequence[str], tall: int, cells: int, g: Glyphs) -> list[Line]:
        if not x.curve:
            head = line((f" {pad(x.name, LABEL)} {g.vline} ", "dim"), (x.why, "dim"))
            return [head, *[line((" " * (LABEL + 2) + g.vline, "dim"))] * (tall - 1)]
        values = [y for _x, y in x.curve]
        low, high = min(values), max(values)
        texts = ["" for _n in range(tall)]
        texts[0] = x.name + " " * max(1, LABEL - width(x.name) - width(x.value)) + x.value
        texts[1] = _("high {x}").format(x=_figure(high))
        texts[2] = _("low {x}").format(x=_figure(low))
        rows = []
        for n, text in enumerate(texts):
            rows.append(
                line((f" {pad(text, LABEL)}", "" if n == 0 else "dim"), (f" {g.vline} ", "dim"), chart[n])
            )
        return rows


def _figure(x: float) -> str:
    return short(x) if x >= 1e4 else f"{x:.4g}"
