"""What a release makes of a config: the cases people meet. tests/real compares with the package itself."""

from __future__ import annotations

from typing import Any

import pytest

from dstui.config.resolve import Resolved, resolve
from tests.real.config_mutations import sample


def of(data: dict[str, Any], world: int = 1, release: str = "0.19.8", **more: Any) -> Resolved:
    return resolve(data, release=release, world_size=world, **more)


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ((64, 2, 4), 8, [64, 2, 4]),
        ((64, 2, None), 8, [64, 2, 4]),
        ((64, None, 4), 8, [64, 2, 4]),
        ((None, 2, 4), 8, [64, 2, 4]),
        ((64, None, None), 8, [64, 8, 1]),
        ((None, 2, None), 8, [16, 2, 1]),
        ((16.0, 2.0, None), 2, [16.0, 2.0, 4.0]),
        ((True, None, None), 1, [True, 1, 1]),
    ],
)
def test_batch_sizes_are_derived_as_deepspeed_does(
    sizes: tuple[Any, Any, Any], world: int, expected: list[Any]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = of({n: v for n, v in zip(names, sizes, strict=True) if v is not None}, world)
    assert found.verdict == "accepted" and found.batch is not None
    values = list(found.batch.values())
    assert values == expected and list(map(type, values)) == list(map(type, expected))


@pytest.mark.parametrize(
    ("data", "world", "pointer", "kind", "words"),
    [
        ({}, 1, "", "batch-missing", "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 2}, 1, "", "batch-missing", "train_batch_size"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 1, "/train_batch_size", "batch", "10 is not micro batch 4"),
        ({"train_batch_size": 2}, 4, "/train_batch_size", "batch", "comes out as 0"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}, 2, "/train_batch_size", "batch", "gradient_accumulation_steps comes out as 0"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0}, 1, "/train_micro_batch_size_per_gpu", "batch", "0"),
        ({"train_batch_size": "8"}, 1, "/train_batch_size", "batch", "number"),
        ({"train_batch_size": 8, "sequence_parallel_size": 0}, 2, "/sequence_parallel_size", "type", "0"),
    ],
)  # fmt: skip
def test_wrong_batch_sizes(data: dict[str, Any], world: int, pointer: str, kind: str, words: str) -> None:
    found = of(data, world)
    assert found.verdict == "rejected" and found.problem is not None
    assert (found.problem.pointer, found.problem.kind) == (pointer, kind)
    assert words in found.problem.message


