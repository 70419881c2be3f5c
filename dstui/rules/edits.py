"""Fixes as RFC 6902 operations on the file."""

from __future__ import annotations

from typing import Any

from dstui.config.pointer import join_pointer, split_pointer
from dstui.i18n import _
from dstui.rules.diagnostic import Fix


def key_of(pointer: str) -> str:
    """Last key of a pointer, as people read it."""
    parts = split_pointer(pointer)
    return parts[-1] if parts else ""


def parent_of(pointer: str) -> str:
    """The pointer of the object that holds ``pointer``."""
    return pointer.rpartition("/")[0]


def sibling(pointer: str, key: str) -> str:
    """The pointer of ``key`` beside ``pointer``."""
    return parent_of(pointer) + join_pointer(key)


def put(pointer: str, value: Any, *, there: bool, safe: bool, title: str | None = None) -> Fix:
    """Set a key: ``there`` tells whether the file has it now."""
    return Fix(
        title or _("set {key} to {value}").format(key=key_of(pointer), value=_json(value)),
        safe,
        ({"op": "replace" if there else "add", "path": pointer, "value": value},),
    )


def drop(pointer: str, *, safe: bool, title: str | None = None) -> Fix:
    """Remove a key."""
    return Fix(
        title or _("remove {key}").format(key=key_of(pointer)), safe, ({"op": "remove", "path": pointer},)
    )


def rename(pointer: str, key: str, value: Any, *, safe: bool) -> Fix:
    """Give a key another name beside its old place."""
    return Fix(
        _("rename {old} to {new}").format(old=key_of(pointer), new=key),
        safe,
        (
            {"op": "add", "path": sibling(pointer, key), "value": value},
            {"op": "remove", "path": pointer},
        ),
    )


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
