"""``dstui explain``: rules, run causes and keys."""

from __future__ import annotations

import json

import pytest

from dstui import cli
from dstui.config import schema
from dstui.rules import keypages
from dstui.rules.registry import all_rules


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["explain", *argv])
    got = capsys.readouterr()
    return code, got.out + got.err


def test_a_rule_by_code_and_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["ds204"], capsys)
    assert code == 0
    for part in ("DS204 offload-param-below-stage-3", "What", "Why", "Example", "Fix", "Source"):
        assert part in text
    assert said(["offload-param-below-stage-3"], capsys) == (0, text)


def test_every_rule_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in all_rules():
        code, text = said([rule.code], capsys)
        assert code == 0
        assert rule.page.source.split()[0] in text.replace("\n    ", " ")


def test_a_run_cause(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["DR101"], capsys)
    assert code == 0
    assert "checkpoint 1" in text


def test_a_key_with_its_defaults_by_release(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["zero_optimization.offload_optimizer.pin_memory", "--deepspeed", "0.19.8"], capsys)
    assert code == 0
    assert "false, true from 0.19.5" in text
    assert "DS501" in text
    code, text = said(["/gradient_clipping", "--json"], capsys)
    page = json.loads(text)
    assert page["kind"] == "key"
    assert page["defaults"] == [{"from": "0.9.5", "value": 0.0}, {"from": "0.19.3", "value": 1.0}]


def test_a_removed_a_renamed_and_an_ambiguous_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.19.8" in said(["elasticity", "--deepspeed", "0.19.8"], capsys)[1]
    assert "intra_op_parallelism" in said(["aio.thread_count"], capsys)[1]
    code, text = said(["pin_memory"], capsys)
    assert code == 0
    assert "zero_optimization.offload_param.pin_memory" in text


def test_did_you_mean(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["ofload_param"], capsys)
    assert code == 2
    assert "offload_param" in text
    code, text = said(["gradient_cliping"], capsys)
    assert "did you mean gradient_clipping?" in text


def test_every_key_of_each_minor_release_has_a_page() -> None:
    for release in {r.rpartition(".")[0]: r for r in schema.releases()}.values():  # the newest of each minor
        for path in keypages.all_paths(release):
            page = keypages.page(path, release)
            assert page.source.startswith("deepspeed/")
            assert page.known or page.until or page.refused_from or page.replaced_by or page.since, path
            json.dumps(page.to_json())


def test_list_and_unknown_release(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["--list"], capsys)
    assert code == 0
    assert "DS204  offload-param-below-stage-3" in text
    assert "DR101" in text
    assert said(["zero_optimization.stage", "--deepspeed", "0.1.0"], capsys)[0] == 2
