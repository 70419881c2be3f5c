"""Verdict, batch sizes and effective values against the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.config.document import ConfigUnreadable, Document, read
from dstui.config.resolve import Resolved, resolve

from .config_mutations import sample

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the train extra"),
]
HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "configs"
CORPUS = HERE.parents[2] / "shared" / "corpus"
WORLDS = (1, 2, 8)
MUTATIONS = int(os.environ.get("DSTUI_MUTATIONS", "1500"))


def installed() -> str:
    """The release that ``import deepspeed`` gives (``PYTHONPATH`` may point at another one)."""
    from importlib.metadata import version

    return version("deepspeed").split("+")[0]


def ask(tmp_path: Path, asks: list[tuple[int, str]]) -> list[dict[str, Any]]:
    source, target = tmp_path / "asks", tmp_path / "answers"
    source.write_text("".join(json.dumps({"world": w, "text": t}) + "\n" for w, t in asks), encoding="utf-8")
    subprocess.run(
        [sys.executable, str(HERE / "ask_deepspeed.py"), str(source), str(target)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=500,
    )
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def ours(text: str, world: int, release: str) -> Resolved | ConfigUnreadable:
    try:
        data = Document.parse(text).data
    except ConfigUnreadable as e:
        return e
    return resolve(data, release=release, world_size=world, accelerator="cpu")


def disagreements(asks: list[tuple[int, str]], answers: list[dict[str, Any]]) -> list[str]:
    assert len(asks) == len(answers)
    release = answers[0]["version"].split("+")[0].strip()
    out = []
    for (world, text), real in zip(asks, answers, strict=True):
        mine = ours(text, world, release)
        verdict = "rejected" if isinstance(mine, ConfigUnreadable) else mine.verdict
        batch = list(mine.batch.values()) if isinstance(mine, Resolved) and mine.batch else None
        if verdict != ("accepted" if real["ok"] else "rejected"):
            reason = real.get("error")
            out.append(f"{verdict}, DeepSpeed: {reason or 'accepted'}: world {world}: {text[:800]}")
        elif real["ok"] and json.dumps(batch) != json.dumps(real["batch"]):
            out.append(f"batch {batch}, DeepSpeed {real['batch']}: world {world}: {text[:800]}")
        elif real["ok"] and isinstance(mine, Resolved):
            for name, value in real["zero"].items():
                got = mine.value(f"/zero_optimization/{name}", "absent")
                if name == "zenflow" and isinstance(got, dict):  # the real one hides this field in its dump
                    got = {k: v for k, v in got.items() if k != "steps_per_epoch"}
                if name == "offload_optimizer" and isinstance(value, dict):  # not a field (pydantic 1)
                    value.pop("pipeline", None)
                if got != value:
                    out.append(f"{name} is {got}, DeepSpeed {value}: {text[:800]}")
            for pointer, name in (
                ("/gradient_clipping", "gradient_clipping"),
                ("/steps_per_print", "steps_per_print"),
                ("/fp16/enabled", "fp16"),
                ("/bf16/enabled", "bf16"),
            ):
                if mine.value(pointer) != real["values"][name]:
                    out.append(f"{pointer} is {mine.value(pointer)}, DeepSpeed {real['values'][name]}")
    return out


def files(folder: Path) -> list[tuple[int, str]]:
    texts = [p.read_text(encoding="utf-8") for p in sorted(folder.iterdir()) if p.is_file()]
    return [(w, t) for t in texts for w in WORLDS]


@pytest.fixture(autouse=True)
def _known_release() -> None:
    if not schema.known(installed()):
        pytest.skip(f"DeepSpeed {installed()} has no schema")


def test_fixtures(tmp_path: Path) -> None:
    asks = files(DATA / "good") + files(DATA / "bad")
    answers = ask(tmp_path, asks)
    assert disagreements(asks, answers) == []
    good = len(files(DATA / "good"))
    assert sum(a["ok"] for a in answers[:good]) >= good - 3  # a size may not divide over 8 ranks
    assert not any(a["ok"] for a in answers[good:][:: len(WORLDS)])


@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus beside the repository")
def test_corpus(tmp_path: Path) -> None:
    asks = [
        (w, p.read_text(encoding="utf-8"))
        for p in sorted(CORPUS.glob("*.json")) + sorted((CORPUS / "seed").glob("*.json"))
        if p.name != "verdicts.json"
        for w in WORLDS
    ]
    assert len(asks) > 300
    assert disagreements(asks, ask(tmp_path, asks)) == []


@pytest.mark.skipif(not (CORPUS / "verdicts.json").exists(), reason="no corpus beside the repository")
@pytest.mark.parametrize("release", ["0.14.5", "0.16.9", "0.18.9", "0.19.4", "0.19.8"])
def test_recorded_verdicts_of_the_corpus(release: str) -> None:
    """Made earlier with the real package of each release."""
    wrong = []
    verdicts = json.loads((CORPUS / "verdicts.json").read_text(encoding="utf-8"))
    for name, entry in verdicts.items():
        real = entry["verdicts"].get(release)
        if real is None:
            continue
        doc = read(str(CORPUS / name))
        mine = resolve(doc.data, release=release, world_size=entry["world_size"], accelerator="cpu")
        if mine.accepted != real["ok"] or (real["ok"] and list((mine.batch or {}).values()) != real["batch"]):
            wrong.append((name, mine.verdict, mine.batch, real))
    assert wrong == []


def test_mutations(tmp_path: Path) -> None:
    asks = list(sample(installed(), MUTATIONS, seed=20))
    answers = ask(tmp_path, asks)
    assert disagreements(asks, answers) == []
    accepted = sum(a["ok"] for a in answers)
    assert 0.2 * len(asks) < accepted < 0.8 * len(asks)  # both kinds are there


def test_the_schema_never_refuses_what_the_release_accepts(tmp_path: Path) -> None:
    release = installed()
    asks = list(sample(release, 600, seed=21))
    for (_world, text), real in zip(asks, ask(tmp_path, asks), strict=True):
        if real["ok"]:
            assert schema.validate(Document.parse(text).data, release) == [], text


def test_fresh_from_the_installed_release() -> None:
    """The committed schema is what the generator makes of this very package."""
    root = HERE.parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "schemas" / "generate.py"), "--check", "installed"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
