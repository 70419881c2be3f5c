#!/usr/bin/env python3
"""Write ``schemas/deepspeed-<version>.json`` from a DeepSpeed release.

    python schemas/generate.py deepspeed==0.19.4    # downloaded by pip
    python schemas/generate.py installed            # the deepspeed of --python (default: this one)
    python schemas/generate.py path/to/tree         # an unpacked tree, a sdist or a --target folder
    python schemas/generate.py ... --reviewed       # its new code was read: remember its hashes
    python schemas/generate.py --before-schemas TREES   # keys and defaults of 0.9.5-0.13.5, without import
    python schemas/generate.py                      # write all files again, from keys.json
    python schemas/generate.py --check              # exit 1 when a file does not follow from keys.json

docs/adding-a-release.md says what to do when.

A release is asked in a subprocess (``DS_ACCELERATOR=cpu``; it imports torch): pydantic models by
introspection (fields, types, defaults, bounds, aliases, deprecations, validators), and which readers
``DeepSpeedConfig`` calls for the blocks that are plain dictionary code. What such readers take is in
``schemas/keys.json``, reviewed by hand, one entry a key with its range of releases and its text.

The answer of the subprocess is kept in the schema under ``x-dstui.release``, so ``--check`` and a change
of ``keys.json`` need no DeepSpeed. Texts and ranges stay in ``keys.json``, once for all releases.

The schema never refuses what the release accepts when it parses a config; quoted numbers, old names and
``"auto"`` (which DeepSpeed drops from its pydantic blocks) therefore pass.

``timeline.json`` holds which release reads which key with which default, for all releases from 0.9.5 on:
from the schemas, and for releases before them (0.9.5-0.13.5) from the source of their models and keys.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FORMAT = 1

# -- asking a release ---------------------------------------------------------------------------

PROBE = r"""
import enum, hashlib, inspect, json, os, pathlib, sys, types, typing
import annotated_types as at
# names that old releases import from newer packages than theirs; parsing a config uses none of them
import numpy
if not hasattr(numpy, "BUFSIZE"): numpy.BUFSIZE = 8192
import torch.distributed.elastic.agent.server.api as elastic_api
for gone in ("log", "_get_socket_with_port"):
    if not hasattr(elastic_api, gone): setattr(elastic_api, gone, None)
for absent in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):  # to 0.14.0
    sys.modules.setdefault(absent, types.ModuleType(absent))
import deepspeed, torch
from deepspeed.runtime import config as C
from deepspeed.runtime.config_utils import DeepSpeedConfigModel as Base

OLD = not hasattr(Base, "model_fields")  # pydantic 1 (to 0.14.5), or its copy within pydantic 2
BaseModel = next(c for c in Base.__mro__ if c.__name__ == "BaseModel")

def fields_of(cls):  # name -> (type, the field)
    if OLD: return {n: (f.outer_type_, f) for n, f in cls.__fields__.items()}
    return {n: (f.annotation, f) for n, f in cls.model_fields.items()}

def term(t):
    o, a = typing.get_origin(t), typing.get_args(t)
    if t in (int, bool, float, str, list, tuple, dict): return t.__name__
    if t is object or t is typing.Any: return "any"
    if t is typing.Dict: return "dict"
    if t is pathlib.Path: return "path"
    if t is torch.dtype: return "dtype"
    if o is typing.Literal: return {"literal": list(a)}
    if o in (typing.Union, types.UnionType):
        rest = [x for x in a if x is not type(None)]
        inner = term(rest[0]) if len(rest) == 1 else {"union": [term(x) for x in rest]}
        return {"null": inner} if len(rest) < len(a) else inner
    if o in (list, typing.List): return {"list": term(a[0])}
    if o in (dict, typing.Dict): return "dict"
    if isinstance(t, type) and issubclass(t, enum.Enum):
        values = list(dict.fromkeys(m.value for m in t))
        return {"enum": values}
    if isinstance(t, type) and issubclass(t, BaseModel):
        model(t); return {"model": t.__name__}
    if OLD and isinstance(t, type) and issubclass(t, (int, float)):  # ConstrainedIntValue
        return "int" if issubclass(t, int) else "float"
    raise SystemExit(f"type {t!r} is not known to the generator")

