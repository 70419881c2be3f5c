"""Fixes: every edit applies, passes our own check, and where the model is known the estimator says that it fits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dstui.config.document import Document
from dstui.estimate.inputs import Training
from dstui.estimate.memory import estimate
from dstui.estimate.model import load_model
from dstui.estimate.subject import subject
from dstui.facts.describe import describe
from dstui.rules.engine import Context, check_document
from dstui.runs import causes, prices, repairs
from dstui.runs.diagnose import diagnose, diagnose_run
from dstui.runs.processes import here
from dstui.runs.store import RunDir, write_json

LOGS = Path(__file__).parent.parent / "data" / "logs"
ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


def configs() -> list[dict[str, Any]]:
    """Stages, offloads, precisions and optimizers, each legal by itself."""
    found: list[dict[str, Any]] = []
    for stage, offload, precision, optimizer in itertools.product(
        (None, 0, 1, 2, 3),
        ("none", "cpu", "both", "nvme"),
        ("bf16", "fp16", None),
        ("AdamW", "Lion", "SGD", None),
    ):
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
        if optimizer:
            config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-4}}
        if precision:
            config[precision] = {"enabled": True}
        if stage is not None:
            zero: dict[str, Any] = {"stage": stage}
            if offload != "none":
                zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            if offload == "both":
                zero["offload_param"] = {"device": "cpu"}
            if offload == "nvme":
                zero["offload_param"] = {"device": "nvme", "nvme_path": "/tmp"}
            config["zero_optimization"] = zero
        if not errors(config):
            found.append(config)
    return found


def errors(config: Mapping[str, Any], release: str = "0.19.8") -> set[tuple[str, str | None]]:
    report = check_document(Document.parse(json.dumps(config)), Context(release, world_size=2))
    return {(f.code, f.pointer) for f in report.findings if f.severity == "error"}


CONFIGS = configs()


def test_edits_pass_our_own_check() -> None:
    texts = {
        "DR102": "CUDA out of memory", "DR201": "client provided optimizer (", "DR203": "buffer nbytes != file bytes",
        "DR302": "no_sync context manager is incompatible", "DR401": "", "DR402": "", "DR602": "", "DR702": "nvcc",
        "DR701": "",
    }  # fmt: skip
    assert len(CONFIGS) > 60
    seen: set[str] = set()
    for config in CONFIGS:
        for code, text in texts.items():
            offered = repairs.of_cause(code, config, text)
            for fix in prices.legal(offered, config, "0.19.8", 2):
                if fix.edits:
                    seen.add(code)
                    then = prices.applied(config, fix.edits)
                    assert then is not None and then != config
                    assert not errors(then), (code, fix, config)
    assert seen == set(texts)


def test_an_edit_that_the_release_refuses_is_not_offered() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": 2}}  # fmt: skip
    bad = repairs.Repair(
        "x", ({"op": "add", "path": "/zero_optimization/stage3_max_live_parameters", "value": -5},)
    )
    gone = repairs.Repair("y", ({"op": "remove", "path": "/zero_optimization/offload_param"},))
    words = repairs.Repair("z")
    assert prices.legal((bad, gone, words), config, "0.19.8", 2) == (words,)


def test_a_trainers_mismatch_gets_auto() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/site-packages/transformers/integrations/deepspeed.py", line 1, in trainer_config_finalize\n'
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n"
        "- ds train_micro_batch_size_per_gpu=1 vs hf per_device_train_batch_size=8\n"
        "The easiest method is to set these DeepSpeed config values to 'auto'.\n"
    )
    found = diagnose(text, config, text=True)
    assert found.cause is not None and (found.cause.code, found.cause.checkpoint) == ("DR705", 3)
    assert found.fixes[0].edits == (
        {"op": "replace", "path": "/train_micro_batch_size_per_gpu", "value": "auto"},
    )


def test_a_world_size_that_was_read_too_early() -> None:
    text = "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 1 * 1\n"
    found = diagnose(text, {"train_batch_size": 16}, text=True)
    assert found.fixes and "right for 8" in found.fixes[0].title


def oom_run(
    tmp_path: Path, config: dict[str, Any], log: str, exit_data: dict[str, Any], **more: Any
) -> RunDir:
    path = tmp_path / "abc2-1129-1920"
    (path / "samples").mkdir(parents=True)
    place = here()
    facts = describe(gpus="2x40GiB", ram="128GiB")
    shape = load_model("7B")
    training = Training(micro_batch=4, seq=2048, checkpointing=True)
    data = {
        "schema_version": 1, "id": path.name, "created_at": 1.0, "world_size": 2, "command": ["deepspeed", "t.py"],
        "host": place.host, "boot_id": place.boot_id, "pid_namespace": place.pid_namespace,
        "supervisor": {"pid": 999_999_999, "start_time": 1}, "launcher": {"pid": 999_999_998, "start_time": 1},
        "versions": {"deepspeed": "0.19.8"}, "facts": facts.to_json(), "subject": subject(shape, training), **more,
    }  # fmt: skip
    write_json(path / "manifest.json", data)
    (path / "out.log").write_text(log)
    write_json(path / "config.json", config)
    write_json(path / "exit.json", {"schema_version": 1, "outcome": "failed", "code": 1, **exit_data})
    return RunDir(path)


OOM = (
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/home/u/train.py", line 5, in <module>\n'
    '[rank0]:   File "/v/site-packages/deepspeed/runtime/engine.py", line 7, in forward\n'
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "40.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 39.00 GiB memory in use. Of the "
    "allocated memory 37.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize("ram", ["128GiB", "1024GiB"])
def test_memory_fixes_are_priced_and_those_that_fit_come_first(tmp_path: Path, ram: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": ADAM,
        "zero_optimization": {"stage": 2},
    }
    facts = describe(gpus="2x40GiB", ram=ram)
    run = oom_run(
        tmp_path, config, OOM, {"rank_code": 1, "first_rank": 0, "oom_kills": {}}, facts=facts.to_json()
    )
    found = diagnose_run(run)
    assert found.cause is not None and (found.cause.code, found.cause.certainty) == ("DR102", "certain")
    priced = [f for f in found.fixes if f.edits]
    assert priced
    shape, training = load_model("7B"), Training(micro_batch=4, seq=2048, checkpointing=True)
    fits = []
    for fix in priced:
        then = prices.applied(config, fix.edits)
        assert then is not None and not errors(then)
        got = estimate(shape, training, then, facts, release="0.19.8", world_size=2, changes=False)
        fits.append(got.verdict)
        if "estimated then" in fix.price:
            assert {"fits": ": fits", "tight": ": tight", "no": ": does not fit"}.get(
                got.verdict, ": unknown"
            ) in fix.price
    order = [{"fits": 0, "no": 2}.get(v, 1) for v in fits]
    assert order == sorted(order)
    if ram == "1024GiB":
        assert fits[0] == "fits"


def test_no_placement_is_offered_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Ranks that train on the CPU hold everything in host RAM, wherever a config places it."""
    import dataclasses

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    log = "[2026-11-29 19:00:00,000] [ERROR] [launch.py:1:x] ['python', 'train.py'] exits with return code = -9\n"
    killed = {"rank_code": -9, "first_rank": 0, "oom_kills": {"cgroup": 1, "system": 1}}
    for gpus, said in ((True, True), (False, False)):
        facts = describe(gpus="2x80GiB", ram="1024GiB")
        if not gpus:
            facts = dataclasses.replace(facts, gpus=())
        folder = tmp_path / str(gpus)
        folder.mkdir()
        found = diagnose_run(oom_run(folder, config, log, killed, facts=facts.to_json()))
        assert found.cause is not None and found.cause.code == "DR401" and found.fixes
        texts = " ".join(f"{f.title} {f.price}" for f in found.fixes)
        assert "?" not in texts and ("on the GPUs" not in texts or said), texts


def test_wrong_results_that_the_release_is_known_for(tmp_path: Path) -> None:
    """A NaN under a config for which a rule knows a silent-wrong window names that rule's fix first."""
    from dstui.rules.registry import all_rules

    silent = [r for r in all_rules() if r.severity == "silent-wrong"]
    assert silent
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "managed_gradient_accumulation": False,
        "optimizer": ADAM,
        "zero_optimization": {"stage": 2},
    }
    fixes = prices.of_rules(config, "0.19.2", 2, ("silent-wrong", "no-effect", "meaning-changed"))
    assert fixes and fixes[0].title.startswith("DS")
    assert prices.of_rules(config, None, 2, ("silent-wrong",)) == ()


def test_every_code_has_a_page_in_both_languages() -> None:
    from dstui import i18n

    try:
        for cause in causes.all_causes():
            i18n.set_language("en")
            english = cause.page()
            i18n.set_language("zh")
            chinese = cause.page()
            assert cause.code in english and cause.name in english
            lines = zip(english.splitlines()[1:], chinese.splitlines()[1:], strict=True)
            assert all(a != b for a, b in lines if a.strip()), cause.code
    finally:
        i18n.set_language("en")
