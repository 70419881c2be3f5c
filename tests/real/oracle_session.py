"""Run as a script by test_session_oracle: the real DeepSpeed's verdict on many written configs, in one process.

stdin: one JSON job a line (file, engine, world, micro, accumulation, precision, hidden); stdout: one JSON line each.
A Trainer's file is filled as transformers does, then parsed as DeepSpeed does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.simplefilter("ignore")

with contextlib.redirect_stdout(io.StringIO()):
    import deepspeed
    import deepspeed.runtime.config as ds_config
    from deepspeed import comm as dist
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

world = 1
for module in (dist, deepspeed.comm.comm):
    module.is_initialized = lambda: True
    module.get_world_size = lambda group=None: world
    module.get_rank = lambda group=None: 0
ds_config.dist = dist


class View:
    """TrainingArguments with some fields replaced (world_size is computed there)."""

    def __init__(self, args, **fields):
        self.__dict__.update(fields)
        self.args = args

    def __getattr__(self, name):
        return getattr(self.args, name)


class Model:
    def __init__(self, hidden):
        self.config = type("Config", (), {"hidden_size": hidden})()


base = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, warmup_steps=10)
for line in sys.stdin:
    job = json.loads(line)
    world = job["world"]
    answer = {"file": job["file"]}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = job["file"]
            if job["engine"] in ("hf", "llamafactory"):
                with Path(job["file"]).open(encoding="utf-8") as f:
                    filled = HfTrainerDeepSpeedConfig(json.load(f))
                args = View(
                    base,
                    world_size=world,
                    per_device_train_batch_size=job["micro"],
                    gradient_accumulation_steps=job["accumulation"],
                    bf16=job["precision"] == "bf16",
                    fp16=job["precision"] == "fp16",
                    learning_rate=job["lr"],
                    weight_decay=job["weight_decay"],
                    max_grad_norm=job["clip"],
                )
                filled.trainer_config_process(args)
                filled.trainer_config_finalize(args, Model(job["hidden"]), 1000)
                config = filled.config
            parsed = ds_config.DeepSpeedConfig(config)
        answer["ok"] = True
        answer["batch"] = [
            parsed.train_micro_batch_size_per_gpu,
            parsed.gradient_accumulation_steps,
            parsed.train_batch_size,
        ]
        answer["stage"] = int(parsed.zero_config.stage)
        answer["left"] = json.dumps(parsed._param_dict).count('"auto"')
    except BaseException as e:
        answer["ok"] = False
        answer["error"] = f"{type(e).__name__}: {str(e)[:400]}"
    print(json.dumps(answer), flush=True)
