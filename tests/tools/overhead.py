"""How much supervisor and sampler slow a training down, and what they cost themselves.

    python tests/tools/overhead.py [--pairs 12] [--steps 200] [--seconds 240]       two GPUs, one training
    python tests/tools/overhead.py --separate --pairs 5                             a run of its own for each block
    python tests/tools/overhead.py --cpu --pairs 2 --steps 20 --drop 0.2            the same on two gloo ranks

One steady training of a GPT on two ranks (bf16, ZeRO stage 2, torch's AdamW, so that no op is compiled) is started by
dstui. For the blocks *without*, the supervisor and all its threads are stopped by SIGSTOP: it neither computes nor
asks the driver; nothing else differs, the ranks' memory and their place on the machine included. Blocks alternate in
pairs, with-without and without-with in turn; the steps of the first ``--drop`` seconds after each change do not count.
``--separate`` starts the very same command ten times instead, by dstui and as a plain child process in turn.

Printed: the slowdown of the median step over the pairs with its 95 % interval (the wider of a bootstrap over pairs and
Student's t), that of the mean step, clocks of each block, the supervisor's CPU and memory, what a reading of all cards
costs, and whether the driver's traffic counters agree with a known amount of copied bytes. Exit code 1 when the median
step is slowed by 0.5 % or more, or supervisor and sampler need more than 1 % of a core or 60 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
RECORD = struct.Struct("<dd")
"""End of a step on the monotonic clock, its duration; seconds."""
TOLERABLE, CORE, MEMORY = 0.005, 0.01, 60e6
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""


@dataclass
class Block:
    """Steps of one arm, in seconds; ``clocks``: MHz of each card's SMs at the end of the block."""

    watched: bool
    steps: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    cpu: float | None = None
    """Cores' worth of the supervisor's time during the block."""


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.value:+.3%} [{self.low:+.3%}, {self.high:+.3%}]"


def interval(ratios: Sequence[float], draws: int = 10_000, seed: int = 1) -> Interval:
    """Mean of per-pair values with the wider of two 95 % intervals: bootstrap over pairs (percentiles), Student's t."""
    n = len(ratios)
    middle = statistics.fmean(ratios)
    if n < 2:
        return Interval(middle, -math.inf, math.inf)
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(ratios, k=n)) for _ in range(draws))
    boot = means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))]
    half = _T95[min(n - 1, len(_T95)) - 1] * statistics.stdev(ratios) / math.sqrt(n)
    if boot[1] - boot[0] >= 2 * half:
        return Interval(middle, *boot)
    return Interval(middle, middle - half, middle + half)


def paired(blocks: Sequence[Block]) -> list[tuple[Block, Block]]:
    """(with, without) of each two neighbours; an odd last block is left out."""
    found = []
    for a, b in zip(blocks[::2], blocks[1::2], strict=False):
        if a.watched == b.watched:
            raise ValueError("the blocks of a pair must differ")
        found.append((a, b) if a.watched else (b, a))
    return found


def slowdown(blocks: Sequence[Block], middle: Any = statistics.median) -> Interval:
    """By how much the ``middle`` step of the watched blocks is slower than that of their partners."""
    return interval([middle(w.steps) / middle(u.steps) - 1 for w, u in paired(blocks)])


def noise(blocks: Sequence[Block]) -> float:
    """Relative spread of the median step among the unwatched blocks: what an A/A comparison would show."""
    medians = [statistics.median(b.steps) for b in blocks if not b.watched]
    return statistics.stdev(medians) / statistics.fmean(medians) if len(medians) > 1 else math.nan


def steps_between(data: bytes, start: float, end: float) -> list[float]:
    """Durations of the recorded steps that began after ``start`` and ended by ``end``."""
    whole = len(data) // RECORD.size * RECORD.size
    return [took for at, took in RECORD.iter_unpack(data[:whole]) if at - took >= start and at <= end]


