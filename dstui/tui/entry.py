"""Reads the inputs, runs the app, says how to rejoin what goes on."""

from __future__ import annotations

import shlex
import shutil
import sys
import threading
from pathlib import Path

from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.tui.app import DstuiApp
from dstui.tui.terminal import Profile


def run_app(profile: Profile, *, file: str | None, facts: str | None, watch: str | None) -> int:
    """Read the inputs (an unreadable one is an error before the screen is taken), run, say how to rejoin."""
    known: Facts | None = None
    document = None
    if facts:
        from dstui.facts.describe import load_facts

        known = load_facts(facts)
    if file:
        from dstui.config import document as documents

        document = documents.read(file)
    threading.Thread(target=_adopt, name="adopt", daemon=True).start()
    if watch:
        from dstui.runs.replay import PREFIX
        from dstui.runs.store import find_run

        watch = watch if watch.startswith(PREFIX) else find_run(watch).id
    app = DstuiApp(profile, facts=known, document=document, watch=watch)
    app.run(mouse=False)
    for run_id in app.live_runs():
        _tell(_("The run {id} goes on. Join it with: {command}").format(id=run_id, command=_watch(run_id)))
    return app.return_code or 0


def _watch(run_id: str) -> str:
    """The command that joins the run from this shell; ``dstui`` may be in an environment that is not on PATH."""
    script = Path(sys.executable).with_name("dstui")
    known = shutil.which("dstui") is not None
    words = ["dstui"] if known else [str(script)] if script.exists() else [sys.executable, "-m", "dstui"]
    return shlex.join([*words, "watch", run_id])


def _adopt() -> None:
    """Runs that lost their supervisor get another one; beside the first paint."""
    from dstui.runs.adopt import adopt_lost

    adopt_lost()


def _tell(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the terminal is gone
        sys.stdout = None
