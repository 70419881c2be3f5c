"""Which rank failed first, from what the supervisor saw of each and what the launcher printed."""

from __future__ import annotations

import pytest

from dstui.runs.processes import Process
from dstui.runs.supervisor import Watched, first_to_fail

UNSEEN = None


@pytest.mark.parametrize(
    ("codes", "printed", "rank", "code"),
    [
        ((1, -15), 1, 0, 1),
        ((-15, 1), 1, 1, 1),  # had somebody ended rank 0 from outside, the launcher would name -15
        ((-15, 1), -15, 0, -15),
        ((-15, UNSEEN), 1, 1, 1),  # rank 1 failed, and the launcher ended rank 0
        ((UNSEEN, -15), -9, 0, -9),
        ((-15, UNSEEN, UNSEEN), 1, None, 1),
        ((-15, UNSEEN), -15, 0, -15),
        ((-15, UNSEEN), None, 0, -15),
        ((-9, UNSEEN), 1, 0, -9),
        ((UNSEEN, UNSEEN), 1, None, 1),
        ((0, 0), None, None, None),
        ((0, UNSEEN), None, None, None),
    ],
)
def test_the_first_to_fail(
    codes: tuple[int | None, ...], printed: int | None, rank: int | None, code: int | None
) -> None:
    ranks = [
        Watched(Process(100 + n, 1), 99, "python", None, rank=n, code=c, ended_at=10.0 + n)
        for n, c in enumerate(codes)
    ]
    first, found = first_to_fail(ranks, printed)
    assert (None if first is None else first.rank, found) == (rank, code)
