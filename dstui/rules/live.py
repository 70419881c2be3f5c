"""A second opinion: the DeepSpeed installed in the training interpreter, asked in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _

_SCRIPT = r"""
import contextlib, io, json, os, sys, warnings
request = json.load(sys.stdin)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
out = os.dup(1)
os.dup2(2, 1)  # whatever the libraries print is not the answer
warnings.simplefilter("ignore")
try:
    import deepspeed
    import deepspeed.runtime.config as config

    try:  # from 0.18.6 deepspeed.initialize reads the file before DeepSpeedConfig sees it
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config as read
    except ImportError:
        read = str
    from deepspeed import comm
    for module in (comm, comm.comm):
        module.is_initialized = lambda: True
        module.get_world_size = lambda group=None: request["world_size"]
        module.get_rank = lambda group=None: 0
    config.dist = comm
except BaseException as e:
    os.write(out, json.dumps({"import": f"{type(e).__name__}: {e}"[:300]}).encode())
    sys.exit(0)


class Arguments:
    def __init__(self, values):
        self.__dict__.update(values)


class Model:
    def __init__(self, hidden_size):
        self.config = type("Config", (), {"hidden_size": hidden_size})()


def fill(path, values):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with open(path) as f:
        filled = HfTrainerDeepSpeedConfig(json.load(f))
    steps = values.pop("num_training_steps", 1000)
    hidden = values.pop("hidden_size", None)
    warm = values["warmup_steps"]
    values["get_warmup_steps"] = lambda n: int(warm) if warm >= 1 else 0
    arguments = Arguments(values)
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, Model(hidden) if hidden else type("M", (), {"config": object()})(), steps)
    return filled.config


answers = []
for path in request["files"]:
    answer = {"file": path, "deepspeed": deepspeed.__version__}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            source = fill(path, dict(request["args"])) if request["args"] is not None else read(path)
            made = config.DeepSpeedConfig(source)
        answer.update(verdict="accepted", problem=None, batch=[made.train_batch_size, made.train_micro_batch_size_per_gpu,
                                                              made.gradient_accumulation_steps])
    except BaseException as e:
        answer.update(verdict="rejected", problem=f"{type(e).__name__}: {e}"[:500], batch=None)
    answers.append(answer)
os.write(out, json.dumps({"answers": answers}).encode())
"""


@dataclass(frozen=True)
class Answer:
    """The installed release's verdict on one file."""

    file: str
    deepspeed: str
    verdict: str
    problem: str | None
    batch: tuple[Any, Any, Any] | None = None
    """train, micro, accumulation as that release holds them."""

    def to_json(self) -> dict[str, Any]:
        return {"deepspeed": self.deepspeed, "verdict": self.verdict, "problem": self.problem}


def ask(
    files: Sequence[str],
    python: str,
    *,
    world_size: int,
    args: Mapping[str, Any] | None = None,
    timeout: float = 120.0,
) -> list[Answer]:
    """``DeepSpeedConfig`` of the DeepSpeed in ``python`` on each file, at a pretended ``world_size``.

    ``args`` (complete TrainingArguments fields) fills ``auto`` with that interpreter's transformers first. Nothing
    is trained and no process group is made. Raises DstuiError when DeepSpeed cannot be asked.
    """
    request = json.dumps(
        {"files": list(files), "world_size": world_size, "args": dict(args) if args is not None else None}
    )
    environment = {
        **os.environ,
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT],
            input=request.encode(),
            capture_output=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    except OSError as e:
        raise DstuiError(
            _("{python} could not be started: {reason}").format(python=python, reason=e.strerror or e)
        ) from e
    except subprocess.TimeoutExpired as e:
        raise DstuiError(
            _("DeepSpeed in {python} did not answer within {seconds:.0f} s").format(
                python=python, seconds=timeout
            ),
            _("try `{python} -c 'import deepspeed'`").format(python=python),
        ) from e
    try:
        answer = json.loads(done.stdout)
    except ValueError as e:
        tail = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise DstuiError(
            _("DeepSpeed in {python} gave no answer: {reason}").format(
                python=python, reason=tail[0] if tail else _("exit code {code}").format(code=done.returncode)
            )
        ) from e
    if "import" in answer:
        raise DstuiError(
            _("{python} cannot import deepspeed: {reason}").format(python=python, reason=answer["import"]),
            _("choose the training interpreter with --facts, or activate its environment"),
        )
    return [
        Answer(
            a["file"], a["deepspeed"], a["verdict"], a["problem"], tuple(a["batch"]) if a["batch"] else None
        )
        for a in answer["answers"]
    ]
