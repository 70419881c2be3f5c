#!/usr/bin/env python3
"""A Hugging Face Trainer on a tiny, randomly initialised Llama and token data made on the spot.

It needs torch, transformers, accelerate and deepspeed; nothing is downloaded. Every option of
``TrainingArguments`` is taken:

    deepspeed --num_gpus 2 hf_trainer_tiny.py --deepspeed ds_config.json --max_steps 40 --logging_steps 1
    torchrun --nproc_per_node 2 hf_trainer_tiny.py --deepspeed ds_config.json --use_cpu

On a machine without GPU the Trainer wants ``--use_cpu``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class Shape:
    """The model and its data."""

    hidden: int = field(default=192)
    layers: int = field(default=4)
    heads: int = field(default=4)
    vocab: int = field(default=512)
    seq: int = field(default=64)
    rows: int = field(default=4096, metadata={"help": "rows in the data set"})


class Walk(torch.utils.data.Dataset):
    """Rows of tokens that follow a fixed permutation of the vocabulary; labels equal inputs."""

    def __init__(self, rows: int, seq: int, vocab: int) -> None:
        follow = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))
        ids = torch.randint(vocab, (rows, seq), generator=torch.Generator().manual_seed(1))
        for t in range(1, seq):
            ids[:, t] = follow[ids[:, t - 1]]
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def main() -> None:
    shape, training = HfArgumentParser((Shape, TrainingArguments)).parse_args_into_dataclasses()
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.hidden * 3,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            vocab_size=shape.vocab,
            max_position_embeddings=shape.seq,
            use_cache=False,
        )
    )
    data = Walk(shape.rows, shape.seq, shape.vocab)
    trainer = Trainer(model=model, args=training, train_dataset=data)
    trainer.train()
    engine = type(trainer.model_wrapped).__name__
    if training.process_index == 0:
        print(f"trained by {engine} on {training.world_size} rank(s)", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if training.device.type == "cpu":  # gloo may abort in the interpreter's teardown: see tiny_gpt.py
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
