from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import view as view_module
from dstui.runs.events import Event
from dstui.runs.processes import here, identify
from dstui.runs.samples import GpuUse, HostUse, Peaks, RankUse, Sample
from dstui.runs.state import Phase, Progress, Series, batch_of, idle, spinning, steps_asked
from dstui.runs.store import RunDir, write_json
from dstui.runs.view import RunView

LOGS = Path(__file__).parent.parent / "data" / "logs"
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
}


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def make_run(tmp_path: Path, **manifest: Any) -> RunDir:
    """A run of this very process: alive as long as the test is."""
    path = tmp_path / "abc2-1129-1920"
    for name in ("samples", "metrics", "requests"):
        (path / name).mkdir(parents=True)
    place, own = here(), identify(os.getpid())
    assert own is not None
    me = {"pid": own.pid, "start_time": own.start}
    data: dict[str, Any] = {
        "schema_version": 1,
        "id": path.name,
        "name": "demo",
        "created_at": time.time() - 20,
        "started_at": time.time() - 19,
        "world_size": 2,
        "command": ["deepspeed", "train.py", "--steps", "40"],
        "host": place.host,
        "boot_id": place.boot_id,
        "pid_namespace": place.pid_namespace,
        "supervisor": me,
        "launcher": me,
    }
    data.update(manifest)
    write_json(path / "manifest.json", data)
    write_json(path / "config.json", CONFIG)
    (path / "out.log").write_bytes(b"")
    return RunDir(path)


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(text)


def add_sample(run: RunDir, sample: Sample) -> None:
    append(run.samples_dir / "1s.jsonl", json.dumps(sample.to_json()) + "\n")


def test_from_launch_to_the_end(tmp_path: Path) -> None:
    run, clock = make_run(tmp_path, launcher=None, started_at=None), Clock()
    view = RunView(run, clock=clock)
    shot = view.poll()
    assert shot.phase is not None and shot.phase.name == "preflight"

    own = identify(os.getpid())
    assert own is not None
    manifest = run.manifest
    write_json(
        run.manifest_path,
        {**manifest, "started_at": clock.now, "launcher": {"pid": own.pid, "start_time": own.start}},
    )
    clock.now += 3
    shot = view.poll()
    assert shot.state == "running"
    assert shot.phase is not None and shot.phase.name == "launch"

    add_sample(run, Sample(clock.now, ranks=(RankUse(0, 7, 1 << 30, 0.9),), host=HostUse(1 << 30, 8 << 30)))
    shot = view.poll()
    assert shot.phase is not None and shot.phase.name == "loading"
    assert shot.ranks[0].rss == 1 << 30
    clock.now += 1
    for i in range(5):
        add_sample(run, Sample(clock.now + i, ranks=(RankUse(0, 7, 1 << 30, 0.9),), build="cpu_adam"))
    clock.now += 5
    shot = view.poll()
    assert shot.phase == Phase("building", pytest.approx(clock.now - 5, abs=0.1), "cpu_adam")  # type: ignore[arg-type]
    add_sample(run, Sample(clock.now, ranks=(RankUse(0, 7, 1 << 30, 0.9),)))
    append(
        run.out_log,
        "[2026-11-29 18:00:00,250] [INFO] [logging.py:1:log_dist] [Rank 0] step=0, skipped=0, lr=[0.1], mom=[0.9]\n",
    )
    shot = view.poll()
    assert shot.phase is not None and shot.phase.name == "first-step"

    for step in range(1, 5):
        append(run.out_log, f"step {step} loss {5 - step}.5 lr 0.1 tokens/s 100\n")
        append(run.metrics_dir / "csv" / "Train_Samples_lr.csv", f"{step * 32},0.1\n")
        clock.now += 2
        shot = view.poll()
    assert shot.phase is None
    assert (shot.step, shot.total, shot.loss, shot.lr) == (4, 40, 1.5, 0.1)
    assert shot.losses == ((1, 4.5), (2, 3.5), (3, 2.5), (4, 1.5))
    assert shot.step_time == pytest.approx(2.0)
    assert shot.eta == pytest.approx(72.0)
    assert shot.batch == 32
    assert shot.stage == 3
    assert shot.log[-1] == "step 4 loss 1.5 lr 0.1 tokens/s 100"

    write_json(
        run.exit_path,
        {
            "schema_version": 1,
            "outcome": "finished",
            "code": 0,
            "ended_at": clock.now,
            "ranks": [{"rank": 0, "code": 0}],
        },
    )
    shot = view.poll()
    assert shot.state == "finished" and shot.over
    assert shot.ending is not None and shot.ending.text == "finished after 4 steps"
    assert shot.eta is None
    assert shot.ranks[0].code == 0


