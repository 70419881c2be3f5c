"""DS2xx: the ZeRO stage and the keys that need one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dstui.i18n import N_, _
from dstui.rules.changes import bf16_wrapper
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, key_of, put
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import MISSING, Subject

ZERO = "/zero_optimization"
STAGE = ZERO + "/stage"


@rule(
    "DS201",
    "stage-3-key-below-stage-3",
    Severity.INFO,
    "always",
    what=N_("A stage3_* tuning key in a config whose ZeRO stage is below 3."),
    why=N_(
        "DeepSpeed parses the key and never reads it: only the stage 3 optimizer uses it. Harmless, but it makes the file say more than it does."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}',
    fix=N_("Leave it if you switch between stages; otherwise remove it."),
    source="deepspeed/runtime/engine.py _configure_zero_optimizer: passed to stage3 only @ 0.9.5-0.19.8",
)
def stage_3_key_below_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage is None or s.stage >= 3:
        return
    for key in s.block(ZERO):
        if key.startswith("stage3_") and s.written(f"{ZERO}/{key}"):
            yield Hit(
                f"{ZERO}/{key}",
                _("{key} is read at ZeRO stage 3 only; this is stage {stage}").format(key=key, stage=s.stage),
                fix=drop(f"{ZERO}/{key}", safe=False),
            )


@rule(
    "DS202",
    "stage-auto",
    Severity.SILENT_WRONG,
    "parse",
    what=N_('"stage": "auto" in zero_optimization.'),
    why=N_(
        'DeepSpeed drops every "auto" in this block and takes the default, which is stage 0. Hugging Face does not fill the stage either. Nothing is sharded and nobody says so.'
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}',
    fix=N_("Write the stage: 1, 2 or 3."),
    source="deepspeed/runtime/config_utils.py:54 @ 0.19.8; executed on 0.14.5-0.19.8",
)
def stage_auto(s: Subject) -> Iterator[Hit]:
    if s.get(STAGE) == "auto":
        yield Hit(
            STAGE,
            _('"stage": "auto" means stage 0'),
            effect=_(
                "nothing is sharded: every GPU holds the whole model, its gradients and its optimizer states"
            ),
            hint=_("write the stage you want: 1, 2 or 3"),
        )


@rule(
    "DS203",
    "zero-without-stage",
    Severity.SILENT_WRONG,
    "parse",
    what=N_("A zero_optimization block with settings but without a stage."),
    why=N_("The default stage is 0, so ZeRO is off and the settings in the block do nothing."),
    example='{"train_batch_size": 8, "zero_optimization": {"overlap_comm": true, "reduce_bucket_size": 5e8}}',
    fix=N_("Add the stage."),
    source="deepspeed/runtime/zero/config.py: stage = ZeroStageEnum.disabled @ 0.19.8",
)
def zero_without_stage(s: Subject) -> Iterator[Hit]:
    block = s.block(ZERO)
    if block and "stage" not in block:
        yield Hit(
            ZERO,
            _("zero_optimization has no stage, and the default is 0"),
            effect=_("ZeRO is off; the other keys of the block are not used"),
            hint=_('add "stage": 1, 2 or 3'),
        )


@rule(
    "DS204",
    "offload-param-below-stage-3",
    Severity.NO_EFFECT,
    "init",
    what=N_("offload_param with a device at ZeRO stage 0, 1 or 2."),
    why=N_(
        "Only stage 3 splits the parameters, so only there can they leave the GPU. Below it DeepSpeed accepts the block without a word and keeps all parameters on the GPU."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
    fix=N_("Use stage 3, or remove offload_param and offload the optimizer only."),
    source="deepspeed/runtime/engine.py _configure_zero_optimizer @ 0.19.8; executed on 0.14.5-0.19.8",
)
def offload_param_below_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage in (0, 1, 2) and s.offload("offload_param") in ("cpu", "nvme"):
        pointer = ZERO + "/offload_param"
        if not s.written(pointer):
            pointer = ZERO + "/cpu_offload_param"
        yield Hit(
            pointer,
            _("parameter offload does nothing at stage {stage}").format(stage=s.stage),
            effect=_("all parameters stay on every GPU; no memory is saved"),
            hint=_("use stage 3, or remove it"),
            fix=put(STAGE, 3, there=s.written(STAGE), safe=False),
        )


@rule(
    "DS205",
    "hpz-does-not-divide",
    Severity.ERROR,
    "init",
    since="0.10.0",
    what=N_("zero_hpz_partition_size does not divide the number of ranks."),
    why=N_(
        "ZeRO++ builds its secondary groups from equal slices of the ranks and stops with an assertion when they do not come out even."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}',
    fix=N_("Use the number of GPUs of one node."),
    source="deepspeed/utils/groups.py:71 @ 0.19.8",
    context={"world_size": 8},
)
def hpz_does_not_divide(s: Subject) -> Iterator[Hit | Lacks]:
    size = s.integer(ZERO + "/zero_hpz_partition_size")
    if s.stage == 3 and size and size > 1 and not s.world_known:
        yield Lacks("world_size")
    elif s.stage == 3 and size and 1 < size < s.world_size and s.world_size % size:
        yield Hit(
            ZERO + "/zero_hpz_partition_size",
            _("{size} does not divide the {world} ranks").format(size=size, world=s.world_size),
            effect=_("the engine stops at start: world size is not divisible"),
            hint=_("usual value: the GPUs of one node"),
        )


@rule(
    "DS206",
    "hpz-larger-than-world",
    Severity.NO_EFFECT,
    "init",
    since="0.10.0",
    what=N_("zero_hpz_partition_size is larger than the number of ranks."),
    why=N_(
        "DeepSpeed cuts it down to the world size without a word; then the secondary copy spans all ranks and saves no traffic, but still takes its memory."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}',
    fix=N_("Use the number of GPUs of one node, or remove the key."),
    source="deepspeed/utils/groups.py _create_zero_param_parallel_group @ 0.19.8; executed",
    context={"world_size": 2},
)
def hpz_larger_than_world(s: Subject) -> Iterator[Hit | Lacks]:
    size = s.integer(ZERO + "/zero_hpz_partition_size")
    if s.stage == 3 and size and size > 1 and not s.world_known:
        yield Lacks("world_size")
    elif s.stage == 3 and size and size > s.world_size:
        yield Hit(
            ZERO + "/zero_hpz_partition_size",
            _("{size} is more than the {world} ranks of this run").format(size=size, world=s.world_size),
            effect=_("DeepSpeed uses {world} instead and says nothing").format(world=s.world_size),
            hint=_("usual value: the GPUs of one node"),
        )


_STAGE_3_ONLY = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
}


@rule(
    "DS207",
    "zeropp-below-stage-3",
    Severity.NO_EFFECT,
    "init",
    since="0.10.0",
    what=N_("A ZeRO++ switch (quantized weights or gradients, hpZ) below ZeRO stage 3."),
    why=N_(
        "ZeRO++ is part of the stage 3 optimizer. Below it the switch is parsed and ignored: no traffic is saved."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "zero_quantized_gradients": true}}',
    fix=N_("Use stage 3, or remove the switch."),
    source="deepspeed/runtime/engine.py _configure_zero_optimizer: passed to stage3 only @ 0.19.8",
)
def zeropp_below_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage not in (0, 1, 2):
        return
    for key, off in _STAGE_3_ONLY.items():
        pointer = f"{ZERO}/{key}"
        if s.get(pointer) is MISSING or s.get(pointer) == "auto":
            continue
        on = s.flag(pointer) if off is False else (s.integer(pointer) or 1) > 1
        if on:
            yield Hit(
                pointer,
                _("{key} does nothing at stage {stage}").format(key=key, stage=s.stage),
                effect=_("traffic and memory stay as without it"),
                hint=_("ZeRO++ needs stage 3"),
                fix=drop(pointer, safe=False),
            )


@rule(
    "DS208",
    "legacy-stage-1",
    Severity.ERROR,
    "init",
    what=N_("legacy_stage1: true."),
    why=N_("The old implementation of stage 1 is gone; the engine raises an exception at start."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 1, "legacy_stage1": true}}',
    fix=N_("Remove the key: stage 1 has its own modern implementation."),
    source="deepspeed/runtime/engine.py:2651 @ 0.19.8",
)
def legacy_stage_1(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/legacy_stage1"
    if s.stage and s.flag(pointer):
        yield Hit(
            pointer,
            _("the old stage 1 no longer exists"),
            effect=_("the engine stops at start"),
            hint=_("remove legacy_stage1"),
            fix=drop(pointer, safe=True),
        )


@rule(
    "DS209",
    "zero-as-bool",
    Severity.WARNING,
    "parse",
    what=N_("zero_optimization given as true or false instead of an object."),
    why=N_(
        "This is the form of 2020: true means stage 1. DeepSpeed still accepts it with a warning and then takes the top-level allgather_size for its bucket."
    ),
    example='{"train_batch_size": 8, "zero_optimization": true}',
    fix=N_("Write an object with the stage."),
    source="deepspeed/runtime/zero/config.py read_zero_config_deprecated @ 0.19.8",
)
def zero_as_bool(s: Subject) -> Iterator[Hit]:
    value = s.get(ZERO)
    if isinstance(value, bool):
        stage = 1 if value else 0
        yield Hit(
            ZERO,
            _("an old form: {value} means stage {stage}").format(value=str(value).lower(), stage=stage),
            hint=_("write {text}").format(text=f'"zero_optimization": {{"stage": {stage}}}'),
            fix=put(ZERO, {"stage": stage}, there=True, safe=not s.written("/allgather_size")),
        )


@rule(
    "DS210",
    "reduce-scatter-with-scaled-gradients",
    Severity.ERROR,
    "init",
    what=N_(
        "prescale_gradients or gradient_predivide_factor together with reduce_scatter at ZeRO stage 2 or 3."
    ),
    why=N_(
        "The reduce-scatter path of stages 2 and 3 does not support them: the engine asserts at start. reduce_scatter is on by default."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "prescale_gradients": true}',
    fix=N_("Remove the key, or set reduce_scatter to false."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:350-351, stage3.py:395-396 @ 0.19.8",
)
def reduce_scatter_with_scaled_gradients(s: Subject) -> Iterator[Hit]:
    if s.stage not in (2, 3) or not s.flag(ZERO + "/reduce_scatter"):
        return
    factor = s.get("/gradient_predivide_factor", 1.0)
    summed = s.at_least("0.19.6") and str(s.get("/gradient_allreduce_op", "mean")).lower() == "sum"
    if (
        isinstance(factor, (int, float))
        and not isinstance(factor, bool)
        and factor != 1.0
        and not (summed and s.stage == 2)
    ):
        yield Hit(
            "/gradient_predivide_factor",
            _("gradient_predivide_factor is not supported with reduce_scatter at stage {stage}").format(
                stage=s.stage
            ),
            effect=_("the engine stops at start"),
            hint=_("remove it or set reduce_scatter to false"),
            fix=drop("/gradient_predivide_factor", safe=False),
        )
    if s.get("/prescale_gradients", False) is True:
        yield Hit(
            "/prescale_gradients",
            _("prescale_gradients is not supported with reduce_scatter at stage {stage}").format(
                stage=s.stage
            ),
            effect=_("the engine stops at start"),
            hint=_("remove it or set reduce_scatter to false"),
            fix=drop("/prescale_gradients", safe=False),
        )


@rule(
    "DS211",
    "quantized-gradients-without-reduce-scatter",
    Severity.ERROR,
    "init",
    since="0.10.0",
    what=N_("zero_quantized_gradients with reduce_scatter: false at stage 3."),
    why=N_("The quantized all-to-all replaces reduce-scatter and asserts that it is on."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true, "reduce_scatter": false}}',
    fix=N_("Remove reduce_scatter: false."),
    source="deepspeed/runtime/zero/stage3.py:390 @ 0.19.8",
)
def quantized_gradients_without_reduce_scatter(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/reduce_scatter"
    if s.stage == 3 and s.flag(ZERO + "/zero_quantized_gradients") and not s.flag(pointer):
        yield Hit(
            pointer,
            _("zero_quantized_gradients needs reduce_scatter"),
            effect=_("the engine stops at start"),
            hint=_("set reduce_scatter to true"),
            fix=put(pointer, True, there=s.written(pointer), safe=False),
        )


@rule(
    "DS212",
    "weights-not-gathered-on-save",
    Severity.INFO,
    "save",
    what=N_("ZeRO stage 3 without stage3_gather_16bit_weights_on_model_save."),
    why=N_(
        "At stage 3 no rank holds the whole model. Without gathering, a saved model holds empty placeholders; the weights must be put together afterwards with zero_to_fp32.py."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    fix=N_(
        "Set stage3_gather_16bit_weights_on_model_save to true if the script saves the model itself; it costs one full 16-bit copy of the model in host RAM at save time."
    ),
    source="deepspeed/runtime/engine.py save_16bit_model @ 0.19.8",
)
def weights_not_gathered_on_save(s: Subject) -> Iterator[Hit]:
    names = (
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    )
    if s.stage == 3 and not any(s.flag(f"{ZERO}/{n}") for n in names):
        pointer = f"{ZERO}/{names[0]}"
        yield Hit(
            pointer if s.written(pointer) else ZERO,
            _("the model is saved in pieces: weights are not gathered at stage 3"),
            hint=_("set {key} to true, or use zero_to_fp32.py on the checkpoint").format(key=names[0]),
        )


@rule(
    "DS213",
    "compute-grad-norm-off",
    Severity.ERROR,
    "init",
    since="0.19.7",
    what=N_("compute_grad_norm: false together with something that needs the gradient norm."),
    why=N_(
        "It is allowed at stages 1 and 2 only, without clipping (whose default is 1.0 since 0.19.3), without optimizer offload and without ZenFlow."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "compute_grad_norm": false}}',
    fix=N_("Write gradient_clipping: 0, or remove compute_grad_norm."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:213-218 @ 0.19.8",
)
def compute_grad_norm_off(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/compute_grad_norm"
    if s.stage not in (1, 2) or s.get(pointer) is MISSING or s.flag(pointer):
        return
    clipping = s.number("/gradient_clipping")
    reason = ""
    if clipping and clipping > 0:
        reason = _("gradient_clipping is {value}").format(value=clipping)
    elif s.offloads_optimizer:
        reason = _("the optimizer is offloaded")
    elif isinstance(s.get(ZERO + "/zenflow"), Mapping):
        reason = _("ZenFlow is on")
    elif s.stage == 1 and bf16_wrapper(s):
        reason = _("bf16 gradients are added up in fp32")
    if reason:
        yield Hit(
            pointer,
            _("compute_grad_norm: false is refused here: {reason}").format(reason=reason),
            effect=_("the engine stops at start"),
            hint=_('write "gradient_clipping": 0 or remove compute_grad_norm'),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS214",
    "zenflow-incomplete",
    Severity.ERROR,
    "init",
    since="0.17.5",
    what=N_("A zenflow block whose partners are missing."),
    why=N_(
        "ZenFlow keeps part of the optimizer on the CPU: at stages 1 and 2 it needs offload_optimizer to cpu, its own offload needs overlap_comm, and select_strategy step or epoch needs a number as select_interval."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}',
    fix=N_("Add what the message names."),
    source="deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py:76,116, engine.py:39-63 @ 0.19.8",
)
def zenflow_incomplete(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/zenflow"
    block = s.get(pointer)
    if not isinstance(block, Mapping) or s.stage not in (1, 2):
        return
    if s.offload("offload_optimizer") != "cpu":
        yield Hit(
            pointer,
            _("ZenFlow needs offload_optimizer with device cpu at stage {stage}").format(stage=s.stage),
            effect=_("the engine stops at start"),
            hint=_("add {text}").format(text='"offload_optimizer": {"device": "cpu"}'),
        )
    elif s.flag(pointer + "/offload") and not s.flag(ZERO + "/overlap_comm"):
        yield Hit(
            pointer + "/offload",
            _("zenflow.offload needs overlap_comm: true"),
            effect=_("the engine stops at start"),
            hint=_("set overlap_comm to true"),
        )
    strategy, interval = block.get("select_strategy", "auto"), block.get("select_interval", "auto")
    if strategy == "auto" and isinstance(interval, int) and not isinstance(interval, bool):
        yield Hit(
            pointer + "/select_interval",
            _("select_strategy auto chooses the interval itself"),
            effect=_("the engine stops at start"),
            hint=_("remove select_interval or name a strategy: step or epoch"),
        )
    elif strategy in ("step", "epoch") and interval == "auto":
        yield Hit(
            pointer + ("/select_interval" if "select_interval" in block else ""),
            _("select_strategy {strategy} needs a number as select_interval").format(strategy=strategy),
            effect=_("the engine stops at start"),
            hint=_("write how many steps or epochs"),
        )
    update = block.get("update_interval", "auto")
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in (interval, update))
    if strategy == "step" and numbers and interval < update:
        yield Hit(
            pointer + "/select_interval",
            _("select_interval {select} is below update_interval {update}").format(
                select=interval, update=update
            ),
            effect=_("the engine stops at start"),
            hint=_("make it at least as large"),
        )


@rule(
    "DS215",
    "elastic-checkpoint-at-stage-3",
    Severity.INFO,
    "parse",
    what=N_("elastic_checkpoint: true at ZeRO stage 3."),
    why=N_("It has no effect there; DeepSpeed 0.19.3 and later say that it is deprecated."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "elastic_checkpoint": true}}',
    fix=N_("Remove it; to change the number of ranks use a universal checkpoint."),
    source="deepspeed/runtime/zero/config.py:405 @ 0.19.8",
)
def elastic_checkpoint_at_stage_3(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/elastic_checkpoint"
    if s.stage == 3 and s.flag(pointer):
        yield Hit(pointer, _("elastic_checkpoint does nothing at stage 3"), fix=drop(pointer, safe=True))


@rule(
    "DS216",
    "sum-reduction-unsupported",
    Severity.ERROR,
    "parse",
    since="0.19.6",
    what=N_("gradient_allreduce_op: sum with ZeRO stage 3, ZenFlow or DeepCompile."),
    why=N_("Those paths only average; DeepSpeed refuses the config."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}',
    fix=N_("Remove gradient_allreduce_op, or use stage 0-2."),
    source="deepspeed/runtime/config.py:696-700 @ 0.19.8",
)
def sum_reduction_unsupported(s: Subject) -> Iterator[Hit]:
    pointer = "/gradient_allreduce_op"
    if str(s.get(pointer, "")).lower() != "sum":
        return
    blocker = (
        _("ZeRO stage 3") if s.stage == 3
        else "ZenFlow" if isinstance(s.get(ZERO + "/zenflow"), Mapping)
        else "DeepCompile" if s.flag("/compile/deepcompile") else ""
    )  # fmt: skip
    if blocker:
        yield Hit(
            pointer,
            _("{key}: sum is not supported with {blocker}").format(key=key_of(pointer), blocker=blocker),
            effect=_("the config is refused"),
            hint=_("remove it"),
            fix=drop(pointer, safe=False),
        )
