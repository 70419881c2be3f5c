"""Run in the interpreter of a DeepSpeed release: its own verdict on many configs, in one process.

    python ask_deepspeed.py IN OUT

IN: JSON lines ``{"world": 8, "text": "..."}``. OUT: JSON lines ``{"ok": .., "error": .., "batch": [..],
"values": {..}}``. A config is handed over as ``deepspeed.initialize`` of the release hands over a file: as
its path, or (from 0.18.6) as the dictionary read from it (hjson, duplicate keys refused).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.pop("DEEPSPEED_ELASTICITY_CONFIG", None)

# Names that old releases import from newer packages than theirs; parsing a config uses none of them.
import numpy
import torch.distributed.elastic.agent.server.api as elastic_api

if not hasattr(numpy, "BUFSIZE"):
    numpy.BUFSIZE = 8192
for gone in ("log", "_get_socket_with_port"):
    if not hasattr(elastic_api, gone):
        setattr(elastic_api, gone, None)
for absent in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):  # to 0.14.0
    sys.modules.setdefault(absent, types.ModuleType(absent))

import deepspeed  # noqa: E402
import hjson  # noqa: E402
from deepspeed import comm as dist  # noqa: E402
from deepspeed.runtime import config as runtime_config  # noqa: E402
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys  # noqa: E402


def main(source: str, target: str) -> None:
    logging.disable(logging.CRITICAL)
    world = 1
    for module in (dist, deepspeed.comm.comm):
        module.is_initialized = lambda: True
        module.get_world_size = lambda group=None: world
        module.get_rank = lambda group=None: 0
    runtime_config.dist = dist
    reads_file = "load_ds_config" in deepspeed.initialize.__code__.co_names
    scratch = Path(tempfile.mkdtemp()) / "ds_config.json"
    with Path(source).open(encoding="utf-8") as asks, Path(target).open("w", encoding="utf-8") as answers:
        for line in asks:
            ask = json.loads(line)
            world = ask["world"]
            answer: dict = {"version": deepspeed.__version__}
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if reads_file:
                        data = hjson.loads(ask["text"], object_pairs_hook=dict_raise_error_on_duplicate_keys)
                        config = runtime_config.DeepSpeedConfig(copy.deepcopy(data))
                    else:
                        scratch.write_text(ask["text"], encoding="utf-8")
                        config = runtime_config.DeepSpeedConfig(str(scratch))
                answer["ok"] = True
                answer["batch"] = [
                    config.train_batch_size,
                    config.train_micro_batch_size_per_gpu,
                    config.gradient_accumulation_steps,
                ]
                zero = config.zero_config
                dump = (
                    zero.model_dump_json if hasattr(zero, "model_dump_json") else zero.json
                )  # pydantic 2, 1
                answer["zero"] = json.loads(dump(by_alias=True))
                old = hasattr(config, "fp16_enabled")  # to 0.17.0
                answer["values"] = {
                    "gradient_clipping": config.gradient_clipping,
                    "steps_per_print": config.steps_per_print,
                    "fp16": config.fp16_enabled if old else config.float16_config.enabled,
                    "bf16": config.bfloat16_enabled if old else config.bfloat16_config.enabled,
                }
            except BaseException as e:
                answer["ok"] = False
                answer["error"] = f"{type(e).__name__}: {e}"[:300]
            answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
