"""A machine's facts in a few lines, for the start screen and the title bar."""

from __future__ import annotations

from collections import Counter

from dstui.facts.model import UNLIMITED, Facts, Gpu
from dstui.i18n import _, listed, ngettext
from dstui.tui.terminal import Glyphs
from dstui.units import gib


def _kinds(gpus: tuple[Gpu, ...]) -> list[tuple[str, int | None, int]]:
    counted = Counter((g.name or _("GPU"), g.memory_total) for g in gpus)
    return [(name, total, n) for (name, total), n in counted.items()]


def gpus_short(facts: Facts | None) -> str:
    """``8 x NVIDIA H200`` for the title bar."""
    if facts is None:
        return _("looking at this machine")
    if facts.gpus is None:
        return _("GPUs unknown")
    if not facts.gpus:
        return _("no GPU (CPU)")
    text = listed(f"{n} x {name}" for name, _total, n in _kinds(facts.gpus))
    return (
        text
        if facts.nodes == 1
        else ngettext("{n} node", "{n} nodes", facts.nodes).format(n=facts.nodes) + " x " + text
    )


def title_right(facts: Facts | None) -> str:
    """What the title bar says of the machine."""
    text = gpus_short(facts)
    if facts is not None and facts.deepspeed:
        text += f"  DeepSpeed {facts.deepspeed}"
    return text


def summary(facts: Facts, glyphs: Glyphs) -> list[tuple[str, str]]:
    """(what, value) rows: GPUs, host memory, training interpreter, scheduler."""
    dot = f" {glyphs.dot} "
    rows: list[tuple[str, str]] = []
    if facts.gpus is None:
        rows.append((_("GPUs"), _("unknown: {why}").format(why=facts.unknown.get("gpus", "?"))))
    elif not facts.gpus:
        rows.append((_("GPUs"), _("none; DeepSpeed trains on the CPU here (gloo)")))
    else:
        for n, (name, total, count) in enumerate(_kinds(facts.gpus)):
            rows.append((_("GPUs") if n == 0 else "", f"{count} x {name}{dot}{gib(total)}"))
        busy = [g for g in facts.gpus if g.busy]
        if busy:
            users = sorted({p.user or "?" for g in busy for p in g.processes or ()})
            text = _("{cards} busy ({users})").format(
                cards=listed(str(g.index) for g in busy), users=listed(users)
            )
            rows.append(("", text))
    host = facts.host
    text = _("{total} RAM, {free} free").format(total=gib(host.ram_total, 0), free=gib(host.memory_free, 0))
    if host.cgroup and host.cgroup.limit not in (None, UNLIMITED):
        text += dot + _("limit of this container {limit}").format(limit=gib(host.cgroup.limit, 0))
    rows.append((_("Host"), text))
    it = facts.interpreter
    if it is None:
        rows.append((_("Training Python"), _("none found")))
    else:
        parts = [
            f"{name} {v}"
            for name, v in it.packages.items()
            if v and name in ("deepspeed", "torch", "transformers")
        ]
        rows.append(
            (_("Training Python"), f"{it.version or '?'}{dot}" + (dot.join(parts) or _("no DeepSpeed")))
        )
        rows.append(("", it.path))
        if not it.can_train and it.problem:
            rows.append(("", it.problem))
    sched = facts.scheduler
    if sched.login_node:
        rows.append(("SLURM", _("a login node: plan here for the compute nodes (Machine, describe)")))
    elif sched.slurm_job:
        rows.append(("SLURM", _("job {job}").format(job=sched.slurm_job)))
    return rows
