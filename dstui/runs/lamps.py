"""Five lamps for the five checkpoints, each with its live evidence in one line.

``lamps(Live) -> (Lamp, ...)`` is a pure function of what a monitor knows. A lamp burns only on evidence: ``green`` means
that something was measured and is well, ``unknown`` that nothing was, and then ``advice`` says what would light it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dstui.facts.model import UNLIMITED, Facts, Gpu
from dstui.i18n import _, aside, clauses, listed, ngettext, phrases
from dstui.runs.ops import offload_device
from dstui.runs.samples import Peaks, Sample
from dstui.runs.stall import Stall
from dstui.runs.state import Progress
from dstui.units import GiB, gib

LEVELS = ("red", "yellow", "green", "unknown")
"""The worst first."""
SECONDS = 60.0
"""Samples of the last minute are what a lamp calls now."""
ROOMY, FULL = 0.85, 0.95
"""Shares of a card: what may be filled by a change, and from where one more tensor is too much."""
HOST_TIGHT, HOST_FULL = 0.85, 0.95
CPU_STEP, CPU_STEP_MOST = 0.35, 0.6
"""Share of a step that the optimizer takes with offload: a CPU Adam that hides behind nothing."""
REDUCE, REDUCE_MOST = 0.3, 0.6
"""Share of a step spent in reducing gradients."""
BUSY_LINK = 0.6
UNEVEN = 0.3
"""Difference of two cards' mean utilisation."""
UNEVEN_CORES = 3.0
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second, lane and direction, by generation (PCI-SIG, after line coding)."""


@dataclass(frozen=True)
class Lamp:
    """``checkpoint``: 1-5. ``text``: the evidence; ``advice``: what to change, or what would light it. Both translated."""

    checkpoint: int
    level: str
    text: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "level": self.level,
            "text": self.text,
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Said:
    """What a rule says about the run's config (``dstui.rules``): no evidence of the run, but of what it will do."""

    code: str
    checkpoint: int
    level: str
    message: str


@dataclass(frozen=True)
class Live:
    """Everything that the lamps look at. ``over``: the run has ended and its last minute is judged."""

    progress: Progress
    config: Mapping[str, Any] | None = None
    facts: Facts = field(default_factory=Facts)
    prediction: Mapping[str, Any] | None = None
    samples: Sequence[Sample] = ()
    peaks: Peaks = field(default_factory=Peaks)
    stage: int | None = None
    world: int | None = None
    stall: Stall | None = None
    release: str | None = None
    said: tuple[Said, ...] = ()
    cause: int | None = None
    """The checkpoint that a run failed at, once it is over."""
    cause_text: str = ""
    asked_batch: tuple[int | None, int | None, int | None] = (None, None, None)
    """train_batch_size, micro batch and accumulation as the config writes them; None for ``auto`` and absence."""

    @cached_property
    def now(self) -> tuple[Sample, ...]:
        """The samples of the last minute."""
        if not self.samples:
            return ()
        last = self.samples[-1].t
        return tuple(s for s in list(self.samples)[-90:] if s.t > last - SECONDS)

    @cached_property
    def at_work(self) -> tuple[Sample, ...]:
        """Those of ``now`` since the first step: before it one rank builds an op while the others wait."""
        first = self.progress.seen.get("step")
        return self.now if first is None else tuple(s for s in self.now if s.t >= first)

    @property
    def offload(self) -> tuple[str, str]:
        """Devices of the optimizer and of the parameters: ``none cpu nvme``."""
        data = dict(self.config or {})
        return offload_device(data, "offload_optimizer"), offload_device(data, "offload_param")


def lamps(live: Live) -> tuple[Lamp, ...]:
    """One lamp a checkpoint, in order."""
    return tuple(
        _failed(live, lamp)
        for lamp in (_stage(live), _offload(live), _accumulation(live), _host(live), _communication(live))
    )


