"""The arithmetic of tests/tools/overhead.py, on figures whose answer is known."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tests.tools.overhead import RECORD, Block, interval, noise, paired, slowdown, steps_between


def blocks(factor: float, pairs: int = 12, spread: float = 0.001, seed: int = 3) -> list[Block]:
    """Pairs in alternating order whose watched steps are ``factor`` times as long."""
    rng = random.Random(seed)
    found = []
    for pair in range(pairs):
        drift = 1 + rng.gauss(0, spread)
        for watched in (True, False) if pair % 2 == 0 else (False, True):
            mean = 0.020 * drift * (factor if watched else 1.0)
            found.append(Block(watched, [mean * (1 + abs(rng.gauss(0, 0.002))) for _ in range(200)]))
    return found


@pytest.mark.parametrize("factor", [1.0, 1.002, 1.02])
def test_a_known_slowdown_is_found_within_its_interval(factor: float) -> None:
    found = slowdown(blocks(factor))
    assert found.low <= factor - 1 <= found.high
    assert abs(found.value - (factor - 1)) < 0.0005
    assert found.width < 0.005


def test_the_wider_interval_counts() -> None:
    few = interval([0.0, 0.01])
    assert few.low < 0.005 - 12 * 0.005 and few.high > 0.005 + 12 * 0.005  # Student's t of two values
    assert interval([0.001]).width == math.inf
    many = interval([0.0] * 19 + [0.1])
    half = 2.093 * statistics.stdev([0.0] * 19 + [0.1]) / math.sqrt(20)
    assert many.width >= 2 * half - 1e-12


def test_pairs_are_neighbours_of_two_kinds() -> None:
    a, b, c = Block(True), Block(False), Block(True)
    assert paired([b, a, a, b, c]) == [(a, b), (a, b)]
    with pytest.raises(ValueError, match="differ"):
        paired([a, c])


def test_one_slow_step_moves_the_mean_and_not_the_median() -> None:
    found = blocks(1.0)
    for b in found:
        if b.watched:
            b.steps[7] *= 10
    assert abs(slowdown(found).value) < 0.001
    assert slowdown(found, statistics.fmean).value > 0.03


def test_the_noise_is_that_of_the_blocks_without() -> None:
    assert noise(blocks(1.5, spread=0.0)) < 0.0005
    assert 0.002 < noise(blocks(1.5, spread=0.005)) < 0.01
    assert math.isnan(noise([Block(True, [1.0]), Block(False, [1.0])]))


def test_steps_of_a_span_and_a_torn_record() -> None:
    data = b"".join(RECORD.pack(float(i), 1.0) for i in range(1, 10)) + b"torn"
    assert steps_between(data, 3.0, 7.0) == [1.0] * 4  # those that ended at 4, 5, 6, 7
    assert steps_between(data, 8.5, 100.0) == []
