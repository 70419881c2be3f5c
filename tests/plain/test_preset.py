"""dstui preset: text, JSON, exit codes, the editor."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from dstui import cli, paths
from dstui.config import presets


def run(*args: str) -> int:
    return cli.main(["preset", *args])


def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = tmp_path / "editor.sh"
    script.write_text("#!/bin/sh\n" + body)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{script} --wait")


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    presets.copy("zero2", "mine")
    (paths.user_presets_dir() / "bad.json").write_text("{")
    assert run("list") == 0
    out = capsys.readouterr().out
    assert "zero3-offload" in out and "mine" in out and "broken" in out
    assert run("list", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1
    by_name = {p["name"]: p for p in data["presets"]}
    assert by_name["zero2"]["shipped"] and not by_name["mine"]["shipped"] and by_name["bad"]["problem"]
    assert run("show", "zero3") == 0
    assert "when" in capsys.readouterr().out
    assert run("show", "zero3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["preset"]["config"]["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    "args",
    [
        (), ("show", "nothing"), ("delete", "zero2"), ("rename", "zero2", "x"), ("copy", "zero2", "zero3"),
        ("copy", "zero2", "../x"), ("import", "/nowhere.json"), ("export", "nothing"), ("edit", "zero2"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_code_2(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    got = capsys.readouterr()
    assert got.out == "" and got.err.startswith("error: ") and "Traceback" not in got.err


def test_copy_rename_delete_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("copy", "zero2", "mine") == 0
    assert run("rename", "mine", "yours", "--json") == 0
    capsys.readouterr()
    target = tmp_path / "ds.json"
    target.write_text("{}")
    assert run("export", "yours", "-o", str(target), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert Path(answer["backup"]).read_text() == "{}"
    assert json.loads(target.read_text()) == presets.load("zero2").config
    assert run("export", "yours") == 0
    assert json.loads(capsys.readouterr().out) == presets.load("zero2").config
    assert run("delete", "yours", "--json") == 0
    assert presets.find("yours") is None


def test_import_explains_old_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zero2 old.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "zero_optimization": {"stage": 2, "cpu_offload": True},
                "bfloat16": {"enabled": True},
            }
        )
    )
    assert run("import", str(path), "--json") == 0
    got = capsys.readouterr()
    assert json.loads(got.out)["preset"]["name"] == "zero2-old"
    assert "cpu_offload" in got.err
    assert run("import", str(path)) == 2  # the name is taken


def test_new_without_terminal_does_not_open_an_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(tmp_path, monkeypatch, "exit 1\n")
    assert run("new", "mine", "--like", "zero3", "--title", "Mine") == 0
    made = presets.load("mine")
    assert made.title == "Mine" and made.config == presets.load("zero3").config


def test_edit_keeps_a_good_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    presets.copy("zero2", "mine")
    editor(tmp_path, monkeypatch, 'sed -i \'s/"stage": 2/"stage": 1/\' "$2"\n')
    assert run("edit", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["preset"]["config"]["zero_optimization"]["stage"] == 1
    assert presets.load("mine").config["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("body", ['echo "{" > "$2"\n', "exit 3\n", 'rm "$2"\n'])
def test_edit_refuses_a_bad_change(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = presets.copy("zero2", "mine")
    assert made.path is not None
    before = made.path.read_bytes()
    editor(tmp_path, monkeypatch, body)
    assert run("edit", "mine") == 2
    assert made.path.read_bytes() == before
    assert "as it was" in capsys.readouterr().err


def test_edit_repairs_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = paths.user_presets_dir()
    folder.mkdir(parents=True)
    (folder / "bad.json").write_text("{")
    editor(
        tmp_path, monkeypatch, 'echo \'{"schema_version": 1, "config": {"train_batch_size": 2}}\' > "$2"\n'
    )
    assert run("edit", "bad") == 0
    assert presets.load("bad").config == {"train_batch_size": 2}


def test_a_missing_editor_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    presets.copy("zero2", "mine")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "/nowhere/editor")
    assert run("edit", "mine") == 2
    assert "EDITOR" in capsys.readouterr().err