def test_sequence_parallel_divides_the_ranks_and_makes_floats() -> None:
    found = of({"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4}, 8)
    assert found.batch is not None and found.batch["train_batch_size"] == 4.0
    assert isinstance(found.batch["train_batch_size"], float)


def test_tensor_parallel_does_not() -> None:
    found = of({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}, 8)
    assert found.batch is not None and found.batch["train_batch_size"] == 16


def test_defaults_of_the_release() -> None:
    data = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    old, new = of(data, release="0.19.4"), of(data)
    assert (old.pin_param, new.pin_param) == (False, True)
    assert new.pin_optimizer is None and new.offload_optimizer == "none" and new.offload_param == "cpu"
    assert new.value("/zero_optimization/overlap_comm") is True
    assert of({"train_batch_size": 1}).value("/zero_optimization/overlap_comm") is False
    size = new.value("/zero_optimization/reduce_bucket_size")
    assert size == 500_000_000 and type(size) is int
    assert new.value("/zero_optimization/stage3_prefetch_bucket_size") == 50_000_000
    assert new.value("/zero_optimization/stage3_param_persistence_threshold") == 100_000
    assert new.value("/gradient_clipping") == 1.0 and new.value("/steps_per_print", 7) is None
    assert new.value("/nothing", "x") == "x" and new.value("/zero_optimization/nothing") is None
    assert new.precision == "fp32" and new.stage == 3


def test_old_names_are_converted() -> None:
    found = of(
        {
            "train_batch_size": 1,
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": True,
                "cpu_offload_param": False,
                "prefetch_bucket_size": "7",
                "stage3_gather_fp16_weights_on_model_save": True,
            },
        }
    )
    assert found.accepted and found.offload_optimizer == "cpu" and found.offload_param == "none"
    assert found.pin_optimizer is True and found.value("/zero_optimization/stage3_prefetch_bucket_size") == 7
    assert found.value("/zero_optimization/prefetch_bucket_size") == 7
    assert found.value("/zero_optimization/stage3_gather_16bit_weights_on_model_save") is True
    off = of({"train_batch_size": 1, "zero_optimization": {"stage": 2, "cpu_offload": False}})
    assert off.accepted and off.offload_optimizer == "none"


@pytest.mark.parametrize(
    ("block", "pointer", "kind"),
    [
        ({"zero_optimization": {"stage": 4}}, "/zero_optimization/stage", "choice"),
        ({"zero_optimization": {"foo": 1}}, "/zero_optimization/foo", "unknown-key"),
        ({"zero_optimization": {"offload_param": {"pin": 1}}}, "/zero_optimization/offload_param/pin", "unknown-key"),
        ({"zero_optimization": None}, "/zero_optimization", "block-type"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, "/zero_optimization/cpu_offload", "deprecated-and-new"),
        ({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}, "/zero_optimization/prefetch_bucket_size", "two-names"),
        ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "/zero_optimization/compute_grad_norm", "combination"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.3}}}, "/zero_optimization/offload_optimizer/ratio", "combination"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "/zero_optimization/reduce_bucket_size", "bound"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "/fp16/enabled", "combination"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "/fp16/min_loss_scale", "bound"),
        ({"bf16": {"bf16_optimizer_states": True}}, "/bf16/bf16_optimizer_states", "combination"),
        ({"amp": None}, "/amp", "removed"),
        ({"zero_optimization": {"mics_shard_size": -1}}, "/zero_optimization/mics_shard_size", "removed"),
        ({"communication_data_type": "float16"}, "/communication_data_type", "choice"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "/gradient_allreduce_op", "combination"),
        ({"optimizer": "AdamW"}, "/optimizer", "block-type"),
        ({"checkpoint": {"tag_validation": "x"}}, "/checkpoint/tag_validation", "choice"),
        ({"data_types": {"keep_in_fp32_modules": [1]}}, "/data_types/keep_in_fp32_modules", "type"),
        ({"wall_clock_breakdown": "yes"}, "/wall_clock_breakdown", "type"),
        ({"aio": []}, "/aio", "block-type"),
    ],
)  # fmt: skip
def test_refusals_name_the_culprit(block: dict[str, Any], pointer: str, kind: str) -> None:
    found = of({"train_batch_size": 1, **block})
    assert found.verdict == "rejected"
    assert [(p.pointer, p.kind) for p in found.problems] == [(pointer, kind)]


def test_unknown_keys_carry_the_names_that_are_known() -> None:
    problem = of({"train_batch_size": 1, "zero_optimization": {"stge": 1}}).problem
    assert problem is not None and "stage" in problem.params["known"]


def test_the_first_problem_is_deepspeeds_own_and_the_rest_is_listed() -> None:
    found = of({"train_batch_size": "x", "fp16": {"y": 1}, "amp": {}, "zero_optimization": {"z": 1}})
    assert [p.pointer for p in found.problems] == [
        "/amp",
        "/zero_optimization/z",
        "/fp16/y",
        "/train_batch_size",
    ]


