"""Facts about DeepSpeed releases that several rules need. Each table names where it was read."""

from __future__ import annotations

from typing import Any, NamedTuple

REMOVED: dict[str, tuple[str, str]] = {
    # key -> (first release that refuses it, what to do instead); presence is enough, whatever the value.
    # runtime/config.py _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS @ 0.19.8
    "/nebula": ("0.19.7", "remove"),
    "/compression_training": ("0.19.7", "remove"),
    "/quantize_training": ("0.19.7", "remove"),
    "/sparse_attention": ("0.19.7", "remove"),
    "/zero_optimization/mics_shard_size": ("0.19.7", "remove"),
    "/zero_optimization/mics_hierarchical_params_gather": ("0.19.7", "remove"),
    "/amp": ("0.19.8", "precision"),
    "/elasticity": ("0.19.8", "batch"),
    "/eigenvalue": ("0.19.8", "remove"),
    "/sparse_gradients": ("0.19.8", "remove"),
    "/graph_harvesting": ("0.19.8", "remove"),
    "/curriculum_learning": ("0.19.8", "curriculum"),
    "/progressive_layer_drop": ("0.19.8", "remove"),
    "/zero_optimization/zeropp_loco_param": ("0.19.8", "remove"),
}

PYDANTIC_BLOCKS = (
    "zero_optimization", "fp16", "bf16", "bfloat16", "tensorboard", "wandb", "csv_monitor", "comet",
    "comms_logger", "hybrid_engine", "compile", "tensor_parallel", "timers/throughput", "weight_quantization",
)  # fmt: skip
"""Blocks read by a pydantic model: ``"auto"`` is dropped there (runtime/config_utils.py), old names converted."""


class Renamed(NamedTuple):
    """A key whose old name is ignored in silence from a release on."""

    old: str
    new: str | None
    since: str
    until: str | None


RENAMED = (
    Renamed("/aio/thread_count", "intra_op_parallelism", "0.16.4", None),
    Renamed("/seq_parallel_comm_data_type", "seq_parallel_communication_data_type", "0.16.5", None),
    Renamed("/compile/enabled", None, "0.14.4", "0.16.5"),
    Renamed("/compile/backend", None, "0.14.4", "0.16.5"),
    Renamed("/compile/kwargs", None, "0.14.4", "0.16.5"),
)

