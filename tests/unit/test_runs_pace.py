"""Step times from each witness, collectives from DeepSpeed's running sums, and how sure a difference is."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import pace
from dstui.runs.ab import Plan
from dstui.runs.compare import Column, compare, verdict
from dstui.runs.compared import sentence
from dstui.runs.pace import Pace, read, student, warmup_of
from dstui.runs.samples import RankUse, Sample
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir, write_json
from dstui.runs.view import RunView

BEGIN = 1_700_000_000.0


def stamp(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) + f",{round(t % 1 * 1000) % 1000:03d}"


THROUGHPUT = (
    f"[{stamp(BEGIN)}] [INFO] [timer.py:1:stop] epoch=0/micro_step={{n}}/global_step={{n}}, "
    "RunningAvgSamplesPerSec=30, CurrSamplesPerSec=40.0, MemAllocated=1.0GB, MaxMemAllocated=2.0GB"
)


def step_line(step: int, t: float) -> str:
    return f"[{stamp(t)}] [INFO] [logging.py:1:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.1], mom=[(0.9, 0.999)]"


def make(
    folder: Path,
    lines: list[tuple[float, str]],
    *,
    probe: list[dict[str, Any]] | None = None,
    csv: list[tuple[float, int]] | None = None,
    config: dict[str, Any] | None = None,
    length: float = 100.0,
    batch: int = 8,
) -> RunDir:
    """A run whose log got each line at its time (seconds after the start); a sample a second says how long it was."""
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics" / "csv").mkdir(parents=True)
    write_json(
        folder / "manifest.json",
        {"schema_version": 1, "id": folder.name, "name": folder.name, "created_at": BEGIN, "started_at": BEGIN,
         "world_size": 2, "command": [], "host": "x", "versions": {"deepspeed": "0.19.8"}, "launcher": {"pid": 1}},
    )  # fmt: skip
    write_json(folder / "config.json", {"train_batch_size": batch, **(config or {})})
    write_json(
        folder / "exit.json",
        {"schema_version": 1, "outcome": "finished", "code": 0, "ranks": [], "ended_at": BEGIN + length},
    )
    (folder / "out.log").write_text("".join(text + "\n" for _t, text in lines))
    rows = [f"{step * batch},0.1\n" for _t, step in csv or ()]
    (folder / "metrics/csv/Train_Samples_lr.csv").write_text("step,lr\n" + "".join(rows))
    samples = []
    for t in range(int(length) + 1):
        log = sum(len(text.encode()) + 1 for at, text in lines if at <= t)
        metrics = 8 + sum(len(r) for (at, _s), r in zip(csv or (), rows, strict=True) if at <= t)
        ranks = (RankUse(0, 5, 2 << 30, 1.0), RankUse(1, 6, 1 << 30, 1.0))
        samples.append(Sample(BEGIN + t, ranks=ranks, sizes=(log, metrics if csv else 0)))
    text = "".join(json.dumps(s.to_json()) + "\n" for s in samples)
    (folder / "samples/1s.jsonl").write_text(text)
    if probe is not None:
        (folder / "probe").mkdir()
        (folder / "probe/rank-0.jsonl").write_text("".join(json.dumps(e) + "\n" for e in probe))
    return RunDir(folder)


def test_stamps_tell_to_the_millisecond(tmp_path: Path) -> None:
    """Steps of 0.25 s, which samples 1 s apart could not tell; the slow first ones are left out."""
    at, lines = 10.0, []
    for step in range(1, 61):
        at += 3.0 if step < 5 else 0.25
        lines.append((at, step_line(step, BEGIN + at)))
    found = read(make(tmp_path / "a", lines))
    assert (found.source, found.warmup, found.total) == ("stamps", 10, 60)
    assert found.step_time == pytest.approx(0.25, abs=0.001) and len(found.steps) == 50
    assert found.resolution < 1e-4 and found.first_at == pytest.approx(BEGIN + 13.0)


def test_a_line_every_ten_steps_is_a_mean_of_ten(tmp_path: Path) -> None:
    lines = [(10 + n, step_line(10 * n, BEGIN + 10 + n)) for n in range(1, 9)]
    found = read(make(tmp_path / "a", lines))
    assert found.step_time == pytest.approx(0.1) and {i.steps for i in found.steps} == {10}


@pytest.mark.parametrize(
    ("source", "line", "seconds"),
    [
        ("script", "step {n} loss 2.5 step time 0.2", 0.2),
        ("throughput", THROUGHPUT, 8 / 40),
        (
            "timers",
            "step {n} loss 2.5\ntime (ms) | fwd: 50.00 | bwd: 100.00 | bwd_inner: 80.00 | bwd_allreduce: 30.00 | step: 50.00",
            0.2,
        ),
    ],
)
def test_other_witnesses(tmp_path: Path, source: str, line: str, seconds: float) -> None:
    lines = [(10 + n / 5, line.format(n=n)) for n in range(1, 41)]
    found = read(make(tmp_path / "a", lines))
    assert found.source == source and found.step_time == pytest.approx(seconds)
    assert found.reduction == (pytest.approx(0.15) if source == "timers" else None)


def test_the_trainer_s_last_line_where_nothing_else_tells(tmp_path: Path) -> None:
    lines = [
        (20.0, "{'loss': '2.5', 'learning_rate': '0.1', 'epoch': '0.5', 'global_step/max_steps': '20/40'}"),
        (30.0, "{'loss': '2.4', 'learning_rate': '0.1', 'epoch': '1.0', 'global_step/max_steps': '40/40'}"),
        (
            31.0,
            "{'train_runtime': '20.0', 'train_samples_per_second': '16.0', 'train_steps_per_second': '2.0'}",
        ),
    ]
    found = read(make(tmp_path / "a", lines))
    assert (found.source, found.step_time) == ("trainer", 0.5)


def test_samples_are_the_last_resort_and_say_how_coarse(tmp_path: Path) -> None:
    """A silent release: only csv_monitor's file grows."""
    csv = [(10 + 0.3 * n, n) for n in range(1, 281)]
    found = read(make(tmp_path / "a", [(1.0, "hello")], csv=csv))
    assert found.source == "samples" and found.total == 280
    assert found.step_time == pytest.approx(0.3, rel=0.05)
    assert found.resolution == pytest.approx(1 / sum(i.steps for i in found.steps))
    assert all(i.steps * i.seconds >= 19 for i in found.steps)


