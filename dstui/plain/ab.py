"""``dstui ab``: two configs, or two interpreters, against each other as real runs in turn."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, clauses, listed, ngettext
from dstui.plain import compare as table
from dstui.plain import run as runs
from dstui.runs import ab, store
from dstui.runs.ab import AbDir, Plan
from dstui.runs.spec import RunSpec
from dstui.units import duration


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = _("dstui ab --config A --config B [options] -- SCRIPT [ARGS]")
    parser.epilog = _(
        "Give --config twice, or --python twice (one config under two DeepSpeed releases). Everything runs on the "
        "same cards, one run after the other, and goes on without this terminal."
    )
    runs.add_spec_options(parser, twice=True)
    parser.add_argument(
        "--pairs", type=int, default=1, metavar="N", help=_("runs of each kind, in turn; default 1, better 5")
    )
    parser.add_argument(
        "--order", choices=ab.ORDERS, default="abba", help=_("abba: every second pair the other way round")
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help=_("end each run after N steps; default: when the script ends")
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help=_("and at the latest after M minutes, loading included")
    )
    parser.add_argument(
        "--total-minutes",
        type=float,
        metavar="M",
        help=_("all of it in M minutes: no pair is begun that would take longer"),
    )
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help=_(
            "one more short run of each kind with wall_clock_breakdown and comms_logger: they tell the share of "
            "communication, wait for the device and slow it down, so its speed does not count"
        ),
    )
    parser.add_argument(
        "--no-probe", action="store_true", help=_("measure from outside only (without --steps)")
    )
    parser.add_argument("--detach", action="store_true", help=_("start it and leave"))
    parser.add_argument(
        "--join", nargs="?", const="last", metavar="AB", help=_("wait for one that was started, and compare")
    )
    parser.add_argument(
        "--stop", nargs="?", const="last", metavar="AB", help=_("end the present run and start no other")
    )
    table.add_price(parser)
    table.add_format(parser)
    runs.add_command(parser)


def run(args: argparse.Namespace) -> int:
    table.refuse_price(args.price_per_gpu_hour)
    if args.stop is not None:
        print(end(ab.find(args.stop)))
        return Exit.OK
    if args.join is not None:
        return _follow(ab.find(args.join), args)
    started = ab.begin(plan_of(args))
    if args.detach:
        if args.format == "json":
            print(json.dumps({"schema_version": 1, "ab": started.id, "dir": str(started.path)}))
        else:
            print(_("A/B {id} started; it needs this terminal no longer").format(id=started.id))
            print(_("  result: dstui ab --join {id}    end it: dstui ab --stop {id}").format(id=started.id))
        return Exit.OK
    return _follow(started, args)


def end(found: AbDir) -> str:
    """End an A/B; a sentence that says what was done. Raises DstuiError."""
    state = found.state
    ended = ab.stop(found)
    if state == "running":
        return _("A/B {id}: its run is being ended, no further one is started").format(id=found.id)
    text = _("A/B {id} is over already: {state}").format(id=found.id, state=store.state_word(state))
    if ended:
        text = _("A/B {id}: ended what its controller left behind: run {run}").format(
            id=found.id, run=listed(run.id for run in ended)
        )
    return text


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan of a command line. Raises DstuiError."""
    if len(args.config) > 2 or len(args.python) > 2:
        raise DstuiError(
            _("more than two kinds"), _("an A/B has two; compare more runs with `dstui compare`")
        )
    if len(args.config) < 2 and len(args.python) < 2:
        raise DstuiError(
            _("nothing to set against each other"),
            _("give --config twice, or --python twice: dstui ab --config A --config B -- SCRIPT"),
        )
    specs = [_spec(args, n) for n in (0, 1)]
    if args.no_probe and args.steps:
        raise DstuiError(_("--steps needs the probe to end a run"), _("leave out --no-probe"))
    return Plan(
        specs=(specs[0], specs[1]),
        labels=_labels(specs),
        pairs=args.pairs,
        order=args.order,
        steps=args.steps,
        minutes=args.minutes,
        total_minutes=args.total_minutes,
        breakdown=args.breakdown,
        probe=not args.no_probe,
    )


def _spec(args: argparse.Namespace, number: int) -> RunSpec:
    one = copy.copy(args)
    for name in ("config", "python"):
        values = getattr(args, name)
        setattr(one, name, values[min(number, len(values) - 1)] if values else None)
    return runs.spec_of(one)


