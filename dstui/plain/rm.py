"""``dstui rm``: forget an ended run."""

from __future__ import annotations

import argparse
import os
import shutil

from dstui.errors import DstuiError, Exit
from dstui.i18n import _
from dstui.runs import control, store
from dstui.runs.store import RunDir


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_("id, unique prefix, name, path or `last`"))


def run(args: argparse.Namespace) -> int:
    targets = [store.find_run(reference) for reference in args.runs]
    for target in targets:
        refuse_living(target)
    for target in targets:
        remove(target)
        print(_("run {id} removed").format(id=target.id))
    return Exit.OK


def refuse_living(run: RunDir) -> None:
    """Raises DstuiError while anything of the run may still be alive."""
    try:
        state = store.state(run)
    except DstuiError:
        state = "lost"  # damaged: only its processes can tell
    if state in ("starting", "running", "stalled"):
        raise DstuiError(
            _("run {id} is {state}: not removed").format(id=run.id, state=state),
            _("stop it first: dstui stop {id}").format(id=run.id),
        )
    if state == "lost" and control.orphans(run):
        raise DstuiError(
            _("run {id} lost its supervisor, but its ranks are alive: not removed").format(id=run.id),
            _("stop it first: dstui stop {id}").format(id=run.id),
        )


def remove(run: RunDir) -> None:
    """Delete the directory; it leaves the list in one step, before its files go."""
    hidden = run.path.with_name(f".rm-{run.id}-{os.getpid()}")
    try:
        run.path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as e:
        raise DstuiError(
            _("{path}: cannot be removed: {cause}").format(path=run.path, cause=e.strerror or e)
        ) from e
