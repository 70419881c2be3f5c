"""Fails in a chosen way after a few real DeepSpeed steps: the source of the logs in ``tests/data/logs``."""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--how", required=True)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
if args.how == "module":
    import a_package_that_nobody_has  # noqa: F401

import deepspeed  # noqa: E402
import torch  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(64, 64)
        self.b = torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).pow(2).mean()


deepspeed.init_distributed(dist_backend="gloo")
rank = torch.distributed.get_rank()
net = Net()
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=args.deepspeed_config
)
for step in range(6):
    x = torch.randn(4, 64)
    if args.how == "nan" and step >= 2:
        x = x * float("inf")
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if step == 2 and rank == 1:
        if args.how == "raise":
            raise ValueError("the labels of row 17 are longer than the inputs")
        if args.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.how == "segv":
            ctypes.string_at(0)
        if args.how == "exit":
            sys.exit(3)
        if args.how == "disk":
            Path("/dev/full").write_text("x")
        if args.how == "term":
            os.kill(os.getpid(), signal.SIGTERM)
    if args.how == "slow":
        time.sleep(1)
torch.distributed.destroy_process_group()
