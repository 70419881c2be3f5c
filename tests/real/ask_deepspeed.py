"""Run in the interpreter of a DeepSpeed release: its own verdict on many configs, in one process.

    python ask_deepspeed.py IN OUT

IN: JSON lines ``{"world": 8, "text": "..."}``. OUT: JSON lines ``{"ok": .., "error": .., "batch": [..],
"values": {..}}``. A config is read as a file is (hjson, duplicate keys refused) and handed over as the
dictionary that ``deepspeed.initialize`` makes of the file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.pop("DEEPSPEED_ELASTICITY_CONFIG", None)

import deepspeed
import hjson
from deepspeed import comm as dist
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys


def main(source: str, target: str) -> None:
    logging.disable(logging.CRITICAL)
    world = 1
    for module in (dist, deepspeed.comm.comm):
        module.is_initialized = lambda: True
        module.get_world_size = lambda group=None: world
        module.get_rank = lambda group=None: 0
    runtime_config.dist = dist
    with Path(source).open(encoding="utf-8") as asks, Path(target).open("w", encoding="utf-8") as answers:
        for line in asks:
            ask = json.loads(line)
            world = ask["world"]
            answer: dict = {"version": deepspeed.__version__}
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    data = hjson.loads(ask["text"], object_pairs_hook=dict_raise_error_on_duplicate_keys)
                    config = runtime_config.DeepSpeedConfig(copy.deepcopy(data))
                answer["ok"] = True
                answer["batch"] = [
                    config.train_batch_size,
                    config.train_micro_batch_size_per_gpu,
                    config.gradient_accumulation_steps,
                ]
                answer["zero"] = json.loads(config.zero_config.model_dump_json(by_alias=True))
                answer["values"] = {
                    "gradient_clipping": config.gradient_clipping,
                    "steps_per_print": config.steps_per_print,
                    "fp16": config.float16_config.enabled,
                    "bf16": config.bfloat16_config.enabled,
                }
            except BaseException as e:
                answer["ok"] = False
                answer["error"] = f"{type(e).__name__}: {e}"[:300]
            answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
