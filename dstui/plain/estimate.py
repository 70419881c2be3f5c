"""``dstui estimate``: will it fit, by phase and by part, on this machine or a described one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.estimate.inputs import ModelShape, Training, expandable_segments
from dstui.estimate.memory import Cell, estimate, grid
from dstui.estimate.model import load_model
from dstui.estimate.result import Estimate, Range
from dstui.facts.describe import facts_for
from dstui.facts.model import Facts
from dstui.i18n import _, ngettext, phrases
from dstui.plain.columns import pad, wrap
from dstui.units import count, gib

SCHEMA_VERSION = 1
WIDTH = 80
MOST = 100_000_000
"""No count that is asked for can be larger."""
_DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help=_("the ds_config.json; without it: stage 0, bf16, AdamW")
    )
    question_options(parser)
    training_options(parser, checkpointing=True)
    parser.add_argument("--grid", action="store_true", help=_("every stage x offload cell"))
    parser.add_argument("--json", action="store_true", help=_("the answer as JSON"))
    parser.add_argument("--format", choices=("text", "json"), default=None, help=argparse.SUPPRESS)


def question_options(parser: argparse.ArgumentParser) -> None:
    """Model, machine and release: what `estimate` and `plan` both ask."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME|REPO_ID|PARAMS",
        help=_("a directory, a cached repository, a well-known name, or a size such as 7B"),
    )
    machine = parser.add_argument_group(_("machine (default: this one)"))
    machine.add_argument("--facts", metavar="FILE", help=_("facts from: dstui detect --json"))
    machine.add_argument("--gpus", metavar="NxSIZE|NxNAME", help=_("cards of a node: 8x80GiB or 8xA100-80G"))
    machine.add_argument("--nodes", type=int, metavar="N", help=_("number of such nodes"))
    machine.add_argument("--ram", metavar="SIZE", help=_("host memory of a node, e.g. 512GiB"))
    machine.add_argument("--world-size", type=int, metavar="N", help=_("ranks, if not every GPU is used"))
    parser.add_argument(
        "--deepspeed", metavar="V", help=_("DeepSpeed release (default: the training interpreter's)")
    )


def training_options(parser: argparse.ArgumentParser, *, checkpointing: bool | None) -> None:
    """How the script trains, for ``training_of``. ``checkpointing``: the default; None leaves it to the verb."""
    how = parser.add_argument_group(_("training"))
    how.add_argument(
        "--micro-batch", type=int, metavar="N", help=_("rows a GPU, where the config leaves it open")
    )
    how.add_argument("--seq", type=int, default=2048, metavar="N", help=_("tokens a row (2048)"))
    how.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=checkpointing,
        help=_("gradient checkpointing (on)") if checkpointing else _("gradient checkpointing (chosen)"),
    )
    how.add_argument(
        "--attention", choices=("eager", "sdpa", "flash"), default="sdpa", help=_("kernel (sdpa)")
    )
    how.add_argument(
        "--loop", choices=("hf", "plain"), default="plain", help=_("HF Trainer or a loop of your own")
    )
    how.add_argument(
        "--loss",
        choices=("standard", "chunked", "fused"),
        default="standard",
        help=_("cross entropy: of transformers, without fp32 logits, or Liger's (standard)"),
    )
    how.add_argument(
        "--reentrant",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=_("use_reentrant of gradient checkpointing (no)"),
    )
    how.add_argument(
        "--sequence-parallel", type=int, default=1, metavar="N", help=_("ranks that share a sequence (1)")
    )
    how.add_argument("--lora-rank", type=int, metavar="N", help=_("train LoRA adapters of this rank"))
    how.add_argument(
        "--lora-targets", metavar="T", help=_("module names, comma separated (all linear layers)")
    )
    how.add_argument(
        "--quant", choices=("none", "int8", "nf4"), default="none", help=_("frozen weights (none)")
    )
    how.add_argument(
        "--zero-init",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_("the model is built under zero.Init at stage 3 (HF Trainer: yes, plain loop: no)"),
    )
    how.add_argument("--load-dtype", metavar="D", help=_("type while loading: bf16, fp16 or fp32"))
    how.add_argument("--optimizer", metavar="O", help=_("what the script makes when the config names none"))
    how.add_argument(
        "--param-groups", type=int, default=1, metavar="N", help=_("optimizer parameter groups (1)")
    )
    how.add_argument(
        "--hold-logits",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_("the loop keeps the model's output until the next one is made"),
    )
    how.add_argument(
        "--expandable",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_("expandable_segments:True (default: as in this environment)"),
    )
    parser.add_argument(
        "--no-calibration",
        dest="calibration",
        action="store_false",
        help=_("leave out what runs of this model on this machine have measured"),
    )


