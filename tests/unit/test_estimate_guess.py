"""A model of which only the size is known, asked beside the models that have that size."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from dstui.estimate import model
from dstui.estimate.decoder import APPROXIMATE
from dstui.estimate.inputs import ModelShape, Training
from dstui.estimate.memory import estimate
from dstui.estimate.model import load_model
from dstui.estimate.plan import plan
from dstui.estimate.result import Estimate
from dstui.facts.describe import describe
from dstui.units import GiB

SETTINGS = list(
    itertools.product((0, 2, 3), (1, 8), (512, 2048, 8192), (1, 4), (True, False), (None, 16))
)  # stage, ranks, tokens, micro batch, checkpointing, LoRA
CATALOGUE = json.loads((Path(model.__file__).parent / "catalogue.json").read_text(encoding="utf-8"))
MACHINES = {n: describe(f"{n}x80GiB", ram="2000GiB") for n in (1, 8)}


def ask(shape: ModelShape, setting: tuple[int, int, int, int, bool, int | None]) -> Estimate:
    stage, ranks, seq, micro, checkpointing, lora = setting
    training = Training(
        micro_batch=micro, seq=seq, checkpointing=checkpointing, lora_rank=lora, hold_logits=False
    )
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    return estimate(shape, training, config, MACHINES[ranks], release="0.19.8", changes=False)


def test_the_range_of_a_size_holds_the_models_of_that_size() -> None:
    chance = random.Random(7)
    held, wrong = [], []
    for name, entry in CATALOGUE.items():
        shape, params = load_model(name), entry["params"]
        if shape.family in APPROXIMATE or not 1e8 < params < 8e10:
            continue
        for setting in chance.sample(SETTINGS, 2):
            real, guess = (
                ask(shape, setting),
                ask(ModelShape(name="?", params=params, source="typed"), setting),
            )
            assert real.gpu.allocated and guess.gpu.allocated
            r = guess.gpu.allocated
            held.append(r.low <= real.gpu.allocated.expected <= r.high)
            if not held[-1]:
                wrong.append((name, setting))
            if guess.verdict != "unknown":  # a confident answer is the right one, or a tight one of it
                assert "no" not in {guess.verdict, real.verdict} or guess.verdict == real.verdict, (
                    name,
                    setting,
                )
    assert len(held) > 80 and sum(held) >= 0.97 * len(held), wrong


@pytest.mark.parametrize(
    ("size", "verdict"), [(100, "no"), (150, "unknown"), (157, "unknown"), (166, "unknown"), (240, "fits")]
)
def test_a_guess_is_sure_only_where_its_whole_range_is(size: int, verdict: str) -> None:
    """7B in full on one card: about 156 GiB."""
    facts = describe(f"1x{size}GiB", ram="512GiB")
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    e = estimate(load_model("7B"), Training(seq=2048), config, facts, release="0.19.8", changes=False)
    assert e.verdict == verdict
    if verdict == "unknown":
        assert e.reason is not None and "config.json" in e.reason  # the next step


def test_a_size_is_planned_where_it_is_enough() -> None:
    shape = load_model("7B")
    small = plan(shape, Training(lora_rank=16), describe("1x24GiB", ram="64GiB"), release="0.19.8")
    assert (small.verdict, small.setup.placement) == ("fits", (0, "none", "none"))
    full = plan(shape, Training(), describe("8x80GiB", ram="1TiB"), release="0.19.8")
    assert (full.verdict, full.setup.placement.stage) == ("fits", 1)


def test_no_offload_is_chosen_while_a_cheaper_placement_may_fit() -> None:
    answer = plan(
        load_model("7B"), Training(lora_rank=16), describe("1x20GiB", ram="256GiB"), release="0.19.8"
    )
    assert answer.verdict == "unknown" and answer.config is None
    assert answer.reason is not None and "config.json" in answer.reason
    assert all("only the number" not in r.reason for r in answer.rejected)
    assert answer.estimate.gpu.capacity == 20 * GiB
