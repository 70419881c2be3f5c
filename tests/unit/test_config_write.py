"""Writing: whole or not at all, with a backup."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dstui.config import write
from dstui.errors import DstuiError


def test_a_new_file_has_the_usual_mode_and_no_backup(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        assert write.save(tmp_path / "c.json", "{}\n") is None
    finally:
        os.umask(mask)
    assert (tmp_path / "c.json").read_text() == "{}\n"
    assert stat.S_IMODE((tmp_path / "c.json").stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_backups_are_numbered_and_mode_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("1")
    path.chmod(0o600)
    assert write.save(path, "2") == tmp_path / "c.json.bak"
    assert write.save(path, "3") == tmp_path / "c.json.bak.1"
    assert write.save(path, "4") == tmp_path / "c.json.bak.2"
    assert [(tmp_path / n).read_text() for n in ("c.json", "c.json.bak", "c.json.bak.1", "c.json.bak.2")] == [
        "4",
        "1",
        "2",
        "3",
    ]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())


def test_equal_text_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("same")
    before = path.stat()
    assert write.save(path, "same") is None
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino


def test_no_backup_when_not_wanted(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("1")
    assert write.save(path, "2", backup=False) is None
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real" / "c.json"
    real.parent.mkdir()
    real.write_text("1")
    link = tmp_path / "c.json"
    link.symlink_to(real)
    assert write.save(link, "2") == real.with_name("c.json.bak")
    assert link.is_symlink() and real.read_text() == "2"


def _fails(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> None:
    calls = {"n": 0}
    real = getattr(os, name)

    def fake(*args: object, **kwargs: object) -> object:
        calls["n"] += 1
        if calls["n"] == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(write.os, name, fake)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_disk_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    path = tmp_path / "c.json"
    path.write_text("old")
    _fails(monkeypatch, "fsync", nth, errno.ENOSPC)
    with pytest.raises(DstuiError) as e:
        write.save(path, "new")
    assert "No space left" in e.value.message and str(path) in e.value.message and e.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"] and path.read_text() == "old"


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(DstuiError):
        write.save(tmp_path / "nowhere" / "c.json", "x")
    with pytest.raises(DstuiError) as e:
        write.save(tmp_path, "x")
    assert "not a regular file" in e.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("old")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DstuiError):
            write.save(path, "new")
    finally:
        tmp_path.chmod(0o700)
    assert path.read_text() == "old"


def test_the_difference_is_a_unified_diff() -> None:
    text = write.difference('{\n  "a": 1\n}', '{\n  "a": 2\n}\n', "c.json")
    assert text.startswith("--- c.json\n+++ c.json\n@@")
    assert text.endswith('-  "a": 1\n-}\n\\ No newline at end of file\n+  "a": 2\n+}\n')
    assert write.difference("a", "a", "c") == ""
