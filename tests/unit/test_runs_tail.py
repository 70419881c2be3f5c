from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstui.runs.tail import MAX_LINE, Line, LogFile, Tail, clean, settle, split


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_lines_come_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == []  # not there yet
    path.write_bytes(b"one\ntw")
    assert texts(tail.read()) == ["one"]
    assert tail.partial == "tw"
    with path.open("ab") as f:
        f.write(b"o\nthree\n")
    assert tail.read() == [Line(4, "two"), Line(8, "three")]
    assert tail.read() == []
    assert tail.partial == ""


def test_a_progress_bar_is_redrawn_lines_and_a_partial(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\r 0%|  | 0/9\r10%|# | 1/9\r      \r{'loss': 1}\n\r20%|##| 2/9")
    tail = Tail(path)
    lines = tail.read()
    assert [line.redrawn for line in lines if line.text.strip()] == [True, True, False]
    assert tail.partial == "20%|##| 2/9"
    assert texts(settle(lines)) == ["{'loss': 1}"]


def test_crlf_split_over_two_reads_is_one_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\r")
    tail = Tail(path)
    assert tail.read() == []
    with path.open("ab") as f:
        f.write(b"\ntwo\n")
    assert tail.read() == [Line(0, "one"), Line(5, "two")]


def test_truncation_replacement_and_deletion(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old old old\n")
    tail = Tail(path)
    assert texts(tail.read()) == ["old old old"]
    path.write_bytes(b"new\n")  # cut: smaller than what was read
    assert texts(tail.read()) == ["new"]
    assert tail.restarts == 1
    path.rename(tmp_path / "log.1")
    with (tmp_path / "log.1").open("ab") as f:
        f.write(b"last words without an end")
    path.write_bytes(b"next\n")
    assert texts(tail.read()) == ["last words without an end", "next"]
    path.unlink()
    assert tail.read() == []
    path.write_bytes(b"again\n")
    assert texts(tail.read()) == ["again"]


def test_holes_and_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as f:
        f.write(b"begin \xff\xfe\n")
        f.seek(1 << 22)  # a sparse hole, as the supervisor leaves it
        f.write(b"end\n")
    assert texts(Tail(path).read(1 << 30)) == ["begin \ufffd\ufffd", "end"]
    assert texts(LogFile(path).last(5)) == ["begin \ufffd\ufffd", "end"]
    found = LogFile(path).search("END")
    assert found is not None and found.text == "end"


def test_a_line_without_end_does_not_grow_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * MAX_LINE + 5))
    tail = Tail(path)
    lines = tail.read()
    assert sum(len(line.text) for line in lines) + len(tail.partial) == 3 * MAX_LINE + 5
    assert max(len(line.text) for line in lines) == MAX_LINE
    assert len(tail.partial) < MAX_LINE


def test_random_access_and_search(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i} {'needle' if i % 1000 == 0 else ''}\n" for i in range(50_000)))
    log = LogFile(path)
    assert texts(log.last(2)) == ["line 49998 ", "line 49999 "]
    hit = log.search("NEEDLE", 100)
    assert hit is not None and hit.text == "line 1000 needle"
    back = log.search("needle", log.size, backwards=True)
    assert back is not None and back.text == "line 49000 needle"
    before = log.search("needle", back.offset, backwards=True)
    assert before is not None and before.text == "line 48000 needle"
    assert texts(log.after(hit.offset, 2)) == ["line 1000 needle", "line 1001 "]
    assert texts(log.before(hit.offset, 2)) == ["line 998 ", "line 999 "]
    assert log.number(hit.offset) == 1001
    assert log.search("nobody wrote this") is None
    assert log.search("nobody wrote this", log.size, backwards=True) is None
    pieces = list(log.probe(10, 256, 0, log.size))
    assert len(pieces) >= 10
    assert all(line.text.startswith("line ") for piece in pieces for line in piece)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_split_is_the_same_however_the_bytes_arrive(parts: list[bytes], chunk: int) -> None:
    data = b"\n".join(parts).replace(b"\0", b"0")
    whole, used = split(data, 0)
    rest, lines, at = b"", [], 0
    for i in range(0, len(data), chunk):
        rest += data[i : i + chunk]
        found, n = split(rest, at)
        lines += found
        rest, at = rest[n:], at + n
    assert lines == whole
    assert at == used


def test_clean_leaves_nothing_that_moves_a_cursor() -> None:
    assert clean("\x1b[31mred\x1b[0m\x1b]0;title\x07 a\tb\x08\x1b[2J") == "red a   b"


@pytest.mark.slow
def test_joining_a_gigabyte(tmp_path: Path) -> None:
    path = tmp_path / "log"
    block = b"".join(b"step %d loss 1.0 some more words to fill the line\n" % i for i in range(20_000))
    with path.open("wb") as f:
        while f.tell() < 1 << 30:
            f.write(block)
    start = time.perf_counter()
    assert len(LogFile(path).last(200)) == 200
    assert time.perf_counter() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 400 * 1024
    os.unlink(path)  # noqa: PTH108
