"""What measured runs leave for the next estimate: kept file by file, applied only as far as it was measured."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstui import __version__
from dstui.estimate.correction import Calibration, Record
from dstui.estimate.inputs import Training
from dstui.estimate.memory import estimate, grid, settings_of
from dstui.estimate.model import load_model
from dstui.estimate.result import Estimate
from dstui.estimate.subject import fingerprint, from_json, settings_class, settings_summary, subject
from dstui.facts.describe import describe
from dstui.facts.model import Facts, Interpreter
from dstui.runs import calibration
from dstui.units import GiB

SHAPE = load_model("qwen2.5-0.5b")
TRAINING = Training(micro_batch=2, seq=1024, hold_logits=False)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}
STAGE_3 = {**CONFIG, "zero_optimization": {"stage": 3}}
OFFLOAD = {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
RELEASE = "0.19.8"
WHATS = ("allocated", "reserved", "device")


def machine(gpus: str = "2x80GiB", torch: str = "2.9.0") -> Facts:
    facts = describe(gpus=gpus, ram="512GiB")
    cards = tuple(dataclasses.replace(g, name="NVIDIA H200") for g in facts.gpus or ())
    it = Interpreter("/venv/bin/python", "option", "3.11", {"torch": torch, "deepspeed": RELEASE})
    return dataclasses.replace(facts, source="detected", driver="570.1", gpus=cards, interpreters=(it,))


FACTS = machine()


def ask(config: dict[str, Any] = CONFIG, known: Calibration | None = None, facts: Facts = FACTS) -> Estimate:
    return estimate(SHAPE, TRAINING, config, facts, release=RELEASE, calibration=known)


def record(
    run: str = "abc2-1129-2000",
    config: dict[str, Any] = CONFIG,
    factor: float = 1.03,
    facts: Facts = FACTS,
    seen: bool = True,
    **measured: float | None,
) -> Record:
    """A run that measured ``factor`` times what is predicted."""
    raw = estimate(SHAPE, TRAINING, config, facts, release=RELEASE)
    s = settings_of(SHAPE, TRAINING, config, facts, release=RELEASE)
    assert raw.gpu.allocated and raw.gpu.reserved and raw.gpu.device and raw.host.peak
    predicted = {
        "allocated": raw.gpu.allocated.expected,
        "reserved": raw.gpu.reserved.expected,
        "device": raw.gpu.device.expected,
        "host": raw.host.peak.expected,
    }
    found: dict[str, float | None] = {k: round(v * factor) for k, v in predicted.items()}
    found["overhead"] = 2 * GiB
    return Record(
        run=run,
        at=time.time(),
        kind="trial",
        dstui=__version__,
        settings=settings_class(s),
        summary=settings_summary(s),
        measured={**found, **measured},
        predicted=dict(predicted),
        phases=("load", "init", "forward", "backward", "step", "save"),
        seen=seen,
    )


def test_what_was_measured_replaces_the_same_question() -> None:
    r = record()
    plain, known = ask(), ask(known=Calibration((r,), __version__))
    for what in ("allocated", "reserved"):
        before, after = getattr(plain.gpu, what), getattr(known.gpu, what)
        assert after.expected == r.value(what)
        assert after.low <= after.expected <= after.high
        assert after.high - after.low < before.high - before.low  # it was measured, so less is open
    assert known.gpu.device and known.gpu.reserved
    assert known.gpu.device.expected == known.gpu.reserved.expected + 2 * GiB
    assert known.host.peak and known.host.peak.expected == r.value("host")
    said = " ".join(known.assumptions)
    assert "corrected by trial abc2-1129-2000 of" in said
    assert "allocated x1.030" in said and "reserved x1.030" in said and "host x1.030" in said
    assert not any("corrected" in a for a in plain.assumptions)


@settings(max_examples=30, deadline=None)
@given(
    factors=st.lists(st.floats(0.7, 1.5), min_size=1, max_size=4),
    seen=st.booleans(),
)
def test_never_narrower_than_what_was_measured(factors: list[float], seen: bool) -> None:
    records = tuple(record(f"run{i}", factor=f, seen=seen) for i, f in enumerate(factors))
    e = ask(known=Calibration(records, __version__))
    plain = ask()
    for what in WHATS[:2]:
        found, before = getattr(e.gpu, what), getattr(plain.gpu, what)
        values = [r.value(what) or 0 for r in records]
        assert found.low <= min(values) and max(values) <= found.high
        assert found.low <= found.expected <= found.high
        if not seen:  # shorter data may have been what made it small
            assert found.expected >= before.expected
            assert found.low <= before.low and found.high >= before.high
    assert e.gpu.allocated and e.gpu.reserved and e.gpu.device
    assert e.gpu.allocated.expected <= e.gpu.reserved.expected <= e.gpu.device.expected
    assert e.host.peak
    hosts = [r.value("host") or 0 for r in records]
    assert e.host.peak.low <= min(hosts) and e.host.peak.high >= max(hosts)


def test_another_placement_takes_only_what_does_not_depend_on_it() -> None:
    known = Calibration((record(),), __version__)
    plain, near = ask(STAGE_3), ask(STAGE_3, known)
    assert near.gpu.allocated == plain.gpu.allocated and near.gpu.reserved == plain.gpu.reserved
    assert near.gpu.device and near.gpu.reserved
    assert near.gpu.device.expected == near.gpu.reserved.expected + 2 * GiB
    assert "corrected" not in " ".join(near.assumptions)
    assert any("beside PyTorch's memory the device holds 2.0 GiB" in a for a in near.assumptions)
    with_offload, before = ask(OFFLOAD, known), ask(OFFLOAD)
    assert with_offload.host.peak == before.host.peak  # an offload's buffers are no interpreter
    alone = ask(STAGE_3, known, machine("1x80GiB"))
    assert alone.gpu.device == ask(STAGE_3, None, machine("1x80GiB")).gpu.device  # no NCCL there


def test_an_interpreter_moves_the_host_and_narrows_nothing() -> None:
    raw = ask(STAGE_3)
    assert raw.host.peak
    low = record(factor=1.0)
    low = dataclasses.replace(
        low, measured={**low.measured, "host": (low.value("host") or 0) - 2 * 300 * 2**20}
    )
    e = ask(STAGE_3, Calibration((low,), __version__))
    assert e.host.peak and e.host.peak.expected == raw.host.peak.expected - 2 * 300 * 2**20
    assert e.host.peak.low <= raw.host.peak.low and e.host.peak.high >= raw.host.peak.high
    other = ask(STAGE_3, Calibration((low,), "some other release"))
    assert other.host.peak == raw.host.peak  # its prediction is not ours


def test_a_phase_that_was_not_reached_is_still_predicted() -> None:
    plain = ask()
    top = max(plain.gpu.phases, key=lambda p: p.total)
    r = record(factor=0.5)
    short = dataclasses.replace(r, phases=tuple(p for p in r.phases if p != top.phase))
    e = ask(known=Calibration((short,), __version__))
    assert e.gpu.allocated and plain.gpu.allocated
    assert e.gpu.allocated.expected == top.total  # not the half that the other phases took
    assert e.gpu.allocated.high >= plain.gpu.allocated.high


def test_one_cell_of_the_grid_is_exact() -> None:
    known = Calibration((record(),), __version__)
    cells = grid(SHAPE, TRAINING, CONFIG, FACTS, release=RELEASE, calibration=known)
    exact = [
        (c.stage, c.offload_optimizer, c.offload_param)
        for c in cells
        if any("corrected" in a for a in c.estimate.assumptions)
    ]
    assert exact == [(2, "none", "none")]


def test_round_trip_and_who_is_recognised() -> None:
    r = record()
    path = calibration.save(r, SHAPE, calibration.machine_of(FACTS))
    assert path is not None and path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "NVIDIA H200" in text and SHAPE.name in text  # a person can see what it is about
    known = calibration.load(FACTS, SHAPE)
    assert known is not None and known.records == (r,)
    renamed = dataclasses.replace(SHAPE, name="mine", source="/data/mine", dtype="float32")
    assert calibration.load(FACTS, renamed) is not None  # the model is its dimensions
    assert calibration.load(FACTS, dataclasses.replace(SHAPE, layers=3)) is None
    assert calibration.load(machine(torch="2.8.0"), SHAPE) is None
    assert calibration.load(FACTS, SHAPE, release="0.18.0") is None
    assert calibration.load(dataclasses.replace(FACTS, driver="580.2"), SHAPE) is None
    assert (
        calibration.load(describe(gpus="2x80GiB", ram="512GiB"), SHAPE) is None
    )  # nobody measured a description
    assert calibration.load(machine("1x80GiB"), SHAPE) is not None


def test_a_machine_that_is_not_known_is_never_recognised() -> None:
    for unknown in (
        dataclasses.replace(FACTS, gpus=None),
        dataclasses.replace(FACTS, driver=None),
        dataclasses.replace(FACTS, interpreters=()),
    ):
        assert calibration.save(record(), SHAPE, calibration.machine_of(unknown)) is None
        assert calibration.load(unknown, SHAPE) is None


def saved(run: str = "abc2-1129-2000") -> Path:
    path = calibration.save(record(run), SHAPE, calibration.machine_of(FACTS))
    assert path is not None
    return path


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "null", '{"schema_version": 1}', '{"schema_version": 2, "record": {}}', "\x00\xff" * 100,
        '{"schema_version": 1, "record": {"run": 5}}',
    ],
)  # fmt: skip
def test_a_damaged_file_costs_one_record(damage: str) -> None:
    good, bad = saved(), saved("bad2-1129-2000")
    bad.write_text(damage)
    known = calibration.load(FACTS, SHAPE)
    assert known is not None and [r.run for r in known.records] == [good.stem[26:]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allocated", -5),
        ("allocated", "much"),
        ("host", 1e300),
        ("reserved", True),
        ("device", [1]),
        ("host", 1),
        ("host", 10**15),
        ("allocated", 0),
        ("reserved", float("nan")),
    ],
)
def test_figures_that_no_machine_has_are_not_used(field: str, value: object) -> None:
    path = saved()
    data = json.loads(path.read_text())
    data["record"]["measured"][field] = value
    path.write_text(json.dumps(data))
    assert calibration.load(FACTS, SHAPE) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("at", 1e300), ("at", float("nan")), ("at", -1e18), ("at", "today"), ("run", "\x1b[31mX"), ("run", "")],
)
def test_a_record_that_cannot_be_named_is_not_used(field: str, value: object) -> None:
    path = saved()
    data = json.loads(path.read_text())
    data["record"][field] = value
    path.write_text(json.dumps(data))
    assert calibration.load(FACTS, SHAPE) is None


def test_writers_at_the_same_time_lose_nothing() -> None:
    machine_ = calibration.machine_of(FACTS)
    records = [record(f"run{i}") for i in range(16)]
    threads = [threading.Thread(target=calibration.save, args=(r, SHAPE, machine_)) for r in records]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    known = calibration.load(FACTS, SHAPE)
    assert known is not None and {r.run for r in known.records} == {r.run for r in records}
    assert not [p for p in calibration.folder().iterdir() if p.suffix != ".json"]  # no temporary file is left


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST", 5)
    for i in range(8):
        path = saved(f"run{i}")
        os.utime(path, (1000 + i, 1000 + i))
    saved("last")
    left = sorted(p.stem[26:] for p in calibration.folder().glob("*.json"))
    assert left == ["last", "run4", "run5", "run6", "run7"]


def test_a_home_that_cannot_be_written_or_read_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(
        "DSTUI_STATE_HOME", str(tmp_path / "file")
    )  # a folder cannot be made there, even by root
    assert calibration.load(FACTS, SHAPE) is None
    with pytest.raises(OSError):
        calibration.save(record(), SHAPE, calibration.machine_of(FACTS))


def test_the_question_survives_json() -> None:
    t = dataclasses.replace(TRAINING, lora_rank=8, lora_targets=("q_proj", "v_proj"))
    again = from_json(json.loads(json.dumps(subject(SHAPE, t))))
    assert again is not None and again[1] == t and fingerprint(again[0]) == fingerprint(SHAPE)
    assert again[0] == SHAPE
    for bad in (
        None,
        5,
        {},
        {"shape": {}},
        {"shape": {"name": 1}, "training": {}},
        {"shape": [], "training": []},
    ):
        assert from_json(bad) is None
    grown = subject(SHAPE, t)
    grown["shape"]["later_field"] = 1
    assert from_json(grown) is not None


def test_the_wizard_says_what_was_measured(tmp_path: Path) -> None:
    from dstui.session import Session

    def panel() -> tuple[Session, Estimate]:
        session = Session(FACTS, cwd=tmp_path)
        session.set("model", "qwen2.5-0.5b")
        found = session.report().estimate
        assert found is not None
        return session, found

    session, plain = panel()
    asked = from_json(session._subject())
    assert asked is not None and not any("corrected" in a for a in plain.assumptions)
    config = session._compose(effective=True).data
    s = settings_of(
        *asked, config, session._state.used or FACTS, release=RELEASE, world_size=session._state.world
    )
    assert plain.gpu.allocated
    measured = round(plain.gpu.allocated.expected * 1.1)
    made = dataclasses.replace(
        record(allocated=measured), settings=settings_class(s), summary=settings_summary(s)
    )
    assert calibration.save(made, asked[0], calibration.machine_of(FACTS)) is not None
    _session, known = panel()
    assert known.gpu.allocated and known.gpu.allocated.expected == measured
    assert any("corrected by trial" in a and "allocated x1.1" in a for a in known.assumptions)
