"""DS85x-DS87x: what a release does with the same file that the one before it did not.

These speak in ``dstui versions`` only: each compares one file in two releases, an older and a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dstui.i18n import N_, _
from dstui.rules.edits import drop
from dstui.rules.pinned import pinned_blocks, pinned_rounded, ranks_per_node
from dstui.rules.registry import Shift, change
from dstui.rules.subject import MISSING, Subject, as_number
from dstui.units import gib

ZERO = "/zero_optimization"


def _free(s: Subject, pointer: str) -> bool:
    """The file leaves this key to its default; in a checked section ``"auto"`` does that too."""
    value = s.get(pointer)
    return value is MISSING or value == "auto"


def _bf16(s: Subject) -> str:
    return "/bf16" if s.get("/bf16") is not MISSING or s.get("/bfloat16") is MISSING else "/bfloat16"


def bf16_wrapper(s: Subject) -> bool:
    """The engine takes ``BF16_Optimizer``: bf16, stage 1, gradients added up in fp32, optimizer not offloaded.

    Source: runtime/engine.py _do_optimizer_sanity_check @ 0.14.5-0.19.8.
    """
    dtype = s.get("/data_types/grad_accum_dtype", None)
    return (
        s.precision("bf16")
        and s.stage == 1
        and dtype in ("fp32", "float32", "torch.float32")
        and not s.offloads_optimizer
    )


def offloads(s: Subject) -> bool:
    """Anything really leaves the GPU: optimizer offload with ZeRO, parameter offload at stage 3."""
    return bool(s.stage) and (
        s.offloads_optimizer or (s.stage == 3 and s.offload("offload_param") in ("cpu", "nvme"))
    )


def _nvme(s: Subject) -> bool:
    return s.stage == 3 and "nvme" in (s.offload("offload_optimizer"), s.offload("offload_param"))


def _offload_block(s: Subject) -> str:
    for name in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"):
        if s.written(f"{ZERO}/{name}"):
            return f"{ZERO}/{name}"
    return ZERO


# -- defaults ---------------------------------------------------------------------------------------------


@change(
    "DS850",
    "steps-per-print-default",
    "default",
    "0.15.2",
    what=N_("The default of steps_per_print."),
    why=N_("It was 10; since 0.15.2 it is unset: DeepSpeed prints no progress and no throughput line."),
    example='{"train_batch_size": 8}',
    fix=N_("Write steps_per_print yourself."),
    source="deepspeed/runtime/constants.py STEPS_PER_PRINT_DEFAULT @ 0.15.1, 0.15.2",
)
def steps_per_print_default(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.get("/steps_per_print") is MISSING:
        yield Shift(
            "/steps_per_print",
            _("{key} is {after} by default from {release}, before it was {before}").format(
                key="steps_per_print", after="null", before="10", release="0.15.2"
            ),
            effect=_("no progress line is printed"),
            hint=_("write steps_per_print yourself"),
            before=10,
            after=None,
        )


@change(
    "DS851",
    "immediate-grad-update-on",
    "default",
    "0.16.5",
    what=N_("The default of bf16.immediate_grad_update becomes true."),
    why=N_(
        "It concerns bf16 at stage 1 with gradients added up in fp32: gradients are added as they come, not after backward. 0.17.1 switched it off again."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}',
    fix=N_("Write bf16.immediate_grad_update yourself."),
    source="deepspeed/runtime/constants.py, bf16_optimizer.py @ 0.16.4, 0.16.5",
)
def immediate_grad_update_on(old: Subject, new: Subject) -> Iterator[Shift]:
    yield from _immediate(new, False, True, "0.16.5")


@change(
    "DS852",
    "immediate-grad-update-off",
    "default",
    "0.17.1",
    what=N_("The default of bf16.immediate_grad_update becomes false again."),
    why=N_("0.17.1 reads bf16 through a checked section, whose default is false."),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}',
    fix=N_("Write bf16.immediate_grad_update yourself."),
    source="deepspeed/runtime/precision_config.py @ 0.17.1",
)
def immediate_grad_update_off(old: Subject, new: Subject) -> Iterator[Shift]:
    yield from _immediate(new, True, False, "0.17.1")


def _immediate(s: Subject, before: bool, after: bool, release: str) -> Iterator[Shift]:
    pointer = _bf16(s) + "/immediate_grad_update"
    if bf16_wrapper(s) and _free(s, pointer):
        yield Shift(
            pointer,
            _("{key} is {after} by default from {release}, before it was {before}").format(
                key="bf16.immediate_grad_update",
                after=str(after).lower(),
                before=str(before).lower(),
                release=release,
            ),
            effect=_("gradients are added up at another moment; memory and speed change"),
            hint=_("write {key} yourself").format(key="immediate_grad_update"),
            before=before,
            after=after,
        )


@change(
    "DS853",
    "warmup-peak-default",
    "default",
    "0.17.2",
    what=N_("The learning rate at which WarmupLR peaks when warmup_max_lr is not written."),
    why=N_("It was 0.001; since 0.17.2 WarmupLR takes the optimizer's lr. WarmupDecayLR keeps 0.001."),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}',
    fix=N_("Write warmup_max_lr yourself."),
    source="deepspeed/runtime/lr_schedules.py WarmupLR @ 0.17.1, 0.17.2 (#7360)",
)
def warmup_peak_default(old: Subject, new: Subject) -> Iterator[Shift]:
    params = new.get("/scheduler/params", None)
    lr = as_number(new.get("/optimizer/params/lr", 0.001))
    if new.scheduler != "WarmupLR" or not isinstance(params, Mapping) or "warmup_max_lr" in params:
        return
    if lr is None or lr == 0.001:
        return
    yield Shift(
        "/scheduler/params/warmup_max_lr",
        _("WarmupLR peaks at the optimizer's {lr} from 0.17.2, before at 0.001").format(lr=f"{lr:g}"),
        effect=_("the whole run has another learning rate"),
        hint=_("write {key} yourself").format(key="warmup_max_lr"),
        before=0.001,
        after=lr,
    )


@change(
    "DS854",
    "logger-level-warning",
    "default",
    "0.17.6",
    what=N_("The level of DeepSpeed's logger."),
    why=N_(
        "It was INFO; since 0.17.6 it is WARNING: step lines, timers and start-up lines vanish although they are switched on. The key log_level brings them back from 0.19.3 on; between nothing in the file does."
    ),
    example='{"train_batch_size": 8, "steps_per_print": 10}',
    fix=N_('Write "log_level": "info" (0.19.3 and later), or use csv_monitor.'),
    source="deepspeed/utils/logging.py @ 0.17.5, 0.17.6 (#7526); runtime/config.py get_log_level @ 0.19.3; executed",
)
def logger_level_warning(old: Subject, new: Subject) -> Iterator[Shift]:
    shown = as_number(new.get("/steps_per_print", 10 if old.before("0.15.2") else None))
    if not shown and not new.flag("/wall_clock_breakdown"):
        return
    if new.at_least("0.19.3") and new.get("/log_level") is not MISSING:
        return
    yield Shift(
        "/log_level",
        _("DeepSpeed logs warnings only from 0.17.6, before INFO too"),
        effect=_("the step lines that the file asks for are not printed"),
        hint=_('write "log_level": "info"') if new.at_least("0.19.3") else _("use csv_monitor, or 0.19.3 or later"),
        before="info",
        after="warning",
        pinnable=new.at_least("0.19.3"),
    )  # fmt: skip


@change(
    "DS855",
    "gradient-clipping-default",
    "default",
    "0.19.3",
    what=N_("The default of gradient_clipping."),
    why=N_("It was 0, which means no clipping; since 0.19.3 it is 1.0."),
    example='{"train_batch_size": 8}',
    fix=N_("Write gradient_clipping yourself."),
    source="deepspeed/runtime/constants.py @ 0.19.2, 0.19.3 (#8068)",
)
def gradient_clipping_default(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.get("/gradient_clipping") is MISSING:
        yield Shift(
            "/gradient_clipping",
            _("{key} is {after} by default from {release}, before it was {before}").format(
                key="gradient_clipping", after="1.0", before="0.0", release="0.19.3"
            ),
            effect=_("gradients with a norm above 1 are scaled down: the run trains differently"),
            hint=_("write gradient_clipping yourself; 0 switches it off"),
            before=0.0,
            after=1.0,
        )


@change(
    "DS856",
    "check-grad-overflow-default",
    "default",
    "0.19.3",
    what=N_("The default of bf16.check_grad_overflow."),
    why=N_(
        "Since 0.19.3 a bf16 step with an infinite gradient is skipped at ZeRO stages 1 and 2; before it was taken. Stage 3 never reads the key."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
    fix=N_("Write bf16.check_grad_overflow yourself."),
    source="deepspeed/runtime/precision_config.py @ 0.19.2, 0.19.3 (#8035)",
)
def check_grad_overflow_default(old: Subject, new: Subject) -> Iterator[Shift]:
    pointer = _bf16(new) + "/check_grad_overflow"
    if new.precision("bf16") and new.stage in (1, 2) and _free(new, pointer):
        yield Shift(
            pointer,
            _("{key} is {after} by default from {release}, before it was {before}").format(
                key="bf16.check_grad_overflow", after="true", before="false", release="0.19.3"
            ),
            effect=_("a step with an infinite gradient is skipped; each step is checked for it"),
            hint=_("write {key} yourself").format(key="check_grad_overflow"),
            before=False,
            after=True,
        )


@change(
    "DS857",
    "pin-memory-default",
    "default",
    "0.19.5",
    what=N_("The default of pin_memory in offload_optimizer and offload_param."),
    why=N_(
        "It was false; since 0.19.5 it is true. Host buffers are page-locked: copies are faster, but each block takes the next power of two of its size, so host RAM can nearly double, and pinned pages cannot be swapped. A pin_memory that is written is not touched."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Write pin_memory yourself: true if the host has the RAM, else false."),
    source="deepspeed/runtime/zero/offload_config.py @ 0.19.4, 0.19.5 (#8207); rounding of torch's host allocator measured",
)
def pin_memory_default(old: Subject, new: Subject) -> Iterator[Shift]:
    told = False
    for name in ("offload_optimizer", "offload_param"):
        pointer = f"{ZERO}/{name}"
        used = bool(new.stage) if name == "offload_optimizer" else new.stage == 3
        if not used or new.offload(name) not in ("cpu", "nvme") or not new.written(pointer):
            continue
        if not _free(new, pointer + "/pin_memory"):
            continue
        yield Shift(
            pointer + "/pin_memory",
            _("{key} is {after} by default from {release}, before it was {before}").format(
                key=f"{name}.pin_memory", after="true", before="false", release="0.19.5"
            ),
            effect=_("see {block}").format(block="offload_optimizer") if told else _pinned_effect(new),
            hint=_("write pin_memory yourself: false keeps the old RAM, true the new speed"),
            before=False,
            after=True,
        )
        told = True


def _pinned_effect(s: Subject) -> str:
    """Host bytes that get pinned: exact with a model, else the rule."""
    params = (s.model.trained or s.model.params) if s.model else None
    blocks = pinned_blocks(s, params, s.world_size) if params else []
    if not blocks:
        return _(
            "host buffers are pinned; each block takes the next power of two of its size, up to twice the RAM, and cannot be swapped (--model gives the bytes)"
        )
    asked, taken = sum(blocks), sum(pinned_rounded(b) for b in blocks)
    ranks = ranks_per_node(s)
    text = _("a rank pins {taken} for {asked} of buffers: each block is rounded up to a power of two").format(
        taken=gib(taken), asked=gib(asked)
    )
    if ranks > 1:
        text += "; " + _("the {ranks} ranks of a host {size}").format(ranks=ranks, size=gib(taken * ranks))
    return text


@change(
    "DS858",
    "collective-timeout-default",
    "default",
    "0.19.6",
    what=N_("The time after which a collective that does not end stops the run."),
    why=N_(
        "It was 30 minutes; since 0.19.6 it is 10, for all backends. A long evaluation, saving or tokenizing on one rank while the others wait now ends the run."
    ),
    example='{"train_batch_size": 8}',
    fix=N_("Set the environment variable DEEPSPEED_TIMEOUT (minutes) for the run."),
    source="deepspeed/constants.py default_pg_timeout @ 0.19.5, 0.19.6 (#8253)",
    context={"world_size": 8},
)
def collective_timeout_default(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.world_size > 1 or not new.world_known:
        yield Shift(
            "",
            _("a collective may take 10 minutes from 0.19.6, before 30"),
            effect=_("slow saving, evaluation or data preparation on one rank ends the run"),
            hint=_("export DEEPSPEED_TIMEOUT=30 for the run; no key of the file sets it"),
            before="30 min",
            after="10 min",
        )


@change(
    "DS859",
    "buffers-keep-their-dtype",
    "default",
    "0.19.2",
    what=N_("The dtype of model buffers (rotary tables, running means) under fp16 and bf16."),
    why=N_(
        "They were cast together with the parameters; since 0.19.2 they keep the dtype with which they were loaded, often fp32. Numerics and a little memory change."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}}',
    fix=N_("Write data_types.buffer_dtype to have them cast."),
    source="deepspeed/runtime/engine.py _cast_module_mixed_precision @ 0.19.2 (#8066)",
)
def buffers_keep_their_dtype(old: Subject, new: Subject) -> Iterator[Shift]:
    dtype = "bf16" if new.precision("bf16") else "fp16" if new.precision("fp16") else None
    pointer = "/data_types/buffer_dtype"
    if dtype and new.get(pointer, None) is None:
        yield Shift(
            pointer,
            _("model buffers keep the dtype they were loaded with from 0.19.2, before they were cast to {dtype}").format(
                dtype=dtype
            ),
            effect=_("fp32 tables stay fp32: slightly other numbers and a little more memory"),
            hint=_("write {key} yourself").format(key="data_types.buffer_dtype"),
            before=dtype,
            after=None,
        )  # fmt: skip


# -- behaviour --------------------------------------------------------------------------------------------


@change(
    "DS860",
    "frozen-parameters-stay-gathered",
    "changed",
    "0.19.3",
    what=N_("Frozen parameters under activation checkpointing at ZeRO stage 3 (LoRA)."),
    why=N_(
        "To 0.19.2 the pair stopped in backward (recomputed shape [0]). 0.19.3 keeps gathered frozen parameters longer so that it works: the peak of GPU memory rises for LoRA-like runs. Models without frozen parameters are as before."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    fix=N_("Leave more room on the GPU, or stay on 0.19.2 without checkpointing."),
    source="deepspeed/runtime/zero/partitioned_param_coordinator.py release_sub_module @ 0.19.3 (#8148); read, not measured",
)
def frozen_parameters_stay_gathered(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.stage == 3:
        yield Shift(
            ZERO + "/stage",
            _("frozen parameters (LoRA) with activation checkpointing: stopped before 0.19.3, gathered longer from then"),
            effect=_("such a run starts to work and needs more GPU memory; others do not change"),
            hint=_("leave room on the GPU when parameters are frozen"),
        )  # fmt: skip


@change(
    "DS861",
    "nvme-buffers-locked",
    "changed",
    "0.19.4",
    what=N_("How the swap buffers of NVMe offload are pinned."),
    why=N_(
        "Since 0.19.4 they are locked with mlock, which ulimit -l counts: about 1 GB a rank for the parameters at the defaults, plus the optimizer's. Before, CUDA pinned them."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}}',
    fix=N_("Raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1."),
    source="deepspeed/ops/csrc/aio/py_lib/deepspeed_pin_tensor.cpp @ 0.19.4 (#8212)",
)
def nvme_buffers_locked(old: Subject, new: Subject) -> Iterator[Shift]:
    if _nvme(new):
        yield Shift(
            _offload_block(new),
            _("NVMe swap buffers are locked with mlock from 0.19.4"),
            effect=_("ulimit -l must allow them, or a rank aborts at start"),
            hint=_("run `ulimit -l unlimited` first"),
        )


@change(
    "DS862",
    "memory-efficient-linear-everywhere",
    "changed",
    "0.19.4",
    what=N_("memory_efficient_linear for a model that was built outside deepspeed.zero.Init."),
    why=N_(
        "The wrapper was installed by zero.Init only; since 0.19.4 stage 3 installs it for every model: less memory in backward."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    fix=N_("Write memory_efficient_linear: false to opt out."),
    source="deepspeed/runtime/zero/partition_parameters.py @ 0.19.4 (#8189)",
)
def memory_efficient_linear_everywhere(old: Subject, new: Subject) -> Iterator[Shift]:
    pointer = ZERO + "/memory_efficient_linear"
    if new.stage == 3 and _free(new, pointer):
        yield Shift(
            pointer,
            _("models built outside zero.Init get the memory-efficient linear from 0.19.4"),
            effect=_("less memory in backward, another kernel"),
            hint=_("write memory_efficient_linear: false to opt out"),
        )


@change(
    "DS863",
    "warmup-per-parameter-group",
    "changed",
    "0.19.4",
    what=N_("WarmupLR with several parameter groups."),
    why=N_("Each group warms up to its own lr since 0.19.4; before, all to that of the first group."),
    example='{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}',
    fix=N_("Write warmup_max_lr to give all groups one peak."),
    source="deepspeed/runtime/lr_schedules.py WarmupLR @ 0.19.4 (#8171)",
)
def warmup_per_parameter_group(old: Subject, new: Subject) -> Iterator[Shift]:
    params = new.block("/scheduler/params")
    if new.scheduler == "WarmupLR" and "warmup_max_lr" not in params:
        yield Shift(
            "/scheduler/type",
            _("with several parameter groups each warms up to its own lr from 0.19.4, before to that of the first"),
            effect=_("groups with another lr train differently; a single group does not"),
            hint=_("write {key} yourself").format(key="warmup_max_lr"),
        )  # fmt: skip


@change(
    "DS864",
    "onecycle-stairs-work",
    "changed",
    "0.19.4",
    what=N_("The stair counts of OneCycle."),
    why=N_("cycle_first_stair_count and cycle_second_stair_count have an effect for the first time in 0.19.4."),
    example='{"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_stair_count": 5}}}',
    fix=N_("Remove the counts to keep the smooth cycle."),
    source="deepspeed/runtime/lr_schedules.py OneCycle @ 0.19.4 (#8179)",
)  # fmt: skip
def onecycle_stairs_work(old: Subject, new: Subject) -> Iterator[Shift]:
    for key in ("cycle_first_stair_count", "cycle_second_stair_count"):
        pointer = f"/scheduler/params/{key}"
        if new.scheduler == "OneCycle" and (as_number(new.get(pointer, 0)) or 0) > 0:
            yield Shift(
                pointer,
                _("{key} has an effect from 0.19.4, before it had none").format(key=key),
                effect=_("the learning rate moves in steps"),
                hint=_("remove it to keep the smooth cycle"),
                fix=drop(pointer, safe=False),
            )


@change(
    "DS865",
    "gradient-copy-asynchronous",
    "changed",
    "0.19.5",
    what=N_("The copy of gradients to the host at ZeRO stage 3 with optimizer offload."),
    why=N_(
        "Since 0.19.5 it does not block: backward goes on while the copy runs, if the buffer is pinned. Faster; the host reads the gradients only after a synchronisation."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Nothing to do; pin_memory: false makes the copy wait again."),
    source="deepspeed/runtime/zero/stage3.py _offload_grad_partition_at_boundary: copy_(..., non_blocking=True) @ 0.19.5; blocking @ 0.19.4 (#8207)",
)
def gradient_copy_asynchronous(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.stage == 3 and new.offloads_optimizer:
        yield Shift(
            _offload_block(new),
            _("gradients are copied to the host asynchronously at stage 3 from 0.19.5, before the copy blocked"),
            effect=_("backward overlaps with the copy when the buffers are pinned"),
            hint=_("compare the first losses after the upgrade"),
        )  # fmt: skip


@change(
    "DS866",
    "pin-memory-op",
    "changed",
    "0.19.5",
    what=N_("The op that locks host memory."),
    why=N_(
        "It was part of async_io; since 0.19.5 it is an op of its own, pin_memory, which needs no libaio. NVMe offload loads it first; offload to cpu uses it only with DS_PIN_MEMORY_BACKEND=native (0.19.6). An environment with ops built beforehand needs DS_BUILD_PIN_MEMORY=1, or a compiler at run time."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Build it with the others (DS_BUILD_PIN_MEMORY=1), or leave a C++ compiler on the machine."),
    source="deepspeed/ops/op_builder/pin_memory.py, async_io.py load @ 0.19.5 (#8236)",
)
def pin_memory_op(old: Subject, new: Subject) -> Iterator[Shift]:
    if offloads(new):
        yield Shift(
            _offload_block(new),
            _("locking host memory is an op of its own from 0.19.5: pin_memory, apart from async_io"),
            effect=_("NVMe offload builds it at the first start; it needs a C++ compiler but no libaio")
            if _nvme(new)
            else _("offload to cpu does not need it unless DS_PIN_MEMORY_BACKEND=native (0.19.6)"),
            hint=_("where ops are built beforehand add DS_BUILD_PIN_MEMORY=1"),
        )


@change(
    "DS867",
    "unmanaged-accumulation-with-offload",
    "new",
    "0.19.5",
    what=N_("managed_gradient_accumulation: false together with offload."),
    why=N_(
        "It works from 0.19.5; 0.19.4 refuses the pair at start; before 0.19.4 the key is ignored in silence, and the script's steps fall at other places than it thinks."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Use 0.19.5 or later if the script counts micro batches itself."),
    source="deepspeed/runtime/engine.py:1653-1655 @ 0.19.4; zero/stage3.py finalize_gradient_accumulation_boundary @ 0.19.5 (#8225)",
)
def unmanaged_accumulation_with_offload(old: Subject, new: Subject) -> Iterator[Shift]:
    if offloads(new):
        yield Shift(
            "/managed_gradient_accumulation" if new.written("/managed_gradient_accumulation") else _offload_block(new),
            _("managed_gradient_accumulation: false works with offload from 0.19.5; 0.19.4 refuses it, older releases ignore the key"),
            hint=_("nothing to do unless the script counts micro batches itself"),
        )  # fmt: skip


@change(
    "DS869",
    "autoep-universal-checkpoint",
    "fixed",
    "0.19.5",
    what=N_("Universal checkpoints of AutoEP at ZeRO stages 1 and 2."),
    why=N_("Their conversion works from 0.19.5."),
    example='{"train_batch_size": 8, "expert_parallel": {"enabled": true, "autoep_size": 2}, "zero_optimization": {"stage": 2}}',
    fix=N_("Use 0.19.5 or later to convert."),
    source="deepspeed/checkpoint/autoep_universal.py @ 0.19.5 (#8198)",
)
def autoep_universal_checkpoint(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.stage in (1, 2) and new.get("/expert_parallel/enabled", False) is True:
        yield Shift("/expert_parallel", _("AutoEP checkpoints can be made universal from 0.19.5"))


_UNIVERSAL_WHY = N_(
    "A converted checkpoint carries a format version. An older DeepSpeed cannot read one that a newer made."
)


def _universal(s: Subject, release: str, version: str) -> Iterator[Shift]:
    pointer = "/checkpoint/load_universal"
    if s.get(pointer, False) is True:
        yield Shift(
            pointer,
            _("universal checkpoints have format {version} from {release}").format(
                version=version, release=release
            ),
            effect=_("an older release does not load what this one converts"),
            hint=_("convert with the release that will load it"),
        )


@change(
    "DS870",
    "universal-checkpoint-0-3",
    "changed",
    "0.19.2",
    what=N_("The format of universal checkpoints: 0.2 becomes 0.3."),
    why=_UNIVERSAL_WHY,
    example='{"train_batch_size": 8, "checkpoint": {"load_universal": true}}',
    fix=N_("Convert with the release that will load it."),
    source="deepspeed/checkpoint/constants.py UNIVERSAL_CHECKPOINT_VERSION @ 0.19.1, 0.19.2",
)
def universal_checkpoint_3(old: Subject, new: Subject) -> Iterator[Shift]:
    yield from _universal(new, "0.19.2", "0.3")


@change(
    "DS871",
    "universal-checkpoint-0-4",
    "changed",
    "0.19.6",
    what=N_("The format of universal checkpoints: 0.3 becomes 0.4."),
    why=_UNIVERSAL_WHY,
    example='{"train_batch_size": 8, "checkpoint": {"load_universal": true}}',
    fix=N_("Convert with the release that will load it."),
    source="deepspeed/checkpoint/constants.py UNIVERSAL_CHECKPOINT_VERSION @ 0.19.5, 0.19.6",
)
def universal_checkpoint_4(old: Subject, new: Subject) -> Iterator[Shift]:
    yield from _universal(new, "0.19.6", "0.4")


@change(
    "DS872",
    "native-pinning",
    "new",
    "0.19.6",
    what=N_("A second way to pin host memory: DS_PIN_MEMORY_BACKEND=native."),
    why=N_(
        "Then DeepSpeed locks pages itself: no rounding up to a power of two, but ulimit -l counts them. Without the variable nothing changes."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("Set it where RAM is scarce and the memlock limit is high."),
    source="deepspeed/accelerator/abstract_accelerator.py, ops/pin_memory @ 0.19.6",
)
def native_pinning(old: Subject, new: Subject) -> Iterator[Shift]:
    pins = any(
        new.offload(name) == "cpu" and new.flag(f"{ZERO}/{name}/pin_memory")
        for name in ("offload_optimizer", "offload_param")
    )
    if pins and offloads(new):
        yield Shift(
            _offload_block(new),
            _("DS_PIN_MEMORY_BACKEND=native (from 0.19.6) pins without rounding; ulimit -l then counts"),
        )


@change(
    "DS873",
    "super-offload-follows-pin-memory",
    "changed",
    "0.19.6",
    what=N_("The gradient buffer of SuperOffload's worker."),
    why=N_("It was always pinned; since 0.19.6 it follows offload_optimizer.pin_memory."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true, "pin_memory": false}}}',
    fix=N_("Write pin_memory: true to keep it pinned."),
    source="deepspeed/runtime/superoffload/superoffload_utils.py @ 0.19.5, 0.19.6",
)
def super_offload_follows_pin_memory(old: Subject, new: Subject) -> Iterator[Shift]:
    block = ZERO + "/offload_optimizer"
    if new.stage == 3 and new.flag(block + "/super_offload") and new.get(block + "/pin_memory") is False:
        yield Shift(
            block + "/pin_memory",
            _("SuperOffload's buffer is not pinned from 0.19.6, before it always was"),
            effect=_("copies are slower, less RAM is pinned"),
            hint=_("write pin_memory: true to keep it pinned"),
        )


@change(
    "DS874",
    "non-finite-norm-skips-the-step",
    "fixed",
    "0.19.8",
    what=N_("A gradient norm that is not finite, with ZeRO."),
    why=N_(
        "The helpers reported it as -1, and the combined norm could look finite: the step was taken unclipped. From 0.19.8 the step is skipped with a warning, also for bf16 at stage 3."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    fix=N_("Use 0.19.8 or later, or watch the loss for NaN."),
    source="deepspeed/runtime/zero/stage3.py:2888 @ 0.19.8",
)
def non_finite_norm_skips_the_step(old: Subject, new: Subject) -> Iterator[Shift]:
    if new.stage:
        yield Shift(
            ZERO + "/stage",
            _("a step whose gradient norm is not finite is skipped from 0.19.8; before it could be taken unclipped"),
            effect=_("a warning line tells the skipped step"),
        )  # fmt: skip


@change(
    "DS875",
    "default-changed",
    "default",
    "",
    what=N_("A default that differs between two releases and has no page of its own."),
    why=N_("The schemas of the two releases say so; the file leaves the key to its default."),
    example="",
    fix=N_("Write the key yourself."),
    source="schemas/",
)
def default_changed(old: Subject, new: Subject) -> Iterator[Shift]:
    return iter(())
