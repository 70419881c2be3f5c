"""Which engine a script belongs to, read from its text: nothing is imported or run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_LIMIT = 1 << 20
"""Bytes read: imports and the parser stand near the top."""


def guess(script: Path) -> tuple[str, str] | None:
    """(engine, the evidence) for a readable script, None when nothing tells.

    ``llamafactory`` by a YAML with its keys, ``hf`` by the Trainer, ``plain`` by ``deepspeed.initialize``.
    """
    try:
        with script.open("rb") as f:
            text = f.read(_LIMIT).decode("utf-8", "replace")
    except OSError:
        return None
    if script.suffix in (".yaml", ".yml"):
        found = re.search(r"^(model_name_or_path|finetuning_type|stage|deepspeed)\s*:", text, re.M)
        return ("llamafactory", found.group(0)) if found else None
    found = re.search(r"\bdeepspeed\.initialize\s*\(|\bdeepspeed\.add_config_arguments\b", text)
    if found:
        return "plain", found.group(0).strip("( ")
    found = re.search(r"\b(?:HfArgumentParser|(?:Seq2Seq)?TrainingArguments|SFTConfig|DPOConfig)\b", text)
    if found:
        return "hf", found.group(0)
    found = re.search(r"\b(?:SFT|DPO|Seq2Seq)?Trainer\s*\(", text)
    if found and "transformers" in text:
        return "hf", found.group(0).strip("( ")
    return None


def split_args(text: str) -> tuple[str, ...]:
    """Arguments as a shell would split them. Raises ValueError on an open quote."""
    return tuple(shlex.split(text))


def argument(args: Sequence[str], *names: str) -> str | None:
    """The value of ``--name V`` or ``--name=V`` (dash and underscore are the same); the last one counts."""
    wanted = {n.replace("-", "_") for n in names}
    value = None
    for i, a in enumerate(args):
        if not a.startswith("--"):
            continue
        name, eq, rest = a[2:].partition("=")
        if name.replace("-", "_") in wanted:
            value = rest if eq else (args[i + 1] if i + 1 < len(args) else "")
    return value
