"""``check``'s answer as text, JSON, GitHub annotations or SARIF."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dstui.i18n import _, clauses, ngettext, phrases
from dstui.rules.diagnostic import FileReport, Finding, Severity

SCHEMA_VERSION = 1
_COLOURS = {
    Severity.ERROR: "1;31",
    Severity.SILENT_WRONG: "1;35",
    Severity.NO_EFFECT: "33",
    Severity.MEANING_CHANGED: "36",
    Severity.WARNING: "33",
    Severity.INFO: "2",
}


def finding_json(f: Finding) -> dict[str, Any]:
    return {
        "code": f.code,
        "name": f.name,
        "severity": f.severity.value,
        "when": f.when,
        "path": f.path,
        "pointer": f.pointer,
        "line": f.line,
        "column": f.column,
        "message": f.message,
        "effect": f.effect,
        "hint": f.hint,
        "fix": None
        if f.fix is None
        else {"title": f.fix.title, "safe": f.fix.safe, "edits": [dict(e) for e in f.fix.edits]},
        "source": f.source,
        "since": f.since,
        "until": f.until,
    }


def report_json(r: FileReport) -> dict[str, Any]:
    out: dict[str, Any] = {
        "path": r.path,
        "engine": r.engine,
        "deepspeed": r.deepspeed,
        "deepspeed_from": r.deepspeed_from,
        "world_size": r.world_size,
        "world_size_from": r.world_size_from,
        "verdict": r.verdict,
        "batch": dict(r.batch) if r.batch is not None else None,
        "findings": [finding_json(f) for f in r.findings],
        "skipped": [{"code": s.code, "needs": s.needs} for s in r.skipped],
    }
    if r.live is not None:
        out["live"] = dict(r.live)
    return out


def to_json(reports: Iterable[FileReport]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "files": [report_json(r) for r in reports]}


def where(path: str, f: Finding) -> str:
    """``path:line:column``, as far as the place is known."""
    if f.line is None:
        return path
    return f"{path}:{f.line}:{f.column}" if f.column is not None else f"{path}:{f.line}"


def _paint(text: str, severity: Severity, colour: bool) -> str:
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if colour else text


def _said(text: str) -> str:
    """Text from the file must not move the cursor or colour the terminal."""
    return "".join(c if c == "\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def concise(reports: Iterable[FileReport]) -> list[str]:
    """One line a finding: ``path:line:column: CODE severity message``."""
    return [
        f"{where(_said(r.path), f)}: {f.code} {f.severity.value} {_about(f)}"
        for r in reports
        for f in r.findings
    ]


def _about(f: Finding) -> str:
    return _said(f"{f.path}: {f.message}" if f.pointer else f.message)


def full(reports: Sequence[FileReport], colour: bool = False) -> list[str]:
    """Everything for people: findings with their effect and next step, then one line a file."""
    lines: list[str] = []
    for r in reports:
        for f in r.findings:
            severity = _paint(f.severity.value, f.severity, colour)
            lines.append(f"{where(_said(r.path), f)}: {f.code} {severity} {f.name}")
            lines.append("    " + _about(f))
            if f.effect:
                lines.append("    " + _("effect: {text}").format(text=_said(f.effect)))
            if f.hint:
                lines.append("    " + _("next: {text}").format(text=_said(f.hint)))
            if f.fix is not None and f.fix.safe:
                lines.append("    " + _("fix: {title} (dstui check --fix)").format(title=_said(f.fix.title)))
        lines.append(summary(r))
        if r.live is not None:
            lines.append(_live(r))
    return lines


def _verdict(r: FileReport) -> str:
    return {
        "accepted": _("accepted by DeepSpeed {release}"),
        "rejected": _("refused by DeepSpeed {release}"),
        "unknown": _("DeepSpeed {release} is unknown here"),
        None: _("not readable"),
    }[r.verdict].format(release=r.deepspeed)


def summary(r: FileReport) -> str:
    """``ds.json: accepted by DeepSpeed 0.19.8 (newest known) on 8 ranks, batch 64 = 2 x 4 x 8; 1 error, 2 info``."""
    origin = {
        "option": "",
        "interpreter": " " + _("(installed)"),
        "newest": " " + _("(newest known)"),
    }.get(r.deepspeed_from, "")
    ranks = ngettext("{n} rank", "{n} ranks", r.world_size).format(n=r.world_size)
    parts = [_verdict(r) + (origin if r.verdict is not None else "")]
    if r.verdict == "unknown" and any(f.code == "DS147" for f in r.findings):
        parts = [
            _("what DeepSpeed {release} gets depends on the training arguments").format(release=r.deepspeed)
        ]
    if r.verdict is not None:
        parts.append(_("on {ranks}").format(ranks=ranks))
    if r.batch:
        train, micro, gas = r.batch.values()
        parts.append(
            _("batch {train} = {micro} x {gas} x {ranks}").format(
                train=train,
                micro=micro,
                gas=gas,
                ranks=round(train / (micro * gas)) if micro and gas else "?",
            )
        )
    counts = [(s, sum(f.severity is s for f in r.findings)) for s in Severity]
    told = phrases(f"{n} {s.value}" for s, n in counts if n) or _("nothing to say")
    return f"{_said(r.path)}: {', '.join(parts)}; {told}"


def _live(r: FileReport) -> str:
    assert r.live is not None
    if r.live.get("verdict") == "accepted":
        text = _("the installed DeepSpeed {release} accepts it").format(release=r.live["deepspeed"])
    else:
        text = _("the installed DeepSpeed {release} refuses it: {problem}").format(
            release=r.live["deepspeed"], problem=_said(" ".join(str(r.live["problem"]).split()))
        )
    return f"{_said(r.path)}: {text}"


def github(reports: Iterable[FileReport]) -> list[str]:
    """Workflow commands that GitHub shows as annotations."""
    kinds = {Severity.ERROR: "error", Severity.SILENT_WRONG: "error", Severity.INFO: "notice"}
    out = []
    for r in reports:
        for f in r.findings:
            place = f",line={f.line},col={f.column or 1}" if f.line is not None else ""
            text = clauses(t for t in (_about(f), f.effect, f.hint) if t)
            out.append(
                f"::{kinds.get(f.severity, 'warning')} file={_property(r.path)}{place},title={f.code} {f.name}::{_data(text)}"
            )
    return out


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(reports: Iterable[FileReport], version: str) -> dict[str, Any]:
    """SARIF 2.1.0 with the rules that spoke."""
    from dstui.rules.registry import find

    levels = {
        Severity.ERROR: "error", Severity.SILENT_WRONG: "error", Severity.NO_EFFECT: "warning",
        Severity.MEANING_CHANGED: "warning", Severity.WARNING: "warning", Severity.INFO: "note",
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    codes: dict[str, dict[str, Any]] = {}
    for r in reports:
        for f in r.findings:
            rule = find(f.code)
            if rule is not None and f.code not in codes:
                codes[f.code] = {
                    "id": f.code,
                    "name": f.name,
                    "shortDescription": {"text": _(rule.page.what)},
                    "fullDescription": {"text": _(rule.page.why)},
                    "defaultConfiguration": {"level": levels[f.severity]},
                }
            region = (
                {"region": {"startLine": f.line, "startColumn": f.column or 1}} if f.line is not None else {}
            )
            results.append(
                {
                    "ruleId": f.code,
                    "level": levels[f.severity],
                    "message": {"text": "; ".join(t for t in (_about(f), f.effect, f.hint) if t)},
                    "locations": [
                        {"physicalLocation": {"artifactLocation": {"uri": _uri(r.path)}, **region}}
                    ],
                }
            )
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "dstui",
                        "version": version,
                        "rules": [codes[c] for c in sorted(codes)],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    return "stdin" if path == "-" else quote(path)
