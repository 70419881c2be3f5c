"""A comparison in words: titled cells, sentences, where the figures come from. Shown by the plain verb and the TUI."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dstui.i18n import _, aside, clauses, ngettext
from dstui.runs.compare import Comparison, Figures, Verdict
from dstui.runs.store import state_word
from dstui.units import duration, gib

WIDE = 10.0
"""An interval whose ends are further apart than this factor is not worth its digits."""


def _share(x: float) -> str:
    return f"{100 * x:.1f} %"


def _seconds(x: float) -> str:
    return f"{x:.4g} s"


def _rows() -> list[tuple[str, str, Callable[[Any], str]]]:
    """Field of Figures, its title, how a value is written."""
    return [
        ("state", _("state"), state_word),
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
        text += f" ({round(100 * (value / base - 1), 1) + 0.0:+.1f} %)"
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
    low, high = (round(100 * (x - 1), 1) + 0.0 for x in (v.low, v.high))  # never -0.0
    if v.outcome == "noise":
        head = _("{b}: the difference in time a {what} to {a} is within noise").format(**sides, what=_what(v))
    elif v.outcome == "same":
        head = _("{b}: the same time a {what} as {a}, to half a per cent").format(**sides, what=_what(v))
    elif v.outcome == "faster":
        head = _("{b}: {x} % less time a {what} than {a}").format(**sides, what=_what(v))
    else:
        head = _("{b}: {x} % more time a {what} than {a}").format(**sides, what=_what(v))
    wide = v.high > WIDE * v.low
    sure = (
        _("the runs differ too much among themselves to tell more")
        if wide
        else _("95 % interval {low:+.1f} to {high:+.1f} %").format(low=low, high=high)
    )
    basis = {
        "pairs": ngettext("{n} pair", "{n} pairs", v.count),
        "runs": ngettext("{n} run each", "{n} runs each", v.count),
        "steps": _("one run each: what differs from run to run is not in it"),
    }[v.method].format(n=v.count)
    return head + aside(clauses([sure, basis]))


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


def told(found: Comparison) -> list[str]:
    """Everything beside the table: how sure, where from, what makes it unfair."""
    return [
        *verdicts(found),
        *notes(found),
        *(_("careful: {text}").format(text=w) for w in found.warnings),
    ]
