"""What one file does differently in two DeepSpeed releases: ``compare``.

Two sources. The rules, run for both releases: what is said of one only has begun or ended in between, and a
bisection finds the release. The changes (``rules/changes.py``): defaults and behaviour that no rule calls wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dstui.config import schema as schemas
from dstui.config.diff import equal
from dstui.config.document import Document
from dstui.config.pointer import lookup
from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.rules.diagnostic import Finding, Fix, Severity, Verdict
from dstui.rules.edits import key_of, parent_of
from dstui.rules.engine import Context, check_document, make_subject, not_a_config
from dstui.rules.registry import Rule, Shift, all_changes, version_key
from dstui.rules.subject import Subject

Kind = Literal[
    "refused", "default", "ignored", "changed", "opens", "closes", "allowed", "read", "new", "lost"
]
KINDS: tuple[Kind, ...] = (
    "refused", "default", "ignored", "changed", "opens", "closes", "allowed", "read", "lost", "new",
)  # fmt: skip
"""``refused``: stops at parse, start or step. ``default``: another value for a key that the file leaves out.
``ignored``/``read``: a key loses/gets its effect. ``opens``/``closes``: a wrong result of one release begins/ends.
``allowed``: no longer refused. ``new``/``lost``: possible from there on/no longer. In order of weight."""

_WITHOUT_SCHEMA = ("DS11", "DS12", "DS130", "DS131", "DS143", "DS146", "DS199")
"""Codes (prefixes) that need the schema: not compared when one of the two releases has none."""
_PINNED_BY_FIX = ("DS801", "DS804")
"""Rules whose safe fix keeps the meaning that the file had before: a removed key that was off, a new name."""


@dataclass(frozen=True)
class Difference:
    """One thing that this file does differently. Texts are translated."""

    kind: Kind
    code: str
    name: str
    since: str
    """First release (in time) with the newer behaviour."""
    pointer: str
    message: str
    effect: str = ""
    hint: str = ""
    before: Any = None
    """Of a default: its value in ``from``."""
    after: Any = None
    """Of a default: its value in ``to``."""
    pin: Fix | None = None
    """Edits that write the behaviour of ``from`` into the file."""
    source: str = ""
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True)
class Comparison:
    """``compare``'s answer for one file."""

    path: str
    old: str
    """The release it comes from (``--from``), which may be the newer one."""
    new: str
    verdicts: tuple[Verdict | None, Verdict | None]
    world_size: int
    world_size_from: str
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...] = ()
    """Which of the two releases have no schema: their keys, types and bounds are not compared."""

    @property
    def differ(self) -> bool:
        """Whether the file behaves differently; what is merely possible now does not count."""
        return any(d.kind not in ("new", "read") for d in self.differences)


def known_release(text: str) -> str:
    """``text`` as a release whose keys are known, a local part such as ``+cu128`` cut off. Raises DstuiError."""
    name = text.strip().split("+")[0]
    releases = schemas.all_releases()
    if name in releases:
        return name
    raise DstuiError(
        _("dstui knows no DeepSpeed {release}").format(release=text),
        _("it knows {first} to {last}").format(first=releases[0], last=releases[-1]),
    )


@dataclass
class _Sides:
    """The file in any release, each looked at once."""

    document: Document
    context: Context
    seen: dict[str, dict[tuple[str, str], Finding]] = field(default_factory=dict)
    verdict: dict[str, Verdict | None] = field(default_factory=dict)

    def at(self, release: str) -> Context:
        return replace(self.context, release=release, release_from="option")

    def findings(self, release: str) -> dict[tuple[str, str], Finding]:
        if release not in self.seen:
            report = check_document(self.document, self.at(release))
            self.seen[release] = {(f.code, f.pointer): f for f in report.findings}
            self.verdict[release] = report.verdict
        return self.seen[release]


