"""Every text exists in Chinese, keeps its placeholders, and the compiled catalogue is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dstui import i18n

REPO = Path(__file__).resolve().parents[2]


def test_catalogues_are_complete_and_current() -> None:
    out = subprocess.run(
        [sys.executable, str(REPO / ".ci" / "translate.py"), "--check"], capture_output=True, text=True
    )
    assert out.returncode == 0, out.stdout + out.stderr


def test_language_choice() -> None:
    assert i18n.pick_language("zh", {}) == "zh_CN"
    assert i18n.pick_language(None, {"LANG": "zh_CN.UTF-8"}) == "zh_CN"
    assert i18n.pick_language(None, {"LANG": "zh_CN.UTF-8"}, tty=False) == "en"
    assert i18n.pick_language("en", {"LANG": "zh_CN.UTF-8"}) == "en"
    assert i18n.pick_language(None, {"LANG": "C"}) == "en"


def test_translation_is_used() -> None:
    i18n.set_language("zh_CN")
    assert i18n._("the facts of this machine") != "the facts of this machine"
    i18n.set_language("en")
    assert i18n._("the facts of this machine") == "the facts of this machine"
