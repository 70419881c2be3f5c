"""The search of ``plan``: candidates of one placement after the other, judged by ``memory.estimate``.

Placements are tried in the order of what they cost (``cost``), those without offload first; the first that fits
is taken, so a higher stage or an offload is never chosen while a lower one fits. Before a placement is given up,
repairs that cost little are tried in it: smaller buckets, zero.Init, unpinned memory, part of the optimizer on the
card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from dstui.errors import DstuiError
from dstui.estimate.correction import Calibration
from dstui.estimate.cost import StepCost, Work, rates, step_cost
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.memory import estimate, placed
from dstui.estimate.replay import run_dimensions
from dstui.estimate.result import Estimate
from dstui.estimate.settings import read_settings
from dstui.facts.model import Facts, Storage
from dstui.i18n import _
from dstui.units import GiB

Goal = Literal["fit", "speed", "batch"]
Precision = Literal["bf16", "fp16", "fp32"]


Objection = Callable[[Mapping[str, Any]], "str | None"]
"""What the rules have against a config, in one sentence; None when they have nothing."""


class Placement(NamedTuple):
    """Where the states live."""

    stage: int
    optimizer: str = "none"
    param: str = "none"

    @property
    def offloads(self) -> bool:
        return self.optimizer != "none" or self.param != "none"


PLACEMENTS: tuple[Placement, ...] = (
    Placement(0),
    Placement(1),
    Placement(2),
    Placement(3),
    Placement(1, "cpu"),
    Placement(2, "cpu"),
    Placement(3, "none", "cpu"),
    Placement(3, "cpu"),
    Placement(3, "cpu", "cpu"),
    Placement(3, "nvme"),
    Placement(3, "nvme", "cpu"),
    Placement(3, "nvme", "nvme"),
)


@dataclass(frozen=True)
class Buckets:
    """Sizes in elements."""

    reduce: int
    prefetch: int
    live: int
    sub_group: int


DEFAULT = Buckets(500_000_000, 50_000_000, 1_000_000_000, 1_000_000_000)
"""DeepSpeed's own (``runtime/zero/config.py``, 0.19.8)."""
SMALL = Buckets(200_000_000, 50_000_000, 500_000_000, 500_000_000)
LEAN = Buckets(50_000_000, 20_000_000, 100_000_000, 100_000_000)
"""Below this the messages get too short to fill a link."""


@dataclass(frozen=True)
class Setup:
    """One candidate: everything that the search decides."""

    placement: Placement
    micro_batch: int
    accumulation: int
    checkpointing: bool
    buckets: Buckets
    pin_optimizer: bool = True
    pin_param: bool = True
    ratio: float = 1.0
    """Share of stage 3's optimizer that goes to host RAM (ZeRO-Offload++, ``offload_optimizer.ratio``)."""
    zero_init: bool | None = None
    load_on: Literal["cpu", "gpu"] = "cpu"
    gather_on_save: bool = True


_RANK = {"unknown": 0, "no": 0, "tight": 1, "fits": 2}

# -- what the search asks ----------------------------------------------------------------------------------


def nvme_storage(facts: Facts) -> Storage | None:
    """The folder for NVMe offload that the facts vouch for: writable, no spinning disk, O_DIRECT, space known."""
    fit = [s for s in facts.storage if s.writable and s.rotational is False and s.o_direct and s.free]
    return max(fit, key=lambda s: s.free or 0) if fit else None


def _pick_precision(facts: Facts) -> Precision:
    """bf16, or fp16 on cards before Ampere, which have none (compute capability below 8.0)."""
    capabilities = [g.compute_capability for g in facts.gpus or () if g.compute_capability is not None]
    return "fp16" if any(c < (8, 0) for c in capabilities) else "bf16"


@dataclass(frozen=True)
class Found:
    """What a search came to. ``refused``: the placements before it, each with the best that could be done."""

    setup: Setup
    estimate: Estimate
    refused: tuple[tuple[Setup, Estimate], ...]
    repaired: tuple[tuple[str, Setup, Estimate], ...]
    """Repairs that the chosen setup needed: name, setup and estimate before."""

    @property
    def fits(self) -> bool:
        return self.estimate.verdict in ("fits", "tight")


