"""Does it fit: GPU per rank, host RAM per node, NVMe, by phase and part, with the changes that would help.

``estimate`` is pure and needs neither torch nor DeepSpeed. It replays the allocations of the run
(``replay``), adds what no tensor shows (``hardware``), counts host RAM (``host``) and compares with the facts.
How it compares with 97 runs measured on one and two H200 is in ``docs/estimate.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dstui.errors import DstuiError
from dstui.estimate import hardware
from dstui.estimate.allocator import PARTS
from dstui.estimate.changes import candidates
from dstui.estimate.correction import Calibration
from dstui.estimate.decoder import APPROXIMATE, named
from dstui.estimate.families import inventory
from dstui.estimate.host import HostNeed, host_need
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.replay import Peaks, endures, replay, run_dimensions
from dstui.estimate.result import (
    PHASES,
    Binds,
    Change,
    Estimate,
    GpuFit,
    HostFit,
    NvmeFit,
    Phase,
    Range,
    Verdict,
)
from dstui.estimate.settings import Settings, read_settings
from dstui.facts.model import UNLIMITED, Facts, Gpu
from dstui.i18n import _, listed
from dstui.units import count, gib

VERIFIED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "gpt_neox", "phi3"})
"""Families whose allocated memory was compared with measured runs (or share every operator with one)."""


def estimate(
    shape: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    facts: Facts,
    *,
    release: str | None,
    world_size: int | None = None,
    changes: bool = True,
    calibration: Calibration | None = None,
) -> Estimate:
    """The fit of one training run on the machine of ``facts``.

    ``config_data`` is the parsed ds_config (an empty one is plain data parallel). ``world_size`` defaults to
    all GPUs of all nodes. ``changes=False`` skips the search for single changes that would make it fit.
    ``calibration``: what runs of this model on this machine measured (``dstui.estimate.correction``).
    A missing fact gives the verdict ``unknown`` and its reason. Raises DstuiError for a config that cannot be
    read as one.
    """
    machine = _Machine(facts, world_size, calibration)
    result = _one(shape, training, config_data, machine, release)
    if changes and result.verdict in ("no", "tight"):
        found = _changes(shape, training, config_data, machine, release, result)
        result = replace(result, changes=found)
    return result


@dataclass(frozen=True)
class Cell:
    """One way to place the states."""

    stage: int
    offload_optimizer: str
    offload_param: str
    estimate: Estimate
    edits: tuple[Mapping[str, Any], ...] = ()


PLACEMENTS: tuple[tuple[int, str, str], ...] = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "none", "cpu"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)
"""Stage, optimizer offload, parameter offload: every cell of the grid, cheapest first within a stage."""


def grid(
    shape: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    facts: Facts,
    *,
    release: str | None,
    world_size: int | None = None,
    calibration: Calibration | None = None,
) -> list[Cell]:
    """Every stage x offload cell, everything else as in ``config_data``."""
    machine = _Machine(facts, world_size, calibration)
    return [
        Cell(
            stage, o, p, _one(shape, training, placed(config_data, stage, o, p), machine, release, quick=True)
        )
        for stage, o, p in PLACEMENTS
    ]


def placed(config_data: Mapping[str, Any], stage: int, optimizer: str, param: str) -> dict[str, Any]:
    """``config_data`` with another stage and offload; sections keep their other keys."""
    data = dict(config_data)
    zero = data.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    zero["stage"] = stage
    for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device == "none":
            zero.pop(key, None)
        else:
            old = zero.get(key)
            zero[key] = {**(old if isinstance(old, Mapping) else {}), "device": device}
    zero.pop("cpu_offload", None)
    zero.pop("cpu_offload_params", None)
    data["zero_optimization"] = zero
    return data


_LEAST_CARD, _LEAST_HOST, _MOST = 1 << 28, 1 << 27, 1 << 46
"""Bytes between which a card's memory and a host's can lie: 256 and 128 MiB, 64 TiB."""


class _Machine:
    """Capacities out of the facts."""

    def __init__(self, facts: Facts, world_size: int | None, calibration: Calibration | None = None) -> None:
        self.calibration = calibration or Calibration()
        self.facts = facts
        self.gpus: Sequence[Gpu] | None = facts.gpus
        self.cpu_only = facts.gpus is not None and len(facts.gpus) == 0
        known = facts.world_size
        self.ranks_known = world_size is not None or known is not None
        self.ranks = max(1, world_size or known or 1)
        self.nodes = max(1, min(facts.nodes, self.ranks))
        here = len(facts.gpus) if facts.gpus else self.ranks
        self.ranks_per_node = max(1, min(here, -(-self.ranks // self.nodes)))
        if self.cpu_only:
            self.ranks_per_node = -(-self.ranks // self.nodes)
        used = list(facts.gpus or ())[: self.ranks_per_node]
        capabilities = {g.compute_capability for g in used}
        self.capability = capabilities.pop() if len(capabilities) == 1 else None
        self.notes: list[str] = []
        sizes = [n for g in used if (n := self._card(g)) is not None]
        self.gpu_capacity = min(sizes) if sizes and len(sizes) == len(used) else None
        self.too_many = bool(facts.gpus) and self.ranks > len(facts.gpus or ()) * facts.nodes
        # what is free leaves out the driver's own reserve where the driver tells it apart (nvmlMemory_v2_t)
        self.driver = min((self._reserve(g) for g in used), default=0)
        self.doubts: list[str] = []
        """Missing facts without which nothing surely fits."""
        if any(g.memory_free is None and g.memory_total is not None for g in used):
            self.doubts.append(_("how much of the GPUs' memory is free is not known"))
        host = facts.host
        left = [n for n in (host.memory_free, host.memory_capacity) if n is not None]
        free_ram = self._plausible(_("host RAM"), host.ram_available, host.ram_total, _LEAST_HOST)
        known = free_ram is not None or host.ram_available is None
        self.host_capacity = min(left) if left and known else None
        group = host.cgroup
        used_unknown = group is not None and group.limit not in (None, UNLIMITED) and group.usage is None
        if self.host_capacity is not None and (host.ram_available is None or used_unknown):
            self.doubts.append(_("how much host RAM is free is not known"))
        if len({g.memory_total for g in used}) > 1:
            self.notes.append(_("the cards differ: the one with the least free memory decides"))
        places = [s.free for s in facts.storage if s.free is not None and s.writable]
        self.nvme_capacity = max(places) if places else None
        for g in used:
            if g.memory_total is None or g.memory_free is None:
                continue
            taken = g.memory_total - g.memory_free - self._reserve(g)
            if g.busy or taken > g.memory_total // 20:
                self.notes.append(
                    _("GPU {index}: {taken} are used by others and not counted as free").format(
                        index=g.index, taken=gib(taken)
                    )
                )

    @staticmethod
    def _reserve(g: Gpu) -> int:
        """What the driver keeps of a card beside what is free and used; 0 where that is not told or cannot be."""
        n, total = g.memory_reserved, g.memory_total
        if n is None or g.memory_free is None or total is None or not 0 < n <= total // 8:
            return 0
        return n

    def _card(self, g: Gpu) -> int | None:
        """What is free on a card; None when that is not known, or cannot be."""
        free = g.memory_free if g.memory_free is not None else g.memory_total
        total = g.memory_total if g.memory_total is not None else g.memory_free
        return self._plausible(_("GPU {index}").format(index=g.index), free, total, _LEAST_CARD)

    def _plausible(self, name: str, free: int | None, total: int | None, least: int) -> int | None:
        """``free`` bytes, unless the two figures cannot be those of a machine: then None, and it is said."""
        if free is None or total is None:
            return free
        if 0 <= free <= total and least <= total <= _MOST:
            return free
        self.notes.append(
            _("{name}: {free} free of {total} cannot be right, and is not used").format(
                name=name, free=gib(free), total=gib(total)
            )
        )
        return None


@lru_cache(maxsize=1)
def _reference_shapes() -> tuple[ModelShape, ...]:
    """Dense Llama-like shapes by size, to guess dimensions from a bare parameter count."""
    from dstui.estimate.model import load_model

    names = (
        "smollm2-135m", "smollm2-360m", "tinyllama-1.1b", "smollm2-1.7b", "llama-3.2-3b", "llama-2-7b",
        "llama-2-13b", "yi-34b", "llama-2-70b", "llama-3.1-405b",
    )  # fmt: skip
    return tuple(load_model(n) for n in names)


def _guess(shape: ModelShape) -> ModelShape:
    """A generic Llama-like shape of about ``shape.params`` parameters: the nearest known one, with as many
    layers as it takes."""
    import math

    nearest = min(_reference_shapes(), key=lambda s: abs(math.log(s.params / max(1, shape.params))))
    layers = nearest.layers or 1
    inv = inventory(nearest)
    per_layer = sum(m.numel for m in inv.kinds[0])
    rest = nearest.params - layers * per_layer
    wanted = max(1, round((shape.params - rest) / per_layer))
    guess = replace(nearest, layers=min(wanted, 4 * layers), dtype=shape.dtype, name=shape.name)
    return replace(guess, params=inventory(guess).params)


def settings_of(
    shape: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    facts: Facts,
    *,
    release: str | None,
    world_size: int | None = None,
) -> Settings:
    """The effective settings that ``estimate`` would use for this question."""
    model = _guess(shape) if shape.family is None else shape
    return _settings(model, training, config_data, _Machine(facts, world_size), release)[0]


def _settings(
    model: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    machine: _Machine,
    release: str | None,
) -> tuple[Settings, list[str]]:
    settings, assumptions = read_settings(
        config_data,
        training,
        model,
        release=release,
        ranks=machine.ranks,
        ranks_per_node=machine.ranks_per_node,
    )
    if machine.cpu_only:  # pinning is a no-op of the CPU accelerator: nothing is rounded
        # and pages of a bucket that no gradient reaches are never touched
        bucket = min(settings.reduce_bucket, max(1, model.params))
        # and torch.optim takes no foreach path: Adam's root and quotient are two tensors
        settings = replace(
            settings,
            pin_optimizer=False,
            pin_param=False,
            load_on_gpu=False,
            reduce_bucket=bucket,
            temporaries=2 if settings.temporaries else 0,
        )
    return settings, assumptions


def _one(
    shape: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    machine: _Machine,
    release: str | None,
    quick: bool = False,
) -> Estimate:
    """``quick``: no reason why a tight run is tight (it costs two more iterations)."""
    guessed = shape.family is None
    model = _guess(shape) if guessed else shape
    settings, assumptions = _settings(model, training, config_data, machine, release)
    if settings.lora_rank and settings.lora_targets and not guessed:
        _check_targets(model, settings.lora_targets)
    scale = shape.params / model.params if guessed else 1.0
    workspace = 0 if machine.cpu_only else hardware.workspace(machine.capability)
    peaks = replay(model, settings, workspace)
    dims = run_dimensions(model, settings)
    host = host_need(settings, dims)
    assumptions = [*_explain(shape, training, settings, guessed), *assumptions, *machine.notes, *shape.notes]
    doubts = _doubt(model, training, settings, dims.largest)
    if machine.cpu_only:
        if guessed:
            doubts = replace(doubts, low=0.35, high=1.0)
        answer = _on_cpu(peaks, settings, machine, host, doubts, scale, assumptions)
        return _unsure(answer, peaks, scale) if guessed else answer
    fit = _gpu(peaks, settings, machine, doubts, scale)
    if guessed:
        fit = _guessed(fit, peaks, model.vocab or 0, scale)
    gpu, gpu_notes = machine.calibration.gpu(fit, settings)
    host_fit, host_notes = machine.calibration.host(_host(host, machine, scale), settings)
    assumptions = [*gpu_notes, *host_notes, *assumptions]
    if host_fit.capacity is None and host_fit.peak is not None:
        assumptions.append(
            _("host RAM is not known: the {need} that a node needs are not compared").format(
                need=gib(host_fit.peak.expected)
            )
        )
    nvme = NvmeFit(machine.nvme_capacity, round(host.nvme * scale)) if host.nvme else None
    squeeze = "runs"
    room = _room(gpu)
    if room is not None and scale == 1.0 and peaks.allocated <= room < peaks.reserved:
        squeeze = endures(model, settings, workspace, room, quick=quick)
    verdict, reason, binds = _judge(gpu, host_fit, nvme, host, settings, machine, squeeze)
    answer = Estimate(verdict, gpu, host_fit, nvme, binds, (), tuple(dict.fromkeys(assumptions)), reason)
    return _unsure(answer, peaks, scale) if guessed else answer


def _unsure(e: Estimate, peaks: Peaks, scale: float) -> Estimate:
    """``e`` of a guessed shape: ``unknown`` unless the whole range leads to its verdict."""
    if (
        e.verdict == "no"
    ):  # what must fit is allocated: cached blocks are given back before an allocation fails
        sides = ((e.gpu.allocated, e.gpu.capacity), (e.host.peak, e.host.capacity))
        sure = any(r is not None and n is not None and r.low > n for r, n in sides)
    elif e.gpu.allocated is None or e.gpu.reserved is None or e.gpu.device is None:  # on the CPU
        sure = e.host.peak is not None and e.host.capacity is not None and e.host.peak.high <= e.host.capacity
    else:
        beside = e.gpu.device.expected - e.gpu.reserved.expected
        sure = e.gpu.capacity is not None and e.gpu.allocated.high + beside <= e.gpu.capacity
    if sure or e.verdict == "unknown":
        return e
    reason = _(
        "only the number of parameters is known: the states need {size} per GPU, activations are a guess; name a model, or a directory with its config.json"
    ).format(size=gib(round(_states(peaks) * scale)))
    return replace(e, verdict="unknown", reason=reason)


def _check_targets(model: ModelShape, targets: Sequence[str]) -> None:
    """peft refuses targets of which none is there."""
    linear = [m.name for kind in inventory(model).kinds for m in kind if m.dims is not None]
    if not any(named(name, targets) for name in linear):
        raise DstuiError(
            _("no linear layer of {model} is called {targets}").format(
                model=model.name, targets=listed(targets)
            ),
            _("use {names}, or all-linear").format(
                names=listed(dict.fromkeys(n.rpartition(".")[2] for n in linear))
            ),
        )


def _states(peaks: Peaks) -> int:
    """Bytes of parameters, gradients and optimizer states at the fullest phase."""
    return max((sum(parts[:4]) for _name, _peak, parts in peaks.phases), default=0)


@dataclass(frozen=True)
class _Doubt:
    """Relative widths of the ranges, and bytes that the loop may hold in addition."""

    low: float
    high: float
    reserved: float
    extra: int
    pending: int
    """Bytes of a gathered parameter that may wait for the GPU to be done with it while it is gathered again: how far
    the CPU runs ahead decides (5 of 8 measured runs with parameters in RAM reserved one block more)."""


def _doubt(shape: ModelShape, training: Training, s: Settings, largest: int) -> _Doubt:
    extra = 0
    gathers = s.stage == 3 and (s.ranks > 1 or s.offload_param != "none")
    if training.loop == "plain" and training.hold_logits is None and shape.vocab:
        extra = s.element * shape.vocab * s.micro_batch * s.seq  # `outputs` still names the logits
    low, high = (0.02, 0.03) if shape.family in VERIFIED else (0.05, 0.07)
    if shape.family in APPROXIMATE:
        low, high = 0.12, 0.18
    if shape.extra.get("multimodal"):  # other towers: their weights, and the activations of images
        low, high = max(low, 0.05), max(high, 0.5)
    if s.quant != "none":
        low, high = max(low, 0.06), max(high, 0.1)
    if s.attention == "eager" or s.release < (0, 16, 0):
        low, high = max(low, 0.05), max(high, 0.06)
    return _Doubt(
        low, high, 0.12 if s.attention == "eager" else 0.08, extra, s.element * largest if gathers else 0
    )


def _explain(shape: ModelShape, training: Training, s: Settings, guessed: bool) -> list[str]:
    out: list[str] = []
    if guessed:
        out.append(
            _(
                "{name}: dimensions unknown; activations are those of a Llama-like model of {n} parameters"
            ).format(name=shape.name, n=count(shape.params))
        )
    elif shape.family in APPROXIMATE:
        out.append(_("mixture of experts: activations are approximate"))
    out.append(
        _("micro batch {micro}, {seq} tokens, no padding, attention {attention}").format(
            micro=s.micro_batch, seq=s.seq, attention=s.attention
        )
    )
    if s.zero_init:
        out.append(_("the model is built under zero.Init"))
    if training.loop == "plain" and s.stage == 3 and training.zero_init is None:
        out.append(_("without zero.Init every rank first holds the whole model"))
    if s.quant != "none":
        out.append(_("quantised weights: packed sizes of bitsandbytes"))
    return out


def _gpu(peaks: Peaks, s: Settings, machine: _Machine, doubt: _Doubt, scale: float) -> GpuFit:
    allocated = round(peaks.allocated * scale)
    reserved = max(round(peaks.reserved * scale), allocated)
    over = hardware.overhead(machine.capability, s.processes, s.stage)
    over = Range(*(max(0, n - machine.driver) for n in (over.low, over.expected, over.high)))
    a = Range(
        round(allocated * (1 - doubt.low)), allocated, round(allocated * (1 + doubt.high)) + doubt.extra
    )
    r = Range(
        max(a.low, round(reserved * (1 - doubt.reserved - doubt.low))),
        reserved,
        round(reserved * (1 + doubt.reserved + doubt.high)) + doubt.extra + doubt.pending,
    )
    d = Range(r.low + over.low, r.expected + over.expected, r.high + over.high)
    order = {name: i for i, name in enumerate(PHASES)}
    phases = tuple(
        Phase(name, {part: round(n * scale) for part, n in zip(PARTS, parts, strict=True) if n})
        for name, _peak, parts in sorted(peaks.phases, key=lambda p: order[p[0]])
    )
    return GpuFit(machine.gpu_capacity, a, r, d, phases)


_LOOSE = {"buffers": (0.0, 1.5), "activations": (0.4, 2.3), "workspace": (1.0, 1.0)}
"""How far the parts of known models lie from those of the shape that their size alone suggests; the states follow
from the size, and 7B is a rounded one (6.5 to 7.5). Together with the logits (vocabularies from 32 to 262 thousand; half of them where the loss
makes fewer copies) it holds the known models' figures in 99 % of the settings tried (tests/unit/test_estimate_guess.py)."""
_VOCABULARIES = (32_000 * 0.35, 262_208)


