"""DS5xx: pinned buffers, host RAM, cgroup and memlock."""

from __future__ import annotations

from collections.abc import Iterator

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import put
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import MISSING, Subject
from dstui.units import gib

ZERO = "/zero_optimization"
OPTIMIZER = ZERO + "/offload_optimizer"
PARAM = ZERO + "/offload_param"


def pinned_rounded(size: float) -> int:
    """Bytes that one pinned block of ``size`` bytes really takes: torch's host allocator rounds up to a power of two.

    Source: c10 CachingHostAllocator; measured 2.25 -> 4.0 GiB on torch 2.13.
    """
    n = max(1, int(size))
    return 1 << (n - 1).bit_length()


def pinned_blocks(s: Subject, params: int, ranks: int) -> list[float]:
    """Sizes in bytes of the blocks that one rank pins for its offload, ``params`` parameters over ``ranks`` ranks.

    Stages 1/2: fp32 master, fp32 gradients, 16-bit copy (0.17.0+). Stage 3: fp32 gradients and the gradient partition;
    parameters: the flat 16-bit partition. Moments and the stage 3 master are pageable.
    Source: runtime/zero/stage_1_and_2.py __init__, stage3.py _create_fp32_partitions @ 0.19.8; measured with 2 ranks.
    """
    own = params / max(1, ranks)
    blocks: list[float] = []
    if s.offload("offload_optimizer") == "cpu" and s.flag(OPTIMIZER + "/pin_memory"):
        if s.stage in (1, 2):
            blocks += [4 * own, 4 * own] + ([2 * own] if s.at_least("0.17.0") else [])
        elif s.stage == 3:
            blocks += [4 * own, 2 * own]
    if s.stage == 3 and s.offload("offload_param") == "cpu":
        blocks.append(2 * own)
    return blocks


def host_states(s: Subject, params: int) -> float:
    """Bytes of model states that offload keeps in the RAM of all nodes together, without rounding.

    18 per parameter for the optimizer (master 4, moments 8, gradients 4, 16-bit 2), 2 for the parameters.
    Source: as ``pinned_blocks``; Adam's moments by ops/adam/cpu_adam.py.
    """
    size = 0.0
    if s.stage and s.offload("offload_optimizer") == "cpu":
        size += 18.0 * params
    if s.stage == 3 and s.offload("offload_param") == "cpu":
        size += 2.0 * params
    return size


