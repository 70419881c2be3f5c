"""Pythons that may train, and what is installed in them, without importing any of it.

A virtual environment or conda environment is read from its files (well below a millisecond each); any other
interpreter is asked with a few lines of Python that import nothing. Versions come from the
``*.dist-info`` folders on its ``sys.path`` (PyPA "Recording installed projects"), torch's CUDA build from
the text of ``torch/version.py``.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dstui.errors import DstuiError
from dstui.facts.model import Interpreter
from dstui.facts.system import Child, System
from dstui.i18n import _

PACKAGES = (
    "deepspeed",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "llamafactory",
    "ms-swift",
    "bitsandbytes",
    "flash-attn",
    "liger-kernel",
    "triton",
)
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "llamafactory-cli", "swift")
MOST_CONDA = 20

_ASK = (
    "import sys\n"
    "print(repr({'version': '.'.join(map(str, sys.version_info[:3])), 'prefix': sys.prefix,\n"
    "  'base': getattr(sys, 'base_prefix', sys.prefix), 'abi': getattr(sys, 'abiflags', ''), 'path': sys.path,\n"
    "  'stdlib': getattr(sys.modules.get('os'), '__file__', None)}))\n"
)
"""Imports nothing: 15 ms instead of 30 with sysconfig, and nothing of the working directory can run."""
_TAGS = {_p.replace("-", "_"): _p for _p in PACKAGES}


@dataclass(frozen=True)
class _Found:
    """What is known of an interpreter before its packages are read."""

    path: str
    origin: str
    prefix: str | None = None
    version: str | None = None
    search: tuple[str, ...] = ()
    include: str | None = None
    managed: bool = False
    problem: str | None = None


class InterpreterReader:
    """Finds the candidates and starts the questions; ``finish`` collects the answers.

    ``python`` is ``--python``, else ``DSTUI_PYTHON``: a path, a folder of a virtual environment, or a name on
    PATH. Raises DstuiError when there is no such interpreter.
    """

    def __init__(self, system: System, python: str | None = None) -> None:
        self.system = system
        self._items: list[_Found | tuple[str, str, Child]] = []
        prefixes: set[str] = set()
        for path, origin in _candidates(system, python or system.environ.get("DSTUI_PYTHON")):
            found = None if origin == "option" else _from_files(system, path, origin)
            if found is not None:
                key = os.path.realpath(found.prefix or path)
                if key in prefixes:
                    continue
                prefixes.add(key)
                self._items.append(found)
                continue
            key = os.path.realpath(path)
            if key in prefixes:
                continue
            prefixes.add(key)
            self._items.append((path, origin, Child([path, "-c", _ASK], system.environ, cwd=system.cwd)))

    def finish(self, deadline: float) -> tuple[Interpreter, ...]:
        """All interpreters, best first, one for each prefix."""
        out: list[Interpreter] = []
        prefixes: set[str] = set()
        for item in self._items:
            found = item if isinstance(item, _Found) else _from_answer(*item, deadline=deadline)
            key = os.path.realpath(found.prefix or found.path)
            if key in prefixes:
                continue
            prefixes.add(key)
            out.append(_describe(found))
        return tuple(out)


def _candidates(system: System, python: str | None) -> Iterable[tuple[str, str]]:
    env = system.environ
    if python is not None:
        yield _named(system, python), "option"
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if env.get(variable):
            yield f"{env[variable]}/bin/python", "active"
    project = Path(system.cwd, ".venv/bin/python")
    if os.path.lexists(project):
        yield str(project), "project"
    if sys.executable:
        yield sys.executable, "own"
    for prefix in _conda_prefixes(system):
        yield f"{prefix}/bin/python", "conda"
    on_path = system.which("python3")
    if on_path:
        yield _through_shim(system, on_path), "path"


def _named(system: System, python: str) -> str:
    path = os.path.expanduser(python)  # noqa: PTH111
    if os.sep not in path and not Path(system.cwd, path).is_dir():
        found = system.which(path)
        if found is None:
            raise DstuiError(
                _("there is no interpreter '{name}' on PATH").format(name=python),
                _("give its path, e.g. --python /path/to/venv/bin/python"),
            )
        return found
    full = Path(system.cwd, path)
    if full.is_dir():
        inside = full / "bin/python"
        if not inside.exists():
            raise DstuiError(
                _("there is no bin/python in {path}").format(path=python),
                _("give the path of an interpreter or of a virtual environment"),
            )
        full = inside
    if not full.exists():
        raise DstuiError(
            _("there is no interpreter at {path}").format(path=python),
            _("give its path, e.g. --python /path/to/venv/bin/python"),
        )
    if not os.access(full, os.X_OK):
        raise DstuiError(
            _("{path} cannot be executed").format(path=python),
            _("give the path of an interpreter or of a virtual environment"),
        )
    return str(full)


def _conda_prefixes(system: System) -> list[str]:
    """Environments that conda and mamba know: their list in the home and the folders beside the base."""
    env = system.environ
    home = env.get("HOME", "")
    found: list[str] = []
    roots: list[Path] = []
    for variable in ("CONDA_EXE", "MAMBA_EXE"):
        if env.get(variable):
            roots.append(Path(env[variable]).parent.parent)
    if env.get("MAMBA_ROOT_PREFIX"):
        roots.append(Path(env["MAMBA_ROOT_PREFIX"]))
    if home:
        try:
            lines = Path(home, ".conda/environments.txt").read_text(encoding="utf-8").splitlines()
            found += [line.strip() for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError):
            pass
        roots += [Path(home, name) for name in ("miniconda3", "anaconda3", "miniforge3", "mambaforge")]
    for root in roots:
        try:
            found += [str(p) for p in sorted((root / "envs").iterdir())]
        except OSError:
            continue
        found.append(str(root))
    unique = list(dict.fromkeys(os.path.normpath(p) for p in found))
    return [p for p in unique if Path(p, "bin/python").exists()][:MOST_CONDA]


def _through_shim(system: System, path: str) -> str:
    """pyenv's shim starts a shell script (70 ms); take the interpreter it would choose when that is plain."""
    shims = Path(path).parent
    if shims.name != "shims" or not (shims.parent / "versions").is_dir():
        return path
    wanted = system.environ.get("PYENV_VERSION")
    if not wanted:
        files = [
            Path(system.cwd, ".python-version"),
            *(p / ".python-version" for p in Path(system.cwd).parents),
        ]
        for file in [*files, shims.parent / "version"]:
            try:
                wanted = file.read_text(encoding="utf-8").split()[0]
                break
            except (OSError, IndexError, UnicodeDecodeError):
                continue
    name = (wanted or "").split(":")[0]
    real = shims.parent / "versions" / name / "bin/python3"
    return str(real) if name and real.exists() else path


