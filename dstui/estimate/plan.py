"""Which stage and offload to start with: the cheapest that fits.

Order of price: plain data parallel, stage 1, stage 2, stage 3, then the optimizer in host RAM (stage 2, then
3), then parameters too, then NVMe. A dearer placement is never chosen while a cheaper one fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.memory import estimate, placed
from dstui.estimate.result import Estimate
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.units import gib

LADDER: tuple[tuple[int, str, str], ...] = (
    (0, "none", "none"),
    (1, "none", "none"),
    (2, "none", "none"),
    (3, "none", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)


@dataclass(frozen=True)
class Recommendation:
    """What to start with. ``estimate`` is its fit; ``fits`` is False when nothing on this machine does."""

    stage: int
    offload_optimizer: str
    offload_param: str
    micro_batch: int
    checkpointing: bool
    reasons: tuple[str, ...]
    estimate: Estimate
    fits: bool


def recommend(
    shape: ModelShape,
    training: Training,
    facts: Facts,
    *,
    release: str | None,
    config_data: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Recommendation:
    """The cheapest placement that fits ``shape`` on the machine, with a sentence for each choice.

    Everything but stage and offload is as in ``config_data`` (default: bf16 with AdamW). The micro batch is the
    script's, or the largest power of two up to 16 that still fits the chosen placement when it names none.
    Without a GPU, and when nothing fits or facts are missing, the answer says so and ``fits`` is False
    (stage 0 on the CPU is judged by RAM alone).
    """
    base: Mapping[str, Any] = config_data or {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    micro = training.micro_batch
    start = replace(training, micro_batch=micro or 1)
    ranks = world_size or facts.world_size or 1

    def fit(placement: tuple[int, str, str], how: Training) -> Estimate:
        return estimate(
            shape,
            how,
            placed(_with_micro(base, how.micro_batch or 1), *placement),
            facts,
            release=release,
            world_size=world_size,
            changes=False,
        )

    ladder = [p for p in LADDER if not (ranks == 1 and p[0] in (1, 2) and p[1] == "none")]
    if facts.gpus is not None and len(facts.gpus) == 0:
        ladder = (
            [(0, "none", "none")]
            if ranks == 1
            else [(0, "none", "none"), (2, "none", "none"), (3, "none", "none")]
        )
    if not any(s.writable is not False and s.free for s in facts.storage):
        ladder = [p for p in ladder if p[1] != "nvme"]
    attempts = [start] if start.checkpointing else [start, replace(start, checkpointing=True)]
    refused: list[tuple[tuple[int, str, str], Estimate]] = []
    tight: tuple[tuple[int, str, str], Training, Estimate] | None = None
    for placement in ladder:
        for how in attempts:
            e = fit(placement, how)
            if e.verdict == "fits":
                chosen = _grown(fit, placement, how, micro)
                return _answer(placement, chosen, fit(placement, chosen), refused, start, True)
            if e.verdict == "tight" and tight is None:
                tight = (placement, how, e)
        refused.append((placement, e))
    if tight is not None:
        placement, how, e = tight
        before = [r for r in refused if ladder.index(r[0]) < ladder.index(placement)]
        return _answer(placement, how, e, before, start, True)
    placement, e = min(refused, key=lambda r: _shortage(r[1]))
    reasons = [_("nothing fits this machine; the nearest is {name}").format(name=_name(placement))]
    if e.verdict == "unknown" and e.reason:
        reasons = [e.reason]
    elif e.binds is not None and e.binds.where == "host":
        reasons.append(
            _("host RAM cannot hold it: {need} needed, {have} free").format(
                need=gib(e.host.peak.expected if e.host.peak else None), have=gib(e.host.capacity)
            )
        )
    elif e.gpu.device is not None:
        reasons.append(
            _("a GPU needs {need} and has {have}").format(
                need=gib(e.gpu.device.expected), have=gib(e.gpu.capacity)
            )
        )
    how = attempts[-1]
    return Recommendation(*placement, how.micro_batch or 1, how.checkpointing, tuple(reasons), e, False)


def _with_micro(config: Mapping[str, Any], micro: int) -> dict[str, Any]:
    data = dict(config)
    if isinstance(data.get("train_micro_batch_size_per_gpu"), int):
        data["train_micro_batch_size_per_gpu"] = micro
        data.pop("train_batch_size", None)
    return data


def _grown(fit: Any, placement: tuple[int, str, str], how: Training, asked: int | None) -> Training:
    """``how`` with the largest micro batch that still fits, when the script names none."""
    if asked is not None:
        return how
    best = how
    for micro in (2, 4, 8, 16):
        larger = replace(how, micro_batch=micro)
        if fit(placement, larger).verdict != "fits":
            break
        best = larger
    return best


def _shortage(e: Estimate) -> float:
    if e.gpu.device is None or not e.gpu.capacity:
        return float("inf")
    need = e.gpu.device.expected / e.gpu.capacity
    if e.host.peak is not None and e.host.capacity:
        need = max(need, e.host.peak.expected / e.host.capacity)
    return need


def _name(placement: tuple[int, str, str]) -> str:
    stage, optimizer, param = placement
    if stage == 0:
        return _("plain data parallel (stage 0)")
    name = _("ZeRO stage {stage}").format(stage=stage)
    if param != "none":
        return _("{name} with optimizer and parameters on {device}").format(name=name, device=param)
    if optimizer != "none":
        return _("{name} with the optimizer on {device}").format(name=name, device=optimizer)
    return name


def _answer(
    placement: tuple[int, str, str],
    how: Training,
    e: Estimate,
    refused: list[tuple[tuple[int, str, str], Estimate]],
    start: Training,
    fits: bool,
) -> Recommendation:
    reasons: list[str] = []
    if e.gpu.device is not None:
        reasons.append(
            _("{name}: {need} of {have} per GPU").format(
                name=_name(placement), need=gib(e.gpu.device.expected), have=gib(e.gpu.capacity)
            )
        )
    elif e.host.peak is not None:
        reasons.append(
            _("{name}: {need} of {have} RAM").format(
                name=_name(placement), need=gib(e.host.peak.expected), have=gib(e.host.capacity)
            )
        )
    if refused:
        last, why = refused[-1]
        if why.binds is not None and why.binds.where == "host" and why.host.peak is not None:
            reasons.append(
                _("{name} does not fit: {need} of host RAM").format(
                    name=_name(last), need=gib(why.host.peak.expected)
                )
            )
        elif why.gpu.device is not None and why.verdict == "no":
            reasons.append(
                _("{name} does not fit: {need} per GPU").format(
                    name=_name(last), need=gib(why.gpu.device.expected)
                )
            )
    stage, optimizer, param = placement
    if optimizer != "none":
        reasons.append(
            _("offload costs PCIe traffic and a slow CPU step; no stage without it is sure to fit")
        )
    elif stage == 3:
        reasons.append(_("stage 3 gathers parameters in every layer: 1.5 times the communication of stage 2"))
    elif stage == 0:
        reasons.append(_("everything fits as it is: sharding would only cost"))
    if how.checkpointing and not start.checkpointing:
        reasons.append(_("gradient checkpointing is needed for it"))
    if e.verdict == "tight":
        reasons.append(_("it is tight: fragmentation may still fail it"))
    return Recommendation(
        stage, optimizer, param, how.micro_batch or 1, how.checkpointing, tuple(reasons), e, fits
    )