def compare(document: Document, old: str, new: str, context: Context) -> Comparison:
    """What ``document`` does in ``new`` that it does not in ``old`` (either may be the later one).

    ``context`` says for whom, its release aside. Raises DstuiError for a release that dstui knows nothing of and for
    a file that is no DeepSpeed config.
    """
    old, new = known_release(old), known_release(new)
    sides = _Sides(document, context)
    subject = make_subject(document.data, sides.at(new))
    other = not_a_config(document.data, subject)
    if other is not None:
        raise DstuiError(f"{document.path}: {other.message}", other.hint)
    unknown = tuple(r for r in dict.fromkeys((old, new)) if not schemas.known(r))
    found = [*_by_rules(sides, old, new, bool(unknown)), *_by_changes(sides, old, new)]
    stops = [d.pointer for d in found if d.kind == "refused" and d.pointer]
    # a fault of something that is refused altogether now is not put right
    placed = [
        _placed(d, document)
        for d in found
        if d.kind not in ("allowed", "closes", "read")
        or not any(d.pointer == p or d.pointer.startswith(p + "/") for p in stops)
    ]
    return Comparison(
        path=document.path,
        old=old,
        new=new,
        verdicts=(sides.verdict[old], sides.verdict[new]),
        world_size=subject.world_size,
        world_size_from=subject.world_size_from,
        differences=tuple(
            sorted(placed, key=lambda d: (KINDS.index(d.kind), version_key(d.since), d.line or 0, d.code))
        ),
        unknown=unknown,
    )


def _between(old: str, new: str) -> list[str]:
    """Releases after the earlier of the two, up to the later one, oldest first."""
    low, high = sorted((old, new), key=version_key)
    return [r for r in schemas.all_releases() if version_key(low) < version_key(r) <= version_key(high)]


# -- what the rules say of one release only ------------------------------------------------------------------


def _compared(f: Finding, no_schema: bool) -> bool:
    if f.severity in (Severity.INFO, Severity.MEANING_CHANGED) or f.code in ("DS100", "DS105"):
        return False
    return not (no_schema and f.code.startswith(_WITHOUT_SCHEMA))


def _by_rules(sides: _Sides, old: str, new: str, no_schema: bool) -> Iterator[Difference]:
    left, right = sides.findings(old), sides.findings(new)
    for key, f in right.items():
        if key not in left and _compared(f, no_schema):
            yield _difference(sides, old, new, key, f, begins=True)
    for key, f in left.items():
        if key not in right and _compared(f, no_schema):
            yield _difference(sides, old, new, key, f, begins=False)


def _difference(
    sides: _Sides, old: str, new: str, key: tuple[str, str], f: Finding, *, begins: bool
) -> Difference:
    kind: Kind
    if f.severity is Severity.ERROR:
        kind = "refused" if begins else "allowed"
    elif f.severity is Severity.NO_EFFECT:
        kind = "ignored" if begins else "read"
    else:
        kind = "opens" if begins else "closes"
    pin = f.fix if begins and f.fix is not None and f.fix.safe and f.code in _PINNED_BY_FIX else None
    return Difference(
        kind=kind,
        code=f.code,
        name=f.name,
        since=_turn(sides, old, new, key),
        pointer=f.pointer,
        message=f.message,
        effect=f.effect,
        hint=f.hint if begins else "",
        pin=pin,
        source=f.source,
    )


def _turn(sides: _Sides, old: str, new: str, key: tuple[str, str]) -> str:
    """The first release, in time, in which ``key`` is as in the later of the two: found by bisection.

    Rules that need a schema can be asked only where there is one; the answer is then "at the latest".
    """
    steps = _between(old, new)
    if key[0].startswith(_WITHOUT_SCHEMA):
        steps = [r for r in steps if schemas.known(r)] or steps[-1:]
    later = steps[-1]
    wanted = key in sides.findings(later)
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if (key in sides.findings(steps[middle])) == wanted:
            high = middle
        else:
            low = middle + 1
    return steps[low]


# -- defaults and behaviour ----------------------------------------------------------------------------------


def _by_changes(sides: _Sides, old: str, new: str) -> Iterator[Difference]:
    forward = version_key(old) <= version_key(new)
    steps = set(_between(old, new))
    low, high = (old, new) if forward else (new, old)
    data = sides.document.data
    older, newer = make_subject(data, sides.at(low)), make_subject(data, sides.at(high))
    for rule in all_changes():
        if rule.since not in steps or rule.compare is None:
            continue
        for shift in rule.compare(older, newer):
            yield _shifted(rule, shift, sides.document, forward)
    yield from _other_defaults(sides, older, newer, forward)


