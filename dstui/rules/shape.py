"""DS10x, DS11x, DS19x: the file itself: readable, the right kind of file, keys that the release knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dstui.config.pointer import dotted, join_pointer
from dstui.i18n import N_, _
from dstui.rules.diagnostic import Fix, Severity
from dstui.rules.edits import drop, key_of, parent_of, rename
from dstui.rules.nearest import nearest
from dstui.rules.registry import Hit, rule, version_key
from dstui.rules.subject import Subject
from dstui.rules.tables import REMOVED, RENAMED

ZERO = "/zero_optimization"


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
