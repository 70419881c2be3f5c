"""Lamps: a level only with evidence, and unknown says what would light it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from dstui.facts.model import Facts, Gpu, Host
from dstui.runs.lamps import LEVELS, Lamp, Live, Said, lamps
from dstui.runs.samples import GpuUse, HostUse, Peaks, RankUse, Sample
from dstui.runs.stall import Stall
from dstui.runs.state import Progress
from dstui.runs.view import RunView
from dstui.units import GiB
from tests.run_tools import FakeRun

CARD = Gpu(0, memory_total=80 * GiB, pcie_generation_max=4, pcie_width=16)
FACTS = Facts(
    gpus=(CARD, dataclasses.replace(CARD, index=1)),
    host=Host(
        ram_total=512 * GiB,
        shm_total=64 * GiB,
        swap_total=0,
        swap_free=0,
        memlock_soft=8 << 20,
        ipc_lock=False,
    ),
)
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def stepped(**fields: Any) -> Progress:
    p = Progress(engine_step=30, loss=2.0)
    for name, value in fields.items():
        setattr(p, name, value)
    return p


def timed(fwd: float, bwd: float, step: float, reduce: float = 0.0) -> Progress:
    p = stepped()
    p.timed.append({"fwd": fwd, "bwd": bwd, "step": step, "bwd_allreduce": reduce})
    return p


def samples(
    used: tuple[float, ...] = (31.0, 31.0),
    busy: tuple[float, ...] = (0.9, 0.9),
    cores: tuple[float, ...] = (1.0, 1.0),
    host: float = 100.0,
    **gpu: Any,
) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            1000.0 + n,
            tuple(
                GpuUse(i, b, int(u * GiB), 80 * GiB, **gpu)
                for i, (u, b) in enumerate(zip(used, busy, strict=True))
            ),
            HostUse(int(host * GiB), 512 * GiB, shm=2 * GiB),
            tuple(RankUse(i, 50 + i, 4 * GiB, c) for i, c in enumerate(cores)),
        )
        for n in range(30)
    )


def live(p: Progress | None = None, **fields: Any) -> Live:
    values: dict[str, Any] = {
        "progress": p or stepped(),
        "config": {"zero_optimization": {"stage": 2}},
        "facts": FACTS,
        "samples": samples(),
        "peaks": Peaks(gpu_used={0: 31 * GiB, 1: 30 * GiB}, rank_rss={0: 4 * GiB, 1: 4 * GiB}),
        "stage": 2,
        "world": 2,
        **fields,
    }
    return Live(**values)


def one(n: int, state: Live) -> Lamp:
    found = lamps(state)
    assert [x.checkpoint for x in found] == [1, 2, 3, 4, 5]
    assert all(x.text and x.level in LEVELS for x in found)
    assert all(x.advice for x in found if x.level == "unknown"), found
    return found[n - 1]


def test_nothing_known_lights_nothing() -> None:
    found = lamps(Live(Progress()))
    assert {x.level for x in found} == {"unknown"}
    assert all(x.advice for x in found)


def prediction(device: float, params: float = 0.0, optimizer: float = 0.0) -> Mapping[str, Any]:
    def around(x: float) -> dict[str, int]:
        return {"low": int(0.95 * x * GiB), "expected": int(x * GiB), "high": int(1.05 * x * GiB)}

    return {
        "gpu": {
            "device": around(device),
            "phases": [{"phase": "step", "parts": {"params": int(params * GiB)}}],
        },
        "host": {"parts": {"optimizer": int(optimizer * GiB)}, "pinned": 3 * GiB, "peak": around(8)},
    }


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({}, "green", "GPU 0 held 31.0 of 80.0 GiB at most"),
        ({"p": Progress()}, "unknown", "after the first step"),
        ({"p": stepped(ooms=2)}, "red", "ran out of memory 2 times"),
        ({"p": stepped(flushes=3)}, "yellow", "3 flushes"),
        ({"peaks": Peaks(gpu_used={0: 79 * GiB})}, "yellow", "1.0 GiB are left"),
        ({"prediction": prediction(31)}, "green", "predicted 31.0 GiB"),
        ({"prediction": prediction(20)}, "yellow", "predicted were at most 21.0 GiB"),
        ({"prediction": prediction(31, params=14), "stage": 3}, "yellow", "stage 2 would fit: GPU memory 31.0 of 80.0"),
        ({"prediction": prediction(31, params=45), "stage": 3}, "green", "predicted"),
        ({"facts": Facts(gpus=()), "samples": (), "peaks": Peaks()}, "unknown", "no GPU here"),
    ],
)  # fmt: skip
def test_stage(fields: dict[str, Any], level: str, words: str) -> None:
    lamp = one(1, live(fields.pop("p", None), **fields))
    assert (lamp.level, words in lamp.text) == (level, True), lamp


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({}, "green", "nothing is offloaded, GPU memory 31.0 of 80.0 GiB"),
        ({"config": OFFLOAD}, "unknown", "busy for 90 %"),
        ({"config": OFFLOAD, "p": timed(0.1, 0.2, 0.1)}, "green", "takes 25 % of a step"),
        ({"config": OFFLOAD, "p": timed(0.1, 0.2, 0.3)}, "yellow", "takes 50 % of a step"),
        ({"config": OFFLOAD, "p": timed(0.1, 0.2, 0.9)}, "red", "takes 75 % of a step"),
        ({"config": OFFLOAD, "samples": samples(pcie_rx=24e9, pcie_tx=3e9)}, "yellow", "PCIe rx 24.0 GB/s (76 % of the link)"),
        ({"config": OFFLOAD, "samples": samples(pcie_rx=4e9, pcie_tx=3e9)}, "green", "PCIe rx 4.0 GB/s (13 %"),
        ({"config": OFFLOAD, "samples": samples(busy=(0.2, 0.2), cores=(8.0, 8.0))}, "yellow", "busy for 20 %"),
        ({"config": OFFLOAD, "prediction": prediction(31, optimizer=40)}, "yellow", "has room for the optimizer"),
        ({"config": OFFLOAD, "prediction": prediction(31, optimizer=90), "p": timed(0.1, 0.2, 0.1)}, "green", "25 %"),
        ({"config": OFFLOAD, "stall": Stall("offload", "DR202", 0.0, (0,))}, "red", "the CPU updates"),
        ({"config": None}, "unknown", "no DeepSpeed config"),
    ],
)  # fmt: skip
def test_offload(fields: dict[str, Any], level: str, words: str) -> None:
    lamp = one(2, live(fields.pop("p", None), **fields))
    assert (lamp.level, words in lamp.text) == (level, True), lamp


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({"asked_batch": (16, 2, 4), "p": stepped(samples_a_step=16)}, "green", "16 samples, as asked (16 = 2 x 4 x 2 ranks)"),
        ({"asked_batch": (None, 2, 4), "p": stepped(script_step=120)}, "green", "4 micro batches a step, as asked"),
        ({"asked_batch": (24, 2, 4)}, "red", "batch 24 is not 2 x 4 x 2 ranks"),
        ({"asked_batch": (16, 2, 4), "p": stepped(samples_a_step=4)}, "red", "counts 4 samples, 16 were asked for"),
        ({"asked_batch": (16, 2, 4), "p": timed(0.1, 0.5, 0.1, 0.35)}, "yellow", "reduces in each of 4 micro batches: 50 %"),
        ({"asked_batch": (16, 2, 4)}, "unknown", "16 = 2 x 4 x 2 ranks"),
        ({}, "unknown", "leaves the batch to the trainer"),
        ({"said": (Said("DS410", 3, "red", "ignored before 0.19.4"),)}, "red", "DS410 ignored"),
    ],
)  # fmt: skip
def test_accumulation(fields: dict[str, Any], level: str, words: str) -> None:
    lamp = one(3, live(fields.pop("p", None), **fields))
    assert (lamp.level, words in lamp.text) == (level, True), lamp


NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}}}


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({}, "green", "host RAM 100.0 of 512.0 GiB, ranks 8.0 GiB"),
        ({"prediction": prediction(31)}, "green", "about 3.0 GiB pinned"),
        ({"samples": samples(host=450)}, "yellow", "450.0 of 512.0"),
        ({"samples": samples(host=500)}, "red", "500.0 of 512.0"),
        ({"config": NVME, "release": "0.19.8"}, "yellow", "ulimit -l allows"),
        ({"config": NVME, "release": "0.19.3"}, "green", "host RAM"),
        ({"prediction": prediction(31), "peaks": Peaks(rank_rss={0: 11 * GiB})}, "yellow", "predicted were at most 8.4"),
        ({"samples": ()}, "unknown", "was not measured"),
    ],
)  # fmt: skip
def test_host(fields: dict[str, Any], level: str, words: str) -> None:
    lamp = one(4, live(fields.pop("p", None), **fields))
    assert (lamp.level, words in lamp.text) == (level, True), lamp


def test_tight_cgroup_and_full_shm() -> None:
    rows = tuple(dataclasses.replace(s, host=HostUse(31 * GiB, 64 * GiB, shm=2 * GiB)) for s in samples())
    assert one(4, live(samples=rows)).text.startswith("cgroup 31.0 of 64.0 GiB")
    rows = tuple(dataclasses.replace(s, host=HostUse(90 * GiB, 512 * GiB, shm=63 * GiB)) for s in samples())
    lamp = one(4, live(samples=rows))
    assert lamp.level == "red" and "/dev/shm 63.0 of 64.0 GiB" in lamp.text


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({"p": timed(0.2, 0.5, 0.1, 0.1)}, "green", "takes 13 % of a step"),
        ({"p": timed(0.2, 0.5, 0.1, 0.3)}, "yellow", "takes 38 % of a step"),
        ({"p": timed(0.2, 0.9, 0.1, 0.8)}, "red", "takes 67 % of a step"),
        ({"p": timed(0.2, 0.5, 0.1, 0.1), "samples": samples(nvlink_tx=120e9)}, "green", "NVLink 120 GB/s"),
        ({}, "unknown", "every GPU does its share (90 % busy)"),
        ({"samples": samples(busy=(0.95, 0.4))}, "yellow", "uneven: GPU 0 95 % busy, GPU 1 40 %"),
        ({"world": 1}, "green", "one rank"),
        ({"p": stepped(timeouts=1)}, "red", "1 collective timed out"),
        ({"stall": Stall("collective", "DR506", 0.0, (1,), how="sleep")}, "red", "rank 1"),
        ({"p": Progress()}, "unknown", "no step"),
        ({"cause": 5, "cause_text": "DR501 collective-timeout"}, "red", "DR501"),
    ],
)  # fmt: skip
def test_communication(fields: dict[str, Any], level: str, words: str) -> None:
    lamp = one(5, live(fields.pop("p", None), **fields))
    assert (lamp.level, words in lamp.text) == (level, True), lamp


def test_a_view_has_lamps_and_alerts_and_repeats_itself() -> None:
    run = FakeRun(8, now=1000.0)
    for _n in range(30):
        run.tick()
    view = RunView(run.run, clock=lambda: run.now)
    shot = view.poll()
    assert [x.level for x in shot.lamps] == ["green", "green", "unknown", "green", "unknown"]
    assert shot.alerts == () and len(shot.speeds) == 30 and shot.speed_unit == "tokens"
    assert view.poll() is shot
    run.log(f"step {run.step} loss nan", f"step {run.step} loss nan")
    assert [a.kind for a in view.poll().alerts] == ["loss-not-finite"]


def test_rules_speak_through_the_lamp_of_their_checkpoint() -> None:
    run = FakeRun(2, now=1000.0)
    run.run.config_path.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}'
    )
    manifest = run.run.manifest
    from dstui.runs.store import write_json

    write_json(run.run.manifest_path, {**manifest, "versions": {"deepspeed": "0.19.8"}})
    run.tick()
    lamp = RunView(run.run, clock=lambda: run.now).poll().lamps[1]
    assert lamp.level == "yellow" and lamp.text.startswith("DS301"), lamp


def test_samples_a_step_are_counted_from_one_row_a_poll() -> None:
    p = Progress(batch=32)
    for n in range(1, 5):
        p.csv("lr", [(32.0 * n, 0.1)], 1000.0 + n)
    assert p.samples_a_step == 32
    p.csv("lr", [(32.0 * 40, 0.1), (32.0 * 41, 0.1)], 1100.0)
    assert p.samples_a_step == 32


def test_ranks_that_waited_for_the_build_of_another_are_not_uneven() -> None:
    """Rank 0 compiled through the minute, a few steps ended it: nothing is known of their balance."""
    p = stepped()
    cpu = dataclasses.replace(FACTS, gpus=())
    uneven = live(
        p, facts=cpu, samples=tuple(dataclasses.replace(s, gpus=()) for s in samples(cores=(0.8, 0.1)))
    )
    assert "uneven: rank 0" in lamps(uneven)[4].text
    p.seen["step"] = 1027.0
    lamp = lamps(dataclasses.replace(uneven))[4]
    assert "uneven" not in lamp.text and lamp.level in ("unknown", "green")