def _guessed(fit: GpuFit, peaks: Peaks, vocab: int, scale: float) -> GpuFit:
    """``fit`` of a model of which only the size is known: the range part by part."""
    assert fit.allocated is not None and fit.reserved is not None and fit.device is not None
    logits = (min(1.0, _VOCABULARIES[0] / max(1, vocab)), max(1.0, _VOCABULARIES[1] / max(1, vocab)))

    def side(i: int, states: float) -> int:
        each = {**{k: v[i] for k, v in _LOOSE.items()}, "logits": logits[i]}
        return round(
            scale
            * max(
                sum(n * each.get(k, states) for k, n in zip(PARTS, p, strict=True))
                for _n, _p, p in peaks.phases
            )
        )

    a = Range(
        min(fit.allocated.expected, side(0, 0.93)),
        fit.allocated.expected,
        max(fit.allocated.high, side(1, 1.07)),
    )
    # the share that PyTorch keeps beside what is allocated is a guess as well
    cached = fit.reserved.expected - fit.allocated.expected
    r = Range(a.low, fit.reserved.expected, max(fit.reserved.high, round(1.08 * a.high) + cached))
    d = Range(
        r.low + fit.device.low - fit.reserved.low,
        fit.device.expected,
        r.high + fit.device.high - fit.reserved.high,
    )
    return replace(fit, allocated=a, reserved=r, device=d)


