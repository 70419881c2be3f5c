#!/usr/bin/env python3
"""A tiny GPT trained with DeepSpeed on data made on the spot.

It needs torch, deepspeed and the standard library, nothing else, and runs wherever they are installed:

    deepspeed --num_gpus 2 tiny_gpt.py --deepspeed --deepspeed_config ds_config.json --steps 60
    torchrun --nproc_per_node 2 tiny_gpt.py --deepspeed --deepspeed_config ds_config.json
    python tiny_gpt.py --deepspeed --deepspeed_config ds_config.json

GPU with NCCL where there is one, otherwise CPU with gloo; any ZeRO stage, any offload. The batch, the
precision, the optimizer and the schedule are the config's. The data is a noisy walk over a fixed
permutation of the vocabulary: a model that learns the permutation brings the loss from ln(vocab) down to
the noise, and most of the way is done within a few dozen steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as fn
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

NOISE = 0.05
"""Share of tokens that do not follow the permutation."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        a = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, h))
        return x + self.down(fn.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Decoder-only transformer; ``forward`` returns the next-token loss of ``(batch, seq + 1)`` token ids."""

    def __init__(
        self, vocab: int, hidden: int, layers: int, heads: int, seq: int, checkpointing: bool
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.token = nn.Embedding(vocab, hidden)
        self.place = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = self.head(self.norm(x))
        return fn.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def make_batch(rows: int, seq: int, vocab: int, draw: torch.Generator) -> torch.Tensor:
    """``(rows, seq + 1)`` token ids: each token is the permutation of the one before, but for the noise."""
    follow = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))
    ids = torch.randint(vocab, (rows, seq + 1), generator=draw)
    keep = torch.rand(rows, seq + 1, generator=draw) >= NOISE
    for t in range(1, seq + 1):
        ids[:, t] = torch.where(keep[:, t], follow[ids[:, t - 1]], ids[:, t])
    return ids


def read_config(path: str) -> dict:
    """The config as DeepSpeed reads it: hjson (comments and trailing commas are legal)."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        import hjson  # a dependency of DeepSpeed

        return hjson.loads(text)
    except ImportError:
        return json.loads(text)


def make_optimizer(model: nn.Module, config: dict, lr: float) -> torch.optim.Optimizer | None:
    """None when the config names an optimizer; otherwise AdamW, DeepSpeed's CPU one where its states are offloaded."""
    if config.get("optimizer"):
        return None
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if offload.get("device", "none") in ("cpu", "nvme"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), lr=lr, adamw_mode=True)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny GPT with DeepSpeed.")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0))
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=0, help="default: hidden / 64")
    parser.add_argument("--seq", type=int, default=64, help="tokens a row")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument(
        "--micro", type=int, default=0, help="rows a micro batch; default: what the config says"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="used when the config names no optimizer")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument(
        "--zero_init", "--zero-init", action="store_true", help="build the model under zero.Init"
    )
    parser.add_argument("--save", metavar="DIR", help="save a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if not args.deepspeed_config:
        parser.error("give a DeepSpeed config with --deepspeed --deepspeed_config FILE")
    return args


def main() -> None:
    args = arguments()
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
    ):  # plain `python tiny_gpt.py`
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = accelerator.device_name() != "cpu"
    if on_gpu:
        accelerator.set_device(local_rank)
    deepspeed.init_distributed(dist_backend=None if on_gpu else "gloo")
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    device = torch.device(accelerator.device_name(local_rank) if on_gpu else "cpu")

    config = read_config(args.deepspeed_config)
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    torch.manual_seed(args.seed)
    heads = args.heads or max(1, args.hidden // 64)
    shape = (args.vocab, args.hidden, args.layers, heads, args.seq, args.checkpointing)
    with deepspeed.zero.Init(
        config_dict_or_path=args.deepspeed_config, enabled=args.zero_init and stage == 3
    ):
        model = TinyGPT(*shape)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=make_optimizer(model, config, args.lr),
        config=args.deepspeed_config,
    )
    rows = args.micro or engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    if rank == 0:
        print(
            f"tiny GPT: {parameters / 1e6:.2f}M parameters, {world} rank(s) on {device.type}, ZeRO stage {stage}, "
            f"{rows} x {accumulation} x {world} rows of {args.seq} tokens a step, {args.steps} steps",
            flush=True,
        )

    draw = torch.Generator().manual_seed(args.seed * 1000 + rank)
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(accumulation):  # the engine updates at the last micro step only
            loss = engine(make_batch(rows, args.seq, args.vocab, draw).to(device))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / accumulation
        deepspeed.comm.all_reduce(total)
        mean = total.item() / world
        if rank == 0:
            rate = rows * args.seq * accumulation * world / (time.perf_counter() - start)
            print(f"step {step} loss {mean:.4f} lr {engine.get_lr()[0]:.3g} tokens/s {rate:.0f}", flush=True)
    if args.save:
        engine.save_checkpoint(args.save, tag=f"step{args.steps}")
        if rank == 0:
            print(f"saved {args.save}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not on_gpu:
        # With gloo and a loaded machine about one interpreter in ten aborts in its own teardown (torch 2.13,
        # "terminate called without an active exception") and would make a run that is done look failed.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