def test_the_probe_wins(tmp_path: Path) -> None:
    lines = [(10 + n, f"step {n} loss 2.5 step time 9") for n in range(1, 41)]
    probe = [{"event": "step", "t": BEGIN + 10 + n, "step": n, "seconds": 0.5, "by": "cuda", "tokens": 100}
             for n in range(1, 41)]  # fmt: skip
    found = read(make(tmp_path / "a", lines, probe=probe))
    assert (found.source, found.step_time) == ("probe", 0.5)
    assert statistics.median(found.tokens) == 400  # two ranks of 100 tokens in half a second


def test_the_last_step_is_the_probe_s_where_the_script_says_less(tmp_path: Path) -> None:
    """A script that counts from 0, and whose line is seen only by the next sample."""
    lines = [(10.5 + n, f"step {n} loss 2.5") for n in range(8)]
    probe = [
        {"event": "step", "t": BEGIN + 9.5 + n, "step": n, "seconds": 0.5, "by": "cuda"} for n in range(1, 9)
    ]
    assert read(make(tmp_path / "a", lines, probe=probe)).total == 8


def test_timers_count_the_steps_where_no_other_line_does(tmp_path: Path) -> None:
    """0.18.9 with wall_clock_breakdown: two lines a step and no step line (recorded from a real run)."""
    lines = [
        (10 + n, text)
        for n in range(1, 13)
        for text in (
            "[Rank 0] time (ms) | fwd_microstep: 0.91 | bwd_microstep: 9.17 | bwd_allreduce_microstep: 7.92",
            "[Rank 0] time (ms) | fwd: 1.00 | bwd: 9.00 | bwd_inner: 1.23 | bwd_allreduce: 5.00 | step: 10.00",
        )
    ]
    found = read(make(tmp_path / "a", lines))
    assert found.reduction == pytest.approx(0.25) and found.source == "timers"
    assert found.step_time == pytest.approx(0.02) and len(found.steps) == 11


def comm(op: str, milliseconds: float) -> str:
    return f"[{stamp(BEGIN)}] [INFO] [logging.py:1:log_dist] [Rank 0] comm op: {op} | time (ms): {milliseconds:.2f} | msg size: 32.0 KB | algbw (Gbps): 0.01 | busbw (Gbps): 0.01"


