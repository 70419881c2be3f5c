"""``dstui report RUN``: a run as one file for a bug report, without secrets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dstui.errors import Exit
from dstui.i18n import _, listed, ngettext
from dstui.plain.which import run_to_read
from dstui.runs.bundle import pack


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="last", metavar="RUN", help=_("default: the newest"))
    parser.add_argument("-o", "--output", metavar="F", help=_("default: dstui-report-RUN.tar.gz here"))
    parser.add_argument("--json", action="store_true", help=_("as JSON"))


def run(args: argparse.Namespace) -> int:
    target = run_to_read(args.run)
    path = Path(args.output).expanduser() if args.output else Path(f"dstui-report-{target.id}.tar.gz")
    done = pack(target, path)
    if args.json:
        data = {
            "path": str(done.path),
            "files": list(done.files),
            "size": done.size,
            "redacted": done.redacted,
            "left_out": list(done.left_out),
        }
        print(json.dumps({"schema_version": 1, "run": target.id, **data}))
        return Exit.OK
    print(
        ngettext(
            "{path}: {n} file, {size} kB; {hidden} places were blanked",
            "{path}: {n} files, {size} kB; {hidden} places were blanked",
            len(done.files),
        ).format(path=done.path, n=len(done.files), size=-(-done.size // 1000), hidden=done.redacted)
    )
    if done.left_out:
        print(_("not all of it found room: {names}").format(names=listed(done.left_out[:5])))
    print(_("look into it before you give it away: a log may hold more than names tell"))
    print(_("look at it anywhere: dstui watch --replay {path}, dstui diagnose {path}").format(path=done.path))
    return Exit.OK
