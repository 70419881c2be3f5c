"""A measured run beside its prediction: files as the probe and the supervisor leave them, every figure checked."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.estimate.inputs import Training
from dstui.estimate.memory import estimate
from dstui.estimate.model import load_model
from dstui.estimate.subject import subject
from dstui.facts.model import Facts, GpuProcess
from dstui.plain.trial import lines, trial_spec
from dstui.runs import calibration, measured, store, trial
from dstui.runs.samples import Peaks
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir
from dstui.runs.view import RunView
from dstui.units import GiB
from tests.unit.test_runs_calibration import CONFIG, FACTS, RELEASE, SHAPE

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1000, "tie_word_embeddings": False, "max_position_embeddings": 512,
    "_name_or_path": "tiny",
}  # fmt: skip
SEEN: dict[str, Any] = {
    "loaded_dtype": "bfloat16", "loaded_on": "cpu", "zero_init": False, "trainer": True, "class": "LlamaForCausalLM",
    "params": 9_000_000, "trainable": 9_000_000, "config": LLAMA, "attention": "sdpa", "quant": "none", "micro_batch": 2,
    "accumulation": 1, "stage": 2, "optimizer": "FusedAdam", "fused": False, "param_groups": 2, "world_size": 2,
    "torch_version": "2.9.0+cu130", "deepspeed_version": RELEASE, "expandable": False, "checkpointing": True, "rows": 2,
    "seq": 384,
}  # fmt: skip


def make(
    facts: Facts = FACTS,
    seen: dict[str, Any] | None = None,
    outcome: str = "finished",
    kind: str = "trial",
    steps: int = 3,
    probe: bool = True,
    **more: Any,
) -> RunDir:
    run = store.create(
        {
            "kind": kind, "facts": facts.to_json(), "devices": ["0", "1"], "world_size": 2, "ranks_per_node": 2,
            "versions": {"torch": "2.9.0+cu130", "deepspeed": RELEASE}, "spec": {"measure": 3 if probe else None},
            "prediction": None, "subject": None, "command": [], "host": "h", "boot_id": None, "pid_namespace": None,
            "supervisor": {"pid": 1, "start_time": -5}, "launcher": {"pid": 1, "start_time": -5}, **more,
        },
        json.dumps(CONFIG),
    )  # fmt: skip
    if probe:
        (run.path / "probe").mkdir()
        for rank in (0, 1):
            write_rank(run, rank, SEEN if seen is None else seen, steps)
    store.write_json(run.exit_path, {"schema_version": 1, "outcome": outcome, "ended_at": time.time()})
    return run


def write_rank(run: RunDir, rank: int, seen: dict[str, Any], steps: int) -> None:
    G = GiB  # noqa: N806

    def phase(name: str, allocated: float, rss: float) -> dict[str, Any]:
        a = int(allocated * G)
        return {"event": "phase", "phase": name, "rss_peak": int(rss * G), "allocated": a, "reserved": a + G // 4,
                "reserved_now": a, "card": a + 2 * G, "card_before": G // 2, "pinned": 0}  # fmt: skip

    rows = [
        {"event": "start"}, phase("load", 0.1, 2), phase("init", 0.2, 3), phase("forward", 0.4, 3),
        phase("backward", 0.5 + rank / 8, 3.5), phase("step", 0.3, 3), phase("between", 0.2, 1),
        *({"event": "step", "step": n, "seconds": 0.5} for n in range(1, steps + 1)),
        {"event": "model", **seen}, {"event": "end", "reason": "steps", "steps": steps},
    ]  # fmt: skip
    path = run.path / "probe" / f"rank-{rank}.jsonl"
    path.write_text("".join(json.dumps({"t": 1.0, **r}) + "\n" for r in rows))


def test_host_memory_is_that_of_the_fullest_node() -> None:
    run = make(outcome="failed")
    for rank, node in ((0, "0"), (1, "1")):
        path = run.path / "probe" / f"rank-{rank}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["node"] = node
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = measured.read_probe(run)
    assert found is not None
    assert found.host == 7 * GiB // 2, "one rank on each node: their sums are not added"
    assert found.phases["load"]["host"] == 2 * GiB


def test_what_ran_is_what_is_predicted() -> None:
    run = make()
    result = trial.settle(run)
    assert result is not None and result.shape is not None and result.training is not None
    assert (result.shape.family, result.shape.layers, result.shape.exact) == ("llama", 4, True)
    t = result.training
    assert (t.micro_batch, t.seq, t.checkpointing, t.loop, t.load_dtype) == (2, 384, True, "hf", "bfloat16")
    assert (t.optimizer, t.param_groups, t.load_on, t.attention) == ("fusedadam", 2, "cpu", "sdpa")
    again = estimate(result.shape, t, CONFIG, FACTS, release=RELEASE, world_size=2, changes=False)
    assert result.estimate == again
    m = result.measured
    assert (m.ranks, m.steps, m.allocated, m.reserved) == (2, 3, 5 * GiB // 8, 7 * GiB // 8)
    assert m.overhead == 2 * GiB and m.device == 5 * GiB // 8 + GiB // 4 + 2 * GiB
    assert m.host == 7 * GiB and m.pinned == 0

    data = trial.read_result(run)
    assert data == json.loads(json.dumps(result.to_json()))
    assert "config" not in data["measured"]["seen"]
    row = data["memory"]["allocated"]
    assert again.gpu.allocated is not None
    assert row["predicted"] == again.gpu.allocated.to_json()
    assert row["ratio"] == m.allocated / again.gpu.allocated.expected
    by_phase = {p["phase"]: p for p in data["phases"]}
    assert by_phase["backward"]["measured"]["allocated"] == 5 * GiB // 8
    assert by_phase["backward"]["predicted"] == next(
        p.total for p in again.gpu.phases if p.phase == "backward"
    )

    known = calibration.load(FACTS, result.shape)
    assert known is not None and known.records[0].run == run.id and known.records[0].seen
    same = estimate(result.shape, t, CONFIG, FACTS, release=RELEASE, world_size=2, calibration=known)
    assert same.gpu.allocated is not None and same.gpu.allocated.expected == m.allocated
    assert any(f"corrected by trial {run.id}" in a for a in same.assumptions)

    first = trial.path_of(run).read_bytes()
    trial.settle(run)  # by somebody else, who came as well
    assert trial.path_of(run).read_bytes() == first
    assert len(list(calibration.folder().glob("*.json"))) == 1


def test_the_result_as_text_fits_80_columns() -> None:
    run = make()
    result = trial.settle(run)
    assert result is not None
    text = lines(result.to_json())
    assert max(map(len, text)) <= 80
    whole = "\n".join(text)
    assert "3 steps measured on 2 ranks" in whole and "later estimates" in whole
    (row,) = [r for r in text if r.strip().startswith("allocated")]
    assert "0.62 GiB" in row and "%" in row
    assert "between" not in whole  # nowhere the peak


def test_what_happens_between_is_shown_where_it_is_the_peak() -> None:
    run = make()
    path = run.path / "probe" / "rank-0.jsonl"
    with path.open("a") as f:
        f.write(json.dumps({"event": "phase", "phase": "between", "rss_peak": 9 * GiB}) + "\n")
    result = trial.settle(run)
    assert result is not None and result.measured.host == round(12.5 * GiB)
    assert any(r.strip().startswith("between") for r in lines(result.to_json()))


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"outcome": "stopped"}, True),
        ({"outcome": "failed"}, False),
        ({"steps": 1}, False),
        ({"facts": dataclasses.replace(FACTS, driver=None)}, False),
    ],
)
def test_only_whole_runs_on_known_machines_teach(change: dict[str, Any], kept: bool) -> None:
    result = trial.settle(make(**change))
    assert result is not None and bool(result.stored) == kept
    assert result.measured.allocated is not None  # shown in any case
    assert calibration.folder().exists() == kept


def test_a_troubled_probe_teaches_nothing() -> None:
    run = make()
    with (run.path / "probe" / "rank-1.jsonl").open("a") as f:
        f.write(json.dumps({"event": "trouble", "where": "step", "error": "ValueError: x"}) + "\n")
    result = trial.settle(run)
    assert (
        result is not None and result.stored is None and result.measured.troubles == ("step: ValueError: x",)
    )


def test_a_home_that_cannot_be_written_still_shows_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "file"))
    result = trial.settle(run)
    assert result is not None and result.stored is None and trial.read_result(run) is not None


def test_a_model_of_ones_own_is_known_by_its_size_or_by_name() -> None:
    seen = {k: v for k, v in SEEN.items() if k != "config"} | {"class": "MyNet"}
    result = trial.settle(make(seen=seen))
    assert result is not None and result.shape is not None
    assert (result.shape.name, result.shape.params, result.shape.family) == ("MyNet", 9_000_000, None)
    named = trial.settle(make(seen=seen, subject=subject(SHAPE, Training(seq=77))))
    assert named is not None and named.shape == SHAPE and named.training is not None
    assert named.training.seq == 384  # what was seen wins ...
    stated = trial.settle(make(seen=seen, subject={**subject(SHAPE, Training(seq=77)), "stated": ["seq"]}))
    assert (
        stated is not None and stated.training is not None and stated.training.seq == 77
    )  # ... over what was assumed
    assert trial.settle(make(seen={})).problem  # type: ignore[union-attr]


def test_a_run_that_goes_on_or_was_not_asked_about_is_left_alone() -> None:
    run = make()
    run.exit_path.unlink()
    assert trial.settle(run) is None
    assert trial.settle(make(probe=False, kind="run")) is None
    assert trial.settle(make(probe=False)) is None  # a trial whose probe was never loaded


def test_a_watched_run_teaches_by_what_was_sampled() -> None:
    asked = subject(SHAPE, Training(micro_batch=2, seq=1024, hold_logits=False))
    facts = dataclasses.replace(
        FACTS, gpus=tuple(dataclasses.replace(g, processes=()) for g in FACTS.gpus or ())
    )

    def sampled(facts: Facts) -> trial.Result:
        run = make(facts=facts, probe=False, kind="run", subject=asked)
        peaks = Peaks({0: 60 * GiB, 1: 61 * GiB}, {0: 3 * GiB, 1: 4 * GiB})
        (run.path / "samples" / "peaks.json").write_text(json.dumps(peaks.to_json()))
        run.out_log.write_text(
            "[2026-11-29 22:29:49,202] [INFO] [logging.py:123:log_dist] [Rank 0] step=9, skipped=0, lr=[0.1], mom=[0]\n"
            "[2026-11-29 22:29:49,202] [INFO] [timer.py:264:stop] epoch=0/micro_step=6/global_step=9, "
            "RunningAvgSamplesPerSec=28.1, CurrSamplesPerSec=28.1, MemAllocated=1.5GB, MaxMemAllocated=50.0GB\n"
        )
        result = trial.settle(run)
        assert result is not None
        return result

    result = sampled(facts)
    m = result.measured
    assert (m.by, m.steps, m.device, m.host, m.reserved) == ("samples", 9, 61 * GiB, 7 * GiB, None)
    assert m.allocated == 50 * GiB
    known = calibration.load(facts, SHAPE)
    assert known is not None and not known.records[0].seen and known.records[0].kind == "run"
    busy = dataclasses.replace(
        facts,
        gpus=tuple(
            dataclasses.replace(g, processes=(GpuProcess(7, kind="compute"),)) for g in facts.gpus or ()
        ),
    )
    assert sampled(busy).measured.device is None  # somebody else's share is in it


def test_the_monitor_shows_the_probes_figures() -> None:
    run = make(prediction=None)
    trial.settle(run)
    view = RunView(run)
    try:
        shot = view.poll()
    finally:
        view.close()
    found = {c.what: c for c in shot.comparisons}
    assert found["allocated"].measured == 5 * GiB // 8 and found["reserved"].measured == 7 * GiB // 8
    assert found["host"].measured == 7 * GiB
    assert shot.phase_memory["backward"]["allocated"] == 5 * GiB // 8 and shot.prediction is not None


def test_the_bundled_gpt_is_known_by_its_arguments(tmp_path: Path) -> None:
    from dstui.examples import tiny_gpt_script

    spec = RunSpec(str(tiny_gpt_script()), ("--hidden", "512", "--seq=128", "--checkpointing"))
    made = trial_spec(spec, steps=4)
    assert (made.trial, made.measure, made.name) == (True, 4, "trial")
    assert made.subject is not None
    shape, training = made.subject["shape"], made.subject["training"]
    assert (shape["hidden"], shape["heads"], shape["layers"]) == (512, 8, 4)
    assert (training["seq"], training["checkpointing"]) == (128, True)
    plain = trial_spec(RunSpec(str(tiny_gpt_script())), steps=1)
    assert plain.subject is not None and plain.subject["shape"]["params"] == load_model("tiny-gpt").params
    other = trial_spec(RunSpec(str(tmp_path / "tiny_gpt.py")), steps=1)
    assert other.subject is None


@pytest.mark.parametrize(
    ("phases", "said"),
    [(("load",), "without a DeepSpeed engine"), (("load", "init", "forward"), "first optimizer step")],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_trial_without_a_step_could_not_do_it(
    phases: tuple[str, ...], said: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(steps=0)
    for rank in (0, 1):
        path = run.path / "probe" / f"rank-{rank}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [r for r in rows if r["event"] in ("start", "end") or r.get("phase") in phases]
        path.write_text("".join(json.dumps(r) + "\n" for r in kept))
    assert main(["trial", "--show", run.id, *(["--json"] if as_json else [])]) == 2
    seen = capsys.readouterr()
    assert said in seen.err and "rank" in seen.out
    if as_json:
        assert json.loads(seen.out)["measured"]["steps"] == 0


def test_a_run_on_two_nodes_is_predicted_on_two_nodes() -> None:
    """The facts are those of the node that starts it; ranks beyond its cards are on the others."""
    run = make(world_size=4, nodes=2)
    result = trial.settle(run)
    assert result is not None and result.estimate is not None and result.training is not None
    assert trial.used_facts(run.manifest).nodes == 2
    assert result.estimate.verdict in ("fits", "tight")