def test_a_poll_without_news_reads_nothing_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path), Clock()
    append(run.out_log, (LOGS / "ok.log").read_text())
    append(run.metrics_dir / "csv" / "Train_Samples_lr.csv", "step,lr\n32,0.1\n64,0.1\n")
    add_sample(run, Sample(clock.now, host=HostUse(1, 2)))
    view = RunView(run, clock=clock)
    first = view.poll()
    second = view.poll()
    assert first is second
    opened: list[str] = []
    real = os.open

    def spy(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    monkeypatch.setattr(view_module.RunView, "_build", lambda *a: pytest.fail("built again"))
    clock.now += 0.5
    assert view.poll() is first
    assert opened == []
    fresh = RunView(run, clock=clock)
    monkeypatch.undo()
    assert fresh.poll() == first  # a second watcher sees the same


def test_joining_a_run_that_ended_long_ago(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append(run.out_log, (LOGS / "raise.log").read_text())
    write_json(
        run.exit_path,
        {
            "schema_version": 1,
            "outcome": "failed",
            "code": 1,
            "rank_code": 1,
            "first_rank": 1,
            "ranks": [{"rank": 0, "code": -15}, {"rank": 1, "code": 1}],
        },
    )
    shot = RunView(run).poll()
    assert shot.state == "failed"
    assert shot.loss is not None
    end = shot.ending
    assert end is not None
    assert (end.cause, end.certainty) == ("DR710", "certain")
    assert "row 17" in end.evidence[0]
    assert [r.code for r in shot.ranks] == [-15, 1]


def test_the_trainers_bar_counts_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, command=["deepspeed", "hf.py", "--max_steps", "6"])
    run.out_log.write_bytes((LOGS / "hf-ok.log").read_bytes())
    shot = RunView(run).poll()
    assert (shot.step, shot.total) == (6, 6)
    assert len(shot.losses) == 6
    assert [x for x, _y in shot.losses] == [1, 2, 3, 4, 5, 6]
    assert shot.grad_norm is not None
    assert not any("1/6 [" in line for line in shot.log)  # drawn over


def test_a_large_log_is_joined_in_bounded_time_with_its_whole_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path, command=["deepspeed", "train.py"])
    with run.out_log.open("w") as f:
        f.write("[2026-11-29 18:00:00,250] [INFO] [launch.py:170:main] dist_world_size=2\n")
        for i in range(1, 400_001):
            f.write(f"step {i} loss {400_000 / i:.4f} lr 0.1 and some more words to make the line longer\n")
    start = time.perf_counter()
    shot = RunView(run).poll()
    assert time.perf_counter() - start < 5.0
    assert shot.step == 400_000
    assert shot.world_size == 2
    xs = [x for x, _y in shot.losses]
    assert xs == sorted(xs)
    assert xs[0] < 10_000 and xs[-1] > 390_000
    assert max(b - a for a, b in itertools.pairwise(xs)) < 40_000


def test_prediction_beside_measurement(tmp_path: Path) -> None:
    prediction = {
        "gpu": {"device": {"low": 9, "expected": 10, "high": 12}, "allocated": None},
        "host": {"peak": {"low": 90, "expected": 100, "high": 110}},
    }
    run = make_run(tmp_path, prediction=prediction)
    write_json(
        run.samples_dir / "peaks.json", Peaks(gpu_used={0: 11, 1: 12}, rank_rss={0: 60, 1: 50}).to_json()
    )
    found = {c.what: c for c in RunView(run).poll().comparisons}
    assert found["device"].measured == 12
    assert found["device"].ratio == pytest.approx(0.2)
    assert found["host"].measured == 110
    assert "allocated" not in found


