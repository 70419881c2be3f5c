"""DS12x, DS13x: the values: types, bounds and choices, numbers written as text, old names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dstui.config.coerce import shown
from dstui.config.pointer import dotted, join_pointer
from dstui.config.replay import Problem
from dstui.i18n import N_, _
from dstui.rules.diagnostic import Fix, Severity
from dstui.rules.edits import drop, key_of, put, rename, sibling
from dstui.rules.nearest import nearest
from dstui.rules.registry import Hit, rule
from dstui.rules.subject import BATCH_KEYS, MISSING, Subject, as_bool, as_number
from dstui.rules.tables import ALIASES, OLD_NAMES

ZERO = "/zero_optimization"
_REFUSED = N_("the config is refused")


def _of_others(pointer: str) -> bool:
    """Keys that rules of their own judge in more detail."""
    return pointer.startswith(tuple("/" + k for k in BATCH_KEYS)) or pointer in (
        "/communication_data_type", "/seq_parallel_communication_data_type", "/seq_parallel_comm_data_type",
        "/gradient_allreduce_op",
    )  # fmt: skip


def _is_fraction(s: Subject, m: Problem) -> bool:
    number = as_number(m.params.get("found"))
    key = s.schema.key(m.pointer) if s.schema else None
    whole = key is not None and key.type.rstrip("?") in ("int", "enum")
    return whole and number is not None and number == number and not float(number).is_integer()


def _typed(s: Subject, *kinds: str) -> Iterator[Problem]:
    return (m for m in s.problems if m.kind in kinds and not _of_others(m.pointer))


@rule(
    "DS120",
    "wrong-type",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    what=N_("A value of the wrong type."),
    why=N_(
        "The section is checked when the config is parsed; the error names every rank and a line of pydantic's documentation."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": "maybe"}}',
    fix=N_("Write the type that the message names."),
    source="deepspeed/runtime/zero/config.py and the other config models @ 0.19.8; executed",
)
def wrong_type(s: Subject) -> Iterator[Hit]:
    for m in _typed(s, "type", "block-type"):
        if m.params.get("found", MISSING) is None or _is_fraction(s, m):
            continue
        yield Hit(
            m.pointer,
            m.message,
            effect=_(_REFUSED),
            hint=_("dstui explain {key} tells more").format(key=dotted(m.pointer)),
            fix=_meant(s, m),
        )


def _meant(s: Subject, m: Problem) -> Fix | None:
    """What a value of the wrong type plainly stands for."""
    value = m.params.get("found")
    if m.pointer.endswith(("/offload_optimizer", "/offload_param")) and value in ("cpu", "nvme", "none"):
        return put(m.pointer, {"device": value}, there=True, safe=True)
    number = as_number(value)
    if number is None or isinstance(value, bool) or not float(number).is_integer():
        return None
    if m.pointer == ZERO and number in (0, 1, 2, 3):
        return put(m.pointer, {"stage": int(number)}, there=True, safe=True)
    key = s.schema.key(m.pointer) if s.schema else None
    if key is not None and key.type.rstrip("?") == "int":
        return put(m.pointer, int(number), there=True, safe=True)
    return None


@rule(
    "DS121",
    "out-of-bounds",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    what=N_("A number outside the bounds of its key."),
    why=N_("The section is checked when the config is parsed."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": -5}}',
    fix=N_("Use a value inside the bounds, or remove the key for the default."),
    source="deepspeed/runtime/zero/config.py, offload_config.py: Field(ge=..., gt=..., le=...) @ 0.19.8; executed",
)
def out_of_bounds(s: Subject) -> Iterator[Hit]:
    for m in _typed(s, "bound"):
        yield Hit(
            m.pointer,
            m.message,
            effect=_(_REFUSED),
            hint=_("remove the key for the default"),
            fix=drop(m.pointer, safe=False),
        )


@rule(
    "DS122",
    "not-one-of-the-choices",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    what=N_("A value that is none of the few that its key allows."),
    why=N_("The section is checked when the config is parsed."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 4}}',
    fix=N_("Use one of the values that the message names."),
    source="deepspeed/runtime/zero/config.py ZeroStageEnum, offload_config.py OffloadDeviceEnum @ 0.19.8; executed",
)
def not_one_of_the_choices(s: Subject) -> Iterator[Hit]:
    for m in _typed(s, "choice"):
        value = s.get(m.pointer)
        key = s.schema.key(m.pointer) if s.schema else None
        words = [str(w) for w in (m.params.get("choices") or (key.choices if key else None) or ())]
        near: str | None = nearest(str(value), words)
        gpu = m.pointer.endswith("/device") and str(value).lower() in ("gpu", "cuda")
        if gpu:
            near = "none"
        yield Hit(
            m.pointer,
            m.message,
            effect=_(_REFUSED),
            hint=_("the states stay on the GPU when the device is none") if gpu
            else _("did you mean {name}?").format(name=near) if near else _("use one of them"),
            fix=put(m.pointer, near, there=True, safe=not gpu) if near and near not in ("0", "1", "2", "3") else None,
        )  # fmt: skip


@rule(
    "DS123",
    "fraction-for-whole-number",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    since="0.15.0",
    what=N_("A fraction where a whole number is wanted."),
    why=N_("Since 0.15.0 (pydantic 2) 1.5 is refused; before, it was cut to 1 in silence."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5.5}}',
    fix=N_("Write a whole number; 5e8 and 5.0 are whole."),
    source="pydantic 2 int parsing; deepspeed/runtime/config_utils.py @ 0.15.0; executed",
)
def fraction_for_whole_number(s: Subject) -> Iterator[Hit]:
    for m in _typed(s, "type", "choice"):
        number = as_number(m.params.get("found"))
        if m.kind == "type" and _is_fraction(s, m) and number is not None:
            yield Hit(
                m.pointer,
                _("{value} is not a whole number").format(value=shown(m.params["found"])),
                effect=_(_REFUSED),
                hint=_("write a whole number"),
                fix=put(m.pointer, round(number), there=True, safe=False)
                if abs(number) != float("inf")
                else None,
            )


@rule(
    "DS124",
    "null-section",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    what=N_("null where a section or a value is wanted."),
    why=N_(
        'DeepSpeed unpacks the section without a test: null ends in "argument after ** must be a mapping", which names no key.'
    ),
    example='{"train_batch_size": 8, "fp16": null}',
    fix=N_("Remove the key."),
    source="deepspeed/runtime/precision_config.py, zero/config.py @ 0.19.8; executed",
)
def null_section(s: Subject) -> Iterator[Hit]:
    for m in _typed(s, "type", "block-type"):
        if m.params.get("found", MISSING) is None:
            yield Hit(
                m.pointer,
                _("null is not allowed here"),
                effect=_("the config is refused with an error that names no key"),
                hint=_("remove the key for the default"),
                fix=drop(m.pointer, safe=True),
            )


@rule(
    "DS125",
    "quoted-number",
    Severity.INFO,
    "parse",
    needs=("schema",),
    what=N_("A number or a switch written as a text, in a section that understands it."),
    why=N_(
        "DeepSpeed from 0.15.0 converts it. Other tools that read the same file may not, and up to 0.14.5 a quoted stage was refused."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": "3", "overlap_comm": "yes"}}',
    fix=N_("Remove the quotes."),
    source="pydantic 2 lax mode; deepspeed/runtime/config_utils.py @ 0.15.0; executed",
)
def quoted_number(s: Subject) -> Iterator[Hit]:
    if s.schema is None:
        return
    for pointer, value in _texts(s.data, ""):
        key = s.schema.key(pointer)
        if key is None or key.policy != "checked":
            continue
        kind = key.type.rstrip("?")
        real: Any = None
        if kind in ("int", "float") or (kind == "enum" and key.choices and isinstance(key.choices[0], int)):
            number = as_number(value)
            if number is not None and number == number and abs(number) != float("inf"):
                real = int(number) if float(number).is_integer() else number
        elif kind == "bool":
            real = as_bool(value)
        if real is None or any(m.pointer == pointer for m in s.problems):
            continue
        yield Hit(
            pointer,
            _("{value} is a text; DeepSpeed reads it as {real}").format(value=shown(value), real=shown(real)),
            hint=_("write it without quotes"),
            fix=put(pointer, real, there=True, safe=True),
        )


def _texts(value: Any, pointer: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from _texts(v, pointer + join_pointer(k))
    elif isinstance(value, str) and value != "auto":
        yield pointer, value


_COUNTED = ("/gradient_clipping", "/steps_per_print")


@rule(
    "DS126",
    "text-for-number-at-top-level",
    Severity.ERROR,
    "step",
    what=N_("gradient_clipping or steps_per_print as a text."),
    why=N_(
        "Top-level keys are not checked: the text survives parsing and start, and stops the run with a TypeError at the first step."
    ),
    example='{"train_batch_size": 8, "gradient_clipping": "1.0"}',
    fix=N_("Write the number without quotes."),
    source="deepspeed/runtime/config.py get_scalar_param: no type check @ 0.19.8; executed",
)
def text_for_number_at_top_level(s: Subject) -> Iterator[Hit]:
    for pointer in _COUNTED:
        value = s.get(pointer)
        if not isinstance(value, str) or value == "auto":
            continue
        number = as_number(value)
        real = int(number) if number is not None and pointer == "/steps_per_print" else number
        yield Hit(
            pointer,
            _("{value} is a text, not a number").format(value=shown(value)),
            effect=_("parsing and start succeed; the first step stops with a TypeError"),
            hint=_("write it without quotes") if number is not None else _("write a number"),
            fix=put(pointer, real, there=True, safe=True) if number is not None else None,
        )


# -- names ------------------------------------------------------------------------------------------------


@rule(
    "DS130",
    "old-name",
    Severity.INFO,
    "parse",
    what=N_("A key under an old name that DeepSpeed still takes."),
    why=N_(
        "DeepSpeed converts it (most with a warning). Both names together are refused, and an old name may go away."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
    fix=N_("Use the new name."),
    source="deepspeed/runtime/config_utils.py _process_deprecated_field, zero/config.py, precision_config.py (bfloat16) @ 0.19.8",
)
def old_name(s: Subject) -> Iterator[Hit]:
    for pointer, new in OLD_NAMES.items():
        value = s.get(pointer)
        if value is MISSING:
            continue
        key = key_of(pointer)
        fix: Fix | None = None
        text = _("{old} is the old name of {new}").format(old=key, new=new)
        hint = _("write {new}").format(new=new)
        if key in ("cpu_offload", "cpu_offload_param"):
            on = as_bool(value)
            target = sibling(pointer, new)
            hint = _("write {text}").format(text=f'"{new}": {{"device": "{"cpu" if on else "none"}"}}')
            if on is not None and not s.written(target):
                fix = Fix(
                    _("replace {old} by {new}").format(old=key, new=new), True,
                    (*(({"op": "add", "path": target, "value": {"device": "cpu"}},) if on else ()),
                     {"op": "remove", "path": pointer}),
                )  # fmt: skip
        elif key == "cpu_offload_use_pin_memory":
            text = _("{old} is no longer read").format(old=key)
            hint = _("write pin_memory inside offload_optimizer or offload_param")
            fix = drop(pointer, safe=True)
        elif not s.written(sibling(pointer, new)):
            fix = rename(pointer, new, value, safe=True)
        yield Hit(pointer, text, hint=hint, fix=fix)
    if s.get("/bfloat16") is not MISSING and s.get("/bf16") is MISSING:
        yield Hit(
            "/bfloat16",
            _("{old} is the old name of {new}").format(old="bfloat16", new="bf16"),
            hint=_("write {new}").format(new="bf16"),
            fix=rename("/bfloat16", "bf16", s.raw.get("bfloat16"), safe=True),
        )


@rule(
    "DS131",
    "both-names-of-a-key",
    Severity.ERROR,
    "parse",
    what=N_("A key under its old and its new name at once."),
    why=N_("DeepSpeed refuses to choose between them."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Remove the old one."),
    source="deepspeed/runtime/config_utils.py:89 @ 0.19.8; executed",
)
def both_names_of_a_key(s: Subject) -> Iterator[Hit]:
    pairs: Iterable[tuple[str, str]] = [*OLD_NAMES.items(), *ALIASES.items()]
    gather = "stage3_gather_16bit_weights_on_model_save"
    for pointer, new in pairs:
        value, other = s.get(pointer), s.get(sibling(pointer, new))
        if new == gather and other is MISSING and pointer.endswith("fp16_weights_on_model_save"):
            other = s.get(sibling(pointer, "gather_16bit_weights_on_model_save"))
        if new == "pin_memory" or MISSING in (value, other) or "auto" in (value, other):
            continue
        yield Hit(
            pointer,
            _("{old} and {new} are the same setting").format(old=key_of(pointer), new=new),
            effect=_(_REFUSED),
            hint=_("remove {old}").format(old=key_of(pointer)),
            fix=drop(pointer, safe=value == other),
        )


@rule(
    "DS132",
    "bfloat16-shadowed",
    Severity.NO_EFFECT,
    "parse",
    what=N_("Both bf16 and bfloat16."),
    why=N_("bfloat16 is read only when bf16 is absent, even if bf16.enabled is false."),
    example='{"train_batch_size": 8, "bf16": {"enabled": false}, "bfloat16": {"enabled": true}}',
    fix=N_("Keep bf16 only."),
    source="deepspeed/runtime/precision_config.py get_bfloat16_config @ 0.19.8",
)
def bfloat16_shadowed(s: Subject) -> Iterator[Hit]:
    if s.get("/bf16") is not MISSING and s.get("/bfloat16") is not MISSING:
        yield Hit(
            "/bfloat16",
            _("bfloat16 is not read: bf16 is there too"),
            effect=_("ignored in silence"),
            hint=_("keep bf16 only"),
            fix=drop("/bfloat16", safe=s.get("/bf16") == s.get("/bfloat16")),
        )
