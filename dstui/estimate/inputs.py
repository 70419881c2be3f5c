"""What an estimate is asked: model shape, how it is trained, the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["standard", "chunked", "fused"]
"""``standard``: transformers' cross entropy, on logits in fp32. ``chunked``: no fp32 copy of them (DeepSpeed's
``ChunkedCausalLMLoss``). ``fused``: head and loss in one, whole logits never exist (Liger's fused linear one)."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in numbers; fields unknown for a model given only by its size are None.

    ``modules`` is the exact inventory: (name pattern, parameters) in registration order is derived by
    ``dstui.estimate.model``; ``params`` is their sum.
    """

    name: str
    params: int
    source: str
    """Where the numbers come from: a path, ``catalogue``, ``typed``."""
    family: str | None = None
    """``llama qwen2 qwen3 mistral gemma gemma2 gemma3 gpt_neox phi phi3 glm deepseek mixtral qwen_moe gpt2 ...``"""
    hidden: int | None = None
    intermediate: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    dtype: str | None = None
    """torch_dtype of the checkpoint: ``bfloat16 float16 float32``."""
    checkpoint_bytes: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    max_positions: int | None = None
    exact: bool = False
    """True when ``params`` equals what the real class allocates."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Family-specific numbers (qkv bias, q/k norm, moe_intermediate, ...); see ``families.shape_from_config``."""
    notes: tuple[str, ...] = ()
    """What the reader of the model wants said (translated): a count that disagrees, a part left out."""


@dataclass(frozen=True)
class Training:
    """How the script trains; what a ds_config does not say."""

    micro_batch: int | None = None
    """Used only when the config leaves it open (``auto``)."""
    seq: int = 2048
    checkpointing: bool = True
    attention: Attention = "sdpa"
    loss: Loss = "standard"
    reentrant: bool = False
    """``use_reentrant=True`` of gradient checkpointing; transformers 5 and most scripts: False."""
    sequence_parallel: int = 1
    """Ranks that share a sequence (Ulysses), where the config has no ``sequence_parallel_size``."""
    loop: Literal["hf", "plain"] = "plain"
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    quant: Literal["none", "int8", "nf4"] = "none"
    zero_init: bool | None = None
    """Model built under zero.Init at stage 3; None = by engine (HF: yes, plain: no)."""
    load_dtype: str | None = None
    optimizer: str | None = None
    """Optimizer made by the script when the config has none (``adamw_torch`` ...)."""
    param_groups: int = 1
    load_on: Literal["cpu", "gpu"] = "cpu"
    """Where the model is made before ``deepspeed.initialize``."""
    hold_logits: bool | None = None
    """The loop still names the model's output, and so its logits, until the next forward pass has made new ones
    (``out = engine(...)``, and no ``del out``). None: not known, counted in the upper end of the range."""
    expandable: bool | None = None
    """``expandable_segments:True`` in ``PYTORCH_CUDA_ALLOC_CONF``; None = off."""


def expandable_segments(environ: Mapping[str, str]) -> bool:
    """Whether PyTorch would take expandable segments in this environment."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in environ.get(n, "").replace(" ", "").lower() for n in names)
