"""Runs the rules over one config and puts the report together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstui.config import resolve as resolving
from dstui.config import schema as schemas
from dstui.config.document import MAX_SIZE, ConfigUnreadable, Document, read_bytes
from dstui.i18n import _
from dstui.rules import kind as kinds
from dstui.rules.diagnostic import FileReport, Finding, Severity, Skipped, Verdict
from dstui.rules.registry import Hit, Lacks, Rule, all_rules, find, selected
from dstui.rules.subject import BATCH_KEYS, Model, Subject

if TYPE_CHECKING:
    from dstui.facts.model import Facts
    from dstui.rules.command import Launch

Engine = Literal["deepspeed", "hf", "accelerate", "lightning"]
ENGINES: tuple[Engine, ...] = ("deepspeed", "hf", "accelerate", "lightning")
JSON_ENGINES = ("hf", "accelerate", "lightning")
"""Engines that read the file with Python's json themselves and hand DeepSpeed a dictionary."""


@dataclass(frozen=True)
class Context:
    """For whom a config is judged."""

    release: str
    release_from: str = "option"
    """``option``, ``interpreter`` or ``newest``."""
    engine: Engine = "deepspeed"
    facts: Facts | None = None
    world_size: int | None = None
    """Ranks; None: from the facts, else inferred from the batch triple, else 1."""
    world_size_from: str = "option"
    args: Mapping[str, Any] | None = None
    """Training arguments that fill ``auto`` (engines hf and accelerate)."""
    model: Model | None = None
    local: bool = False
    """The config is for this machine: its paths can be looked at."""
    launch: Launch | None = None
    """The command line that starts the run (``dstui.rules.command``)."""


@dataclass(frozen=True)
class Options:
    """What ``check_path`` needs: the context, and which rules may speak."""

    context: Context
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    max_size: int = MAX_SIZE
    rules: tuple[Rule, ...] = field(default_factory=all_rules)


def infer_world_size(data: Any) -> int | None:
    """train / (micro x accumulation) when all three are positive whole numbers that divide, else None."""
    if not isinstance(data, Mapping):
        return None
    values = [data.get(k) for k in BATCH_KEYS]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        return None
    train, micro, steps = (int(v) for v in values if isinstance(v, int))
    ranks, rest = divmod(train, micro * steps)
    return ranks if ranks and not rest else None


def world_size_of(data: Any, context: Context) -> tuple[int, str]:
    """The number of ranks and where it comes from (``option``, ``facts``, ``batch``, ``default``)."""
    if context.world_size is not None:
        return context.world_size, context.world_size_from
    if context.facts is not None and context.facts.world_size is not None:
        return context.facts.world_size, "facts"
    inferred = infer_world_size(data)
    return (inferred, "batch") if inferred else (1, "default")


def folder_state(path: str) -> str | None:
    """``ok``, ``missing`` (its nearest parent can be written), ``unwritable``: what ``path`` is on this machine."""
    here = Path.cwd() / path
    if here.is_dir():
        return "ok" if os.access(here, os.W_OK | os.X_OK) else "unwritable"
    if here.exists():
        return "unwritable"
    parent = next((p for p in here.parents if p.exists()), None)
    return "missing" if parent and parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) else "unwritable"


def check_path(path: str, options: Options) -> FileReport:
    """Read one file (``-`` = standard input) and check it. Never raises for what is in the file.

    A file that cannot be read gives a report with verdict None and one finding that says why.
    """
    context = options.context
    strict = context.engine in JSON_ENGINES
    try:
        raw = read_bytes(path, options.max_size)
    except ConfigUnreadable as e:
        return _unreadable(path, context, e)
    try:
        document = Document.parse(raw, path, strict_json=strict)
    except ConfigUnreadable as e:
        return _unreadable(path, context, e, raw)
    return check_document(document, context, options.select, options.ignore, options.rules)


def make_subject(data: Mapping[str, Any], context: Context) -> Subject:
    """What the rules look at: ``data`` as ``context.engine`` hands it to ``context.release``."""
    world, world_from = world_size_of(data, context)
    return Subject(
        data,
        release=context.release,
        engine=context.engine,
        world_size=world,
        world_size_from=world_from,
        args=context.args,
        facts=context.facts,
        model=context.model,
        schema=schemas.load(context.release) if schemas.known(context.release) else None,
        resolved=resolving.resolve(
            data, release=context.release, world_size=world, engine=context.engine, args=context.args
        ),
        folder=folder_state if context.local else None,
        launch=context.launch,
    )


