"""Text in terminal columns: a Chinese character takes two, which ``str.format`` and ``textwrap`` do not know."""

from __future__ import annotations

import re
from unicodedata import category, east_asian_width

_PIECES = re.compile(r"\s+|[^\s\u2e80-\uffef]+|[\u2e80-\uffef]")
_NO_START = "、，。：；！？）》】」』％"


def width(text: str) -> int:
    """Columns that ``text`` takes."""
    return sum(
        2 if east_asian_width(c) in "WF" else 0 if category(c) in ("Mn", "Me", "Cf") else 1 for c in text
    )


def pad(text: str, columns: int, right: bool = False) -> str:
    """``text`` filled with spaces to ``columns``; never cut. ``right``: aligned to the right."""
    fill = " " * (columns - width(text))
    return fill + text if right else text + fill


def wrap(text: str, columns: int, first: str = "", rest: str | None = None) -> list[str]:
    """``text`` in lines of at most ``columns``, ``first`` before the first and ``rest`` before the others.

    Breaks at spaces and between Chinese characters (never before closing punctuation); a longer word stays whole,
    so that paths and commands can be copied.
    """
    rest = " " * width(first) if rest is None else rest
    lines: list[str] = []
    line, used = first, width(first)
    empty = True
    for piece in _PIECES.findall(text):
        if piece.isspace():
            piece = " "
        size = width(piece)
        if not empty and used + size > columns and piece not in _NO_START and piece != " ":
            lines.append(line.rstrip())
            line, used, empty = rest, width(rest), True
        if piece == " " and empty:
            continue
        line += piece
        used += size
        empty = False
    return [*lines, line.rstrip()] if not empty or not lines else lines
