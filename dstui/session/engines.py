"""Which engine a script belongs to, and what its arguments say. Nothing is imported or run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dstui.i18n import _


def guess(script: Path) -> tuple[str, str] | None:
    """(engine of the wizard, why) for a readable script, None when nothing in it tells."""
    from dstui.runs.command import guess_engine
    from dstui.runs.script import look

    found = look(script)
    if found.problem:
        return None
    engine = guess_engine(found)
    if engine == "llamafactory":
        return engine, _("a YAML file")
    if engine == "hf":
        return engine, _("the script uses the Trainer of transformers")
    if found.adds_deepspeed_arguments or found.imports_deepspeed or found.config_flag:
        return "plain", _("the script uses DeepSpeed itself")
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
