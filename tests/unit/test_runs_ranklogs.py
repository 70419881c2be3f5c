"""Rank logs: what each launcher is told, whose file is whose, and DeepSpeed's copied into the common log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstui.runs import ranklogs, store
from dstui.runs.events import Parser
from dstui.runs.logkeeper import LogKeeper
from dstui.runs.ranklogs import Merger, files_of, options, ranks_of
from dstui.runs.store import RunDir
from dstui.runs.tail import Tail


@pytest.fixture
def run() -> RunDir:
    made = store.create({})
    made.rank_logs.mkdir()
    return made


@pytest.fixture
def out(run: RunDir) -> Iterator[int]:
    fd = os.open(run.out_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def write(run: RunDir, rank: int, text: str) -> None:
    with (run.rank_logs / f"20261129_rank{rank}.log").open("a") as f:
        f.write(text)


def test_what_each_launcher_is_told() -> None:
    folder = Path("/run/rank-logs")
    assert options("deepspeed", folder) == (["--enable_each_rank_log", "/run/rank-logs"], {})
    for name in ("torchrun", "llamafactory", "accelerate"):
        assert options(name, folder) == (["--log_dir", "/run/rank-logs", "--tee", "3"], {})
    assert options("swift", folder) == ([], {"PET_LOG_DIR": "/run/rank-logs", "PET_TEE": "3"})
    assert options("python", folder) == ([], {})


def test_whole_lines_are_copied_marked_and_once(run: RunDir, out: int) -> None:
    merger = Merger(run, out)
    write(run, 0, "step 1 loss 2.0\nhalf of a")
    write(run, 1, "Traceback (most recent call last):\n")
    merger.tick()
    merger.tick()
    assert run.out_log.read_text() == "step 1 loss 2.0\n[rank1]: Traceback (most recent call last):\n"
    write(run, 0, " line\n")
    write(run, 1, "[rank1]: ValueError: x\nno newline")
    merger.tick()
    merger.tick(last=True)
    assert run.out_log.read_text().splitlines()[2:] == [
        "half of a line",
        "[rank1]: ValueError: x",  # torch had marked it already
        "[rank1]: no newline",
    ]


def test_the_readers_understand_the_marks(run: RunDir, out: int) -> None:
    write(run, 0, "step 7 loss 1.5\n")
    write(run, 1, 'Traceback (most recent call last):\n  File "t.py", line 3, in f\nValueError: bad\nnext\n')
    Merger(run, out).tick(last=True)
    parser, tail = Parser(), Tail(run.out_log)
    events = [*parser.feed_all(tail.read()), *parser.finish()]
    tail.close()
    assert [e.values["step"] for e in events if e.kind == "step"] == [7]
    (error,) = [e for e in events if e.kind == "error"]
    assert error.rank == 1 and error.values["failure"].type == "ValueError"


def test_a_bar_that_is_drawn_over_is_copied_as_it_moves(run: RunDir, out: int) -> None:
    merger = Merger(run, out)
    write(run, 0, "\r 10%|#| 1/10\r 20%|##| 2/10")
    merger.tick()
    assert run.out_log.read_bytes() == b"\r 10%|#| 1/10\r"


def test_the_next_supervisor_goes_on_where_the_last_one_was(run: RunDir, out: int) -> None:
    write(run, 0, "one\n")
    Merger(run, out).tick()
    write(run, 0, "two\n")
    Merger(run, out).tick()
    assert run.out_log.read_text() == "one\ntwo\n"


def test_a_flood_stays_in_its_own_log(run: RunDir, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranklogs, "AT_ONCE", 1000)
    write(run, 1, "x" * 99 + "\n")
    write(run, 1, ("y" * 99 + "\n") * 100)
    Merger(run, out).tick()
    text = run.out_log.read_text()
    assert text.startswith("[dstui] 9100 bytes of rank 1 are in 20261129_rank1.log only\n")
    assert text.count("[rank1]: " + "y" * 99) == 10 and len(text) < 1300


def test_whose_file_is_whose(run: RunDir) -> None:
    write(run, 0, "a")
    write(run, 10, "b")
    for rank in (0, 1):
        folder = run.rank_logs / "none_abc" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            (folder / name).touch()
    (run.rank_logs / "none_abc" / "notes.log").touch()
    assert ranks_of(run) == [0, 1, 10]
    assert [str(p.relative_to(run.rank_logs)) for p in files_of(run, 1)] == [
        "none_abc/attempt_0/1/stderr.log",
        "none_abc/attempt_0/1/stdout.log",
    ]
    assert files_of(run, 2) == []


def test_each_keeps_its_share_of_the_disk(run: RunDir) -> None:
    keeper = LogKeeper(run, 1)  # the smallest limit: 16 MiB
    path = run.rank_logs / "20261129_rank3.log"
    with path.open("wb") as f:
        for i in range(40):
            f.write(f"{i:7}\n".encode() + b"x" * ((1 << 20) - 8))
    keeper.tick()
    os.close(keeper.fd)
    size = path.stat()
    assert size.st_size == 40 << 20
    if size.st_blocks * 512 > 39 << 20:
        pytest.skip("this file system cannot punch holes")
    assert size.st_blocks * 512 < 16 << 20
    data = path.read_bytes()
    assert data.startswith(b"      0\n") and data[-(1 << 20) :].startswith(b"     39\n")
