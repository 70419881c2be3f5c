"""Reading a model's size: directories, caches, names, sizes, and everything that can be wrong with them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstui.errors import DstuiError
from dstui.estimate.families import inventory
from dstui.estimate.inputs import ModelShape
from dstui.estimate.model import catalogue_names, load_model, modules, parse_params

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], cut: int = 0) -> None:
    sizes = {"BF16": 2, "F32": 4, "F16": 2, "U8": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        n = sizes[dtype]
        for k in shape:
            n *= k
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + n]}
        end += n
    raw = json.dumps(header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(end)
    path.write_bytes(data[: len(data) - cut] if cut else data)


def weights(shape: ModelShape, dtype: str = "BF16") -> dict[str, tuple[str, list[int]]]:
    return {name: (dtype, [n]) for name, n in modules(shape)}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_bare_config(model_dir: Path) -> None:
    shape = load_model(str(model_dir / "config.json"))
    assert (shape.name, shape.family, shape.hidden, shape.layers, shape.kv_heads) == (
        "my-model",
        "llama",
        64,
        2,
        2,
    )
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert shape.params == 2 * 100 * 64 + 2 * (attention + 3 * 64 * 128 + 2 * 64) + 64
    assert shape.exact and shape.dtype == "bfloat16" and not shape.notes


def test_directory_with_weights_agrees(model_dir: Path) -> None:
    bare = load_model(str(model_dir))
    safetensors(model_dir / "model.safetensors", weights(bare, "F32"))
    shape = load_model(str(model_dir))
    assert shape.params == bare.params and shape.exact and not shape.notes
    assert shape.dtype == "float32"  # the header wins over the config
    assert shape.checkpoint_bytes == 4 * bare.params


def test_shards_through_the_index(model_dir: Path) -> None:
    items = list(weights(load_model(str(model_dir))).items())
    half = len(items) // 2
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, part in zip(names, (items[:half], items[half:]), strict=True):
        safetensors(model_dir / name, dict(part))
    mapping = {k: names[i >= half] for i, (k, _v) in enumerate(items)}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    shape = load_model(str(model_dir))
    assert shape.exact and shape.checkpoint_bytes == 2 * shape.params
    (model_dir / names[1]).unlink()
    with pytest.raises(DstuiError, match=r"1 of 2 weight files are missing.*00002-of-00002"):
        load_model(str(model_dir))
    (model_dir / names[0]).unlink()  # only config and index fetched: the config tells
    assert load_model(str(model_dir)).params == shape.params


def test_a_head_stored_beside_a_tied_embedding_is_no_disagreement(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    shape = load_model(str(model_dir))
    safetensors(model_dir / "model.safetensors", {**weights(shape), "lm_head.weight": ("BF16", [100, 64])})
    again = load_model(str(model_dir))
    assert again.exact and again.params == shape.params and not again.notes


def test_other_count_in_the_weights_is_said(model_dir: Path) -> None:
    shape = load_model(str(model_dir))
    safetensors(model_dir / "model.safetensors", {**weights(shape), "extra": ("BF16", [7])})
    again = load_model(str(model_dir))
    assert not again.exact and len(again.notes) == 1
    assert f"{shape.params + 7:,}" in again.notes[0]


def test_unknown_architecture_with_weights_has_an_exact_count(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**LLAMA, "model_type": "exotic"}))
    with pytest.raises(DstuiError, match="exotic") as caught:
        load_model(str(model_dir))
    assert caught.value.hint and "7B" in caught.value.hint
    safetensors(model_dir / "model.safetensors", {"a": ("BF16", [10, 10]), "b": ("BF16", [5])})
    shape = load_model(str(model_dir))
    assert (shape.params, shape.family, shape.exact) == (105, None, True) and shape.notes


@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_weights(model_dir: Path, cut: int) -> None:
    safetensors(model_dir / "model.safetensors", weights(load_model(str(model_dir))), cut=cut)
    with pytest.raises(DstuiError, match=r"model\.safetensors is truncated") as caught:
        load_model(str(model_dir))
    assert caught.value.hint and caught.value.code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header"),
        (b"abc", "no header"),
        (struct.pack("<Q", 50) + b"{}", "header is cut"),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (struct.pack("<Q", 3) + b"{,}", "damaged"),
        (struct.pack("<Q", 15) + b'{"a": {"x": 1}}', "damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "not a safetensors file"),
    ],
)
def test_corrupt_weights(model_dir: Path, content: bytes, message: str) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(DstuiError, match=message) as caught:
        load_model(str(model_dir))
    assert "model.safetensors" in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a model configuration"),
        ("{}", "no formula for architecture"),
        (json.dumps({**LLAMA, "hidden_size": "big"}), "'hidden_size' must be a whole number"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "above 0"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "'vocab_size' is missing"),
        (json.dumps({**LLAMA, "num_hidden_layers": True}), "whole number"),
        (json.dumps({**LLAMA, "intermediate_size": -5}), "whole number"),
        (json.dumps({**LLAMA, "vocab_size": 0}), "above 0"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**12}), "cannot be"),
        (json.dumps({**LLAMA, "hidden_size": 10**12}), "cannot be"),
    ],
)
def test_bad_config(model_dir: Path, text: str, message: str) -> None:
    (model_dir / "config.json").write_text(text)
    with pytest.raises(DstuiError, match=message) as caught:
        load_model(str(model_dir))
    assert "config.json" in caught.value.message and caught.value.hint


def test_what_is_not_there(tmp_path: Path) -> None:
    for spec, message in (
        (str(tmp_path / "nowhere"), "no such file"),
        (str(tmp_path), "neither config.json nor safetensors"),
        ("", "no model is named"),
        ("some/repository", "neither here nor in the local"),
    ):
        with pytest.raises(DstuiError, match=message) as caught:
            load_model(spec)
        assert caught.value.hint


def test_adapter_directory_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DstuiError, match="LoRA adapter"):
        load_model(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_directory(model_dir: Path) -> None:
    model_dir.chmod(0)
    try:
        with pytest.raises(DstuiError, match="cannot read"):
            load_model(str(model_dir))
    finally:
        model_dir.chmod(0o700)


def test_cached_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    shape = load_model("org/name", hf_home=tmp_path)
    assert shape.name == "org/name" and shape.params > 0 and str(snapshot) in shape.source
    (refs / "main").write_text("gone")  # a reference to a snapshot that was pruned
    assert load_model("org/name", hf_home=tmp_path).name == "org/name"


def test_catalogue_and_did_you_mean() -> None:
    assert load_model("Llama-3.1-8B").params == 8030261248
    assert load_model("meta-llama/Llama-3.1-8B-Instruct").params == 8030261248
    with pytest.raises(DstuiError) as caught:
        load_model("lama-3.1-8b")
    assert caught.value.hint and "llama-3.1-8b" in caught.value.hint
    names = [n.lower() for n in catalogue_names()]
    assert len(names) == len({*names})


def test_typed_sizes() -> None:
    assert load_model("7B") == ModelShape(name="7B", params=7_000_000_000, source="typed")
    for text, n in (("8.03e9", 8_030_000_000), ("350m", 350_000_000), ("1_300_000_000", 1_300_000_000),
                    ("0.5b", 500_000_000), ("13", 13_000_000_000), ("1.5T", 1_500_000_000_000)):  # fmt: skip
        assert parse_params(text) == n
    for text in ("0", "-7B", "7Q", "B", "", "1e30", "seven"):
        assert parse_params(text) is None


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_no_file_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DstuiError):
        load_model(str(folder))


def test_every_shipped_shape_has_its_stated_count() -> None:
    from dstui.estimate.model import _catalogue

    for repo, entry in _catalogue().items():
        shape = load_model(repo)
        assert shape.params == entry["params"] == inventory(shape).params, repo
