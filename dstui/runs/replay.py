"""A run's directory played back: ``ReplayView(run, speed).poll()`` gives the Snapshots that ``RunView`` gave then.

Nothing is written and no process is looked at. Each sample says how long ``out.log`` and csv_monitor's files were at
that second; a run of an earlier dstui has no such sizes, its log then flows evenly from start to end. The times in a
Snapshot are moved to the present, so that a front end may count from its own clock.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.runs import store
from dstui.runs.alerts import Disk
from dstui.runs.samples import Peaks, Sample, read_history
from dstui.runs.store import RunDir
from dstui.runs.tail import LogFile
from dstui.runs.view import RunView, Snapshot

PREFIX = "replay:"
FASTEST = 10000.0


class _Clock:
    """Epoch seconds of the run, ``speed`` times as fast as ours from ``begin`` on."""

    def __init__(self, begin: float, speed: float) -> None:
        self.begin, self.speed = begin, speed
        self._start = time.monotonic()
        self.at: float | None = None
        """Set: stands there."""

    def go(self, speed: float) -> None:
        """Another speed from now on; the time does not jump."""
        self.begin = self()
        self._start = time.monotonic()
        self.speed = speed

    def __call__(self) -> float:
        if self.at is not None:
            return self.at
        return self.begin + (time.monotonic() - self._start) * self.speed


class ReplayView(RunView):
    """Plays ``run`` back at ``speed``. Raises DstuiError when the directory holds nothing that could be played."""

    def __init__(self, run: RunDir, speed: float = 1.0) -> None:
        if not 0 < speed <= FASTEST:
            raise DstuiError(_("--speed {x}: between 0 and {most}").format(x=speed, most=int(FASTEST)))
        manifest = run.manifest
        self._all = read_history(run.samples_dir)
        self._times = [s.t for s in self._all]
        self._begin = float(manifest.get("started_at") or run.created_at)
        self._exit = run.exit
        ended = (self._exit or {}).get("ended_at") or (self._times[-1] if self._times else None)
        self._end = max(self._begin, float(ended or _mtime(run.out_log) or self._begin))
        self._final = store.state(run) if self._exit is not None else "lost"
        self._log_size = LogFile(run.out_log).size
        self._csv_size = sum(p.stat().st_size for p in run.metrics_dir.glob("*/Train_Samples_*.csv"))
        self._time = _Clock(self._begin, speed)
        self._shown = 0
        super().__init__(run, clock=self._time)

    @property
    def speed(self) -> float:
        return self._time.speed

    def go(self, speed: float) -> None:
        """Play on at another speed, between 1/8 and ``FASTEST``."""
        self._time.go(max(0.125, min(FASTEST, speed)))

    @property
    def played(self) -> float:
        """Share of the run that was shown, 0-1."""
        length = self._end - self._begin
        return max(0.0, min(1.0, (self._time() - self._begin) / length)) if length > 0 else 1.0

    @property
    def moments(self) -> list[float]:
        """Epoch seconds at which something was recorded, the end included."""
        return [t for t in self._times if self._begin <= t < self._end] + [self._end + 1]

    def poll(self) -> Snapshot:
        now = self._time()
        self._reveal(now)
        shot = super().poll()
        return shot if self._time.at is not None else _moved(shot, time.time() - now)

    def at(self, moment: float) -> Snapshot:
        """The run as it was at ``moment``, with its own times; moments must not go back."""
        self._time.at = moment
        return self.poll()

    # -- what RunView asks the file system, answered for that moment ---------------------------------------------

    def _reveal(self, now: float) -> None:
        """How much of each file was there by then."""
        log, metrics = self._sizes(now)
        self._tail.end = log
        share = metrics / self._csv_size if self._csv_size else 1.0
        self._csv.limit(min(1.0, share))

    def _sizes(self, now: float) -> tuple[int, int]:
        if now >= self._end:
            return self._log_size, self._csv_size
        n = bisect.bisect_right(self._times, now) - 1
        known = self._all[n].sizes if n >= 0 else (0, 0)
        if known is not None:  # a report's log is a little shorter or longer than the one that was measured
            last = next((s.sizes[0] for s in reversed(self._all) if s.sizes), 0)
            scale = self._log_size / last if last else 1.0
            return round(known[0] * scale), known[1]
        share = max(0.0, min(1.0, (now - self._begin) / max(1.0, self._end - self._begin)))
        return int(share * self._log_size), int(share * self._csv_size)

    def _join(self, now: float) -> None:
        super()._join(now)
        self._samples.clear()
        self._peaks = Peaks()
        self._state = "starting"
        self._tail.offset = 0

    def _join_large(self, size: int, now: float) -> None:
        """Nothing is skipped: it is read as it appears."""

    def _read_samples(self) -> bool:
        until = bisect.bisect_right(self._times, self._clock())
        fresh: list[Sample] = self._all[self._shown : until]
        self._shown = max(self._shown, until)
        for sample in fresh:
            self._samples.append(sample)
            assert self._peaks is not None
            self._peaks.add(sample)
        return bool(fresh)

    def _look_at_disks(self, now: float) -> tuple[Disk, ...]:
        return self._sampled_disks()

    def _look_at_processes(self, now: float) -> bool:
        stall = None
        if now >= self._end:
            state = self._final
        elif not self._manifest.get("launcher"):
            state = "starting"
        else:
            stall = self._progress.stall(now, self._samples, offload=self._offload)
            state = "running" if stall is None else "stalled"
        changed = (state, stall) != (self._state, self._stall)
        self._state, self._stall = state, stall
        return changed


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _moved(shot: Snapshot, by: float) -> Snapshot:
    """All times later by ``by`` seconds."""

    def later(t: float | None) -> float | None:
        return None if t is None else t + by

    changes: dict[str, Any] = {
        name: later(getattr(shot, name)) for name in ("created", "started", "ended_at", "quiet_since")
    }
    if shot.phase is not None:
        changes["phase"] = dataclasses.replace(shot.phase, since=shot.phase.since + by)
    if shot.stall is not None:
        changes["stall"] = dataclasses.replace(shot.stall, since=shot.stall.since + by)
    if shot.ending is not None:
        changes["ending"] = dataclasses.replace(shot.ending, at=later(shot.ending.at))
    return dataclasses.replace(shot, **changes)


def reference(run: RunDir, speed: float) -> str:
    """What ``open_view`` takes for a replay of ``run``."""
    return f"{PREFIX}{speed:g}:{run.path}"


def run_of(text: str) -> RunDir:
    """The run that ``text`` names, be it a replay's reference or any other."""
    if text.startswith(PREFIX):
        return RunDir(Path(text.removeprefix(PREFIX).partition(":")[2]))
    return store.find_run(text)


def open_view(text: str) -> RunView:
    """A view of the run that ``text`` names; ``replay:SPEED:PATH`` plays it back."""
    if text.startswith(PREFIX):
        return ReplayView(run_of(text), float(text.removeprefix(PREFIX).partition(":")[0]))
    return RunView(store.find_run(text), keep=True)
