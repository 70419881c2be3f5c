"""The process that owns a run: starts the launcher, watches every rank, obeys stop requests, tells how it ended.

``python -m dstui.runs.supervisor RUNDIR ACK_FD`` with the job as JSON on stdin (``dstui.runs.start``). It
leaves the caller's session at once (setsid, second fork, stdio closed, SIGHUP ignored), so nothing that
happens to a terminal reaches it. What DeepSpeed's launcher would hide is seen here directly:

- Exit codes of single ranks. ``deepspeed`` reports 247 for a rank that the kernel killed, 0 when its own
  ``launch`` was killed, and leaves ranks behind when only its runner gets SIGTERM (launcher/runner.py and
  launch.py, 0.9.5-0.19.8). Each descendant is watched through a pidfd, and its wait status is read from
  ``/proc/PID/stat`` while it is a zombie; orphans become our children (child subreaper) and are reaped here.
- A killed supervisor writes nothing. Readers then say ``lost``; an exit code is never guessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstui.runs import shm, store
from dstui.runs.causes import BY_CODE
from dstui.runs.firstfail import (
    PDSH_CODE,
    Watched,
    first_node_to_fail,
    first_to_fail,
    host_named,
    rank_code_from_log,
    rank_from_log,
    ssh_host,
)
from dstui.runs.hook import Hooks
from dstui.runs.logkeeper import LogKeeper, metric_files
from dstui.runs.nodes import Reach, environment_file, host_names, is_here
from dstui.runs.oomkills import OomKills
from dstui.runs.ops import CPU_COLLECTIVES, HeldLock, extensions_root, held_by, ops_needed, remove_dead
from dstui.runs.processes import (
    RUN_ID_VARIABLE,
    STOP_NOW,
    SUPERVISES_VARIABLE,
    Family,
    Process,
    Stat,
    all_stats,
    descendants,
    environment,
    identify,
    marked,
    send,
    signal_name,
    stat,
    still_alive,
)
from dstui.runs.quiet import Ear
from dstui.runs.ranklogs import Merger
from dstui.runs.samples import SETTLED, Sampler
from dstui.runs.stall import Stall
from dstui.runs.state import read_config
from dstui.runs.store import RunDir

TICK = 1.0
STOPPING_TICK = 0.1
SCAN_EVERY = 5.0
"""Seconds between two looks at the process table; every second in the first two minutes."""
QUICK = 0.25
"""Until the next one when processes are new: a rank may die within its first second, and not be its own program yet."""
EARLY = 120.0
INTERRUPT_SECONDS = 20.0
TERMINATE_SECONDS = 15.0
NOW_SECONDS = 3.0
LEFTOVER_SECONDS = 10.0
NODE_KILL_SECONDS = 20.0
"""How long SIGKILL is tried on every node; then the run ends, and says what lives on."""
SILENT_SECONDS = 10.0
"""How long each stage waits for nodes that do not answer, when those that do have no process of the run any more."""
NODE_GRACE_SECONDS = 30.0
"""After the ranks of one node failed: how long those of the others may take to notice it themselves."""
LOOK_SECONDS = 0.5
LOW_DISK = 64 << 20
RESERVE = 16 << 10
IGNORED = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
    signal.SIGIO, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip
"""What would end or stop the supervisor and means nothing to it; some of them wake it."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass
class Stop:
    """A stop in progress. ``stage``: INT, TERM, KILL."""

    by: dict[str, Any]
    now: bool
    stage: str = ""
    stage_since: float = 0.0
    told: bool = False
    """Whether the nodes were sent this stage's signal."""
    looked_at: float = 0.0
    failed: bool = False
    """Nobody asked: the ranks of a node failed, and those of the others were ended."""
    signalled: set[Process] = field(default_factory=set)


