"""What an estimate says. Frozen, JSON as docs/cli.md has it (``dstui estimate --json``). Sizes are bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["fits", "tight", "no", "unknown"]
PHASES = ("load", "init", "forward", "backward", "step", "save")


@dataclass(frozen=True)
class Range:
    low: int
    expected: int
    high: int

    def to_json(self) -> dict[str, int]:
        return {"low": self.low, "expected": self.expected, "high": self.high}


@dataclass(frozen=True)
class Phase:
    """What is allocated at the peak of one phase, by part (params grads optimizer buffers activations logits ...)."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class GpuFit:
    """The worst rank. ``allocated`` live tensors, ``reserved`` PyTorch's cache, ``device`` all that NVML counts."""

    capacity: int | None
    allocated: Range | None
    reserved: Range | None
    device: Range | None
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True)
class HostFit:
    """One node: sum over its ranks."""

    capacity: int | None
    pinned: int | None
    pageable: int | None
    peak: Range | None
    parts: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, int] = field(default_factory=dict)
    """Expected peak of each phase; ``save`` is that of ``save_checkpoint``."""
    checkpoint: int | None = None
    """Bytes on disk of one ``save_checkpoint``, all ranks of all nodes."""


@dataclass(frozen=True)
class NvmeFit:
    capacity: int | None
    needed: int


@dataclass(frozen=True)
class Change:
    """One change that would make it fit. ``edits`` are RFC 6902 operations on the config."""

    title: str
    edits: tuple[Mapping[str, Any], ...]
    saves: int | None
    costs: str


@dataclass(frozen=True)
class Binds:
    where: Literal["gpu", "host", "nvme"]
    phase: str
    part: str


@dataclass(frozen=True)
class Estimate:
    verdict: Verdict
    gpu: GpuFit
    host: HostFit
    nvme: NvmeFit | None = None
    binds: Binds | None = None
    changes: tuple[Change, ...] = ()
    assumptions: tuple[str, ...] = ()
    reason: str | None = None
    """Why the verdict is ``unknown`` (or which memory decides), in one translated sentence."""

    def to_json(self) -> dict[str, Any]:
        """The fields as docs/cli.md names them; ``schema_version`` is added by who prints it."""
        data = dataclasses.asdict(self)
        for shown, phase in zip(data["gpu"]["phases"], self.gpu.phases, strict=True):
            shown["total"] = phase.total
        return data