@pytest.mark.parametrize("sums", [True, False], ids=["running sums", "single times"])
def test_collectives(tmp_path: Path, sums: bool) -> None:
    """Each step gathers 2 x 20 ms and reduces 10 ms of its 200 ms; DeepSpeed prints the sums so far."""
    lines: list[tuple[float, str]] = []
    total = {"all_gather_into_tensor": 0.0, "reduce_scatter_tensor": 0.0}
    for n in range(1, 31):
        at = 10 + n / 5
        for op, ms in (("all_gather_into_tensor", 19.0), ("all_gather_into_tensor", 21.0), ("reduce_scatter_tensor", 10.0)):  # fmt: skip
            total[op] += ms
            lines.append((at, comm(op, total[op] if sums else ms)))
        lines += [(at, comm("barrier", 5000.0 * n)), (at, step_line(n, BEGIN + at))]
    found = read(make(tmp_path / "a", lines))
    assert found.communication == pytest.approx(0.25)
    assert found.operations == pytest.approx({"all_gather_into_tensor": 0.04, "reduce_scatter_tensor": 0.01})
    lamp = RunView(RunDir(tmp_path / "a")).poll().lamps[4]
    assert (lamp.checkpoint, lamp.level) == (5, "green")
    assert "collectives take 25 % of a step" in lamp.text


def test_how_much_is_warm_up() -> None:
    assert [warmup_of(n) for n in (0, 1, 3, 20, 49, 50, 5000)] == [1, 1, 1, 4, 9, 10, 10]


# ---- how sure


def steps_of(folder: Path, name: str, seconds: list[float], **options: Any) -> RunDir:
    at, lines = 10.0, []
    for n, s in enumerate(seconds, 1):
        at += s
        lines.append((at, step_line(n, BEGIN + at)))
        lines.append((at, f"step {n} loss {3 - n / 100:.4f}"))
    return make(folder / name, lines, length=at + 5, **options)


def noisy(mean: float, seed: int, count: int = 80) -> list[float]:
    rng = random.Random(seed)
    return [round(mean * (1 + rng.gauss(0, 0.03)), 3) for _n in range(count)]


def test_noise_is_called_noise_and_a_difference_a_difference(tmp_path: Path) -> None:
    base = steps_of(tmp_path, "base", noisy(0.5, 1))
    same = steps_of(tmp_path, "same", noisy(0.5, 7))
    fast = steps_of(tmp_path, "fast", noisy(0.4, 3))
    found = compare([base, same, fast])
    a, b = found.verdicts
    assert (a.outcome, a.method) == ("noise", "steps")
    assert sentence(a, found.labels).startswith(
        "same: the difference in time a sample to base is within noise (95"
    )
    assert b.outcome == "faster" and b.ratio == pytest.approx(0.8, rel=0.03)
    assert b.high - b.low < 0.06


def test_pairs_use_the_t_interval(tmp_path: Path) -> None:
    """Checked by hand: log ratios 0.10 and 0.12 give 0.11 +- 12.706 * 0.01414 / sqrt(2)."""
    runs = {
        n: steps_of(tmp_path, n, [t] * 40)
        for n, t in {"a1": 0.5, "b1": 0.5 * math.exp(0.10), "a2": 0.6, "b2": 0.6 * math.exp(0.12)}.items()
    }
    columns = [Column((runs["a1"], runs["a2"]), "A"), Column((runs["b1"], runs["b2"]), "B")]
    found = compare(columns, paired=True)
    (v,) = found.verdicts
    half = 12.706 * statistics.stdev([0.10, 0.12]) / math.sqrt(2)
    assert (v.method, v.count) == ("pairs", 2)
    assert math.log(v.ratio) == pytest.approx(0.11, abs=0.003)
    assert math.log(v.high) - math.log(v.ratio) == pytest.approx(half, abs=0.03)
    assert v.outcome == "noise"  # two pairs alone prove nothing of this size
    unpaired = compare(columns).verdicts[0]
    assert unpaired.method == "runs" and unpaired.high > v.high
    assert found.figures[0].runs == ("a1", "a2") and found.labels == ("A", "B")


def test_a_coarse_measurement_widens_the_interval(tmp_path: Path) -> None:
    csv = [[(10 + s * n, n) for n in range(1, 100)] for s in (0.50, 0.502)]
    runs = [make(tmp_path / str(i), [(1.0, "x")], csv=c, length=70) for i, c in enumerate(csv)]
    found = compare(runs)
    assert found.verdicts[0].outcome == "noise"
    assert any("1 s apart" in w for w in found.warnings)


def test_batches_count_a_sample(tmp_path: Path) -> None:
    """Twice the batch in 1.5 of the time is faster."""
    a = steps_of(tmp_path, "a", noisy(0.4, 1), batch=8)
    b = steps_of(tmp_path, "b", noisy(0.6, 2), batch=16)
    found = compare([a, b])
    assert found.verdicts[0].per == "sample" and found.verdicts[0].ratio == pytest.approx(0.75, rel=0.05)
    assert found.figures[1].samples_per_second == pytest.approx(16 / 0.6, rel=0.05)


