"""A log of its own for each rank (``dstui run --rank-logs``), beside ``out.log``, where the launcher can write one.

torchrun and accelerate write ``<folder>/<name>/attempt_N/<rank>/stdout.log`` and ``stderr.log`` and copy every line to
their own output (``--tee 3``; torch distributed/run.py). DeepSpeed's launcher writes ``<folder>/<time>_rank<N>.log``
*instead* (``--enable_each_rank_log``; launcher/launch.py, 0.9.5-0.19.8): there the supervisor copies the lines to
``out.log``, those of other ranks than 0 marked ``[rankN]:`` as torch marks them, so that the monitor and ``diagnose``
miss nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from dstui.runs.store import RunDir

AT_ONCE = 1 << 20
"""Bytes of one rank that are copied in one tick; what is more stays in its own log only."""
_NAME = re.compile(r"_rank(\d+)\.log$")


def options(launcher: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Options of the launcher and variables that make it write rank logs; nothing where it cannot."""
    if launcher == "deepspeed":
        return ["--enable_each_rank_log", str(folder)], {}
    if launcher in ("torchrun", "llamafactory"):
        return ["--log_dir", str(folder), "--tee", "3"], {}
    if launcher == "accelerate":
        return ["--log_dir", str(folder), "--tee", "3"], {}
    if launcher == "swift":  # it starts torchrun, whose options can be given as variables
        return [], {"PET_LOG_DIR": str(folder), "PET_TEE": "3"}
    return [], {}


def all_logs(run: RunDir) -> list[Path]:
    """Every rank's; one look at the folder where there are none."""
    if not run.rank_logs.is_dir():
        return []
    try:
        return list(run.rank_logs.rglob("*.log"))
    except OSError:
        return []


def files_of(run: RunDir, rank: int) -> Sequence[Path]:
    """The logs of one rank, oldest first; () when it has none."""
    found = [p for p in all_logs(run) if _rank_of(p) == rank]
    return sorted(found, key=lambda p: (p.parent.parent.name, p.parent.name, p.name))


def ranks_of(run: RunDir) -> list[int]:
    """Ranks that have a log."""
    return sorted({r for p in all_logs(run) if (r := _rank_of(p)) is not None})


def _rank_of(path: Path) -> int | None:
    m = _NAME.search(path.name)
    if m:
        return int(m.group(1))
    inside = path.parent.parent.name.startswith("attempt_") and path.name in ("stdout.log", "stderr.log")
    return int(path.parent.name) if inside and path.parent.name.isdigit() else None


class Merger:
    """Copies new lines of DeepSpeed's rank logs to ``out.log`` (open for appending as ``fd``)."""

    def __init__(self, run: RunDir, fd: int) -> None:
        self._run = run
        self._fd = fd
        self._state = run.rank_logs / ".copied"
        self._offsets: dict[str, int] = {}
        with contextlib.suppress(
            OSError, ValueError, AttributeError, TypeError, RecursionError
        ):  # of the supervisor before
            self._offsets = {k: int(v) for k, v in json.loads(self._state.read_text()).items()}

    def tick(self, *, last: bool = False) -> None:
        """``last``: the ranks are gone; an unfinished line counts too. Raises OSError (full disk)."""
        try:
            names = sorted(e.name for e in os.scandir(self._run.rank_logs) if _NAME.search(e.name))
        except OSError:
            return
        before = dict(self._offsets)
        for name in names:
            self._copy(name, last)
        if self._offsets != before:
            temporary = self._state.with_name(".copied.tmp")
            temporary.write_text(json.dumps(self._offsets))
            temporary.replace(self._state)

    def _copy(self, name: str, last: bool) -> None:
        m = _NAME.search(name)
        assert m is not None
        rank, offset = int(m.group(1)), self._offsets.get(name, 0)
        with (self._run.rank_logs / name).open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            note = b""
            if size - offset > AT_ONCE:
                skipped = size - offset - AT_ONCE
                note = f"[dstui] {skipped} bytes of rank {rank} are in {name} only\n".encode()
                offset += skipped
            data = os.pread(f.fileno(), AT_ONCE, offset)
        if not last:
            data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        if not data:
            return
        os.write(self._fd, note + (data if rank == 0 else _marked(data, rank)))
        self._offsets[name] = offset + len(data)


def _marked(data: bytes, rank: int) -> bytes:
    mark = f"[rank{rank}]:".encode()
    lines = data.split(b"\n")
    return b"\n".join(x if not x or x.startswith(mark) else mark + b" " + x for x in lines)
