"""DS7xx: precision, optimizer, scheduler and what is shown while training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dstui.config.pointer import join_pointer
from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put, rename
from dstui.rules.nearest import nearest
from dstui.rules.registry import Hit, rule, version_key
from dstui.rules.subject import MISSING, Subject, as_bool, as_number
from dstui.rules.tables import (
    DEEPSPEED_OPTIMIZERS,
    OPTIMIZER_PARAMS,
    SCHEDULERS,
    TORCH_ADAM_ONLY,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)

ZERO = "/zero_optimization"


@rule(
    "DS701",
    "fp16-and-bf16",
    Severity.ERROR,
    "parse",
    what=N_("fp16 and bf16 are both enabled."),
    why=N_("A run has one 16-bit type; DeepSpeed refuses the config."),
    example='{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
    fix=N_("Keep bf16 on cards of compute capability 8.0 or higher (A100 and newer), else fp16."),
    source="deepspeed/runtime/config.py:511 @ 0.19.8",
)
def fp16_and_bf16(s: Subject) -> Iterator[Hit]:
    if s.precision("fp16") and s.precision("bf16"):
        name = "bf16" if s.get("/bf16") is not MISSING else "bfloat16"
        yield Hit(
            f"/{name}/enabled",
            _("fp16 and bf16 cannot both be on"),
            effect=_("the config is refused"),
            hint=_("keep bf16 on A100 and newer, else fp16"),
            fix=put("/fp16/enabled", False, there=s.written("/fp16/enabled"), safe=False),
        )


@rule(
    "DS702",
    "bf16-on-old-gpu",
    Severity.WARNING,
    "step",
    needs=("facts.gpus",),
    what=N_("bf16 on GPUs of compute capability below 8.0 (V100, T4, RTX 20)."),
    why=N_("These cards have no bf16 units: PyTorch emulates the type, slowly, and some kernels refuse it."),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}}',
    fix=N_("Use fp16."),
    source="torch.cuda.is_bf16_supported (2.13), deepspeed/accelerator/cuda_accelerator.py @ 0.19.8",
    context={"compute_capability": (7, 0)},
)
def bf16_on_old_gpu(s: Subject) -> Iterator[Hit]:
    if not s.precision("bf16"):
        return
    old = (
        [g for g in (s.facts.gpus or ()) if g.compute_capability and g.compute_capability < (8, 0)]
        if s.facts
        else []
    )
    if old:
        name = "bf16" if s.get("/bf16") is not MISSING else "bfloat16"
        yield Hit(
            f"/{name}/enabled",
            _("{card} has no bf16 units (compute capability {major}.{minor})").format(
                card=old[0].name or _("GPU {index}").format(index=old[0].index),
                major=old[0].compute_capability[0] if old[0].compute_capability else "?",
                minor=old[0].compute_capability[1] if old[0].compute_capability else "?",
            ),
            effect=_("bf16 is emulated: slow, and some kernels stop"),
            hint=_("use fp16"),
        )


def _optimizers(s: Subject) -> list[str]:
    """DeepSpeed's own optimizer names in this release."""
    return [
        o.name for o in DEEPSPEED_OPTIMIZERS
        if not (o.since and s.key < version_key(o.since)) and not (o.until and s.key > version_key(o.until))
    ]  # fmt: skip


