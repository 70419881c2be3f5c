"""The JSON Schemas of ds_config.json, one generated file per DeepSpeed release (``schemas/generate.py``).

A release without a file is not known: nothing here answers for a neighbour. ``history`` and ``defaults``
answer from ``schemas/timeline.json`` for all releases from 0.9.5 on. ``load`` reads the file of one
release; ``Schema.keys`` adds the texts and ranges of ``schemas/keys.json``; ``validate`` runs the
``jsonschema`` package (imported on first use: it costs more than the rest of ``check``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dstui.config.pointer import join_pointer, split_pointer
from dstui.errors import DstuiError
from dstui.i18n import N_, _
from dstui.paths import data_dir


@dataclass(frozen=True)
class Key:
    """One config key as one release has it."""

    pointer: str
    """``/zero_optimization/offload_param/device``"""
    type: str
    """``int bool float str path list dict any``, ``enum``, ``object``; ``?`` after it: null is legal."""
    default: Any = None
    has_default: bool = True
    """False when the default depends on other keys (``description`` says how)."""
    bounds: Mapping[str, float] | None = None
    """``gt``, ``ge``, ``lt``, ``le``."""
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()
    """Other names that the release takes for it in the same block."""
    deprecated: str | None = None
    """The key to use instead."""
    description: str = ""
    since: str | None = None
    """First release that reads it; ``0.9.5`` = that or earlier."""
    until: str | None = None
    policy: str = "checked"
    """``checked``: the release checks type and bounds; ``unchecked``: plain dictionary code takes any value."""


@dataclass(frozen=True)
class SchemaProblem:
    """One place where a document breaks the schema; ``pointer`` names the culprit, an unknown key included."""

    pointer: str
    message: str
    keyword: str
    """JSON Schema's keyword: ``type``, ``enum``, ``additionalProperties``, ``minimum``..."""


class Schema:
    """The schema of one release. ``json_schema`` is the file's content and must not be changed."""

    def __init__(self, release: str, json_schema: dict[str, Any]) -> None:
        self.release = release
        self.json_schema = json_schema
        self.facts: dict[str, Any] = json_schema["x-dstui"]["release"]
        self._keys: dict[str, Key] | None = None

    @property
    def removed(self) -> tuple[str, ...]:
        """Pointers of keys whose mere presence this release refuses."""
        return tuple(
            [join_pointer(k) for k in self.facts["removed"]]
            + [join_pointer("zero_optimization", k) for k in self.facts["removed_zero"]]
        )

    @property
    def keys(self) -> Mapping[str, Key]:
        """Pointer -> Key for every key that this release reads."""
        if self._keys is None:
            self._keys = _collect(self)
        return self._keys

    def key(self, pointer: str) -> Key | None:
        """The key at ``pointer``; old names and aliases lead to the key they stand for."""
        found = self.keys.get(pointer)
        if found is not None:
            return found
        parent, _sep, name = pointer.rpartition("/")
        return next(
            (k for p, k in self.keys.items() if p.rpartition("/")[0] == parent and name in k.aliases),
            None,
        )

    def unknown_policy(self, block: str) -> str:
        """``refused`` or ``ignored``: what the release does with a key it does not know in ``block``."""
        node = self._block(block)
        return "refused" if "additionalProperties" in node else "ignored"

    def names(self, block: str) -> tuple[str, ...]:
        """The names that this release knows in ``block`` (a pointer; ``""`` = the top level)."""
        node = self._block(block)
        return tuple(
            k
            for k, v in node.get("properties", {}).items()
            if not {"hidden", "removed"} & set(v.get("x-dstui", ()))
        )

    def _block(self, block: str) -> dict[str, Any]:
        node: Any = self.json_schema
        for name in split_pointer(block):
            node = self.resolved(node).get("properties", {}).get(name, {})
        return self.resolved(node)

    def resolved(self, node: Any) -> dict[str, Any]:
        """``node`` with a reference to a model followed (also in ``anyOf`` with null, ``auto``...)."""
        if not isinstance(node, dict):
            return {}
        for option in (node, *node.get("anyOf", ())):
            reference = option.get("$ref") if isinstance(option, dict) else None
            if reference and reference.rpartition("/")[2] in self.facts["models"]:
                target: dict[str, Any] = self.json_schema["$defs"][reference.rpartition("/")[2]]
                return target
            if isinstance(option, dict) and option is not node and "anyOf" in option:
                inner = self.resolved(option)
                if inner is not option:
                    return inner
        return node


def _folder() -> Path:
    return data_dir("schemas")


