"""``versions``: what one file does differently in two releases, and nothing that it does not."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.rules.engine import Context, check_document
from dstui.rules.registry import Rule, all_changes, version_key
from dstui.rules.subject import Model
from dstui.rules.versions import KINDS, Comparison, Difference, compare, pinned
from tests.unit.test_rules_engine import mutated

RELEASES = schema.all_releases()
B: dict[str, Any] = {"train_batch_size": 8}


def ask(data: Any, old: str, new: str, **say: Any) -> Comparison:
    text = data if isinstance(data, str) else json.dumps(data)
    context = Context(
        new,
        engine=say.get("engine", "deepspeed"),
        world_size=say.get("world_size", 1),
        args=say.get("args"),
        model=Model(say["params"]) if "params" in say else None,
    )
    return compare(Document.parse(text, "ds.json"), old, new, context)


def said(c: Comparison, code: str) -> list[Difference]:
    return [d for d in c.differences if d.code == code]


def zero(**keys: Any) -> dict[str, Any]:
    return {**B, "zero_optimization": keys}


OFFLOAD = zero(stage=3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})


def test_releases_are_listed_once_in_order() -> None:
    assert list(RELEASES) == sorted(set(RELEASES), key=version_key)
    assert len(RELEASES) >= 68
    assert set(schema.releases()) <= set(RELEASES)


def test_the_upgrade_from_0_19_4_to_0_19_5_of_an_offload_file() -> None:
    found = ask(OFFLOAD, "0.19.4", "0.19.5", params=7_000_000_000, world_size=8)
    first, second = said(found, "DS857")
    assert (first.kind, first.since, first.before, first.after) == ("default", "0.19.5", False, True)
    assert first.pointer == "/zero_optimization/offload_optimizer/pin_memory"
    assert second.pointer == "/zero_optimization/offload_param/pin_memory"
    # 7e9 parameters on 8 ranks: fp32 gradients 3.26 -> 4, two 16-bit buffers 1.63 -> 2 GiB each
    assert "8.0 GiB for 6.5 GiB" in first.effect
    assert "64.0 GiB" in first.effect
    (copy,) = said(found, "DS865")
    assert "asynchronously" in copy.message
    (op,) = said(found, "DS866")
    assert "pin_memory" in op.message
    (unmanaged,) = said(found, "DS867")
    for words in ("works with offload from 0.19.5", "0.19.4 refuses it", "older releases ignore the key"):
        assert words in unmanaged.message
    assert found.differ


def test_without_a_model_the_rule_is_told_in_words() -> None:
    (first, _second) = said(ask(OFFLOAD, "0.19.4", "0.19.5"), "DS857")
    assert "power of two" in first.effect


def test_an_explicit_pin_memory_silences_the_default() -> None:
    for value in (True, False):
        block = {"device": "cpu", "pin_memory": value}
        data = zero(stage=3, offload_optimizer=block, offload_param=block)
        assert not said(ask(data, "0.19.4", "0.19.5"), "DS857")
    unused = zero(stage=2, offload_param={"device": "cpu"})  # never read below stage 3
    assert not said(ask(unused, "0.19.4", "0.19.5"), "DS857")


def test_unmanaged_accumulation_with_offload_in_three_releases() -> None:
    data = {**OFFLOAD, "managed_gradient_accumulation": False}
    (ignored,) = said(ask(data, "0.19.3", "0.19.5"), "DS410")
    assert (ignored.kind, ignored.since) == ("closes", "0.19.4")
    (refused,) = said(ask(data, "0.19.3", "0.19.4"), "DS408")
    assert (refused.kind, refused.since) == ("refused", "0.19.4")
    (allowed,) = said(ask(data, "0.19.4", "0.19.8"), "DS408")
    assert (allowed.kind, allowed.since) == ("allowed", "0.19.5")


def test_removed_keys_name_their_own_release_and_what_to_do() -> None:
    data = {**B, "amp": {"enabled": False}, "nebula": {"enabled": True}}
    found = {d.pointer: d for d in said(ask(data, "0.18.9", "0.19.8"), "DS801")}
    assert {p: d.since for p, d in found.items()} == {"/amp": "0.19.8", "/nebula": "0.19.7"}
    assert all(d.kind == "refused" and d.hint for d in found.values())
    assert found["/amp"].pin is not None  # it was off: removing it keeps the meaning
    assert found["/nebula"].pin is None


def test_a_fault_of_something_that_is_gone_is_not_put_right() -> None:
    data = {
        **zero(stage=1),
        "amp": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}},
    }
    found = ask(data, "0.18.9", "0.19.8")
    assert {d.code for d in found.differences if d.kind == "refused"} == {"DS801", "DS802"}
    assert not [d for d in found.differences if d.kind in ("allowed", "closes", "read") and d.code != "DS874"]


def test_a_rename_in_silence() -> None:
    found = ask({**B, "aio": {"thread_count": 4}}, "0.16.3", "0.16.4")
    (renamed,) = said(found, "DS804")
    assert (renamed.kind, renamed.since) == ("ignored", "0.16.4")
    assert renamed.pin is not None
    assert "intra_op_parallelism" in renamed.message


def test_windows_open_and_close() -> None:
    data = {
        **zero(stage=2, offload_optimizer={"device": "cpu", "pin_memory": True}),
        "gradient_accumulation_steps": 4,
    }
    (opens,) = said(ask(data, "0.15.0", "0.16.0"), "DS805")
    assert (opens.kind, opens.since) == ("opens", "0.15.2")
    (closes,) = said(ask(data, "0.18.0", "0.19.8"), "DS805")
    assert (closes.kind, closes.since) == ("closes", "0.19.0")
    assert not said(ask(data, "0.14.0", "0.19.8"), "DS805")
    assert not said(ask(zero(stage=2), "0.18.0", "0.19.8"), "DS805")


def test_the_way_back_undoes_it() -> None:
    back = ask(OFFLOAD, "0.19.5", "0.19.4")
    first = said(back, "DS857")[0]
    assert (first.before, first.after) == (True, False)
    assert first.pin is not None
    assert first.pin.edits[-1]["value"] is True
    assert [d.kind for d in said(back, "DS867")] == ["lost"]


def test_the_same_release_twice_is_no_difference() -> None:
    found = ask(OFFLOAD, "0.19.8", "0.19.8+cu128")
    assert found.differences == ()
    assert not found.differ


@pytest.mark.parametrize("name", ["0.1.0", "0.20.0", "new", ""])
def test_a_release_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(DstuiError, match="knows no DeepSpeed"):
        ask(B, name, "0.19.8")


def test_a_file_of_another_tool_is_named() -> None:
    with pytest.raises(DstuiError, match="Accelerate"):
        ask({"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"}, "0.19.4", "0.19.8")


def test_pin_writes_the_old_behaviour_and_keeps_the_text() -> None:
    text = """{
  // stage 3
  "train_batch_size": 8,
  "steps_per_print": 10, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
  "amp": {"enabled": false},
}
"""
    document = Document.parse(text, "ds.json")
    found = compare(document, "0.19.1", "0.19.8", Context("0.19.8", world_size=1))
    after, done = pinned(document, found)
    assert "// stage 3" in after.text
    assert after.data == {
        "train_batch_size": 8,
        "steps_per_print": 10,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "gradient_clipping": 0.0,
        "data_types": {"buffer_dtype": "bf16"},
    }
    assert {d.code for d in done} == {"DS801", "DS855", "DS856", "DS857", "DS859"}
    again = compare(after, "0.19.1", "0.19.8", Context("0.19.8", world_size=1))
    assert not [d for d in again.differences if d.pin is not None]
    assert check_document(after, Context("0.19.8", world_size=1)).verdict == "accepted"


CHANGES = [c for c in all_changes() if c.page.example]


@pytest.mark.parametrize("rule", CHANGES, ids=lambda c: c.code)
def test_each_change_speaks_for_its_example_at_its_release_only(rule: Rule) -> None:
    assert rule.since in RELEASES
    before = RELEASES[RELEASES.index(rule.since) - 1]
    world = rule.context.get("world_size", 1)
    (found, *_more) = said(ask(rule.page.example, before, rule.since, world_size=world), rule.code)
    assert found.since == rule.since
    assert found.message
    assert not found.message.endswith(".")
    assert found.kind in KINDS
    if found.kind == "default":
        assert found.before != found.after
        assert found.effect
    elsewhere = RELEASES[RELEASES.index(before) - 1]
    assert not said(ask(rule.page.example, elsewhere, before, world_size=world), rule.code)


def test_a_plain_file_hears_of_no_feature_it_does_not_use() -> None:
    data = {**B, "gradient_clipping": 1.0, "steps_per_print": 10, "log_level": "info"}
    found = ask(data, "0.14.0", "0.19.8", world_size=1)
    assert {d.code for d in found.differences} <= {"DS858", "DS115", "DS854"}


def test_every_corpus_file_that_stops_being_accepted_is_explained(shared: Path) -> None:
    """The real releases' verdicts say which; each of those files must be told why, since when and what to do."""
    verdicts = json.loads((shared / "corpus" / "verdicts.json").read_text(encoding="utf-8"))
    stopped = [
        (name, entry["world_size"])
        for name, entry in verdicts.items()
        if entry["verdicts"]["0.18.9"]["ok"] and not entry["verdicts"]["0.19.8"]["ok"]
    ]
    assert len(stopped) == 4
    for name, world in stopped:
        document = Document.parse((shared / "corpus" / name).read_bytes(), name)
        found = compare(document, "0.18.9", "0.19.8", Context("0.19.8", world_size=world))
        assert found.verdicts == ("accepted", "rejected"), name
        refused = [d for d in found.differences if d.kind == "refused"]
        assert refused, name
        for d in refused:
            assert version_key("0.18.9") < version_key(d.since) <= version_key("0.19.8"), (name, d)
            assert d.hint, (name, d)
            assert d.line or d.pointer == "", (name, d)