@rule(
    "DS703",
    "optimizer-unknown",
    Severity.ERROR,
    "init",
    what=N_("optimizer.type is no optimizer that this release knows."),
    why=N_(
        "DeepSpeed looks for its own names in any case, then for an exact name in torch.optim (SGD, not sgd). It finds out only after the model was loaded."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamWW", "params": {"lr": 1e-4}}}',
    fix=N_("Correct the name, or let the script make the optimizer and remove the section."),
    source="deepspeed/runtime/engine.py:1985, 2018 @ 0.19.8; executed",
)
def optimizer_unknown(s: Subject) -> Iterator[Hit]:
    name = s.optimizer
    if name is None or name == "auto":
        return
    own = _optimizers(s)
    if name.lower() in {o.lower() for o in own} or name in TORCH_OPTIMIZERS:
        return
    if any(name.lower() == o.name.lower() for o in DEEPSPEED_OPTIMIZERS):
        return  # known, but not in this release: DS802
    near = nearest(name, [*own, *TORCH_OPTIMIZERS])
    yield Hit(
        "/optimizer/type",
        _("there is no optimizer {name!r}").format(name=name),
        effect=_("the engine stops at start, after the model was loaded"),
        hint=_("did you mean {name}?").format(name=near) if near
        else _("known: {names}, or an exact name from torch.optim").format(names=", ".join(own)),
        fix=put("/optimizer/type", near, there=True, safe=True) if near else None,
    )  # fmt: skip


@rule(
    "DS704",
    "optimizer-parameter-unknown",
    Severity.ERROR,
    "init",
    what=N_("A key in optimizer.params that the optimizer does not take."),
    why=N_(
        "The params are handed to the optimizer's constructor as they are: an unknown one is a TypeError, after the model was loaded."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decy": 0.1}}}',
    fix=N_("Correct or remove the key."),
    source="deepspeed/runtime/engine.py _configure_basic_optimizer; ops/adam, ops/lamb, ops/lion constructors @ 0.19.8; executed",
)
def optimizer_parameter_unknown(s: Subject) -> Iterator[Hit]:
    name = (s.optimizer or "").lower()
    known = OPTIMIZER_PARAMS.get(name)
    params = s.get("/optimizer/params", None)
    if known is None or not isinstance(params, Mapping):
        return
    torch_adam = name in ("adam", "adamw") and as_bool(params.get("torch_adam", False)) is True
    if name in ("adam", "adamw") and not torch_adam:
        known = known - TORCH_ADAM_ONLY
    for key in params:
        pointer = join_pointer("optimizer", "params", key)
        if key in known or key == "max_grad_norm":
            continue
        near = nearest(str(key), known)
        yield Hit(
            pointer,
            _("{type} takes no parameter {key!r}").format(type=s.optimizer, key=key),
            effect=_("the engine stops at start with a TypeError, after the model was loaded"),
            hint=_("did you mean {name}?").format(name=near) if near
            else _("it takes: {names}").format(names=", ".join(sorted(known))),
            fix=rename(pointer, near, params[key], safe=True) if near and near not in params else None,
        )  # fmt: skip


@rule(
    "DS705",
    "scheduler-unknown",
    Severity.ERROR,
    "init",
    what=N_("scheduler.type is no scheduler that DeepSpeed knows."),
    why=N_(
        "It looks for its own five, then for an exact name in torch.optim.lr_scheduler; case matters in both. It finds out only after the model was loaded."
    ),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmUpLR", "params": {}}}',
    fix=N_("Correct the name, or let the script make the scheduler and remove the section."),
    source="deepspeed/runtime/engine.py:1923-1936 @ 0.19.8; executed",
)
def scheduler_unknown(s: Subject) -> Iterator[Hit]:
    name = s.scheduler
    if name is None or name == "auto":
        return
    own = [n for n in SCHEDULERS if n != "WarmupCosineLR" or s.at_least("0.12.3")]
    if name in own or name in TORCH_SCHEDULERS:
        return
    near = nearest(name, [*own, *TORCH_SCHEDULERS])
    yield Hit(
        "/scheduler/type",
        _("there is no scheduler {name!r}").format(name=name),
        effect=_("the engine stops at start, after the model was loaded"),
        hint=_("did you mean {name}?").format(name=near) if near
        else _("known: {names}, or an exact name from torch.optim.lr_scheduler").format(names=", ".join(own)),
        fix=put("/scheduler/type", near, there=True, safe=True) if near else None,
    )  # fmt: skip


@rule(
    "DS706",
    "scheduler-parameters-incomplete",
    Severity.ERROR,
    "init",
    what=N_("A scheduler without params, or without one it cannot do without."),
    why=N_(
        'DeepSpeed hands the params to the constructor: without the section it fails with "argument after ** must be a mapping", without a required one with a TypeError.'
    ),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}',
    fix=N_("Add the missing parameter; an empty params object will do for WarmupLR."),
    source="deepspeed/runtime/lr_schedules.py constructors, engine.py:1934 @ 0.19.8; executed",
)
def scheduler_parameters_incomplete(s: Subject) -> Iterator[Hit]:
    name = s.scheduler
    if name not in SCHEDULERS and name not in TORCH_SCHEDULERS:
        return
    params = s.get("/scheduler/params", None)
    if params is None:
        yield Hit(
            "/scheduler",
            _("the scheduler has no params"),
            effect=_("the engine stops at start with a TypeError"),
            hint=_("add \"params\": {}"),
            fix=put("/scheduler/params", {}, there=s.written("/scheduler/params"), safe=name in ("WarmupLR", "LRRangeTest")),
        )  # fmt: skip
        return
    if name in SCHEDULERS and isinstance(params, Mapping):
        missing = sorted(SCHEDULERS[name][1] - set(params))
        if missing:
            yield Hit(
                "/scheduler/params",
                _("{name} needs {missing}").format(name=name, missing=", ".join(missing)),
                effect=_("the engine stops at start with a TypeError"),
                hint=_("add it"),
            )


@rule(
    "DS707",
    "scheduler-parameter-unknown",
    Severity.ERROR,
    "init",
    what=N_("A key in scheduler.params that the scheduler does not take."),
    why=N_(
        "The params are handed to the constructor as they are: an unknown one is a TypeError, after the model was loaded."
    ),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}}',
    fix=N_("Correct or remove the key."),
    source="deepspeed/runtime/lr_schedules.py constructors @ 0.19.8; executed",
)
def scheduler_parameter_unknown(s: Subject) -> Iterator[Hit]:
    name = s.scheduler
    params = s.get("/scheduler/params", None)
    if name not in SCHEDULERS or not isinstance(params, Mapping):
        return
    known = SCHEDULERS[name][0]
    common = {"warmup_steps": "warmup_num_steps", "total_steps": "total_num_steps"}
    for key in params:
        if key in known:
            continue
        pointer = join_pointer("scheduler", "params", key)
        near = common.get(str(key)) if common.get(str(key)) in known else nearest(str(key), known)
        yield Hit(
            pointer,
            _("{type} takes no parameter {key!r}").format(type=name, key=key),
            effect=_("the engine stops at start with a TypeError, after the model was loaded"),
            hint=_("did you mean {name}?").format(name=near) if near
            else _("it takes: {names}").format(names=", ".join(sorted(known))),
            fix=rename(pointer, near, params[key], safe=True) if near and near not in params else None,
        )  # fmt: skip