# -- the training ----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """One rank. Rank 0 records every step; everything else is done before the first."""
    import gc

    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from dstui.examples.tiny_gpt import TinyGPT

    on_gpu = not args.cpu
    local = int(os.environ["LOCAL_RANK"])
    if on_gpu:
        get_accelerator().set_device(local)
    else:
        torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend=None if on_gpu else "gloo")
    rank = deepspeed.comm.get_rank()
    device = torch.device(f"cuda:{local}" if on_gpu else "cpu")
    torch.manual_seed(0)
    hidden, layers, seq, vocab, micro = (4096, 6, 1024, 8192, 4) if on_gpu else (64, 2, 32, 256, 2)
    model = TinyGPT(vocab, hidden, layers, hidden // 64, seq, False)
    engine, *_rest = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config=args.config,
    )
    ids = torch.randint(vocab, (micro, seq + 1), generator=torch.Generator().manual_seed(rank)).to(device)
    record = open(args.record, "ab") if rank == 0 else None  # noqa: SIM115, PTH123
    gc.collect()
    gc.freeze()
    gc.disable()
    done, limit = 0, args.total or (1 << 60)
    while done < limit:
        begun = time.monotonic()
        engine.backward(engine(ids))
        engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        now = time.monotonic()
        done += 1
        if record is not None:
            record.write(RECORD.pack(now, now - begun))
            if done % 10 == 0:
                record.flush()
    if record is not None:
        record.close()
    torch.distributed.destroy_process_group()
    if not on_gpu:
        os._exit(0)


# -- the measurement -------------------------------------------------------------------------------------------


class Cards:
    """Clocks of the SMs, read once at the end of a block, in both arms alike."""

    def __init__(self, cpu: bool) -> None:
        from dstui.facts.gpu import NvmlSession

        self.session = None if cpu else NvmlSession()

    def clocks(self) -> list[float]:
        readings = self.session.sample() if self.session else ()
        return [float(g.sm_clock) for g in readings if g.sm_clock]


