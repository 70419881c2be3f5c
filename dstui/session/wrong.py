"""What makes a field wrong, beyond its syntax: a text for the person, empty when nothing does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from dstui.i18n import _
from dstui.session import engines
from dstui.session.state import State

_NAME_OF_A_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _gpus(s: State) -> str:
    return "" if s.described is not None else _("say what a node has: 8x80GiB")


def _facts_file(s: State) -> str:
    return "" if s.from_file is not None or s.detected is not None else _("name the file")


def _script(s: State) -> str:
    script = s.get("script")
    if not script:
        return ""
    path = s.at_cwd(script)
    if path.is_dir():
        return _("{path} is a folder").format(path=path)
    return "" if path.is_file() else _("{path} does not exist").format(path=path)


def _args(s: State) -> str:
    try:
        engines.split_args(str(s.get("args")))
    except ValueError:
        return _("a quote is not closed")
    return ""


def _cwd(s: State) -> str:
    return "" if s.at_cwd(s.get("cwd")).is_dir() else _("{path} is no folder").format(path=s.get("cwd"))


def _nvme(s: State) -> str:
    if s.facts is None or s.facts.source != "detected":
        return ""
    path = s.at_cwd(s.get("nvme_path"))
    while not path.exists() and path != path.parent:
        path = path.parent  # DeepSpeed makes the folders below it
    return "" if os.access(path, os.W_OK) and path.is_dir() else _("{path} is not writable").format(path=path)


def _allgather(s: State) -> str:
    return _("must be even") if s.get("allgather_bucket_size") % 2 else ""


def _output(s: State) -> str:
    path = s.at_cwd(s.get("output"))
    if path.is_dir():
        return _("{path} is a folder").format(path=path)
    return "" if path.parent.is_dir() else _("{path} is no folder").format(path=path.parent)


def _name(s: State) -> str:
    name = s.get("name")
    return "" if not name or _NAME_OF_A_RUN.fullmatch(name) else _("letters, digits, '.', '_' and '-' only")


CHECKS: Mapping[str, Callable[[State], str]] = {
    "gpus": _gpus,
    "facts_file": _facts_file,
    "script": _script,
    "args": _args,
    "cwd": _cwd,
    "model": lambda s: s.model_problem,
    "global_batch": lambda s: s.batch_problem,
    "nvme_path": _nvme,
    "allgather_bucket_size": _allgather,
    "output": _output,
    "name": _name,
}
"""Field id -> its check, asked while the field applies."""