def _not_positive_int(value: Any) -> bool:
    return not isinstance(value, int) or value <= 0


@rule(
    "DS708",
    "warmup-steps-not-a-positive-integer",
    Severity.ERROR,
    "init",
    since="0.19.3",
    what=N_("warmup_num_steps (or the step size of LRRangeTest, OneCycle) is not a whole number above 0."),
    why=N_(
        "0.19.3 began to check it: 0, 100.0, 1e3 and a text are refused at start. Before, the value was cut to at least 2 in silence."
    ),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}',
    fix=N_("Write a whole number without a point; 1 for no warmup."),
    source="deepspeed/runtime/lr_schedules.py:734 @ 0.19.8 (#8126), :371, :527 @ 0.19.8 (#8166); executed",
)
def warmup_steps_not_a_positive_integer(s: Subject) -> Iterator[Hit]:
    params = s.block("/scheduler/params")
    name = s.scheduler or ""
    key = "warmup_num_steps" if name.startswith("Warmup") else ""
    if s.at_least("0.19.4"):
        key = {"LRRangeTest": "lr_range_test_step_size", "OneCycle": "cycle_first_step_size"}.get(name, key)
    if key not in params or params[key] == "auto":
        return
    value = params[key]
    bad = (as_number(value) or 0) <= 0 if key == "cycle_first_step_size" else _not_positive_int(value)
    if bad:
        number = as_number(value)
        whole = int(number) if number and number > 0 and float(number).is_integer() else None
        yield Hit(
            f"/scheduler/params/{key}",
            _("{key} must be a whole number above 0, not {value!r}").format(key=key, value=value),
            effect=_("the engine stops at start, after the model was loaded"),
            hint=_("write {value}").format(value=whole) if whole else _("write 1 for no warmup"),
            fix=put(f"/scheduler/params/{key}", whole or 1, there=True, safe=True),
        )


