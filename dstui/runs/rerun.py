"""A run started again with another config: ``change`` says what would differ, ``launch`` starts it.

The new run is made from the manifest of the old one, and its config from the old one's own copy, without the keys
that dstui added to that copy. The user's file is only written by ``write_source``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dstui.config.document import Document, read
from dstui.config.write import difference, save
from dstui.errors import DstuiError
from dstui.facts.model import Facts
from dstui.i18n import _, phrases
from dstui.runs.redact import REDACTED, is_secret
from dstui.runs.spec import RunSpec, on_its_nodes
from dstui.runs.store import RunDir
from dstui.units import gib


@dataclass(frozen=True)
class Change:
    """``before`` and ``after``: text of the config. ``source``: the user's file, where it still is there."""

    run: str
    before: str
    after: str
    edits: tuple[Mapping[str, Any], ...]
    spec: RunSpec
    source: str | None
    price: str

    @property
    def diff(self) -> str:
        """Unified difference of the two configs."""
        return difference(self.before, self.after, "config.json")


def own_config(run: RunDir) -> Document:
    """The run's copy without the monitor's file output, which names that run's folder. Raises DstuiError."""
    try:
        text = run.config_path.read_bytes()
    except OSError as e:
        raise DstuiError(
            _("run {id} has no config: {cause}").format(id=run.id, cause=e.strerror or e),
            _("it was started without one"),
        ) from e
    document = Document.parse(text, "config.json")
    monitor = document.data.get("csv_monitor")
    if isinstance(monitor, dict) and monitor.get("output_path") == str(run.metrics_dir):
        return document.edited([{"op": "remove", "path": "/csv_monitor"}])
    return document


def change(run: RunDir, edits: Sequence[Mapping[str, Any]]) -> Change:
    """What a run with ``edits`` (RFC 6902) in its config would be. Raises DstuiError when it cannot be made again."""
    manifest = run.manifest
    before = own_config(run)
    after = before.edited([dict(e) for e in edits])
    price, prediction = _price(manifest, before.data, after.data)
    spec = spec_of(run.id, manifest, after.text, prediction)
    source = (manifest.get("config") or {}).get("source")
    there = source if source and Path(str(source)).is_file() else None
    return Change(run.id, before.text, after.text, tuple(edits), spec, there, price)


def spec_of(
    run_id: str, manifest: Mapping[str, Any], config_text: str, prediction: Mapping[str, Any] | None
) -> RunSpec:
    """The RunSpec that a run was started with, for ``config_text``. Raises DstuiError where a secret is missing."""
    kept = manifest.get("spec")
    if not isinstance(kept, Mapping) or "script" not in kept:
        raise DstuiError(
            _("run {id} does not say how it was started").format(id=run_id), _("start it with dstui run")
        )
    names = {f.name for f in fields(RunSpec)}
    values = {k: v for k, v in kept.items() if k in names}
    args = tuple(str(a) for a in values.get("args") or ())
    if any(REDACTED in a for a in args):
        raise DstuiError(
            _("the arguments of run {id} hold a secret, which its folder does not keep").format(id=run_id),
            _("start it by hand: dstui run --config FILE -- {script} ...").format(script=kept["script"]),
        )
    if REDACTED in str(values.get("on_event") or ""):
        values["on_event"] = None  # not written down whole: the settings' command, if there is one
    devices = values.get("devices")
    values.update(
        args=args,
        devices=None if devices is None else tuple(devices),
        cwd=manifest.get("cwd") or values.get("cwd"),
        python=manifest.get("python") or values.get("python"),
        env=_environment(run_id, manifest),
        config_text=config_text,
        prediction=prediction,
        subject=manifest.get("subject"),
    )
    return RunSpec(**values)


def _environment(run_id: str, manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the person added to the environment; a secret is taken from ours, as the folder does not hold it."""
    kept = manifest.get("env") or {}
    found = {}
    for name in manifest.get("env_user") or ():
        value = os.environ.get(name) if is_secret(name) else kept.get(name)
        if value is None or REDACTED in value:
            raise DstuiError(
                _("run {id} had the variable {name}, whose value its folder does not keep").format(
                    id=run_id, name=name
                ),
                _("export it, then try again"),
            )
        found[name] = value
    return found


def _price(
    manifest: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, dict[str, Any] | None]:
    """(the change in predicted memory as a sentence, the new prediction); both empty where the model is not known."""
    from dstui.estimate.memory import estimate
    from dstui.estimate.subject import from_json

    asked = from_json(manifest.get("subject"))
    release = (manifest.get("versions") or {}).get("deepspeed")
    if asked is None or not release:
        return "", None
    facts = on_its_nodes(facts_of(manifest), manifest)
    world = manifest.get("world_size")
    try:
        old, new = (
            estimate(*asked, config, facts, release=release, world_size=world) for config in (before, after)
        )
    except DstuiError:
        return "", None
    parts = []
    for label, a, b in (
        (_("GPU memory"), old.gpu.device, new.gpu.device),
        (_("host memory"), old.host.peak, new.host.peak),
    ):
        if a is not None and b is not None:
            parts.append(f"{label} {gib(a.expected)} -> {gib(b.expected)}")
    verdict = {"fits": _("fits"), "tight": _("tight"), "no": _("does not fit"), "unknown": ""}[new.verdict]
    return phrases([*parts, *([verdict] if verdict else [])]), new.to_json()


def facts_of(manifest: Mapping[str, Any]) -> Facts:
    """The machine that the run was started on; nothing known where a later release wrote it."""
    try:
        return Facts.from_json(manifest.get("facts"))
    except DstuiError:
        return Facts()


def launch(made: Change, facts: Facts) -> RunDir:
    """Start the new run. Raises DstuiError, PreflightFailed among them."""
    from dstui.runs.start import start

    return start(made.spec, facts)


def write_source(made: Change) -> Path:
    """Apply the edits to the user's own file, atomically, its old text kept beside it as ``.bak``. Raises DstuiError."""
    if made.source is None:
        raise DstuiError(
            _("the file that the config came from is not there any more"), _("the new run has its own copy")
        )
    path = Path(made.source)
    save(path, read(str(path)).edited([dict(e) for e in made.edits]).text)
    return path
