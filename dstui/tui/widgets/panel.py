"""The side panel's three pages as lines: fit, findings, the file. Pure functions of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dstui.estimate.result import PHASES, Estimate, Range
from dstui.i18n import N_, _, ngettext
from dstui.session.model import Report
from dstui.tui.terminal import Glyphs
from dstui.tui.text import SEVERITY_ROLE, Line, clip, line, pad, width, wrapped
from dstui.units import GiB, MiB, gib

VERDICTS: dict[str, tuple[str, str]] = {
    "fits": (N_("fits"), "good"),
    "tight": (N_("tight"), "warn"),
    "no": (N_("does not fit"), "bad"),
    "unknown": (N_("unknown"), "dim"),
}
"""Verdict of an estimate -> (word, role)."""
PARTS: dict[str, str] = {
    "params": N_("parameters"),
    "grads": N_("gradients"),
    "optimizer": N_("optimizer"),
    "buffers": N_("buffers"),
    "activations": N_("activations"),
    "logits": N_("logits"),
    "pinned": N_("pinned"),
    "pageable": N_("pageable"),
    "checkpoint": N_("checkpoint"),
    "process": N_("processes"),
}
PHASE_NAMES: dict[str, str] = {
    "load": N_("load"),
    "init": N_("init"),
    "forward": N_("forward"),
    "backward": N_("backward"),
    "step": N_("step"),
    "save": N_("save"),
}


def bar(low: float, expected: float, high: float, capacity: float, cells: int, g: Glyphs) -> str:
    """``expected`` of ``capacity`` in ``cells`` cells, the span up to ``high`` in a lighter glyph."""
    if capacity <= 0 or cells <= 0:
        return ""
    full = min(cells, round(cells * expected / capacity))
    part = min(cells, max(full, round(cells * high / capacity)))
    return g.full * full + g.part * (part - full) + g.empty * (cells - part)


def verdict_word(estimate: Estimate | None) -> tuple[str, str]:
    """(word, role) of an estimate's verdict."""
    word, role = VERDICTS[estimate.verdict if estimate else "unknown"]
    return _(word), role


def _gpu_range(e: Estimate) -> Range | None:
    return e.gpu.device or e.gpu.reserved or e.gpu.allocated


def status_line(report: Report | None, cells: int, g: Glyphs) -> Line:
    """One row that says it all: verdict, GPU, host, batch, findings."""
    if report is None:
        return line((" " + _("computing ..."), "dim"))
    spans: list[tuple[str, str]] = [(" ", "")]
    e = report.estimate
    if e is None or e.verdict == "unknown":
        why = (e.reason if e else None) or (report.blockers[0] if report.blockers else "")
        word = _("fit unknown") + (": " + why if why else "")
        spans.append((word, "dim"))
    else:
        word, role = verdict_word(e)
        spans.append((word, role))
        r = _gpu_range(e)
        if r is not None:
            spans.append((f"  {_('GPU')} {_of(r, e.gpu.capacity)}", ""))
        if e.host.peak is not None:
            spans.append((f"  {_('host')} {_of(e.host.peak, e.host.capacity)}", ""))
    tail = severity_counts(report)
    text = sum(width(t) for t, _r in spans)
    room = cells - text - sum(width(t) for t, _r in tail) - 3
    if room < 0 and text > 20:
        t, role = spans[-1]
        spans[-1] = (clip(t, max(8, width(t) + room), g.cut), role)
        room = 0
    return line(*spans, "  ", *tail)


def _of(r: Range, capacity: int | None) -> str:
    if capacity is None:
        return gib(r.expected)
    return _("{used} of {all}").format(used=gib(r.expected), all=gib(capacity))


def own_blockers(report: Report) -> list[str]:
    """The blockers that are no finding of the check; those are among the findings."""
    known = {f"{f.code} {f.message}" for f in report.findings}
    return [text for text in report.blockers if text not in known]


def count(report: Report) -> int:
    """How many things the page of findings lists."""
    return len(report.findings) + len(own_blockers(report)) + len(report.warnings)


def severity_counts(report: Report) -> list[tuple[str, str]]:
    """``1 E  2 W  1 I`` as spans, worst first, ``count`` in all; ``no findings`` without any."""
    letters = ["!"] * len(own_blockers(report)) + ["W"] * len(report.warnings)
    letters += [f.severity.letter for f in report.findings]
    if not letters:
        return [(_("no findings"), "good")]
    spans: list[tuple[str, str]] = []
    for letter in "!ESNMWI":
        n = letters.count(letter)
        if n:
            spans.append((f"{n} {letter}", SEVERITY_ROLE.get(letter, "bad")))
            spans.append((" ", ""))
    return spans[:-1]


