"""What DeepSpeed's op builder needs to compile its ops at first use.

Searched as the real builders do: ``torch/utils/cpp_extension.py`` (``_find_cuda_home``, ``get_cxx_compiler``,
``is_ninja_available``) and DeepSpeed 0.19.8 ``ops/op_builder/builder.py`` (``installed_cuda_version`` runs
``$CUDA_HOME/bin/nvcc -V``) and ``async_io.py`` (links ``-laio``).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dstui.facts.model import Interpreter, Toolchain
from dstui.facts.system import Child, System
from dstui.i18n import _

PACKAGE_MANAGERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk")


def cuda_home(system: System) -> str | None:
    """``CUDA_HOME`` as torch finds it: the variable, ``CUDA_PATH``, two folders above nvcc, /usr/local/cuda."""
    home = system.environ.get("CUDA_HOME") or system.environ.get("CUDA_PATH")
    if home:
        return home
    nvcc = system.which("nvcc")
    if nvcc:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if system.exists("/usr/local/cuda") else None


class ToolchainReader:
    """Starts the version questions at once; ``finish`` collects the answers."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.home = cuda_home(system)
        nvcc = f"{self.home}/bin/nvcc" if self.home else None
        self.nvcc = nvcc if nvcc and system.path(nvcc).is_file() else None
        self.compiler, self.compiler_words = _compiler(system)
        self._nvcc_child = Child([str(system.path(self.nvcc)), "-V"], system.environ) if self.nvcc else None
        self._cxx_child = (
            Child([*self.compiler_words, "--version"], system.environ) if self.compiler else None
        )

    def finish(self, interpreter: Interpreter | None, deadline: float) -> tuple[Toolchain, dict[str, str]]:
        """The toolchain seen from the training interpreter, and reasons (keys ``toolchain.<field>``)."""
        unknown: dict[str, str] = {}
        system = self.system
        nvcc_version = None
        if self.home is None:
            unknown["toolchain.cuda_home"] = unknown["toolchain.nvcc"] = _(
                "no CUDA toolkit: CUDA_HOME is not set, nvcc is not on PATH, /usr/local/cuda does not exist"
            )
        elif self.nvcc is None:
            unknown["toolchain.nvcc"] = _("there is no nvcc in {folder}").format(folder=f"{self.home}/bin")
        if self._nvcc_child:
            text = self._nvcc_child.output(deadline)
            m = re.search(r"release (\d+\.\d+)", text or "")
            nvcc_version = m.group(1) if m else None
            if nvcc_version is None:
                unknown["toolchain.nvcc_version"] = _why(self._nvcc_child)
        compiler_version = None
        if self._cxx_child is None:
            unknown["toolchain.compiler"] = _("no C++ compiler: {name} is not on PATH").format(
                name=self.compiler_words[0] if self.compiler_words else "c++"
            )
        else:
            text = self._cxx_child.output(deadline)
            first = (text or "").splitlines()[:1]
            numbers = re.findall(r"\d+\.\d+(?:\.\d+)?", first[0]) if first else []
            compiler_version = numbers[-1] if numbers else None
            if compiler_version is None:
                unknown["toolchain.compiler_version"] = _why(self._cxx_child)
        ninja, on_path = _ninja(system, interpreter)
        if ninja is None:
            unknown["toolchain.ninja"] = _("ninja is neither on PATH nor beside the training interpreter")
        headers = interpreter.headers if interpreter else None
        if headers is None:
            unknown["toolchain.python_headers"] = _("the training interpreter is not known well enough")
        return (
            Toolchain(
                cuda_home=self.home,
                nvcc=self.nvcc,
                nvcc_version=nvcc_version,
                compiler=self.compiler,
                compiler_version=compiler_version,
                cxx=system.environ.get("CXX") or None,
                ninja=ninja,
                ninja_on_path=on_path,
                libaio=_found(system, _library_folders(system), "libaio.so"),
                libaio_header=_found(system, _header_folders(system), "libaio.h"),
                python_headers=headers,
                package_manager=next((m for m in PACKAGE_MANAGERS if system.which(m)), None),
                arch_list=system.environ.get("TORCH_CUDA_ARCH_LIST") or None,
            ),
            unknown,
        )


def _why(child: Child) -> str:
    if child.timed_out:
        return _("it did not answer in time")
    return child.failure or _("its answer was not understood")


def _compiler(system: System) -> tuple[str | None, list[str]]:
    """(path, words of the command): ``$CXX`` or ``c++``, as torch takes it."""
    try:
        words = shlex.split(system.environ.get("CXX", "")) or ["c++"]
    except ValueError:
        words = [system.environ["CXX"]]
    path = system.which(words[0])
    return path, ([path, *words[1:]] if path else words)


def _ninja(system: System, interpreter: Interpreter | None) -> tuple[str | None, bool | None]:
    path = system.which("ninja")
    if path:
        return path, True
    if interpreter:
        beside = Path(interpreter.path).parent / "ninja"
        if beside.is_file():
            return str(beside), False
    return None, None


def _flag_folders(system: System, variables: tuple[str, ...], flag: str) -> list[str]:
    found = []
    for name in variables:
        try:
            words = shlex.split(system.environ.get(name, ""))
        except ValueError:
            continue
        for i, w in enumerate(words):
            if w == flag and i + 1 < len(words):
                found.append(words[i + 1])
            elif w.startswith(flag) and len(w) > 2:
                found.append(w[2:])
    return found


def _path_list(system: System, *names: str) -> list[str]:
    return [p for name in names for p in system.environ.get(name, "").split(":") if p]


def _triples(system: System, folder: str) -> list[str]:
    try:
        return [f"{folder}/{p.name}" for p in system.path(folder).glob("*-linux-gnu*") if p.is_dir()]
    except OSError:
        return []


def _library_folders(system: System) -> list[str]:
    return [
        *_flag_folders(system, ("LDFLAGS",), "-L"),
        *_path_list(system, "LIBRARY_PATH"),
        *_triples(system, "/usr/lib"),
        "/usr/lib64",
        "/usr/lib",
        "/lib64",
        "/lib",
        "/usr/local/lib",
        "/usr/local/lib64",
    ]


def _header_folders(system: System) -> list[str]:
    return [
        *_flag_folders(system, ("CFLAGS", "CPPFLAGS", "CXXFLAGS"), "-I"),
        *_path_list(system, "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
        "/usr/include",
        "/usr/local/include",
        *_triples(system, "/usr/include"),
    ]


def _found(system: System, folders: list[str], name: str) -> bool:
    return any(system.exists(f"{folder}/{name}") for folder in folders)