def test_no_corpus_file_that_both_accept_is_called_refused_at_parse(shared: Path) -> None:
    verdicts = json.loads((shared / "corpus" / "verdicts.json").read_text(encoding="utf-8"))
    for name, entry in verdicts.items():
        if not all(entry["verdicts"][v]["ok"] for v in ("0.19.4", "0.19.8")):
            continue
        document = Document.parse((shared / "corpus" / name).read_bytes(), name)
        found = compare(document, "0.19.4", "0.19.8", Context("0.19.8", world_size=entry["world_size"]))
        assert found.verdicts == ("accepted", "accepted"), name
        assert {d.code for d in found.differences if d.kind == "refused"} <= {"DS802", "DS708"}, name


@pytest.mark.parametrize("rule", [c for c in CHANGES if c.kind == "default"], ids=lambda c: c.code)
def test_a_default_that_changed_is_what_the_releases_own_models_say(rule: Rule) -> None:
    """The timeline is generated from DeepSpeed's sources; what a change claims must be in it."""
    assert rule.since
    before = RELEASES[RELEASES.index(rule.since) - 1]
    world = rule.context.get("world_size", 1)
    generated = 0
    for d in said(ask(rule.page.example, before, rule.since, world_size=world), rule.code):
        old, new = schema.defaults(before), schema.defaults(rule.since)
        if d.pointer in old and d.pointer in new and rule.code != "DS853":
            assert (old[d.pointer], new[d.pointer]) == (d.before, d.after), d.pointer
            generated += 1
    other = {
        "DS853",
        "DS854",
        "DS858",
        "DS859",
    }  # a scheduler's own, the logger, the process group, a new key
    assert bool(generated) == (rule.code not in other)


