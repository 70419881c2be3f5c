"""Buffers that DeepSpeed's CPU collectives leave behind: exactly those of one run are removed."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from dstui.runs import shm


def buffer(folder: Path, port: int, rank: int = 0, uid: int | None = None, name: str | None = None) -> Path:
    uid = os.getuid() if uid is None else uid
    path = folder / (name or f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_{rank}")
    path.write_bytes(b"x" * 4096)
    return path


def test_only_the_runs_own_are_removed(tmp_path: Path) -> None:
    start = time.time()
    own = [buffer(tmp_path, 29501, 0), buffer(tmp_path, 29501, 1)]
    kept = [
        buffer(tmp_path, 29502),  # another run
        buffer(tmp_path, 29501, 7, uid=os.getuid() + 1),  # another user
        buffer(tmp_path, 29501, name="deepspeed_allreduce_buffer_x_29501_0"),
        buffer(tmp_path, 29501, name="my_deepspeed_allreduce_buffer_0_a_29501_0"),
        buffer(tmp_path, 29501, 5),  # older than the run
    ]
    os.utime(kept[-1], (start - 60, start - 60))
    link = tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29501_9"
    link.symlink_to(kept[0])
    assert shm.remove(29501, start, tmp_path) == (2, 8192)
    assert not any(p.exists() for p in own)
    assert all(p.exists() for p in kept) and link.is_symlink()
    assert shm.remove(None, start, tmp_path) == (0, 0)


def test_a_file_in_use_stays(tmp_path: Path) -> None:
    path = buffer(tmp_path, 29501)
    with path.open("r+b") as f, mmap.mmap(f.fileno(), 0):
        assert shm.leftovers(29501, 0, tmp_path) == []
    assert shm.leftovers(29501, 0, tmp_path) == [path]


def test_no_such_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.remove(29501, 0, tmp_path / "none") == (0, 0)
