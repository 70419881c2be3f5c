"""What was answered for a script lies in one file, by the run and by the wizard."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstui.runs import answers


def test_run_and_wizard_keep_their_answers_side_by_side(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    link = tmp_path / "link.py"
    link.symlink_to(script)
    answers.remember(script, {"options": ["--cfg", "{config}"]})
    answers.remember(link, {"engine": "hf", "args": "--epochs 3"})
    found = dict(answers.recall(script))
    assert found.pop("at") > 0
    assert found == {"options": ["--cfg", "{config}"], "engine": "hf", "args": "--epochs 3"}
    assert answers.options(link) == ["--cfg", "{config}"]
    assert answers.recall(tmp_path / "other.py") == {} and answers.options(tmp_path / "other.py") is None
    assert answers.place().stat().st_mode & 0o077 == 0


def test_secrets_are_not_remembered_and_old_scripts_go() -> None:
    answers.remember("/a.py", {"args": "--steps 3"})
    answers.remember("/a.py", {"engine": "hf", "args": "--hub_token abc"})
    assert "abc" not in answers.place().read_text()
    assert answers.recall("/a.py")["engine"] == "hf" and "args" not in answers.recall("/a.py")
    data = json.loads(answers.place().read_text())
    data["scripts"].update({f"/{i}.py": {"at": 2e9 + i} for i in range(answers.MOST - 1)})
    answers.place().write_text(json.dumps(data))
    answers.remember("/new.py", {"engine": "plain"})
    left = json.loads(answers.place().read_text())["scripts"]
    assert len(left) == answers.MOST and "/new.py" in left and "/a.py" not in left


@pytest.mark.parametrize("text", ["", "[]", '{"scripts": 3}', '{"scripts": {"/a.py": 1}}', "\udcff"])
def test_a_damaged_file_counts_as_empty(text: str) -> None:
    answers.place().parent.mkdir(parents=True, exist_ok=True)
    answers.place().write_bytes(os.fsencode(text))
    assert answers.recall("/a.py") == {}
    answers.remember("/a.py", {"engine": "hf"})
    assert answers.recall("/a.py")["engine"] == "hf"


def test_a_place_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "file" / "below"))
    answers.remember("/a.py", {"engine": "hf"})
    assert answers.recall("/a.py") == {}
