"""The training cases that are measured on real GPUs, and which of them are set aside before any tuning.

A case is a plain dict (JSON), read by ``measure_case.py`` (runs it) and ``compare_rows.py`` (predicts it):

- ``name``, ``family`` (how errors are grouped), ``model`` (a key of ``MODELS``), ``ds`` (the ds_config), ``world``;
- ``mb`` micro batch, ``seq`` tokens, ``ckpt`` activation checkpointing, ``reentrant``, ``attn`` eager|sdpa;
- ``prec`` bf16|fp16|fp32 of the run; the weights are made in that type;
- ``zero_init`` model built under zero.Init; ``load`` gpu|cpu, where it is made otherwise;
- ``lora`` rank, ``targets`` module names or "all-linear", ``dropout``;
- ``client`` optimizer that the script makes (``adamw_torch``), else the one of ``ds``;
- ``loop`` plain|hf; ``hold`` the plain loop still names the model's output (and its logits) in backward;
- ``loss`` chunked (DeepSpeed's) | liger (its fused linear cross entropy), else that of transformers;
- ``quant`` nf4|int8 (bitsandbytes), ``kbit`` peft's ``prepare_model_for_kbit_training``;
- ``load_prec`` type of the weights when it is not the run's; ``save`` 16bit|checkpoint, written at the end;
- ``sp`` ranks that share a sequence (Ulysses); tensor parallelism is ``tensor_parallel.autotp_size`` of ``ds``;
- ``expandable`` expandable segments; ``threshold`` also find the cap at which it runs out of memory;
- ``alone`` nothing else on the card, so that what NVML counts belongs to it; ``steps``.

Order is value: a run that is cut short has measured the cases that matter most.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Case = dict[str, Any]

MODELS: dict[str, dict[str, Any]] = {
    "smol-360m": {"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                      "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49152, "tie_word_embeddings": True},
    "qwen2-0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                       "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-0.6b": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                       "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                       "tie_word_embeddings": True},
    "pythia-1b": {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 8, "vocab_size": 50304, "tie_word_embeddings": False},
    "llama-1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "qwen2-1.5b": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                       "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "gemma-2b": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
                     "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000,
                     "tie_word_embeddings": True},
    "llama-3b": {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                     "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "llama-7b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False},
    "tinyllama": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
    "smol-1.7b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                  "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152, "tie_word_embeddings": True},
    "qwen3-1.7b": {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "qwen2-3b": {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                 "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "mistral-2b": {"model_type": "mistral", "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 24,
                   "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32768, "sliding_window": None,
                   "tie_word_embeddings": False},
    "pythia-410m": {"model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                    "num_attention_heads": 16, "vocab_size": 50304, "tie_word_embeddings": False},
    "phi3-1b": {"model_type": "phi3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
                "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32064, "tie_word_embeddings": False,
                "pad_token_id": 0},
    "gemma3-1b": {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                  "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
                  "tie_word_embeddings": True},
    "tiny": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "tiny-qwen2": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "tiny-qwen3": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
                       "tie_word_embeddings": True},
    "tiny-neox": {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "vocab_size": 512, "tie_word_embeddings": False},
    "tiny-gemma": {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
                       "tie_word_embeddings": True},
}  # fmt: skip
"""Fields of the ``config.json`` of models of these sizes; weights are random. ``tiny`` ones are for a CPU."""

POSITIONS = 8192


def group(name: str) -> str:
    """``tuned`` rows were looked at when the model was written. A third was not until it was done (``aside``), chosen
    by the hash of the name before anything was measured; ``blind`` ones were predicted first."""
    return "blind" if name.startswith("b-") else "aside" if aside(name) else "tuned"


def aside(name: str) -> bool:
    """Whether the case of this name is set aside, a third of them."""
    return hashlib.sha256(name.encode()).digest()[0] % 3 == 0


def case(
    name: str,
    family: str,
    model: str,
    stage: int,
    *,
    prec: str = "bf16",
    gas: int = 1,
    mb: int = 1,
    optimizer: str | None = "AdamW",
    oo: dict[str, Any] | None = None,
    op: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    accumulate: str | None = None,
    world: int = 1,
    **more: Any,
) -> Case:
    """One case. ``oo``/``op``: keys of ``offload_optimizer``/``offload_param`` beside the device (cpu)."""
    section: dict[str, Any] = {"stage": stage, **(zero or {})}
    if oo is not None:
        section["offload_optimizer"] = {"device": "cpu", **oo}
    if op is not None:
        section["offload_param"] = {"device": "cpu", **op}
    ds: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": mb,
        "gradient_accumulation_steps": gas,
        "zero_optimization": section,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    if prec in ("bf16", "fp16"):
        ds[prec] = {"enabled": True}
    if prec == "fp16":
        ds[prec]["initial_scale_power"] = 8  # no step may be skipped: there are three
    if optimizer is not None:
        ds["optimizer"] = {"type": optimizer, "params": {"lr": 1e-5}}
        if optimizer != "AdamW":
            ds["zero_allow_untested_optimizer"] = True
    if accumulate is not None:
        ds["data_types"] = {"grad_accum_dtype": accumulate}
    out: Case = {
        "name": name, "family": family, "model": model, "world": world, "ds": ds, "prec": prec, "mb": mb,
        "seq": 1024, "ckpt": True, "attn": "sdpa", "load": "gpu", "loop": "plain", "steps": 3,
    }  # fmt: skip
    return {**out, **more}


def client(name: str, family: str, model: str, stage: int, **more: Any) -> Case:
    """A case whose script makes torch.optim.AdamW."""
    return case(name, family, model, stage, optimizer=None, client="adamw_torch", **more)


def _auto(hidden: int) -> dict[str, int]:
    """What transformers writes for ``auto`` at stage 3."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


