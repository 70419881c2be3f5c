"""The engine: a broken rule is a finding, missing facts are listed, verdict and findings never contradict."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.config import schema
from dstui.config.document import Document
from dstui.facts.model import Facts, Gpu
from dstui.rules import registry
from dstui.rules.diagnostic import Severity, Skipped
from dstui.rules.engine import Context, Options, check_document, check_path, folder_state, infer_world_size
from dstui.rules.nearest import distance, nearest
from dstui.rules.registry import Hit, Page, Rule, all_rules
from dstui.rules.subject import Subject
from tests.rules_tools import check, codes, context

WRONG = Path(__file__).parent.parent / "data" / "wrong"


def _broken(s: Subject) -> Iterator[Hit]:
    yield Hit("/train_batch_size", "said before it broke")
    raise ZeroDivisionError("oops")


def test_a_crashing_rule_is_a_finding_and_the_others_still_speak() -> None:
    page = Page("a.", "b.", "{}", "c.", "d/e")
    broken = Rule("DS299", "broken", Severity.ERROR, "parse", page, _broken)
    document = Document.parse('{"train_batch_size": 8, "comms_logger": {"enabled": false}}')
    report = check_document(document, Context("0.19.8"), rules=(broken, *all_rules()))
    crash = next(f for f in report.findings if f.code == "DS100")
    assert "DS299" in crash.message
    assert "ZeroDivisionError: oops" in crash.message
    assert {"DS299", "DS603"} <= set(codes(report))


def test_what_a_rule_needs_is_listed_when_it_is_missing() -> None:
    report = check({"train_batch_size": 8})
    assert Skipped("DS702", "facts.gpus") in report.skipped
    assert Skipped("DS902", "facts") in report.skipped
    offload = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    assert Skipped("DS502", "model") in check(offload).skipped
    nvme = {"device": "nvme", "nvme_path": "/somewhere"}
    report = check({"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": nvme}})
    assert Skipped("DS504", "facts.host.memlock_soft") in report.skipped
    assert Skipped("DS305", "facts.storage") in report.skipped


def test_world_size_order() -> None:
    text = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'
    document = Document.parse(text)
    two = Facts(gpus=(Gpu(0), Gpu(1)))
    for where, expected in (
        (Context("0.19.8", world_size=3, facts=two), (3, "option")),
        (Context("0.19.8", facts=two), (2, "facts")),
        (Context("0.19.8"), (8, "batch")),
    ):
        report = check_document(document, where)
        assert (report.world_size, report.world_size_from) == expected
    assert (
        check_document(Document.parse('{"train_batch_size": 8}'), Context("0.19.8")).world_size_from
        == "default"
    )


@pytest.mark.parametrize(
    ("data", "ranks"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8),
        (
            {"train_batch_size": 63, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            None,
        ),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, None),
        (
            {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            None,
        ),
        (
            {"train_batch_size": "64", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            None,
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 0, "gradient_accumulation_steps": 4},
            None,
        ),
        ([], None),
    ],
)
def test_infer_world_size(data: Any, ranks: int | None) -> None:
    assert infer_world_size(data) == ranks


def test_sequence_parallel_ranks_do_not_share_the_batch() -> None:
    data = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    report = check({**data, "sequence_parallel_size": 2}, world_size=8)
    assert report.verdict == "accepted"
    report = check({**data, "train_batch_size": 64, "sequence_parallel_size": 2}, world_size=8)
    assert report.verdict == "rejected"
    assert "DS402" in codes(report)


def test_batch_hint_names_legal_values() -> None:
    data = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    (found,) = [f for f in check(data, world_size=8).findings if f.code == "DS402"]
    assert "64, 128" in found.hint
    assert found.fix is not None
    assert found.fix.edits == ({"op": "replace", "path": "/train_batch_size", "value": 128},)
    assert not found.fix.safe


def test_duplicate_keys_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8,\n "zero_optimization": {"stage": 3,\n "stage": 2}}')
    plain = check_path(str(path), Options(context()))
    assert (plain.verdict, codes(plain)) == ("rejected", ["DS102"])
    assert plain.findings[0].line == 3
    hf = check_path(str(path), Options(context({"engine": "hf", "args": {"per_device_train_batch_size": 8}})))
    assert hf.verdict == "accepted"
    (found,) = [f for f in hf.findings if f.code == "DS103"]
    assert (found.pointer, found.line) == ("/zero_optimization/stage", 3)


def test_folder_state(tmp_path: Path) -> None:
    assert folder_state(str(tmp_path)) == "ok"
    assert folder_state(str(tmp_path / "a" / "b")) == "missing"
    file = tmp_path / "file"
    file.write_text("")
    assert folder_state(str(file)) == "unwritable"
    assert folder_state(str(file / "below")) == "unwritable"


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("gradient_clipp1ng", ["gradient_clipping", "gradient_predivide_factor"], "gradient_clipping"),
        ("zero_optimisation", ["zero_optimization"], "zero_optimization"),
        ("ZeroOptimization", ["zero_optimization"], "zero_optimization"),
        ("pinmemory", ["pin_memory"], "pin_memory"),
        ("staeg", ["stage"], "stage"),
        ("AdamWW", ["Adam", "AdamW", "Adamax"], "AdamW"),
        ("wandb_project", ["wandb"], None),
        ("my_run", ["fp16", "amp", "aio"], None),
        ("model", ["comet", "mode"], "mode"),
        ("seed", ["bf16", "aio"], None),
    ],
)
def test_did_you_mean(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_distance() -> None:
    assert distance("abc", "abc") == 0
    assert distance("abc", "acb") == 1
    assert distance("abc", "xyz", 2) == 3
    assert distance("a", "abcdef", 3) == 4


VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, -1, 1.5, 0.0, 2e8, "auto", "3", "yes", "cpu", "nvme", "none", "gpu", "", "x", [], {},
    {"device": "cpu"}, {"enabled": True}, {"enabled": "auto"}, [1], {"stage": 3}, "1e9", 10**20, -5.5,
]  # fmt: skip
KEYS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16",
    "bfloat16", "zero_optimization", "optimizer", "scheduler", "aio", "comms_logger", "amp", "elasticity", "steps_per_print",
    "communication_data_type", "checkpoint", "data_types", "activation_checkpointing", "gradient_allreduce_op", "compile",
    "sequence_parallel_size", "managed_gradient_accumulation", "flops_profiler", "tensor_parallel", "nonsense", "pipeline",
    "zero_allow_untested_optimizer", "prescale_gradients", "torch_autocast", "expert_parallel", "data_efficiency", "log_level",
    "offload_optimizer", "offload_param", "stage", "pin_memory", "device", "ratio", "enabled", "type", "params", "lr", "cpu_offload",
    "overlap_comm", "reduce_bucket_size", "stage3_max_live_parameters", "max_live_parameters", "zenflow", "zero_hpz_partition_size",
    "nvme_path", "super_offload", "mics_shard_size", "loss_scale", "warmup_num_steps", "total_num_steps", "block_size",
]  # fmt: skip


def mutated(seed: int) -> dict[str, Any]:
    """A config people might write, with some keys put, dropped or given other values at random."""
    pick = random.Random(seed)
    files = sorted(p for p in WRONG.glob("*.json") if p.name not in ("cases.json",))
    while True:
        try:
            data: dict[str, Any] = dict(Document.parse(pick.choice(files).read_text()).data)
            break
        except Exception:
            continue
    for _n in range(pick.randint(1, 4)):
        here: Any = data
        while pick.random() < 0.6:
            inner = [v for v in here.values() if isinstance(v, dict)]
            if not inner:
                break
            here = pick.choice(inner)
        what = pick.random()
        if what < 0.2 and here:
            here.pop(pick.choice(list(here)))
        elif what < 0.6 and here:
            here[pick.choice(list(here))] = copy.deepcopy(pick.choice(VALUES))
        else:
            here[pick.choice(KEYS)] = copy.deepcopy(pick.choice(VALUES))
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


@pytest.mark.parametrize("release", schema.releases())
def test_verdict_and_findings_never_contradict(release: str) -> None:
    """The newest release is asked about every mutation, each older one about a share of its own."""
    releases = schema.releases()
    share = len(releases) - 1 if release != releases[-1] else 1
    for seed in range(releases.index(release) if share > 1 else 0, 400, share):
        data = mutated(seed)
        for engine in ("deepspeed", "hf"):
            args = {"per_device_train_batch_size": 2, "hidden_size": 64} if engine == "hf" else None
            for world in (1, 8):
                report = check(data, release=release, engine=engine, args=args, world_size=world)
                case = (seed, engine, world, data, [(f.code, f.pointer, f.message) for f in report.findings])
                assert "DS100" not in codes(report), case
                refused = [f for f in report.findings if f.severity is Severity.ERROR and f.when == "parse"]
                assert bool(refused) == (report.verdict == "rejected"), case


@pytest.mark.parametrize("release", ["0.9.5", "0.13.5", "0.20.0", "9.0.0"])
def test_releases_without_a_schema_never_crash_a_rule(release: str) -> None:
    for seed in range(80):
        report = check(mutated(seed), release=release)
        assert report.verdict == "unknown"
        assert "DS100" not in codes(report), (seed, report.findings)


def test_every_module_of_rules_is_pure() -> None:
    folder = Path(registry.__file__).parent
    for name in (
        "shape", "zero", "offload", "batch", "pinned", "comm", "precision", "release", "launch", "features", "training",
        "windows", "changes",
    ):  # fmt: skip
        tree = ast.parse((folder / f"{name}.py").read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {m.split(".")[0] for m in imported} & {
            "os",
            "pathlib",
            "subprocess",
            "time",
            "socket",
            "sys",
        }
        called = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert not called & {"open", "print", "exec", "eval"}


def test_no_alarm_on_presets() -> None:
    folder = Path(__file__).parent.parent.parent / "presets"
    files = sorted(folder.glob("*.json"))
    assert files
    for path in files:
        preset = json.loads(path.read_text())
        config = preset.get("config")
        if not isinstance(config, dict):
            continue
        hf = '"auto"' in json.dumps(config)
        args = {"per_device_train_batch_size": 2, "bf16": True, "hidden_size": 64, "num_training_steps": 100}
        report = check(config, engine="hf" if hf else "deepspeed", args=args if hf else None, world_size=4)
        bad = [f for f in report.findings if f.severity.rank <= Severity.NO_EFFECT.rank]
        assert not bad, (path.name, bad)
