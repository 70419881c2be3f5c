"""Parameter counts and inventories beside the real classes on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dstui.estimate import model as catalogue  # noqa: E402
from dstui.estimate.families import inventory, shape_from_config  # noqa: E402
from dstui.estimate.model import load_model  # noqa: E402

pytestmark = pytest.mark.real

SMALL = {"hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
         "vocab_size": 500, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DENSE = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "glm",
    "glm4",
    "gpt_neox",
]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for tied in (False, True):
        for kind in DENSE:
            for bias in (False, True):
                values = {
                    **SMALL,
                    "tie_word_embeddings": tied,
                    "attention_bias": bias,
                    "num_key_value_heads": 2,
                    "head_dim": 32,
                }
                if kind == "llama":
                    values["mlp_bias"] = bias
                if kind == "phi":
                    values["qk_layernorm"] = bias
                if kind in ("phi", "qwen2"):
                    values.pop("head_dim")
                yield kind, values
        yield (
            "mixtral",
            {**SMALL, "tie_word_embeddings": tied, "num_local_experts": 4, "num_key_value_heads": 3},
        )
        for kind in ("qwen2_moe", "qwen3_moe"):
            for dense in ([], [1], [0, 1, 2]):
                values = {**SMALL, "tie_word_embeddings": tied, "num_experts": 5, "moe_intermediate_size": 24,
                          "num_key_value_heads": 2, "mlp_only_layers": dense, "head_dim": 16}  # fmt: skip
                if kind == "qwen2_moe":
                    values["shared_expert_intermediate_size"] = 40
                    values.pop("head_dim")
                yield kind, values
            yield kind, {**values, "decoder_sparse_step": 2, "mlp_only_layers": []}
        for kind in ("deepseek_v2", "deepseek_v3"):
            for rank in (None, 24):
                yield kind, {**SMALL, "tie_word_embeddings": tied, "n_routed_experts": 4, "moe_intermediate_size": 20,
                             "first_k_dense_replace": 1, "q_lora_rank": rank, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                             "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 6, "n_group": 1,
                             "topk_group": 1, "num_experts_per_tok": 2, "attention_bias": bool(rank)}  # fmt: skip
    yield "gpt2", {"n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 333, "n_positions": 128}
    yield (
        "gpt2",
        {
            "n_embd": 96,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 333,
            "n_inner": 100,
            "tie_word_embeddings": False,
        },
    )


def real_modules(model_type: str, values: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    config = transformers.CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found: dict[str, int] = {}
    for name, p in model.named_parameters():
        owner = name.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + p.numel()
    return config, found


CASES = list(cases())


@pytest.mark.parametrize(("model_type", "values"), CASES, ids=[f"{i}-{t}" for i, (t, _v) in enumerate(CASES)])
def test_every_module_in_order(model_type: str, values: dict[str, Any]) -> None:
    config, wanted = real_modules(model_type, values)
    shape = shape_from_config(config.to_dict(), model_type, model_type)
    assert inventory(shape).modules() == list(wanted.items())
    assert shape.params == sum(wanted.values())


CATALOGUE = json.loads((Path(catalogue.__file__).parent / "catalogue.json").read_text(encoding="utf-8"))
REAL = [r for r in CATALOGUE if not r.startswith("dstui/")]


def test_the_bundled_gpt() -> None:
    pytest.importorskip("deepspeed")
    from dstui.examples.tiny_gpt import TinyGPT

    with torch.device("meta"):
        model = TinyGPT(vocab=256, hidden=256, layers=4, heads=4, seq=64, checkpointing=False)
    sizes = [p.numel() for p in model.parameters()]
    shape = load_model("tiny-gpt")
    assert shape.params == sum(sizes) and inventory(shape).parameters() == sizes


@pytest.mark.parametrize("repo", REAL)
def test_catalogue_counts_are_those_of_the_class(repo: str) -> None:
    from dstui.estimate.model import _catalogue

    config = dict(_catalogue()[repo]["config"])
    kind = config.pop("model_type")
    config.pop("torch_dtype", None)
    config.setdefault("pad_token_id", 0)
    built = transformers.CONFIG_MAPPING[kind](**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    assert load_model(repo).params == sum(p.numel() for p in model.parameters())
