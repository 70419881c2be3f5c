"""What a release makes of a config when it parses it: verdict, batch sizes, effective values.

``engine="deepspeed"``: the file goes to ``deepspeed.initialize`` as it is. From 0.18.6 that reads the file
into a dictionary first, so ``sequence_parallel_size`` counts; from 0.17.0 to 0.18.5 it counts only in a
dictionary, as the trainers hand it over. ``engine="hf"``: Hugging Face's
``HfTrainerDeepSpeedConfig`` fills ``"auto"`` from TrainingArguments first
(``transformers/integrations/deepspeed.py`` ``trainer_config_process`` and ``trainer_config_finalize``,
5.24) and refuses what contradicts them.

``world_size`` is the number of ranks. DeepSpeed divides it by ``sequence_parallel_size``; it does *not*
divide it by ``tensor_parallel.autotp_size`` (``runtime/config.py`` ``DeepSpeedConfig.__init__``, 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dstui.config import schema as schemas
from dstui.config.coerce import shown
from dstui.config.pointer import join_pointer, lookup, split_pointer
from dstui.config.replay import Model, Problem, Replay
from dstui.i18n import _

Verdict = Literal["accepted", "rejected", "unknown"]
AUTO = "auto"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

HF_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "fp16": False,
    "fp16_full_eval": False,
    "bf16": False,
    "bf16_full_eval": False,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "save_on_each_node": False,
}
"""TrainingArguments' own defaults for the fields that fill ``"auto"`` (transformers 5.24)."""


