"""Fails, or stands still, on a GPU in a chosen way: run by ``tests/tools/provoke_gpu.py``.

Without a GPU it runs on the CPU, where only the cases without GPU memory make sense.
"""

import argparse
import datetime
import os
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
parser.add_argument("--how", required=True)
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--at", type=int, default=3, help="the step at which one rank does something else")
parser.add_argument("--limit", type=float, default=0, help="GiB of the card that this process may take")
parser.add_argument("--timeout", type=float, default=600, help="of a collective, seconds")
parser.add_argument("--seconds", type=float, default=300, help="how long somebody sleeps")
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

import deepspeed  # noqa: E402
import torch  # noqa: E402

if args.how == "no-card":
    torch.cuda.set_device(args.local_rank)
GPU = torch.cuda.is_available()
if GPU:
    torch.cuda.set_device(args.local_rank)
    if args.limit:
        whole = torch.cuda.get_device_properties(args.local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit * 2**30 / whole)
device = torch.device("cuda", args.local_rank) if GPU else torch.device("cpu")
deepspeed.init_distributed(
    dist_backend="nccl" if GPU else "gloo", timeout=datetime.timedelta(seconds=args.timeout)
)
rank = torch.distributed.get_rank()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, args.hidden)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(args.hidden, args.hidden, bias=False) for _ in range(args.layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.float().pow(2).mean()


torch.set_default_device(device)
net = Net()
torch.set_default_device("cpu")
if args.how == "client":
    own = torch.optim.AdamW(net.parameters(), lr=1e-4)
else:
    own = None
engine, _, _, _ = deepspeed.initialize(
    model=net,
    model_parameters=net.parameters(),
    config=args.deepspeed_config,
    optimizer=own,
    dist_init_required=False,
)
# DeepSpeed reduces in a clone of the world group, and new_group gives that torch's default time-out
for group in list(torch.distributed.distributed_c10d._world.pg_map):
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=args.timeout), group)
kind = next(engine.module.parameters()).dtype
for step in range(args.steps):
    if args.how == "index" and step == 2:
        x = engine.module.table(torch.full((4,), 64, device=device))
    else:
        x = torch.randn(args.rows, args.hidden, device=device)
        x = x if args.how == "dtype" else x.to(kind)
    if args.how == "overflow" and step >= 1:
        x = x * 1e4
    if args.how == "nan" and step >= 2:
        x = x * float("nan")
    if rank == 1 and step == args.at:
        if args.how == "asleep":
            time.sleep(args.seconds)
        if args.how == "raise":
            raise ValueError("the labels of row 17 are longer than the inputs")
        if args.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.how == "fewer":
            torch.distributed.barrier()  # it believes that the epoch is over
            time.sleep(args.seconds)
    if rank == 0 and step == args.at:
        if args.how == "kill0":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.how == "eat":
            held = []
            while True:
                held.append(bytearray(os.urandom(1 << 20)) * 64)
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(x)
        engine.backward(loss)
        if rank == 0 and engine.gradient_accumulation_steps() > 1:
            print(
                f"step {step * engine.gradient_accumulation_steps() + micro} loss {loss.item():.4f}",
                flush=True,
            )
        engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if args.how in ("asleep", "steady"):
        time.sleep(0.1)
sys.stdout.flush()
if GPU:
    torch.cuda.synchronize()
torch.distributed.destroy_process_group()
