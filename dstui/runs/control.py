"""Ask a run to stop, from any terminal on any host; end what a dead supervisor left behind; forget an ended run."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _, listed
from dstui.runs import store
from dstui.runs.nodes import PASSING, Reach, host_names, left_behind
from dstui.runs.processes import STOP_NOW, Process, alive, here, marked, send
from dstui.runs.store import RunDir

STOP_SECONDS = 60.0
"""How long ``stop`` waits: the ladder INT 20 s, TERM 15 s, KILL ends well before."""
TAKEN_SECONDS = 5.0
"""A supervisor looks for requests every second."""
LADDER: tuple[tuple[int, float], ...] = (
    (signal.SIGINT, 20.0),
    (signal.SIGTERM, 15.0),
    (signal.SIGKILL, 10.0),
)
LADDER_NOW: tuple[tuple[int, float], ...] = ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0))
_POLL = 0.1


@dataclass(frozen=True)
class Stopped:
    """``ended``: the run is over (False: asked, not over yet). ``state`` as in the store. ``killed``: pids that
    were ended by us because no supervisor was left to do it."""

    ended: bool
    state: str
    already: bool = False
    killed: tuple[int, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()
    """Nodes where something of the run lives, or may live (``dstui.runs.nodes.Reach.records``)."""


def stop(run: RunDir, now: bool = False, timeout: float | None = STOP_SECONDS) -> Stopped:
    """End ``run`` and all its ranks; waits up to ``timeout`` seconds (None: until it is over, 0: only ask).

    ``now`` skips the polite part (TERM, 3 s, KILL). A supervisor on this host is woken by a signal after
    its pid *and* start time were compared; one on another host finds the request within a second. A
    ``lost`` run on this host: the processes that carry its id are ended from here. Raises DstuiError
    when the run is lost on another host, or the request cannot be written. A run that has ended while a node did not
    answer: that node is asked again.
    """
    if run.has_ended():
        again = _left_on_nodes(run)
        if again:
            left = _end_on_nodes(run, [str(r["host"]) for r in again], now=True)
            return Stopped(True, store.state(run), nodes=left)
        return Stopped(True, store.state(run), already=True)
    try:
        look = store.liveness(run)
    except DstuiError:
        return _stop_damaged(run, now, timeout)
    if look.supervisor is False:
        if run.has_ended():
            return Stopped(True, store.state(run), already=True)
        if store.rebooted(run):
            left = _end_on_nodes(run, _hosts(run), now)
            return Stopped(True, "lost", already=not left, nodes=left)
        if not look.here:
            raise DstuiError(
                _("run {id} is lost: its supervisor on {host} is gone").format(
                    id=run.id, host=run.place().host
                ),
                _("stop it there: dstui stop {id}").format(id=run.id),
            )
        left = _end_on_nodes(run, _hosts(run), now)
        killed = end_orphans(run, now=now)
        return Stopped(
            True, "lost", already=not (killed or left), killed=tuple(p.pid for p in killed), nodes=left
        )
    supervisor = run.process("supervisor") if look.here else None
    try:
        _ask(run, now)
    except DstuiError:
        if supervisor is None or not _signal(supervisor, now):
            raise
    else:
        if supervisor is not None:
            with contextlib.suppress(OSError):
                send(supervisor, signal.SIGUSR1)
    deadline = None if timeout is None else time.monotonic() + timeout
    while deadline is None or time.monotonic() < deadline:
        if run.has_ended():
            return Stopped(True, store.state(run), nodes=_again_from_here(run))
        if look.here and store.liveness(run).supervisor is False:
            if run.has_ended():
                return Stopped(True, store.state(run), nodes=_again_from_here(run))
            left = _end_on_nodes(run, _hosts(run), now)
            killed = end_orphans(run, now=now)
            return Stopped(True, "lost", killed=tuple(p.pid for p in killed), nodes=left)
        time.sleep(_POLL)
    return Stopped(False, store.state(run))


def _hosts(run: RunDir) -> tuple[str, ...]:
    return host_names(run.manifest)


def _left_on_nodes(run: RunDir) -> tuple[Mapping[str, Any], ...]:
    """What ``exit.json`` says of its nodes, less those that a later stop has cleared."""
    cleared = {h for e in run.events() if e.get("event") == "nodes_cleared" for h in e.get("hosts") or ()}
    return tuple(r for r in left_behind((run.exit or {}).get("nodes")) if r["host"] not in cleared)


def _again_from_here(run: RunDir) -> tuple[Mapping[str, Any], ...]:
    """What is left on nodes that refused the supervisor: this terminal may have a key (an agent's) that it has not."""
    left = _left_on_nodes(run)
    refused = [str(r["host"]) for r in left if r.get("problem") not in (None, *PASSING)]
    if not refused:
        return left
    return (*_end_on_nodes(run, refused, now=True), *(r for r in left if r["host"] not in refused))


def _end_on_nodes(run: RunDir, hosts: Sequence[str], now: bool) -> tuple[Mapping[str, Any], ...]:
    """End the run's processes on these nodes, from here; the records of those where something is left."""
    if not hosts:
        return ()
    reach = Reach(hosts, str(run.manifest.get("python")), run.id, os.environ)
    reach.end(LADDER_NOW if now else LADDER)
    left = left_behind(reach.records())
    gone = [h for h in hosts if h not in {r["host"] for r in left}]
    with contextlib.suppress(OSError):
        run.append_event("nodes_cleared", hosts=gone)
    return tuple(left)


def _signal(supervisor: Process, now: bool) -> bool:
    """Ask without a file: the disk is full or read-only. False when it may not be signalled, or is gone."""
    try:
        return send(supervisor, STOP_NOW if now else signal.SIGTERM)
    except OSError:
        return False


def _stop_damaged(run: RunDir, now: bool, timeout: float | None) -> Stopped:
    """The manifest is unreadable: a supervisor that lives takes the request all the same, else whatever carries the
    run's id is ended from here."""
    asked = _ask(run, now)
    taken_by = time.monotonic() + TAKEN_SECONDS
    while asked.exists() and time.monotonic() < taken_by:
        time.sleep(_POLL)
    if asked.exists():
        asked.unlink(missing_ok=True)
        killed = end_orphans(run, now=now)
        return Stopped(True, "lost", already=not killed, killed=tuple(p.pid for p in killed))
    deadline = None if timeout is None else time.monotonic() + timeout
    while deadline is None or time.monotonic() < deadline:
        if run.has_ended():
            return Stopped(True, store.state(run))
        time.sleep(_POLL)
    return Stopped(False, "running")


def _ask(run: RunDir, now: bool) -> Path:
    """Write the request; where it lies until the supervisor takes it."""
    request: dict[str, Any] = {
        "schema_version": 1,
        "request": "stop",
        "now": now,
        "t": time.time(),
        "by": {"user": _user(), "host": here().host, "pid": os.getpid()},
    }
    name = f"stop-{time.time_ns()}-{os.getpid()}"
    path, temporary = run.requests_dir / f"{name}.json", run.requests_dir / f".{name}.tmp"
    try:
        temporary.write_text(json.dumps(request) + "\n", encoding="utf-8")
        temporary.rename(path)
        return path
    except OSError as e:
        raise DstuiError(
            _("cannot write the request to {path}: {cause}").format(
                path=run.requests_dir, cause=e.strerror or e
            ),
            _("only the run's owner can stop it, and the disk must not be full"),
        ) from e


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def orphans(run: RunDir) -> list[Process]:
    """Living processes of a run whose supervisor is dead: they carry its id in their environment.

    The last heartbeat's identities are added where they mean something, for processes whose environment cannot be
    read.
    """
    found = dict.fromkeys(marked(run.id))
    try:
        beat = (run.heartbeat or {}) if run.place() == here() else {}
    except DstuiError:
        beat = {}  # its manifest is damaged: nobody knows where its pids mean something
    for entry in beat.get("processes", ()):
        if isinstance(entry, list) and len(entry) == 2:
            process = Process(int(entry[0]), int(entry[1]))
            if alive(process):
                found[process] = None
    return list(found)


def end_orphans(run: RunDir, now: bool = False) -> list[Process]:
    """INT, TERM, KILL (``now``: TERM, KILL) to every orphan of ``run``; returns those that were there.

    Of a run on several nodes, KILL alone: what is left here then is DeepSpeed's launcher, which would answer with a
    signal to every DeepSpeed training on these nodes (``dstui.runs.nodes``).
    """
    seen: dict[Process, None] = {}
    ladder = LADDER_NOW if now else LADDER
    with contextlib.suppress(DstuiError):
        ladder = LADDER[-1:] if _hosts(run) else ladder
    for number, seconds in ladder:
        told: set[Process] = set()
        deadline = time.monotonic() + seconds
        while True:
            living = orphans(run)
            if not living:
                _note(run, seen)
                return list(seen)
            for process in living:
                seen[process] = None
                if process not in told:
                    told.add(process)
                    with contextlib.suppress(OSError):
                        send(process, number)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
    raise DstuiError(
        _("processes of run {id} do not end: {pids}").format(
            id=run.id, pids=listed(str(p.pid) for p in orphans(run))
        ),
        _("they may wait for a device or a file system; look at them with ps"),
    )


def _note(run: RunDir, killed: dict[Process, None]) -> None:
    if killed:
        with contextlib.suppress(OSError):
            run.append_event("orphans_ended", pids=[p.pid for p in killed])


def refuse_living(run: RunDir) -> None:
    """Raises DstuiError while anything of the run may still be alive."""
    try:
        state = store.state(run)
    except DstuiError:
        state = "lost"  # damaged: only its processes can tell
    if state in store.LIVE:
        raise DstuiError(
            _("run {id} is {state}: not removed").format(id=run.id, state=state),
            _("stop it first: dstui stop {id}").format(id=run.id),
        )
    if state == "lost" and orphans(run):
        raise DstuiError(
            _("run {id} lost its supervisor, but its ranks are alive: not removed").format(id=run.id),
            _("stop it first: dstui stop {id}").format(id=run.id),
        )


def remove(run: RunDir) -> None:
    """Delete the directory; it leaves the list in one step, before its files go."""
    hidden = run.path.with_name(f".rm-{run.id}-{os.getpid()}")
    try:
        run.path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as e:
        raise DstuiError(
            _("{path}: cannot be removed: {cause}").format(path=run.path, cause=e.strerror or e)
        ) from e
