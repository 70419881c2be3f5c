"""``dstui diagnose``: why a run failed, from its directory or from any log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, listed
from dstui.plain.columns import wrap
from dstui.runs.case import Diagnosis
from dstui.runs.causes import BY_CODE, CHECKPOINTS
from dstui.runs.diagnose import diagnose
from dstui.runs.store import state_word

WIDTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        default="last",
        metavar="RUN|LOG|-",
        help=_("a run, a log file, or - for a log on stdin; default: the newest run"),
    )
    parser.add_argument(
        "--config", metavar="F", help=_("the DeepSpeed config, so that fixes can name their edits")
    )
    parser.add_argument("--json", action="store_true", help=_("the answer as JSON"))


def run(args: argparse.Namespace) -> int:
    config = _config(args.config) if args.config else None
    found = judge(args.run, config)
    if args.json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        print(render(found))
    return Exit.OK


def judge(what: str, config: Mapping[str, Any] | None) -> Diagnosis:
    """``-``, a log file, a run's directory, or whatever names a run. Raises DstuiError."""
    if what == "-":
        return diagnose(sys.stdin.buffer.read().decode("utf-8", "replace"), config, text=True)
    path = Path(what).expanduser()
    from dstui.plain.which import BUNDLE, run_to_read
    from dstui.runs.adopt import adopt_lost

    log = path.is_file() and not what.endswith(BUNDLE)
    if log:
        return diagnose(path, config)
    if path.is_dir() and (path / "manifest.json").is_file():
        adopt_lost()
        return diagnose(path, config)
    return diagnose(run_to_read(what), config)


def _config(name: str) -> Mapping[str, Any]:
    from dstui.config.document import Document

    path = Path(name).expanduser()
    try:
        text = path.read_bytes()
    except OSError as e:
        raise DstuiError(_("{path}: {cause}").format(path=name, cause=e.strerror)) from e
    data: Mapping[str, Any] = Document.parse(text, path=name).data
    return data


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def render(found: Diagnosis) -> str:
    """The answer as text: fate, cause with its checkpoint, evidence, what to change."""
    lines = [_("outcome: {outcome}").format(outcome=state_word(found.outcome))]
    cause = found.cause
    if cause is None:
        lines.append(_("no cause found in what is there"))
        return "\n".join(lines)
    place = (
        _("checkpoint {n} of 5: {name}").format(n=cause.checkpoint, name=_(CHECKPOINTS[cause.checkpoint - 1]))
        if cause.checkpoint
        else _("not one of the five checkpoints")
    )
    lines.append(f"{cause.code} {cause.name}: {BY_CODE[cause.code].heading}")
    lines.append("  " + place + ", " + certainty_text(cause.certainty))
    if cause.detail:
        lines += wrap(cause.detail, WIDTH, "  ")
    if found.evidence:
        lines += ["", _("evidence:")]
        for e in found.evidence:
            where = f"{e.file}:{e.line}" if e.line else e.file
            lines.append(f"  {where}")
            lines += ["    " + _cut(part) for part in e.text.splitlines()[:6]]
    if found.fixes:
        lines += ["", _("what to change:")]
        for n, fix in enumerate(found.fixes, 1):
            lines.append(
                f"  {n}. {fix.title}"
                + (f"  ({_('price: {text}').format(text=fix.price)})" if fix.price else "")
            )
            lines += [f"       {json.dumps(dict(edit), ensure_ascii=False)}" for edit in fix.edits]
    else:
        advice = _("what to do: {text}").format(text=_(BY_CODE[cause.code].do))
        lines += ["", *wrap(advice, WIDTH, rest="  ")]
    if found.others:
        lines += [
            "",
            _("also possible: {names}").format(names=listed(f"{o.code} {o.name}" for o in found.others)),
        ]
    lines += ["", _("more: dstui explain {code}").format(code=cause.code)]
    return "\n".join(lines)


def certainty_text(certainty: str) -> str:
    return {"certain": _("certain"), "likely": _("likely"), "possible": _("possible")}[certainty]
