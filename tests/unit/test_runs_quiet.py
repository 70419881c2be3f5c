"""The supervisor's ear: when a silence is worth a look."""

from __future__ import annotations

from collections.abc import Sequence

from dstui.runs import store
from dstui.runs.quiet import Ear
from dstui.runs.samples import Sample
from dstui.runs.stall import Stall
from dstui.runs.store import RunDir

STALL = Stall("collective", "DR506", 0.0)


class Looks:
    def __init__(self, answer: Stall | None) -> None:
        self.answer = answer
        self.asked: list[tuple[float, tuple[float, ...]]] = []

    def __call__(self, run: RunDir, heard: float, gaps: Sequence[float]) -> Stall | None:
        self.asked.append((heard, tuple(gaps)))
        return self.answer


def ear(answer: Stall | None) -> tuple[Ear, Looks]:
    looks = Looks(answer)
    return Ear(store.create({}), looks), looks


def test_a_run_that_goes_on_is_never_looked_at() -> None:
    listening, looks = ear(STALL)
    for t in range(3600):
        assert not listening.hear(Sample(float(t), sizes=(t // 10, t // 5)))
    assert looks.asked == []


def test_silence_is_looked_at_after_ten_usual_gaps_and_named_once() -> None:
    listening, looks = ear(STALL)
    for t in range(200):
        listening.hear(Sample(float(t), sizes=(0, t // 8)))  # a step every 8 s
    changes = [t for t in range(200, 400) if listening.hear(Sample(float(t), sizes=(0, 24)))]
    assert changes == [192 + 80]
    assert looks.asked == [(192.0, (8.0,) * 24)] and listening.stall is STALL
    assert listening.hear(Sample(500.0, sizes=(0, 25))) and listening.stall is None


def test_a_log_that_is_written_to_is_no_step() -> None:
    listening, looks = ear(STALL)
    for t in range(60):
        listening.hear(Sample(float(t), sizes=(t, t)))
    for t in range(60, 200):  # a watchdog prints, nothing steps
        listening.hear(Sample(float(t), sizes=(t, 59)))
    assert listening.stall is STALL and len(looks.asked) == 1


def test_a_run_without_step_files_is_heard_by_its_log() -> None:
    listening, looks = ear(None)
    for t in range(60):
        listening.hear(Sample(float(t), sizes=(t, 0)))
    for t in range(60, 60 + 3600):
        listening.hear(Sample(float(t), sizes=(59, 0)))
    assert 5 <= len(looks.asked) <= 25  # ever more rarely
    assert listening.looks == len(looks.asked)


def test_nothing_is_said_without_sizes() -> None:
    listening, looks = ear(None)
    for t in range(20):
        assert not listening.hear(Sample(float(t)))
    assert looks.asked == []
