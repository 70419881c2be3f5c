"""The page of a config key: meaning, type, default by release, since/until, who reads it, which rules know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dstui.config import schema as schemas
from dstui.config.pointer import dotted
from dstui.i18n import N_, _
from dstui.rules.nearest import nearest
from dstui.rules.registry import all_rules
from dstui.rules.tables import ALIASES, OLD_NAMES, REMOVED, RENAMED, default_history

_MEANING: dict[str, str] = {
    "train_batch_size": N_("samples per optimizer step over all ranks: micro batch x accumulation x ranks"),
    "train_micro_batch_size_per_gpu": N_("samples one GPU works on at a time; the first number to change when memory is short"),
    "gradient_accumulation_steps": N_("micro batches whose gradients are added up before one optimizer step"),
    "managed_gradient_accumulation": N_("false: every engine.step() is a boundary, DeepSpeed counts no micro batches"),
    "steps_per_print": N_("optimizer steps between two progress lines; unset: no line at all"),
    "log_level": N_("level of DeepSpeed's own log; info is needed to see its progress lines"),
    "gradient_clipping": N_("largest norm of the gradients of one step; 0 switches clipping off"),
    "communication_data_type": N_("type in which gradients travel between ranks"),
    "prescale_gradients": N_("divide gradients before they are reduced instead of after"),
    "gradient_predivide_factor": N_("part of the division that happens before the reduction"),
    "wall_clock_breakdown": N_("time forward, backward and step with CUDA events and print them"),
    "memory_breakdown": N_("print GPU and host memory at marked places of a step"),
    "zero_allow_untested_optimizer": N_("let ZeRO run with an optimizer that is not on its list"),
    "zero_force_ds_cpu_optimizer": N_("refuse an optimizer of the script that is not DeepSpeed's CPU one when offloading"),
    "sequence_parallel_size": N_("ranks that share one sequence (Ulysses)"),
    "zero_optimization": N_("what is sharded over the ranks and what is moved to the host"),
    "zero_optimization.stage": N_("0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters are sharded over the ranks"),
    "zero_optimization.overlap_comm": N_("reduce gradients while backward goes on; needs a second bucket at stages 1 and 2; unset: on at stage 3, else off"),
    "zero_optimization.contiguous_gradients": N_("copy gradients into one buffer as they appear, against fragmentation"),
    "zero_optimization.reduce_scatter": N_("each rank gets only the gradients of its own part"),
    "zero_optimization.reduce_bucket_size": N_("elements that are reduced at once; x2 bytes of GPU memory, twice with overlap_comm"),
    "zero_optimization.allgather_bucket_size": N_("elements that are gathered at once after the step; even at stages 1 and 2"),
    "zero_optimization.round_robin_gradients": N_("spread the copies of gradients to the host over the ranks; helps stage 2 with offload and accumulation"),
    "zero_optimization.sub_group_size": N_("elements of one piece of the stage 3 optimizer step"),
    "zero_optimization.stage3_prefetch_bucket_size": N_("elements fetched ahead at stage 3"),
    "zero_optimization.stage3_param_persistence_threshold": N_("parameters smaller than this stay on every GPU at stage 3"),
    "zero_optimization.stage3_max_live_parameters": N_("parameters that may be on a GPU at once at stage 3"),
    "zero_optimization.stage3_max_reuse_distance": N_("a parameter needed again within so many parameters is not released at stage 3"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": N_("put the whole 16-bit model together when it is saved at stage 3"),
    "zero_optimization.zero_hpz_partition_size": N_("ZeRO++: ranks that keep a secondary copy of the parameters, usually the GPUs of a node"),
    "zero_optimization.zero_quantized_weights": N_("ZeRO++: gather parameters as 8-bit"),
    "zero_optimization.zero_quantized_gradients": N_("ZeRO++: reduce gradients as 4-bit"),
    "zero_optimization.memory_efficient_linear": N_("a Linear that keeps less for backward at stage 3"),
    "zero_optimization.ignore_unused_parameters": N_("false: stop when a parameter got no gradient"),
    "zero_optimization.elastic_checkpoint": N_("save checkpoints that another number of ranks can load (stages 1 and 2)"),
    "zero_optimization.offload_optimizer": N_("keep optimizer states and the optimizer step on the host or on NVMe"),
    "zero_optimization.offload_optimizer.device": N_("none, cpu or nvme (nvme at stage 3 only)"),
    "zero_optimization.offload_optimizer.pin_memory": N_("page-locked host buffers: faster copies, RAM that cannot be swapped, blocks rounded up to a power of two"),
    "zero_optimization.offload_optimizer.nvme_path": N_("folder on a local NVMe disk"),
    "zero_optimization.offload_optimizer.buffer_count": N_("buffers through which optimizer states are swapped"),
    "zero_optimization.offload_optimizer.fast_init": N_("initialise the swapped states faster"),
    "zero_optimization.offload_optimizer.pipeline_read": N_("read the next states while the step of the current ones runs"),
    "zero_optimization.offload_optimizer.pipeline_write": N_("write the last states while the step of the current ones runs"),
    "zero_optimization.offload_optimizer.ratio": N_("share of the optimizer that is offloaded (stage 3, CPU Adam)"),
    "zero_optimization.offload_param": N_("keep the parameters on the host or on NVMe (stage 3 only)"),
    "zero_optimization.offload_param.device": N_("none, cpu or nvme; read at stage 3 only"),
    "zero_optimization.offload_param.pin_memory": N_("page-locked host buffers: faster copies, RAM that cannot be swapped, blocks rounded up to a power of two"),
    "zero_optimization.offload_param.nvme_path": N_("folder on a local NVMe disk"),
    "zero_optimization.offload_param.buffer_count": N_("buffers through which parameters are swapped"),
    "zero_optimization.offload_param.buffer_size": N_("elements of one buffer; the largest parameter partition must fit"),
    "zero_optimization.offload_param.max_in_cpu": N_("elements that stay in RAM when parameters go to NVMe"),
    "fp16": N_("16-bit training with loss scaling"),
    "fp16.enabled": N_("train in fp16; excludes bf16"),
    "fp16.loss_scale": N_("fixed loss scale; 0 = dynamic"),
    "fp16.initial_scale_power": N_("first dynamic scale as a power of 2"),
    "fp16.loss_scale_window": N_("steps without overflow before the scale is raised"),
    "fp16.hysteresis": N_("overflows before the scale is lowered"),
    "fp16.min_loss_scale": N_("smallest dynamic scale; an overflow there ends the run"),
    "bf16": N_("16-bit training without loss scaling (compute capability 8.0 and up)"),
    "bf16.enabled": N_("train in bf16; excludes fp16"),
    "data_types.grad_accum_dtype": N_("type in which gradients are added up; unset: the model's"),
    "optimizer": N_("an optimizer that DeepSpeed makes; without it the script does"),
    "optimizer.type": N_("DeepSpeed's names in any case, torch.optim's in exact case"),
    "optimizer.params": N_("keyword arguments of the optimizer"),
    "optimizer.params.lr": N_("learning rate"),
    "optimizer.params.torch_adam": N_("use torch.optim.AdamW instead of DeepSpeed's own"),
    "optimizer.params.adam_w_mode": N_("false: plain Adam with L2 regularisation"),
    "scheduler": N_("a learning rate scheduler that DeepSpeed makes and steps"),
    "scheduler.type": N_("LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or an exact name from torch"),
    "scheduler.params": N_("keyword arguments of the scheduler; must be there, if only as {}"),
    "scheduler.params.warmup_num_steps": N_("steps until the learning rate reaches its peak"),
    "scheduler.params.total_num_steps": N_("optimizer steps of the whole run"),
    "aio": N_("asynchronous reading and writing for NVMe offload"),
    "aio.block_size": N_("bytes of one I/O request"),
    "aio.queue_depth": N_("requests in flight"),
    "aio.intra_op_parallelism": N_("threads that share one read or write"),
    "activation_checkpointing": N_("settings of deepspeed.checkpointing; only a script that calls it reads them"),
    "comms_logger": N_("log of every collective; the block's presence alone switches it on"),
    "csv_monitor": N_("one CSV file a metric: loss, learning rate, loss scale, timers"),
    "tensorboard": N_("the same metrics for TensorBoard"),
    "wandb": N_("the same metrics for Weights & Biases"),
    "flops_profiler": N_("counts the floating point operations of one step"),
    "tensor_parallel.autotp_size": N_("ranks that share each layer (AutoTP)"),
    "checkpoint.tag_validation": N_("what to do when ranks name a checkpoint differently"),
}  # fmt: skip

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
    """A key in one release. ``meaning`` and ``note`` are translated; the rest is DeepSpeed's."""

    path: str
    release: str
    known: bool
    """The release reads it."""
    type: str
    meaning: str
    note: str
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
            "note": self.note,
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
        meaning=_(_MEANING.get(path, "")),
        note=_(str(entry.get("text") or (key.description if key else ""))),
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
