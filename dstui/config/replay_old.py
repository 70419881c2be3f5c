"""What only older releases do: fp16 and bf16 as plain dictionaries (to 0.17.0),
and the readers of removed features: elasticity, compression, eigenvalue (to 0.19.6/0.19.7)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dstui.config.coerce import shown
from dstui.config.pointer import join_pointer
from dstui.i18n import _

if TYPE_CHECKING:
    from dstui.config.replay import Replay


# -- fp16 and bf16 (``runtime/config.py`` get_fp16_enabled ... get_dynamic_loss_scale_args, to 0.17.0) --


def precision(replay: Replay) -> None:
    """fp16 and bf16 as plain dictionaries."""
    fp16 = replay.block("fp16") if "fp16" in replay.data else {}
    name = next((n for n in ("bf16", "bfloat16") if n in replay.data), None)
    bf16 = replay.block(name) if name else {}
    if not fp16.get("enabled", False):
        return
    if bf16.get("enabled", False):
        replay.report("/fp16/enabled", "combination", _("fp16 and bf16 cannot both be enabled"))
    replay.fp16_master = fp16.get("fp16_master_weights_and_grads", False)
    power = fp16.get("initial_scale_power", 16)
    try:
        if isinstance(power, int) and power > 10**9:  # Python would try until its memory is used up
            raise OverflowError
        2**power
    except (TypeError, ArithmeticError):
        replay.report(
            "/fp16/initial_scale_power",
            "type",
            _("must be {wanted}, found {found}").format(
                wanted=_("a number that 2 can be raised to"), found=shown(power)
            ),
            wanted="int",
            found=power,
        )


# -- elasticity ---------------------------------------------------------------------------------

_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120,
    20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400,
    665280, 720720,
)  # fmt: skip


def elasticity(replay: Replay, block: dict[str, Any]) -> None:
    """``elasticity/elasticity.py`` ``compute_elastic_config`` and the part of ``DeepSpeedConfig.__init__``."""
    if not block.get("enabled", False):
        return

    def refuse(key: str, message: str) -> Exception:
        return replay.stop("/elasticity" + (join_pointer(key) if key else ""), "combination", message)

    for key in ("max_train_batch_size", "micro_batch_sizes"):
        if key not in block:
            raise refuse(
                "", _("'{key}' must be given while '{block}' is enabled").format(key=key, block="elasticity")
            )
    largest, micros = block["max_train_batch_size"], block["micro_batch_sizes"]
    if not isinstance(micros, list) or not all(isinstance(m, int) and m > 0 for m in micros):
        raise refuse("micro_batch_sizes", _("must be a list of positive integers"))
    least, most = block.get("min_gpus", 1), block.get("max_gpus", 10000)
    if least < 1 or most < 1 or most < least:
        raise refuse("min_gpus", _("min_gpus and max_gpus must be positive, min_gpus not above max_gpus"))
    model_parallel, per_node = block.get("model_parallel_size", 1), block.get("num_gpus_per_node", 1)
    for key, value in (("model_parallel_size", model_parallel), ("num_gpus_per_node", per_node)):
        if value < 1:
            raise refuse(key, _("must be at least 1"))
    if block.get("min_time", 0) < 0:
        raise refuse("min_time", _("must not be negative"))
    version = float(block.get("version", 0.2))
    if (model_parallel > 1 and version != 0.2) or version > 0.2:
        raise refuse("version", _("elasticity version {version} cannot do this").format(version=version))
    larger = block.get("prefer_larger_batch", True)
    world = replay.world
    if version == 0.1:
        total, valid = _compatible(replay, micros, largest, least, most, larger)
        total = int(total)
    elif version == 0.2:
        total, valid = _compatible_nodes(
            replay, micros, largest, world, least, most, larger, per_node, model_parallel
        )
        total = int(total)
    else:
        raise refuse("version", _("elasticity version {version} cannot do this").format(version=version))
    if world not in valid:
        raise refuse(
            "",
            _("elasticity: a world size of {world} is not among the valid ones: {valid}").format(
                world=world, valid=valid
            ),
        )
    micro = next((m for m in sorted(set(micros), reverse=True) if total // world % m == 0), None)
    if micro is None:
        raise refuse("micro_batch_sizes", _("no micro batch divides the batch per rank"))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if not block.get("ignore_non_elastic_batch_info", False):
        found = next((n for n in names if n in replay.data), None)
        if found:
            raise replay.stop(
                join_pointer(found),
                "combination",
                _("'{key}' must not be given while elasticity is enabled").format(key=found),
            )
    replay.elastic = dict(zip(names, (total, micro, total // (micro * world)), strict=True))


def _compatible(
    replay: Replay, micros: list[int], largest: Any, least: Any, most: Any, larger: Any
) -> tuple[Any, list[Any]]:
    """``_get_compatible_gpus_v01``: the batch size with the most usable rank counts."""
    least = least or 1
    most = most or largest // min(micros)
    if not all(m <= largest for m in micros):
        raise ValueError("a micro batch is above max_train_batch_size")
    candidates = set()
    for base in [*micros, math.lcm(*micros)]:
        if base > largest and replay.variants.get("elasticity.elasticity") == "within-limit":
            continue
        if base >= largest:
            candidates.add(base)
        else:
            value = largest // base
            index = next((i for i, h in enumerate(_HIGHLY_COMPOSITE) if h > value), 0)
            candidates.add(_HIGHLY_COMPOSITE[index - 1] * base)
    count, valid, final = 0, None, int(min(micros))
    for size in list(candidates):
        ranks = _rank_counts(size, micros, least, most)
        better = size > final if larger else size < final
        if len(ranks) > count or (len(ranks) == count and better):
            count, valid, final = len(ranks), ranks, size
    if valid is None:
        raise TypeError("no rank count fits")
    return final, valid


def _rank_counts(size: int, micros: list[int], least: Any, most: Any) -> list[int]:
    found = set()
    for micro in micros:
        if size % micro == 0:
            top = size // micro
            if least <= top <= most:
                found.add(top)
            found.update(i for i in range(1, top // 2 + 1) if least <= i <= most and top % i == 0)
    return sorted(found)


def _compatible_nodes(
    replay: Replay, micros: list[int], largest: Any, world: Any, least: Any, most: Any, larger: Any,
    per_node: Any, model_parallel: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``_get_compatible_gpus_v02``: as v0.1, at the level of nodes."""
    if per_node % model_parallel != 0:
        raise replay.stop(
            "/elasticity/num_gpus_per_node", "combination", _("must be a multiple of model_parallel_size")
        )
    per_node_dp = per_node // model_parallel
    total, nodes = _compatible(
        replay, micros, int(largest / per_node_dp), int(least / per_node), int(most / per_node), larger
    )
    total = int(total) * per_node_dp
    valid = [n * per_node_dp for n in nodes]
    if world // model_parallel in valid:
        return total, valid
    current = (world / per_node) * per_node_dp
    sizes = []
    for micro in micros:
        smallest = micro * current
        sizes.append(math.floor(largest / float(smallest)) * smallest)
    return (max(sizes) if larger else min(sizes)), [int(current)]