def version_key(version: str) -> tuple[int, ...]:
    """``0.19.4`` -> (0, 19, 4), to compare releases; local parts (``+cu128``) are ignored."""
    out = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        out.append(int(digits) if digits else 0)
    return tuple(out)


@lru_cache(maxsize=1)
def releases() -> tuple[str, ...]:
    """The releases with a schema, oldest first."""
    names = (p.name[len("deepspeed-") : -len(".json")] for p in _folder().glob("deepspeed-*.json"))
    return tuple(sorted(names, key=version_key))


def newest() -> str:
    """The newest release with a schema."""
    if not releases():
        raise DstuiError(_("no schema is installed in {path}").format(path=_folder()), _("reinstall dstui"))
    return releases()[-1]


def known(release: str) -> bool:
    """Whether there is a schema for exactly this release (a local part such as ``+cu128`` aside)."""
    return release.split("+")[0] in releases()


@lru_cache(maxsize=8)
def load(release: str) -> Schema:
    """The schema of exactly ``release``. Raises DstuiError when there is none: never a neighbour's."""
    name = release.split("+")[0]
    if name not in releases():
        raise DstuiError(
            _("no schema for DeepSpeed {release}").format(release=release),
            _("there is one for each release from {first} to {last}").format(
                first=next(iter(releases()), "?"), last=next(reversed(releases()), "?")
            ),
        )
    text = (_folder() / f"deepspeed-{name}.json").read_text(encoding="utf-8")
    return Schema(name, json.loads(text))


# -- every release, those without a schema too ---------------------------------------------------


@lru_cache(maxsize=1)
def _timeline() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_folder() / "timeline.json").read_text(encoding="utf-8"))
    return data


def all_releases() -> tuple[str, ...]:
    """Every release whose keys and defaults are known, 0.9.5 on, oldest first; see ``releases``."""
    return tuple(_timeline()["releases"])


def history(pointer: str) -> tuple[tuple[str, str, Any], ...]:
    """(first release, last release, default) of the key at ``pointer``, oldest first; () = never read.

    Blocks are no keys here. One small file is read, no schema. A default that depends on other keys is None.
    """
    return tuple((first, last, default) for first, last, default in _timeline()["keys"].get(pointer, ()))


def refused_from(pointer: str) -> str | None:
    """The release from which the mere presence of this key is refused; None = none does."""
    found: str | None = _timeline()["refused"].get(pointer)
    return found


def defaults(release: str) -> Mapping[str, Any]:
    """Pointer -> default of every key that ``release`` (one of ``all_releases``) reads. Raises DstuiError."""
    name = release.split("+")[0]
    order = {r: i for i, r in enumerate(all_releases())}
    if name not in order:
        raise DstuiError(
            _("dstui knows no DeepSpeed {release}").format(release=release),
            _("it knows {first} to {last}").format(first=all_releases()[0], last=all_releases()[-1]),
        )
    at = order[name]
    return {
        pointer: default
        for pointer, rows in _timeline()["keys"].items()
        for first, last, default in rows
        if order[first] <= at <= order[last]
    }


@lru_cache(maxsize=1)
def key_texts() -> dict[str, Any]:
    """``schemas/keys.json``: the reviewed texts and ranges, shared by all releases."""
    data: dict[str, Any] = json.loads((_folder() / "keys.json").read_text(encoding="utf-8"))
    return data


def _type_name(term: Any) -> tuple[str, tuple[Any, ...] | None, bool]:
    """A type term of the generator -> (name, choices, may be null)."""
    if isinstance(term, str):
        return term, None, False
    ((kind, inner),) = term.items()
    if kind == "null":
        name, choices, _null = _type_name(inner)
        return name, choices, True
    if kind in ("enum", "literal"):
        return "enum", tuple(inner), False
    if kind == "list":
        name, choices, _null = _type_name(inner)
        return f"list[{name}]", choices, False
    if kind == "union":
        return "|".join(_type_name(t)[0] for t in inner), None, False
    return "object", None, False


