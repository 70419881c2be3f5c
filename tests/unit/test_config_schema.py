"""The schemas: complete, small, fresh, never a neighbour's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.errors import DstuiError

ROOT = Path(__file__).parents[2]
BOTH = ("0.19.4", "0.19.8")


def test_releases_are_sorted_as_numbers() -> None:
    assert set(BOTH) <= set(schema.releases())
    assert list(schema.releases()) == sorted(schema.releases(), key=schema.version_key)
    assert schema.newest() == schema.releases()[-1]
    assert schema.version_key("0.9.5") < schema.version_key("0.19.4") < schema.version_key("0.19.10+cu128")


def test_no_release_answers_for_another() -> None:
    assert not schema.known("0.13.5") and schema.known("0.19.8+cu128")
    for release in ("0.13.5", "0.19", "../etc", "0.19.9"):
        with pytest.raises(DstuiError) as e:
            schema.load(release)
        assert "0.19.8" in (e.value.hint or "")


@pytest.mark.parametrize("release", BOTH)
def test_a_schema_is_valid_and_self_contained(release: str) -> None:
    from jsonschema import Draft202012Validator

    loaded = schema.load(release)
    Draft202012Validator.check_schema(loaded.json_schema)
    text = json.dumps(loaded.json_schema)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert (
            reference.startswith("#/$defs/") and reference.rpartition("/")[2] in loaded.json_schema["$defs"]
        )
    shown = schema.published(loaded)
    Draft202012Validator.check_schema(shown)
    pin = shown["$defs"]["DeepSpeedZeroOffloadParamConfig"]["properties"]["pin_memory"]
    assert pin["default"] is (release == "0.19.8") and pin["x-dstui"]["type"] == "bool"


def test_47_releases_fit_in_3_mb() -> None:
    folder = ROOT / "schemas"
    largest = max(p.stat().st_size for p in folder.glob("deepspeed-*.json"))
    assert largest * 47 + (folder / "keys.json").stat().st_size < 3_000_000


def test_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "schemas" / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_stale_is_said(tmp_path: Path) -> None:
    for path in (ROOT / "schemas").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    keys = tmp_path / "keys.json"
    keys.write_text(keys.read_text().replace('"steps_per_print"', '"steps_per_print2"', 1))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "deepspeed-0.19.8.json is stale" in done.stderr


def test_code_that_nobody_read_is_not_replayed(tmp_path: Path) -> None:
    for path in (ROOT / "schemas").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    keys = tmp_path / "keys.json"
    data = json.loads(keys.read_text())
    data["reviewed"]["functions"]["get_zero_config"] = []
    keys.write_text(json.dumps(data))
    done = subprocess.run([sys.executable, str(tmp_path / "generate.py")], capture_output=True, text=True)
    assert done.returncode == 1 and "function get_zero_config@" in done.stderr


def test_keys_of_the_pinned_memory_flip() -> None:
    for release, default in (("0.19.4", False), ("0.19.8", True)):
        for block in ("offload_param", "offload_optimizer"):
            key = schema.load(release).keys[f"/zero_optimization/{block}/pin_memory"]
            assert (key.type, key.default, key.policy) == ("bool", default, "checked")


@pytest.mark.parametrize(
    ("pointer", "expected"),
    [
        ("/zero_optimization/stage", {"type": "enum", "default": 0, "choices": (0, 1, 2, 3)}),
        ("/zero_optimization/reduce_bucket_size", {"type": "int", "default": 500000000, "bounds": {"gt": 0}}),
        ("/zero_optimization/overlap_comm", {"type": "bool?", "default": None}),
        ("/zero_optimization/cpu_offload", {"deprecated": "offload_optimizer"}),
        (
            "/zero_optimization/offload_optimizer/device",
            {"choices": ("none", "cpu", "nvme"), "default": "none"},
        ),
        ("/gradient_clipping", {"default": 1.0, "policy": "unchecked"}),
        ("/steps_per_print", {"default": None}),
        ("/compile/passes", {"type": "list[enum]?", "choices": ("z1", "z3", "autosp", "autotp")}),
        ("/aio/intra_op_parallelism", {"since": "0.16.4", "default": 1}),
    ],
)
def test_keys_of_the_newest(pointer: str, expected: dict[str, Any]) -> None:
    key = schema.load("0.19.8").keys[pointer]
    assert {name: getattr(key, name) for name in expected} == expected


def test_aliases_lead_to_the_documented_name() -> None:
    loaded = schema.load("0.19.8")
    key = loaded.key("/zero_optimization/prefetch_bucket_size")
    assert key is not None and key.pointer == "/zero_optimization/stage3_prefetch_bucket_size"
    assert key.aliases == ("prefetch_bucket_size",)
    assert loaded.key("/zero_optimization/nothing") is None


def test_policies_and_names() -> None:
    loaded = schema.load("0.19.8")
    assert loaded.unknown_policy("") == "ignored"
    for block in (
        "/zero_optimization",
        "/zero_optimization/offload_param",
        "/fp16",
        "/wandb",
        "/tensor_parallel/tp",
    ):
        assert loaded.unknown_policy(block) == "refused", block
    for block in ("/optimizer", "/activation_checkpointing", "/aio", "/timers", "/checkpoint"):
        assert loaded.unknown_policy(block) == "ignored", block
    names = loaded.names("/zero_optimization")
    assert "offload_param" in names and "strict" not in names and "mics_shard_size" not in names
    assert "/amp" in loaded.removed and "/zero_optimization/mics_shard_size" in loaded.removed
    assert schema.load("0.19.4").removed == ()


@pytest.mark.parametrize(
    ("data", "pointer", "words"),
    [
        ({"zero_optimization": {"stage": 5}}, "/zero_optimization/stage", "0 | 1 | 2 | 3"),
        ({"zero_optimization": {"stge": 2}}, "/zero_optimization/stge", "unknown key 'stge'"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "/zero_optimization/offload_param/device", '"none" | "cpu" | "nvme"'),
        ({"zero_optimization": {"sub_group_size": -1}}, "/zero_optimization/sub_group_size", ">= 0"),
        ({"zero_optimization": {"sub_group_size": "big"}}, "/zero_optimization/sub_group_size", "an integer"),
        ({"fp16": {"enabled": "maybe"}}, "/fp16/enabled", "true or false"),
        ({"bf16": 1}, "/bf16", "an object"),
        ({"amp": {}}, "/amp", "removed"),
        ({"zero_optimization": {"mics_shard_size": "auto"}}, "/zero_optimization/mics_shard_size", "removed"),
        ({"train_batch_size": 0}, "/train_batch_size", "> 0"),
        ({"zero_optimization": {"max_reuse_distance": 1, "stage3_max_reuse_distance": 1}}, "/zero_optimization/max_reuse_distance", "two names"),
        ({"tensor_parallel": {"dtype": "fp16"}}, "/tensor_parallel/dtype", "from Python"),
        ({"compile": {"passes": ["z2"]}}, "/compile/passes/0", '"z3"'),
    ],
)  # fmt: skip
def test_problems_name_the_culprit(data: dict[str, Any], pointer: str, words: str) -> None:
    problems = schema.validate(data, "0.19.8")
    assert [p.pointer for p in problems] == [pointer]
    assert words in problems[0].message


def test_all_problems_at_once_and_none_for_what_is_legal() -> None:
    many = {"zero_optimization": {"stage": 9, "x": 1, "offload_param": {"y": 1}}, "fp16": {"z": 1}}
    assert {p.pointer for p in schema.validate(many, "0.19.8")} == {
        "/zero_optimization/stage",
        "/zero_optimization/x",
        "/zero_optimization/offload_param/y",
        "/fp16/z",
    }
    style = {
        "train_batch_size": 8,
        "anything": [1],
        "zero_optimization": {
            "stage": "2",
            "reduce_bucket_size": "5_000",
            "unheard_of": "auto",
            "cpu_offload": "yes",
        },
        "gradient_clipping": "auto",
        "steps_per_print": "never",
    }
    assert schema.validate(style, "0.19.8") == []


def test_nothing_heavy_is_imported_until_needed() -> None:
    code = (
        "import sys; from dstui.config import schema, resolve, document, diff;"
        "d = document.Document.parse('{\"train_batch_size\": 8}').data;"
        "resolve.resolve(d, release='0.19.8', world_size=1);"
        "bad = {'jsonschema', 'hjson', 'torch', 'deepspeed', 'textual', 'rich'} & set(sys.modules); print(bad or 'clean')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "clean", done.stderr
