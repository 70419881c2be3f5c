"""DS4xx: train batch = micro batch x accumulation x ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Fix, Severity
from dstui.rules.edits import put
from dstui.rules.registry import Hit, rule
from dstui.rules.subject import BATCH_KEYS, MISSING, Subject

TRAIN, MICRO, GAS = ("/" + k for k in BATCH_KEYS)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return _number(value) and float(value).is_integer()


@rule(
    "DS401",
    "batch-size-missing",
    Severity.ERROR,
    "parse",
    what=N_("Neither train_batch_size nor train_micro_batch_size_per_gpu is set."),
    why=N_(
        "DeepSpeed derives the third of the three batch numbers, but it needs one batch size to begin with; accumulation alone is not enough."
    ),
    example='{"gradient_accumulation_steps": 4}',
    fix=N_("Add train_micro_batch_size_per_gpu: the samples one GPU works on at a time."),
    source="deepspeed/runtime/config.py:649 @ 0.19.8",
)
def batch_size_missing(s: Subject) -> Iterator[Hit]:
    if all(s.get(p, None) is None for p in (TRAIN, MICRO)):
        yield Hit(
            "",
            _("no batch size: neither train_batch_size nor train_micro_batch_size_per_gpu is set"),
            effect=_("the config is refused"),
            hint=_("add \"train_micro_batch_size_per_gpu\": 1 and raise it while memory lasts"),
            fix=Fix(
                _("set train_micro_batch_size_per_gpu to 1"), False,
                ({"op": "replace" if s.written(MICRO) else "add", "path": MICRO, "value": 1},),
            ),
        )  # fmt: skip


@rule(
    "DS402",
    "batch-does-not-multiply",
    Severity.ERROR,
    "parse",
    what=N_("train_batch_size is not micro batch x accumulation x ranks."),
    why=N_(
        "The three numbers must agree exactly for the number of ranks of the run; a missing one is found by division rounded down, so two that do not divide are refused too."
    ),
    example='{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}',
    fix=N_("Leave one of the three out, or use one of the values that the message names."),
    source="deepspeed/runtime/config.py:602, 613-650 @ 0.19.8",
    context={"world_size": 8},
)
def batch_does_not_multiply(s: Subject) -> Iterator[Hit]:
    train, micro, gas = s.batch()
    ranks = s.data_parallel_size
    given = [v for v in (train, micro, gas) if v is not MISSING]
    if train is MISSING or (len(given) < 2 and ranks == 1) or not all(_number(v) and v > 0 for v in given):
        return
    if len(given) == 1 and train < ranks:
        return  # DS407 says it better
    effective = _derive(train, micro, gas, ranks)
    if effective is None:
        return
    t, m, g = effective
    if m > 0 and g > 0 and t == m * g * ranks:
        return
    step = (m if micro is not MISSING and m > 0 else 1) * (g if gas is not MISSING and g > 0 else 1) * ranks
    low = int(t // step * step)
    legal = [v for v in (low, low + int(step)) if v > 0]
    # the sum that DeepSpeed really tests, its own rounded quotient included
    text = _("{train} is not {micro} x {gas} x {ranks} ranks = {product}").format(
        train=_short(t), micro=_short(m), gas=_short(g), ranks=ranks, product=_short(m * g * ranks)
    )
    if len(given) < 3:
        text = _("{train} cannot be split over {ranks} ranks in steps of {step}").format(
            train=_short(t), ranks=ranks, step=_short(step)
        )
    nearest = min(legal, key=lambda v: abs(v - t))
    yield Hit(
        TRAIN,
        text,
        effect=_("the config is refused on {ranks} ranks").format(ranks=ranks),
        hint=_("legal values nearby: {values}").format(values=", ".join(str(v) for v in legal)),
        fix=put(TRAIN, nearest, there=True, safe=False),
    )


def _derive(train: Any, micro: Any, gas: Any, ranks: int) -> tuple[Any, Any, Any] | None:
    """The three numbers as DeepSpeed completes them (runtime/config.py _set_batch_related_parameters)."""
    if micro is not MISSING and gas is not MISSING:
        return train, micro, gas
    if micro is not MISSING:
        return train, micro, train // micro // ranks
    if gas is not MISSING:
        return train, train // ranks // gas, gas
    return train, train // ranks, 1


def _short(value: Any) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


@rule(
    "DS403",
    "accumulation-not-positive",
    Severity.ERROR,
    "parse",
    what=N_("gradient_accumulation_steps is 0 or negative."),
    why=N_(
        "At least one micro batch makes a step. DeepSpeed's own message blames train_batch_size, which is the product."
    ),
    example='{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 0}',
    fix=N_("Use 1 for no accumulation."),
    source="deepspeed/runtime/config.py:596-600 @ 0.19.8",
)
def accumulation_not_positive(s: Subject) -> Iterator[Hit]:
    value = s.batch()[2]
    if _number(value) and value <= 0:
        yield Hit(
            GAS,
            _("accumulation over {value} micro batches is impossible").format(value=value),
            effect=_("the config is refused, with a text that blames another key"),
            hint=_("1 means no accumulation"),
            fix=put(GAS, 1, there=True, safe=value == 0),
        )


@rule(
    "DS404",
    "batch-number-not-whole",
    Severity.SILENT_WRONG,
    "parse",
    what=N_("A batch size or accumulation with a fraction."),
    why=N_(
        "DeepSpeed does not check the type: 2.5 accumulation steps make a boundary that falls between micro batches, and a loss divided by 2.5."
    ),
    example='{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2.5}',
    fix=N_("Use whole numbers."),
    source="deepspeed/runtime/config.py get_scalar_param: no type check @ 0.19.8; executed",
)
def batch_number_not_whole(s: Subject) -> Iterator[Hit]:
    for pointer, value in zip((TRAIN, MICRO, GAS), s.batch(), strict=True):
        if isinstance(value, float) and not value.is_integer():
            yield Hit(
                pointer,
                _("{value} is not a whole number").format(value=value),
                effect=_("accepted, then the accumulation boundary and the loss are wrong"),
                hint=_("use a whole number"),
                fix=put(pointer, max(1, round(value)), there=True, safe=False),
            )


@rule(
    "DS405",
    "batch-not-a-number",
    Severity.ERROR,
    "parse",
    what=N_("A batch size or accumulation that is a text, a list or true/false."),
    why=N_(
        "DeepSpeed compares it with 0 without looking at its type: a text ends in a TypeError that names no key."
    ),
    example='{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "four"}',
    fix=N_("Write a number without quotes."),
    source="deepspeed/runtime/config.py:596-650 @ 0.19.8; executed",
)
def batch_not_a_number(s: Subject) -> Iterator[Hit]:
    for pointer, value in zip((TRAIN, MICRO, GAS), s.batch(), strict=True):
        if value is MISSING or _number(value) or isinstance(value, bool):
            continue
        number: int | None = int(value) if isinstance(value, str) and value.strip().isdigit() else None
        yield Hit(
            pointer,
            _("{value!r} is not a number").format(value=value),
            effect=_("the config is refused with a TypeError that names no key"),
            hint=_("write it without quotes") if number else _("write a whole number"),
            fix=put(pointer, number, there=True, safe=True) if number else None,
        )


@rule(
    "DS406",
    "batch-not-positive",
    Severity.ERROR,
    "parse",
    what=N_("train_batch_size or train_micro_batch_size_per_gpu is 0 or negative."),
    why=N_("A batch holds at least one sample."),
    example='{"train_batch_size": -8}',
    fix=N_("Use a number above 0."),
    source="deepspeed/runtime/config.py:596-598 @ 0.19.8",
)
def batch_not_positive(s: Subject) -> Iterator[Hit]:
    for pointer, value in zip((TRAIN, MICRO), s.batch()[:2], strict=True):
        if _number(value) and value <= 0:
            yield Hit(
                pointer,
                _("a batch of {value} samples is impossible").format(value=value),
                effect=_("the config is refused"),
                hint=_("use a number above 0"),
            )


@rule(
    "DS407",
    "batch-smaller-than-world",
    Severity.ERROR,
    "parse",
    what=N_("train_batch_size is smaller than the number of ranks."),
    why=N_(
        "Every rank needs at least one sample; DeepSpeed divides with rounding down and then complains about a micro batch of 0."
    ),
    example='{"train_batch_size": 4}',
    fix=N_("Raise train_batch_size to a multiple of the ranks, or use fewer GPUs."),
    source="deepspeed/runtime/config.py:598 @ 0.19.8",
    context={"world_size": 8},
)
def batch_smaller_than_world(s: Subject) -> Iterator[Hit]:
    train, micro, gas = s.batch()
    ranks = s.data_parallel_size
    if micro is MISSING and gas is MISSING and _number(train) and 0 < train < ranks:
        yield Hit(
            TRAIN,
            _("{train} samples cannot be shared by {ranks} ranks").format(train=_short(train), ranks=ranks),
            effect=_("the config is refused: micro batch 0"),
            hint=_("use at least {ranks}").format(ranks=ranks),
            fix=put(TRAIN, ranks, there=True, safe=False),
        )


@rule(
    "DS408",
    "unmanaged-accumulation-refused",
    Severity.ERROR,
    "init",
    since="0.19.4",
    what=N_("managed_gradient_accumulation: false together with something that excludes it."),
    why=N_(
        "It is refused with overlap_comm at stages 0 and 1 and with DeepCompile; in 0.19.4 also with any offload."
    ),
    example='{"train_batch_size": 8, "managed_gradient_accumulation": false, "zero_optimization": {"stage": 1, "overlap_comm": true}}',
    fix=N_("Remove overlap_comm, use stage 2 or 3, or let DeepSpeed manage the accumulation."),
    source="deepspeed/runtime/engine.py:2030-2036 @ 0.19.8, :1653-1655 @ 0.19.4",
)
def unmanaged_accumulation_refused(s: Subject) -> Iterator[Hit]:
    pointer = "/managed_gradient_accumulation"
    if s.get(pointer, True) not in (False, 0):
        return
    reason = ""
    if s.stage in (0, 1) and s.flag("/zero_optimization/overlap_comm"):
        reason = _("overlap_comm at stage {stage}").format(stage=s.stage)
    elif s.flag("/compile/deepcompile"):
        reason = "DeepCompile"
    elif s.release == "0.19.4" and s.stage and (s.offloads_optimizer or s.offload("offload_param") != "none"):
        reason = _("offload (allowed from 0.19.5)")
    elif s.before("0.19.8") and s.get("/amp/enabled", False) is True:
        reason = "amp"
    if reason:
        yield Hit(
            pointer,
            _("unmanaged accumulation does not go with {reason}").format(reason=reason),
            effect=_("the engine stops at start"),
            hint=_("remove one of the two"),
        )


@rule(
    "DS409",
    "unmanaged-accumulation-steps",
    Severity.INFO,
    "step",
    since="0.19.4",
    what=N_("managed_gradient_accumulation: false."),
    why=N_(
        "Then every engine.step() is a boundary: DeepSpeed counts nothing. gradient_accumulation_steps only divides the loss; with 1 the gradients of several backward() calls are summed, not averaged. A loop that calls step() on every micro batch updates every time."
    ),
    example='{"train_batch_size": 8, "managed_gradient_accumulation": false}',
    fix=N_(
        "Call engine.step() once per optimizer step and set gradient_accumulation_steps to the number of backward() calls."
    ),
    source="deepspeed/runtime/engine.py:3442 @ 0.19.8; executed",
)
def unmanaged_accumulation_steps(s: Subject) -> Iterator[Hit]:
    pointer = "/managed_gradient_accumulation"
    if s.get(pointer, True) in (False, 0):
        yield Hit(pointer, _("every step() is a boundary; gradient_accumulation_steps only divides the loss"))


@rule(
    "DS410",
    "unmanaged-accumulation-unknown",
    Severity.SILENT_WRONG,
    "step",
    until="0.19.3",
    what=N_("managed_gradient_accumulation: false for a release that does not know it."),
    why=N_(
        "The key exists from 0.19.4. Before, it is ignored: DeepSpeed keeps its own boundary, so a script that steps by itself steps at the wrong time."
    ),
    example='{"train_batch_size": 8, "managed_gradient_accumulation": false}',
    fix=N_("Use DeepSpeed 0.19.5 or later, or engine.set_gradient_accumulation_boundary()."),
    source="deepspeed/runtime/config.py get_managed_gradient_accumulation @ 0.19.4 (#8184)",
    context={"release": "0.19.3"},
)
def unmanaged_accumulation_unknown(s: Subject) -> Iterator[Hit]:
    pointer = "/managed_gradient_accumulation"
    if s.get(pointer, True) in (False, 0):
        yield Hit(
            pointer,
            _("this release ignores managed_gradient_accumulation"),
            effect=_("DeepSpeed keeps its own boundary; the script's steps fall at other places"),
            hint=_("it exists from 0.19.4, with offload from 0.19.5"),
        )


@rule(
    "DS411",
    "differs-from-training-arguments",
    Severity.ERROR,
    "parse",
    what=N_("A value that contradicts the training arguments given to Hugging Face."),
    why=N_(
        'Hugging Face compares the two sources when training starts and refuses what differs; "auto" leaves the choice to the arguments. 8 and "8" count as different too.'
    ),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}',
    fix=N_('Write "auto", or make both equal.'),
    source="transformers/integrations/deepspeed.py trainer_config_finalize @ 5.24; executed",
    context={"engine": "hf", "args": {"per_device_train_batch_size": 2}},
)
def differs_from_training_arguments(s: Subject) -> Iterator[Hit]:
    for m in s.problems:
        if m.kind == "mismatch":
            yield Hit(
                m.pointer,
                m.message,
                effect=_("the Trainer stops when training starts"),
                hint=_('write "auto" here, or make both equal'),
                fix=put(m.pointer, "auto", there=True, safe=True),
            )
