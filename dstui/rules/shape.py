"""DS1xx: the file itself: readable, the right kind of file, known keys, right types, no forgotten ``auto``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dstui.config.pointer import dotted, join_pointer, split_pointer
from dstui.i18n import N_, _
from dstui.rules.diagnostic import Fix, Severity
from dstui.rules.edits import drop, key_of, parent_of, put, rename, sibling
from dstui.rules.nearest import nearest
from dstui.rules.registry import Hit, rule, version_key
from dstui.rules.subject import BATCH_KEYS, MISSING, Subject, as_bool, as_number
from dstui.rules.tables import ALIASES, OLD_NAMES, REMOVED, RENAMED

if TYPE_CHECKING:
    from dstui.config.replay import Problem

ZERO = "/zero_optimization"
_REFUSED = N_("the config is refused")


# -- found by the engine itself; declared here so that they have a page, a code and a severity ------------


@rule(
    "DS100",
    "rule-crashed",
    Severity.WARNING,
    "always",
    what=N_("A rule of dstui failed on this file."),
    why=N_("This is a defect of dstui, not of the file: the rule could not judge it, all others did."),
    example="",
    fix=N_("Please report it with the file."),
    source="dstui/rules/engine.py",
)
def rule_crashed(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS101",
    "unreadable-file",
    Severity.ERROR,
    "parse",
    what=N_("A file that the engine cannot read: missing, not text, or not JSON."),
    why=N_(
        "DeepSpeed reads the file with hjson (comments, trailing commas and words without quotes are legal there), Hugging Face with strict JSON. What they cannot parse stops the run before a single key is looked at."
    ),
    example='{"train_batch_size": 8',
    fix=N_("Correct the place that the message names."),
    source="deepspeed/runtime/config.py DeepSpeedConfig.__init__ @ 0.19.8; transformers/integrations/deepspeed.py @ 5.24",
)
def unreadable_file(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS102",
    "duplicate-key",
    Severity.ERROR,
    "parse",
    what=N_("An object that has the same key twice, in a file that DeepSpeed reads."),
    why=N_("DeepSpeed refuses it at any depth: it could not know which of the two is meant."),
    example='{"train_batch_size": 8, "train_batch_size": 16}',
    fix=N_("Remove one of the two."),
    source="deepspeed/runtime/config_utils.py:211 @ 0.19.8; executed on 0.9.5-0.19.8",
)
def duplicate_key(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS103",
    "duplicate-key-last-wins",
    Severity.SILENT_WRONG,
    "parse",
    what=N_("An object that has the same key twice, in a file that Hugging Face or Accelerate reads."),
    why=N_("They read the file with Python's json, which keeps the last one in silence."),
    example='{"train_batch_size": "auto", "zero_optimization": {"stage": 3}, "zero_optimization": {"stage": 2}}',
    fix=N_("Remove one of the two."),
    source="transformers/integrations/deepspeed.py HfDeepSpeedConfig, accelerate/utils/deepspeed.py @ 1.15; executed",
    context={"engine": "hf"},
)
def duplicate_key_last_wins(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS104",
    "not-an-object",
    Severity.ERROR,
    "parse",
    what=N_("A file that holds a list, a number or a text instead of an object."),
    why=N_("A config is an object of keys and values."),
    example="[1, 2]",
    fix=N_("Put the keys between { and }."),
    source="deepspeed/runtime/config.py DeepSpeedConfig.__init__ @ 0.19.8",
)
def not_an_object(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS105",
    "not-a-deepspeed-config",
    Severity.ERROR,
    "parse",
    what=N_("A configuration file of another tool."),
    why=N_("Its keys mean nothing to DeepSpeed, or DeepSpeed's inference reads it instead of training."),
    example='{"output_dir": "out", "per_device_train_batch_size": 2, "num_train_epochs": 3}',
    fix=N_(
        "Give the DeepSpeed config that this file names, usually under the key deepspeed or deepspeed_config_file."
    ),
    source="the formats of transformers 5.24, accelerate 1.15, LLaMA-Factory 0.9.5, axolotl, ms-swift 4.6, deepspeed/inference/config.py @ 0.19.8",
)
def not_a_deepspeed_config(s: Subject) -> Iterator[Hit]:
    return iter(())


@rule(
    "DS199",
    "refused-by-deepspeed",
    Severity.ERROR,
    "parse",
    what=N_("DeepSpeed refuses the config for a reason that has no rule of its own."),
    why=N_("The message is the one DeepSpeed gives, shortened."),
    example='{"train_batch_size": 8, "elasticity": {"enabled": true}}',
    fix=N_("Follow the message; dstui explain KEY tells what the key may be."),
    source="deepspeed/runtime/config.py @ the release in question",
    context={"release": "0.18.9"},
)
def refused_by_deepspeed(s: Subject) -> Iterator[Hit]:
    return iter(())


# -- unknown keys -----------------------------------------------------------------------------------------


def _top_names(s: Subject) -> tuple[str, ...]:
    return (*s.schema.names(""), "bfloat16") if s.schema else ()


def _unknown_top(s: Subject) -> Iterator[str]:
    if s.schema is None:
        return
    known = {*s.schema.json_schema.get("properties", {}), "bfloat16"}
    renamed = {r.old[1:] for r in RENAMED if s.key >= version_key(r.since)}
    for key in s.raw:
        if str(key) not in known and str(key) not in renamed and f"/{key}" not in REMOVED:
            yield str(key)


def _history(pointer: str) -> Mapping[str, Any] | None:
    """since/until of a key in any release, from the reviewed key list; None when no release ever had it."""
    from dstui.config.schema import key_texts

    entry = key_texts()["keys"].get(dotted(pointer))
    return entry if isinstance(entry, Mapping) else None


def _other_release(s: Subject, pointer: str) -> str:
    """``from 0.19.4`` when another release knows the key, else an empty text."""
    entry = _history(pointer)
    if entry is None:
        return ""
    since, until = entry.get("since"), entry.get("until")
    if since and s.key < version_key(str(since)):
        return _("it exists from {release}").format(release=since)
    if until and s.key > version_key(str(until)):
        return _("it existed up to {release}").format(release=until)
    return ""


def _home(s: Subject, key: str, block: str) -> str | None:
    """The pointer where a key that is unknown in ``block`` would be known, if there is exactly one such place."""
    if s.schema is None:
        return None
    homes = [p for p in s.schema.keys if p.rpartition("/")[2] == key and p.rpartition("/")[0] != block]
    homes = [p for p in homes if p.count("/") <= 3]
    if "/" + key in homes:
        return "/" + key
    return homes[0] if len(homes) == 1 else None


def _place(pointer: str) -> str:
    return dotted(pointer) if parent_of(pointer) else _("the top level")


@rule(
    "DS110",
    "misspelt-key",
    Severity.NO_EFFECT,
    "parse",
    needs=("schema",),
    what=N_("A top-level key that DeepSpeed does not know and that looks like one it does."),
    why=N_(
        "DeepSpeed ignores unknown top-level keys without a word: the setting does nothing and the default is used."
    ),
    example='{"train_batch_size": 8, "gradient_clipp1ng": 1.0}',
    fix=N_("Correct the key."),
    source="deepspeed/runtime/config.py: no check of top-level keys @ 0.9.5-0.19.8; executed",
)
def misspelt_key(s: Subject) -> Iterator[Hit]:
    for key in _unknown_top(s):
        near = nearest(key, _top_names(s))
        if near is None or isinstance(s.raw[key], Mapping) or _other_release(s, join_pointer(key)):
            continue
        yield Hit(
            join_pointer(key),
            _("DeepSpeed does not know {key!r}").format(key=key),
            effect=_("ignored in silence: {name} keeps its default").format(name=near),
            hint=_("did you mean {name}?").format(name=near),
            fix=rename(join_pointer(key), near, s.raw[key], safe=True) if near not in s.raw else drop(join_pointer(key), safe=False),
        )  # fmt: skip


@rule(
    "DS111",
    "misspelt-section",
    Severity.SILENT_WRONG,
    "parse",
    needs=("schema",),
    what=N_("A whole section under a name that DeepSpeed does not know and that looks like one it does."),
    why=N_(
        "The section is ignored without a word. With zero_optimisation the run trains at stage 0: nothing is sharded."
    ),
    example='{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}',
    fix=N_("Correct the name of the section."),
    source="deepspeed/runtime/config.py: no check of top-level keys @ 0.9.5-0.19.8; executed",
)
def misspelt_section(s: Subject) -> Iterator[Hit]:
    for key in _unknown_top(s):
        near = nearest(key, _top_names(s))
        if near is None or not isinstance(s.raw[key], Mapping) or _other_release(s, join_pointer(key)):
            continue
        yield Hit(
            join_pointer(key),
            _("there is no section {key!r}").format(key=key),
            effect=_("the whole section is ignored in silence; {name} keeps its defaults").format(name=near),
            hint=_("did you mean {name}?").format(name=near),
            fix=rename(join_pointer(key), near, s.raw[key], safe=True) if near not in s.raw else None,
        )


@rule(
    "DS112",
    "unknown-key-refused",
    Severity.ERROR,
    "parse",
    needs=("schema",),
    what=N_("A key that a section does not know, in a section that refuses unknown keys."),
    why=N_(
        "zero_optimization, the offload blocks, fp16, bf16 and some others are checked strictly; the error is a page of text for every rank, after the model was loaded."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}',
    fix=N_("Correct or remove the key."),
    source="deepspeed/runtime/config_utils.py DeepSpeedConfigModel extra=forbid @ 0.19.8; executed on 0.9.5-0.19.8",
)
def unknown_key_refused(s: Subject) -> Iterator[Hit]:
    for m in s.problems:
        if m.kind != "unknown-key" or m.pointer in REMOVED:
            continue
        key, block = key_of(m.pointer), parent_of(m.pointer)
        other = _other_release(s, m.pointer)
        near = None if other else nearest(key, s.names(block))
        home = None if other or near else _home(s, key, block)
        siblings, value = s.block(block), s.get(m.pointer)
        fix: Fix | None
        if near and near not in siblings:
            fix = rename(m.pointer, near, value, safe=True)
        elif home and not s.written(home) and parent_of(home) in ("", ZERO):
            fix = Fix(
                _("move it to {place}").format(place=dotted(home)), True,
                ({"op": "add", "path": home, "value": value}, {"op": "remove", "path": m.pointer}),
            )  # fmt: skip
        else:
            fix = drop(m.pointer, safe=False)
        yield Hit(
            m.pointer,
            _("{block} has no key {key!r}").format(block=dotted(block), key=key),
            effect=_("the config is refused; the error comes on every rank, after the model was loaded"),
            hint=other or (_("did you mean {name}?").format(name=near) if near
            else _("it belongs to {place}").format(place=_place(home)) if home
            else _("remove it")),
            fix=fix,
        )  # fmt: skip


_IGNORING = (
    "/activation_checkpointing", "/flops_profiler", "/aio", "/data_types", "/checkpoint", "/checkpoint/writer",
    "/checkpoint/parallel_write", "/timers", "/torch_autocast", "/optimizer", "/scheduler", "/expert_parallel",
    "/fp16", "/bf16", "/bfloat16",
)  # fmt: skip
"""Sections read key by key: what is not asked for is not seen. Others keep unknown keys for the script (pipeline)."""


@rule(
    "DS113",
    "unknown-key-ignored",
    Severity.NO_EFFECT,
    "parse",
    needs=("schema",),
    what=N_("A key that a section does not know, in a section that ignores unknown keys."),
    why=N_(
        "aio, activation_checkpointing, flops_profiler and some others are read key by key: a wrong name does nothing and the default is used."
    ),
    example='{"train_batch_size": 8, "aio": {"blocksize": 1048576}}',
    fix=N_("Correct or remove the key."),
    source="deepspeed/runtime/swap_tensor/aio_config.py, activation_checkpointing/config.py ... @ 0.19.8; executed",
)
def unknown_key_ignored(s: Subject) -> Iterator[Hit]:
    renamed = {r.old for r in RENAMED}
    for block in _IGNORING:
        names = s.names(block)
        if s.schema is None or not names or s.schema.unknown_policy(block) != "ignored":
            continue
        for key, value in s.block(block).items():
            pointer = block + join_pointer(key)
            if key in names or pointer in renamed:
                continue
            other = _other_release(s, pointer)
            near = None if other else nearest(str(key), names)
            home = None if other or near else _home(s, str(key), block)
            yield Hit(
                pointer,
                _("{block} has no key {key!r}").format(block=dotted(block), key=key),
                effect=_("ignored in silence"),
                hint=other or (_("did you mean {name}?").format(name=near) if near
                else _("it belongs to {place}").format(place=_place(home)) if home
                else _("known keys: {names}").format(names=", ".join(names))),
                fix=rename(pointer, near, value, safe=True) if near and near not in s.block(block) else drop(pointer, safe=False),
            )  # fmt: skip


@rule(
    "DS114",
    "misplaced-key",
    Severity.NO_EFFECT,
    "parse",
    needs=("schema",),
    what=N_("A key at the top level that belongs into a section."),
    why=N_("DeepSpeed looks for it in its section only and ignores it at the top level."),
    example='{"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_optimization": {"stage": 2}}',
    fix=N_("Move it into its section."),
    source="deepspeed/runtime/config.py: no check of top-level keys @ 0.9.5-0.19.8; executed",
)
def misplaced_key(s: Subject) -> Iterator[Hit]:
    for key in _unknown_top(s):
        pointer = join_pointer(key)
        if nearest(key, _top_names(s)) or _other_release(s, pointer):
            continue
        home = _home(s, key, "")
        if home is None:
            continue
        there = isinstance(s.get(parent_of(home)), Mapping) and not s.written(home)
        yield Hit(
            pointer,
            _("{key!r} does nothing at the top level").format(key=key),
            effect=_("ignored in silence"),
            hint=_("it belongs to {place}").format(place=dotted(home)),
            fix=Fix(
                _("move it to {place}").format(place=dotted(home)), True,
                ({"op": "add", "path": home, "value": s.raw[key]}, {"op": "remove", "path": pointer}),
            ) if there else None,
        )  # fmt: skip


@rule(
    "DS115",
    "key-of-another-release",
    Severity.NO_EFFECT,
    "parse",
    needs=("schema",),
    what=N_("A top-level key that another release reads and this one does not."),
    why=N_(
        "DeepSpeed ignores unknown top-level keys without a word, also those that came later or went before."
    ),
    example='{"train_batch_size": 8, "disable_python_gc": true}',
    fix=N_("Use the release that has it, or remove the key."),
    source="deepspeed/runtime/config.py of each release, compared @ 0.9.5-0.19.8",
    context={"release": "0.19.4"},
)
def key_of_another_release(s: Subject) -> Iterator[Hit]:
    for key in _unknown_top(s):
        pointer = join_pointer(key)
        other = _other_release(s, pointer)
        if other:
            yield Hit(
                pointer,
                _("this release does not read {key!r}").format(key=key),
                effect=_("ignored in silence"),
                hint=other,
                fix=drop(pointer, safe=False),
            )


@rule(
    "DS116",
    "unknown-top-level-key",
    Severity.INFO,
    "parse",
    needs=("schema",),
    what=N_("A top-level key that no release of DeepSpeed knows."),
    why=N_("DeepSpeed ignores it. That is fine when your script reads it from the same file."),
    example='{"train_batch_size": 8, "my_experiment": "a"}',
    fix=N_("Leave it if your script reads it; otherwise remove it."),
    source="deepspeed/runtime/config.py: no check of top-level keys @ 0.9.5-0.19.8; executed",
)
def unknown_top_level_key(s: Subject) -> Iterator[Hit]:
    for key in _unknown_top(s):
        pointer = join_pointer(key)
        if not (nearest(key, _top_names(s)) or _other_release(s, pointer) or _home(s, key, "")):
            yield Hit(
                pointer,
                _("DeepSpeed does not read {key!r}").format(key=key),
                hint=_("fine if your script does"),
            )


# -- types and bounds -------------------------------------------------------------------------------------


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


def _shown(value: Any) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 50 else text[:47] + "..."


@rule(
    "DS117",
    "key-newer-than-release",
    Severity.WARNING,
    "parse",
    what=N_("A key that came later than the release, in a section that refuses unknown keys."),
    why=N_(
        "For releases without a schema dstui still knows when each key came. A checked section refuses a key that it does not know yet; with a schema DS112 says so."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}',
    fix=N_("Use a newer release, or remove the key."),
    source="schemas/timeline.json, generated from the config models of 0.9.5-0.19.8",
    context={"release": "0.9.5"},
)
def key_newer_than_release(s: Subject) -> Iterator[Hit]:
    from dstui.config.schema import all_releases, history

    if s.schema is not None or s.release.split("+")[0] not in all_releases():
        return
    for block in (
        "zero_optimization",
        "zero_optimization/offload_optimizer",
        "zero_optimization/offload_param",
    ):
        for key in s.block(f"/{block}"):
            rows = history(join_pointer(block, key))
            if rows and s.key < version_key(rows[0][0]):
                yield Hit(
                    join_pointer(block, key),
                    _("{key} exists from {release}").format(key=key, release=rows[0][0]),
                    effect=_("this release refuses a key that it does not know"),
                    hint=_("use a newer release, or remove it"),
                )


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
                _("{value} is not a whole number").format(value=_shown(m.params["found"])),
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
            _("{value} is a text; DeepSpeed reads it as {real}").format(
                value=_shown(value), real=_shown(real)
            ),
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
            _("{value} is a text, not a number").format(value=_shown(value)),
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


# -- auto -------------------------------------------------------------------------------------------------

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
    text = _('nobody replaces "auto" here: {keys}').format(
        keys=", ".join(_place(p) if parent_of(p) else key_of(p) for p in pointers)
    )
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
                _('nobody replaces "auto" here: the default {value} is used').format(
                    value=_shown(key.default)
                )
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


@rule(
    "DS198",
    "release-not-known",
    Severity.INFO,
    "always",
    what=N_("A DeepSpeed release that dstui has no schema for."),
    why=N_(
        "dstui never answers with a neighbour's schema: keys, types and bounds are not checked, and the verdict is unknown. Rules that know their releases still speak."
    ),
    example='{"train_batch_size": 8}',
    fix=N_("Judge by one of the known releases with --deepspeed, or ask the installed one with --live."),
    source="schemas/",
    context={"release": "0.1.0"},
)
def release_not_known(s: Subject) -> Iterator[Hit]:
    from dstui.config.schema import releases

    if s.schema is None:
        yield Hit(
            "",
            _("no schema for DeepSpeed {release}: keys and types are not checked").format(release=s.release),
            hint=_("known releases: {releases}").format(releases=", ".join(releases())),
        )
