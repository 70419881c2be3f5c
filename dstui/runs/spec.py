"""What a person asks to run. Frozen; the wizard, ``dstui run`` and ``dstui demo`` all build one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dstui.errors import DstuiError
from dstui.facts.model import Facts
from dstui.i18n import _, listed
from dstui.runs.hook import redacted

ENGINES = ("plain", "hf", "llamafactory", "accelerate", "swift")
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "llamafactory", "swift", "python")

NAME_LENGTH = 100

Engine = str
"""One of ENGINES: who reads the DeepSpeed config."""
Launcher = str
"""One of LAUNCHERS: who starts the ranks."""


@dataclass(frozen=True)
class RunSpec:
    """One training run, before it exists. Paths may be relative to ``cwd``; nothing is resolved here."""

    script: str
    """The script, or for the engine ``llamafactory`` its YAML file."""
    args: tuple[str, ...] = ()
    """``{config}`` in an argument becomes the path of the run's own copy of the config."""
    engine: Engine = "plain"
    launcher: Launcher | None = None
    """None = the one that works on this machine (``dstui.runs.command.choose_launcher``)."""
    python: str | None = None
    """The training interpreter; None = the one that the facts name."""
    devices: tuple[str, ...] | None = None
    """Physical GPU indices (PCI order, as ``Gpu.index``), or UUIDs of GPUs and MIG instances."""
    share_gpus: bool = False
    """Start although other processes compute on the devices."""
    num_gpus: int | None = None
    """Ranks on each node; None = one per device, or one rank without GPUs."""
    nodes: int = 1
    master_port: int | Literal["auto"] = "auto"
    hostfile: str | None = None
    master_addr: str | None = None
    """Address of the first node, for the others; None = the first that its ``hostname -I`` says, as DeepSpeed takes it."""
    cwd: str | None = None
    """None = the caller's working directory."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the caller's whole environment."""
    name: str | None = None
    config: Mapping[str, Any] | None = None
    """The DeepSpeed config as data, when there is no text (the demo, the wizard before saving)."""
    config_text: str | None = None
    """Its text, kept as written; wins over ``config``."""
    config_source: str | None = None
    """The user's file; read by ``start`` when neither ``config_text`` nor ``config`` is given. Never written."""
    prediction: Mapping[str, Any] | None = None
    """The estimate as JSON, shown beside the measurement."""
    subject: Mapping[str, Any] | None = None
    """What the estimate was asked (``dstui.estimate.subject``), so that the run can correct the next one."""
    measure: int | None = None
    """Optimizer steps that the probe measures in each rank (``dstui.runs.trial``); None = no probe."""
    trial: bool = False
    """End after ``measure`` steps: the run exists to be measured."""
    instrument: bool = True
    """Add the keys that a monitor needs (``steps_per_print``, ``log_level``, ``csv_monitor``) to the run's copy."""
    steps_per_print: int = 10
    """Interval that is added where the config has none."""
    on_event: str | None = None
    """Shell command on end, failure and stall (``dstui.runs.hook``); None = the one of the settings, "" = none."""
    rank_logs: bool = False
    """A log of its own for each rank, where the launcher allows it (``dstui.runs.ranklogs``)."""
    progress: str | None = None
    """How the script reports a step: a regular expression with named groups (``dstui.runs.events.step_pattern``)."""
    log_limit: int = 1 << 30
    """Bytes of ``out.log`` kept on disk; beyond it the middle goes (``dstui.runs.store``)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(str(a) for a in self.args))
        if self.devices is not None:
            object.__setattr__(self, "devices", tuple(str(d) for d in self.devices))
        if self.engine not in ENGINES:
            raise DstuiError(
                _("unknown engine '{name}'").format(name=self.engine),
                _("one of: {names}").format(names=listed(ENGINES)),
            )
        if self.launcher is not None and self.launcher not in LAUNCHERS:
            raise DstuiError(
                _("unknown launcher '{name}'").format(name=self.launcher),
                _("one of: {names}").format(names=listed(LAUNCHERS)),
            )
        if self.name is not None and not (self.name.isprintable() and len(self.name) <= NAME_LENGTH):
            raise DstuiError(
                _("a run's name is one line of at most {n} characters").format(n=NAME_LENGTH),
                _("give a shorter one without control characters"),
            )
        if self.progress is not None:
            from dstui.runs.events import step_pattern  # compiles every format that is known

            step_pattern(self.progress)
        if self.measure is not None and self.measure < 1:
            raise DstuiError(_("--steps {n}: at least 1").format(n=self.measure))
        if self.nodes < 1:
            raise DstuiError(_("a run needs at least one node"), _("give --nodes 1 or more"))
        if self.num_gpus is not None and self.num_gpus < 1:
            raise DstuiError(_("a run needs at least one rank"), _("give --num-gpus 1 or more"))

    @property
    def has_config(self) -> bool:
        return self.config is not None or self.config_text is not None or self.config_source is not None

    def to_json(self) -> dict[str, Any]:
        """For the manifest. The environment is left out: it may hold secrets (``dstui.runs.redact``)."""
        data = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("env", "config", "config_text", "prediction", "subject")
        }
        data["args"] = list(self.args)
        data["on_event"] = None if self.on_event is None else redacted(self.on_event)
        data["devices"] = None if self.devices is None else list(self.devices)
        return data


def on_its_nodes(facts: Facts, manifest: Mapping[str, Any]) -> Facts:
    """The facts of the machine that a run was started on, with as many such nodes as the run takes."""
    nodes = manifest.get("nodes")
    return dataclasses.replace(facts, nodes=max(facts.nodes, nodes if isinstance(nodes, int) else 1))