def _failed(live: Live, lamp: Lamp) -> Lamp:
    """A run that ended at a checkpoint, and a config that a rule speaks about, colour their lamp."""
    if live.cause == lamp.checkpoint:
        return Lamp(lamp.checkpoint, "red", live.cause_text, _("d: the diagnosis"))
    for said in sorted(live.said, key=lambda s: LEVELS.index(s.level)):
        if said.checkpoint == lamp.checkpoint and LEVELS.index(said.level) < LEVELS.index(lamp.level):
            advice = _("dstui explain {code}").format(code=said.code)
            return Lamp(lamp.checkpoint, said.level, f"{said.code} {said.message}", advice)
    return lamp


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _of(used: float, total: float) -> str:
    if max(used, total) < GiB:
        return _("{used} of {total}").format(used=gib(int(used)), total=gib(int(total)))
    return _("{used:.1f} of {total}").format(used=used / GiB, total=gib(int(total)))


def _wall() -> str:
    return _('switch on "wall_clock_breakdown": true to see the parts of a step')


# ---- 1 stage


def _fullest(live: Live) -> tuple[int, int, int] | None:
    """(index, bytes used at most, capacity) of the fullest card; None where no card was measured."""
    total: dict[int, int] = {}
    for s in live.now:
        for g in s.gpus:
            if g.memory_total:
                total[g.index] = g.memory_total
    for gpu in live.facts.gpus or ():
        if gpu.memory_total:
            total.setdefault(gpu.index, gpu.memory_total)
    known = [(v / total[i], i, v, total[i]) for i, v in live.peaks.gpu_used.items() if total.get(i)]
    return max(known)[1:] if known else None


def _range(prediction: Mapping[str, Any] | None, *path: str) -> Mapping[str, int] | None:
    at: Any = prediction
    for name in path:
        at = at.get(name) if isinstance(at, Mapping) else None
    known = {k: v for k, v in at.items() if _bytes(v)} if isinstance(at, Mapping) else {}
    return known if known.get("expected") else None


