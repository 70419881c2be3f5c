"""The shipped preset files as they are, before the wizard touches them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstui.config import presets
from tests.real.test_session_oracle import verdicts

pytestmark = pytest.mark.real


def test_shipped_presets_are_accepted_at_any_world_size(tmp_path: Path) -> None:
    jobs = []
    for preset in presets.list_presets():
        path = tmp_path / f"{preset.name}.json"
        path.write_text(presets.export(preset.name))
        for world in (1, 2, 8, 12):
            jobs.append(
                {
                    "file": str(path), "engine": preset.engine, "world": world, "micro": 2, "accumulation": 4,
                    "precision": "bf16", "lr": 1e-5, "weight_decay": 0.0, "clip": 1.0, "hidden": 4096,
                }
            )  # fmt: skip
    wrong = [a for a in verdicts(jobs) if not a["ok"] or a["left"]]
    assert not wrong
