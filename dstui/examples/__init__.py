"""The bundled training scripts and their configs. Importing this loads neither torch nor deepspeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OFFLOADS = ("none", "optimizer", "both")


def tiny_gpt_script() -> Path:
    """The tiny GPT: a script for the engine ``plain``; runs where dstui is not installed."""
    return Path(__file__).resolve().parent / "tiny_gpt.py"


def demo_config(
    *,
    stage: int = 3,
    offload: str = "none",
    steps: int = 60,
    precision: str = "fp32",
    torch_adam: bool = False,
) -> dict[str, Any]:
    """A config for the tiny GPT. ``offload``: one of OFFLOADS; ``precision``: ``fp32``, ``bf16`` or ``fp16``.

    ``torch_adam``: PyTorch's optimizer; DeepSpeed's own is an op that a CPU compiles for a minute.
    The micro batch and the learning rate are such that the loss falls within some thirty steps.
    """
    zero: dict[str, Any] = {"stage": stage}
    if offload in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "both":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-3,
                "warmup_num_steps": max(2, steps // 10),
                "total_num_steps": max(steps, 3),
            },
        },
        "zero_optimization": zero,
    }
    if torch_adam:
        config["optimizer"]["params"]["torch_adam"] = True
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config
