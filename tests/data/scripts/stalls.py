"""Stands still in a chosen way after some real DeepSpeed steps: what ``dstui.runs.stall`` must name.

``--how``: ``loader`` a data set in the rank that blocks; ``workers`` data loader workers that are slow; ``asleep`` one
rank that leaves the loop; ``unequal`` rank 1 has fewer batches; ``checkpoint`` a disk that takes its time; ``silent``
a healthy run that says nothing.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--how", required=True)
parser.add_argument("--at", type=int, default=40, help="the step")
parser.add_argument("--seconds", type=float, default=600)
parser.add_argument("--save", default="checkpoints")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        # two rows of every rank a step; the sampler is sequential, so all ranks block at the same step
        if args.how in ("loader", "workers") and i >= 2 * args.at:
            time.sleep(args.seconds)
        return torch.randn(64)


class SlowDisk:
    """A file on a disk that writes 1 kB a second."""

    def __init__(self, path):
        self.file = Path(path).open("wb")  # noqa: SIM115

    def write(self, data):
        time.sleep(args.seconds if len(data) > 512 else 0.1)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


deepspeed.init_distributed(dist_backend="gloo")
rank = torch.distributed.get_rank()
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=args.deepspeed_config
)
workers = 1 if args.how == "workers" else 0
loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=workers)
for step, x in enumerate(loader, 1):
    if args.how == "unequal" and rank == 1 and step == args.at:
        torch.distributed.barrier()
    if args.how == "asleep" and rank == 1 and step == args.at:
        time.sleep(args.seconds)
    for _ in range(200 if args.how == "silent" else 1):
        loss = net(x).pow(2).mean()
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    if args.how == "checkpoint" and step == args.at:
        if rank == 0:
            folder = Path(args.save) / f"global_step{step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(net.state_dict(), SlowDisk(folder / "mp_rank_00_model_states.pt"))
        torch.distributed.barrier()
    if rank == 0 and args.how != "silent":
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        time.sleep(0.02)
sys.stdout.flush()
os._exit(0)
