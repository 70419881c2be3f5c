"""``dstui plan``: the best config for a machine, each choice with its reason."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.estimate.model import load_model
from dstui.estimate.plan import Plan, plan
from dstui.facts.describe import facts_for
from dstui.i18n import _, clauses, phrases
from dstui.plain.columns import wrap
from dstui.plain.estimate import (
    MOST,
    SCHEMA_VERSION,
    WIDTH,
    headline,
    question_options,
    training_of,
    training_options,
)
from dstui.plain.objections import Rules
from dstui.rules.diagnostic import Finding


def configure(parser: argparse.ArgumentParser) -> None:
    question_options(parser)
    wanted = parser.add_argument_group(_("wanted"))
    wanted.add_argument(
        "--goal",
        choices=("fit", "speed", "batch"),
        default="fit",
        help=_("least demanding, fastest, or largest micro batch (fit)"),
    )
    wanted.add_argument(
        "--global-batch", type=int, metavar="N", help=_("rows of one step over all ranks, by accumulation")
    )
    wanted.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        default=None,
        help=_("number format (bf16; fp16 on cards without it)"),
    )
    wanted.add_argument(
        "--network", type=float, metavar="GBIT", help=_("Gbit/s of a node to the others (100, assumed)")
    )
    training_options(parser, checkpointing=None)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=_("write the config there; an old one is kept as .bak")
    )
    parser.add_argument("--json", action="store_true", help=_("the answer as JSON"))
    parser.add_argument("--format", choices=("text", "json"), default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    training = training_of(args)
    for name in ("world_size", "global_batch", "network"):
        value = getattr(args, name)
        least = 0.001 if name == "network" else 1
        if value is not None and not least <= value <= MOST:
            raise DstuiError(
                _("--{name} must be from {least} to {most}, found {value}").format(
                    name=name.replace("_", "-"), least=least, most=MOST, value=value
                ),
                _("see: dstui plan --help"),
            )
    shape = load_model(args.model)
    facts = facts_for(facts=args.facts, gpus=args.gpus, nodes=args.nodes, ram=args.ram)
    release = args.deepspeed or facts.deepspeed
    known = None
    if args.calibration:
        from dstui.runs import calibration

        known = calibration.load(facts, shape, release=release)
    rules = Rules(
        facts, release, "hf" if training.loop == "hf" else "deepspeed", args.world_size or facts.world_size
    )
    answer = plan(
        shape,
        training,
        facts,
        release=release,
        goal=args.goal,
        global_batch=args.global_batch,
        checkpointing=args.checkpointing,
        world_size=args.world_size,
        precision=args.precision,
        network=args.network,
        calibration=known,
        objection=rules.objection,
    )
    findings = [] if answer.config is None else rules.findings(answer.config)
    text = None if answer.config is None else json.dumps(answer.config, indent=2) + "\n"
    if text is not None and args.output:
        from dstui.config.write import save

        backup = save(Path(args.output), text)
        print(_("wrote {path}").format(path=args.output), file=sys.stderr)
        if backup is not None:
            print(_("the file that was there is {path} now").format(path=backup), file=sys.stderr)
    if args.json or args.format == "json":
        print(json.dumps(to_json(answer, findings), indent=2, ensure_ascii=False))
    else:
        print("\n".join([*_head(shape, facts, answer), *render(answer, findings)]), file=sys.stderr)
        if text is not None and not args.output:
            print(text, end="")
    return {"no": Exit.BAD, "unknown": Exit.CANNOT}.get(answer.verdict, Exit.OK)


# -- JSON ------------------------------------------------------------------------------------------------


def to_json(answer: Plan, findings: list[Finding]) -> dict[str, Any]:
    """The fields of ``dstui plan --json``; sizes in bytes, seconds of one optimizer step."""
    s = answer.setup
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": answer.verdict,
        "reason": answer.reason,
        "goal": answer.goal,
        "config": answer.config,
        "stage": s.placement.stage,
        "offload_optimizer": s.placement.optimizer,
        "offload_param": s.placement.param,
        "batch": {
            "micro": s.micro_batch,
            "accumulation": s.accumulation,
            "ranks": answer.ranks,
            "global": answer.global_batch,
        },
        "checkpointing": s.checkpointing,
        "choices": [dataclasses.asdict(c) for c in answer.choices],
        "rejected": [dataclasses.asdict(r) for r in answer.rejected],
        "findings": [{"code": f.code, "severity": f.severity, "message": f.message} for f in findings],
        "cost": None if answer.cost is None else answer.cost.to_json(),
        "rates": list(answer.rates.sources),
        "changes": [{"title": c.title, "costs": c.costs} for c in answer.changes],
        "estimate": answer.estimate.to_json(),
    }


# -- text ------------------------------------------------------------------------------------------------


def _head(shape: Any, facts: Any, answer: Plan) -> list[str]:
    return wrap(headline(shape, facts, answer.estimate), WIDTH, "", None)


def render(answer: Plan, findings: list[Finding]) -> list[str]:
    """Reasons, what was rejected, and the cost of a step, in at most 80 columns."""
    lines: list[str] = []
    if answer.reason:
        lines += wrap(answer.reason, WIDTH, "  ", None)
    if answer.choices:
        lines += ["", _("Chosen")]
        for c in answer.choices:
            value = (_("on") if c.value else _("off")) if isinstance(c.value, bool) else c.value
            name = c.what if c.what == "tight" else f"{c.what} {value}"
            lines += wrap(f"{name}: {c.reason}", WIDTH, "  ", "    ")
    if answer.rejected:
        lines += ["", _("Rejected")]
        for r in answer.rejected:
            lines += wrap(f"{r.what}: {r.reason}", WIDTH, "  ", "    ")
    if findings:
        lines += ["", _("What check says of it")]
        for f in findings:
            lines += wrap(f"{f.code} {f.message}", WIDTH, "  ", "    ")
    if answer.changes:
        lines += ["", _("What would fit") if answer.config is None else _("Also possible")]
        for change in answer.changes:
            lines += wrap(f"{change.title} ({change.costs})", WIDTH, "  ", "    ")
    if answer.cost is not None:
        lines += ["", _("A step, seconds (upper bounds, nothing hidden behind another)")]
        lines += wrap(_cost_line(answer), WIDTH, "  ", None)
        lines += wrap(clauses(answer.rates.sources), WIDTH, "  ", None)
    if answer.config is not None and answer.estimate.assumptions:
        lines += ["", _("Assumed")]
        for text in answer.estimate.assumptions:
            lines += wrap(text, WIDTH, "  ", "    ")
    return lines


def _figure(seconds: float) -> str:
    """Two digits below ten, whole seconds above: never with an exponent."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _cost_line(answer: Plan) -> str:
    c = answer.cost
    assert c is not None
    parts = [
        (_("computing"), c.compute),
        (_("recomputing"), c.recompute),
        (_("launching"), c.launch),
        (_("communication"), c.communication),
        ("PCIe", c.pcie),
        (_("Adam on the CPU"), c.cpu_adam),
        ("NVMe", c.nvme),
    ]
    shown = [f"{name} {_figure(value)}" for name, value in parts if value is not None and value >= 0.005]
    total = _("{total} s for {n} rows").format(total=_figure(c.total), n=c.samples)
    if c.compute is None:
        total = _("{total} s without computing").format(total=_figure(c.total))
    return phrases([*shown, total])