def test_a_peak_is_never_below_what_is_in_use_now(tmp_path: Path) -> None:
    """peaks.json is written every few seconds, samples every second."""
    run = make_run(tmp_path)
    write_json(run.samples_dir / "peaks.json", Peaks(rank_rss={0: 50}, host_used=500).to_json())
    now = time.time()
    record = Sample(now, host=HostUse(used=600, capacity=900), ranks=(RankUse(0, 1, 60, 0.5),))
    (run.samples_dir / "1s.jsonl").write_text(json.dumps(record.to_json()) + "\n")
    shot = RunView(run).poll()
    assert (shot.host.used, shot.host_peak) == (600, 600)
    assert [(r.rss, r.rss_peak) for r in shot.ranks] == [(60, 60)]


def test_silence_is_no_stall(tmp_path: Path) -> None:
    run, clock = make_run(tmp_path), Clock()
    view = RunView(run, clock=clock)
    view.poll()
    clock.now += 3600
    assert view.poll().state == "running"


def progress_until(now: float) -> Progress:
    p = Progress()
    for step in range(1, 6):
        p.apply(Event("step", 0, {"step": step, "loss": 1.0, "source": "script"}), now - 400 + step)
    return p


def samples_of(now: float, cpu: float = 0.01, wait: str | None = None, **gpu: Any) -> list[Sample]:
    gpus = (GpuUse(0, **gpu),) if gpu else ()
    ranks = (RankUse(0, 1, 1, cpu, 0.0, wait), RankUse(1, 2, 1, cpu, 0.0, wait))
    return [Sample(now - 59 + i, gpus=gpus, ranks=ranks) for i in range(59)]


def test_a_stall_needs_dead_ranks() -> None:
    now = 1_000_000.0
    p = progress_until(now)
    found = p.stall(now, samples_of(now))
    assert found is not None and (found.kind, found.since) == ("idle", now - 395)
    early = now - 300
    assert p.stall(early, samples_of(early)) is None  # not long enough
    assert p.stall(now, samples_of(now, cpu=0.9)) is None  # tokenizing, evaluating, ...
    assert p.stall(now, []) is None  # nobody looked
    waiting = samples_of(now, utilisation=1.0, power=120.0, power_limit=700.0)
    spun = p.stall(now, waiting)
    assert spun is not None and spun.kind == "collective"  # NCCL kernels that spin
    working = samples_of(now, utilisation=1.0, power=500.0, power_limit=700.0)
    assert p.stall(now, working) is None
    assert Progress().stall(now, samples_of(now)) is None  # never reported a step


def test_idle_and_spinning_need_figures() -> None:
    assert not idle(Sample(0.0))
    assert not spinning(Sample(0.0))
    assert not spinning(Sample(0.0, gpus=(GpuUse(0, utilisation=1.0),)))


def test_the_engine_counts_optimizer_steps_and_the_script_micro_steps() -> None:
    p = Progress(batch=32)
    for micro in range(8):
        p.apply(Event("step", 0, {"step": micro, "loss": 2.0, "source": "script"}), 10.0 + micro)
    p.csv("lr", [(32.0, 0.1), (64.0, 0.2), (96.0, 0.3), (128.0, 0.4)], 20.0)
    assert p.step == 4
    assert p.lrs.points[-1] == (4, 0.4)


def engine_line(p: Progress, step: int, now: float) -> None:
    p.apply(Event("step", 0, {"step": step, "source": "deepspeed"}, time=now), now)


def test_a_script_s_counter_of_micro_batches_gives_neither_total_nor_time_to_go() -> None:
    """16 micro batches a step: `152/1024` beside the engine's step 10 is no share of the run."""
    p = Progress()
    for micro in range(0, 160, 8):
        p.apply(
            Event("step", 0, {"step": micro, "total": 1024, "loss": 2.0, "source": "script"}), 10.0 + micro
        )
    assert (p.step, p.total_steps) == (152, 1024)  # its own units, all there is
    engine_line(p, 10, 170.0)
    assert (p.step, p.total_steps, p.eta) == (10, None, None)