def plain(v):
    if isinstance(v, bool) or v is None: return v
    if isinstance(v, enum.Enum): return v.value
    if isinstance(v, int): return int(v)
    if isinstance(v, (float, str)): return v
    if isinstance(v, (list, tuple)): return [plain(x) for x in v]
    if isinstance(v, dict): return {k: plain(x) for k, x in v.items()}
    if isinstance(v, BaseModel):
        return {k: plain(getattr(v, k)) for k in (v.__fields_set__ if OLD else v.model_fields_set)}
    return str(v)

def sha(f):
    return hashlib.sha256(inspect.getsource(f).encode()).hexdigest()[:12]

models = {}
def model(cls):
    if cls.__name__ in models: return
    extra = (cls.__config__.extra.value if OLD else cls.model_config.get("extra")) or "ignore"
    out = models[cls.__name__] = {"extra": extra, "fields": {}}
    if Base in cls.__mro__: out["drops_auto"] = True
    for name, (annotation, f) in fields_of(cls).items():
        d = out["fields"][name] = {"type": term(annotation)}
        if OLD and f.allow_none and d["type"] != "any": d["type"] = {"null": d["type"]}
        if f.alias and f.alias != name: d["alias"] = f.alias
        d["default"] = plain(f.default_factory() if f.default_factory else f.default)
        if OLD:
            for key in ("gt", "ge", "lt", "le"):
                if getattr(f.field_info, key) is not None: d[key] = plain(getattr(f.field_info, key))
        else:
            for m in f.metadata:
                for cls2, key in ((at.Gt, "gt"), (at.Ge, "ge"), (at.Lt, "lt"), (at.Le, "le")):
                    if isinstance(m, cls2): d[key] = plain(getattr(m, key))
        x = (f.field_info.extra if OLD else f.json_schema_extra) or {}
        if x.get("deprecated"):
            d["deprecated"] = {k: x[k] for k in ("new_param", "set_new_param", "deprecated_msg") if k in x}
            if "new_param_fn" in x:
                d["deprecated"]["converts"] = [[v, plain(x["new_param_fn"](v))] for v in (True, False, None)]
    if OLD:
        by_name = {}
        for name, f in cls.__fields__.items():
            for v in (f.class_validators or {}).values():
                at_ = by_name.setdefault(v.func.__name__, {
                    "name": v.func.__name__, "mode": "before" if v.pre else "after", "fields": [], "sha": sha(v.func)})
                at_["fields"].append(name)
        out["validators"] = list(by_name.values()) + [
            {"name": v.__name__, "mode": "before", "sha": sha(v)} for v in cls.__pre_root_validators__
        ] + [
            {"name": v.__name__, "mode": "after", "sha": sha(v)} for skip, v in cls.__post_root_validators__
        ]
        return
    dec = cls.__pydantic_decorators__
    out["validators"] = [
        {"name": n, "mode": v.info.mode, "sha": sha(v.func)} for n, v in dec.model_validators.items()
    ] + [
        {"name": n, "mode": v.info.mode, "fields": list(v.info.fields), "sha": sha(v.func)}
        for n, v in dec.field_validators.items()
    ]

roots = {}
def root(pointer, cls):
    model(cls); roots[pointer] = cls.__name__

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
root("/zero_optimization", DeepSpeedZeroConfig)
from deepspeed.comm.config import CommsLoggerConfig
root("/comms_logger", CommsLoggerConfig)
from deepspeed.monitor.config import DeepSpeedMonitorConfig
for n, (t, f) in fields_of(DeepSpeedMonitorConfig).items():
    if isinstance(t, type) and issubclass(t, BaseModel): root("/" + n, t)
