"""Host RAM of a node and NVMe space: what the offloads pin, what stays pageable, by phase.

Formulas after ``stage_1_and_2.py.__init__``/``initialize_optimizer_states``, ``stage3.py._create_fp32_partitions``/
``initialize_optimizer_states``/``_create_param_groups_fp16_flat_cpu_memory`` and ``swap_tensor/*`` of DeepSpeed
0.19.8. Pinned blocks are rounded up to a power of two by torch's CachingHostAllocator and stay in its cache
when freed. Checked against four offload runs on H200 (pinned exact, peak RSS within 1 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstui.estimate import hardware
from dstui.estimate.replay import Dimensions
from dstui.estimate.settings import Settings

SAVES = ("save", "save_16bit")
"""Phases of ``save_checkpoint`` and ``save_16bit_model``."""
_SHARD = 5_000_000_000
"""Default size of one safetensors shard (``save_pretrained``): what zero.Init loads at a time."""


@dataclass(frozen=True)
class HostNeed:
    """Bytes per node. ``phases`` are peaks of RSS summed over the node's ranks."""

    pinned: int
    pageable: int
    phases: dict[str, int]
    parts: dict[str, int]
    nvme: int
    checkpoint: int
    """Bytes of the files of one ``save_checkpoint``, all nodes."""
    lighter: int
    """Bytes that the processes may have less, where the script imports little."""

    @property
    def peak(self) -> int:
        """Of training itself. Saving is told apart: a run need not save, and it can save less."""
        return self.phases[self.phase]

    @property
    def phase(self) -> str:
        return max((k for k in self.phases if k not in SAVES), key=lambda k: self.phases[k])


