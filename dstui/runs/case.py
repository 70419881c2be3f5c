"""All that is known about one run that ended or hangs, and the shapes of an answer about it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dstui.runs import prices
from dstui.runs.causes import BY_CODE
from dstui.runs.events import Event, Failure
from dstui.runs.repairs import Repair
from dstui.runs.tail import Line

Certainty = Literal["certain", "likely", "possible"]
SURVIVED = 3
"""Steps after a traceback from which on it is no cause: more than the ranks' buffers can hold back."""
BUFFER = 1 << 14
"""Python holds back 8 KiB of a redirected stdout: steps that are printed after a traceback may be older than it."""


@dataclass(frozen=True)
class Evidence:
    """``line``: from 1, None when it was not counted or the evidence is no line of a file."""

    file: str
    line: int | None
    text: str


@dataclass(frozen=True)
class Named:
    """A cause as it applies to this run."""

    code: str
    certainty: Certainty
    detail: str = ""
    """One translated sentence with the run's own figures."""

    @property
    def name(self) -> str:
        return BY_CODE[self.code].name

    @property
    def checkpoint(self) -> int | None:
        return self.place or BY_CODE[self.code].checkpoint

    place: int | None = None
    """Overrides the checkpoint of the cause (a refused key belongs to its own)."""


@dataclass(frozen=True)
class Diagnosis:
    """The answer. ``others``: causes that are less likely; ``cause`` None: nothing tells."""

    outcome: str
    cause: Named | None
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Repair, ...] = ()
    others: tuple[Named, ...] = ()

    def to_json(self) -> dict[str, Any]:
        def named(n: Named) -> dict[str, Any]:
            return {
                "code": n.code,
                "name": n.name,
                "checkpoint": n.checkpoint,
                "certainty": n.certainty,
                "message": BY_CODE[n.code].heading,
                "detail": n.detail,
            }

        return {
            "schema_version": 1,
            "outcome": self.outcome,
            "cause": None if self.cause is None else named(self.cause),
            "evidence": [{"file": e.file, "line": e.line, "text": e.text} for e in self.evidence],
            "fixes": [
                {"title": f.title, "edits": [dict(e) for e in f.edits], "price": f.price} for f in self.fixes
            ],
            "others": [named(n) for n in self.others],
        }


@dataclass
class Case:
    """All that is known about one run."""

    outcome: str
    file: str
    events: list[Event]
    tail: list[Line] = field(default_factory=list)
    config: Mapping[str, Any] | None = None
    exit: Mapping[str, Any] | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    number: Any = None
    steps: list[int] | None = None
    """Offsets of the lines that report a step."""

    @property
    def failures(self) -> list[Failure]:
        """Tracebacks, without those after which training went on.

        What nobody catches ends its process: where training went on after several of that form, they are data (samples
        that are printed), and so are the last ones, unless a launcher reports an end.
        """
        found = [e.values["failure"] for e in self.events if e.kind == "error"]
        if len(found) > SURVIVED and not self.of("rank_exit"):
            fatal = [not caught(f) and f.rank is None for f in found]
            if sum(self.survived(f.offset) for f, dies in zip(found, fatal, strict=True) if dies) >= SURVIVED:
                found = [f for f, dies in zip(found, fatal, strict=True) if not dies]
        if not self.of("rank_exit") and self.outcome != "failed":
            # their process went on, to a good end for all we know
            found = [f for f in found if not f.aside and not by_the_way(f)]
        return [
            f for f in found if not (self.survived(f.offset) and (caught(f) or self._far_behind(f.offset)))
        ]

    def _far_behind(self, offset: int) -> bool:
        """Whether more was written after this place than a process that ends can still have had in its buffer."""
        return bool(self.steps) and self.steps[-1] - offset > BUFFER  # type: ignore[index]

    def survived(self, offset: int) -> bool:
        """Whether training went on after what the log says here: it was caught, or no failure at all."""
        if self.steps is None:
            self.steps = sorted(e.offset for e in self.events if e.kind == "step")
        return len(self.steps) - bisect_right(self.steps, offset) >= SURVIVED

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.kind == kind]

    def line(self, offset: int, text: str) -> Evidence:
        return Evidence(self.file, self.number(offset) if self.number else None, text.strip()[:600])

    @property
    def rank_code(self) -> int | None:
        """Return code of the rank that ended first, negative for a signal."""
        if self.exit is not None:
            code = self.exit.get("rank_code")
            return code if isinstance(code, int) else None
        codes = [e.values["code"] for e in self.of("rank_exit")]
        return next((c for c in codes if c), None)

    @property
    def stepped(self) -> bool:
        return any(
            e.kind == "step" and (e.values.get("loss") is not None or e.values.get("step", 0) > 0)
            for e in self.events
        )


@dataclass(frozen=True)
class Finding:
    """A cause that competes with others."""

    cause: Named
    evidence: tuple[Evidence, ...]
    fixes: tuple[Repair, ...] = ()
    weight: int = 0
    """The heaviest wins."""


_ABORTED_AT_EXIT = "terminate called without an active exception"
"""What libstdc++ prints when an interpreter that ends leaves a thread of torch behind (then SIGABRT)."""


def ended_by_exception(case: Case) -> bool:
    """The record tells of a rank that ended as Python does after an exception."""
    code = case.rank_code
    if code is None or case.outcome != "failed":
        return False
    aborted = code == -6 and any(line.text.strip() == _ABORTED_AT_EXIT for line in case.tail)
    return code > 0 or aborted


def recorded(case: Case, *, agrees: bool) -> Certainty:
    """``certain`` only where the supervisor's record says the same as the log."""
    return "certain" if case.exit is not None and agrees else "likely"


def caught(f: Failure) -> bool:
    """Whether somebody printed this traceback and went on: it begins where it was caught, not at the main module.
    torch's prefix of the rank is put only before what nobody caught."""
    if f.aside:
        return True
    if f.rank is not None and "rank" in f.source:
        return False
    return not f.frames or f.frames[0].function not in ("<module>", "_run_module_as_main")


_SERVICES = re.compile(r"/(?:wandb|swanlab|mlflow|comet_ml|clearml|trackio|aim|tensorboard|neptune)/")


def by_the_way(f: Failure) -> bool:
    """Printed by a service that only watches the training, in a thread of its own."""
    return bool(f.frames) and caught(f) and all(_SERVICES.search(x.file) for x in f.frames)


def first_line(text: str) -> str:
    """The first line, of bearable length."""
    return text.splitlines()[0][:400] if text else ""


def deepspeed_release(case: Case) -> str | None:
    """The run's DeepSpeed, from the manifest or from what it printed."""
    release = prices.release_of(case.manifest)
    if release is None:
        printed = [
            m.group(1)
            for e in case.of("init")
            for m in [re.search(r"info: version=(\d[\d.]*\d)", e.text)]
            if m
        ]
        release = printed[0] if printed else None
    return release


def world_of(case: Case) -> int | None:
    """Number of ranks on all nodes, where the manifest tells."""
    world = case.manifest.get("world_size")
    return world if isinstance(world, int) else None


SPOKEN_LINES = 20_000
"""Lines at the end of a log that are searched for messages."""
