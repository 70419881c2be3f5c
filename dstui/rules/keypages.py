"""The page of a config key: meaning, type, default by release, since/until, who reads it, which rules know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dstui.config import schema as schemas
from dstui.config.pointer import dotted
from dstui.i18n import _
from dstui.rules.nearest import nearest
from dstui.rules.registry import all_rules
from dstui.rules.tables import ALIASES, OLD_NAMES, REMOVED, RENAMED, default_history

_READ_BY: tuple[tuple[str, str], ...] = (
    # longest prefix first; files of DeepSpeed 0.19.8
    ("zero_optimization.offload_param", "deepspeed/runtime/zero/offload_config.py"),
    ("zero_optimization.offload_optimizer", "deepspeed/runtime/zero/offload_config.py"),
    ("zero_optimization.zenflow", "deepspeed/runtime/zenflow/zenflow_config.py"),
    ("zero_optimization.leaf_module", "deepspeed/runtime/zero/leaf_module_config.py"),
    ("zero_optimization", "deepspeed/runtime/zero/config.py"),
    ("tensorboard", "deepspeed/monitor/config.py"),
    ("wandb", "deepspeed/monitor/config.py"),
    ("csv_monitor", "deepspeed/monitor/config.py"),
    ("comet", "deepspeed/monitor/config.py"),
    ("comms_logger", "deepspeed/comm/config.py"),
    ("weight_quantization", "deepspeed/inference/config.py"),
    ("compile", "deepspeed/compile/config.py"),
    ("timers", "deepspeed/utils/config.py"),
    ("tensor_parallel", "deepspeed/runtime/tensor_parallel/config.py"),
    ("bf16", "deepspeed/runtime/precision_config.py"),
    ("fp16", "deepspeed/runtime/precision_config.py"),
    ("scheduler", "deepspeed/runtime/lr_schedules.py, engine.py"),
    ("optimizer", "deepspeed/runtime/engine.py"),
    ("activation_checkpointing", "deepspeed/runtime/activation_checkpointing/config.py"),
    ("flops_profiler", "deepspeed/profiling/config.py"),
    ("aio", "deepspeed/runtime/swap_tensor/aio_config.py"),
    ("checkpoint.writer", "deepspeed/runtime/model_checkpointing/config.py"),
    ("autotuning", "deepspeed/autotuning/config.py"),
    ("elasticity", "deepspeed/elasticity/config.py"),
    ("nebula", "deepspeed/nebula/config.py"),
    ("expert_parallel", "deepspeed/module_inject/auto_ep_config.py"),
    ("data_efficiency", "deepspeed/runtime/data_pipeline/config.py"),
    ("", "deepspeed/runtime/config.py"),
)


@dataclass(frozen=True)
class KeyPage:
    """A key in one release. ``meaning`` is translated; the rest is DeepSpeed's."""

    path: str
    release: str
    known: bool
    """The release reads it."""
    type: str
    meaning: str
    defaults: tuple[tuple[str, Any], ...]
    """(first release, value), oldest first; empty when there is none of its own."""
    bounds: str
    choices: tuple[Any, ...]
    aliases: tuple[str, ...]
    replaced_by: str | None
    since: str | None
    until: str | None
    refused_from: str | None
    unknown_keys: str | None
    """For a section: ``refused`` or ``ignored``."""
    keys: tuple[str, ...]
    source: str
    rules: tuple[tuple[str, str], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "key",
            "path": self.path,
            "deepspeed": self.release,
            "known": self.known,
            "type": self.type,
            "meaning": self.meaning,
            "defaults": [{"from": since, "value": value} for since, value in self.defaults],
            "bounds": self.bounds,
            "choices": list(self.choices),
            "aliases": list(self.aliases),
            "replaced_by": self.replaced_by,
            "since": self.since,
            "until": self.until,
            "refused_from": self.refused_from,
            "unknown_keys": self.unknown_keys,
            "keys": list(self.keys),
            "source": self.source,
            "rules": [{"code": c, "name": n} for c, n in self.rules],
        }


def all_paths(release: str) -> list[str]:
    """Every dotted key of ``release`` and of any other release."""
    paths = dict.fromkeys(dotted(p) for p in schemas.load(release).keys)
    paths.update(dict.fromkeys(schemas.key_texts()["keys"]))
    for pointer in (*OLD_NAMES, *ALIASES, *REMOVED):
        paths.setdefault(dotted(pointer), None)
    return list(paths)


