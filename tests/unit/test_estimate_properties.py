"""What must hold for any model, machine and setting."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstui.errors import DstuiError
from dstui.estimate.families import inventory, shape_from_config
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.memory import PLACEMENTS, estimate, grid, placed
from dstui.estimate.model import load_model
from dstui.estimate.result import Estimate
from dstui.facts.describe import describe
from dstui.facts.model import Cgroup, Facts, Gpu, Host, Storage
from dstui.units import GiB

MODELS = ("qwen2.5-0.5b", "pythia-160m", "gemma-2-2b", "gpt2", "phi-2", "qwen3-0.6b", "smollm2-135m")
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
         "vocab_size": 32000, "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
MIXTURE = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "glm", "glm4", "qwen2"), SMALL),
    "gpt_neox": {**SMALL, "num_key_value_heads": 8},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 512},
    "qwen3_moe": MIXTURE,
    "deepseek_v3": {**SMALL, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                    "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "num_key_value_heads": 8},
}  # fmt: skip
"""One small model of every family."""
STATES = ("params", "grads", "optimizer")


def machine(n: int, size: int = 80 * GiB, ram: int | None = 512 * GiB, nodes: int = 1) -> Facts:
    gpus = tuple(Gpu(index=i, memory_total=size, memory_free=size) for i in range(n))
    return Facts(gpus=gpus, nodes=nodes, host=Host(ram_total=ram, ram_available=ram))


def config(stage: int, optimizer: str = "none", param: str = "none", **zero: Any) -> dict[str, Any]:
    base = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": dict(zero)}
    return placed(base, stage, optimizer, param)


def run(shape: ModelShape, training: Training, data: dict[str, Any], facts: Facts) -> Estimate:
    return estimate(shape, training, data, facts, release="0.19.8", changes=False)


def allocated(e: Estimate) -> int:
    assert e.gpu.allocated is not None
    return e.gpu.allocated.expected


trainings = st.builds(
    Training,
    micro_batch=st.integers(1, 4),
    seq=st.sampled_from((128, 512, 1000, 2048)),
    checkpointing=st.booleans(),
    attention=st.sampled_from(("sdpa", "eager")),
    loss=st.sampled_from(("standard", "standard", "chunked", "fused")),
    reentrant=st.booleans(),
    quant=st.sampled_from(("none", "none", "none", "nf4", "int8")),
    lora_rank=st.sampled_from((None, None, 8)),
    zero_init=st.booleans(),
)
models = st.sampled_from(MODELS).map(load_model) | st.sampled_from(sorted(CONFIGS)).map(
    lambda kind: shape_from_config({"model_type": kind, **CONFIGS[kind]}, kind, "test")
)


@settings(max_examples=15, deadline=None)
@given(models, trainings, st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4)))
def test_more_gpus_never_need_more_per_gpu(
    shape: ModelShape, training: Training, stage: int, ranks: int
) -> None:
    few = run(shape, training, config(stage), machine(ranks * 2))
    many = run(shape, training, config(stage), machine(ranks * 4))
    # partitions are padded and a gather buffer may be one parameter larger: 1 % of slack
    assert allocated(many) <= allocated(few) * 1.01


@settings(max_examples=15, deadline=None)
@given(models, trainings, st.sampled_from((2, 4, 8)))
def test_a_higher_stage_never_needs_more_states(shape: ModelShape, training: Training, ranks: int) -> None:
    def rest(stage: int) -> int:
        e = run(shape, training, config(stage), machine(ranks))
        save = next(p for p in e.gpu.phases if p.phase == "save")
        return sum(save.parts.get(part, 0) for part in ("params", "optimizer"))

    sizes = [rest(stage) for stage in (0, 1, 2, 3)]
    assert all(b <= a * 1.001 + (1 << 24) for a, b in itertools.pairwise(sizes)), sizes


@settings(max_examples=15, deadline=None)
@given(models, trainings, st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 8)))
def test_offload_never_needs_more_gpu(shape: ModelShape, training: Training, stage: int, ranks: int) -> None:
    def states(e: Estimate) -> int:
        save = next(p for p in e.gpu.phases if p.phase == "save")
        return sum(save.parts.get(part, 0) for part in STATES)

    without = run(shape, training, config(stage), machine(ranks))
    with_it = run(shape, training, config(stage, "cpu"), machine(ranks))
    assert states(with_it) <= states(without)
    if training.lora_rank is None:
        assert allocated(with_it) <= allocated(without)


@settings(max_examples=15, deadline=None)
@given(models, trainings, st.sampled_from(PLACEMENTS), st.sampled_from((1, 2, 8)))
def test_parts_sum_and_ranges_are_ordered(
    shape: ModelShape, training: Training, placement: tuple[int, str, str], ranks: int
) -> None:
    e = run(shape, training, config(*placement), machine(ranks))
    assert e.gpu.allocated and e.gpu.reserved and e.gpu.device and e.host.peak
    assert max(p.total for p in e.gpu.phases) == e.gpu.allocated.expected
    assert all(n > 0 for p in e.gpu.phases for n in p.parts.values())
    assert e.gpu.allocated.expected <= e.gpu.reserved.expected <= e.gpu.device.expected
    for r in (e.gpu.allocated, e.gpu.reserved, e.gpu.device, e.host.peak):
        assert 0 < r.low <= r.expected <= r.high
    assert e.host.pinned is not None and e.host.pageable is not None
    assert sum(e.host.parts.values()) == e.host.pinned + e.host.pageable


@settings(max_examples=10, deadline=None)
@given(models, st.sampled_from((0, 1, 2, 3)), st.booleans())
def test_memory_grows_with_the_batch(shape: ModelShape, stage: int, checkpointing: bool) -> None:
    sizes = [
        allocated(
            run(
                shape,
                Training(micro_batch=m, seq=512, checkpointing=checkpointing),
                config(stage),
                machine(2),
            )
        )
        for m in (1, 2, 4, 8)
    ]
    # each tensor's block may be up to 1 MiB larger than asked, depending on what is cached: 1 % of slack
    assert all(b >= 0.99 * a for a, b in itertools.pairwise(sizes)), sizes


@settings(max_examples=15, deadline=None)
@given(models, trainings, st.sampled_from(PLACEMENTS))
def test_a_missing_fact_is_never_a_confident_answer(
    shape: ModelShape, training: Training, placement: tuple[int, str, str]
) -> None:
    unknown_gpus = Facts(gpus=None, host=Host(ram_total=512 * GiB, ram_available=512 * GiB))
    e = run(shape, training, config(*placement), unknown_gpus)
    assert e.verdict == "unknown" and e.reason
    no_size = Facts(gpus=(Gpu(index=0),), host=Host(ram_total=512 * GiB, ram_available=512 * GiB))
    e = run(shape, training, config(*placement), no_size)
    assert e.verdict == "unknown" and e.reason
    for host in (Host(), Host(ram_total=None, ram_available=None, swap_total=GiB)):
        e = run(shape, training, config(*placement), dataclasses.replace(machine(1, 10_000 * GiB), host=host))
        assert e.verdict == "unknown" and e.reason
    few = estimate(
        shape,
        training,
        config(*placement),
        machine(2, 10_000 * GiB),
        release="0.19.8",
        world_size=8,
        changes=False,
    )
    assert few.verdict == "unknown" and few.reason and "8" in few.reason


WHOLE = Facts(
    gpus=tuple(
        Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_total=80 * GiB, memory_free=79 * GiB,
            memory_reserved=GiB // 2, compute_capability=(9, 0))
        for i in range(2)
    ),
    host=Host(ram_total=512 * GiB, ram_available=500 * GiB, cgroup=Cgroup(version=2, limit=400 * GiB, usage=9 * GiB)),
    storage=(Storage(path="/nvme", free=4096 * GiB, writable=True, rotational=False, o_direct=True),),
)  # fmt: skip


def without(what: str) -> Facts:
    """``WHOLE`` with one fact missing."""
    room, _dot, name = what.rpartition(".")
    gone: dict[str, Any] = dict.fromkeys(name.split("+"))
    host, storage, gpus = WHOLE.host, WHOLE.storage, WHOLE.gpus or ()
    if what == "gpus":
        return dataclasses.replace(WHOLE, gpus=None)
    if room == "host":
        host = dataclasses.replace(host, **gone)
    elif room == "cgroup":
        assert host.cgroup is not None
        host = dataclasses.replace(host, cgroup=dataclasses.replace(host.cgroup, **gone))
    elif room == "storage":
        storage = (dataclasses.replace(storage[0], **gone),)
    else:
        gpus = (gpus[0], dataclasses.replace(gpus[1], **gone))
    return dataclasses.replace(WHOLE, host=host, storage=storage, gpus=gpus)


@pytest.mark.parametrize(
    "what", ["gpus", "memory_free", "memory_total+memory_free", "host.ram_available", "cgroup.usage", "storage.free",
             "storage.writable"]
)  # fmt: skip
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_surely_fits_where_one_fact_is_missing(what: str, stage: int) -> None:
    nvme = "storage" in what
    data = config(3, "nvme", "nvme") if nvme else config(stage)
    shape, training = load_model("qwen2.5-0.5b"), Training(seq=512)
    assert run(shape, training, data, WHOLE).verdict == "fits"
    e = run(shape, training, data, without(what))
    assert e.verdict == "unknown" and e.reason
    if what != "gpus":  # what is too large for all that there can be does not fit all the same
        large = config(0) if not nvme else config(3, "nvme", "nvme")
        assert run(load_model("llama-2-70b"), training, large, without(what)).verdict in ("no", "unknown")


def test_other_missing_facts_widen_the_range_only() -> None:
    shape, training = load_model("qwen2.5-0.5b"), Training(seq=512)
    full = run(shape, training, config(2), WHOLE).gpu.device
    for what in ("compute_capability", "memory_reserved", "name"):
        part = run(shape, training, config(2), without(what)).gpu.device
        assert full and part and part.high - part.low >= full.high - full.low and part.high >= full.high


def test_a_multimodal_model_has_a_wide_range_and_says_so() -> None:
    """Only its language part is counted."""
    text = {"model_type": "llama", **CONFIGS["llama"]}
    plain = shape_from_config(text, "text", "test")
    both = shape_from_config(
        {"model_type": "llava", "text_config": text, "vision_config": {}}, "both", "test"
    )
    assert both.params == plain.params
    one, other = (run(shape, Training(seq=512), config(2), machine(1)) for shape in (plain, both))
    assert one.gpu.allocated and other.gpu.allocated
    assert one.gpu.allocated.expected == other.gpu.allocated.expected
    assert other.gpu.allocated.high >= 1.4 * one.gpu.allocated.expected
    assert any("multimodal" in text for text in other.assumptions)


def test_cards_that_differ_are_judged_by_the_smallest() -> None:
    assert WHOLE.gpus is not None
    small = dataclasses.replace(
        WHOLE.gpus[1], memory_total=24 * GiB, memory_free=23 * GiB, compute_capability=(7, 5)
    )
    for gpus in ((WHOLE.gpus[0], small), (small, WHOLE.gpus[0])):
        e = run(load_model("llama-2-7b"), Training(), config(2), dataclasses.replace(WHOLE, gpus=gpus))
        assert e.verdict == "no" and e.gpu.capacity == 23 * GiB
        assert any("the cards differ" in text for text in e.assumptions)


def test_a_described_machine_without_ram_is_asked_about_its_cards() -> None:
    shape, facts = load_model("qwen2.5-0.5b"), describe("1x24GiB")
    e = run(shape, Training(seq=512), config(2), facts)
    assert e.verdict == "fits" and any("host RAM is not known" in text for text in e.assumptions)
    e = run(shape, Training(seq=512), config(2, "cpu"), facts)
    assert e.verdict == "unknown" and e.reason


def test_the_driver_s_reserve_counts_on_one_side_only() -> None:
    """What is free leaves it out where the driver tells it apart, so what is needed does as well."""
    shape, training = load_model("qwen2.5-0.5b"), Training(seq=512)
    total, share = 24 * GiB, GiB // 2
    apart = Gpu(index=0, memory_total=total, memory_free=total - share, memory_reserved=share)
    one = run(shape, training, config(2), Facts(gpus=(apart,), host=machine(1).host))
    other = run(shape, training, config(2), machine(1, total))
    assert one.gpu.device and other.gpu.device and one.gpu.capacity and other.gpu.capacity
    assert other.gpu.device.expected - one.gpu.device.expected == share
    assert other.gpu.capacity - one.gpu.capacity == share


def test_states_are_the_textbook_ones() -> None:
    """16 bytes a parameter at stage 0-2 on one rank, 16 / ranks at stage 3 (bf16, Adam)."""
    shape = load_model("llama-2-7b")
    training = Training(micro_batch=1, seq=512)
    for stage, ranks, each in ((0, 1, 14), (1, 4, 2 + 12 / 4), (2, 8, 2 + 12 / 8), (3, 8, 16 / 8)):
        data = config(stage, stage3_param_persistence_threshold=0, reduce_bucket_size=1000)
        e = run(shape, training, data, machine(ranks))
        save = next(p for p in e.gpu.phases if p.phase == "save")
        states = sum(save.parts.get(part, 0) for part in STATES)
        assert abs(states / shape.params - each) < 0.01


def test_grid_has_every_cell_once_and_agrees_with_single_estimates() -> None:
    shape, training, facts = load_model("qwen2.5-0.5b"), Training(micro_batch=1, seq=512), machine(2)
    cells = grid(shape, training, config(2), facts, release="0.19.8")
    assert [(c.stage, c.offload_optimizer, c.offload_param) for c in cells] == list(PLACEMENTS)
    for c in cells:
        alone = run(shape, training, config(c.stage, c.offload_optimizer, c.offload_param), facts)
        assert alone == c.estimate


def test_inventory_sums_to_the_shape() -> None:
    for name in MODELS:
        shape = load_model(name)
        assert sum(n for _name, n in inventory(shape).modules()) == shape.params
        assert inventory(shape).largest == max(inventory(shape).parameters())


ABSURD: dict[str, Facts] = {
    "no memory": Facts(gpus=(Gpu(index=0, memory_total=0, memory_free=0),), host=Host(ram_total=512 * GiB)),
    "more free than there is": Facts(
        gpus=(Gpu(index=0, memory_total=80 * GiB, memory_free=90 * GiB),), host=Host(ram_total=512 * GiB)
    ),
    "bytes for kilobytes": Facts(
        gpus=(Gpu(index=0, memory_total=80 * GiB << 20, memory_free=80 * GiB << 20),),
        host=Host(ram_total=512 * GiB),
    ),
    "negative": Facts(gpus=(Gpu(index=0, memory_total=-1, memory_free=-1),), host=Host(ram_total=512 * GiB)),
}


@pytest.mark.parametrize("what", list(ABSURD))
def test_a_wrong_fact_is_said_and_not_used(what: str) -> None:
    e = run(load_model("qwen2.5-0.5b"), Training(seq=512), config(2), ABSURD[what])
    assert e.verdict == "unknown" and e.reason
    assert any("cannot be right" in text for text in e.assumptions)


@pytest.mark.parametrize(("total", "available"), [(8 * GiB, 9 * GiB), (-5, 1), (1 << 60, 1 << 59)])
def test_wrong_host_memory_is_not_compared(total: int, available: int) -> None:
    facts = Facts(gpus=machine(1).gpus, host=Host(ram_total=total, ram_available=available))
    e = run(load_model("qwen2.5-0.5b"), Training(seq=512), config(2, "cpu"), facts)
    assert e.verdict == "unknown" and e.host.capacity is None
    assert any("cannot be right" in text for text in e.assumptions)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq": 0},
        {"seq": -5},
        {"micro_batch": 0},
        {"sequence_parallel": 0},
        {"lora_rank": -1},
        {"seq": 10**12},
    ],
)
def test_an_impossible_script_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(DstuiError):
        run(load_model("qwen2.5-0.5b"), Training(**wrong), config(2), machine(1))  # type: ignore[arg-type]


def test_an_unknown_card_has_the_widest_range() -> None:
    def width(capability: tuple[int, int] | None) -> int:
        gpus = (Gpu(index=0, memory_total=80 * GiB, memory_free=80 * GiB, compute_capability=capability),)
        e = run(
            load_model("qwen2.5-0.5b"), Training(seq=512), config(2), Facts(gpus=gpus, host=machine(1).host)
        )
        assert e.gpu.device is not None
        return e.gpu.device.high - e.gpu.device.low

    assert width(None) > width((9, 0)) and width((8, 0)) > width((9, 0))


def test_unmeasured_families_have_wider_ranges() -> None:
    def width(kind: str) -> float:
        shape = shape_from_config({"model_type": kind, **CONFIGS[kind]}, kind, "test")
        a = run(shape, Training(seq=512), config(2), machine(1)).gpu.allocated
        assert a is not None
        return (a.high - a.low) / a.expected

    assert width("llama") < width("glm4") < width("mixtral")
    # of a size alone the states are known, what depends on the batch is not
    for training, other in ((Training(seq=512), "glm4"), (Training(seq=4096, lora_rank=8), "mixtral")):
        guess = run(load_model("7B"), training, config(2), machine(1)).gpu.allocated
        assert guess is not None
        assert (guess.high - guess.low) / guess.expected > width(other)


@settings(max_examples=12, deadline=None)
@given(models, trainings, st.sampled_from((1, 2, 3)))
def test_ranks_that_share_a_sequence_need_less(shape: ModelShape, training: Training, stage: int) -> None:
    if training.attention == "eager":
        return

    def activations(e: Estimate) -> int:
        forward = next(p for p in e.gpu.phases if p.phase == "forward")
        return sum(forward.parts.get(k, 0) for k in ("activations", "logits"))

    alone = run(shape, training, config(stage), machine(4))
    shared = run(shape, dataclasses.replace(training, sequence_parallel=2), config(stage), machine(4))
    # keys of fewer heads than ranks are repeated, and tensors are rounded: 1 % of slack. Gradients travel in fp32.
    assert activations(shared) <= activations(alone) * 1.01


@settings(max_examples=12, deadline=None)
@given(models, trainings, st.sampled_from((0, 1, 2)))
def test_ranks_that_share_layers_need_less(shape: ModelShape, training: Training, stage: int) -> None:
    data = {**config(stage), "tensor_parallel": {"autotp_size": 2}}
    alone = run(shape, training, config(stage), machine(2))
    shared = run(shape, training, data, machine(2))
    save = next(p for p in shared.gpu.phases if p.phase == "save")
    whole = next(p for p in alone.gpu.phases if p.phase == "save")
    if stage == 0:  # above, the states are divided among the same two ranks either way
        assert sum(save.parts.values()) <= sum(whole.parts.values()) * 1.01
    assert save.parts["params"] <= whole.parts["params"] * 1.01


def test_a_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(DstuiError, match="does not divide"):
        data = {**config(1), "tensor_parallel": {"autotp_size": 3}}
        run(load_model("qwen2.5-0.5b"), Training(seq=512), data, machine(4))


def test_losses_are_ordered() -> None:
    """A long sequence of a large vocabulary: no fp32 logits, then no logits at all."""
    sizes = []
    for loss in ("standard", "chunked", "fused"):
        e = run(load_model("qwen2.5-0.5b"), Training(seq=16384, loss=loss), config(2), machine(8))  # type: ignore[arg-type]
        sizes.append(max(p.total for p in e.gpu.phases if p.phase in ("forward", "backward")))
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_checkpoint_on_disk() -> None:
    """14 bytes a parameter at stage 2 and 12 at stage 3 were measured with Adam (bf16)."""
    shape = load_model("smollm2-360m")
    for stage, each in ((2, 14), (3, 12)):
        e = run(shape, Training(seq=512), config(stage), machine(1))
        assert e.host.checkpoint == each * shape.params


def test_bf16_without_zero_before_its_own_gradients() -> None:
    """Up to 0.17.5 it was BF16_Optimizer: whole fp32 gradients, states split over the ranks."""
    shape = load_model("smollm2-360m")

    def rest(release: str) -> int:
        e = estimate(shape, Training(seq=512), config(0), machine(4), release=release, changes=False)
        return sum(next(p for p in e.gpu.phases if p.phase == "save").parts.get(k, 0) for k in STATES)

    assert rest("0.17.5") == pytest.approx((2 + 4 + 12 / 4) * shape.params, rel=0.01)
    assert rest("0.17.6") == pytest.approx(14 * shape.params, rel=0.01)


def test_buckets_lay_beside_the_logits_before_0_18_4() -> None:
    """``backward_prologue`` made them; later the first gradient does, when the loss is done."""
    shape, training = load_model("qwen2.5-0.5b"), Training(seq=8192)

    def peak(release: str) -> int:
        e = estimate(shape, training, config(2), machine(1), release=release, changes=False)
        return next(p for p in e.gpu.phases if p.phase == "backward").total

    bucket = 2 * 500_000_000
    assert peak("0.18.3") - peak("0.18.4") == pytest.approx(bucket, rel=0.05)
