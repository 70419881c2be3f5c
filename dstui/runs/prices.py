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
from dstui.i18n import _, clauses
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
        if found.gpu.device is None:
            rows.append((1, fix))
            continue
        verdict = {"fits": _("fits"), "tight": _("tight"), "no": _("does not fit")}.get(
            found.verdict, _("unknown whether it fits")
        )
        text = _("estimated then: {gpu} of {capacity} on a GPU, {host} of host RAM a node: {verdict}").format(
            gpu=_expected(found.gpu.device),
            capacity=gib(found.gpu.capacity),
            host=_expected(found.host.peak),
            verdict=verdict,
        )
        rank = {"fits": 0, "no": 2}.get(found.verdict, 1)
        rows.append((rank, dataclasses.replace(fix, price=clauses(x for x in (fix.price, text) if x))))
    if not any(rank == 0 for rank, fix in rows if fix.edits):

        def alone(edits: Sequence[Mapping[str, Any]]) -> bool:
            """Whether the edits do it without a change of the script."""
            then = applied(config, edits)
            if then is None:
                return False
            e = estimate(shape, training, then, facts, release=release, world_size=world, changes=False)
            return e.verdict in ("fits", "tight")

        try:
            now = estimate(shape, training, config, facts, release=release, world_size=world)
        except (DstuiError, ArithmeticError, LookupError, TypeError, ValueError):
            now = None
        changes = [c for c in now.changes if c.edits and alone(c.edits)] if now is not None else []
        rows += [(0, Repair(c.title, tuple(c.edits), c.costs)) for c in changes]
        cell = None if changes else _first_that_fits(shape, training, config, facts, release, world)
        if cell is not None:
            rows.append((0, cell))
    rows.sort(key=lambda row: row[0])
    return tuple(fix for _rank, fix in rows)


def _first_that_fits(
    shape: Any, training: Any, config: Mapping[str, Any], facts: Any, release: str | None, world: int | None
) -> Repair | None:
    """The cheapest place for the states that fits, where no single change does."""
    if facts is not None and not facts.gpus:
        return None  # the ranks train on the CPU: all is in host RAM, wherever a config places it
    from dstui.estimate.memory import grid, placed

    try:
        cells = grid(shape, training, config, facts, release=release, world_size=world)
    except (DstuiError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    for cell in cells:
        where = (cell.stage, cell.offload_optimizer, cell.offload_param)
        zero = placed(config, *where).get("zero_optimization")
        if (
            cell.estimate.verdict == "fits" and zero is not None and "nvme" not in where
        ):  # no path is known for that
            edit = {
                "op": "replace" if "zero_optimization" in config else "add",
                "path": "/zero_optimization",
                "value": zero,
            }
            title = _("ZeRO stage {stage}, optimizer on {optimizer}, parameters on {params}").format(
                stage=cell.stage,
                optimizer=_where(cell.offload_optimizer),
                params=_where(cell.offload_param),
            )
            price = _(
                "estimated then: {gpu} of {capacity} on a GPU, {host} of host RAM a node: {verdict}"
            ).format(
                gpu=_expected(cell.estimate.gpu.device),
                capacity=gib(cell.estimate.gpu.capacity),
                host=_expected(cell.estimate.host.peak),
                verdict=_("fits"),
            )
            return Repair(title, (edit,), price)
    return None


def _where(device: str) -> str:
    return {"none": _("the GPUs"), "cpu": _("the CPU")}.get(device, device)


def _expected(found: Range | None) -> str:
    return "?" if found is None else gib(found.expected)


def _asked(manifest: Mapping[str, Any]) -> tuple[Any, Any, Any, str | None, int | None] | None:
    from dstui.estimate.subject import from_json
    from dstui.facts.model import Facts
    from dstui.runs.spec import on_its_nodes

    subject = from_json(manifest.get("subject"))
    data = manifest.get("facts")
    if subject is None or not isinstance(data, Mapping):
        return None
    try:
        facts = on_its_nodes(Facts.from_json(data), manifest)
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


def legal(
    fixes: Sequence[Repair],
    config: Mapping[str, Any] | None,
    release: str | None,
    world: int | None,
    engine: str = "plain",
) -> tuple[Repair, ...]:
    """``fixes`` without edits that do not apply, or after which ``dstui check`` finds an error it did not find before."""
    if config is None or not any(f.edits for f in fixes):
        return tuple(fixes)
    if any(e.get("value") == "auto" for f in fixes for e in f.edits):
        engine = "hf"  # nobody else fills it
    before = _errors(config, release, world, engine)
    kept = []
    for fix in fixes:
        if fix.edits:
            then = applied(config, fix.edits)
            if then is None or not _errors(then, release, world, engine) <= before:
                continue
        kept.append(fix)
    return tuple(kept)


def _errors(
    config: Mapping[str, Any], release: str | None, world: int | None, engine: str
) -> set[tuple[str, str | None]]:
    from dstui.config import schema
    from dstui.config.document import Document
    from dstui.rules.engine import Context, check_document

    reader: Any = {"plain": "deepspeed", "accelerate": "accelerate"}.get(engine, "hf")
    context = Context(release or schema.newest(), engine=reader, world_size=world)
    report = check_document(Document.parse(json.dumps(config)), context)
    return {(f.code, f.pointer) for f in report.findings if f.severity == "error"}


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