def pinned_block(nbytes: int) -> int:
    """Bytes that a pinned block really takes: the next power of two (CachingHostAllocator)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


class _Ledger:
    def __init__(self) -> None:
        self.pinned: dict[str, int] = {}
        self.pageable: dict[str, int] = {}

    def add(self, part: str, nbytes: int, pin: bool, blocks: int = 1) -> None:
        """``blocks`` equal blocks of ``nbytes`` in all."""
        if nbytes <= 0:
            return
        if pin:
            each = pinned_block(-(-nbytes // blocks))
            self.pinned[part] = self.pinned.get(part, 0) + each * blocks
        else:
            self.pageable[part] = self.pageable.get(part, 0) + nbytes

    def total(self) -> int:
        return sum(self.pinned.values()) + sum(self.pageable.values())


def host_need(s: Settings, dims: Dimensions) -> HostNeed:
    """RAM and NVMe of one node."""
    trainable, part, sub_groups = dims.trainable, dims.part, dims.sub_groups
    b = s.element
    total, frozen = sum(trainable), sum(dims.frozen)
    largest = max(trainable, default=0)
    ledger = _Ledger()
    moment = 8 if s.optimizer in ("adam", "lion", "other") else s.moment  # CPU Lion keeps a second state too
    init_extra = step_extra = 0
    nvme = 0
    if s.offload_optimizer != "none" and s.stage in (1, 2):
        always = s.release < (0, 18, 3)  # the master copy was pinned whatever pin_memory said (PR 7689)
        pin = s.pin_optimizer
        ledger.add("master", 4 * part, pin or always)
        ledger.add("grads", 4 * part, pin)
        if s.release >= (0, 17, 0):
            ledger.add("params", b * part, pin or always)
        ledger.add("staging", b * largest, pin)
        if s.accumulation > 1:  # accumulated_grads_in_cpu: one block a parameter of the partition
            for n in _first(trainable, part):
                ledger.add("accumulated grads", b * n, pin)
        ledger.add("moments", moment * part, False)
        # zeros are made pageable, then copied to a pinned block; the bf16 one lives to the end of __init__
        init_extra = ((4 + b) * part if pin else 0) - moment * part
    elif s.offload_optimizer != "none" and s.stage == 3:
        count = len(sub_groups)
        on_cpu = [n for i, n in enumerate(sub_groups) if i >= int((1 - s.ratio) * count)]
        share = sum(on_cpu)
        if s.offload_optimizer == "cpu":
            ledger.add("master", 4 * share, False)
            ledger.add("moments", moment * share, False)
            for n in on_cpu:
                ledger.add("grads", 4 * n, s.pin_optimizer)
            init_extra = 4 * max(on_cpu, default=0) - moment * share
            if s.offload_param == "none":  # the new fp32 values in 16 bits on their way to the GPU
                step_extra = b * max(on_cpu, default=0)
        else:
            widest = max(sub_groups, default=0)
            aligned = -(-widest // 1024) * 1024
            each = 4 * aligned if s.release >= (0, 19, 4) else pinned_block(4 * aligned)
            ledger.pinned["swap buffers"] = each * s.buffer_count
            nvme += (4 + s.moment + 4) * part
            # the first gradient, and moments that are made before they are written (``initialize_optimizer_states``)
            init_extra = (4 + moment) * widest
            if s.offload_param == "none":
                step_extra = b * widest
        ledger.add("grad partitions", s.accumulate * part, s.pin_optimizer)
    if s.offload_param == "cpu" and s.offload_optimizer == "none":
        # the new values come down in fp32: a copy between devices converts after it (aten/native/cuda/Copy.cu)
        step_extra = 4 * max(sub_groups, default=0)
    if s.offload_param == "cpu":
        ledger.add("params", b * part, True)  # the flat buffer is always pinned
        cached = sum(pinned_block(b * -(-n // s.ranks)) if s.pin_param else 0 for n in trainable)
        if s.zero_init and s.pin_param:  # the head had a partition too before it was tied
            cached += pinned_block(b * -(-dims.twice // s.ranks))
        ledger.pinned["pinned cache"] = cached  # the partitions before they moved to the flat buffer
        for n in dims.frozen:  # each keeps its own partition: only trained ones move to the flat buffer
            ledger.add("frozen params", -(-n // s.ranks), s.pin_param)
    elif s.offload_param == "nvme":
        nvme += b * part + -(-frozen // s.ranks)
        kept = min(s.max_in_cpu, part)
        ledger.add("params", b * kept, True)
        buffers = s.param_buffer_count * b * s.param_buffer
        if kept < part:  # new values wait there on their way out, by whole parameters of a sub-group
            buffers += b * min(max(sub_groups, default=0) * s.ranks, total)
        ledger.pinned["param buffers"] = buffers if s.release >= (0, 19, 4) else pinned_block(buffers)
    if s.stage == 3 and s.offload_param == "none":
        init_extra = max(
            init_extra, b * part - ledger.pageable.get("moments", 0) - sum(ledger.pinned.values())
        )
    ranks = min(s.processes, s.ranks_per_node)
    stay = b * part + sum(v.get("frozen params", 0) for v in (ledger.pinned, ledger.pageable))
    load = _load(s, dims, stay if s.offload_param != "none" else 0)
    kept_total = ledger.total()
    compiles = hardware.RANK_RSS_COMPILE if s.optimizer == "muon" else 0
    phases = {
        "load": load * ranks,
        "init": (hardware.RANK_RSS_INIT + max(0, kept_total + init_extra)) * ranks,
        "step": (hardware.RANK_RSS + compiles + kept_total + step_extra) * ranks,
    }
    # torch.save brings one storage at a time to the host: the largest is one fp32 partition of each rank, at
    # stage 0 rank 0's whole copy
    if s.stage == 0:
        storage = 4 * total
    elif s.offload_optimizer == "none":
        storage = 4 * max(sub_groups, default=0) * ranks
    else:
        storage = b * total if s.stage < 3 else 0
    phases["save"] = phases["step"] - step_extra * ranks + storage
    if s.gather_on_save:  # rank 0 holds the whole model (``_zero3_consolidated_16bit_state_dict``)
        phases["save_16bit"] = phases["step"] - step_extra * ranks + b * total + frozen
    parts = {k: v * ranks for k, v in {**ledger.pinned}.items()}
    for k, v in ledger.pageable.items():
        parts[k] = parts.get(k, 0) + v * ranks
    parts["processes"] = hardware.RANK_RSS * ranks
    light = hardware.RANK_RSS_LIGHT if s.offload_optimizer == "none" else hardware.RANK_RSS_LIGHT_OFFLOAD
    return HostNeed(
        pinned=sum(ledger.pinned.values()) * ranks,
        pageable=(sum(ledger.pageable.values()) + hardware.RANK_RSS) * ranks,
        phases=phases,
        parts=parts,
        checkpoint=_checkpoint(s, dims),
        nvme=nvme * ranks,
        lighter=(hardware.RANK_RSS - light) * ranks,
    )


def _load(s: Settings, dims: Dimensions, shards: int) -> int:
    """Peak of one rank while the model loads; ``shards`` = bytes of its parameters that stay in RAM."""
    base = hardware.RANK_RSS_LOAD + (hardware.RANK_RSS_TOGETHER if s.processes > 1 else 0)
    if (
        s.quant != "none"
    ):  # the 16-bit file is mapped, its pages count as they are read, and one tensor is copied
        return base + 2 * (dims.model + dims.largest)
    if s.load_on_gpu:
        return base + (shards if s.zero_init else 0)
    if s.zero_init:
        return base + min(s.load * dims.model, _SHARD) + shards
    return base + s.load * (dims.model + dims.twice)


def _checkpoint(s: Settings, dims: Dimensions) -> int:
    """Master copy and moments of what trains, and the model in 16 bits where a rank has it whole (stages 0-2:
    ``mp_rank_00_model_states.pt``; 14 and 12 bytes a parameter measured at stages 2 and 3 with Adam). Frozen weights
    are part of it unless the script leaves them out."""
    total, frozen = sum(dims.trainable), sum(dims.frozen)
    states = s.moment + (4 if s.element == 2 or s.stage else 0)
    return states * total + frozen + (s.element * total if s.stage < 3 else 0)


def _first(sizes: Sequence[int], elements: int) -> list[int]:
    """The first parameters until they reach ``elements``."""
    out: list[int] = []
    seen = 0
    for n in sizes:
        if seen >= elements:
            break
        out.append(n)
        seen += n
    return out
