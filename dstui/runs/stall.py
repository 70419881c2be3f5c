"""Why a run stands still, from samples alone: a data loader, a collective, offload, an op's build, a checkpoint.

Silence is never a stall: a stall needs a usual pace that was left far behind *and* ranks that positively look like
waiting. What each kind looks like was seen on real runs (CPU/gloo, torch 2.13; NCCL on H200):

- gloo waits asleep on a futex; NCCL's kernels spin at 100 % utilisation and little power;
- data loader workers are awaited on a pipe, a slow in-process data set sleeps, reads or computes in the main thread;
- torch's lock on an op's folder is polled with time.sleep for ever;
- a checkpoint file is open for writing in a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstui.i18n import _, listed, ngettext
from dstui.runs.samples import Sample

WINDOW = 20.0
"""Seconds of samples that must all tell the same."""
FEWEST = 8
"""Samples below which nothing is said."""
IDLE = 0.1
"""Cores: a process that uses less is waiting."""
BUSY = 0.7


@dataclass(frozen=True)
class Stall:
    """``kind``: ``op-lock op-build checkpoint data-loader collective offload idle timeout``. ``code``: its cause.

    ``timeout`` is what the log says alone (``timed_out``); the other kinds are seen in samples.

    ``since``: epoch seconds of the last progress. ``ranks``: those to look at. ``path``: the lock or the file.
    """

    kind: str
    code: str
    since: float
    ranks: tuple[int, ...] = ()
    path: str | None = None
    op: str | None = None
    holder: int | None = None
    how: str = ""
    """What the ranks named do: ``sleep poll run disk lock helpers``; ``elsewhere``: they are on other nodes."""
    timed_out: bool = False
    """The log says that a collective timed out since the last step."""

    @property
    def text(self) -> str:
        """One translated sentence."""
        if self.kind == "timeout":
            return _("a collective timed out: not all ranks took part")
        if self.timed_out:
            return _("a collective timed out; {seen}").format(seen=self.seen)
        return self.seen

    @property
    def seen(self) -> str:
        """What the samples show, in one translated sentence."""
        who = _ranks(self.ranks)
        if self.kind == "op-lock":
            return _(
                "waiting for ever: a killed build of the op {op} left its lock; in another terminal: rm {path}"
            ).format(op=self.op, path=self.path)
        if self.kind == "op-build":
            if self.holder is not None:
                return _("waiting for the op {op}, which process {pid} builds").format(
                    op=self.op, pid=self.holder
                )
            return _("the op {op} is being compiled").format(op=self.op or "?")
        if self.kind == "checkpoint":
            return _("a checkpoint is being written: {path}").format(path=self.path)
        if self.kind == "offload":
            return _("the GPUs idle while the CPU updates offloaded states ({ranks})").format(ranks=who)
        if self.kind == "data-loader":
            return _("no data: {ranks} {what}").format(ranks=who, what=_how(self.how))
        if self.kind == "collective":
            if not self.ranks and self.how == "elsewhere":
                return _("every rank here waits in a collective; those on other nodes are not sampled")
            if not self.ranks:
                return _("every rank waits in a collective: they do not wait for the same one")
            return _("the other ranks wait in a collective for {ranks}, which {what}").format(
                ranks=who, what=_how(self.how)
            )
        return _("every rank is idle, and nothing tells for what")


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return _("the ranks")
    shown = listed(map(str, ranks[:8])) + (" .." if len(ranks) > 8 else "")
    return ngettext("rank {list}", "ranks {list}", len(ranks)).format(list=shown)


def _how(how: str) -> str:
    return {
        "sleep": _("sleeps"),
        "poll": _("waits for its workers"),
        "run": _("computes on the CPU"),
        "disk": _("reads or writes a disk"),
        "helpers": _("waits for busy data loader workers"),
        "lock": _("waits for a thread of its own"),
        "child": _("waits for a child process"),
        "idle": _("has an idle GPU"),
    }.get(how, _("waits"))


@dataclass(frozen=True)
class _Look:
    """One rank through the window: cores of its own process and of its helpers, and what it waits in most."""

    rank: int
    own: float
    helpers: float
    wait: str

    @property
    def still(self) -> bool:
        return self.own < IDLE


def _looks(window: Sequence[Sample]) -> list[_Look] | None:
    """None when a rank is not known through most of the window."""
    by: dict[int, list[tuple[float, float, str | None]]] = {}
    for s in window:
        for r in s.ranks:
            if r.cpu is not None:
                helpers = r.helpers or 0.0
                by.setdefault(r.rank, []).append((max(0.0, r.cpu - helpers), helpers, r.wait))
    found = []
    for rank, rows in sorted(by.items()):
        if len(rows) < 0.7 * len(window):
            return None
        waits = Counter(w for _o, _h, w in rows if w)
        wait, n = waits.most_common(1)[0] if waits else ("", 0)
        own = sum(r[0] for r in rows) / len(rows)
        helpers = sum(r[1] for r in rows) / len(rows)
        found.append(_Look(rank, own, helpers, wait if n >= 0.6 * len(rows) else "mixed"))
    return found or None


def recent(samples: Sequence[Sample], now: float) -> list[Sample]:
    """The samples of the last ``WINDOW`` seconds."""
    return [s for s in samples if s.t > now - WINDOW]


def on_lock(samples: Sequence[Sample], now: float) -> Stall | None:
    """Ranks that sleep while a lock of a dead build lies in the folder of an op that they load.

    The one stall that needs no pace to compare with: nothing else ends this wait.
    """
    window = recent(samples, now)
    locked = [s for s in window if s.lock is not None]
    if len(window) < FEWEST or len(locked) < 0.5 * len(window) or window[-1].lock is None:
        return None
    looks = _looks(locked)
    sleeping = tuple(x.rank for x in looks or () if x.wait == "sleep" and x.still)
    if not sleeping:
        return None
    op, path, holder = window[-1].lock
    since = locked[0].t
    for s in reversed(samples):
        if s.lock is None:
            break
        since = s.t
    if holder is not None:
        return Stall("op-build", "DR709", since, sleeping, path, op, holder)
    return Stall("op-lock", "DR708", since, sleeping, path, op)


def slow_by_nature(samples: Sequence[Sample], now: float, since: float) -> Stall | None:
    """Work that takes its time and ends: a build, a checkpoint."""
    window = recent(samples, now)
    if len(window) < FEWEST:
        return None
    building = [s for s in window if s.build is not None]
    if len(building) > 0.6 * len(window):
        return Stall("op-build", "DR709", since, op=building[-1].build or None)
    writing = [s for s in window if s.saving is not None]
    begun = bool(writing) and window[-1].saving is not None and writing[0].t >= since  # seen up to 5 s late
    if begun or len(writing) > 0.6 * len(window):
        return Stall("checkpoint", "DR902", since, path=writing[-1].saving)
    return None


def told(found: Stall | None, since: float) -> Stall:
    """The stall of a run whose log says that a collective timed out; ``found``: what its samples show."""
    if found is None:
        return Stall("timeout", "DR501", since, timed_out=True)
    return replace(found, code="DR501", timed_out=True)


def name(
    samples: Sequence[Sample], now: float, since: float, *, offload: bool = False, world: int | None = None
) -> Stall | None:
    """The stall that the last ``WINDOW`` seconds show; None when the ranks may well be working.

    ``world``: ranks of the run on all nodes. A single one waits in no collective, whatever its card shows.
    """
    window = recent(samples, now)
    if len(window) < FEWEST:
        return None
    found = slow_by_nature(samples, now, since)
    if found is not None:
        return found
    looks = _looks(window)
    if looks is None:
        return None
    if any(s.gpus for s in window):
        found = _on_gpus(window, looks, since, offload, world == 1)
    else:
        found = _on_cpu(looks, since, world == 1)
    if found is not None and found.kind == "collective" and not found.ranks and (world or 0) > len(looks):
        return replace(found, how="elsewhere")
    return found


def _on_cpu(looks: list[_Look], since: float, alone: bool) -> Stall | None:
    inside = [] if alone else [x for x in looks if x.still and x.wait == "lock" and x.helpers < BUSY]
    outside = [x for x in looks if x not in inside]
    asleep = [x for x in outside if x.still]
    if not outside:
        return Stall("collective", "DR506", since)  # nobody is left for whom they could wait
    if inside:
        return _missing(asleep or outside, since)
    if len(asleep) == len(looks):
        how = _doing(asleep)
        if how in ("sleep", "poll", "disk", "helpers"):
            return Stall("data-loader", "DR505", since, tuple(x.rank for x in asleep), how=how)
        return Stall("idle", "DR507", since)
    if asleep and all(x.own >= BUSY for x in outside if not x.still):
        return _missing(asleep, since)  # the others spin on shared memory
    return None


def _missing(missing: list[_Look], since: float) -> Stall:
    """Some ranks wait in a collective for these."""
    how, ranks = _doing(missing), tuple(x.rank for x in missing)
    if how in ("poll", "helpers", "disk"):
        return Stall("data-loader", "DR505", since, ranks, how=how)
    return Stall("collective", "DR506", since, ranks, how=how)


def _doing(looks: Sequence[_Look]) -> str:
    if any(x.helpers >= 0.3 for x in looks):
        return "helpers"
    kinds = Counter("run" if x.own >= BUSY else x.wait for x in looks)
    return kinds.most_common(1)[0][0]


def _beside(look: _Look) -> _Look:
    """The rank of an idle card among spinning ones: its thread says what it does, or at least that its card idles."""
    telling = look.still and look.wait in ("sleep", "poll", "disk", "child")
    return _Look(
        look.rank, 0.0, look.helpers, look.wait if telling else "run" if look.own >= BUSY else "idle"
    )


COOL = 0.45
"""Share of the power limit. Spinning NCCL kernels of three jobs on one H200 took 0.37-0.48 of it (recorded)."""


def _mostly_cool(loads: Sequence[float | None]) -> bool:
    """A few seconds of another job's work on the card do not hide the wait."""
    return None not in loads and sum(p < COOL for p in loads if p is not None) >= 0.7 * len(loads)