def ticks(pid: int) -> float:
    """CPU seconds of all threads of ``pid``."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def spec(args: argparse.Namespace, record: Path, total: int = 0) -> Any:
    from dstui.runs.spec import RunSpec

    words = ["--train", "--record", str(record), "--config", "{config}", "--total", str(total)]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2 if args.cpu else 8}
    config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "steps_per_print": 1 << 30}
    return RunSpec(
        str(Path(__file__).resolve()),
        (*words, *(["--cpu"] if args.cpu else [])),
        launcher="torchrun",
        python=sys.executable,
        num_gpus=2,
        config=config,
        instrument=False,
        cwd=str(record.parent),
    )


def wait_for_steps(record: Path, n: int, alive: Any, patience: float, since: float = 0.0) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if record.exists() and len(steps_between(record.read_bytes(), since, math.inf)) >= n:
            return
        if not alive():
            raise SystemExit("the training ended too early")
        time.sleep(0.25)
    raise SystemExit(f"no {n} steps within {patience:.0f} s")


def toggled(args: argparse.Namespace, folder: Path, facts: Any) -> tuple[list[Block], dict[str, Any]]:
    """Blocks of one training whose supervisor is stopped and continued."""
    from dstui.runs.control import stop
    from dstui.runs.processes import alive
    from dstui.runs.start import start

    begun = time.monotonic()
    record = folder / "steps"
    run = start(spec(args, record), facts, preflight=False)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    cards, blocks = Cards(args.cpu), []
    try:

        def running() -> bool:
            return run.exit is None

        try:
            wait_for_steps(record, args.warm, running, args.patience)
        except SystemExit as e:
            raise SystemExit(f"{e}\n{run.out_log.read_text(errors='replace')[-3000:]}") from None
        print(f"warm after {time.monotonic() - begun:.0f} s", flush=True)
        for pair in range(args.pairs):
            if pair >= 2 and time.monotonic() - begun > args.seconds:
                print(f"time is over after {pair} pairs")
                break
            for watched in (True, False) if pair % 2 == 0 else (False, True):
                os.kill(supervisor.pid, signal.SIGCONT if watched else signal.SIGSTOP)
                time.sleep(args.drop)
                block, since, before = Block(watched), time.monotonic(), ticks(supervisor.pid)
                wait_for_steps(record, args.steps, running, args.patience, since)
                until, spent = time.monotonic(), ticks(supervisor.pid) - before
                block.clocks = cards.clocks()
                block.cpu = spent / (until - since)
                block.steps = steps_between(record.read_bytes(), since, until)
                blocks.append(block)
                print(line(block), flush=True)
        assert alive(supervisor)
        more = {"memory": peak_memory(supervisor.pid), "last sample": last_sample(run)}
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
        stop(run, now=True)
    return blocks, more


def separate(args: argparse.Namespace, folder: Path, facts: Any) -> tuple[list[Block], dict[str, Any]]:
    """A whole run for each block: by dstui, or the same command as a plain child process."""
    from dstui.runs import command as commands
    from dstui.runs.start import start
    from dstui.runs.store import RunDir

    begun = time.monotonic()
    cards, blocks, more = Cards(args.cpu), [], {"memory": 0, "last sample": ""}
    for pair in range(args.pairs):
        if pair >= 2 and time.monotonic() - begun > args.seconds * (1 - 1 / args.pairs):
            print(f"time is over after {pair} pairs")
            break
        for watched in (True, False) if pair % 2 == 0 else (False, True):
            block = Block(watched)
            record = folder / f"steps-{pair}-{watched}"
            wanted = spec(args, record, args.warm + args.steps)
            if watched:
                run = start(wanted, facts, preflight=False)
                supervisor = run.process("supervisor")
                assert supervisor is not None
                wait_for_steps(record, args.warm, lambda run=run: run.exit is None, args.patience)
                since, before = time.monotonic(), ticks(supervisor.pid)
                wait_for_steps(
                    record, args.warm + args.steps // 2, lambda run=run: run.exit is None, args.patience
                )
                block.cpu = (ticks(supervisor.pid) - before) / (time.monotonic() - since)
                block.clocks = cards.clocks()
                more = {
                    "memory": max(more["memory"], peak_memory(supervisor.pid)),
                    "last sample": last_sample(run),
                }
                while run.exit is None:
                    time.sleep(0.1)
            else:
                home = folder / f"plain-{pair}"
                home.mkdir()
                made = commands.build(wanted, facts, RunDir(home).path)
                for name, text in made.files.items():
                    (home / name).write_text(text)
                with (home / "log").open("wb") as log:
                    child = subprocess.Popen(
                        made.argv, cwd=made.cwd, env={**os.environ, **made.env}, stdout=log, stderr=log
                    )
                    wait_for_steps(
                        record,
                        args.warm + args.steps // 2,
                        lambda child=child: child.poll() is None,
                        args.patience,
                    )
                    block.clocks = cards.clocks()
                    child.wait()
            data = record.read_bytes()
            block.steps = [took for _at, took in RECORD.iter_unpack(data)][args.warm :]
            blocks.append(block)
            print(line(block), flush=True)
    return blocks, more


def last_sample(run: Any) -> str:
    from dstui.runs.samples import read_samples

    samples = read_samples(run.samples_dir, 3)
    return "" if not samples else json.dumps([vars(g) for g in samples[-1].gpus])


def line(b: Block) -> str:
    clocks = "/".join(f"{c:.0f}" for c in b.clocks) or "-"
    cpu = f", supervisor {b.cpu:.2%} of a core" if b.watched and b.cpu is not None else ""
    return (
        f"{'with   ' if b.watched else 'without'} {len(b.steps)} steps, median {statistics.median(b.steps) * 1e3:.3f} ms, "
        f"mean {statistics.fmean(b.steps) * 1e3:.3f} ms, SM {clocks} MHz{cpu}"
    )


def reading() -> str:
    """What one reading of every card costs: wall and CPU time, seconds."""
    from dstui.facts.gpu import NvmlSession

    with NvmlSession() as session:
        session.sample()
        walls, before = [], time.process_time()
        for _ in range(20):
            at = time.perf_counter()
            cards = len(session.sample())
            walls.append(time.perf_counter() - at)
        cpu = (time.process_time() - before) / len(walls)
    return (
        f"a reading of {cards} card(s): {statistics.median(walls) * 1e3:.2f} ms wall (worst {max(walls) * 1e3:.2f}), "
        f"{cpu * 1e3:.2f} ms CPU"
    )


def links(seconds: float = 3.0) -> list[str]:
    """The driver's counters beside a known number of copied bytes: host to card, card to card."""
    import torch

    from dstui.facts.gpu import NvmlSession

    if not torch.cuda.is_available():
        return []
    size = 256 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    first = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    second = torch.empty(size, dtype=torch.uint8, device="cuda:1") if torch.cuda.device_count() > 1 else None
    rows = []
    for name, target, source, out in (
        ("host -> 0", first, host, lambda s: s[0].pcie_rx),
        ("0 -> host", host, first, lambda s: s[0].pcie_tx),
        ("0 -> 1", second, first, lambda s: s[0].nvlink_tx),
        ("1 <- 0", second, first, lambda s: s[1].nvlink_rx),
    ):
        if target is None:
            continue
        with NvmlSession(slow=0) as session:
            session.sample()
            copied, at = 0, time.monotonic()
            while time.monotonic() - at < seconds:
                for _ in range(40):
                    target.copy_(source, non_blocking=True)
                copied += 40 * size
                seen = out(session.sample())  # while it copies: the first one has PCIe measured
                torch.cuda.synchronize(0)
            rate = copied / (time.monotonic() - at)
        shown = "not counted" if seen is None else f"{seen / 1e9:.2f} GB/s, {seen / rate - 1:+.1%}"
        rows.append(f"{name}: copied {rate / 1e9:.2f} GB/s, the driver says {shown}")
    return rows


