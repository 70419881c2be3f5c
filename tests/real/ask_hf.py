"""Hugging Face's way to DeepSpeed on many configs, in one process: fill ``"auto"``, then parse.

    python ask_hf.py IN OUT

IN: JSON lines ``{"world": 8, "text": "...", "args": {...}}``; ``args`` are TrainingArguments fields plus
``hidden_size`` and ``num_training_steps``. OUT: JSON lines ``{"ok": .., "error": .., "batch": .., "config": ..}``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime import config as runtime_config
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig


def main(source: str, target: str) -> None:
    logging.disable(logging.CRITICAL)
    world = 1
    for module in (dist, deepspeed.comm.comm):
        module.is_initialized = lambda: True
        module.get_world_size = lambda group=None: world
        module.get_rank = lambda group=None: 0
    runtime_config.dist = dist
    plain = TrainingArguments(output_dir="x", use_cpu=True)
    with Path(source).open(encoding="utf-8") as asks, Path(target).open("w", encoding="utf-8") as answers:
        for line in asks:
            ask = json.loads(line)
            world = ask["world"]
            given = dict(ask["args"])
            hidden, steps = given.pop("hidden_size", None), given.pop("num_training_steps", 1000)
            args = SimpleNamespace(**{**vars(plain), **given, "world_size": world})
            args.get_warmup_steps = lambda n, a=args: TrainingArguments.get_warmup_steps(a, n)
            model = SimpleNamespace(config=SimpleNamespace(**({"hidden_size": hidden} if hidden else {})))
            answer: dict = {}
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    filled = HfTrainerDeepSpeedConfig(json.loads(ask["text"]))
                    filled.trainer_config_process(args)
                    filled.trainer_config_finalize(args, model, steps)
                    answer["config"] = json.loads(json.dumps(filled.config))
                    config = runtime_config.DeepSpeedConfig(filled.config)
                answer["ok"] = True
                answer["batch"] = [
                    config.train_batch_size,
                    config.train_micro_batch_size_per_gpu,
                    config.gradient_accumulation_steps,
                ]
            except BaseException as e:
                answer["ok"] = False
                answer["error"] = f"{type(e).__name__}: {e}"[:300]
            answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
