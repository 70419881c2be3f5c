"""DS14x: ``"auto"`` that nobody replaces, or that somebody has to."""

from __future__ import annotations

from collections.abc import Iterator

from dstui.config.coerce import shown
from dstui.config.pointer import dotted, split_pointer
from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop
from dstui.rules.registry import Hit, rule
from dstui.rules.subject import BATCH_KEYS, Subject

ZERO = "/zero_optimization"

_PRECISION = ("/fp16/enabled", "/bf16/enabled", "/bfloat16/enabled")
_AT_STEP = ("/gradient_clipping", "/steps_per_print")
_HF_LEAVES = (ZERO + "/stage3_prefetch_bucket_size", ZERO + "/stage3_param_persistence_threshold")
"""Filled by Hugging Face at stage 3 only, on purpose; below it nobody reads them."""
_LEGAL_AUTO = (
    "/pipeline/stages", "/data_types/keep_in_fp32_modules", ZERO + "/zenflow/", "/expert_parallel/", "/autotuning/",
)  # fmt: skip


def _auto_hint(s: Subject) -> str:
    if s.strict:
        return _("write a value; if Hugging Face starts the run, check with --engine hf --args")
    return _("write a value")


def _auto(s: Subject, pointers: list[str], meaning: str, effect: str) -> Iterator[Hit]:
    """One hit for all places of a kind: a file written for another engine is full of them."""
    if not pointers:
        return
    text = _('nobody replaces "auto" here: {keys}').format(keys=", ".join(dotted(p) for p in pointers))
    yield Hit(pointers[0], f"{text}; {meaning}" if meaning else text, effect=effect, hint=_auto_hint(s))


@rule(
    "DS140",
    "auto-in-batch",
    Severity.ERROR,
    "parse",
    what=N_('"auto" in a batch size or accumulation that nobody fills.'),
    why=N_(
        'Hugging Face and Accelerate replace "auto" before DeepSpeed sees it. Without them DeepSpeed compares the word with a number: a TypeError that names no key.'
    ),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}',
    fix=N_("Write numbers, or start the run through Hugging Face."),
    source="deepspeed/runtime/config.py:596-650 @ 0.19.8; executed",
)
def auto_in_batch(s: Subject) -> Iterator[Hit]:
    found = [p for p in s.autos if p[1:] in BATCH_KEYS]
    yield from _auto(s, found, "", _("the config is refused with a TypeError that names no key"))


@rule(
    "DS141",
    "auto-in-constructor",
    Severity.ERROR,
    "init",
    what=N_('"auto" in the parameters of the optimizer or the scheduler that nobody fills.'),
    why=N_("The word is handed to the constructor: a TypeError or ValueError after the model was loaded."),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}',
    fix=N_("Write numbers, or start the run through Hugging Face."),
    source="deepspeed/runtime/engine.py _configure_basic_optimizer, _scheduler_from_config @ 0.19.8; executed",
)
def auto_in_constructor(s: Subject) -> Iterator[Hit]:
    found = [p for p in s.autos if p.startswith(("/optimizer/", "/scheduler/"))]
    yield from _auto(s, found, "", _("the engine stops at start, after the model was loaded"))


@rule(
    "DS142",
    "auto-until-first-step",
    Severity.ERROR,
    "step",
    what=N_('"auto" in gradient_clipping or steps_per_print that nobody fills.'),
    why=N_(
        "Top-level keys are not checked: the word survives parsing and start, and stops the run with a TypeError at the first step."
    ),
    example='{"train_batch_size": 8, "gradient_clipping": "auto"}',
    fix=N_("Write a number, or start the run through Hugging Face."),
    source="deepspeed/runtime/zero/stage_1_and_2.py, engine.py: clip_grad > 0.0 @ 0.19.8; executed",
)
def auto_until_first_step(s: Subject) -> Iterator[Hit]:
    yield from _auto(s, [p for p in s.autos if p in _AT_STEP], "", _("the first step stops with a TypeError"))


@rule(
    "DS143",
    "auto-means-default",
    Severity.WARNING,
    "parse",
    what=N_('"auto" in a checked section that nobody fills.'),
    why=N_("DeepSpeed drops the key and takes its default, without a word."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}',
    fix=N_("Write the value, or remove the key."),
    source="deepspeed/runtime/config_utils.py:54 @ 0.19.8; executed",
)
def auto_means_default(s: Subject) -> Iterator[Hit]:
    from dstui.rules.tables import PYDANTIC_BLOCKS

    own = (ZERO + "/stage", ZERO + "/offload_optimizer", ZERO + "/offload_param", *_PRECISION)
    for pointer in s.autos:
        if pointer in own or pointer.endswith(("/device", "/nvme_path")) or pointer.startswith(_LEGAL_AUTO):
            continue
        if not s.strict and pointer in _HF_LEAVES:
            continue
        if any(pointer.startswith(f"/{b}/") for b in PYDANTIC_BLOCKS):
            key = s.schema.key(pointer) if s.schema else None
            yield Hit(
                pointer,
                _('nobody replaces "auto" here: the default {value} is used').format(value=shown(key.default))
                if key and key.has_default
                else _('nobody replaces "auto" here: the default is used'),
                hint=_auto_hint(s),
                fix=drop(pointer, safe=True),
            )


