"""DS8xx: what a release took away, renamed or got wrong."""

from __future__ import annotations

from collections.abc import Iterator

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, key_of, put, rename, sibling
from dstui.rules.registry import Hit, rule, version_key
from dstui.rules.subject import MISSING, Subject, as_int
from dstui.rules.tables import DEEPSPEED_OPTIMIZERS, REMOVED, RENAMED

ZERO = "/zero_optimization"


@rule(
    "DS801",
    "removed-key",
    Severity.ERROR,
    "parse",
    since="0.19.7",
    what=N_("A key whose feature was removed from DeepSpeed."),
    why=N_(
        "0.19.7 and 0.19.8 removed old features and refuse their keys by name. The presence alone is enough: false, null and an empty block are refused too."
    ),
    example='{"train_batch_size": 8, "amp": {"enabled": false}}',
    fix=N_(
        "Remove the key. The run does what it did when the feature was off; when it was on, stay on an older release."
    ),
    source="deepspeed/runtime/config.py:79-141 @ 0.19.8 (#8489, #8490, #8493, #8535, #8563, #8564); executed",
)
def removed_key(s: Subject) -> Iterator[Hit]:
    hints = {
        "precision": _("use bf16, fp16 or torch_autocast"),
        "batch": _("set the batch sizes directly"),
        "curriculum": _("use data_efficiency.data_sampling.curriculum_learning"),
        "remove": _("remove it"),
    }
    for pointer, (since, what) in REMOVED.items():
        if s.key >= version_key(since) and s.get(pointer) is not MISSING:
            value = s.get(pointer)
            off = value in (None, False, {}) or (
                isinstance(value, dict) and value.get("enabled", True) in (False, "false")
            )
            off = off or (
                pointer.endswith("mics_shard_size")
                and as_int(value) is not None
                and (as_int(value) or 0) <= 0
            )
            yield Hit(
                pointer,
                _("{key} was removed in {release}").format(key=key_of(pointer), release=since),
                effect=_("the config is refused, even when the feature is switched off"),
                hint=hints[what],
                fix=drop(pointer, safe=bool(off)),
            )


@rule(
    "DS802",
    "optimizer-not-in-release",
    Severity.ERROR,
    "init",
    what=N_("An optimizer of DeepSpeed that this release does not have: removed, or not there yet."),
    why=N_(
        "OneBitAdam, ZeroOneAdam and OneBitLamb were removed in 0.19.7; Lion came in 0.11.0, Muon in 0.17.6. The config parses; the engine stops at start."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}',
    fix=N_("Use AdamW, or the release that has it."),
    source="deepspeed/runtime/config.py DEEPSPEED_OPTIMIZERS @ 0.19.6, 0.19.7 (#8490); executed",
)
def optimizer_not_in_release(s: Subject) -> Iterator[Hit]:
    name = (s.optimizer or "").lower()
    for o in DEEPSPEED_OPTIMIZERS:
        if o.name.lower() != name:
            continue
        if o.until and s.key > version_key(o.until):
            text = _("{name} was removed after {release}").format(name=o.name, release=o.until)
        elif o.since and s.key < version_key(o.since):
            text = _("{name} exists from {release}").format(name=o.name, release=o.since)
        else:
            continue
        yield Hit(
            "/optimizer/type",
            text,
            effect=_("the engine stops at start, after the model was loaded"),
            hint=_("use AdamW, or another release"),
        )


@rule(
    "DS803",
    "onebit-with-zero",
    Severity.ERROR,
    "init",
    until="0.19.6",
    what=N_("A 1-bit optimizer together with ZeRO."),
    why=N_("The 1-bit optimizers compress whole gradients and are not compatible with any ZeRO stage."),
    example='{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 1}}',
    fix=N_("Use stage 0, or AdamW."),
    source="deepspeed/runtime/engine.py:2235-2249 @ 0.19.6",
    context={"release": "0.19.4"},
)
def onebit_with_zero(s: Subject) -> Iterator[Hit]:
    if s.stage and (s.optimizer or "").lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        yield Hit(
            "/optimizer/type",
            _("{name} does not work with ZeRO").format(name=s.optimizer),
            effect=_("the engine stops at start"),
            hint=_("use stage 0, or AdamW"),
        )


