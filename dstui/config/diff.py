"""What differs between two configs in meaning: in the files, and in what a release makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstui.config import schema as schemas
from dstui.config.pointer import dotted, join_pointer, lookup
from dstui.config.resolve import Resolved, resolve

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One key whose effective value differs. ``a``/``b`` are None when the release has no value there."""

    pointer: str
    a: Any
    b: Any
    a_given: bool
    """Written in that file (under any of its names); else it is the release's default or derived."""
    b_given: bool

    @property
    def path(self) -> str:
        return dotted(self.pointer)


@dataclass(frozen=True)
class Difference:
    """``compare``'s answer for two files under one release."""

    edits: tuple[Mapping[str, Any], ...]
    """RFC 6902: what turns the data of A into the data of B."""
    effective: tuple[Change, ...] | None
    """None when the release has no schema."""
    same_meaning: tuple[str, ...]
    """Pointers that differ between the files but not in what the release makes of them."""
    unread: tuple[str, ...]
    """Pointers that differ and that the release does not read."""
    a: Resolved
    b: Resolved

    @property
    def differ(self) -> bool:
        """Whether the two mean different things; another spelling of the same does not count."""
        if self.effective is None:
            return bool(self.edits)
        return bool(self.effective or self.unread or self.a.verdict != self.b.verdict)


def edits_between(a: Any, b: Any, base: str = "") -> Iterator[dict[str, Any]]:
    """RFC 6902 edits that turn ``a`` into ``b``; objects are compared key by key, arrays as a whole."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:
            if key not in b:
                yield {"op": "remove", "path": base + join_pointer(key)}
        for key, value in b.items():
            pointer = base + join_pointer(key)
            if key not in a:
                yield {"op": "add", "path": pointer, "value": value}
            else:
                yield from edits_between(a[key], value, pointer)
    elif not equal(a, b):
        yield {"op": "replace", "path": base, "value": b}


def equal(a: Any, b: Any) -> bool:
    """Equal as config values: 5e8 is 500000000, but true is not 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def leaves(value: Any, base: str = "") -> Iterator[tuple[str, Any]]:
    """(pointer, value) of every value that is not a filled object."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, base + join_pointer(key))
    else:
        yield base, value


def infer_world_size(data: Mapping[str, Any]) -> int | None:
    """The number of ranks that makes all three batch sizes agree; None when they do not say."""
    try:
        train, micro, steps = (
            data["train_batch_size"],
            data["train_micro_batch_size_per_gpu"],
            data["gradient_accumulation_steps"],
        )
        ranks = train / (micro * steps)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError):
        return None
    return int(ranks) if ranks >= 1 and ranks == int(ranks) else None


def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    release: str,
    world_size: int | None = None,
    engine: str = "deepspeed",
) -> Difference:
    """Compare two configs as ``release`` reads them on ``world_size`` ranks (None: inferred, else 1)."""
    left = resolve(a, release=release, world_size=world_size or infer_world_size(a) or 1, engine=engine)
    right = resolve(b, release=release, world_size=world_size or infer_world_size(b) or 1, engine=engine)
    edits = tuple(edits_between(dict(a), dict(b)))
    if left.effective is None or right.effective is None:
        return Difference(edits, None, (), (), left, right)
    schema = schemas.load(release)
    x, y = dict(leaves(left.effective)), dict(leaves(right.effective))
    changes = []
    for pointer in dict.fromkeys([*x, *y]):
        va, vb = x.get(pointer, _ABSENT), y.get(pointer, _ABSENT)
        if va is _ABSENT or vb is _ABSENT:
            # a block on one side, null or nothing on the other: compare what both say there
            va = lookup(left.effective, pointer, None) if va is _ABSENT else va
            vb = lookup(right.effective, pointer, None) if vb is _ABSENT else vb
            if isinstance(va, Mapping) or isinstance(vb, Mapping) or (va is None and vb is None):
                continue
        if not equal(va, vb):
            changes.append(Change(pointer, va, vb, _given(schema, a, pointer), _given(schema, b, pointer)))
    changed = {c.pointer for c in changes}
    same: list[str] = []
    unread: list[str] = []
    for edit in edits:
        whole = edit.get("value") if edit["op"] != "remove" else lookup(dict(a), edit["path"])
        for pointer, _value in leaves(whole, edit["path"]):
            key = schema.key(pointer)
            canonical = key.pointer if key else pointer
            if canonical.startswith("/bfloat16"):
                canonical = canonical.replace("/bfloat16", "/bf16", 1)
            if canonical in changed or any(c.startswith(canonical + "/") for c in changed):
                continue
            known = schema.key(canonical) is not None or (
                lookup(left.effective, canonical, _ABSENT) is not _ABSENT
                or lookup(right.effective, canonical, _ABSENT) is not _ABSENT
            )
            (same if known else unread).append(pointer)
    return Difference(
        edits, tuple(changes), tuple(dict.fromkeys(same)), tuple(dict.fromkeys(unread)), left, right
    )


def _given(schema: schemas.Schema, data: Mapping[str, Any], pointer: str) -> bool:
    if lookup(dict(data), pointer, _ABSENT) is not _ABSENT:
        return True
    key = schema.key(pointer)
    parent = pointer.rpartition("/")[0]
    names = [parent + join_pointer(n) for n in (key.aliases if key else ())]
    return any(lookup(dict(data), n, _ABSENT) is not _ABSENT for n in names)
