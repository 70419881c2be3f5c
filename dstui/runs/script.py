"""What a training script does with a DeepSpeed config, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CONFIG_FLAGS = (
    "--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config", "--ds_config_path",
    "--deepspeed_config_path", "--deepspeed_config_file", "--ds_config_file",
)  # fmt: skip
"""Options that scripts give a DeepSpeed config under, the official one first."""
_OPEN_CLIS = {"fire", "hydra", "typer", "click", "absl", "jsonargparse", "simple_parsing", "tyro", "draccus"}
_HF_PARSERS = {"HfArgumentParser", "H4ArgumentParser", "TrlParser"}
_HF_ARGUMENTS = ("TrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "PPOConfig")
_MAX_FILES = 40
_MAX_SIZE = 2 << 20


@dataclass(frozen=True)
class HardCoded:
    """A config path written into the source."""

    file: str
    line: int
    value: str


@dataclass
class Look:
    """What the source shows. ``problem``: why it could not be read (translated by the caller's words)."""

    kind: str = "python"
    """``python``, ``yaml`` or ``other``."""
    flags: dict[str, bool] = field(default_factory=dict)
    """Option -> whether it takes a value."""
    adds_deepspeed_arguments: bool = False
    """Calls ``deepspeed.add_config_arguments``."""
    hf_parser: bool = False
    """Parses TrainingArguments from the command line."""
    uses_trainer: bool = False
    """Makes Hugging Face TrainingArguments at all."""
    sets_cpu: bool = False
    """Those name ``use_cpu`` or ``no_cuda``, or take a mapping that may."""
    uses_accelerate: bool = False
    open_cli: bool = False
    """Its options cannot be read from the source (hydra, fire, parse_known_args, ...)."""
    reads_dstui_config: bool = False
    """Reads the variable DSTUI_CONFIG."""
    imports_deepspeed: bool = False
    reads_arguments: bool = False
    local_rank: bool = False
    """Accepts ``--local_rank``."""
    hard_coded: HardCoded | None = None
    problem: str | None = None
    line: int | None = None

    @property
    def config_flag(self) -> str | None:
        return next((f for f in CONFIG_FLAGS if self.flags.get(f)), None)


def look(script: Path) -> Look:
    """Read ``script`` and the modules beside it that it imports (at most 40 files)."""
    if script.suffix.lower() in (".yaml", ".yml", ".json"):
        return Look(kind="yaml")
    if script.suffix and script.suffix != ".py":
        return Look(kind="other")
    found = Look()
    queue, seen = [script], set[Path]()
    while queue and len(seen) < _MAX_FILES:
        path = queue.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            if path.stat().st_size > _MAX_SIZE:
                continue
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except OSError as e:
            if path == script:
                found.problem = e.strerror or str(e)
            continue
        except (SyntaxError, ValueError) as e:
            if path == script:
                # Its interpreter may be newer than ours; then nothing is known.
                found.problem, found.line = str(e), getattr(e, "lineno", None)
                found.open_cli = True
            continue
        _read(tree, path, found)
        queue.extend(_local_imports(tree, path, script.parent))
    return found


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _read(tree: ast.Module, path: Path, found: Look) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        for module in modules:
            top = module.partition(".")[0]
            found.open_cli = found.open_cli or top in _OPEN_CLIS
            found.uses_accelerate = found.uses_accelerate or top == "accelerate"
            found.imports_deepspeed = found.imports_deepspeed or top == "deepspeed"
        if isinstance(node, ast.Call):
            _read_call(node, path, found)
        elif isinstance(node, ast.Attribute) and node.attr == "argv":
            found.reads_arguments = True
        elif isinstance(node, ast.Constant) and node.value == "DSTUI_CONFIG":
            found.reads_dstui_config = True


def _read_call(node: ast.Call, path: Path, found: Look) -> None:
    name = _name(node.func)
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    if name == "add_argument":
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        action = keywords.get("action")
        takes = not (
            isinstance(action, ast.Constant) and str(action.value).startswith(("store_", "count", "help"))
        )
        for flag in names:
            if flag.startswith("-"):
                found.flags[flag] = takes
                found.local_rank = found.local_rank or flag in ("--local_rank", "--local-rank")
        found.reads_arguments = True
    elif name in ("add_config_arguments", "_add_core_arguments"):
        found.adds_deepspeed_arguments = True
        found.flags.update({"--deepspeed": False, "--deepspeed_config": True})
    elif name in _HF_PARSERS:
        found.hf_parser = True
        found.reads_arguments = True
    elif name == "parse_known_args":
        found.open_cli = True
    elif name == "DeepSpeedPlugin":
        _hard(found, path, keywords.get("hf_ds_config"))
    elif name == "initialize":
        _hard(found, path, keywords.get("config") or keywords.get("config_params"))
    if name.endswith(_HF_ARGUMENTS) or "TrainingArguments" in name:
        found.uses_trainer = True
        found.sets_cpu |= any(k.arg in (None, "use_cpu", "no_cuda") for k in node.keywords)
        _hard(found, path, keywords.get("deepspeed"))


def _hard(found: Look, path: Path, value: ast.expr | None) -> None:
    if found.hard_coded is None and isinstance(value, ast.Constant) and isinstance(value.value, str):
        found.hard_coded = HardCoded(str(path), value.lineno, value.value)


def _local_imports(tree: ast.Module, path: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        names: list[tuple[Path, str]] = []
        if isinstance(node, ast.Import):
            names = [(root, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else path.parent
            for _up in range(max(0, node.level - 1)):
                base = base.parent
            module = node.module or ""
            names = [(base, module)] if module else []
            names += [(base, f"{module}.{a.name}".lstrip(".")) for a in node.names]
        for base, dotted in names:
            if not dotted or dotted == "*":
                continue
            target = base.joinpath(*dotted.split("."))
            for candidate in (target.with_name(target.name + ".py"), target / "__init__.py"):
                if candidate.is_file():
                    yield candidate
