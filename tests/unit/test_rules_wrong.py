"""Wrong configs that people really write: each is named with the right culprit and, where there is one, a fix.

``tests/data/wrong/cases.json``: group ``wrong`` are the 38 of our study of what tools let through, ``deprecated``
and ``lenient`` what DeepSpeed accepts on purpose, ``more`` what we met besides. The verdicts are DeepSpeed
0.19.8's own (tests/real/test_rules_live.py asks it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui.rules.diagnostic import FileReport, Severity
from dstui.rules.engine import Options, check_path
from tests.rules_tools import codes, context

FOLDER = Path(__file__).parent.parent / "data" / "wrong"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))


def report_of(case: dict[str, Any]) -> FileReport:
    return check_path(str(FOLDER / case["file"]), Options(context(case)))


def test_all_38_of_the_study_are_here() -> None:
    assert sum(c["group"] == "wrong" for c in CASES) == 38
    assert {p.name for p in FOLDER.glob("*.json")} == {c["file"] for c in CASES} | {"cases.json"}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["file"][:-5])
def test_named_with_the_right_culprit(case: dict[str, Any]) -> None:
    report = report_of(case)
    assert report.verdict == case["verdict"]
    assert "DS100" not in codes(report)
    serious = {f.severity for f in report.findings if f.severity.rank <= Severity.NO_EFFECT.rank}
    if case["group"] in ("deprecated", "lenient"):
        assert not serious
    if case["code"] is None:
        return
    found = [f for f in report.findings if f.code == case["code"] and f.pointer == case["pointer"]]
    assert len(found) == 1, [(f.code, f.pointer) for f in report.findings]
    assert (found[0].fix is not None) == case["fix"]
    if case["pointer"]:
        assert found[0].line
    if case["verdict"] == "rejected":
        assert any(f.severity is Severity.ERROR for f in report.findings)


@pytest.mark.parametrize("case", [c for c in CASES if c["group"] == "wrong"], ids=lambda c: c["file"][:-5])
def test_a_wrong_config_never_looks_clean(case: dict[str, Any]) -> None:
    report = report_of(case)
    about_the_file = [f for f in report.findings if f.severity is not Severity.MEANING_CHANGED]
    worst = min((f.severity for f in about_the_file), key=lambda s: s.rank)
    limit = Severity.WARNING if case["code"] in ("DS306", "DS606", "DS901") else Severity.NO_EFFECT
    assert worst.rank <= limit.rank
    # what is named worst is the planted culprit, not something else
    assert case["code"] in {f.code for f in about_the_file if f.severity is worst}
