"""The text of a log as it is judged: its beginning and its end, the last of several runs, tracebacks that somebody cut."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.runs.tail import Line, LogFile, split

HEAD = 1 << 20
TAIL = 4 << 20
"""A larger log is read at its beginning and its end."""


_LAUNCHED = re.compile(r"\[runner\.py:\d+:main\] cmd = ")
RESTARTED = re.compile(r"will restart worker group")
_BEGUN = re.compile(
    r"\[runner\.py:\d+:main\] cmd = |torch/distributed/run\.py:\d+\] Setting OMP_NUM_THREADS|"
    r"^WARNING:__main__:\s*$|WARNING:torch\.distributed\.run:"
)
_RAN = re.compile(r"sigkill_handler\]|exits successfully|ChildFailedError|'loss': |step=\d+, skipped=")
"""What a run that did something leaves behind."""


def last_attempt(head: list[Line], tail: list[Line]) -> list[Line] | None:
    """The lines of the last run where a file holds several, one after the other: a script starts one after another,
    a log is appended to, torchrun starts its workers again. None where there is only one."""
    starts = [
        (part, i)
        for part in (head, tail)
        for i, x in enumerate(part)
        if _LAUNCHED.search(x.text) or RESTARTED.search(x.text)
    ]
    if len(starts) < 2 and not any(RESTARTED.search(part[i].text) for part, i in starts):
        # the beginning of the first is missing, or torchrun started them
        again = (
            (part, i)
            for part in (tail, head)
            for i in reversed(range(len(part)))
            if _BEGUN.search(part[i].text)
        )
        starts = [at for at in itertools.islice(again, 1) if any(_RAN.search(x.text) for x in at[0][: at[1]])]
    if not starts:
        return None
    part, i = starts[-1]
    return part[i:] if part is tail or not tail else part[i:] + tail


_INSIDE = re.compile(r'^(.*?)\s+File "[^"]+", line \d+, in \S')
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)")


_BOX = re.compile(r"^(.*?)[│|] \S.*?:\d+ in\b")
_BOX_END = re.compile(r"[╰└+][─-]+[╯┘+]")


def opened(lines: list[Line]) -> list[Line]:
    """A text as it was before somebody cut it inside tracebacks, or put it into a block that is set in."""
    depth = min((len(x.text) - len(x.text.lstrip(" ")) for x in lines if x.text.strip()), default=0)
    if depth:
        lines = [x._replace(text=x.text[depth:]) for x in lines]
    heads: dict[int, str] = {}
    known: set[str] = set()
    for i, line in enumerate(lines[:1000]):
        if "Traceback (most recent call last)" in line.text:
            known.add(line.text.partition("Traceback (most")[0].strip())
            if not known - {""}:
                break  # without tags the first of them opens all that follows
            continue
        m = _INSIDE.match(line.text)
        box = None if m or known else _BOX.match(line.text)
        tag = str((m or box).group(1)) if m or box else None  # type: ignore[union-attr]
        if tag is None or any(k == tag.strip() or (tag.strip() and k.startswith(tag.strip())) for k in known):
            continue  # a logger may put more before the first line only
        known.add(tag.strip())
        rest = [x.text[len(tag) :] for x in lines[i : i + 400] if x.text.startswith(tag)]
        rest = list(itertools.takewhile(lambda x: "Traceback (most recent call last)" not in x, rest))
        if box is not None:
            end = next((n for n, x in enumerate(rest) if _BOX_END.match(x)), len(rest))
            if any(_RAISED.match(x.strip()) for x in rest[end + 1 : end + 2]):
                heads[i] = f"{tag}╭─ Traceback (most recent call last) ─╮"
        elif any(len(x) - len(x.lstrip()) < 2 and _RAISED.match(x.strip()) for x in rest):
            heads[i] = f"{tag}{' ' if tag else ''}Traceback (most recent call last):"
        if not tag.strip():
            break
    return [y for i, x in enumerate(lines) for y in ((x._replace(text=heads[i]), x) if i in heads else (x,))]


def read_log(path: Path) -> tuple[list[Line], list[Line]]:
    """Beginning and end of a log; the end is empty when the beginning is all of it."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116
        with path.open("rb") as f:
            if size <= HEAD + TAIL:
                return split(f.read(), 0, final=True)[0], []
            head = split(f.read(HEAD), 0)[0]
    except OSError as e:
        raise DstuiError(_("{path}: {cause}").format(path=path, cause=e.strerror or e)) from e
    found: list[Line] = []
    for at, data in LogFile(path).blocks(size - TAIL, size):
        found += split(data, at, final=True)[0]
    return head, found[1:]