@rule(
    "DS709",
    "untested-optimizer",
    Severity.ERROR,
    "init",
    what=N_("An optimizer that ZeRO does not list as tested, without zero_allow_untested_optimizer."),
    why=N_(
        "ZeRO accepts Adam, AdamW, Adagrad, Lion and Muon by exact type; Lamb, SGD and the rest stop at start unless the key is true."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}',
    fix=N_('Add "zero_allow_untested_optimizer": true, or use a tested optimizer.'),
    source="deepspeed/runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS, engine.py:2299 @ 0.19.8; executed",
)
def untested_optimizer(s: Subject) -> Iterator[Hit]:
    pointer = "/zero_allow_untested_optimizer"
    name = s.optimizer
    if not s.stage or name is None or s.get(pointer, False) not in (False, 0, None):
        return
    own = {o.name.lower(): o.tested for o in DEEPSPEED_OPTIMIZERS if not o.until}  # the 1-bit ones: DS803
    tested = own.get(name.lower())
    if tested is None:
        tested = name in ("Adam", "AdamW", "Adagrad") if name in TORCH_OPTIMIZERS else None
    if tested is False and name.lower() in {n.lower() for n in _optimizers(s)} | {
        t.lower() for t in TORCH_OPTIMIZERS
    }:
        yield Hit(
            "/optimizer/type",
            _("{name} is not on ZeRO's list of tested optimizers").format(name=name),
            effect=_("the engine stops at start"),
            hint=_('add "zero_allow_untested_optimizer": true'),
            fix=put(pointer, True, there=s.written(pointer), safe=False),
        )


@rule(
    "DS710",
    "max-grad-norm-in-optimizer",
    Severity.ERROR,
    "init",
    what=N_("max_grad_norm inside optimizer.params."),
    why=N_("DeepSpeed refuses it there and points to gradient_clipping."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}',
    fix=N_("Move the value to the top-level key gradient_clipping."),
    source="deepspeed/runtime/engine.py:2481 @ 0.19.8; executed",
)
def max_grad_norm_in_optimizer(s: Subject) -> Iterator[Hit]:
    from dstui.rules.diagnostic import Fix

    pointer = "/optimizer/params/max_grad_norm"
    if s.optimizer is None or s.get(pointer) is MISSING:
        return
    free = not s.written("/gradient_clipping")
    yield Hit(
        pointer,
        _("max_grad_norm does not belong to the optimizer"),
        effect=_("the engine stops at start"),
        hint=_("use the top-level key gradient_clipping"),
        fix=Fix(
            _("move it to gradient_clipping"), True,
            (
                {"op": "add", "path": "/gradient_clipping", "value": s.get(pointer)},
                {"op": "remove", "path": pointer},
            ),
        ) if free else drop(pointer, safe=False),
    )  # fmt: skip


@rule(
    "DS711",
    "gradient-clipping-left-to-default",
    Severity.MEANING_CHANGED,
    "step",
    what=N_("No gradient_clipping in the file."),
    why=N_(
        "Its default became 1.0 in DeepSpeed 0.19.3 (0 before, which means off). The same file trains with clipped gradients after the upgrade."
    ),
    example='{"train_batch_size": 8}',
    fix=N_("Write gradient_clipping: 1.0, or 0 for no clipping."),
    source="deepspeed/runtime/constants.py @ 0.19.2, 0.19.3 (#8068)",
)
def gradient_clipping_left_to_default(s: Subject) -> Iterator[Hit]:
    pointer = "/gradient_clipping"
    if s.get(pointer) is not MISSING:
        return
    now = s.at_least("0.19.3")
    yield Hit(
        "",
        _("gradients are clipped at 1.0 by default since 0.19.3, before they were not") if now
        else _("gradients are not clipped here, and clipped at 1.0 by default from 0.19.3"),
        effect="" if now else _("the same file trains differently after an upgrade"),
        hint=_("write gradient_clipping yourself; 0 switches it off"),
        fix=put(pointer, 1.0 if now else 0.0, there=False, safe=False),
    )  # fmt: skip


