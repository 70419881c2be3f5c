from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstui.runs import samples as module
from dstui.runs.samples import (
    GpuUse,
    HostUse,
    Peaks,
    RankUse,
    Sample,
    Sampler,
    _Tier,
    merge,
    rank_of,
    read_history,
    read_peaks,
    read_samples,
)


class Source:
    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.closed = False

    def sample(self) -> list[GpuUse]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        return answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process like a rank: RANK in its environment, 40 MiB in its memory, a busy core, a loader as child."""
    code = (
        "import subprocess, sys, time; x = b'1' * (40 << 20);"
        "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE);"
        "print('up', flush=True)\nwhile True: pass"
    )
    env = {**os.environ, "RANK": "3"}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_rank_its_children_and_the_gpu(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    from dstui.runs.processes import descendants

    source = Source([GpuUse(1, 0.5, 10 << 30, 80 << 30, 300.0, 700.0, 60.0, "")])
    sampler = Sampler(tmp_path, source=lambda: source, interval=0.01)
    pids = [rank.pid, *(p.pid for p in descendants(rank.pid)), os.getpid()]
    for _i in range(3):
        time.sleep(0.1)
        sampler.sample(pids)
    sampler.close()
    last = read_samples(tmp_path)[-1]
    assert last.gpus[0].memory_used == 10 << 30
    assert [r.rank for r in last.ranks] == [3]
    use = last.ranks[0]
    assert use.pid == rank.pid
    assert use.rss is not None and use.rss > 45 << 20
    assert use.cpu is not None and use.cpu > 0
    assert last.host.used and last.host.capacity and last.host.used < last.host.capacity
    assert last.host.disk and last.host.swap is not None
    peaks = read_peaks(tmp_path)
    assert peaks is not None
    assert peaks.gpu_used == {1: 10 << 30}
    assert peaks.rank_rss[3] >= use.rss
    assert peaks.rss_total == peaks.rank_rss[3]


def test_a_compiler_below_a_rank_is_not_the_rank_s_memory(tmp_path: Path) -> None:
    """Two cc1plus hold GiB while an op is built; measured beside predicted, they would look like a leak."""
    from dstui.runs.processes import descendants

    compiler = tmp_path / "cc1plus"
    compiler.symlink_to(os.path.realpath(sys.executable))
    child = "x = b'1' * (90 << 20); print('up', flush=True); import sys; sys.stdin.read()"
    code = (
        "import subprocess, sys;"
        f"p = subprocess.Popen([{str(compiler)!r}, '-S', '-c', {child!r}],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
        "p.stdout.readline(); print('up', flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "RANK": "0"}
    rank = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        sampler = Sampler(tmp_path, devices=())
        sampler.sample([rank.pid, *(p.pid for p in descendants(rank.pid))])
        sampler.close()
        assert rank.stdin is not None
        rank.stdin.close()
    last = read_samples(tmp_path)[-1]
    assert last.build is not None
    assert last.ranks[0].rss is not None and last.ranks[0].rss < 60 << 20


def test_a_broken_driver_leaves_a_gap_only(tmp_path: Path) -> None:
    source = Source(RuntimeError("GPU is lost"))
    sampler = Sampler(tmp_path, source=lambda: source, interval=0.01)
    time.sleep(0.1)
    sampler.sample([])
    assert sampler.problem is not None and "GPU is lost" in sampler.problem
    sampler.close()
    assert read_samples(tmp_path)[-1].gpus == ()


def test_no_gpus_asks_nobody(tmp_path: Path) -> None:
    def never() -> Source:
        raise AssertionError

    sampler = Sampler(tmp_path, devices=(), source=never)
    sampler.sample([])
    assert sampler.problem is None
    sampler.close()


def test_a_full_disk_tears_one_line_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(tmp_path, devices=())
    sampler.sample([])
    real = os.write

    def full(fd: int, data: bytes) -> int:
        real(fd, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    sampler.sample([])
    assert sampler.problem is not None and "space" in sampler.problem
    monkeypatch.undo()
    sampler.sample([])
    assert sampler.problem is None
    sampler.close()
    assert len(read_samples(tmp_path)) == 2


def test_tiers_are_bounded_and_history_spans_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIERS", (("1s", 1, 50), ("10s", 10, 50), ("60s", 60, 50)))
    tiers = [_Tier(tmp_path, *tier) for tier in module.TIERS]
    for i in range(3000):
        sample = Sample(1000.0 + i, host=HostUse(used=i, capacity=9999))
        for tier in tiers:
            tier.add(sample)
    for tier in tiers:
        tier.flush()
    for name, _s, length in module.TIERS:
        for path in (tmp_path / f"{name}.jsonl", tmp_path / f"{name}.old.jsonl"):
            if path.exists():
                assert len(path.read_text().splitlines()) <= length + 2
    history = read_history(tmp_path)
    times = [s.t for s in history]
    assert times == sorted(times)
    assert times[0] < 1100 and times[-1] == 3999.0
    assert len(history) < 300
    assert max(s.host.used or 0 for s in history) == 2999


def test_merge_keeps_the_largest_size_and_the_mean_of_the_rest() -> None:
    a = Sample(
        1.0, (GpuUse(0, 0.2, 100, 1000, 50.0, 700.0, 40.0, ""),), HostUse(5, 10), (RankUse(0, 9, 7, 1.0),)
    )
    b = Sample(
        2.0,
        (GpuUse(0, 0.4, 300, 1000, 150.0, 700.0, 50.0, "sw-thermal"),),
        HostUse(3, 10),
        (RankUse(0, 9, 6, 3.0),),
        build="cpu_adam",
    )
    m = merge([a, b])
    assert m.gpus[0] == GpuUse(0, pytest.approx(0.3), 300, 1000, 100.0, 700.0, 45.0, "sw-thermal")  # type: ignore[arg-type]
    assert (m.host.used, m.ranks[0].rss, m.ranks[0].cpu, m.build, m.t) == (5, 7, 2.0, "cpu_adam", 2.0)


def test_records_round_trip_and_later_columns_are_ignored() -> None:
    s = Sample(1.5, (GpuUse(0, 0.25),), HostUse(1, 2, 3, 0.5, 4, 5, 6, 7), (RankUse(1, 2, 3, 0.5),), build="")
    data = json.loads(json.dumps(s.to_json()))
    assert Sample.from_json(data) == s
    data["host"].append("new")
    data["gpus"][0].append(1)
    assert Sample.from_json(data) == s
    assert Sample.from_json({"schema_version": 1}) is None
    assert Peaks.from_json(json.loads(json.dumps(Peaks({0: 1}, {2: 3}, 4, 5).to_json()))) == Peaks(
        {0: 1}, {2: 3}, 4, 5
    )


def test_records_of_before_the_links_are_read() -> None:
    old = {"t": 1.0, "gpus": [[0, 0.5, 1, 2, 300.0, 700.0, 60.0, ""]], "host": [1, 2, 3, 0.5, 4], "ranks": []}
    sample = Sample.from_json(old)
    assert sample is not None
    assert sample.gpus == (GpuUse(0, 0.5, 1, 2, 300.0, 700.0, 60.0, ""),)
    assert sample.host == HostUse(1, 2, 3, 0.5, 4) and sample.host.swap is None
    assert sample.gpus[0].pcie_rx is None and sample.gpus[0].clock_sm is None


def test_clocks_and_links_through_the_file_and_the_slower_tiers() -> None:
    a = GpuUse(0, clock_sm=1000.0, clock_mem=3201.0, pcie_rx=2e9, pcie_tx=None, nvlink_rx=4e9)
    b = GpuUse(0, clock_sm=1980.0, clock_mem=3201.0, pcie_rx=4e9, pcie_tx=1e9, nvlink_rx=8e9)
    again = Sample.from_json(json.loads(json.dumps(merge([Sample(1.0, (a,)), Sample(2.0, (b,))]).to_json())))
    assert again is not None
    assert again.gpus == (
        GpuUse(0, clock_sm=1490.0, clock_mem=3201.0, pcie_rx=3e9, pcie_tx=1e9, nvlink_rx=6e9),
    )


def test_a_driver_that_hangs_leaves_a_gap_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(module, "GPU_STALE", 1e9)
    hang, asked = threading.Event(), threading.Event()

    class Hanging(Source):
        def sample(self) -> list[GpuUse]:
            if self.closed:
                asked.set()
                hang.wait()
            self.closed = True
            return [GpuUse(0, 0.5)]

    sampler = Sampler(tmp_path, source=Hanging, interval=0.01)
    assert asked.wait(30)
    sampler.sample([])
    monkeypatch.setattr(module, "GPU_STALE", 0.0)
    sampler.sample([])
    sampler.close()
    hang.set()
    first, second = read_samples(tmp_path)
    assert first.gpus == (GpuUse(0, 0.5),)
    assert second.gpus == () and second.host.used


def test_rank_of() -> None:
    assert rank_of({"RANK": "2"}) == 2
    assert rank_of({}) is None
    assert rank_of({"RANK": "x"}) is None


def test_the_sampler_costs_under_one_percent_of_a_core(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    gpus = [GpuUse(i, 0.5, 10 << 30, 80 << 30, 300.0, 700.0, 60.0, "") for i in range(8)]
    sampler = Sampler(tmp_path, source=lambda: Source(gpus), interval=1.0)
    sampler.sample([rank.pid])
    start = time.process_time()
    for _i in range(200):
        sampler.sample([rank.pid] * 8)
    spent = (time.process_time() - start) / 200
    sampler.close()
    assert spent < 0.01  # seconds a sample, one sample a second
