"""Every text exists in Chinese, keeps its placeholders, and the compiled catalogue is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dstui import cli, i18n
from dstui.settings import Settings

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


@pytest.mark.parametrize(
    ("wanted", "variable", "setting", "tty", "language"),
    [
        ("en", "zh", "zh", True, "en"),
        (None, "en", "zh", True, "en"),
        (None, "", "zh", True, "zh_CN"),
        (None, "", "en", True, "en"),
        (None, "", "", True, "zh_CN"),
        (None, "zh", "zh", False, "en"),
    ],
)
def test_order_of_languages(
    wanted: str | None, variable: str, setting: str, tty: bool, language: str
) -> None:
    """``--lang``, DSTUI_LANG, the setting, the locale; English without a terminal."""
    env = {"DSTUI_LANG": variable, "LANG": "zh_CN.UTF-8"}
    assert i18n.pick_language(wanted, env, tty, lambda: setting) == language


def test_the_setting_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    settings = Settings.load()
    for value, language in (("zh", "zh_CN"), ("", "en")):
        settings.set("language", value)
        settings.save()
        assert cli.main(["where"]) == 0
        assert i18n.language() == language
    settings.path.write_text('{"language": "fr"}')
    assert cli.main(["where"]) == 0 and i18n.language() == "en"
    capsys.readouterr()


def test_translation_is_used() -> None:
    i18n.set_language("zh_CN")
    assert i18n._("the facts of this machine") != "the facts of this machine"
    i18n.set_language("en")
    assert i18n._("the facts of this machine") == "the facts of this machine"
