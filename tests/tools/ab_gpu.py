"""A/B of real trainings on real GPUs, as `dstui ab` does them; prints its tables as Markdown.

    python tests/tools/ab_gpu.py [stages] [offload] [--pairs N] [--steps N] [--gpus N] [--micro N] [--out FILE]

- stages: ZeRO stage 2 (A) against stage 3 (B);
- offload: stage 2 with the optimizer in host RAM (A) against on the card (B).

Each interleaved, plus one run of each kind with DeepSpeed's timers for the share of communication. Exit code 1 when
one of them gave no verdict, or lacks the memory, the speed or the share of communication of a side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TRAIN = REPO / "tests" / "tools" / "ab_train.py"


def config(stage: int, offload: bool, micro: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    adam: dict[str, Any] = {"lr": 1e-4}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    else:
        adam["torch_adam"] = True  # nothing to build
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
    }


CASES = {"stages": ((2, False), (3, False)), "offload": ((2, True), (2, False))}


def run(case: str, args: argparse.Namespace, home: Path) -> dict[str, Any] | None:
    paths = []
    for letter, (stage, offload) in zip("ab", CASES[case], strict=True):
        path = home / f"{letter}-stage{stage}{'-offload' if offload else ''}.json"
        path.write_text(json.dumps(config(stage, offload, args.micro), indent=2))
        paths.append(path)
    words = [sys.executable, "-m", "dstui", "ab", "--config", str(paths[0]), "--config", str(paths[1])]
    words += ["--num-gpus", str(args.gpus), "--launcher", "torchrun", "--pairs", str(args.pairs)]
    words += ["--steps", str(args.steps), "--minutes", "3", "--breakdown", "--detach", "--json"]
    words += ["--", str(TRAIN), "--steps", str(10 * args.steps), *args.script]
    env = {**os.environ, "DSTUI_STATE_HOME": str(home / "state")}

    def call(*what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(what, capture_output=True, text=True, cwd=REPO, env=env)

    began = time.monotonic()
    started = call(*words)
    if started.returncode:
        print(started.stderr)
        return None
    name = json.loads(started.stdout)["ab"]
    join = [sys.executable, "-m", "dstui", "ab", "--join", name, "--price-per-gpu-hour", str(args.price)]
    done = call(*join, "--json")
    print(f"\n## {case}: {args.pairs} pairs of {args.steps} steps, {time.monotonic() - began:.0f} s in all\n")
    print(call(*join, "--format", "markdown").stdout)
    if done.returncode:
        print(done.stderr)
        for log in sorted((home / "state" / "runs").glob("*/out.log")):
            print(f"--- {log.parent.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def complete(found: dict[str, Any]) -> bool:
    wanted = (
        "step_time",
        "gpu_peak",
        "host_peak",
        "tokens_per_second",
        "communication",
        "gpu_hours",
        "price",
    )
    return bool(found["verdicts"]) and all(r[w] is not None for r in found["runs"] for w in wanted)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--price", type=float, default=3.0)
    parser.add_argument("--script", action="append", default=[], help="more arguments for the training")
    parser.add_argument("--out", type=Path, help="where the JSON answers go")
    args = parser.parse_args()
    answers: dict[str, Any] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases or list(CASES):
            home = Path(folder) / case
            home.mkdir()
            answers[case] = run(case, args, home)
            if args.out:
                args.out.write_text(json.dumps(answers, indent=1))
    bad = [case for case, found in answers.items() if found is None or not complete(found)]
    print(
        f"\n{time.monotonic() - began:.0f} s; " + (f"NOT COMPLETE: {', '.join(bad)}" if bad else "complete")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
