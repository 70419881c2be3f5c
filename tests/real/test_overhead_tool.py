"""tests/tools/overhead.py on two gloo ranks: its logic, not its figures (those need two idle GPUs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dstui.runs import store

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real
TOOL = Path(__file__).resolve().parents[1] / "tools" / "overhead.py"
BLOCK = re.compile(r"^(with|without) +(\d+) steps, median ([\d.]+) ms, mean ([\d.]+) ms", re.M)


def test_pairs_of_blocks_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    words = ["--cpu", "--pairs", "2", "--steps", "10", "--warm", "5", "--drop", "0.2", "--patience", "500"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *words], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: a busy machine is no place to measure on
    blocks = BLOCK.findall(done.stdout)
    assert [b[0] for b in blocks] == ["with", "without", "without", "with"], done.stdout + done.stderr
    assert all(int(b[1]) >= 10 and float(b[2]) > 0 for b in blocks)
    assert "slowdown of the median step: " in done.stdout and "supervisor and sampler: " in done.stdout
    (run,) = store.list_runs()
    assert (run.exit or {})["outcome"] == "stopped"  # its supervisor was continued, and ended it
