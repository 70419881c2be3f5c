"""What this machine lacks to train with DeepSpeed, and the exact commands that add it.

Sources: DeepSpeed 0.19.8 ``ops/op_builder/builder.py`` (``assert_no_cuda_mismatch``,
``cuda_minor_mismatch_ok``, ``compute_capability_args``) and ``async_io.py``; the dependency metadata of the
torch wheels (2.8-2.10 need CUDA 12.8 libraries, 2.11-2.13 CUDA 13.0 ones, which no longer hold code for
compute capability 7.0).
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from dstui.facts.model import Facts, Interpreter
from dstui.i18n import _

FIRST_CUDA_13_TORCH = "2.11"
"""The first torch whose default wheel is built for CUDA 13."""
_OLDEST_13 = (7, 5)
"""CUDA 13 dropped Volta and older."""

_PACKAGES = {
    "apt-get": {
        "compiler": "g++",
        "headers": "python{version}-dev",
        "ninja": "ninja-build",
        "libaio": "libaio-dev",
    },
    "dnf": {
        "compiler": "gcc-c++",
        "headers": "python3-devel",
        "ninja": "ninja-build",
        "libaio": "libaio-devel",
    },
    "zypper": {"compiler": "gcc-c++", "headers": "python3-devel", "ninja": "ninja", "libaio": "libaio-devel"},
    "pacman": {"compiler": "gcc", "headers": "python", "ninja": "ninja", "libaio": "libaio"},
    "apk": {"compiler": "g++", "headers": "python3-dev", "ninja": "ninja", "libaio": "libaio-dev"},
}
_PACKAGES["yum"] = _PACKAGES["dnf"]
_INSTALL = {"pacman": "pacman -S", "apk": "apk add"}


@dataclass(frozen=True)
class Lack:
    """One thing that is missing or does not fit. ``code``: ``compiler headers ninja nvcc cuda-mismatch
    arch-list libaio driver-too-old torch-cpu``; ``fix``: a command or a sentence."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True)
class Advice:
    """``command`` installs DeepSpeed in one line of a POSIX shell; ``lacks`` is what its ops will miss."""

    command: str
    reason: str
    lacks: tuple[Lack, ...] = ()


def arch_list(facts: Facts) -> str | None:
    """``TORCH_CUDA_ARCH_LIST`` for the cards here (``8.0;9.0``); None when a capability is unknown."""
    if not facts.gpus or any(g.compute_capability is None for g in facts.gpus):
        return None
    found = sorted({g.compute_capability for g in facts.gpus if g.compute_capability})
    return ";".join(f"{major}.{minor}" for major, minor in found)


def bad_arch_entries(value: str) -> list[str]:
    """Entries of ``TORCH_CUDA_ARCH_LIST`` that DeepSpeed's builder cannot read (``9.0a``, ``Hopper``)."""
    entries = [e for e in re.split(r"[ ;]+", value.strip()) if e]
    return [e for e in entries if not re.fullmatch(r"\d+\.\d+(\+PTX)?", e)]


def system_package(facts: Facts, what: str, interpreter: Interpreter | None = None) -> str | None:
    """``sudo apt-get install g++`` for ``compiler``, ``headers``, ``ninja`` or ``libaio``; None: unknown system."""
    manager = facts.toolchain.package_manager
    if manager not in _PACKAGES:
        return None
    version = ".".join((interpreter.version or "3").split(".")[:2]) if interpreter else "3"
    command = _INSTALL.get(manager, f"{manager} install")
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}{command} {_PACKAGES[manager][what].format(version=version)}"


def _major(version: str | None) -> int | None:
    head = (version or "").split(".")[0]
    return int(head) if head.isdigit() else None


def lacks(facts: Facts, interpreter: Interpreter | None = None) -> tuple[Lack, ...]:
    """What DeepSpeed's ops (CPU Adam for offload, fused Adam, async I/O) will miss, worst first."""
    it = interpreter or facts.interpreter
    tools = facts.toolchain
    out: list[Lack] = []

    def package(what: str, other: str) -> str:
        return system_package(facts, what, it) or other

    if "toolchain" in facts.unknown:  # a described machine: nothing is known
        return ()
    torch_cuda = it.torch_cuda if it else None
    if facts.gpus and torch_cuda == "":
        out.append(
            Lack(
                "torch-cpu",
                _("torch {version} is a CPU build: it will not see the GPUs").format(
                    version=it.torch if it else "?"
                ),
                _("install the CUDA build: {command}").format(
                    command=_torch_command(facts, it, upgrade=True)
                ),
            )
        )
    driver, built = _major(facts.cuda_driver), _major(torch_cuda)
    if facts.gpus and driver and built and driver < built:
        out.append(
            Lack(
                "driver-too-old",
                _("torch is built for CUDA {built}, the driver {driver} supports up to CUDA {cuda}").format(
                    built=torch_cuda, driver=facts.driver or "?", cuda=facts.cuda_driver
                ),
                _("update the NVIDIA driver, or: {command}").format(
                    command=_torch_command(facts, it, upgrade=True)
                ),
            )
        )
    if tools.compiler is None:
        message = _("no C++ compiler: DeepSpeed cannot build its ops (CPU Adam, async I/O)")
        if tools.cxx:
            message = _(
                "CXX={value} is not on PATH: DeepSpeed cannot build its ops (CPU Adam, async I/O)"
            ).format(value=tools.cxx)
        fix = "unset CXX" if tools.cxx else package("compiler", _("install a C++ compiler (g++)"))
        out.append(Lack("compiler", message, fix))
    if tools.python_headers is False:
        out.append(
            Lack(
                "headers",
                _("Python.h of {python} is missing: DeepSpeed cannot build its ops").format(
                    python=it.path if it else "python"
                ),
                package("headers", _("install the Python development headers")),
            )
        )
    if tools.ninja is None:
        python = shlex.quote(it.path) if it else "python3"
        out.append(
            Lack(
                "ninja",
                _("ninja is missing: DeepSpeed cannot build its ops"),
                f"{python} -m pip install ninja",
            )
        )
    if facts.gpus and torch_cuda:
        out += _nvcc_lacks(facts, torch_cuda)
    if tools.arch_list and bad_arch_entries(tools.arch_list):
        good = arch_list(facts)
        bad = bad_arch_entries(tools.arch_list)
        out.append(
            Lack(
                "arch-list",
                _("TORCH_CUDA_ARCH_LIST={value}: DeepSpeed's builder fails on '{entry}'").format(
                    value=tools.arch_list, entry=bad[0]
                ),
                f"export TORCH_CUDA_ARCH_LIST={shlex.quote(good)}" if good else "unset TORCH_CUDA_ARCH_LIST",
            )
        )
    if tools.libaio is False or tools.libaio_header is False:
        out.append(
            Lack(
                "libaio",
                _("libaio's header or library is missing: NVMe offload cannot be built"),
                package("libaio", _("install libaio with its header")),
            )
        )
    return tuple(out)