root("/hybrid_engine", C.HybridEngineConfig)
def made_by(pointer, reader, name):  # the model that a reader of runtime/config.py fills
    found = reader in vars(C) and vars(C)[reader].__globals__.get(name)
    if found: root(pointer, found)
made_by("/fp16", "get_float16_config", "DeepSpeedFP16Config")
made_by("/bf16", "get_bfloat16_config", "DeepSpeedBF16Config")
made_by("/timers/throughput", "get_timers_config", "DeepSpeedThroughputTimerConfig")
made_by("/tensor_parallel", "get_tensor_parallel_config", "TPTrainingConfig")
made_by("/compile", "get_compile_config", "CompileConfig")  # to 0.14.3: torch.compile
if "CompileConfig" in vars(C): root("/compile", C.CompileConfig)
if "WeightQuantConfig" in vars(C): root("/weight_quantization", C.WeightQuantConfig)

readers = [n for n in C.DeepSpeedConfig._initialize_params.__code__.co_names
           if n in vars(C) and callable(vars(C)[n])]
functions = {n: sha(getattr(C.DeepSpeedConfig, n)) for n in (
    "__init__", "_initialize_params", "_batch_assertion", "_set_batch_related_parameters", "_do_error_check",
    "_do_warning_check")}
functions.update({n: sha(vars(C)[n]) for n in readers})
functions["DeepSpeedConfigModel"] = sha(Base)
for name in ("compression.config", "runtime.data_pipeline.config", "elasticity.elasticity", "elasticity.config",
             "runtime.model_checkpointing.config"):  # whole modules of readers that call each other
    try:
        functions[name] = sha(__import__("deepspeed." + name, fromlist=["x"]))
    except ImportError:
        pass
import deepspeed.runtime.data_pipeline.config as D
try:
    functions["parse_autoep_config"] = sha(
        __import__("deepspeed.module_inject.auto_ep_config", fromlist=["x"]).parse_autoep_config)
except ImportError:
    pass