@rule(
    "DS712",
    "no-step-line",
    Severity.INFO,
    "step",
    since="0.15.2",
    what=N_("Nothing makes DeepSpeed print a line per step."),
    why=N_(
        "steps_per_print is unset since 0.15.2, and from 0.17.6 the logger hides the line even when it is set. From 0.19.3 log_level: info together with steps_per_print brings it back. A run started by dstui gets both in its own copy."
    ),
    example='{"train_batch_size": 8}',
    fix=N_('Add "steps_per_print": 10 and, from 0.19.3, "log_level": "info".'),
    source="deepspeed/runtime/constants.py @ 0.15.2; utils/logging.py @ 0.17.6 (#7526); runtime/config.py get_log_level @ 0.19.3; executed",
)
def no_step_line(s: Subject) -> Iterator[Hit]:
    printing = as_number(s.get("/steps_per_print", None))
    level = s.get("/log_level", None)
    needs_level = s.at_least("0.17.6")
    if printing and (not needs_level or (s.at_least("0.19.3") and str(level).lower() in ("info", "debug"))):
        return
    if needs_level and s.before("0.19.3"):
        yield Hit(
            "/steps_per_print" if s.written("/steps_per_print") else "",
            _("this release prints no step line, whatever the config says"),
            hint=_("use csv_monitor or your script's own output"),
        )
        return
    missing = [
        k
        for k, have in (
            ("steps_per_print", printing),
            ("log_level", level in ("info", "debug") or not needs_level),
        )
        if not have
    ]
    yield Hit(
        "/steps_per_print" if s.written("/steps_per_print") else "",
        _("DeepSpeed prints no step line: {keys} is not set").format(keys=", ".join(missing)),
        hint=_("add \"steps_per_print\": 10 and \"log_level\": \"info\"") if needs_level else _("add \"steps_per_print\": 10"),
    )  # fmt: skip


@rule(
    "DS713",
    "master-weights-need-zero",
    Severity.ERROR,
    "parse",
    what=N_(
        "fp16_master_weights_and_grads, bf16_master_weights_and_grads or bf16_optimizer_states where it is not allowed."
    ),
    why=N_(
        "16-bit master weights need ZeRO stage 1-3 (until 0.18.2: exactly stage 2), and bf16_optimizer_states needs bf16_master_weights_and_grads."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
    fix=N_("Use a ZeRO stage, or remove the key."),
    source="deepspeed/runtime/config.py:703-714 @ 0.19.8, :979 @ 0.18.2",
)
def master_weights_need_zero(s: Subject) -> Iterator[Hit]:
    def hit(pointer: str, text: str, hint: str) -> Hit:
        return Hit(pointer, text, effect=_("the config is refused"), hint=hint, fix=drop(pointer, safe=False))

    pointer = "/fp16/fp16_master_weights_and_grads"
    if s.flag(pointer):
        if s.at_least("0.18.3") and s.stage == 0:
            yield hit(pointer, _("16-bit master weights need ZeRO"), _("use stage 1, 2 or 3"))
        elif s.before("0.18.3") and s.stage != 2:
            yield hit(pointer, _("16-bit master weights need ZeRO stage 2 in this release"), _("use stage 2"))
    bf16 = "bf16" if s.get("/bf16") is not MISSING else "bfloat16"
    master, states = f"/{bf16}/bf16_master_weights_and_grads", f"/{bf16}/bf16_optimizer_states"
    if s.at_least("0.18.3"):
        if s.flag(master) and s.stage == 0:
            yield hit(master, _("16-bit master weights need ZeRO"), _("use stage 1, 2 or 3"))
        if s.flag(states) and s.stage == 0:
            yield hit(states, _("16-bit optimizer states need ZeRO"), _("use stage 1, 2 or 3"))
        elif s.flag(states) and not s.flag(master):
            yield hit(states, _("bf16_optimizer_states needs bf16_master_weights_and_grads"), _("set both"))


@rule(
    "DS714",
    "adam-is-adamw",
    Severity.INFO,
    "init",
    what=N_("optimizer type Adam with weight decay."),
    why=N_(
        "DeepSpeed makes AdamW out of Adam unless adam_w_mode is false: weight decay is decoupled from the gradient."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.01}}}',
    fix=N_("Write AdamW to say so, or adam_w_mode: false for L2 regularisation."),
    source="deepspeed/runtime/engine.py:2489 @ 0.19.8",
)
def adam_is_adamw(s: Subject) -> Iterator[Hit]:
    params = s.block("/optimizer/params")
    decay = params.get("weight_decay", 0)
    if (
        (s.optimizer or "").lower() == "adam"
        and decay not in (0, 0.0, "auto")
        and "adam_w_mode" not in params
    ):
        yield Hit(
            "/optimizer/type",
            _("Adam means AdamW here: weight decay is decoupled"),
            hint=_("write AdamW, or adam_w_mode: false"),
        )


