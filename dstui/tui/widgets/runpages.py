"""The monitor's other pages as lines: prediction beside measurement, the run's config, the full diagnosis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstui.i18n import _
from dstui.runs.case import Diagnosis
from dstui.runs.causes import BY_CODE, CHECKPOINTS
from dstui.runs.repairs import Repair
from dstui.runs.rerun import Change
from dstui.runs.stacks import Stacks
from dstui.runs.view import Comparison, Snapshot
from dstui.tui.terminal import Glyphs
from dstui.tui.text import BLANK, Line, clip, line, pad, width, wrapped
from dstui.tui.widgets.dashboard import (
    COMPARED,
    before_peak,
    checkpoint_row,
    packed,
    plan_difference,
    plan_word,
    rank_rows,
    rule,
    state_word,
)
from dstui.tui.widgets.panel import PARTS, PHASE_NAMES, diff_lines, json_lines
from dstui.units import gib


def plan_page(shot: Snapshot, manifest: Mapping[str, Any], cells: int, g: Glyphs) -> list[Line]:
    """Every predicted figure with its range, what was measured so far, and what the prediction assumed."""
    prediction = shot.prediction or manifest.get("prediction")
    rows: list[Line] = []
    if not isinstance(prediction, Mapping):
        rows += wrapped(
            _("This run was started without a prediction: its model was not described."),
            cells - 2, "", " ", cut=g.cut,
        )  # fmt: skip
        rows += wrapped(
            _("The wizard predicts where it knows the model; dstui estimate does it for any config."),
            cells - 2, "dim", " ", cut=g.cut,
        )  # fmt: skip
        return [*rows, *_by_phase(shot, {}, cells, g), *_measured(shot, cells, g)]
    rows += _table(shot.comparisons, cells, g, before_peak(shot))
    if shot.state in ("starting", "running", "stalled"):
        text = _("Measured figures are the highest so far; memory is at its peak after the first step.")
        rows += wrapped(text, cells - 2, "dim", " ", cut=g.cut)
    rows += _by_phase(shot, prediction, cells, g)
    rows += [BLANK, *_parts(prediction, cells, g)]
    rows += _measured(shot, cells, g)
    assumed = [str(t) for t in prediction.get("assumptions") or ()]
    if assumed:
        rows += [BLANK, rule(_("assumed"), cells, g)]
        for text in assumed:
            rows += wrapped(f"{g.dot} {text}", cells - 2, "dim", " ", cut=g.cut)
    return rows


def _table(found: tuple[Comparison, ...], cells: int, g: Glyphs, so_far: bool) -> list[Line]:
    head = (_("peak"), _("low"), _("expected"), _("high"), _("measured"), _("difference"))
    body: list[tuple[tuple[str, ...], str, str]] = []
    for c in found:
        word, role = plan_word(c, so_far)
        measured = gib(c.measured) if c.measured is not None else _("not measured")
        ratio = plan_difference(c, so_far)
        texts = (_(COMPARED.get(c.what, c.what)), gib(c.low), gib(c.expected), gib(c.high), measured, ratio)
        body.append((texts, word, role))
    sizes = [max(width(t) for t in column) for column in zip(head, *(b[0] for b in body), strict=True)]
    sizes = [max(s, 9) for s in sizes]

    def row(texts: tuple[str, ...]) -> str:
        return " " + "  ".join(pad(t, s) for t, s in zip(texts, sizes, strict=True))

    rows = [line((row(head), "dim"))]
    rows += [line(row(texts), ("  " + word if word else "", role)) for texts, word, role in body]
    meanings = (
        ("allocated", _("live tensors of the worst rank, as torch counts them")),
        ("reserved", _("what torch's allocator holds, gaps included")),
        ("device", _("all that the driver counts on the fullest card: context and NCCL too")),
        ("host", _("resident memory of the node's ranks together")),
    )
    size = max(width(_(COMPARED[k])) for k, _t in meanings)
    present = {c.what for c in found}
    rows.append(BLANK)
    for name, text in meanings:
        if name in present:
            rows += [
                line((f" {pad(_(COMPARED[name]) if n == 0 else '', size)}  ", "dim"), *r)
                for n, r in enumerate(wrapped(text, cells - size - 4, "dim", cut=g.cut))
            ]
    return rows


def _by_phase(shot: Snapshot, prediction: Mapping[str, Any], cells: int, g: Glyphs) -> list[Line]:
    """A measured run: what was predicted to be allocated in each phase, beside what the probe saw there."""
    if not shot.phase_memory:
        return []
    thought = {p["phase"]: p.get("total") for p in (prediction.get("gpu") or {}).get("phases") or ()}
    names = [p for p in PHASE_NAMES if p in shot.phase_memory]
    columns: list[tuple[str, list[int | None]]] = [(_("predicted"), [thought.get(p) for p in names])]
    for what in ("allocated", "reserved", "device", "host"):
        columns.append((_(COMPARED[what]), [shot.phase_memory[p].get(what) for p in names]))
    columns = [(title, values) for title, values in columns if any(v is not None for v in values)]
    first = max([width(_(PHASE_NAMES[p])) for p in names] + [8])
    sizes = [max(width(title), 9) for title, _values in columns]
    head = "".join("  " + pad(title, n) for (title, _values), n in zip(columns, sizes, strict=True))
    rows = [BLANK, rule(_("measured by phase"), cells, g), line((" " + pad("GiB", first) + head, "dim"))]
    for i, p in enumerate(names):
        texts = ["" if (v := values[i]) is None else f"{v / 2**30:.2f}" for _title, values in columns]
        row = "".join("  " + pad(t, n) for t, n in zip(texts, sizes, strict=True))
        rows.append(line(" " + pad(_(PHASE_NAMES[p]), first) + row))
    return rows


def _parts(prediction: Mapping[str, Any], cells: int, g: Glyphs) -> list[Line]:
    """What fills the GPU and the host at their predicted peaks."""
    rows: list[Line] = []
    gpu = prediction.get("gpu") or {}
    phases = [p for p in gpu.get("phases") or () if isinstance(p, Mapping) and p.get("parts")]
    if phases:
        top = max(phases, key=lambda p: sum(p["parts"].values()))
        name = str(top.get("phase"))
        phase = _(PHASE_NAMES.get(name, name))
        rows.append(rule(_("predicted to fill the GPU, in {phase}").format(phase=phase), cells, g))
        rows += _shares(top["parts"], cells, g)
    host = prediction.get("host") or {}
    parts = {k: v for k, v in (host.get("parts") or {}).items() if v}
    if not parts:
        parts = {k: host[k] for k in ("pinned", "pageable") if host.get(k)}
    if parts:
        rows += [BLANK, rule(_("predicted to fill the host"), cells, g), *_shares(parts, cells, g)]
    return rows


def _shares(parts: Mapping[str, int], cells: int, g: Glyphs) -> list[Line]:
    known = sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda kv: -kv[1])
    if not known:
        return []
    names = max(width(_(PARTS.get(k, k))) for k, _v in known)
    sizes = max(width(gib(v)) for _k, v in known)
    room = max(0, min(40, cells - names - sizes - 6))
    top = known[0][1]
    return [
        line(
            f" {pad(_(PARTS.get(k, k)), names)}  {gib(v):>{sizes}}  ",
            (g.full * round(room * v / top), "accent"),
        )
        for k, v in known
    ]


def _measured(shot: Snapshot, cells: int, g: Glyphs) -> list[Line]:
    rows: list[Line] = []
    if any(x.memory_peak for x in shot.gpus):
        rows += [BLANK, rule(_("measured on the GPUs"), cells, g)]
        texts = [f"GPU {x.index}  {gib(x.memory_peak)}" for x in shot.gpus if x.memory_peak]
        rows += packed(texts, cells, 40, g)
    if shot.ranks:
        rows += [BLANK, rule(_("measured in the ranks"), cells, g), *rank_rows(shot.ranks, cells, 40, g)]
    if shot.host_peak:
        text = _("host RAM in use at most: {size} (other programs included)").format(size=gib(shot.host_peak))
        rows += [BLANK, line(" " + text)]
    return rows


def config_page(
    text: str | None, manifest: Mapping[str, Any], path: str, cells: int, g: Glyphs
) -> list[Line]:
    """The run's own copy of the config, with where it came from and how it reaches the script."""
    about = manifest.get("config") or {}
    rows = wrapped(_("the run's copy: {path}").format(path=path), cells - 2, "dim", " ", cut=g.cut)
    if about.get("source"):
        rows += wrapped(_("made from {path}").format(path=about["source"]), cells - 2, "dim", " ", cut=g.cut)
    if about.get("instrumented"):
        note = _("steps_per_print, log_level and csv_monitor were added so that the monitor can read the run")
        rows += wrapped(note, cells - 2, "dim", " ", cut=g.cut)
    rows.append(BLANK)
    if text is None:
        return [*rows, line((" " + _("this run has no DeepSpeed config"), "dim"))]
    return rows + [line(" ", *r) for r in json_lines(text, cells - 2, g)]


