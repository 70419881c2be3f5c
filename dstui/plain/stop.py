"""``dstui stop``: end a run and all its ranks, from any terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, ngettext
from dstui.runs import store
from dstui.runs.adopt import adopt, is_lost_here
from dstui.runs.control import STOP_SECONDS, orphans, stop


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_("id, unique prefix, name, path or `last`"))
    parser.add_argument("--now", action="store_true", help=_("TERM, then KILL after 3 s: no time to save"))
    parser.add_argument(
        "--timeout", type=float, default=STOP_SECONDS, metavar="S", help=_("how long to wait for the end")
    )
    parser.add_argument("--json", action="store_true", help=_("as JSON"))


def run(args: argparse.Namespace) -> int:
    answers: list[dict[str, Any]] = []
    code = Exit.OK
    for target in [store.find_run(reference) for reference in args.runs]:  # a wrong name stops nothing
        if is_lost_here(target) and orphans(target):
            adopt(target)  # who ends then is seen, and the end is written
        try:
            done = stop(target, now=args.now, timeout=args.timeout)
        except DstuiError as e:  # the others are stopped all the same
            code = Exit.CANNOT
            answers.append(
                {"run": target.id, "ended": False, "state": None, "already": False, "locks_removed": []}
                | {"problem": e.message}
            )
            print(_("error: {message}").format(message=e.message), file=sys.stderr)
            if e.hint:
                print("  " + e.hint, file=sys.stderr)
            continue
        removed = [] if done.already or not done.ended else (target.exit or {}).get("locks_removed") or []
        answers.append(
            {
                "run": target.id,
                "ended": done.ended,
                "state": done.state,
                "already": done.already,
                "locks_removed": removed,
                "nodes_left": [dict(r) for r in done.nodes],
                "problem": None,
            }
        )
        if not done.ended or done.nodes:
            code = Exit.CANNOT
        if args.json:
            continue
        if done.already:
            print(_("run {id} had ended: {state}").format(id=target.id, state=store.state_word(done.state)))
        elif not done.ended:
            print(
                _("run {id} was asked to stop and has not ended yet; harder: dstui stop --now {id}").format(
                    id=target.id
                ),
                file=sys.stderr,
            )
        elif done.killed:
            n = len(done.killed)
            print(
                ngettext(
                    "run {id} had lost its supervisor; {n} process left behind was ended",
                    "run {id} had lost its supervisor; {n} processes left behind were ended",
                    n,
                ).format(id=target.id, n=n)
            )
        else:
            print(_("run {id}: {state}").format(id=target.id, state=done.state))
        for record in done.nodes:
            print(of_node(record), file=sys.stderr)
        if done.nodes:
            print(_("  when they answer again: dstui stop {id}").format(id=target.id), file=sys.stderr)
        for path in removed:
            print(_("  removed the lock of its unfinished op build: {path}").format(path=path))
    if args.json:
        print(json.dumps({"schema_version": 1, "runs": answers}))
    return code


def of_node(record: Mapping[str, Any]) -> str:
    """What lives, or may live, on a node after the stop."""
    host, left = record["host"], record.get("left")
    if left is None:
        return _("  node {host} does not answer ({detail}): the ranks there may live on").format(
            host=host, detail=record.get("detail") or record.get("problem")
        )
    return ngettext(
        "  node {host}: {n} process of the run is still alive",
        "  node {host}: {n} processes of the run are still alive",
        left,
    ).format(host=host, n=left)
