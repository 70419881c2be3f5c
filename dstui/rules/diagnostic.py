"""Findings: what a rule says about a config. Frozen; rendered by the front ends, never here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from dstui.config.pointer import dotted


class Severity(str, Enum):
    """How bad a finding is, worst first. The words are part of the JSON and are never translated."""

    ERROR = "error"
    SILENT_WRONG = "silent-wrong"
    NO_EFFECT = "no-effect"
    MEANING_CHANGED = "meaning-changed"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 = worst."""
        return list(Severity).index(self)

    @property
    def letter(self) -> str:
        """One letter for screens without colour: E S N M W I."""
        return self.value[0].upper()


When = Literal["launch", "parse", "init", "step", "save", "always"]
Verdict = Literal["accepted", "rejected", "unknown"]


@dataclass(frozen=True)
class Fix:
    """RFC 6902 edits on the file. ``safe``: the effective meaning is what the author plainly wanted."""

    title: str
    safe: bool
    edits: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Finding:
    """One finding. ``message``, ``effect``, ``hint`` and the fix title are translated; nothing else is."""

    code: str
    name: str
    severity: Severity
    when: When
    pointer: str
    """RFC 6901 pointer to the culprit; ``""`` = the whole file."""
    message: str
    effect: str = ""
    hint: str = ""
    fix: Fix | None = None
    source: str = ""
    since: str | None = None
    until: str | None = None
    line: int | None = None
    column: int | None = None

    @property
    def path(self) -> str:
        """The pointer as people write it: ``zero_optimization.offload_param``."""
        return dotted(self.pointer)


@dataclass(frozen=True)
class Skipped:
    """A rule that could not look: ``needs`` names the missing fact (``facts.gpus``)."""

    code: str
    needs: str


@dataclass(frozen=True)
class FileReport:
    """``check``'s answer for one file; docs/cli.md has its JSON."""

    path: str
    engine: str
    deepspeed: str
    deepspeed_from: str
    world_size: int
    world_size_from: str
    verdict: Verdict | None
    batch: Mapping[str, int] | None
    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...] = ()
    live: Mapping[str, Any] | None = None
    """What the installed DeepSpeed itself said (``check --live``): ``deepspeed``, ``verdict``, ``problem``."""