def run(args: argparse.Namespace) -> int:
    training = training_of(args)
    config = _config(args.file, args.optimizer)
    shape = load_model(args.model)
    facts = facts_for(facts=args.facts, gpus=args.gpus, nodes=args.nodes, ram=args.ram)
    release = args.deepspeed or facts.deepspeed
    if args.world_size is not None and args.world_size < 1:
        raise DstuiError(_("--world-size must be 1 or more"), _("leave it out to use every GPU"))
    as_json = args.json or args.format == "json"
    known = None
    if args.calibration:
        from dstui.runs import calibration

        known = calibration.load(facts, shape, release=release)
    if args.grid:
        cells = grid(
            shape, training, config, facts, release=release, world_size=args.world_size, calibration=known
        )
        if as_json:
            print(
                json.dumps(
                    {"schema_version": SCHEMA_VERSION, "cells": [_cell_json(c) for c in cells]}, indent=2
                )
            )
        else:
            print("\n".join(_grid_lines(shape, facts, cells)))
        return _grid_code(cells)
    answer = estimate(
        shape, training, config, facts, release=release, world_size=args.world_size, calibration=known
    )
    if args.file is not None and answer.verdict in ("fits", "tight"):
        refusal = _refusal(config, facts, release, training, args.world_size)
        if refusal is not None:
            answer = replace(
                answer, reason=refusal if answer.reason is None else f"{refusal}; {answer.reason}"
            )
    if as_json:
        print(
            json.dumps({"schema_version": SCHEMA_VERSION, **answer.to_json()}, indent=2, ensure_ascii=False)
        )
    else:
        print("\n".join(render(shape, facts, answer)))
    return _code(answer)


def _refusal(
    config: Mapping[str, Any], facts: Facts, release: str | None, training: Training, ranks: int | None
) -> str | None:
    """That memory is not what stops this config; ``auto`` is read as the Trainer reads it."""
    from dstui.plain.objections import Rules

    trainer = training.loop == "hf" or '"auto"' in json.dumps(config, default=str)
    found = Rules(facts, release, "hf" if trainer else "deepspeed", ranks or facts.world_size).refusal(config)
    return (
        None
        if found is None
        else _("memory suffices, but the config is refused: {finding}").format(finding=found)
    )


def _code(e: Estimate) -> Exit:
    return {"no": Exit.BAD, "unknown": Exit.CANNOT}.get(e.verdict, Exit.OK)


def _grid_code(cells: list[Cell]) -> Exit:
    """0 when any cell fits, 1 when none does, 2 when that is not known."""
    verdicts = {c.estimate.verdict for c in cells}
    if verdicts & {"fits", "tight"}:
        return Exit.OK
    return Exit.CANNOT if "unknown" in verdicts else Exit.BAD


def training_of(args: argparse.Namespace) -> Training:
    """The training that the options describe. Raises DstuiError for a number or a word that cannot be."""
    for name in ("micro_batch", "seq", "lora_rank", "param_groups", "sequence_parallel"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= MOST:
            raise DstuiError(
                _("--{name} must be from 1 to {most}, found {value}").format(
                    name=name.replace("_", "-"), most=MOST, value=value
                ),
                _("see: dstui estimate --help"),
            )
    if args.quant != "none" and args.lora_rank is None:
        raise DstuiError(
            _("--quant {value} without --lora-rank: quantised weights are not trained themselves").format(
                value=args.quant
            ),
            _("add --lora-rank 16, or leave --quant out"),
        )
    if args.lora_targets is not None and args.lora_rank is None:
        raise DstuiError(
            _("--lora-targets without --lora-rank: no adapter is trained"), _("add --lora-rank 16")
        )
    dtype = None
    if args.load_dtype is not None:
        dtype = _DTYPES.get(args.load_dtype.lower())
        if dtype is None:
            raise DstuiError(
                _("--load-dtype {value} is not known").format(value=args.load_dtype),
                _("use bf16, fp16 or fp32"),
            )
    targets: tuple[str, ...] = tuple(t for t in (args.lora_targets or "").replace(" ", ",").split(",") if t)
    return Training(
        micro_batch=args.micro_batch,
        seq=args.seq,
        checkpointing=args.checkpointing is not False,
        attention=args.attention,
        loss=args.loss,
        reentrant=args.reentrant,
        sequence_parallel=args.sequence_parallel,
        loop=args.loop,
        lora_rank=args.lora_rank,
        lora_targets=targets if targets and targets != ("all-linear",) else "all-linear",
        quant=args.quant,
        zero_init=args.zero_init,
        load_dtype=dtype,
        optimizer=args.optimizer,
        param_groups=args.param_groups,
        hold_logits=args.hold_logits,
        expandable=_expandable(args),
    )


def _expandable(args: argparse.Namespace) -> bool:
    """As asked; for this machine, what its environment says."""
    if args.expandable is not None or args.gpus or args.facts:
        return bool(args.expandable)
    return expandable_segments(os.environ)


def _config(path: str | None, optimizer: str | None = None) -> Mapping[str, Any]:
    """``optimizer``: what the script makes; a config that is not there then names none."""
    if path is None:
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}}
        return config if optimizer else {**config, "optimizer": {"type": "AdamW"}}
    from dstui.config.document import read
    from dstui.rules.kind import refuse_other

    data = read(path).data
    refuse_other(data, path)
    return data