def _bytes(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1e18


def _stage(live: Live) -> Lamp:
    full = _fullest(live)
    p = live.progress
    if p.ooms:
        text = ngettext("CUDA ran out of memory {n} time", "CUDA ran out of memory {n} times", p.ooms).format(
            n=p.ooms
        )
        if full is not None:
            text = phrases([text, _("GPU {n} held {amount}").format(n=full[0], amount=_of(full[1], full[2]))])
        return Lamp(1, "red", text, _("a higher stage, a smaller micro batch, activation checkpointing"))
    if full is None:
        if live.facts.gpus == ():
            return Lamp(
                1, "unknown", _("no GPU here: the stage shows in GPU memory"), _("a run on a GPU tells")
            )
        return Lamp(
            1,
            "unknown",
            _("no GPU memory was measured"),
            _("NVML on the run's host: dstui detect says why not"),
        )
    index, used, capacity = full
    amount = _("GPU {n} held {amount} at most").format(n=index, amount=_of(used, capacity))
    if used > FULL * capacity:
        text = phrases([amount, _("{size} are left").format(size=gib(capacity - used))])
        return Lamp(
            1, "yellow", text, _("a longer sequence may end the run: a higher stage or a smaller micro batch")
        )
    if p.flushes:
        text = ngettext(
            "{n} flush of the allocator's cache", "{n} flushes of the allocator's cache", p.flushes
        ).format(n=p.flushes)
        return Lamp(1, "yellow", f"{text}; {amount}", _("each costs a synchronisation: leave it more room"))
    if not p.stepped:
        text = clauses([amount, _("memory is at its peak after the first step")])
        return Lamp(1, "unknown", text, _("the first step tells"))
    device = _range(live.prediction, "gpu", "device")
    if device is not None and device.get("high") and used > device["high"]:
        text = phrases([amount, _("predicted were at most {size}").format(size=gib(device["high"]))])
        return Lamp(
            1,
            "yellow",
            text,
            _("in the monitor p compares each figure; other processes on the card count too"),
        )
    lower = _lower_stage(live, used, capacity)
    if lower is not None:
        return lower
    if device is not None:
        amount = phrases([amount, _("predicted {size}").format(size=gib(device["expected"]))])
    return Lamp(1, "green", amount)


def _lower_stage(live: Live, used: int, capacity: int) -> Lamp | None:
    """Stage 3 gathers every layer twice a step; where the whole 16-bit weights fit as well, stage 2 saves that."""
    world = live.world or 1
    if live.stage != 3 or world < 2 or live.offload[1] != "none":
        return None
    shard = _part(live.prediction, "params")
    if not shard:
        return None
    more = shard * (world - 1)
    if used + more > ROOMY * capacity:
        return None
    text = _("stage 2 would fit: GPU memory {amount}, about {more} more").format(
        amount=_of(used, capacity), more=gib(more)
    )
    return Lamp(1, "yellow", text, _("stage 2 gathers no parameters: about a third less communication"))


def _part(prediction: Mapping[str, Any] | None, name: str) -> int | None:
    """Bytes of one part at the predicted peak of the GPU."""
    gpu = (prediction or {}).get("gpu")
    phases = gpu.get("phases") if isinstance(gpu, Mapping) else None
    sizes = [
        phase["parts"].get(name) or 0
        for phase in phases or ()
        if isinstance(phase, Mapping) and isinstance(phase.get("parts"), Mapping)
    ]
    return max(sizes) if sizes else None


# ---- 2 offload


def _offload(live: Live) -> Lamp:
    where = [d for d in live.offload if d != "none"]
    if live.config is None:
        return Lamp(2, "unknown", _("the run has no DeepSpeed config"), _("a config tells"))
    if not where:
        full = _fullest(live)
        if full is not None and live.progress.stepped:
            return Lamp(
                2,
                "green",
                _("nothing is offloaded, GPU memory {amount}").format(amount=_of(full[1], full[2])),
            )
        return Lamp(2, "green", _("nothing is offloaded: no step waits for the host"))
    if live.stall is not None and live.stall.kind == "offload":
        return Lamp(
            2, "red", live.stall.text, _("a smaller micro batch instead of offload, or faster host RAM")
        )
    target = "/".join(dict.fromkeys(where))
    share = _optimizer_share(live.progress) if live.offload[0] != "none" else None
    link = _pcie(live)
    parts = []
    level = "unknown"
    if share is not None:
        parts.append(
            _("the optimizer on the {target} takes {share} of a step").format(
                target=target, share=_percent(share)
            )
        )
        level = "red" if share >= CPU_STEP_MOST else "yellow" if share >= CPU_STEP else "green"
    if link is not None:
        rate, limit, way = link
        text = _("PCIe {way} {rate:.1f} GB/s").format(way=way, rate=rate / 1e9)
        if limit:
            text += aside(_("{share} of the link").format(share=_percent(rate / limit)))
            if rate > BUSY_LINK * limit:
                level = "red" if level == "red" else "yellow"
            elif level == "unknown":
                level = "green"
        parts.append(text)
    room = _room(live)
    if room is not None and level != "red":
        return Lamp(2, "yellow", clauses([room, *parts]), _("drop the offload: the step gets faster"))
    if level == "unknown":
        use = _utilisation(live)
        if use is not None and live.progress.stepped:
            cores = _cores(live)
            parts.insert(0, _("the GPUs are busy for {share} of the time").format(share=_percent(use)))
            if cores is not None:
                parts.insert(1, _("the ranks use {n:.0f} cores").format(n=cores))
            level = (
                "yellow" if use < 0.5 and cores is not None and cores > 1.5 * (live.world or 1) else "unknown"
            )
    if level in ("green", "red", "yellow"):
        advice = "" if level == "green" else _("the price of offload; a larger micro batch makes steps rarer")
        return Lamp(2, level, clauses(parts), advice)
    text = clauses([_("{parts} offloaded to {target}").format(parts=_offloaded(live), target=target), *parts])
    return Lamp(2, "unknown", text, _wall())


def _offloaded(live: Live) -> str:
    names = (_("the optimizer"), _("the parameters"))
    return listed(n for n, d in zip(names, live.offload, strict=True) if d != "none")


def _optimizer_share(p: Progress) -> float | None:
    parts = p.parts
    whole = parts.get("fwd", 0) + parts.get("bwd", 0) + parts.get("step", 0)
    return parts["step"] / whole if whole and "step" in parts else None


def _pcie(live: Live) -> tuple[float, float | None, str] | None:
    """(bytes per second of the busiest card and direction, what its link can, direction)."""
    found: dict[tuple[int, str], list[float]] = {}
    for s in live.now:
        for g in s.gpus:
            for way, rate in (("rx", g.pcie_rx), ("tx", g.pcie_tx)):
                if rate is not None:
                    found.setdefault((g.index, way), []).append(rate)
    if not found:
        return None
    (index, way), rates = max(found.items(), key=lambda item: statistics.fmean(item[1]))
    gpu = next((g for g in live.facts.gpus or () if g.index == index), None)
    return statistics.fmean(rates), _link(gpu), way


def _link(gpu: Gpu | None) -> float | None:
    if gpu is None:
        return None
    # a link sleeps at a low generation while its card idles: what it can is what counts
    generation, lanes = gpu.pcie_generation_max, gpu.pcie_width or gpu.pcie_width_max
    rate = PCIE_LANE.get(generation or 0)
    return rate * lanes if rate and lanes else None


def _room(live: Live) -> str | None:
    """Offload although the card has room for what was moved away."""
    full = _fullest(live)
    host = (live.prediction or {}).get("host")
    parts = host.get("parts") if isinstance(host, Mapping) else None
    moved = parts.get("optimizer") if isinstance(parts, Mapping) else None
    ranks = len(live.peaks.rank_rss) or live.world or 1
    if full is None or not _bytes(moved) or not live.progress.stepped or live.offload[1] != "none":
        return None
    each = int(moved or 0) // ranks
    if full[1] + each > ROOMY * full[2]:
        return None
    return _("the GPU has room for the optimizer: {amount} used, it needs {more}").format(
        amount=_of(full[1], full[2]), more=gib(each)
    )


def _utilisation(live: Live) -> float | None:
    known = [g.utilisation for s in live.at_work for g in s.gpus if g.utilisation is not None]
    return statistics.fmean(known) if len(known) >= 8 else None


def _cores(live: Live) -> float | None:
    rows = [sum(r.cpu for r in s.ranks if r.cpu is not None) for s in live.at_work if s.ranks]
    return statistics.fmean(rows) if len(rows) >= 8 else None


# ---- 3 accumulation


def _accumulation(live: Live) -> Lamp:
    p = live.progress
    whole, micro, gas = live.asked_batch
    world = p.world or live.world
    if live.config is None:
        return Lamp(3, "unknown", _("the run has no DeepSpeed config"), _("a config tells"))
    if whole and micro and gas and world and whole != micro * gas * world:
        text = _("batch {whole} is not {micro} x {gas} x {world} ranks").format(
            whole=whole, micro=micro, gas=gas, world=world
        )
        return Lamp(3, "red", text, _("leave train_batch_size out and let DeepSpeed derive it"))
    triple = _triple(whole, micro, gas, world)
    logged = p.samples_a_step
    asked = whole or (micro * (gas or 1) * world if micro and world else None)
    if logged and asked and logged % asked:
        text = _("a step counts {logged} samples, {asked} were asked for").format(logged=logged, asked=asked)
        return Lamp(3, "red", text + aside(triple), _("the script sets another batch size"))
    reduce = _reduce_share(p)
    if (live.stage or 0) >= 2 and (gas or 1) >= 4 and reduce is not None and reduce >= REDUCE:
        text = _("stage {stage} reduces in each of {gas} micro batches: {share} of a step").format(
            stage=live.stage, gas=gas, share=_percent(reduce)
        )
        return Lamp(3, "yellow", text, _("a larger micro batch with less accumulation, or stage 1"))
    counted = p.micro_steps
    if counted is not None and gas and gas > 1 and abs(counted - gas) < 0.2 * gas:
        text = _("the script counts {n} micro batches a step, as asked").format(n=gas)
        return Lamp(3, "green", text + aside(triple))
    if logged and asked:
        text = _("a step counts {n} samples, as asked").format(n=asked)
        return Lamp(3, "green", text + aside(triple))
    if not p.stepped:
        return Lamp(3, "unknown", triple or _("no step was taken yet"), _("the first steps tell"))
    text = triple or _("the config leaves the batch to the trainer")
    return Lamp(3, "unknown", text, _("csv_monitor counts samples a step; dstui adds it unless declined"))


def _triple(whole: int | None, micro: int | None, gas: int | None, world: int | None) -> str:
    """``16 = 4 x 2 x 2 ranks`` with what is known."""
    if not micro or not world:
        return ""
    gas = gas or (whole // (micro * world) if whole else 1) or 1
    return _("{whole} = {micro} x {gas} x {world} ranks").format(
        whole=whole or micro * gas * world, micro=micro, gas=gas, world=world
    )


# ---- 4 host


def _host(live: Live) -> Lamp:
    now = live.now
    last = now[-1].host if now else None
    if last is None or last.used is None or not last.capacity:
        return Lamp(4, "unknown", _("host memory was not measured"), _("a sample of the run's host"))
    used = max(s.host.used or 0 for s in now)
    limited = live.facts.host.ram_total is not None and last.capacity < 0.98 * live.facts.host.ram_total
    of = _("cgroup {amount}") if limited else _("host RAM {amount}")
    parts = [of.format(amount=_of(used, last.capacity))]
    mine = live.peaks.rss_total
    if mine:
        parts.append(_("ranks {size}").format(size=gib(mine)))
    pinned = (live.prediction or {}).get("host")
    pinned = pinned.get("pinned") if isinstance(pinned, Mapping) else None
    pinned = pinned if _bytes(pinned) else None
    if live.progress.pinned:
        parts.append(_("{size} pinned by a rank").format(size=gib(live.progress.pinned)))
    elif pinned:
        parts.append(_("about {size} pinned").format(size=gib(int(pinned))))
    swap = _swap(live)
    if swap:
        parts.append(_("swap {size}").format(size=gib(swap)))
    text = phrases(parts)
    share = used / last.capacity
    shm = _shm(live)
    if share >= HOST_FULL:
        return Lamp(4, "red", text, _("the kernel kills a rank next: drop offload_param, or run fewer ranks"))
    if shm is not None and shm[0] >= HOST_FULL:
        text = phrases([_("/dev/shm {amount}").format(amount=_of(shm[1], shm[2])), text])
        return Lamp(
            4, "red", text, _("data loader workers die of a full /dev/shm: --shm-size, or fewer workers")
        )
    memlock = _memlock(live)
    if memlock:
        return Lamp(4, "yellow", memlock, _("raise it: ulimit -l unlimited"))
    if swap and swap > 0.25 * GiB:
        return Lamp(4, "yellow", text, _("a rank that swaps slows all of them"))
    if share >= HOST_TIGHT:
        return Lamp(4, "yellow", text, _("saving a checkpoint needs room too"))
    peak = _range(live.prediction, "host", "peak")
    if peak is not None and mine and peak.get("high") and mine > 1.1 * peak["high"] and mine > GiB:
        text = phrases([text, _("predicted were at most {size}").format(size=gib(peak["high"]))])
        return Lamp(4, "yellow", text, _("in the monitor p compares each figure"))
    return Lamp(4, "green", text)


def _swap(live: Live) -> int | None:
    """Bytes of swap that came into use since the run began."""
    known = [s.host.swap for s in live.now if s.host.swap is not None]
    if not known:
        return None
    host = live.facts.host
    before = 0
    if host.swap_total is not None and host.swap_free is not None:
        before = host.swap_total - host.swap_free
    return max(0, max(known) - before)


def _shm(live: Live) -> tuple[float, int, int] | None:
    """(share, used, size) of /dev/shm."""
    total = live.facts.host.shm_total
    known = [s.host.shm for s in live.now if s.host.shm is not None]
    if not total or not known:
        return None
    return max(known) / total, max(known), total


def _memlock(live: Live) -> str:
    """The limit of locked memory counts for NVMe swap buffers only (from 0.19.4 on); cudaHostAlloc ignores it."""
    host = live.facts.host
    if "nvme" not in live.offload or host.ipc_lock or host.memlock_soft in (None, UNLIMITED):
        return ""
    if _release(live.release) < (0, 19, 4) or (host.memlock_soft or 0) >= GiB:
        return ""
    return _("NVMe swap buffers are locked, and ulimit -l allows {size}").format(size=gib(host.memlock_soft))


def _release(text: str | None) -> tuple[int, ...]:
    parts = (text or "").partition("+")[0].split(".")
    return tuple(int(p) for p in parts if p.isdigit())


# ---- 5 communication


def _reduce_share(p: Progress) -> float | None:
    parts = p.parts
    whole = parts.get("fwd", 0) + parts.get("bwd", 0) + parts.get("step", 0)
    return parts["bwd_allreduce"] / whole if whole and "bwd_allreduce" in parts else None


def _communication(live: Live) -> Lamp:
    p = live.progress
    world = p.world or live.world
    if live.stall is not None and live.stall.kind in ("collective", "data-loader"):
        return Lamp(
            5,
            "red",
            live.stall.text,
            _("what every rank does now: `dstui watch --once --stacks`, in the monitor y"),
        )
    if p.timeouts:
        text = ngettext("{n} collective timed out", "{n} collectives timed out", p.timeouts)
        return Lamp(5, "red", text.format(n=p.timeouts), _("unequal work, or a rank that is gone"))
    if world == 1:
        return Lamp(5, "green", _("one rank: nothing to communicate"))
    uneven = _uneven(live)
    if uneven:
        return Lamp(5, "yellow", uneven, _("equal data and equal accumulation on every rank"))
    share = _reduce_share(p)
    if share is not None:
        text = _("reducing gradients takes {share} of a step").format(share=_percent(share))
        link = _nvlink(live)
        if link:
            text = phrases([text, link])
        level = "red" if share >= REDUCE_MOST else "yellow" if share >= REDUCE else "green"
        return Lamp(
            5, level, text, "" if level == "green" else _("more accumulation, larger buckets, faster links")
        )
    if not p.stepped:
        return Lamp(5, "unknown", _("no step was taken yet"), _("the first steps tell"))
    spent, each = p.collectives.seconds, p.step_time
    if spent is not None and each:
        share = min(1.0, spent / each)
        text = _("collectives take {share} of a step while comms_logger waits for each of them").format(
            share=_percent(share)
        )
        level = "red" if share >= REDUCE_MOST else "yellow" if share >= REDUCE else "green"
        return Lamp(
            5, level, text, "" if level == "green" else _("more accumulation, larger buckets, faster links")
        )
    text = _even(live)
    return Lamp(5, "unknown", text or _("the log has no parts of a step"), _wall())


def _uneven(live: Live) -> str:
    """Ranks that do clearly different amounts of work through the last minute."""
    if not live.progress.stepped:
        return ""
    use: dict[int, list[float]] = {}
    for s in live.at_work:
        if len(s.gpus) == len(s.ranks):
            for g in s.gpus:
                if g.utilisation is not None:
                    use.setdefault(g.index, []).append(g.utilisation)
    means = {i: statistics.fmean(rows) for i, rows in use.items() if len(rows) >= 8}
    if len(means) >= 2:
        high, low = max(means, key=lambda i: means[i]), min(means, key=lambda i: means[i])
        if means[high] - means[low] > UNEVEN:
            return _("uneven: GPU {high} {most} busy, GPU {low} {least}").format(
                high=high, most=_percent(means[high]), low=low, least=_percent(means[low])
            )
    if use:
        return ""
    cores = _rank_cores(live)
    if len(cores) >= 2:
        high, low = max(cores, key=lambda i: cores[i]), min(cores, key=lambda i: cores[i])
        if cores[high] > 0.5 and cores[high] > UNEVEN_CORES * max(cores[low], 0.01):
            return _("uneven: rank {high} uses {most:.2f} cores, rank {low} {least:.2f}").format(
                high=high, most=cores[high], low=low, least=cores[low]
            )
    return ""


def _rank_cores(live: Live) -> dict[int, float]:
    rows: dict[int, list[float]] = {}
    for s in live.at_work:
        for r in s.ranks:
            if r.cpu is not None:
                rows.setdefault(r.rank, []).append(r.cpu)
    return {i: statistics.fmean(v) for i, v in rows.items() if len(v) >= 8}


def _even(live: Live) -> str:
    """What is known of the balance where the parts of a step are not."""
    use = _utilisation(live)
    if use is not None:
        return _("every GPU does its share ({share} busy)").format(share=_percent(use))
    cores = _rank_cores(live)
    return _("every rank does its share") if len(cores) >= 2 else ""


def _nvlink(live: Live) -> str:
    rates = [g.nvlink_tx for s in live.now for g in s.gpus if g.nvlink_tx is not None]
    if not rates or max(rates) == 0:
        return ""
    return _("NVLink {rate:.0f} GB/s a card").format(rate=statistics.fmean(rates) / 1e9)
