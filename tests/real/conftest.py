"""Runs that a test killed while they built an op leave its lock; the next test must not wait on it."""

from __future__ import annotations

import pytest

from tests.conftest import EXTENSIONS


@pytest.fixture(autouse=True)
def no_dead_locks(isolated: None) -> None:
    for lock in EXTENSIONS.rglob("lock"):  # these tests run one at a time: nobody else builds here
        lock.unlink(missing_ok=True)