def fit_lines(report: Report | None, cells: int, g: Glyphs) -> list[Line]:
    """Fit per GPU and host, in bars and numbers."""
    if report is None:
        return [line((_("computing ..."), "dim"))]
    e = report.estimate
    if e is None:
        rows = [line((_("unknown"), "dim"))]
        for text in report.blockers:
            rows += wrapped(text, cells, "dim", cut=g.cut)
        return rows
    word, role = verdict_word(e)
    rows = [
        line(
            (word, role),
            ("  " + ngettext("{n} rank", "{n} ranks", report.world_size).format(n=report.world_size), "dim"),
        )
    ]
    if e.reason:
        rows += wrapped(e.reason, cells, cut=g.cut)
    rows.append(())
    r = _gpu_range(e)
    if r is not None:
        rows += _memory(_("GPU"), r, e.gpu.capacity, cells, g, e.binds is not None and e.binds.where == "gpu")
        for name, value in ((_("reserved"), e.gpu.reserved), (_("allocated"), e.gpu.allocated)):
            if value is not None and value is not r:
                rows.append(_amount(name, _span(value), cells, g))
        rows += _peak(e, cells, g)
        rows.append(())
    if e.host.peak is not None:
        rows += _memory(
            _("Host"), e.host.peak, e.host.capacity, cells, g, e.binds is not None and e.binds.where == "host"
        )
        for name, part in ((_("pinned"), e.host.pinned), (_("pageable"), e.host.pageable)):
            if part is not None:
                rows.append(_amount(name, gib(part), cells, g))
        rows.append(())
    if e.nvme is not None:
        rows.append(_amount(_("NVMe needed"), gib(e.nvme.needed), cells, g))
        if e.nvme.capacity is not None:
            rows.append(_amount(_("NVMe free"), gib(e.nvme.capacity), cells, g))
        rows.append(())
    if e.changes:
        rows.append(line((_("What would help"), "title")))
        for change in e.changes[:4]:
            saved = f" (-{gib(change.saves)})" if change.saves else ""
            rows += wrapped(change.title + saved, cells, "", "  ", limit=2, cut=g.cut)
            if change.costs:
                rows += wrapped(change.costs, cells, "dim", "  ", limit=1, cut=g.cut)
        rows.append(())
    for text in e.assumptions:
        rows += wrapped(f"{g.dot} {text}", cells, "dim", cut=g.cut)
    return rows


def _memory(name: str, r: Range, capacity: int | None, cells: int, g: Glyphs, binds: bool) -> list[Line]:
    head = line(
        (pad(name, 6), "strong"),
        _of(r, capacity),
        (("  " + _("decides")) if binds else "", "accent"),
    )
    if not capacity:
        return [head]
    over = r.high > capacity
    role = "bad" if r.expected > capacity else "warn" if over else "good"
    drawn = bar(r.low, r.expected, r.high, capacity, max(8, cells - 7), g)
    return [head, line((drawn, role), (f" {100 * r.expected / capacity:4.0f} %", ""))]


def _span(r: Range) -> str:
    """``28.3 GiB  25.5-32.6``: expected, and the range in the same unit."""
    unit = gib(r.expected).partition(" ")[2]
    size = GiB if unit == "GiB" else MiB
    digits = 1 if unit == "GiB" else 0
    return f"{gib(r.expected)}  {r.low / size:.{digits}f}-{r.high / size:.{digits}f}"


def _amount(name: str, value: str, cells: int, g: Glyphs) -> Line:
    return line(("  " + pad(name, 14, g.cut), "dim"), clip(value, cells - 16, g.cut))


def _peak(e: Estimate, cells: int, g: Glyphs) -> list[Line]:
    """What fills the GPU in the phase with the highest total."""
    phases = [p for p in e.gpu.phases if p.phase in PHASES]
    if not phases:
        return []
    top = max(phases, key=lambda p: p.total)
    rows = [_amount(_("peak in"), _(PHASE_NAMES[top.phase]), cells, g)]
    for part, size in sorted(top.parts.items(), key=lambda kv: -kv[1]):
        if size > 0:
            rows.append(_amount("  " + _(PARTS.get(part, part)), gib(size), cells, g))
    return rows


def finding_lines(report: Report | None, cells: int, g: Glyphs, limit: int | None = None) -> list[Line]:
    """Every finding: letter, code, place, message, effect and hint; blockers first."""
    if report is None:
        return [line((_("computing ..."), "dim"))]
    rows: list[Line] = []
    for text in own_blockers(report):
        rows += [
            line(("! ", "bad"), *first) if n == 0 else line("  ", *first)
            for n, first in enumerate(wrapped(text, cells - 2, cut=g.cut))
        ]
    for text in report.warnings:
        rows += [
            line(("W ", "warn"), *r) if n == 0 else line("  ", *r)
            for n, r in enumerate(wrapped(text, cells - 2, cut=g.cut))
        ]
    for f in sorted(report.findings, key=lambda f: f.severity.rank)[:limit]:
        letter = f.severity.letter
        rows.append(
            line(
                (letter + " ", SEVERITY_ROLE[letter]),
                (f.code, "strong"),
                (clip(f"  {f.path}", max(0, cells - 3 - width(f.code)), g.cut), "accent"),
            )
        )
        rows += wrapped(f.message, cells, "", "  ", cut=g.cut)
        if f.effect and limit is None:
            rows += wrapped(f.effect, cells, "dim", "  ", cut=g.cut)
        if f.hint:
            rows += wrapped(f"{g.arrow} {f.hint}", cells, "dim", "  ", cut=g.cut)
    left = len(report.findings) - (limit if limit is not None else len(report.findings))
    if left > 0:
        rows.append(line(("  " + ngettext("{n} more", "{n} more", left).format(n=left), "dim")))
    return rows or [line((_("no findings"), "good"))]


_JSON_LINE = re.compile(r'^(\s*)("(?:[^"\\]|\\.)*")(\s*:)(.*)$')


def json_lines(text: str, cells: int, g: Glyphs) -> list[Line]:
    """A config file with its keys marked; lines are cut, never wrapped, so its layout shows."""
    rows: list[Line] = []
    for raw in text.splitlines():
        shown = raw.expandtabs(4)
        m = _JSON_LINE.match(shown)
        if m and width(shown) <= cells:
            rows.append(line(m.group(1), (m.group(2), "accent"), m.group(3), m.group(4)))
        else:
            rows.append(line(clip(shown, cells, g.cut)))
    return rows


def diff_lines(text: str, cells: int, g: Glyphs) -> list[Line]:
    """A unified difference: the sign says it, the colour repeats it."""
    roles: Mapping[str, str] = {"+": "good", "-": "bad", "@": "accent"}
    return [line((clip(raw, cells, g.cut), roles.get(raw[:1], ""))) for raw in text.splitlines()]
