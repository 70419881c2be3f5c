"""Stacks of ranks: where each one is, in one line; texts are those of py-spy 0.4 on real ranks."""

from __future__ import annotations

import pytest

from dstui.plain.watch import stack_lines
from dstui.runs.stacks import RankStack, Stacks, spans
from dstui.tui.terminal import UNICODE
from dstui.tui.widgets.runpages import stacks_page

WAITS = """Process 795: /opt/bin/python -u /home/u/live.py --local_rank=0
Python v3.11.7 (/usr/bin/python3.11)

Thread 795 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    DeepSpeedEngine.allreduce_bucket (deepspeed/runtime/engine.py:3811)
    DeepSpeedEngine.backward (deepspeed/runtime/engine.py:3431)
    train (live.py:20)
    <module> (live.py:31)
Thread 801 (idle): "Thread-1"
    wait (threading.py:331)
"""
SLEEPS = """Process 796: /opt/bin/python -u /home/u/live.py --local_rank=1
Python v3.11.7 (/usr/bin/python3.11)

Thread 796 (idle): "MainThread"
    train (live.py:26)
    <module> (live.py:31)
"""
MODULE = """Thread 7 (active): "MainThread"
    forward (torch/nn/modules/linear.py:134)
    step (trainer/loop.py:88)
    <module> (trainer/loop.py:120)
    _run_code (<frozen runpy>:88)
"""


def stacks(*texts: str) -> Stacks:
    return Stacks(tuple(RankStack(n, 700 + n, text, "", "py-spy dump") for n, text in enumerate(texts)))


def test_the_odd_one_out_comes_first() -> None:
    found = stacks(WAITS, SLEEPS, WAITS, WAITS)
    assert found.gist == [
        "rank 1: train (live.py:26)",
        "ranks 0, 2-3: all_reduce (torch/distributed/distributed_c10d.py:3252), called by train (live.py:20)",
    ]
    told = found.to_json()["ranks"][0]
    assert told["script"] == "train (live.py:20)" and told["inner"].startswith("all_reduce ")


def test_a_script_that_runs_as_a_module() -> None:
    (place,) = stacks(MODULE).gist
    assert place == "rank 0: forward (torch/nn/modules/linear.py:134), called by step (trainer/loop.py:88)"


@pytest.mark.parametrize(
    "text", ["", "Error: no such process", 'Thread 7 (idle): "MainThread"\n', "Thread 7\n  ?"]
)
def test_no_stack_no_place(text: str) -> None:
    found = stacks(text)
    assert found.gist == [] and found.to_json()["ranks"][0]["inner"] is None


def test_spans() -> None:
    assert [spans(x) for x in ([3], [1, 0], [0, 2, 3, 4, 7])] == ["3", "0-1", "0, 2-4, 7"]


def test_every_rank_is_on_the_first_screen() -> None:
    """At 80 columns the places come before the first stack, whatever the number of ranks."""
    found = stacks(*[WAITS] * 5, SLEEPS, *[WAITS] * 2)
    rows = ["".join(text for text, _role in row) for row in stacks_page(found, 78, UNICODE)]
    assert rows[0].strip() == "rank 5: train (live.py:26)" and "ranks 0-4, 6-7" in rows[1]
    assert all(len(row) <= 80 for row in rows)
    told = stack_lines(found)
    assert told[:2] == found.gist and sum(text.startswith("rank ") and "pid" in text for text in told) == 8
