"""``RunView(run).poll() -> Snapshot``: all that a monitor shows of one run, for any run on any host.

A poll of a run in which nothing happened costs a few ``stat`` calls and returns the same Snapshot. Joining
reads a bounded part of the log whatever its size: its beginning, pieces spread over its middle, its end.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.facts.model import Facts
from dstui.runs import store
from dstui.runs.adopt import adopt, is_lost_here
from dstui.runs.alerts import Alert, AlertBook, Disk, Moment
from dstui.runs.events import Parser, parser_of
from dstui.runs.lamps import Lamp, Live, Said, lamps
from dstui.runs.measured import FOLDER, Measured, read_probe
from dstui.runs.nodes import elsewhere
from dstui.runs.ops import offload_device
from dstui.runs.samples import HostUse, Peaks, RankUse, Sample, read_peaks, read_samples
from dstui.runs.stall import Stall
from dstui.runs.state import Phase, Progress, batch_of, read_config, steps_asked
from dstui.runs.store import RunDir
from dstui.runs.tail import Line, LogFile, Tail, clean, settle
from dstui.runs.trainer import TrainerFiles, output_folder

HEAD = 256 << 10
TAIL = 512 << 10
PIECES, PIECE = 48, 8 << 10
"""A log larger than WHOLE is joined by HEAD + PIECES x PIECE + TAIL bytes."""
WHOLE = 2 << 20
LOG_LINES = 200
SAMPLES = 600
DISK_EVERY = 30.0
RECHECK = 2.0
"""Seconds between two looks at the processes of a run whose files do not change."""
KEEP_EVERY = 30.0
"""Seconds between two tries to give a lost run another supervisor."""
SET_BACK = 5.0
"""Seconds by which a sample must be older than the one before it to count as written by a clock that was set back."""
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class GpuRow:
    index: int
    name: str | None = None
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    memory_peak: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    throttle: str | None = None
    clock_sm: float | None = None
    pcie_rx: float | None = None
    pcie_tx: float | None = None
    nvlink_rx: float | None = None
    nvlink_tx: float | None = None


@dataclass(frozen=True)
class RankRow:
    """``code``: exit code once it ended (negative = signal)."""

    rank: int
    pid: int | None = None
    rss: int | None = None
    rss_peak: int | None = None
    cpu: float | None = None
    code: int | None = None


@dataclass(frozen=True)
class Comparison:
    """One predicted figure beside the measured one, bytes. ``what``: ``allocated reserved device host``."""

    what: str
    low: int | None
    expected: int | None
    high: int | None
    measured: int | None

    @property
    def ratio(self) -> float | None:
        """measured / expected - 1."""
        if not self.expected or self.measured is None:
            return None
        return self.measured / self.expected - 1


@dataclass(frozen=True)
class Ending:
    """How a run ended; ``text`` is one translated sentence, ``fixes`` translated titles."""

    outcome: str
    text: str
    at: float | None = None
    code: int | None = None
    signal: str | None = None
    cause: str | None = None
    cause_name: str | None = None
    checkpoint: int | None = None
    certainty: str | None = None
    evidence: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Times are epoch seconds, so an unchanged run gives an equal Snapshot; sizes bytes."""

    id: str
    state: str
    name: str | None = None
    path: str = ""
    created: float = 0.0
    started: float | None = None
    ended_at: float | None = None
    quiet_since: float | None = None
    """Last sign of progress; with the state ``stalled``: since when it stands still."""
    stall: Stall | None = None
    """With the state ``stalled``: what it waits for."""
    phase: Phase | None = None
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None
    overflows: int = 0
    flushes: int = 0
    step_time: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    eta: float | None = None
    losses: Curve = ()
    lrs: Curve = ()
    step_times: Curve = ()
    grad_norms: Curve = ()
    speeds: Curve = ()
    speed_unit: str = ""
    """What ``speeds`` counts a second: ``tokens`` or ``samples``."""
    timers: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the last step by part (wall_clock_breakdown): fwd bwd bwd_allreduce step ..."""
    world_size: int | None = None
    batch: int | None = None
    stage: int | None = None
    gpus: tuple[GpuRow, ...] = ()
    host: HostUse = field(default_factory=HostUse)
    host_peak: int | None = None
    ranks: tuple[RankRow, ...] = ()
    utilisation: Curve = ()
    """Mean over the GPUs of the last minutes; without GPUs the host's CPU share."""
    comparisons: tuple[Comparison, ...] = ()
    prediction: Mapping[str, Any] | None = None
    """The estimate as JSON: the one that the run was started with, else the one made from what the probe saw."""
    phase_memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What the probe measured: phase -> ``allocated reserved device host pinned`` (``dstui.runs.measured``)."""
    log: tuple[str, ...] = ()
    ending: Ending | None = None
    allocated: int | None = None
    """Peak bytes of live tensors on a card, and what torch's allocator held for them: where the log tells them."""
    reserved: int | None = None
    lamps: tuple[Lamp, ...] = ()
    """One a checkpoint, in order."""
    alerts: tuple[Alert, ...] = ()
    """The worst first."""
    elsewhere: int = 0
    """Ranks on other nodes, which nobody samples; ``nodes``: their names."""
    nodes: tuple[str, ...] = ()
    here: bool = True
    """False: the run's host is another one, so liveness is only as good as its heartbeat."""

    @property
    def over(self) -> bool:
        return self.state in ("finished", "failed", "stopped", "lost")


