"""What ``dstui plan`` writes, asked of the real DeepSpeed: parsed at its world size, and trained with."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from dstui.estimate.inputs import Training
from dstui.estimate.model import load_model
from dstui.estimate.plan import Plan, plan
from dstui.estimate.search import Goal
from dstui.facts.describe import describe
from dstui.facts.model import Facts, Storage
from dstui.units import GiB
from tests.real.test_session_oracle import verdicts
from tests.unit.test_plan import CASES, EXPECTED, RELEASE

pytestmark = pytest.mark.real

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b")
MACHINES = ("1x4090", "2x4090", "4xL40S", "8xA100-80G", "8xT4")


def job(p: Plan, path: Path, loop: str) -> dict[str, Any]:
    path.write_text(json.dumps(p.config))
    return {
        "file": str(path), "engine": "hf" if loop == "hf" else "plain", "world": p.ranks,
        "micro": p.setup.micro_batch, "accumulation": p.setup.accumulation,
        "precision": "fp16" if "fp16" in (p.config or {}) else "bf16",
        "lr": 1e-5, "weight_decay": 0.0, "clip": 1.0, "hidden": 4096,
    }  # fmt: skip


def test_every_plan_is_accepted_at_its_world_size(tmp_path: Path) -> None:
    plans: list[tuple[str, Plan]] = []

    def add(model: str, facts: Facts, training: Training, goal: Goal, total: int | None) -> None:
        p = plan(load_model(model), training, facts, release=RELEASE, goal=goal, global_batch=total)
        if p.config is not None:
            plans.append((training.loop, p))

    loops: tuple[Literal["plain", "hf"], ...] = ("plain", "hf")
    for i, (name, (model, gpus, ram, nodes, how)) in enumerate(CASES.items()):
        if EXPECTED[name][0] != "no":
            for loop in loops:
                goal: Goal = ("fit", "speed", "batch")[(i + (loop == "hf")) % 3]
                add(model, describe(gpus, nodes=nodes, ram=ram), Training(loop=loop, **how), goal, 64)
    for model in MODELS:
        for gpus in MACHINES:
            add(model, describe(gpus, nodes=2, ram="128GiB"), Training(seq=1024), "fit", None)
    assert len(plans) >= 24 and len({p.ranks for _l, p in plans}) >= 5, [p.ranks for _l, p in plans]
    jobs = [job(p, tmp_path / f"{i}.json", loop) for i, (loop, p) in enumerate(plans)]
    wrong = [
        (j["file"], p.config, a)
        for j, (_l, p), a in zip(jobs, plans, verdicts(jobs), strict=True)
        if not a["ok"]
    ]
    assert not wrong, wrong[0]


TRAIN = """
import json, sys
import torch, deepspeed
config = json.load(open(sys.argv[1]))
config["optimizer"]["params"]["lr"] = 1e-2
if "ratio" not in config["zero_optimization"].get("offload_optimizer", {}):  # that asserts DeepSpeed's own Adam
    config["optimizer"]["params"]["torch_adam"] = True  # spares the build of an op
    config["zero_force_ds_cpu_optimizer"] = False
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
x = torch.randn(config["train_micro_batch_size_per_gpu"], 64).to(torch.bfloat16)
losses = []
for _ in range(6 * config["gradient_accumulation_steps"]):
    loss = ((engine(x) - x) ** 2).float().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print("LOSSES", json.dumps([losses[0], losses[-1]]))
"""


@pytest.mark.parametrize(
    "case",
    ["stage1", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ratio", "both", "nvme", "unpinned"))],
)
def test_the_real_engine_trains_with_it(case: str, tmp_path: Path) -> None:
    """One rank on the CPU runs every kind of placement that a plan can write; sizes of buckets as written."""
    pytest.importorskip("deepspeed")
    drive = Storage(path=str(tmp_path), free=4000 * GiB, rotational=False, writable=True, o_direct=True)
    machines: dict[str, tuple[str, Facts]] = {
        "stage1": ("llama-2-7b", describe("8xA100-80G", ram="512GiB")),
        "ratio": ("llama-2-70b", describe("8xA100-80G", ram="1024GiB")),
        "both": ("llama-2-13b", describe("1x4090", ram="512GiB")),
        "unpinned": ("llama-2-13b", describe("2x4090", ram="256GiB")),
        "nvme": ("gpt-neox-20b", describe("1x4090", ram="96GiB")),
    }
    model, facts = machines[case]
    if case == "nvme":
        pytest.importorskip("deepspeed.ops.aio")

        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            pytest.skip("libaio is not here")
        facts = replace(facts, storage=(drive,))
    p = plan(load_model(model), Training(zero_init=True), facts, release=RELEASE)
    assert p.config is not None
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(p.config))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), str(config)], env=env, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert lines, done.stderr[-3000:]
    first, last = json.loads(lines[0][7:])
    assert last < first
