"""The best config for a machine, with the reason of every choice and the figure of everything rejected.

``search`` picks the placement: the cheapest that fits. What is left open within it (micro batch, checkpointing,
bucket sizes) follows the goal:

* ``fit``: least demanding. Micro batch 1, checkpointing, moderate buckets.
* ``speed``: least seconds a sample by the cost model among the settings that fit.
* ``batch``: the largest micro batch that fits, with checkpointing and small buckets.

Every candidate is judged by ``memory.estimate`` of the very config that would be written. ``plan`` serves the
verb, ``recommend`` the wizard, which writes its own buckets and batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dstui.errors import DstuiError
from dstui.estimate.correction import Calibration
from dstui.estimate.cost import Rates, StepCost
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.result import Change, Estimate, Verdict
from dstui.estimate.search import (
    DEFAULT,
    Found,
    Goal,
    Objection,
    Placement,
    Precision,
    Search,
    Setup,
    placement_name,
    shortage,
)
from dstui.facts.model import Facts, Host
from dstui.i18n import _, ngettext
from dstui.units import TiB, count, gib


@dataclass(frozen=True)
class Choice:
    """One decision in one sentence. ``what`` is a stable key, ``value`` what was decided."""

    what: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Rejected:
    """What was not chosen, and the figure that decided: bytes of ``where``, or seconds a step."""

    what: str
    reason: str
    where: str | None = None
    need: int | None = None
    have: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The answer. ``config`` is None when nothing fits (``no``) or a fact is missing (``unknown``)."""

    verdict: Verdict
    goal: Goal
    ranks: int
    setup: Setup
    estimate: Estimate
    config: Mapping[str, Any] | None
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    cost: StepCost | None
    rates: Rates
    reason: str | None = None
    """Why there is no config: what is short or which fact is missing."""
    changes: tuple[Change, ...] = ()
    """When nothing fits: single changes of the question under which something does."""
    training: Training = field(default_factory=Training)
    """How the script has to train for it."""

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step."""
        return (
            self.setup.micro_batch * self.setup.accumulation * self.ranks // self.training.sequence_parallel
        )


@dataclass(frozen=True)
class Recommendation:
    """What to start with. ``estimate`` is its fit; ``fits`` is False when nothing on this machine does."""

    stage: int
    offload_optimizer: str
    offload_param: str
    micro_batch: int
    checkpointing: bool
    reasons: tuple[str, ...]
    estimate: Estimate
    fits: bool


# -- the verb's answer -------------------------------------------------------------------------------------


def plan(
    shape: ModelShape,
    training: Training,
    facts: Facts,
    *,
    release: str | None,
    goal: Goal = "fit",
    global_batch: int | None = None,
    checkpointing: bool | None = None,
    world_size: int | None = None,
    precision: Precision | None = None,
    network: float | None = None,
    calibration: Calibration | None = None,
    objection: Objection | None = None,
) -> Plan:
    """The best config for ``shape`` on the machine of ``facts``, each choice with its reason.

    ``training.micro_batch`` fixes the micro batch; ``checkpointing`` None lets the search decide;
    ``global_batch`` is rows of one optimizer step over all ranks; ``network`` Gbit/s of a node to the others.
    ``objection`` asks the rules about a config: one that they refuse, or with which the release trains wrongly, is
    never answered. Raises DstuiError when the global batch cannot be divided over the ranks.
    """
    search = Search(
        shape,
        training,
        facts,
        release=release,
        world_size=world_size,
        goal=goal,
        checkpointing=checkpointing,
        global_batch=global_batch,
        precision=precision,
        network=network,
        calibration=calibration,
        objection=objection,
    )
    _check_batch(search)
    found = search.find()
    if not found.fits:
        return _refusal(search, found)
    setup = found.setup
    over: list[tuple[Setup, Estimate]] = []
    if found.estimate.verdict == "fits" and training.micro_batch is None and goal == "batch":
        setup, beyond = search.largest(setup)
        over = [] if beyond is None else [beyond]
    elif found.estimate.verdict == "fits" and goal == "speed":
        setup, over = search.fastest(setup)
    if search.objection(setup) is not None:  # accumulation can differ from that of the setup found
        setup, over = found.setup, []
    return _answer(search, found, setup, over)


def _check_batch(search: Search) -> None:
    wanted, ranks = search.global_batch, search.replicas
    if wanted is None:
        return
    unit = ranks * (search.training.micro_batch or 1)
    if wanted < 1 or wanted % unit:
        below = wanted // unit * unit
        raise DstuiError(
            _("a global batch of {n} is no multiple of {unit} = {ranks} ranks x micro batch {micro}").format(
                n=wanted, unit=unit, ranks=ranks, micro=search.training.micro_batch or 1
            ),
            _("use {numbers}").format(numbers=", ".join(str(n) for n in (below, below + unit) if n > 0)),
        )


def _figure(e: Estimate) -> tuple[str | None, int | None, int | None]:
    """Where it binds, bytes needed, bytes there. What is tight counts with the cache that PyTorch keeps."""
    where = e.binds.where if e.binds else None
    card, room = _floor(e), e.gpu.capacity
    if e.verdict == "tight" and e.gpu.device is not None and room is not None:
        if e.gpu.device.expected > 0.97 * room:
            return "gpu", e.gpu.device.expected, room
        if where == "gpu":
            return "gpu", max(e.gpu.device.expected, card or 0), room
    if where == "host" and e.host.peak is not None:
        return "host", e.host.peak.expected, e.host.capacity
    if where == "nvme" and e.nvme is not None:
        return "nvme", e.nvme.needed, e.nvme.capacity
    return ("gpu", card, room) if card is not None else (where, None, None)


def _floor(e: Estimate) -> int | None:
    """Bytes that a card must have: what is allocated, and what no tensor shows."""
    if e.gpu.device is None or e.gpu.allocated is None or e.gpu.reserved is None:
        return None
    return e.gpu.allocated.expected + e.gpu.device.expected - e.gpu.reserved.expected


def _short_of(e: Estimate) -> str:
    """``31.7 GiB a card, 24.0 GiB there``; card and RAM when both are short."""
    if e.verdict == "unknown":
        return e.reason or _("a fact is missing")
    where, need, have = _figure(e)
    text = {
        "host": _("{need} of host RAM a node, {have} there"),
        "nvme": _("{need} on the NVMe drive, {have} free"),
    }.get(where or "gpu", _("{need} a card, {have} there"))
    if need is None:
        return _("it does not fit")
    text = text.format(need=gib(need), have=gib(have))
    if e.verdict == "tight":
        return _("fits only tightly: {figure}").format(figure=text)
    if have is not None and need <= have:
        return _("free memory would be in pieces: {figure}").format(figure=text)
    card, room = _floor(e), e.gpu.capacity
    if where == "host" and card is not None and room is not None and card > room:
        text = _("{need} a card, {have} there").format(need=gib(card), have=gib(room)) + "; " + text
    return text


def _reject(name: str, e: Estimate) -> Rejected:
    where, need, have = _figure(e)
    return Rejected(name, _short_of(e), where, need, have)


def _refused(search: Search, s: Setup, e: Estimate) -> Rejected:
    name = placement_name(s.placement)
    text = search.objection(s) if e.verdict in ("fits", "tight") else None
    if text is not None:
        return Rejected(name, text)
    found = _reject(name, e)
    if found.where == "gpu" and e.verdict == "tight" and _expandable_helps(search, s):
        return replace(found, reason=found.reason + "; " + _expandable_note())
    return found


def _expandable_helps(search: Search, s: Setup) -> bool:
    """Whether it fits where memory that is given back is not left in pieces."""
    return not search.training.expandable and search.fit(s, expandable=True).verdict == "fits"


def _expandable_note() -> str:
    return _("with {name} in the environment it fits").format(
        name="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


def _answer(search: Search, found: Found, setup: Setup, over: list[tuple[Setup, Estimate]]) -> Plan:
    e = search.fit(setup)
    cost = search.cost(setup)
    rejected = [_refused(search, s, r) for s, r in found.refused]
    rejected += [
        _reject(_repair_name(name, before), r) for name, before, r in found.repaired if name != "load_on"
    ]
    for s, r in over:
        name = _("micro batch {n}").format(n=s.micro_batch)
        if not s.checkpointing and setup.checkpointing:
            name = _("micro batch {n} without gradient checkpointing").format(n=s.micro_batch)
        rejected.append(_reject(name, r))
    choices = [
        _placement_choice(search, found, setup, e),
        *_offload_choices(search, found, setup, e, cost),
        *_batch_choices(search, setup, over, cost),
        _checkpointing_choice(search, setup, over),
        *_bucket_choice(search, found, setup),
        *_script_choices(search, setup),
        *_link_choices(search, setup, e),
    ]
    if e.verdict == "tight":
        choices.append(_tight_choice(search, setup, e))
    return Plan(
        e.verdict,
        search.goal,
        search.ranks,
        setup,
        e,
        search.config(setup),
        tuple(choices),
        tuple(rejected),
        cost,
        search.rates,
        changes=tuple(_instead(search, setup)),
        training=search.how(setup),
    )


def _tight_choice(search: Search, s: Setup, e: Estimate) -> Choice:
    text = e.reason or _("it fits as expected, not at the upper end of the range")
    if e.gpu.capacity is not None and _expandable_helps(search, s):
        text += "; " + _expandable_note()
    return Choice("tight", True, text)


def _repair_name(name: str, before: Setup) -> str:
    names: Mapping[str, Callable[[], str]] = {
        "buckets": lambda: _("buckets of {n} elements").format(n=count(before.buckets.reduce)),
        "pin_param": lambda: _("pinned parameters"),
        "pin_optimizer": lambda: _("a pinned optimizer"),
        "zero_init": lambda: _("every rank loads the whole model"),
        "ratio": lambda: _("{share:.0%} of the optimizer in RAM").format(share=before.ratio),
        "gather_on_save": lambda: _("gathering the 16-bit weights at a save"),
    }
    return names[name]()


def _need(e: Estimate) -> str:
    if e.gpu.device is None:
        return _("{need} of {have} RAM").format(
            need=gib(e.host.peak.expected if e.host.peak else None), have=gib(e.host.capacity)
        )
    return _("{need} of {have} a card").format(need=gib(e.gpu.device.expected), have=gib(e.gpu.capacity))


def _placement_choice(search: Search, found: Found, s: Setup, e: Estimate) -> Choice:
    need, ranks = _need(e), search.ranks
    stage = s.placement.stage
    if search.cpu_only:
        text = _("no GPU: every tensor is in host RAM ({need})")
    elif stage == 0 and ranks == 1:
        text = _(
            "all of it fits on one card ({need}): ZeRO has nothing to split, plain PyTorch does the same"
        )
    elif stage == 0:
        text = _("all of it fits on every card ({need}): plain data parallel, torch DDP does the same")
    elif stage == 1 and ranks == 1:
        text = _("nothing is split on one card, but ZeRO's optimizer steps with fewer copies ({need})")
    elif stage == 1:
        text = _("splitting the optimizer states over {ranks} ranks is enough ({need})")
    elif stage == 2:
        text = _("optimizer states and gradients have to be split over {ranks} ranks ({need})")
    elif ranks == 1:
        text = _("only stage 3 can let parameters leave the card or step in pieces ({need})")
    elif s.placement.offloads:
        text = _("even the parameters have to be split over {ranks} ranks ({need})")
    else:
        text = _(
            "the parameters have to be split too, over {ranks} ranks ({need}); FSDP with full shard is the same"
        )
    reason = text.format(ranks=ranks, need=need)
    if found.refused:
        last, why = found.refused[-1]
        before = [r for r in found.refused if r[0].placement.offloads == s.placement.offloads]
        if before:
            last, why = before[-1]
        reason += "; " + _("{name}: {figure}").format(
            name=placement_name(last.placement), figure=_short_of(why)
        )
    return Choice("stage", stage, reason)


def _seconds(value: float) -> str:
    return _("{n:.2g} s").format(n=value) if value < 10 else _("{n:.0f} s").format(n=value)


def _offload_choices(search: Search, found: Found, s: Setup, e: Estimate, cost: StepCost) -> list[Choice]:
    p = s.placement
    if not p.offloads:
        if search.cpu_only:
            return []
        other = search.cost(replace(s, placement=Placement(max(1, p.stage), "cpu")))
        text = _("nothing has to leave the card; in host RAM the optimizer would cost {n} more a step")
        extra = other.pcie + other.cpu_adam
        return [Choice("offload_optimizer", "none", text.format(n=_seconds(extra)))]
    out: list[Choice] = []
    plain = [r for r in found.refused if not r[0].placement.offloads]
    if p.optimizer != "none":
        best = min(plain, key=lambda r: shortage(r[1])) if plain else None
        why = (
            _("the nearest without offload, {name}: {figure}").format(
                name=placement_name(best[0].placement), figure=_short_of(best[1])
            )
            if best
            else _("nothing fits without")
        )
        out.append(
            Choice(
                "offload_optimizer",
                p.optimizer,
                _("{why}; it costs {pcie} of copies and {adam} of Adam on the CPU a step").format(
                    why=why, pcie=_seconds(cost.pcie), adam=_seconds(cost.cpu_adam)
                ),
            )
        )
    if p.param != "none":
        moved = _("the 16-bit parameters ({size}) cross PCIe twice in every micro step").format(
            size=gib((4 if search.precision == "fp32" else 2) * search.shape.params / search.ranks)
        )
        less = [r for r in found.refused if r[0].placement.param == "none"]
        if less:
            last, why_not = less[-1]
            moved += "; " + _("{name}: {figure}").format(
                name=placement_name(last.placement), figure=_short_of(why_not)
            )
        out.append(Choice("offload_param", p.param, moved))
    if s.ratio < 1:
        forced = any(name == "ratio" for name, _s, _e in found.repaired)
        text = (
            _("the rest of the optimizer fits on the card: less to copy and to step on the CPU")
            if not forced
            else _("the rest of the optimizer stays on the card, because RAM cannot hold all of it")
        )
        out.append(Choice("ratio", s.ratio, text))
    out.append(_pin_choice(s, e))
    return out


def _pin_choice(s: Setup, e: Estimate) -> Choice:
    pins = [
        pin
        for pin, device in ((s.pin_optimizer, s.placement.optimizer), (s.pin_param, s.placement.param))
        if device != "none"
    ]
    host = _("{peak} of {have} host RAM a node").format(
        peak=gib(e.host.peak.expected if e.host.peak else None), have=gib(e.host.capacity)
    )
    if all(pins):
        text = _(
            "pinned copies run about twice as fast; with blocks rounded to powers of two it takes {host}"
        )
    elif any(pins):
        text = _(
            "the optimizer is pinned, the parameters are not: rounded to powers of two both need too much; {host}"
        )
    else:
        text = _("pinned blocks are rounded to powers of two, which this RAM cannot hold; {host}")
    return Choice("pin_memory", all(pins), text.format(host=host))


def _batch_choices(
    search: Search, s: Setup, over: list[tuple[Setup, Estimate]], cost: StepCost
) -> list[Choice]:
    if search.training.micro_batch is not None:
        text = _("as asked")
    elif search.goal == "fit":
        text = _("the least demanding; --goal batch or speed raises it")
    elif search.goal == "batch":
        text = _("the largest that fits")
    else:
        text = _("the smallest within 3 % of the fastest by the cost model")
    beyond = [o for o in over if o[0].checkpointing == s.checkpointing]
    if beyond:
        text += "; " + _("{n}: {figure}").format(n=beyond[0][0].micro_batch, figure=_short_of(beyond[0][1]))
    out = [Choice("micro_batch", s.micro_batch, text)]
    whole = s.micro_batch * s.accumulation * search.replicas
    if search.global_batch is None:
        text = _("no --global-batch was given: each micro step is a step, {n} rows over all ranks").format(
            n=whole
        )
        if cost.cpu_adam > 0.5:
            text += "; " + _("a larger one spreads the {n} of the CPU step over more rows").format(
                n=_seconds(cost.cpu_adam)
            )
    else:
        text = _("{micro} x {steps} x {ranks} ranks = {n} rows a step").format(
            micro=s.micro_batch, steps=s.accumulation, ranks=search.replicas, n=whole
        )
    out.append(Choice("gradient_accumulation_steps", s.accumulation, text))
    return out


def _checkpointing_choice(search: Search, s: Setup, over: list[tuple[Setup, Estimate]]) -> Choice:
    if search.checkpointing is not None:
        return Choice("checkpointing", s.checkpointing, _("as asked"))
    if not s.checkpointing:
        return Choice(
            "checkpointing", False, _("the activations fit: recomputing them would take a third more work")
        )
    without = [o for o in over if not o[0].checkpointing]
    if without:
        text = _("needed: without, {figure}").format(figure=_short_of(without[0][1]))
    elif search.goal == "speed":
        text = _("it costs less than the smaller micro batch without it")
    else:
        text = _("leaves the most room; costs about a third more work")
    return Choice("checkpointing", True, text)


def _bucket_choice(search: Search, found: Found, s: Setup) -> list[Choice]:
    if s.placement.stage == 0 or (search.ranks == 1 and s.placement.stage < 3):
        return []
    zero = search.config(s)["zero_optimization"]
    size = zero["reduce_bucket_size"]
    if size < s.buckets.reduce:
        text = _("no larger than what is trained: a bucket is allocated whole")
    elif any(name == "buckets" for name, _s, _e in found.repaired):
        text = _("smaller than DeepSpeed's {n}: with larger ones it is tight or does not fit").format(
            n=count(DEFAULT.reduce)
        )
    elif s.buckets == DEFAULT:
        text = _("DeepSpeed's own: there is room for them")
    else:
        text = _("below DeepSpeed's {n}: more, shorter messages for more room").format(
            n=count(DEFAULT.reduce)
        )
    return [Choice("buckets", size, text)]


def _script_choices(search: Search, s: Setup) -> list[Choice]:
    """What the script has to do for the plan to hold."""
    out: list[Choice] = []
    if search.precision == "fp16":
        out.append(Choice("precision", "fp16", _("cards before Ampere have no bf16")))
    if search.training.optimizer is None and search.needs_torch_adam(s) and not search.cpu_only:
        out.append(
            Choice("optimizer", "torch_adam", _("FusedAdam would have to be compiled, and nvcc is not here"))
        )
    if s.zero_init and search.training.zero_init is None:
        out.append(
            Choice(
                "loading",
                "zero.Init",
                _("build the model under deepspeed.zero.Init: else every rank first holds the whole model"),
            )
        )
    if s.load_on == "gpu" and search.training.load_on == "cpu":
        size = (search.shape.checkpoint_bytes or 2 * search.shape.params) * search.ranks_per_node
        out.append(
            Choice(
                "loading",
                "gpu",
                _("load the model straight onto each rank's GPU: {n} copies in RAM would be {size}").format(
                    n=search.ranks_per_node, size=gib(size)
                ),
            )
        )
    if s.placement.stage == 3 and not s.gather_on_save:
        out.append(
            Choice(
                "gather_on_save",
                False,
                _("RAM cannot hold the gathered weights at a save; use zero_to_fp32.py on the checkpoint"),
            )
        )
    return out


def _link_choices(search: Search, s: Setup, e: Estimate) -> list[Choice]:
    """Stage 3 over several nodes: whether a second shard inside the node (ZeRO++ hpZ) fits.

    hpZ keeps the 16-bit parameters once more, split over ``zero_hpz_partition_size`` ranks, and gathers from
    them in backward (arXiv 2306.10209, section 3.2; ``partition_parameters.py``).
    """
    n = search.ranks_per_node
    if s.placement.stage != 3 or search.ranks <= n or search.ranks % n or s.placement.offloads:
        return []
    extra = round((4 if search.precision == "fp32" else 2) * search.shape.params / n)
    if e.gpu.device is None or e.gpu.capacity is None:
        return []
    room = round(0.97 * e.gpu.capacity) - e.gpu.device.expected
    if extra > room:
        text = _(
            "zero_hpz_partition_size {n} would keep the gathers of backward inside a node, but takes {extra} more and {room} are left"
        )
        return [
            Choice("zero_hpz_partition_size", 1, text.format(n=n, extra=gib(extra), room=gib(max(0, room))))
        ]
    now, then = search.cost(s), search.cost(s, hpz=True)
    text = _(
        "try zero_hpz_partition_size {n}: a second shard inside each node ({extra} more) takes communication from {now} to {then} a step; MiCS does it for all states, with its own Init"
    )
    return [
        Choice(
            "zero_hpz_partition_size",
            1,
            text.format(
                n=n, extra=gib(extra), now=_seconds(now.communication), then=_seconds(then.communication)
            ),
        )
    ]


# -- nothing fits ------------------------------------------------------------------------------------------


def _refusal(search: Search, found: Found) -> Plan:
    e = found.estimate
    looked_at = [
        (s, r) for s, r in (*found.refused, (found.setup, e)) if e.verdict != "unknown" or r.verdict == "no"
    ]
    rejected = [_refused(search, s, r) for s, r in looked_at]
    if e.verdict == "unknown":
        reason = e.reason or _("a fact is missing")
    else:
        reason = _("nothing fits this machine; the nearest, {name}, wants {figure}").format(
            name=placement_name(found.setup.placement), figure=_short_of(e)
        )
    return Plan(
        e.verdict,
        search.goal,
        search.ranks,
        found.setup,
        e,
        None,
        (),
        tuple(rejected),
        None,
        search.rates,
        reason,
        () if e.verdict == "unknown" else tuple(_ways_out(search, e)),
        search.how(found.setup),
    )


class _Asker:
    """Asks the question again with one thing changed, and keeps what then fits."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.found: list[Change] = []

    def __call__(self, title: str, costs: str, **changes: Any) -> Placement | None:
        found = _again(self.search, **changes).find()
        if found.estimate.verdict != "fits":
            return None
        then = _("{name}, {need}").format(
            name=placement_name(found.setup.placement), need=_need(found.estimate)
        )
        if found.estimate.host.peak is not None and found.setup.placement.offloads:
            then += ", " + _("{size} of RAM").format(size=gib(found.estimate.host.peak.expected))
        self.found.append(Change(_("{title}: {then}").format(title=title, then=then), (), None, costs))
        return found.setup.placement

    def adapters(self) -> None:
        """LoRA for full training, and QLoRA unless nothing has to leave the card with LoRA."""
        t = self.search.training
        if t.quant != "none":
            return
        if not t.lora_rank:
            lora = self(
                _("train a LoRA adapter of rank 16"),
                _("another model: only low-rank updates are learnt"),
                lora_rank=16,
            )
            if lora is not None and lora.stage < 3:
                return
        self(
            _("LoRA on a 4-bit model (QLoRA)"),
            _("the frozen weights are rounded to 4 bits"),
            lora_rank=t.lora_rank or 16,
            quant="nf4",
        )


