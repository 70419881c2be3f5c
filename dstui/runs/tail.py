"""Logs by byte offset: a follower that costs a ``stat`` when nothing happened, and a reader for any place in a file.

Lines end at ``\\n``, ``\\r`` or ``\\r\\n``: each redraw of a progress bar is a line of its own, marked ``redrawn``.
Holes and NUL bytes (``dstui.runs.store``: the middle of a log that outgrew its limit) are skipped. Bytes that are
no UTF-8 become U+FFFD. Memory is bounded whatever the file: lines are cut at ``MAX_LINE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_LINE = 1 << 16
"""Bytes; a longer line comes in pieces."""
CHUNK = 1 << 18
_ENDS = re.compile(rb"\r\n|\n|\r|\0+")
SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-OQ-WYZ\\`-~])"
)
"""A control sequence or string, as ECMA-48 and xterm have them."""
HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What no terminal may get of a log: controls of both sets (a terminal obeys U+009B as well as ESC [) except tab and line
ends, and marks that reverse the direction of the text after them."""


class Line(NamedTuple):
    """One line of a log. ``offset``: of its first byte. ``redrawn``: it ended in a carriage return."""

    offset: int
    text: str
    redrawn: bool = False


def clean(text: str) -> str:
    """``text`` without escape sequences and control characters, tabs as blanks: safe to show on a terminal."""
    if "\x1b" in text:
        text = SEQUENCE.sub("", text)
    return HIDDEN.sub("", text.expandtabs(8).replace("\r", ""))


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def split(data: bytes, offset: int, final: bool = False) -> tuple[list[Line], int]:
    """Complete lines of ``data`` (which lies at ``offset``) and the number of bytes that they took.

    ``final``: nothing will follow, so the unterminated rest is a line too.
    """
    lines: list[Line] = []
    start = 0
    for m in _ENDS.finditer(data):
        end, after = m.span()
        if after == len(data) and m.group() == b"\r" and not final:
            break  # its \n may come with the next read
        if end - start > MAX_LINE:
            lines += _pieces(data, start, end, offset)
        else:
            mark = m.group()
            if end > start or mark[0]:
                lines.append(Line(offset + start, _decode(data[start:end]), mark == b"\r"))
        start = after
    while len(data) - start >= MAX_LINE:
        lines.append(Line(offset + start, _decode(data[start : start + MAX_LINE])))
        start += MAX_LINE
    if final and start < len(data):
        lines.append(Line(offset + start, _decode(data[start:])))
        start = len(data)
    return lines, start


def _pieces(data: bytes, start: int, end: int, offset: int) -> list[Line]:
    return [Line(offset + i, _decode(data[i : min(i + MAX_LINE, end)])) for i in range(start, end, MAX_LINE)]