@rule(
    "DS144",
    "precision-auto-is-off",
    Severity.SILENT_WRONG,
    "parse",
    since="0.17.1",
    what=N_('"enabled": "auto" in fp16 or bf16 that nobody fills.'),
    why=N_(
        "Since 0.17.1 DeepSpeed drops the word and takes the default: off. The run trains in fp32, twice the memory and much slower, without a word."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": "auto"}}',
    fix=N_("Write true or false."),
    source="deepspeed/runtime/precision_config.py @ 0.17.1, config_utils.py:54 @ 0.19.8; executed",
)
def precision_auto_is_off(s: Subject) -> Iterator[Hit]:
    if s.precision("fp16") or s.precision("bf16"):
        return
    # the Trainer adds bf16 itself when its own bf16 is on, so an old bfloat16 does no harm there
    found = [p for p in s.autos if p in _PRECISION and (s.strict or p != "/bfloat16/enabled")]
    yield from _auto(s, found, _("it means off"), _("the model trains in fp32"))


@rule(
    "DS145",
    "precision-auto-is-on",
    Severity.SILENT_WRONG,
    "parse",
    until="0.17.0",
    what=N_('"enabled": "auto" in fp16 or bf16 that nobody fills, on an old release.'),
    why=N_("Up to 0.17.0 the word counts as true: the precision is switched on, whatever was meant."),
    example='{"train_batch_size": 8, "fp16": {"enabled": "auto"}}',
    fix=N_("Write true or false."),
    source="deepspeed/runtime/config.py get_fp16_enabled @ 0.17.0; executed",
    context={"release": "0.16.9"},
)
def precision_auto_is_on(s: Subject) -> Iterator[Hit]:
    found = [p for p in s.autos if p in _PRECISION]
    yield from _auto(s, found, _("it means on"), _("the precision is switched on"))


@rule(
    "DS146",
    "auto-taken-literally",
    Severity.WARNING,
    "init",
    what=N_('"auto" in a key that is not checked and that nobody fills.'),
    why=N_("The word reaches the code that uses it, where it counts as true or fails."),
    example='{"train_batch_size": 8, "aio": {"block_size": "auto"}}',
    fix=N_("Write a value, or remove the key."),
    source="deepspeed/runtime/config.py: dictionary reads @ 0.19.8",
)
def auto_taken_literally(s: Subject) -> Iterator[Hit]:
    from dstui.rules.tables import PYDANTIC_BLOCKS

    for pointer in s.autos:
        first = split_pointer(pointer)[0]
        if (
            pointer[1:] in BATCH_KEYS or pointer in _AT_STEP or pointer.startswith(("/optimizer/", "/scheduler/"))
            or pointer.startswith(_LEGAL_AUTO) or any(pointer.startswith(f"/{b}") for b in PYDANTIC_BLOCKS)
            or s.schema is None or first not in s.schema.names("")
        ):  # fmt: skip
            continue
        yield Hit(
            pointer,
            _('nobody replaces "auto" here, and DeepSpeed takes the word as it is'),
            effect=_("it counts as true, or fails when it is used"),
            hint=_auto_hint(s),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS147",
    "auto-left-to-arguments",
    Severity.INFO,
    "parse",
    what=N_('"auto" that Hugging Face or Accelerate will fill from arguments that dstui was not given.'),
    why=N_("Without them the values, and so the verdict, are not known here."),
    example='{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}',
    fix=N_("Give the training arguments with --args, or leave it: this is how such a file is meant."),
    source="transformers/integrations/deepspeed.py trainer_config_process, trainer_config_finalize @ 5.24",
    context={"engine": "hf"},
)
def auto_left_to_arguments(s: Subject) -> Iterator[Hit]:
    left = s.resolved.open if s.resolved else ()
    if left:
        keys = ", ".join(dotted(p) for p in left)
        yield Hit(
            left[0],
            _("filled from the training arguments: {keys}").format(keys=keys),
            hint=_("they come from the model's hidden_size; if its config has none, write numbers")
            if set(left) <= {f"{ZERO}/reduce_bucket_size", *_HF_LEAVES}
            else _("give them with --args to have them checked"),
        )
