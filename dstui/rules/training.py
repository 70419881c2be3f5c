"""DS72x-DS73x, DS41x, DS90x: precision and optimizers in finer detail, and what a trainer's arguments exclude."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put
from dstui.rules.registry import Hit, rule
from dstui.rules.subject import MISSING, Subject, as_bool, as_int
from dstui.rules.tables import DEEPSPEED_OPTIMIZERS, TORCH_OPTIMIZERS

ZERO = "/zero_optimization"
_STOPS = N_("the engine stops at start")


def _bf16(s: Subject) -> str:
    return "/bf16" if s.get("/bf16") is not MISSING else "/bfloat16"


@rule(
    "DS721",
    "master-weights-need-cpu-adam",
    Severity.ERROR,
    "init",
    what=N_("16-bit master weights with ZeRO but without optimizer offload and DeepSpeed's CPU Adam."),
    why=N_(
        "fp16_master_weights_and_grads and bf16_master_weights_and_grads are written for DeepSpeedCPUAdam. Only bf16 with bf16_optimizer_states may do without offload."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2}}',
    fix=N_("Add offload_optimizer to cpu with Adam or AdamW, or remove the key."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:332, stage3.py:300 @ 0.19.8; stage_1_and_2.py:270 @ 0.18.2; executed",
)
def master_weights_need_cpu_adam(s: Subject) -> Iterator[Hit]:
    if not s.stage:
        return
    cpu_adam = s.offloads_optimizer and (s.optimizer or "adam").lower() in ("adam", "adamw")
    cpu_adam = cpu_adam and as_bool(s.get("/optimizer/params/torch_adam", False)) is not True
    bf16 = _bf16(s)
    for pointer, on in (
        ("/fp16/fp16_master_weights_and_grads", s.precision("fp16")),
        (f"{bf16}/bf16_master_weights_and_grads", s.precision("bf16") and s.at_least("0.18.3")),
    ):
        if not on or not s.flag(pointer) or cpu_adam:
            continue
        if pointer.startswith(bf16) and s.flag(f"{bf16}/bf16_optimizer_states") and not s.offloads_optimizer:
            continue
        yield Hit(
            pointer,
            _("16-bit master weights need optimizer offload with DeepSpeed's CPU Adam"),
            effect=_(_STOPS),
            hint=_('add "offload_optimizer": {"device": "cpu"} with AdamW, or remove it'),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS722",
    "autocast-with-quantized-weights",
    Severity.ERROR,
    "init",
    since="0.17.2",
    what=N_("torch_autocast together with zero_quantized_weights."),
    why=N_("Both change the dtype in which parameters are gathered; the engine refuses the pair."),
    example='{"train_batch_size": 8, "torch_autocast": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}',
    fix=N_("Keep one of them."),
    source="deepspeed/runtime/torch_autocast.py:32 @ 0.19.8; executed",
)
def autocast_with_quantized_weights(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/zero_quantized_weights"
    if s.get("/torch_autocast/enabled", False) is True and s.flag(pointer):
        yield Hit(
            pointer,
            _("zero_quantized_weights does not go with torch_autocast"),
            effect=_(_STOPS),
            hint=_("remove one of the two"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS724",
    "vocabulary-not-aligned",
    Severity.INFO,
    "parse",
    what=N_("vocabulary_size that is not a multiple of 8."),
    why=N_("DeepSpeed only warns: matrix units work best on multiples of 8. The key has no other use."),
    example='{"train_batch_size": 8, "vocabulary_size": 50257}',
    fix=N_("Pad the vocabulary in the model, or remove the key."),
    source="deepspeed/runtime/config.py:719 @ 0.19.8; executed",
)
def vocabulary_not_aligned(s: Subject) -> Iterator[Hit]:
    size = as_int(s.get("/vocabulary_size", None))
    if size and size % 8:
        yield Hit("/vocabulary_size", _("{size} is not a multiple of 8").format(size=size))


@rule(
    "DS725",
    "untested-optimizer-allowed",
    Severity.INFO,
    "init",
    what=N_("An optimizer that ZeRO does not list as tested, allowed by zero_allow_untested_optimizer."),
    why=N_("DeepSpeed warns and goes on. Optimizers that look at whole tensors (Lamb, Muon-like) see slices under ZeRO."),
    example='{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 2}}',
    fix=N_("Compare the first losses with stage 0."),
    source="deepspeed/runtime/engine.py:2304 @ 0.19.8; executed",
)  # fmt: skip
def untested_optimizer_allowed(s: Subject) -> Iterator[Hit]:
    name = s.optimizer
    if not s.stage or name is None or s.get("/zero_allow_untested_optimizer", False) is not True:
        return
    own = {o.name.lower(): o.tested for o in DEEPSPEED_OPTIMIZERS if not o.until}
    tested = own.get(name.lower(), name in ("Adam", "AdamW", "Adagrad") if name in TORCH_OPTIMIZERS else None)
    if tested is False:
        yield Hit("/optimizer/type", _("{name} is not on ZeRO's list of tested optimizers").format(name=name))


@rule(
    "DS727",
    "param-dtype-differs",
    Severity.ERROR,
    "init",
    since="0.19.2",
    what=N_("data_types.param_dtype that is not the dtype of fp16 or bf16."),
    why=N_("The parameters' dtype follows the section that is on; another one is refused at start."),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}}',
    fix=N_("Remove param_dtype."),
    source="deepspeed/runtime/engine.py:1827 @ 0.19.8; executed",
)
def param_dtype_differs(s: Subject) -> Iterator[Hit]:
    pointer = "/data_types/param_dtype"
    value = s.get(pointer, None)
    names = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
             "bfloat16": "bf16"}  # fmt: skip
    if not isinstance(value, str):
        return
    wanted = names.get(value.removeprefix("torch."))
    model = "fp16" if s.precision("fp16") else "bf16" if s.precision("bf16") else "fp32"
    if wanted is not None and wanted != model:
        yield Hit(
            pointer,
            _("param_dtype {wanted}, but the model trains in {model}").format(wanted=wanted, model=model),
            effect=_(_STOPS),
            hint=_("remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS728",
    "fp16-on-old-gpu",
    Severity.ERROR,
    "init",
    since="0.16.0",
    needs=("facts.gpus",),
    what=N_("fp16 on GPUs of compute capability below 7.0 (Pascal and older)."),
    why=N_(
        "DeepSpeed refuses it from 0.16.0 on; for 6.x the environment variable DS_ALLOW_DEPRECATED_FP16=1 lifts the refusal."
    ),
    example='{"train_batch_size": 8, "fp16": {"enabled": true}}',
    fix=N_("Train in fp32, or export DS_ALLOW_DEPRECATED_FP16=1 (6.x only)."),
    source="deepspeed/accelerator/cuda_accelerator.py is_fp16_supported, runtime/engine.py:2004 @ 0.19.8",
    context={"compute_capability": (6, 1)},
)
def fp16_on_old_gpu(s: Subject) -> Iterator[Hit]:
    if not s.precision("fp16") or s.facts is None:
        return
    for g in s.facts.gpus or ():
        if g.compute_capability and g.compute_capability < (7, 0):
            yield Hit(
                "/fp16/enabled" if s.written("/fp16/enabled") else "/fp16",
                _("{card} has compute capability {major}.{minor}; DeepSpeed wants 7.0 for fp16").format(
                    card=g.name or _("GPU {index}").format(index=g.index),
                    major=g.compute_capability[0],
                    minor=g.compute_capability[1],
                ),
                effect=_(_STOPS),
                hint=_("train in fp32, or export DS_ALLOW_DEPRECATED_FP16=1 on 6.x"),
            )
            return


@rule(
    "DS731",
    "contiguous-checkpointing-incomplete",
    Severity.WARNING,
    "init",
    what=N_("contiguous_memory_optimization without partition_activations or number_checkpoints."),
    why=N_(
        "deepspeed.checkpointing.configure() asserts both; number_checkpoints is enforced from 0.19.3 on. A script that does not call it ignores the section."
    ),
    example='{"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true}}',
    fix=N_("Add partition_activations: true and number_checkpoints, or remove the key."),
    source="deepspeed/runtime/activation_checkpointing/checkpointing.py:1229-1231 @ 0.19.8",
)
def contiguous_checkpointing_incomplete(s: Subject) -> Iterator[Hit]:
    base = "/activation_checkpointing"
    if s.get(base + "/contiguous_memory_optimization", False) is not True:
        return
    lacking = []
    if s.get(base + "/partition_activations", False) is not True:
        lacking.append("partition_activations")
    if s.at_least("0.19.3") and s.get(base + "/number_checkpoints", None) is None:
        lacking.append("number_checkpoints")
    if lacking:
        yield Hit(
            base + "/contiguous_memory_optimization",
            _("contiguous_memory_optimization needs {keys}").format(keys=", ".join(lacking)),
            effect=_("deepspeed.checkpointing.configure() stops with an assertion"),
            hint=_("add them, or remove it"),
            fix=drop(base + "/contiguous_memory_optimization", safe=False),
        )


@rule(
    "DS732",
    "grad-overflow-check-at-stage-3",
    Severity.NO_EFFECT,
    "step",
    since="0.17.1",
    what=N_("bf16.check_grad_overflow at ZeRO stage 3 or 0."),
    why=N_("Only the optimizer of stages 1 and 2 reads it. From 0.19.8 stage 3 skips such steps by itself."),
    example='{"train_batch_size": 8, "bf16": {"enabled": true, "check_grad_overflow": true}, "zero_optimization": {"stage": 3}}',
    fix=N_("Remove the key."),
    source="deepspeed/runtime/zero/stage3.py: check_grad_overflow is not passed @ 0.17.1-0.19.8; executed",
)
def grad_overflow_check_at_stage_3(s: Subject) -> Iterator[Hit]:
    pointer = _bf16(s) + "/check_grad_overflow"
    if s.precision("bf16") and s.stage == 3 and s.get(pointer) not in (MISSING, "auto"):
        yield Hit(
            pointer,
            _("check_grad_overflow is not read at stage {stage}").format(stage=s.stage),
            effect=_("ignored in silence"),
            hint=_("remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS733",
    "timers-hidden",
    Severity.NO_EFFECT,
    "step",
    since="0.17.6",
    until="0.17.6",
    what=N_("wall_clock_breakdown on 0.17.6."),
    why=N_("The timer lines go through a logger that 0.17.6 set to WARNING: nothing is printed. 0.18.0 prints them again."),
    example='{"train_batch_size": 8, "wall_clock_breakdown": true}',
    fix=N_("Use 0.18.0 or later, or csv_monitor."),
    source="deepspeed/utils/timer.py, logging.py @ 0.17.6 (#7526); executed",
    context={"release": "0.17.6"},
)  # fmt: skip
def timers_hidden(s: Subject) -> Iterator[Hit]:
    pointer = "/wall_clock_breakdown"
    if s.flag(pointer):
        yield Hit(
            pointer,
            _("this release prints no timer lines"),
            effect=_("the timers cost time and show nothing"),
            hint=_("use 0.18.0 or later, or csv_monitor"),
        )


@rule(
    "DS737",
    "cosine-without-decay",
    Severity.ERROR,
    "step",
    until="0.19.2",
    what=N_("WarmupCosineLR whose total_num_steps equals warmup_num_steps, on a release that divides by their difference."),
    why=N_("The first step after the warmup divides by zero. From 0.19.3 the learning rate stays at its floor instead."),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 100}}}',
    fix=N_("Make total_num_steps the number of optimizer steps of the whole run."),
    source="deepspeed/runtime/lr_schedules.py:848 @ 0.18.9; max(1, ...) @ 0.19.3",
    context={"release": "0.19.2"},
)  # fmt: skip
def cosine_without_decay(s: Subject) -> Iterator[Hit]:
    params = s.block("/scheduler/params")
    total, warm = as_int(params.get("total_num_steps")), as_int(params.get("warmup_num_steps", 1000))
    if s.scheduler == "WarmupCosineLR" and total is not None and warm is not None and total == max(2, warm):
        yield Hit(
            "/scheduler/params/total_num_steps",
            _("no step is left after the warmup, and this release divides by their number"),
            effect=_("the first step after the warmup stops with a ZeroDivisionError"),
            hint=_("total_num_steps must be larger than warmup_num_steps"),
        )


# -- trainers -----------------------------------------------------------------------------------------------


def _argument(s: Subject, *names: str) -> Any:
    """The first of these training arguments that is given."""
    for name in names:
        if s.args and s.args.get(name) not in (None, "", False):
            return s.args[name]
    return None


@rule(
    "DS412",
    "accumulation-under-lightning",
    Severity.ERROR,
    "init",
    what=N_("gradient_accumulation_steps in a config that Lightning hands over."),
    why=N_(
        "Lightning counts micro batches itself and refuses the key; a train_batch_size beside it then no longer multiplies."
    ),
    example='{"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2}',
    fix=N_(
        "Remove gradient_accumulation_steps and train_batch_size; set accumulate_grad_batches on the Trainer."
    ),
    source="lightning/pytorch/strategies/deepspeed.py _format_batch_size_and_grad_accum_config (2.x); DeepSpeed 0.19.8 is not asked",
    context={"engine": "lightning"},
)
def accumulation_under_lightning(s: Subject) -> Iterator[Hit]:
    pointer = "/gradient_accumulation_steps"
    if s.engine == "lightning" and s.get(pointer) is not MISSING:
        steps = as_int(s.get(pointer))
        train, micro, _steps = s.batch()
        if train is not MISSING and micro is not MISSING and as_int(train) and as_int(micro):
            derived = (as_int(train) or 0) // ((as_int(micro) or 1) * s.data_parallel_size)
            steps = steps or derived
        yield Hit(
            pointer,
            _("Lightning owns the accumulation and refuses this key"),
            effect=_("the Trainer stops when training starts"),
            hint=_("remove it and train_batch_size; set accumulate_grad_batches={steps}").format(steps=steps),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS413",
    "zero-section-missing",
    Severity.ERROR,
    "init",
    what=N_("A config without zero_optimization for Hugging Face or Accelerate."),
    why=N_("Accelerate's plugin, which the Trainer uses too, refuses a config without the section."),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}',
    fix=N_("Add zero_optimization with a stage; stage 0 is allowed."),
    source="accelerate/utils/dataclasses.py DeepSpeedPlugin.__post_init__ @ 1.13; DeepSpeed 0.19.8 accepts it",
    context={"engine": "accelerate"},
)
def zero_section_missing(s: Subject) -> Iterator[Hit]:
    tuner = s.get("/autotuning/enabled", False) is True  # writes the section itself
    if s.engine in ("hf", "accelerate") and s.get(ZERO) is MISSING and not tuner:
        yield Hit(
            "",
            _("the section zero_optimization is missing"),
            effect=_("the Trainer stops: Please specify the ZeRO optimization config"),
            hint=_('add "zero_optimization": {"stage": 0} or the stage you want'),
            fix=put(ZERO, {"stage": 0}, there=False, safe=False),
        )


@rule(
    "DS905",
    "unsloth-with-stage-3",
    Severity.ERROR,
    "init",
    what=N_("use_unsloth in the training arguments at ZeRO stage 3."),
    why=N_("Unsloth patches the model for whole weights on one GPU; LLaMA-Factory refuses the pair."),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}',
    fix=N_("Use stage 2, or switch use_unsloth off."),
    source="LLaMA-Factory hparams/parser.py (2024 and later); DeepSpeed 0.19.8 is not asked",
    context={"engine": "hf", "args": {"use_unsloth": True}},
)
def unsloth_with_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage == 3 and _argument(s, "use_unsloth"):
        yield Hit(
            ZERO + "/stage",
            _("use_unsloth and stage 3 exclude each other"),
            effect=_("training stops at start"),
            hint=_("use stage 2, or switch use_unsloth off"),
            fix=put(ZERO + "/stage", 2, there=True, safe=False),
        )


@rule(
    "DS906",
    "quantized-base-with-stage-3",
    Severity.WARNING,
    "init",
    what=N_("A quantized base model (4 or 8 bit, GPTQ, AWQ) at ZeRO stage 3."),
    why=N_(
        "Packed weights cannot be partitioned while they are loaded: every GPU holds the whole quantized model, and GPTQ or AWQ models do not train at stage 3."
    ),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}',
    fix=N_("Use stage 2 with the quantized model, or stage 3 with 16-bit weights."),
    source="transformers/integrations/deepspeed.py, quantizers/ @ 5.24; public reports",
    context={"engine": "hf", "args": {"quantization_bit": 4}},
)
def quantized_base_with_stage_3(s: Subject) -> Iterator[Hit]:
    name = str(_argument(s, "model_name_or_path", "model", "model_id") or "")
    packed = re.search(r"gptq|awq|int4|int8|bnb", name, re.I)
    bits = _argument(s, "quantization_bit", "load_in_4bit", "load_in_8bit", "quant_bits")
    if s.stage == 3 and (bits or packed):
        yield Hit(
            ZERO + "/stage",
            _("a quantized base model is not split at stage 3"),
            effect=_("every GPU holds the whole model; GPTQ and AWQ models fail"),
            hint=_("use stage 2, or 16-bit weights"),
            fix=put(ZERO + "/stage", 2, there=True, safe=False),
        )


@rule(
    "DS907",
    "device-map-with-stage-3",
    Severity.ERROR,
    "init",
    what=N_("device_map or low_cpu_mem_usage in the training arguments at ZeRO stage 3."),
    why=N_("Stage 3 places the parameters itself; Hugging Face refuses to place them twice."),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}',
    fix=N_("Remove device_map and low_cpu_mem_usage."),
    source="transformers/modeling_utils.py from_pretrained (4.28 to 5.24)",
    context={"engine": "hf", "args": {"device_map": "auto"}},
)
def device_map_with_stage_3(s: Subject) -> Iterator[Hit]:
    given = [n for n in ("device_map", "low_cpu_mem_usage") if _argument(s, n)]
    if s.stage == 3 and given:
        yield Hit(
            ZERO + "/stage",
            _("{keys} and stage 3 exclude each other").format(keys=", ".join(given)),
            effect=_("loading the model stops with a ValueError"),
            hint=_("remove {keys} from the arguments").format(keys=", ".join(given)),
        )


@rule(
    "DS908",
    "half-weights-under-lightning",
    Severity.INFO,
    "step",
    what=N_("precision 16-mixed with Lightning's DeepSpeed strategy."),
    why=N_("Under DeepSpeed it means fp16 weights with a loss scale, not autocast: expect overflows in the first steps."),
    example='{"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}}',
    fix=N_("Prefer bf16 on cards of compute capability 8.0 or higher."),
    source="lightning/pytorch/plugins/precision/deepspeed.py (2.0 and later)",
    context={"engine": "lightning", "args": {"precision": "16-mixed"}},
)  # fmt: skip
def half_weights_under_lightning(s: Subject) -> Iterator[Hit]:
    if s.engine == "lightning" and str(_argument(s, "precision")) in ("16-mixed", "16", "16-true"):
        yield Hit(
            "",
            _("precision 16-mixed under DeepSpeed trains with fp16 weights"),
            hint=_("prefer bf16-mixed on A100 and newer"),
        )


@rule(
    "DS909",
    "fp16-for-a-bf16-model",
    Severity.WARNING,
    "step",
    what=N_("fp16 for a model of the T5 family."),
    why=N_(
        "T5, mT5 and their kin were trained in bf16: their activations leave the range of fp16, and every step overflows until the loss scale is at its floor."
    ),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
    fix=N_("Use bf16, or fp32 on cards without it."),
    source="transformers issues on T5 under fp16 (4.x); deepspeed/runtime/fp16/loss_scaler.py:258 @ 0.19.8",
    context={"engine": "hf", "args": {"model_name_or_path": "google/mt5-large", "fp16": True}},
)
def fp16_for_a_bf16_model(s: Subject) -> Iterator[Hit]:
    name = str(_argument(s, "model_name_or_path", "model", "model_id") or "")
    if s.precision("fp16") and re.search(r"(?<![a-z0-9])(m|um|by|long|flan-)?t5(?![a-z0-9]*gpt)", name, re.I):
        yield Hit(
            "/fp16/enabled" if s.written("/fp16/enabled") else "/fp16",
            _("models of the T5 family overflow in fp16"),
            effect=_("every step is skipped until the loss scale reaches its floor and the run ends"),
            hint=_("use bf16"),
        )