@rule(
    "DS804",
    "renamed-key-ignored",
    Severity.NO_EFFECT,
    "parse",
    since="0.14.4",
    what=N_("A key under its old name, which this release ignores."),
    why=N_(
        "DeepSpeed renamed it without keeping the old name; unknown keys in that block are ignored in silence, so the default is used."
    ),
    example='{"train_batch_size": 8, "aio": {"thread_count": 4}}',
    fix=N_("Use the new name."),
    source="deepspeed/runtime/swap_tensor/constants.py @ 0.16.4, runtime/constants.py @ 0.16.5, runtime/compiler.py @ 0.14.4; executed",
)
def renamed_key_ignored(s: Subject) -> Iterator[Hit]:
    for r in RENAMED:
        if (
            s.get(r.old) is MISSING
            or s.key < version_key(r.since)
            or (r.until and s.key > version_key(r.until))
        ):
            continue
        new = r.new
        both = bool(new) and s.get(sibling(r.old, new or "")) is not MISSING
        yield Hit(
            r.old,
            _("{key} is called {new} since {release}").format(key=key_of(r.old), new=new, release=r.since) if new
            else _("{key} is not read by this release").format(key=key_of(r.old)),
            effect=_("ignored: the default is used"),
            hint=_("use the new name") if new else _("remove it"),
            fix=(drop(r.old, safe=True) if both or not new else rename(r.old, new, s.get(r.old), safe=True)),
        )  # fmt: skip


@rule(
    "DS805",
    "offload-accumulation-bug",
    Severity.SILENT_WRONG,
    "step",
    since="0.15.2",
    until="0.18.9",
    what=N_(
        "ZeRO stage 1 or 2 with optimizer offload and accumulation, on a release with a wrong accumulation."
    ),
    why=N_(
        "From 0.15.2 to 0.18.9 the gradients of later micro batches were not added to the copy on the CPU: the step used too small a gradient."
    ),
    example='{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Use 0.19.0 or later, accumulation 1, or stage 3."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (#6550 in 0.15.2; fixed in 0.19.0 by #7967)",
    context={"release": "0.18.9"},
)
def offload_accumulation_bug(s: Subject) -> Iterator[Hit]:
    if s.stage not in (1, 2) or not s.offloads_optimizer:
        return
    steps = accumulation(s)
    if steps is not None and steps > 1:
        yield Hit(
            "/gradient_accumulation_steps" if s.written("/gradient_accumulation_steps") else "",
            _("this release loses gradients: offload at stage {stage} with accumulation {steps}").format(
                stage=s.stage, steps=steps
            ),
            effect=_("the gradients of all but one micro batch are too small or lost; nothing is reported"),
            hint=_("use 0.19.0 or later"),
        )


def accumulation(s: Subject) -> int | None:
    """gradient_accumulation_steps, written or derived; None when the file and the ranks do not tell it."""
    train, micro, steps = s.batch()
    if steps is not MISSING:
        return as_int(steps)
    t, m = as_int(train) if train is not MISSING else None, as_int(micro) if micro is not MISSING else None
    if (t is None) != (m is None) and MISSING in (train, micro):
        return 1
    return t // m // s.data_parallel_size if t and m and m > 0 and s.world_known else None


