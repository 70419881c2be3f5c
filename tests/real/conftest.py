"""Runs that a test killed while they built an op leave its lock; the next test must not wait on it."""

from __future__ import annotations

import pytest

from dstui.runs.ops import find_locks
from tests.conftest import EXTENSIONS


@pytest.fixture(autouse=True)
def no_dead_locks(isolated: None) -> None:
    for lock in find_locks(EXTENSIONS):
        if lock.holder is None:  # a build that lives, of another session, would fail without its lock
            lock.path.unlink(missing_ok=True)
