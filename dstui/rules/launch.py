"""DS9xx: the machine, its GPUs and its tools against what the config asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import Subject, as_bool

ZERO = "/zero_optimization"


def _offload_block(s: Subject) -> str:
    for name in ("offload_optimizer", "offload_param", "cpu_offload"):
        if s.written(f"{ZERO}/{name}"):
            return f"{ZERO}/{name}"
    return ZERO


def builds_cpu_adam(s: Subject) -> bool:
    """The run compiles DeepSpeed's CPU optimizer at start: optimizer offload with one of its own optimizers."""
    own = (s.optimizer or "").lower() in ("adam", "adamw", "lion", "adagrad")
    return (
        bool(s.stage)
        and s.offloads_optimizer
        and own
        and as_bool(s.get("/optimizer/params/torch_adam", False)) is not True
    )


@rule(
    "DS901",
    "more-ranks-than-gpus",
    Severity.WARNING,
    "init",
    needs=("facts.gpus",),
    what=N_("The number of ranks is larger than the GPUs of the machine."),
    why=N_(
        "The launcher does not check: it starts that many processes, which then share cards, or run on the CPU where there is no GPU at all."
    ),
    example='{"train_batch_size": 99}',
    fix=N_("Start one rank a GPU."),
    source="deepspeed/launcher/runner.py: --num_gpus is not checked @ 0.19.8; executed",
    context={"world_size": 99, "gpus": 0},
)
def more_ranks_than_gpus(s: Subject) -> Iterator[Hit]:
    if s.facts is None or s.facts.gpus is None or not s.world_known or s.world_size_from == "batch":
        return
    if s.launch is not None and s.launch.ranks == s.world_size:
        return  # the rules of the command line say which option asks for too much
    there = len(s.facts.gpus) * max(1, s.facts.nodes)
    # On a machine without GPUs a few ranks on the CPU (gloo) are a choice, not a slip.
    room = there or (s.facts.host.cores_usable or 1) * max(1, s.facts.nodes)
    if s.world_size > room:
        yield Hit(
            "",
            _("{world} ranks, but {gpus} GPUs").format(world=s.world_size, gpus=there),
            effect=_("several processes share one card or run on the CPU; nobody warns"),
            hint=_("start one rank a GPU"),
        )


@rule(
    "DS902",
    "arch-list-breaks-builder",
    Severity.ERROR,
    "init",
    needs=("facts",),
    what=N_("TORCH_CUDA_ARCH_LIST has an entry such as 9.0a while the run must compile an op."),
    why=N_(
        'DeepSpeed\'s op builder turns the parts into integers: "invalid literal for int()" stops the run when it builds the CPU optimizer.'
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Set TORCH_CUDA_ARCH_LIST to plain numbers, for example 9.0."),
    source="deepspeed/ops/op_builder/builder.py compute_capability_args @ 0.19.8",
    context={"arch_list": "9.0a"},
)
def arch_list_breaks_builder(s: Subject) -> Iterator[Hit]:
    arch = s.facts.toolchain.arch_list if s.facts else None
    if not arch or not builds_cpu_adam(s):
        return
    bad = [a for a in re.split(r"[;\s]+", arch) if a and not re.fullmatch(r"\d+\.\d+(\+PTX)?", a)]
    if bad:
        yield Hit(
            _offload_block(s),
            _("TORCH_CUDA_ARCH_LIST has {entry}, which DeepSpeed's op builder cannot read").format(
                entry=bad[0]
            ),
            effect=_('building the CPU optimizer stops with "invalid literal for int()"'),
            hint=_("export TORCH_CUDA_ARCH_LIST={value}").format(
                value=re.sub(r"[a-z]+", "", bad[0].split("+")[0])
            ),
        )


@rule(
    "DS903",
    "no-compiler-for-offload",
    Severity.ERROR,
    "init",
    needs=("facts",),
    what=N_("Optimizer offload on a machine without a C++ compiler."),
    why=N_("DeepSpeed compiles its CPU optimizer when the run starts."),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Install a compiler: apt-get install g++, or dnf install gcc-c++."),
    source="deepspeed/ops/op_builder/cpu_adam.py, builder.py jit_load @ 0.19.8",
    context={"compiler": None},
)
def no_compiler_for_offload(s: Subject) -> Iterator[Hit | Lacks]:
    if not builds_cpu_adam(s) or s.facts is None:
        return
    if (
        s.facts.source == "described"
        or "toolchain.compiler" in s.facts.unknown
        or "toolchain" in s.facts.unknown
    ):
        yield Lacks("facts.toolchain.compiler")
    elif s.facts.toolchain.compiler is None:
        yield Hit(
            _offload_block(s),
            _("no C++ compiler here, and offload compiles DeepSpeed's CPU optimizer"),
            effect=_("the engine stops at start"),
            hint=_("install g++ (apt-get install g++, dnf install gcc-c++)"),
        )


@rule(
    "DS904",
    "no-libaio-for-nvme",
    Severity.ERROR,
    "init",
    needs=("facts",),
    what=N_("NVMe offload on a machine without libaio."),
    why=N_("The asynchronous I/O op needs the library and its header; it is built when the run starts."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}}',
    fix=N_("Install it: apt-get install libaio-dev, or dnf install libaio-devel."),
    source="deepspeed/ops/op_builder/async_io.py @ 0.19.8",
    context={"libaio": False},
)
def no_libaio_for_nvme(s: Subject) -> Iterator[Hit]:
    nvme = s.stage == 3 and "nvme" in (s.offload("offload_optimizer"), s.offload("offload_param"))
    if not nvme or s.facts is None:
        return
    tools = s.facts.toolchain
    if tools.libaio is False or tools.libaio_header is False:
        yield Hit(
            _offload_block(s),
            _("no libaio here, and NVMe offload needs it"),
            effect=_("the engine stops at start: Unable to JIT load the async_io op"),
            hint=_("apt-get install libaio-dev, or dnf install libaio-devel"),
        )