def _instead(search: Search, s: Setup) -> list[Change]:
    """What would spare an offload: adapters."""
    if not s.placement.offloads:
        return []
    ask = _Asker(search)
    ask.adapters()
    return ask.found


def _ways_out(search: Search, nearest: Estimate) -> list[Change]:
    """Single changes of the question, from cheap to dear, each with what then fits."""
    t = search.training
    ask = _Asker(search)
    if search.checkpointing is False:
        ask(_("turn on gradient checkpointing"), _("about a third more computation"), checkpointing=True)
    if t.micro_batch is not None and t.micro_batch > 1:
        ask(_("micro batch 1"), _("more, smaller kernels"), micro_batch=1)
    ask.adapters()
    for seq in (t.seq // 2, t.seq // 4) if _activations_decide(nearest) else ():
        if seq >= 512 and ask(
            _("sequences of {seq} tokens").format(seq=seq), _("longer examples are cut"), seq=seq
        ):
            break
    _more_ram(search, ask.found)
    _more_cards(search, ask)
    return ask.found


def _activations_decide(e: Estimate) -> bool:
    """Whether a card could hold everything but the activations."""
    if e.gpu.capacity is None or (e.binds is not None and e.binds.where != "gpu"):
        return False
    kept = max(
        (p.total - p.parts.get("activations", 0) - p.parts.get("logits", 0) for p in e.gpu.phases), default=0
    )
    return kept < e.gpu.capacity


def _again(search: Search, *, facts: Facts | None = None, **changes: Any) -> Search:
    checkpointing = changes.pop("checkpointing", search.checkpointing)
    offload = changes.pop("offload", True)
    grown = facts is not None and facts.world_size != search.facts.world_size
    training = replace(search.training, **changes)
    return Search(
        search.shape,
        training,
        facts or search.facts,
        release=search.release,
        world_size=None if grown else search.world_size,
        goal=search.goal,
        checkpointing=checkpointing,
        precision=search.precision,
        network=search.network,
        calibration=search.calibration,
        brief=True,
        offload=offload,
    )


def _more_ram(search: Search, out: list[Change]) -> None:
    """How much host RAM would let an offload fit."""
    have = search.facts.host.memory_free
    if have is None or search.cpu_only:
        return
    plenty = Host(ram_total=64 * TiB, ram_available=64 * TiB, cores=search.facts.host.cores)
    question = _again(search, facts=dataclasses.replace(search.facts, host=plenty))
    found = question.find()
    if found.estimate.verdict != "fits":
        return
    least = replace(found.setup, pin_optimizer=False, pin_param=False, gather_on_save=False)
    peak = question.fit(least).host.peak
    if peak is None or peak.high <= have:
        return
    out.append(
        Change(
            _("{size} of free host RAM a node: {name}").format(
                size=gib(max(peak.high, peak.expected / 0.95), 0), name=placement_name(found.setup.placement)
            ),
            (),
            None,
            _("hardware; the step waits for PCIe and the CPU"),
        )
    )


def _more_cards(search: Search, ask: _Asker) -> None:
    """The least number of such cards, in powers of two, that holds it without offload: up to 8 a node, then 8 nodes."""
    gpus = search.facts.gpus
    if not gpus or search.world_size not in (None, search.facts.world_size):
        return
    sizes = [(n, search.facts.nodes) for n in (1, 2, 4, 8) if n > len(gpus)]
    sizes += [(max(8, len(gpus)), n) for n in (2, 4, 8) if n > search.facts.nodes]
    for here, nodes in sizes:
        cards = tuple(dataclasses.replace(gpus[i % len(gpus)], index=i) for i in range(here))
        facts = dataclasses.replace(search.facts, gpus=cards, nodes=nodes)
        title = ngettext("{n} such card", "{n} such cards", here * nodes).format(n=here * nodes)
        if nodes > 1:
            title = _("{nodes} nodes of {n} such cards").format(nodes=nodes, n=here)
        if ask(title, _("hardware"), facts=facts, offload=False):
            return


# -- the wizard's question ---------------------------------------------------------------------------------

_WIZARD_MOST = 16
"""Largest micro batch that the wizard proposes."""


def recommend(
    shape: ModelShape,
    training: Training,
    facts: Facts,
    *,
    release: str | None,
    config_data: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Recommendation:
    """The cheapest placement that fits ``shape`` on the machine, with a sentence for each choice.

    Everything but stage and offload is as in ``config_data`` (default: bf16 with AdamW). The micro batch is the
    script's, or the largest power of two up to 16 that still fits the chosen placement when it names none.
    Without a GPU, and when nothing fits or facts are missing, the answer says so and ``fits`` is False
    (stage 0 on the CPU is judged by RAM alone).
    """
    search = Search(
        shape,
        training,
        facts,
        release=release,
        world_size=world_size,
        goal="speed",
        checkpointing=training.checkpointing,
        base=config_data
        or {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
    )
    found = search.find()
    setup = found.setup
    if found.estimate.verdict == "fits" and training.micro_batch is None:
        for micro in (2, 4, 8, _WIZARD_MOST):
            larger = search.with_micro(setup, micro)
            if search.fit(larger).verdict != "fits":
                break
            setup = larger
    e = search.fit(setup)
    reasons = _wizard_reasons(found, setup, e, training) if found.fits else _wizard_refusal(found)
    return Recommendation(
        *setup.placement, setup.micro_batch, setup.checkpointing, tuple(reasons), e, found.fits
    )


def _wizard_refusal(found: Found) -> list[str]:
    e = found.estimate
    if e.verdict == "unknown" and e.reason:
        return [e.reason]
    reasons = [
        _("nothing fits this machine; the nearest is {name}").format(
            name=placement_name(found.setup.placement)
        )
    ]
    if e.binds is not None and e.binds.where == "host":
        reasons.append(
            _("host RAM cannot hold it: {need} needed, {have} free").format(
                need=gib(e.host.peak.expected if e.host.peak else None), have=gib(e.host.capacity)
            )
        )
    elif e.gpu.device is not None:
        reasons.append(
            _("a GPU needs {need} and has {have}").format(
                need=gib(e.gpu.device.expected), have=gib(e.gpu.capacity)
            )
        )
    return reasons


def _wizard_reasons(found: Found, s: Setup, e: Estimate, training: Training) -> list[str]:
    name = placement_name(s.placement)
    reasons = [_("{name}: {figure}").format(name=name, figure=_need(e))]
    if found.refused:
        last, why = found.refused[-1]
        reasons.append(
            _("{name} does not fit: {figure}").format(
                name=placement_name(last.placement), figure=_short_of(why)
            )
        )
    if s.placement.offloads:
        reasons.append(
            _("offload costs PCIe traffic and a slow CPU step; no stage without it is sure to fit")
        )
    elif s.placement.stage == 3:
        reasons.append(_("stage 3 gathers parameters in every layer, for forward and again for backward"))
    elif s.placement.stage == 0:
        reasons.append(_("everything fits as it is: sharding would only cost"))
    if s.checkpointing and not training.checkpointing:
        reasons.append(_("gradient checkpointing is needed for it"))
    if e.verdict == "tight":
        reasons.append(_("it is tight: fragmentation may still fail it"))
    return reasons
