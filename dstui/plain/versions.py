"""``dstui versions FILE --from V --to V``: what this very file does differently in another DeepSpeed release."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from dstui.config.document import MAX_SIZE, read
from dstui.config.pointer import dotted
from dstui.errors import DstuiError, Exit
from dstui.i18n import _, listed, ngettext
from dstui.plain.check import model_of, read_args, release_of
from dstui.plain.columns import pad, width
from dstui.rules import versions as core
from dstui.rules.engine import ENGINES, JSON_ENGINES, Context


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_("a ds_config.json; - reads standard input"))
    parser.add_argument(
        "--from", dest="old", metavar="V", required=True, help=_("release that ran it so far")
    )
    parser.add_argument(
        "--to", dest="new", metavar="V", help=_("release that will run it (default: the installed one)")
    )
    parser.add_argument(
        "--pin", action="store_true", help=_("write the old behaviour into the file; keeps a backup")
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="deepspeed", help=_("who hands the file to DeepSpeed")
    )
    parser.add_argument("--args", metavar="FILE|k=v,...", help=_('training arguments that fill "auto"'))
    parser.add_argument("--world-size", type=int, metavar="N", help=_("number of ranks"))
    parser.add_argument("--model", metavar="M", help=_("the model, as for dstui estimate: gives host bytes"))
    parser.add_argument("--facts", metavar="FILE", help=_("the machine, from dstui detect --json"))
    parser.add_argument("--max-size", metavar="SIZE", help=_("largest file to read (default: 1MB)"))
    parser.add_argument("--json", action="store_true", help=_("answer as JSON"))


def run(args: argparse.Namespace) -> int:
    if args.world_size is not None and args.world_size < 1:
        raise DstuiError(_("--world-size must be at least 1"))
    if args.pin and args.file == "-":
        raise DstuiError(_("--pin needs a file, not standard input"))
    size = MAX_SIZE
    if args.max_size:
        from dstui.units import parse_size

        size = parse_size(args.max_size)
    facts = None
    if args.facts:
        from dstui.facts.describe import load_facts

        facts = load_facts(args.facts)
    new = args.new or release_of(None, facts)[0]
    context = Context(
        release=new,
        engine=args.engine,
        facts=facts,
        world_size=args.world_size,
        args=read_args(args.args) if args.args else None,
        model=model_of(args.model) if args.model else None,
    )
    document = read(args.file, size, strict_json=args.engine in JSON_ENGINES)
    found = core.compare(document, args.old, new, context)
    done: tuple[core.Difference, ...] = ()
    kept = None
    if args.pin:
        changed, done = core.pinned(document, found)
        if changed.text != document.text:
            from dstui.config.write import difference, save

            kept = save(args.file, changed.text)
            sys.stderr.write(difference(document.text, changed.text, args.file))
            found = core.compare(changed, args.old, new, context)
    if args.json:
        print(json.dumps(as_json(found, done, kept), ensure_ascii=False, indent=2))
    else:
        sys.stdout.write("".join(line + "\n" for line in as_text(found, done, str(kept) if kept else None)))
    return Exit.BAD if found.differ else Exit.OK


def as_json(
    found: core.Comparison, done: tuple[core.Difference, ...], kept: os.PathLike[str] | None
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "path": found.path,
        "from": found.old,
        "to": found.new,
        "verdict": {"from": found.verdicts[0], "to": found.verdicts[1]},
        "world_size": found.world_size,
        "world_size_from": found.world_size_from,
        "differ": found.differ,
        "without_schema": list(found.unknown),
        "differences": [_difference_json(d) for d in found.differences],
        "pinned": [{"code": d.code, "pointer": d.pointer} for d in done],
        "backup": None if kept is None else os.fspath(kept),
    }


def _difference_json(d: core.Difference) -> dict[str, Any]:
    out: dict[str, Any] = {
        "kind": d.kind,
        "code": d.code,
        "name": d.name,
        "since": d.since,
        "path": dotted(d.pointer),
        "pointer": d.pointer,
        "line": d.line,
        "column": d.column,
        "message": d.message,
        "effect": d.effect,
        "hint": d.hint,
        "before": d.before,
        "after": d.after,
        "pin": None if d.pin is None else {"title": d.pin.title, "edits": [dict(e) for e in d.pin.edits]},
        "source": d.source,
    }
    return out


def _titles(found: core.Comparison) -> dict[str, str]:
    new = found.new
    return {
        "refused": _("refused by {release}, not before:").format(release=new),
        "default": _("other defaults, and this file relies on them:"),
        "ignored": _("no effect any more:"),
        "changed": _("works differently:"),
        "opens": _("goes wrong in {release}:").format(release=new),
        "closes": _("put right in {release}:").format(release=new),
        "allowed": _("no longer refused:"),
        "read": _("has an effect now:"),
        "lost": _("not possible any more:"),
        "new": _("possible now:"),
    }


def as_text(found: core.Comparison, done: tuple[core.Difference, ...], kept: str | None) -> Iterator[str]:
    """For people: a section for each kind, the release in front, then one line on the whole."""
    titles = _titles(found)
    column = max((width(d.since) for d in found.differences), default=0)
    last = ""
    for d in found.differences:
        if d.kind != last:
            yield titles[d.kind]
            last = d.kind
        place = f"{_said(found.path)}:{d.line}: " if d.line is not None else ""
        yield f"  {pad(d.since, column)}  {place}{d.code} {_said(d.message)}"
        indent = " " * (column + 4)
        for text in (
            _("effect: {text}").format(text=_said(d.effect)) if d.effect else "",
            _("next: {text}").format(text=_said(d.hint)) if d.hint else "",
            _("pin: {title}").format(title=_said(d.pin.title)) if d.pin is not None else "",
        ):
            if text:
                yield indent + text
    for release in found.unknown:
        yield _("no schema for DeepSpeed {release}: keys and types are not checked").format(release=release)
    if done:
        yield _("written into the file: {keys}").format(keys=listed(dict.fromkeys(_key(d) for d in done)))
        if kept:
            yield _("the old file is {path}").format(path=kept)
    n = len(found.differences)
    head = f"{_said(found.path)}: DeepSpeed {found.old} -> {found.new}: "
    if not n:
        yield head + _("no difference for this file")
        return
    text = ngettext("{n} difference", "{n} differences", n).format(n=n)
    left, right = found.verdicts
    if left == "accepted" and right == "rejected":
        text += "; " + _("{release} refuses the file").format(release=found.new)
    elif left == "rejected" and right == "accepted":
        text += "; " + _("{release} accepts the file").format(release=found.new)
    can = sum(d.pin is not None for d in found.differences)
    if can and not done:
        text += "; " + ngettext("--pin writes {n} of them out", "--pin writes {n} of them out", can).format(
            n=can
        )
    yield head + text


def _key(d: core.Difference) -> str:
    return d.pointer.rpartition("/")[2] or d.code


def _said(text: str) -> str:
    """Text from the file must not move the cursor or colour the terminal."""
    return "".join(c if c == "\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