def stacks_page(found: Stacks | None, cells: int, g: Glyphs) -> list[Line]:
    """What each rank does, its threads with the innermost frame first; why it cannot be seen, and the command."""
    if found is None:
        return [line((" " + _("py-spy looks at every rank ..."), "dim"))]
    rows: list[Line] = []
    if found.problem:
        rows += wrapped(found.problem, cells - 2, "warn", " ", cut=g.cut)
        rows += wrapped(found.hint, cells - 2, "", " ", cut=g.cut) if found.hint else []
    for text in found.gist:
        rows += wrapped(text, cells - 2, "strong", " ", cut=g.cut)
    for r in found.ranks:
        rows.append(rule(_("rank {n}, pid {pid}").format(n=r.rank, pid=r.pid), cells, g))
        if r.problem:
            rows += wrapped(r.problem, cells - 2, "warn", " ", cut=g.cut)
            rows += wrapped(_("by hand: {command}").format(command=r.command), cells - 2, "", " ", cut=g.cut)
        for text in r.text.splitlines():
            if text.startswith("Thread "):
                rows.append(line((" " + clip(text, cells - 3, g.cut), "strong")))
            elif text[:1].isspace():  # the rest repeats pid and command
                rows += wrapped(text.strip(), cells - 2, "", "   ", cut=g.cut)
        rows.append(BLANK)
    return rows


