"""Every rule keeps the contract: code, name, page, source, an example that it flags, fixes that help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dstui.config.document import Document
from dstui.rules import registry
from dstui.rules.diagnostic import Severity
from dstui.rules.engine import check_document
from dstui.rules.registry import Rule, all_changes, all_rules, find, matches, selected, version_key
from tests.rules_tools import check_text, codes, context

RULES = all_rules()


def test_there_is_a_family_for_each_hundred() -> None:
    assert {r.family for r in RULES} == {f"DS{n}" for n in range(1, 10)}
    assert len(RULES) >= 100


@pytest.mark.parametrize("rule", [*RULES, *all_changes()], ids=lambda r: r.code)
def test_page_is_complete(rule: Rule) -> None:
    page = rule.page
    for text in (page.what, page.why, page.fix):
        assert text.strip().endswith((".", "?"))
        assert "  " not in text
    assert "/" in page.source
    assert page.example or rule.code in ("DS100", "DS875")
    assert find(rule.code.lower()) is rule
    assert find(rule.name) is rule


def test_every_rule_about_deepspeed_cites_a_file_and_a_release() -> None:
    ours = {"DS100", "DS198", "DS875"}
    for rule in (*RULES, *all_changes()):
        if rule.code not in ours:
            assert re.search(r"\d+\.\d+|of each release|in question|ms-swift", rule.page.source), rule.code


@pytest.mark.parametrize("rule", [r for r in RULES if r.page.example], ids=lambda r: r.code)
def test_example_is_flagged_by_its_rule(rule: Rule, tmp_path: Path) -> None:
    report = check_text(rule.page.example, rule.context, tmp_path)
    assert rule.code in codes(report)
    assert "DS100" not in codes(report)
    assert rule.code == "DS199" or "DS199" not in codes(report), "one refusal told twice"
    mine = [f for f in report.findings if f.code == rule.code]
    for finding in mine:
        assert finding.severity is rule.severity
        assert finding.message
        assert not finding.message.endswith(".")
        if rule.severity.rank <= Severity.NO_EFFECT.rank:
            assert finding.effect
            assert finding.hint


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.page.example and r.severity is Severity.ERROR], ids=lambda r: r.code
)
def test_an_error_at_parse_goes_with_a_rejected_file_and_a_later_one_does_not(
    rule: Rule, tmp_path: Path
) -> None:
    report = check_text(rule.page.example, rule.context, tmp_path)
    if report.verdict in (None, "unknown"):
        return
    assert (rule.when == "parse") == (report.verdict == "rejected")


@pytest.mark.parametrize("rule", [r for r in RULES if r.page.example], ids=lambda r: r.code)
def test_a_fix_applies_and_removes_its_finding(rule: Rule, tmp_path: Path) -> None:
    where = context(rule.context)
    report = check_text(rule.page.example, rule.context, tmp_path)
    for finding in report.findings:
        if finding.code != rule.code or finding.fix is None:
            continue
        document = Document.parse(rule.page.example, strict_json=where.engine == "hf")
        after = check_document(document.edited(finding.fix.edits), where)
        assert (finding.code, finding.pointer) not in {(f.code, f.pointer) for f in after.findings}
        if finding.fix.safe:
            before = [f for f in report.findings if f.severity.rank <= Severity.NO_EFFECT.rank]
            still = [f for f in after.findings if f.severity.rank <= Severity.NO_EFFECT.rank]
            assert len(still) <= len(before)


def test_a_good_config_gets_nothing_worse_than_a_default_that_changed() -> None:
    text = """{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
      "steps_per_print": 10, "log_level": "info", "bf16": {"enabled": true},
      "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
      "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e7,
                            "offload_optimizer": {"device": "cpu", "pin_memory": true}}}"""
    report = check_text(text, {"world_size": 8})
    assert report.verdict == "accepted"
    assert report.findings == ()


def test_codes_and_names_cannot_be_declared_twice() -> None:
    fields = {"what": "a.", "why": "b.", "example": "{}", "fix": "c.", "source": "d/e"}
    for code, name in (("DS204", "another-name"), ("DS299", "offload-param-below-stage-3")):
        with pytest.raises(ValueError, match="declared twice"):
            registry.rule(code, name, Severity.INFO, "always", **fields)
    with pytest.raises(ValueError, match="three digits"):
        registry.rule("DS2", "a-name", Severity.INFO, "always", **fields)
    with pytest.raises(ValueError, match="kebab"):
        registry.rule("DS299", "A_Name", Severity.INFO, "always", **fields)


def test_check_never_runs_a_change() -> None:
    assert not {c.code for c in all_changes()} & {r.code for r in RULES}
    with pytest.raises(ValueError, match="declared twice"):
        registry.change(
            "DS204",
            "another-name",
            "new",
            "0.19.5",
            what="a.",
            why="b.",
            example="{}",
            fix="c.",
            source="d/e",
        )


def test_release_range() -> None:
    rule = find("DS805")
    assert rule is not None
    assert not rule.holds(version_key("0.15.1"))
    assert rule.holds(version_key("0.15.2"))
    assert rule.holds(version_key("0.18.9+cu126"))
    assert not rule.holds(version_key("0.19.0"))
    assert not rule.holds(version_key("0.100.0"))


def test_selection_by_prefix() -> None:
    assert matches("DS204", ("ds2",))
    assert matches("DS204", ("ALL",))
    assert not matches("DS204", ("DS3", ""))
    assert selected("DS204", (), ())
    assert not selected("DS204", (), ("DS2",))
    assert not selected("DS301", ("DS2",), ())
    assert selected("DS204", ("DS204",), ("DS2",))
    assert not selected("DS204", ("DS2",), ("DS204",))
