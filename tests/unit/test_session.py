"""The wizard's state machine: values, recommendations, errors, the report."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dstui.config import presets
from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.session import FIELDS, STEPS, Session
from dstui.tui.text import width
from dstui.units import GiB
from tests.walks import OPENED, machine, start, step, walk

TWO_ROWS = 2 * 58
"""Columns of the deciding line in a terminal of 80."""


def test_steps_and_fields_belong_together() -> None:
    assert [s.id for s in STEPS] == [
        "machine",
        "script",
        "model",
        "stage",
        "offload",
        "batch",
        "pinned",
        "comm",
        "precision",
        "review",
    ]
    assert sorted(s.checkpoint for s in STEPS if s.checkpoint) == [1, 2, 3, 4, 5]
    assert all(s.signal and s.title for s in STEPS)
    assert {f.step for f in FIELDS} == {s.id for s in STEPS}
    session = Session(machine("8x80"))
    for s in STEPS:
        views = session.fields(s.id)
        assert views and all(v.step == s.id for v in views)
        assert session.deciding(s.id)
        for v in views:
            assert v == session.field(v.id)
            if v.kind == "choice":
                assert v.options
                if v.enabled and v.id != "python":
                    assert v.value in [o.value for o in v.options]
                for o in v.options:
                    assert o.enabled is not bool(o.why_not)


def test_nothing_that_is_typed_raises(tmp_path: Path) -> None:
    texts = ["", " ", "x", "-1", "1e400", "nan", "0", "7", "%s", "é", "'", "a\nb", "9" * 400]
    session = Session(machine("4x24-busy"), cwd=tmp_path)
    for spec in FIELDS:
        for text in texts:
            session.set(spec.id, text)
            view = session.field(spec.id)
            if view.error and view.enabled:
                assert session.report().blockers
        session.unset(spec.id)
    assert session.problems() == ()


def test_a_wrong_text_stays_with_its_reason_and_the_old_value(tmp_path: Path) -> None:
    session = Session(machine("8x80"), cwd=tmp_path)
    session.set("lr", "2e-5")
    session.set("lr", "fast")
    view = session.field("lr")
    assert (view.text, view.value) == ("fast", 2e-5)
    assert "fast" in view.error
    with pytest.raises(DstuiError):
        session.write(tmp_path / "x.json")
    session.set("lr", "3e-5")
    assert session.field("lr").error == ""


def test_busy_cards_are_not_ticked_and_say_whose() -> None:
    session = Session(machine("4x24-busy"))
    view = session.field("cards")
    assert view.value == ("1", "2", "3")
    assert "ana" in view.options[0].note and "3.0 GiB" in view.options[0].note
    assert session.report().world_size == 3
    session.set("cards", "0,2")
    assert session.report().world_size == 2
    session.set("cards", "9")
    assert "9" in session.field("cards").error


def test_all_cards_unticked_is_a_blocker() -> None:
    session = Session(machine("8x80"))
    session.set("cards", "")
    assert any("card" in b for b in session.report().blockers)


def test_a_login_node_is_never_planned_for_its_cpu() -> None:
    session = Session(machine("login"))
    assert session.is_login_node and session.field("machine").value == "describe"
    assert not session.field("ranks").enabled
    assert "login node" in session.deciding("machine")
    assert session.report().blockers
    session.set("machine", "this")
    assert session.field("machine").error
    session.unset("machine")
    for field, value in (("machine", "describe"), ("nodes", 2), ("ram", "512GiB"), ("gpus", "8x80GiB")):
        session.set(field, value)
    assert session.report().world_size == 16 and not session.report().blockers
    assert "another machine" in session.report().launch_blockers[0]


def test_a_python_that_cannot_train_is_named_with_the_install_command() -> None:
    facts = machine("cpu")
    bare = dataclasses.replace(facts.interpreters[0], packages={"torch": "2.13.0+cpu", "deepspeed": None})
    said = Session(dataclasses.replace(facts, interpreters=(bare,))).report().launch_blockers[0]
    assert "has no deepspeed" in said and "-m pip install deepspeed" in said
    said = Session(dataclasses.replace(facts, interpreters=())).report().launch_blockers[0]
    assert "pip install" in said


def test_detection_that_arrives_late_keeps_what_was_typed() -> None:
    session = Session(None)
    assert session.field("cards").options == ()
    session.set("micro_batch", "4")
    session.set("model", "7B")
    session.set("engine", "plain")
    session.set_facts(machine("8x80"))
    assert session.field("micro_batch").value == 4
    assert session.field("model").value == "7B"
    assert session.report().batch.total == 4 * session.report().batch.accumulation * 8


def test_any_two_of_the_batch_decide_the_third() -> None:
    session = Session(machine("8x80"))
    session.set("engine", "plain")
    session.set("micro_batch", "2")
    session.set("global_batch", "64")
    assert session.field("accumulation").value == 4
    session.set("accumulation", "2")
    assert session.field("micro_batch").value == 4 and session.field("global_batch").value == 64
    session.set("micro_batch", "1")
    assert session.field("global_batch").value == 16
    session.set("global_batch", "17")
    assert session.field("global_batch").error
    session.set("global_batch", "16")
    assert not session.problems("batch")


def test_a_choice_that_became_impossible_says_so() -> None:
    session = Session(machine("8x80"))
    session.set("stage", 3)
    session.set("offload", "both")
    assert not session.problems()
    session.set("stage", 2)
    assert "stage 3" in session.field("offload").error
    session.set("offload", "optimizer")
    assert not session.problems()
    session.set("stage", "1")
    session.set("offload", "param")
    assert "stage 3" in session.field("offload").error


def test_offload_needs_an_optimizer_of_deepspeed() -> None:
    session = Session(machine("8x80"))
    session.set("stage", 2)
    session.set("optimizer", "script")
    options = {o.value: o for o in session.field("offload").options}
    assert not options["optimizer"].enabled and "script" in options["optimizer"].why_not


@pytest.mark.parametrize(
    ("kind", "model", "stage", "offload", "words"),
    [
        ("8x80", "tinyllama-1.1b", 0, "none", "fits, so stage 0"),
        ("8x80", "llama-3.1-8b", 1, "none", "fits, so stage 1"),
        ("4x24-busy", "llama-3.1-8b", 3, "optimizer", "stage 3"),
        ("1x24", "0.5B", 0, "none", "fits, so stage 0"),
        ("8x80", "500B", 3, None, "nothing fits"),
    ],
)
def test_the_recommended_stage_is_the_cheapest_that_fits(
    kind: str, model: str, stage: int, offload: str | None, words: str
) -> None:
    session = Session(machine(kind))
    session.set("engine", "plain")
    session.set("model", model)
    assert session.field("stage").value == stage
    if offload is not None:
        assert session.field("offload").value == offload
    assert words in session.field("stage").recommended_reason
    assert "GiB" in session.deciding("stage")
    assert width(session.deciding("stage")) <= TWO_ROWS
    session.set("stage", 3 if stage < 3 else 2)
    other = session.deciding("stage")
    assert ("nothing fits" if words == "nothing fits" else f"recommended is {stage}: ") in other
    assert width(other) <= TWO_ROWS


def test_a_front_end_that_must_not_wait_gets_the_plan_from_a_fork() -> None:
    session = Session(machine("4x24-busy"), patient=False)
    session.set("engine", "plain")
    session.set("model", "llama-3.1-8b")
    assert session.field("stage").value == 2 and session.deciding("stage")  # the everyday choice, at once
    report = session.fork().report()
    assert report.config["zero_optimization"]["stage"] == 3
    assert session.adopt(report) is True
    assert session.field("stage").value == 3 and "stage 3" in session.deciding("stage")
    session.set("lr", "1e-4")
    assert session.field("stage").value == 3  # nothing that the plan depends on has changed
    assert session.adopt(session.fork().report()) is False


def test_a_glance_answers_for_what_is_shown_before_the_plan_is_found_again() -> None:
    session = Session(machine("4x24-busy"), patient=False)
    session.set("engine", "plain")
    session.set("model", "smollm2-135m")
    assert session.fork().glance() is None  # no plan yet: nothing was recommended for this model
    session.adopt(session.fork().report())
    micro = session.field("micro_batch").value
    assert session.field("stage").value == 0 and micro > 1
    assert session.fork().glance() is None  # nothing to find
    session.set("seq", "8192")
    fork = session.fork()
    quick = fork.glance()
    assert quick is not None and quick.estimate is not None
    assert quick.config["train_micro_batch_size_per_gpu"] == micro  # as the form still shows it
    report = fork.report()
    assert report.config["train_micro_batch_size_per_gpu"] < micro
    assert report.config == session.fork().report().config  # the glance has left nothing behind
    session.adopt(report)
    session.set("model", "llama-3.1-8b")
    assert session.fork().glance() is None  # the plan of another model is no answer


def test_an_opened_file_does_not_hide_the_plan(tmp_path: Path) -> None:
    """Its stage is stated, so no field asks for a plan before the step shows the deciding line."""
    document = Document.parse('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', "a.json")
    session = Session(machine("8x80"), cwd=tmp_path, document=document, patient=False)
    session.set("engine", "plain")
    session.set("model", "llama-3.1-8b")
    session.adopt(session.fork().report())
    line = session.deciding("stage")
    assert "not known" not in line and "computed" not in line
    assert line.startswith("stage 2: ") and "recommended is 1: " in line


def test_why_there_is_no_plan_is_said() -> None:
    session = Session(None, patient=False)
    session.set("engine", "plain")
    assert "model's size" in session.deciding("stage")
    session.set("model", "llama-3.1-8b")
    assert "the machine is not known yet" in session.deciding("stage")
    session.set_facts(machine("8x80"))
    assert "computed" in session.deciding("stage")


def test_a_machine_without_gpu_is_not_spoken_to_of_cards() -> None:
    session = Session(machine("cpu"))
    for stage in (0, 3):
        session.set("stage", stage)
        for name in ("model", "stage", "offload", "comm"):
            texts = [session.deciding(name)]
            for f in session.fields(name):
                texts += [f.recommended_reason, *(o.note for o in f.options)]
            for text in texts:
                assert not re.search(r"\bcards?\b|the GPU|each GPU|per GPU", text), text


def test_accept_rest_answers_everything() -> None:
    session = Session(machine("8x80"))
    session.accept_rest()
    assert not session.report().stops


def test_a_preset_is_the_start_and_typed_values_win() -> None:
    session = Session(machine("8x80"), preset=presets.load("zero3-offload"))
    session.set("engine", "plain")
    assert (session.field("stage").value, session.field("offload").value) == (3, "both")
    assert session.field("stage").recommended_reason == "from the preset"
    session.set("stage", 2)
    zero = session.report().config["zero_optimization"]
    assert zero["stage"] == 2 and "offload_param" not in zero and zero["offload_optimizer"]["device"] == "cpu"


def test_a_preset_on_the_demo_brings_its_strategy_only() -> None:
    session = Session(machine("cpu"), preset=presets.load("zero3-offload"))
    session.set("engine", "demo")
    config = session.report().config
    assert config["zero_optimization"]["stage"] == 3
    assert config["optimizer"]["params"]["lr"] == 1e-3
    assert config["zero_optimization"]["reduce_bucket_size"] < 10_000_000


def test_lora_preset_sets_the_method() -> None:
    session = Session(machine("8x80"), preset=presets.load("lora-zero2"))
    session.set("engine", "plain")
    assert session.field("method").value == "lora" and session.field("lora_rank").value == 16


def test_an_opened_file_keeps_comments_order_and_unknown_keys(tmp_path: Path) -> None:
    text = (
        '{\n  // mine\n  "my_key": 1,\n  "train_batch_size": 64,\n  "zero_optimization": {"stage": 2},\n}\n'
    )
    path = tmp_path / "ds.json"
    path.write_text(text)
    session = Session(machine("8x80"), cwd=tmp_path, document=Document.parse(text, str(path)))
    session.set("engine", "plain")
    assert session.field("output").value == str(path)
    assert session.report().config_text == text and not session.report().changed
    session.set("stage", "3")
    written = session.write()
    assert written.backup is not None and written.backup.read_text() == text
    new = path.read_text()
    assert "// mine" in new and new.index("my_key") < new.index("train_batch_size") and '"stage": 3' in new
    assert session.diff() == ""


def test_a_file_for_other_ranks_is_put_right_and_said(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})
    session = Session(machine("4x24-busy"), cwd=tmp_path, document=Document.parse(text, "ds.json"))
    session.set("engine", "plain")
    report = session.report()
    assert report.config["train_batch_size"] == report.batch.total == 4 * 2 * 3
    assert any("32" in w for w in report.warnings)


def test_the_trainer_gets_strict_json(tmp_path: Path) -> None:
    text = '{ // c\n "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto" }'
    session = Session(machine("8x80"), cwd=tmp_path, document=Document.parse(text, "ds.json"))
    assert session.field("engine").value == "hf"
    json.loads(session.report().config_text)
    assert any("strict JSON" in w for w in session.report().warnings)


def test_arguments_of_a_trainer_feed_the_plan(tmp_path: Path) -> None:
    session = Session(machine("8x80"), cwd=tmp_path)
    session.set("engine", "hf")
    session.set(
        "args", "--per_device_train_batch_size 2 --gradient_accumulation_steps=4 --learning_rate 3e-5 --bf16"
    )
    assert session.report().batch.total == 64
    assert session.field("lr").value == 3e-5
    assert session.report().config["train_micro_batch_size_per_gpu"] == "auto"
    session.set("micro_batch", "8")
    assert any("--per_device_train_batch_size 8" in w for w in session.report().warnings)


@pytest.mark.parametrize(
    ("name", "text", "engine"),
    [
        ("train.py", "import deepspeed\nparser = deepspeed.add_config_arguments(p)\n", "plain"),
        ("run.py", "from transformers import HfArgumentParser\nHfArgumentParser(A)\n", "hf"),
        ("sft.yaml", "model_name_or_path: x\nstage: sft\n", "llamafactory"),
        ("other.py", "print(1)\n", "plain"),
    ],
)
def test_the_engine_is_seen_in_the_script(tmp_path: Path, name: str, text: str, engine: str) -> None:
    (tmp_path / name).write_text(text)
    session = Session(machine("8x80"), cwd=tmp_path)
    assert session.field("engine").value == "demo"
    session.set("script", name)
    assert session.field("engine").value == engine
    session.set("script", "gone.py")
    assert "gone.py" in session.field("script").error


def test_run_spec_says_all_that_a_run_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    session = Session(machine("4x24-busy"), cwd=tmp_path)
    session.set("script", "train.py")
    session.set("args", "--epochs 3 '--name=a b'")
    session.set("timeout", "45")
    session.set("name", "first")
    spec = session.run_spec()
    assert spec.script == "train.py" and spec.args == ("--epochs", "3", "--name=a b")
    assert spec.engine == "plain" and spec.devices == ("1", "2", "3") and spec.num_gpus is None
    assert spec.env == {"DEEPSPEED_TIMEOUT": "45"} and spec.name == "first" and spec.cwd == str(tmp_path)
    assert json.loads(spec.config_text or "") == session.report().config
    cpu = Session(machine("cpu"), cwd=tmp_path)
    spec = cpu.run_spec()
    assert spec.devices is None and spec.num_gpus == 2 and spec.script.endswith("tiny_gpt.py")
    assert spec.args == ("--steps", "60", "--seq", "64")


def test_what_keeps_a_run_from_starting(tmp_path: Path) -> None:
    session = Session(machine("8x80"), cwd=tmp_path)
    session.set("engine", "plain")
    report = session.report()
    assert report.stops and not report.blockers
    with pytest.raises(DstuiError, match="script"):
        session.run_spec()


def test_a_fork_does_not_touch_the_original() -> None:
    session = Session(machine("8x80"))
    session.set("stage", 2)
    twin = session.fork()
    twin.set("stage", 3)
    twin.set("micro_batch", "x")
    assert session.field("stage").value == 2 and not session.problems()
    report = session.fork().report()
    session.adopt(report)
    assert session.report() is report


def test_equal_inputs_give_equal_reports() -> None:
    a, b = Session(machine("8x80"), cwd="/tmp"), Session(machine("8x80"), cwd="/tmp")
    for s in (a, b):
        s.set("engine", "plain")
        s.set("model", "7B")
    assert a.report() == b.report()


def test_bytes_of_the_demo_are_those_of_the_script() -> None:
    torch = pytest.importorskip("torch")
    from dstui.session.state import demo_shape

    shape = demo_shape(64)
    h, layers = shape.hidden or 0, shape.layers or 0
    block = sum(p.numel() for m in (
        torch.nn.LayerNorm(h), torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h), torch.nn.LayerNorm(h),
        torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h),
    ) for p in m.parameters())  # fmt: skip
    assert shape.params == 2 * 256 * h + 64 * h + layers * block + 2 * h


def test_answers_for_a_script_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    session = Session(machine("8x80"), cwd=tmp_path, remembers=True)
    session.set("script", "train.py")
    session.set("engine", "hf")
    session.set("args", "--epochs 3")
    session.remember()
    strange = Session(machine("8x80"), cwd=tmp_path)
    strange.set("script", "train.py")
    assert strange.field("args").value == ""
    again = Session(machine("8x80"), cwd=tmp_path, remembers=True)
    again.set("script", "train.py")
    assert again.field("engine").value == "hf" and again.field("args").value == "--epochs 3"


def test_pinned_blocks_are_weighed_against_ram() -> None:
    session = Session(machine("8x80"))
    session.set("engine", "plain")
    session.set("model", "tinyllama-1.1b")
    session.set("stage", 2)
    session.set("offload", "optimizer")
    assert session.field("pin_optimizer").value is True
    session.set("model", "llama-2-13b")
    assert session.field("pin_optimizer").value is False
    assert "RAM" in session.field("pin_optimizer").recommended_reason
    assert session.facts is not None and session.facts.host.ram_total == 256 * GiB


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_walks_end_ready(seed: int, tmp_path: Path) -> None:
    session = walk(seed, tmp_path)
    report = session.report()
    assert not report.blockers
    assert session.problems() == ()
    json.dumps(report.config)
    for s in STEPS:
        assert session.deciding(s.id)


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_of_a_walk_can_be_shown(seed: int, tmp_path: Path) -> None:
    session, rng = start(seed, tmp_path)
    for _ in range(12):
        step(session, rng)
        for s in STEPS:
            session.fields(s.id)
            session.deciding(s.id)
        report = session.report()
        assert (report.config_text == "") is False


def test_no_key_of_an_opened_file_is_lost_that_dstui_does_not_know(tmp_path: Path) -> None:
    for data in OPENED:
        session = Session(machine("8x80"), cwd=tmp_path, document=Document.parse(json.dumps(data), "ds.json"))
        session.set("stage", 3)
        session.set("offload", "both")
        config = session.report().config
        for key in ("my_own_key", "wall_clock_breakdown", "steps_per_print"):
            if key in data:
                assert config[key] == data[key]