def change_page(made: Change | None, fix: Repair | None, cells: int, g: Glyphs) -> list[Line]:
    """A fix as the difference that it makes to the config, with its price, before it is used."""
    if fix is None:
        return []
    rows = wrapped(fix.title, cells - 2, "strong", " ", cut=g.cut)
    if fix.price:
        rows += wrapped(_("price: {text}").format(text=fix.price), cells - 2, "dim", " ", cut=g.cut)
    if made is None:
        return [*rows, BLANK, line((" " + _("computing ..."), "dim"))]
    if made.price:
        rows += wrapped(_("predicted: {text}").format(text=made.price), cells - 2, "", " ", cut=g.cut)
    rows += [BLANK, rule(_("the config of the new run"), cells, g)]
    changed = made.diff.split("\n", 2)[-1]  # without the names of two files that are the same one
    rows += [line(" ", *r) for r in diff_lines(changed, cells - 2, g)]
    rows += [BLANK, rule(_("what happens"), cells, g)]
    command = " ".join([made.spec.script, *made.spec.args])
    texts = [
        _("Enter starts a new run of the same command with this config: {command}").format(command=command)
    ]
    if made.source:
        texts.append(
            _("w writes the change into your file {path} too; the run does not need it").format(
                path=made.source
            )
        )
    texts.append(_("this run stays as it is"))
    for text in texts:
        rows += wrapped(f"{g.dot} {text}", cells - 2, "", " ", cut=g.cut)
    return rows


def diagnosis_page(found: Diagnosis, cells: int, g: Glyphs) -> list[Line]:
    """Fate, cause with its checkpoint, what was seen, every change with its edits and price, other causes."""
    letter, word, role = state_word(found.outcome)
    rows = [line((f" {letter} {word}", role))]
    cause = found.cause
    if cause is None:
        nothing = (
            _("nothing is wrong in what is there")
            if found.outcome in ("running", "starting", "finished")
            else _("no cause found in what is there; the log tells more (key l)")
        )
        return [*rows, BLANK, *wrapped(nothing, cells - 2, "", " ", cut=g.cut)]
    sure = {"certain": _("certain"), "likely": _("likely"), "possible": _("possible")}[cause.certainty]
    known = BY_CODE[cause.code]
    rows += [BLANK, *wrapped(f"{cause.code} {cause.name} ({sure})", cells - 2, "bad", " ", cut=g.cut)]
    rows += wrapped(known.heading, cells - 2, "strong", " ", cut=g.cut)
    if cause.detail:
        rows += wrapped(cause.detail, cells - 2, "", " ", cut=g.cut)
    rows += [BLANK, checkpoint_row(cause.checkpoint, cells, g)]
    if cause.checkpoint:
        text = _("failed: checkpoint {n} of 5, {name}").format(
            n=cause.checkpoint, name=_(CHECKPOINTS[cause.checkpoint - 1])
        )
        rows += wrapped(text, cells - 2, "", " ", cut=g.cut)
    for title, text in ((_("why"), known.why), (_("what to do"), known.do)):
        rows += [BLANK, rule(title, cells, g), *wrapped(_(text), cells - 2, "", " ", cut=g.cut)]
    if found.evidence:
        rows += [BLANK, rule(_("evidence"), cells, g)]
        for e in found.evidence:
            rows += wrapped(f"{e.file}:{e.line}" if e.line else e.file, cells - 2, "dim", " ", cut=g.cut)
            for text in e.text.splitlines()[:8]:
                rows += wrapped(text, cells - 5, "", "   ", limit=3, cut=g.cut)
    if found.fixes:
        rows += [BLANK, rule(_("what to change"), cells, g)]
        for n, fix in enumerate(found.fixes, 1):
            for m, r in enumerate(wrapped(fix.title, cells - 6, "strong", "", cut=g.cut)):
                rows.append(line((f" {n}. " if m == 0 else "    ", "key"), *r))
            for edit in fix.edits:
                rows += wrapped(json.dumps(dict(edit), ensure_ascii=False), cells - 6, "accent", "    ")
            if fix.price:
                rows += wrapped(
                    _("price: {text}").format(text=fix.price), cells - 6, "dim", "    ", cut=g.cut
                )
    if found.others:
        rows += [BLANK, rule(_("also possible"), cells, g)]
        for o in found.others:
            rows += wrapped(f"{o.code} {o.name}: {BY_CODE[o.code].heading}", cells - 2, "", " ", cut=g.cut)
    more = _("the same in plain text: dstui diagnose RUN; the page: dstui explain {code}").format(
        code=cause.code
    )
    return [*rows, BLANK, *wrapped(more, cells - 2, "dim", " ", cut=g.cut)]
