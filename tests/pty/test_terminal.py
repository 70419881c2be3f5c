"""The life of the terminal, on a real pty: what Pilot cannot see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pty.harness import ROOT, Terminal

pytestmark = pytest.mark.pty

ENTER_ALT, LEAVE_ALT = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def term(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(cwd=tmp_path) as t:
        t.wait("Recommended")
        yield t


def open_wizard(t: Terminal) -> None:
    t.wait("Training Python")  # detection has ended
    t.settle()
    t.press("enter")
    t.wait("step 1 of 10")
    t.settle(0.5)


def test_first_paint_is_small(term: Terminal) -> None:
    term.settle()
    assert len(term.raw) < 12_000
    assert term.rss < 60 << 20
    assert "Join a run" in term.text and "This machine" in term.text


def test_idle_is_silent(term: Terminal) -> None:
    open_wizard(term)
    assert term.read(3.0) == 0


def test_step_change_and_cursor_are_cheap(term: Terminal) -> None:
    open_wizard(term)
    for n in range(2, 11):
        term.press("right")
        term.wait(f"step {n} of 10")
        assert term.settle() + 2000 < 10_000
    for _n in range(9):
        term.press("left")
        assert 0 < term.settle(0.2) < 10_000
    term.press("down")
    assert 0 < term.settle(0.2) < 1_500


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_signal_restores_the_terminal(term: Terminal, number: int, code: int) -> None:
    open_wizard(term)
    assert ENTER_ALT in term.raw and LEAVE_ALT not in term.raw
    term.kill(number)
    assert term.gone() <= 2.0
    assert LEAVE_ALT in term.raw
    assert term.raw.rfind(b"\x1b[?25h") > term.raw.rfind(b"\x1b[?25l")
    assert term.code == code


def test_quit_key(term: Terminal) -> None:
    open_wizard(term)
    term.press("q")
    assert term.gone() <= 2.0
    assert LEAVE_ALT in term.raw
    assert term.code == 0


def test_ctrl_c_asks_once(term: Terminal) -> None:
    open_wizard(term)
    term.press("ctrl+c")
    term.wait("Quit?")
    term.press("x")
    term.settle()
    assert "Quit?" not in term.text and "step 1 of 10" in term.text
    term.press("ctrl+c")
    term.wait("Quit?")
    term.press("ctrl+c")
    assert term.gone() <= 2.0
    assert term.code == 0


def forget(t: Terminal) -> None:
    """Clean up after a child that the test itself waited for."""
    try:
        os.kill(t.child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not t.child.closed:
        t.hang_up()


_IGNORES_HUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "dstui"])
"""


def _end_of(pid: int, limit: float) -> float:
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            done, _status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return time.monotonic() - start
        if done:
            return time.monotonic() - start
        time.sleep(0.02)
    raise AssertionError(f"alive {limit} s after the terminal went away")


def test_lost_terminal_without_a_signal(tmp_path: Path) -> None:
    """The pty closes and SIGHUP is ignored (nohup): the process must not stay and spin."""
    t = Terminal(cwd=tmp_path, command=[sys.executable, "-c", _IGNORES_HUP])
    try:
        t.wait("Recommended")
        t.settle()
        pid = t.child.pid
        t.hang_up()
        assert _end_of(pid, 5.0) <= 2.0
    finally:
        forget(t)


def test_terminal_that_stops_reading(tmp_path: Path) -> None:
    """Output that nobody takes blocks Textual's event loop; SIGTERM must end it all the same."""
    t = Terminal(cwd=tmp_path)
    try:
        t.wait("Recommended")
        t.settle()
        for _n in range(400):  # enough repaints to fill the pty and the writer's queue
            t.child.send("\x1b[B\x1b[A?x")
        time.sleep(0.5)
        t.kill(signal.SIGTERM)
        assert _end_of(t.child.pid, 6.0) <= 2.5
    finally:
        forget(t)


def test_dumb_terminal_is_refused(tmp_path: Path) -> None:
    with Terminal(cwd=tmp_path, env={"TERM": "dumb"}) as t:
        t.gone()
        assert t.code == 2
        assert "TERM=dumb" in t.text and "dstui init" in t.text.replace("\n", "")
        assert ENTER_ALT not in t.raw


def test_no_terminal_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dstui"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr and "dstui init" in done.stderr
    assert done.stdout == ""


def test_exported_columns_and_lines_do_not_count(tmp_path: Path) -> None:
    with Terminal(cwd=tmp_path, env={"COLUMNS": "120", "LINES": "50"}) as t:
        t.wait("Recommended")
        t.settle()
        assert t.text.splitlines()[0].startswith(" dstui  start")
        assert t.text.splitlines()[-1].rstrip().endswith("q quit")


def test_too_small_and_back(tmp_path: Path) -> None:
    with Terminal(cwd=tmp_path, columns=40, rows=10) as t:
        t.wait("40x10")
        t.settle()
        assert "Recommended" not in t.text
        t.resize(80, 24)
        t.wait("Recommended")
        t.resize(40, 10)
        t.wait("60x15")
        t.press("q")
        assert t.gone() <= 2.0


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LANG": "xx_YY.UTF-8"}])
def test_ascii_only_without_a_utf8_locale(tmp_path: Path, locale: dict[str, str | None]) -> None:
    with Terminal(cwd=tmp_path, env=locale) as t:
        t.wait("Recommended")
        open_wizard(t)
        for key in ("right", "right", "v", "v", "esc", "A"):
            t.press(key)
            t.settle(0.15)
        t.press("ctrl+c")
        t.wait("Quit?")
        assert t.raw.isascii(), [c for c in t.raw.decode() if ord(c) > 127][:5]


def test_no_color(tmp_path: Path) -> None:
    import re

    with Terminal(cwd=tmp_path, env={"NO_COLOR": "1"}) as t:
        t.wait("Recommended")
        open_wizard(t)
        codes = {c for m in re.findall(rb"\x1b\[([0-9;]*)m", t.raw) for c in m.split(b";")}
        assert not codes & {str(n).encode() for n in (*range(30, 39), *range(40, 49), *range(90, 108))}


def test_unreadable_file_is_told_before_the_screen_is_taken(tmp_path: Path) -> None:
    bad = tmp_path / "ds_config.json"
    bad.write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    with Terminal([str(bad)], cwd=tmp_path) as t:
        t.gone()
        assert t.code == 2
        assert "train_batch_size" in t.text and ENTER_ALT not in t.raw
