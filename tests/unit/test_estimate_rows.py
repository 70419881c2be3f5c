"""The estimate beside training cases measured on one and two H200 (``tests/tools/measure_grid.py``).

``cases.group`` says which rows were looked at when the replay was written, which were set aside, chosen by the hash of
their name before anything was measured, and which were predicted before they were measured (``predicted.json``, whose
figures are compared as they were written then). The bounds are those that must hold on rows never seen.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dstui.estimate.result import Range

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "gpu"


def _load(name: str) -> ModuleType:
    folder = TESTS / "tools"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


compare = _load("compare_rows")
Found = dict[str, dict[str, tuple[Range, int]]]


@pytest.fixture(scope="session")
def measured() -> dict[str, dict[str, Any]]:
    lines = [line for path in sorted(DATA.glob("h200*.jsonl")) for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines if line.strip()]
    return {r["case"]["name"]: r for r in rows if r["ok"]}


@pytest.fixture(scope="session")
def found(measured: dict[str, dict[str, Any]]) -> Found:
    return {name: compare.pairs(row) for name, row in measured.items()}


def chosen(found: Found, group: str) -> Found:
    return {n: f for n, f in found.items() if compare.cases.group(n) == group}


def errors(found: Found, what: str) -> dict[str, float]:
    return {n: f[what][0].expected / f[what][1] - 1 for n, f in found.items() if what in f}


BOUNDS = {"allocated": (0.01, 0.03), "reserved": (0.05, 0.12), "host": (0.07, 0.15)}
"""Mean and worst error of each figure."""
SEEN = {"allocated": (0.001, 0.01), "reserved": (0.015, 0.10), "host": (0.04, 0.12)}
LEAST = {"tuned": 70, "aside": 45, "blind": 24}


@pytest.mark.parametrize("group", list(LEAST))
@pytest.mark.parametrize("what", list(BOUNDS))
def test_mean_and_worst_error(found: Found, what: str, group: str) -> None:
    all_of = errors(chosen(found, group), what)
    assert len(all_of) >= LEAST[group]
    mean, worst = (SEEN if group == "tuned" else BOUNDS)[what]
    assert sum(map(abs, all_of.values())) / len(all_of) <= mean
    beyond = {n: f"{100 * e:+.1f} %" for n, e in all_of.items() if abs(e) > worst}
    assert not beyond


@pytest.mark.parametrize("what", list(BOUNDS))
def test_what_was_predicted_before_it_was_measured(measured: dict[str, dict[str, Any]], what: str) -> None:
    keys = {"allocated": "peak_alloc", "reserved": "peak_reserved", "host": "peak_rss"}
    predicted = json.loads((DATA / "predicted.json").read_text(encoding="utf-8"))
    found = {n: p[what][1] / measured[n][keys[what]] - 1 for n, p in predicted.items() if n in measured}
    assert len(found) >= LEAST["blind"]
    mean, worst = BOUNDS[what]
    assert sum(map(abs, found.values())) / len(found) <= mean
    assert max(map(abs, found.values())) <= worst, found


@pytest.mark.parametrize("what", [*BOUNDS, "device"])
def test_ranges_hold_what_was_measured(found: Found, what: str) -> None:
    held = {n: f[what][0].low <= f[what][1] <= f[what][0].high for n, f in found.items() if what in f}
    assert sum(held.values()) >= 0.95 * len(held), [n for n, h in held.items() if not h]


@pytest.mark.parametrize(("group", "asked", "allowed"), [("tuned", 40, 0), ("aside", 30, 1), ("blind", 4, 0)])
def test_the_verdict_is_right_beyond_three_percent_of_each_threshold(
    measured: dict[str, dict[str, Any]], group: str, asked: int, allowed: int
) -> None:
    found = {n: compare.verdicts(r) for n, r in measured.items() if compare.cases.group(n) == group}
    wrong = [
        (n, round(cap, 2), verdict)
        for n, all_of in found.items()
        for cap, verdict, right in all_of
        if not right
    ]
    assert sum(map(len, found.values())) >= asked
    assert len(wrong) <= allowed, wrong