# -- JSON ------------------------------------------------------------------------------------------------


def _cell_json(c: Cell) -> dict[str, Any]:
    return {
        "stage": c.stage,
        "offload_optimizer": c.offload_optimizer,
        "offload_param": c.offload_param,
        **c.estimate.to_json(),
    }


# -- text ------------------------------------------------------------------------------------------------


def _verdict_name(verdict: str) -> str:
    return {"fits": _("fits"), "tight": _("tight"), "no": _("does not fit"), "unknown": _("unknown")}[verdict]


def _part_name(part: str) -> str:
    names = {
        "params": _("parameters"),
        "grads": _("gradients"),
        "optimizer": _("optimizer states"),
        "buffers": _("buffers"),
        "activations": _("activations"),
        "logits": _("logits and loss"),
        "workspace": _("cuBLAS"),
        "moments": _("moments"),
        "master": _("fp32 copy"),
        "staging": _("staging buffer"),
        "processes": _("processes"),
        "tensors": _("tensors"),
        "grad partitions": _("gradient partitions"),
        "accumulated grads": _("accumulated gradients"),
        "swap buffers": _("swap buffers"),
        "param buffers": _("parameter buffers"),
        "pinned cache": _("pinned cache"),
        "frozen params": _("frozen parameters"),
    }
    return names.get(part, part)


def phase_name(phase: str) -> str:
    names = {
        "load": _("load"),
        "init": _("init"),
        "forward": _("forward"),
        "backward": _("backward"),
        "step": _("step"),
        "save": _("save"),
        "between": _("between"),
    }
    return names.get(phase, phase)


def _where_name(where: str) -> str:
    return {"gpu": _("GPU memory"), "host": _("host RAM"), "nvme": _("NVMe space")}[where]


def _wrap(text: str, first: str = "  ", rest: str | None = None) -> list[str]:
    return wrap(text, WIDTH, first, rest)


def _between(r: Range | None) -> str:
    if r is None:
        return "?"
    return _("{expected}  ({low} to {high})").format(
        expected=gib(r.expected), low=gib(r.low), high=gib(r.high)
    )


def render(shape: ModelShape, facts: Facts, e: Estimate) -> list[str]:
    """The estimate as text of at most 80 columns: verdict first."""
    lines = _wrap(headline(shape, facts, e), "")
    if e.reason:
        lines += _wrap(e.reason)
    if e.binds is not None and e.verdict != "unknown":
        lines += _wrap(
            _("{where} decides, in the {phase} phase; the largest part: {part}").format(
                where=_where_name(e.binds.where),
                phase=phase_name(e.binds.phase),
                part=_part_name(e.binds.part),
            )
        )
    if e.gpu.allocated is not None:
        lines += ["", _("GPU, worst rank")]
        lines.append("  " + pad(_("capacity"), 12) + gib(e.gpu.capacity))
        for name, value in (
            (_("allocated"), e.gpu.allocated),
            (_("reserved"), e.gpu.reserved),
            (_("device"), e.gpu.device),
        ):
            lines.append(f"  {pad(name, 12)}{_between(value)}")
        lines += ["", *_phase_table(e)]
    lines += ["", _("Host, one node")]
    lines.append("  " + pad(_("capacity"), 12) + gib(e.host.capacity))
    lines.append("  " + pad(_("peak"), 12) + _between(e.host.peak))
    lines.append("  " + pad(_("pinned"), 12) + gib(e.host.pinned))
    if e.host.phases.get("save"):
        lines.append("  " + pad(_("saving"), 12) + gib(e.host.phases["save"]))
    if e.host.checkpoint:
        lines.append(
            "  " + pad(_("checkpoint"), 12) + _("{size} on disk").format(size=gib(e.host.checkpoint))
        )
    shown = sorted(((k, v) for k, v in e.host.parts.items() if v), key=lambda kv: -kv[1])
    if shown:
        lines += _wrap(phrases(f"{_part_name(k)} {gib(v)}" for k, v in shown), "  " + pad(_("parts"), 12))
    if e.nvme is not None:
        lines += ["", _("NVMe")]
        lines.append("  " + pad(_("free"), 12) + gib(e.nvme.capacity))
        lines.append("  " + pad(_("needed"), 12) + gib(e.nvme.needed))
    if e.changes:
        lines += ["", _("One of these would make it fit")]
        for c in e.changes:
            saved = "" if c.saves is None else _(" (saves {size})").format(size=gib(c.saves))
            lines += _wrap(f"{c.title}{saved}: {c.costs}", "  - ")
    if e.verdict == "no" and not e.changes:
        lines += ["", *_wrap(_("No single change makes it fit; dstui plan tries several together."), "")]
    if e.assumptions:
        lines += ["", _("Assumed")]
        for text in e.assumptions:
            lines += _wrap(text, "  - ")
    return lines


