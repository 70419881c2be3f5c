"""Fails in a chosen way after a few real DeepSpeed steps: the source of the logs in ``tests/data/logs``."""

import argparse
import ctypes
import datetime
import mmap
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
if "--no-local-rank-option" not in sys.argv:
    parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--no-local-rank-option", action="store_true")
parser.add_argument("--how", required=True)
parser.add_argument("--save")
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


if args.how == "arch":
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    class Builder(CUDAOpBuilder):
        def __init__(self):
            super().__init__("nothing")

        def sources(self):
            return []

        def absolute_name(self):
            return "deepspeed.ops.nothing"

    Builder().compute_capability_args(
        cross_compile_archs=os.environ["TORCH_CUDA_ARCH_LIST"].replace(";", " ")
    )
deepspeed.init_distributed(
    dist_backend="gloo", timeout=datetime.timedelta(seconds=8 if args.how == "unequal" else 600)
)
rank = torch.distributed.get_rank()
net = Net()
own = torch.optim.SGD(net.parameters(), lr=0.1) if args.how == "client" else None
engine, _, _, _ = deepspeed.initialize(
    model=net,
    model_parameters=net.parameters(),
    config="conf/ds_zero2.json" if args.how == "noconf" else args.deepspeed_config,
    optimizer=own,
)
kind = next(engine.module.parameters()).dtype
for step in range(6):
    x = torch.randn(4, 64).to(kind)
    if args.how == "unequal" and step == 3 and rank == 1:
        time.sleep(60)  # its batches are used up, and it does something else
    if args.how == "unequal":
        torch.distributed.all_reduce(torch.ones(1))
    if args.how == "floor" and step == 2:  # DeepSpeed's own scaler; fp16 itself needs a GPU
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        scaler = DynamicLossScaler(4.0, 10, 1.0, 1, False)
        while True:
            scaler.update_scale(overflow=True)
    if args.how == "nan" and step >= 2:
        x = x * float("inf")
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if step == 2 and args.how == "shm":
        rows = torch.zeros(8, 4 << 20)  # 16 MiB a row go through /dev/shm
        for _ in torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1):
            pass
    if step == 2 and args.how == "save":
        engine.save_checkpoint(args.save)
    if step == 2 and rank == 1:
        if args.how == "eat":
            held = []
            while True:
                held.append(bytearray(os.urandom(1 << 20)) * 32)
        if args.how == "raise":
            raise ValueError("the labels of row 17 are longer than the inputs")
        if args.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.how == "bus":  # as NCCL and old loaders do it: a sparse file, mapped, then touched
            with Path("/dev/shm/exchange").open("w+b") as f:
                f.truncate(64 << 20)
                mmap.mmap(f.fileno(), 64 << 20).write(b"x" * (64 << 20))
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