@rule(
    "DS715",
    "decay-peaks-at-default-lr",
    Severity.WARNING,
    "step",
    what=N_("WarmupDecayLR without warmup_max_lr."),
    why=N_(
        "It then warms up to 0.001, whatever the optimizer's lr is (WarmupLR takes the optimizer's from 0.17.2, WarmupDecayLR never)."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}}',
    fix=N_("Set warmup_max_lr to the optimizer's lr."),
    source="deepspeed/runtime/lr_schedules.py:818 @ 0.19.8 (#7360)",
)
def decay_peaks_at_default_lr(s: Subject) -> Iterator[Hit]:
    name = s.scheduler
    if name != "WarmupDecayLR" and not (name == "WarmupLR" and s.before("0.17.2")):
        return
    params = s.get("/scheduler/params", None)
    lr = as_number(s.get("/optimizer/params/lr", None))
    if not isinstance(params, Mapping) or "warmup_max_lr" in params or lr is None or lr == 0.001:
        return
    yield Hit(
        "/scheduler/params",
        _("the learning rate will peak at 0.001, not at the optimizer's {lr}").format(lr=lr),
        effect=_("the scheduler overwrites the optimizer's lr"),
        hint=_('add "warmup_max_lr": {lr}').format(lr=lr),
        fix=put("/scheduler/params/warmup_max_lr", lr, there=False, safe=False),
    )


@rule(
    "DS716",
    "total-steps-below-warmup",
    Severity.WARNING,
    "step",
    what=N_("total_num_steps is not larger than warmup_num_steps."),
    why=N_(
        "The warmup never ends, and the decay begins past its own end: the learning rate never reaches its peak."
    ),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 100}}}',
    fix=N_("Make total_num_steps the number of optimizer steps of the whole run."),
    source="deepspeed/runtime/lr_schedules.py:826 @ 0.19.8",
)
def total_steps_below_warmup(s: Subject) -> Iterator[Hit]:
    params = s.block("/scheduler/params")
    total, warm = as_number(params.get("total_num_steps")), as_number(params.get("warmup_num_steps", 1000))
    if (
        s.scheduler in ("WarmupDecayLR", "WarmupCosineLR")
        and total is not None
        and warm is not None
        and total <= warm
    ):
        yield Hit(
            "/scheduler/params/total_num_steps",
            _("{total:g} steps in all, but {warm:g} of warmup").format(total=total, warm=warm),
            effect=_("the learning rate never reaches its peak")
            if total < warm
            else _("no step is left for the decay"),
            hint=_(
                "total_num_steps counts the optimizer steps of the whole run; warmup_num_steps is 1000 when unset"
            ),
        )


@rule(
    "DS717",
    "activation-checkpointing-block",
    Severity.INFO,
    "step",
    what=N_("An activation_checkpointing block."),
    why=N_(
        "It configures deepspeed.checkpointing only: nothing is checkpointed because of it, and Hugging Face's gradient_checkpointing does not read it."
    ),
    example='{"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": true}}',
    fix=N_(
        "With Hugging Face set gradient_checkpointing: true in the training arguments; with a script of your own call deepspeed.checkpointing.configure and .checkpoint."
    ),
    source="deepspeed/runtime/activation_checkpointing/checkpointing.py configure @ 0.19.8",
)
def activation_checkpointing_block(s: Subject) -> Iterator[Hit]:
    if isinstance(s.get("/activation_checkpointing"), Mapping):
        yield Hit(
            "/activation_checkpointing",
            _("the Trainer does not read this block") if s.engine in ("hf", "accelerate")
            else _("read only by deepspeed.checkpointing.configure() in the script"),
            hint=_("use gradient_checkpointing in the training arguments") if s.engine in ("hf", "accelerate")
            else _("this block alone saves no memory"),
        )  # fmt: skip


