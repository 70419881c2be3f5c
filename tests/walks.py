"""Random walks of the wizard's session without a screen, the same for every front end's tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from dstui.config import presets
from dstui.config.document import Document
from dstui.facts.model import Facts, Gpu, GpuProcess, Host, Interpreter, Scheduler, Storage, Toolchain
from dstui.session import FIELDS, Session
from dstui.units import GiB

PACKAGES = {"deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.24.0", "llamafactory": "0.9.4"}


def machine(kind: str, python: str = "/usr/bin/python3") -> Facts:
    """Facts by a short name: ``cpu``, ``login``, ``1x24``, ``4x24-busy``, ``8x80``."""
    host = Host(ram_total=256 * GiB, ram_available=200 * GiB, cores=32)
    interpreters = (
        Interpreter(
            path=python,
            origin="active",
            version="3.11.9",
            packages=PACKAGES,
            torch_cuda="13.0",
            launchers=("deepspeed", "torchrun", "llamafactory-cli"),
        ),
    )
    common: dict[str, Any] = {
        "host": host,
        "interpreters": interpreters,
        "toolchain": Toolchain(compiler="/usr/bin/c++"),
    }
    if kind == "cpu":
        return Facts(gpus=(), **common)
    if kind == "login":
        return Facts(gpus=(), scheduler=Scheduler(slurm_present=True, login_node=True), **common)
    count, size = (int(x) for x in kind.removesuffix("-busy").split("x"))
    gpus = []
    for i in range(count):
        busy = kind.endswith("-busy") and i == 0
        processes = (GpuProcess(4242, "ana", "python", 3 * GiB),) if busy else ()
        free = size * GiB - (3 * GiB if busy else 0)
        gpus.append(
            Gpu(
                i,
                uuid=f"GPU-{i}",
                name="Card",
                memory_total=size * GiB,
                memory_free=free,
                compute_capability=(9, 0),
                processes=processes,
            )
        )
    storage = (
        Storage(
            path="/tmp",
            mount="/",
            filesystem="ext4",
            free=900 * GiB,
            rotational=False,
            writable=True,
            o_direct=True,
        ),
    )
    return Facts(gpus=tuple(gpus), storage=storage, **common)


OPENED: tuple[dict[str, Any], ...] = (
    {"train_batch_size": 32, "fp16": {"enabled": True, "loss_scale": 0}, "zero_optimization": {"stage": 1}},
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "stage3_gather_fp16_weights_on_model_save": True,
            "prefetch_bucket_size": 10000000,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "wall_clock_breakdown": False,
    },
    {
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {"stage": 2, "cpu_offload": True, "overlap_comm": True},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 100,
    },
    {"train_batch_size": 8, "zero_optimization": False, "my_own_key": {"kept": 1}},
)
"""Configs as people have them: old aliases, `auto`, a key that nobody knows."""

TEXTS: dict[str, tuple[str, ...]] = {
    "gpus": ("8x80GiB", "4x24GiB", "2xA100-80G", "nonsense"),
    "ranks": ("1", "2", "4", "x"),
    "nodes": ("1", "2", "0"),
    "ram": ("512GiB", "64GiB", "much"),
    "args": ("", "--epochs 1", "--per_device_train_batch_size 2 --bf16 True", "'open"),
    "model": ("smollm2-135m", "0.5B", "tinyllama-1.1b", "/nowhere/model"),
    "seq": ("512", "2048", "-1", "1.5"),
    "lora_rank": ("8", "64", "0"),
    "micro_batch": ("1", "2", "8", "0"),
    "accumulation": ("1", "4", "16", "a"),
    "global_batch": ("8", "64", "7", "256"),
    "reduce_bucket_size": ("2e8", "5e8", "100000000", "0", "big"),
    "allgather_bucket_size": ("2e8", "500000000", "3"),
    "prefetch_bucket_size": ("0", "5e7"),
    "persistence_threshold": ("0", "1e5"),
    "timeout": ("10", "60", "0"),
    "lr": ("1e-5", "2e-4", "-1", "fast"),
    "weight_decay": ("0", "0.1"),
    "gradient_clipping": ("0", "1.0", "x"),
    "name": ("", "my-run", "no/slash"),
    "facts_file": ("/nowhere.json",),
}


def start(seed: int, folder: Path) -> tuple[Session, random.Random]:
    """A session on a random machine, from nothing, a preset or an opened file."""
    rng = random.Random(seed)
    facts = machine(rng.choice(("cpu", "login", "1x24", "4x24-busy", "8x80", "8x80")))
    way = rng.choice(("new", "new", "preset", "preset", "file"))
    late = rng.random() < 0.3
    kwargs: dict[str, Any] = {}
    if way == "preset":
        kwargs["preset"] = rng.choice(presets.list_presets())
    elif way == "file":
        data = rng.choice(OPENED)
        text = json.dumps(data, indent=2)
        if rng.random() < 0.5:
            text = text.replace("{", "{  // mine\n", 1)
        path = folder / f"opened{seed}.json"
        path.write_text(text)
        kwargs["document"] = Document.parse(text, str(path))
    session = Session(None if late else facts, cwd=folder, **kwargs)
    if late:
        session.set("micro_batch", "2")
        session.set_facts(facts)
    return session, rng


def step(session: Session, rng: random.Random) -> None:
    """One thing that a person does on a random field."""
    spec = rng.choice(FIELDS)
    if spec.id in ("cwd", "output", "python", "facts_file"):
        return
    view = session.field(spec.id)
    if not view.enabled and rng.random() < 0.8:
        return
    if spec.id == "script":
        session.set("script", str(Path(session.field("cwd").value) / rng.choice(("train.py", "missing.py"))))
    elif spec.id == "nvme_path":
        session.set("nvme_path", rng.choice(("/tmp", "/proc/none")))
    elif spec.kind == "multi":
        values = [str(o.value) for o in view.options]
        session.set(spec.id, rng.sample(values, rng.randint(0, len(values))))
    elif spec.kind == "choice":
        session.set(spec.id, rng.choice([*(o.value for o in view.options), "bogus"]))
    elif spec.kind == "bool":
        session.set(spec.id, rng.choice(("yes", "no", "perhaps")))
    else:
        session.set(spec.id, rng.choice(TEXTS[spec.id]))


def settle(session: Session) -> None:
    """Do what a person does before writing: put right every field that is wrong, take the rest as recommended."""
    (Path(session.field("cwd").value) / "train.py").write_text("import deepspeed\n")
    if session.is_login_node and session.facts is None:
        for field, value in (("machine", "describe"), ("nodes", 1), ("ram", "512GiB"), ("gpus", "4x80GiB")):
            session.set(field, value)
    for _ in range(10):
        problems = session.problems()
        for field, _error in problems:
            if field == "gpus":
                session.set("gpus", "4x80GiB")
            else:
                session.unset(field)
        if not problems:
            break
    facts = session.facts
    if facts is not None and facts.gpus == () and session.field("cards").options:
        session.unset("cards")
        if not session.field("cards").value:
            session.set("cards", [session.field("cards").options[0].value])
    session.accept_rest()


def walk(seed: int, folder: Path, steps: int = 25) -> Session:
    """A whole walk, ready to be written."""
    session, rng = start(seed, folder)
    for _ in range(rng.randint(0, steps)):
        if rng.random() < 0.15:
            session.accept(rng.choice(session.steps).id)
        else:
            step(session, rng)
        if rng.random() < 0.2:
            session.report()
    settle(session)
    return session
