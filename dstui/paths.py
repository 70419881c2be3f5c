"""Where dstui reads and writes. Every place can be moved by an environment variable (``dstui where``)."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_dir(name: str) -> Path:
    """The shipped folder ``schemas`` or ``presets``: in the wheel under ``_data``, in a checkout beside the package."""
    package = Path(__file__).resolve().parent
    packed = package / "_data" / name
    return packed if packed.is_dir() else package.parent / name


def config_home() -> Path:
    """User settings and presets; ``DSTUI_CONFIG_HOME`` moves it."""
    override = os.environ.get("DSTUI_CONFIG_HOME")
    return Path(override) if override else Path(platformdirs.user_config_dir("dstui"))


def state_home() -> Path:
    """Runs; ``DSTUI_STATE_HOME`` moves it."""
    override = os.environ.get("DSTUI_STATE_HOME")
    return Path(override) if override else Path(platformdirs.user_state_dir("dstui"))


def cache_home() -> Path:
    """Things that can be made again; ``DSTUI_CACHE_HOME`` moves it."""
    override = os.environ.get("DSTUI_CACHE_HOME")
    return Path(override) if override else Path(platformdirs.user_cache_dir("dstui"))


def runs_dir() -> Path:
    return state_home() / "runs"


def user_presets_dir() -> Path:
    return config_home() / "presets"
