"""Recorded /proc and /sys trees for the facts tests."""

from __future__ import annotations

from pathlib import Path

from dstui.facts.system import System


def tree(root: Path, files: dict[str, str]) -> System:
    """Write ``files`` (absolute names) below ``root`` and look at it as a machine with an empty environment."""
    for name, text in files.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return System(root=str(root), environ={}, cwd=str(root))
