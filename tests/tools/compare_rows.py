"""Predicted beside measured: the rows of ``measure_grid.py`` through ``dstui.estimate``.

    python tests/tools/compare_rows.py results.jsonl ... [--rows tuned|aside|blind|all] [--quiet|--json]
    python tests/tools/compare_rows.py --predict blind,blind-two     what is expected of cases, as JSON, before a run

Prints every row (GiB predicted/measured and the error), mean and worst error by family and of all, for the rows
that may be tuned on and for those set aside, and the range coverage. Then the thresholds: where a card of that
size really ran out of memory, beside the predicted allocated and reserved peaks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import cases  # noqa: E402

from dstui.estimate.families import shape_from_config  # noqa: E402
from dstui.estimate.inputs import Training  # noqa: E402
from dstui.estimate.memory import estimate  # noqa: E402
from dstui.estimate.result import Estimate  # noqa: E402
from dstui.facts.model import Facts, Gpu, Host  # noqa: E402

GiB = 1 << 30
RELEASE = "0.19.8"
GROUPS = ("tuned", "aside", "blind")
WHAT = ("allocated", "reserved", "device", "host")
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def training(case: cases.Case) -> Training:
    """A case as the estimate is asked about it; fields that this dstui does not have are left out."""
    targets = case.get("targets", "all-linear")
    values: dict[str, Any] = {
        "micro_batch": case["mb"],
        "seq": case["seq"],
        "checkpointing": case["ckpt"],
        "reentrant": bool(case.get("reentrant")),
        "attention": case["attn"],
        "loop": case["loop"],
        "lora_rank": case.get("lora"),
        "lora_targets": targets if isinstance(targets, str) else tuple(targets),
        "lora_dropout": case.get("dropout", 0.0),
        "zero_init": bool(case.get("zero_init")),
        "load_dtype": TYPES[case.get("load_prec", case["prec"])],
        "optimizer": case.get("client"),
        "load_on": case["load"],
        "hold_logits": bool(case.get("hold")),
        "loss": {"liger": "fused"}.get(case.get("loss", ""), case.get("loss") or "standard"),
        "sequence_parallel": case.get("sp", 1),
        "quant": case.get("quant") or "none",
        "expandable": bool(case.get("expandable")),
    }
    known = {f.name for f in dataclasses.fields(Training)}
    return Training(**{k: v for k, v in values.items() if k in known})


def predicted(case: cases.Case, row: dict[str, Any] | None, capacity: int = 141 * GiB) -> Estimate:
    """dstui's estimate of a case on cards of ``capacity`` bytes."""
    world = int(case["world"])
    gpus = tuple(
        Gpu(index=i, memory_total=capacity, memory_free=capacity, compute_capability=(9, 0))
        for i in range(world)
    )
    facts = Facts(gpus=gpus, host=Host(ram_total=512 * GiB, ram_available=500 * GiB))
    shape = shape_from_config(cases.MODELS[case["model"]], case["model"], "measured")
    release = (row or {}).get("ds") or RELEASE
    return estimate(shape, training(case), case["ds"], facts, release=release, changes=False)


