"""``dstui estimate``: text, JSON, grid, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.config.document import apply_edit

MACHINE = ["--gpus", "8x80GiB", "--ram", "1TiB"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["estimate", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def write(tmp_path: Path, data: dict[str, Any]) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(data))
    return str(path)


ZERO2: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}


def test_json_is_the_contract(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, data = answer(capsys, write(tmp_path, ZERO2), "--model", "llama-2-7b", *MACHINE)
    assert code == 0 and data["verdict"] == "fits" and data["schema_version"] == 1
    assert set(data["binds"]) == {"where", "phase", "part"}
    for name in ("allocated", "reserved", "device"):
        r = data["gpu"][name]
        assert 0 < r["low"] <= r["expected"] <= r["high"]
    assert data["gpu"]["capacity"] == 80 * 2**30
    assert [p["phase"] for p in data["gpu"]["phases"]] == [
        "load",
        "init",
        "forward",
        "backward",
        "step",
        "save",
    ]
    assert (
        max(sum(p["parts"].values()) for p in data["gpu"]["phases"]) == data["gpu"]["allocated"]["expected"]
    )
    assert set(data["host"]) >= {"capacity", "pinned", "pageable", "peak"}
    assert data["nvme"] is None and data["changes"] == []


@pytest.mark.parametrize(
    ("args", "verdict", "code"),
    [
        (["--model", "llama-2-7b", *MACHINE], "no", 1),
        (["--model", "qwen2.5-0.5b", *MACHINE], "fits", 0),
        (["--model", "70B", "--gpus", "1x24GiB", "--ram", "64GiB"], "no", 1),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], args: list[str], verdict: str, code: int) -> None:
    got, data = answer(capsys, *args)
    assert (got, data["verdict"]) == (code, verdict)


def test_unknown_is_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    offload = {**ZERO2, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    code, data = answer(capsys, write(tmp_path, offload), "--model", "llama-2-7b", "--gpus", "8x80GiB")
    assert code == 2 and data["verdict"] == "unknown" and "--ram" in data["reason"]


def test_a_change_really_makes_it_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {**ZERO2, "zero_optimization": {"stage": 0}}
    code, data = answer(capsys, write(tmp_path, config), "--model", "llama-2-7b", *MACHINE)
    assert code == 1 and data["changes"]
    for change in data["changes"]:
        assert change["costs"] and change["title"]
        if not change["edits"]:
            continue
        edited: Any = config
        for edit in change["edits"]:
            edited = apply_edit(edited, edit)
        code, after = answer(capsys, write(tmp_path, edited), "--model", "llama-2-7b", *MACHINE)
        assert code == 0 and after["verdict"] in ("fits", "tight")
        saved = data["gpu"]["device"]["expected"] - after["gpu"]["device"]["expected"]
        assert saved == change["saves"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_larger_than_a_card_is_built_under_zero_init(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: int
) -> None:
    """70B in 16 bits is 128 GiB: without zero.Init each rank holds it whole, whatever the stage."""
    machine = ("--gpus", "8xA100-80G", "--nodes", "2", "--ram", "2TiB", "--model", "llama-2-70b")
    path = write(
        tmp_path, {**ZERO2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    )
    code, data = answer(capsys, path, *machine)
    assert code == 1
    (change,) = [c for c in data["changes"] if "zero.Init" in c["title"]]
    assert change["saves"] > 40 * 2**30
    for edit in change["edits"]:
        assert edit["path"] == "/zero_optimization/stage" and edit["value"] == 3
    path = write(tmp_path, {**ZERO2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    code, data = answer(capsys, path, *machine, "--zero-init")
    assert code == 0 and data["verdict"] in ("fits", "tight")


def test_where_no_single_change_helps_plan_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, ZERO2)
    assert main(["estimate", path, "--model", "llama-2-70b", "--gpus", "2x24GiB", "--ram", "32GiB"]) == 1
    assert "dstui plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "DS701"),
        ({"train_batch_size": 7}, "DS402"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            "DS120 zero_optimization.offload_optimizer",
        ),
        ({"optimizer": {"type": 5}}, "DS120 optimizer.type"),
    ],
)
def test_a_config_that_is_refused_is_not_left_at_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    path = write(tmp_path, {**ZERO2, **change})
    args = ("--model", "qwen2.5-0.5b", *MACHINE, "--world-size", "2")
    exit_code, data = answer(capsys, path, *args)
    assert (
        (exit_code, data["verdict"]) == (0, "fits")
        and "is refused" in data["reason"]
        and code in data["reason"]
    )
    assert main(["estimate", path, *args]) == 0
    assert "is refused" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("batch", ["auto", 2])
def test_a_config_that_is_accepted_has_no_such_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, batch: Any
) -> None:
    path = write(tmp_path, {**ZERO2, "train_micro_batch_size_per_gpu": batch})
    _code, data = answer(capsys, path, "--model", "qwen2.5-0.5b", *MACHINE)
    assert data["verdict"] == "fits" and data["reason"] is None


def test_text_fits_eighty_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for extra in ([], ["--grid"], ["--lang", "zh"]):
        main(["estimate", write(tmp_path, ZERO2), "--model", "deepseek-v3", "--gpus", "8x80GiB", *extra])
        out = capsys.readouterr().out
        assert out.strip() and max(map(len, out.splitlines())) <= 80
    main(["estimate", write(tmp_path, ZERO2), "--model", "llama-2-7b", *MACHINE])
    out = capsys.readouterr().out
    assert out.startswith("fits: ")
    for word in ("backward", "optimizer states", "reserved", "device", "Host", "Assumed"):
        assert word in out


def test_grid(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["estimate", "--model", "llama-2-7b", *MACHINE, "--grid", "--json"])
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert code == 0 and len(cells) >= 9
    assert {c["stage"] for c in cells} == {0, 1, 2, 3}
    assert all({"offload_optimizer", "offload_param", "verdict", "gpu", "host"} <= set(c) for c in cells)


@pytest.mark.parametrize(
    "args",
    [
        ["--model", "no-such-model-anywhere", *MACHINE],
        ["--model", "7B", "--gpus", "8xNothing"],
        ["--model", "7B", *MACHINE, "--micro-batch", "0"],
        ["--model", "7B", *MACHINE, "--load-dtype", "int3"],
        ["--model", "7B", *MACHINE, "--world-size", "0"],
        ["--model", "7B", *MACHINE, "--seq", "1000000000"],
        ["--model", "7B", *MACHINE, "--quant", "nf4"],
        ["--model", "7B", *MACHINE, "--lora-targets", "q_proj"],
        ["--model", "qwen2.5-0.5b", *MACHINE, "--lora-rank", "8", "--lora-targets", "query_key_value"],
        ["/nonexistent/ds_config.json", "--model", "7B", *MACHINE],
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(["estimate", *args]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.startswith("error: ") and len(seen.err.splitlines()) <= 3


def test_a_number_that_is_too_large_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "7B", *MACHINE, "--seq", "1000000000"]) == 2
    assert "from 1 to 100000000" in capsys.readouterr().err


def test_adapters_are_named_as_peft_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    def states(*targets: str) -> int:
        args = ("--model", "qwen2.5-0.5b", *MACHINE, "--lora-rank", "64", "--no-zero-init")
        _code, data = answer(capsys, *args, *(("--lora-targets", ",".join(targets)) if targets else ()))
        return next(p["parts"]["optimizer"] for p in data["gpu"]["phases"] if p["phase"] == "save")

    attention = states("q_proj", "v_proj")
    assert states("self_attn.q_proj", "v_proj") == attention < states() == states("all-linear")
    assert (
        main(["estimate", "--model", "gpt2", *MACHINE, "--lora-rank", "8", "--lora-targets", "q_proj"]) == 2
    )
    assert "c_attn" in capsys.readouterr().err


def test_the_optimizer_of_the_script_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def need(*args: str) -> tuple[int, list[str]]:
        _code, data = answer(capsys, *args, "--model", "qwen2.5-0.5b", *MACHINE)
        return data["gpu"]["allocated"]["expected"], data["assumptions"]

    adam = need()[0]
    assert need("--optimizer", "sgd")[0] < 0.7 * adam
    assert need("--optimizer", "adamw_torch_fused")[0] <= adam < need("--optimizer", "adamw_torch")[0]
    unknown, said = need("--optimizer", "adafactor")
    assert unknown >= adam and any("adafactor" in text for text in said)
    assert any("fp32 states" in text for text in need("--optimizer", "adamw_bnb_8bit")[1])
    path = write(tmp_path, ZERO2)
    with_file, said = need(path, "--optimizer", "sgd")  # the config names its own
    assert with_file == need(path)[0] and any("sgd of the script is not used" in text for text in said)
    assert need(path, "--optimizer", "adamw")[1] == need(path)[1]


def test_bad_values_in_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for zero in ({"stage": 7}, {"stage": "two"}, {"stage": 2, "reduce_bucket_size": "big"}):
        path = write(tmp_path, {**ZERO2, "zero_optimization": zero})
        assert main(["estimate", path, "--model", "7B", *MACHINE]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_auto_is_filled_as_the_trainer_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    auto = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto"},
    }  # fmt: skip
    h = 4096
    filled = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": h * h, "stage3_prefetch_bucket_size": int(0.9 * h * h),
                              "stage3_param_persistence_threshold": 10 * h},
    }  # fmt: skip
    options = ["--model", "llama-2-7b", *MACHINE, "--micro-batch", "4", "--loop", "hf"]
    _code, a = answer(capsys, write(tmp_path, auto), *options)
    _code, b = answer(capsys, write(tmp_path, filled), *options)
    assert a["gpu"] == b["gpu"] and a["host"] == b["host"]


def test_a_file_of_another_tool_is_named_not_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {"output_dir": "x", "per_device_train_batch_size": 4, "deepspeed": "ds.json"})
    assert main(["estimate", path, "--model", "7B", *MACHINE]) == 2
    assert "Hugging Face training arguments" in capsys.readouterr().err
