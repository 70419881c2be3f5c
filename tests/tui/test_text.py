"""Widths, wrapping and the panel's lines: pure functions."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstui.estimate.result import Binds, Change, Estimate, GpuFit, HostFit, Phase, Range
from dstui.rules.diagnostic import Finding, Severity
from dstui.session.model import Batch, Report
from dstui.tui import entry, text
from dstui.tui.terminal import ASCII, UNICODE
from dstui.tui.widgets import panel
from dstui.tui.widgets.lines import _merged
from dstui.units import GiB
from tests.tui.conftest import plain_text

WORDS = st.text(alphabet="ab c中文。，-/ é", max_size=80)


@given(WORDS, st.integers(1, 40))
def test_pad_is_exact(value: str, cells: int) -> None:
    assert text.width(text.pad(value, cells)) == cells


@given(WORDS, st.integers(4, 40))
def test_clips_never_exceed(value: str, cells: int) -> None:
    assert text.width(text.clip(value, cells)) <= cells
    assert text.width(text.clip_middle(value, cells)) <= cells
    row = text.line((value, "good"), (value, "bad"))
    assert text.line_width(text.clip_line(row, cells)) <= cells


@given(WORDS, st.integers(2, 40))
def test_wrap_keeps_everything_but_blanks(value: str, cells: int) -> None:
    rows = text.wrap(value, cells)
    assert all(text.width(r) <= cells for r in rows)
    assert "".join("".join(rows).split()) == "".join(value.split())


@pytest.mark.parametrize("cells", [-3, 0, 1, 2, 3])
def test_wrap_ends_where_a_character_is_wider_than_the_row(cells: int) -> None:
    assert "".join(text.wrap("放得下 a", cells)).replace(" ", "") == "放得下a"


def test_wrap_breaks_between_chinese_characters() -> None:
    assert text.wrap("显存不够时，先降低批量。", 8) == ["显存不够", "时，先降", "低批量。"]


def test_limit_marks_the_cut() -> None:
    rows = text.wrapped("one two three four five six", 9, limit=2)
    assert len(rows) == 2
    assert plain_text(rows).endswith("…")
    assert all(text.line_width(r) <= 9 for r in rows)


@given(st.lists(st.tuples(WORDS, st.sampled_from(list(text.ROLES))), max_size=8))
def test_merging_styles_keeps_the_text(spans: list[tuple[str, str]]) -> None:
    merged = _merged(tuple(spans))
    assert "".join(t for t, _r in merged) == "".join(t for t, _r in spans)
    assert len(merged) <= len(spans)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_bar_fills_its_cells(glyphs: object) -> None:
    assert glyphs in (UNICODE, ASCII)
    g = UNICODE if glyphs is UNICODE else ASCII
    assert panel.bar(40, 50, 75, 100, 20, g) == g.full * 10 + g.part * 5 + g.empty * 5
    assert panel.bar(90, 120, 150, 100, 20, g) == g.full * 20
    assert panel.bar(1, 1, 1, 0, 20, g) == ""


def _estimate() -> Estimate:
    device = Range(70 * GiB, 75 * GiB, 81 * GiB)
    return Estimate(
        "tight",
        GpuFit(
            80 * GiB,
            Range(60 * GiB, 65 * GiB, 70 * GiB),
            None,
            device,
            (Phase("step", {"params": 15 * GiB, "optimizer": 50 * GiB}),),
        ),
        HostFit(200 * GiB, 20 * GiB, 10 * GiB, Range(25 * GiB, 30 * GiB, 40 * GiB)),
        binds=Binds("gpu", "step", "optimizer"),
        changes=(Change("ZeRO stage 3", (), 10 * GiB, "slower without fast links"),),
    )


def _report(**changes: object) -> Report:
    finding = Finding(
        "DS204",
        "offload-param-below-stage-3",
        Severity.ERROR,
        "init",
        "/zero_optimization/offload_param",
        "needs stage 3",
        hint="set stage 3",
    )
    report = Report(_estimate(), None, (finding,), {}, "{}\n", Batch(1, 2, 4), 4, None)
    return replace(report, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("cells", [38, 60, 100])
def test_panel_pages_stay_in_their_width(cells: int) -> None:
    report = _report()
    for rows in (
        panel.fit_lines(report, cells, UNICODE),
        panel.finding_lines(report, cells, UNICODE),
        panel.json_lines('{\n  "a": 1\n}', cells, UNICODE),
        [panel.status_line(report, cells + 40, UNICODE)],
    ):
        for row in rows:
            assert text.line_width(row) <= cells + 40 * (len(rows) == 1), plain_text([row])


def test_fit_page_says_what_decides() -> None:
    shown = plain_text(panel.fit_lines(_report(), 45, UNICODE))
    assert "tight" in shown and "75.0 GiB of 80.0 GiB" in shown and "decides" in shown
    assert "optimizer" in shown and "50.0 GiB" in shown
    assert "ZeRO stage 3 (-10.0 GiB)" in shown


def test_finding_has_its_letter_code_and_place() -> None:
    shown = plain_text(panel.finding_lines(_report(), 60, ASCII))
    assert "E DS204  zero_optimization.offload_param" in shown
    assert "> set stage 3" in shown
    assert shown.isascii()


def test_status_counts_by_letter() -> None:
    shown = plain_text([panel.status_line(_report(), 100, UNICODE)])
    assert "tight" in shown and "1 E" in shown
    quiet = plain_text([panel.status_line(_report(findings=()), 100, UNICODE)])
    assert "no findings" in quiet


def _spoken(report: Report) -> int:
    """How many findings the status line counts."""
    shown = plain_text([panel.status_line(report, 100, UNICODE)])
    return sum(int(n) for n in re.findall(r"\b(\d+) [!ESNMWI]\b|\b(\d+) !", shown) for n in n if n)


def test_status_counts_what_the_page_lists() -> None:
    error = _report().findings[0]
    info = replace(error, code="DS499", severity=Severity.INFO)
    said = f"{error.code} {error.message}"
    for report in (
        _report(findings=(info,)),
        _report(findings=(error, info), blockers=(said,)),  # the finding that blocks is one finding
        _report(findings=(info,), blockers=("Model: no such file",), warnings=("w", "x")),
    ):
        assert (
            _spoken(report)
            == panel.count(report)
            == len(report.findings) + len(report.warnings) + (report.blockers == ("Model: no such file",))
        )
        rows = plain_text(panel.finding_lines(report, 60, ASCII)).splitlines()
        assert sum(row[:2] in ("! ", "E ", "I ", "W ") for row in rows) == panel.count(report)
    assert "1 I" in plain_text([panel.status_line(_report(findings=(info,)), 100, UNICODE)])
    assert "no findings" in plain_text([panel.status_line(_report(findings=()), 100, UNICODE)])


def test_the_command_that_joins_a_run_works_in_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``make run`` opens dstui in an environment that is not on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert entry._watch("abc") == f"{tmp_path}/python -m dstui watch abc"
    (tmp_path / "dstui").touch(0o755)
    assert entry._watch("abc") == f"{tmp_path}/dstui watch abc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dstui").touch(0o755)
    assert entry._watch("abc") == "dstui watch abc"
