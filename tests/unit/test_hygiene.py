"""The core stays light: a clean interpreter loads each room and we look at what came along."""

from __future__ import annotations

import subprocess
import sys

import pytest

CORE = ["facts", "config", "rules", "estimate", "runs", "session"]
FORBIDDEN = ("textual", "rich", "torch", "deepspeed", "transformers", "numpy", "pydantic")


def loaded_by(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split(".")[0] for line in out.stdout.splitlines()}


def submodules(package: str) -> str:
    return (
        f"import pkgutil, importlib, dstui.{package} as p\n"
        "for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)"
    )


@pytest.mark.parametrize("room", [*CORE, "plain"])
def test_room_loads_no_ui_and_no_framework(room: str) -> None:
    assert not loaded_by(submodules(room)) & set(FORBIDDEN)


def test_the_guard_sees_a_forbidden_import() -> None:
    assert "rich" in loaded_by("import rich")


def test_entry_point_loads_no_verb() -> None:
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            "import dstui.cli, sys; print([m for m in sys.modules if m.startswith('dstui.')])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "dstui.plain" not in out.stdout
    assert "dstui.tui" not in out.stdout