def _collect(schema: Schema) -> dict[str, Key]:
    out: dict[str, Key] = {}
    texts, blocks = key_texts()["keys"], key_texts()["blocks"]
    models = schema.facts["models"]

    def text(pointer: str) -> dict[str, Any]:
        name = pointer[1:].replace("/", ".")
        found: dict[str, Any] = texts.get(name) or {"text": blocks.get(name, {}).get("text", "")}
        return found

    def add_model(base: str, name: str) -> None:
        for field_name, field in models[name]["fields"].items():
            shown = field.get("alias", field_name)
            pointer = f"{base}/{shown}"
            entry = text(pointer)
            if len(entry) < 2:
                entry = text(f"{base}/{field_name}")
            type_name, choices, null = _type_name(field["type"])
            replacement = field.get("deprecated", {}).get("new_param") if "deprecated" in field else None
            out[pointer] = Key(
                pointer=pointer,
                type=type_name + ("?" if null else ""),
                default=field["default"],
                bounds={b: field[b] for b in ("gt", "ge", "lt", "le") if b in field} or None,
                choices=choices or (tuple(entry["choices"]) if "choices" in entry else None),
                aliases=(field_name,) if shown != field_name else (),
                deprecated=replacement,
                description=entry.get("text", ""),
                since=entry.get("since"),
                until=entry.get("until"),
            )
            inner = field["type"]
            while isinstance(inner, dict) and "null" in inner:
                inner = inner["null"]
            if isinstance(inner, dict) and "model" in inner:
                add_model(pointer, inner["model"])

    def walk(node: dict[str, Any], base: str) -> None:
        for name, child in node.get("properties", {}).items():
            if {"hidden", "removed"} & set(child.get("x-dstui", ())):
                continue
            pointer = base + join_pointer(name)
            model = schema.facts["roots"].get(pointer)
            entry = text(pointer)
            if model or "properties" in child or "default" not in child:
                out[pointer] = Key(
                    pointer,
                    "object"
                    if model or "properties" in child
                    else entry.get("type", "any").replace("|null", "?"),
                    has_default=False,
                    description=entry.get("text", ""),
                    since=entry.get("since"),
                    until=entry.get("until"),
                    policy="checked" if model else "unchecked",
                )
            else:
                out[pointer] = Key(
                    pointer=pointer,
                    type=entry.get("type", "any").replace("|null", "?"),
                    default=child["default"],
                    bounds=entry.get("bounds"),
                    choices=tuple(entry["choices"]) if "choices" in entry else None,
                    deprecated=entry.get("deprecated"),
                    description=entry.get("text", ""),
                    since=entry.get("since"),
                    until=entry.get("until"),
                    policy="unchecked",
                )
            if model:
                add_model(pointer, model)
            else:
                walk(child, pointer)

    walk(schema.json_schema, "")
    return out


def published(schema: Schema) -> dict[str, Any]:
    """The schema for editors: with the texts in, without what only this program needs."""
    out: dict[str, Any] = json.loads(json.dumps(schema.json_schema))
    out["x-dstui"] = {
        "deepspeed": schema.release,
        "removed": list(schema.removed),
    }
    for key in schema.keys.values():
        notes: dict[str, Any] = {
            "type": key.type,
            "checked": key.policy == "checked",
            "since": key.since,
            "until": key.until,
            "aliases": list(key.aliases) or None,
            "replaced_by": key.deprecated,
        }
        node = _published_node(out, schema, key.pointer)
        if node is None:
            continue
        if key.description:
            node["description"] = key.description
        if key.choices and key.policy == "unchecked" and "enum" not in node:
            node.setdefault("examples", list(key.choices))
        node["x-dstui"] = {k: v for k, v in notes.items() if v is not None}
    for name, model in out["$defs"].items():
        if name in schema.facts["models"]:
            model["x-dstui"] = {"unknown_keys": "refused" if "additionalProperties" in model else "ignored"}
    return out


def _published_node(out: dict[str, Any], schema: Schema, pointer: str) -> dict[str, Any] | None:
    node: dict[str, Any] | None = out
    for name in split_pointer(pointer):
        target = schema.resolved(node)  # a definition of ``schema``: take its twin in ``out``
        for reference, definition in schema.json_schema["$defs"].items():
            if target is definition:
                target = out["$defs"][reference]
                break
        node = target.get("properties", {}).get(name)
        if node is None:
            return None
    return node


# -- validation ---------------------------------------------------------------------------------


def validate(data: Any, release: str) -> list[SchemaProblem]:
    """Where ``data`` breaks the schema of ``release``, in the order of the document.

    A file that breaks it is refused by the release; one that fits may still be refused for what a
    schema cannot say (batch arithmetic, two keys that exclude each other): see ``resolve``.
    """
    schema = load(release)
    out: list[SchemaProblem] = []
    for error in _validator(schema.release).iter_errors(data):
        out.extend(_problems(schema, error))
    seen: set[tuple[str, str]] = set()
    unique = []
    for p in out:
        if (p.pointer, p.keyword) not in seen:
            seen.add((p.pointer, p.keyword))
            unique.append(p)
    return unique