@dataclass(frozen=True)
class Resolved:
    """The answer of ``resolve``; see there."""

    release: str
    world_size: int
    engine: str
    verdict: Verdict
    problems: tuple[Problem, ...]
    """Why it is rejected, DeepSpeed's own first problem first; or why the verdict is unknown."""
    batch: Mapping[str, Any] | None
    """The three sizes as ``DeepSpeedConfig`` holds them (floats where it computes floats); None when
    it cannot or when they are still open."""
    data: Mapping[str, Any]
    """The dictionary that reaches DeepSpeed: ``"auto"`` filled where the engine fills it."""
    open: tuple[str, ...] = ()
    """Pointers whose ``"auto"`` the engine will fill with something not known here."""
    effective: Mapping[str, Any] | None = None
    """Every key that the release reads, with its value or default, by name as documented; None without schema."""
    blocks: Mapping[str, Model] = field(default_factory=dict, repr=False)

    @property
    def accepted(self) -> bool:
        return self.verdict == "accepted"

    @property
    def problem(self) -> Problem | None:
        """The first problem: what the user will see DeepSpeed complain about."""
        return self.problems[0] if self.problems else None

    def value(self, pointer: str, default: Any = None) -> Any:
        """The effective value at ``pointer`` (aliases and old names work), the release's default included.

        ``default`` when the release does not read the key, when it is unknown here, or when ``"auto"``
        is still open there.
        """
        if self.effective is None or pointer in self.open:
            return default
        tokens = split_pointer(pointer)
        if tokens[:1] == ["bfloat16"]:
            tokens[0] = "bf16"
        found = lookup(self.effective, join_pointer(*tokens), _MISSING)
        if found is _MISSING:
            key = schemas.load(self.release).key(join_pointer(*tokens))
            found = lookup(self.effective, key.pointer, _MISSING) if key else _MISSING
        return default if found is _MISSING else found

    def given(self, pointer: str) -> bool:
        """Whether the file itself has ``pointer`` (under this very name)."""
        return lookup(self.data, pointer, _MISSING) is not _MISSING

    # -- what the rest of dstui asks most --

    @property
    def stage(self) -> int | None:
        """ZeRO stage 0-3."""
        return _int(self.value("/zero_optimization/stage"))

    @property
    def offload_optimizer(self) -> str | None:
        """``none``, ``cpu`` or ``nvme`` as parsed (at stage 1/2 DeepSpeed treats nvme as cpu)."""
        return self._device("/zero_optimization/offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        """``none``, ``cpu`` or ``nvme`` as parsed (without effect below stage 3)."""
        return self._device("/zero_optimization/offload_param")

    def _device(self, pointer: str) -> str | None:
        if self.effective is None:
            return None
        block = self.value(pointer)
        return str(block.get("device", "none")) if isinstance(block, Mapping) else "none"

    @property
    def pin_optimizer(self) -> bool | None:
        """``offload_optimizer.pin_memory``; None without that block."""
        return _bool(self.value("/zero_optimization/offload_optimizer/pin_memory"))

    @property
    def pin_param(self) -> bool | None:
        """``offload_param.pin_memory``; None without that block."""
        return _bool(self.value("/zero_optimization/offload_param/pin_memory"))

    @property
    def precision(self) -> str | None:
        """``bf16``, ``fp16`` or ``fp32``; None when unknown or still open."""
        if self.effective is None or {"/bf16/enabled", "/fp16/enabled"} & set(self.open):
            return None
        if self.value("/bf16/enabled"):
            return "bf16"
        return "fp16" if self.value("/fp16/enabled") else "fp32"


_MISSING = object()


def _int(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def resolve(
    data: Mapping[str, Any],
    *,
    release: str,
    world_size: int,
    engine: str = "deepspeed",
    args: Mapping[str, Any] | None = None,
    accelerator: str = "cuda",
) -> Resolved:
    """What ``release`` makes of ``data`` on ``world_size`` ranks, reached through ``engine``.

    ``engine``: ``deepspeed`` (also ``lightning``), ``hf`` or ``accelerate``, whose trainers fill ``"auto"``.
    ``args``: TrainingArguments fields by name, plus ``hidden_size`` and ``num_training_steps``; fields not
    named have TrainingArguments' default. Without ``args`` what they would fill stays open.
    ``accelerator``: DeepSpeed's device name; only ``aio.use_gds`` asks for it at parse.

    A release without a schema gets the verdict ``unknown`` and no effective values.
    """
    raw: dict[str, Any] = _copy(data)
    fills = engine in ("hf", "accelerate")
    open_: list[str] = []
    early: list[Problem] = []
    if fills:
        raw, open_, early = _fill_hf(raw, world_size, args)
    if not schemas.known(release):
        reason = Problem(
            "",
            "release",
            _("DeepSpeed {release} has no schema here").format(release=release),
            {"known": schemas.releases()},
        )
        return Resolved(release, world_size, engine, "unknown", (reason,), None, raw, tuple(open_))
    schema = schemas.load(release)
    replay = Replay(schema, _closed(raw, open_), world_size, accelerator, from_file=engine == "deepspeed")
    try:
        replay.run()
    except RecursionError:
        replay.problems.append(Problem("", "crash", _("is nested too deeply to be read")))
    seen = {(p.pointer, p.kind) for p in early}
    problems = [*early, *(p for p in replay.problems if (p.pointer, p.kind) not in seen)]
    undecided = [p for p in open_ if p[1:] in _BATCH]
    batch = replay.batch
    verdict: Verdict = "rejected" if problems else "accepted"
    if undecided:
        given = [n for n in _BATCH if raw.get(n) is not None]
        batch = None
        problems = [p for p in problems if not p.kind.startswith("batch")]
        verdict = "rejected" if problems else "accepted"
        if not problems and len(undecided) < len(given):
            verdict = "unknown"
            problems = [
                Problem(
                    undecided[0],
                    "open",
                    _("'{key}' is filled from the training arguments, which are not known here").format(
                        key=undecided[0][1:]
                    ),
                )
            ]
    return Resolved(
        release=release,
        world_size=world_size,
        engine=engine,
        verdict=verdict,
        problems=tuple(problems),
        batch=batch,
        data=raw,
        open=tuple(open_),
        effective=_effective(schema, replay),
        blocks=replay.blocks,
    )


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _closed(raw: dict[str, Any], open_: list[str]) -> dict[str, Any]:
    """``raw`` with some legal value wherever the engine will have put one."""
    if not open_:
        return raw
    out: dict[str, Any] = _copy(raw)
    for pointer in open_:
        tokens = split_pointer(pointer)
        parent = lookup(out, join_pointer(*tokens[:-1]))
        if isinstance(parent, dict):
            parent.pop(tokens[-1], None)
    if all(out.get(n) is None for n in _BATCH[:2]):
        out["train_micro_batch_size_per_gpu"] = 1
    return out


def _effective(schema: schemas.Schema, replay: Replay) -> dict[str, Any]:
    """Every key that the release reads, by documented name."""

    def merge(node: Mapping[str, Any], given: Any, base: str) -> Any:
        out: dict[str, Any] = {}
        for name, child in node.get("properties", {}).items():
            pointer = base + join_pointer(name)
            if {"hidden", "removed"} & set(child.get("x-dstui", ())):
                continue
            if pointer in schema.facts["roots"]:
                if pointer in replay.blocks:
                    out[name] = replay.blocks[pointer].values
                continue
            value = given.get(name, _MISSING) if isinstance(given, dict) else _MISSING
            if "properties" in child and (value is _MISSING or isinstance(value, dict)):
                if value is _MISSING and base == "" and not _has_defaults(child):
                    continue
                out[name] = merge(child, value, pointer)
            elif value is not _MISSING:
                out[name] = value
            elif "default" in child:
                out[name] = child["default"]
        if isinstance(given, dict) and base:  # what the release keeps and passes on (optimizer.params...)
            for name, value in given.items():
                out.setdefault(name, value)
        return out

    given = replay.data
    if "bfloat16" in given and "bf16" not in given and "/bf16" not in schema.facts["roots"]:
        given = {**given, "bf16": given["bfloat16"]}
    result: dict[str, Any] = merge(schema.json_schema, given, "")
    for name in ("optimizer", "scheduler"):  # absent: no optimizer, not one with default arguments
        if name not in replay.data:
            result.pop(name, None)
        elif isinstance(replay.data[name], dict):
            result[name] = {"type": None, "params": None, **replay.data[name]}
    if replay.batch is not None:
        result.update(replay.batch)
    return result


def _has_defaults(node: Mapping[str, Any]) -> bool:
    return any(
        isinstance(c, dict) and ("default" in c or "$ref" in c or "anyOf" in c or _has_defaults(c))
        for c in node.get("properties", {}).values()
    )


def _hf_crashes(data: Mapping[str, Any]) -> list[Problem]:
    """Values on which ``HfDeepSpeedConfig`` itself fails: it calls ``.get`` on these (accelerate
    ``utils/deepspeed.py`` ``find_config_node`` and ``set_stage_and_offload``)."""
    walked = [
        "zero_optimization",
        "optimizer",
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "fp16",
        "bf16",
    ]
    zero = data.get("zero_optimization")
    if (
        isinstance(zero, Mapping)
        and not isinstance(zero.get("stage"), (dict, list))
        and zero.get("stage") in (2, 3)
    ):
        walked += ["zero_optimization.offload_optimizer", "zero_optimization.offload_param"]
    out = []
    for path in walked:
        node: Any = data
        for token in path.split("."):
            node = node.get(token) if isinstance(node, Mapping) else None
        pointer = join_pointer(*path.split("."))
        if node is not None and not isinstance(node, Mapping):
            out.append(
                Problem(
                    pointer,
                    "block-type",
                    _("must be an object, found {found}").format(found=shown(node)),
                    {"wanted": "object", "found": node},
                )
            )
        elif "offload" in path and node and isinstance(node.get("device"), (dict, list)):
            out.append(
                Problem(
                    pointer + "/device",
                    "type",
                    _("must be {wanted}, found {found}").format(
                        wanted=_("a string"), found=shown(node["device"])
                    ),
                    {"wanted": "str", "found": node["device"]},
                )
            )
    return out


# -- Hugging Face -------------------------------------------------------------------------------


def _fill_hf(
    data: dict[str, Any], world_size: int, args: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Fill ``"auto"`` as transformers does; returns (data, pointers still open, contradictions)."""
    problems: list[Problem] = []
    open_: list[str] = []
    known = args is not None
    a = {**HF_DEFAULTS, **(args or {})}

    def fill(path: str, value: Any, source: str, must_match: bool = True) -> None:
        tokens = path.split(".")
        node: Any = data
        for token in tokens[:-1]:
            node = node.get(token) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return
        name, pointer = tokens[-1], join_pointer(*tokens)
        if node.get(name) == AUTO:
            if value is _MISSING:
                open_.append(pointer)
            else:
                node[name] = value
        elif must_match and known and value is not _MISSING:
            found = node.get(name)
            if found is not None and found != value:
                problems.append(
                    Problem(
                        pointer,
                        "mismatch",
                        _(
                            "{found} here, but {source} is {value}: Hugging Face refuses the contradiction"
                        ).format(found=shown(found), source=source, value=shown(value)),
                        {"wanted": value, "found": found, "source": source},
                    )
                )

    def arg(name: str) -> Any:
        return a[name] if known else _MISSING

    problems.extend(_hf_crashes(data))

    micro, steps = arg("per_device_train_batch_size"), arg("gradient_accumulation_steps")
    total = world_size * micro * steps if known else _MISSING
    fill("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
    fill("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
    fill("train_batch_size", total, _("train_batch_size (calculated)"))
    fill("gradient_clipping", arg("max_grad_norm"), "max_grad_norm")
    fill("optimizer.params.lr", arg("learning_rate"), "learning_rate")
    betas = [a["adam_beta1"], a["adam_beta2"]] if known else _MISSING
    fill("optimizer.params.betas", betas, "adam_beta1, adam_beta2")
    fill("optimizer.params.eps", arg("adam_epsilon"), "adam_epsilon")
    fill("optimizer.params.weight_decay", arg("weight_decay"), "weight_decay")
    fill("scheduler.params.warmup_min_lr", 0, "", must_match=False)
    fill("scheduler.params.warmup_max_lr", arg("learning_rate"), "learning_rate")
    if known and a["save_on_each_node"]:
        data.setdefault("checkpoint", {})
        if isinstance(data["checkpoint"], dict):
            data["checkpoint"]["use_node_local_storage"] = a["save_on_each_node"]
    fp16 = (a["fp16"] or a["fp16_full_eval"]) if known else _MISSING
    bf16 = (a["bf16"] or a["bf16_full_eval"]) if known else _MISSING
    fill("fp16.enabled", fp16, "fp16")
    fill("bf16.enabled", bf16, "bf16")
    # trainer_config_finalize
    zero = data.get("zero_optimization")
    hidden = a.get("hidden_size") if known else None
    if isinstance(zero, dict):
        stage3 = zero.get("stage") == 3
        for name, size in (
            ("reduce_bucket_size", lambda h: h * h),
            ("stage3_prefetch_bucket_size", lambda h: int(0.9 * h * h)),
            ("stage3_param_persistence_threshold", lambda h: 10 * h),
        ):
            if zero.get(name) == AUTO:
                if hidden is None:
                    open_.append(join_pointer("zero_optimization", name))
                elif name == "reduce_bucket_size" or stage3:  # else it stays "auto", which DeepSpeed drops
                    zero[name] = size(hidden)
    training_steps = a.get("num_training_steps") if known else None
    fill(
        "scheduler.params.total_num_steps",
        _MISSING if training_steps is None else training_steps,
        "num_training_steps",
    )
    warmup: Any = _MISSING
    if known:
        if a["warmup_steps"] >= 1:
            warmup = int(a["warmup_steps"])
        elif not a["warmup_steps"] and not a["warmup_ratio"]:
            warmup = 0
        elif training_steps is not None:
            warmup = math.ceil(training_steps * (a["warmup_ratio"] or a["warmup_steps"]))
        warmup = warmup if warmup is _MISSING else max(1, warmup)
    fill("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
    return data, open_, problems