def test_a_script_s_counter_of_optimizer_steps_gives_the_total() -> None:
    p = Progress()
    for step in range(1, 40):
        p.apply(Event("step", 0, {"step": step, "total": 60, "loss": 2.0, "source": "script"}), 10.0 + step)
        if step % 10 == 0:
            engine_line(p, step, 10.0 + step)
    assert (p.step, p.total_steps) == (30, 60)


def test_the_curve_goes_on_where_the_script_counts_each_epoch_anew() -> None:
    p = Progress()
    at = 10.0
    for epoch in range(3):
        for i in range(0, 100, 10):
            at += 1.0
            values = {"epoch": float(epoch), "step": i, "total": 100, "loss": at, "source": "script"}
            p.apply(Event("step", 0, values), at)
    xs = [x for x, _y in p.losses.points]
    assert xs == [float(x) for x in range(0, 300, 10)]
    assert p.total_steps is None  # that of one epoch


def test_a_bar_over_the_loader_is_not_the_optimizer_s_step() -> None:
    p = Progress()
    for done in range(200):
        p.apply(Event("progress", 0, {"desc": "", "done": done, "total": 1024}), 10.0 + done)
    engine_line(p, 10, 300.0)
    assert (p.step, p.total_steps) == (10, None)


def test_the_batch_is_learned_from_the_metrics() -> None:
    p = Progress()
    p.csv("lr", [(24.0, 0.1), (48.0, 0.1), (72.0, 0.1)], 5.0)
    assert (p.batch, p.step) == (24, 3)


def test_a_bar_of_one_epoch_gives_its_loss_but_no_total() -> None:
    p = Progress()
    for done in range(3):
        p.apply(
            Event("progress", 0, {"desc": "Epoch 1", "done": done, "total": 50, "loss": 3.0 - done}),
            5.0 + done,
        )
    assert (p.loss, p.total_steps, p.step) == (1.0, None, None)
    assert [y for _x, y in p.losses.points] == [3.0, 2.0, 1.0]
    assert p.stepped


def test_stamps_give_the_step_time_and_the_first_step_does_not_count() -> None:
    p = Progress()
    for step, at in ((0, 100.0), (1, 160.0), (2, 162.0), (3, 164.0)):
        p.apply(Event("step", 0, {"step": step, "source": "deepspeed", "lr": 0.1}, time=at), 500.0)
    assert p.step_time == pytest.approx(2.0)


def test_resuming_rewrites_the_curve() -> None:
    s = Series()
    for x in (1, 2, 3, 4):
        s.add(x, float(x))
    s.add(3, 30.0)
    assert s.points == ((1, 1.0), (2, 2.0), (3, 30.0))


def test_series_stay_bounded_and_keep_both_ends() -> None:
    s = Series(64)
    for x in range(10_000):
        s.add(x, float(x))
    assert len(s) < 64
    assert s.points[0][0] == 0
    assert s.points[-1][0] > 9_000


def test_words_of_the_command_line_and_config() -> None:
    assert steps_asked(["a", "--max_steps=7"]) == 7
    assert steps_asked(["a", "--steps", "9"]) == 9
    assert steps_asked(["a", "--max_steps", "-1"]) is None
    assert batch_of({"train_batch_size": 64}, None) == 64
    assert batch_of({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8) == 64
    assert batch_of({"train_micro_batch_size_per_gpu": "auto"}, 8) is None


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path) -> None:
    """An hour back: what was sampled "later" would keep every new figure from the screen for that hour."""
    run, clock = make_run(tmp_path), Clock()
    view = RunView(run, clock=clock)
    for i in range(20):
        add_sample(run, Sample(clock.now + i, ranks=(RankUse(0, 7, 1 << 30, 0.9),)))
    clock.now += 20
    assert view.poll().ranks[0].rss == 1 << 30
    clock.now -= 3600
    for i in range(3):
        add_sample(run, Sample(clock.now + i, ranks=(RankUse(0, 7, 2 << 30, 0.9),)))
    clock.now += 3
    assert view.poll().ranks[0].rss == 2 << 30
    assert RunView(run, clock=clock).poll().ranks[0].rss == 2 << 30, "and for who joins then"
    clock.now += 86400 * 30
    add_sample(run, Sample(clock.now, ranks=(RankUse(0, 7, 3 << 30, 0.9),)))
    assert view.poll().ranks[0].rss == 3 << 30
