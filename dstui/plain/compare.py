"""``dstui compare RUN RUN...``: runs side by side."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable
from typing import Any

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, ngettext
from dstui.plain.columns import pad, width, wrap
from dstui.plain.which import run_to_read
from dstui.runs.compare import Column, Comparison, Figures, Verdict, compare
from dstui.units import duration, gib

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
        ("batch", _("global batch"), lambda x: f"{x:.0f}"),
        ("steps", _("steps"), lambda x: f"{x:.0f}"),
        ("seconds", _("run time"), duration),
        ("before_first_step", _("until the first step"), duration),
        ("step_time", _("step time (median)"), _seconds),
        ("step_time_spread", _("its spread"), _seconds),
        ("samples_per_second", _("samples/s"), lambda x: f"{x:.4g}"),
        ("tokens_per_second", _("tokens/s"), lambda x: f"{x:.4g}"),
        ("gpu_peak", _("GPU memory, peak"), gib),
        ("allocated_peak", _("allocated, peak"), gib),
        ("host_peak", _("host memory, peak"), gib),
        ("gpu_utilisation", _("GPU use"), _share),
        ("gpu_power", _("power of a card"), lambda x: f"{x:.0f} W"),
        ("communication", _("communication"), _share),
        ("gradient_reduction", _("gradient reduction"), _share),
        ("loss", _("last loss"), lambda x: f"{x:.4f}"),
        ("loss_at", _("loss at step {n}"), lambda x: f"{x:.4f}"),
        ("gpu_hours", _("GPU-hours"), lambda x: f"{x:.3f}"),
        ("price", _("price"), lambda x: f"{x:.2f}"),
        ("gpu_hours_per_million_samples", _("GPU-hours a million samples"), lambda x: f"{x:.4g}"),
        ("price_per_million_samples", _("price of a million samples"), lambda x: f"{x:.4g}"),
    ]


_RELATIVE = (
    "step_time",
    "samples_per_second",
    "tokens_per_second",
    "gpu_peak",
    "allocated_peak",
    "host_peak",
    "gpu_hours_per_million_samples",
    "price_per_million_samples",
)
"""Fields with the difference to the first column behind them."""


def table(found: Comparison) -> list[list[str]]:
    """Head, then one row a figure that at least one column has; differences to the first in per cent."""
    rows = [["", *found.labels]]
    for name, title, write in _rows():
        values = [getattr(f, name) for f in found.figures]
        if all(v is None for v in values):
            continue
        cells = [_cell(name, f, found.figures[0], write) for f in found.figures]
        rows.append([title.format(n=found.equal_step), *cells])
    return rows


def _cell(name: str, f: Figures, first: Figures, write: Callable[[Any], str]) -> str:
    value, base = getattr(f, name), getattr(first, name)
    if value is None:
        return "-"
    text = write(value)
    if name in _RELATIVE and f is not first and base:
        text += f" ({100 * (value / base - 1):+.1f} %)"
    return text


def differences(found: Comparison) -> list[list[str]]:
    return [
        [path, *("-" if v is None else json.dumps(v, ensure_ascii=False) for v in values)]
        for path, values in found.differences
    ]


def verdicts(found: Comparison) -> list[str]:
    """One sentence a column: how much less or more time it takes than the first, and how sure that is."""
    return [sentence(v, found.labels) for v in found.verdicts]


def sentence(v: Verdict, labels: tuple[str, ...]) -> str:
    sides = {"a": labels[0], "b": labels[v.column], "x": f"{100 * abs(v.ratio - 1):.1f}"}
    low, high = (100 * (x - 1) for x in (v.low, v.high))
    if v.outcome == "noise":
        head = _("{b}: the difference to {a} is within noise").format(**sides)
    elif v.outcome == "same":
        head = _("{b}: as fast as {a}, to half a per cent").format(**sides)
    elif v.outcome == "faster":
        head = _("{b}: {x} % less time a {what} than {a}").format(**sides, what=_what(v))
    else:
        head = _("{b}: {x} % more time a {what} than {a}").format(**sides, what=_what(v))
    sure = _("95 % interval {low:+.1f} to {high:+.1f} %").format(low=low, high=high)
    basis = {
        "pairs": ngettext("{n} pair", "{n} pairs", v.count),
        "runs": ngettext("{n} run each", "{n} runs each", v.count),
        "steps": _("one run each: what differs from run to run is not in it"),
    }[v.method].format(n=v.count)
    return f"{head} ({sure}; {basis})"


def _what(v: Verdict) -> str:
    return _("sample") if v.per == "sample" else _("step")


def notes(found: Comparison) -> list[str]:
    """Where the figures come from, and how to get those that are missing."""
    out = []
    sources = {f.step_time_from for f in found.figures if f.step_time_from}
    if len(sources) == 1:
        left = max(f.warmup_steps for f in found.figures)
        out.append(
            ngettext(
                "step times: {source}; the first {n} step is left out",
                "step times: {source}; the first {n} steps are left out",
                left,
            ).format(source=source_title(sources.pop()), n=round(left))
        )
    if all(f.communication is None for f in found.figures):
        out.append(
            _(
                'the share of communication needs "comms_logger" in the config, that of gradient reduction '
                '"wall_clock_breakdown": true; both wait for the device and slow the run down, so take them in runs '
                "of their own: dstui ab --breakdown"
            )
        )
    if any(f.communication is not None for f in found.figures):
        out.append(
            _("communication: each collective waited for, so it is what is left when nothing overlaps")
        )
    releases = {f.deepspeed for f in found.figures if f.deepspeed}
    if len(releases) == 2:
        a, b = (f.deepspeed for f in (found.figures[0], next(f for f in found.figures if f.deepspeed != found.figures[0].deepspeed)))  # fmt: skip
        out.append(
            _(
                "what the releases do differently with a config: dstui versions FILE --from {a} --to {b}"
            ).format(a=a, b=b)
        )
    return out


def source_title(source: str) -> str:
    return {
        "probe": _("measured inside the rank"),
        "stamps": _("times of DeepSpeed's step lines"),
        "script": _("as the script prints them"),
        "throughput": _("DeepSpeed's throughput timer"),
        "timers": _("forward + backward + step of wall_clock_breakdown"),
        "bar": _("the progress bar"),
        "trainer": _("the Trainer's mean over the whole run"),
        "samples": _("samples 1 s apart"),
    }[source]


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
    told = [
        *verdicts(found),
        *notes(found),
        *(_("careful: {text}").format(text=w) for w in found.warnings),
    ]
    out += ["", *(row for t in told for row in wrap(t, WIDTH, rest="  "))]
    return "\n".join(out)


def markdown(found: Comparison) -> str:
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
