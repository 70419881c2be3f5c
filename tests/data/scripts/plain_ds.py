"""A foreign plain DeepSpeed script, as people write them: argparse, add_config_arguments, its own print style."""

import argparse
import os
import sys

import deepspeed
import torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    x = torch.randn(2048, 32)
    y = (x[:, :4].sum(dim=1, keepdim=True) > 0).float()
    data = torch.utils.data.TensorDataset(x, y)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    for epoch in range(args.epochs):
        for i, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(engine.device), targets.to(engine.device)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if i % 8 == 0 and engine.local_rank in (-1, 0):
                print(f"Epoch {epoch} | iter {i}/{len(loader)} | loss: {loss.item():.4f}")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort in the interpreter's teardown (torch 2.13)


if __name__ == "__main__":
    main()
