"""Random walks through the wizard by keys; what each one writes is accepted by its engine's own reader."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstui.session import Session
from dstui.tui.app import DstuiApp
from tests.real.test_session_oracle import job, verdicts
from tests.tui.conftest import Walk, cpu_facts, gpu_facts

MakeApp = Callable[..., DstuiApp]
KEYS = (
    ["down"] * 5
    + ["up"] * 2
    + ["space"] * 4
    + ["enter"] * 5
    + ["right", "left", "v", "v", "tab", "tab", "h", "n"]
)
NUMBERS = {
    "micro_batch": (1, 16),
    "accumulation": (1, 16),
    "seq": (128, 8192),
    "ranks": (1, 4),
    "lora_rank": (4, 64),
}
SIZES = [(80, 24), (120, 40), (100, 30)]


async def back_to_wizard(walk: Walk) -> None:
    """From help, a question or the start screen."""
    for _n in range(8):
        if walk.wizard is not None:
            return
        await walk.press("ctrl+w" if walk.app.current_mode != "wizard" else "escape")
    raise AssertionError(walk.text)


async def stroll(walk: Walk, rng: random.Random) -> None:
    """Some 40 keys anywhere in the wizard, then accept what is left."""
    await walk.to(rng.randint(1, 9))
    for _n in range(rng.randint(15, 40)):
        if walk.wizard is None:
            await back_to_wizard(walk)
            continue
        if walk.step == "review":
            await walk.to(rng.randint(1, 9))
        field = walk.wizard.form.field
        if field is not None and field.enabled and field.id in NUMBERS and rng.random() < 0.5:
            low, high = NUMBERS[field.id]
            await walk.press("space")
            await walk.press("ctrl+u")
            await walk.type(str(rng.randint(low, high)))
            await walk.press("enter")
        elif field is not None and field.kind in ("text", "path", "size", "float", "int"):
            await walk.press(rng.choice(("down", "up", "ctrl+n", "ctrl+p")))
        else:
            await walk.press(rng.choice(KEYS))


async def one(make_app: MakeApp, folder: Path, seed: int) -> tuple[Session, dict[str, Any]] | None:
    """A walk's session and its job for the oracle; None when it ended at a question only a person can answer."""
    rng = random.Random(seed)
    facts = rng.choice((cpu_facts(), gpu_facts(1), gpu_facts(4, busy=(0,)), gpu_facts(8)))
    folder.mkdir()
    (folder / "train.py").write_text("")
    app = make_app(facts, cwd=folder)
    async with app.run_test(size=rng.choice(SIZES)) as pilot:
        walk = Walk(app, pilot)
        await pilot.pause()
        await walk.press("enter")
        await walk.settle()
        await stroll(walk, rng)
        await back_to_wizard(walk)
        session = app.session
        # Questions without a recommended answer: what only the person knows.
        if session.field("script").enabled:
            session.set("script", "train.py")
        if session.field("gpus").enabled:
            session.set("gpus", "8x80GiB")
        if session.field("facts_file").enabled:
            session.set("machine", "this")
        if session.field("nvme_path").enabled:
            session.set("nvme_path", str(folder))
        await walk.to(1)
        await walk.settle()
        await walk.press("ctrl+a")
        await walk.settle()
        assert walk.step == "review", walk.text
        report = session.report()
        if report.blockers:
            assert all(report.blockers), walk.text
            return None
        await walk.press("f3")
        await walk.settle()
        assert "written" in walk.text, walk.text
        return session, job(session, folder / "ds_config.json")


async def _walks(make_app: MakeApp, tmp_path: Path, seeds: range) -> None:
    done = [r for seed in seeds if (r := await one(make_app, tmp_path / f"walk{seed}", seed)) is not None]
    assert len(done) >= 0.8 * len(seeds), f"only {len(done)} of {len(seeds)} walks could be written"
    wrong = []
    for (session, asked), got in zip(done, verdicts([j for _s, j in done]), strict=True):
        batch = session.report().batch
        if not got["ok"] or got["left"] or got["batch"] != [batch.micro, batch.accumulation, batch.total]:
            wrong.append((asked, got, Path(asked["file"]).read_text()))
    print(f"{len(seeds)} walks, {len(done)} written, {len(done) - len(wrong)} accepted")
    assert not wrong, f"{len(wrong)} of {len(done)}:\n" + "\n".join(map(str, wrong[:3]))


async def test_fifteen_walks(make_app: MakeApp, tmp_path: Path) -> None:
    await _walks(make_app, tmp_path, range(15))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 300, 25))
async def test_two_hundred_walks(make_app: MakeApp, tmp_path: Path, first: int) -> None:
    await _walks(make_app, tmp_path, range(first, first + 25))
