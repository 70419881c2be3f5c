"""``dstui demo``: the whole path on any machine, with the bundled tiny GPT."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.examples import OFFLOADS, demo_config, tiny_gpt_script
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help=_("default: every free GPU, or 2 on a CPU"))
    parser.add_argument(
        "--share-gpus", action="store_true", help=_("start although others compute on these GPUs")
    )
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help=_("ZeRO stage, default 3"))
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help=_("what goes to host RAM"))
    parser.add_argument("--steps", type=int, default=60, metavar="N", help=_("optimizer steps, default 60"))
    parser.add_argument("--python", metavar="P", help=_("the interpreter that trains"))
    parser.add_argument("--plain", action="store_true", help=_("follow it as lines of text"))
    parser.add_argument("--detach", action="store_true", help=_("start it and leave"))
    parser.add_argument("--json", action="store_true", help=_("print the run as JSON"))


def run(args: argparse.Namespace) -> int:
    from dstui.facts.detect import detect
    from dstui.runs.start import start

    facts = detect(python=args.python)
    started = start(demo_spec(args, facts), facts)
    if args.json:
        print(json.dumps({"schema_version": 1, "run": started.id, "dir": str(started.path)}), flush=True)
    else:
        print(_("run {id} started; it needs this terminal no longer").format(id=started.id), flush=True)
    if args.detach:
        if not args.json:
            print(
                _("  watch it: dstui watch {id}    stop it: dstui stop {id}").format(id=started.id),
                flush=True,
            )
        return Exit.OK
    return _watch(started, plain=args.plain, quiet=args.json)


def _watch(started: RunDir, *, plain: bool, quiet: bool) -> int:
    from dstui.plain import watch

    if quiet:
        from dstui.plain.run import wait

        return wait(started, quiet=True)
    if not plain and watch.full_screen_possible():
        import importlib

        tui = importlib.import_module("dstui.tui")  # the two front ends do not know each other
        tui.start(watch=started.id)
        outcome = (started.exit or {}).get("outcome", "finished")  # left early: the run goes on
        return Exit.OK if outcome == "finished" else Exit.BAD
    return watch.follow(started)


def demo_spec(args: argparse.Namespace, facts: Facts) -> RunSpec:
    """The run for a command line. Raises DstuiError for a stage that cannot do the offload."""
    if args.offload == "both" and args.stage != 3:
        raise DstuiError(
            _("parameters can be offloaded at ZeRO stage 3 only"), _("write: --stage 3 --offload both")
        )
    if args.offload != "none" and args.stage == 0:
        raise DstuiError(_("stage 0 has nothing to offload"), _("write: --stage 1 (or 2, 3)"))
    if args.steps < 1:
        raise DstuiError(_("--steps {n}: at least 1").format(n=args.steps))
    if args.ranks is not None and args.ranks < 1:
        raise DstuiError(_("--ranks {n}: at least 1").format(n=args.ranks))
    devices, ranks = choose_devices(args.ranks, facts)
    precision = choose_precision(facts)
    config = demo_config(
        stage=args.stage,
        offload=args.offload,
        steps=args.steps,
        precision=precision,
        torch_adam=devices is None and args.offload == "none",
    )
    return RunSpec(
        script=str(tiny_gpt_script()),
        args=("--deepspeed", "--deepspeed_config", "{config}", "--steps", str(args.steps)),
        engine="plain",
        python=args.python,
        devices=devices,
        share_gpus=args.share_gpus,
        num_gpus=ranks,
        name="demo",
        config=config,
        prediction=_prediction(config, facts, devices, ranks),
        subject={**_subject(), "stated": ["seq", "checkpointing", "attention"]},
        steps_per_print=1,
    )


def _subject() -> dict[str, Any]:
    """The tiny GPT as it is without arguments; its rows are one token longer than what the model sees."""
    from dstui.estimate.inputs import Training
    from dstui.estimate.model import load_model
    from dstui.estimate.subject import subject

    return subject(load_model("tiny-gpt"), Training(seq=64, checkpointing=False))


def _prediction(
    config: Mapping[str, Any], facts: Facts, devices: tuple[str, ...] | None, ranks: int
) -> dict[str, Any] | None:
    """What the run's folder keeps beside the measurement; None when the release is not known."""
    from dstui.estimate.memory import estimate
    from dstui.estimate.subject import from_json
    from dstui.runs import calibration

    if facts.deepspeed is None:
        return None
    used = None if facts.gpus is None else tuple(g for g in facts.gpus if g.cuda_id in (devices or ()))
    machine = dataclasses.replace(facts, gpus=used)
    asked = from_json(_subject())
    assert asked is not None
    return estimate(
        *asked,
        config,
        machine,
        release=facts.deepspeed,
        world_size=ranks,
        calibration=calibration.load(machine, asked[0]),
    ).to_json()


def choose_devices(ranks: int | None, facts: Facts) -> tuple[tuple[str, ...] | None, int]:
    """Cards (free ones first) and number of ranks."""
    gpus = facts.gpus or ()
    if not gpus:
        return None, ranks or min(2, facts.host.cores_usable or os.cpu_count() or 1)
    free = [g for g in gpus if not g.busy]
    chosen = free or list(gpus)
    if ranks is None:
        ranks = len(chosen)
    if ranks > len(gpus):
        raise DstuiError(
            _("{n} ranks need {n} GPUs, this machine has {have}").format(n=ranks, have=len(gpus)),
            _("write: --ranks {have}").format(have=len(gpus)),
        )
    if ranks > len(chosen):
        chosen = list(gpus)  # preflight says who is on the others
    return tuple(g.cuda_id for g in chosen[:ranks]), ranks


def choose_precision(facts: Facts) -> str:
    """bf16 from compute capability 8.0, fp16 from 7.0 (DeepSpeed's own gates), else fp32."""
    capability = min((g.compute_capability for g in facts.gpus or () if g.compute_capability), default=None)
    if capability is None or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp16"