def not_a_config(data: Mapping[str, Any], subject: Subject) -> Hit | None:
    """What the file is when it is no DeepSpeed training config."""
    other = kinds.identify(kinds.top_level_keys(data))
    rejected = subject.resolved is not None and subject.resolved.verdict == "rejected"
    if other is None and rejected and subject.schema is not None:
        other = _stranger(data, subject.schema)
    return _other_kind(other) if other is not None else None


def check_document(
    document: Document,
    context: Context,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    rules: tuple[Rule, ...] | None = None,
) -> FileReport:
    """What ``context.release`` does with ``document``, and what the rules have to say. Never raises for its content."""
    data: Mapping[str, Any] = document.data
    subject = make_subject(data, context)
    resolved = subject.resolved
    assert resolved is not None
    select, ignore = tuple(select), tuple(ignore)
    rules = all_rules() if rules is None else rules
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    other = not_a_config(data, subject)
    if other is not None:
        findings.append(_finding(_known("DS105"), other, document))
    else:
        for rule in rules:
            if rule.holds(subject.key):
                _apply(rule, subject, document, findings, skipped)
        findings += _second_readings(document, context)
        if resolved.verdict == "rejected":
            findings += _unclaimed(resolved, document, findings)
    keep = [f for f in findings if selected(f.code, select, ignore)]
    return FileReport(
        path=document.path,
        engine=context.engine,
        deepspeed=context.release,
        deepspeed_from=context.release_from,
        world_size=subject.world_size,
        world_size_from=subject.world_size_from,
        verdict=resolved.verdict,
        batch=_whole(resolved.batch) if resolved.verdict == "accepted" else None,
        findings=tuple(sorted(keep, key=_order)),
        skipped=tuple(s for s in skipped if selected(s.code, select, ignore)),
    )


def _order(f: Finding) -> tuple[int, int, str, str]:
    return (f.severity.rank, f.line or 0, f.code, f.pointer)


def _known(code: str) -> Rule:
    rule = find(code)
    assert rule is not None, code
    return rule


def _lacks(need: str, subject: Subject) -> bool:
    facts = subject.facts
    return {
        "schema": subject.schema is None,
        "facts": facts is None,
        "facts.gpus": facts is None or facts.gpus is None,
        "facts.host": facts is None or facts.host.memory_capacity is None,
        "model": subject.model is None or subject.model.params is None,
        "world_size": not subject.world_known,
    }[need]


def _apply(
    rule: Rule, subject: Subject, document: Document, findings: list[Finding], skipped: list[Skipped]
) -> None:
    for need in rule.needs:
        if _lacks(need, subject):
            skipped.append(Skipped(rule.code, need))
            return
    try:
        for hit in rule.check(subject):
            if isinstance(hit, Lacks):
                skipped.append(Skipped(rule.code, hit.needs))
            else:
                findings.append(_finding(rule, hit, document))
    except Exception as e:  # a broken rule must not hide what the others found
        crashed = Hit(
            "",
            _("rule {code} ({name}) failed: {error}").format(
                code=rule.code, name=rule.name, error=f"{type(e).__name__}: {e}"[:200]
            ),
            effect=_("this file was not judged by that rule"),
            hint=_("please report it with the file"),
        )
        findings.append(_finding(_known("DS100"), crashed, document))


def _finding(rule: Rule, hit: Hit, document: Document | None) -> Finding:
    place = document.place(hit.pointer) if document is not None and hit.pointer else None
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=rule.severity,
        when=rule.when,
        pointer=hit.pointer,
        message=hit.message,
        effect=hit.effect,
        hint=hit.hint,
        fix=hit.fix,
        source=rule.page.source,
        since=rule.since,
        until=rule.until,
        line=place[0] if place else None,
        column=place[1] if place else None,
    )


def _whole(batch: Mapping[str, Any] | None) -> dict[str, int] | None:
    """The three sizes as integers; DeepSpeed itself may hold 16.0."""
    if batch is None:
        return None
    return {k: int(v) if float(v).is_integer() else v for k, v in batch.items()}


def _stranger(data: Mapping[str, Any], schema: schemas.Schema) -> tuple[str, str] | None:
    """A rejected file in which DeepSpeed knows no key at all."""
    known = {*schema.json_schema["properties"], "bfloat16"}
    if data and not known & set(data):
        from dstui.config.schema import key_texts
        from dstui.rules.nearest import nearest

        texts = key_texts()["keys"]
        if not any(str(k) in texts or nearest(str(k), known) for k in data):
            return "unknown", ""
    return None