release = {
    "version": deepspeed.__version__.split("+")[0].strip(),
    "pydantic": 1 if OLD else 2,
    # deepspeed.initialize makes a dictionary of a file before it makes a DeepSpeedConfig of it
    "reads_file": "load_ds_config" in deepspeed.initialize.__code__.co_names,
    "models": models, "roots": roots, "readers": readers, "functions": functions,
    "helpers": [n for n in ("get_dynamic_batching",) if n in vars(D)],
    "elasticity": "elasticity_enabled" in C.DeepSpeedConfig.__init__.__code__.co_names,
    "removed": sorted(getattr(C, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})),
    "removed_zero": sorted(getattr(C, "_REMOVED_ZERO_CONFIG_KEYS", {})),
    "optimizers": list(C.DEEPSPEED_OPTIMIZERS),
}
json.dump(release, open(sys.argv[1], "w"))
"""


def ask(python: str, tree: Path | None) -> dict[str, Any]:
    """What the release in ``tree`` (None: the one installed for ``python``) says about itself."""
    env = dict(os.environ, DS_ACCELERATOR="cpu", PYTHONWARNINGS="ignore")
    if tree is not None:
        env["PYTHONPATH"] = str(tree)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "release.json"
        done = subprocess.run(
            [python, "-c", PROBE, str(out)], env=env, cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"the release could not be read:\n{done.stderr.strip()[-2000:] or done.stdout[-2000:]}")
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer


def find_tree(source: str, python: str, scratch: Path) -> Path | None:
    """The folder to put on PYTHONPATH for ``source``; None = what is installed."""
    if source == "installed":
        return None
    path = Path(source)
    if "==" in source and not path.exists():
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-build-isolation",
                "-d",
                str(scratch),
                source,
            ],
            env=dict(os.environ, DS_BUILD_OPS="0"),
            check=True,
        )
        path = next(p for p in scratch.iterdir() if p.name.startswith("deepspeed"))
    if path.is_file():
        with tarfile.open(path) as tar:
            tar.extractall(scratch / "tree", filter="data")
        path = next((scratch / "tree").iterdir())
    if not (path / "deepspeed" / "__init__.py").is_file():
        sys.exit(f"{source}: no deepspeed package in it")
    info = path / "deepspeed" / "git_version_info_installed.py"
    if not info.exists() and (path / "version.txt").exists():  # an unpacked sdist: setup.py writes this
        version = (path / "version.txt").read_text().strip()
        info.write_text(
            f"version='{version}'\ngit_hash='none'\ngit_branch='none'\ninstalled_ops={{}}\n"
            "accelerator_name='cpu'\ntorch_info={'version': '0.0', 'bf16_support': False, 'cuda_version': '0.0', "
            "'nccl_version': '0.0', 'hip_version': '0.0'}\n"
        )
    return path.resolve()


# -- the schema ---------------------------------------------------------------------------------


def _any_case(words: list[str]) -> str:
    """A pattern for ``words`` in any case (ECMA patterns have no flag for it)."""
    return "|".join("".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in w) for w in words)


_INT_TEXT = r"^\s*[+-]?[0-9][0-9_]*(\.0*)?\s*$|^auto$"
BASIC: dict[str, Any] = {
    "int": {"type": ["integer", "boolean", "string"], "pattern": _INT_TEXT},
    "bool": {
        "anyOf": [
            {"type": "boolean"},
            {"enum": [0, 1, "auto"]},
            {
                "type": "string",
                "pattern": f"^({_any_case(['0', '1', 'off', 'on', 'f', 't', 'false', 'true', 'n', 'y', 'no', 'yes'])})$",
            },
        ]
    },
    "float": {
        "type": ["number", "boolean", "string"],
        "pattern": rf"^\s*[+-]?([0-9_]*\.?[0-9_]*([eE][+-]?[0-9_]+)?|{_any_case(['inf', 'infinity', 'nan'])})\s*$|^auto$",
    },
    "str": {"type": "string"},
    "path": {"type": "string"},
    "list": {"anyOf": [{"type": "array"}, {"const": "auto"}]},
    "tuple": {"anyOf": [{"type": "array"}, {"const": "auto"}]},
    "dict": {"anyOf": [{"type": "object"}, {"const": "auto"}]},
    "any": {},
    "dtype": {"const": "auto"},
}
"""What pydantic 2 takes for each type in its lax mode, ``"auto"`` included (dropped before it looks)."""
BASIC_1: dict[str, Any] = {
    **BASIC,
    "int": {"type": ["number", "boolean", "string"], "pattern": r"^\s*[+-]?\d(_?\d)*\s*$|^auto$"},
    "str": {"type": ["string", "number", "boolean"]},
    "dict": {"anyOf": [{"type": ["object", "array"]}, {"enum": ["", "auto"]}]},
}
"""The same for pydantic 1 (to 0.14.5): fractions are cut, numbers become strings, pairs become objects."""
REMOVED = {"not": {}, "x-dstui": {"removed": True}}
_BOUND_WORDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def in_range(version: str, first: str | None, last: str | None) -> bool:
    v = _key(version)
    return (first is None or _key(first) <= v) and (last is None or v <= _key(last))


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.lstrip("<=").split("."))


def type_schema(term: Any, pydantic: int) -> dict[str, Any]:
    """JSON Schema of a pydantic type term of the probe."""
    if isinstance(term, str):
        return {"$ref": f"#/$defs/{term}"}
    ((kind, inner),) = term.items()
    if kind == "null":
        return {"anyOf": [type_schema(inner, pydantic), {"type": "null"}]}
    if kind == "model":
        if pydantic == 1:  # dict(value) is tried
            return {"anyOf": [{"$ref": f"#/$defs/{inner}"}, {"type": "array"}, {"enum": ["", "auto"]}]}
        return {"anyOf": [{"$ref": f"#/$defs/{inner}"}, {"const": "auto"}]}
    if kind == "enum" and all(isinstance(v, int) for v in inner):
        if pydantic == 1:
            return {"enum": [*inner, True, False, "auto"]}
        return {"anyOf": [{"enum": [*inner, True, False, "auto"]}, {"type": "string", "pattern": _INT_TEXT}]}
    if kind in ("enum", "literal"):
        return {"enum": [*inner, *(() if "auto" in inner else ("auto",))]}
    if kind == "list":
        item = (
            {"enum": inner["literal"]}
            if isinstance(inner, dict) and "literal" in inner
            else type_schema(inner, pydantic)
        )
        return {"anyOf": [{"type": "array", "items": item}, {"const": "auto"}]}
    if kind == "union":
        return {"anyOf": [type_schema(t, pydantic) for t in inner]}
    raise ValueError(kind)


def field_schema(field: dict[str, Any], pydantic: int) -> dict[str, Any]:
    out = type_schema(field["type"], pydantic)
    for word, name in _BOUND_WORDS.items():
        if word in field:
            out[name] = field[word]
    if pydantic == 1 and field["type"] == "int" and out.get("minimum") == 0:
        del out["minimum"]
        out["exclusiveMinimum"] = -1  # the fraction is cut before the bound is looked at
    out["default"] = field["default"]
    if "deprecated" in field:
        out["deprecated"] = True
    return out


def model_schema(model: dict[str, Any], loosen: dict[str, Any], pydantic: int) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    one_of_two = []
    for key, field in model["fields"].items():
        node = field_schema(field, pydantic)
        if key in loosen.get("fields", {}):
            node = {"anyOf": [{k: v for k, v in node.items() if k != "default"}, loosen["fields"][key]],
                    "default": node["default"]}  # fmt: skip
        if key in loosen.get("replace", {}):  # a validator of the class is narrower than the type
            node = {**loosen["replace"][key], "default": node["default"]}
        alias = field.get("alias")
        properties[alias or key] = node
        if alias:
            properties[key] = {
                **{k: v for k, v in node.items() if k != "default"},
                "x-dstui": {"name_of": alias},
            }
            real = {"not": {"const": "auto"}} if model.get("drops_auto") else {}
            one_of_two.append({"not": {"required": [alias, key], "properties": {alias: real, key: real}}})
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if model["extra"] == "forbid":
        out["additionalProperties"] = False
        if model.get("drops_auto"):  # "auto" is dropped before names are looked at
            out["additionalProperties"] = {"const": "auto"}
            # DeepSpeedConfigModel.__init__ has a parameter of this name
            properties["strict"] = {"x-dstui": {"hidden": True}}
    if one_of_two:
        out["allOf"] = one_of_two
    return out


def review(release: dict[str, Any], reviewed: dict[str, Any]) -> list[str]:
    """Give each validator the name of the check that replays it, and each reader that behaves otherwise
    than in the newest release the name of its variant; returns what nobody has looked at yet.

    ``dstui/config/replay.py`` repeats the release's own Python code. Code that changed since it was
    reviewed must be read again before its hash goes into ``keys.json``.
    """
    missing = []
    for name, model in release["models"].items():
        for validator in model["validators"]:
            check = reviewed["validators"].get(f"{validator['name']}@{validator['sha']}")
            if check is None:
                missing.append(f"validator {name}.{validator['name']}@{validator['sha']}")
            validator["check"] = check
    release["variants"] = {}
    for name, digest in release["functions"].items():
        if digest not in reviewed["functions"].get(name, ()):
            missing.append(f"function {name}@{digest}")
        label = reviewed["variants"].get(f"{name}@{digest}")
        if label:
            release["variants"][name] = label
    return missing


def build(release: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The schema of one release from the probe's answer and the reviewed keys."""
    version = release["version"]
    pydantic = release["pydantic"]
    defs: dict[str, Any] = dict(BASIC_1 if pydantic == 1 else BASIC)
    for name, model in release["models"].items():
        defs[name] = model_schema(model, keys["loosen"].get(name, {}), pydantic)
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:dstui:deepspeed:{version}",
        "title": f"DeepSpeed {version} configuration",
        "type": "object",
        "properties": {},
    }
    for pointer, name in release["roots"].items():
        node = _at(schema, pointer)
        node.update({"$ref": f"#/$defs/{name}"})
    # a null bf16 is read as an absent one (runtime/precision_config.py get_bfloat16_config)
    properties = schema["properties"]
    for name, patch in keys["blocks"].items():
        wanted = patch.get("schema")
        for first, last, other in patch.get("ranges", ()):  # what is written otherwise in older releases
            if in_range(version, first, last):
                wanted = other
                break
        else:
            if not in_range(version, patch.get("from"), patch.get("to")):
                continue
        if name in release["removed"]:
            continue
        node = _at(schema, "/" + name.replace(".", "/"))
        reference = node.pop("$ref", None)
        if wanted is not None:
            ref = {"$ref": reference} if reference else None
            node.update(_fill(wanted, ref))
        elif reference:
            node["$ref"] = reference
    for path, entry in keys["keys"].items():
        if entry.get("pydantic") and in_range(version, entry["pydantic"][0], entry["pydantic"][1]):
            continue
        if not in_range(version, entry["since"], entry.get("until")) or "defaults" not in entry:
            continue
        node = _at(schema, "/" + path.replace(".", "/"))
        default = next((d[2] for d in entry["defaults"] if in_range(version, d[0], d[1])), None)
        node["default"] = default
        if entry.get("deprecated"):
            node["deprecated"] = True
    for name in release["removed"]:
        properties[name] = REMOVED
    zero = defs[release["roots"]["/zero_optimization"]]
    for name in release["removed_zero"]:
        zero["properties"][name] = REMOVED
    schema["$defs"] = defs
    schema["x-dstui"] = {"format": FORMAT, "release": release}
    return schema