_NOTHING_LIVE = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}

ONE: list[Case] = [
    # need no compiled kernel: they run while the kernels are built
    client("s2-llama1b-torchadamw", "optimizer", "llama-1b", 2, threshold=True),
    client("s3-qwen1.5b-torchadamw", "optimizer", "qwen2-1.5b", 3),
    client("s0-qwen0.5b-torchadamw", "optimizer", "qwen2-0.5b", 0),
    client("hf-s2-qwen0.5b-torchadamw", "hf", "qwen2-0.5b", 2, loop="hf", load="cpu", mb=2),
    client("s3-lora-llama7b-torchadamw", "lora", "llama-7b", 3, lora=8),
    client("s1-smol-torchadamw-fp32", "precision", "smol-360m", 1, prec="fp32"),
    case("s3-llama7b-sgd", "optimizer", "llama-7b", 3, optimizer="SGD"),
    case("s2-pythia-sgd-s4096", "optimizer", "pythia-1b", 2, optimizer="SGD", seq=4096),
    # stage 3: parameter offload, LoRA
    case("s3-both-qwen0.5b-pin", "offload", "qwen2-0.5b", 3, oo={"pin_memory": True}, op={"pin_memory": True}),
    case("s3-param-qwen0.5b", "offload", "qwen2-0.5b", 3, op={"pin_memory": True}),
    case("s3-lora-llama7b-init", "lora", "llama-7b", 3, lora=16, zero_init=True),
    case("s3-lora-llama3b-noinit", "lora", "llama-3b", 3, lora=16, seq=2048, threshold=True),
    case("s3-both-qwen0.5b-nopin", "offload", "qwen2-0.5b", 3, oo={"pin_memory": False}, op={"pin_memory": False}, zero_init=True),
    case("s3-param-lora-llama3b", "offload", "llama-3b", 3, op={"pin_memory": True}, lora=16, zero_init=True),
    # eager attention
    case("s2-llama1b-eager-s2048", "eager", "llama-1b", 2, attn="eager", seq=2048, threshold=True),
    case("s2-qwen0.5b-eager-nockpt", "eager", "qwen2-0.5b", 2, attn="eager", ckpt=False, mb=2),
    case("s3-pythia-eager", "eager", "pythia-1b", 3, attn="eager", seq=2048),
    case("s2-qwen0.5b-eager-fp16-s2048", "eager", "qwen2-0.5b", 2, attn="eager", prec="fp16", seq=2048),
    # streams and buckets
    case("s1-llama1b-overlap", "buckets", "llama-1b", 1, zero={"overlap_comm": True}, threshold=True),
    case("s2-llama1b-overlap-rbs5e7", "buckets", "llama-1b", 2, zero={"overlap_comm": True, "reduce_bucket_size": 50_000_000}, threshold=True),
    case("s2-qwen1.5b-rbs2e8-s2048", "buckets", "qwen2-1.5b", 2, zero={"reduce_bucket_size": 200_000_000}, seq=2048),
    case("s3-llama1b-auto", "buckets", "llama-1b", 3, zero=_auto(2048), threshold=True),
    case("s3-llama3b-nothing-live", "buckets", "llama-3b", 3, zero={**_NOTHING_LIVE, "reduce_bucket_size": 50_000_000}, zero_init=True, threshold=True),
    case("s3-qwen1.5b-sub1e8-live3e8", "buckets", "qwen2-1.5b", 3, zero={"sub_group_size": 100_000_000, "stage3_max_live_parameters": 300_000_000}),
    case("s3-qwen0.5b-nooverlap-persist1e6", "buckets", "qwen2-0.5b", 3, zero={"overlap_comm": False, "stage3_param_persistence_threshold": 1_000_000}),
    case("s2-qwen3-noncontiguous", "buckets", "qwen3-0.6b", 2, zero={"contiguous_gradients": False}),
    # precision
    case("s2-llama1b-fp16", "precision", "llama-1b", 2, prec="fp16", threshold=True),
    case("s3-qwen0.5b-fp16", "precision", "qwen2-0.5b", 3, prec="fp16"),
    case("s0-qwen3-fp16", "precision", "qwen3-0.6b", 0, prec="fp16"),
    case("s2-qwen0.5b-fp32", "precision", "qwen2-0.5b", 2, prec="fp32", threshold=True),
    case("s3-qwen0.5b-fp32-s2048", "precision", "qwen2-0.5b", 3, prec="fp32", seq=2048),
    # accumulation
    case("s2-llama1b-gas4", "accumulation", "llama-1b", 2, gas=4, threshold=True),
    case("s1-qwen1.5b-gas4", "accumulation", "qwen2-1.5b", 1, gas=4),
    case("s3-qwen0.5b-gas4", "accumulation", "qwen2-0.5b", 3, gas=4),
    case("s1-llama1b-accum32", "accumulation", "llama-1b", 1, accumulate="fp32", threshold=True),
    case("s2-qwen1.5b-accum32", "accumulation", "qwen2-1.5b", 2, accumulate="fp32"),
    case("s3-llama1b-accum32-gas2", "accumulation", "llama-1b", 3, accumulate="fp32", gas=2),
    case("s0-qwen0.5b-accum32-gas2", "accumulation", "qwen2-0.5b", 0, accumulate="fp32", gas=2),
    # long sequences, no checkpointing
    case("s2-qwen1.5b-s8192", "sequence", "qwen2-1.5b", 2, seq=8192, threshold=True),
    case("s2-llama1b-nockpt-s4096", "sequence", "llama-1b", 2, seq=4096, ckpt=False, threshold=True),
    case("s3-llama3b-s4096", "sequence", "llama-3b", 3, seq=4096, zero_init=True),
    case("s2-qwen3-nockpt-s2048", "sequence", "qwen3-0.6b", 2, seq=2048, ckpt=False, mb=2, threshold=True),
    case("s3-pythia-nockpt-s2048", "sequence", "pythia-1b", 3, seq=2048, ckpt=False, mb=2),
    case("s2-gemma2b-nockpt-s512", "sequence", "gemma-2b", 2, seq=512, ckpt=False, mb=4),
    case("s2-qwen1.5b-reentrant-s4096", "sequence", "qwen2-1.5b", 2, seq=4096, reentrant=True),
    case("s2-smol-s8192-mb2", "sequence", "smol-360m", 2, seq=8192, mb=2),
    # the Trainer, loading on the CPU, the logits
    case("hf-s3-qwen0.5b-init", "hf", "qwen2-0.5b", 3, loop="hf", zero_init=True, mb=2),
    case("hf-s2-llama1b-nockpt-s2048", "hf", "llama-1b", 2, loop="hf", load="cpu", ckpt=False, seq=2048),
    case("hf-s2-lora-llama3b", "hf", "llama-3b", 2, loop="hf", load="cpu", lora=16, seq=2048),
    case("hf-s0-qwen3-gas2", "hf", "qwen3-0.6b", 0, loop="hf", load="cpu", gas=2),
    case("s2-llama3b-cpu", "load", "llama-3b", 2, load="cpu"),
    case("s3-llama1b-cpu", "load", "llama-1b", 3, load="cpu"),
    case("s2-llama1b-hold-s4096", "sequence", "llama-1b", 2, seq=4096, hold=True),
    # more offload and adapters
    case("s2-oo-qwen0.5b-gas4", "offload", "qwen2-0.5b", 2, oo={"pin_memory": True}, gas=4, threshold=True),
    case("s1-oo-smol-nopin", "offload", "smol-360m", 1, oo={"pin_memory": False}),
    case("s3-oo-qwen0.5b-ratio-sub5e7", "offload", "qwen2-0.5b", 3, oo={"ratio": 0.5}, zero={"sub_group_size": 50_000_000}, zero_init=True),
    case("s3-both-llama1b-gas2", "offload", "llama-1b", 3, oo={"pin_memory": False}, op={"pin_memory": True}, gas=2, zero_init=True),
    case("s2-lora-qwen1.5b-qv-s4096", "lora", "qwen2-1.5b", 2, lora=8, targets=["q_proj", "v_proj"], seq=4096, threshold=True),
    case("s3-lora-qwen0.5b-cpu-dropout", "lora", "qwen2-0.5b", 3, lora=32, load="cpu", dropout=0.05, seq=2048),
    case("s2-lora-qwen3-nockpt", "lora", "qwen3-0.6b", 2, lora=16, ckpt=False, seq=2048),
    # allocator, other optimizers, the card for itself
    case("s2-llama1b-expandable", "allocator", "llama-1b", 2, expandable=True, threshold=True),
    case("s3-qwen1.5b-expandable", "allocator", "qwen2-1.5b", 3, expandable=True),
    case("s3-gemma2b-alone", "base", "gemma-2b", 3, alone=True),
    case("s2-qwen0.5b-alone-eager", "base", "qwen2-0.5b", 2, attn="eager", alone=True),
    case("s2-llama1b-lion", "optimizer", "llama-1b", 2, optimizer="Lion"),
    case("s2-qwen0.5b-muon", "optimizer", "qwen2-0.5b", 2, optimizer="Muon"),
]  # fmt: skip

