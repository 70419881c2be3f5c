"""What supervisor and sampler cost on a machine with eight GPUs, simulated; exit code 1 when it is too much.

    python tests/bench/supervise.py [--seconds 60] [--gpus 8] [--usec 200]

A real supervisor watches eight ranks that print ten lines a second between them and a step a second each to a csv
file, as csv_monitor does. The cards are those of tests/data/nvml_stub.c behind the real binding: every reading of
utilisation, memory, power and counters takes ``--usec`` microseconds, half of them computing (what a real driver
costs is measured by tests/tools/overhead.py). Budgets: 1 % of one core, 60 MB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
CORE, MEMORY = 0.01, 60e6
RANKS = """
import os, subprocess, sys, time
n = int(sys.argv[1])
code = "import os, sys, time\\nwhile True: print('step', time.time(), 'x' * 150, flush=True); time.sleep(float(sys.argv[1]))"
ranks = [
    subprocess.Popen([sys.executable, "-S", "-c", code, str(n / 10)], env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r)})
    for r in range(n)
]
while all(p.poll() is None for p in ranks):
    time.sleep(1)
"""


def build_stub(folder: Path) -> None:
    source = REPO / "tests" / "data" / "nvml_stub.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True
    )


def seconds_of(pid: int) -> dict[str, float]:
    """CPU seconds by thread name."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_bytes().rpartition(b")")[2].split()
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        found[name] = found.get(name, 0.0) + (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return found


def memory_of(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--usec", type=int, default=200)
    args = parser.parse_args(argv)
    from dstui.facts.model import Facts, Gpu, Interpreter
    from dstui.runs.control import stop
    from dstui.runs.samples import read_samples
    from dstui.runs.spec import RunSpec
    from dstui.runs.start import start

    folder = Path(tempfile.mkdtemp(prefix="dstui-bench-"))
    build_stub(folder)
    (folder / "train.py").write_text(RANKS)
    os.environ["DSTUI_STATE_HOME"] = str(folder / "state")
    os.environ["LD_LIBRARY_PATH"] = str(folder)  # inherited by the supervisor
    os.environ.update(STUB_CARDS=str(args.gpus), STUB_USEC=str(args.usec))
    cards = tuple(Gpu(i, name="NVIDIA H200") for i in range(args.gpus))
    facts = Facts(gpus=cards, interpreters=(Interpreter(sys.executable, "option", "3"),))
    wrapper = folder / "python"  # stands for torchrun, which would want a torch
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} train.py {args.gpus}\n")
    wrapper.chmod(0o755)
    wanted = RunSpec("train.py", launcher="torchrun", python=str(wrapper), cwd=str(folder))
    run = start(wanted, facts, preflight=False)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    pid = supervisor.pid
    csv = run.metrics_dir / "csv" / "Train_Samples_lr.csv"
    csv.parent.mkdir(parents=True)
    try:
        time.sleep(5)
        before, began, resident = seconds_of(pid), time.monotonic(), memory_of(pid, "VmRSS")
        while time.monotonic() - began < args.seconds:
            with csv.open("a") as f:
                f.write("8,0.001\n")
            time.sleep(1)
        took, after = time.monotonic() - began, seconds_of(pid)
        peak, grown = memory_of(pid, "VmHWM"), memory_of(pid, "VmRSS") - resident
        samples = read_samples(run.samples_dir)
    finally:
        stop(run, now=True)
    share = {name: (spent - before.get(name, 0.0)) / took for name, spent in after.items()}
    whole = sum(share.values())
    print(
        f"{len(samples)} samples of {len(samples[-1].gpus)} cards and {len(samples[-1].ranks)} ranks in {took:.0f} s"
    )
    print(f"CPU: {whole:.2%} of a core (" + ", ".join(f"{n} {s:.2%}" for n, s in sorted(share.items())) + ")")
    print(f"memory: {peak / 1e6:.1f} MB at most, {grown / 1e6:+.1f} MB meanwhile")
    complete = len(samples[-1].gpus) == args.gpus and samples[-1].gpus[-1].pcie_rx is not None
    wrong = [
        text
        for bad, text in (
            (whole > CORE, "more than 1 % of a core"),
            (peak > MEMORY, "more than 60 MB"),
            (not complete, "the cards were not read"),
        )
        if bad
    ]
    print("failures:", "; ".join(wrong) or "none")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