def _fill(node: Any, ref: dict[str, Any] | None) -> Any:
    """A copy of a reviewed block schema with the model's reference in the place of ``"MODEL"``."""
    if node == "MODEL":
        return ref
    if isinstance(node, dict):
        return {k: _fill(v, ref) for k, v in node.items()}
    if isinstance(node, list):
        return [_fill(v, ref) for v in node]
    return node


def _at(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """The property node at ``pointer``, made with its parents where missing."""
    node = schema
    for name in pointer.split("/")[1:]:
        node = node.setdefault("properties", {}).setdefault(name, {})
    return node


# -- before the schemas -------------------------------------------------------------------------

MODEL_FILES = (
    "comm/constants.py",
    "runtime/zero/config.py",
    "runtime/zero/offload_config.py",
    "comm/config.py",
    "monitor/config.py",
    "runtime/config.py",
    "runtime/compiler.py",
    "inference/config.py",
)
MODEL_ROOTS = {
    "/zero_optimization": "DeepSpeedZeroConfig",
    "/comms_logger": "CommsLoggerConfig",
    "/tensorboard": "TensorBoardConfig",
    "/wandb": "WandbConfig",
    "/csv_monitor": "CSVConfig",
    "/hybrid_engine": "HybridEngineConfig",
    "/weight_quantization": "WeightQuantConfig",
    "/compile": "CompileConfig",
}


def read_models(tree: Path) -> tuple[str, dict[str, Any]]:
    """(version, pointer -> default) of the pydantic models in a source tree that need not be importable."""
    constants: dict[str, Any] = {}
    classes: dict[str, ast.ClassDef] = {}
    for name in MODEL_FILES:
        path = tree / "deepspeed" / name
        if not path.exists():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                try:
                    constants[node.targets[0].id] = ast.literal_eval(node.value)
                except ValueError:
                    pass

    def value(node: ast.expr | None) -> Any:
        if isinstance(node, ast.Name):
            return constants[node.id]
        if isinstance(node, ast.Attribute):  # OffloadDeviceEnum.none; sys.maxsize
            return sys.maxsize if node.attr == "maxsize" else node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "pp_int":
                return int(value(node.args[0]))
            return {}  # a model with its own defaults
        return None if node is None else ast.literal_eval(node)

    def fields(name: str) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                yield from fields(base.id)
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id, node.annotation, node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, None, node.value

    out: dict[str, Any] = {}
    config = (tree / "deepspeed" / "runtime" / "config.py").read_text(encoding="utf-8")

    def walk(base: str, name: str) -> None:
        for field, annotation, default in fields(name):
            shown = field
            if (
                isinstance(default, ast.Call)
                and isinstance(default.func, ast.Name)
                and default.func.id == "Field"
            ):
                alias = next((k.value for k in default.keywords if k.arg == "alias"), None)
                shown = value(alias) if alias is not None else field
                default = default.args[0]
            out[f"{base}/{shown}"] = value(default)
            inner = [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)] if annotation else []
            for model in inner:
                if model in classes and not model.endswith("Enum"):
                    walk(f"{base}/{shown}", model)

    for pointer, name in MODEL_ROOTS.items():
        reader = {"CompileConfig": "get_compile_config", "WeightQuantConfig": "WeightQuantConfig"}.get(
            name, ""
        )
        if name in classes and reader in config:
            walk(pointer, name)
    return (tree / "version.txt").read_text().split()[0], out


