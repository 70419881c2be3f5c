"""Isolation: no test sees or touches the developer's own settings, runs, caches or language."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstui import i18n
from dstui.runs.ops import find_locks

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
"""Measured truth and public configs that are not part of the project; tests that use them skip without."""

EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or REPO / ".pytest_cache" / "torch_extensions")
"""Built DeepSpeed ops, shared by the tests of this checkout and nobody else: a cold build takes a minute."""


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    for name, sub in (
        ("HOME", "."),
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_STATE_HOME", "state"),
        ("XDG_CACHE_HOME", "cache"),
        ("XDG_DATA_HOME", "data"),
    ):
        folder = home / sub
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv(name, str(folder))
    for name in [n for n in os.environ if n.startswith(("DSTUI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "CUDA_VISIBLE_DEVICES", "NO_COLOR", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))
    i18n.set_language("en")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of an interrupted session a build's lock may be left, on which every later one would wait for ever.

    One that a process holds is another session's build, which fails without it.
    """
    if not hasattr(session.config, "workerinput"):
        for lock in find_locks(EXTENSIONS):
            if lock.holder is None:
                lock.path.unlink(missing_ok=True)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the measured truth beside the repository")
    return SHARED