OLD_NAMES: dict[str, str] = {
    # runtime/zero/config.py: fields with json_schema_extra deprecated, new_param
    "/zero_optimization/cpu_offload": "offload_optimizer",
    "/zero_optimization/cpu_offload_param": "offload_param",
    "/zero_optimization/cpu_offload_use_pin_memory": "pin_memory",
    "/zero_optimization/stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

ALIASES: dict[str, str] = {
    # runtime/zero/config.py Field(alias=...): the second name of the same key; both together are refused
    "/zero_optimization/prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "/zero_optimization/param_persistence_threshold": "stage3_param_persistence_threshold",
    "/zero_optimization/model_persistence_threshold": "stage3_model_persistence_threshold",
    "/zero_optimization/max_live_parameters": "stage3_max_live_parameters",
    "/zero_optimization/max_reuse_distance": "stage3_max_reuse_distance",
    "/zero_optimization/gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "/zero_optimization/use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "/zero_optimization/module_granularity_threshold": "stage3_module_granularity_threshold",
    "/zero_optimization/allgather_sequential": "stage3_allgather_sequential",
}

_DEFAULTS: dict[str, tuple[tuple[tuple[int, ...], Any], ...]] = {
    # pointer -> ((from release, value), ...), oldest first; only those the rules read
    "/zero_optimization/stage": (((0,), 0),),
    "/zero_optimization/reduce_scatter": (((0,), True),),
    "/zero_optimization/overlap_comm": (((0,), None),),
    "/zero_optimization/reduce_bucket_size": (((0,), 500_000_000),),
    "/zero_optimization/allgather_bucket_size": (((0,), 500_000_000),),
    "/zero_optimization/zero_hpz_partition_size": (((0,), 1),),
    "/zero_optimization/compute_grad_norm": (((0,), True),),
    "/zero_optimization/ignore_unused_parameters": (((0,), True),),
    "/zero_optimization/offload_optimizer/device": (((0,), "none"),),
    "/zero_optimization/offload_optimizer/ratio": (((0,), 1.0),),
    "/zero_optimization/offload_optimizer/buffer_count": (((0,), 4),),
    "/zero_optimization/offload_optimizer/pin_memory": (((0,), False), ((0, 19, 5), True)),
    "/zero_optimization/offload_param/device": (((0,), "none"),),
    "/zero_optimization/offload_param/buffer_count": (((0,), 5),),
    "/zero_optimization/offload_param/buffer_size": (((0,), 100_000_000),),
    "/zero_optimization/offload_param/pin_memory": (((0,), False), ((0, 19, 5), True)),
    "/gradient_clipping": (((0,), 0.0), ((0, 19, 3), 1.0)),
    "/steps_per_print": (((0,), 10), ((0, 15, 2), None)),
    "/zero_allow_untested_optimizer": (((0,), False),),
    "/zero_force_ds_cpu_optimizer": (((0,), True),),
    "/managed_gradient_accumulation": (((0,), True),),
}


def default_of(pointer: str, key: tuple[int, ...]) -> Any:
    """The default of ``pointer`` in the release with this ``version_key``; None when there is none."""
    value = None
    for since, v in _DEFAULTS.get(pointer, ()):
        if key >= since:
            value = v
    return value


def default_history(pointer: str) -> tuple[tuple[str, Any], ...]:
    """(first release, value) of a default that the rules know, oldest first; "" = from the first release on."""
    return tuple(
        (".".join(map(str, since)) if any(since) else "", v) for since, v in _DEFAULTS.get(pointer, ())
    )


class Optimizer(NamedTuple):
    """An optimizer that DeepSpeed makes by name, and the releases that know it."""

    name: str
    since: str | None
    until: str | None
    tested: bool
    """Accepted by ZeRO without ``zero_allow_untested_optimizer``."""


DEEPSPEED_OPTIMIZERS = (
    # runtime/config.py DEEPSPEED_OPTIMIZERS; tested: runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS
    Optimizer("Adam", None, None, True),
    Optimizer("AdamW", None, None, True),
    Optimizer("Adagrad", None, None, True),
    Optimizer("Lamb", None, None, False),
    Optimizer("MuAdam", "0.10.2", None, False),
    Optimizer("MuAdamW", "0.10.2", None, False),
    Optimizer("MuSGD", "0.10.2", None, False),
    Optimizer("Lion", "0.11.0", None, True),
    Optimizer("Muon", "0.17.6", None, True),
    Optimizer("OneBitAdam", None, "0.19.6", False),
    Optimizer("ZeroOneAdam", None, "0.19.6", False),
    Optimizer("OneBitLamb", None, "0.19.6", False),
)

TORCH_OPTIMIZERS = (
    # torch.optim 2.1 - 2.13, by exact name: runtime/engine.py _is_supported_optimizer
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam", "Optimizer",
)  # fmt: skip

_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode", "torch_adam",
                   "fp32_optimizer_states"})  # fmt: skip
OPTIMIZER_PARAMS: dict[str, frozenset[str]] = {
    # ops/adam/fused_adam.py, cpu_adam.py, ops/lamb/fused_lamb.py, ops/lion/*.py, cpu_adagrad.py @ 0.19.8:
    # the union of what the GPU and the CPU class take, so that neither is refused by mistake
    "adam": _ADAM | {"set_grad_none", "adamw_mode", "foreach", "maximize", "capturable", "differentiable", "fused"},
    "adamw": _ADAM | {"set_grad_none", "adamw_mode", "foreach", "maximize", "capturable", "differentiable", "fused"},
    "adagrad": frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "amsgrad", "foreach",
                          "maximize", "differentiable", "fused", "fp32_optimizer_states"}),
    "lamb": frozenset({"lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm",
                       "max_coeff", "min_coeff", "amsgrad"}),
    "lion": frozenset({"lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"}),
}  # fmt: skip
TORCH_ADAM_ONLY = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused"})
"""Taken by torch.optim.AdamW only, so only with ``torch_adam: true``."""

SCHEDULERS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # name -> (all parameters, required ones): constructors in runtime/lr_schedules.py @ 0.19.8
    "LRRangeTest": (
        frozenset({"lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
                   "lr_range_test_staircase", "last_batch_iteration"}),
        frozenset(),
    ),
    "OneCycle": (
        frozenset({"cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
                   "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
                   "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"}),
        frozenset({"cycle_min_lr", "cycle_max_lr"}),
    ),
    "WarmupLR": (
        frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"}),
        frozenset(),
    ),
    "WarmupDecayLR": (
        frozenset({"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
                   "last_batch_iteration"}),
        frozenset({"total_num_steps"}),
    ),
    "WarmupCosineLR": (
        frozenset({"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                   "last_batch_iteration"}),
        frozenset({"total_num_steps"}),
    ),
}  # fmt: skip

TORCH_SCHEDULERS = (
    # torch.optim.lr_scheduler, by exact name (runtime/engine.py _scheduler_from_config)
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip
