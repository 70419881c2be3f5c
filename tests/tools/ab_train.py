"""A GPT of about 500 M parameters on random tokens made on the card: nothing but forward, backward, step.

What `tests/tools/ab_gpu.py` trains; the model is the one of `dstui/examples/tiny_gpt.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import deepspeed
import torch

_PATH = Path(__file__).resolve().parents[2] / "dstui" / "examples" / "tiny_gpt.py"
_SPEC = importlib.util.spec_from_file_location("tiny_gpt", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
tiny_gpt = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny_gpt)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=1024)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", args.local_rank))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    with device:  # half a billion random numbers take seconds on one thread of a CPU
        model = tiny_gpt.TinyGPT(
            args.vocab, args.hidden, args.layers, max(1, args.hidden // 64), args.seq, checkpointing=False
        )
    engine, _optimizer, _loader, _schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    rows, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step in range(1, args.steps + 1):
        for _ in range(accumulation):
            loss = engine(torch.randint(args.vocab, (rows, args.seq + 1), device=device))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