def test_no_default_that_changed_is_forgotten() -> None:
    """Every default that differs between two neighbours is named, or falls to DS875 when its section is there."""
    for old, new in itertools.pairwise(RELEASES):
        was, now = schema.defaults(old), schema.defaults(new)
        for pointer in was.keys() & now.keys():
            if was[pointer] == now[pointer]:
                continue
            block, _sep, _key = pointer.rpartition("/")
            data: dict[str, Any] = {
                **B,
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "scheduler": {"type": "WarmupLR", "params": {}},
                "zero_optimization": {
                    "stage": 3 if "offload" in pointer else 1,
                    **({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if "offload" in pointer else {}),
                },
            }  # fmt: skip
            here = data
            for token in block.split("/")[1:]:
                here = here.setdefault(token, {})
            found = [d.pointer for d in ask(data, old, new).differences if d.kind == "default"]
            assert pointer in found, (old, new, pointer)


def test_any_config_between_any_releases_is_compared() -> None:
    """No crash, no difference of a release with itself, and the way back names the same codes."""
    pick = random.Random(7)
    for seed in range(40):
        data = mutated(seed)
        old, new = pick.choice(RELEASES), pick.choice(RELEASES)
        try:
            there, back = ask(data, old, new), ask(data, new, old)
        except DstuiError:
            continue  # another tool's file
        assert {(d.code, d.pointer) for d in there.differences} == {
            (d.code, d.pointer) for d in back.differences
        }
        assert "DS100" not in {d.code for d in there.differences}
        for d in there.differences:
            assert d.since in RELEASES
        if old == new:
            assert not there.differences
        json.dumps([d.before for d in there.differences])