def _on_gpus(
    window: list[Sample], looks: list[_Look], since: float, offload: bool, alone: bool
) -> Stall | None:
    use: dict[int, list[tuple[float, float | None]]] = {}
    for s in window:
        for g in s.gpus:
            if g.utilisation is not None:
                load = g.power / g.power_limit if g.power and g.power_limit else None
                use.setdefault(g.index, []).append((g.utilisation, load))
    if not use or any(len(rows) < 0.7 * len(window) for rows in use.values()):
        return None
    mean = {i: sum(u for u, _p in rows) / len(rows) for i, rows in use.items()}
    cool = {i: _mostly_cool([p for _u, p in rows]) for i, rows in use.items()}
    idle = [i for i, u in sorted(mean.items()) if u < 0.05]
    spin = [i for i, u in sorted(mean.items()) if u >= 0.97 and cool[i]]
    if spin and len(spin) + len(idle) == len(mean):
        busy = [x for x in looks if x.own >= BUSY or x.wait == "disk"]
        if alone:  # other jobs keep the card busy; what this one waits for is on its host
            return Stall("offload", "DR202", since, tuple(x.rank for x in busy)) if offload and busy else None
        if idle and len(mean) == len(looks):  # rank n of this node drives the n-th card that it was given
            order = sorted(mean)
            return _missing([_beside(looks[order.index(i)]) for i in idle], since)
        # a card that others use too spins although its rank is away: then the rank's thread tells
        away = [x for x in looks if x.still and x.wait in ("sleep", "poll", "disk", "child")]
        return _missing(away, since) if 0 < len(away) < len(looks) else Stall("collective", "DR506", since)
    if max(mean.values()) >= 0.2:
        return None
    busy = [x for x in looks if x.own >= BUSY or x.wait == "disk"]
    if offload and busy:
        return Stall("offload", "DR202", since, tuple(x.rank for x in busy))
    helped = [x for x in looks if x.helpers >= 0.3]
    if helped:
        return Stall("data-loader", "DR505", since, tuple(x.rank for x in helped), how="helpers")
    waits = [x for x in looks if x.still and x.wait in ("sleep", "poll", "disk")]
    if waits and len(waits) == len(looks):
        return Stall("data-loader", "DR505", since, tuple(x.rank for x in waits), how=_doing(waits))
    if waits:
        return _missing(waits, since)
    if busy and len(busy) < len(looks):
        return _missing(busy, since)
    if busy:
        return Stall("data-loader", "DR505", since, tuple(x.rank for x in busy), how="run")
    return Stall("idle", "DR507", since)
