"""Files in which trainers keep their own progress, beside what they print: structured truth, where there is some.

- LLaMA-Factory ``output_dir/trainer_log.jsonl`` (``train/callbacks.py``), one row a logging step;
- ms-swift ``output_dir/v*/logging.jsonl`` (``trainers/callback.py``), the same;
- Hugging Face ``output_dir/checkpoint-N/trainer_state.json`` (``trainer_callback.py: TrainerState.save_to_json``), its
  ``log_history`` up to that checkpoint.

Values are numbers or, from transformers 5 on, strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstui.runs.events import Event, Parser, number
from dstui.runs.tail import Tail

LOOK_SECONDS = 5.0
"""How often a file that is not there yet is looked for."""
MOST_BYTES = 64 << 20
"""A state file that is larger is not read: a history of some hundred thousand rows."""


def output_folder(manifest: Mapping[str, Any], run_folder: Path) -> Path | None:
    """Where a run's trainer writes: ``--output_dir`` of its command line, or ``output_dir`` of its YAML."""
    folder = None
    words = [str(w) for w in manifest.get("command") or ()]
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--output_dir", "--output-dir"):
            folder = value if equals else (words[i + 1] if i + 1 < len(words) else None)
    if folder is None:
        for file in sorted(run_folder.glob("*.y*ml")):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            for line in text.splitlines():
                key, colon, value = line.partition(":")
                if colon and key.strip() == "output_dir":
                    folder = value.partition(" #")[0].strip().strip("'\"")
    return Path(str(manifest.get("cwd") or ".")) / folder if folder else None


class TrainerFiles:
    """Follows the files of one run. ``since``: epoch seconds of its start; older files are another run's."""

    def __init__(self, folder: Path, since: float) -> None:
        self._folder = folder
        self._since = since
        self._parser = Parser()
        self._tail: Tail | None = None
        self._state: tuple[Path, int] | None = None
        self._looked = -math.inf

    def poll(self, now: float) -> list[Event]:
        """New rows as events; ``now``: epoch seconds. Unreadable and half-written files say nothing."""
        if self._tail is None:
            if now - self._looked < LOOK_SECONDS:
                return []
            self._looked = now
            file = self._newest(("trainer_log.jsonl", "v*/logging.jsonl", "logging.jsonl"))
            if file is not None:
                self._tail = Tail(file)
        if self._tail is not None:
            return self._parser.feed_all(self._tail.read()) if self._tail.behind else []
        file = self._newest(("checkpoint-*/trainer_state.json",))
        if file is None:
            return []
        try:
            stamp = (file, file.stat().st_mtime_ns)
        except OSError:
            return []
        if stamp == self._state:
            return []
        self._state = stamp
        return read_state(file)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    def _newest(self, patterns: Sequence[str]) -> Path | None:
        found: list[tuple[float, Path]] = []
        for pattern in patterns:
            for path in self._folder.glob(pattern):
                try:
                    changed = path.stat().st_mtime
                except OSError:
                    continue
                if changed >= self._since:
                    found.append((changed, path))
        return max(found)[1] if found else None


def read_state(path: Path) -> list[Event]:
    """Step and eval events of a ``trainer_state.json``; [] when it is no such file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return []
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    history = data.get("log_history") if isinstance(data, dict) else None
    if not isinstance(history, list):
        return []
    total = data.get("max_steps")
    events = []
    for row in history:
        if not isinstance(row, dict):
            continue
        step = row.get("step")
        values = {
            "step": step if isinstance(step, int) else None,
            "total": total if isinstance(total, int) and total > 0 else None,
            "loss": number(row.get("loss")),
            "lr": number(row.get("learning_rate")),
            "grad_norm": number(row.get("grad_norm")),
            "epoch": number(row.get("epoch")),
        }
        known = {k: v for k, v in values.items() if v is not None}
        if "loss" in known and "step" in known:
            events.append(Event("step", 0, {**known, "source": "trainer"}))
        elif any(k.startswith("eval_") for k in row):
            shown = {k: number(v) for k, v in row.items() if k.startswith("eval_")}
            events.append(Event("eval", 0, {k: v for k, v in shown.items() if v is not None}))
    return events