def _nvcc_lacks(facts: Facts, torch_cuda: str) -> list[Lack]:
    tools = facts.toolchain
    wanted = ".".join(torch_cuda.split(".")[:2])
    if tools.nvcc is None:
        return [
            Lack(
                "nvcc",
                _(
                    "no nvcc: DeepSpeed cannot build CUDA ops such as fused Adam (torch's own optimizers work)"
                ),
                _("install the CUDA {version} toolkit and set CUDA_HOME").format(version=wanted),
            )
        ]
    have = tools.nvcc_version
    if have is None or have == wanted:
        return []
    if _major(have) == _major(wanted) and (_major(wanted) or 0) in (10, 11, 12):
        return []  # the builder accepts any minor release of these
    return [
        Lack(
            "cuda-mismatch",
            _(
                "nvcc is CUDA {nvcc}, torch is built for CUDA {torch}: DeepSpeed refuses to build CUDA ops"
            ).format(nvcc=have, torch=wanted),
            _(
                "install the CUDA {version} toolkit and set CUDA_HOME, or DS_SKIP_CUDA_CHECK=1 at your own risk"
            ).format(version=wanted),
        )
    ]


def torch_requirement(facts: Facts) -> str:
    """``torch`` or ``torch<2.11``: whose default wheel runs on this driver and these cards and matches nvcc."""
    driver = _major(facts.cuda_driver)
    nvcc = _major(facts.toolchain.nvcc_version)
    old_card = any(g.compute_capability and g.compute_capability < _OLDEST_13 for g in facts.gpus or ())
    if facts.gpus and (old_card or (driver is not None and driver < 13) or nvcc == 12):
        return f"torch<{FIRST_CUDA_13_TORCH}"
    return "torch"


def _pip(it: Interpreter | None) -> list[str]:
    """Words before the requirements; more than one command is joined by ``&&``."""
    if it is None or it.problem or it.externally_managed:
        python = shlex.quote(it.path) if it and not it.problem else "python3"
        return [f"{python} -m venv .venv", ".venv/bin/python -m pip install"]
    python = shlex.quote(it.path)
    if it.has_pip is False:
        return [f"{python} -m ensurepip", f"{python} -m pip install"]
    return [f"{python} -m pip install"]


def _torch_command(facts: Facts, it: Interpreter | None, *, upgrade: bool = False) -> str:
    words = _pip(it)
    flags = " --upgrade --force-reinstall" if upgrade else ""
    return " && ".join([*words[:-1], f"{words[-1]}{flags} {shlex.quote(torch_requirement(facts))}"])


def install_advice(facts: Facts, interpreter: Interpreter | None = None) -> Advice | None:
    """How to make ``interpreter`` (default: the training one) train here; None when it can already.

    The command names the very interpreter, a torch whose CUDA major the driver supports and nvcc matches,
    and the cards' architectures for ops built ahead.
    """
    it = interpreter or facts.interpreter
    if it is not None and it.can_train:
        return None
    driver = _major(facts.cuda_driver)
    wanted: list[str] = []
    fresh = it is None or bool(it.problem) or bool(it.externally_managed)
    if fresh or it is None or not it.torch:
        wanted.append(shlex.quote(torch_requirement(facts)))
    wanted.append("deepspeed")
    steps = _pip(it)
    install = f"{steps[-1]} {' '.join(wanted)}"
    archs = arch_list(facts)
    if archs and facts.toolchain.nvcc:
        install = f"TORCH_CUDA_ARCH_LIST={shlex.quote(archs)} {install}"
    if it is None:
        reason = _("no Python that can train was found")
    elif it.problem:
        reason = f"{it.path}: {it.problem}"
    elif not it.torch and not it.deepspeed:
        reason = _("{python} has neither torch nor deepspeed").format(python=it.path)
    elif not it.deepspeed:
        reason = _("{python} has no deepspeed").format(python=it.path)
    else:
        reason = _("{python} has no torch").format(python=it.path)
    missing = list(lacks(facts, it))
    if facts.gpus and driver is not None and driver < 12:
        missing.insert(
            0,
            Lack(
                "driver-too-old",
                _(
                    "the driver {driver} supports CUDA {cuda}; every torch that DeepSpeed needs is built for 12"
                ).format(driver=facts.driver or "?", cuda=facts.cuda_driver),
                _("update the NVIDIA driver to 525 or later"),
            ),
        )
    return Advice(" && ".join([*steps[:-1], install]), reason, tuple(missing))
