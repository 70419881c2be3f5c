"""What was answered for each training script, for its next run: one file in the state home, nothing depends on it.

``scripts.json``: ``{"schema_version": 1, "scripts": {ABSOLUTE PATH: {"engine", "args", "launcher", "options", "at"}}}``.
``options`` are those that brought the config (``["--cfg", "{config}"]``), ``at`` the time of the last answer.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.runs.store import write_json

MOST = 200
"""Scripts remembered; the oldest go first."""
_SECRET = re.compile(r"token|key|secret|pass", re.I)


def place() -> Path:
    return paths.state_home() / "scripts.json"


def _all() -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(place().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    scripts = data.get("scripts") if isinstance(data, dict) else None
    return {k: v for k, v in scripts.items() if isinstance(v, dict)} if isinstance(scripts, dict) else {}


def recall(script: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The answers for ``script``; empty when there are none, or none that can be read."""
    return _all().get(os.path.realpath(script), {})


def remember(script: str | os.PathLike[str], answers: Mapping[str, Any]) -> None:
    """Keep ``answers`` beside the earlier ones. A text that looks like a secret is not kept. Never raises OSError."""
    kept = {k: v for k, v in answers.items() if not (isinstance(v, str) and _SECRET.search(v))}
    scripts = _all()
    key = os.path.realpath(script)
    before = scripts.get(key, {})
    after = {**{k: v for k, v in before.items() if k not in answers}, **kept}
    if after == before:
        return
    scripts[key] = {**after, "at": round(time.time())}

    def age(item: tuple[str, dict[str, Any]]) -> float:
        at = item[1].get("at")
        return float(at) if isinstance(at, (int, float)) else 0.0

    newest = sorted(scripts.items(), key=age)[-MOST:]
    try:
        place().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(place(), {"schema_version": 1, "scripts": dict(newest)})
    except OSError:
        return


def options(script: str | os.PathLike[str]) -> list[str] | None:
    """How the config reached ``script`` when somebody said it: its options with ``{config}``."""
    found = recall(script).get("options")
    return [str(o) for o in found] if isinstance(found, list) and found else None
