"""Fails in a chosen way after a few real DeepSpeed steps: the source of the logs in ``tests/data/logs``."""

import argparse
import ctypes
import datetime
import json
import mmap
import os
import resource
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
parser.add_argument("--resume")
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
if args.how == "module":
    import a_package_that_nobody_has  # noqa: F401

import deepspeed  # noqa: E402
import torch  # noqa: E402


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(64, 64)
        self.b = torch.nn.Linear(64, 1)

    def forward(self, x):
        if args.how == "twice":  # a weight that two reentrant checkpoints share
            from torch.utils.checkpoint import checkpoint

            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.a, x, use_reentrant=True)
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
if args.how == "nvcc":  # what a CUDA op asks first; the CPU's own ops ask for no toolkit
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    installed_cuda_version()
if args.how == "template":  # the words of LLaMA-Factory's data/template.py, which is not installed here
    raise ValueError("Template llama9 does not exist.")
if args.how == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    opened = [Path("/dev/null").open() for _ in range(100)]  # noqa: SIM115
short = args.how in ("unequal", "accumulation")
deepspeed.init_distributed(dist_backend="gloo", timeout=datetime.timedelta(seconds=8 if short else 600))
rank = torch.distributed.get_rank()
config = "conf/ds_zero2.json" if args.how == "noconf" else args.deepspeed_config
if args.how == "accumulation":  # each rank with a number of its own
    config = {**json.loads(Path(args.deepspeed_config).read_text()), "gradient_accumulation_steps": 1 + rank}
net = Net()
own = torch.optim.SGD(net.parameters(), lr=0.1) if args.how == "client" else None
engine, _, _, _ = deepspeed.initialize(
    model=net,
    model_parameters=net.parameters(),
    config=config,
    optimizer=own,
)
kind = next(engine.module.parameters()).dtype
if args.resume:
    engine.load_checkpoint(args.resume)
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
    # the same number of micro batches on every rank: with unequal accumulation not the same number of steps
    for _ in range(1 if args.how == "accumulation" else engine.gradient_accumulation_steps()):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if step == 2 and args.how == "shm":
        rows = torch.zeros(8, 4 << 20)  # 16 MiB a row go through /dev/shm
        for _ in torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1):
            pass
    if step == 2 and args.how == "limit":
        # EFBIG in the middle of a file, as a quota does it; the log is shorter
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
    if step == 2 and args.how == "loader":
        for _ in torch.utils.data.DataLoader(Rows(), num_workers=1):
            pass
    if step == 2 and args.how == "nosync":
        with engine.no_sync():
            engine.backward(engine(x))
    if step == 2 and args.how == "index":
        torch.nn.Embedding(8, 4)(torch.tensor([8]))
    if step == 2 and args.how == "weight":
        torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), engine.module.a.weight)
    if step == 2 and args.how == "memory":
        torch.empty(1 << 45, dtype=torch.uint8)
    if step == 2 and args.how in ("save", "limit"):
        engine.save_checkpoint(args.save, client_state={"rows": torch.zeros(1 << 18)})
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
sys.stdout.flush()
# Now and then a thread of torch's gloo is still there when Python ends, and aborts it ("terminate called without an
# active exception", torch 2.13): what is judged came before.
os._exit(0)
