"""Lines of styled text measured in terminal cells: the one currency of every widget here.

A ``Line`` is a tuple of ``(text, role)``; a role is a key of ``ROLES``. Lines compare by value, so a view
repaints only the rows that changed. Colours are the terminal's own 16, and no colour carries a meaning
that a letter or word beside it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.cells import cell_len, set_cell_size
from rich.style import Style

Span = tuple[str, str]
Line = tuple[Span, ...]

ROLES: dict[str, Style] = {
    "": Style(),
    "dim": Style(dim=True),
    "strong": Style(bold=True),
    "title": Style(bold=True, color="cyan"),
    "accent": Style(color="cyan"),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(bold=True, color="red"),
    "key": Style(bold=True),
    "cursor": Style(reverse=True),
    "bar": Style(reverse=True),
}
SEVERITY_ROLE = {"E": "bad", "S": "bad", "N": "warn", "M": "warn", "W": "warn", "I": "accent"}

BLANK: Line = ()


def line(*spans: Span | str) -> Line:
    """A line from spans and plain strings; empty spans are dropped."""
    return tuple(s if isinstance(s, tuple) else (s, "") for s in spans if s and s[0])


def width(text: str) -> int:
    """Terminal cells that ``text`` takes; a Chinese character takes two."""
    return cell_len(text)


def line_width(row: Line) -> int:
    """Terminal cells of a whole row."""
    return sum(cell_len(text) for text, _role in row)


def pad(text: str, cells: int, cut: str = "…") -> str:
    """``text`` in exactly ``cells`` cells: cut with ``cut`` or filled with spaces."""
    have = cell_len(text)
    if have <= cells:
        return text + " " * (cells - have)
    return set_cell_size(text, max(0, cells - 1)) + cut if cells > 0 else ""


def clip(text: str, cells: int, cut: str = "…") -> str:
    """``text``, cut with ``cut`` where it is wider than ``cells``."""
    return text if cell_len(text) <= cells else pad(text, cells, cut)


def clip_middle(text: str, cells: int, cut: str = "…") -> str:
    """Like ``clip`` but keeps both ends: for paths."""
    if cell_len(text) <= cells:
        return text
    tail = max(0, (cells - 1) * 2 // 3)
    end = text
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(text, max(0, cells - 1 - cell_len(end))) + cut + end


def clip_line(row: Line, cells: int, cut: str = "…") -> Line:
    """``row`` cut to ``cells`` cells."""
    if line_width(row) <= cells:
        return row
    out: list[Span] = []
    left = cells - 1
    for text, role in row:
        w = cell_len(text)
        if w > left:
            out.append((set_cell_size(text, max(0, left)) + cut, role))
            break
        out.append((text, role))
        left -= w
    return tuple(out)


def _words(text: str) -> Iterator[str]:
    """Pieces between which a line may break: words with their trailing space, wide characters one by one."""
    word = ""
    for ch in text:
        if cell_len(ch) == 2:
            # Closing punctuation stays with what it closes.
            if ch in "，。；：？！、）》”":
                yield word + ch
            else:
                if word:
                    yield word
                word = ch
                continue
            word = ""
        elif ch == " ":
            yield word + ch
            word = ""
        else:
            if word and cell_len(word[-1]) == 2:
                yield word
                word = ""
            word += ch
    if word:
        yield word


def wrap(text: str, cells: int) -> list[str]:
    """``text`` broken into rows of at most ``cells`` cells, never less than the two that one character may take."""
    rows: list[str] = []
    cells = max(2, cells)
    for paragraph in text.split("\n"):
        row = ""
        for piece in _words(paragraph):
            while cell_len(row) + cell_len(piece.rstrip()) > cells:
                if row:
                    rows.append(row.rstrip())
                    row = ""
                else:  # one piece wider than a row: a long path
                    head = set_cell_size(piece, cells).rstrip()
                    rows.append(head)
                    piece = piece[len(head) :]
            row += piece
        rows.append(row.rstrip())
    return rows


def wrapped(
    text: str, cells: int, role: str = "", indent: str = "", limit: int | None = None, cut: str = "…"
) -> list[Line]:
    """``wrap`` as lines with a hanging ``indent``; at most ``limit`` of them."""
    rows = wrap(text, cells - cell_len(indent))
    if limit is not None and len(rows) > limit:
        rows = rows[:limit]
        rows[-1] = clip(rows[-1], max(0, cells - cell_len(indent) - 1), "") + cut
    return [line((indent + r, role)) for r in rows]


def columns(rows: Iterable[Iterable[str]], gap: int = 2, limits: dict[int, int] | None = None) -> list[str]:
    """Rows of cells as aligned text; ``limits`` caps the width of a column."""
    table = [list(r) for r in rows]
    if not table:
        return []
    count = max(len(r) for r in table)
    sizes = [
        min((limits or {}).get(c, 10_000), max((cell_len(r[c]) for r in table if c < len(r)), default=0))
        for c in range(count)
    ]
    return [(" " * gap).join(pad(cell, sizes[c]) for c, cell in enumerate(r)).rstrip() for r in table]