def report(blocks: Sequence[Block], more: dict[str, Any]) -> list[str]:
    """Prints; the budgets that do not hold."""
    median, mean = slowdown(blocks), slowdown(blocks, statistics.fmean)
    shares = [b.cpu for b in blocks if b.watched and b.cpu is not None]
    cpu = statistics.fmean(shares) if shares else math.nan
    counts = [len(b.steps) for b in blocks]
    print(f"\n{len(paired(blocks))} pairs of {min(counts)}-{max(counts)} steps")
    print(f"slowdown of the median step: {median}   (95 %)")
    print(f"slowdown of the mean step:   {mean}   (95 %)")
    print(f"spread of the median step among the blocks without: {noise(blocks):.3%}")
    if median.width > TOLERABLE:
        print(
            f"the interval is {median.width:.3%} wide: wider than {TOLERABLE:.1%}, so it proves less than it should"
        )
    for watched in (True, False):
        clocks = [c for b in blocks if b.watched is watched for c in b.clocks]
        if clocks:
            print(
                f"SM clocks {'with' if watched else 'without'}: {min(clocks):.0f}-{max(clocks):.0f} MHz, "
                f"mean {statistics.fmean(clocks):.1f}"
            )
    print(f"supervisor and sampler: {cpu:.3%} of a core, {more['memory'] / 1e6:.1f} MB at most")
    print("their last sample:", more["last sample"])
    wrong = []
    if not median.value < TOLERABLE:
        wrong.append("the median step is slowed by 0.5 % or more")
    if not cpu <= CORE:
        wrong.append("more than 1 % of a core")
    if more["memory"] > MEMORY:
        wrong.append("more than 60 MB")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200, help="warm steps a block")
    parser.add_argument("--warm", type=int, default=100, help="steps before the first that counts")
    parser.add_argument("--drop", type=float, default=1.5, help="seconds after a change that do not count")
    parser.add_argument("--seconds", type=float, default=240.0, help="no new pair after that")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds to wait for a block's steps")
    parser.add_argument("--separate", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--total", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        train(args)
        return 0
    from dstui.facts.detect import detect

    os.environ.setdefault("DSTUI_STATE_HOME", tempfile.mkdtemp(prefix="dstui-state-"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    folder = Path(tempfile.mkdtemp(prefix="dstui-overhead-"))
    facts = detect(python=sys.executable)
    if not args.cpu:
        print(reading(), flush=True)
    blocks, more = (separate if args.separate else toggled)(args, folder, facts)
    wrong = report(blocks, more)
    if not args.cpu:
        print(reading())
        print("\n".join(links()))
    print("\nfailures:", "; ".join(wrong) or "none")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
