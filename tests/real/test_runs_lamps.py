"""Lamps, alerts and stacks of a real training; the same run played back tells the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import store
from dstui.runs.replay import ReplayView
from dstui.runs.stacks import find_tool
from dstui.runs.store import RunDir

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real
DSTUI = [sys.executable, "-m", "dstui"]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    command = [*DSTUI, "demo", "--ranks", "2", "--stage", "1", "--steps", "100000", "--detach", "--json"]
    out = subprocess.run([*command, "--python", sys.executable], capture_output=True, text=True, check=True)
    run = store.find_run(json.loads(out.stdout)["run"])
    yield run
    subprocess.run([*DSTUI, "stop", "--now", run.id], capture_output=True, check=False)


def look(run: RunDir, *options: str) -> dict[str, Any]:
    out = subprocess.run(
        [*DSTUI, "watch", run.id, "--once", "--json", *options], capture_output=True, text=True, check=False
    )
    assert out.stdout, out.stderr
    found: dict[str, Any] = json.loads(out.stdout)
    return found


def test_a_healthy_run_has_evidence_and_no_alert(demo: RunDir) -> None:
    deadline = time.monotonic() + 300
    shot = look(demo)
    while (shot["step"] or 0) < 8 and time.monotonic() < deadline:
        time.sleep(1)
        shot = look(demo)
    assert shot["step"] >= 8, shot
    shot = look(demo, "--stacks")
    levels = {lamp["checkpoint"]: (lamp["level"], lamp["text"]) for lamp in shot["lamps"]}
    assert levels[2][0] == "green" and levels[4][0] in ("green", "yellow", "red")
    assert levels[3][0] == "green" and "as asked" in levels[3][1], levels
    assert shot["alerts"] == []
    stacks = shot["stacks"]
    if find_tool(sys.executable) is None:
        assert "py-spy" in stacks["problem"] and "pip install" in stacks["hint"]
    else:
        assert [r["rank"] for r in stacks["ranks"]] == [0, 1]
        for r in stacks["ranks"]:
            assert "tiny_gpt.py" in r["text"] or (r["problem"] and r["command"].startswith("sudo ")), r
    subprocess.run([*DSTUI, "stop", "--now", demo.id], capture_output=True, check=True)
    view = ReplayView(demo)
    seen: set[str] = set()
    for moment in view.moments:
        at = view.at(moment)
        seen |= {alert.kind for alert in at.alerts}
    view.close()
    assert seen == set()
    assert [lamp.level for lamp in at.lamps][2] == "green" and at.state == "stopped"
