"""``dstui diff A B``: what differs in meaning, effective values included."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dstui.config import schema
from dstui.config.diff import Difference, compare
from dstui.config.document import read
from dstui.config.pointer import dotted
from dstui.errors import Exit
from dstui.i18n import _, ngettext
from dstui.rules.kind import refuse_other


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=_("a config file, - for standard input"))
    parser.add_argument("b", metavar="B")
    parser.add_argument("--deepspeed", metavar="V", help=_("the release that reads them (newest known)"))
    parser.add_argument("--world-size", type=int, metavar="N", help=_("number of ranks"))
    parser.add_argument(
        "--engine",
        choices=("deepspeed", "hf", "accelerate", "lightning"),
        default="deepspeed",
        help=_("who hands the config to DeepSpeed"),
    )
    parser.add_argument("--json", action="store_true", help=_("the answer as JSON"))


def run(args: argparse.Namespace) -> int:
    strict = args.engine in ("hf", "accelerate")
    a, b = read(args.a, strict_json=strict), read(args.b, strict_json=strict)
    for document in (a, b):
        refuse_other(document.data, document.path)
    release = args.deepspeed or schema.newest()
    found = compare(a.data, b.data, release=release, world_size=args.world_size, engine=args.engine)
    if args.json:
        print(json.dumps(as_json(found, args.a, args.b, release), ensure_ascii=False, indent=2))
    else:
        print("\n".join(as_text(found, release)))
    return Exit.BAD if found.differ else Exit.OK


def as_json(found: Difference, a: str, b: str, release: str) -> dict[str, Any]:
    effective = None
    if found.effective is not None:
        effective = [
            {
                "path": c.path,
                "pointer": c.pointer,
                "a": c.a,
                "b": c.b,
                "a_given": c.a_given,
                "b_given": c.b_given,
            }
            for c in found.effective
        ]
    return {
        "schema_version": 1,
        "a": {"path": a, "verdict": found.a.verdict, "world_size": found.a.world_size},
        "b": {"path": b, "verdict": found.b.verdict, "world_size": found.b.world_size},
        "deepspeed": release,
        "differ": found.differ,
        "edits": list(found.edits),
        "effective": effective,
        "same_meaning": list(found.same_meaning),
        "unread": list(found.unread),
    }


def as_text(found: Difference, release: str) -> list[str]:
    rows: list[str] = []
    if found.effective is None:
        rows.append(
            _("no schema for DeepSpeed {release}: only the files are compared").format(release=release)
        )
        for edit in found.edits:
            rows.append(f"  {edit['op']} {dotted(edit['path'])}" + _tail(edit))
    else:
        width = min(60, max((len(c.path) for c in found.effective), default=0))
        for c in found.effective:
            left, right = _side(c.a, c.a_given), _side(c.b, c.b_given)
            rows.append(f"{c.path:<{width}}  {left} -> {right}")
    for title, pointers in (
        (_("written differently, same meaning:"), found.same_meaning),
        (_("not read by DeepSpeed {release}:").format(release=release), found.unread),
    ):
        if pointers:
            rows.append(title)
            rows += [f"  {dotted(p)}" for p in pointers]
    if found.a.verdict != found.b.verdict:
        rows.append(_("A is {a}, B is {b}").format(a=found.a.verdict, b=found.b.verdict))
    if not found.differ:
        rows.append(_("no difference in meaning"))
    elif found.effective:
        n = len(found.effective)
        rows.append(
            ngettext("{n} effective value differs", "{n} effective values differ", n).format(n=n)
            + f" (DeepSpeed {release})"
        )
    return rows


def _side(value: Any, given: bool) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if given else _("{value} (not written)").format(value=text)


def _tail(edit: Any) -> str:
    return ": " + json.dumps(edit["value"], ensure_ascii=False) if "value" in edit else ""
