"""Sizes and durations as people read and type them. Bytes inside, GiB on screen."""

from __future__ import annotations

import re

from dstui.errors import DstuiError
from dstui.i18n import _

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40
_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": KiB,
    "m": 10**6, "mb": 10**6, "mib": MiB,
    "g": 10**9, "gb": 10**9, "gib": GiB,
    "t": 10**12, "tb": 10**12, "tib": TiB,
}  # fmt: skip


def gib(n: float | None, digits: int = 1) -> str:
    """``n`` bytes as ``12.3 GiB``; ``?`` for an unknown size, MiB below 0.1 GiB."""
    if n is None:
        return "?"
    if abs(n) < 0.0995 * GiB:
        return f"{n / MiB:.0f} MiB"
    return f"{n / GiB:.{digits}f} GiB"


def parse_size(text: str) -> int:
    """``80GiB``, ``512g``, ``24e9`` -> bytes. ``G``/``GB`` are decimal, ``GiB`` binary. Raises DstuiError."""
    m = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text, re.I)
    number = float(m.group(1)) if m else 0.0
    if not m or m.group(2).lower() not in _UNITS or number > 1e24:
        raise DstuiError(
            _("'{text}' is not a size").format(text=text),
            _("write it like 80GiB, 512GB or a number of bytes"),
        )
    return int(number * _UNITS[m.group(2).lower()])


def count(n: float | None) -> str:
    """A number of parameters: ``8.03B``, ``124M``."""
    if n is None:
        return "?"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.3g}{suffix}"
    return f"{n:.0f}"


def duration(seconds: float | None) -> str:
    """``95`` -> ``1m35s``; ``?`` when unknown."""
    if seconds is None or seconds != seconds:
        return "?"
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"
