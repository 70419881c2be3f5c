"""The five lamps and the alerts as lines: one row each in the overview, a page with all their evidence."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dstui.i18n import N_, _, ngettext
from dstui.runs.alerts import Alert
from dstui.runs.causes import CHECKPOINTS
from dstui.runs.lamps import Lamp
from dstui.runs.view import Snapshot
from dstui.tui.terminal import Glyphs
from dstui.tui.text import BLANK, Line, Span, clip, line, width, wrapped

CHECKPOINT_NAMES = (N_("stage"), N_("offload"), N_("accum"), N_("host"), N_("comm"))
"""The five checkpoints, short enough for one row; in full: ``dstui.runs.causes.CHECKPOINTS``."""
LEVEL_ROLES = {"red": "bad", "yellow": "warn", "green": "good", "unknown": "dim"}
LEVEL_WORDS = {"red": N_("trouble"), "yellow": N_("look here"), "green": N_("fine"), "unknown": N_("unknown")}
ALERT_ROWS = 2
"""Rows of the overview that alerts may take."""


def lamp_sign(level: str, g: Glyphs) -> str:
    """A sign for each level, so that none is told by its colour alone."""
    return {"red": g.problem, "yellow": "W", "green": g.done}.get(level, "?")


def lamp_row(found: Sequence[Lamp], g: Glyphs) -> Line:
    """``✓ 1 stage   ? 2 offload   ...``"""
    spans: list[Span | str] = [" "]
    for lamp in found:
        name = _(CHECKPOINT_NAMES[lamp.checkpoint - 1])
        role = LEVEL_ROLES[lamp.level]
        spans += [(f"{lamp_sign(lamp.level, g)} {lamp.checkpoint} {name}", role), "   "]
    return line(*spans, ("k", "key"), (" " + _("why"), "dim"))


def alert_rows(found: Sequence[Alert], cells: int, g: Glyphs, limit: int = ALERT_ROWS) -> list[Line]:
    """One row an alert; what does not fit in ``limit`` rows is counted in the last."""
    rows = []
    for n, alert in enumerate(found[:limit]):
        left = len(found) - limit if n == limit - 1 else 0
        tail = "  " + ngettext("and {n} more: k", "and {n} more: k", left).format(n=left) if left > 0 else ""
        code = f"  {alert.cause}" if alert.cause else ""
        mark, role = (g.problem, "bad") if alert.level == "bad" else ("W", "warn")
        room = cells - 5 - width(tail) - width(code)
        rows.append(line((f" {mark} {clip(alert.text, room, g.cut)}{code}", role), (tail, "dim")))
    return rows


def health_page(shot: Snapshot, cells: int, g: Glyphs, chosen: int | None = None) -> list[Line]:
    """Every alert and every lamp, with evidence and what to do. What stands out comes first: alerts if there are any,
    unless a lamp was asked for. ``chosen``: the lamp that is marked."""
    lamps: list[Line] = []
    for lamp in shot.lamps:
        role = LEVEL_ROLES[lamp.level]
        mark = g.cursor if lamp.checkpoint == chosen else " "
        head = f"{lamp_sign(lamp.level, g)} {lamp.checkpoint} {_(CHECKPOINTS[lamp.checkpoint - 1])}"
        lamps.append(line((mark, "key"), (head, role), ("  " + _(LEVEL_WORDS[lamp.level]), "dim")))
        lamps += wrapped(lamp.text, cells - 2, "", "     ", cut=g.cut)
        if lamp.advice:
            lamps += wrapped(f"{g.arrow} {lamp.advice}", cells - 2, "dim", "     ", cut=g.cut)
        lamps.append(BLANK)
    if shot.alerts and chosen is None:
        return [*_alerts(shot, cells, g), BLANK, _title(_("five checkpoints"), cells, g), *lamps]
    return [*lamps, *_alerts(shot, cells, g)]


def _title(text: str, cells: int, g: Glyphs) -> Line:
    return line((f" {text} ", "title"), (g.hline * max(0, cells - width(text) - 3), "dim"))


def _alerts(shot: Snapshot, cells: int, g: Glyphs) -> list[Line]:
    rows = [_title(_("alerts"), cells, g)]
    if not shot.alerts:
        nothing = _("none") if not shot.over else _("none when it ended")
        rows.append(line((" " + nothing, "dim")))
    for alert in shot.alerts:
        mark, role = (g.problem, "bad") if alert.level == "bad" else ("W", "warn")
        first, *rest = wrapped(alert.text, cells - 4, role, "", cut=g.cut)
        rows.append(line((f" {mark} ", role), *first))
        rows += [line("   ", *r) for r in rest]
        rows += wrapped(f"{g.arrow} {alert.advice}", cells - 2, "dim", "   ", cut=g.cut)
        about = []
        if alert.since is not None:
            about.append(
                _("since {time}").format(time=time.strftime("%H:%M:%S", time.localtime(alert.since)))
            )
        if alert.cause:
            about.append(_("dstui explain {code}").format(code=alert.cause))
        if about:
            rows.append(line(("   " + "  ".join(about), "dim")))
    return rows
