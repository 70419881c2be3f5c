"""Which process of a run failed first, and where: from wait statuses and from what the launchers print."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dstui.runs.processes import Process, stat


@dataclass
class Watched:
    """One process of the run."""

    process: Process
    parent: int
    name: str
    fd: int | None
    rank: int | None = None
    host: str | None = None
    """Of an ssh client: the node that it starts ranks on."""
    belongs: int | None = None
    """The rank that this process helps (data loader, compiler); None for ranks and launchers."""
    looks: int = 0
    """How often its environment was read without finding a rank (it may not have called exec yet)."""
    code: int | None = None
    """As ``subprocess`` tells it: exit code, or minus the signal; None while it runs or when unseen."""
    ended_at: float | None = None


PDSH_CODE = re.compile(rb"(?m)^pdsh@[^:\s]+: (\S+): ssh exited with exit code [1-9]")
"""What pdsh says of a node whose ssh ended with an error."""
_CODE = re.compile(rb"exits with return code = (-?\d+)|exitcode\s*:\s*(-?\d+)\s*\(pid: \d+\)")


def first_to_fail(ranks: Sequence[Watched], printed: int | None) -> tuple[Watched | None, int | None]:
    """The rank that failed first, where it is known, and its code. ``printed``: as the launcher printed it.

    The launcher ends the others by SIGTERM: a rank that ended so is not the first where the launcher names another
    code. The one that has it may have been reaped before we could look.
    """
    first = min((w for w in ranks if w.code), key=lambda w: w.ended_at or 0, default=None)
    if first is None:
        return None, printed
    if first.code != -signal.SIGTERM or printed in (None, first.code):
        return first, first.code
    said = [w for w in ranks if w.code == printed]
    unseen = [w for w in ranks if w.code is None]
    if said:
        return min(said, key=lambda w: w.ended_at or 0), printed
    return (unseen[0] if len(unseen) == 1 else None), printed


def rank_code_from_log(fd: int, tail: int = 256 << 10) -> int | None:
    """The rank's code as the launcher printed it, for a rank that was reaped before we could look.

    DeepSpeed: ``[...] exits with return code = -9`` (launcher/launch.py); torchrun's failure table:
    ``exitcode  : -9 (pid: 4242)``, where those that it ended itself may stand before the root cause.
    """
    size = os.fstat(fd).st_size
    text = os.pread(fd, tail, max(0, size - tail))
    root = _root_cause(text)
    if root is not None:
        return root[1]
    found = list(_CODE.finditer(text))
    codes = [int(m.group(1) or m.group(2)) for m in found]
    return next((c for c in codes if c), None)


def rank_from_log(fd: int, tail: int = 256 << 10) -> int | None:
    """The rank that torchrun names as the root cause; DeepSpeed's launcher names none."""
    size = os.fstat(fd).st_size
    root = _root_cause(os.pread(fd, tail, max(0, size - tail)))
    return None if root is None else root[0]


_ROOT_CAUSE = re.compile(
    rb"Root Cause \(first observed failure\):.{0,400}?rank\s*:\s*(\d+).{0,200}?exitcode\s*:\s*(-?\d+)\s*\(pid: \d+\)",
    re.DOTALL,
)


def _root_cause(text: bytes) -> tuple[int, int] | None:
    """Rank and code (torch distributed/elastic/multiprocessing/errors, ``ChildFailedError.format_msg``)."""
    found = list(_ROOT_CAUSE.finditer(text))
    return (int(found[-1].group(1)), int(found[-1].group(2))) if found else None


_NODE_CODE = re.compile(rb"(?m)^(\S+): \[.*exits with return code = (-?\d+)")


def first_node_to_fail(fd: int, hosts: Sequence[str], tail: int = 4 << 20) -> tuple[str | None, int | None]:
    """The node whose ``launch`` was the first to say that a rank failed, and that rank's code."""
    size = os.fstat(fd).st_size
    for m in _NODE_CODE.finditer(os.pread(fd, tail, max(0, size - tail))):
        host = host_named(m.group(1), hosts)
        if host is not None and int(m.group(2)):
            return host, int(m.group(2))
    return None, None


def host_named(name: bytes, hosts: Sequence[str]) -> str | None:
    """The node of the hostfile that pdsh means: it leaves the user's name out."""
    text = name.decode(errors="replace")
    return next((h for h in hosts if text in (h, h.rpartition("@")[2])), None)


def ssh_host(pid: int, parent: int, hosts: Sequence[str]) -> str | None:
    """The node that this process is connected to; None unless it is an ssh client of pdsh (``pdsh.bin`` in Debian)."""
    own, above = stat(pid), stat(parent)
    if own is None or own.name != "ssh" or above is None or not above.name.startswith("pdsh"):
        return None
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((h for h in hosts if h.rpartition("@")[2] in words), None)