def _other_kind(other: tuple[str, str]) -> Hit:
    kind, name = other
    hints = {
        "accelerate": _(
            "check the file it names under deepspeed_config_file, or its deepspeed_config section"
        ),
        "llamafactory": _("check the file it names under deepspeed"),
        "swift": _("check the file it names under deepspeed"),
        "axolotl": _("check the file it names under deepspeed"),
        "hf-args": _("check the file it names under deepspeed"),
        "inference": _("dstui checks training configs; this one goes to deepspeed.init_inference"),
    }
    return Hit(
        "",
        _("this is {name}, not a DeepSpeed config").format(name=_(name))
        if name
        else _("no key in this file is one of DeepSpeed's"),
        effect=_("DeepSpeed would not train with it"),
        hint=hints.get(kind, _("give the DeepSpeed config")),
    )


def _second_readings(document: Document, context: Context) -> list[Finding]:
    """Duplicate keys in a file that a JSON engine reads: legal there, the last one wins."""
    if context.engine not in JSON_ENGINES:
        return []
    try:
        Document.parse(document.text, document.path)
    except ConfigUnreadable as e:
        if e.kind != "duplicate":
            return []
        hit = Hit(
            e.pointer,
            _("the key {key!r} is there twice").format(key=e.pointer.rpartition("/")[2]),
            effect=_("the last one wins in silence; DeepSpeed itself would refuse the file"),
            hint=_("remove one of the two"),
        )
        return [replace(_finding(_known("DS103"), hit, None), line=e.line, column=e.column)]
    return []


_BATCH_POINTERS = frozenset("/" + k for k in BATCH_KEYS)
_NAMED_ELSEWHERE = {("/fp16/enabled", "combination"): "DS701"}
"""A conflict of two keys -> the rule that names it at the other one."""


def _unclaimed(resolved: resolving.Resolved, document: Document, findings: list[Finding]) -> list[Finding]:
    """Reasons for a refusal that no rule has named: the generic finding, so that none is lost."""
    errors = {f.pointer for f in findings if f.severity is Severity.ERROR and f.when == "parse"}
    batch = bool(
        errors & {*_BATCH_POINTERS, ""} & {f.pointer for f in findings if f.code[:3] in ("DS4", "DS1")}
    )
    out: list[Finding] = []
    codes = {f.code for f in findings}
    for p in resolved.problems:
        if _NAMED_ELSEWHERE.get((p.pointer, p.kind)) in codes:
            continue
        if p.pointer in errors or (batch and (p.kind.startswith("batch") or p.pointer in _BATCH_POINTERS)):
            continue
        if any(e and p.pointer.startswith(e + "/") for e in errors):
            continue
        hit = Hit(
            p.pointer,
            p.message,
            effect=_("the config is refused"),
            hint=_("see dstui explain {key}").format(key=".".join(p.pointer.split("/")[1:]) or "DS199"),
        )
        out.append(_finding(_known("DS199"), hit, document))
        errors.add(p.pointer)
    return out


def _unreadable(path: str, context: Context, e: ConfigUnreadable, raw: bytes = b"") -> FileReport:
    code, verdict = "DS101", None
    hint = e.hint or ""
    message = e.reason
    if e.kind == "duplicate":
        code, verdict = "DS102", "rejected"
        hint = hint or _("remove one of the two")
    elif e.kind == "not-an-object":
        code, verdict = "DS104", "rejected"
    elif e.kind == "syntax":
        other = kinds.identify_text(raw.decode("utf-8", "replace"))
        if other is not None:
            found = _other_kind(other)
            code, message, hint = "DS105", found.message, found.hint
        elif context.engine in JSON_ENGINES and _hjson_reads(raw, path):
            hint = _(
                "DeepSpeed itself reads this (comments and trailing commas are legal to it), but {engine} wants strict JSON"
            ).format(engine=context.engine)
    hint = hint or (
        _("put the keys between { and }")
        if e.kind == "not-an-object"
        else _("correct the place and check again")
    )
    world, world_from = world_size_of(None, context)
    hit = Hit(e.pointer, message, effect=_("the run stops before it looks at a single key"), hint=hint)
    finding = replace(_finding(_known(code), hit, None), line=e.line, column=e.column)
    judged: Verdict | None = "rejected" if verdict else None
    return FileReport(
        path,
        context.engine,
        context.release,
        context.release_from,
        world,
        world_from,
        judged,
        None,
        (finding,),
    )


def _hjson_reads(raw: bytes, path: str) -> bool:
    try:
        Document.parse(raw, path)
    except ConfigUnreadable:
        return False
    return True
