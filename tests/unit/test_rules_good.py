"""No false alarm on public configs: every file that a release accepts and a rule still calls wrong is listed here.

Accepted means parsed. The reason beside each is why the rule is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dstui.config import schema
from dstui.rules.diagnostic import FileReport, Severity
from dstui.rules.engine import Context, Options, check_path

ONE_BIT = (
    "0.19.7 removed the 1-bit optimizers: parses, then 'is not a supported DeepSpeed Optimizer' at start"
)
RIGHT = {
    ("zero3_fp16.json", "DS802"): ONE_BIT,
    ("onebitadam_bsz96_config.json", "DS802"): ONE_BIT,
    ("01adam_config_seq512_mpi_ethernet.json", "DS802"): ONE_BIT,
    ("onebitadam_config_seq128_mpi_infiniband.json", "DS802"): ONE_BIT,
    ("onebitlamb_config_seq512_mpi_ethernet.json", "DS802"): ONE_BIT,
    ("onebitlamb_config_seq128_mpi_ethernet.json", "DS802"): ONE_BIT,
    ("onebitlamb_config_seq512_mpi_infiniband.json", "DS802"): ONE_BIT,
    ("onebitlamb_config_seq128_mpi_infiniband.json", "DS802"): ONE_BIT,
    ("onebitlamb_config_seq128_nccl.json", "DS802"): ONE_BIT,
    ("zero3_fp16.json", "DS803"): "ZeroOneAdam at stage 3: '0/1 Adam is not compatible with ZeRO' at start",
    ("hybrid_engine_config.json", "DS204"): "offload_param to cpu in a block with stage 0: never read",
    ("ds_config_zero3_model_only.json", "DS144"): "both precisions auto without anybody to fill them: fp32",
}
OLDER = {
    "DS113": "aio.intra_op_parallelism came with 0.16.4 (thread_count before), aio.use_gds with 0.15.0",
    "DS115": "sequence_parallel_size is read from 0.15.0",
    "DS142": 'gradient_clipping "auto" without anybody to fill it: TypeError at the first step',
    "DS145": '"bfloat16": the trainer fills only "bf16", and to 0.17.0 any string switches it on',
    "DS610": "sequence_parallel_size 2 at one rank",
    "DS617": "sequence_parallel_size is looked for in the path of the file to 0.18.5",
    "DS733": "wall_clock_breakdown prints nothing on 0.17.6",
    "DS812": "to 0.18.9 the last micro batch of bf16 with fp32 accumulation is not averaged",
    "DS814": "to 0.17.6 ranks may disagree about an fp16 overflow at stage 1",
    "DS804": "compile.{backend,kwargs,enabled} are not read from 0.14.4 to 0.16.5",
    "DS805": "0.15.0-0.18.9 lose gradients with offload at stage 1/2 and accumulation",
    "DS806": "bf16 at stage 0 trained wrongly in these releases",
}
"""What is rightly said of files that are good in 0.19: rule -> reason, for releases before it."""
ARGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 5e-5,
    "max_grad_norm": 1.0,
    "bf16": True,
    "warmup_steps": 10,
    "hidden_size": 4096,
    "num_training_steps": 1000,
}


def alarms(report: FileReport) -> set[tuple[str, str]]:
    return {
        (Path(report.path).name, f.code)
        for f in report.findings
        if f.severity.rank <= Severity.NO_EFFECT.rank
    }


@pytest.mark.parametrize("release", {r.rpartition(".")[0]: r for r in schema.releases()}.values())
@pytest.mark.parametrize("engine", ["deepspeed", "hf"])
def test_no_false_alarm(release: str, engine: str, shared: Path) -> None:
    files = [p for p in sorted(shared.glob("corpus/**/*.json")) if p.name != "verdicts.json"]
    accepted = 0
    wrong = []
    for path in files:
        if engine == "hf" and '"auto"' not in path.read_text():
            continue
        context = Context(
            release,
            engine="hf" if engine == "hf" else "deepspeed",
            world_size=8 if engine == "hf" else None,
            args=ARGS if engine == "hf" else None,
        )
        report = check_path(str(path), Options(context))
        if report.verdict != "accepted":
            continue
        accepted += 1
        wrong += [
            a
            for a in alarms(report)
            if not any(a[0].endswith(name) and a[1] == code for name, code in RIGHT)
            and not (a[1] in OLDER and schema.version_key(release) < (0, 19))
        ]
    assert not wrong
    assert accepted >= 40
    if engine == "hf":
        assert all(
            (shared / "corpus" / "seed" / n).is_file()
            for n in ("zero2_offload_auto.json", "zero3_offload_auto.json")
        )


def test_the_two_seed_files_are_accepted_and_their_old_names_explained(shared: Path) -> None:
    for name in ("zero2_offload_auto.json", "zero3_offload_auto.json"):
        path = str(shared / "corpus" / "seed" / name)
        report = check_path(path, Options(Context("0.19.8", engine="hf", world_size=4, args=ARGS)))
        assert report.verdict == "accepted"
        old = {f.pointer for f in report.findings if f.code == "DS130"}
        assert "/bfloat16" in old
        assert ("/zero_optimization/stage3_gather_fp16_weights_on_model_save" in old) == ("zero3" in name)
        assert not alarms(report)
