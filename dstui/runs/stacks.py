"""What each rank of a run does just now: ``py-spy dump`` of its processes, where py-spy is installed and allowed to look.

py-spy stops a process for some milliseconds while it reads its stacks. A pid is looked at only when the environment of
its process names the run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui.i18n import _, listed, ngettext
from dstui.runs import processes
from dstui.runs.store import RunDir

TIMEOUT = 20.0
"""Seconds for one process: py-spy waits for a process that is in the kernel."""
_FRAME = re.compile(r"\((.+):\d+\)$")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class RankStack:
    """``problem``: why there is no ``text``. ``command`` does it by hand."""

    rank: int
    pid: int
    text: str
    problem: str
    command: str

    @property
    def at(self) -> tuple[str, str] | None:
        """(innermost frame, innermost frame in the script's own file) of the main thread; None without a stack.

        py-spy prints ``    name (file:line)``, the innermost first, below ``Thread 7 (idle): "MainThread"``; files of
        packages with their folders, the script by its name.
        """
        threads: list[tuple[str, list[str]]] = []
        for text in self.text.splitlines():
            if text.startswith("Thread "):
                threads.append((text, []))
            elif threads and text[:1].isspace() and _FRAME.search(text):
                threads[-1][1].append(text.strip())
        main = next((frames for head, frames in threads if '"MainThread"' in head and frames), None)
        if main is None:
            return None
        own = [f for f in main if "(<frozen " not in f]
        script = _FRAME.search(own[-1] if own else main[-1])
        assert script is not None
        return main[0], next(f for f in main if f"({script.group(1)}:" in f)


@dataclass(frozen=True)
class Stacks:
    """``problem``: why no rank was looked at, ``hint``: what would help; both translated."""

    ranks: tuple[RankStack, ...] = ()
    problem: str = ""
    hint: str = ""

    @property
    def gist(self) -> list[str]:
        """One line a place where ranks are, the place of the fewest first; [] where no stack was read."""
        places: dict[tuple[str, str], list[int]] = {}
        for r in self.ranks:
            if r.at is not None:
                places.setdefault(r.at, []).append(r.rank)
        lines = []
        for (inner, script), ranks in sorted(places.items(), key=lambda x: (len(x[1]), x[1])):
            who = ngettext("rank {list}", "ranks {list}", len(ranks)).format(list=spans(ranks))
            where = (
                inner
                if inner == script
                else _("{inner}, called by {script}").format(inner=inner, script=script)
            )
            lines.append(_("{who}: {where}").format(who=who, where=where))
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [
                {
                    "rank": r.rank,
                    "pid": r.pid,
                    "text": r.text,
                    "inner": None if r.at is None else r.at[0],
                    "script": None if r.at is None else r.at[1],
                    "problem": r.problem,
                    "command": r.command,
                }
                for r in self.ranks
            ],
            "problem": self.problem,
            "hint": self.hint,
        }


def spans(numbers: Iterable[int]) -> str:
    """``0, 2-7``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return listed(str(a) if a == b else f"{a}-{b}" for a, b in parts)


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
