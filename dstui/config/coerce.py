"""How pydantic takes a value that is not of the type asked for (2: lax mode, 1: its validators), and types in words.

Version 2 was measured on 2.14: ``"1"``, ``1.0`` and ``true`` are integers, ``1.5`` and ``"1e3"`` are not; ``"yes"`` is
a boolean. Version 1 is what DeepSpeed used to 0.14.5.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from dstui.i18n import _


def shown(value: Any, width: int = 50) -> str:
    """A value as JSON for a message, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


# -- pydantic 2's lax mode ----------------------------------------------------------------------

_INT_TEXT = re.compile(r"\s*[+-]?[0-9]+(?:_[0-9]+)*(?:\.0*(?<=0))?\s*\Z")
_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}


def _lax_int(value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, str) and len(value) <= 4300 and _INT_TEXT.match(value):
        return int(value.strip().partition(".")[0])
    raise ValueError


def _lax_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError


def _lax_float(value: Any) -> float:
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str):
        return float(value)
    raise ValueError


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        raise ValueError

    return check


def _never(_value: Any) -> Any:
    raise ValueError


LAX: dict[str, Callable[[Any], Any]] = {
    "int": _lax_int,
    "bool": _lax_bool,
    "float": _lax_float,
    "str": _exactly(str),
    "path": lambda value: str(PurePosixPath(_exactly(str)(value))),
    "list": _exactly(list),
    "tuple": _exactly(list),
    "dict": _exactly(dict),
    "any": lambda value: value,
    "dtype": _never,  # an instance of torch.dtype: nothing that JSON can hold
}
BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "gt": (lambda v, b: v > b, ">"),
    "ge": (lambda v, b: v >= b, ">="),
    "lt": (lambda v, b: v < b, "<"),
    "le": (lambda v, b: v <= b, "<="),
}


# -- pydantic 1 (``pydantic/v1/validators.py``, 1.10) -------------------------------------------


def _int_1(value: Any) -> int:
    try:
        return int(value)
    except OverflowError as e:
        raise ValueError from e


def _bool_1(value: Any) -> bool:
    if isinstance(value, str):
        value = value.lower()
    if isinstance(value, (bool, int, float, str)):
        if value in (1, "1", "on", "t", "true", "y", "yes"):
            return True
        if value in (0, "0", "off", "f", "false", "n", "no"):
            return False
    raise ValueError


def _str_1(value: Any) -> str:
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError


def _list_1(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError


def _path_1(value: Any) -> str:
    return str(PurePosixPath(value))


LAX_1: dict[str, Callable[[Any], Any]] = {
    "int": _int_1,
    "bool": _bool_1,
    "float": float,
    "str": _str_1,
    "path": _path_1,
    "list": _list_1,
    "tuple": _list_1,
    "dict": dict,
    "any": lambda value: value,
}
"""Fractions are cut (``1.5`` is 1), numbers become strings, pairs and an empty string become a dictionary."""


# -- words --------------------------------------------------------------------------------------


def type_words(term: Any) -> str:
    """A type term in words, for messages."""
    words = {
        "int": _("an integer"),
        "bool": _("true or false"),
        "float": _("a number"),
        "str": _("a string"),
        "path": _("a path"),
        "list": _("a list"),
        "tuple": _("a list"),
        "dict": _("an object"),
        "dtype": _("nothing (it can only be set from Python)"),
    }
    if isinstance(term, str):
        return words.get(term, term)
    ((kind, inner),) = term.items()
    if kind == "null":
        return _("{type} or null").format(type=type_words(inner))
    if kind in ("enum", "literal"):
        return _("one of {choices}").format(choices=", ".join(shown(v) for v in inner))
    if kind == "list":
        return _("a list, each item {type}").format(type=type_words(inner))
    if kind == "union":
        return " | ".join(type_words(t) for t in inner)
    return words["dict"]