def match(word: str, release: str) -> list[str]:
    """The keys that ``word`` may mean: a dotted path or pointer, else every key of that last name."""
    wanted = word.strip().replace("/", ".").strip(".")
    wanted = "bf16" + wanted[len("bfloat16") :] if wanted.split(".")[0] == "bfloat16" else wanted
    paths = all_paths(release)
    exact = [p for p in paths if p.lower() == wanted.lower()]
    if exact:
        return exact[:1]
    return [p for p in paths if p.lower().endswith("." + wanted.lower())]


def suggestions(word: str, release: str) -> list[str]:
    """Did you mean: codes, rule names or keys near ``word``."""
    found = []
    paths = all_paths(release)
    for known in (
        paths,
        [p.rpartition(".")[2] for p in paths],
        [r.code for r in all_rules()],
        [r.name for r in all_rules()],
    ):
        near = nearest(word.strip(), known)
        if near is not None and near not in found:
            found.append(near)
    return found[:3]


def page(path: str, release: str) -> KeyPage:
    """The page of the key at dotted ``path``, as ``release`` (one with a schema) reads it."""
    schema = schemas.load(release)
    pointer = "/" + path.replace(".", "/")
    key = schema.keys.get(pointer) or schema.key(pointer)
    entry: Mapping[str, Any] = schemas.key_texts()["keys"].get(path) or {}
    until, since = entry.get("until"), entry.get("since")
    refused = REMOVED.get(pointer, (entry.get("removed"),))[0]
    renamed = next((r for r in RENAMED if r.old == pointer), None)
    replaced = (
        OLD_NAMES.get(pointer)
        or ALIASES.get(pointer)
        or (renamed.new if renamed else None)
        or entry.get("deprecated")
    )
    block = (
        bool(schema.names(pointer))
        and schema.keys.get(pointer) is not None
        and key is not None
        and key.type == "object"
    )
    last = path.rpartition(".")[2]
    return KeyPage(
        path=path,
        release=release,
        known=key is not None and pointer not in schema.removed,
        type=(key.type if key else str(entry.get("type", "?"))),
        meaning=_(str(entry.get("text") or (key.description if key else ""))),
        defaults=() if block else _defaults(pointer, entry, since),
        bounds=_bounds(key.bounds if key else None),
        choices=tuple(key.choices or ()) if key else tuple(entry.get("choices", ())),
        aliases=tuple(key.aliases) if key else (),
        replaced_by=replaced,
        since=since,
        until=until,
        refused_from=refused,
        unknown_keys=schema.unknown_policy(pointer) if block else None,
        keys=schema.names(pointer) if block else (),
        source=next(
            s for prefix, s in _READ_BY if not prefix or path == prefix or path.startswith(prefix + ".")
        ),
        rules=_rules(last, path),
    )


def _defaults(pointer: str, entry: Mapping[str, Any], since: str | None) -> tuple[tuple[str, Any], ...]:
    history = default_history(pointer)
    if history:
        return tuple((first or since or "0.9.5", value) for first, value in history)
    if isinstance(entry.get("defaults"), list):
        return tuple((str(first), value) for first, _last, value in entry["defaults"])
    out: list[tuple[str, Any]] = []
    for first, _last, value in schemas.history(pointer):
        if not out or out[-1][1] != value:
            out.append((first if out else since or first, value))
    return tuple(out)


def _bounds(bounds: Mapping[str, float] | Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    if isinstance(bounds, list):  # by release: the newest
        bounds = bounds[-1].get("value", {}) if bounds else {}
    return (
        ", ".join(f"{signs[k]} {v}" for k, v in bounds.items() if k in signs)
        if isinstance(bounds, Mapping)
        else ""
    )


def _rules(last: str, path: str) -> tuple[tuple[str, str], ...]:
    import re

    word = re.compile(rf"(?<![\w.]){re.escape(last)}(?!\w)")
    full = re.compile(rf"(?<![\w.]){re.escape(path)}(?!\w)")
    common = last in (
        "enabled",
        "device",
        "type",
        "params",
        "lr",
        "stage",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "zero_optimization",
    )
    pattern = full if common else word
    return tuple((r.code, r.name) for r in all_rules() if pattern.search(f"{r.page.what} {r.page.fix}"))


def newest_known(release: str) -> str:
    """``release`` when it has a schema, else the newest one that has."""
    return release if schemas.known(release) else schemas.newest()