def _labels(specs: list[RunSpec]) -> tuple[str, str]:
    """What tells the two apart, short: file names, else interpreters."""
    by_config = [Path(s.config_source or "").name for s in specs]
    by_python = [s.python or "" for s in specs]
    for words in (
        by_config,
        [s.config_source or "" for s in specs],
        [_environment(p) for p in by_python],
        by_python,
    ):
        if words[0] != words[1]:
            return f"A {words[0]}", f"B {words[1]}"
    return "A", "B"


def _environment(python: str) -> str:
    """The folder that an interpreter belongs to: ``ds0189`` of ``.../envs/ds0189/bin/python``."""
    path = Path(python)
    return path.parent.parent.name if path.parent.name == "bin" else python


def _follow(found: AbDir, args: argparse.Namespace) -> int:
    """Tell what happens until it is over, then compare. Ctrl+C leaves it going on."""
    quiet = args.format == "json"
    try:
        _wait(found, quiet)
    except KeyboardInterrupt:
        print(
            _("A/B {id} goes on; its result: dstui ab --join {id}; end it: dstui ab --stop {id}").format(
                id=found.id
            ),
            file=sys.stderr,
        )
        return Exit.INTERRUPTED
    return _report(found, args)


def _wait(found: AbDir, quiet: bool) -> None:
    told: set[str] = set()
    running: str | None = None
    while True:
        state = found.state
        data = found.data
        for entry in data["runs"]:
            if entry["run"] not in told:
                told.add(entry["run"])
                if running is not None:
                    _tell_end(running, quiet)
                running = entry["run"]
                if not quiet:
                    print(_started(data, entry), file=sys.stderr, flush=True)
        if state != "running":
            if running is not None:
                _tell_end(running, quiet)
            return
        time.sleep(0.5)


def _started(data: dict[str, Any], entry: dict[str, Any]) -> str:
    label = data["labels"][entry["kind"]]
    if entry["breakdown"]:
        return _("{label}, timers: run {id} started").format(label=label, id=entry["run"])
    return _("{label}, {n} of {all}: run {id} started").format(
        label=label, n=entry["pair"] + 1, all=data["pairs"], id=entry["run"]
    )


def _tell_end(run_id: str, quiet: bool) -> None:
    if quiet:
        return
    try:
        run = store.find_run(run_id)
        done = run.exit or {}
        if not done and store.state(run) in store.LIVE:
            print(_("  run {id} goes on").format(id=run_id), file=sys.stderr, flush=True)
            return
        seconds = (done.get("ended_at") or 0) - (run.manifest.get("started_at") or 0)
        text = _("  run {id}: {state} after {time}").format(
            id=run_id, state=store.state_word(store.state(run)), time=duration(seconds if done else None)
        )
        print(text, file=sys.stderr, flush=True)
    except DstuiError:
        return  # forgotten meanwhile


def _report(found: AbDir, args: argparse.Namespace) -> int:
    data, state = found.data, found.state
    compared = ab.result(found, args.price_per_gpu_hour)
    if args.format == "json":
        about = {
            k: data[k] for k in ("id", "labels", "configs", "pythons", "order", "pairs", "steps", "runs")
        }
        about |= {"state": state, "problem": data["problem"], "dir": str(found.path)}
        print(json.dumps({**compared.to_json(), "ab": about}, ensure_ascii=False, indent=2))
    else:
        print(table.shown(compared, args.format))
    for entry in data["runs"]:
        if entry.get("busy"):
            text = _("careful: run {id} shared its cards: {what}")
            print(text.format(id=entry["run"], what=entry["busy"]), file=sys.stderr)
    if state == "finished" and not data["problem"]:
        return Exit.OK
    done = min(len(found.runs(kind)) for kind in (0, 1))
    text = ngettext(
        "A/B {id} is {state}: compared is {n} pair of {all}",
        "A/B {id} is {state}: compared are {n} pairs of {all}",
        done,
    ).format(id=found.id, state=store.state_word(state), n=done, all=data["pairs"])
    print(clauses([text, *([data["problem"]] if data["problem"] else [])]), file=sys.stderr)
    return Exit.OK if state == "finished" else Exit.BAD  # --total-minutes did what it was asked to