def _shifted(rule: Rule, shift: Shift, document: Document, forward: bool) -> Difference:
    kind: Kind
    if rule.kind == "default":
        kind = "default"
    elif rule.kind == "new":
        kind = "new" if forward else "lost"
    elif rule.kind == "fixed":
        kind = "closes" if forward else "opens"
    else:
        kind = "changed"
    before, after = (shift.before, shift.after) if forward else (shift.after, shift.before)
    pin = shift.fix if forward else None
    if (
        pin is None
        and shift.pinnable
        and shift.pointer
        and before != after
        and (forward or before is not None)
    ):
        pin = written(document, shift.pointer, before)
    return Difference(
        kind=kind,
        code=rule.code,
        name=rule.name,
        since=rule.since or "",
        pointer=shift.pointer,
        message=shift.message,
        effect=shift.effect,
        hint=shift.hint,
        before=before,
        after=after,
        pin=pin,
        source=rule.page.source,
    )


def written(document: Document, pointer: str, value: Any) -> Fix:
    """Edits that put ``value`` at ``pointer``; objects on the way are made when the file has none."""
    edits: list[Mapping[str, Any]] = []
    missing: list[str] = []
    here = parent_of(pointer)
    while here and lookup(dict(document.data), here, _ABSENT) is _ABSENT:
        missing.append(here)
        here = parent_of(here)
    edits += [{"op": "add", "path": p, "value": {}} for p in reversed(missing)]
    there = lookup(dict(document.data), pointer, _ABSENT) is not _ABSENT
    edits.append({"op": "replace" if there else "add", "path": pointer, "value": value})
    title = _("set {key} to {value}").format(key=key_of(pointer), value=_json(value))
    return Fix(title, True, tuple(edits))


_ABSENT = object()


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def _other_defaults(sides: _Sides, older: Subject, newer: Subject, forward: bool) -> Iterator[Difference]:
    """Defaults that differ between the two releases and that no change names: a release newer than this text.

    Only keys of the top level and of sections that the file has, and only where the file leaves the key out.
    """
    was = schemas.defaults(older.release)
    data = dict(sides.document.data)
    for pointer, now in schemas.defaults(newer.release).items():
        parent = parent_of(pointer)
        if pointer not in was or equal(was[pointer], now) or pointer in _NAMED:
            continue
        if lookup(data, pointer, _ABSENT) is not _ABSENT or (
            parent and lookup(data, parent, _ABSENT) is _ABSENT
        ):
            continue
        before, after = (was[pointer], now) if forward else (now, was[pointer])
        since = next(first for first, _last, value in schemas.history(pointer) if equal(value, now))
        yield Difference(
            kind="default",
            code="DS875",
            name="default-changed",
            since=since,
            pointer=pointer,
            message=_("{key} is {after} by default from {release}, before it was {before}").format(
                key=".".join(pointer.split("/")[1:]),
                after=_json(now),
                before=_json(was[pointer]),
                release=since,
            ),
            hint=_("write {key} yourself").format(key=key_of(pointer)),
            before=before,
            after=after,
            pin=written(sides.document, pointer, before),
            source="schemas/timeline.json",
        )


_NAMED = frozenset(
    {
        "/steps_per_print", "/gradient_clipping", "/bf16/immediate_grad_update", "/bf16/check_grad_overflow",
        "/zero_optimization/offload_optimizer/pin_memory", "/zero_optimization/offload_param/pin_memory",
        "/scheduler/params/warmup_max_lr",
    }
)  # fmt: skip
"""Named by a change of their own, which knows when the file really relies on them."""


# -- pin -----------------------------------------------------------------------------------------------------


def pinned(document: Document, comparison: Comparison) -> tuple[Document, tuple[Difference, ...]]:
    """``document`` with the behaviour of ``comparison.old`` written out, and what was written. Comments stay."""
    done = []
    for d in comparison.differences:
        if d.pin is None:
            continue
        edits = d.pin.edits
        if d.kind in ("default", "changed") and edits[-1]["op"] != "remove":
            # an earlier pin may have made the section already
            edits = written(document, str(edits[-1]["path"]), edits[-1]["value"]).edits
        try:
            document = document.edited(edits)
        except DstuiError:
            continue
        done.append(d)
    return document, tuple(done)


def _placed(d: Difference, document: Document) -> Difference:
    pointer = d.pointer
    place = document.place(pointer) if pointer else None
    while place is None and pointer:
        pointer = parent_of(pointer)
        place = document.place(pointer) if pointer else None
    return replace(d, line=place[0], column=place[1]) if place else d
