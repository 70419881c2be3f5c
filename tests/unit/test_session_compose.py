"""Fields <-> ds_config: what is read, what is written, what is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from dstui.session.compose import Editor, autos, compose, read

VALUES: dict[str, Any] = {
    "stage": 2,
    "offload": "none",
    "optimizer_device": "cpu",
    "param_device": "cpu",
    "nvme_path": "/nvme",
    "micro_batch": 2,
    "accumulation": 4,
    "global_batch": 64,
    "pin_optimizer": True,
    "pin_param": True,
    "overlap_comm": True,
    "reduce_bucket_size": 5,
    "allgather_bucket_size": 6,
    "prefetch_bucket_size": 7,
    "persistence_threshold": 8,
    "precision": "bf16",
    "optimizer": "AdamW",
    "lr": 1e-5,
    "weight_decay": 0.0,
    "gradient_clipping": 1.0,
}


def written(base: Any = None, touched: set[str] | None = None, trainer: bool = False, **over: Any) -> Editor:
    kinds = {
        k: over.pop(k)
        for k in ("complete", "resolve_autos", "batch_misfit", "largest_tensor", "torch_adam")
        if k in over
    }
    values = {**VALUES, **over}
    touched = set(over) if touched is None else touched
    return compose(
        base, values.__getitem__, touched.__contains__, trainer=trainer, world=8,
        resolve_autos=kinds.pop("resolve_autos", not trainer), complete=kinds.pop("complete", False), **kinds,
    )  # fmt: skip


def apply(data: Any, edits: list[dict[str, Any]]) -> Any:
    """RFC 6902 on objects, written independently of the Editor."""
    import copy

    data = copy.deepcopy(data)
    for e in edits:
        *parents, last = e["path"].split("/")[1:]
        node = data
        for p in parents:
            node = node[p]
        if e["op"] == "add":
            assert last not in node
            node[last] = copy.deepcopy(e["value"])
        elif e["op"] == "replace":
            assert last in node
            node[last] = copy.deepcopy(e["value"])
        else:
            del node[last]
    return data


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer", "param", "both"])
def test_a_new_file_reads_back_as_what_was_chosen(stage: int, offload: str) -> None:
    if (offload in ("param", "both") and stage < 3) or (offload == "optimizer" and stage < 1):
        pytest.skip("not offered")
    data = written(stage=stage, offload=offload).data
    got = read(data)
    assert got["stage"] == stage
    assert got["offload"] == offload
    for field in (
        "micro_batch",
        "accumulation",
        "precision",
        "optimizer",
        "lr",
        "weight_decay",
        "gradient_clipping",
    ):
        assert got[field] == VALUES[field]
    if stage in (1, 2):
        assert got["reduce_bucket_size"] == 5 and got["allgather_bucket_size"] == 6
    if stage == 3:
        assert got["prefetch_bucket_size"] == 7 and got["persistence_threshold"] == 8
    assert "train_batch_size" not in data  # micro x accumulation stays right at any world size


@pytest.mark.parametrize(
    ("base", "over"),
    [
        ({}, {"stage": 3, "offload": "both"}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, {"stage": 1}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"offload": "optimizer", "stage": 2}),
        ({"zero_optimization": True}, {"stage": 2}),
        ({"train_batch_size": 64, "bf16": {"enabled": True}}, {"precision": "fp16", "micro_batch": 1}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1}}}, {"optimizer": "script"}),
        ({"a~b": {"c/d": 1}}, {"lr": 2.0}),
    ],
)
def test_the_edits_alone_make_the_data(base: dict[str, Any], over: dict[str, Any]) -> None:
    editor = written(base, **over)
    assert apply(base, editor.edits) == editor.data


def test_an_opened_file_keeps_what_was_not_touched() -> None:
    base = {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "my_key": [1, 2],
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99]}},
    }
    assert written(base, touched=set()).edits == []
    edits = written(base, lr=1e-3).edits
    assert edits == [{"op": "replace", "path": "/optimizer/params/lr", "value": 1e-3}]


def test_pin_memory_is_always_written_out() -> None:
    base = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    edits = written(base, touched=set(), pin_param=True).edits
    assert edits == [{"op": "add", "path": "/zero_optimization/offload_param/pin_memory", "value": True}]
    said = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}}
    assert written(said, touched=set()).edits == []


def test_a_train_batch_size_that_is_there_follows() -> None:
    base = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    data = written(base, micro_batch=2).data
    assert data["train_batch_size"] == 2 * 4 * 8
    assert data["train_micro_batch_size_per_gpu"] == 2 and data["gradient_accumulation_steps"] == 4


def test_leaving_stage_3_takes_its_keys_along() -> None:
    base = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_max_live_parameters": 1,
            "prefetch_bucket_size": 2,
            "overlap_comm": True,
        }
    }
    zero = written(base, stage=2).data["zero_optimization"]
    assert zero["stage"] == 2 and zero["overlap_comm"] is True
    assert not {"offload_param", "stage3_max_live_parameters", "prefetch_bucket_size"} & set(zero)


def test_an_alias_in_use_stays_the_only_name() -> None:
    base = {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 2}, "bfloat16": {"enabled": False}}
    data = written(base, prefetch_bucket_size=9, precision="bf16", stage=3).data
    assert data["zero_optimization"]["prefetch_bucket_size"] == 9
    assert "stage3_prefetch_bucket_size" not in data["zero_optimization"]
    assert data["bfloat16"]["enabled"] is True and "bf16" not in data


def test_the_old_offload_switch_becomes_a_block() -> None:
    base = {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}}
    assert read(base)["offload"] == "optimizer"
    zero = written(base, offload="optimizer").data["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert not {"cpu_offload", "cpu_offload_use_pin_memory"} & set(zero)


def test_a_trainer_owns_its_values() -> None:
    data = written(trainer=True, stage=3, offload="both").data
    assert data["train_batch_size"] == data["train_micro_batch_size_per_gpu"] == "auto"
    assert data["optimizer"]["params"] == {
        "lr": "auto",
        "betas": "auto",
        "eps": "auto",
        "weight_decay": "auto",
    }
    assert data["bf16"]["enabled"] == data["fp16"]["enabled"] == "auto"
    assert data["zero_optimization"]["stage"] == 3
    assert data["zero_optimization"]["reduce_bucket_size"] == "auto"


def test_autos_are_resolved_where_nobody_else_would() -> None:
    data = written(trainer=True, stage=3, offload="both").data
    plain = written(data, touched=set(), stage=3, offload="both").data
    assert autos(plain) == []
    assert plain["train_batch_size"] == 64 and plain["optimizer"]["params"]["lr"] == 1e-5
    assert plain["bf16"]["enabled"] is True and plain["fp16"]["enabled"] is False


def test_an_nvme_buffer_holds_the_largest_parameter() -> None:
    editor = written(stage=3, offload="both", param_device="nvme", largest_tensor=8 * 131_000_000)
    block = editor.data["zero_optimization"]["offload_param"]
    assert block["device"] == "nvme" and block["nvme_path"] == "/nvme"
    assert block["buffer_size"] >= 131_000_000


def test_autos_are_found_anywhere() -> None:
    assert autos({"a": "auto", "b/c": {"d": "auto", "e": ["auto"]}}) == ["/a", "/b~1c/d", "/b~1c/e/0"]
