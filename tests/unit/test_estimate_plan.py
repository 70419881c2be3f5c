"""What is recommended where, and why."""

from __future__ import annotations

import pytest

from dstui.estimate.inputs import Training
from dstui.estimate.memory import estimate
from dstui.estimate.model import load_model
from dstui.estimate.plan import recommend
from dstui.estimate.result import Estimate
from dstui.facts.model import Facts, Gpu, Host
from dstui.units import GiB


def machine(n: int, size: int, ram: int) -> Facts:
    gpus = tuple(Gpu(index=i, memory_total=size * GiB, memory_free=size * GiB) for i in range(n))
    return Facts(gpus=gpus, host=Host(ram_total=ram * GiB, ram_available=ram * GiB))


@pytest.mark.parametrize(
    ("model", "facts", "stage", "offload"),
    [
        ("qwen2.5-0.5b", machine(8, 80, 512), 0, ("none", "none")),
        ("llama-2-7b", machine(8, 80, 512), 1, ("none", "none")),
        ("llama-2-7b", machine(4, 24, 512), 3, ("cpu", "none")),
        ("llama-2-13b", machine(1, 24, 1024), 3, ("cpu", "cpu")),
    ],
)
def test_cheapest_that_fits(model: str, facts: Facts, stage: int, offload: tuple[str, str]) -> None:
    found = recommend(load_model(model), Training(zero_init=True), facts, release="0.19.8")
    assert found.fits and found.estimate.verdict in ("fits", "tight")
    assert (found.stage, (found.offload_optimizer, found.offload_param)) == (stage, offload)
    assert found.reasons and all(r for r in found.reasons)


def test_no_offload_while_a_lower_stage_fits() -> None:
    for model in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-2-7b", "pythia-1.4b"):
        for n in (1, 2, 8):
            found = recommend(load_model(model), Training(), machine(n, 80, 1024), release="0.19.8")
            if found.offload_optimizer == "none":
                continue
            for stage in (0, 1, 2, 3):
                e = _at(model, stage, found.micro_batch, machine(n, 80, 1024))
                assert e.verdict in ("no", "tight"), (model, n, stage)


def _at(model: str, stage: int, micro: int, facts: Facts) -> Estimate:
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": stage},
    }
    return estimate(
        load_model(model), Training(micro_batch=micro), config, facts, release="0.19.8", changes=False
    )


def test_both_offloads_are_refused_when_ram_cannot_hold_them() -> None:
    found = recommend(
        load_model("llama-2-7b"), Training(zero_init=True), machine(1, 24, 64), release="0.19.8"
    )
    assert not found.fits and found.estimate.verdict == "no"
    assert any("RAM" in r for r in found.reasons)


def test_unknown_facts_are_said() -> None:
    found = recommend(load_model("llama-2-7b"), Training(), Facts(gpus=None), release="0.19.8")
    assert not found.fits and found.estimate.verdict == "unknown" and found.reasons


def test_the_micro_batch_grows_only_when_nobody_chose_it() -> None:
    facts = machine(8, 80, 512)
    free = recommend(load_model("qwen2.5-0.5b"), Training(), facts, release="0.19.8")
    fixed = recommend(load_model("qwen2.5-0.5b"), Training(micro_batch=2), facts, release="0.19.8")
    assert free.micro_batch > 2 and fixed.micro_batch == 2
