"""``dstui rm``: forget an ended run."""

from __future__ import annotations

import argparse

from dstui.errors import Exit
from dstui.i18n import _
from dstui.runs import store
from dstui.runs.adopt import adopt, is_lost_here
from dstui.runs.control import orphans, refuse_living, remove


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_("id, unique prefix, name, path or `last`"))


def run(args: argparse.Namespace) -> int:
    targets = [store.find_run(reference) for reference in args.runs]
    for target in targets:
        if is_lost_here(target) and orphans(target):
            adopt(target)
        refuse_living(target)
    for target in targets:
        remove(target)
        print(_("run {id} removed").format(id=target.id))
    return Exit.OK
