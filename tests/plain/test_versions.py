"""``dstui versions`` as people and scripts meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui import cli

TEXT = """{
  // stage 2
  "train_batch_size": 8,
  "gradient_clipping": 1.0, "steps_per_print": 10,
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
"""


def write(folder: Path, text: str = TEXT) -> str:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["versions", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_is_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    code, data = answer([path, "--from", "0.19.4", "--to", "0.19.5"], capsys)
    assert code == 1
    assert data["schema_version"] == 1
    assert (data["path"], data["from"], data["to"]) == (path, "0.19.4", "0.19.5")
    assert data["differ"] is True
    first = data["differences"][0]
    assert set(first) == {
        "kind", "code", "name", "since", "path", "pointer", "line", "column", "message", "effect", "hint", "before",
        "after", "pin", "source",
    }  # fmt: skip
    assert (first["code"], first["kind"], first["since"], first["line"]) == ("DS857", "default", "0.19.5", 5)
    assert first["path"] == "zero_optimization.offload_optimizer.pin_memory"
    assert first["pin"]["edits"][-1] == {
        "op": "add",
        "path": "/zero_optimization/offload_optimizer/pin_memory",
        "value": False,
    }
    assert (data["pinned"], data["backup"]) == ([], None)


def test_text_names_the_release_the_key_and_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "versions",
        write(tmp_path),
        "--from",
        "0.19.4",
        "--to",
        "0.19.5",
        "--model",
        "7B",
        "--world-size",
        "8",
    ]
    assert cli.main(argv) == 1
    out = capsys.readouterr().out
    assert "offload_optimizer.pin_memory is true by default from 0.19.5" in out
    assert "GiB of buffers: each block is rounded up to a power of two; the 8 ranks of a host" in out
    assert out.splitlines()[-1].startswith(f"{tmp_path}/ds.json: DeepSpeed 0.19.4 -> 0.19.5: ")


def test_pin_keeps_comments_and_makes_a_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    code, data = answer([path, "--from", "0.19.4", "--to", "0.19.5", "--pin"], capsys)
    text = Path(path).read_text()
    assert "// stage 2" in text
    assert '"pin_memory": false' in text
    assert (tmp_path / "ds.json.bak").read_text() == TEXT
    assert data["backup"] == str(tmp_path / "ds.json.bak")
    assert data["pinned"] == [{"code": "DS857", "pointer": "/zero_optimization/offload_optimizer/pin_memory"}]
    assert "DS857" not in {d["code"] for d in data["differences"]}
    assert code == 1  # the separate op cannot be pinned
    answer([path, "--from", "0.19.4", "--to", "0.19.5", "--pin"], capsys)
    assert Path(path).read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ds.json", "ds.json.bak"]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert cli.main(["versions", path, "--from", "0.19.8", "--to", "0.19.8"]) == 0
    assert "no difference for this file" in capsys.readouterr().out
    assert cli.main(["versions", path, "--from", "0.19.4", "--to", "0.19.8"]) == 1
    for argv in (
        [path, "--from", "0.1", "--to", "0.19.8"],
        [str(tmp_path / "no.json"), "--from", "0.19.4", "--to", "0.19.8"],
        ["-", "--from", "0.19.4", "--to", "0.19.8", "--pin"],
        [path, "--from", "0.19.4", "--to", "0.19.8", "--world-size", "0"],
        [str(tmp_path), "--from", "0.19.4", "--to", "0.19.8"],
    ):
        assert cli.main(["versions", *argv]) == 2, argv
    assert capsys.readouterr().err.count("error: ") == 5


def test_a_refused_key_says_since_when_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, '{"train_batch_size": 8, "curriculum_learning": {"enabled": true}}')
    assert cli.main(["versions", path, "--from", "0.18.9", "--to", "0.19.8"]) == 1
    out = capsys.readouterr().out
    assert "refused by 0.19.8, not before:" in out
    assert "curriculum_learning was removed in 0.19.8" in out
    assert "data_efficiency.data_sampling.curriculum_learning" in out
    assert "0.19.8 refuses the file" in out


def test_a_release_without_a_schema_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer([write(tmp_path), "--from", "0.12.6", "--to", "0.19.8"], capsys)
    assert code == 1
    assert data["without_schema"] == ["0.12.6"]
    assert data["verdict"] == {"from": "unknown", "to": "accepted"}


def test_text_of_a_file_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path, '{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"\\u001b[2J": 1}}}'
    )
    cli.main(["versions", path, "--from", "0.18.9", "--to", "0.19.8"])
    assert "\x1b" not in capsys.readouterr().out


def test_every_change_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    from dstui.rules.registry import all_changes

    assert cli.main(["explain", "--list"]) == 0
    listed = capsys.readouterr().out
    for rule in all_changes():
        assert f"{rule.code}  {rule.name}" in listed
        assert cli.main(["explain", rule.code]) == 0
        assert rule.page.source.split()[0] in capsys.readouterr().out.replace("\n    ", " ")