@lru_cache(maxsize=4)
def _validator(release: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(load(release).json_schema)


def _problems(schema: Schema, error: Any) -> list[SchemaProblem]:
    pointer = join_pointer(*error.absolute_path)
    if error.validator == "additionalProperties":
        block = error.schema.get("properties", {})
        return [_unknown(pointer + join_pointer(k), k) for k in error.instance if k not in block]
    path = list(error.relative_schema_path)
    if path[-2:] == ["additionalProperties", "const"]:  # "auto" is the one value an unknown key may have
        return [_unknown(pointer, str(error.absolute_path[-1]))]
    inside = _inside(error)
    if inside:
        return [p for e in inside for p in _problems(schema, e)]
    if isinstance(error.schema, dict) and error.schema.get("x-dstui", {}).get("removed"):
        return [
            SchemaProblem(
                pointer,
                _("'{key}' was removed: DeepSpeed {release} refuses a config that has it").format(
                    key=error.absolute_path[-1], release=schema.release
                ),
                "removed",
            )
        ]
    if error.validator == "not" and "required" in error.validator_value:
        names = error.validator_value["required"]
        return [
            SchemaProblem(
                pointer + join_pointer(names[1]),
                _("'{key}' and '{other}' are two names of one key: give only one").format(
                    key=names[1], other=names[0]
                ),
                "not",
            )
        ]
    return [
        SchemaProblem(
            pointer,
            _("must be {wanted}, found {found}").format(
                wanted=_wanted(schema, pointer, error), found=_shown(error.instance)
            ),
            str(error.validator),
        )
    ]


def _inside(error: Any) -> list[Any] | None:
    """The errors within the value when one option of an ``anyOf`` takes a value of this kind."""
    if error.validator != "anyOf" or not isinstance(error.instance, (dict, list)):
        return None
    options: dict[Any, list[Any]] = {}
    for inner in error.context or ():
        options.setdefault(inner.schema_path[0], []).append(inner)
    found: list[list[Any]] = []
    for errors in options.values():
        flat: list[Any] = []
        for e in errors:
            deeper = [e] if e.path or e.validator == "not" else _inside(e)
            if not deeper:
                break
            flat += deeper
        else:
            found.append(flat)
    return min(found, key=len) if found else None


def _unknown(pointer: str, key: str) -> SchemaProblem:
    return SchemaProblem(pointer, _("unknown key '{key}'").format(key=key), "additionalProperties")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


_TYPE_WORDS = {
    "int": N_("an integer"),
    "bool": N_("true or false"),
    "float": N_("a number"),
    "str": N_("a string"),
    "path": N_("a path"),
    "list": N_("a list"),
    "tuple": N_("a list"),
    "dict": N_("an object"),
    "object": N_("an object"),
    "dtype": N_("left out: it can only be set from Python"),
    "integer": N_("an integer"),
    "number": N_("a number"),
    "boolean": N_("true or false"),
    "string": N_("a string"),
    "array": N_("a list"),
    "null": N_("null"),
}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _wanted(schema: Schema, pointer: str, error: Any) -> str:
    """What is legal at this place, in words."""
    if error.validator in _SIGNS:
        return f"{_SIGNS[error.validator]} {error.validator_value}"
    key = schema.key(pointer)
    if key is not None and key.policy == "checked":
        kind = key.type.rstrip("?")
        if key.choices and "enum" in (kind, error.validator):
            words = " | ".join(json.dumps(c) for c in key.choices)
        elif kind.startswith("list["):
            inner = _TYPE_WORDS.get(kind[5:-1], kind[5:-1])
            choices = " | ".join(json.dumps(c) for c in key.choices or ())
            words = _("a list of {items}").format(items=choices or _(inner))
        else:
            words = " | ".join(_(_TYPE_WORDS.get(k, k)) for k in kind.split("|"))
        return f"{words} | null" if key.type.endswith("?") else words
    return " | ".join(_options(error.schema)) or _("something else")


def _options(node: Mapping[str, Any]) -> list[str]:
    """The choices that a schema node offers, in words; ``"auto"`` and other spellings left out."""
    out: list[str] = []
    for option in node.get("anyOf", ()):
        out += _options(option)
    if "enum" in node:
        out += [json.dumps(v) for v in node["enum"] if v not in ("auto", True)]
    elif "type" in node and "pattern" not in node:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        out += [_(_TYPE_WORDS.get(str(t), str(t))) for t in types]
        if "exclusiveMinimum" in node:
            out[-1] += f" > {node['exclusiveMinimum']}"
    elif "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        out.append(_(_TYPE_WORDS.get(str(name), "an object")))
    return list(dict.fromkeys(out))
