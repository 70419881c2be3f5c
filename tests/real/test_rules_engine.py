"""What the rules claim about start and step, proven by real engines on CPU (one rank, gloo).

One process drives all cases: a config, the rule that must speak, and how the engine must end.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui.rules.diagnostic import Severity
from tests.rules_tools import check

pytestmark = pytest.mark.real
pytest.importorskip("deepspeed")

B: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
"""torch's own AdamW, with offload too: DeepSpeed's would have to be compiled first."""


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


STOPS: list[tuple[str, str, dict[str, Any], str]] = [
    # rule, phase in which the engine stops, config, words of DeepSpeed's error
    ("DS703", "init", {**B, **optimizer("AdamWW", lr=1e-3)}, "not a supported DeepSpeed Optimizer"),
    ("DS703", "init", {**B, **optimizer("sgd", lr=1e-3)}, "not a supported DeepSpeed Optimizer"),
    (
        "DS704",
        "init",
        {**B, **optimizer("AdamW", lr=1e-3, torch_adam=True, weight_decai=0.1)},
        "weight_decai",
    ),
    ("DS705", "init", {**B, **ADAM, **scheduler("WarmUpLR")}, "does not recognize LR scheduler"),
    ("DS706", "init", {**B, **ADAM, "scheduler": {"type": "WarmupLR"}}, "must be a mapping"),
    ("DS706", "init", {**B, **ADAM, **scheduler("WarmupDecayLR", warmup_num_steps=2)}, "total_num_steps"),
    ("DS707", "init", {**B, **ADAM, **scheduler("WarmupLR", warmup_steps=2)}, "warmup_steps"),
    ("DS708", "init", {**B, **ADAM, **scheduler("WarmupLR", warmup_num_steps=0)}, "positive integer"),
    ("DS708", "init", {**B, **ADAM, **scheduler("WarmupLR", warmup_num_steps=100.5)}, "positive integer"),
    ("DS709", "init", {**B, **optimizer("SGD", lr=0.1), **zero(stage=2)}, "untested ZeRO Optimizer"),
    (
        "DS710",
        "init",
        {**B, **optimizer("AdamW", lr=1e-3, torch_adam=True, max_grad_norm=1.0)},
        "max_grad_norm",
    ),
    ("DS802", "init", {**B, **optimizer("OneBitAdam", lr=1e-3)}, "not a supported DeepSpeed Optimizer"),
    ("DS141", "init", {**B, **optimizer("AdamW", lr="auto", torch_adam=True)}, "not supported between"),
    ("DS142", "step", {**B, **ADAM, "gradient_clipping": "auto", **zero(stage=1)}, "not supported between"),
    ("DS142", "step", {**B, **ADAM, "steps_per_print": "auto"}, "unsupported operand"),
    ("DS126", "step", {**B, **ADAM, "gradient_clipping": "1.0", **zero(stage=1)}, "not supported between"),
    ("DS126", "step", {**B, **ADAM, "steps_per_print": "10"}, "unsupported operand"),
    ("DS601", "init", {**B, **ADAM, **zero(stage=1, allgather_bucket_size=200000001)}, "must be a multiple"),
    (
        "DS208",
        "init",
        {**B, **ADAM, **zero(stage=1, legacy_stage1=True)},
        "deprecated version of ZeRO Stage 1",
    ),
    ("DS210", "init", {**B, **ADAM, "prescale_gradients": True, **zero(stage=2)}, "pre-scale gradients"),
    ("DS210", "init", {**B, **ADAM, "gradient_predivide_factor": 2.0, **zero(stage=3)}, "predivide_factor"),
    (
        "DS211",
        "init",
        {**B, **ADAM, **zero(stage=3, zero_quantized_gradients=True, reduce_scatter=False)},
        "reduce_scatter",
    ),
    ("DS213", "init", {**B, **ADAM, **zero(stage=2, compute_grad_norm=False)}, "gradient_clipping=0"),
    ("DS304", "init", {**B, **ADAM, **zero(stage=3, offload_optimizer={"device": "nvme"})}, ""),
    (
        "DS408",
        "init",
        {**B, **ADAM, "managed_gradient_accumulation": False, **zero(stage=1, overlap_comm=True)},
        "overlap_comm",
    ),
    (
        "DS718",
        "init",
        {**B, **ADAM, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "unsupported mix",
    ),
    ("DS718", "init", {**B, **ADAM, "data_types": {"grad_accum_dtype": "fp33"}, **zero(stage=1)}, ""),
    (
        "DS720",
        "init",
        {**B, **optimizer("Muon", lr=0.02, torch_adam=True), **zero(stage=3)},
        "Muon and reduce scatter",
    ),
    (
        "DS721",
        "init",
        {**B, **ADAM, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **zero(stage=1)},
        "Master weights feature requires",
    ),
    (
        "DS721",
        "init",
        {**B, **ADAM, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **zero(stage=3)},
        "Master weights feature requires",
    ),
    (
        "DS722",
        "init",
        {**B, **ADAM, "torch_autocast": {"enabled": True}, **zero(stage=3, zero_quantized_weights=True)},
        "torch autocast",
    ),
    (
        "DS727",
        "init",
        {**B, **ADAM, "bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}, **zero(stage=1)},
        "conflicts with the enabled precision",
    ),
    (
        "DS213",
        "init",
        {
            **B,
            **ADAM,
            "bf16": {"enabled": True},
            "gradient_clipping": 0,
            "data_types": {"grad_accum_dtype": "fp32"},
            **zero(stage=1, compute_grad_norm=False),
        },
        "does not support ZeRO Stage 1 with BF16",
    ),
    (
        "DS613",
        "init",
        {**B, **ADAM, "expert_parallel": {"enabled": True, "comm_backend": "deepep"}},
        "comm_max_tokens_per_rank",
    ),
    (
        "DS613",
        "init",
        {**B, **ADAM, "expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}},
        "expert_tensor_parallel_size",
    ),
    (
        "DS214",
        "init",
        {
            **B,
            **ADAM,
            **zero(
                stage=2,
                offload_optimizer={"device": "cpu"},
                zenflow={"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            ),
        },
        "Select interval",
    ),
]

RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # rule, config that trains although something in it is not what it seems, what the engine then holds
    ("DS202", {**B, **ADAM, **zero(stage="auto")}, {"stage": 0}),
    ("DS203", {**B, **ADAM, **zero(overlap_comm=True)}, {"stage": 0}),
    ("DS111", {**B, **ADAM, "zero_optimisation": {"stage": 3}}, {"stage": 0}),
    ("DS110", {**B, **ADAM, "gradient_clipp1ng": 0.5}, {"clipping": 1.0}),
    ("DS711", {**B, **ADAM}, {"clipping": 1.0}),
    ("DS144", {**B, **ADAM, "bf16": {"enabled": "auto"}}, {"dtype": "torch.float32"}),
    ("DS132", {**B, **ADAM, "bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, {"dtype": "torch.float32"}),
    ("DS603", {**B, **ADAM, "comms_logger": {"enabled": False}}, {"comms_logger": True}),
    ("DS206", {**B, **ADAM, **zero(stage=3, zero_hpz_partition_size=16)}, {"stage": 3}),
    ("DS207", {**B, **ADAM, **zero(stage=2, zero_quantized_weights=True)}, {"stage": 2}),
    ("DS204", {**B, **ADAM, **zero(stage=2, offload_param={"device": "cpu"})}, {"stage": 2}),
    ("DS302", {**B, **ADAM, **zero(stage=2, offload_optimizer={"pin_memory": False})}, {"basic_optimizer": "AdamW"}),
    ("DS404", {**B, **ADAM, "gradient_accumulation_steps": 2.5}, {"accumulation": 2.5}),
    ("DS732", {**B, **ADAM, "bf16": {"enabled": True, "check_grad_overflow": True}, **zero(stage=3)}, {"stage": 3}),
    ("DS219", {**B, **ADAM, **zero(stage=2, leaf_module={"classes": ["X"]})}, {"stage": 2}),
    ("DS724", {**B, **ADAM, "vocabulary_size": 50257}, {"basic_optimizer": "AdamW"}),
    ("DS725", {**B, **optimizer("SGD", lr=0.1), "zero_allow_untested_optimizer": True, **zero(stage=2)}, {"stage": 2}),
    ("DS618", {**B, **ADAM, "pipeline": {"stages": 2}, **zero(stage=2)}, {"stage": 2}),
    ("DS715", {**B, **optimizer("AdamW", lr=2e-5, torch_adam=True), **scheduler("WarmupDecayLR", total_num_steps=9, warmup_num_steps=2)}, {"max_lrs": [0.001]}),
    ("DS714", {**B, **optimizer("Adam", lr=1e-3, torch_adam=True, weight_decay=0.1)}, {"basic_optimizer": "AdamW"}),
    ("DS301", {**B, **ADAM, **zero(stage=0, offload_optimizer={"device": "cpu"})}, {"basic_optimizer": "AdamW"}),
    ("DS303", {**B, **ADAM, **zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "NVME"})}, {"stage": 2}),
    ("DS308", {**B, **ADAM, **zero(stage=2, offload_optimizer={"device": "cpu", "super_offload": True})}, {"basic_optimizer": "AdamW"}),
]  # fmt: skip

CLIENT: list[tuple[dict[str, Any], str]] = [
    ({**B, **zero(stage=2, offload_optimizer={"device": "cpu"})}, "init"),
    (
        {**B, "zero_force_ds_cpu_optimizer": False, **zero(stage=2, offload_optimizer={"device": "cpu"})},
        "done",
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    nvme = str(tmp_path_factory.mktemp("nvme") / "never")
    for i, (_rule, _phase, config, _words) in enumerate(STOPS):
        cases.append({"name": f"stop-{i}", "config": config})
    for i, (rule, config, _facts) in enumerate(RUNS):
        text = json.dumps(config).replace('"NVME"', json.dumps(nvme))
        steps = 8 if rule == "DS404" else 2
        cases.append({"name": f"run-{i}", "config": json.loads(text), "steps": steps})
    for i, (config, _phase) in enumerate(CLIENT):
        cases.append({"name": f"client-{i}", "config": config, "client": "adamw"})
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_cases.py"))],
        input=json.dumps(cases).encode(),
        capture_output=True,
        timeout=200,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr.decode()[-2000:]
    found = {a["name"]: a for a in answers}
    found["nvme"] = {"exists": Path(nvme).exists()}
    return found


@pytest.mark.parametrize("i", range(len(STOPS)), ids=lambda i: f"{STOPS[i][0]}-{i}")
def test_an_error_stops_the_engine_when_the_rule_says(i: int, outcomes: dict[str, dict[str, Any]]) -> None:
    rule, phase, config, words = STOPS[i]
    outcome = outcomes[f"stop-{i}"]
    assert outcome["phase"] == phase, outcome
    assert words in outcome["error"]
    report = check(config)
    assert report.verdict == "accepted"
    said = [f for f in report.findings if f.code == rule]
    assert said
    assert said[0].severity is Severity.ERROR
    assert said[0].when == phase


@pytest.mark.parametrize("i", range(len(RUNS)), ids=lambda i: f"{RUNS[i][0]}-{i}")
def test_what_has_no_effect_or_another_one_still_trains(i: int, outcomes: dict[str, dict[str, Any]]) -> None:
    rule, config, facts = RUNS[i]
    outcome = outcomes[f"run-{i}"]
    assert outcome["phase"] == "done", outcome
    for name, value in facts.items():
        assert outcome["facts"][name] == value
    report = check(config)
    assert report.verdict == "accepted"
    assert rule in {f.code for f in report.findings}
    assert not any(f.severity is Severity.ERROR for f in report.findings)


def test_nvme_at_stage_2_never_touches_the_path(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["nvme"] == {"exists": False}


@pytest.mark.parametrize("i", range(len(CLIENT)))
def test_script_optimizer_with_offload(i: int, outcomes: dict[str, dict[str, Any]]) -> None:
    config, phase = CLIENT[i]
    outcome = outcomes[f"client-{i}"]
    assert outcome["phase"] == phase, outcome
    said = "DS310" in {f.code for f in check(config).findings}
    assert said == (phase == "init")
