"""A run directory that was damaged or edited: whatever stands in its files, the run is shown, or refused in words."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.errors import DstuiError
from dstui.plain.watch import as_json, line, render
from dstui.runs import store
from dstui.runs.diagnose import diagnose_run
from dstui.runs.replay import ReplayView
from dstui.runs.store import RunDir
from dstui.runs.view import RunView
from dstui.tui.terminal import UNICODE
from dstui.tui.widgets import runpages
from dstui.tui.widgets.dashboard import guarded, overview
from dstui.tui.widgets.health import health_page
from tests.run_tools import FakeRun

BAD: list[Any] = [
    None,
    [],
    {},
    "x",
    -1,
    math.inf,
    math.nan,
    True,
    [None],
    {"a": 1},
    "9" * 99,
    10**30,
    [["a"]],
    "\x1b[31m\u4e2d",
]


@pytest.fixture
def run() -> RunDir:
    fake = FakeRun(2, now=time.time() - 40)
    for _n in range(12):
        fake.tick()
    fake.log(
        "Traceback (most recent call last):", '  File "/x/train.py", line 3, in <module>', "ValueError: no"
    )
    fake.end("failed", code=1, first_rank=0)
    ended = fake.run.exit or {}
    ranks = [{"rank": n, "pid": 70 + n, "code": n, "signal": None, "ended_at": time.time()} for n in range(2)]
    store.write_json(fake.run.exit_path, {**ended, "ranks": ranks, "oom_kills": {"cgroup": 0, "system": 0}})
    return fake.run


def look(run: RunDir) -> None:
    """All that is shown of a run. A refusal in words is fine; anything else is not."""
    try:
        store.list_runs()
        shot = RunView(run).poll()
        json.dumps(as_json(shot))
        render(shot), line(shot, time.time())
        health_page(shot, 78, UNICODE), overview(shot, 80, 21, UNICODE, time.time(), 0.0)
        guarded(lambda: runpages.plan_page(shot, run.manifest, 78, UNICODE))
        runpages.config_page("{}", run.manifest, "p", 78, UNICODE)
        runpages.diagnosis_page(diagnose_run(run), 78, UNICODE)
        replay = ReplayView(run, 1000.0)
        replay.poll(), replay.poll()
        replay.close()
    except DstuiError as e:
        assert e.message


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(data, dict):
        for k in data:
            yield from places(data[k], (*path, k))
    elif isinstance(data, list):
        for n in range(min(2, len(data))):
            yield from places(data[n], (*path, n))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = at = json.loads(json.dumps(data))
    for k in path[:-1]:
        at = at[k]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "name", ["manifest.json", "exit.json", "samples/peaks.json", "config.json", "heartbeat"]
)
def test_a_field_that_holds_something_else(run: RunDir, name: str) -> None:
    path = run.path / name
    if not path.exists():
        path.write_text("{}")
    data = json.loads(path.read_text())
    cases = [(p, v) for p in places(data) for v in BAD]
    for where, value in random.Random(5).sample(cases, min(120, len(cases))):
        path.write_text(json.dumps(changed(data, where, value)))
        look(run)


def test_a_sample_that_holds_something_else(run: RunDir) -> None:
    path = run.samples_dir / "1s.jsonl"
    lines = path.read_text().splitlines()
    cases = [
        (n, p, v)
        for n in (len(lines) // 2, len(lines) - 1)
        for p in places(json.loads(lines[n]))
        for v in BAD
    ]
    for n, where, value in random.Random(6).sample(cases, 80):
        torn = [*lines[:n], json.dumps(changed(json.loads(lines[n]), where, value)), *lines[n + 1 :]]
        path.write_text("\n".join(torn) + "\n")
        look(run)


def test_files_that_are_torn_noise_gone_or_folders(run: RunDir) -> None:
    rng = random.Random(7)
    for path in [p for p in run.path.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        noise = bytearray(whole)
        for _n in range(min(30, len(noise))):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        for content in (b"", whole[: len(whole) // 2], bytes(noise), b"\xff\xfe\0\0", b"null", b"[" * 5000):
            path.write_bytes(content)
            look(run)
        path.unlink()
        look(run)
        path.mkdir()
        look(run)
        path.rmdir()
        path.write_bytes(whole)


def test_a_folder_that_is_gone(run: RunDir, tmp_path: Path) -> None:
    view = RunView(run)
    view.poll()
    run.path.rename(tmp_path / "elsewhere")
    for seen in (view, RunView(run)):
        with pytest.raises(DstuiError):
            seen.poll()