# -- compression (compression/config.py) --------------------------------------------------------

_TECHNIQUES: tuple[tuple[str, dict[str, tuple[str, list[str]]], tuple[str, ...]], ...] = (
    (
        "weight_quantization",
        {
            "quantization_type": ("symmetric", ["symmetric", "asymmetric"]),
            "rounding": ("nearest", ["nearest", "stochastic"]),
        },
        ("start_bits", "target_bits"),
    ),
    (
        "activation_quantization",
        {
            "quantization_type": ("symmetric", ["symmetric", "asymmetric"]),
            "range_calibration": ("dynamic", ["dynamic", "static"]),
        },
        ("bits",),
    ),
    ("sparse_pruning", {"method": ("l1", ["l1", "topk", "snip_momentum"])}, ("dense_ratio",)),
    ("row_pruning", {"method": ("l1", ["l1", "topk"])}, ("dense_ratio",)),
    ("head_pruning", {"method": ("topk", ["l1", "topk"])}, ("dense_ratio",)),
    ("channel_pruning", {"method": ("l1", ["l1", "topk"])}, ("dense_ratio",)),
)


def compression(replay: Replay, block: dict[str, Any]) -> None:
    """Every technique is read even when it is not enabled; each needs its ``different_groups``."""
    base = "/compression_training"
    for name, choices, required in _TECHNIQUES:
        if name in block:
            replay.step(
                base + join_pointer(name),
                lambda name=name, choices=choices, required=required: _technique(  # type: ignore[misc]
                    replay, block, name, choices, required
                ),
            )
    if "layer_reduction" in block:
        inner = replay.block("layer_reduction", block, base)
        if inner.get("enabled", False):
            replay._enabled_required("layer_reduction", block, base)