def _host(need: HostNeed, machine: _Machine, scale: float) -> HostFit:
    peak = round(need.peak * scale)
    return HostFit(
        machine.host_capacity,
        round(need.pinned * scale),
        round(need.pageable * scale),
        Range(min(round(peak * 0.92), peak - need.lighter), peak, round(peak * 1.12)),
        {k: round(v * scale) for k, v in need.parts.items()},
        {k: round(v * scale) for k, v in need.phases.items()},
        round(need.checkpoint * scale),
    )


def _on_cpu(
    peaks: Peaks,
    s: Settings,
    machine: _Machine,
    need: HostNeed,
    doubt: _Doubt,
    scale: float,
    assumptions: list[str],
) -> Estimate:
    """No GPU: every tensor lives in host RAM, once per rank."""
    ranks = min(s.processes, s.ranks_per_node)
    tensors = round(peaks.allocated * scale)
    offloaded = sum(v for k, v in need.parts.items() if k != "processes")
    per_rank = tensors + hardware.RANK_RSS_CPU
    peak = per_rank * ranks + round(offloaded * scale)
    host = HostFit(
        machine.host_capacity,
        0,
        peak,
        Range(
            # the bundled GPT on CPU: within 1 % at stage 3 with offload, 27-28 % lower at stage 0, which loads no optimizer op
            round(peak * (1 - doubt.low - 0.3)),
            peak,
            round(peak * (1 + doubt.high + 0.25)) + doubt.extra * ranks,
        ),
        {"tensors": tensors * ranks, "processes": hardware.RANK_RSS_CPU * ranks},
    )
    host, measured = machine.calibration.host(host, s)
    gpu = GpuFit(None, None, None, None, ())
    assumptions = [*measured, _("no GPU: every tensor is in host RAM"), *assumptions]
    notes = tuple(dict.fromkeys(assumptions))
    phase, part = _fullest(peaks)
    if machine.host_capacity is None:
        return Estimate("unknown", gpu, host, None, None, (), notes, _("how much RAM is free is not known"))
    assert host.peak is not None
    verdict = _compare(host.peak.expected, host.peak.high, machine.host_capacity)
    binds, reason = Binds("host", phase, part), None
    if machine.doubts and verdict != "no":
        verdict, reason = "unknown", machine.doubts[0]
    return Estimate(verdict, gpu, host, None, binds, (), notes, reason)


