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


def test_every_release_from_0_14_0_on_has_a_schema_and_all_are_small() -> None:
    assert len(schema.releases()) >= 47 and schema.releases()[0] == "0.14.0"
    assert schema.all_releases()[: -len(schema.releases())] == (
        "0.9.5", "0.10.0", "0.10.1", "0.10.2", "0.10.3", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.1", "0.12.2",
        "0.12.3", "0.12.4", "0.12.5", "0.12.6", "0.13.0", "0.13.1", "0.13.2", "0.13.3", "0.13.4", "0.13.5",
    )  # fmt: skip
    folder = Path(schema.__file__).parents[2] / "schemas"
    assert sum(p.stat().st_size for p in folder.glob("*.json")) <= 3_000_000


def test_every_schema_is_one() -> None:
    from jsonschema import Draft202012Validator

    for release in schema.releases():
        Draft202012Validator.check_schema(schema.load(release).json_schema)


def test_the_history_of_a_key() -> None:
    assert schema.history("/gradient_clipping") == (
        ("0.9.5", "0.19.2", 0.0),
        ("0.19.3", schema.newest(), 1.0),
    )
    pinned = schema.history("/zero_optimization/offload_optimizer/pin_memory")
    assert [(first, default) for first, _last, default in pinned] == [("0.9.5", False), ("0.19.5", True)]
    assert schema.history("/aio/thread_count") == (("0.9.5", "0.16.3", 1),)
    assert schema.history("/compile/enabled") == (("0.13.2", "0.14.3", False),)
    assert schema.history("/nonsense") == ()
    assert schema.refused_from("/zero_optimization/mics_shard_size") == "0.19.7"
    assert schema.refused_from("/gradient_clipping") is None


def test_keys_and_defaults_of_a_release_without_a_schema() -> None:
    old = schema.defaults("0.10.3")
    assert old["/zero_optimization/stage3_prefetch_bucket_size"] == 50_000_000
    assert old["/zero_optimization/offload_param/buffer_count"] == 5
    assert old["/weight_quantization/enabled"] is True
    assert "/weight_quantization/enabled" not in schema.defaults("0.10.2")
    assert "/timers/throughput/enabled" not in old
    assert schema.defaults("0.19.8+cu128")["/gradient_clipping"] == 1.0
    with pytest.raises(DstuiError):
        schema.defaults("0.9.4")


def test_the_history_says_what_the_sources_say(shared: Path) -> None:
    """Made apart from the generator: ranges and defaults of every key in 68 releases."""
    facts = json.loads((shared / "facts" / "deepspeed-keys.json").read_text(encoding="utf-8"))
    order = {v: i for i, v in enumerate(facts["versions"])}
    compared = 0
    for key in facts["keys"]:
        pointer = "/" + key["path"].replace(".", "/")
        rows = schema.history(pointer)
        if not rows:  # a block; or a name that is an alias here
            continue
        found = {v: d for first, last, d in rows for v in facts["versions"][order[first] : order[last] + 1]}
        since, until = key["since"].lstrip("<="), key["until"] or facts["versions"][-1]
        assert set(found) == set(facts["versions"][order[since] : order[until] + 1]), pointer
        for row in key["defaults"] or ():
            for version in facts["versions"][order[row["from"]] : order[row["to"]] + 1]:
                if version in found and not str(row["value"]).startswith("<factory>"):
                    assert found[version] == row["value"], (pointer, version)
                    compared += 1
    assert compared > 10_000


@pytest.mark.parametrize(
    ("release", "data", "verdict"),
    [
        # pydantic 1 cuts fractions and wants no quotes around a stage; pydantic 2 the other way round
        ("0.14.5", {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1.5}}, True),
        ("0.15.0", {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1.5}}, False),
        ("0.14.5", {"zero_optimization": {"stage": "2"}}, False),
        ("0.15.0", {"zero_optimization": {"stage": "2"}}, True),
        ("0.14.5", {"zero_optimization": {"offload_param": []}}, True),
        ("0.15.0", {"zero_optimization": {"offload_param": []}}, False),
        ("0.14.5", {"csv_monitor": {"job_name": 7}}, True),
        ("0.14.0", {"communication_data_type": "bfp16"}, True),
        ("0.14.1", {"communication_data_type": "bfp16"}, False),
        ("0.14.3", {"compile": {"odd": 1}}, False),
        ("0.16.5", {"compile": {"odd": 1}}, True),
        ("0.16.6", {"compile": {"odd": 1}}, False),
        ("0.17.0", {"fp16": {"enabled": True, "odd": 1}}, True),
        ("0.17.1", {"fp16": {"enabled": True, "odd": 1}}, False),
        ("0.14.5", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, True),
        ("0.15.0", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, False),
        ("0.18.2", {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, False),
        ("0.18.3", {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, True),
    ],
)  # fmt: skip
def test_strictness_by_release(release: str, data: dict[str, Any], verdict: bool) -> None:
    from dstui.config.resolve import resolve

    config = {"train_batch_size": 8, **data}
    assert resolve(config, release=release, world_size=1).accepted is verdict
    if verdict:  # the schema never refuses what the release accepts
        assert schema.validate(config, release) == []
