"""What a step takes and what of it is lost: the explicit model by which ``plan`` compares.

Every term is seconds of one optimizer step of one rank, none hidden behind another: upper bounds of what is
lost, made to compare placements, not to promise a step time. Volumes follow DeepSpeed 0.19.8:

* stage 0: the engine all-reduces gradients at the accumulation boundary (``engine.allreduce_gradients``): 2 G.
* stage 1: the same all-reduce of buckets at the boundary (``stage_1_and_2.average_tensor`` with
  ``use_multi_rank_bucket_allreduce``, the default, reduces whole buckets and keeps its part: 2 G, where the
  ZeRO paper counts 1), then an all-gather of the new parameters: 1 G.
* stage 2: as stage 1, but the buckets are reduced in every micro step (``partition_gradients``).
* stage 3: in every micro step the parameters are gathered for forward and for backward (2 P) and the gradients
  are reduce-scattered (1 G) (arXiv 1910.02054, section 7.2; ``partitioned_param_coordinator``).

G: bytes of the trained parameters, P: of all, both in 16 bits; times (N - 1) / N as a ring moves them.
Offload, per rank: gradients go down in fp32 and new parameters up in 16 bits once a step
(``async_inplace_copy_grad_to_fp32_buffer_from_gpu``); with accumulation the partial sums go down and up in
every micro step (``async_accumulate_grad_in_cpu_via_gpu``, stage 2; ``stage3.partition_grads``); parameters in
RAM come up for forward and again for backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dstui.errors import DstuiError
from dstui.facts.cards import find_card
from dstui.facts.model import Facts, Gpu
from dstui.i18n import _

GB = 10**9

TFLOPS: Mapping[str, float] = {
    "B300": 2250, "GB200": 2500, "B200": 2250, "RTX-PRO-6000": 500, "5090": 209.5, "5080": 112.6,
    "H200": 989, "GH200-96G": 989, "H100-80G": 989, "H100-PCIE": 756, "H100-NVL": 835, "H800": 989, "H20": 148,
    "L40S": 362, "L40": 181, "L20": 119.5, "L4": 121, "RTX-6000-ADA": 364, "4090": 165.2, "4080": 97.5,
    "A100-80G": 312, "A100-40G": 312, "A800": 312, "A30": 165, "A40": 149.7, "A10": 125, "A10G": 70,
    "A6000": 154.8, "3090": 71, "3090-TI": 80, "3080": 59.5,
    "T4": 65, "2080-TI": 53.8, "TITAN-RTX": 130.5, "V100-32G": 125, "V100-16G": 125,
}  # fmt: skip
"""Dense 16-bit matrix rate with fp32 accumulation in 10^12 FLOP/s, by ``cards.Card.key``; NVIDIA's data sheets
and architecture white papers (half of a figure that is given "with sparsity"). Turing and Volta: fp16."""

NVLINK: Mapping[str, float] = {
    "B300": 900, "GB200": 900, "B200": 900, "H200": 450, "GH200-96G": 450, "H100-80G": 450, "H20": 450,
    "H800": 200, "A100-80G": 300, "A100-40G": 300, "A800": 200, "V100-32G": 150, "V100-16G": 150,
}  # fmt: skip
"""NVLink of the boards that always have it, GB/s in one direction (half of the data sheet's total)."""

BRIDGE = 56.0
"""A card with NVLink peers that is not in ``NVLINK``: a bridge, GB/s in one direction (RTX 3090, A6000: 112.5
in both)."""

_LANE: Mapping[int, float] = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction after line coding (PCI-SIG)."""
_LINK_SHARE = 0.8
"""Share of the line rate that large pinned copies reach."""
_PAGEABLE = 0.5
"""A pageable copy is staged through a pinned buffer of the driver: about half the rate."""
_PCIE_COLLECTIVE = 0.5
"""Collectives over PCIe without peer access pass through host memory: down and up again."""
_NVLINK_SHARE = 0.8
"""Share of NVLink's rate that NCCL's rings reach with large messages."""

UTILISATION = 0.45
"""Share of the data sheet's rate that a dense model reaches: assumed; 0.28 to 0.4 on H200 at 2048 to 8192
tokens, with the launch time below."""
LAUNCH = 0.007
LAUNCH_STAGE3 = 0.020
"""Seconds of Python and kernel launches a layer and micro step: what a Llama of 1B, 1024 tokens a micro step,
took on H200 (0.11-0.16 s of 16 layers at stages 0 to 2, 0.31-0.40 s at stage 3; torch 2.11, DeepSpeed 0.19.8)."""

ADAM_CORE = 1.0e9
"""Parameters a second that DeepSpeedCPUAdam updates with one core: measured with 1e8 parameters, fp32 states,
AVX-512 (0.94-1.06e9); a second core of the same memory channel added nothing."""
ADAM_HOST = 3.0e9
ADAM_HOST_STAGE3 = 1.5e9
"""The same for a whole host, where memory decides: a Llama of 1B on an H200 host with 16 cores took 0.41 s more
a step with the optimizer in RAM at stage 2 after its copies are taken off (3.0e9), with 32 cores and two ranks
as much; stage 3, which steps sub-group by sub-group, 0.83 s (1.5e9). Four nodes reported 10 s for 72B at stage 3:
1.8e9 a host (DeepSpeed issue 6834)."""

NVME_READ = 3.0 * GB
NVME_WRITE = 1.5 * GB
"""Bytes a second of one NVMe drive, assumed: no fact says it."""
NETWORK = 100.0
"""Gbit/s of a node to the others, assumed when nobody says it."""


@dataclass(frozen=True)
class Rates:
    """What the machine moves and computes, bytes and FLOP a second. ``sources``: where each comes from."""

    compute: float | None
    """Attainable FLOP/s of a card; None: card not known, seconds of computation cannot be told."""
    peers: float
    """Between the cards of a node, one direction."""
    network: float | None
    """Of a node to the others; None: one node."""
    pcie: float
    adam: float
    adam_stage3: float
    nvlink: bool
    sources: tuple[str, ...] = ()


def _card_key(gpu: Gpu) -> str | None:
    if not gpu.name:
        return None
    try:
        return find_card(gpu.name).key
    except DstuiError:
        return None


def _pcie(gpu: Gpu, notes: list[str]) -> float:
    """One direction of the card's own link. An idle card lowers the generation, never the width, so the highest
    generation and the width in use count."""
    generation = gpu.pcie_generation_max or gpu.pcie_generation
    width = gpu.pcie_width or gpu.pcie_width_max
    if generation is None:
        capability = gpu.compute_capability or (8, 0)
        consumer = {(12, 0): 5, (10, 0): 5, (10, 3): 5, (9, 0): 5}
        generation = consumer.get(capability, 4 if capability >= (8, 0) else 3)
        notes.append(_("PCIe generation {n} x16 is assumed").format(n=generation))
    else:
        notes.append(_("PCIe generation {n}, x{width}").format(n=generation, width=width or 16))
    if width is not None and gpu.pcie_width_max is not None and width < gpu.pcie_width_max:
        notes.append(_("the card uses {n} of {all} PCIe lanes").format(n=width, all=gpu.pcie_width_max))
    return _LANE.get(generation, _LANE[4]) * (width or 16) * _LINK_SHARE * GB


def rates(facts: Facts, *, ranks: int, ranks_per_node: int, network: float | None = None) -> Rates:
    """Rates of the machine of ``facts`` with ``ranks_per_node`` ranks on each node; ``network``: Gbit/s of a node.

    What the facts do not say is assumed and said in ``sources``.
    """
    notes: list[str] = []
    gpus = (facts.gpus or ())[:ranks_per_node]
    compute: float | None = None
    nvlink = False
    peers = pcie = 25.0 * GB
    if gpus:
        key = _card_key(gpus[0]) or ""
        if key in TFLOPS:
            compute = TFLOPS[key] * 1e12 * UTILISATION
            notes.append(
                _("{name}: {n:g} TFLOP/s dense in 16 bits, {share:.0%} of it reached (assumed)").format(
                    name=gpus[0].name, n=TFLOPS[key], share=UTILISATION
                )
            )
        else:
            notes.append(_("the card's rate is not known: seconds of computation are left out"))
        pcie = _pcie(gpus[0], notes)
        known = gpus[0].nvlink_peers
        if known is not None:
            nvlink = len(gpus) > 1 and all(len(g.nvlink_peers or ()) >= len(gpus) - 1 for g in gpus)
        else:
            nvlink = key in NVLINK
        peers = pcie * _PCIE_COLLECTIVE
        if nvlink:
            peers = (NVLINK.get(key) or BRIDGE) * _NVLINK_SHARE * GB
        if len(gpus) > 1:
            how = _("NVLink") if nvlink else "PCIe"
            text = _("cards linked by {how}") if known is not None else _("cards linked by {how} (assumed)")
            notes.append(text.format(how=how))
    between: float | None = None
    if ranks > ranks_per_node:
        between = (network or NETWORK) / 8 * GB * 0.9
        text = _("{n:g} Gbit/s between nodes") if network else _("{n:g} Gbit/s between nodes (assumed)")
        notes.append(text.format(n=network or NETWORK))
    cores = facts.host.cores_usable or facts.host.cores
    adam = min(ADAM_HOST, (cores or 64) * ADAM_CORE)
    return Rates(
        compute, peers, between, pcie, adam, min(adam, ADAM_HOST_STAGE3), nvlink, tuple(dict.fromkeys(notes))
    )


@dataclass(frozen=True)
class Work:
    """One optimizer step of one rank. ``params`` and ``trained`` are elements of the whole model."""

    params: int
    trained: int
    layers: int
    hidden: int
    seq: int
    micro_batch: int
    accumulation: int
    ranks: int
    ranks_per_node: int
    stage: int
    offload_optimizer: str
    offload_param: str
    pinned: bool
    checkpointing: bool
    ratio: float = 1.0
    """Share of the optimizer in RAM."""
    sharing: int = 1
    """Ranks that share a row (sequence parallel)."""
    element: int = 2
    hpz: bool = False


@dataclass(frozen=True)
class StepCost:
    """Seconds of one optimizer step. ``compute`` is None where the card's rate is unknown."""

    compute: float | None
    recompute: float | None
    launch: float
    """What launching takes beyond computing."""
    communication: float
    pcie: float
    cpu_adam: float
    nvme: float
    samples: int
    """Rows of all ranks in the step."""

    @property
    def lost(self) -> float:
        """What one card with enough memory would not spend."""
        return (self.recompute or 0.0) + self.communication + self.pcie + self.cpu_adam + self.nvme

    @property
    def total(self) -> float:
        return (self.compute or 0.0) + self.launch + self.lost

    @property
    def per_sample(self) -> float:
        return self.total / self.samples

    def to_json(self) -> dict[str, Any]:
        """Seconds, with the sums; ``relative_only``: computation is missing in them."""
        return {
            **asdict(self),
            "lost": self.lost,
            "total": self.total,
            "per_sample": self.per_sample,
            "relative_only": self.compute is None,
        }


def volume(w: Work) -> float:
    """Bytes a rank sends in one step, all collectives together."""
    if w.ranks == 1:
        return 0.0
    ring = (w.ranks - 1) / w.ranks
    grads, params = w.element * w.trained * ring, w.element * w.params * ring
    if w.stage == 0:
        return 2 * grads
    if w.stage == 1:
        return 3 * grads
    if w.stage == 2:
        return 2 * grads * w.accumulation + grads
    return (2 * params + grads) * w.accumulation


def step_cost(w: Work, r: Rates) -> StepCost:
    """Seconds by cause; see the module for each volume."""
    tokens = w.micro_batch * w.seq / w.sharing
    attention = 2.0 * w.layers * w.hidden * w.seq * tokens  # QK and AV, half of them masked
    forward = 2.0 * w.params * tokens + attention
    backward = 2.0 * (w.params + w.trained) * tokens + 2 * attention
    again = forward if w.checkpointing else 0.0
    launch = w.layers * (LAUNCH_STAGE3 if w.stage == 3 else LAUNCH)
    compute: float | None = None
    recompute: float | None = None
    if r.compute is not None:
        compute = (forward + backward) / r.compute * w.accumulation
        recompute = again / r.compute * w.accumulation
        launch = max(0.0, launch * w.accumulation - compute - recompute)
    else:
        launch *= w.accumulation
    sent = volume(w)
    communication = sent / r.peers
    if r.network is not None:
        crossing = sent
        if w.hpz and w.stage == 3:  # backward gathers from the node's own secondary shard
            crossing = sent - w.element * w.params * (w.ranks - 1) / w.ranks * w.accumulation
        communication = max(communication, crossing / r.network)
    b, part = w.element, w.trained / w.ranks * w.ratio
    link = r.pcie * (1.0 if w.pinned else _PAGEABLE)
    moved = 0.0
    cpu_adam = nvme = 0.0
    if w.offload_optimizer != "none":
        moved += 4 * part + (b * part if w.offload_param == "none" else 0.0)
        if w.stage == 2 and w.accumulation > 1:
            moved += 2 * b * part * (w.accumulation - 1)
        elif w.stage == 3:
            moved += 2 * b * part * w.accumulation
        on_node = part * min(w.ranks, w.ranks_per_node)
        cpu_adam = on_node / (r.adam_stage3 if w.stage == 3 else r.adam)
        if (
            w.offload_optimizer == "nvme"
        ):  # master and moments are read and written, the gradient both ways too
            nvme += on_node * 16 * (1 / NVME_READ + 1 / NVME_WRITE)
    if w.offload_param != "none":
        moved += 2 * b * w.params / w.ranks * w.accumulation
        if w.offload_param == "nvme":
            nvme += 2 * b * w.params / w.ranks * min(w.ranks, w.ranks_per_node) * w.accumulation / NVME_READ
    samples = w.micro_batch * w.accumulation * w.ranks // w.sharing
    return StepCost(compute, recompute, launch, communication, moved / link, cpu_adam, nvme, samples)
