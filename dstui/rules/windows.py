"""DS81x-DS82x: results that some releases get wrong, and what only old releases refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dstui.i18n import N_, _
from dstui.rules.changes import bf16_wrapper
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put
from dstui.rules.registry import Hit, rule
from dstui.rules.release import accumulation
from dstui.rules.subject import MISSING, Subject, as_bool, as_int

ZERO = "/zero_optimization"


def _place(s: Subject, *pointers: str) -> str:
    return next((p for p in pointers if s.written(p)), "")


@rule(
    "DS810",
    "inf-gradients-become-nan",
    Severity.WARNING,
    "step",
    since="0.13.2",
    until="0.16.5",
    what=N_("Gradient clipping at ZeRO stage 1 or 2, on a release that turns infinite gradients into NaN."),
    why=N_(
        "From 0.13.2 to 0.16.5 an infinite gradient gave a NaN norm, and clipping with it spread NaN to every weight instead of skipping the step."
    ),
    example='{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}',
    fix=N_("Use 0.16.6 or later."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (#4974 in 0.13.2; fixed in 0.16.6 by #7171); read",
    context={"release": "0.16.5"},
)
def inf_gradients_become_nan(s: Subject) -> Iterator[Hit]:
    clipping = s.number("/gradient_clipping")
    if s.stage in (1, 2) and clipping and clipping > 0:
        yield Hit(
            _place(s, "/gradient_clipping"),
            _("an infinite gradient becomes NaN in all weights in this release"),
            effect=_("one bad step ends the training; the loss stays NaN"),
            hint=_("use 0.16.6 or later"),
        )


@rule(
    "DS811",
    "manual-accumulation-loses-gradients",
    Severity.INFO,
    "step",
    until="0.18.9",
    what=N_("Optimizer offload at ZeRO stage 1 or 2 with accumulation 1, on a release that keeps only the last backward."),
    why=N_(
        "If the script calls backward() several times before step() while the config says 1, all but the last call are lost. One backward() a step is right."
    ),
    example='{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Write the real gradient_accumulation_steps, or use 0.19.0 or later."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (fixed in 0.19.0 by #7981); read",
    context={"release": "0.18.9"},
)  # fmt: skip
def manual_accumulation_loses_gradients(s: Subject) -> Iterator[Hit]:
    if s.stage in (1, 2) and s.offloads_optimizer and accumulation(s) == 1:
        yield Hit(
            _place(s, "/gradient_accumulation_steps", ZERO + "/offload_optimizer", ZERO),
            _("several backward() calls before one step() lose gradients here"),
            hint=_("write the real gradient_accumulation_steps, or use 0.19.0 or later"),
        )


@rule(
    "DS812",
    "bf16-accumulation-diverges",
    Severity.SILENT_WRONG,
    "step",
    until="0.18.9",
    what=N_("bf16 with gradients added up in fp32 at ZeRO stage 1 and accumulation, on a release whose ranks diverge."),
    why=N_(
        "To 0.18.9 the gradient of the last micro batch was added after the reduction: each rank stepped with its own. immediate_grad_update: true (the default of 0.16.5 to 0.17.0) avoids it."
    ),
    example='{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}',
    fix=N_("Use 0.19.0 or later, or write bf16.immediate_grad_update: true."),
    source="deepspeed/runtime/bf16_optimizer.py (fixed in 0.19.0 by #7985); read",
    context={"release": "0.18.9", "world_size": 2},
)  # fmt: skip
def bf16_accumulation_diverges(s: Subject) -> Iterator[Hit]:
    pointer = "/bf16/immediate_grad_update"
    default = s.between("0.16.5", "0.17.0")
    value = s.get(pointer)
    immediate = default if value is MISSING or value == "auto" else as_bool(value) is True
    steps = accumulation(s)
    alone = s.world_known and s.world_size == 1
    if bf16_wrapper(s) and not immediate and steps is not None and steps > 1 and not alone:
        yield Hit(
            "/data_types/grad_accum_dtype",
            _("the last micro batch is not averaged over the ranks in this release"),
            effect=_("the ranks' weights drift apart; nothing is reported"),
            hint=_("use 0.19.0 or later, or immediate_grad_update: true"),
            fix=put(pointer, True, there=s.written(pointer), safe=False)
            if s.at_least("0.13.3") and s.written("/bf16")
            else None,
        )


@rule(
    "DS813",
    "stage-3-reduces-one-by-one",
    Severity.WARNING,
    "step",
    since="0.17.2",
    until="0.17.2",
    what=N_("ZeRO stage 3 on 0.17.2."),
    why=N_(
        "The count of its reduce bucket is never reset: parameters are reduced one at a time, which is slow."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    fix=N_("Use 0.17.3 or later."),
    source="deepspeed/runtime/zero/stage3.py @ 0.17.2 (fixed in 0.17.3 by #7418)",
    context={"release": "0.17.2"},
)
def stage_3_reduces_one_by_one(s: Subject) -> Iterator[Hit]:
    if s.stage == 3:
        yield Hit(
            ZERO + "/stage",
            _("gradients are reduced one parameter at a time in this release"),
            effect=_("training is slow"),
            hint=_("use 0.17.3 or later"),
        )


@rule(
    "DS814",
    "fp16-overflow-not-shared",
    Severity.SILENT_WRONG,
    "step",
    until="0.17.6",
    what=N_(
        "fp16 at ZeRO stage 1 on several ranks, on a release whose ranks may disagree about an overflow."
    ),
    why=N_(
        "To 0.17.6 the overflow flag of stage 1 was not broadcast: one rank may skip a step that the others take, and the weights drift apart."
    ),
    example='{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    fix=N_("Use 0.18.0 or later, bf16, or stage 2."),
    source="deepspeed/runtime/zero/stage_1_and_2.py has_overflow (fixed in 0.18.0 by #7580); read",
    context={"release": "0.17.6", "world_size": 2},
)
def fp16_overflow_not_shared(s: Subject) -> Iterator[Hit]:
    if s.stage == 1 and s.precision("fp16") and s.world_known and s.world_size > 1:
        yield Hit(
            "/fp16/enabled" if s.written("/fp16/enabled") else "/fp16",
            _("ranks may disagree about skipping an overflowed step in this release"),
            effect=_("their weights drift apart after an overflow; nothing is reported"),
            hint=_("use 0.18.0 or later, bf16, or stage 2"),
        )


@rule(
    "DS815",
    "muon-without-orthogonalisation",
    Severity.SILENT_WRONG,
    "step",
    since="0.17.6",
    until="0.19.6",
    what=N_("Muon with bf16, gradients added up in fp32 and ZeRO stage 1, on a release that skips its main step."),
    why=N_("The bf16 wrapper never ran Newton-Schulz: the run was plain momentum. 0.19.7 refuses the pair, 0.19.8 supports it."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1, "reduce_scatter": false}}',
    fix=N_("Use 0.19.8 or later, or leave grad_accum_dtype out."),
    source="deepspeed/runtime/bf16_optimizer.py @ 0.17.6-0.19.6; read",
    context={"release": "0.19.6"},
)  # fmt: skip
def muon_without_orthogonalisation(s: Subject) -> Iterator[Hit]:
    if (s.optimizer or "").lower() == "muon" and bf16_wrapper(s):
        yield Hit(
            "/data_types/grad_accum_dtype",
            _("Muon is not applied with this wrapper in this release"),
            effect=_("the optimizer is plain momentum; nothing is reported"),
            hint=_("use 0.19.8 or later, or leave grad_accum_dtype out"),
            fix=drop("/data_types/grad_accum_dtype", safe=False),
        )


@rule(
    "DS816",
    "overlap-comm-may-give-nan",
    Severity.INFO,
    "step",
    until="0.19.2",
    what=N_(
        "overlap_comm at ZeRO stage 1 or 2, on a release in which a compiled model can turn it into NaN."
    ),
    why=N_(
        "To 0.19.2 a bucket may be written from several streams when the model goes through torch.compile. Some reports see NaN or a loss of exactly 0 without it too."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}',
    fix=N_("Use 0.19.3 or later, or overlap_comm: false."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (#8061; fixed in 0.19.3 by #8080); public reports",
    context={"release": "0.19.2"},
)
def overlap_comm_may_give_nan(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/overlap_comm"
    if s.stage in (1, 2) and s.flag(pointer) and s.at_least("0.14.3"):
        yield Hit(
            pointer,
            _("with torch.compile the gradients can become NaN in this release"),
            hint=_("if the loss turns NaN or exactly 0, set overlap_comm to false"),
            fix=put(pointer, False, there=True, safe=False),
        )


@rule(
    "DS817",
    "hpz-small-parameters-wrong",
    Severity.SILENT_WRONG,
    "step",
    since="0.10.0",
    until="0.19.4",
    what=N_("zero_hpz_partition_size above 1, on a release that copies the secondary shard of small parameters wrongly."),
    why=N_("To 0.19.4 the secondary copy of a parameter smaller than its slice was not filled correctly."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}',
    fix=N_("Use 0.19.5 or later."),
    source="deepspeed/runtime/zero/partition_parameters.py (fixed in 0.19.5 by #8210); read",
    context={"release": "0.19.4", "world_size": 8},
)  # fmt: skip
def hpz_small_parameters_wrong(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/zero_hpz_partition_size"
    size = s.integer(pointer)
    if s.stage == 3 and size and size > 1 and not (s.world_known and s.world_size == 1):
        yield Hit(
            pointer,
            _("small parameters are copied wrongly to the secondary shard in this release"),
            effect=_("biases and norms may be computed from wrong values"),
            hint=_("use 0.19.5 or later"),
        )


@rule(
    "DS818",
    "amp-with-zero",
    Severity.ERROR,
    "init",
    until="0.19.7",
    what=N_("amp (Apex) together with ZeRO, fp16 or bf16."),
    why=N_(
        "Apex does its own casting; the engine refuses the pair at start. The key itself is gone in 0.19.8."
    ),
    example='{"train_batch_size": 8, "amp": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    fix=N_("Use bf16 or fp16 instead of amp."),
    source="deepspeed/runtime/engine.py:2259, 2282 @ 0.19.7",
    context={"release": "0.19.7"},
)
def amp_with_zero(s: Subject) -> Iterator[Hit]:
    block = s.get("/amp", None)
    if not isinstance(block, Mapping) or not block.get("enabled"):
        return
    other = "ZeRO" if s.stage else "fp16" if s.precision("fp16") else "bf16" if s.precision("bf16") else None
    if other:
        yield Hit(
            "/amp/enabled",
            _("amp does not go with {other}").format(other=other),
            effect=_("the engine stops at start"),
            hint=_("use the bf16 or fp16 section instead"),
            fix=drop("/amp", safe=False),
        )


@rule(
    "DS819",
    "mics-with-offload",
    Severity.ERROR,
    "step",
    until="0.19.6",
    what=N_("MiCS together with offload."),
    why=N_(
        "MiCS keeps its shards on the GPUs; with offload the first step fails. The key is gone in 0.19.7."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("Remove one of the two."),
    source="deepspeed/runtime/zero/mics.py:422 @ 0.19.6",
    context={"release": "0.19.6"},
)
def mics_with_offload(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/mics_shard_size"
    size = as_int(s.get(pointer, -1)) or -1
    offload = s.offloads_optimizer or s.offload("offload_param") in ("cpu", "nvme")
    if s.stage == 3 and size > 0 and offload:
        yield Hit(
            pointer,
            _("MiCS does not go with offload"),
            effect=_("the first step fails"),
            hint=_("remove one of the two"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS820",
    "pipeline-loss-not-averaged",
    Severity.WARNING,
    "step",
    since="0.18.2",
    until="0.18.2",
    what=N_("A pipeline section with accumulation on 0.18.2."),
    why=N_("A public report: the effective learning rate of pipeline runs is multiplied by the accumulation; 0.18.3 is right."),
    example='{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "pipeline": {"stages": 2}}',
    fix=N_("Use 0.18.3 or later."),
    source="deepspeed/runtime/pipe/engine.py @ 0.18.2; a public report, not measured",
    context={"release": "0.18.2"},
)  # fmt: skip
def pipeline_loss_not_averaged(s: Subject) -> Iterator[Hit]:
    steps = accumulation(s)
    if isinstance(s.get("/pipeline"), Mapping) and steps is not None and steps > 1:
        yield Hit(
            "/pipeline",
            _("pipeline runs do not average over {steps} micro batches in this release").format(steps=steps),
            effect=_("the learning rate is in effect multiplied by it"),
            hint=_("use 0.18.3 or later"),
        )


@rule(
    "DS821",
    "muon-refused-with-bf16-wrapper",
    Severity.ERROR,
    "init",
    since="0.19.7",
    until="0.19.7",
    what=N_("Muon with bf16, gradients added up in fp32 and ZeRO stage 1 on 0.19.7."),
    why=N_("0.19.7 refuses what older releases did wrongly; 0.19.8 supports it."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1, "reduce_scatter": false}}',
    fix=N_("Use 0.19.8 or later, or leave grad_accum_dtype out."),
    source="deepspeed/runtime/engine.py:2371 @ 0.19.7",
    context={"release": "0.19.7"},
)
def muon_refused_with_bf16_wrapper(s: Subject) -> Iterator[Hit]:
    if (s.optimizer or "").lower() == "muon" and bf16_wrapper(s):
        yield Hit(
            "/data_types/grad_accum_dtype",
            _("Muon with fp32 accumulation is refused in this release"),
            effect=_("the engine stops at start"),
            hint=_("use 0.19.8 or later, or leave grad_accum_dtype out"),
            fix=drop("/data_types/grad_accum_dtype", safe=False),
        )


@rule(
    "DS822",
    "muon-offload-with-reduce-scatter",
    Severity.ERROR,
    "init",
    since="0.19.3",
    until="0.19.7",
    what=N_("Muon with optimizer offload at ZeRO stage 1 or 2 and reduce_scatter, which is on by default."),
    why=N_("From 0.19.3 to 0.19.7 the offloaded Muon needs whole gradients; the engine refuses the pair."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Write reduce_scatter: false, or use 0.19.8."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:245 @ 0.19.7",
    context={"release": "0.19.7"},
)
def muon_offload_with_reduce_scatter(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/reduce_scatter"
    muon = (s.optimizer or "").lower() == "muon"
    if muon and s.stage in (1, 2) and s.offloads_optimizer and s.flag(pointer):
        yield Hit(
            pointer if s.written(pointer) else "/optimizer/type",
            _("offloaded Muon needs reduce_scatter: false in this release"),
            effect=_("the engine stops at start"),
            hint=_("reduce_scatter is true by default; write false"),
            fix=put(pointer, False, there=s.written(pointer), safe=False),
        )