TWO: list[Case] = [
    client("x2-s2-llama1b-torchadamw", "optimizer", "llama-1b", 2, world=2),
    client("x2-s3-lora-llama7b-torchadamw", "lora", "llama-7b", 3, lora=8, zero_init=True, world=2),
    client("x2-hf-s3-qwen0.5b-torchadamw", "hf", "qwen2-0.5b", 3, loop="hf", zero_init=True, mb=2, world=2),
    case("x2-s3-param-qwen0.5b", "offload", "qwen2-0.5b", 3, op={"pin_memory": True}, oo={"pin_memory": True}, world=2),
    case("x2-s2-llama1b-overlap", "buckets", "llama-1b", 2, zero={"overlap_comm": True}, world=2, threshold=True),
    case("x2-s3-llama3b-auto", "buckets", "llama-3b", 3, zero=_auto(3072), zero_init=True, world=2, threshold=True),
    case("x2-s1-llama1b-accum32", "accumulation", "llama-1b", 1, accumulate="fp32", world=2),
    case("x2-s3-lora-llama3b-noinit", "lora", "llama-3b", 3, lora=16, seq=2048, world=2),
    case("x2-s3-qwen1.5b-s8192", "sequence", "qwen2-1.5b", 3, seq=8192, world=2),
    case("x2-s1-qwen1.5b-overlap-gas4", "buckets", "qwen2-1.5b", 1, gas=4, zero={"overlap_comm": True}, world=2),
    case("x2-s2-qwen0.5b-fp32", "precision", "qwen2-0.5b", 2, prec="fp32", world=2),
    case("x2-s3-pythia-nothing-live", "buckets", "pythia-1b", 3, zero={**_NOTHING_LIVE}, world=2),
    case("x2-s3-llama7b-s2048-alone", "base", "llama-7b", 3, seq=2048, zero_init=True, world=2, alone=True),
    case("x2-s2-gemma2b-fp16", "precision", "gemma-2b", 2, prec="fp16", world=2),
]  # fmt: skip

