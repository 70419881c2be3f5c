"""What the wizard writes is accepted by its engine: real DeepSpeed, and transformers' filling for the Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.config import presets
from dstui.session import Session
from tests.walks import machine, walk

pytestmark = pytest.mark.real

WALKS = 200


def job(session: Session, path: Path) -> dict[str, Any]:
    report = session.report()
    return {
        "file": str(path),
        "engine": session.field("engine").value,
        "world": report.world_size,
        "micro": report.batch.micro,
        "accumulation": report.batch.accumulation,
        "precision": session.field("precision").value,
        "lr": session.field("lr").value,
        "weight_decay": session.field("weight_decay").value,
        "clip": session.field("gradient_clipping").value,
        "hidden": 4096,
    }


def verdicts(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    script = Path(__file__).with_name("oracle_session.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input="".join(json.dumps(j) + "\n" for j in jobs),
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(jobs), done.stderr[-2000:]
    return answers


def test_presets_and_walks_are_accepted(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    expected: list[tuple[str, Session]] = []

    def add(what: str, session: Session, folder: Path) -> None:
        report = session.report()
        assert not report.blockers, what
        written = session.write(folder / "ds_config.json")
        jobs.append(job(session, written.path))
        expected.append((what, session))

    for preset in presets.list_presets():
        for kind in ("8x80", "cpu", "1x24"):
            folder = tmp_path / f"{preset.name}-{kind}"
            folder.mkdir()
            session = Session(machine(kind), cwd=folder, preset=preset)
            session.set("engine", preset.engine)
            (folder / "train.py").write_text("")
            session.set("script", "train.py")
            session.set("nvme_path", str(tmp_path))
            add(preset.name, session, folder)
    for seed in range(WALKS):
        folder = tmp_path / f"walk{seed}"
        folder.mkdir()
        add(f"walk {seed}", walk(seed, folder), folder)
    wrong = []
    for (what, session), asked, got in zip(expected, jobs, verdicts(jobs), strict=True):
        batch = session.report().batch
        if not got["ok"] or got["left"]:
            wrong.append((what, asked["engine"], got, session.report().config_text))
        elif got["batch"] != [batch.micro, batch.accumulation, batch.total]:
            wrong.append((what, asked["engine"], got["batch"], batch))
        elif got["stage"] != session.field("stage").value:
            wrong.append((what, "stage", got["stage"], session.field("stage").value))
    assert not wrong, f"{len(wrong)} of {len(jobs)}: " + "\n".join(map(str, wrong[:5]))
