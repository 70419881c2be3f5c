"""JSON pointers (RFC 6901): the place of a value in a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _


def split_pointer(pointer: str) -> list[str]:
    """RFC 6901 pointer -> reference tokens. Raises DstuiError for a pointer without leading slash."""
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise DstuiError(_("'{pointer}' is not a JSON pointer").format(pointer=pointer))
    return [t.replace("~1", "/").replace("~0", "~") for t in pointer[1:].split("/")]


def join_pointer(*tokens: str | int) -> str:
    """Reference tokens -> RFC 6901 pointer."""
    return "".join("/" + str(t).replace("~", "~0").replace("/", "~1") for t in tokens)


def dotted(pointer: str) -> str:
    """As people write it: ``/zero_optimization/stage`` -> ``zero_optimization.stage``."""
    return ".".join(split_pointer(pointer))


def lookup(data: Any, pointer: str, default: Any = None) -> Any:
    """The value at ``pointer`` in plain data, or ``default``."""
    for token in split_pointer(pointer):
        if isinstance(data, Mapping) and token in data:
            data = data[token]
        elif isinstance(data, list) and token.isdigit() and int(token) < len(data):
            data = data[int(token)]
        else:
            return default
    return data