_NVME = {"device": "nvme", "nvme_path": "/tmp/swap"}


def tensor_parallel(c: Case, size: int) -> Case:
    """The case with its linear layers split over ``size`` ranks (AutoTP)."""
    return {**c, "ds": {**c["ds"], "tensor_parallel": {"autotp_size": size}}, "load": "cpu"}


MORE: list[Case] = [
    # need no compiled kernel
    client("s2-lora-llama7b-s8192", "lora", "llama-7b", 2, lora=16, seq=8192),
    client("s2-lora-llama7b-reentrant-s8192", "reentrant", "llama-7b", 2, lora=16, seq=8192, reentrant=True),
    client("s3-param-lora-qwen1.5b", "offload", "qwen2-1.5b", 3, op={"pin_memory": True}, lora=8, zero_init=True),
    client("s3-param-lora-llama3b-nopin", "offload", "llama-3b", 3, op={"pin_memory": False}, lora=16),
    client("s2-qlora-llama3b", "qlora", "llama-3b", 2, lora=16, quant="nf4", kbit=True, seq=2048),
    client("s2-qlora-qwen1.5b-nokbit-s4096", "qlora", "qwen2-1.5b", 2, lora=8, quant="nf4", seq=4096),
    client("s2-qlora-qwen1.5b-int8", "qlora", "qwen2-1.5b", 2, lora=16, quant="int8", seq=2048),
    client("s2-llama1b-liger-s8192", "loss", "llama-1b", 2, loss="liger", seq=8192),
    client("s2-llama1b-chunked-s8192", "loss", "llama-1b", 2, loss="chunked", seq=8192, threshold=True),
    client("s3-qwen1.5b-chunked-nockpt-mb2", "loss", "qwen2-1.5b", 3, loss="chunked", ckpt=False, mb=2),
    client("s3-lora-qwen1.5b-liger-s8192", "loss", "qwen2-1.5b", 3, loss="liger", lora=16, seq=8192),
    client("s2-qwen1.5b-cpu32", "load", "qwen2-1.5b", 2, load="cpu", load_prec="fp32"),
    client("s3-smol-eager-mb2-gas2", "eager", "smol-360m", 3, attn="eager", mb=2, gas=2),
    # with FusedAdam
    case("s2-smol-reentrant-s4096-mb4", "reentrant", "smol-360m", 2, reentrant=True, seq=4096, mb=4),
    case("s3-pythia-reentrant-s4096", "reentrant", "pythia-1b", 3, reentrant=True, seq=4096, mb=2),
    case("s2-smol-muon-s2048", "muon", "smol-360m", 2, optimizer="Muon", seq=2048),
    case("s2-llama1b-muon", "muon", "llama-1b", 2, optimizer="Muon"),
    case("s1-qwen3-muon-gas2", "muon", "qwen3-0.6b", 1, optimizer="Muon", gas=2),
    case("s3-qwen1.5b-save16", "save", "qwen2-1.5b", 3, zero={"stage3_gather_16bit_weights_on_model_save": True}, zero_init=True, save="16bit"),
    case("s2-smol-save", "save", "smol-360m", 2, save="checkpoint"),
    case("s3-smol-save", "save", "smol-360m", 3, save="checkpoint"),
    case("hf-s2-qwen1.5b-mb2-gas2", "hf", "qwen2-1.5b", 2, loop="hf", load="cpu", mb=2, gas=2),
    case("hf-s3-llama1b-init-s4096", "hf", "llama-1b", 3, loop="hf", zero_init=True, seq=4096),
    case("s2-qwen0.5b-mb4-gas4", "accumulation", "qwen2-0.5b", 2, mb=4, gas=4, threshold=True),
    case("s3-pythia-fp32-gas2", "precision", "pythia-1b", 3, prec="fp32", gas=2),
    case("s1-qwen3-nockpt-mb4", "sequence", "qwen3-0.6b", 1, ckpt=False, mb=4),
    # with CPUAdam and the asynchronous I/O
    case("s3-nvme-oo-qwen0.5b", "nvme", "qwen2-0.5b", 3, oo=_NVME),
    case("s3-nvme-both-qwen0.5b", "nvme", "qwen2-0.5b", 3, oo=_NVME, op={**_NVME, "buffer_size": 200_000_000}, zero_init=True),
    case("s3-nvme-both-qwen3-sub1e8", "nvme", "qwen3-0.6b", 3, oo={**_NVME, "buffer_count": 5}, op={**_NVME, "buffer_size": 160_000_000, "buffer_count": 8}, zero={"sub_group_size": 100_000_000}),
    case("s3-both-lora-llama3b", "offload", "llama-3b", 3, oo={"pin_memory": True}, op={"pin_memory": True}, lora=16, zero_init=True),
    case("s2-oo-llama1b-s4096-pin", "offload", "llama-1b", 2, oo={"pin_memory": True}, seq=4096),
]  # fmt: skip
"""Settings that the first sets do not have, on one card."""