def ranks_per_node(s: Subject) -> int:
    """Ranks that share one host's RAM, with the nodes that the facts know (one when they know none)."""
    nodes = s.facts.nodes if s.facts else 1
    return max(1, s.world_size // max(1, nodes))


@rule(
    "DS501",
    "pin-memory-left-to-default",
    Severity.MEANING_CHANGED,
    "init",
    what=N_("Offload to the CPU or NVMe without pin_memory."),
    why=N_(
        "Its default became true in DeepSpeed 0.19.5 (false before). The same file now pins its host buffers: transfers are faster, but pinned pages cannot be swapped and each block is rounded up to a power of two, so host RAM can nearly double against 0.19.4."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Write pin_memory: true if the host has the RAM, else false."),
    source="deepspeed/runtime/zero/offload_config.py @ 0.19.4 and 0.19.5 (#8207); rounding measured",
)
def pin_memory_left_to_default(s: Subject) -> Iterator[Hit]:
    now = s.at_least("0.19.5")
    for name, pointer in (("offload_optimizer", OPTIMIZER), ("offload_param", PARAM)):
        used = s.stage in (1, 2, 3) if name == "offload_optimizer" else s.stage == 3
        value = s.get(pointer + "/pin_memory")
        if not used or s.offload(name) not in ("cpu", "nvme") or not (value is MISSING or value == "auto"):
            continue
        if not s.written(pointer):
            continue  # the old cpu_offload: its own switch decides
        if now:
            text = _("{block}.pin_memory is true by default since 0.19.5, before it was false").format(
                block=name
            )
            effect = _(
                "host buffers are pinned; each takes up to twice its size in RAM that cannot be swapped"
            )
            params = s.model.params if s.model else None
            if params:
                blocks = pinned_blocks(s, params, s.world_size)
                size = sum(pinned_rounded(b) for b in blocks) * ranks_per_node(s)
                if size:
                    effect = _("about {size} of this host's RAM get pinned").format(size=gib(size))
        else:
            text = _("{block}.pin_memory is false by default here and true from 0.19.5").format(block=name)
            effect = _("after an upgrade the same file pins its host buffers")
        yield Hit(
            pointer,
            text,
            effect=effect,
            hint=_("write pin_memory yourself"),
            fix=put(pointer + "/pin_memory", now, there=value is not MISSING, safe=False),
        )


@rule(
    "DS502",
    "pinned-memory-exceeds-host",
    Severity.ERROR,
    "init",
    what=N_("The buffers that offload needs are larger than the whole host memory."),
    why=N_(
        "The host's RAM, or the cgroup limit if that is tighter, ends the run: an allocation error, or the kernel kills a rank (-9, exit 247) without a message."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("Use pin_memory: false, more nodes, a higher stage without offload, or NVMe."),
    source="deepspeed/runtime/zero/stage_1_and_2.py, stage3.py @ 0.19.8; rounding of pinned blocks measured",
    context={"world_size": 8, "params": 70_000_000_000, "ram": 512 << 30},
)
def pinned_memory_exceeds_host(s: Subject) -> Iterator[Hit | Lacks]:
    yield from _host(s, over="capacity")


@rule(
    "DS503",
    "pinned-memory-exceeds-free",
    Severity.WARNING,
    "init",
    what=N_("The buffers that offload needs are larger than the host memory that is free now."),
    why=N_(
        "Other processes hold the rest of RAM (or of the cgroup). If they do not end first, a rank is killed."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("End what holds the memory, or use pin_memory: false."),
    source="deepspeed/runtime/zero/stage_1_and_2.py, stage3.py @ 0.19.8; rounding of pinned blocks measured",
    context={"world_size": 8, "params": 7_000_000_000, "ram": 512 << 30, "free": 64 << 30},
)
def pinned_memory_exceeds_free(s: Subject) -> Iterator[Hit | Lacks]:
    yield from _host(s, over="free")


def _host(s: Subject, over: str) -> Iterator[Hit | Lacks]:
    offloads = [
        p for n, p in (("offload_optimizer", OPTIMIZER), ("offload_param", PARAM)) if s.offload(n) == "cpu"
    ]
    if not offloads or not s.stage:
        return
    params = (s.model.trained or s.model.params) if s.model else None
    if params is None:
        yield Lacks("model")
        return
    if s.facts is None or s.facts.host.memory_capacity is None:
        yield Lacks("facts.host")
        return
    nodes = max(1, s.facts.nodes)
    per_node = ranks_per_node(s)
    blocks = pinned_blocks(s, params, s.world_size)
    pinned = sum(pinned_rounded(b) for b in blocks) * per_node
    pageable = max(0.0, host_states(s, params) / nodes - sum(blocks) * per_node)
    need = pinned + pageable
    capacity, free = s.facts.host.memory_capacity, s.facts.host.memory_free
    limit = capacity if over == "capacity" else free
    if limit is None or need <= limit or (over == "free" and need > capacity):
        return
    where = _("this host has") if over == "capacity" else _("free now are")
    yield Hit(
        offloads[0] if s.written(offloads[0]) else ZERO,
        _("offload needs {need} of host RAM ({pinned} pinned); {where} {limit}").format(
            need=gib(need), pinned=gib(pinned), where=where, limit=gib(limit)
        ),
        effect=_("a rank is killed by the kernel or stops with an allocation error"),
        hint=_("pin_memory: false saves {size}; or use more nodes, NVMe, or no offload").format(
            size=gib(pinned - sum(blocks) * per_node)
        ),
    )


@rule(
    "DS504",
    "nvme-buffers-exceed-memlock",
    Severity.ERROR,
    "init",
    since="0.19.4",
    what=N_("NVMe offload whose swap buffers are larger than the memlock limit (ulimit -l)."),
    why=N_(
        "Since 0.19.4 the swap buffers are locked with mlock, which the limit counts. Offload to cpu is not affected: it pins through CUDA, which the limit does not count."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}}',
    fix=N_(
        "Raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1), or make buffer_count x buffer_size smaller."
    ),
    source="deepspeed/csrc/aio/common/deepspeed_aio_utils.cpp:125 @ 0.19.4, csrc/pin_memory/page_alloc.cpp:19 @ 0.19.5-0.19.8 (#8212)",
    context={"memlock": 64 << 10},
)
def nvme_buffers_exceed_memlock(s: Subject) -> Iterator[Hit | Lacks]:
    if s.stage != 3 or s.offload("offload_param") != "nvme":
        return
    if s.facts is None or s.facts.host.memlock_soft is None:
        yield Lacks("facts.host.memlock_soft")
        return
    from dstui.facts.model import UNLIMITED

    count, size = s.integer(PARAM + "/buffer_count"), s.integer(PARAM + "/buffer_size")
    if count is None or size is None or s.facts.host.memlock_soft == UNLIMITED:
        return
    need = count * size * 2
    if need > s.facts.host.memlock_soft:
        yield Hit(
            PARAM,
            _("swap buffers of {need} a rank, but ulimit -l allows {limit}").format(
                need=gib(need), limit=gib(s.facts.host.memlock_soft)
            ),
            effect=_("mlock fails at start and the rank aborts"),
            hint=_("run `ulimit -l unlimited` first, or make buffer_count or buffer_size smaller"),
        )


@rule(
    "DS505",
    "pin-memory-false-ignored",
    Severity.NO_EFFECT,
    "init",
    until="0.18.2",
    what=N_("pin_memory: false for the optimizer offload of stages 1 and 2 on an old release."),
    why=N_(
        "Up to 0.18.2 the fp32 master copy is pinned whatever the file says, so the setting saves no RAM."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false}}}',
    fix=N_("Upgrade to 0.18.3 or later."),
    source="deepspeed/runtime/zero/stage_1_and_2.py @ 0.18.2, 0.18.3 (#7689)",
    context={"release": "0.18.2"},
)
def pin_memory_false_ignored(s: Subject) -> Iterator[Hit]:
    pointer = OPTIMIZER + "/pin_memory"
    if s.stage in (1, 2) and s.offload("offload_optimizer") in ("cpu", "nvme") and s.get(pointer) is False:
        yield Hit(
            pointer,
            _("pinned anyway: this release ignores pin_memory: false at stage {stage}").format(stage=s.stage),
            effect=_("the fp32 copy is pinned and rounded up to a power of two"),
            hint=_("upgrade to 0.18.3 or later"),
        )


@rule(
    "DS506",
    "nvme-buffer-too-small",
    Severity.ERROR,
    "step",
    what=N_("offload_param.buffer_size is smaller than the largest parameter partition."),
    why=N_(
        "A swapped parameter must fit one buffer; the largest is usually the embedding, divided by the ranks."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 0}}}',
    fix=N_("Use at least vocabulary x hidden size / ranks; the default is 1e8 elements."),
    source="deepspeed/runtime/swap_tensor/partitioned_param_swapper.py @ 0.19.8",
)
def nvme_buffer_too_small(s: Subject) -> Iterator[Hit]:
    if s.stage != 3 or s.offload("offload_param") != "nvme":
        return
    for key in ("buffer_size", "buffer_count"):
        pointer = f"{PARAM}/{key}"
        if s.integer(pointer) == 0:
            yield Hit(
                pointer,
                _("{key} 0 leaves no buffer to swap through").format(key=key),
                effect=_("the first swap fails"),
                hint=_("remove the key: the defaults are 5 buffers of 1e8 elements"),
            )
    size = s.integer(PARAM + "/buffer_size")
    largest = s.model.largest if s.model else None
    if not size or not largest or not s.world_known:
        return
    need = -(-largest // max(1, s.world_size))
    if need > size:
        pointer = PARAM + "/buffer_size"
        yield Hit(
            pointer if s.written(pointer) else PARAM,
            _("the largest parameter needs a buffer of {need} elements, buffer_size is {size}").format(
                need=need, size=size
            ),
            effect=_("the first swap fails"),
            hint=_(
                "write buffer_size {need} or more; every buffer takes 2 bytes an element of locked RAM"
            ).format(need=need),
            fix=put(pointer, need, there=s.written(pointer), safe=False),
        )
