"""Failures and stalls made on purpose on real GPUs, each a real run of ``dstui run``, judged by ``dstui diagnose``.

    python tests/tools/provoke_gpu.py [--out DIR] [--only NAME,NAME] [--workers 6]

Prints one line a case (expected and first answer) and a Markdown table, exit code 1 when an answer differs. Logs,
exit records, samples and answers are left in ``provoked.tar.gz`` below ``--out`` (default: $OUT). One card: the cases
of one rank; two cards: those of two. Cases share the cards: memory is limited for each process, except for the cases
that fill a card, which come last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "tests" / "data" / "scripts" / "gpu_failing.py"
WORK = Path(tempfile.mkdtemp(prefix="provoke-"))
CASE_SECONDS = 170.0
"""No case takes longer; torch waits a minute with its records of NCCL before it ends a rank."""
BF16 = {"bf16": {"enabled": True}}
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
FUSED_ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


@dataclass(frozen=True)
class Case:
    """``expected``: codes of which the first answer must be one. ``ends``: False for a stall, asked while it lasts."""

    name: str
    expected: tuple[str, ...]
    args: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    ends: bool = True
    env: Callable[[Path], dict[str, str]] = lambda folder: {}
    group: bool = False
    """In a memory cgroup of its own."""
    alone: bool = False
    holder: float = 0.0
    """GiB that another process holds on the card meanwhile."""


def without_nvcc(folder: Path) -> dict[str, str]:
    """A PATH without the toolkit, and no CUDA_HOME that exists."""
    kept = [p for p in os.environ["PATH"].split(":") if not (Path(p) / "nvcc").exists()]
    return {
        "PATH": ":".join([str(Path(sys.executable).parent), *kept]),
        "CUDA_HOME": str(folder / "no-cuda"),
        "TORCH_EXTENSIONS_DIR": str(folder / "ext"),
    }


def wrong_arch(folder: Path) -> dict[str, str]:
    return {"TORCH_CUDA_ARCH_LIST": "9.0a", "TORCH_EXTENSIONS_DIR": str(folder / "ext")}


def stale_lock(folder: Path) -> dict[str, str]:
    lock = folder / "ext" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return {"TORCH_EXTENSIONS_DIR": str(folder / "ext")}


def one_thread(folder: Path) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def no_card(folder: Path) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""}


ONE = (
    # 1.5e9 parameters whose states lie in host RAM; a step of one thread takes long after 20 short micro steps
    Case("offload-stall", ("DR202",), ("--how", "ok", "--hidden", "8192", "--layers", "22"),
         {**BF16, "gradient_accumulation_steps": 20, "optimizer": TORCH_ADAM,
          "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
         ends=False, env=one_thread),
    Case("stale-lock", ("DR708",), ("--how", "ok"), {"optimizer": FUSED_ADAM}, ends=False, env=stale_lock),
    Case("oom-init", ("DR101",), ("--how", "ok", "--hidden", "8192", "--layers", "8", "--limit", "3.5"),
         {**BF16, "zero_optimization": {"stage": 1}}),
    Case("oom-forward", ("DR102",), ("--how", "ok", "--rows", "65536", "--hidden", "4096", "--layers", "24",
                                      "--limit", "8"), {**BF16, "zero_optimization": {"stage": 2}}),
    Case("oom-step", ("DR103",), ("--how", "ok", "--hidden", "8192", "--layers", "8", "--limit", "7")),
    Case("oom-offload-forward", ("DR102",), ("--how", "ok", "--rows", "65536", "--hidden", "4096", "--layers", "24",
                                              "--limit", "6"),
         {**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    Case("scale-floor", ("DR602",), ("--how", "overflow", "--steps", "60"),
         {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "zero_optimization": {"stage": 2}}),
    Case("nan-fp16", ("DR601",), ("--how", "nan"),
         {"fp16": {"enabled": True, "loss_scale": 1}, "zero_optimization": {"stage": 1}}),
    Case("nan-fp16-dynamic", ("DR601", "DR602"), ("--how", "nan", "--steps", "30"),
         {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "zero_optimization": {"stage": 1}}),
    Case("no-nvcc-fused-adam", ("DR702",), ("--how", "ok"), {"optimizer": FUSED_ADAM}, env=without_nvcc),
    Case("wrong-arch", ("DR703",), ("--how", "ok"), {"optimizer": FUSED_ADAM}, env=wrong_arch),
    Case("client-optimizer", ("DR201",), ("--how", "client"),
         {**BF16, "optimizer": None, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    Case("index", ("DR801",), ("--how", "index")),
    Case("dtype", ("DR603",), ("--how", "dtype"), BF16),
    Case("no-card", ("DR707", "DR508"), ("--how", "no-card"), env=no_card),
    Case("killed", ("DR721", "DR401"), ("--how", "kill0")),
    Case("host-oom", ("DR401",), ("--how", "eat"), group=True),
    Case("oom-whole-card", ("DR102",), ("--how", "ok", "--rows", str(1 << 20), "--hidden", "4096", "--layers", "24"),
         {**BF16, "zero_optimization": {"stage": 2}}, alone=True),
    Case("oom-occupied", ("DR104",), ("--how", "ok", "--rows", "65536", "--hidden", "4096", "--layers", "64"),
         {**BF16, "zero_optimization": {"stage": 2}}, alone=True, holder=0.85),
)  # fmt: skip
TWO = (
    Case("asleep", ("DR506",), ("--how", "asleep", "--steps", "400", "--at", "40"), ranks=2, ends=False),
    Case("nccl-timeout", ("DR501",), ("--how", "asleep", "--timeout", "10"), ranks=2),
    Case("fewer-batches", ("DR501",), ("--how", "fewer", "--timeout", "10"), ranks=2),
    Case("fewer-batches-stage3", ("DR501",), ("--how", "fewer", "--timeout", "10"),
         {**BF16, "zero_optimization": {"stage": 3}}, ranks=2),
    Case("rank-raises", ("DR710",), ("--how", "raise"), ranks=2),
    Case("rank-killed", ("DR721", "DR401"), ("--how", "kill"), ranks=2),
    Case("oom-step-2", ("DR103",), ("--how", "ok", "--hidden", "8192", "--layers", "8", "--limit", "7"), ranks=2),
    Case("scale-floor-2", ("DR602",), ("--how", "overflow", "--steps", "60"),
         {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "zero_optimization": {"stage": 3}},
         ranks=2),
)  # fmt: skip


def memory_group(name: str, limit: int) -> list[str] | None:
    """Shell words that move a process into a memory cgroup of its own; None where none can be made."""
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / name
        try:
            if not Path(root, "cgroup.procs").exists():
                continue
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(limit))
        except OSError as e:
            print(f"  no memory cgroup at {group}: {e}", flush=True)
            continue
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    return None


def provoke(case: Case, out: Path, until: float) -> tuple[Case, str, str, float]:
    """(case, first answer, detail, seconds)."""
    begun = time.monotonic()
    deadline = min(until, begun + CASE_SECONDS)
    folder = WORK / case.name
    folder.mkdir()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": TORCH_ADAM,
        **case.config,
    }
    file = folder / "ds.json"
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=1))
    env = dict(os.environ, DSTUI_STATE_HOME=str(folder / "state"), PYTHONPATH=str(REPO))
    words = [sys.executable, "-m", "dstui", "run", "--config", str(file), "--num-gpus", str(case.ranks),
             "--no-preflight", "--json", *(["--wait"] if case.ends else [])]  # fmt: skip
    for key, value in case.env(folder).items():
        if key in ("CUDA_VISIBLE_DEVICES", "PATH"):
            env[key] = value
        else:
            words += ["--env", f"{key}={value}"]
    words += ["--", str(SCRIPT), *case.args]
    if case.group:
        inside = memory_group(f"dstui-provoke-{os.getpid()}", 12 << 30)
        if inside is None:
            return case, "-", "no writable memory cgroup", 0.0
        words = [*inside, *words]
    holder = hold(case.holder) if case.holder else None
    try:
        if case.ends:
            done = subprocess.run(
                words, env=env, capture_output=True, text=True, cwd=folder,
                timeout=max(20.0, deadline - time.monotonic()), check=False,
            )  # fmt: skip
        else:
            done = subprocess.run(
                words, env=env, capture_output=True, text=True, cwd=folder, timeout=60, check=False
            )
            wait_for_stall(env, folder, deadline)
    except subprocess.TimeoutExpired:
        done = None
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()
    answer: dict[str, Any] = {}
    said = ask(env, folder)
    if said:
        answer = json.loads(said)
    subprocess.run(
        [sys.executable, "-m", "dstui", "stop", "--now", "last"],
        env=env,
        cwd=folder,
        capture_output=True,
        check=False,
    )
    keep(folder, out / case.name, said)
    cause = answer.get("cause") or {}
    detail = f"{cause.get('certainty')}: {cause.get('detail') or cause.get('message')}" if cause else ""
    if not cause:
        detail = f"outcome {answer.get('outcome')}"
        if done is not None:
            detail += f"; exit {done.returncode}; {done.stderr.strip()[-300:]}"
    return case, cause.get("code") or "-", detail, time.monotonic() - begun


def ask(env: dict[str, str], folder: Path) -> str:
    """``diagnose last --json``; a person's waits before a stall is named are shortened, the evidence is not."""
    program = (
        "from dstui.runs import stall, state\n"
        "state.NAMED_SECONDS, state.STALL_SECONDS, stall.WINDOW, stall.FEWEST = 4.0, 12.0, 10.0, 6\n"
        "from dstui.cli import main\n"
        "raise SystemExit(main(['diagnose', 'last', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout


def wait_for_stall(env: dict[str, str], folder: Path, deadline: float) -> None:
    while time.monotonic() < deadline - 10:
        time.sleep(3)
        said = ask(env, folder)
        try:
            answer = json.loads(said)
        except ValueError:
            continue
        if answer["cause"] or answer["outcome"] not in ("running", "starting", "stalled"):
            return


def hold(share: float) -> subprocess.Popen[bytes]:
    """Another process that holds this share of the first card."""
    program = (
        "import torch, time\n"
        f"x = torch.empty(int(torch.cuda.mem_get_info()[1] * {share}), dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def keep(folder: Path, target: Path, said: str) -> None:
    """The files of the run that a test can read later, without the names of this machine."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "diagnose.json").write_text(plain(said))
    for run in sorted((folder / "state").glob("**/manifest.json"))[:1]:
        for name in ("out.log", "exit.json", "config.json"):
            if (run.parent / name).exists():
                text = (run.parent / name).read_text(errors="replace")
                if len(text) > 400_000:
                    text = text[:200_000] + "\n" + text[-200_000:]
                (target / name).write_text(plain(text))
        if (run.parent / "samples").is_dir():
            shutil.copytree(run.parent / "samples", target / "samples", dirs_exist_ok=True)


def plain(text: str) -> str:
    for word, instead in (
        (str(REPO), "/home/ann/dstui"), (str(WORK), "/home/ann/work"), (str(Path.home()), "/home/ann"),
        (socket.gethostname(), "node1"),
    ):  # fmt: skip
        if len(word) > 3:
            text = text.replace(word, instead)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=os.environ.get("OUT") or str(WORK / "out"))
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=140)
    options = parser.parse_args()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if shutil.which(
        "nvidia-smi"
    ) else None  # fmt: skip
    cards = len(listed.stdout.strip().splitlines()) if listed is not None and listed.returncode == 0 else 0
    cases = list(TWO if cards >= 2 else ONE)
    if options.only:
        wanted = options.only.split(",")
        cases = [c for c in (*TWO, *ONE) if c.name in wanted]
    out = Path(options.out) / "provoked"
    deadline = time.monotonic() + options.seconds
    print(f"{cards} cards, {len(cases)} cases, logs: {out}", flush=True)
    rows: list[tuple[Case, str, str, float]] = []
    lock = threading.Lock()

    def one(case: Case) -> None:
        try:
            row = provoke(case, out, deadline)
        except Exception as e:
            row = (case, "-", f"{type(e).__name__}: {e}", 0.0)
        with lock:
            rows.append(row)
            mark = (
                "ok"
                if row[1] in case.expected
                else "DIFFERS"
                if row[2] != "no writable memory cgroup"
                else "skip"
            )
            print(
                f"{mark:8}{case.name:24}{'|'.join(case.expected):14}{row[1]:7}{row[3]:6.0f} s  {row[2][:200]}",
                flush=True,
            )

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(one, [c for c in cases if not c.alone]))
    for case in cases:
        if case.alone:
            if time.monotonic() > deadline - 15:
                print(f"skip    {case.name}: no time left", flush=True)
                continue
            one(case)
    print("\n| case | expected | first answer | seconds | |\n|---|---|---|---|---|")
    for case, code, detail, seconds in sorted(rows, key=lambda r: r[0].name):
        print(f"| {case.name} | {' or '.join(case.expected)} | {code} | {seconds:.0f} | {detail[:120]} |")
    wrong = [r[0].name for r in rows if r[1] not in r[0].expected and r[2] != "no writable memory cgroup"]
    with tarfile.open(out.parent / "provoked.tar.gz", "w:gz") as f:
        f.add(out, "provoked")
    shutil.rmtree(out)
    print("\nwrong:", ", ".join(wrong) or "none", f"of {len(rows)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
