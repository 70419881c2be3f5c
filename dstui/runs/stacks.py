"""What each rank of a run does just now: ``py-spy dump`` of its processes, where py-spy is installed and allowed to look.

py-spy stops a process for some milliseconds while it reads its stacks. A pid is looked at only when the environment of
its process names the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui.i18n import _
from dstui.runs import processes
from dstui.runs.store import RunDir

TIMEOUT = 20.0
"""Seconds for one process: py-spy waits for a process that is in the kernel."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class RankStack:
    """``problem``: why there is no ``text``. ``command`` does it by hand."""

    rank: int
    pid: int
    text: str
    problem: str
    command: str


@dataclass(frozen=True)
class Stacks:
    """``problem``: why no rank was looked at, ``hint``: what would help; both translated."""

    ranks: tuple[RankStack, ...] = ()
    problem: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [
                {"rank": r.rank, "pid": r.pid, "text": r.text, "problem": r.problem, "command": r.command}
                for r in self.ranks
            ],
            "problem": self.problem,
            "hint": self.hint,
        }


def find_tool(python: str | None) -> str | None:
    """py-spy beside the training interpreter, beside ours, or on PATH."""
    for interpreter in (python, sys.executable):
        if interpreter:
            beside = Path(interpreter).parent / "py-spy"
            if os.access(beside, os.X_OK):
                return str(beside)
    return shutil.which("py-spy")


def dump(run: RunDir, manifest: Mapping[str, Any], ranks: Iterable[tuple[int, int]]) -> Stacks:
    """Stacks of ``ranks``, pairs (rank, pid). Blocks for up to ``TIMEOUT`` a rank."""
    wanted = sorted(ranks)
    place = processes.here()
    if manifest.get("host") != place.host or manifest.get("boot_id") != place.boot_id:
        return Stacks(
            problem=_("the run is on another host: {host}").format(host=manifest.get("host")),
            hint=_("there: dstui watch {id}, then y").format(id=run.id),
        )
    alive = [(rank, pid) for rank, pid in wanted if processes.environment(pid).get("DSTUI_RUN_ID") == run.id]
    if not alive:
        return Stacks(problem=_("no rank of the run is alive here"))
    tool = find_tool(manifest.get("python"))
    if tool is None:
        pids = " ".join(str(pid) for _rank, pid in alive)
        return Stacks(
            problem=_("py-spy is not installed: neither beside the training Python nor on PATH"),
            hint=_(
                "{python} -m pip install py-spy; then y again, or: py-spy dump --pid PID (ranks: {pids})"
            ).format(python=manifest.get("python") or "python", pids=pids),
        )
    return Stacks(tuple(_one(tool, rank, pid) for rank, pid in alive))


def _one(tool: str, rank: int, pid: int) -> RankStack:
    argv = [tool, "dump", "--pid", str(pid)]
    by_hand = "sudo " + shlex.join(argv)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return RankStack(rank, pid, "", _("py-spy got no answer in {n} s").format(n=int(TIMEOUT)), by_hand)
    except OSError as e:
        return RankStack(
            rank, pid, "", _("{tool} cannot be run: {cause}").format(tool=tool, cause=e), by_hand
        )
    if done.returncode == 0 and done.stdout.strip():
        return RankStack(rank, pid, done.stdout.rstrip(), "", shlex.join(argv))
    said = done.stderr.strip()
    if "permission" in said.lower() or "not permitted" in said.lower():
        return RankStack(rank, pid, "", _("not permitted: {reason}").format(reason=_forbidden()), by_hand)
    if processes.stat(pid) is None:
        return RankStack(rank, pid, "", _("the rank has ended meanwhile"), by_hand)
    return RankStack(
        rank, pid, "", said.splitlines()[-1][:300] if said else _("py-spy said nothing"), by_hand
    )


def _forbidden() -> str:
    """Why the kernel does not let py-spy look."""
    try:
        scope = int(YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 1:
        return _("ptrace_scope is 1, only a parent may look (as root: sysctl kernel.yama.ptrace_scope=0)")
    if scope > 1:
        return _("ptrace_scope is {n}, only root may look").format(n=scope)
    return _("the container lacks CAP_SYS_PTRACE, or the process belongs to another user")
