"""Configs that are wrong in every way that people and scripts make them wrong. Seeded: the same each run."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from dstui.config import schema
from dstui.config.pointer import split_pointer

BASES: list[dict[str, Any]] = [
    {"train_batch_size": 16},
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
    {
        "train_batch_size": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_count": 5},
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e7,
        },
    },
    {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "round_robin_gradients": True},
        "flops_profiler": {"enabled": False},
        "wall_clock_breakdown": False,
        "activation_checkpointing": {"partition_activations": True},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
    },
    {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 1,
            "zenflow": {"topk_ratio": 0.2, "update_interval": 4},
            "leaf_module": {"classes": ["A"]},
        },
        "aio": {"block_size": 1048576},
        "checkpoint": {"tag_validation": "Warn", "writer": {"type": "fast"}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        },
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}},
        "compile": {"deepcompile": False, "passes": ["z1"]},
        "timers": {"throughput": {"enabled": True}},
        "expert_parallel": {"enabled": False},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": False}},
            "data_routing": {"random_ltd": {"enabled": False}},
        },
        "hybrid_engine": {"enabled": False},
        "weight_quantization": {"enabled": True},
    },
]
OLD: dict[str, list[Any]] = {
    "elasticity": [
        {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1},
        {
            "enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [1, 2],
            "ignore_non_elastic_batch_info": True, "min_gpus": 1, "max_gpus": 4, "version": 0.2,
        },
        {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 4,
         "model_parallel_size": 2, "ignore_non_elastic_batch_info": True, "max_gpus": 16},
        {"enabled": True, "micro_batch_sizes": [2, 4]}, {"enabled": False}, None, {},
    ],
    "compression_training": [
        {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {
            "w": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["a"]}}}},
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        {"weight_quantization": {"shared_parameters": {"rounding": "odd"}, "different_groups": {}}},
        {"sparse_pruning": {"shared_parameters": {"method": "snip_momentum", "dense_ratio": 2}, "different_groups": {}}},
        {"head_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"a": {"params": {"dense_ratio": 0.5}}}}},
        {"row_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"a": {"params": {}}}}},
        {"layer_reduction": {"enabled": True, "keep_number_layer": 5}}, {"layer_reduction": {}}, {}, None,
    ],
    "sparse_attention": [{"mode": "fixed"}, {"mode": "odd"}, {}, None, {"mode": ["a"]}],
    "amp": [{"enabled": True, "opt_level": "O1"}, {"opt_level": "O1"}, None, False, {"enabled": False}],
    "progressive_layer_drop": [{"enabled": True, "theta": 0.5}, {"theta": 0.5}, None],
    "curriculum_learning": [{"enabled": True, "min_difficulty": 8}, {"min_difficulty": 8}, 3],
    "nebula": [{"enabled": True}, None, []],
    "eigenvalue": [{"enabled": True}, None],
    "quantize_training": [{"enabled": True, "eigenvalue": {"enabled": True}}, None],
    "sparse_gradients": [True, False, None],
    "graph_harvesting": [True, None],
    "zero_optimization/mics_shard_size": [4, -1, "auto", None],
    "zero_optimization/mics_hierarchical_params_gather": [True, "x"],
    "zero_optimization/zeropp_loco_param": [{"err_beta": 0.8}, None, 3],
    "zero_optimization/cpu_offload": [True, False, None, "auto", "maybe", 1],
    "zero_optimization/cpu_offload_param": [True, False, None, "auto"],
    "zero_optimization/cpu_offload_use_pin_memory": [True, "x"],
    "zero_optimization/stage3_gather_fp16_weights_on_model_save": [True, False, "auto"],
    "bfloat16": [{"enabled": True}, {"enabled": True, "x": 1}, None, 3],
    "zero_optimization": [True, False, None, [], "auto", 3, {"stage": 1, "strict": True}, {"strict": True, "stage": "auto"}],
    "allgather_size": [1000, -1, "x"],
    "sequence_parallel_size": [1, 2, 4, 0, "2", None, 3],
    "dump_state": [True],
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, -1, 1.5, 0.5, 2.0, 1e9, 1e20, 5e8, 10**25, "auto", "", "abc", "1", "0", "yes",
    "True", " 2 ", "+3", "1e3", "1.0", "2.5", "1_000", "inf", "nan", [], [1], ["a"], [None], {}, {"enabled": True},
    {"a": 1}, "cpu", "nvme", "none", "CPU", "fp16", "BF16", "bf16", "mean", "SUM", "sum", "epoch", "throughput", "fail",
    "socket", "torch", "z3", ["z1", "z2"], ["autotp"], {"stage": 1}, {"params": None}, {"type": "Adam", "params": []},
    {"type": 3}, {"pipeline_stage": 1}, {"throughput": None}, {"throughput": {"enabled": "no"}}, ["throughput"],
    {"max_tokens": "7", "enabled": True}, {"enabled": True, "max_batch_size": None},
]  # fmt: skip
NAMES = [
    "foo",
    "stage2",
    "strict",
    "self",
    "enabled",
    "Stage",
    "offload",
    "device",
    "auto",
    "pin_memory",
    "opt_level",
    "",
]


def put(data: dict[str, Any], tokens: list[str], value: Any) -> None:
    """Set a value, making objects on the way; leaves the data alone where the way is blocked."""
    for token in tokens[:-1]:
        if not isinstance(data.get(token), dict):
            if token in data and data[token] is not None:
                return
            data[token] = {}
        data = data[token]
    data[tokens[-1]] = copy.deepcopy(value)


def _objects(data: Any, base: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict):
        yield base
        for k, v in data.items():
            yield from _objects(v, (*base, k))


def mutate(data: dict[str, Any], pointers: list[list[str]], pick: random.Random) -> None:
    kind = pick.random()
    if kind < 0.45:
        put(data, pick.choice(pointers), pick.choice(VALUES))
    elif kind < 0.65:
        path = pick.choice(list(OLD))
        put(data, path.split("/"), pick.choice(OLD[path]))
    elif kind < 0.78:
        where = pick.choice(list(_objects(data)))
        put(data, [*where, pick.choice(NAMES)], pick.choice(VALUES))
    elif kind < 0.88:
        name = pick.choice([p[0] for p in pointers])
        data[name] = copy.deepcopy(pick.choice(VALUES))
    elif kind < 0.94:
        name = pick.choice(
            ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
        )
        data[name] = pick.choice(
            [1, 2, 4, 8, 16, 0, -1, 3, 2.5, 16.0, True, None, "auto", "8", [1], 1e12, 10**400]
        )
    elif data:
        where = pick.choice(list(_objects(data)))
        node = data
        for token in where:
            node = node[token]
        if node:
            del node[pick.choice(list(node))]


def spell(data: dict[str, Any], pick: random.Random) -> str:
    """The data as text, sometimes as people write Hjson, sometimes with a key twice."""
    text = json.dumps(data, indent=pick.choice([None, 2, 4]))
    kind = pick.random()
    if kind < 0.05 and text.startswith("{\n"):
        text = "{\n  # a comment\n  // another\n" + text[2:]
    elif kind < 0.10 and "\n" in text:
        text = text.replace("\n}", ",\n}") if len(data) else text
    elif kind < 0.13 and data:
        key = pick.choice(list(data))
        text = text.rstrip()[:-1] + f", {json.dumps(key)}: 1}}"
    elif kind < 0.15:
        text = text.replace('"enabled"', "enabled")
    elif kind < 0.17:
        text = text[: pick.randrange(len(text))]
    return text


def _pointers(release: str) -> list[list[str]]:
    """Every key and alias that some release has, as tokens; those of ``release`` first."""
    out: dict[tuple[str, ...], None] = dict.fromkeys(tuple(p) for p in of_release(release))
    for name, patch in schema.key_texts()["keys"].items():
        tokens = tuple(name.split("."))
        out[tokens] = None
        for alias in patch.get("aliases", ()):
            out[(*tokens[:-1], alias)] = None
    return [list(p) for p in out]


def of_release(release: str) -> list[list[str]]:
    """Every key that ``release`` reads and every other name it has for one."""
    out = []
    for pointer, key in schema.load(release).keys.items():
        tokens = split_pointer(pointer)
        out += [tokens, *([*tokens[:-1], alias] for alias in key.aliases)]
    return out


def _harmless(data: dict[str, Any]) -> bool:
    """False for what keeps Python busy until its memory is used up: 2 to the power of 10**25 (to 0.17.0)."""
    fp16 = data.get("fp16")
    power = fp16.get("initial_scale_power") if isinstance(fp16, dict) else None
    return not (isinstance(power, int) and power > 10**6)


def sample(release: str, count: int, seed: int = 1) -> Iterator[tuple[int, str]]:
    """``count`` pairs of world size and text."""
    pick = random.Random(seed)
    pointers = _pointers(release)
    made = 0
    while made < count:
        data = copy.deepcopy(BASES[made % len(BASES)])
        for _ in range(pick.choice([0, 1, 1, 1, 1, 2, 2, 3])):
            mutate(data, pointers, pick)
        if _harmless(data):
            made += 1
            yield pick.choice([1, 1, 2, 8]), spell(data, pick)


def holds(data: Any, tokens: list[str]) -> bool:
    for token in tokens:
        if not isinstance(data, dict) or token not in data:
            return False
        data = data[token]
    return True


def covering(
    release: str, count: int, seed: int = 1, times: int = 5, seen: set[str] | None = None
) -> Iterator[tuple[int, str]]:
    """``count`` distinct pairs; first each key and each alias of ``release`` ``times`` times with another
    value, the rest as ``sample``. ``seen``: texts not to be used again, kept up to date."""
    pick = random.Random(seed)
    seen = set() if seen is None else seen
    made = 0
    usual = [b for b in BASES if _refused_by_none(release, b)]
    for tokens in of_release(release):
        values = pick.sample(VALUES, len(VALUES))
        done = 0
        while done < times and values:
            data = copy.deepcopy(pick.choice(usual))
            put(data, tokens, values.pop())
            text = json.dumps(data, indent=pick.choice([None, 2]))
            if text in seen or not holds(data, tokens) or not _harmless(data):
                continue
            seen.add(text)
            done += 1
            made += 1
            yield pick.choice([1, 2, 8]), text
    rest = sample(release, 10 * count, seed + 1)
    while made < count:
        world, text = next(rest)
        if text not in seen:
            seen.add(text)
            made += 1
            yield world, text


def _refused_by_none(release: str, data: dict[str, Any]) -> bool:
    return not schema.validate(data, release)
