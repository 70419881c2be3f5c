"""``dstui compare RUN RUN...``: runs side by side."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _
from dstui.plain.columns import pad, width
from dstui.plain.which import run_to_read
from dstui.runs.compare import Comparison, Figures, compare
from dstui.units import duration, gib


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_("id, unique prefix, name, path or `last`"))
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="X", help=_("also tell what each run cost")
    )
    parser.add_argument(
        "--format", choices=("text", "json", "markdown", "csv"), default="text", help=_("default: text")
    )
    parser.add_argument("--json", action="store_const", dest="format", const="json", help=_("as JSON"))


def run(args: argparse.Namespace) -> int:
    if len(args.runs) < 2:
        raise DstuiError(_("one run alone cannot be compared"), _("give two runs or more; see `dstui runs`"))
    if args.price_per_gpu_hour is not None and args.price_per_gpu_hour < 0:
        raise DstuiError(_("--price-per-gpu-hour {x}: not a price").format(x=args.price_per_gpu_hour))
    found = compare([run_to_read(r) for r in args.runs], args.price_per_gpu_hour)
    if args.format == "json":
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=2))
        return Exit.OK
    print({"text": text, "markdown": markdown, "csv": as_csv}[args.format](found).rstrip("\n"))
    return Exit.OK


def _share(x: float) -> str:
    return f"{100 * x:.1f} %"


def _seconds(x: float) -> str:
    return f"{x:.4g} s"


def _rows() -> list[tuple[str, str, Callable[[Any], str]]]:
    """Field of Figures, its title, how a value is written."""
    return [
        ("state", _("state"), str),
        ("deepspeed", "DeepSpeed", str),
        ("torch", "torch", str),
        ("gpu", _("cards"), str),
        ("ranks", _("ranks"), str),
        ("batch", _("global batch"), str),
        ("steps", _("steps"), str),
        ("seconds", _("run time"), duration),
        ("step_time", _("step time (median)"), _seconds),
        ("step_time_spread", _("its spread"), _seconds),
        ("samples_per_second", _("samples/s"), lambda x: f"{x:.4g}"),
        ("tokens_per_second", _("tokens/s"), lambda x: f"{x:.4g}"),
        ("gpu_peak", _("GPU memory, peak"), gib),
        ("allocated_peak", _("allocated, peak"), gib),
        ("host_peak", _("host memory, peak"), gib),
        ("gpu_utilisation", _("GPU use"), _share),
        ("communication", _("gradient reduction"), _share),
        ("loss", _("last loss"), lambda x: f"{x:.4f}"),
        ("gpu_hours", _("GPU-hours"), lambda x: f"{x:.3f}"),
        ("price", _("price"), lambda x: f"{x:.2f}"),
    ]


_FASTER = ("step_time", "samples_per_second", "tokens_per_second")


def table(found: Comparison) -> list[list[str]]:
    """Head, then one row a figure that at least one run has; differences to the first run in per cent."""
    head = ["", *(f.name or f.run for f in found.figures)]
    if len(set(head[1:])) < len(head) - 1:
        head = ["", *(f.run for f in found.figures)]
    rows = [head]
    for field, title, write in _rows():
        values = [getattr(f, field) for f in found.figures]
        if all(v is None for v in values):
            continue
        rows.append([title, *(_cell(field, f, found.figures[0], write) for f in found.figures)])
    return rows


def _cell(field: str, f: Figures, first: Figures, write: Callable[[Any], str]) -> str:
    value, base = getattr(f, field), getattr(first, field)
    if value is None:
        return "-"
    shown = write(value)
    if field in _FASTER and f is not first and base:
        shown += f" ({100 * (value / base - 1):+.1f} %)"
    return shown


def differences(found: Comparison) -> list[list[str]]:
    return [
        [path, *("-" if v is None else json.dumps(v, ensure_ascii=False) for v in values)]
        for path, values in found.differences
    ]


def text(found: Comparison) -> str:
    rows = table(found)
    other = differences(found)
    sizes = [max(width(r[i]) for r in [*rows, *other]) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        return "  ".join(pad(cell, size) for cell, size in zip(row, sizes, strict=True)).rstrip()

    out = [line(row) for row in rows]
    out += (
        ["", _("config:"), *(line(row) for row in other)] if other else ["", _("the configs mean the same")]
    )
    if all(f.communication is None for f in found.figures):
        out += ["", _('the share of communication needs "wall_clock_breakdown": true in the config')]
    out += [_("careful: {text}").format(text=w) for w in found.warnings]
    return "\n".join(out)


def markdown(found: Comparison) -> str:
    rows = table(found)
    bar = ["---"] * len(rows[0])
    body = [rows[0], bar, *rows[1:], *([f"`{r[0]}`", *r[1:]] for r in differences(found))]
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in body]
    return "\n".join([*lines, "", *(f"- {w}" for w in found.warnings)])


def as_csv(found: Comparison) -> str:
    """Plain numbers, one run a row; columns named as in the JSON answer, then the config's keys."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(found.figures[0].to_json())
    writer.writerow([*names, *(path for path, _v in found.differences)])
    for n, f in enumerate(found.figures):
        row = [f.to_json()[k] for k in names]
        writer.writerow([*row, *(json.dumps(v[n]) for _p, v in found.differences)])
    return out.getvalue()