def ranges(found: dict[str, dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """release -> key -> default, as key -> [[first release, last release, default], ...]."""
    out: dict[str, list[list[Any]]] = {}
    order = sorted(found, key=_key)
    for i, release in enumerate(order):
        for pointer, default in found[release].items():
            rows = out.setdefault(pointer, [])
            last = rows[-1] if rows else None
            if last is not None and last[1] == order[i - 1] and last[2:] == [default] and i:
                last[1] = release
            else:
                rows.append([release, release, default])
    return {k: out[k] for k in sorted(out)}


def timeline(schemas: list[dict[str, Any]], before: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """What ``timeline.json`` holds; ``before``: its part for the releases without a schema."""
    sys.path.insert(0, str(HERE.parent))
    from dstui.config.schema import Schema  # reads keys.json beside this file

    found: dict[str, dict[str, Any]] = {}
    blocks = {path.rpartition(".")[0] for path in (*keys["keys"], *keys["blocks"])}
    for release in before["releases"]:
        now = found[release] = {
            pointer: row[2]
            for pointer, rows in before["models"].items()
            for row in rows
            if in_range(release, row[0], row[1])
        }
        for path, entry in keys["keys"].items():
            read_by_model = entry.get("pydantic") and in_range(release, *entry["pydantic"])
            known = "defaults" in entry and in_range(release, entry["since"], entry.get("until"))
            if read_by_model or not known or path in blocks:
                continue
            default = next((d[2] for d in entry["defaults"] if in_range(release, d[0], d[1])), None)
            now["/" + path.replace(".", "/")] = default
    refused: dict[str, str] = {}
    for schema in sorted(schemas, key=lambda s: _key(s["x-dstui"]["release"]["version"])):
        loaded = Schema(schema["x-dstui"]["release"]["version"], schema)
        found[loaded.release] = {k.pointer: k.default for k in loaded.keys.values() if k.has_default}
        for pointer in loaded.removed:
            refused.setdefault(pointer, loaded.release)
    return {
        "releases": sorted(found, key=_key),
        "before": before,
        "refused": refused,
        "keys": ranges(found),
    }


def render_timeline(data: dict[str, Any]) -> str:
    """One line a key."""

    def table(rows: dict[str, Any], indent: str) -> str:
        inner = ",\n".join(f"{indent} {json.dumps(k)}: {_compact(v)}" for k, v in rows.items())
        return f"{{\n{inner}\n{indent}}}"

    before = data["before"]
    return (
        f'{{\n "releases": {_compact(data["releases"])},\n "before": {{\n'
        f'  "releases": {_compact(before["releases"])},\n  "models": {table(before["models"], "  ")}\n }},\n'
        f' "refused": {table(data["refused"], " ")},\n "keys": {table(data["keys"], " ")}\n}}\n'
    )


def render(schema: dict[str, Any]) -> str:
    """Compact JSON, one line a property and a definition, so that a difference can be read."""
    rows = []
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            inner = ",\n".join(f"  {json.dumps(k)}: {_compact(v)}" for k, v in value.items())
            rows.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            rows.append(f" {json.dumps(key)}: {_compact(value)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def remember(missing: list[str], path: Path) -> None:
    """Put hashes of code that was read, and that does what its last version did, into ``keys.json``."""
    text = path.read_text(encoding="utf-8")
    reviewed = json.loads(text)["reviewed"]
    for line in missing:
        kind, _space, code = line.partition(" ")
        name, _at_sign, digest = code.rpartition("@")
        if kind == "function":
            reviewed["functions"].setdefault(name, []).append(digest)
        else:
            name = name.rpartition(".")[2]
            same = [v for k, v in reviewed["validators"].items() if k.partition("@")[0] == name]
            if not same:
                sys.exit(f"{name}: a new validator needs a check in dstui/config/replay.py and its name here")
            reviewed["validators"][f"{name}@{digest}"] = same[-1]
    start, end = text.index(' "reviewed": {'), text.index(' "keys": {')
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in reviewed.items())
    _write(path, f'{text[:start]} "reviewed": {{\n{rows}\n }},\n{text[end:]}')


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    print(f"wrote {path.name} ({len(text.encode())} bytes)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write schemas/deepspeed-<version>.json and timeline.json.")
    parser.add_argument("source", nargs="*", help="installed, a folder, a sdist or deepspeed==VERSION")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch and pydantic")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    parser.add_argument("--reviewed", action="store_true", help="the new code was read and changes nothing")
    parser.add_argument("--before-schemas", nargs="+", metavar="TREE", help="source trees of 0.9.5-0.13.5")
    args = parser.parse_args()
    keys_path, timeline_path = HERE / "keys.json", HERE / "timeline.json"
    keys = json.loads(keys_path.read_text(encoding="utf-8"))
    releases: dict[str, dict[str, Any]] = {}
    for path in sorted(HERE.glob("deepspeed-*.json")):
        release = json.loads(path.read_text(encoding="utf-8"))["x-dstui"]["release"]
        releases[release["version"]] = release
    asked = []
    for source in args.source:
        with tempfile.TemporaryDirectory() as scratch:
            release = ask(args.python, find_tree(source, args.python, Path(scratch)))
        releases[release["version"]] = release
        asked.append(release["version"])
    if args.before_schemas:
        found = dict(read_models(Path(tree)) for tree in args.before_schemas)
        before = {"releases": sorted(found, key=_key), "models": ranges(found)}
    else:
        before = json.loads(timeline_path.read_text(encoding="utf-8"))["before"]
    outcome = 0
    schemas = []
    for version in sorted(releases, key=_key):
        release = releases[version]
        missing = review(release, keys["reviewed"])
        if missing and args.reviewed and version in asked:
            remember(missing, keys_path)
            keys = json.loads(keys_path.read_text(encoding="utf-8"))
            missing = review(release, keys["reviewed"])
        if missing:
            print(
                f"DeepSpeed {version}: read this code, then run this again with --reviewed:", file=sys.stderr
            )
            print("  " + "\n  ".join(missing), file=sys.stderr)
            return 1
        schemas.append(build(release, keys))
    files = {HERE / f"deepspeed-{s['x-dstui']['release']['version']}.json": render(s) for s in schemas}
    files[timeline_path] = render_timeline(timeline(schemas, before, keys))
    for path, text in files.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if args.check:
            print(f"{path.name} is stale: run python schemas/generate.py", file=sys.stderr)
            outcome = 1
        else:
            _write(path, text)
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