def _fullest(peaks: Peaks) -> tuple[str, str]:
    name, _peak, parts = max(peaks.phases, key=lambda p: p[1])
    return name, PARTS[max(range(len(parts)), key=lambda i: parts[i])]


def _compare(expected: int, high: int, capacity: int) -> Verdict:
    if expected > capacity:
        return "no"
    return "fits" if high <= capacity and expected <= 0.95 * capacity else "tight"


def _room(gpu: GpuFit) -> int | None:
    """Bytes of the card that PyTorch may reserve."""
    if gpu.capacity is None or gpu.device is None or gpu.reserved is None:
        return None
    return gpu.capacity - (gpu.device.expected - gpu.reserved.expected)


def _judge(
    gpu: GpuFit,
    host: HostFit,
    nvme: NvmeFit | None,
    need: HostNeed,
    s: Settings,
    machine: _Machine,
    squeeze: str,
) -> tuple[Verdict, str | None, Binds | None]:
    verdicts: list[Verdict] = []
    reasons: list[str] = []
    remark: str | None = None
    pressure: list[tuple[float, Binds]] = []
    assert gpu.allocated is not None and gpu.device is not None and gpu.reserved is not None
    fullest = max(gpu.phases, key=lambda p: p.total)
    gpu_binds = Binds("gpu", fullest.phase, max(fullest.parts, key=lambda k: fullest.parts[k]))
    if machine.too_many:
        verdicts.append("unknown")
        cards, nodes = len(machine.facts.gpus or ()), machine.facts.nodes
        reasons.append(
            _(
                "{ranks} ranks on {cards} GPUs x {nodes} nodes: give more of them or a smaller --world-size"
            ).format(ranks=machine.ranks, cards=cards, nodes=nodes)
        )
        pressure.append((0.0, gpu_binds))
    elif gpu.capacity is None or not machine.ranks_known:
        verdicts.append("unknown")
        reasons.append(_("the GPUs' memory is not known: give --gpus 8x80GiB or --facts"))
        pressure.append((0.0, gpu_binds))
    else:
        # cached blocks go back to the driver before an allocation fails, so what must fit is allocated;
        # what NVML will show is reserved
        beside = gpu.device.expected - gpu.reserved.expected
        floor = gpu.allocated.expected + beside
        if floor > gpu.capacity:
            verdicts.append("no")
        elif squeeze == "fails":
            verdicts.append("no")
            remark = (
                None
                if s.expandable
                else _(
                    "{floor} are allocated at the peak, which would fit, but the free memory is in pieces; expandable segments avoid that"
                ).format(floor=gib(floor))
            )
        elif squeeze == "steps":
            verdicts.append("tight")
            remark = (
                None
                if s.expandable
                else _(
                    "a step fits, but memory left in pieces by the first step may not; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                )
            )
        elif gpu.device.expected > 0.97 * gpu.capacity or gpu.allocated.high + beside > gpu.capacity:
            verdicts.append("tight")
            if gpu.device.expected > gpu.capacity:
                remark = _(
                    "{floor} must fit; with room PyTorch would hold {device}, so it lives by giving cached blocks back"
                ).format(floor=gib(floor), device=gib(gpu.device.expected))
        else:
            verdicts.append("fits")
        pressure.append((floor / max(1, gpu.capacity), gpu_binds))
    assert host.peak is not None
    largest = {k: v for k, v in host.parts.items() if k != "processes"} or host.parts
    part = max(largest, key=lambda k: largest[k])
    host_binds = Binds("host", need.phase, "params" if need.phase == "load" else part)
    if host.capacity is None:
        # a described machine without --ram asks about its cards; one that was looked at should have told its RAM
        offloads = s.offload_optimizer != "none" or s.offload_param != "none"
        if offloads or machine.facts.source != "described":
            verdicts.append("unknown")
            reasons.append(_("host RAM is not known: give --ram 512GiB or --facts"))
    else:
        verdicts.append(_compare(host.peak.expected, host.peak.high, host.capacity))
        pressure.append((host.peak.expected / max(1, host.capacity), host_binds))
        if host.peak.expected <= host.capacity < host.phases.get("save", 0):
            verdicts.append("tight")
            remark = remark or _(
                "training fits, but save_checkpoint takes {need} of host RAM: one fp32 partition a rank goes through it"
            ).format(need=gib(host.phases["save"]))
    if nvme is not None:
        if nvme.capacity is None:
            verdicts.append("unknown")
            reasons.append(_("the space on the NVMe drive is not known"))
        else:
            verdicts.append(_compare(nvme.needed, nvme.needed, nvme.capacity))
            pressure.append((nvme.needed / max(1, nvme.capacity), Binds("nvme", "step", "optimizer")))
    binds = max(pressure, key=lambda p: p[0])[1] if pressure else None
    if "no" in verdicts:
        return "no", remark if squeeze == "fails" else None, binds
    if "unknown" in verdicts or machine.doubts:
        return "unknown", [*reasons, *machine.doubts][0], binds
    return ("tight", remark, binds) if "tight" in verdicts else ("fits", None, binds)


_MOST_CHANGES = 4


def _changes(
    shape: ModelShape,
    training: Training,
    config_data: Mapping[str, Any],
    machine: _Machine,
    release: str | None,
    now: Estimate,
) -> tuple[Change, ...]:
    """Those single changes under which the run fits better than ``now``, cheapest first."""
    model = _guess(shape) if shape.family is None else shape
    settings, _notes = read_settings(
        config_data,
        training,
        model,
        release=release,
        ranks=machine.ranks,
        ranks_per_node=machine.ranks_per_node,
    )
    where = now.binds.where if now.binds else "gpu"
    rank = {"no": 0, "unknown": 1, "tight": 2, "fits": 3}
    found: list[Change] = []
    for c in candidates(config_data, training, settings, where, cpu_only=machine.cpu_only):
        if where == "gpu" and _hopeless(shape, model, c.training, c.config, machine, release):
            continue
        then = _one(shape, c.training, c.config, machine, release, quick=True)
        if rank[then.verdict] <= rank[now.verdict] or then.verdict == "unknown":
            continue
        found.append(Change(c.title, c.edits, _saved(now, then, where), c.costs))
        if len(found) == _MOST_CHANGES:
            break
    return tuple(found)


def _hopeless(
    shape: ModelShape,
    model: ModelShape,
    training: Training,
    config: Mapping[str, Any],
    machine: _Machine,
    release: str | None,
) -> bool:
    """Whether the states alone exceed a GPU in init or step: a lower bound that saves the replay."""
    if training.lora_rank or training.quant != "none" or machine.gpu_capacity is None:
        return False
    s, _notes = read_settings(
        config, training, model, release=release, ranks=machine.ranks, ranks_per_node=machine.ranks_per_node
    )
    if s.tensor_parallel > 1 or (s.stage == 0 and s.release < (0, 17, 6)):
        return False  # the states are divided in other ways
    b, kept = s.element, 4 + s.moment
    if s.stage == 0:
        least: float = b + kept + (b + 4 if b == 2 else 4)  # 16-bit and fp32 gradients in the step
    elif s.stage < 3:
        flatten: float = 2 * b if s.release >= (0, 19, 0) else b
        least = max(flatten, b + (0 if s.offload_optimizer != "none" else (kept + 4) / s.ranks))
    else:
        states = b if s.offload_param == "none" else 0
        if s.offload_optimizer == "none":
            states += kept + s.accumulate
        least = max(states / s.ranks, 0 if s.zero_init else b)
    return least * shape.params > machine.gpu_capacity


def _saved(now: Estimate, then: Estimate, where: str) -> int | None:
    """Bytes that the binding memory gets back."""
    if where == "gpu":
        if now.gpu.device is None or then.gpu.device is None:
            return None
        return now.gpu.device.expected - then.gpu.device.expected
    if now.host.peak is None or then.host.peak is None:
        return None
    return now.host.peak.expected - then.host.peak.expected
