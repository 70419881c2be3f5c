"""Random keys against the real program on a real pty: it must neither crash, nor hang, nor spoil the terminal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.pty.harness import KEYS, Terminal

pytestmark = pytest.mark.pty
POOL = [k for k in KEYS if k not in ("ctrl+c", "ctrl+q", "ctrl+z", "ctrl+s")] + list(
    "0123456789abdefghijkmnoprtuvwyzAGNR?/[].- 字é"
)
"""Not ``q`` and ``^C`` (they leave), not ``l``, ``s``, ``x`` (start, stop, forget)."""


def monkey(tmp_path: Path, seed: int, keys: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8}')
    with Terminal(cwd=tmp_path, columns=rng.choice((80, 100, 60)), rows=rng.choice((24, 30, 16))) as t:
        t.wait("dstui", 20)
        trail = []
        for n in range(keys):
            if "launch" in t.text.splitlines()[-1]:  # never start a run
                t.press("ctrl+p")
            key = rng.choice(POOL)
            if key == "enter" and "launch" in t.text.splitlines()[-1]:
                continue
            trail.append(key)
            t.press(key)
            t.read(0.02)
            if n % 40 == 39:
                t.resize(rng.choice((40, 80, 120)), rng.choice((10, 24, 40)))
            if not t.child.isalive():
                t.read(0.5)
                raise AssertionError(f"seed {seed}: gone after {trail[-40:]}:\n{t.text}\n{t.raw[-1500:]!r}")
        t.resize(80, 24)
        t.settle(0.5, 20)
        assert "mistake of dstui" not in t.text, f"seed {seed}, {trail[-40:]}:\n{t.text}"
        for _n in range(6):
            t.press("ctrl+q")
            t.read(0.5)
            if not t.child.isalive():
                break
        assert not t.child.isalive(), f"seed {seed}: does not quit after {trail[-40:]}:\n{t.text}"
        assert t.raw.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in t.raw[-4000:]
        assert b"Traceback" not in t.raw[-8000:]


def test_monkey_short(tmp_path: Path) -> None:
    monkey(tmp_path, 1, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_monkey_long(tmp_path: Path, seed: int) -> None:
    monkey(tmp_path, seed, 800)