def _skip_hole(fd: int, offset: int) -> int:
    """First byte of data at or after ``offset``; ``offset`` itself where the file system cannot tell."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:
        return offset


class Tail:
    """Follows one file by offset.

    ``read()`` gives the lines completed since the last call. A file that does not exist yet is simply empty;
    one that was replaced (rotation) is read to its end, then the new one from its start; one that was cut is
    read again from its start; one that was deleted stays readable until it is closed.
    """

    def __init__(self, path: Path | str, offset: int = 0) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        """Of the next byte to read."""
        self.restarts = 0
        """How often the file was cut or replaced."""
        self.problem: str | None = None
        self.end: int | None = None
        """Where the file counts as ended (``dstui.runs.replay``); None: where it really ends."""
        self._fd = -1
        self._rest = b""
        self._identity: tuple[int, int] | None = None

    @property
    def partial(self) -> str:
        """The unterminated text at the end, as far as it was read: where a progress bar stands."""
        return _decode(self._rest[-MAX_LINE:]).rstrip("\r")

    @property
    def partial_offset(self) -> int:
        return self.offset - len(self._rest)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as e:
            self.problem = e.strerror or str(e)
            return False
        st = os.fstat(self._fd)
        self._identity = (st.st_dev, st.st_ino)
        self.problem = None
        return True

    def _restart(self) -> None:
        self.offset = 0
        self._rest = b""
        self.restarts += 1

    def _replaced(self) -> bool:
        try:
            st = os.stat(self.path)  # noqa: PTH116 - called every tick
        except OSError:
            return False
        return (st.st_dev, st.st_ino) != self._identity

    def read(self, limit: int = 1 << 22) -> list[Line]:
        """Lines completed since the last call, at most about ``limit`` bytes of them."""
        if self._fd < 0 and not self._open():
            return []
        lines: list[Line] = []
        left = limit
        while left > 0:
            try:
                size = os.fstat(self._fd).st_size
                if size < self.offset:
                    self._restart()
                    continue
                if self.end is not None:
                    size = min(size, self.end)
                want = min(CHUNK, left, size - self.offset)
                data = os.pread(self._fd, want, self.offset) if size > self.offset else b""
            except OSError as e:  # a stale NFS handle: open again next time
                self.problem = e.strerror or str(e)
                self.close()
                break
            if not data:
                if self.end is not None or not self._replaced():
                    break
                found, _used = split(self._rest, self.offset - len(self._rest), final=True)
                lines += found
                self.close()
                self._restart()
                if not self._open():
                    break
                continue
            if data[0] == 0:
                after = _skip_hole(self._fd, self.offset)
                if after > self.offset:
                    self._rest = b""
                    self.offset = after
                    continue
            self.offset += len(data)
            left -= len(data)
            whole = self._rest + data
            found, used = split(whole, self.offset - len(whole))
            lines += found
            self._rest = whole[used:]
        return lines

    @property
    def behind(self) -> int:
        """Bytes on disk that were not read yet."""
        try:
            size = os.stat(self.path).st_size  # noqa: PTH116
            return max(0, (size if self.end is None else min(size, self.end)) - self.offset)
        except OSError:
            return 0


class LogFile:
    """Any place of a log: its end, what is around an offset, a search in either direction."""

    def __init__(self, path: Path | str) -> None:
        self.path = os.fspath(path)

    @property
    def size(self) -> int:
        try:
            return os.stat(self.path).st_size  # noqa: PTH116
        except OSError:
            return 0

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Data of ``[start, end)`` in blocks that end at line ends; holes left out."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            rest, at = b"", start
            while at < end:
                data = os.pread(fd, min(CHUNK, end - at), at)
                if not data:
                    break
                if data[0] == 0:
                    after = _skip_hole(fd, at)
                    if after > at:
                        rest, at = b"", after
                        continue
                at += len(data)
                whole = rest + data
                cut = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
                if cut == 0 and len(whole) >= MAX_LINE:
                    cut = len(whole)
                if cut:
                    yield at - len(whole), whole[:cut]
                rest = whole[cut:]
            if rest:
                yield at - len(rest), rest
        finally:
            os.close(fd)

    def _line_start(self, offset: int) -> int:
        """Start of the line that holds ``offset`` (at most MAX_LINE before it)."""
        if offset <= 0:
            return 0
        low = max(0, offset - MAX_LINE)
        with open(self.path, "rb") as f:  # noqa: PTH123
            data = os.pread(f.fileno(), offset - low, low)
        cut = max(data.rfind(b"\n"), data.rfind(b"\r"))
        return low + cut + 1 if cut >= 0 else low

    def after(self, offset: int, count: int) -> list[Line]:
        """Up to ``count`` lines from the line that holds ``offset`` on."""
        found: list[Line] = []
        try:
            for at, data in self.blocks(self._line_start(offset), self.size):
                found += split(data, at, final=True)[0]
                if len(found) >= count:
                    break
        except OSError:
            return []
        return found[:count]

    def before(self, offset: int, count: int) -> list[Line]:
        """Up to ``count`` complete lines that end at or before ``offset``, oldest first."""
        found: list[Line] = []
        end = min(offset, self.size)
        try:
            while end > 0 and len(found) < count:
                start = self._line_start(max(0, end - CHUNK))
                block: list[Line] = []
                for at, data in self.blocks(start, end):
                    block += split(data, at, final=True)[0]
                found = block + found
                if start >= end:
                    start = max(0, end - MAX_LINE)
                end = start
        except OSError:
            return found[-count:] if count else []
        return found[-count:] if count else []

    def last(self, count: int) -> list[Line]:
        """The newest ``count`` lines; of the redraws of one progress bar only the last."""
        want, size = count, self.size
        while True:
            raw = self.before(size, want)
            lines = settle(raw)
            if len(lines) >= count or len(raw) < want or want > 1 << 16:
                return lines[-count:]
            want *= 4

    def search(self, pattern: str, start: int = 0, *, backwards: bool = False) -> Line | None:
        """The next line at or after (or before) ``start`` that contains ``pattern``, letter case ignored."""
        needle = pattern.lower()
        if not needle:
            return None
        raw = needle.encode()
        narrow = raw.isascii()
        try:
            if not backwards:
                for at, data in self.blocks(start, self.size):
                    if narrow and raw not in data.lower():
                        continue
                    for line in split(data, at, final=True)[0]:
                        if needle in line.text.lower():
                            return line
                return None
            end = min(start, self.size)
            while end > 0:
                begin = self._line_start(max(0, end - CHUNK))
                if begin >= end:
                    begin = max(0, end - MAX_LINE)
                for at, data in reversed(list(self.blocks(begin, end))):
                    if narrow and raw not in data.lower():
                        continue
                    for line in reversed(split(data, at, final=True)[0]):
                        if needle in line.text.lower():
                            return line
                end = begin
        except OSError:
            pass
        return None

    def probe(self, count: int, size: int, low: int, high: int) -> Iterator[list[Line]]:
        """``count`` pieces of ``size`` bytes, evenly spread over ``[low, high)``: a big log at a glance."""
        if high - low <= 0 or count <= 0:
            return
        step = max(size, (high - low) // count)
        try:
            with open(self.path, "rb") as f:  # noqa: PTH123
                at = low
                while at < high:
                    place = _skip_hole(f.fileno(), at)
                    if place > at:  # inside a hole: go on behind it, on the same grid
                        at += -(-(place - at) // step) * step
                        continue
                    data = os.pread(f.fileno(), min(size, high - at), at)
                    cut = max(data.find(b"\n"), data.find(b"\r") if b"\n" not in data else -1) + 1
                    if at > low and cut:
                        yield split(data[cut:], at + cut)[0]
                    else:
                        yield split(data, at)[0]
                    at += step
        except OSError:
            return

    def number(self, offset: int) -> int:
        """Line number (from 1) of ``offset``, as editors count: by ``\\n``. Reads the file up to there."""
        total = 1
        try:
            for at, data in self.blocks(0, offset):
                total += data.count(b"\n", 0, max(0, offset - at))
        except OSError:
            pass
        return total


def settle(lines: list[Line]) -> list[Line]:
    """``lines`` as a terminal would leave them: a redrawn line gives way to what was drawn over it.

    Blank text that only wipes a bar is dropped with the bar.
    """
    found: list[Line] = []
    over = False  # the last line of `found` is drawn over by what follows
    for line in lines:
        blank = not line.text.strip()
        if blank and line.redrawn:
            continue
        if over and not blank:
            found[-1] = line
        elif not over:
            found.append(line)
        over = line.redrawn
    return found
