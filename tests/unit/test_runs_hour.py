"""An hour of a talkative run, accelerated: 36,000 lines and 3,600 samples of 8 GPUs through one RunView."""

from __future__ import annotations

import os
import pickle
import time

import pytest

from dstui.runs.state import PACES, SERIES_LENGTH, TIMED
from dstui.runs.view import LOG_LINES, SAMPLES, RunView
from dstui.tui.terminal import UNICODE
from dstui.tui.text import line_width
from dstui.tui.widgets.curves import CurvesPage
from dstui.tui.widgets.dashboard import overview
from dstui.tui.widgets.health import health_page
from tests.run_tools import FakeRun

TICKS, LINES = 3600, 10


def test_an_hour_of_ten_lines_a_second_is_held_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    run = FakeRun(8, total=40_000, now=time.time() - TICKS)
    view = RunView(run.run, clock=lambda: run.now)
    page = CurvesPage()
    sizes: list[int] = []
    for tick in range(TICKS):
        run.tick()
        run.log(
            *[
                f"[Rank 0] time (ms) | fwd: {100 + n}.5 | bwd: 210.1 | bwd_allreduce: 30.2 | step: 41.3"
                for n in range(7)
            ],
            f"{{'loss': '{3 - tick / TICKS:.4f}', 'grad_norm': '1.25', 'learning_rate': '1e-05', 'epoch': '{tick / 1e4}'}}",
        )
        shot = view.poll()
        if tick % 60 == 59:
            for rows in (
                overview(shot, 80, 21, UNICODE, run.now),
                health_page(shot, 78, UNICODE),
                page.rows(shot, 80, 21, UNICODE),
            ):
                assert all(line_width(r) <= 80 for r in rows)
            sizes.append(len(pickle.dumps((shot, view.progress))))
    assert run.run.out_log.stat().st_size > TICKS * LINES * 40
    p = view.progress
    assert (shot.step, shot.alerts) == (TICKS, ())
    assert [lamp.level for lamp in shot.lamps][4] == "green", "the parts of a step are known"
    for curve in (shot.losses, shot.lrs, shot.step_times, shot.grad_norms, shot.speeds):
        assert 0 < len(curve) < SERIES_LENGTH
    assert len(shot.log) <= LOG_LINES and len(view._samples) == SAMPLES
    assert len(p.paces) <= PACES and len(p.timed) == TIMED
    # Memory of the last minute is that of the tenth: a series is between half full and full.
    assert max(sizes[10:]) <= 1.6 * min(sizes[10:])
    assert max(sizes) < 400_000