def _technique(
    replay: Replay,
    block: dict[str, Any],
    name: str,
    choices: dict[str, tuple[str, list[str]]],
    required: tuple[str, ...],
) -> None:
    base = f"/compression_training/{name}"
    technique = replay.block(name, block, "/compression_training")
    if "shared_parameters" in technique:
        shared = replay.block("shared_parameters", technique, base)
        where = base + "/shared_parameters"
        for key, (default, allowed) in choices.items():
            if shared.get(key, default) not in allowed:
                replay._choice(f"{where}/{key}", shared.get(key), allowed)
        if "fp16_mixed_quantize" in shared and name == "weight_quantization":
            replay.block("fp16_mixed_quantize", shared, where)
        if name == "sparse_pruning" and shared.get("method") == "snip_momentum":
            ratio, offset = shared.get("dense_ratio", 0.1), shared.get("schedule_offset", 1000)
            if not 0 < ratio < 1:
                replay.report(where + "/dense_ratio", "bound", _("must be between 0 and 1"))
            if not offset <= shared.get("schedule_offset_end", offset):
                replay.report(where + "/schedule_offset_end", "bound", _("must not be below schedule_offset"))
        if name == "head_pruning" and shared.get("enabled", False) and "num_heads" not in shared:
            replay.report(
                where,
                "combination",
                _("'{key}' must be given while '{block}' is enabled").format(key="num_heads", block=name),
            )
    if "different_groups" not in technique:
        raise replay.stop(
            base, "combination", _("'{key}' must be given in this block").format(key="different_groups")
        )
    groups = replay.block("different_groups", technique, base)
    for group in groups:
        where = f"{base}/different_groups"
        inner = replay.block(group, groups, where)
        where += join_pointer(group)
        if "params" not in inner:
            raise replay.stop(
                where, "combination", _("'{key}' must be given in this block").format(key="params")
            )
        params = replay.block("params", inner, where)
        for key in required:
            if key not in params:
                replay.report(
                    where + "/params", "combination", _("'{key}' must be given in this block").format(key=key)
                )


def eigenvalue(replay: Replay) -> None:
    """``get_eigenvalue_config``: read only when ``compression_training``'s own ``shared_parameters`` say enabled."""
    block = replay.data["compression_training"]
    shared = block.get("shared_parameters")
    if not isinstance(shared, dict) or not shared.get("enabled", False):
        return
    if replay.data.get("quantize_training") is None:
        if replay.variants.get("get_eigenvalue_config") != "needs-block":
            return
        if "quantize_training" not in replay.data:
            where = "/compression_training"
            message = _("'{key}' must be given while '{block}' is enabled")
            message = message.format(key="quantize_training", block="compression_training")
            raise replay.stop(where, "combination", message)
    inner = replay.block("quantize_training").get("eigenvalue", {})
    if isinstance(inner, dict) and inner.get("enabled", False):
        replay.report(
            "/quantize_training/eigenvalue", "combination", _("this feature is switched off in this release")
        )
