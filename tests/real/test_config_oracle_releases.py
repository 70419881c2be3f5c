"""Verdict and batch sizes of many releases against the real packages; installs them on first use.

``make oracle`` runs this. A release comes from pip into a folder of its own (``DSTUI_ORACLE_CACHE``, else
``dstui-oracle`` under the temporary folder) and runs beside the torch of this environment; to 0.14.5
DeepSpeed uses pydantic 1, which newer pydantic packages carry as ``pydantic.v1``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dstui.config import schema
from dstui.config.document import Document

from .config_mutations import covering, holds, of_release
from .test_config_oracle import CORPUS, DATA, HERE, WORLDS, disagreements, files, installed

RELEASES = (
    "0.14.0", "0.14.5", "0.15.4", "0.16.9", "0.17.1", "0.17.6", "0.18.0", "0.18.9",
    "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8",
)  # fmt: skip
SHARE = int(os.environ.get("DSTUI_ORACLE_SHARE", "15750"))
"""Generated cases of each minor release (0.14, 0.15...), divided by its releases above."""
CACHE = Path(os.environ.get("DSTUI_ORACLE_CACHE") or Path(tempfile.gettempdir()) / "dstui-oracle")
pytestmark = [pytest.mark.real, pytest.mark.slow]


class Row(NamedTuple):
    release: str
    generated: int
    refused: int
    fewest: int
    """How often the least mutated key or alias was mutated."""
    keys: int
    files: int
    wrong: list[str]


ROWS: list[Row] = []
SEEN: set[str] = set()


def place(release: str) -> Path | None:
    """The folder to put on PYTHONPATH (None: the environment's own release); skips when there is none."""
    try:
        if installed() == release:
            return None
    except ImportError:
        pass
    folder = CACHE / release
    if (folder / "deepspeed" / "__init__.py").is_file():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=CACHE))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    environment = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "PYTHONPATH")}
    done = subprocess.run(
        [*command, str(scratch / "site"), f"deepspeed=={release}"],
        env={**environment, "DS_BUILD_OPS": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        pytest.skip(f"pip cannot install deepspeed=={release}: {done.stderr.strip()[-300:]}")
    (scratch / "site").rename(folder)
    scratch.rmdir()
    return folder


def ask(tmp_path: Path, folder: Path | None, asks: list[tuple[int, str]]) -> list[dict[str, Any]]:
    source, target = tmp_path / "asks", tmp_path / "answers"
    source.write_text("".join(json.dumps({"world": w, "text": t}) + "\n" for w, t in asks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(HERE / "ask_deepspeed.py"), str(source), str(target)],
        env=os.environ if folder is None else {**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def known_files() -> Iterator[tuple[int, str]]:
    yield from files(DATA / "good")
    yield from files(DATA / "bad")
    if CORPUS.is_dir():
        for path in sorted(CORPUS.glob("*.json")) + sorted((CORPUS / "seed").glob("*.json")):
            if path.name != "verdicts.json":
                text = path.read_text(encoding="utf-8")
                yield from ((w, text) for w in WORLDS)


def mutated(release: str, asks: list[tuple[int, str]]) -> dict[tuple[str, ...], int]:
    """How many texts hold each key and alias of the release."""
    counts = {tuple(p): 0 for p in of_release(release)}
    for _world, text in asks:
        try:
            data = json.loads(text)
        except ValueError:
            continue
        for tokens in counts:
            counts[tokens] += holds(data, list(tokens))
    return counts


@pytest.mark.parametrize("release", RELEASES)
def test_a_release(release: str, tmp_path: Path) -> None:
    folder = place(release)
    minor = release.rpartition(".")[0]
    count = SHARE // sum(r.startswith(minor + ".") for r in RELEASES)
    made = list(covering(release, count, seed=RELEASES.index(release) * 1000, seen=SEEN))
    fixed = list(known_files())
    answers = ask(tmp_path, folder, made + fixed)
    assert {a["version"].split("+")[0].strip() for a in answers} == {release}
    wrong = disagreements(made + fixed, answers)
    counts = mutated(release, made)
    refused = sum(not a["ok"] for a in answers[: len(made)])
    ROWS.append(Row(release, len(made), refused, min(counts.values()), len(counts), len(fixed), wrong))
    assert wrong == []
    accepted = [text for (_world, text), a in zip(made, answers, strict=False) if a["ok"]]
    for text in accepted[
        :: max(1, len(accepted) // 500)
    ]:  # the schema never refuses what the release accepts
        assert schema.validate(Document.parse(text).data, release) == [], text
    assert min(counts.values()) >= 5
    assert 0.3 <= refused / len(made) <= 0.7


def test_table_of_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    if not ROWS:
        pytest.skip("no release could be installed")
    with capsys.disabled():
        print(
            "\n| release | files x world sizes | generated | refused | keys and aliases | each at least | agree |"
        )
        print("|---|---|---|---|---|---|---|")
        for row in ROWS:
            total = row.generated + row.files
            print(
                f"| {row.release} | {row.files} | {row.generated} | {row.refused / row.generated:.1%} | {row.keys}"
                f" | {row.fewest} | {(total - len(row.wrong)) / total:.2%} |"
            )
        print(f"{sum(r.generated for r in ROWS)} distinct generated cases", end=" ")
    assert not any(r.wrong for r in ROWS)
    if len(ROWS) == len(RELEASES):
        assert len(SEEN) >= 20_000
        shares = {r.release.rpartition(".")[0]: 0 for r in ROWS}
        for row in ROWS:
            shares[row.release.rpartition(".")[0]] += row.generated
        assert max(shares.values()) - min(shares.values()) <= len(RELEASES)


def test_every_release_of_the_oracle_has_a_schema() -> None:
    assert set(RELEASES) <= set(schema.releases())
