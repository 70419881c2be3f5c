"""``engine="hf"`` against transformers: what fills ``"auto"``, what is refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.config.resolve import resolve

from .config_mutations import VALUES
from .test_config_oracle import CORPUS, installed

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None or importlib.util.find_spec("transformers") is None,
        reason="needs the train extra and transformers",
    ),
]
HERE = Path(__file__).parent
TEMPLATE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
ARGS: list[dict[str, Any]] = [
    {"hidden_size": 128},
    {"bf16": True, "hidden_size": 4096, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"fp16": True, "hidden_size": 64, "warmup_steps": 10, "learning_rate": 1e-4, "num_training_steps": 77},
    {"bf16": True, "hidden_size": 96, "warmup_steps": 0.1, "num_training_steps": 55, "max_grad_norm": 0.3},
    {"bf16": True, "hidden_size": 100, "weight_decay": 0.1, "adam_beta2": 0.95, "save_on_each_node": True},
]


def cases(count: int) -> list[tuple[int, str, dict[str, Any]]]:
    pick = random.Random(5)
    out = []
    for i in range(count):
        data = copy.deepcopy(TEMPLATE)
        for _ in range(pick.choice([0, 1, 1, 2, 3])):
            blocks = [data, *(v for v in data.values() if isinstance(v, dict))]
            block = pick.choice(blocks)
            if not block:
                continue
            name = pick.choice(list(block))
            kind = pick.random()
            if kind < 0.3:
                del block[name]
            elif kind < 0.8:
                block[name] = copy.deepcopy(pick.choice(VALUES))
            else:
                block[pick.choice(["x", "stage", "enabled", "cpu_offload"])] = pick.choice(
                    [True, 1, "auto", 2]
                )
        args = ARGS[i % len(ARGS)]
        if pick.random() < 0.3:
            for block_name, key, value in (
                ("", "train_micro_batch_size_per_gpu", args.get("per_device_train_batch_size", 8)),
                ("", "gradient_clipping", 1.0),
                ("bf16", "enabled", args.get("bf16", False)),
            ):
                block = data if not block_name else data.get(block_name)
                if isinstance(block, dict):
                    block[key] = value
        out.append((pick.choice([1, 2, 8]), json.dumps(data), args))
    if CORPUS.is_dir():
        for path in sorted(CORPUS.glob("*.json")):
            text = path.read_text(encoding="utf-8")
            try:
                if not isinstance(json.loads(text), dict) or path.name == "verdicts.json":
                    continue
            except ValueError:
                continue
            out += [(8, text, ARGS[1])]
    return out


def test_hugging_face_fills_and_refuses_alike(tmp_path: Path) -> None:
    release = installed()
    if not schema.known(release):
        pytest.skip(f"DeepSpeed {release} has no schema")
    asks = cases(600)
    source, target = tmp_path / "asks", tmp_path / "answers"
    source.write_text(
        "".join(json.dumps({"world": w, "text": t, "args": a}) + "\n" for w, t, a in asks), encoding="utf-8"
    )
    subprocess.run(
        [sys.executable, str(HERE / "ask_hf.py"), str(source), str(target)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=500,
    )
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == len(asks)
    wrong = []
    for (world, text, args), real in zip(asks, answers, strict=True):
        given = {"num_training_steps": 1000, **args}
        mine = resolve(
            json.loads(text), release=release, world_size=world, engine="hf", args=given, accelerator="cpu"
        )
        if mine.accepted != real["ok"]:
            wrong.append((mine.verdict, [p.message for p in mine.problems], real.get("error"), args, text))
        elif real["ok"]:
            assert list((mine.batch or {}).values()) == real["batch"], text
            assert json.loads(json.dumps(mine.data)) == real["config"], text
            assert mine.open == ()
    assert wrong == []
    assert 0.2 * len(asks) < sum(a["ok"] for a in answers) < 0.9 * len(asks)