MORE_TWO: list[Case] = [
    client("x2-s2-qwen1.5b-torchadamw-gas2", "threshold", "qwen2-1.5b", 2, gas=2, world=2, threshold=True),
    client("x2-s3-llama1b-s4096", "threshold", "llama-1b", 3, seq=4096, world=2, threshold=True),
    client("x2-s2-lora-llama3b-s4096", "threshold", "llama-3b", 2, lora=16, seq=4096, world=2, threshold=True),
    client("x2-s1-pythia-nockpt", "threshold", "pythia-1b", 1, ckpt=False, mb=2, world=2, threshold=True),
    client("x2-s0-qwen0.5b", "stage0", "qwen2-0.5b", 0, world=2),
    client("x2-s3-param-lora-llama3b", "offload", "llama-3b", 3, op={"pin_memory": True}, lora=16, zero_init=True, world=2),
    client("x2-s2-qwen1.5b-liger-s4096", "loss", "qwen2-1.5b", 2, loss="liger", seq=4096, world=2),
    tensor_parallel(client("x2-tp2-s1-llama1b", "tp", "llama-1b", 1, world=2, seq=2048), 2),
    tensor_parallel(client("x2-tp2-s2-llama3b-nockpt", "tp", "llama-3b", 2, world=2, ckpt=False), 2),
    client("x2-sp2-s3-llama1b-s8192", "sp", "llama-1b", 3, sp=2, seq=8192, world=2),
    client("x2-sp2-s2-qwen1.5b-nockpt", "sp", "qwen2-1.5b", 2, sp=2, seq=4096, ckpt=False, world=2),
    case("x2-s3-qwen1.5b-save16", "save", "qwen2-1.5b", 3, zero={"stage3_gather_16bit_weights_on_model_save": True}, save="16bit", world=2),
    case("x2-s2-qwen0.5b-muon", "muon", "qwen2-0.5b", 2, optimizer="Muon", world=2),
    case("x2-hf-s2-llama1b", "hf", "llama-1b", 2, loop="hf", load="cpu", world=2),
    case("x2-s3-qwen3-reentrant-mb4", "reentrant", "qwen3-0.6b", 3, reentrant=True, mb=4, world=2),
    case("x2-s3-pythia-eager", "eager", "pythia-1b", 3, attn="eager", world=2),
    case("x2-s2-oo-qwen0.5b-gas2", "offload", "qwen2-0.5b", 2, oo={"pin_memory": True}, gas=2, world=2),
    case("x2-s3-nvme-both-qwen0.5b", "nvme", "qwen2-0.5b", 3, oo=_NVME, op={**_NVME, "buffer_size": 80_000_000}, world=2),
]  # fmt: skip

