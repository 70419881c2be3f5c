from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstui.errors import DstuiError
from dstui.settings import SETTINGS, Settings


def test_defaults_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a" / "settings.json"
    s = Settings.load(path)
    assert s.problem is None
    for setting in SETTINGS:
        assert s.get(setting.key) == setting.default and setting.help
    s.set("low", True)
    s.save()
    assert Settings.load(path).get("low") is True
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("key", "value"), [("low", 1), ("language", "fr"), ("nothing", True)])
def test_wrong_values_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(DstuiError):
        Settings.load(tmp_path / "s.json").set(key, value)


def test_keys_of_a_later_release_stay(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"schema_version": 3, "later": [1], "low": "yes"}')
    s = Settings.load(path)
    assert s.get("low") is False  # of the wrong type
    s.set("low", True)
    s.save()
    assert json.loads(path.read_text())["later"] == [1]


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff"])
def test_an_unreadable_file_is_kept_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(text.encode("latin-1"))
    s = Settings.load(path)
    assert s.problem and s.get("low") is False
    s.save()
    assert (tmp_path / "s.json.bak").read_bytes() == text.encode("latin-1")
