"""Drives real DeepSpeed engines on CPU, one config after another; prints what each came to as JSON lines.

Run by test_rules_engine.py with a list of cases on standard input. Needs deepspeed and torch, not dstui.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
out = os.dup(1)
os.dup2(2, 1)
warnings.simplefilter("ignore")

import deepspeed  # noqa: E402
import deepspeed.comm.comm as comm  # noqa: E402
import deepspeed.comm.torch  # noqa: E402 - its module; the attribute of that name is torch itself
import torch  # noqa: E402

# one rank shares nothing, and building the shared memory op would take a minute
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")


def facts_of(engine):
    group = engine.optimizer.param_groups[0] if engine.optimizer is not None else {"lr": None}
    return {
        "stage": engine.zero_optimization_stage(),
        "dtype": str(next(engine.module.parameters()).dtype),
        "clipping": engine.gradient_clipping(),
        "accumulation": engine.gradient_accumulation_steps(),
        "comms_logger": comm.comms_logger.enabled,
        "aio": dict(engine._config.aio_config or {}),
        "max_lrs": getattr(engine.lr_scheduler, "max_lrs", None),
        "basic_optimizer": type(engine.basic_optimizer).__name__,
        "wrapper": type(engine.optimizer).__name__,
        "lr": group["lr"],
    }


def one(case):
    torch.manual_seed(0)
    comm.comms_logger.enabled = False
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    answer = {"name": case["name"], "phase": "init"}
    client = None
    if case.get("client") == "adamw":
        client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=client,
            config=copy.deepcopy(case["config"]),
        )
        answer["facts"] = facts_of(engine)
        answer["phase"] = "step"
        dtype = next(engine.module.parameters()).dtype
        for _step in range(case.get("steps", 2)):
            loss = engine(torch.ones(2, 8, dtype=dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        answer["phase"] = "done"
        answer["global_steps"] = engine.global_steps
    except BaseException as e:
        answer["error"] = f"{type(e).__name__}: {e}"[:300]
    return answer


for case in json.load(sys.stdin):
    begin = time.monotonic()
    answer = one(case)
    answer["seconds"] = round(time.monotonic() - begin, 2)
    os.write(out, (json.dumps(answer, default=str) + "\n").encode())
