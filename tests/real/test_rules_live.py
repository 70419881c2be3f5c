"""The verdict of ``check`` against the installed DeepSpeed itself, through plain files and through Hugging Face."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.config.resolve import HF_DEFAULTS
from dstui.rules.diagnostic import Severity
from dstui.rules.engine import Context, Options, check_path
from dstui.rules.live import ask

pytestmark = pytest.mark.real

WRONG = Path(__file__).parent.parent / "data" / "wrong"
ARGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 5e-5,
    "max_grad_norm": 1.0,
    "bf16": True,
    "warmup_steps": 10,
    "hidden_size": 4096,
    "num_training_steps": 1000,
}


@pytest.fixture(scope="module")
def release() -> str:
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs deepspeed")
    if not schema.known(found):
        pytest.skip(f"no schema for the installed {found}")
    return found


def compare(files: list[Path], release: str, world: int, args: dict[str, Any] | None) -> None:
    engine = "deepspeed" if args is None else "hf"
    given = None if args is None else {**HF_DEFAULTS, **args, "world_size": world}
    answers = ask([str(f) for f in files], sys.executable, world_size=world, args=given)
    wrong = []
    for path, answer in zip(files, answers, strict=True):
        report = check_path(str(path), Options(Context(release, engine=engine, world_size=world, args=args)))  # type: ignore[arg-type]
        ours = report.verdict or "rejected"  # not readable for us, not readable for it
        batch = tuple(report.batch.values()) if report.batch else None
        if ours != answer.verdict or (answer.batch and ours == "accepted" and batch != answer.batch):
            wrong.append((path.name, ours, batch, answer))
        elif ours == "rejected" and not any(f.severity is Severity.ERROR for f in report.findings):
            wrong.append((path.name, "no error finding", None, answer))
    assert not wrong


def test_verdicts_on_wrong_configs_are_deepspeeds_own(release: str) -> None:
    cases = json.loads((WRONG / "cases.json").read_text(encoding="utf-8"))
    for world in sorted({c.get("world_size", 1) for c in cases}):
        compare([WRONG / c["file"] for c in cases if c.get("world_size", 1) == world], release, world, None)


@pytest.mark.parametrize("world", [1, 8])
def test_verdicts_on_public_configs(release: str, shared: Path, world: int) -> None:
    files = sorted(p for p in (shared / "corpus").glob("*.json") if p.name != "verdicts.json")
    files = [
        p for p in files if "use_gds" not in p.read_text()
    ]  # refused without CUDA: the machine, not the file
    assert len(files) > 100
    compare(files, release, world, None)


@pytest.mark.parametrize("world", [1, 8])
def test_verdicts_through_hugging_face(release: str, shared: Path, world: int) -> None:
    pytest.importorskip("transformers")
    folder = shared / "corpus"
    files = [
        p for p in sorted(folder.glob("*.json")) if '"auto"' in p.read_text() and p.name != "verdicts.json"
    ]
    files += sorted((folder / "seed").glob("*.json"))
    assert len(files) > 50
    compare(files, release, world, ARGS)