def test_figures_of_unlike_runs_agree(tmp_path: Path) -> None:
    """The rate of a column is that of its step time, however far apart its runs are."""
    runs = [steps_of(tmp_path, str(n), noisy(s, n), batch=8) for n, s in enumerate((0.1, 0.9))]
    figures = compare([Column(tuple(runs)), runs[0]]).figures[0]
    assert figures.step_time == pytest.approx(0.5, rel=0.05)
    assert figures.samples_per_second == pytest.approx(8 / (figures.step_time or 0))


def test_loss_at_equal_steps(tmp_path: Path) -> None:
    a = steps_of(tmp_path, "a", [0.2] * 100)
    b = steps_of(tmp_path, "b", [0.2] * 60)
    found = compare([a, b])
    assert found.equal_step == 60 and found.loss_gap == 0
    assert found.figures[0].loss_at == found.figures[1].loss_at == pytest.approx(3 - 57.5 / 100 + 0, abs=0.01)
    assert found.figures[0].loss == 2.0 and found.figures[1].loss == 2.4


def test_no_step_times_no_verdict(tmp_path: Path) -> None:
    a = make(tmp_path / "a", [(1.0, "hello")])
    b = make(tmp_path / "b", [(1.0, "hello")])
    found = compare([a, b])
    assert (
        found.verdicts == () and found.figures[0].step_time is None and found.figures[0].host_peak == 3 << 30
    )
    assert verdict([], [], 1) is None


def test_student_is_never_too_small() -> None:
    assert (
        student(1) == 12.706
        and student(11) == student(10)
        and student(1000) == 2.042
        and student(0) == 12.706
    )


def test_the_bootstrap_covers_the_truth() -> None:
    """Of 40 made-up pairs of equal pace, at most a few may look different at 95 %."""
    rng = random.Random(5)
    wrong = 0
    for _n in range(40):
        a, b = ([1 + rng.gauss(0, 0.05) for _s in range(60)] for _side in range(2))
        draws = random.Random(0)
        low, high = pace.within(
            math.log(y / x)
            for x, y in zip(pace.medians(a, draws, 300), pace.medians(b, draws, 300), strict=True)
        )
        wrong += not low <= 0 <= high
    assert wrong <= 6


def test_orders() -> None:
    def turns(order: str, pairs: int) -> str:
        spec = RunSpec(script="x.py")
        plan = Plan(specs=(spec, spec), labels=("A", "B"), pairs=pairs, order=order)
        return "".join("AB"[kind] for _pair, kinds in plan.turns() for kind in kinds)

    assert turns("abba", 3) == "ABBAAB" and turns("abab", 3) == "ABABAB" and turns("abba", 1) == "AB"


def test_a_pace_is_empty_without_steps(tmp_path: Path) -> None:
    found: Pace = read(make(tmp_path / "a", [(1.0, "hello")]))
    assert (found.source, found.step_time, found.spread, found.steps) == (None, None, None, ())


def test_a_large_log_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A median of thousands of steps, from a bounded number of bytes; no interval bridges two pieces."""
    monkeypatch.setattr(pace, "WHOLE", 1 << 20)
    monkeypatch.setattr(pace, "END", 64 << 10)
    monkeypatch.setattr(pace, "PIECE", 8 << 10)
    lines = [
        (1.0, step_line(n, BEGIN + n / 2) + f"\nstep {n} loss {3 - n / 1e5:.5f} {'x' * 80}")
        for n in range(1, 20001)
    ]
    run = make(tmp_path / "a", lines, length=20)
    read_bytes = []
    whole = pace.LogFile.blocks

    def blocks(self: Any, start: int, end: int) -> Any:
        for at, data in whole(self, start, end):
            read_bytes.append(len(data))
            yield at, data

    monkeypatch.setattr(pace.LogFile, "blocks", blocks)
    found = read(run)
    assert found.source == "stamps" and found.step_time == pytest.approx(0.5) and found.total == 20000
    assert 2000 < len(found.steps) < 10000 and {i.steps for i in found.steps} == {1}
    assert sum(read_bytes) < run.out_log.stat().st_size / 3


def test_losses_over_the_same_stretch(tmp_path: Path) -> None:
    """One logs every step, the other every seventh: hardly a step in common."""
    a = make(tmp_path / "a", [(n / 10, f"step {n} loss {4 - n / 100:.4f}") for n in range(1, 101)], length=20)
    b = make(
        tmp_path / "b", [(n / 10, f"step {n} loss {4 - n / 100:.4f}") for n in range(93, 101, 7)], length=20
    )
    found = compare([a, b])
    assert found.equal_step == 100 and found.loss_gap is None
    assert found.figures[0].loss_at == pytest.approx(3.045) and found.figures[1].loss_at == pytest.approx(
        3.035
    )