BLIND: list[Case] = [
    # no compiled kernel: they run while the kernels are built
    client("b-s2-tinyllama-mb3-s3072", "plain", "tinyllama", 2, mb=3, seq=3072, threshold=True),
    client("b-s3-qwen3b-init-s2560", "plain", "qwen2-3b", 3, zero_init=True, seq=2560),
    client("b-s2-qlora-smol1.7b-s3000", "qlora", "smol-1.7b", 2, lora=32, quant="nf4", kbit=True, seq=3000),
    client("b-s2-qlora-tinyllama-int8", "qlora", "tinyllama", 2, lora=8, quant="int8", seq=1536),
    client("b-s2-lora-mistral-qkvo-nockpt", "lora", "mistral-2b", 2, lora=64, targets=["q_proj", "k_proj", "v_proj", "o_proj"], ckpt=False, seq=3072),
    client("b-s3-param-lora-mistral", "offload", "mistral-2b", 3, op={"pin_memory": True}, lora=8, zero_init=True, seq=2048),
    client("b-s2-smol1.7b-liger-s16384", "loss", "smol-1.7b", 2, loss="liger", seq=16384),
    client("b-s3-gemma2b-chunked-s4096", "loss", "gemma-2b", 3, loss="chunked", seq=4096),
    client("b-s1-qwen3-1.7b-gas3-overlap", "accumulation", "qwen3-1.7b", 1, gas=3, zero={"overlap_comm": True}, seq=1536),
    client("b-s0-pythia410m-fp16-mb8", "precision", "pythia-410m", 0, prec="fp16", mb=8, seq=512),
    client("b-s2-phi3-mb2", "family", "phi3-1b", 2, mb=2),
    client("b-s2-gemma3-s2048", "family", "gemma3-1b", 2, seq=2048),
    client("b-s3-mistral-nockpt-s1536", "plain", "mistral-2b", 3, ckpt=False, seq=1536),
    # FusedAdam, CPUAdam, asynchronous I/O
    case("b-s2-tinyllama-reentrant-mb6-expandable", "reentrant", "tinyllama", 2, reentrant=True, mb=6, seq=2048, expandable=True),
    case("b-s2-tinyllama-muon-s4096", "muon", "tinyllama", 2, optimizer="Muon", seq=4096),
    case("b-hf-s3-qwen3-1.7b-auto", "hf", "qwen3-1.7b", 3, loop="hf", zero_init=True, zero=_auto(2048), mb=2),
    case("b-s2-oo-smol1.7b-mb2", "offload", "smol-1.7b", 2, oo={"pin_memory": True}, mb=2, seq=2048),
    case("b-s3-both-tinyllama-gas2", "offload", "tinyllama", 3, oo={"pin_memory": True}, op={"pin_memory": True}, gas=2, seq=4096),
    case("b-s3-oo-qwen3-1.7b-nopin-sub3e8", "offload", "qwen3-1.7b", 3, oo={"pin_memory": False}, zero={"sub_group_size": 300_000_000}, zero_init=True),
    case("b-s3-nvme-both-tinyllama", "nvme", "tinyllama", 3, oo=_NVME, op={**_NVME, "buffer_size": 80_000_000}, zero_init=True),
]  # fmt: skip
"""Other models, lengths and combinations: predicted (``blind.json``) before any of them was measured."""