def _from_files(system: System, path: str, origin: str) -> _Found | None:
    """A virtual or conda environment read from its files; None when it must be asked instead."""
    if origin == "own":
        search = tuple(p for p in sys.path if p)
        version = ".".join(map(str, sys.version_info[:3]))
        include = _include(sys.base_prefix, version, sys.abiflags)
        managed = sys.prefix == sys.base_prefix and _managed(os.__file__)
        return _Found(path, origin, sys.prefix, version, search, include, managed)
    prefix = Path(path).parent.parent
    if not Path(path).exists():
        reason = _("{path} is gone or points nowhere").format(path=path)
        return _Found(path, origin, str(prefix), problem=reason)
    if not os.access(path, os.X_OK):
        return _Found(path, origin, str(prefix), problem=_("{path} cannot be executed").format(path=path))
    config = prefix / "pyvenv.cfg"
    try:
        settings = {
            k.strip().lower(): v.strip()
            for k, eq, v in (line.partition("=") for line in config.read_text(encoding="utf-8").splitlines())
            if eq
        }
    except (OSError, UnicodeDecodeError):
        return _conda_files(system, path, origin, prefix)
    version = settings.get("version") or settings.get("version_info") or ""
    m = re.match(r"(\d+)\.(\d+)(?:\.\d+)?", version)
    if settings.get("include-system-site-packages", "false").lower() == "true" or not m:
        return None
    lib = prefix / f"lib/python{m.group(1)}.{m.group(2)}/site-packages"
    if not lib.is_dir() or not settings.get("home"):
        return None
    base = str(Path(settings["home"]).parent)
    return _Found(path, origin, str(prefix), m.group(), _search(system, lib), _include(base, m.group(), ""))


def _conda_files(system: System, path: str, origin: str, prefix: Path) -> _Found | None:
    versions = []
    try:
        for record in (prefix / "conda-meta").glob("python-[0-9]*.json"):
            m = re.match(r"python-((\d+)\.(\d+)\.\d+)", record.name)
            if m:
                versions.append(m)
    except OSError:
        return None
    if len(versions) != 1:
        return None
    version, short = versions[0].group(1), f"python{versions[0].group(2)}.{versions[0].group(3)}"
    lib = prefix / f"lib/{short}/site-packages"
    if not lib.is_dir():
        return None
    search = list(_search(system, lib))
    user = Path(system.environ.get("HOME", ""), f".local/lib/{short}/site-packages")
    if not system.environ.get("PYTHONNOUSERSITE") and user.is_dir():
        search[len(search) - 1 :] = [str(user), *search[len(search) - 1 :]]
    return _Found(path, origin, str(prefix), version, tuple(search), str(prefix / "include" / short))


