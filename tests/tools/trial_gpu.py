"""``dstui trial`` on real GPUs: what it prints, and what must hold; exit code 1 when something does not.

    python tests/tools/trial_gpu.py [tiny] [hf] [hf-stage3] [offload] [python]     default: all

Uses every visible card. Each case is one trial of five steps in a state home of its own; ``hf`` runs twice, so that the
second is asked with what the first has measured. Nothing is downloaded. About a minute a case once ops are built.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "dstui" / "examples" / "tiny_gpt.py"
HF = REPO / "dstui" / "examples" / "hf_trainer_tiny.py"
GiB = 1 << 30
ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
SHAPE = ["--hidden", "1024", "--layers", "16", "--heads", "16", "--vocab", "32000", "--seq", "1024"]
"""About 285 M parameters as a Llama."""
failures: list[str] = []


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **more}}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "tiny": (
        {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2, "optimizer": ADAM, **zero(2)},
        [],
        [str(TINY), "--steps", "500", "--hidden", "1024", "--layers", "12", "--seq", "512", "--vocab", "8192"],
    ),
    "hf": (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2},
        },
        [],
        [str(HF), *SHAPE, "--bf16", "True", "--per_device_train_batch_size", "4", "--gradient_checkpointing", "True"],
    ),
    "hf-stage3": (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3},
        },
        ["--launcher", "torchrun"],
        [str(HF), *SHAPE, "--bf16", "True", "--per_device_train_batch_size", "4"],
    ),
    "offload": (
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            **zero(2, offload_optimizer={"device": "cpu", "pin_memory": True}),
        },
        [],
        [str(TINY), "--steps", "500", "--hidden", "1024", "--layers", "12", "--seq", "512", "--vocab", "8192"],
    ),
    "python": (
        {"train_micro_batch_size_per_gpu": 16, "optimizer": ADAM, **zero(0)},
        ["--launcher", "python", "--devices", "0"],
        [str(TINY), "--steps", "500", "--hidden", "1024", "--layers", "12", "--seq", "512", "--vocab", "8192"],
    ),
}  # fmt: skip


def expect(ok: bool, what: str) -> None:
    print(("ok       " if ok else "DIFFERS  ") + what)
    if not ok:
        failures.append(what)


def dstui(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dstui", *words],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=580,
        env={**os.environ, "DSTUI_STATE_HOME": str(home)},
    )


def trial(name: str, home: Path) -> dict[str, Any] | None:
    config, options, command = CASES[name]
    path = home / f"{name}.json"
    path.write_text(json.dumps(config))
    if command[0] == str(HF):
        command = [*command, "--output_dir", str(home / "out"), "--max_steps", "500", "--report_to", "none",
                   "--logging_steps", "1"]  # fmt: skip
    words = ["trial", "--steps", "5", "--python", sys.executable, "--config", str(path), *options]
    done = dstui(home, *words, "--json", "--", *command)
    if done.returncode != 0:
        print(done.stdout[-3000:], done.stderr[-3000:])
        expect(False, f"{name}: exit code {done.returncode}")
        for log in sorted(home.glob("runs/*/out.log"))[-1:]:
            print(log.read_text(errors="replace")[-4000:])
        return None
    answer: dict[str, Any] = json.loads(done.stdout)
    print(dstui(home, "trial", "--show", answer["run"]).stdout)
    return answer


def judge(name: str, answer: dict[str, Any]) -> None:
    run = Path(answer["dir"])
    ended = json.loads((run / "exit.json").read_text())
    codes = [r["code"] for r in ended["ranks"]]
    expect(
        answer["state"] == "finished" and set(codes) <= {0, None} and not ended["leftovers"],
        f"{name}: ranks {codes}",
    )
    m = answer["measured"]
    expect(m["troubles"] == [] and m["steps"] == 5, f"{name}: {m['steps']} steps, troubles {m['troubles']}")
    for what, row in answer["memory"].items():
        p, measured = row["predicted"], row["measured"]
        if measured is None or p is None:
            expect(False, f"{name}: {what} measured {measured}, predicted {p}")
        else:
            inside = p["low"] <= measured <= p["high"] or what == "pinned"
            ratio = f"{100 * (row['ratio'] - 1):+.1f} %" if row["ratio"] else ""
            expect(inside, f"{name}: {what} {measured / GiB:.3f} GiB in its range {ratio}")
    phases = [p["phase"] for p in answer["phases"] if p["measured"]]
    expect(phases[:5] == ["load", "init", "forward", "backward", "step"], f"{name}: phases {phases}")
    peaks = json.loads((run / "samples" / "peaks.json").read_text())
    card = max(peaks["gpu_used"].values())
    device = answer["memory"]["device"]["measured"] or 0
    expect(
        abs(device / card - 1) < 0.05,
        f"{name}: device {device / GiB:.2f} GiB, the sampler saw {card / GiB:.2f}",
    )
    log = (run / "out.log").read_text(errors="replace")
    rates = [float(x) for x in re.findall(r"step \d+ loss .* tokens/s (\d+)", log)][2:]
    if rates and m["step_time"]:
        tokens = m["seen"]["rows"] * answer["training"]["seq"] * m["seen"]["accumulation"] * m["ranks"]
        own = tokens / sorted(rates)[len(rates) // 2]
        print(f"         {name}: step {m['step_time']:.4f} s, the script's own clock {own:.4f} s")
    noise = [x for x in log.splitlines() if "Traceback" in x or "ProcessGroupNCCL" in x]
    print(
        f"         {name}: overhead {m['overhead'] / GiB if m['overhead'] else None} GiB, lines of noise {noise[:3]}"
    )


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in names or list(CASES):
            print(f"\n## {name}\n", flush=True)
            answer = trial(name, home)
            if answer is None:
                continue
            judge(name, answer)
            if name == "hf":
                again = trial(name, home)
                if again is not None:
                    for what in ("allocated", "reserved", "device", "host"):
                        a, b = answer["memory"][what]["measured"], again["memory"][what]["measured"]
                        print(
                            f"         again: {what} {100 * (b / a - 1):+.2f} %"
                            if a and b
                            else f"         {what} ?"
                        )
                model = home / "model"
                model.mkdir(exist_ok=True)
                (model / "config.json").write_text(json.dumps(llama()))
                config = json.loads((home / "hf.json").read_text()) | {"bf16": {"enabled": True}}
                (home / "asked.json").write_text(json.dumps(config))
                ask = ["estimate", str(home / "asked.json"), "--model", str(model), "--seq", "1024", "--micro-batch", "4",
                       "--loop", "hf", "--checkpointing"]  # fmt: skip
                print(dstui(home, *ask).stdout)
                found = json.loads(dstui(home, *ask, "--json").stdout)
                expect(
                    any("corrected by trial" in a for a in found["assumptions"]),
                    "hf: the next estimate is corrected",
                )
    print("\n" + ("all as expected" if not failures else "\n".join(failures)))
    return 1 if failures else 0


def llama() -> dict[str, Any]:
    """As ``hf_trainer_tiny.py`` makes it with SHAPE."""
    return {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
