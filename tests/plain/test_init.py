"""dstui init: flags, the dialogue on a real terminal, what is written."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pexpect
import pytest

from dstui import cli
from dstui.errors import DstuiError
from dstui.plain import init
from dstui.session import FIELDS, Session
from tests.conftest import REPO
from tests.walks import machine


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(machine("8x80").to_json()))
    return str(path)


def test_no_question_without_a_terminal(facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--facts", facts]) == 2
    err = capsys.readouterr().err
    assert "--yes" in err and "--stage" in err
    assert not Path("ds_config.json").exists()


def test_every_field_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["init", "--help"])
    text = capsys.readouterr().out
    for f in FIELDS:
        if f.id not in ("machine", "facts_file", "output", "python"):
            assert f.flag in text
    assert "--facts" in text and "--output" in text and "--python" in text


def test_yes_writes_and_reports(facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["init", "--yes", "--facts", facts, "--engine", "plain", "--stage", "3", "--offload", "optimizer"]
    assert cli.main([*args, "--micro-batch", "2", "--global-batch", "64", "--json", "-o", "my.json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 1 and answer["world_size"] == 8
    assert answer["batch"] == {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    }  # fmt: skip
    written = json.loads(Path("my.json").read_text())
    assert written == answer["config"]
    assert written["zero_optimization"]["stage"] == 3
    assert "offload_param" not in written["zero_optimization"]
    assert answer["fields"]["offload"] == "optimizer"


def test_what_does_not_fit_leads_to_the_estimate(facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--engine", "plain", "--model", "qwen2.5-7b", "--seq", "1024"]
    assert cli.main(["init", "--yes", "--facts", facts, *asked, "--stage", "2"]) == 0
    assert re.search(r"^fit: fits, GPU [\d.]+ GiB of 80\.0 GiB", capsys.readouterr().out, re.M)
    assert cli.main(["init", "--yes", "--facts", facts, *asked, "--stage", "0", "-o", "b.json"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^fit: does not fit, GPU [\d.]+ GiB of 80\.0 GiB", out, re.M)
    found = re.search(r"dstui (estimate .*)$", out, re.M)
    assert found is not None
    words = shlex.split(found.group(1))
    assert words[words.index("--seq") + 1] == "1024" and words[words.index("--facts") + 1] == facts
    assert cli.main(words) == 1  # the same answer: it does not fit


def test_described_cards(facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["init", "--yes", "--gpus", "4x24GiB", "--nodes", "2", "--json", "--engine", "plain", "-o", "-"]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["world_size"] == 8 and answer["path"] is None and answer["launch_blockers"]
    assert not Path("ds_config.json").exists()


def test_a_preset_and_a_file_as_start(facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--yes", "--facts", facts, "--preset", "hf-zero3-offload", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["train_batch_size"] == "auto"
    Path("mine.json").write_text('{ // kept\n "own": 1, "train_batch_size": 64 }')
    assert cli.main(["init", "--yes", "--facts", facts, "--from", "mine.json", "--stage", "2"]) == 0
    text = Path("mine.json").read_text()
    assert "// kept" in text and '"own": 1' in text and '"stage": 2' in text
    err = capsys.readouterr().err
    assert "+" in err and "stage" in err  # the difference was shown
    assert Path("mine.json.bak").exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--stage", "5"], "--stage"),
        (["--micro-batch", "0"], "--micro-batch"),
        (["--offload", "param", "--stage", "2"], "--offload"),
        (["--model", "/nowhere/model"], "--model"),
        (["--gpus", "what"], "--gpus"),
        (["--preset", "zero9"], "zero9"),
        (["--preset", "zero2", "--from", "x.json"], "--preset"),
        (["--script", "missing.py"], "missing.py"),
        (["-o", "no/such/folder/x.json"], "-o"),
        (["--cards", "77"], "--cards"),
    ],
)  # fmt: skip
def test_wrong_answers_are_named_by_their_flag(
    extra: list[str], words: str, facts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["init", "--yes"] if "--gpus" in extra else ["init", "--yes", "--facts", facts]
    assert cli.main([*base, *extra]) == 2
    got = capsys.readouterr()
    assert words in got.err and "Traceback" not in got.err and got.out == ""
    assert not Path("ds_config.json").exists()


def dialogue(session: Session, text: str) -> str:
    sink = io.StringIO()
    init._Dialogue(session, set(), io.StringIO(text), sink).run()
    return sink.getvalue()


def test_enter_takes_every_recommended_value(tmp_path: Path) -> None:
    session, plain = (Session(machine("8x80"), cwd=tmp_path) for _ in range(2))
    said = dialogue(session, "\n" * 200)
    assert "Step 1 of 10" in said and "Step 10 of 10" in said and "checkpoint 1" in said
    assert session.report() == plain.report()


def test_back_returns_to_the_question_before(tmp_path: Path) -> None:
    session = Session(machine("cpu"), cwd=tmp_path)
    said = dialogue(
        session, "\n4\nback\nback\n3\nrest\n"
    )  # plan for; ranks 4; (at nodes) back; (at ranks) back; ...
    assert session.field("ranks").value == 2
    assert said.count("Ranks (ranks)") == 2 or said.count("Ranks") >= 2


def test_a_wrong_answer_is_asked_again_with_its_reason(tmp_path: Path) -> None:
    session = Session(machine("cpu"), cwd=tmp_path)
    said = dialogue(session, "\nmany\n3\nrest\n")
    assert "'many' is not a number" in said
    assert session.field("ranks").value == 3


def test_enter_never_takes_an_answer_that_was_refused(tmp_path: Path) -> None:
    session = Session(machine("cpu"), cwd=tmp_path)
    said = dialogue(session, "zzz\n\nmany\n\nrest\n")
    assert said.count("Plan for [this]:") == 2 and "Plan for [zzz]" not in said and "[many]" not in said
    assert (session.field("machine").value, session.field("ranks").value) == ("this", 2)


def test_options_can_be_chosen_by_number_and_explained(tmp_path: Path) -> None:
    session = Session(machine("8x80"), cwd=tmp_path)
    for field in FIELDS:
        if field.step in ("machine", "script", "model"):
            session.accept(field.step)
    view = session.field("offload")
    assert init._by_number(view, "2") == "optimizer"
    assert init._by_number(session.field("stage"), "2") == "2"  # 2 is itself a value
    assert init._by_number(view, "9") == "9"


def test_the_end_of_input_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DstuiError) as e:
        dialogue(Session(machine("cpu"), cwd=tmp_path), "\n")
    assert e.value.code == 130


@pytest.mark.pty
def test_on_a_terminal(facts: str, tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable, ["-m", "dstui", "init", "--facts", facts, "--engine", "plain"],
        cwd=str(tmp_path), env={"PYTHONPATH": str(REPO), "TERM": "dumb", "LANG": "C", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=20, encoding="utf-8",
    )  # fmt: skip
    child.expect(r"Cards \[0,1,2,3,4,5,6,7\]: ")
    child.sendline("0,1")
    child.expect(r"Nodes .*\[1\]: ")
    child.sendline("?")
    child.expect("machines of this kind")
    child.sendline("rest")
    child.expect(r"Write .*ds_config.json\? \[yes\]: ")
    child.sendline("")
    child.expect("written: ")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]["stage"] == 2
