"""What measured runs leave for the next estimate: one small file a run in ``<state home>/calibration``.

``MACHINE-MODEL-RUN.json`` with ``MACHINE`` and ``MODEL`` as twelve hex digits (``machine_key``,
``dstui.estimate.subject.fingerprint``) and in words inside. One file a run needs no lock and no database, on any
file system: writers never meet, a damaged file costs one record, and deleting files forgets them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui import __version__, paths
from dstui.estimate.correction import Calibration, Record
from dstui.estimate.inputs import ModelShape
from dstui.estimate.subject import fingerprint
from dstui.facts.model import Facts
from dstui.runs.store import write_json

SCHEMA_VERSION = 1
MOST = 500
"""Files kept; the oldest go first."""
_PER_MODEL = 24
"""Records of one model on one machine that are read, newest first."""


def folder() -> Path:
    return paths.state_home() / "calibration"


def machine_of(facts: Facts, *, torch: str | None = None, deepspeed: str | None = None) -> dict[str, Any]:
    """What decides about memory beside the model and its settings, in words."""
    it = facts.interpreter
    torch = torch or (it.torch if it else None)
    deepspeed = deepspeed or facts.deepspeed
    return {
        "gpus": sorted({g.name or "?" for g in facts.gpus or ()}) if facts.gpus is not None else None,
        "driver": facts.driver if facts.gpus else None,
        "torch": _plain(torch),
        "deepspeed": _plain(deepspeed),
    }


def _plain(release: str | None) -> str | None:
    """Without the local part: ``2.9.0+cu130`` -> ``2.9.0``."""
    return release.partition("+")[0] if release else None


def machine_key(machine: Mapping[str, Any]) -> str | None:
    """None where something that decides is not known: such a machine is never recognised again."""
    if machine.get("gpus") is None or not machine.get("torch") or not machine.get("deepspeed"):
        return None
    if machine["gpus"] and (not machine.get("driver") or "?" in machine["gpus"]):
        return None
    names = ("gpus", "driver", "torch", "deepspeed")
    text = json.dumps({k: machine.get(k) for k in names}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def save(record: Record, shape: ModelShape, machine: Mapping[str, Any]) -> Path | None:
    """Keep one record; the file of the same run is replaced. None when the machine cannot be named.

    Raises OSError.
    """
    key = machine_key(machine)
    if key is None:
        return None
    home = folder()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = home / f"{key}-{fingerprint(shape)}-{record.run}.json"
    data = {
        "schema_version": SCHEMA_VERSION,
        "machine": dict(machine),
        "model": {"name": shape.name, "params": shape.params, "family": shape.family},
        "record": dataclasses.asdict(record),
    }
    write_json(path, data)
    _prune(home)
    return path


def _prune(home: Path) -> None:
    files = []
    for entry in os.scandir(home):
        if entry.name.endswith(".json") and not entry.name.startswith("."):
            try:
                files.append((entry.stat().st_mtime, entry.path))
            except OSError:
                continue
    for _at, path in sorted(files)[: max(0, len(files) - MOST)]:
        Path(path).unlink(missing_ok=True)


def load(facts: Facts | None, shape: ModelShape | None, *, release: str | None = None) -> Calibration | None:
    """What runs of ``shape`` on the machine of ``facts`` measured; None when there is nothing. Never raises.

    ``release``: the DeepSpeed release of the question, where it is not the training interpreter's.
    """
    if facts is None or shape is None or facts.source == "described":
        return None
    key = machine_key(machine_of(facts, deepspeed=release))
    if key is None:
        return None
    prefix = f"{key}-{fingerprint(shape)}-"
    try:
        names = [
            e.path for e in os.scandir(folder()) if e.name.startswith(prefix) and e.name.endswith(".json")
        ]
    except OSError:
        return None
    found = [r for r in map(_read, names) if r is not None]
    found.sort(key=lambda r: r.at, reverse=True)
    return Calibration(tuple(found[:_PER_MODEL]), __version__) if found else None


def _read(path: str) -> Record | None:
    """A record; None for a file that is damaged or of a later format."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["schema_version"] != SCHEMA_VERSION:
            return None
        r = data["record"]
        known = {f.name for f in dataclasses.fields(Record)}
        record = Record(
            **{k: v for k, v in r.items() if k in known and k != "phases"}, phases=tuple(r["phases"])
        )
        return record if _sane(record) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


_WHOLE = ("allocated", "reserved", "device", "host")
_MOST_OFF = 8.0
"""A measurement that is off its own prediction by more is no correction of it but another question, or damage."""
_YEAR_2200 = 7.3e9


def _sane(r: Record) -> bool:
    """Numbers where numbers are expected, and none that no machine has."""
    if not (
        isinstance(r.run, str)
        and re.fullmatch(r"[\w.-]{1,100}", r.run)
        and _number(r.at, _YEAR_2200)
        and isinstance(r.settings, str)
        and isinstance(r.summary, Mapping)
        and isinstance(r.ranks, int)
        and all(n is None or _number(n, 1e16) for n in (*r.measured.values(), *r.predicted.values()))
    ):
        return False
    ratios = [q for what in _WHOLE if (q := r.ratio(what)) is not None]
    return all(1 / _MOST_OFF <= q <= _MOST_OFF for q in ratios)


def _number(n: object, most: float) -> bool:
    return isinstance(n, (int, float)) and not isinstance(n, bool) and 0 <= n < most
