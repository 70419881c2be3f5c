"""The one line that decides a step of the wizard, with this machine's figures. ``report`` makes the live answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dstui.i18n import _
from dstui.session import advice
from dstui.session.model import Report
from dstui.session.state import State
from dstui.units import gib


def _machine(s: State, report: Callable[[], Report]) -> str:
    if s.is_login_node and s.facts is None:
        return _(
            "A login node (SLURM, no GPU): describe the machine that will train, or give its facts file."
        )
    facts = s.facts
    if facts is None:
        return _("Looking at this machine...")
    if facts.gpus:
        room = advice.card(s)
        return _("{chosen} of {all} cards, {size} usable on each; world size {world}").format(
            chosen=len(s.get("cards")), all=len(facts.gpus), size=gib(room), world=s.world
        )
    return _("No GPU: {ranks} ranks on the CPU, {size} of memory free").format(
        ranks=s.world, size=gib(facts.host.memory_free)
    )


def _script(s: State, report: Callable[[], Report]) -> str:
    reason = s.recommended("engine")[1]
    return (
        f"{s.get('engine')}: {reason}"
        if reason and s.get("engine") == s.recommended("engine")[0]
        else s.get("engine")
    )


def _model(s: State, report: Callable[[], Report]) -> str:
    if s.shape is None:
        return s.model_problem or _(
            "Without a model the fit is unknown; the config can be written all the same."
        )
    line = advice.size_line(s)
    copy = advice.copy16(s)
    text = _("{model}; copy of a rank {size}") if advice.on_cpu(s) else _("{model}; copy on a card {size}")
    return text.format(model=line, size=gib(copy))


def _stage(s: State, report: Callable[[], Report]) -> str:
    stage = s.get("stage")
    need, room = advice.states(s, stage, "none"), advice.card(s)
    if s.plan.fits is None or need is None or room is None:
        return advice.RECOMMEND["stage"](s)[1]
    if stage == s.plan.stage or not s.plan.fits:
        return s.plan.short
    line = (
        _("stage {stage}: states {need} of {room} a rank")
        if advice.on_cpu(s)
        else _("stage {stage}: states {need} of {room} a card")
    ).format(stage=stage, need=gib(need), room=gib(room))
    return line + "; " + _("recommended is {best}: {why}").format(best=s.plan.stage, why=s.plan.in_all)


def _offload(s: State, report: Callable[[], Report]) -> str:
    stage, offload = s.get("stage"), s.get("offload")
    if advice.on_cpu(s):
        return _("No GPU: all of it is in RAM anyway.")
    need, room = advice.states(s, stage, offload), advice.card(s)
    if need is None or room is None:
        return _("Offload only when the states do not fit: every step then crosses PCIe and the CPU.")
    line = _("states left on the card {need} of {room}").format(need=gib(need), room=gib(room))
    host = advice.host_states(s)
    facts = s.used
    if host and facts:
        line += "; " + _("host {need} of {room}").format(need=gib(host), room=gib(facts.host.memory_capacity))
    return line


def _batch(s: State, report: Callable[[], Report]) -> str:
    micro, steps, total = s.batch
    return _("micro {micro} x accumulation {steps} x {world} ranks = {total} samples a step").format(
        micro=micro, steps=steps, world=s.world, total=total
    )


def _pinned(s: State, report: Callable[[], Report]) -> str:
    if s.get("offload") == "none":
        return _("Nothing is offloaded: nothing is pinned.")
    facts = s.used
    pinned = report().estimate
    need = (
        pinned.host.pinned if pinned is not None and pinned.host.pinned is not None else advice.host_states(s)
    )
    return _(
        "pinned (rounded up) {need} of {room} RAM; written out, for the default changed in 0.19.5"
    ).format(need=gib(need), room=gib(facts.host.memory_capacity if facts else None))


def _comm(s: State, report: Callable[[], Report]) -> str:
    if s.get("stage") == 0:
        return _("Stage 0: one all-reduce a step, nothing to set.")
    bytes_ = s.get("reduce_bucket_size") * (4 if s.get("precision") == "fp32" else 2)
    twice = 2 if s.get("overlap_comm") and s.get("stage") in (1, 2) else 1
    text = (
        _("buckets take {size} in each rank; a collective that waits longer than {n} minutes ends the run")
        if advice.on_cpu(s)
        else _(
            "buckets take {size} on each card; a collective that waits longer than {n} minutes ends the run"
        )
    )
    return text.format(size=gib(bytes_ * twice), n=s.get("timeout"))


def _precision(s: State, report: Callable[[], Report]) -> str:
    reason = s.recommended("precision")[1] if s.get("precision") == s.recommended("precision")[0] else ""
    return f"{s.get('precision')}: {reason}" if reason else str(s.get("precision"))


def _review(s: State, report: Callable[[], Report]) -> str:
    answer = report()
    if answer.blockers:
        return answer.blockers[0]
    estimate = answer.estimate
    if estimate is None:
        return _("The fit is unknown: no model was named.")
    return estimate.reason or estimate.verdict


LINES: Mapping[str, Callable[[State, Callable[[], Report]], str]] = {
    "machine": _machine,
    "script": _script,
    "model": _model,
    "stage": _stage,
    "offload": _offload,
    "batch": _batch,
    "pinned": _pinned,
    "comm": _comm,
    "precision": _precision,
    "review": _review,
}
