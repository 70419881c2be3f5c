"""DS6xx: communication: buckets, dtypes, loggers, asynchronous I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put
from dstui.rules.registry import Hit, rule
from dstui.rules.subject import MISSING, Subject, as_int, as_number

ZERO = "/zero_optimization"


@rule(
    "DS601",
    "allgather-bucket-odd",
    Severity.ERROR,
    "init",
    what=N_("An odd allgather_bucket_size at ZeRO stage 1 or 2."),
    why=N_("Each shard must start at a multiple of two elements; the engine asserts it at start."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "allgather_bucket_size": 200000001}}',
    fix=N_("Use an even number."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:389 @ 0.19.8",
)
def allgather_bucket_odd(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/allgather_bucket_size"
    size = s.integer(pointer)
    if s.stage in (1, 2) and size and size % 2:
        yield Hit(
            pointer,
            _("{size} is odd").format(size=size),
            effect=_("the engine stops at start: it must be a multiple of 2"),
            hint=_("use {size}").format(size=size - 1),
            fix=put(pointer, size - 1, there=True, safe=True),
        )


@rule(
    "DS602",
    "reduce-bucket-zero",
    Severity.WARNING,
    "step",
    until="0.19.5",
    what=N_("reduce_bucket_size: 0."),
    why=N_(
        "Every gradient is then reduced by itself: many small messages. From 0.19.6 the value is refused."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}',
    fix=N_("Use 5e8 elements, or less if GPU memory is short."),
    source="deepspeed/runtime/zero/config.py @ 0.19.5, 0.19.6",
    context={"release": "0.19.4"},
)
def reduce_bucket_zero(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/reduce_bucket_size"
    if s.stage and s.integer(pointer) == 0:
        yield Hit(
            pointer,
            _("a bucket of 0 elements"),
            effect=_("each gradient travels alone; 0.19.6 and later refuse the value"),
            hint=_("5e8 is the default"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS603",
    "comms-logger-switched-on-by-presence",
    Severity.SILENT_WRONG,
    "init",
    what=N_("comms_logger with enabled: false, or without enabled."),
    why=N_(
        "DeepSpeed looks only whether the block is there: enabled: false switches the logger on. Every collective is then timed, which slows the run and fills the log."
    ),
    example='{"train_batch_size": 8, "comms_logger": {"enabled": false}}',
    fix=N_("Remove the block to switch the logger off."),
    source="deepspeed/comm/config.py:22, utils/comms_logging.py:79 @ 0.19.8; executed",
)
def comms_logger_switched_on_by_presence(s: Subject) -> Iterator[Hit]:
    pointer = "/comms_logger"
    block = s.get(pointer)
    if isinstance(block, Mapping) and "enabled" in block and not s.flag(pointer + "/enabled"):
        yield Hit(
            pointer + "/enabled",
            _("enabled: false does not switch the communication logger off"),
            effect=_("the logger is on: every collective is timed and kept"),
            hint=_("remove the whole block"),
            fix=drop(pointer, safe=True),
        )


@rule(
    "DS604",
    "communication-dtype-unknown",
    Severity.ERROR,
    "parse",
    what=N_("communication_data_type is none of fp16, bf16, fp32."),
    why=N_(
        "DeepSpeed refuses other names, also float16 or bfloat16. Up to 0.14.0 bf16 had to be spelt bfp16."
    ),
    example='{"train_batch_size": 8, "communication_data_type": "bfloat16"}',
    fix=N_("Write fp16, bf16 or fp32."),
    source="deepspeed/runtime/config.py:230 @ 0.19.8, :264 @ 0.14.0; executed",
)
def communication_dtype_unknown(s: Subject) -> Iterator[Hit]:
    sequence = (
        "/seq_parallel_communication_data_type" if s.at_least("0.16.5") else "/seq_parallel_comm_data_type"
    )
    bf16 = "bf16" if s.at_least("0.14.1") else "bfp16"
    legal = ("fp16", bf16, "fp32")
    near = {
        "float16": "fp16", "half": "fp16", "bfloat16": bf16, "bf16": bf16, "bfp16": bf16, "float32": "fp32",
        "float": "fp32", "torch.float16": "fp16", "torch.bfloat16": bf16, "torch.float32": "fp32",
    }  # fmt: skip
    for pointer in ("/communication_data_type", sequence):
        value = s.get(pointer, None)
        if value is None:
            continue
        name = value.lower() if isinstance(value, str) else value
        if name in legal:
            continue
        meant = near.get(name) if isinstance(name, str) else None
        yield Hit(
            pointer,
            _("{value!r} is not a communication dtype").format(value=value),
            effect=_("the config is refused"),
            hint=_("write {names}").format(names=" / ".join(legal)),
            fix=put(pointer, meant, there=True, safe=True) if meant else None,
        )


@rule(
    "DS605",
    "aio-value-not-positive",
    Severity.ERROR,
    "init",
    what=N_("aio.block_size, queue_depth or the thread count is 0 or negative while NVMe offload is on."),
    why=N_(
        "The block is read without any check; the asynchronous I/O handle then divides by the value or never makes progress."
    ),
    example='{"train_batch_size": 8, "aio": {"block_size": 0}, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}}',
    fix=N_(
        "Use 1048576 (block_size), 8 (queue_depth), 1 (intra_op_parallelism), or measure with ds_nvme_tune."
    ),
    source="deepspeed/runtime/swap_tensor/aio_config.py, csrc/aio @ 0.19.8",
)
def aio_value_not_positive(s: Subject) -> Iterator[Hit]:
    yield from _aio(s, used=True)


@rule(
    "DS606",
    "aio-value-not-positive-unused",
    Severity.WARNING,
    "parse",
    what=N_(
        "aio.block_size, queue_depth or the thread count is 0 or negative in a config without NVMe offload."
    ),
    why=N_(
        "The block is accepted without any check. It is not used here, but switching NVMe offload on would fail."
    ),
    example='{"train_batch_size": 8, "aio": {"block_size": 0}}',
    fix=N_("Use 1048576 (block_size), 8 (queue_depth), 1 (intra_op_parallelism), or remove the block."),
    source="deepspeed/runtime/swap_tensor/aio_config.py @ 0.19.8; executed",
)
def aio_value_not_positive_unused(s: Subject) -> Iterator[Hit]:
    yield from _aio(s, used=False)


def _aio(s: Subject, used: bool) -> Iterator[Hit]:
    nvme = s.stage == 3 and "nvme" in (s.offload("offload_optimizer"), s.offload("offload_param"))
    if nvme is not used:
        return
    threads = "intra_op_parallelism" if s.at_least("0.16.4") else "thread_count"
    for key, usual in (("block_size", 1048576), ("queue_depth", 8), (threads, 1)):
        pointer = f"/aio/{key}"
        value = s.get(pointer)
        number = as_number(value)
        if value is not MISSING and number is not None and number <= 0:
            yield Hit(
                pointer,
                _("aio.{key} must be above 0").format(key=key),
                effect=_("reading and writing the swap files fails") if used else _("not used here"),
                hint=_("usual value: {value}").format(value=usual),
                fix=put(pointer, usual, there=True, safe=False),
            )


@rule(
    "DS607",
    "aio-without-nvme",
    Severity.INFO,
    "init",
    what=N_("An aio block in a config without NVMe offload."),
    why=N_("Only NVMe offload (stage 3) and a script that opens its own I/O handle read it."),
    example='{"train_batch_size": 8, "aio": {"block_size": 1048576}, "zero_optimization": {"stage": 2}}',
    fix=N_("Leave it, or remove it."),
    source="deepspeed/runtime/engine.py aio_config: passed to the swappers @ 0.19.8",
)
def aio_without_nvme(s: Subject) -> Iterator[Hit]:
    nvme = s.stage == 3 and "nvme" in (s.offload("offload_optimizer"), s.offload("offload_param"))
    if isinstance(s.get("/aio"), Mapping) and not nvme:
        yield Hit("/aio", _("aio is read for NVMe offload only, and there is none"))


@rule(
    "DS608",
    "overlap-comm-doubles-bucket",
    Severity.INFO,
    "step",
    needs=("facts.gpus",),
    what=N_("overlap_comm at ZeRO stage 1 or 2 with buckets that are large for the card."),
    why=N_(
        "With overlap_comm two reduce buckets live on the GPU at once: 2 x reduce_bucket_size x 2 bytes, 2 GB at the default."
    ),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 2000000000}}',
    fix=N_("Make reduce_bucket_size smaller, for example 5e7, if GPU memory is short."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:3255 @ 0.19.8",
    context={"gpu": 24 << 30},
)
def overlap_comm_doubles_bucket(s: Subject) -> Iterator[Hit]:
    size = s.integer(ZERO + "/reduce_bucket_size")
    cards = [g.memory_total for g in (s.facts.gpus or ()) if g.memory_total] if s.facts else []
    if s.stage not in (1, 2) or not s.flag(ZERO + "/overlap_comm") or not size or not cards:
        return
    bytes_each = 2 if s.precision("bf16") or s.precision("fp16") else 4
    need = 2 * size * bytes_each
    if need > min(cards) / 8:
        from dstui.units import gib

        pointer = ZERO + "/reduce_bucket_size"
        yield Hit(
            pointer if s.written(pointer) else ZERO + "/overlap_comm",
            _("two reduce buckets take {need} of each {card} card").format(
                need=gib(need), card=gib(min(cards))
            ),
            hint=_("a smaller reduce_bucket_size costs little speed"),
        )


@rule(
    "DS609",
    "allreduce-op-unknown",
    Severity.ERROR,
    "parse",
    since="0.19.6",
    what=N_("gradient_allreduce_op is neither mean nor sum."),
    why=N_("DeepSpeed refuses other values."),
    example='{"train_batch_size": 8, "gradient_allreduce_op": "average"}',
    fix=N_("Write mean or sum."),
    source="deepspeed/runtime/config.py:246 @ 0.19.8",
)
def allreduce_op_unknown(s: Subject) -> Iterator[Hit]:
    pointer = "/gradient_allreduce_op"
    value = s.get(pointer)
    if value is MISSING or (isinstance(value, str) and value.lower() in ("mean", "sum")):
        return
    yield Hit(
        pointer,
        _("{value!r} is neither mean nor sum").format(value=value),
        effect=_("the config is refused"),
        hint=_("mean is the default"),
        fix=drop(pointer, safe=False),
    )


@rule(
    "DS610",
    "sequence-parallel-does-not-divide",
    Severity.ERROR,
    "init",
    since="0.15.0",
    what=N_("sequence_parallel_size does not divide the number of ranks."),
    why=N_(
        "DeepSpeed divides the world size by it to find the data-parallel ranks; a rest makes the batch sum fail or the device mesh impossible."
    ),
    example='{"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 3}',
    fix=N_("Use a divisor of the number of ranks."),
    source="deepspeed/runtime/config.py DeepSpeedConfig.__init__, __init__.py mesh_device @ 0.19.8",
    context={"world_size": 8},
)
def sequence_parallel_does_not_divide(s: Subject) -> Iterator[Hit]:
    pointer = "/sequence_parallel_size"
    size = as_int(s.get(pointer, 1))
    if s.world_known and size and size > 1 and s.world_size % size:
        yield Hit(
            pointer,
            _("{size} does not divide the {world} ranks").format(size=size, world=s.world_size),
            effect=_("the run stops at start"),
            hint=_("use a divisor of {world}").format(world=s.world_size),
        )
