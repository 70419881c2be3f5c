"""``dstui compare RUN RUN...``: runs side by side."""

from __future__ import annotations

import argparse
import csv
import io
import json

from dstui.errors import DstuiError, Exit
from dstui.i18n import _
from dstui.plain.columns import pad, width, wrap
from dstui.plain.which import run_to_read
from dstui.runs.compare import Column, Comparison, compare
from dstui.runs.compared import differences, notes, table, told, verdicts

WIDTH = 100
FORMATS = ("text", "json", "markdown", "csv")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=_("id, unique prefix, name, path or `last`; RUN,RUN are repeats of one kind in one column"),
    )
    add_price(parser)
    add_format(parser)


def add_price(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="X", help=_("also tell what each run cost")
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="text", help=_("default: text"))
    parser.add_argument("--json", action="store_const", dest="format", const="json", help=_("as JSON"))


def refuse_price(price: float | None) -> None:
    """Raises DstuiError for what is no price."""
    if price is not None and not 0 <= price < float("inf"):
        raise DstuiError(
            _("--price-per-gpu-hour {x}: not a price").format(x=price), _("give a number, such as 2.5")
        )


def run(args: argparse.Namespace) -> int:
    refuse_price(args.price_per_gpu_hour)
    columns = [
        Column(tuple(run_to_read(r) for r in word.split(",") if r))
        if "/" not in word
        else Column((run_to_read(word),))
        for word in args.runs
    ]
    if len(columns) < 2:
        raise DstuiError(_("one run alone cannot be compared"), _("give two runs or more; see `dstui runs`"))
    print(shown(compare(columns, args.price_per_gpu_hour), args.format))
    return Exit.OK


def shown(found: Comparison, form: str) -> str:
    """The answer in one of FORMATS."""
    if form == "json":
        return json.dumps(found.to_json(), ensure_ascii=False, indent=2)
    return {"text": text, "markdown": markdown, "csv": as_csv}[form](found).rstrip("\n")


def text(found: Comparison) -> str:
    """The table for a terminal, the differences of the configs, the verdicts in words."""
    rows = table(found)
    other = differences(found)
    sizes = [max(width(r[i]) for r in [*rows, *other]) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        return "  ".join(pad(cell, size) for cell, size in zip(row, sizes, strict=True)).rstrip()

    out = [line(row) for row in rows]
    out += (
        ["", _("config:"), *(line(row) for row in other)] if other else ["", _("the configs mean the same")]
    )
    out += ["", *(row for t in told(found) for row in wrap(t, WIDTH, rest="  "))]
    return "\n".join(out)


def markdown(found: Comparison) -> str:
    """The same as a Markdown table with a list below it."""
    rows = table(found)
    bar = ["---"] * len(rows[0])
    body = [rows[0], bar, *rows[1:], *([f"`{r[0]}`", *r[1:]] for r in differences(found))]
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in body]
    return "\n".join([*lines, "", *(f"- {w}" for w in [*verdicts(found), *notes(found), *found.warnings])])


def as_csv(found: Comparison) -> str:
    """Plain numbers, one column of the table a row; named as in the JSON answer, then the config's keys."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(found.figures[0].to_json())
    writer.writerow([*names, *(path for path, _v in found.differences)])
    for n, f in enumerate(found.figures):
        data = f.to_json()
        data["runs"] = " ".join(f.runs)
        row = [data[k] for k in names]
        writer.writerow([*row, *(json.dumps(v[n]) for _p, v in found.differences)])
    return out.getvalue()