class _CsvFiles:
    """csv_monitor's files below ``metrics/``: one a metric, lines ``step,value`` with a header at each start."""

    METRICS = ("lr", "train_loss", "loss_scale")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self._listed = 0
        self._share: float | None = None

    def _find(self) -> None:
        try:
            mtime = self._folder.stat().st_mtime_ns
        except OSError:
            return
        if len(self._tails) == len(self.METRICS):
            return
        if self._listed == mtime and self._tails:
            return
        self._listed = mtime
        for metric in self.METRICS:
            if metric not in self._tails:
                found = sorted(self._folder.glob(f"*/Train_Samples_{metric}.csv"))
                if found:
                    self._tails[metric] = Tail(found[0])

    def limit(self, share: float) -> None:
        """Show only the first ``share`` of each file."""
        self._share = share

    def poll(self, progress: Progress, now: float, live: bool) -> bool:
        self._find()
        changed = False
        for metric, tail in self._tails.items():
            if self._share is not None:
                tail.end = int(self._share * LogFile(tail.path).size)
            if tail.offset == 0 and tail.behind > WHOLE:
                self._join(metric, tail, progress, now)
                changed = True
            if not tail.behind:
                continue
            rows = _rows(tail.read())
            if rows:
                progress.csv(metric, rows, now, live=live)
                changed = True
        return changed

    @staticmethod
    def _join(metric: str, tail: Tail, progress: Progress, now: float) -> None:
        file = LogFile(tail.path)
        size = file.size
        pieces = [*file.probe(PIECES, 1 << 12, 0, size - HEAD), file.after(size - HEAD, 1 << 20)]
        for lines in pieces:
            progress.csv(metric, _rows(lines), now, live=False)
        tail.offset = pieces[-1][-1].offset if pieces[-1] else size


def _rows(lines: list[Line]) -> list[tuple[float, float]]:
    rows = []
    for line in lines:
        x, _, y = line.text.partition(",")
        try:
            rows.append((float(x), float(y)))
        except ValueError:
            continue  # the header, or a torn line
    return rows


