"""One-line and small charts in one style: a style a cell would cost ten times the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def resample(values: Sequence[float], cells: int) -> list[float]:
    """At most ``cells`` values: as they are, or means of equal parts. Values that are not finite are left out."""
    known = [v for v in values if math.isfinite(v)]
    if len(known) <= cells or cells <= 0:
        return known[:cells] if cells > 0 else []
    out = []
    for n in range(cells):
        part = known[
            n * len(known) // cells : max(n * len(known) // cells + 1, (n + 1) * len(known) // cells)
        ]
        out.append(sum(part) / len(part))
    return out


def _level(value: float, low: float, high: float, count: int) -> int:
    if high <= low:
        return 0
    return max(0, min(count - 1, int((value - low) / (high - low) * count)))


def spark(
    values: Sequence[float], cells: int, levels: str, low: float | None = None, high: float | None = None
) -> str:
    """The curve in at most ``cells`` cells, one of ``levels`` each; the scale is the curve's own unless given."""
    shown = resample(values, cells)
    if not shown:
        return ""
    bottom = min(shown) if low is None else low
    top = max(shown) if high is None else high
    return "".join(levels[_level(v, bottom, top, len(levels))] for v in shown)


def chart(values: Sequence[float], cells: int, rows: int, levels: str) -> list[str]:
    """The curve as columns ``rows`` cells high, topmost row first, each ``cells`` cells wide at most.

    The lowest value still fills one level, so that a curve never vanishes.
    """
    shown = resample(values, cells)
    if not shown or rows <= 0:
        return []
    bottom, top = min(shown), max(shown)
    steps = [1 + _level(v, bottom, top, rows * len(levels)) for v in shown]
    out = []
    for row in range(rows):
        base = (rows - 1 - row) * len(levels)
        cells_of_row = []
        for s in steps:
            over = min(len(levels), s - base)
            cells_of_row.append(levels[over - 1] if over > 0 else " ")
        out.append("".join(cells_of_row).rstrip())
    return out
