"""Commas, semicolons and brackets of both languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dstui.i18n import aside, clauses, listed, phrases, set_language


@pytest.fixture(autouse=True)
def english_again() -> Iterator[None]:
    yield
    set_language("en")


@pytest.mark.parametrize(
    ("code", "things", "parts", "sentences", "bracket"),
    [("en", "a, b", "a, b", "a; b", " (c)"), ("zh_CN", "a、b", "a，b", "a；b", "（c）")],
)
def test_punctuation(code: str, things: str, parts: str, sentences: str, bracket: str) -> None:
    set_language(code)
    assert (listed(["a", "b"]), phrases(["a", "b"]), clauses(["a", "b"])) == (things, parts, sentences)
    assert (aside("c"), aside(""), listed([])) == (bracket, "", "")
