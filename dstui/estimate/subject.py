"""What an estimate was asked, as JSON and as keys: the same question must be recognised when a run has answered it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.settings import Settings

_SHAPE_KEYS = (
    "family", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied", "experts",
    "experts_per_token",
)  # fmt: skip
_NO_CLASS = frozenset({"release", "param_groups", "hold_logits", "load", "gather_on_save"})
"""Settings that do not separate classes: the release is the machine's, the others are seldom known beforehand."""


def subject(shape: ModelShape, training: Training) -> dict[str, Any]:
    """JSON of the two inputs that a run's folder does not hold otherwise."""
    return {"shape": dataclasses.asdict(shape), "training": dataclasses.asdict(training)}


def from_json(data: Any) -> tuple[ModelShape, Training] | None:
    """Inverse of ``subject``; None for anything else. Unknown keys are ignored (a later release wrote them)."""
    if not isinstance(data, Mapping):
        return None
    try:
        shape = _fill(ModelShape, data["shape"])
        return (
            dataclasses.replace(shape, notes=tuple(shape.notes)),
            training_from(data["training"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def training_from(data: Mapping[str, Any]) -> Training:
    """A Training from its JSON."""
    training: Training = _fill(Training, data)
    if not isinstance(training.lora_targets, str):
        training = dataclasses.replace(training, lora_targets=tuple(training.lora_targets))
    return training


def _fill(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    return kind(**{k: v for k, v in data.items() if k in known})


def fingerprint(shape: ModelShape) -> str:
    """Twelve hex digits of the model's dimensions, whatever it is called; of its size where only that is known."""
    keys: dict[str, Any] = {k: getattr(shape, k) for k in _SHAPE_KEYS}
    if shape.family is None:
        keys["params"] = shape.params
    keys["extra"] = dict(shape.extra)
    return _digest(keys)


def settings_class(s: Settings) -> str:
    """Twelve hex digits of all settings that decide about memory: equal for runs that should measure the same."""
    keys = {k: v for k, v in dataclasses.asdict(s).items() if k not in _NO_CLASS}
    keys["lora_targets"] = sorted(s.lora_targets)
    return _digest(keys)


def settings_summary(s: Settings) -> dict[str, Any]:
    """The same in words that a person can read in the calibration's file."""
    names = (
        "stage", "offload_optimizer", "offload_param", "ranks", "processes", "ranks_per_node", "micro_batch", "accumulation", "seq",
        "checkpointing", "attention", "optimizer", "lora_rank", "quant", "zero_init", "expandable",
    )  # fmt: skip
    return {name: getattr(s, name) for name in names}


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
