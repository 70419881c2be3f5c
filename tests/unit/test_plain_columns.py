"""Columns, not characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstui.plain.columns import pad, width, wrap


def test_width_and_pad() -> None:
    assert width("GPU 显存") == 8
    assert pad("显存", 6) == "显存  "
    assert pad("显存", 6, right=True) == "  显存"
    assert pad("longer", 3) == "longer"


def test_wrap_breaks_between_chinese_characters_and_keeps_words() -> None:
    assert wrap("显存不足，减小微批", 8, "  ") == ["  显存不", "  足，减", "  小微批"]
    assert wrap("a /very/long/path/that/stays b", 10, "> ", "  ") == [
        "> a",
        "  /very/long/path/that/stays",
        "  b",
    ]
    assert wrap("", 10, "> ") == [">"]


@given(st.text(alphabet="ab 显存，.", max_size=80), st.integers(6, 30))
def test_wrap_loses_nothing_and_fits(text: str, columns: int) -> None:
    lines = wrap(text, columns)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    for line in lines:  # closing punctuation hangs over, a word stays whole
        assert width(line.rstrip("，. ")) <= columns or " " not in line.strip()
