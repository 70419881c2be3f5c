"""What DeepSpeed refuses, ignores or changes, row by row, and the code of ours that says it, or why none does.

``tests/data/coverage.json`` is the table. It always has to hold together; where the fact files that it was made from
lie beside the repository, no row of theirs may be missing. ``pytest -s`` prints it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dstui.rules.registry import find
from dstui.runs import causes

TABLE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "coverage.json").read_text(encoding="utf-8")
)
GROUPS: dict[str, dict[str, Any]] = {
    "rules of DeepSpeed": TABLE["rules"],
    "removed keys": TABLE["removed"],
    "unknown keys, by section": TABLE["policies"],
    **{f"section {name}": rows for name, rows in TABLE["sections"].items()},
}


def _name(code: str) -> str | None:
    if code.startswith("DR"):
        cause = causes.find(code)
        return cause.name if cause else None
    rule = find(code)
    return rule.name if rule else None


@pytest.mark.parametrize("group", GROUPS)
def test_every_row_has_a_code_that_exists_or_a_reason(group: str) -> None:
    covered = 0
    print(f"\n{group}")
    for row, entry in GROUPS[group].items():
        assert set(entry) <= {"codes", "why_not"}
        assert bool(entry["codes"]) != bool(entry.get("why_not")), row
        for code in entry["codes"]:
            assert _name(code), (row, code)
        covered += bool(entry["codes"])
        told = ", ".join(f"{c} {_name(c)}" for c in entry["codes"]) or f"- {entry['why_not']}"
        print(f"  {row:<44} {told}")
    print(f"  {covered} of {len(GROUPS[group])} have a code")


def test_figures() -> None:
    assert len(TABLE["rules"]) == 152
    assert sum(bool(e["codes"]) for e in TABLE["rules"].values()) >= 114
    assert len(TABLE["policies"]) == 34
    assert len(TABLE["removed"]) == 14


def test_no_row_of_the_fact_files_is_missing(shared: Path) -> None:
    facts = json.loads((shared / "facts" / "deepspeed-keys.json").read_text(encoding="utf-8"))
    assert {r["id"] for r in facts["rules"]} == set(TABLE["rules"])
    assert set(facts["blocks"]) == set(TABLE["policies"])
    assert {k["key"] for k in facts["removed_keys"]} == set(TABLE["removed"])


def _rows(text: str, section: str) -> list[str]:
    """The rows of the tables of ``section``, or its bullets when it has no table."""
    body = re.split(rf"^##+ {re.escape(section)} .*$", text, flags=re.M)[1]
    body = re.split(r"^##+ ", body, flags=re.M)[0]
    lines = body.splitlines()
    table = [
        line
        for i, line in enumerate(lines)
        if line.startswith("|") and not line.startswith("|---") and not lines[i + 1 : i + 2][0].startswith("|---")
    ]  # fmt: skip
    if section == "6.1":
        return table
    return table or [line[2:] for line in lines if line.startswith("- ")]


@pytest.mark.parametrize("section", TABLE["sections"])
def test_every_row_of_the_version_notes_is_here(section: str, shared: Path) -> None:
    text = (shared / "facts" / "deepspeed-versions.md").read_text(encoding="utf-8") + "\n\n"
    heading = "5." if section == "5" else section
    rows = _rows(text, heading)
    assert len(rows) >= 4
    plain = [row.replace("`", "") for row in rows]
    keys = {k.replace("`", "") for k in TABLE["sections"][section]}
    # each row belongs to the longest key that is in it, and no key is without a row
    owners = {row: max((k for k in keys if k in row), key=len, default="") for row in plain}
    assert not [row[:80] for row, key in owners.items() if not key]
    text_only = (
        {k for k in keys - set(owners.values()) if k in text.replace("`", "")} if section == "6.1" else set()
    )
    assert keys - set(owners.values()) == text_only
