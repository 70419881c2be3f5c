"""Where dstui reads and writes. Every place can be moved by an environment variable (``dstui where``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_dir(name: str) -> Path:
    """The shipped folder ``schemas`` or ``presets``: in the wheel under ``_data``, in a checkout beside the package."""
    package = Path(__file__).resolve().parent
    packed = package / "_data" / name
    return packed if packed.is_dir() else package.parent / name


_PLATFORM: str = sys.platform
_XDG = {"config": "~/.config", "state": "~/.local/state"}


def _home(kind: str) -> Path:
    override = os.environ.get(f"DSTUI_{kind.upper()}_HOME")
    if override:
        return Path(override)
    if _PLATFORM == "linux":  # as platformdirs does it (XDG), whose import costs 15 ms
        base = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
        if not base.startswith("/"):  # not set, or not as the specification wants it
            base = os.path.expanduser(_XDG[kind])  # noqa: PTH111 - pathlib raises without a home
        return Path(base) / "dstui"
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")("dstui"))


def config_home() -> Path:
    """User settings and presets; ``DSTUI_CONFIG_HOME`` moves it."""
    return _home("config")


def state_home() -> Path:
    """Runs; ``DSTUI_STATE_HOME`` moves it."""
    return _home("state")


def runs_dir() -> Path:
    return state_home() / "runs"


def user_presets_dir() -> Path:
    return config_home() / "presets"
