"""Failures that people reported in public, as far as a config, training arguments and a machine can show them.

``tests/data/reports.json``: ``cases`` (what was run, the codes that must speak, words that the answer must hold; a word
that begins with / is a pointer that must be named) and ``not`` (why the others cannot be a fixture). ``pytest -s`` tells
the count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui.rules.diagnostic import FileReport
from dstui.rules.engine import Options, check_path
from tests.rules_tools import check_text, codes, context

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "reports.json").read_text(encoding="utf-8")
)
CASES: list[dict[str, Any]] = DATA["cases"]


def report_of(case: dict[str, Any], folder: Path) -> FileReport:
    if case["config"] is None:
        return check_path(str(folder / case["path"]), Options(context(case)))
    return check_text(json.dumps(case["config"]), case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_the_answer_that_was_missing(case: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(case, tmp_path)
    assert "DS100" not in codes(report)
    assert set(case["codes"]) <= set(codes(report)), [(f.code, f.message) for f in report.findings]
    said = [f for f in report.findings if f.code in case["codes"]]
    text = "\n".join(f"{f.message}\n{f.effect}\n{f.hint}\n{f.fix.title if f.fix else ''}" for f in said)
    for word in case["words"]:
        if word.startswith("/"):
            assert word in {f.pointer for f in said}
        else:
            assert word in text, (word, text)


def test_every_report_is_a_case_or_has_a_reason(shared: Path) -> None:
    reports = json.loads((shared / "facts" / "reports.json").read_text(encoding="utf-8"))
    wanted = {r["id"] for r in reports if "V" in r["catch"].split(",")}
    answered, not_ours = {c["id"] for c in CASES}, set(DATA["not"])
    assert not answered & not_ours
    assert answered | not_ours == wanted
    print(f"\n{len(answered)} of {len(wanted)} reports are answered by check")
    for reason in dict.fromkeys(DATA["not"].values()):
        ids = [i for i, r in DATA["not"].items() if r == reason]
        print(f"  {len(ids):>3}  {reason}: {' '.join(ids)}")
