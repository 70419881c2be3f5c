"""``dstui runs``: every run, newest first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import PurePath
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _
from dstui.plain.columns import pad, width
from dstui.runs import store
from dstui.runs.adopt import adopt_lost
from dstui.runs.store import RunDir, state_word
from dstui.units import duration


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, metavar="N", help=_("only the N newest"))
    parser.add_argument("--json", action="store_true", help=_("as JSON"))


def summary(run: RunDir) -> dict[str, Any]:
    """One run for a list. A damaged manifest leaves its fields null and the state ``lost``."""
    row: dict[str, Any] = dict.fromkeys(
        (
            "name",
            "kind",
            "host",
            "script",
            "engine",
            "launcher",
            "world_size",
            "world_size_asked",
            "config",
            "started_at",
            "ended_at",
        )
    )
    row |= {"run": run.id, "dir": str(run.path), "state": "lost", "created_at": run.created_at}
    row |= {"code": None, "signal": None, "problem": None, "stall": None}
    try:
        manifest = run.manifest
        row["state"] = store.state(run)
    except DstuiError as e:
        row["problem"] = e.message
        return row
    if row["state"] == "running":
        row |= _look(run)
    config = manifest.get("config") or {}
    ended = run.exit or {}
    names = ("name", "kind", "host", "script", "engine", "world_size", "world_size_asked", "started_at")
    row |= {k: manifest.get(k) for k in names}
    row |= {"launcher": manifest.get("launcher_kind"), "config": config.get("source")}
    row |= {k: ended.get(k) for k in ("ended_at", "code", "signal")}
    return row


def _look(run: RunDir) -> dict[str, Any]:
    """Whether a living run stands still, and why: asks its log and samples, a bounded part of them."""
    from dstui.runs.view import RunView

    view = RunView(run)
    try:
        shot = view.poll()
    except (DstuiError, OSError):
        return {}
    finally:
        view.close()
    if shot.stall is None:
        return {"state": shot.state}
    return {"state": shot.state, "stall": {"code": shot.stall.code, "text": shot.stall.text}}


def run(args: argparse.Namespace) -> int:
    adopt_lost()
    found = store.list_runs()
    rows = [summary(r) for r in (found[: args.n] if args.n else found)]
    if args.json:
        print(json.dumps({"schema_version": 1, "runs": rows}, ensure_ascii=False))
        return Exit.OK
    if not rows:
        print(_("no runs yet; start one: dstui demo"))
        return Exit.OK
    print(table(rows))
    if rows[0]["state"] in ("failed", "lost"):
        print(_("why the newest one failed: dstui diagnose last"), file=sys.stderr)
    return Exit.OK


def table(rows: list[dict[str, Any]], now: float | None = None) -> str:
    """Columns that fit 80: id, state, age, run time, ranks, name or script."""
    now = time.time() if now is None else now
    head = (_("RUN"), _("STATE"), _("STARTED"), _("TIME"), _("RANKS"), _("NAME"))
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        begun = row["started_at"] or row["created_at"]
        living = row["state"] in store.LIVE
        end = now if living else row["ended_at"]
        name = row["name"] or (PurePath(row["script"]).name if row["script"] else row["problem"] or "")
        if row.get("kind") == "trial" and name != "trial":
            name += " " + _("(trial)")
        lines.append(
            (
                row["run"],
                state_word(row["state"]),
                _("{time} ago").format(time=duration(max(0.0, now - row["created_at"]))),
                duration(max(0.0, end - begun)) if end is not None else "?",
                str(row["world_size"] or "?"),
                "".join(c if c.isprintable() else "?" for c in name),  # a script may be called anything
            )
        )
    widths = [max(width(line[i]) for line in lines) for i in range(len(head) - 1)]
    out = []
    for line in lines:
        cells = [pad(cell, w) for cell, w in zip(line, widths, strict=False)]
        out.append("  ".join([*cells, line[-1]]).rstrip())
    for row in rows:
        if row.get("world_size_asked"):
            text = _("{id}: {asked} ranks were asked for, the launcher started {n}")
            out.append("  " + text.format(id=row["run"], asked=row["world_size_asked"], n=row["world_size"]))
        if row.get("stall"):
            out.append(f"  {row['run']}: {row['stall']['text']} ({row['stall']['code']})")
    return "\n".join(out)
