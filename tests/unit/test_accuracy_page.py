"""``docs/accuracy.md`` says what ``tests/tools/peer_errors.py`` computes from the measured rows and the peers' answers."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_errors", TOOLS / "peer_errors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_errors"] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(tool: ModuleType) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tool.rows()
    return found


@pytest.fixture(scope="module")
def kept(tool: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tool.ANSWERS.read_text(encoding="utf-8"))
    return found


def test_the_pages_are_what_the_rows_say(tool: ModuleType, rows: list[dict[str, Any]]) -> None:
    assert not set(tool.stale(rows)), "python tests/tools/peer_errors.py"


def test_every_row_was_put_to_every_peer(
    tool: ModuleType, rows: list[dict[str, Any]], kept: dict[str, Any]
) -> None:
    """A number of bytes, or why there is none; and what it covers is what it was asked."""
    for row in rows:
        answers = kept["answers"].get(row["case"]["name"], {})
        assert set(answers) == set(tool.PEERS), (
            f"{row['case']['name']}: python tests/tools/peer_errors.py --ask"
        )
        for name, answer in answers.items():
            reason = tool.PEERS[name].covers(row)
            assert isinstance(answer, int) or answer.startswith(("not asked: ", "refused: ")), answer
            assert (reason is None) == (answer != f"not asked: {reason}"), (row["case"]["name"], name, answer)


def test_each_peer_says_what_it_is(tool: ModuleType, kept: dict[str, Any]) -> None:
    for name in tool.PEERS:
        about = kept["peers"][name]
        assert all(about[k] for k in ("name", "version", "date", "command"))
        assert about["command"] == tool.PEERS[name].command
        assert sum(isinstance(a[name], int) for a in kept["answers"].values()) >= 5


def test_another_measurement_changes_the_page(
    tool: ModuleType, rows: list[dict[str, Any]], kept: dict[str, Any]
) -> None:
    changed = copy.deepcopy(rows[:6])
    before = tool.tables(changed, kept, "en")
    changed[0]["peak_alloc"] = round(changed[0]["peak_alloc"] * 1.2)
    after = tool.tables(changed, kept, "en")
    assert before["ours"] != after["ours"] and before["rows"] != after["rows"]


def test_both_languages_have_the_same_figures(
    tool: ModuleType, rows: list[dict[str, Any]], kept: dict[str, Any]
) -> None:
    english, chinese = (tool.tables(rows[:6], kept, k)["rows"].splitlines() for k in ("en", "zh"))
    assert [x.split("|")[3:] for x in english[1:]] == [x.split("|")[3:] for x in chinese[1:]]
