"""The JSON Schema (draft 2020-12) of a facts file, made from the dataclasses in ``dstui.facts.model``.

``python -m dstui.facts.schema > schemas/facts.json`` writes the shipped file; a test compares the two.
Readers ignore unknown keys (a later release may add some), so the schema allows them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from dstui.facts.model import Facts


def json_schema() -> dict[str, Any]:
    """A self-contained schema; every dataclass is one entry of ``$defs``."""
    definitions: dict[str, Any] = {}
    root = _schema(Facts, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dstui facts: a machine as `dstui detect --json` describes it",
        "$comment": "Sizes are bytes. null = unknown; `unknown` gives the reason by dotted path. -1 = unlimited.",
        **root,
        "$defs": definitions,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _schema(next(a for a in args if a is not type(None)), definitions)
        if "type" in inner:
            return {**inner, "type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if kind.__name__ not in definitions:
            hints = typing.get_type_hints(kind)
            fields = dataclasses.fields(kind)
            missing = dataclasses.MISSING
            required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
            if kind is Facts:
                required = ["schema_version"]
            definitions[kind.__name__] = {
                "type": "object",
                "properties": {f.name: _schema(hints[f.name], definitions) for f in fields},
                "required": required,
            }
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple:
        if args[-1] is Ellipsis:
            return {"type": "array", "items": _schema(args[0], definitions)}
        return {
            "type": "array",
            "prefixItems": [_schema(a, definitions) for a in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    return {"type": {str: "string", int: "integer", bool: "boolean", float: "number"}[kind]}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