def pairs(row: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """``{what: (Range, measured)}`` of those that were measured."""
    e = predicted(row["case"], row)
    host = e.host.peak
    if host is not None:  # of one rank, and of the phases that the case had
        saved = {"16bit": "save_16bit", "checkpoint": "save"}.get(row["case"].get("save"))
        seen = [v for k, v in e.host.phases.items() if not k.startswith("save") or k == saved]
        base = max(v for k, v in e.host.phases.items() if not k.startswith("save"))
        share = max(seen) / base / row["world"]
        if saved == "save_16bit":  # rank 0 alone, whose row it is
            share = (e.host.phases[saved] - (row["world"] - 1) * e.host.phases["step"] / row["world"]) / base
        host = type(host)(*(round(share * v) for v in (host.low, host.expected, host.high)))
    found = {
        "allocated": (e.gpu.allocated, row.get("peak_alloc")),
        "reserved": (e.gpu.reserved, row.get("peak_reserved")),
        "device": (e.gpu.device, row.get("peak_nvml")),
        "host": (host, row.get("peak_rss")),
    }
    return {k: (r, int(m)) for k, (r, m) in found.items() if r is not None and m}


def table(rows: list[dict[str, Any]], title: str, quiet: bool) -> None:
    if not rows:
        return
    print(f"\n## {title}: {len(rows)} rows\n")
    errors: dict[str, dict[str, list[tuple[float, str]]]] = defaultdict(lambda: defaultdict(list))
    inside = dict.fromkeys(WHAT, 0)
    head = f"{'GiB predicted/measured':40s}" + "".join(f"{w:>26s}" for w in WHAT)
    print(head if not quiet else "")
    for row in rows:
        name, family = row["case"]["name"], row["case"]["family"]
        try:
            found = pairs(row)
        except Exception as e:
            print(f"{name:40s} no estimate: {e!r}"[:160])
            continue
        line = f"{name:40s}"
        for what in WHAT:
            if what not in found:
                line += f"{'-':>26s}"
                continue
            span, measured = found[what]
            error = span.expected / measured - 1
            errors[what][family].append((error, name))
            held = span.low <= measured <= span.high
            inside[what] += held
            line += (
                f"{span.expected / GiB:9.2f}/{measured / GiB:7.2f} {100 * error:+6.1f}%{' ' if held else '!'}"
            )
        if not quiet:
            print(line)
    families = sorted({f for by in errors.values() for f in by})
    print(f"\n{'mean, worst (of which row)':40s}" + "".join(f"{w:>20s}" for w in WHAT))
    for family in [*families, "all"]:
        line = f"{family:40s}"
        for what in WHAT:
            values = [
                e for f, found_ in errors[what].items() for e in found_ if family == "all" or f == family
            ]
            if not values:
                line += f"{'-':>20s}"
                continue
            mean = sum(abs(e) for e, _n in values) / len(values)
            worst = max(values, key=lambda v: abs(v[0]))[0]
            line += f"{100 * mean:11.2f}% {100 * worst:+6.1f}%"
        print(line)
    for what in WHAT:
        every = [e for found_ in errors[what].values() for e in found_]
        if every:
            worst3 = sorted(every, key=lambda v: -abs(v[0]))[:3]
            text = ", ".join(f"{n} {100 * e:+.1f}%" for e, n in worst3)
            print(f"{what}: {inside[what]} of {len(every)} within low-high; worst: {text}")


def thresholds(rows: list[dict[str, Any]]) -> None:
    found = [r for r in rows if (r.get("threshold") or {}).get("works")]
    if not found:
        return
    print(
        f"\n## thresholds: {len(found)} settings (GiB)\n\n"
        f"{'':40s}{'fails':>8s}{'works':>8s}{'peak allocated':>16s}{'reserved free':>15s}"
        f"{'ours alloc':>12s}{'ours res.':>12s}   threshold/allocated"
    )
    for r in found:
        t = r["threshold"]
        e = predicted(r["case"], r)
        assert e.gpu.allocated and e.gpu.reserved
        fails = f"{t['fails'] / GiB:8.2f}" if t["fails"] else f"{'?':>8s}"
        print(
            f"{r['case']['name']:40s}{fails}{t['works'] / GiB:8.2f}{t['allocated'] / GiB:16.2f}"
            f"{t['natural'] / GiB:15.2f}{e.gpu.allocated.expected / GiB:12.2f}"
            f"{e.gpu.reserved.expected / GiB:12.2f}   {t['works'] / t['allocated']:.3f}"
        )


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure: rows, mean and worst error (shares; the worst is signed), rows whose range held; verdicts asked
    beside real thresholds and how many were right."""
    out: dict[str, Any] = {}
    found = [pairs(r) for r in rows]
    for what in WHAT:
        spans = [f[what] for f in found if what in f]
        if spans:
            errors = [span.expected / measured - 1 for span, measured in spans]
            out[what] = {
                "rows": len(errors),
                "mean": sum(map(abs, errors)) / len(errors),
                "worst": max(errors, key=abs),
                "held": sum(span.low <= measured <= span.high for span, measured in spans),
            }
    asked = [right for r in rows for _cap, _verdict, right in verdicts(r)]
    out["verdicts"] = {"asked": len(asked), "right": sum(asked)}
    return out


def verdicts(row: dict[str, Any]) -> list[tuple[float, str, bool]]:
    """``(cap as a share of what works, verdict, whether it is right)`` 3 and 10 % beyond a row's real threshold.

    A card that has all the run reserved before the search began is large enough, whatever the search found: it
    empties the cache before each step, after which other pieces are left.
    """
    t = row.get("threshold") or {}
    if not (t.get("works") and t.get("fails")):
        return []
    e = predicted(row["case"], row)
    assert e.gpu.device is not None and e.gpu.reserved is not None
    beside = e.gpu.device.expected - e.gpu.reserved.expected
    out = []
    for cap in (0.9 * t["fails"], 0.97 * t["fails"], 1.03 * t["works"], 1.1 * t["works"]):
        verdict = predicted(row["case"], row, int(cap + beside)).verdict
        fails = cap < min(t["works"], row["peak_reserved"])
        out.append((cap / t["works"], verdict, (verdict == "no") == fails))
    return out


def predictions(sets: list[str]) -> dict[str, Any]:
    """``{case: {figure: [low, expected, high]}}``, host RAM of one rank."""
    out: dict[str, Any] = {}
    for case in (c for name in sets for c in cases.load_cases(name)):
        measured = dict.fromkeys(("peak_alloc", "peak_reserved", "peak_nvml", "peak_rss"), 1)
        found = pairs({"case": case, "world": case["world"], "ds": RELEASE, **measured})
        out[case["name"]] = {what: [r.low, r.expected, r.high] for what, (r, _m) in found.items()}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--rows", choices=(*GROUPS, "all"), default="all")
    parser.add_argument("--quiet", action="store_true", help="no row by row")
    parser.add_argument("--json", action="store_true", help="the figures of each group")
    parser.add_argument("--predict", metavar="SETS", help="predict the cases of these sets instead")
    options = parser.parse_args()
    if options.predict:
        print(json.dumps(predictions(options.predict.split(",")), indent=1))
        return 0
    rows: list[dict[str, Any]] = []
    for path in options.results:
        rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    bad = [r for r in rows if not r["ok"]]
    good = [r for r in rows if r["ok"]]
    if options.rows != "all":
        good = [r for r in good if cases.group(r["case"]["name"]) == options.rows]
    if options.json:
        groups = {n: [r for r in good if cases.group(r["case"]["name"]) == n] for n in GROUPS}
        print(json.dumps({n: figures(rows) for n, rows in groups.items() if rows}, indent=1))
        return 0
    for name in GROUPS:
        table([r for r in good if cases.group(r["case"]["name"]) == name], name, options.quiet)
    thresholds(good)
    if bad:
        print(f"\n{len(bad)} rows without a result:")
        for r in bad:
            last = (r.get("error") or r.get("tail") or "").strip().splitlines()[-1:] or [""]
            print(f"  {r['case']['name']:40s} {last[0][:140]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
