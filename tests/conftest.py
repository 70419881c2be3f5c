"""Isolation: no test sees or touches the developer's own settings, runs, caches or language."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstui import i18n

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
"""Measured truth and public configs that are not part of the project; tests that use them skip without."""


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
    # Built DeepSpeed ops are shared between tests: a cold build takes a minute.
    monkeypatch.setenv(
        "TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR") or _real_home_extensions()
    )
    i18n.set_language("en")


def _real_home_extensions() -> str:
    import pwd

    return str(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "torch_extensions")


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the measured truth beside the repository")
    return SHARED