def test_auto_is_dropped_by_deepspeed_itself() -> None:
    found = of({"train_batch_size": 1, "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}})
    assert found.accepted and found.stage == 0 and found.precision == "fp32"
    assert of({"train_batch_size": "auto"}).verdict == "rejected"


def test_auto_stays_open_for_hugging_face_without_arguments() -> None:
    data = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    found = of(data, 4, engine="hf")
    assert found.accepted and found.batch is None and found.precision is None
    assert found.value("/zero_optimization/reduce_bucket_size") is None and "/bf16/enabled" in found.open
    half = of({**data, "train_batch_size": 32}, 4, engine="hf")
    assert half.verdict == "unknown" and half.problem is not None and half.problem.kind == "open"
    broken = of({**data, "fp16": {"x": 1}}, 4, engine="hf")
    assert broken.verdict == "rejected"


def test_auto_is_filled_from_training_arguments() -> None:
    data = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    args = {"per_device_train_batch_size": 2, "bf16": True, "hidden_size": 100}
    found = of(data, 4, engine="hf", args=args)
    assert found.batch == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    zero = found.value("/zero_optimization")
    assert (found.precision, zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (
        "bf16",
        10_000,
        9_000,
    )
    assert data["train_batch_size"] == "auto"  # the caller's data is not touched
    clash = of({**data, "train_micro_batch_size_per_gpu": 4}, 4, engine="hf", args=args)
    assert clash.problem is not None and clash.problem.kind == "mismatch"
    assert clash.problem.pointer == "/train_micro_batch_size_per_gpu"


def test_a_release_without_schema_gets_no_verdict_and_no_values() -> None:
    found = of({"train_batch_size": 1, "zero_optimization": {"stage": 3}}, release="0.13.5")
    assert found.verdict == "unknown" and found.effective is None and found.batch is None
    assert found.stage is None and found.precision is None and found.offload_param is None
    assert found.problem is not None and found.problem.kind == "release"


def test_elasticity_of_0_19_4_sets_the_sizes() -> None:
    block = {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "min_gpus": 1,
        "max_gpus": 10000,
        "version": 0.1,
    }
    found = of({"elasticity": block}, 4, "0.19.4")
    assert found.accepted and found.batch is not None
    assert found.batch["train_batch_size"] == 1680 and found.batch["train_micro_batch_size_per_gpu"] == 6
    assert of({"elasticity": block, "train_batch_size": 8}, 4, "0.19.4").verdict == "rejected"
    assert of({"elasticity": block}, 4, "0.19.8").verdict == "rejected"


@pytest.mark.parametrize("release", ["0.19.4", "0.19.8"])
def test_no_config_crashes_it(release: str) -> None:
    from dstui.config.document import ConfigUnreadable, Document

    seen = set()
    for world, text in sample(release, 1500, seed=3):
        try:
            data = Document.parse(text).data
        except ConfigUnreadable:
            continue
        for engine in ("deepspeed", "hf"):
            found = resolve(data, release=release, world_size=world, engine=engine)
            seen.add(found.verdict)
            for problem in found.problems:
                assert problem.message and (problem.pointer == "" or problem.pointer.startswith("/"))
    assert {"accepted", "rejected"} <= seen


@pytest.mark.parametrize(
    ("release", "engine", "size", "train"),
    [
        ("0.16.9", "hf", 2, 16),  # not read yet
        ("0.17.6", "hf", 2, 8),
        ("0.17.6", "deepspeed", 2, 16),  # a file goes on as its path, in which the key is looked for
        ("0.18.6", "deepspeed", 2, 8),  # the file is read first
        ("0.18.6", "deepspeed", "two", 2),  # any error means one rank
        ("0.19.2", "deepspeed", 0, 2),
        ("0.19.3", "deepspeed", 0, None),
    ],
)
def test_sequence_parallel_size_by_release(release: str, engine: str, size: Any, train: int | None) -> None:
    """Every row was asked of the real release: runtime/config.py DeepSpeedConfig.__init__."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "sequence_parallel_size": size,
    }
    found = resolve(
        config, release=release, world_size=8, engine=engine, args={"per_device_train_batch_size": 2}
    )
    assert found.accepted is (train is not None)
    assert (found.batch or {}).get("train_batch_size") == train


def test_precision_of_dictionaries_to_0_17_0() -> None:
    def of(data: dict[str, Any], release: str = "0.17.0") -> Resolved:
        return resolve({"train_batch_size": 8, **data}, release=release, world_size=1)

    assert of({"bfloat16": {"enabled": True}}).precision == "bf16"
    assert of({"bf16": {}, "bfloat16": {"enabled": True}}).precision == "fp32"  # the first name counts
    assert of({"fp16": {"enabled": True}, "bf16": {"enabled": "no"}}).problem  # any text is true
    assert of({"fp16": {"enabled": True}, "bf16": {"enabled": "no"}}, "0.17.1").accepted
    assert of({"fp16": {"enabled": True, "initial_scale_power": None}}).problem
    assert of({"fp16": {"enabled": False, "initial_scale_power": None}}).accepted
    assert of({"fp16": {"enabled": True, "initial_scale_power": 10**30}}).problem  # at once
    assert not of({"bf16": None}).accepted and of({"bf16": None}, "0.17.1").accepted