@rule(
    "DS806",
    "bf16-stage-0-scaled",
    Severity.SILENT_WRONG,
    "step",
    since="0.17.6",
    until="0.18.5",
    what=N_("bf16 without ZeRO, on a release that divides the gradients by 65536."),
    why=N_(
        "From 0.17.6 to 0.18.5 the loss scaler of fp16 was applied to bf16 at stage 0, and gradients were not zeroed."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}}',
    fix=N_("Use 0.18.6 or later, or ZeRO stage 1."),
    source="deepspeed/runtime/fp16/fused_optimizer.py (#7515; fixed in 0.18.6 by #7839)",
    context={"release": "0.18.4"},
)
def bf16_stage_0_scaled(s: Subject) -> Iterator[Hit]:
    if s.stage == 0 and s.precision("bf16"):
        yield Hit(
            "/bf16" if s.written("/bf16") else "/bfloat16",
            _("bf16 at stage 0 trains wrongly in this release"),
            effect=_("gradients are divided by 65536 and not zeroed"),
            hint=_("use 0.18.6 or later, or stage 1"),
        )


@rule(
    "DS807",
    "overlap-comm-race",
    Severity.SILENT_WRONG,
    "step",
    until="0.14.2",
    what=N_("ZeRO stage 1 or 2 with overlap_comm, on a release with a race."),
    why=N_("Up to 0.14.2 the reduction may read a bucket that is being filled again."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}',
    fix=N_("Use 0.14.3 or later, or overlap_comm: false."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (fixed in 0.14.3 by #5606)",
    context={"release": "0.14.2"},
)
def overlap_comm_race(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/overlap_comm"
    if s.stage in (1, 2) and s.flag(pointer):
        yield Hit(
            pointer,
            _("overlap_comm has a race in this release"),
            effect=_("gradients may be wrong now and then"),
            hint=_("use 0.14.3 or later, or set it to false"),
            fix=put(pointer, False, there=True, safe=False),
        )


@rule(
    "DS808",
    "muon-updates-wrong",
    Severity.SILENT_WRONG,
    "step",
    since="0.17.6",
    until="0.19.2",
    what=N_("Muon at ZeRO stage 1 or 2 with reduce_scatter, on a release with wrong updates."),
    why=N_(
        "From 0.17.6 to 0.19.2 each rank orthogonalised its own slice: updates were wrong and depended on the number of ranks."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 2}}',
    fix=N_("Use 0.19.3 or later, or reduce_scatter: false."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (fixed in 0.19.3 by #8090, #8141)",
    context={"release": "0.19.0"},
)
def muon_updates_wrong(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/reduce_scatter"
    if (s.optimizer or "").lower() == "muon" and s.stage in (1, 2) and s.flag(pointer):
        yield Hit(
            "/optimizer/type",
            _("Muon with reduce_scatter updates wrongly in this release"),
            effect=_("weights differ from what Muon would do, and with the number of ranks"),
            hint=_("use 0.19.3 or later, or reduce_scatter: false"),
            fix=put(pointer, False, there=s.written(pointer), safe=False),
        )


@rule(
    "DS809",
    "offload-memory-peak",
    Severity.WARNING,
    "step",
    since="0.16.3",
    until="0.16.9",
    what=N_("ZeRO stage 1 or 2 with optimizer offload, on a release with a memory peak."),
    why=N_(
        "From 0.16.3 to 0.16.9 the step copied fp32 weights to the GPU: about three times the 16-bit parameters."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Use 0.17.0 or later."),
    source="deepspeed/runtime/zero/stage_1_and_2.py (#6962 in 0.16.3; fixed in 0.17.0 by #7309)",
    context={"release": "0.16.9"},
)
def offload_memory_peak(s: Subject) -> Iterator[Hit]:
    if s.stage in (1, 2) and s.offloads_optimizer:
        yield Hit(
            ZERO + "/offload_optimizer" if s.written(ZERO + "/offload_optimizer") else ZERO,
            _("the offloaded step needs about three times the 16-bit parameters on the GPU in this release"),
            effect=_("out of memory at the first step although training fits"),
            hint=_("use 0.17.0 or later"),
        )