BLIND_TWO: list[Case] = [
    client("b-x2-s3-tinyllama-mb2-s4096", "plain", "tinyllama", 3, mb=2, seq=4096, world=2, threshold=True),
    client("b-x2-s2-qwen3b-overlap-gas2", "accumulation", "qwen2-3b", 2, gas=2, zero={"overlap_comm": True}, world=2),
    client("b-x2-s2-mistral-s6144", "plain", "mistral-2b", 2, seq=6144, world=2, threshold=True),
    tensor_parallel(client("b-x2-tp2-s1-tinyllama", "tp", "tinyllama", 1, seq=2048, world=2), 2),
    client("b-x2-sp2-s3-mistral-s16384-liger", "sp", "mistral-2b", 3, sp=2, loss="liger", seq=16384, world=2),
    client("b-x2-s2-qlora-smol1.7b", "qlora", "smol-1.7b", 2, lora=16, quant="nf4", world=2),
    client("b-x2-s3-param-lora-mistral", "offload", "mistral-2b", 3, op={"pin_memory": True}, lora=16, zero_init=True, world=2),
    client("b-x2-s1-pythia410m-fp16-nockpt-mb4", "precision", "pythia-410m", 1, prec="fp16", ckpt=False, mb=4, world=2),
    case("b-x2-hf-s3-qwen3-1.7b", "hf", "qwen3-1.7b", 3, loop="hf", zero_init=True, seq=2048, world=2),
    case("b-x2-s2-oo-tinyllama", "offload", "tinyllama", 2, oo={"pin_memory": True}, seq=3072, world=2),
]  # fmt: skip