class Supervisor:
    def __init__(self, run: RunDir, job: dict[str, Any], ack_fd: int) -> None:
        self.run = run
        self.job = job
        self.ack_fd: int | None = ack_fd
        self.manifest = run.manifest
        self.started_at = time.time()
        self.watched: dict[int, Watched] = {}
        self.launcher: Watched | None = None
        self.launcher_code: int | None = None
        self.stop: Stop | None = None
        self.log = LogKeeper(run, int(self.manifest.get("log_limit") or 1 << 30))
        self.family = Family(os.getpid())
        self.rank_logs = Merger(run, self.log.fd)
        self.cgroup = OomKills()
        self.selector = selectors.DefaultSelector()
        self.sampling: threading.Thread | None = None
        self.ending = threading.Event()
        self.next_scan = 0.0
        self.next_beat = 0.0
        self.begun = time.monotonic()
        self.disk_low = False
        self.leftovers: list[dict[str, Any]] = []
        self.hooks = Hooks(run, str(job.get("on_event") or ""), self.manifest, self.event)
        self.stall: Stall | None = None
        self.stall_told: Stall | None = None
        self.held_locks: set[HeldLock] = set()
        hosts = host_names(self.manifest)
        self.reach: Reach | None = None
        """Set for a run whose ranks are started over ssh, those on this machine too."""
        if hosts:
            environ = {**os.environ, **job["env"]}
            self.reach = Reach(hosts, str(self.manifest.get("python")), run.id, environ)
        self.hosts_here = [
            h["name"]
            for h in self.manifest.get("hosts") or ()
            if isinstance(h, dict) and h.get("here") and h.get("name")
        ]
        self.strangers: set[int] = set()
        self.looked_anew = 0.0
        self.on_this_node: set[Process] = set()
        self.failed_node: tuple[str, float] | None = None
        self.pdsh_read = 0
        """Up to where ``out.log`` was searched for pdsh's words."""
        self.foreign: dict[int, Process] = {}
        """Descendants that belong to another run."""
        self.own: dict[Process, int] = {}
        """How often the environment of a descendant was read without finding another run."""
        self.asked_to_quit: int | None = None
        self.manifest_seen: tuple[int, int, int] | None = None
        """Inode, size and time of change of the manifest when it was last found to be sound."""

    # -- start ---------------------------------------------------------------------------------------

    def acknowledge(self, **answer: Any) -> None:
        if self.ack_fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self.ack_fd, json.dumps(answer).encode())
        with contextlib.suppress(OSError):
            os.close(self.ack_fd)
        self.ack_fd = None

    def signals(self) -> None:
        """Handlers, not SIG_IGN, where the ranks must get the default back: exec resets handlers only."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.selector.register(read_end, selectors.EVENT_READ, None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by launcher and ranks on purpose
        for number in IGNORED:
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, STOP_NOW):
            signal.signal(number, self._on_stop)

    def _on_stop(self, number: int, _frame: Any) -> None:
        if self.asked_to_quit != STOP_NOW:
            self.asked_to_quit = number

    def reserve(self) -> None:
        """Blocks for exit.json, so that a full disk cannot take the last word."""
        with contextlib.suppress(OSError):
            (self.run.path / ".exit.reserve").write_bytes(b" " * RESERVE)
        with contextlib.suppress(OSError):
            for path in metric_files(read_config(self.run.config_path) or {}, self.run.metrics_dir):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.touch(mode=0o600)
        self.log.reserve()

    def launch(self) -> bool:
        """Start the launcher in a session of its own; False (and exit.json) when it cannot be started."""
        env = {**os.environ, **self.job["env"], RUN_ID_VARIABLE: self.run.id}
        env.pop(SUPERVISES_VARIABLE, None)
        umask = int(self.job.get("umask", 0o022))
        handed_on = self.for_nodes(env) if self.reach else None
        try:
            child = subprocess.Popen(
                self.job["argv"],
                cwd=self.job["cwd"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.log.fd,
                stderr=self.log.fd,
                start_new_session=True,
                umask=umask,
                pass_fds=() if handed_on is None else (handed_on,),
            )
        except (OSError, subprocess.SubprocessError) as e:
            reason = f"cannot start {self.job['argv'][0]}: {getattr(e, 'strerror', None) or e}"
            self.finish_without_launch(reason)
            self.acknowledge(error=reason)
            return False
        finally:
            if handed_on is not None:
                os.close(handed_on)
        child.returncode = 0  # reaped here, by waitpid(-1); Popen must not wait for it
        process = identify(child.pid) or Process(child.pid, -1)
        self.launcher = self.watch(process, os.getpid(), "launcher")
        if self.manifest.get("launcher_kind") == "python":
            self.set_rank(self.launcher, 0)
        own = identify(os.getpid())
        assert own is not None
        self.manifest["supervisor"] = {"pid": own.pid, "start_time": own.start}
        self.manifest["launcher"] = {"pid": process.pid, "start_time": process.start}
        self.manifest["started_at"] = self.started_at
        self.manifest["detached"] = self.job.get("detached")
        store.write_json(self.run.manifest_path, self.manifest)
        self.event("launched", pid=process.pid)
        self.beat(time.monotonic())
        self.acknowledge(ok=True, pid=own.pid)
        return True

    def for_nodes(self, env: dict[str, str]) -> int:
        """Let the ranks on every node have the run's environment, and ssh notice a node that is gone.

        The lines are in memory, never on disk: they may hold secrets that ``--env`` gave. Their names and those that
        could not be handed on are in an event.
        """
        text, dropped = environment_file(
            self.job["env"],
            os.environ,
            cwd=self.job["cwd"],
            python=str(self.manifest.get("python")),
            run_id=self.run.id,
            release=(self.manifest.get("versions") or {}).get("deepspeed"),
        )
        if dropped:
            self.event("not_handed_on", names=sorted(dropped))
        fd = os.memfd_create("dstui")
        os.write(fd, text)
        # Joined to a folder (launcher/runner.py), an absolute path stays as it is.
        env["DS_ENV_FILE"] = f"/proc/self/fd/{fd}"
        options = env.get("PDSH_SSH_ARGS_APPEND", "")
        if "ServerAlive" not in options:
            # pdsh would wait for ever for a node that lost its power: five minutes of silence end its ssh.
            alive = "-oBatchMode=yes -oServerAliveInterval=30 -oServerAliveCountMax=10"
            env["PDSH_SSH_ARGS_APPEND"] = f"{options} {alive}".strip()
        return fd

    def finish_without_launch(self, reason: str) -> None:
        now = time.time()
        self.event("exit", outcome="failed", reason=reason)
        self.write_exit(
            {
                "schema_version": store.SCHEMA_VERSION,
                "outcome": "failed",
                "code": None,
                "signal": None,
                "reason": reason,
                "ranks": [],
                "started_at": self.started_at,
                "ended_at": now,
                "stopped_by": None,
                "cause": None,
            }
        )

    # -- records -------------------------------------------------------------------------------------

    def event(self, name: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self.run.append_event(name, **fields)

    def beat(self, now: float) -> None:
        self.next_beat = now + store.HEARTBEAT_INTERVAL
        living = [w for w in self.watched.values() if w.ended_at is None]
        data = {
            "t": round(time.time(), 3),
            "state": "stopping" if self.stop else "running",
            "processes": [[w.process.pid, w.process.start] for w in living],
            "ranks": {str(w.rank): w.process.pid for w in living if w.rank is not None},
        }
        if self.stall is not None:
            data["stall"] = stall_json(self.stall)
        path = self.run.heartbeat_path
        temporary = path.with_name(".heartbeat.tmp")
        text = json.dumps(data)
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except (
            OSError
        ):  # a full disk: into the blocks that the file has, so that other hosts see a living run
            with contextlib.suppress(OSError), path.open("r+") as f:
                f.write(text.ljust(path.stat().st_size))

    def write_exit(self, data: dict[str, Any]) -> None:
        """Complete or not at all; into the reserved blocks, so a full disk does not matter."""
        text = (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode()
        reserve = self.run.path / ".exit.reserve"
        while self.run.path.is_dir():
            try:
                fd = os.open(reserve, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    os.pwrite(fd, text, 0)
                    os.ftruncate(fd, len(text))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                reserve.replace(self.run.exit_path)
                return
            except OSError as e:
                print(f"exit.json: {e}; trying again", file=sys.stderr)
                time.sleep(5)

    # -- processes -----------------------------------------------------------------------------------

    def watch(self, process: Process, parent: int, name: str) -> Watched:
        fd = None
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(process.pid)
        w = Watched(process, parent, name, fd)
        self.watched[process.pid] = w
        if fd is not None:
            self.selector.register(fd, selectors.EVENT_READ, w)
        return w

    def forget_fd(self, w: Watched) -> None:
        if w.fd is not None:
            self.selector.unregister(w.fd)
            os.close(w.fd)
            w.fd = None

    def set_rank(self, w: Watched, rank: int) -> None:
        w.rank = rank
        self.event("rank", rank=rank, pid=w.process.pid)

    def members(self, stats: dict[int, Stat] | None = None) -> list[Process]:
        """Every living process of the run; the user's own command on an event is none, nor is a run that it started."""
        stats = all_stats() if stats is None else stats
        found = [
            p for p in descendants(os.getpid(), stats) if not self.is_of_another_run(p, stats[p.pid].parent)
        ]
        found += [p for p in self.on_this_node if p.pid in stats and stats[p.pid].start == p.start]
        return [p for p in found if not self.hooks.owns(p, stats[p.pid])]

    def is_of_another_run(self, process: Process, parent: int) -> bool:
        """A training may start runs as well: their supervisors and ranks come under this process, and are not its own."""
        if parent in self.foreign:
            self.foreign[process.pid] = process
        known = self.foreign.get(process.pid)
        if known is not None:
            if known == process:
                return True
            del self.foreign[process.pid]
        looks = self.own.get(process, 0)
        if looks >= SETTLED:
            return False
        self.own[process] = looks + 1  # before exec it still shows its parent's environment
        env = environment(process.pid)
        if SUPERVISES_VARIABLE in env or env.get(RUN_ID_VARIABLE, self.run.id) != self.run.id:
            self.foreign[process.pid] = process
            return True
        return False

    def table(self, now: float) -> dict[int, Stat]:
        """The part of the process table in which the run's processes are."""
        stats = self.family.stats(now)
        if self.reach is not None:
            self.look_on_this_node(now, stats)
        return stats

    def look_on_this_node(self, now: float, stats: dict[int, Stat]) -> None:
        """Ranks that sshd started here are no children of ours; the run's id in their environment tells."""
        if now - self.looked_anew >= Family.ANEW:
            self.looked_anew = now
            self.strangers.clear()
        own = {p.pid for p in descendants(os.getpid(), stats)}
        self.on_this_node = {p for p in marked(self.run.id, self.strangers) if p.pid not in own}
        for p in self.on_this_node:
            s = stat(p.pid)
            if s is not None and s.start == p.start:
                stats[p.pid] = s

    def scan(self, now: float) -> list[Process]:
        """Look at the process table: new processes are watched, vanished ones noted. Returns the living."""
        self.next_scan = now + (TICK if now - self.begun < EARLY else SCAN_EVERY)
        stats = self.table(now)
        living = [p for p in self.members(stats) if p.pid in stats]
        self.forget_others(stats)
        for process in living:
            known = self.watched.get(process.pid)
            if known is None or known.process != process:
                if known is not None:
                    self.ended(known, None)
                s = stats[process.pid]
                known = self.watch(process, s.parent, s.name)
                self.next_scan = min(self.next_scan, now + QUICK)
            if known.rank is None and known.belongs is None and known.looks < 5:
                known.looks += 1
                self.look_for_rank(known)
                if self.reach is not None and known.host is None:
                    known.host = ssh_host(process.pid, known.parent, self.reach.hosts)
        there = set(living)
        for w in list(self.watched.values()):
            if w.ended_at is None and w.process not in there and w.fd is None:
                self.ended(w, self.zombie_code(w.process))
        return living

    def look_for_rank(self, w: Watched) -> None:
        env = environment(w.process.pid)
        rank = env.get("RANK", "")
        if not rank.isdigit() or "LOCAL_RANK" not in env:
            return
        if (rank, env["LOCAL_RANK"]) == (os.environ.get("RANK"), os.environ.get("LOCAL_RANK")):
            return  # inherited from our caller, not given by the launcher
        number = int(rank)
        parent = self.watched.get(w.parent)
        helps = parent is not None and (parent.rank is not None or parent.belongs is not None)
        orphan = w.parent == os.getpid() and w is not self.launcher
        taken = any(x.rank == number and x.ended_at is None for x in self.watched.values())
        if helps or orphan or taken:
            w.belongs = number
        else:
            self.set_rank(w, number)
            self.see_world(env.get("WORLD_SIZE", ""))

    def see_world(self, text: str) -> None:
        """How many ranks the launcher really made of what it was told; the manifest then says that number."""
        asked = self.manifest.get("world_size")
        if not text.isdigit() or int(text) == asked or "world_size_asked" in self.manifest:
            return
        self.manifest |= {"world_size": int(text), "world_size_asked": asked}
        self.event("world_size", asked=asked, seen=int(text))
        with contextlib.suppress(OSError):
            store.write_json(self.run.manifest_path, self.manifest)

    def forget_others(self, stats: Mapping[int, Stat]) -> None:
        """What turned out to be of another run was watched for a moment; what is gone need not be remembered."""
        for pid, process in self.foreign.items():
            w = self.watched.get(pid)
            if w is not None and w.process == process:
                self.forget_fd(self.watched.pop(pid))
        self.foreign = {pid: p for pid, p in self.foreign.items() if pid in stats}
        self.own = {p: n for p, n in self.own.items() if p.pid in stats}

    @staticmethod
    def zombie_code(process: Process) -> int | None:
        """Exit code of a process that its parent has not reaped yet (``/proc/PID/stat`` field 52)."""
        try:
            raw = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        if raw[0] not in (b"Z", b"X") or int(raw[19]) != process.start:
            return None
        return os.waitstatus_to_exitcode(int(raw[49]))

    def ended(self, w: Watched, code: int | None) -> None:
        if w.code is None:
            w.code = code
        if w.ended_at is not None:
            return
        w.ended_at = time.time()
        self.forget_fd(w)
        if w.rank is not None:
            self.event("rank_exit", rank=w.rank, pid=w.process.pid, code=w.code)
        if w.host is not None:
            self.event("node_exit", host=w.host, code=w.code)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self.hooks.reaped(pid, code):
                continue
            w = self.watched.get(pid)
            if w is not None:
                w.code = code
                self.ended(w, code)
            if self.launcher is not None and pid == self.launcher.process.pid:
                self.launcher_code = code

    # -- the loop ------------------------------------------------------------------------------------

    def main_loop(self) -> None:
        self.start_sampler()
        if self.reach is not None:
            self.reach.tell(0)  # what each node's kernel has counted so far
        next_tick = time.monotonic()
        while not self.is_over():
            now = time.monotonic()
            if now >= next_tick:
                next_tick = max(next_tick + TICK, now + TICK / 2)
                self.tick(now)
            elif now >= self.next_scan:
                self.scan(now)
            soon = min(next_tick, self.next_scan)
            wait = STOPPING_TICK if self.stop else max(0.0, soon - time.monotonic())
            self.wait(wait)
            if self.stop:
                self.push_stop()

    def is_over(self) -> bool:
        return self.launcher_code is not None

    def wait(self, seconds: float) -> None:
        for key, _mask in self.selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
                self.requests()
            elif key.data.ended_at is None:
                w: Watched = key.data
                code = self.zombie_code(w.process)
                if w.parent == os.getpid() or code is None:
                    self.reap()
                self.ended(w, code)
        self.reap()
        if self.asked_to_quit is not None:
            number, self.asked_to_quit = self.asked_to_quit, None
            if self.stop is None or (number == STOP_NOW and not self.stop.now):
                by = {"signal": signal_name(number), "to": "supervisor"}
                self.begin_stop(by, now=number == STOP_NOW)

    def tick(self, now: float) -> None:
        if now >= self.next_scan:
            self.scan(now)
        self.tell_stall(now)
        self.look_at_nodes(now)
        self.keep_up(now)

    def keep_up(self, now: float) -> None:
        """What goes on until nothing of the run lives any more: requests, heartbeat, manifest, log."""
        self.requests()
        if now >= self.next_beat:
            self.beat(now)
            self.look_at_disk()
            self.keep_manifest()
        self.hooks.tick(now)
        try:
            self.rank_logs.tick()
            events = [self.log.tick(), self.log.reserve()]
        except OSError as e:
            events = [{"event": "log_trouble", "cause": str(e)}]
        for event in filter(None, events):
            self.event(event.pop("event"), **event)

    def tell_stall(self, now: float) -> None:
        """What the sampling thread found: recorded, in the heartbeat, and to the user's command."""
        stall = self.stall
        if stall == self.stall_told:
            return
        self.stall_told = stall
        if stall is None:
            self.event("stall_over")
            self.hooks.calm()
        else:
            told = stall_json(stall)
            self.event("stall", **told)
            cause = {"code": stall.code, "name": BY_CODE[stall.code].name, "certainty": None}
            if self.stop is None:
                self.hooks.fire("stalled", message=stall.text, cause=cause, stall=told)
        self.beat(now)

    def look_at_nodes(self, now: float) -> None:
        """The ranks of one node have failed and the others wait for them: as on one node, the run is over.

        DeepSpeed's ``launch`` ends only the ranks of its own node; the others would sit in a collective until it
        times out, 30 minutes with gloo, 10 with NCCL.
        """
        if self.reach is None or self.stop is not None:
            return
        if self.failed_node is None:
            failed = self.node_that_pdsh_lost()
            if failed is not None:
                self.failed_node = (failed, now)
            return
        if now - self.failed_node[1] < NODE_GRACE_SECONDS:
            return
        self.event("node_failed", host=self.failed_node[0])
        self.begin_stop({"node": self.failed_node[0]}, now=True, failed=True)

    def keep_manifest(self) -> None:
        """Somebody removed, emptied or damaged it (an editor, a full disk): nobody could find or stop the run."""
        try:
            s = self.run.manifest_path.stat()
            seen = (s.st_ino, s.st_size, s.st_mtime_ns)
        except OSError:
            seen = None
        before, self.manifest_seen = self.manifest_seen, seen
        if seen == before if seen is not None else before is not None:
            return  # sound, or gone just now: the whole folder may be about to go
        if store.read_json(self.run.manifest_path) is not None or not self.run.path.is_dir():
            return
        with contextlib.suppress(OSError):
            store.write_json(self.run.manifest_path, self.manifest)
            self.event("manifest_restored")

    def node_that_pdsh_lost(self) -> str | None:
        """The first node whose ssh ended with another code than 0, as pdsh says at once (Debian's 2.34)."""
        data = os.pread(self.log.fd, 4 << 20, self.pdsh_read)
        data = data[: data.rfind(b"\n") + 1]
        self.pdsh_read += len(data)
        m = PDSH_CODE.search(data)
        return None if m is None or self.reach is None else host_named(m.group(1), self.reach.hosts)

    def look_at_disk(self) -> None:
        try:
            s = os.statvfs(self.run.path)
        except OSError:
            return
        free = s.f_bavail * s.f_frsize
        if free < LOW_DISK:
            event = self.log.free_space()
            if event or not self.disk_low:
                self.event("disk_low", free=free)
            self.disk_low = True
        elif free > 2 * LOW_DISK:
            self.disk_low = False

    def start_sampler(self) -> None:
        """In a thread: a disk that hangs must not delay a stop."""
        self.sampling = threading.Thread(target=self.take_samples, name="samples", daemon=True)
        self.sampling.start()

    def take_samples(self) -> None:
        try:
            sampler = Sampler(
                self.run.samples_dir,
                devices=self.job.get("devices"),
                extensions=self.extensions,
                ops=self.ops(),
            )
            ear = Ear(self.run)
            while not self.ending.wait(TICK):
                living = [w for w in list(self.watched.values()) if w.ended_at is None]
                taken = sampler.sample([w.process.pid for w in living])
                self.keep_locks(sampler.held)
                if ear.hear(taken):
                    self.stall = ear.stall
            sampler.close()
        except Exception as e:  # the run goes on without figures
            traceback.print_exc()
            self.event("sampler_failed", cause=str(e))

    @property
    def extensions(self) -> Path:
        return extensions_root({**os.environ, **self.job["env"]})

    def ops(self) -> tuple[str, ...]:
        """The ops whose locks this run may wait for."""
        config = read_config(self.run.config_path)
        on_cpu = self.job.get("devices") == []
        return (*ops_needed(config or {}), *((CPU_COLLECTIVES,) if on_cpu else ()))

    # -- stopping ------------------------------------------------------------------------------------

    def requests(self) -> None:
        try:
            entries = sorted(e.name for e in os.scandir(self.run.requests_dir) if e.name.endswith(".json"))
        except OSError:
            return
        for name in entries:
            path = self.run.requests_dir / name
            try:
                asked = json.loads(path.read_text(encoding="utf-8"))
                path.rename(path.with_suffix(".done"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                asked = None
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".bad"))
            if not isinstance(asked, dict) or asked.get("request") != "stop":
                self.event("request_refused", file=name)
                continue
            by = asked.get("by") if isinstance(asked.get("by"), dict) else {}
            self.begin_stop(dict(by or {}), bool(asked.get("now")))

    def begin_stop(self, by: dict[str, Any], now: bool, failed: bool = False) -> None:
        if not failed:
            self.event("stop_requested", by=by, now=now)
        self.scan(time.monotonic())  # a rank that came up just now may hold a lock already
        self.note_locks()
        if self.stop is None:
            self.stop = Stop(by, now, failed=failed)
        elif now and not self.stop.now:
            self.stop.now = True  # somebody lost patience
            self.stop.stage = ""
        self.push_stop()
        self.beat(time.monotonic())

    def push_stop(self) -> None:
        """INT, TERM, KILL: each stage reaches every process of the run once, also those started meanwhile."""
        stop = self.stop
        assert stop is not None
        now = time.monotonic()
        if not stop.stage:
            self.enter(stop, "TERM" if stop.now else "INT", now)
        elapsed = now - stop.stage_since
        if stop.stage == "INT" and elapsed > INTERRUPT_SECONDS:
            self.enter(stop, "TERM", now)
        elif stop.stage == "TERM" and elapsed > (NOW_SECONDS if stop.now else TERMINATE_SECONDS):
            self.enter(stop, "KILL", now)
        number = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}[stop.stage]
        if self.reach is not None:
            self.push_nodes(stop, self.reach, number, now)
            return
        for process in self.scan(now):
            if process not in stop.signalled or stop.stage == "KILL":
                stop.signalled.add(process)
                with contextlib.suppress(OSError):
                    send(process, number)

    def push_nodes(self, stop: Stop, reach: Reach, number: int, now: float) -> None:
        """The same ladder on every node. The launcher ends by itself when its ranks have; it gets no signal that it
        could answer, for it would end every DeepSpeed training on these nodes (``dstui.runs.nodes``)."""
        if now >= self.next_scan:
            self.scan(now)
        if reach.busy:
            return
        if not stop.told:
            stop.told = True
            reach.tell(number)
            return
        local = self.tell_this_node(stop, reach, number)
        if reach.clear:
            if now - stop.stage_since > LEFTOVER_SECONDS and stop.stage != "KILL":
                self.enter(stop, "KILL", now)
            elif stop.stage == "KILL" and now - stop.stage_since > LEFTOVER_SECONDS / 2:
                self.kill_launcher()  # it had time to end by itself
        elif not local and reach.silent and (reach.hopeless or now - stop.stage_since > SILENT_SECONDS):
            if stop.stage == "KILL":
                self.kill_launcher()
            else:
                self.enter(stop, "KILL", now)
        elif stop.stage == "KILL" and now - stop.stage_since > NODE_KILL_SECONDS:
            self.kill_launcher()
        elif now - stop.looked_at > LOOK_SECONDS:
            stop.looked_at = now
            reach.tell(number if stop.stage == "KILL" else 0)

    def tell_this_node(self, stop: Stop, reach: Reach, number: int) -> list[Process]:
        """Where this machine's own sshd lets nobody in (a key that was in an agent), its ranks are signalled from here.
        Those that live."""
        if not any(reach.answers[h].problem for h in self.hosts_here if h in reach.answers):
            return []
        living = still_alive(self.on_this_node)
        for process in living:
            if process not in stop.signalled:
                stop.signalled.add(process)
                with contextlib.suppress(OSError):
                    send(process, number)
        return living

    def kill_launcher(self) -> None:
        """Runner, pdsh and its ssh clients wait for a node that does not answer."""
        for process in self.scan(time.monotonic()):
            with contextlib.suppress(OSError):
                send(process, signal.SIGKILL)

    def enter(self, stop: Stop, stage: str, now: float) -> None:
        stop.stage, stop.stage_since = stage, now
        stop.told = False
        stop.signalled.clear()
        self.event("signal", signal="SIG" + stage, processes=len(self.members()))

    def end_leftovers(self) -> None:
        """The launcher is gone; whatever still runs is a rank that lost it, or something that a rank left.

        DeepSpeed's runner ends at once of the SIGINT of a stop: its ranks have the time of the stop all the same.
        """
        deadline = time.monotonic() + (LEFTOVER_SECONDS if self.launcher_code == 0 else LEFTOVER_SECONDS / 2)
        next_tick = time.monotonic()
        ladder = [signal.SIGTERM, signal.SIGKILL]
        told: set[Process] = set()
        number: int | None = None
        if self.stop and self.stop.stage in ("TERM", "KILL"):
            deadline = 0.0
        while True:
            living = still_alive(self.scan(time.monotonic()))
            if not living:
                self.wait(0.0)  # the last ones to die are still zombies, and have their codes
                return
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK
                self.keep_up(now)
            if self.stop is not None and self.reach is None:
                self.push_stop()
                self.wait(STOPPING_TICK)
                continue
            if now >= deadline:
                number = ladder.pop(0) if ladder else signal.SIGKILL
                deadline = now + LEFTOVER_SECONDS
                told = set()
            if number is not None:
                for process in living:
                    if process in told and number != signal.SIGKILL:
                        continue
                    told.add(process)
                    w = self.watched.get(process.pid)
                    if number == signal.SIGTERM or not any(x["pid"] == process.pid for x in self.leftovers):
                        own, rank = stat(process.pid), w.rank if w else None  # it was seen before its exec
                        name = own.name if own is not None else w.name if w else None
                        self.leftovers.append({"pid": process.pid, "rank": rank, "name": name})
                        self.event("leftover", pid=process.pid, rank=rank)
                    with contextlib.suppress(OSError):
                        send(process, number)
            self.wait(STOPPING_TICK)

    def end_on_nodes(self, only_look: bool = False) -> None:
        """The launcher is gone: nothing of the run may live on any node. What may all the same is written down."""
        reach = self.reach
        if reach is None:
            return
        deadline = time.monotonic() + NODE_KILL_SECONDS
        grace = time.monotonic() + (LEFTOVER_SECONDS / 2 if self.stop is None else 0.0)
        number: int = 0
        while True:
            self.until_told(reach)
            reach.tell(number)
            self.until_told(reach)
            left = {r["host"]: r["left"] for r in reach.records() if r["left"]}
            if reach.clear or only_look or time.monotonic() >= deadline:
                break
            if not left and time.monotonic() >= grace:
                break  # the others do not answer
            if left and time.monotonic() >= grace:
                if number == 0:
                    self.event("leftover_on_nodes", left=left)
                number = int(signal.SIGKILL if number else signal.SIGTERM)
            self.wait(NOW_SECONDS if number == signal.SIGTERM else LOOK_SECONDS)
        if not reach.clear:
            self.event("nodes_not_clear", nodes=reach.records())

    def nodes(self) -> list[dict[str, Any]]:
        """What is known of each node at the end; [] for a run on one machine."""
        return [] if self.reach is None else self.reach.records()

    def until_told(self, reach: Reach) -> None:
        while reach.busy:
            self.wait(STOPPING_TICK)

    # -- the end -------------------------------------------------------------------------------------

    def conclude(self) -> None:
        code = self.launcher_code
        assert code is not None
        at_exit = [w for w in self.watched.values() if w.rank is not None and w.ended_at is None]
        stopped = (
            self.stop is not None and not self.stop.failed
        )  # one that comes now finds a run that is over
        self.end_on_nodes()
        self.end_leftovers()
        with contextlib.suppress(OSError):
            self.rank_logs.tick(last=True)
        self.free_shared_memory()
        self.end_sampling()
        removed = self.free_locks()
        ranks = sorted(
            (w for w in self.watched.values() if w.rank is not None), key=lambda w: (w.rank, w.ended_at or 0)
        )
        own = [w for w in ranks if w not in at_exit]  # ended by themselves or by the launcher
        first, rank_code = first_to_fail(own, rank_code_from_log(self.log.fd))
        node = None
        if self.reach is not None:
            node, code_there = first_node_to_fail(self.log.fd, self.reach.hosts)
            gone = [r["host"] for r in self.nodes() if r["problem"] is not None and r["met"]]
            if gone:
                node, code_there = gone[0], None  # it could not say so itself
            elif node is None and self.failed_node is not None:
                node = self.failed_node[0]
            if node is not None and not is_here(node):
                first, rank_code = None, code_there  # those here followed
        parents = [
            w
            for w in self.watched.values()
            if w.rank is None and self.is_launcher(w) and w.code not in (0, None)
        ]
        rank = first.rank if first is not None else None
        if rank is None and node is None:
            rank = rank_from_log(self.log.fd)
        reason = None
        if stopped:
            outcome = "stopped"
        elif code == 0 and rank_code is None and not parents and not at_exit:
            outcome = "finished"
        else:
            outcome = "failed"
            reason = self.reason(code, rank_code, rank, parents, at_exit)
            if node is not None:
                reason = f"on node {node}: {reason}"
                said = next((r["detail"] for r in self.nodes() if r["host"] == node), None)
                reason += f"; ssh to it says: {said}" if said else ""
        data = {
            "schema_version": store.SCHEMA_VERSION,
            "outcome": outcome,
            "code": code if code >= 0 else None,
            "signal": self.ending_signal(code, rank_code, parents),
            "launcher_signal": signal_name(-code) if code < 0 else None,
            "rank_code": rank_code,
            "first_rank": rank,
            "first_node": node if outcome == "failed" else None,
            "nodes": self.nodes() or None,
            "ended_for_node": self.stop.by.get("node") if self.stop and self.stop.failed else None,
            "reason": reason,
            "ranks": [self.rank_record(w) for w in ranks],
            "leftovers": self.leftovers,
            "locks_removed": removed,
            "oom_kills": self.cgroup.difference(),
            "started_at": self.started_at,
            "ended_at": time.time(),
            "stopped_by": self.stop.by if stopped and self.stop is not None else None,
            "cause": None,
        }
        data["cause"] = self.cause(data)
        self.event("exit", outcome=outcome, code=data["code"], signal=data["signal"])
        self.write_exit(data)
        self.settle()
        self.tell_end(data)

    def tell_end(self, data: dict[str, Any]) -> None:
        """To the user's command; readers know the end already."""
        message = data.get("reason") or f"the run has {data['outcome']}"
        if data["outcome"] == "stopped":
            message = "the run was stopped"
        self.hooks.fire(data["outcome"], message=message, cause=data.get("cause"), end=data)
        while self.hooks.busy:
            self.hooks.tick(time.monotonic())
            time.sleep(STOPPING_TICK)
            self.reap()

    def end_sampling(self) -> None:
        self.ending.set()
        if self.sampling is not None:
            self.sampling.join(3.0)
        with contextlib.suppress(OSError):
            self.log.tick()

    @staticmethod
    def rank_record(w: Watched) -> dict[str, Any]:
        return {
            "rank": w.rank,
            "pid": w.process.pid,
            "code": w.code,
            "signal": signal_name(-w.code) if w.code is not None and w.code < 0 else None,
            "ended_at": w.ended_at,
        }

    def free_shared_memory(self) -> None:
        """No process of the run lives any more: its buffers in /dev/shm are nobody's."""
        try:
            files, size = shm.remove(self.manifest.get("master_port"), self.started_at)
        except OSError as e:
            self.event("shared_memory_left", cause=str(e))
            return
        if files:
            self.event("shared_memory_freed", files=files, bytes=size)

    def note_locks(self) -> None:
        """The locks that ranks hold now, while their holders can still be seen."""
        ranks = [w.process.pid for w in self.watched.values() if w.ended_at is None and w.rank is not None]
        self.keep_locks(held_by(ranks, self.extensions))

    def keep_locks(self, found: set[HeldLock]) -> None:
        """Remember them, and write them down for the supervisor that may come after this one."""
        for lock in sorted(found - self.held_locks):
            self.held_locks.add(lock)
            self.event("op_lock", **lock._asdict())

    def free_locks(self) -> list[str]:
        """Remove the locks of op builds that died with this run: held by one of its processes, of which none lives.

        Every later run would wait for such a lock for ever (``dstui.runs.ops``).
        """
        removed = []
        for lock in sorted(self.held_locks):
            if remove_dead(lock):
                removed.append(lock.path)
                self.event("op_lock_removed", path=lock.path)
        return removed

    def cause(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """The named cause; readers can always ask again, with the rules of their own release."""
        try:
            from dstui.runs.diagnose import diagnose_run

            found = diagnose_run(_Ended(self.run.path, data)).cause
        except Exception:
            traceback.print_exc()
            return None
        if found is None:
            return None
        return {
            "code": found.code,
            "name": found.name,
            "checkpoint": found.checkpoint,
            "certainty": found.certainty,
        }

    def settle(self) -> None:
        """What was measured corrects the next estimate. The run is over and written down by now."""
        if self.manifest.get("subject") is None and not (self.run.path / "probe").is_dir():
            return
        try:
            from dstui.runs.trial import settle

            settle(self.run)
        except Exception:
            traceback.print_exc()

    def is_launcher(self, w: Watched) -> bool:
        """The launcher or a process between it and a rank (DeepSpeed's ``launch``)."""
        if w is self.launcher:
            return True
        return any(x.parent == w.process.pid for x in self.watched.values() if x.rank is not None)

    @staticmethod
    def ending_signal(code: int, rank_code: int | None, parents: list[Watched]) -> str | None:
        for value in (rank_code, code, *(w.code for w in parents)):
            if value is not None and value < 0:
                return signal_name(-value)
        return None

    @staticmethod
    def reason(
        code: int,
        rank_code: int | None,
        rank: int | None,
        parents: list[Watched],
        at_exit: list[Watched],
    ) -> str:
        """One English sentence for logs and JSON; the front ends have their own words (diagnose)."""
        if rank_code is not None:
            who = f"rank {rank}" if rank is not None else "a rank"
            how = f"killed by {signal_name(-rank_code)}" if rank_code < 0 else f"exited with code {rank_code}"
            return f"{who} {how} (launcher exit code {code})"
        what = f"the launcher exited with code {code}"
        killed = next((w for w in parents if w.code is not None and w.code < 0), None)
        if killed is not None and killed.code is not None:
            what = f"the launcher (pid {killed.process.pid}) was killed by {signal_name(-killed.code)}"
        elif code == 0 and at_exit:
            # DeepSpeed's runner forwards codes > 0 only, so 0 with living ranks means a signal to launch.
            what = f"a process of the launcher was killed (its exit code {code} means nothing)"
        if at_exit:
            names = ", ".join(str(w.rank) for w in at_exit)
            what += f" while rank(s) {names} still ran; they were ended"
        return what


def stall_json(stall: Stall) -> dict[str, Any]:
    """For events, heartbeat and the user's command; texts in English."""
    return {
        "kind": stall.kind,
        "code": stall.code,
        "since": round(stall.since, 3),
        "ranks": list(stall.ranks),
        "text": stall.text,
    }


class _Ended(RunDir):
    """The run as it will be read once ``exit.json`` is there."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        super().__init__(path)
        self._exit = data

    @property
    def exit(self) -> dict[str, Any] | None:
        return self._exit


def detach() -> None:
    """Second fork, no session leader any more, stdio on /dev/null; the first process ends here."""
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    os.chdir("/")
    os.umask(0o077)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(argv: list[str]) -> int:
    run, ack_fd = RunDir(Path(argv[0])), int(argv[1])
    os.set_inheritable(ack_fd, False)
    job = json.load(sys.stdin)
    detach()
    errors = os.open(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.close(errors)
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(run, job, ack_fd)
        supervisor.signals()
        supervisor.reserve()
        if not supervisor.launch():
            return 1
        supervisor.main_loop()
        supervisor.conclude()
    except Exception as e:
        traceback.print_exc()
        if supervisor is not None and supervisor.launcher is None:
            reason = e.strerror if isinstance(e, OSError) and e.errno != errno.ENOENT else str(e)
            supervisor.acknowledge(error=str(reason))
            supervisor.finish_without_launch(str(reason))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
