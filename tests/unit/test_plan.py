"""What ``plan`` answers: the cases that an expert would check, and properties of every answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.estimate.cost import ADAM_HOST, NVLINK, TFLOPS, Work, rates, step_cost, volume
from dstui.estimate.inputs import Training
from dstui.estimate.memory import estimate
from dstui.estimate.model import load_model
from dstui.estimate.plan import Plan, plan
from dstui.estimate.search import PLACEMENTS, Placement, Search
from dstui.facts.cards import CARDS, find_card
from dstui.facts.describe import describe
from dstui.facts.model import Facts, Gpu, Host, Storage
from dstui.rules.engine import Context, check_document
from dstui.units import GiB

RELEASE = "0.19.8"
CASES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "7b-lora-1x24": ("llama-2-7b", "1x4090", "64GiB", 1, {"lora_rank": 16}),
    "7b-4x24": ("llama-2-7b", "4x4090", "256GiB", 1, {}),
    "7b-8x80": ("llama-2-7b", "8xA100-80G", "512GiB", 1, {}),
    "13b-1x24-64": ("llama-2-13b", "1x4090", "64GiB", 1, {}),
    "13b-1x24-256": ("llama-2-13b", "1x4090", "256GiB", 1, {}),
    "13b-2x24-256": ("llama-2-13b", "2x4090", "256GiB", 1, {}),
    "20b-1x24-128": ("gpt-neox-20b", "1x4090", "128GiB", 1, {}),
    "20b-2x24-256": ("gpt-neox-20b", "2x4090", "256GiB", 1, {}),
    "70b-8x80-1t": ("llama-2-70b", "8xA100-80G", "1024GiB", 1, {}),
    "70b-8x80-2t": ("llama-2-70b", "8xH100-80G", "2048GiB", 1, {}),
    "70b-2x8x80": ("llama-2-70b", "8xH100-80G", "1024GiB", 2, {}),
}
EXPECTED: dict[str, tuple[str, tuple[int, str, str]]] = {
    "7b-lora-1x24": ("fits", (0, "none", "none")),
    "7b-4x24": ("fits", (3, "cpu", "none")),
    "7b-8x80": ("fits", (1, "none", "none")),
    "13b-1x24-64": ("no", (3, "cpu", "none")),
    "13b-1x24-256": ("tight", (3, "cpu", "cpu")),
    "13b-2x24-256": ("fits", (3, "cpu", "none")),
    "20b-1x24-128": ("no", (3, "cpu", "cpu")),
    "20b-2x24-256": ("no", (3, "cpu", "none")),
    "70b-8x80-1t": ("tight", (3, "cpu", "none")),
    "70b-8x80-2t": ("fits", (3, "cpu", "none")),
    "70b-2x8x80": ("fits", (3, "none", "none")),
}


def answer(case: str, **options: Any) -> Plan:
    model, gpus, ram, nodes, how = CASES[case]
    return plan(
        load_model(model), Training(**how), describe(gpus, nodes=nodes, ram=ram), release=RELEASE, **options
    )


def machine(n: int, size: float, ram: int, nodes: int = 1) -> Facts:
    each = int(size * GiB)
    gpus = tuple(Gpu(index=i, memory_total=each, memory_free=each) for i in range(n))
    return Facts(gpus=gpus, nodes=nodes, host=Host(ram_total=ram * GiB, ram_available=ram * GiB))


def choice(p: Plan, what: str) -> Any:
    return next(c for c in p.choices if c.what == what)


# -- the cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(CASES))
def test_what_an_expert_would_choose(case: str) -> None:
    p = answer(case)
    verdict, placement = EXPECTED[case]
    assert (p.verdict, tuple(p.setup.placement)) == (verdict, placement)
    assert (p.config is None) == (verdict == "no")
    if p.config is None:
        assert p.reason and p.changes and not p.choices
    else:
        assert all(c.reason for c in p.choices)
    assert all(r.reason for r in p.rejected)


def test_7b_lora_needs_no_deepspeed_and_says_so() -> None:
    p = answer("7b-lora-1x24")
    assert "plain PyTorch" in choice(p, "stage").reason
    assert p.setup.checkpointing and p.config and p.config["zero_optimization"] == {"stage": 0}


def test_7b_full_on_8x80_names_why_not_stage_0() -> None:
    p = answer("7b-8x80")
    assert [r.what for r in p.rejected] == ["plain data parallel (stage 0)"]
    assert p.rejected[0].need is not None and p.rejected[0].have is not None
    assert p.rejected[0].need > p.rejected[0].have


def test_a_refusal_names_what_is_short_and_the_ways_out() -> None:
    p = answer("13b-1x24-64")
    titles = " ".join(c.title for c in p.changes)
    assert "64.0 GiB there" in (p.reason or "")
    assert "LoRA" in titles and "QLoRA" in titles and "host RAM" in titles and "such cards" in titles


def test_pinning_is_dropped_before_an_offload_is_refused() -> None:
    p = answer("13b-2x24-256")
    assert not choice(p, "pin_memory").value
    assert p.config and p.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert any(r.what == "a pinned optimizer" for r in p.rejected)


def test_part_of_the_optimizer_stays_on_the_card_where_ram_is_short() -> None:
    p = answer("70b-8x80-1t")
    assert p.config and p.config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.75


def test_several_nodes_name_hpz_with_its_price() -> None:
    fits = plan(
        load_model("yi-34b"), Training(), describe("8xH100-80G", nodes=2, ram="1024GiB"), release=RELEASE
    )
    assert "try zero_hpz_partition_size 8" in choice(fits, "zero_hpz_partition_size").reason
    assert "takes 16.1 GiB more" in choice(answer("70b-2x8x80"), "zero_hpz_partition_size").reason
    assert not any(c.what == "zero_hpz_partition_size" for c in answer("7b-8x80").choices)


def test_stage_3_without_offload_is_named_as_fsdp() -> None:
    assert "FSDP" in choice(answer("70b-2x8x80"), "stage").reason
    assert "FSDP" not in choice(answer("7b-4x24"), "stage").reason


def test_the_script_is_told_to_use_zero_init_where_it_must() -> None:
    assert choice(answer("13b-2x24-256"), "loading").value == "zero.Init"
    few = plan(load_model("llama-2-7b"), Training(), describe("8xA100-80G", ram="96GiB"), release=RELEASE)
    assert few.verdict == "fits" and few.setup.placement == Placement(1)
    assert choice(few, "loading").value == "gpu"


@pytest.mark.parametrize("goal", ["fit", "speed", "batch"])
@pytest.mark.parametrize("loop", ["plain", "hf"])
@pytest.mark.parametrize("case", ["7b-lora-1x24", "7b-4x24", "7b-8x80", "13b-2x24-256", "70b-2x8x80"])
def test_our_own_check_has_nothing_to_say(case: str, loop: str, goal: Any) -> None:
    model, gpus, ram, nodes, how = CASES[case]
    facts = describe(gpus, nodes=nodes, ram=ram)
    p = plan(
        load_model(model), Training(loop=loop, **how), facts, release=RELEASE, goal=goal, global_batch=64
    )
    assert p.config is not None
    context = Context(
        release=RELEASE, engine="hf" if loop == "hf" else "deepspeed", facts=facts, world_size=p.ranks
    )
    report = check_document(Document.parse(json.dumps(p.config)), context)
    assert report.verdict == "accepted"
    assert [f for f in report.findings if f.severity != "info"] == []


def test_the_estimate_is_that_of_the_written_config() -> None:
    p = answer("7b-4x24", goal="speed", global_batch=64)
    model, gpus, ram, nodes, _how = CASES["7b-4x24"]
    again = estimate(
        load_model(model), p.training, p.config or {}, describe(gpus, nodes=nodes, ram=ram), release=RELEASE
    )
    assert again.gpu == p.estimate.gpu and again.host == p.estimate.host and again.verdict == p.verdict


# -- facts -------------------------------------------------------------------------------------------------


def test_a_missing_fact_is_said_and_nothing_is_planned() -> None:
    no_gpus = plan(load_model("llama-2-7b"), Training(), Facts(gpus=None), release=RELEASE)
    no_size = plan(load_model("llama-2-7b"), Training(), Facts(gpus=(Gpu(index=0),)), release=RELEASE)
    no_ram = plan(load_model("llama-2-13b"), Training(), describe("1x4090"), release=RELEASE)
    for p in (no_gpus, no_size, no_ram):
        assert p.verdict == "unknown" and p.config is None and p.reason and not p.choices
    assert "--gpus" in (no_size.reason or "") and "--ram" in (no_ram.reason or "")


def test_nvme_only_with_a_drive_that_the_facts_vouch_for() -> None:
    shape, training = load_model("gpt-neox-20b"), Training(zero_init=True)
    base = describe("1x4090", ram="96GiB")
    drive = Storage(path="/nvme", free=4000 * GiB, rotational=False, writable=True, o_direct=True)
    p = plan(shape, training, replace(base, storage=(drive,)), release=RELEASE)
    assert p.config is not None and "nvme" in p.setup.placement
    assert p.config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/nvme"
    for bad in (
        replace(drive, rotational=True),
        replace(drive, o_direct=None),
        replace(drive, free=None),
        replace(drive, writable=False),
    ):
        assert plan(shape, training, replace(base, storage=(bad,)), release=RELEASE).config is None


def test_a_release_that_would_train_wrongly_is_avoided() -> None:
    def object_to_stage_1(config: Any) -> str | None:
        return "wrong" if config["zero_optimization"]["stage"] == 1 else None

    p = answer("7b-8x80", objection=object_to_stage_1)
    assert p.setup.placement == Placement(2)
    assert [(r.what, r.reason) for r in p.rejected][-1] == ("ZeRO stage 1", "wrong")
    nothing = answer("7b-8x80", objection=lambda config: "wrong")
    assert nothing.verdict == "no" and nothing.config is None


def test_without_a_gpu_nothing_is_offloaded() -> None:
    facts = Facts(gpus=(), host=Host(ram_total=64 * GiB, ram_available=64 * GiB))
    p = plan(load_model("qwen2.5-0.5b"), Training(seq=512), facts, release=RELEASE)
    assert p.verdict == "fits" and p.setup.placement == Placement(0)
    assert p.config and p.config["optimizer"]["params"]["torch_adam"] is True


def test_cards_without_bf16_get_fp16() -> None:
    p = plan(
        load_model("qwen2.5-0.5b"), Training(seq=512), describe("4xV100-32G", ram="256GiB"), release=RELEASE
    )
    assert p.config and p.config["fp16"]["enabled"] and "bf16" not in p.config


def test_a_global_batch_that_cannot_be_divided() -> None:
    with pytest.raises(DstuiError) as e:
        answer("7b-8x80", global_batch=100)
    assert "96, 104" in (e.value.hint or "")


# -- properties --------------------------------------------------------------------------------------------

MODELS = ("qwen2.5-0.5b", "pythia-1b", "qwen2.5-1.5b")
some = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
machines = st.builds(
    machine,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([8, 12, 16, 24, 40]),
    st.sampled_from([32, 128, 512]),
)


def ask(model: str, facts: Facts, **options: Any) -> Plan:
    return plan(load_model(model), Training(seq=1024, zero_init=True), facts, release=RELEASE, **options)


@some
@given(st.sampled_from(MODELS), machines)
def test_never_dearer_while_a_cheaper_fits(model: str, facts: Facts) -> None:
    p = ask(model, facts)
    if p.config is None:
        return
    chosen = p.setup.placement
    for stage, optimizer, param in PLACEMENTS:
        dearer = chosen.offloads if not Placement(stage, optimizer, param).offloads else False
        lower = (
            stage < chosen.stage
            and optimizer in ("none", chosen.optimizer)
            and param in ("none", chosen.param)
        )
        less = stage == chosen.stage and (
            (optimizer == "none" != chosen.optimizer and param in ("none", chosen.param))
            or (param == "none" != chosen.param and optimizer in ("none", chosen.optimizer))
        )
        if not (dearer or lower or less):
            continue
        zero: dict[str, Any] = {
            "stage": stage,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
        }
        for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
            if device != "none":
                zero[key] = {"device": device, "pin_memory": True}
        if "nvme" in (optimizer, param):
            continue
        config = {**p.config, "zero_optimization": zero}
        e = estimate(load_model(model), p.training, config, facts, release=RELEASE, changes=False)
        assert e.verdict in ("no", "tight"), (stage, optimizer, param, chosen)


@some
@given(st.sampled_from(MODELS), st.sampled_from([8, 12, 16, 24]), st.sampled_from([64, 512]))
def test_more_cards_never_make_it_impossible(model: str, size: int, ram: int) -> None:
    possible = False
    for n in (2, 4, 8):
        p = ask(model, machine(n, size, ram))
        assert p.config is not None or not possible, n
        possible = p.config is not None


@some
@given(
    st.sampled_from(MODELS),
    machines,
    st.sampled_from(["fit", "speed", "batch"]),
    st.integers(1, 12),
    st.sampled_from([None, 1, 2]),
)
def test_the_global_batch_is_kept(model: str, facts: Facts, goal: Any, times: int, micro: int | None) -> None:
    ranks = len(facts.gpus or ())
    wanted = ranks * times * (micro or 1)
    p = plan(
        load_model(model),
        Training(seq=512, micro_batch=micro),
        facts,
        release=RELEASE,
        goal=goal,
        global_batch=wanted,
    )
    if p.config is None:
        return
    c = p.config
    assert c["train_batch_size"] == wanted == p.global_batch
    assert c["train_micro_batch_size_per_gpu"] * c["gradient_accumulation_steps"] * ranks == wanted
    assert micro is None or c["train_micro_batch_size_per_gpu"] == micro


@some
@given(st.sampled_from(MODELS), machines)
def test_goals_order_the_micro_batch(model: str, facts: Facts) -> None:
    fit, batch = ask(model, facts), ask(model, facts, goal="batch")
    assert (fit.config is None) == (batch.config is None)
    assert batch.setup.micro_batch >= fit.setup.micro_batch
    fast = ask(model, facts, goal="speed")
    if fast.verdict == fit.verdict == "fits" and fast.setup.placement == fit.setup.placement:
        assert fast.cost and fit.cost and fast.cost.per_sample <= fit.cost.per_sample * 1.031


# -- the cost model ----------------------------------------------------------------------------------------


def work(**changes: Any) -> Work:
    base = Work(
        params=7 * 10**9, trained=7 * 10**9, layers=32, hidden=4096, seq=2048, micro_batch=1, accumulation=1,
        ranks=8, ranks_per_node=8, stage=2, offload_optimizer="none", offload_param="none", pinned=True,
        checkpointing=True,
    )  # fmt: skip
    return replace(base, **changes)


def test_volumes_by_stage() -> None:
    unit = 2 * 7e9 * 7 / 8
    assert [volume(work(stage=s)) / unit for s in range(4)] == pytest.approx([2, 3, 3, 3])
    assert [volume(work(stage=s, accumulation=4)) / unit for s in range(4)] == pytest.approx([2, 3, 9, 12])
    assert volume(work(ranks=1, ranks_per_node=1)) == 0


def test_every_offload_costs_and_pinning_pays() -> None:
    r = rates(describe("8xA100-80G", ram="1TiB"), ranks=8, ranks_per_node=8)
    plain, cpu = step_cost(work(), r), step_cost(work(offload_optimizer="cpu"), r)
    both = step_cost(work(stage=3, offload_optimizer="cpu", offload_param="cpu"), r)
    assert plain.pcie == plain.cpu_adam == 0 < cpu.pcie < both.pcie
    assert cpu.cpu_adam == pytest.approx(7e9 / ADAM_HOST)
    assert step_cost(work(offload_optimizer="cpu", pinned=False), r).pcie == pytest.approx(2 * cpu.pcie)
    assert step_cost(work(checkpointing=False), r).recompute == 0
    half = step_cost(work(stage=3, offload_optimizer="cpu", ratio=0.5), r)
    assert half.cpu_adam == pytest.approx(step_cost(work(stage=3, offload_optimizer="cpu"), r).cpu_adam / 2)


def test_links_come_from_the_facts() -> None:
    gpu = Gpu(index=0, name="NVIDIA GeForce RTX 4090", pcie_generation=1, pcie_generation_max=4, pcie_width=8,
              pcie_width_max=16, nvlink_peers=())  # fmt: skip
    facts = Facts(gpus=(gpu, replace(gpu, index=1)))
    r = rates(facts, ranks=2, ranks_per_node=2)
    whole = rates(
        Facts(gpus=tuple(replace(g, pcie_width=16) for g in facts.gpus or ())), ranks=2, ranks_per_node=2
    )
    assert whole.pcie == pytest.approx(2 * r.pcie) and not r.nvlink
    assert any("8 of 16" in s for s in r.sources)
    assert rates(describe("8xA100-80G"), ranks=8, ranks_per_node=8).nvlink
    two = rates(describe("8xA100-80G", nodes=2), ranks=16, ranks_per_node=8)
    assert two.network is not None and any("assumed" in s for s in two.sources)


def test_an_unknown_card_gives_relative_figures_only() -> None:
    r = rates(describe("8x80GiB"), ranks=8, ranks_per_node=8)
    cost = step_cost(work(), r)
    assert r.compute is None and cost.compute is None and cost.to_json()["relative_only"]
    assert any("not known" in s for s in r.sources)


def test_the_tables_name_known_cards() -> None:
    keys = {c.key for c in CARDS}
    assert set(TFLOPS) == keys and set(NVLINK) <= keys
    assert find_card("A100-80G").key in TFLOPS


def test_the_order_of_placements_respects_what_they_contain() -> None:
    for facts in (machine(1, 24, 64), machine(8, 80, 512), machine(8, 80, 512, nodes=4)):
        for how in (Training(), Training(lora_rank=16)):
            for total in (None, 1024):
                search = Search(
                    load_model("llama-2-7b"), how, facts, release=RELEASE, world_size=None, goal="fit",
                    checkpointing=None, global_batch=total,
                )  # fmt: skip
                order = search.ladder()
                for i, a in enumerate(order):
                    for b in order[i + 1 :]:
                        contained = (
                            b.stage <= a.stage
                            and b.optimizer in ("none", a.optimizer)
                            and b.param in ("none", a.param)
                        )
                        assert not contained, (a, b)


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_verb_says() -> None:
    """Words, not figures: those move with every refinement of the estimate (``plan_cases.py --write``)."""
    from tests.tools.plan_cases import COMMANDS, PAGES, block, written

    if not PAGES["en"].exists():
        pytest.skip("the documentation is not here")

    def words(text: str) -> list[str]:
        return re.sub(r"[\d.]+", "0", text).split()

    for page in PAGES.values():
        blocks = written(page)
        assert [b.partition("\n")[0][2:] for b in blocks] == list(COMMANDS)
        assert all(len(b.splitlines()) > 2 for b in blocks)
    for shown in written(PAGES["en"])[:4]:
        command = shown.partition("\n")[0][2:]
        assert words(block(command)) == words(shown), command


def test_ranks_that_share_a_row_count_once() -> None:
    p = plan(
        load_model("llama-2-7b"),
        Training(sequence_parallel=4, seq=16384),
        describe("8xA100-80G", ram="512GiB"),
        release=RELEASE,
        global_batch=6,
    )
    assert p.config and p.config["sequence_parallel_size"] == 4 and p.global_batch == 6
    assert p.config["train_micro_batch_size_per_gpu"] * p.config["gradient_accumulation_steps"] * 2 == 6
    assert p.cost and p.cost.samples == 6
    with pytest.raises(DstuiError):
        plan(load_model("llama-2-7b"), Training(sequence_parallel=3), describe("8x80GiB"), release=RELEASE)


MEASURED: list[tuple[dict[str, Any], float]] = [
    ({"stage": 0}, 0.155),
    ({"stage": 2}, 0.215),
    ({"stage": 2, "checkpointing": False}, 0.145),
    ({"stage": 3}, 0.42),
    ({"stage": 2, "offload_optimizer": "cpu"}, 0.77),
    ({"stage": 3, "offload_optimizer": "cpu"}, 1.41),
    ({"stage": 2, "ranks": 2}, 0.14),
    ({"stage": 3, "ranks": 2}, 0.315),
    ({"stage": 2, "ranks": 2, "offload_optimizer": "cpu"}, 0.63),
    ({"stage": 1, "ranks": 2, "accumulation": 4}, 0.42),
    ({"stage": 2, "micro_batch": 4, "seq": 2048, "checkpointing": False}, 0.2),
    (
        {
            "stage": 2, "ranks": 2, "seq": 2048, "layers": 32, "hidden": 4096,
            "params": 6_738_415_616, "trained": 6_738_415_616,
        },
        0.4,
    ),
]  # fmt: skip
"""Seconds of a steady step on H200: a Llama of 1.24e9 parameters (16 layers, 1024 tokens), the last one of 7B; torch
2.11, DeepSpeed 0.19.8, cards of their own."""


def test_the_cost_model_beside_measured_steps() -> None:
    said = []
    for changes, measured in MEASURED:
        base = work(params=1_236_000_000, trained=1_236_000_000, layers=16, hidden=2048, seq=1024, ranks=1)
        w = replace(base, **changes)
        w = replace(w, ranks_per_node=w.ranks)
        r = rates(describe(f"{w.ranks}xH200"), ranks=w.ranks, ranks_per_node=w.ranks)
        said.append(step_cost(w, r).total)
        assert 0.5 * measured <= said[-1] <= 1.15 * measured, changes
    apart = [
        (a, b) for a in range(len(said)) for b in range(len(said)) if MEASURED[a][1] > 1.6 * MEASURED[b][1]
    ]
    assert apart and all(said[a] > said[b] for a, b in apart)