@rule(
    "DS718",
    "accumulation-dtype-mix",
    Severity.ERROR,
    "init",
    what=N_("data_types.grad_accum_dtype differs from the training dtype at ZeRO stage 0."),
    why=N_(
        "Without ZeRO there is no wrapper that keeps gradients in another type: the engine raises NotImplementedError."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
    fix=N_("Use ZeRO stage 1 or higher, or remove grad_accum_dtype."),
    source="deepspeed/runtime/engine.py:2323 @ 0.19.8, :1425 @ 0.17.5",
)
def accumulation_dtype_mix(s: Subject) -> Iterator[Hit]:
    pointer = "/data_types/grad_accum_dtype"
    value = s.get(pointer, None)
    names = {
        "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "float": "fp32", "fp16": "fp16", "float16": "fp16",
        "torch.float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
        "int8": "int8", "torch.int8": "int8",
    }  # fmt: skip
    if value is None:
        return
    grad = names.get(value) if isinstance(value, str) else None
    if grad is None:
        yield Hit(
            pointer,
            _("{value!r} is no dtype").format(value=value),
            effect=_("the engine stops at start with a ValueError"),
            hint=_("write fp32, bf16 or fp16"),
        )
        return
    model = "fp16" if s.precision("fp16") else "bf16" if s.precision("bf16") else "fp32"
    old_pair = s.before("0.18.5") and (model, grad) == ("bf16", "fp32")
    if s.stage == 0 and grad != model and not old_pair:
        yield Hit(
            pointer,
            _("gradients in {grad} with a {model} model need ZeRO").format(grad=grad, model=model),
            effect=_("the engine stops at start"),
            hint=_("use stage 1 or higher, or remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS719",
    "lamb-with-static-scale",
    Severity.ERROR,
    "init",
    what=N_("Lamb with a fixed fp16 loss scale."),
    why=N_("Lamb (and the 1-bit optimizers before 0.19.7) works with dynamic loss scaling only."),
    example='{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 128}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
    fix=N_("Set fp16.loss_scale to 0."),
    source="deepspeed/runtime/engine.py:2021 @ 0.19.8",
)
def lamb_with_static_scale(s: Subject) -> Iterator[Hit]:
    pointer = "/fp16/loss_scale"
    scale = as_number(s.get(pointer, 0))
    if (s.optimizer or "").lower() == "lamb" and s.precision("fp16") and scale:
        yield Hit(
            pointer,
            _("{name} needs dynamic loss scaling").format(name=s.optimizer),
            effect=_("the engine stops at start"),
            hint=_("set it to 0"),
            fix=put(pointer, 0, there=True, safe=False),
        )


@rule(
    "DS720",
    "muon-with-reduce-scatter",
    Severity.ERROR,
    "init",
    since="0.18.9",
    what=N_("Muon at ZeRO stage 3 with reduce_scatter (on by default) or quantized gradients."),
    why=N_("Muon needs whole gradients; the engine refuses the pair."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 3}}',
    fix=N_("Write reduce_scatter: false."),
    source="deepspeed/runtime/zero/stage3.py:361-363 @ 0.19.8",
)
def muon_with_reduce_scatter(s: Subject) -> Iterator[Hit]:
    if (s.optimizer or "").lower() != "muon" or s.stage != 3:
        return
    pointer = ZERO + "/reduce_scatter"
    if s.flag(pointer):
        yield Hit(
            pointer if s.written(pointer) else "/optimizer/type",
            _("Muon at stage 3 needs reduce_scatter: false"),
            effect=_("the engine stops at start"),
            hint=_("reduce_scatter is true by default; write false"),
            fix=put(pointer, False, there=s.written(pointer), safe=False),
        )
    if s.flag(ZERO + "/zero_quantized_gradients"):
        yield Hit(
            ZERO + "/zero_quantized_gradients",
            _("Muon does not work with quantized gradients"),
            effect=_("the engine stops at start"),
            hint=_("remove it"),
            fix=drop(ZERO + "/zero_quantized_gradients", safe=False),
        )
