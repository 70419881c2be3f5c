"""``dstui logs``: the output of a run as its processes wrote it."""

from __future__ import annotations

import argparse
import codecs
import errno
import os
import stat
import sys
import time
from collections.abc import Callable

from dstui.errors import DstuiError, Exit
from dstui.i18n import _, listed
from dstui.plain.which import run_to_read
from dstui.runs import ranklogs
from dstui.runs.adopt import is_over
from dstui.runs.store import RunDir
from dstui.runs.tail import HIDDEN, SEQUENCE

_CHUNK = 1 << 18
_HELD = 4096
"""Characters of a sequence that is not complete yet which wait for its rest."""


class Tame:
    """``write`` for a terminal: a log may hold what would clear it, rename it, fill its clipboard or reverse its text.

    Sequences and control characters are left out, except line ends, tabs and the ``\\r`` of progress bars.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def __call__(self, data: bytes) -> None:
        text = SEQUENCE.sub("", self._held + self._decoder.decode(data))
        start = text.rfind("\x1b")
        whole = start < 0 or len(text) - start > _HELD
        self._held = "" if whole else text[start:]
        text = text if whole else text[:start]
        self._write(HIDDEN.sub("", text).encode("utf-8", "replace"))


_POLL = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="last", metavar="RUN", help=_("default: the newest"))
    parser.add_argument("-f", "--follow", action="store_true", help=_("go on until the run ends"))
    parser.add_argument("--rank", type=int, metavar="N", help=_("only this rank (of a run with --rank-logs)"))
    parser.add_argument("-n", type=int, metavar="N", help=_("only the last N lines"))


def run(args: argparse.Namespace) -> int:
    target = run_to_read(args.run)
    sys.stdout.flush()
    write: Callable[[bytes], object] = sys.stdout.buffer.write
    if sys.stdout.isatty():
        write = Tame(write)
    if args.rank is None:
        copy(target, write, lines=args.n, follow=args.follow)
    else:
        copy_rank(target, args.rank, write, lines=args.n, follow=args.follow)
    sys.stdout.buffer.flush()
    return Exit.OK


def copy_rank(
    run: RunDir,
    rank: int,
    write: Callable[[bytes], object],
    *,
    lines: int | None = None,
    follow: bool = False,
) -> None:
    """Send what one rank wrote to ``write``; a launcher that keeps stdout and stderr apart gives two parts."""
    paths = list(ranklogs.files_of(run, rank))
    if not paths:
        known = listed(map(str, ranklogs.ranks_of(run)))
        raise DstuiError(
            _("run {id} has no log of rank {rank}").format(id=run.id, rank=rank),
            _("there are: {names}").format(names=known)
            if known
            else _(
                "start it with --rank-logs (not with the launcher python: its one rank writes the whole log)"
            ),
        )
    open_files = {path: os.open(path, os.O_RDONLY) for path in paths}
    shown = None
    try:
        offsets = {p: 0 if lines is None else _last_lines(fd, lines) for p, fd in open_files.items()}
        while True:
            over = not follow or is_over(run)
            for path, fd in open_files.items():
                if len(paths) > 1 and shown != path and os.fstat(fd).st_size > offsets[path]:
                    write(f"==> {path.relative_to(run.rank_logs)} <==\n".encode())
                    shown = path
                offsets[path] = _drain(fd, offsets[path], write)
            if over:
                return
            sys.stdout.flush()
            time.sleep(_POLL)
    finally:
        for fd in open_files.values():
            os.close(fd)


def copy(
    run: RunDir, write: Callable[[bytes], object], *, lines: int | None = None, follow: bool = False
) -> None:
    """Send ``out.log`` to ``write``; its hole (``dstui.runs.store``) is left out. Memory stays bounded."""
    try:
        fd = os.open(run.out_log, os.O_RDONLY)
    except OSError as e:
        raise DstuiError(
            _("{path}: {cause}").format(path=run.out_log, cause=e.strerror),
            _("a running supervisor makes it again within a second"),
        ) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DstuiError(_("{path}: no regular file").format(path=run.out_log))
    try:
        offset = 0 if lines is None else _last_lines(fd, lines)
        while True:
            over = not follow or is_over(run)
            offset = _drain(fd, offset, write)
            if over:
                return
            if follow:
                sys.stdout.flush()
            time.sleep(_POLL)
            try:
                there = run.out_log.stat()
            except OSError:
                continue
            mine = os.fstat(fd)
            if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):  # deleted and made again
                _drain(fd, offset, write)
                os.close(fd)
                fd, offset = os.open(run.out_log, os.O_RDONLY), 0
    finally:
        os.close(fd)


def _drain(fd: int, offset: int, write: Callable[[bytes], object]) -> int:
    while True:
        try:
            data_at = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return offset  # nothing but a hole, or the end
            data_at = offset
        if data_at > offset:
            write(
                _("[dstui: {n} bytes of this log were given up for space]")
                .format(n=data_at - offset)
                .encode()
            )
            write(b"\n")
            offset = data_at
        part = os.pread(fd, _CHUNK, offset)
        if not part:
            return offset
        try:
            hole_at = os.lseek(fd, offset, os.SEEK_HOLE)
        except OSError:
            hole_at = offset + len(part)
        part = part[: max(1, hole_at - offset)]
        write(part)
        offset += len(part)


def _last_lines(fd: int, lines: int) -> int:
    """Offset of the first of the last ``lines`` lines, read backwards."""
    end = os.fstat(fd).st_size
    at, wanted = end, max(0, lines)
    if wanted == 0:
        return end
    newlines = 0
    while at > 0:
        start = max(0, at - _CHUNK)
        part = os.pread(fd, at - start, start)
        index = len(part)
        while True:
            index = part.rfind(b"\n", 0, index)
            if index < 0:
                break
            if start + index == end - 1:
                continue  # the newline that ends the last line
            newlines += 1
            if newlines == wanted:
                return start + index + 1
        if b"\0" in part:
            return start + part.rfind(b"\0") + 1
        at = start
    return 0
