"""The fields of the wizard, as data: one table feeds the TUI's forms and ``dstui init``'s questions and flags."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import N_, _
from dstui.session.model import Kind
from dstui.units import gib, parse_size


@dataclass(frozen=True)
class FieldSpec:
    """One field. ``minimum`` is inclusive; ``maximum`` None = no bound."""

    id: str
    step: str
    kind: Kind
    _label: str
    _help: str = ""
    _unit: str = ""
    minimum: float | None = None
    maximum: float | None = None

    @property
    def label(self) -> str:
        return _(self._label)

    @property
    def help(self) -> str:
        return _(self._help)

    @property
    def unit(self) -> str:
        return _(self._unit)

    @property
    def flag(self) -> str:
        """The option of ``dstui init``."""
        return "--" + self.id.replace("_", "-")


FIELDS: tuple[FieldSpec, ...] = (
    FieldSpec("machine", "machine", "choice", N_("Plan for"), N_("this machine, or one that you describe")),
    FieldSpec("gpus", "machine", "text", N_("Cards a node"), N_("count x size or name: 8x80GiB, 8xA100-80G")),
    FieldSpec("facts_file", "machine", "path", N_("Facts file"), N_("made there with: dstui detect --json")),
    FieldSpec("cards", "machine", "multi", N_("Cards"), N_("the cards to use; busy ones are not ticked")),
    FieldSpec(
        "ranks", "machine", "int", N_("Ranks"), N_("processes of a run without GPU"), N_("ranks"), 1, 4096
    ),
    FieldSpec(
        "nodes", "machine", "int", N_("Nodes"), N_("machines of this kind in one run"), N_("nodes"), 1, 100000
    ),
    FieldSpec("ram", "machine", "size", N_("RAM a node"), N_("of the described machine: 512GiB")),
    FieldSpec(
        "python", "machine", "choice", N_("Interpreter"), N_("the Python that trains; a path is accepted")
    ),
    FieldSpec("engine", "script", "choice", N_("Engine"), N_("who reads the DeepSpeed config")),
    FieldSpec(
        "script", "script", "path", N_("Script"), N_("the training script; for LLaMA-Factory its YAML file")
    ),
    FieldSpec(
        "args",
        "script",
        "text",
        N_("Arguments"),
        N_("for the script; {config} becomes the path of the config"),
    ),
    FieldSpec("cwd", "script", "path", N_("Working folder"), N_("where the run starts")),
    FieldSpec("launcher", "script", "choice", N_("Launcher"), N_("who starts the ranks")),
    FieldSpec(
        "model",
        "model",
        "text",
        N_("Model"),
        N_("a folder, a config.json, a repository id, a known name or 7B"),
    ),
    FieldSpec("seq", "model", "int", N_("Sequence length"), N_("tokens a sample"), N_("tokens"), 1, 10**8),
    FieldSpec("method", "model", "choice", N_("Method"), N_("what is trained")),
    FieldSpec("lora_rank", "model", "int", N_("LoRA rank"), N_("on all linear layers"), "", 1, 65536),
    FieldSpec(
        "checkpointing",
        "model",
        "bool",
        N_("Checkpointing"),
        N_("recompute activations: less memory, about 1/3 slower"),
    ),
    FieldSpec(
        "attention", "model", "choice", N_("Attention"), N_("eager keeps the scores of every head in memory")
    ),
    FieldSpec("stage", "stage", "choice", N_("ZeRO stage"), N_("what is split over the ranks")),
    FieldSpec("offload", "offload", "choice", N_("Offload"), N_("what leaves the GPU")),
    FieldSpec(
        "optimizer_device", "offload", "choice", N_("Optimizer to"), N_("where the optimizer states live")
    ),
    FieldSpec("param_device", "offload", "choice", N_("Parameters to"), N_("where the parameters live")),
    FieldSpec(
        "nvme_path",
        "offload",
        "path",
        N_("NVMe folder"),
        N_("on a local, fast disk; one folder for all ranks"),
    ),
    FieldSpec(
        "micro_batch",
        "batch",
        "int",
        N_("Micro batch"),
        N_("samples a rank in one forward"),
        N_("samples"),
        1,
        10**7,
    ),
    FieldSpec(
        "accumulation",
        "batch",
        "int",
        N_("Accumulation"),
        N_("micro batches before one optimizer step"),
        "",
        1,
        10**7,
    ),
    FieldSpec(
        "global_batch",
        "batch",
        "int",
        N_("Global batch"),
        N_("micro batch x accumulation x ranks; edit any two"),
        N_("samples"),
        1,
        10**9,
    ),
    FieldSpec(
        "pin_optimizer",
        "pinned",
        "bool",
        N_("Pin optimizer"),
        N_("page-locked host memory for the optimizer states"),
    ),
    FieldSpec(
        "pin_param", "pinned", "bool", N_("Pin parameters"), N_("page-locked host memory for the parameters")
    ),
    FieldSpec(
        "overlap_comm",
        "comm",
        "bool",
        N_("Overlap"),
        N_("reduce while backward runs; a second bucket at stage 1 and 2"),
    ),
    FieldSpec(
        "reduce_bucket_size",
        "comm",
        "int",
        N_("Reduce bucket"),
        N_("elements reduced at once; 2 bytes each in 16 bit"),
        N_("elements"),
        1,
        10**12,
    ),
    FieldSpec(
        "allgather_bucket_size",
        "comm",
        "int",
        N_("Allgather bucket"),
        N_("elements gathered at once; an even number"),
        N_("elements"),
        2,
        10**12,
    ),
    FieldSpec(
        "prefetch_bucket_size",
        "comm",
        "int",
        N_("Prefetch"),
        N_("parameters fetched ahead"),
        N_("elements"),
        0,
        10**12,
    ),
    FieldSpec(
        "persistence_threshold",
        "comm",
        "int",
        N_("Kept whole below"),
        N_("parameters smaller than this are not split"),
        N_("elements"),
        0,
        10**12,
    ),
    FieldSpec(
        "timeout",
        "comm",
        "int",
        N_("Time-out"),
        N_("of a collective; then the run ends"),
        N_("minutes"),
        1,
        100000,
    ),
    FieldSpec("precision", "precision", "choice", N_("Precision"), N_("of parameters and gradients")),
    FieldSpec("optimizer", "precision", "choice", N_("Optimizer"), N_("made by DeepSpeed, or by the script")),
    FieldSpec("lr", "precision", "float", N_("Learning rate"), "", "", 0.0, 1e6),
    FieldSpec("weight_decay", "precision", "float", N_("Weight decay"), "", "", 0.0, 1e6),
    FieldSpec(
        "gradient_clipping", "precision", "float", N_("Clip gradients"), N_("norm; 0 = off"), "", 0.0, 1e9
    ),
    FieldSpec("output", "review", "path", N_("Config file"), N_("where the config is written")),
    FieldSpec("name", "review", "text", N_("Run name"), N_("to find the run again")),
    FieldSpec(
        "instrument",
        "review",
        "bool",
        N_("Monitor keys"),
        N_("the run's copy prints a step line and writes CSV; your file stays as it is"),
    ),
)

BY_ID: dict[str, FieldSpec] = {f.id: f for f in FIELDS}

_YES = {"yes", "y", "true", "on", "1", "是"}
_NO = {"no", "n", "false", "off", "0", "否"}


def parse(spec: FieldSpec, raw: Any) -> Any:
    """The typed value of what a person gave. Raises DstuiError with the reason; bounds included."""
    if spec.kind == "bool":
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        if word in _YES or word in _NO:
            return word in _YES
        raise DstuiError(_("answer yes or no"))
    if spec.kind in ("int", "float"):
        return _number(spec, raw)
    if spec.kind == "size":
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        return parse_size(str(raw))
    if spec.kind == "multi":
        if isinstance(raw, str):
            raw = [p for p in raw.replace(",", " ").split() if p]
        if not isinstance(raw, Iterable):
            raise DstuiError(_("give a list such as 0,1"))
        return tuple(str(p) for p in raw)
    if spec.kind == "choice":
        return raw
    text = str(raw).strip()
    if spec.kind == "path" and ("\0" in text or any(len(os.fsencode(p)) > 255 for p in text.split("/"))):
        raise DstuiError(_("no file can have this name"))
    return text


def _number(spec: FieldSpec, raw: Any) -> int | float:
    if isinstance(raw, bool):
        raise DstuiError(_("give a number"))
    text = str(raw).strip().replace("_", "").replace(",", "")
    try:
        value: float = int(text) if spec.kind == "int" and text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise DstuiError(_("'{text}' is not a number").format(text=raw)) from None
    if value != value or value in (float("inf"), float("-inf")):
        raise DstuiError(_("'{text}' is not a number").format(text=raw))
    if spec.kind == "int":
        if value != int(value):
            raise DstuiError(_("give a whole number"))
        value = int(value)
    if spec.minimum is not None and value < spec.minimum:
        raise DstuiError(_("must be {bound} or more").format(bound=f"{spec.minimum:g}"))
    if spec.maximum is not None and value > spec.maximum:
        raise DstuiError(_("must be {bound} or less").format(bound=f"{spec.maximum:g}"))
    return value


def show(spec: FieldSpec, value: Any) -> str:
    """A value as it stands in an input."""
    if value is None:
        return ""
    if spec.kind == "bool":
        return _("yes") if value else _("no")
    if spec.kind == "multi":
        return ",".join(str(v) for v in value)
    if spec.kind == "size":
        return gib(value, 0) if value else ""
    if spec.kind == "float":
        return f"{value:g}"
    if spec.kind == "int" and isinstance(value, int) and abs(value) >= 100_000:
        short = f"{value:.12g}" if value % 10**5 else f"{value:.3e}"
        mantissa, _e, exponent = short.partition("e")
        if exponent and float(short) == value:
            return f"{float(mantissa):g}e{int(exponent)}"
    return str(value)
