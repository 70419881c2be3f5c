"""Difference in meaning."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dstui.config.diff import compare, edits_between, equal, infer_world_size, leaves
from dstui.config.document import apply_edit

A = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "cpu_offload": True},
    "foo": 1,
}
B = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {
        "stage": 3,
        "prefetch_bucket_size": 50_000_000,
        "offload_optimizer": {"device": "cpu"},
    },
    "gradient_clipping": 1.0,
}


def test_effective_values_include_what_no_file_says() -> None:
    found = compare(A, B, release="0.19.8")
    assert found.effective is not None and found.differ
    changes = {c.path: (c.a, c.b, c.a_given, c.b_given) for c in found.effective}
    assert changes == {
        "zero_optimization.stage": (2, 3, True, True),
        "zero_optimization.overlap_comm": (False, True, False, False),
    }
    assert (
        "/gradient_clipping" in found.same_meaning and "/zero_optimization/cpu_offload" in found.same_meaning
    )
    assert found.unread == ("/foo",)


def test_another_spelling_is_no_difference() -> None:
    old = {"train_batch_size": 4, "bfloat16": {"enabled": "yes"}, "zero_optimization": {"stage": 1}}
    new = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": "1", "overlap_comm": False, "contiguous_gradients": "auto"},
    }
    found = compare(old, new, release="0.19.8")
    assert found.effective == () and not found.differ and found.edits and found.unread == ()


def test_a_block_against_none_shows_what_the_block_says() -> None:
    with_block = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    without = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    found = compare(without, with_block, release="0.19.4")
    assert found.effective is not None
    changes = {c.path: (c.a, c.b) for c in found.effective}
    assert changes["zero_optimization.offload_optimizer.device"] == (None, "cpu")
    assert changes["zero_optimization.offload_optimizer.pin_memory"] == (None, False)


def test_a_release_without_schema_compares_the_files_only() -> None:
    assert compare(A, B, release="0.13.5").effective is None
    assert compare(A, B, release="0.13.5").differ and not compare(A, dict(A), release="0.13.5").differ


def test_a_verdict_that_differs_is_a_difference() -> None:
    found = compare(
        {"train_batch_size": 1}, {"train_batch_size": 1, "amp": {"enabled": False}}, release="0.19.8"
    )
    assert found.differ and (found.a.verdict, found.b.verdict) == ("accepted", "rejected")


def test_world_size_is_inferred_from_three_sizes() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert infer_world_size(dict(zip(names, (64, 2, 4), strict=True))) == 8
    for sizes in ((64, 2, 5), (64, 0, 1), (1, 2, 1), ("64", 2, 1), (64, "auto", 1)):
        assert infer_world_size(dict(zip(names, sizes, strict=True))) is None
    assert infer_world_size({"train_batch_size": 8}) is None


_DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["", "a", "/", "~"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "/", "~1"]), inner, max_size=3),
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "c/d"]), _DATA),
    st.dictionaries(st.sampled_from(["a", "b"]), _DATA),
)
def test_the_edits_lead_from_one_to_the_other(a: dict[str, Any], b: dict[str, Any]) -> None:
    data: Any = a
    for edit in edits_between(a, b):
        data = apply_edit(data, edit)
    assert equal(data, b)
    assert list(edits_between(a, a)) == []
    assert len(dict(leaves(a))) == len(list(leaves(a)))
