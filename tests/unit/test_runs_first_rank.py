"""Which rank failed first, from what the supervisor saw of each and what the launcher printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstui.runs.firstfail import Watched, first_to_fail, rank_code_from_log, rank_from_log
from dstui.runs.processes import Process

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


def failure(number: int, rank: int, code: int, why: str = "") -> str:
    return (
        f"[{number}]:\n  time      : 2026-11-30_02:32:38\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {18110 + rank}) {why}\n"
        "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
    )


TABLE = (
    f"{'=' * 60}\nseven.py FAILED\n{'-' * 60}\nFailures:\n{failure(1, 0, -15, ' (SIGTERM)')}{'-' * 60}\n"
    f"Root Cause (first observed failure):\n{failure(0, 1, 7)}{'=' * 60}\n"
)
"""As torch 2.13 prints it: those that it ended itself come before the root cause."""
ALONE = TABLE.replace(failure(1, 0, -15, " (SIGTERM)"), "  <NO_OTHER_FAILURES>\n")


@pytest.mark.parametrize(
    ("log", "rank", "code"),
    [
        (TABLE, 1, 7),
        (ALONE, 1, 7),
        (TABLE + TABLE.replace("rank      : 1", "rank      : 3"), 3, 7),  # a restart failed again
        ("[INFO] [launch.py:335:sigkill_handler] ['python'] exits with return code = -9\n", None, -9),
        ("exitcode  : -9 (pid: 4242)\n", None, -9),
        ("all is well\n", None, None),
    ],
)
def test_what_the_launcher_printed(tmp_path: Path, log: str, rank: int | None, code: int | None) -> None:
    (tmp_path / "out.log").write_text("x" * 1000 + "\n" + log)
    with (tmp_path / "out.log").open("rb") as f:
        assert (rank_from_log(f.fileno()), rank_code_from_log(f.fileno())) == (rank, code)
