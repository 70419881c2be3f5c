"""``dstui diff`` and ``dstui schema``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstui import cli


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text('{train_batch_size: 8 # eight\n "zero_optimization": {"stage": 2}}')
    b.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "steps_per_print": null}')
    return str(a), str(b)


def test_diff_says_what_differs(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", *pair]) == 1
    out = capsys.readouterr().out
    assert "zero_optimization.stage" in out and "2 -> 3" in out
    assert "false (not written) -> true (not written)" in out
    assert "steps_per_print" in out.partition("same meaning")[2]


def test_diff_of_equals_is_0(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", pair[0], pair[0]]) == 0
    assert "no difference" in capsys.readouterr().out


def test_diff_json(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "--json", "--deepspeed", "0.19.4", *pair]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 1 and answer["differ"] is True and answer["deepspeed"] == "0.19.4"
    assert {"op": "replace", "path": "/zero_optimization/stage", "value": 3} in answer["edits"]
    assert {c["pointer"] for c in answer["effective"]} == {
        "/zero_optimization/stage",
        "/zero_optimization/overlap_comm",
    }


def test_diff_of_what_cannot_be_read_is_2(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 1, "a": 2}')
    assert cli.main(["diff", pair[0], str(bad)]) == 2
    assert "bad.json:1:10: the key 'a' is there twice" in capsys.readouterr().err
    assert cli.main(["diff", pair[0], str(tmp_path / "none.json")]) == 2


def test_every_unreadable_file_gets_a_next_step(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    for text in (
        "[1, 2]",
        "null",
        '{"a": ',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"a": "\udcff"}',
    ):
        bad.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert cli.main(["diff", pair[0], str(bad)]) == 2
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2 and err[0].startswith("error: ") and err[1].startswith("  "), text[:20]


def test_a_file_of_another_tool_is_named_not_compared(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "args.json"
    other.write_text('{"output_dir": "x", "per_device_train_batch_size": 4, "deepspeed": "ds.json"}')
    assert cli.main(["diff", pair[0], str(other)]) == 2
    assert "Hugging Face training arguments" in capsys.readouterr().err


def test_schema_is_one_self_contained_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "--deepspeed", "0.19.4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["$schema"].endswith("2020-12/schema") and shown["x-dstui"] == {
        "deepspeed": "0.19.4",
        "removed": [],
    }
    zero = shown["$defs"]["DeepSpeedZeroConfig"]["properties"]
    assert zero["stage"]["default"] == 0 and zero["stage"]["description"]


def test_schema_of_an_unknown_release_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "--deepspeed", "0.13.2"]) == 2
    err = capsys.readouterr().err
    assert "no schema for DeepSpeed 0.13.2" in err and "0.19.8" in err
