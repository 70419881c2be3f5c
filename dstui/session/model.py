"""What a front end sees of the wizard: steps, fields, the live report. Frozen; no widget, no terminal.

The TUI and ``dstui init`` render these; neither knows what a field means. Texts are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dstui.estimate.inputs import ModelShape
from dstui.estimate.result import Estimate
from dstui.i18n import N_, _
from dstui.rules.diagnostic import FileReport, Finding

Kind = Literal["choice", "multi", "int", "float", "size", "text", "path", "bool"]
Engine = Literal["demo", "plain", "hf", "llamafactory"]


@dataclass(frozen=True)
class Step:
    """One page of the wizard. ``checkpoint`` 1-5: which of the five checkpoints it settles, if any."""

    id: str
    _title: str
    checkpoint: int | None
    _signal: str

    @property
    def title(self) -> str:
        return _(self._title)

    @property
    def signal(self) -> str:
        """What tells that this step is the culprit when a run fails (one or two lines)."""
        return _(self._signal)


STEPS: tuple[Step, ...] = (
    Step(
        "machine",
        N_("Machine"),
        None,
        N_(
            "`invalid device ordinal`, or one card out of memory while others are empty: a card was busy or hidden."
        ),
    ),
    Step(
        "script",
        N_("Script & engine"),
        None,
        N_(
            "`unrecognized arguments: --deepspeed`, or a run that ignores the config: the script does not take it."
        ),
    ),
    Step(
        "model",
        N_("Model"),
        None,
        N_(
            "Out of memory in forward or backward, not at init: activations. Shorter sequences or checkpointing."
        ),
    ),
    Step(
        "stage",
        N_("ZeRO stage"),
        1,
        N_(
            "Out of memory at init, or cards half empty and slow. Does the 16-bit copy of the parameters fit "
            "on one card? Yes: stage 2 or lower. No: stage 3."
        ),
    ),
    Step(
        "offload",
        N_("Offload target"),
        2,
        N_(
            "Host memory high, PCIe busy, GPU idle: the step waits for the CPU. Worth it only to close a small gap; "
            "else a smaller micro batch or more cards."
        ),
    ),
    Step(
        "batch",
        N_("Batch & accumulation"),
        3,
        N_(
            "An assertion on the batch size, or a loss that looks wrong although nothing failed: "
            "offload met an accumulation boundary that the script draws itself."
        ),
    ),
    Step(
        "pinned",
        N_("Pinned memory"),
        4,
        N_(
            "Init fails, or the run vanishes without a message (-9, 137, 247): the host ran short. "
            "Pinned blocks are rounded up to a power of two."
        ),
    ),
    Step(
        "comm",
        N_("Communication"),
        5,
        N_(
            "No progress. GPU low, CPU busy: the data loader. GPU 100 % and no step, then a time-out: "
            "a collective waits for a rank that has other work."
        ),
    ),
    Step(
        "precision",
        N_("Precision & optimizer"),
        None,
        N_("Loss is NaN or every step is skipped: fp16 scale, learning rate too high, or no clipping."),
    ),
    Step(
        "review",
        N_("Review & launch"),
        None,
        N_("Refused before step 1: read the findings."),
    ),
)

STEP_IDS: tuple[str, ...] = tuple(s.id for s in STEPS)


@dataclass(frozen=True)
class Option:
    """One choice of a field. A disabled one says in ``why_not`` what it needs."""

    value: Any
    label: str
    note: str = ""
    enabled: bool = True
    why_not: str = ""


@dataclass(frozen=True)
class FieldView:
    """A field as it stands now.

    ``value`` is what counts (typed, else from the opened file or preset, else recommended); ``text`` is what to
    show in an input (as typed, also when wrong); ``error`` stays until the next good value.
    """

    id: str
    step: str
    label: str
    kind: Kind
    value: Any
    text: str
    recommended: Any = None
    recommended_reason: str = ""
    options: tuple[Option, ...] = ()
    unit: str = ""
    help: str = ""
    error: str = ""
    enabled: bool = True
    why_not: str = ""
    """Why the field does not apply now (when not ``enabled``)."""


@dataclass(frozen=True)
class Batch:
    """``micro`` x ``accumulation`` x ``world`` = ``total`` samples per optimizer step."""

    micro: int
    accumulation: int
    world: int

    @property
    def total(self) -> int:
        return self.micro * self.accumulation * self.world


@dataclass(frozen=True)
class Report:
    """The live answer beside the form. Equal inputs give equal reports (a front end may compare to skip a repaint)."""

    estimate: Estimate | None
    """None while the model or the machine is unknown."""
    check: FileReport | None
    findings: tuple[Finding, ...]
    config: Mapping[str, Any]
    config_text: str
    """The file as it will be written."""
    batch: Batch
    world_size: int
    shape: ModelShape | None
    warnings: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    """What must be answered before the config is written."""
    launch_blockers: tuple[str, ...] = ()
    """What else keeps it from being started here; the config can be written all the same."""
    engine: str = "plain"
    deepspeed: str | None = None
    changed: bool = True
    """Whether writing would change the file that was opened."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Why a run cannot be started; the config may be written for all that."""
        return (*self.blockers, *self.launch_blockers)


@dataclass(frozen=True)
class Written:
    """Result of writing: where, and where the previous content went (None: there was none)."""

    path: Path
    backup: Path | None
    report: Report | None = field(default=None, compare=False)
