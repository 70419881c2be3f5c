"""``dstui run``: preflight, start detached, print the run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any, Literal

from dstui.errors import DstuiError, Exit
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.runs import command as commands
from dstui.runs import script as scripts
from dstui.runs import store
from dstui.runs.adopt import is_over
from dstui.runs.measured import STEPS
from dstui.runs.preflight import Problem, preflight, rank_problems
from dstui.runs.spec import ENGINES, LAUNCHERS, RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = _("dstui run [options] -- SCRIPT [ARGS]")
    after = parser.add_mutually_exclusive_group()
    after.add_argument("--wait", action="store_true", help=_("wait for the end; exit code 1 if it failed"))
    after.add_argument("--watch", action="store_true", help=_("follow it here (Ctrl+C leaves it running)"))
    parser.add_argument(
        "--measure",
        action="store_true",
        help=_("measure the first steps inside each rank, as a trial does, and go on"),
    )
    launch_options(parser)


def launch_options(parser: argparse.ArgumentParser) -> None:
    """What a run is started from; also of ``dstui trial``."""
    parser.epilog = _("In ARGS, {config} becomes the path of the run's own copy of the config.").replace(
        "%", "%%"
    )
    add_spec_options(parser)
    parser.add_argument("--no-preflight", action="store_true", help=_("start without the checks"))
    parser.add_argument("--json", action="store_true", help=_("print the run as JSON"))
    add_command(parser)


def add_spec_options(parser: argparse.ArgumentParser, *, twice: bool = False) -> None:
    """The options that ``spec_of`` reads. ``twice``: --config and --python may be repeated (``dstui ab``)."""
    again: dict[str, Any] = {"action": "append", "default": []} if twice else {}
    parser.add_argument(
        "--config",
        metavar="F",
        help=_("the DeepSpeed config; given twice: these two against each other")
        if twice
        else _("the DeepSpeed config; the file itself is never changed"),
        **again,
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help=_("who reads the config; default: seen in the script")
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, help=_("who starts the ranks; default: by engine"))
    parser.add_argument(
        "--python",
        metavar="P",
        help=_("the interpreter that trains; given twice: these two against each other")
        if twice
        else _("the interpreter that trains"),
        **again,
    )
    parser.add_argument(
        "--devices", metavar="0,1", help=_("GPUs by number or UUID; default: all visible ones")
    )
    parser.add_argument(
        "--share-gpus", action="store_true", help=_("start although others compute on these GPUs")
    )
    parser.add_argument(
        "--num-gpus", "--ranks", dest="num_gpus", type=int, metavar="N", help=_("ranks on each node")
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help=_("nodes of the hostfile to use; default: all of them")
    )
    parser.add_argument("--master-port", default="auto", metavar="N", help=_("default: a free port"))
    parser.add_argument(
        "--master-addr",
        metavar="A",
        help=_("address of the first node; default: the first of its `hostname -I`"),
    )
    parser.add_argument("--hostfile", metavar="F", help=_("DeepSpeed's hostfile for several nodes"))
    parser.add_argument("--cwd", metavar="D", help=_("working directory of the training"))
    parser.add_argument(
        "--env", action="append", default=[], metavar="K=V", help=_("add a variable; may be repeated")
    )
    if twice:
        parser.set_defaults(name=None)
    else:
        parser.add_argument("--name", metavar="N", help=_("a name for the run"))
    parser.add_argument(
        "--no-instrument",
        action="store_true",
        help=_("leave the run's copy of the config as it is (the monitor then sees less)"),
    )
    parser.add_argument(
        "--on-event",
        metavar="CMD",
        help=_("shell command that the supervisor runs on end, failure and stall; '' = none"),
    )
    parser.add_argument(
        "--progress",
        metavar="REGEX",
        help=_("how the script reports a step, e.g. 'it (?P<step>\\d+) L=(?P<loss>[\\d.]+)'"),
    )
    parser.add_argument(
        "--rank-logs", action="store_true", help=_("a log of its own for each rank, beside the common one")
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help=_("what to train"))


def spec_of(args: argparse.Namespace) -> RunSpec:
    """The RunSpec of a command line. Raises DstuiError."""
    words = list(args.command)
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        raise DstuiError(_("no script given"), _("write it at the end: -- SCRIPT [ARGS]"))
    env: dict[str, str] = {}
    for item in args.env:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise DstuiError(_("--env {item}: not NAME=VALUE").format(item=item))
        env[name] = value
    port: int | Literal["auto"] = "auto"
    if args.master_port != "auto":
        try:
            port = int(args.master_port)
        except ValueError:
            raise DstuiError(
                _("--master-port {value}: neither a number nor auto").format(value=args.master_port)
            ) from None
    config = os.path.abspath(os.path.expanduser(args.config)) if args.config else None  # noqa: PTH100, PTH111
    spec = RunSpec(
        script=words[0],
        args=tuple(words[1:]),
        launcher=args.launcher,
        python=args.python,
        devices=tuple(d.strip() for d in args.devices.split(",") if d.strip()) if args.devices else None,
        share_gpus=args.share_gpus,
        num_gpus=args.num_gpus,
        nodes=1 if args.nodes is None else args.nodes,
        master_port=port,
        hostfile=args.hostfile,
        master_addr=args.master_addr,
        cwd=args.cwd,
        env=env,
        name=args.name,
        config_source=config,
        instrument=not args.no_instrument,
        on_event=args.on_event,
        rank_logs=args.rank_logs,
        progress=args.progress,
        engine=args.engine or "plain",
        measure=STEPS if getattr(args, "measure", False) else None,
    )
    if args.hostfile and args.nodes is None:
        spec = dataclasses.replace(spec, nodes=len(commands.hosts(spec)))
    if args.engine is None:
        path = commands.script_path(spec)
        if path.is_file():
            spec = dataclasses.replace(spec, engine=commands.guess_engine(scripts.look(path)))
    return spec


def run(args: argparse.Namespace) -> int:
    from dstui.facts.detect import detect

    spec = spec_of(args)
    facts = detect(python=args.python, cwd=spec.cwd)
    started = begin(spec, facts, args)
    return Exit.CANNOT if started is None else announce(started, args)


def begin(spec: RunSpec, facts: Facts, args: argparse.Namespace) -> RunDir | None:
    """Preflight, then start; None when preflight refused, which was said. Also used by ``dstui trial``."""
    if not args.no_preflight:
        problems = preflight(spec, facts)
        show(problems)
        if any(p.severity == "error" for p in problems):
            if args.json:
                print(
                    json.dumps({"schema_version": 1, "run": None, "dir": None, "problems": as_json(problems)})
                )
            return None
    else:
        show(tuple(dataclasses.replace(p, severity="warning") for p in rank_problems(spec, facts)))
    started = start(spec, facts, preflight=False)
    config = started.manifest.get("config") or {}
    if config.get("how") == "remembered":  # somebody named it once: if that was wrong, it stays wrong
        options = " ".join(config.get("options") or ())
        text = _("the config goes in by {options}, as {script} got it before").format(
            options=options, script=spec.script
        )
        print(text, file=sys.stderr)
    return started


def as_json(problems: tuple[Problem, ...]) -> list[dict[str, str]]:
    return [{"code": p.code, "severity": p.severity, "message": p.message, "hint": p.hint} for p in problems]


def show(problems: tuple[Problem, ...]) -> None:
    """On stderr, errors first."""
    for p in problems:
        line = _("error: {message}") if p.severity == "error" else _("warning: {message}")
        print(line.format(message=p.message), file=sys.stderr)
        if p.hint:
            print("  " + p.hint, file=sys.stderr)


def announce(started: RunDir, args: argparse.Namespace) -> int:
    """Print the run; then return, wait or watch as asked."""
    if args.json:
        print(json.dumps({"schema_version": 1, "run": started.id, "dir": str(started.path)}), flush=True)
    else:
        print(_("run {id} started; it needs this terminal no longer").format(id=started.id))
        print(_("  watch it: dstui watch {id}    stop it: dstui stop {id}").format(id=started.id), flush=True)
    if args.watch:
        import importlib

        watch = importlib.import_module("dstui.plain.watch")
        parser = argparse.ArgumentParser(prog="dstui watch")
        watch.configure(parser)
        return int(watch.run(parser.parse_args([started.id])))
    if args.wait:
        return wait(started, quiet=args.json)
    return Exit.OK


def wait(started: RunDir, quiet: bool = False) -> int:
    """Until the run is over: 0 finished, 1 otherwise. Ctrl+C leaves it running (130)."""
    try:
        while not is_over(started):
            time.sleep(0.2)
    except KeyboardInterrupt:
        print(
            _("run {id} goes on; join it with: dstui watch {id}").format(id=started.id),
            file=sys.stderr,
        )
        return Exit.INTERRUPTED
    outcome = store.state(started)
    if not quiet:
        from dstui.plain.watch import ending
        from dstui.runs.view import RunView

        view = RunView(started)
        try:
            print(ending(view.poll()))
        finally:
            view.close()
    return Exit.OK if outcome == "finished" else Exit.BAD