class Search:
    """One question: model, training, machine. Estimates are remembered by setup."""

    def __init__(
        self,
        shape: ModelShape,
        training: Training,
        facts: Facts,
        *,
        release: str | None,
        world_size: int | None,
        goal: Goal,
        checkpointing: bool | None,
        global_batch: int | None = None,
        precision: Precision | None = None,
        network: float | None = None,
        calibration: Calibration | None = None,
        objection: Objection | None = None,
        base: Mapping[str, Any] | None = None,
        brief: bool = False,
        offload: bool = True,
    ) -> None:
        self.shape, self.training, self.facts, self.release = shape, training, facts, release
        self.goal, self.checkpointing, self.global_batch = goal, checkpointing, global_batch
        self.world_size, self.network = world_size, network
        self.calibration = calibration
        self._objection = objection
        self._objected: dict[Setup, str | None] = {}
        self.base = base
        """The wizard's config: then only placement, checkpointing and micro batch are searched."""
        self.brief = brief
        """Placements without a chance are skipped, not measured: only the answer counts."""
        self.offload = offload
        self.ranks = max(1, world_size or facts.world_size or 1)
        self.sharing = training.sequence_parallel
        """Ranks that work on one row together (``sequence_parallel_size``)."""
        if self.ranks % self.sharing:
            raise DstuiError(
                _("{ranks} ranks cannot share sequences by {n}").format(ranks=self.ranks, n=self.sharing),
                _("use a divisor of the number of ranks"),
            )
        self.replicas = self.ranks // self.sharing
        """Ranks, or groups of them, that read rows of their own."""
        nodes = max(1, min(facts.nodes, self.ranks))
        here = len(facts.gpus) if facts.gpus else self.ranks
        self.ranks_per_node = max(1, min(here, -(-self.ranks // nodes)))
        self.cpu_only = facts.gpus is not None and len(facts.gpus) == 0
        self.precision: Precision = precision or _pick_precision(facts)
        self.rates = rates(facts, ranks=self.ranks, ranks_per_node=self.ranks_per_node, network=network)
        self.nvme = nvme_storage(facts)
        self._seen: dict[tuple[Setup, bool], Estimate] = {}
        self._trained: int | None = None

    # -- one candidate --

    def accumulation(self, micro: int) -> int:
        if self.global_batch is None:
            return 1
        return self.global_batch // (self.replicas * micro)

    def micros(self) -> list[int] | None:
        """The micro batches that are possible, ascending; None: any."""
        if self.training.micro_batch is not None:
            return [self.training.micro_batch]
        if self.global_batch is None:
            return None
        share = self.global_batch // self.replicas
        return [n for n in range(1, min(share, 4096) + 1) if share % n == 0]

    def start(self, placement: Placement) -> Setup:
        """The least demanding setup of a placement, with the buckets that its goal prefers."""
        micro = self.training.micro_batch or 1
        buckets = {"fit": SMALL, "speed": DEFAULT, "batch": LEAN}[self.goal]
        return Setup(
            placement,
            micro,
            self.accumulation(micro),
            True if self.checkpointing is None else self.checkpointing,
            buckets,
            zero_init=self.training.zero_init,
            load_on=self.training.load_on,
        )

    def trained(self) -> int:
        """Elements that get gradients."""
        if self._trained is None:
            if not self.training.lora_rank:
                self._trained = self.shape.params
            elif self.shape.family is None:
                self._trained = max(1, self.shape.params // 100)
            else:
                settings, _notes = read_settings(
                    {}, self.training, self.shape, release=self.release, ranks=1, ranks_per_node=1
                )
                self._trained = sum(run_dimensions(self.shape, settings).trainable)
        return self._trained

    def how(self, s: Setup) -> Training:
        return replace(
            self.training,
            micro_batch=s.micro_batch,
            checkpointing=s.checkpointing,
            zero_init=s.zero_init,
            load_on=s.load_on,
        )

    def config(self, s: Setup) -> dict[str, Any]:
        """The ds_config of ``s``."""
        if self.base is not None:
            return placed(_with_micro(self.base, s.micro_batch), *s.placement)
        hf = self.training.loop == "hf"
        data: dict[str, Any] = {}
        if self.global_batch is not None:
            data["train_batch_size"] = s.micro_batch * s.accumulation * self.replicas
        data["train_micro_batch_size_per_gpu"] = s.micro_batch
        data["gradient_accumulation_steps"] = s.accumulation
        if self.sharing > 1:
            data["sequence_parallel_size"] = self.sharing
        data["gradient_clipping"] = "auto" if hf else 1.0
        if self.precision == "bf16":
            data["bf16"] = {"enabled": True}
        elif self.precision == "fp16":
            data["fp16"] = {"enabled": True, "initial_scale_power": 16}
        if self.training.optimizer is None:
            data["optimizer"] = self._optimizer(s, hf)
        zero = self._zero(s)
        data["zero_optimization"] = zero  # at stage 0 too: the Trainer refuses a file without the section
        if "nvme" in s.placement:
            data["aio"] = {
                "block_size": 1048576,
                "queue_depth": 8,
                "single_submit": False,
                "overlap_events": True,
            }
        return data

    def _optimizer(self, s: Setup, hf: bool) -> dict[str, Any]:
        if hf:
            params: dict[str, Any] = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        else:
            params = {"lr": 2e-4 if self.training.lora_rank else 1e-5, "weight_decay": 0.0}
        if self.needs_torch_adam(s):
            params["torch_adam"] = True
        return {"type": "AdamW", "params": params}

    def needs_torch_adam(self, s: Setup) -> bool:
        """FusedAdam is compiled at the first start: it needs nvcc. Without a GPU it has no use."""
        if s.placement.optimizer != "none":
            return False
        lacks = self.facts.source == "detected" and self.facts.toolchain.nvcc is None
        return self.cpu_only or lacks

    def _zero(self, s: Setup) -> dict[str, Any]:
        stage, optimizer, param = s.placement
        zero: dict[str, Any] = {"stage": stage}
        if stage == 0:
            return zero
        largest = -(-self.trained() // 2) * 2  # no bucket needs to be larger than what is reduced
        reduce = min(s.buckets.reduce, max(1_000_000, largest))
        if stage < 3:
            zero["reduce_bucket_size"] = reduce
            zero["allgather_bucket_size"] = reduce - reduce % 2
            if self.goal == "speed" and self.ranks > 1:
                zero["overlap_comm"] = True
        else:
            zero["reduce_bucket_size"] = reduce
            zero["stage3_prefetch_bucket_size"] = s.buckets.prefetch
            zero["stage3_max_live_parameters"] = s.buckets.live
            zero["stage3_max_reuse_distance"] = s.buckets.live
            zero["sub_group_size"] = s.buckets.sub_group
            if s.gather_on_save:
                zero["stage3_gather_16bit_weights_on_model_save"] = True
        if optimizer != "none":
            zero["offload_optimizer"] = self._target(optimizer, s.pin_optimizer)
            if s.ratio < 1:
                zero["offload_optimizer"]["ratio"] = s.ratio
        if param != "none":
            block = self._target(param, s.pin_param)
            if param == "nvme" and self.shape.vocab and self.shape.hidden:
                # a swap buffer must hold a rank's part of the largest parameter (default 1e8 elements)
                part = -(-self.shape.vocab * self.shape.hidden // self.ranks)
                if part > 100_000_000:
                    block["buffer_size"] = -(-part // 10_000_000) * 10_000_000
            zero["offload_param"] = block
        return zero

    def _target(self, device: str, pin: bool) -> dict[str, Any]:
        block: dict[str, Any] = {"device": device, "pin_memory": pin}
        if device == "nvme" and self.nvme is not None:
            block["nvme_path"] = self.nvme.path
        return block

    def fit(self, s: Setup, *, expandable: bool = False) -> Estimate:
        """The estimate of the config of ``s``; ``expandable``: under expandable segments."""
        key = (s, expandable)
        found = self._seen.get(key)
        if found is None:
            how = self.how(s)
            found = self._seen[key] = estimate(
                self.shape,
                replace(how, expandable=True) if expandable else how,
                self.config(s),
                self.facts,
                release=self.release,
                world_size=self.world_size,
                changes=False,
                calibration=self.calibration,
            )
        return found

    def objection(self, s: Setup) -> str | None:
        """What the rules have against the config of ``s`` (None: nothing, or nobody asked them)."""
        if self._objection is None:
            return None
        if s not in self._objected:
            self._objected[s] = self._objection(self.config(s))
        return self._objected[s]

    def cost(self, s: Setup, *, hpz: bool = False) -> StepCost:
        return step_cost(
            Work(
                params=self.shape.params,
                trained=self.trained(),
                layers=self.shape.layers or 32,
                hidden=self.shape.hidden or 4096,
                seq=self.training.seq,
                micro_batch=s.micro_batch,
                accumulation=s.accumulation,
                ranks=self.ranks,
                ranks_per_node=self.ranks_per_node,
                stage=s.placement.stage,
                offload_optimizer=s.placement.optimizer,
                offload_param=s.placement.param,
                pinned=s.pin_optimizer if s.placement.optimizer != "none" else s.pin_param,
                checkpointing=s.checkpointing,
                ratio=s.ratio,
                sharing=self.sharing,
                element=4 if self.precision == "fp32" else 2,
                hpz=hpz,
            ),
            self.rates,
        )

    # -- the search --

    def ladder(self) -> list[Placement]:
        """Placements from cheap to dear: without offload first, then by the cost model."""
        out = list(PLACEMENTS)
        if self.cpu_only:  # every tensor is in RAM anyway
            out = [p for p in out if not p.offloads and (self.ranks > 1 or p.stage == 0)]
        if not self.offload:
            out = [p for p in out if not p.offloads]
        if self.nvme is None:
            out = [p for p in out if "nvme" not in p]
        if self.training.optimizer is not None:  # the script's optimizer stays where the script puts it
            out = [p for p in out if p.optimizer == "none"]
        if self.training.quant != "none":  # packed weights are not swapped
            out = [p for p in out if p.param == "none"]

        def dear(p: Placement) -> tuple[Any, ...]:
            c = self.cost(self.start(p))
            return (p.offloads, "nvme" in p, round(c.lost + c.launch, 9), p.stage, p.param, p.optimizer)

        return sorted(out, key=dear)

    def repairs(self, s: Setup, e: Estimate) -> list[tuple[str, Setup]]:
        """What may help where ``e`` binds, from cheap to dear; none changes the placement."""
        if self.base is not None or self.cpu_only:
            return []
        out: list[tuple[str, Setup]] = []
        stage, optimizer, param = s.placement
        if stage == 3 and s.zero_init is None and self.training.loop == "plain":
            out.append(("zero_init", replace(s, zero_init=True)))
        if e.binds is not None and e.binds.where == "host":
            if e.binds.phase == "load" and stage < 3 and s.load_on == "cpu":
                out.append(("load_on", replace(s, load_on="gpu")))
            if param == "cpu" and s.pin_param:
                out.append(("pin_param", replace(s, pin_param=False)))
            if e.binds.phase == "save" and s.gather_on_save:
                out.append(("gather_on_save", replace(s, gather_on_save=False)))
            if optimizer != "none" and s.pin_optimizer:
                out.append(("pin_optimizer", replace(s, pin_optimizer=False)))
            if stage == 3 and optimizer == "cpu" and s.ratio > 0.25 and self._has_room(e):
                out.append(("ratio", replace(s, ratio=s.ratio - 0.25)))
            return out
        if stage == 0 or e.gpu.allocated is None or e.gpu.capacity is None:
            return out
        if e.gpu.allocated.expected < e.gpu.capacity + 16 * GiB:  # more than that no bucket gives back
            for smaller in (SMALL, LEAN):
                if smaller.reduce < s.buckets.reduce:
                    out.append(("buckets", replace(s, buckets=smaller)))
                    break
        return out

    def _has_room(self, e: Estimate) -> bool:
        """Whether the card can take another quarter of the optimizer: 16 bytes a parameter with its gradient."""
        if e.gpu.device is None or e.gpu.capacity is None:
            return False
        return e.gpu.device.expected + 4 * self.trained() // self.ranks < 0.97 * e.gpu.capacity

    def settle(self, s: Setup) -> tuple[Setup, Estimate, list[tuple[str, Setup, Estimate]]]:
        """``s`` or the same placement after the repairs that it needs; the nearest of them when none is enough."""
        e = self.fit(s)
        done: list[tuple[str, Setup, Estimate]] = []
        best = (s, e, 0)
        while e.verdict in ("no", "tight"):
            tries = self.repairs(s, e)
            if not tries:
                break
            name, then = tries[0]
            done.append((name, s, e))
            s, e = then, self.fit(then)
            if (_RANK[e.verdict], -shortage(e)) > (_RANK[best[1].verdict], -shortage(best[1])):
                best = (s, e, len(done))
        s, e, n = best
        return s, e, done[:n]

    def hopeless(self, p: Placement) -> bool:
        """Whether the states alone exceed a card: a lower bound that saves the replay.

        Bytes a parameter: fp32 master copy and two moments 12, 16-bit copy and gradient 2 each, as each is split
        (arXiv 1910.02054, section 5). LoRA and quantised weights are not judged.
        """
        sizes = [
            g.memory_free if g.memory_free is not None else g.memory_total for g in self.facts.gpus or ()
        ]
        known = [n for n in sizes if n is not None]
        if self.cpu_only or not known or self.training.lora_rank or self.training.quant != "none":
            return False
        n = self.ranks
        states = 0.0 if p.optimizer != "none" else 12 / (n if p.stage >= 1 else 1)
        copy = 0.0 if p.param != "none" else 2 / (n if p.stage == 3 else 1)
        return (states + copy) * self.shape.params > min(known)

    def find(self) -> Found:
        """The cheapest placement that fits; the tight one that is cheapest when none does; else the nearest."""
        refused: list[tuple[Setup, Estimate]] = []
        tight: tuple[int, Found] | None = None
        attempts = [True] if self.checkpointing is not False else [False]
        if self.base is not None and self.checkpointing is False:
            attempts = [False, True]  # the wizard may still turn it on
        for placement in self.ladder():
            if self.brief and self.hopeless(placement):
                continue
            if self.goal == "speed" and self.base is None and tight is not None and placement.offloads:
                break  # no offload is as fast as a run that lives by giving cached blocks back
            kept: tuple[Setup, Estimate] | None = None
            for checkpointing in attempts:
                s, e, done = self.settle(replace(self.start(placement), checkpointing=checkpointing))
                fair = e.verdict in ("fits", "tight") and self.objection(s) is None
                if fair and e.verdict == "fits":
                    return Found(s, e, tuple(refused), tuple(done))
                if fair and tight is None:
                    tight = (len(refused), Found(s, e, (), tuple(done)))
                kept = (s, e)
                if e.verdict == "unknown" and e.gpu.capacity is None and not self.cpu_only:
                    return Found(s, e, (), ())  # no card is known: no placement can be judged
                if (
                    e.verdict == "unknown"
                    and self.base is None
                    and not placement.offloads
                    and not self.cpu_only
                ):
                    return Found(s, e, tuple(refused), ())  # it may fit, and what comes after it costs more
            assert kept is not None
            refused.append(kept)
        if tight is not None:
            at, found = tight
            return replace(found, refused=tuple(refused[:at]))
        if not refused:  # brief, and no placement has a chance
            s = self.start(self.ladder()[-1])
            return Found(s, self.fit(s), (), ())
        unknown = [r for r in refused if r[1].verdict == "unknown"]
        s, e = unknown[0] if unknown else min(refused, key=lambda r: shortage(r[1]))
        if e.verdict in ("fits", "tight"):  # the rules object to all that would fit
            e = replace(e, verdict="no", reason=self.objection(s))
        return Found(s, e, tuple(r for r in refused if r[0] is not s), ())

    def with_micro(self, s: Setup, micro: int) -> Setup:
        return replace(s, micro_batch=micro, accumulation=self.accumulation(micro))

    def largest(self, s: Setup, most: int = 1 << 16) -> tuple[Setup, tuple[Setup, Estimate] | None]:
        """``s`` with the largest micro batch that fits, and the next one, which does not."""

        def works(micro: int) -> bool:
            return self.fit(self.with_micro(s, micro)).verdict == "fits"

        sizes = self.micros()
        if sizes is not None:
            low, high = 0, len(sizes)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if works(sizes[middle]) else (low, middle)
            best, after = sizes[low], sizes[high] if high < len(sizes) else None
        else:
            best, after = s.micro_batch, None
            step = best * 2
            while step <= most:
                if not works(step):
                    after = step
                    break
                best, step = step, step * 2
            while after is not None and after - best > max(1, best // 16):
                middle = (best + after) // 2
                best, after = (middle, after) if works(middle) else (best, middle)
        over = None if after is None else self.with_micro(s, after)
        return self.with_micro(s, best), None if over is None else (over, self.fit(over))

    def fastest(self, s: Setup) -> tuple[Setup, list[tuple[Setup, Estimate]]]:
        """The setup of least seconds a sample among those that fit, and what did not fit on the way.

        The smallest micro batch within 3 % of the best is taken: what is left is room for longer batches.
        """
        fits: list[tuple[float, Setup]] = []
        over: list[tuple[Setup, Estimate]] = []
        options = [s.checkpointing] if self.checkpointing is not None else [True, False]
        sizes = self.micros() or [1 << i for i in range(9)]
        ratios = (
            [r for r in (0.25, 0.5, 0.75, 1.0) if r <= s.ratio]
            if s.placement == (3, "cpu", "none")
            else [1.0]
        )
        s = replace(
            s,
            ratio=next(r for r in ratios if r == s.ratio or self.fit(replace(s, ratio=r)).verdict == "fits"),
        )
        for checkpointing in options:
            best = float("inf")
            for micro in sizes:
                then = replace(self.with_micro(s, micro), checkpointing=checkpointing)
                took = self.cost(then).per_sample
                if took > 0.97 * best:
                    break  # larger is hardly faster
                e = self.fit(then)
                if e.verdict != "fits" and then != s:
                    over.append((then, e))
                    break
                best = took
                fits.append((took, then))
        least = min(t for t, _s in fits)
        near = [x for x in fits if x[0] <= 1.03 * least]
        chosen = min(near, key=lambda x: (x[1].micro_batch, not x[1].checkpointing))[1]
        return chosen, over


def _with_micro(config: Mapping[str, Any], micro: int) -> dict[str, Any]:
    data = dict(config)
    if isinstance(data.get("train_micro_batch_size_per_gpu"), int):
        data["train_micro_batch_size_per_gpu"] = micro
        data.pop("train_batch_size", None)
    return data


def shortage(e: Estimate) -> float:
    """How much is missing, card and host RAM added up, as shares of what is there; 0 when nothing is."""
    if e.gpu.allocated is None or not e.gpu.capacity:
        return float("inf")
    short = max(0.0, e.gpu.allocated.expected / e.gpu.capacity - 1)
    if e.host.peak is not None and e.host.capacity:
        short += max(0.0, e.host.peak.expected / e.host.capacity - 1)
    if e.nvme is not None and e.nvme.capacity:
        short += max(0.0, e.nvme.needed / e.nvme.capacity - 1)
    return short


def placement_name(p: tuple[int, str, str]) -> str:
    """``ZeRO stage 3 with the optimizer on cpu``."""
    stage, optimizer, param = p
    if stage == 0:
        return _("plain data parallel (stage 0)")
    name = _("ZeRO stage {stage}").format(stage=stage)
    if param != "none" and optimizer == "none":
        return _("{name} with the parameters on {device}").format(name=name, device=param)
    if param != "none":
        return _("{name} with optimizer and parameters on {device}").format(
            name=name, device=optimizer if optimizer == param else f"{optimizer}, {param}"
        )
    if optimizer != "none":
        return _("{name} with the optimizer on {device}").format(name=name, device=optimizer)
    return name
