"""A/B of real trainings on real GPUs, as `dstui ab` does them; prints its tables as Markdown.

    python tests/tools/ab_gpu.py [stages] [offload] [--pairs N] [--steps N] [--seconds N] [--gpus N] [--out FILE]

- stages: ZeRO stage 2 (A) against stage 3 (B);
- offload: stage 2 with the optimizer in host RAM (A) against on the card (B).

Each interleaved, plus one run of each kind with DeepSpeed's timers for the share of communication. Every run is told
when it starts and when it ends, with the seconds of its parts. ``--seconds``: the time for all of it, as
``--total-minutes`` of `dstui ab`: what cannot end in time is not begun. What was done is compared, printed and stored
in any case, also when this program is ended by SIGTERM or Ctrl+C. Exit code 1: nothing was compared; 3: a figure of
what was compared is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TRAIN = REPO / "tests" / "tools" / "ab_train.py"
SPARE = 8.0
"""Seconds for what comes after the last run of a comparison: its tables."""
CASES = {"stages": ((2, False), (3, False)), "offload": ((2, True), (2, False))}
WANTED = (
    "step_time", "gpu_peak", "host_peak", "tokens_per_second", "communication", "gpu_hours", "price"
)  # fmt: skip
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


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


class Case:
    """One comparison: its folder, the A/B's id once it has begun."""

    def __init__(self, name: str, args: argparse.Namespace, home: Path) -> None:
        self.name, self.args, self.home = name, args, home
        self.id: str | None = None
        self.told: set[str] = set()
        self.ended: set[str] = set()
        threads = max(1, (os.cpu_count() or 1) // args.gpus)
        # torchrun would give each rank one thread, and Adam on the CPU needs all of them
        self.env = {"OMP_NUM_THREADS": str(threads), **os.environ, "DSTUI_STATE_HOME": str(home / "state")}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "dstui", "ab", *words]
        return subprocess.run(argv, capture_output=True, text=True, cwd=REPO, env=self.env)

    def begin(self, seconds: float | None) -> bool:
        args = self.args
        words: list[str] = []
        for letter, (stage, offload) in zip("ab", CASES[self.name], strict=True):
            path = self.home / f"{letter}-stage{stage}{'-offload' if offload else ''}.json"
            path.write_text(json.dumps(config(stage, offload, args.micro), indent=2))
            words += ["--config", str(path)]
        words += ["--num-gpus", str(args.gpus), "--launcher", "torchrun", "--pairs", str(args.pairs)]
        words += ["--steps", str(args.steps), "--minutes", "3", "--breakdown", "--detach", "--json"]
        words += [] if seconds is None else ["--total-minutes", f"{seconds / 60:.4f}"]
        started = self.call(*words, "--", str(TRAIN), "--steps", str(10 * args.steps), *args.script)
        if started.returncode:
            say(started.stderr)
            return False
        self.id = json.loads(started.stdout)["ab"]
        return True

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.home / "state" / "ab" / str(self.id) / "ab.json").read_text()
        )
        return found

    def follow(self) -> None:
        """Until it is over, one line for each run that starts and that ends."""
        told, ended = self.told, self.ended
        while True:
            data = self.state()
            for entry in data["runs"]:
                run, label = entry["run"], data["labels"][entry["kind"]]
                if run not in told:
                    told.add(run)
                    what = "timers" if entry["breakdown"] else f"pair {entry['pair'] + 1} of {data['pairs']}"
                    say(f"{label}, {what}: run {run} started")
                folder = self.home / "state" / "runs" / run
                if run not in ended and (folder / "exit.json").exists():
                    ended.add(run)
                    say(f"  run {run}: {parts(folder)}")
            if data["state"] != "running" and len(ended) == len(told):
                say(f"A/B {data['state']}" + (f": {data['problem']}" if data["problem"] else ""))
                return
            time.sleep(0.2)

    def result(self) -> dict[str, Any] | None:
        join = ["--join", str(self.id), "--price-per-gpu-hour", str(self.args.price)]
        done = self.call(*join, "--json")
        if not done.stdout:
            say(done.stderr)
            for log in sorted((self.home / "state" / "runs").glob("*/out.log")):
                lines = log.read_text(errors="replace").splitlines()[-15:]
                print(f"--- {log.parent.name}\n" + "\n".join(lines), flush=True)
            return None
        shown = self.call(*join, "--format", "markdown")
        print(f"\n## {self.name}\n\n{shown.stdout}{shown.stderr}", flush=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def parts(folder: Path) -> str:
    """What a run took, by phase, as rank 0's probe saw it: until Python runs there, until the engine is made
    (imports and the model), DeepSpeed's own start (NCCL, optimizer, builds), the steps, until the run was over."""
    done = json.loads((folder / "exit.json").read_text())
    begun, ended = float(done["started_at"]), float(done["ended_at"])
    marks: dict[str, float] = {}
    steps: list[float] = []
    probe = folder / "probe" / "rank-0.jsonl"
    if probe.exists():
        for line in probe.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                steps.append(event["seconds"])
            name = event.get("phase", event["event"])
            if name in ("start", "load", "init"):
                marks.setdefault(name, event["t"])
            elif name == "end":
                marks[name] = event["t"]
    words = [f"{done['outcome']} after {ended - begun:.1f} s"]
    order = (("start", "launcher"), ("load", "imports and model"), ("init", "init"), ("end", "steps"))
    before = begun
    for mark, title in order:
        if mark in marks:
            words.append(f"{title} {marks[mark] - before:.1f}")
            before = marks[mark]
    words.append(f"end {ended - before:.1f}")
    if steps:
        words.append(f"step {sorted(steps)[len(steps) // 2]:.3f}")
    return ", ".join(words)


def complete(found: dict[str, Any]) -> bool:
    return bool(found["verdicts"]) and all(r[w] is not None for r in found["runs"] for w in WANTED)


class Ended(Exception):
    """SIGTERM."""


def on_term(_number: int, _frame: Any) -> None:
    raise Ended


def measure(case: Case, seconds: float | None) -> dict[str, Any] | None:
    if not case.begin(seconds):
        return None
    try:
        case.follow()
    except (KeyboardInterrupt, Ended):
        say("ended from outside: its runs are stopped")
        case.call("--stop", str(case.id))
        case.follow()
        found = case.result()
        if found is not None:
            found["ended"] = True
        return found
    return case.result()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, help="for all of it; default: no limit")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--price", type=float, default=3.0)
    parser.add_argument("--script", action="append", default=[], help="more arguments for the training")
    parser.add_argument("--out", type=Path, help="where the JSON answers go")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)
    answers: dict[str, Any] = {}
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases or list(CASES):
            began = time.monotonic()
            left = None if args.seconds is None else args.seconds - (began - BEGAN) - SPARE
            if left is not None and left < longest:
                say(f"{name}: not begun, {left:.0f} s are left and the one before took {longest:.0f} s")
                continue
            say(f"{name}: {args.pairs} pairs of {args.steps} steps")
            home = Path(folder) / name
            home.mkdir()
            answers[name] = measure(Case(name, args, home), left)
            longest = max(longest, time.monotonic() - began)
            if args.out:
                args.out.write_text(json.dumps(answers, indent=1))
            if answers[name] is not None and answers[name].get("ended"):
                break
    done = {name: found for name, found in answers.items() if found is not None}
    lacking = [name for name, found in done.items() if not complete(found)]
    say(
        f"compared: {', '.join(done) or 'nothing'}"
        + (f"; a figure is missing: {', '.join(lacking)}" if lacking else "")
    )
    if not done:
        return 1
    return 3 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