def _search(system: System, site: Path) -> tuple[str, ...]:
    """``sys.path`` for packages: PYTHONPATH, the folders that ``.pth`` files add, site-packages last."""
    first = [p for p in system.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    added: list[str] = []
    try:
        for file in sorted(site.glob("*.pth")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                text = line.strip()
                if text and not text.startswith(("#", "import ", "import\t")) and len(text) < 4096:
                    folder = site / text
                    if folder.is_dir():
                        added.append(str(folder))
    except OSError:
        pass
    return (*first, *added, str(site))


def _from_answer(path: str, origin: str, child: Child, *, deadline: float) -> _Found:
    text = child.output(deadline)
    if text is None:
        reason = (
            _("it did not answer in time") if child.timed_out else (child.failure or _("it does not start"))
        )
        return _Found(path, origin, problem=reason)
    try:
        answer = ast.literal_eval(text.strip().splitlines()[-1])
        return _Found(
            path=path,
            origin=origin,
            prefix=str(answer["prefix"]),
            version=str(answer["version"]),
            search=tuple(str(p) for p in answer["path"] if p),
            include=_include(answer["base"], answer["version"], answer["abi"]),
            managed=answer["prefix"] == answer["base"] and _managed(answer["stdlib"]),
        )
    except (ValueError, SyntaxError, IndexError, KeyError, TypeError):
        return _Found(path, origin, problem=_("its answer was not understood: is it a Python?"))


def _include(base: str, version: str, abi: str) -> str:
    """Folder of ``Python.h``: the ``include`` path of ``sysconfig``'s posix_prefix scheme."""
    return f"{base}/include/python{'.'.join(version.split('.')[:2])}{abi}"


def _managed(os_module: str | None) -> bool:
    """PEP 668: a file beside the standard library (``os_module`` is its ``os.py``)."""
    return bool(os_module) and Path(str(os_module)).with_name("EXTERNALLY-MANAGED").exists()


def _describe(found: _Found) -> Interpreter:
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    torch_cuda = None
    problem = found.problem
    if problem is None:
        installed = installed_packages(found.search)
        packages.update(installed)
        if packages["torch"] is not None:
            build, torch_version = _torch_build(found.search)
            torch_cuda = build
            if torch_version:  # its own text carries the build (+cu130) that metadata may lack
                packages["torch"] = torch_version
        if found.version and tuple(int(n) for n in found.version.split(".")[:2]) < (3, 8):
            problem = _("Python {version} is too old for any DeepSpeed here").format(version=found.version)
    folders = [Path(found.path).parent]
    user_bin = Path(os.path.expanduser("~/.local/bin"))  # noqa: PTH111
    if any("/.local/lib/python" in p for p in found.search):
        folders.append(user_bin)
    return Interpreter(
        path=found.path,
        origin=found.origin,
        version=found.version,
        packages=packages,
        torch_cuda=torch_cuda,
        prefix=found.prefix,
        headers=Path(found.include, "Python.h").exists() if found.include else None,
        has_pip=any(Path(p, "pip").is_dir() for p in found.search) if found.search else None,
        externally_managed=found.managed if found.search else None,
        launchers=tuple(name for name in LAUNCHERS if any((f / name).exists() for f in folders)),
        problem=problem,
    )


def installed_packages(search: Iterable[str]) -> dict[str, str]:
    """Versions of ``PACKAGES`` found on a ``sys.path``; the first folder that has one wins, as for Python."""
    found: dict[str, str] = {}
    for folder in search:
        try:
            with os.scandir(folder) as entries:
                names = [e.name for e in entries if e.name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue
        here: dict[str, str] = {}
        for name in names:
            stem = name.rsplit(".", 1)[0]
            project, _dash, rest = stem.partition("-")
            package = _TAGS.get(re.sub(r"[-_.]+", "_", project).lower())
            if package is None or package in found:
                continue
            version = rest.split("-py")[0] if name.endswith(".egg-info") else rest
            version = version or _metadata_version(Path(folder, name)) or ""
            if version and _is_real(Path(folder, name)):
                here[package] = version
        for package, version in here.items():
            found.setdefault(package, version)
    return found


def _is_real(info: Path) -> bool:
    """A half-removed package leaves an empty folder behind."""
    return info.is_file() or any((info / name).exists() for name in ("METADATA", "PKG-INFO"))


def _metadata_version(info: Path) -> str | None:
    for file in (info / "METADATA", info / "PKG-INFO", info):
        try:
            with file.open(encoding="utf-8", errors="replace") as f:
                for line in f:
                    if line.startswith("Version:"):
                        return line.partition(":")[2].strip()
                    if not line.strip():
                        break
        except OSError:
            continue
    return None


def _torch_build(search: Iterable[str]) -> tuple[str | None, str | None]:
    """(CUDA release, version) from ``torch/version.py``: ``13.0``, ``""`` for a CPU or ROCm build."""
    for folder in search:
        try:
            text = Path(folder, "torch/version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        cuda = re.search(r"^cuda(?:\s*:[^=\n]*)?\s*=\s*(None|'[^']*'|\"[^\"]*\")", text, re.M)
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.M)
        build = None if cuda is None else ("" if cuda.group(1) == "None" else cuda.group(1)[1:-1])
        return build, version.group(1) if version else None
    return None, None
