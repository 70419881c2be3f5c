"""The probe in a run's folder, and what it wrote there. Light: a monitor reads it at every tick."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from dstui.estimate.result import PHASES
from dstui.runs.command import Command
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir
from dstui.units import GiB

SCHEMA_VERSION = 1
FOLDER = "probe"
STEPS = 5
"""Optimizer steps that a measured run or a trial takes unless told otherwise: the first makes the optimizer's states
and warms caches, the second and third are like all later ones; two more show the spread of step times."""
_IDLE_CARD = GiB
"""More than this on a card before the run is somebody else's, so the card's figure is not the run's."""
_MOST_BYTES = 16 << 20


def as_trial(spec: RunSpec, steps: int = STEPS) -> RunSpec:
    """``spec`` as a run of ``steps`` optimizer steps that exists to be measured."""
    return dataclasses.replace(spec, measure=steps, trial=True, name=spec.name or "trial")


def equip(command: Command, spec: RunSpec, run: RunDir, environ: Mapping[str, str]) -> Command:
    """``command`` with the probe in it, where ``spec`` asks for one: two files, and PYTHONPATH longer by one folder."""
    if spec.measure is None:
        return command
    source = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    settings = {
        "schema_version": SCHEMA_VERSION,
        "steps": spec.measure,
        "end": spec.trial,
        "talk": _talks(command),
    }
    files = {
        **command.files,
        f"{FOLDER}/sitecustomize.py": source,
        f"{FOLDER}/settings.json": json.dumps(settings) + "\n",
    }
    before = command.env.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
    path = os.pathsep.join([str(run.path / FOLDER), *([before] if before else [])])
    return dataclasses.replace(command, files=files, env={**command.env, "PYTHONPATH": path})


def _talks(command: Command) -> bool:
    """Whether the run's config asks comms_logger for a line an operation."""
    try:
        config = hjson.loads(command.files.get("config.json") or "{}")
    except ValueError:
        return False
    comms = config.get("comms_logger") if isinstance(config, Mapping) else None
    return isinstance(comms, Mapping) and bool(comms.get("enabled")) and bool(comms.get("verbose"))


# -- what was measured -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Bytes and seconds. GPU figures are the worst rank's, host figures the sum over the ranks of the fullest node."""

    ranks: int = 0
    steps: int = 0
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Phase -> ``allocated reserved device host pinned``, those that could be measured."""
    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    overhead: int | None = None
    """Device bytes beside PyTorch's reserve: context, NCCL, and the driver's own share."""
    host: int | None = None
    pinned: int | None = None
    step_time: float | None = None
    """Median of the steps after the first, of the slowest rank."""
    retries: int = 0
    """Times that the allocator gave its cache back to make room."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """What the probe saw of the training (``Probe.describe``)."""
    troubles: tuple[str, ...] = ()
    by: str = "probe"
    """``probe``, or ``samples`` for the sampler's and the log's figures of a run without one."""

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["seen"] = {k: v for k, v in self.seen.items() if k not in ("config", "ds_config")}
        return data


def read_probe(run: RunDir) -> Measured | None:
    """What the probe wrote so far; None where no rank wrote anything."""
    try:
        files = sorted((run.path / FOLDER).glob("rank-*.jsonl"))
    except OSError:
        return None
    ranks = [r for r in map(_read_rank, files) if r is not None]
    return _together(ranks) if ranks else None


@dataclass
class _Rank:
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    node: str | None = None
    """Of a run on several nodes: which of them."""
    overhead: int | None = None
    retries: int = 0
    seen: dict[str, Any] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def highest(self, what: str) -> int | None:
        """Of training; what a rank's RAM holds while it saves is told apart, as it is in a prediction."""
        names = [p for p in self.phases if what != "host" or p != "save"]
        return max((self.phases[p][what] for p in names if what in self.phases[p]), default=None)


def _read_rank(path: Path) -> _Rank | None:
    rank = _Rank()
    try:
        with path.open("rb") as f:
            lines = f.read(_MOST_BYTES).splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            data = json.loads(line)
            _take(rank, data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # the last line of a rank that was killed
    if rank.overhead is not None:
        for figures in rank.phases.values():
            if "reserved" in figures:  # also what was given back again within the phase was on the card
                figures["device"] = figures["reserved"] + rank.overhead
    return rank if rank.phases or rank.troubles else None


_COUNTERS = {"allocated": "allocated", "reserved": "reserved", "rss_peak": "host", "pinned": "pinned"}


def _take(rank: _Rank, data: Mapping[str, Any]) -> None:
    event = data["event"]
    if event == "phase":
        into = rank.phases.setdefault(str(data["phase"]), {})
        for key, name in _COUNTERS.items():
            if key in data:
                into[name] = max(into.get(name, 0), int(data[key]))
        if "card" in data and int(data["card_before"]) <= _IDLE_CARD:
            beside = int(data["card"]) - int(data["reserved_now"])
            rank.overhead = max(rank.overhead or 0, beside)
        rank.retries = max(rank.retries, int(data.get("retries", 0)))
    elif event == "step":
        rank.steps = max(rank.steps, int(data["step"]))
        rank.times[int(data["step"])] = float(data["seconds"])
    elif event == "start":
        rank.node = data.get("node")
    elif event == "model":
        rank.seen = {k: v for k, v in data.items() if k not in ("event", "t")}
    elif event == "end":
        rank.steps = max(rank.steps, int(data["steps"]))
    elif event == "trouble":
        rank.troubles.append(f"{data['where']}: {data['error']}")


def _together(ranks: list[_Rank]) -> Measured:
    phases: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys([*PHASES, *(p for r in ranks for p in r.phases)]):
        found = [r.phases[name] for r in ranks if name in r.phases]
        into: dict[str, int] = {}
        for what in ("allocated", "reserved", "device"):
            values = [f[what] for f in found if what in f]
            if values:
                into[what] = max(values)
        for what in ("host", "pinned"):
            sums: dict[str | None, int] = {}
            for r in ranks:
                if what in r.phases.get(name, {}):
                    sums[r.node] = sums.get(r.node, 0) + r.phases[name][what]
            if sums:
                into[what] = max(sums.values())
        if into:
            phases[name] = into

    def worst(what: str) -> int | None:
        return max((n for r in ranks if (n := r.highest(what)) is not None), default=None)

    def total(what: str) -> int | None:
        sums: dict[str | None, int] = {}
        for r in ranks:
            n = r.highest(what)
            if n is None:
                return None
            sums[r.node] = sums.get(r.node, 0) + n
        return max(sums.values(), default=None)

    times = [
        statistics.median(later)
        for r in ranks
        if (later := [s for n, s in r.times.items() if n > 1] or list(r.times.values()))
    ]
    return Measured(
        ranks=len(ranks),
        steps=min(r.steps for r in ranks),
        phases=phases,
        allocated=worst("allocated"),
        reserved=worst("reserved"),
        device=worst("device"),
        overhead=max((r.overhead for r in ranks if r.overhead is not None), default=None),
        host=total("host"),
        pinned=total("pinned"),
        step_time=max(times, default=None),
        retries=max(r.retries for r in ranks),
        seen=ranks[0].seen,
        troubles=tuple(dict.fromkeys(t for r in ranks for t in r.troubles)),
    )