class RunView:
    """Follows one run. ``clock``: replaces ``time.time`` in tests. ``keep``: a run whose supervisor is killed under
    the eyes of somebody gets another one (``dstui.runs.adopt``)."""

    def __init__(self, run: RunDir, *, clock: Any = time.time, keep: bool = False) -> None:
        self.run = run
        self._keep = keep
        self._kept_at: float | None = None
        self._clock = clock
        self._manifest: dict[str, Any] = {}
        self._marks: dict[str, tuple[int, int] | None] = {}
        self._parser = Parser()
        self._tail = Tail(run.out_log)
        self._trainer: TrainerFiles | None = None
        self._csv = _CsvFiles(run.metrics_dir)
        self._progress = Progress()
        self._lines: deque[Line] = deque(maxlen=LOG_LINES)
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._sample_tail = Tail(run.samples_dir / "1s.jsonl")
        self._peaks: Peaks | None = None
        self._measured: Measured | None = None
        self._settled: dict[str, Any] | None = None
        self._state = "starting"
        self._stall: Stall | None = None
        self._offload = False
        self._here = True
        self._checked = 0.0
        self._joined = False
        self._partial = ""
        self._ending: Ending | None = None
        self._snapshot: Snapshot | None = None
        self._stage: int | None = None
        self._names: dict[Any, Any] = {}
        self._config: Mapping[str, Any] | None = None
        self._facts = Facts()
        self._said: tuple[Said, ...] = ()
        self._book = AlertBook()
        self._disks: tuple[Disk, ...] = ()
        self._disks_read = 0.0

    @property
    def progress(self) -> Progress:
        return self._progress

    def poll(self) -> Snapshot:
        """The run now. Raises DstuiError when its manifest cannot be read."""
        now = self._clock()
        changed = self._read_manifest()
        joining = not self._joined
        if joining:
            self._join(now)
            changed = True
        live = self._live and not joining  # what lies there already did not happen just now
        changed |= self._read_log(now, live)
        changed |= self._csv.poll(self._progress, now, live)
        if joining and self._live and self._progress.stepped:
            self._progress.reported_at = self._last_output()
        changed |= self._read_samples()
        changed |= self._read_probe()
        changed |= self._look_at_processes(now)
        if self._snapshot is None or changed:
            self._snapshot = self._build(now)
        return self._snapshot

    def newest_ranks(self) -> tuple[RankUse, ...]:
        """The ranks as last sampled."""
        return self._samples[-1].ranks if self._samples else ()

    def close(self) -> None:
        for tail in (self._tail, self._sample_tail, self._trainer):
            if tail is not None:
                tail.close()

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def _live(self) -> bool:
        return self._state in store.LIVE

    def _changed(self, path: Path) -> bool:
        try:
            st = os.stat(path)  # noqa: PTH116 - every tick
            mark: tuple[int, int] | None = (st.st_mtime_ns, st.st_ino)
        except OSError:
            mark = None
        key = path.name
        if key in self._marks and self._marks[key] == mark:
            return False
        self._marks[key] = mark
        return True

    def _read_manifest(self) -> bool:
        if not self._changed(self.run.manifest_path) and self._manifest:
            return False
        before = self._manifest.get("world_size") if self._manifest else None
        self._manifest = self.run.manifest
        world = self._manifest.get("world_size")
        if self._joined and world != before:  # the launcher made another number of ranks than it was told
            self._progress.world, self._progress.batch = world, batch_of(self._config, world)
        return True

    def _join(self, now: float) -> None:
        self._joined = True
        m = self._manifest
        config = self._config = read_config(self.run.config_path)
        try:
            self._facts = Facts.from_json(m.get("facts"))
        except DstuiError:
            self._facts = Facts()  # of a later format
        self._said = _said(self.run, m, self._facts)
        self._progress.world = m.get("world_size")
        self._progress.batch = batch_of(config, m.get("world_size"))
        self._progress.total_hint = steps_asked(m.get("command") or ())
        self._stage = _stage(config)
        self._offload = any(
            offload_device(config or {}, which) != "none" for which in ("offload_optimizer", "offload_param")
        )
        self._names = {
            g.get("index"): g.get("name")
            for g in self._gpus_listed()
            if isinstance(g.get("index"), int) and isinstance(g.get("name"), str)
        }
        self._state = store.state(self.run)
        self._parser = parser_of(m)
        folder = output_folder(m, self.run.path)
        if folder is not None:
            self._trainer = TrainerFiles(folder, float(m.get("created_at") or 0.0))
        self._samples.extend(read_samples(self.run.samples_dir, SAMPLES))
        self._sample_tail.offset = LogFile(self._sample_tail.path).size
        size = LogFile(self.run.out_log).size
        if size > WHOLE:
            self._join_large(size, now)

    def _gpus_listed(self) -> list[dict[str, Any]]:
        gpus = (self._manifest.get("facts") or {}).get("gpus")
        return [g for g in gpus if isinstance(g, dict)] if isinstance(gpus, list) else []

    def _join_large(self, size: int, now: float) -> None:
        file = LogFile(self.run.out_log)
        head = Tail(self.run.out_log)
        self._progress.apply_all(parser_of(self._manifest).feed_all(head.read(HEAD)), now, live=False)
        head.close()
        for lines in file.probe(PIECES, PIECE, HEAD, size - TAIL):
            self._progress.apply_all(parser_of(self._manifest).feed_all(lines), now, live=False)
        first = file.after(size - TAIL, 1)
        self._tail.offset = first[0].offset if first else size - TAIL

    def _last_output(self) -> float | None:
        try:
            return self.run.out_log.stat().st_mtime
        except OSError:
            return None

    def _read_log(self, now: float, live: bool) -> bool:
        changed = False
        if self._tail.behind or self._tail.restarts:
            while True:
                lines = self._tail.read()
                if not lines:
                    break
                changed = True
                self._progress.apply_all(self._parser.feed_all(lines), now, live=live)
                self._lines.extend(lines[-LOG_LINES * 4 :])
            self._tail.restarts = 0
            partial = self._tail.partial
            if partial != self._partial:
                self._partial = partial
                changed = True
                line = Line(self._tail.partial_offset, partial)
                self._progress.apply_all(self._parser.progress(line), now, live=live)
        written = self._trainer.poll(now) if self._trainer is not None else []
        self._progress.apply_all(written, now, live=live)
        changed |= bool(written)
        return changed

    def _read_probe(self) -> bool:
        """What a measured run's ranks have written so far."""
        if (self._manifest.get("spec") or {}).get("measure") is None:
            return False
        changed = False
        if self._changed(self.run.path / FOLDER / "rank-0.jsonl"):
            self._measured = read_probe(self.run)
            changed = True
        if self._changed(self.run.path / "trial.json"):
            self._settled = store.read_json(self.run.path / "trial.json")
            self._measured = read_probe(self.run)
            changed = True
        return changed

    def _read_samples(self) -> bool:
        changed = False
        if self._sample_tail.behind or self._sample_tail.offset == 0:
            for line in self._sample_tail.read():
                try:
                    sample = Sample.from_json(json.loads(line.text))
                except (ValueError, RecursionError):
                    continue
                if sample is None:
                    continue
                if self._samples and sample.t <= self._samples[-1].t:
                    if self._samples[-1].t - sample.t < SET_BACK:
                        continue  # read at the join already
                    while self._samples and self._samples[-1].t >= sample.t:
                        self._samples.pop()  # the clock was set back: those of the future would hide what follows
                self._samples.append(sample)
                changed = True
        elif self._sample_tail.read():  # the file was replaced by a fresh one
            changed = True
        if self._changed(self.run.samples_dir / "peaks.json"):
            self._peaks = read_peaks(self.run.samples_dir)
            changed = True
        return changed

    def _look_at_processes(self, now: float) -> bool:
        ended = self._changed(self.run.exit_path)
        if self._state in ("finished", "failed", "stopped") and not ended:
            return False
        if not ended and now - self._checked < RECHECK:
            return False
        self._checked = now
        state = store.state(self.run)
        if state == "lost" and self._keep and (self._kept_at is None or now - self._kept_at >= KEEP_EVERY):
            self._kept_at = now
            if is_lost_here(self.run) and adopt(self.run):
                state = store.state(self.run)
        self._here = store.liveness(self.run).here if state not in ("finished", "failed", "stopped") else True
        stall = None
        if state == "running":
            stall = self._progress.stall(now, self._samples, offload=self._offload)
            state = "running" if stall is None else "stalled"
        changed = (state, stall) != (self._state, self._stall)
        self._state, self._stall = state, stall
        return changed

    # -- showing -----------------------------------------------------------------------------------------------

    def _build(self, now: float) -> Snapshot:
        m, p = self._manifest, self._progress
        exit_data = self.run.exit if self._state in ("finished", "failed", "stopped", "lost") else None
        over = self._state in ("finished", "failed", "stopped", "lost")
        started = m.get("started_at")
        launched = started if m.get("launcher") else None
        last = self._samples[-1] if self._samples else None
        fresh = last is not None and not over and now - last.t < 15
        known_peak = self._peaks.host_used if self._peaks else None  # written every few seconds only
        if not over:
            self._ending = None  # a lost run was adopted
        elif self._ending is None:
            self._ending = self._make_ending(exit_data)
        shot = Snapshot(
            id=self.run.id,
            name=m.get("name"),
            path=str(self.run.path),
            state=self._state,
            created=float(m.get("created_at") or 0.0),
            started=started,
            ended_at=(exit_data or {}).get("ended_at"),
            quiet_since=(self._stall.since if self._stall else p.reported_at) if not over else None,
            stall=self._stall if self._state == "stalled" else None,
            phase=None if over else p.phase(float(m.get("created_at") or now), launched, self._samples),
            step=p.step,
            total=p.total_steps,
            epoch=p.epoch,
            loss=p.loss,
            lr=p.lr,
            grad_norm=p.grad_norm,
            loss_scale=p.loss_scale,
            skipped=p.skipped,
            overflows=p.overflows,
            flushes=p.flushes,
            step_time=p.step_time,
            tokens_per_second=p.tokens_per_second,
            # DeepSpeed's own figure leaves out what happens between step and forward (utils/timer.py ThroughputTimer)
            samples_per_second=p.batch / p.step_time if p.batch and p.step_time else p.samples_per_second,
            eta=None if over else p.eta,
            losses=p.losses.points,
            lrs=p.lrs.points,
            step_times=p.step_times.points,
            grad_norms=p.grad_norms.points,
            speeds=p.speeds.points,
            speed_unit=p.speed_unit,
            timers=dict(p.timers),
            world_size=p.world or m.get("world_size"),
            batch=p.batch,
            stage=self._stage,
            gpus=self._gpus(last if fresh else None),
            host=last.host
            if fresh and last is not None
            else HostUse(capacity=last.host.capacity if last else None),
            host_peak=max(known_peak or 0, (last.host.used or 0) if fresh and last else 0) or None,
            ranks=self._ranks(last if fresh else None, exit_data),
            utilisation=self._utilisation(),
            comparisons=self._comparisons(),
            prediction=self._prediction(),
            phase_memory=self._measured.phases if self._measured else {},
            log=self._log(),
            ending=self._ending,
            allocated=self._inside("allocated", p.peak_allocated),
            reserved=self._inside("reserved", p.peak_reserved),
            here=self._here,
            elsewhere=elsewhere(m)[0],
            nodes=elsewhere(m)[1],
        )
        return replace(shot, lamps=self._lamps(over), alerts=self._alerts(now, over, exit_data))

    def _inside(self, what: str, seen: int | None) -> int | None:
        """A peak as the log told it, or as the probe measured it inside the ranks."""
        measured = getattr(self._measured, what, None)
        return max(measured or 0, seen or 0) or None

    def _lamps(self, over: bool) -> tuple[Lamp, ...]:
        m, config, end = self._manifest, self._config or {}, self._ending
        cause = end.checkpoint if over and end is not None and end.outcome == "failed" else None
        return lamps(
            Live(
                progress=self._progress,
                config=self._config,
                facts=self._facts,
                prediction=self._prediction(),
                samples=self._samples,
                peaks=self._peaks or Peaks(),
                stage=self._stage,
                world=m.get("world_size"),
                stall=self._stall if self._state == "stalled" else None,
                release=(m.get("versions") or {}).get("deepspeed"),
                said=self._said,
                cause=cause,
                cause_text="" if end is None else f"{end.cause} {end.cause_name}: {end.text}",
                asked_batch=(
                    _whole(config.get("train_batch_size")),
                    _whole(config.get("train_micro_batch_size_per_gpu")),
                    _whole(config.get("gradient_accumulation_steps")),
                ),
            )
        )

    def _alerts(self, now: float, over: bool, exit_data: dict[str, Any] | None) -> tuple[Alert, ...]:
        last = self._samples[-1].t if self._samples else now
        return self._book.look(
            Moment(
                now=float((exit_data or {}).get("ended_at") or last) if over else now,
                progress=self._progress,
                samples=self._samples,
                stall=self._stall if self._state == "stalled" else None,
                disks=() if over else self._look_at_disks(now),
                over=over,
            )
        )

    def _look_at_disks(self, now: float) -> tuple[Disk, ...]:
        """Room where the run writes, one entry a file system; elsewhere what its samples say."""
        if not self._here:
            return self._sampled_disks()
        if now - self._disks_read < DISK_EVERY:
            return self._disks
        self._disks_read = now
        found: dict[int, Disk] = {}
        for path in (self.run.path, Path(self._manifest.get("cwd") or self.run.path)):
            try:
                device = os.stat(path).st_dev  # noqa: PTH116
                use = shutil.disk_usage(path)
            except OSError:
                continue
            found.setdefault(device, Disk(str(path), use.free, use.total))
        self._disks = tuple(found.values())
        return self._disks

    def _sampled_disks(self) -> tuple[Disk, ...]:
        free = self._samples[-1].host.disk if self._samples else None
        return () if free is None else (Disk(str(self.run.path), free),)

    def _gpus(self, sample: Sample | None) -> tuple[GpuRow, ...]:
        peaks = self._peaks.gpu_used if self._peaks else {}
        if sample is None:
            return tuple(
                GpuRow(index=i, name=self._names.get(i), memory_peak=v) for i, v in sorted(peaks.items())
            )
        return tuple(
            GpuRow(
                index=g.index,
                name=self._names.get(g.index),
                utilisation=g.utilisation,
                memory_used=g.memory_used,
                memory_total=g.memory_total,
                memory_peak=max(peaks.get(g.index, 0), g.memory_used or 0) or None,
                power=g.power,
                power_limit=g.power_limit,
                temperature=g.temperature,
                throttle=g.throttle,
                clock_sm=g.clock_sm,
                pcie_rx=g.pcie_rx,
                pcie_tx=g.pcie_tx,
                nvlink_rx=g.nvlink_rx,
                nvlink_tx=g.nvlink_tx,
            )
            for g in sample.gpus
        )

    def _ranks(self, sample: Sample | None, exit_data: dict[str, Any] | None) -> tuple[RankRow, ...]:
        rows: dict[int, RankRow] = {}
        peaks = self._peaks.rank_rss if self._peaks else {}
        codes = {
            r["rank"]: r.get("code") for r in (exit_data or {}).get("ranks") or () if isinstance(r, dict)
        }
        known: dict[int, RankUse] = {r.rank: r for r in (sample.ranks if sample else ())}
        for rank in sorted({*known, *peaks, *codes}):
            use = known.get(rank)
            rows[rank] = RankRow(
                rank=rank,
                pid=use.pid if use else None,
                rss=use.rss if use else None,
                rss_peak=max(peaks.get(rank, 0), (use.rss if use else None) or 0) or None,
                cpu=use.cpu if use else None,
                code=codes.get(rank),
            )
        return tuple(rows.values())

    def _utilisation(self) -> Curve:
        points = []
        for s in list(self._samples)[-240:]:
            known = [g.utilisation for g in s.gpus if g.utilisation is not None]
            share = sum(known) / len(known) if known else s.host.cpu
            if share is not None:
                points.append((round(s.t), round(share, 3)))
        return tuple(points)

    def _prediction(self) -> Mapping[str, Any] | None:
        made: dict[str, Any] | None = self._manifest.get("prediction")
        return made or store.sound_prediction((self._settled or {}).get("prediction"))

    def _comparisons(self) -> tuple[Comparison, ...]:
        prediction = self._prediction()
        if prediction is None:
            return ()
        peaks = self._peaks or Peaks()
        gpu, host = (_table(prediction.get(name)) for name in ("gpu", "host"))
        on_gpu = bool(peaks.gpu_used)
        measured = {
            "allocated": self._progress.peak_allocated if on_gpu else None,
            "reserved": self._progress.peak_reserved if on_gpu else None,
            "device": max(peaks.gpu_used.values()) if on_gpu else None,
            "host": peaks.rss_total,
        }
        if self._measured is not None:  # from inside the ranks: exact, and only higher than what samples saw
            for what in ("allocated", "reserved"):
                inside = getattr(self._measured, what)
                measured[what] = measured[what] if inside is None else max(inside, measured[what] or 0)
            measured["host"] = max(self._measured.host or 0, measured["host"] or 0) or None
        predicted = {
            "allocated": gpu.get("allocated"),
            "reserved": gpu.get("reserved"),
            "device": gpu.get("device"),
            "host": host.get("peak"),
        }
        found = []
        for what, range_ in predicted.items():
            if isinstance(range_, dict):
                low, expected, high = (_whole(range_.get(k)) for k in ("low", "expected", "high"))
                found.append(Comparison(what, low, expected, high, measured[what]))
        return tuple(found)

    def _log(self) -> tuple[str, ...]:
        lines = list(self._lines)
        if self._partial:
            lines.append(Line(self._tail.partial_offset, self._partial))
        shown = [clean(line.text)[:2000].rstrip() for line in settle(lines)]
        return tuple(shown[-LOG_LINES:])

    def _make_ending(self, exit_data: dict[str, Any] | None) -> Ending:
        from dstui.runs.diagnose import diagnose_run, ending_text

        data = exit_data or {}
        found = None if self._state == "finished" else diagnose_run(self.run)
        cause = found.cause if found else None
        return Ending(
            outcome=self._state,
            text=ending_text(self._state, data, found, self._progress.step),
            at=data.get("ended_at"),
            code=data.get("code"),
            signal=data.get("signal"),
            cause=cause.code if cause else None,
            cause_name=cause.name if cause else None,
            checkpoint=cause.checkpoint if cause else None,
            certainty=cause.certainty if cause else None,
            evidence=tuple(e.text for e in found.evidence) if found else (),
            fixes=tuple(f.title for f in found.fixes) if found else (),
        )


