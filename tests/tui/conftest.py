"""A wizard on a known machine, without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from dstui.facts.model import Facts, Gpu, GpuProcess, Host, Interpreter, Toolchain
from dstui.tui.app import DstuiApp
from dstui.tui.terminal import Profile
from dstui.tui.text import Line
from dstui.units import GiB


def plain_text(rows: Sequence[Line]) -> str:
    """The text of rows without styles."""
    return "\n".join("".join(text for text, _role in row).rstrip() for row in rows)


PACKAGES = {"deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.24.0"}


def cpu_facts() -> Facts:
    return Facts(
        gpus=(),
        host=Host(hostname="box", ram_total=64 * GiB, ram_available=60 * GiB, cores=16, cores_usable=16),
        toolchain=Toolchain(compiler="/usr/bin/g++", ninja="/usr/bin/ninja"),
        interpreters=(
            Interpreter(
                sys.executable,
                "active",
                "3.11.7",
                PACKAGES,
                torch_cuda="",
                launchers=("deepspeed", "torchrun"),
            ),
        ),
    )


def gpu_facts(cards: int = 8, busy: tuple[int, ...] = (), ram: int = 1024) -> Facts:
    gpus = tuple(
        Gpu(
            index=n,
            uuid=f"GPU-{n:08d}",
            name="NVIDIA H200",
            memory_total=140 * GiB,
            memory_free=(30 if n in busy else 139) * GiB,
            compute_capability=(9, 0),
            processes=(GpuProcess(100 + n, "ann", "python", 110 * GiB),) if n in busy else (),
        )
        for n in range(cards)
    )
    return Facts(
        gpus=gpus,
        driver="570.1",
        cuda_driver="13.0",
        host=Host(
            hostname="gpubox", ram_total=ram * GiB, ram_available=(ram - 24) * GiB, cores=96, cores_usable=96
        ),
        toolchain=Toolchain(
            cuda_home="/usr/local/cuda", nvcc="/usr/local/cuda/bin/nvcc", compiler="/usr/bin/g++"
        ),
        interpreters=(
            Interpreter(
                sys.executable,
                "active",
                "3.11.7",
                PACKAGES,
                torch_cuda="13.0",
                launchers=("deepspeed", "torchrun"),
            ),
        ),
    )


class Walk:
    """Drives the wizard by keys and reads its screen."""

    def __init__(self, app: DstuiApp, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def type(self, text: str) -> None:
        names = {
            "/": "slash",
            ".": "full_stop",
            "-": "minus",
            "_": "underscore",
            " ": "space",
            "{": "left_curly_bracket",
        }
        for ch in text:
            await self.pilot.press(names.get(ch, ch))
        await self.pilot.pause()

    async def settle(self) -> None:
        """Wait until the report belongs to the values on the screen and no job runs."""
        for _n in range(600):
            await self.pilot.pause(0.02)
            wizard = self.wizard
            if self.app.jobs.running == 0 and (wizard is None or (wizard.fresh and wizard.settled)):
                return
        raise AssertionError("the wizard did not come to rest")

    @property
    def wizard(self) -> Any:
        from dstui.tui.screens.wizard import WizardScreen

        return self.app.screen if isinstance(self.app.screen, WizardScreen) else None

    @property
    def step(self) -> str:
        return str(self.wizard.step_id)

    @property
    def text(self) -> str:
        """The screen as text."""
        _width, height = self.app.size
        lines = self.app.screen._compositor.render_strips()
        assert len(lines) == height
        return "\n".join(strip.text.rstrip() for strip in lines)

    async def to(self, step: int) -> None:
        """Jump with the number key; ``ctrl+p`` first where a text field would take it."""
        for _n in range(12):
            if self.wizard._step == step - 1:
                return
            await self.press("ctrl+n" if self.wizard._step < step - 1 else "ctrl+p")
        raise AssertionError(f"step {step} not reached")

    async def on_field(self, field_id: str, option: object = None) -> None:
        """Put the cursor on a field (and one of its options) with Up and Down only."""
        for key in ("up", "down"):
            for _n in range(60):
                form = self.wizard.form
                on_it = form.field is not None and form.field.id == field_id
                if on_it and (option is None or (form.option is not None and form.option.value == option)):
                    return
                at = form._cursor
                await self.press(key)
                if form._cursor == at:
                    break
        raise AssertionError(f"{field_id} {option} is not reachable:\n{self.text}")


Start = Callable[..., Awaitable[Walk]]


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[..., DstuiApp]:
    def make(facts: Facts | None = None, **options: Any) -> DstuiApp:
        options.setdefault("cwd", tmp_path)
        profile = options.pop("profile", Profile())
        return DstuiApp(profile, facts=facts or cpu_facts(), **options)

    return make