def tiny(cases: list[Case]) -> list[Case]:
    """The same cases with models and lengths that a CPU trains in seconds, to try the scripts without a GPU."""
    models = {"qwen2": "tiny-qwen2", "qwen3": "tiny-qwen3", "gpt_neox": "tiny-neox", "gemma": "tiny-gemma"}
    out = []
    for c in cases:
        zero = {k: v for k, v in c["ds"]["zero_optimization"].items() if "bucket" not in k}
        ds = {**c["ds"], "zero_optimization": {**zero, "reduce_bucket_size": 1_000_000}}
        if ds.get("optimizer", {}).get("type") == "AdamW" and "offload_optimizer" not in zero:
            ds["optimizer"] = {
                "type": "AdamW",
                "params": {"lr": 1e-5, "torch_adam": True},
            }  # nothing to compile
        kind = MODELS[c["model"]]["model_type"]
        out.append({**c, "model": models.get(kind, "tiny"), "ds": ds, "seq": 32, "dry": True})
    return out


_REAL = {"one": ONE, "two": TWO, "more": MORE, "more-two": MORE_TWO, "blind": BLIND, "blind-two": BLIND_TWO}
SETS: dict[str, list[Case]] = {**_REAL, **{f"tiny-{name}": tiny(found) for name, found in _REAL.items()}}


def ops(c: Case) -> set[str]:
    """The DeepSpeed kernels that a case needs: builder names, as ``deepspeed.ops.op_builder`` has them."""
    kind = c["ds"].get("optimizer", {}).get("type", "").lower()
    zero = c["ds"]["zero_optimization"]
    offload = zero.get("offload_optimizer")
    aio = {"AsyncIOBuilder"} if "nvme" in json.dumps(zero) else set()
    if offload is not None:
        found = aio | {"CPULionBuilder" if kind == "lion" else "CPUAdamBuilder"}
        return found | ({"FusedAdamBuilder"} if offload.get("ratio", 1.0) < 1 else set())
    return aio | {
        "adamw": {"FusedAdamBuilder"}, "adam": {"FusedAdamBuilder"}, "muon": {"FusedAdamBuilder"},
        "lion": {"FusedLionBuilder"},
    }.get(kind, set())  # fmt: skip


def load_cases(what: str) -> list[Case]:
    """Cases by the name of a set, or from a JSON file holding a list."""
    from pathlib import Path

    if what in SETS:
        return SETS[what]
    data: list[Case] = json.loads(Path(what).read_text(encoding="utf-8"))
    return data