def _stage(config: Mapping[str, Any] | None) -> int | None:
    zero = (config or {}).get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if config is not None and isinstance(stage, int) else None


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1e18 else None


def _said(run: RunDir, manifest: Mapping[str, Any], facts: Facts) -> tuple[Said, ...]:
    """What the rules of the five checkpoints say about the run's copy of its config."""
    release = (manifest.get("versions") or {}).get("deepspeed")
    if not release:
        return ()
    from dstui.config.document import Document
    from dstui.rules.diagnostic import Severity
    from dstui.rules.engine import Context, check_document
    from dstui.runs.preflight import RULE_ENGINES

    level = {Severity.SILENT_WRONG: "red", Severity.NO_EFFECT: "yellow", Severity.WARNING: "yellow"}
    context = Context(
        release=release,
        release_from="interpreter",
        engine=RULE_ENGINES.get(str(manifest.get("engine")), "deepspeed"),
        facts=facts,
        world_size=manifest.get("world_size"),
    )
    try:
        found = check_document(
            Document.parse(run.config_path.read_bytes(), str(run.config_path)),
            context,
            select=("DS2", "DS3", "DS4", "DS5", "DS6"),
        ).findings
    except (DstuiError, OSError):
        return ()  # the run has no config, or one that nobody can read
    return tuple(
        Said(f.code, int(f.code[2]) - 1, level[f.severity], f.message)
        for f in found
        if f.severity in level and f.code[2:3].isdigit()
    )
