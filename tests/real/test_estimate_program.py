"""The programs of allocations beside the real classes, traced operator by operator on the meta device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

from dstui.estimate.families import shape_from_config  # noqa: E402
from dstui.estimate.inputs import Training  # noqa: E402
from dstui.estimate.replay import _Run  # noqa: E402
from dstui.estimate.settings import read_settings  # noqa: E402

pytestmark = pytest.mark.real


class Live(TorchDispatchMode):
    """Bytes of the storages alive, as the caching allocator would count them (512-byte blocks)."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.now = self.peak = 0

    def _gone(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)

    def see(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = (storage.nbytes() + 511) & -512
        self.known[key] = size
        self.now += size
        weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            self.see(leaf)
        return out


class Fused(torch.autograd.Function):
    """What a fused attention kernel keeps: its inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        b, heads, n, _d = q.shape
        out = torch.empty(b, n, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, _g: Any) -> Any:
        q, k, v, _out, lse = ctx.saved_tensors
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        work = torch.empty(q.shape, dtype=torch.float32, device=q.device), torch.empty_like(lse)
        del work
        return grads


def fused(_module: Any, q: Any, k: Any, v: Any, _mask: Any, **_kw: Any) -> Any:
    return Fused.apply(q, k, v), None


BASE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
        "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "use_cache": False}  # fmt: skip
# dropout is left out: the fused CUDA kernel keeps a one-byte mask, the meta device another
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("glm", {}),
    ("glm4", {}),
    ("gpt_neox", {"num_key_value_heads": 8}),
    ("phi", {"num_key_value_heads": 8}),
    (
        "gpt2",
        {
            "n_embd": 256,
            "n_layer": 4,
            "n_head": 8,
            "n_positions": 512,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
]
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_local_experts": 8}),
    ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}),
    ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 128}),
    ("deepseek_v2", {"n_routed_experts": 8, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "q_lora_rank": None,
                     "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                     "num_key_value_heads": 8, "num_experts_per_tok": 2}),
    ("deepseek_v3", {"n_routed_experts": 8, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "q_lora_rank": 64,
                     "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                     "num_key_value_heads": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}),
]  # fmt: skip


def traced(
    model_type: str, extra: dict[str, Any], micro: int, seq: int, checkpointing: bool
) -> tuple[int, int, Any]:
    """Peak bytes of forward and of backward above the parameters, and the configuration."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fused_probe", fused)
    values = {**BASE, **extra}
    if model_type in ("phi", "qwen2", "qwen2_moe") or model_type.startswith("deepseek"):
        values.pop("head_dim")
    if model_type == "gpt2":
        values = {
            k: v
            for k, v in values.items()
            if k.startswith("n_") or k.endswith("pdrop") or k in ("vocab_size", "use_cache")
        }
    config = transformers.CONFIG_MAPPING[model_type](**values)
    config._attn_implementation = "fused_probe"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.zeros(micro, seq, dtype=torch.long, device="meta")
    live = Live()
    for p in [*model.parameters(), *model.buffers(), ids]:
        live.known[p.untyped_storage()._cdata] = 0  # views of these are no activations
    with live:
        out = model(input_ids=ids, labels=ids)
        loss = out.loss
        del out
        forward = live.peak
        live.peak = live.now
        loss.backward()
    return forward, live.peak, config


def ours(config: Any, micro: int, seq: int, checkpointing: bool) -> tuple[int, int]:
    shape = shape_from_config(config.to_dict(), "x", "x")
    training = Training(micro_batch=micro, seq=seq, checkpointing=checkpointing)
    settings, _notes = read_settings(
        {"bf16": {"enabled": True}}, training, shape, release="0.19.8", ranks=1, ranks_per_node=1
    )
    run = _Run(shape, settings, 0)
    run._micro_step()
    run.mem.finish()
    return run.mem.peaks["forward"][0], run.mem.peaks["backward"][0]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("model_type", "extra"), CASES, ids=[f"{t}-{i}" for i, (t, _e) in enumerate(CASES)])
def test_peaks_match_the_real_class(model_type: str, extra: dict[str, Any], checkpointing: bool) -> None:
    micro, seq = 2, 256
    forward, backward, config = traced(model_type, extra, micro, seq, checkpointing)
    f, b = ours(config, micro, seq, checkpointing)
    print(
        f"{model_type} ckpt={checkpointing}: forward {f / forward - 1:+.2%} backward {b / backward - 1:+.2%}"
    )
    assert f == pytest.approx(forward, rel=0.04)
    assert b == pytest.approx(backward, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("model_type", "extra"), MIXTURES, ids=[t for t, _e in MIXTURES])
def test_mixtures_are_within_their_range(model_type: str, extra: dict[str, Any], checkpointing: bool) -> None:
    """Approximate, and the estimate says so: the wider range of these families must hold."""
    forward, backward, config = traced(model_type, extra, 2, 256, checkpointing)
    f, b = ours(config, 2, 256, checkpointing)
    print(
        f"{model_type} ckpt={checkpointing}: forward {f / forward - 1:+.2%} backward {b / backward - 1:+.2%}"
    )
    assert b == pytest.approx(backward, rel=0.2)