def headline(shape: ModelShape, facts: Facts, e: Estimate) -> str:
    """Verdict, model and machine in one line."""
    machine = _machine(facts)
    return _("{verdict}: {model} ({n} parameters) on {machine}").format(
        verdict=_verdict_name(e.verdict), model=shape.name, n=count(shape.params), machine=machine
    )


def _machine(facts: Facts) -> str:
    if facts.gpus is None:
        return _("unknown GPUs")
    n = len(facts.gpus)
    if n == 0:
        return _("this machine's CPU")
    cards = ngettext("{n} GPU", "{n} GPUs", n).format(n=n)
    if facts.nodes > 1:
        return _("{nodes} nodes of {cards}").format(nodes=facts.nodes, cards=cards)
    return cards


def _phase_table(e: Estimate) -> list[str]:
    """Parts down, phases across, GiB."""
    phases = [p for p in e.gpu.phases if p.total]
    parts: list[str] = []
    for p in phases:
        parts += [k for k in p.parts if k not in parts]
    head = (
        "  "
        + pad(_("GiB at the peak"), 17)
        + "".join(pad(phase_name(p.phase), 10, right=True) for p in phases)
    )
    rows = [head]
    for part in parts:
        cells = "".join(f"{p.parts.get(part, 0) / 2**30:>10.2f}" for p in phases)
        rows.append(f"  {pad(_part_name(part), 17)}{cells}")
    rows.append("  " + pad(_("allocated"), 17) + "".join(f"{p.total / 2**30:>10.2f}" for p in phases))
    return rows


def _grid_lines(shape: ModelShape, facts: Facts, cells: list[Cell]) -> list[str]:
    lines = _wrap(
        _("{model} ({n} parameters) on {machine}").format(
            model=shape.name, n=count(shape.params), machine=_machine(facts)
        ),
        "",
    )
    lines.append("")
    head = (_("stage"), _("optimizer"), _("params"), _("verdict"), _("GPU"), _("host"), _("decides"))
    lines.append(_grid_row(*head))
    for c in cells:
        e = c.estimate
        device = gib(e.gpu.device.expected) if e.gpu.device else "-"
        peak = gib(e.host.peak.expected) if e.host.peak else "-"
        decides = _where_name(e.binds.where) if e.binds else ""
        lines.append(
            _grid_row(
                str(c.stage),
                _place(c.offload_optimizer),
                _place(c.offload_param),
                _verdict_name(e.verdict),
                device,
                peak,
                decides,
            )
        )
    notes: list[str] = []
    for c in cells:
        if c.estimate.reason and c.estimate.reason not in notes:
            notes.append(c.estimate.reason)
    for text in notes:
        lines += ["", *_wrap(text)]
    return lines


def _grid_row(
    stage: str, optimizer: str, params: str, verdict: str, gpu: str, host: str, decides: str
) -> str:
    left = pad(stage, 6) + pad(optimizer, 11) + pad(params, 9) + pad(verdict, 14)
    return f"  {left}{pad(gpu, 11, right=True)}{pad(host, 11, right=True)}  {decides}"


def _place(device: str) -> str:
    return {"none": _("GPU"), "cpu": _("RAM"), "nvme": "NVMe"}[device]
