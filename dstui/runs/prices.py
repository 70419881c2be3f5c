"""What the estimator and the rules add to a diagnosis: the fit after a change, and what this release is known for.

Both need what a run's folder holds and a bare log does not: the model (``subject`` of the manifest), the facts, the
release. Nothing is said without them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstui.errors import DstuiError
from dstui.i18n import _
from dstui.runs.repairs import Repair
from dstui.units import gib

if TYPE_CHECKING:
    from dstui.estimate.result import Range


def priced(
    fixes: Sequence[Repair], config: Mapping[str, Any] | None, manifest: Mapping[str, Any]
) -> tuple[Repair, ...]:
    """``fixes`` of a lack of memory, each edit with the peak that the estimator expects after it (bytes of the worst
    GPU and of a node's RAM); what fits comes first, and where nothing does, changes that do are added."""
    asked = _asked(manifest)
    if asked is None or config is None:
        return tuple(fixes)
    from dstui.estimate.memory import estimate

    shape, training, facts, release, world = asked
    rows: list[tuple[int, Repair]] = []
    for fix in fixes:
        then = applied(config, fix.edits) if fix.edits else None
        if then is None:
            rows.append((1, fix))
            continue
        try:
            found = estimate(
                shape,
                training,
                then,
                facts,
                release=release,
                world_size=world,
                changes=False,
            )
        except (DstuiError, ArithmeticError, LookupError, TypeError, ValueError):
            rows.append((1, fix))
            continue
        verdict = {"fits": _("fits"), "tight": _("tight"), "no": _("does not fit")}.get(found.verdict)
        if verdict is None:
            rows.append((1, fix))
            continue
        text = _("estimated then: {gpu} of {capacity} on a GPU, {host} of host RAM a node: {verdict}").format(
            gpu=_expected(found.gpu.device),
            capacity=gib(found.gpu.capacity),
            host=_expected(found.host.peak),
            verdict=verdict,
        )
        rank = {"fits": 0, "tight": 1, "no": 2}[found.verdict]
        rows.append((rank, dataclasses.replace(fix, price="; ".join(x for x in (fix.price, text) if x))))
    if not any(rank == 0 for rank, fix in rows if fix.edits):
        try:
            now = estimate(shape, training, config, facts, release=release, world_size=world)
        except (DstuiError, ArithmeticError, LookupError, TypeError, ValueError):
            now = None
        for change in now.changes if now is not None else ():
            if change.edits:
                rows.append((0, Repair(change.title, tuple(change.edits), change.costs)))
    rows.sort(key=lambda row: row[0])
    return tuple(fix for _rank, fix in rows)


def _expected(found: Range | None) -> str:
    return "?" if found is None else gib(found.expected)


def _asked(manifest: Mapping[str, Any]) -> tuple[Any, Any, Any, str | None, int | None] | None:
    from dstui.estimate.subject import from_json
    from dstui.facts.model import Facts

    subject = from_json(manifest.get("subject"))
    data = manifest.get("facts")
    if subject is None or not isinstance(data, Mapping):
        return None
    try:
        facts = Facts.from_json(data)
    except (DstuiError, TypeError, ValueError, KeyError):
        return None
    world = manifest.get("world_size")
    return *subject, facts, release_of(manifest), world if isinstance(world, int) else None


def applied(config: Mapping[str, Any], edits: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The config after RFC 6902 operations; None when they do not apply to it."""
    from dstui.config.document import Document

    try:
        data = Document.parse(json.dumps(config)).edited(list(edits)).data
    except (DstuiError, KeyError, ValueError, IndexError, TypeError):
        return None
    return data if isinstance(data, Mapping) else None


def release_of(manifest: Mapping[str, Any]) -> str | None:
    """The DeepSpeed release of the training interpreter."""
    versions = manifest.get("versions")
    release = versions.get("deepspeed") if isinstance(versions, Mapping) else None
    return str(release) if release else None


def of_rules(
    config: Mapping[str, Any] | None, release: str | None, world: int | None, severities: Sequence[str]
) -> tuple[Repair, ...]:
    """What ``dstui check`` knows about this config under the run's own release, of these severities."""
    if config is None or release is None:
        return ()
    from dstui.config.document import Document
    from dstui.rules.engine import Context, check_document

    try:
        report = check_document(
            Document.parse(json.dumps(config, indent=1)),
            Context(release, world_size=world if world else None),
        )
    except (DstuiError, ValueError):
        return ()
    found = []
    for f in report.findings:
        if f.severity in severities:
            edits = tuple(f.fix.edits) if f.fix is not None else ()
            title = f.fix.title if f.fix is not None else (f.hint or f.message)
            found.append(Repair(f"{f.code} {title}", edits, f.message))
    return tuple(found[:3])
