"""The allocator port: c10's rules one by one, and its books under random use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstui.estimate.allocator import ACTIVATIONS, PARAMS, Allocator, Block, OutOfMemory
from dstui.units import KiB, MiB


def test_sizes_round_to_512_and_segments_to_their_class() -> None:
    for asked, block, segment in (
        (1, 512, 2 * MiB),
        (0, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (2 * MiB, 2 * MiB, 20 * MiB),
        (9 * MiB, 9 * MiB, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (33 * MiB + 1, 34 * MiB, 34 * MiB),  # less than 1 MiB is left: the block keeps it
    ):
        a = Allocator()
        a.malloc(asked, PARAMS)
        assert (a.allocated, a.reserved) == (block, segment), asked


def test_a_remainder_of_one_mib_or_less_stays_with_a_large_block() -> None:
    a = Allocator()
    whole = a.malloc(40 * MiB, PARAMS)
    a.release(whole)
    a.malloc(39 * MiB, PARAMS)
    assert a.allocated == 40 * MiB
    b = Allocator()
    b.release(b.malloc(40 * MiB, PARAMS))
    b.malloc(38 * MiB, PARAMS)
    assert (b.allocated, b.reserved) == (38 * MiB, 40 * MiB)


def test_best_fit_and_merge() -> None:
    a = Allocator()
    small, large = a.malloc(20 * MiB, PARAMS), a.malloc(60 * MiB, PARAMS)
    a.release(large)
    a.release(small)
    first = a.malloc(18 * MiB, PARAMS)  # from the 20 MiB segment, not the 60 MiB one
    assert a.malloc(60 * MiB, PARAMS) is not None and a.reserved == 80 * MiB
    a.release(first)
    again = a.malloc(20 * MiB, PARAMS)  # the two halves have merged
    assert a.reserved == 80 * MiB and again.size == 20 * MiB


def test_streams_do_not_share_blocks() -> None:
    a = Allocator()
    a.release(a.malloc(50 * MiB, PARAMS, stream=1))
    a.malloc(50 * MiB, PARAMS, stream=0)
    assert a.reserved == 100 * MiB


def test_empty_cache_gives_back_whole_segments_only() -> None:
    a = Allocator()
    one = a.malloc(4 * MiB, PARAMS)
    two = a.malloc(4 * MiB, PARAMS)
    a.release(one)
    a.empty_cache()
    assert a.reserved == 20 * MiB
    a.release(two)
    a.empty_cache()
    assert (a.reserved, a.allocated) == (0, 0)


def test_peaks_by_phase_and_part() -> None:
    a = Allocator()
    a.phase("init")
    kept = a.malloc(30 * MiB, PARAMS)
    a.phase("forward")
    a.release(a.malloc(50 * MiB, ACTIVATIONS))
    a.phase("step")
    a.release(kept)
    a.finish()
    assert a.peaks["init"][0] == 30 * MiB
    total, parts = a.peaks["forward"]
    assert total == 80 * MiB == sum(parts) and parts[PARAMS] == 30 * MiB and parts[ACTIVATIONS] == 50 * MiB
    assert a.peaks["step"][0] == 30 * MiB and a.peak == 80 * MiB


sizes = st.one_of(st.integers(1, 600 * KiB), st.integers(MiB, 30 * MiB))


def test_expandable_segments_grow_by_pages_and_reuse_every_gap() -> None:
    a = Allocator(expandable=True)
    first, second, third = (a.malloc(30 * MiB, PARAMS) for _i in range(3))
    assert a.reserved == 100 * MiB  # 90 MiB in pages of 20
    a.release(second)
    again = a.malloc(25 * MiB, PARAMS)
    assert again.addr == second.addr and a.reserved == 100 * MiB
    a.release(again)
    a.release(third)
    a.malloc(70 * MiB, PARAMS)  # the free end grows instead of a new segment
    assert (a.allocated, a.reserved) == (100 * MiB, 100 * MiB)
    a.release(first)
    a.empty_cache()  # one whole page of the first 30 MiB lies free
    assert a.reserved == 80 * MiB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_cap_gives_free_segments_back_before_it_fails(expandable: bool) -> None:
    a = Allocator(expandable, cap=100 * MiB)
    a.release(a.malloc(60 * MiB, PARAMS))
    kept = a.malloc(80 * MiB, PARAMS)
    assert a.reserved <= 100 * MiB
    with pytest.raises(OutOfMemory):
        a.malloc(40 * MiB, PARAMS)
    a.release(kept)
    assert a.malloc(90 * MiB, PARAMS).size == 90 * MiB


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(sizes, st.sampled_from(["make", "make", "free", "empty"]), st.integers(0, 1)), max_size=120
    ),
    st.booleans(),
    st.sampled_from([None, 64 * MiB]),
)
def test_books_balance_whatever_happens(
    steps: list[tuple[int, str, int]], expandable: bool, cap: int | None
) -> None:
    a = Allocator(expandable, cap)
    live: list[Block] = []
    for size, what, stream in steps:
        if what == "empty" and size % 3 == 0:
            a.empty_cache()
        elif what == "free" and live:
            a.release(live.pop(size % len(live)))
        elif cap is not None:
            try:
                live.append(a.malloc(size, size % 7, stream))
            except OutOfMemory:
                assert a.reserved + 20 * MiB + size > cap
        else:
            live.append(a.malloc(size, size % 7, stream))
        assert a.allocated == sum(b.size for b in live) == sum(a.live)
        assert a.allocated <= a.reserved <= a.peak_reserved
        spans = sorted((b.addr, b.addr + b.size) for b in live)
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(spans))
    for b in live:
        a.release(b)
    a.empty_cache()
    assert a.allocated == a.reserved == 0
