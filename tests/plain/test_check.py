"""``dstui check`` as people and scripts meet it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstui import cli
from dstui.errors import DstuiError
from dstui.plain import check

GOOD = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "log_level": "info",
    "zero_optimization": {"stage": 2},
}


def write(folder: Path, data: Any, name: str = "ds.json") -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return str(path)


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["check", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_is_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {**GOOD, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    code, data = answer([path, "--deepspeed", "0.19.8", "--world-size", "4"], capsys)
    assert code == 0
    assert data["schema_version"] == 1
    (file,) = data["files"]
    assert file | {"findings": None, "skipped": None} == {
        "path": path,
        "engine": "deepspeed",
        "deepspeed": "0.19.8",
        "deepspeed_from": "option",
        "world_size": 4,
        "world_size_from": "option",
        "verdict": "accepted",
        "batch": {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
        "findings": None,
        "skipped": None,
    }
    finding = next(f for f in file["findings"] if f["code"] == "DS204")
    assert finding["name"] == "offload-param-below-stage-3"
    assert finding["severity"] == "no-effect"
    assert finding["when"] == "init"
    assert finding["path"] == "zero_optimization.offload_param"
    assert finding["pointer"] == "/zero_optimization/offload_param"
    column = Path(path).read_text().index('"offload_param"') + 1
    assert (finding["line"], finding["column"]) == (1, column)
    assert finding["fix"]["edits"] == [{"op": "replace", "path": "/zero_optimization/stage", "value": 3}]
    assert set(finding) == {
        "code", "name", "severity", "when", "path", "pointer", "line", "column", "message", "effect", "hint", "fix",
        "source", "since", "until",
    }  # fmt: skip
    assert {"code": "DS702", "needs": "facts.gpus"} in file["skipped"]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, GOOD, "good.json")
    bad = write(tmp_path, {**GOOD, "zero_optimization": {"stage": 7}}, "bad.json")
    broken = write(tmp_path, '{"train_batch_size": ', "broken.json")
    silent = write(tmp_path, {**GOOD, "comms_logger": {"enabled": False}}, "silent.json")
    missing = str(tmp_path / "no.json")
    for files, code in (
        ([good], 0), ([bad], 1), ([silent], 1), ([good, bad], 1), ([broken], 2), ([missing], 2),
        ([bad, missing, good], 2),
    ):  # fmt: skip
        assert cli.main(["check", *files, "--deepspeed", "0.19.8"]) == code, files
    out = capsys.readouterr().out
    assert "good.json: accepted" in out.splitlines()[-1]
    assert cli.main(["check", good, "--fail-on", "info", "--deepspeed", "0.13.5"]) == 1
    assert cli.main(["check", silent, "--fail-on", "error"]) == 0


def test_an_error_at_start_leaves_the_verdict_accepted_and_still_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**GOOD, "optimizer": {"type": "AdamWW"}})
    code, data = answer([path, "--deepspeed", "0.19.8"], capsys)
    assert (code, data["files"][0]["verdict"]) == (1, "accepted")


def test_world_size_is_inferred_from_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    )
    _code, data = answer([path], capsys)
    assert (data["files"][0]["world_size"], data["files"][0]["world_size_from"]) == (8, "batch")


def test_release_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "deepspeed-0.19.4.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: deepspeed\n")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    assert check.release_of(None) == ("0.19.4", "interpreter")
    assert check.release_of("0.19.8") == ("0.19.8", "option")
    monkeypatch.setattr(check, "installed", lambda: None)
    assert check.release_of(None) == (check.schemas.newest(), "newest")
    with pytest.raises(DstuiError, match="not a release"):
        check.release_of("new")


def test_a_release_without_a_schema_is_unknown_and_never_a_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**GOOD, "zero_optimization": {"stage": 2, "nonsense": 1}})
    code, data = answer([path, "--deepspeed", "0.13.5"], capsys)
    assert code == 0
    assert data["files"][0]["verdict"] == "unknown"
    assert data["files"][0]["batch"] is None
    assert "DS198" in {f["code"] for f in data["files"][0]["findings"]}
    assert {"code": "DS112", "needs": "schema"} in data["files"][0]["skipped"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = io.TextIOWrapper(io.BytesIO(json.dumps(GOOD).encode()))
    monkeypatch.setattr(sys, "stdin", fake)
    code, data = answer(["-", "--deepspeed", "0.19.8"], capsys)
    assert (code, data["files"][0]["path"], data["files"][0]["verdict"]) == (0, "-", "accepted")


def test_fix_keeps_comments_and_makes_a_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """{
  // the batch
  "train_micro_batch_size_per_gpu": "2",
  "gradient_clipp1ng": 1.0,
  "zero_optimization": {"stage": 2, "cpu_offload": true, "allgather_bucket_size": 200000001, },
}
"""
    path = write(tmp_path, text)
    code, data = answer([path, "--fix", "--deepspeed", "0.19.8"], capsys)
    fixed = Path(path).read_text()
    assert "// the batch" in fixed
    assert '"train_micro_batch_size_per_gpu": 2' in fixed
    assert '"gradient_clipping": 1' in fixed
    assert "gradient_clipp1ng" not in fixed
    assert '"cpu_offload"' not in fixed
    assert "200000000" in fixed
    assert (tmp_path / "ds.json.bak").read_text() == text
    assert code == 0
    safe = [f for f in data["files"][0]["findings"] if f["fix"] and f["fix"]["safe"]]
    assert not safe
    before = fixed
    answer([path, "--fix", "--deepspeed", "0.19.8"], capsys)
    assert Path(path).read_text() == before


def test_an_unsafe_fix_is_never_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {**GOOD, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    before = Path(path).read_bytes()
    answer([path, "--fix", "--deepspeed", "0.19.8"], capsys)
    assert Path(path).read_bytes() == before
    assert list(tmp_path.iterdir()) == [Path(path)]
    cli.main(["check", path, "--fix", "--deepspeed", "0.19.8"])
    assert "there is no safe fix to apply" in capsys.readouterr().err


def test_hugging_face_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    path = write(tmp_path, data)
    _code, plain = answer([path, "--deepspeed", "0.19.8"], capsys)
    assert plain["files"][0]["verdict"] == "rejected"
    _code, open_ = answer([path, "--deepspeed", "0.19.8", "--engine", "hf"], capsys)
    assert "DS147" in {f["code"] for f in open_["files"][0]["findings"]}
    argv = [path, "--deepspeed", "0.19.8", "--engine", "hf", "--world-size", "4", "--args"]
    say = "per_device_train_batch_size=2,gradient_accumulation_steps=4,bf16=true"
    code, filled = answer([*argv, say], capsys)
    assert (code, filled["files"][0]["verdict"]) == (0, "accepted")
    assert filled["files"][0]["batch"]["train_batch_size"] == 32
    yaml = write(tmp_path, "per_device_train_batch_size: 2 # each\nbf16: true\nlist:\n  - a\n", "train.yaml")
    _code, from_file = answer([*argv, yaml], capsys)
    assert from_file["files"][0]["batch"]["train_batch_size"] == 8


@pytest.mark.parametrize("text", ["a=1,b", "=2", "nowhere.json"])
def test_bad_arguments_are_named(text: str) -> None:
    with pytest.raises(DstuiError, match="--args"):
        check.read_args(text)


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD)
    assert cli.main(["check", path, "--world-size", "0"]) == 2
    assert cli.main(["check", path, "--json", "--format", "sarif"]) == 2
    assert cli.main(["check", "-", "--fix"]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 3


def test_too_large_and_strange_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = write(tmp_path, json.dumps(GOOD) + " " * 5000, "big.json")
    code, data = answer([big, str(tmp_path), "--max-size", "4k"], capsys)
    assert code == 2
    assert [f["verdict"] for f in data["files"]] == [None, None]
    assert {f["findings"][0]["code"] for f in data["files"]} == {"DS101"}


def test_other_tools_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    factory = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\ncutoff_len: 2048\ndeepspeed: z.json\n"
    for text, name in (
        (yaml, "an Accelerate configuration"),
        (factory, "a LLaMA-Factory configuration"),
        (json.dumps({"output_dir": "o", "learning_rate": 1e-5, "save_steps": 10}), "Hugging Face training arguments"),
        (json.dumps({"architectures": ["A"], "model_type": "llama", "hidden_size": 8}), "a Hugging Face model's config.json"),
        (json.dumps({"replace_with_kernel_inject": True, "dtype": "fp16"}), "a DeepSpeed inference configuration"),
        (json.dumps({"name": "x", "version": "1"}), "no key in this file"),
    ):  # fmt: skip
        path = write(tmp_path, text)
        code, data = answer([path, "--deepspeed", "0.19.8"], capsys)
        assert code != 0
        codes = [f["code"] for f in data["files"][0]["findings"]]
        assert codes == ["DS105"], (name, data)
        assert name in data["files"][0]["findings"][0]["message"]


def test_concise_github_and_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path, '{\n "train_batch_size": 8,\n "zero_optimization": {"stage": 2, "overlap_com": true}\n}\n'
    )
    argv = ["check", path, "--deepspeed", "0.19.8", "--select", "DS1", "--format"]
    assert cli.main([*argv, "concise"]) == 1
    line = capsys.readouterr().out
    assert (
        line
        == f"{path}:3:36: DS112 error zero_optimization.overlap_com: zero_optimization has no key 'overlap_com'\n"
    )
    assert cli.main([*argv, "github"]) == 1
    line = capsys.readouterr().out
    assert line.startswith(
        f"::error file={path},line=3,col=36,title=DS112 unknown-key-refused::zero_optimization.overlap_com: "
    )
    assert cli.main([*argv, "sarif"]) == 1
    sarif = json.loads(capsys.readouterr().out)
    assert sarif["version"] == "2.1.0"
    (run,) = sarif["runs"]
    assert [r["id"] for r in run["tool"]["driver"]["rules"]] == ["DS112"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 3, "startColumn": 36}


def test_text_of_a_file_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, '{"train_batch_size": 8, "\\u001b[2Jkey": 1}')
    cli.main(["check", path, "--deepspeed", "0.19.8"])
    assert "\x1b" not in capsys.readouterr().out


def test_select_and_ignore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"train_batch_size": 8, "comms_logger": {"enabled": False}})
    code, data = answer([path, "--ignore", "DS6"], capsys)
    assert (code, [f["code"] for f in data["files"][0]["findings"] if f["code"][:3] == "DS6"]) == (0, [])
    code, data = answer([path, "--select", "DS603"], capsys)
    assert (code, [f["code"] for f in data["files"][0]["findings"]]) == (1, ["DS603"])


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        ("DS9X", "DS9?"),
        ("DS999", "DS9?"),
        ("DS70l", "DS70?"),
        ("SD701", "DS701?"),
        ("fp16-and-bf16", "DS701?"),
        ("E501", "like DS2"),
    ],
)
@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_a_code_that_no_rule_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, code: str, meant: str
) -> None:
    path = write(tmp_path, {"train_batch_size": 8})
    assert cli.main(["check", path, option, "DS2," + code]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"{option} {code.upper()}: " in err and meant in err
    assert (
        cli.main(["check", path, option, "ds2,DS401,all,DS850"]) == 0
    )  # DS850: a change, `versions` tells it


def test_a_conflict_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    for release in ("0.19.8", "0.16.9", "0.14.0"):
        _code, data = answer([path, "--deepspeed", release], capsys)
        assert data["files"][0]["verdict"] == "rejected"
        found = data["files"][0]["findings"]
        assert [f["code"] for f in found if f["severity"] == "error"] == ["DS701"], release


def test_chinese_changes_texts_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"train_batch_size": 8, "comms_logger": {"enabled": False}})
    _code, english = answer([path], capsys)
    _code, chinese = answer([path, "--lang", "zh"], capsys)
    for a, b in zip(english["files"][0]["findings"], chinese["files"][0]["findings"], strict=True):
        for key in ("code", "name", "severity", "when", "path", "pointer", "line", "source"):
            assert a[key] == b[key]


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    code = (
        "import sys; from dstui.cli import main; "
        f"rc = main(['check', {path!r}, '--deepspeed', '0.19.8']); "
        "heavy = {'textual', 'rich', 'torch', 'deepspeed', 'transformers', 'jsonschema', 'pydantic', 'hjson',"
        " 'psutil', 'pynvml', 'numpy', 'subprocess'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _strange(folder: Path, kind: str) -> str:
    path = folder / "ds.json"
    if kind == "2 MB":
        path.write_text('{"train_batch_size": 8, "x": "' + "a" * 2_000_000 + '"}')
    elif kind == "10000 objects deep":
        path.write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    elif kind == "10000 lists deep":
        path.write_text('{"train_batch_size": 8, "x": ' + "[" * 10_000 + "]" * 10_000 + "}")
    elif kind == "invalid UTF-8":
        path.write_bytes(b'{"train_batch_size": 8, "\xff\xfe": 1}')
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "no permission":
        path.symlink_to(folder / "nowhere")
    else:
        return kind
    return str(path)


STRANGE = ("2 MB", "10000 objects deep", "10000 lists deep", "invalid UTF-8", "FIFO", "directory", "no permission", "/dev/zero")  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("engine", ["deepspeed", "hf"])
def test_no_file_is_too_strange(
    kind: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _strange(tmp_path, kind)
    code, data = answer([path, "--deepspeed", "0.19.8", "--engine", engine], capsys)
    assert code == 2
    (finding,) = data["files"][0]["findings"]
    assert finding["code"] == "DS101"
    assert finding["message"]
    assert finding["hint"]
    for form in ("full", "concise", "github", "sarif"):
        assert cli.main(["check", path, "--deepspeed", "0.19.8", "--engine", engine, "--format", form]) == 2
        out = capsys.readouterr()
        assert "DS101" in out.out
        assert "Traceback" not in out.out + out.err
    assert cli.main(["versions", path, "--from", "0.19.4", "--to", "0.19.8", "--engine", engine]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_max_size_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _strange(tmp_path, "2 MB")
    code, data = answer([path, "--deepspeed", "0.19.8", "--max-size", "4MB"], capsys)
    assert (code, data["files"][0]["verdict"]) == (0, "accepted")


SARIF: dict[
    str, Any
] = {  # what SARIF 2.1.0 asks of the parts that check writes (OASIS, sections 3.13 to 3.30)
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "pattern": "^https://.*sarif.*2\\.1\\.0.*json$"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/run"}},
    },
    "additionalProperties": False,
    "$defs": {
        "text": {
            "type": "object",
            "required": ["text"],
            "properties": {"text": {"type": "string", "minLength": 1}},
            "additionalProperties": False,
        },
        "run": {
            "type": "object",
            "required": ["tool", "results"],
            "properties": {
                "tool": {
                    "type": "object",
                    "required": ["driver"],
                    "properties": {"driver": {"$ref": "#/$defs/driver"}},
                    "additionalProperties": False,
                },
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
            "additionalProperties": False,
        },
        "driver": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "rules": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/rule"}},
            },
            "additionalProperties": False,
        },
        "rule": {
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "string"},
                "name": {"type": "string"},
                "shortDescription": {"$ref": "#/$defs/text"},
                "fullDescription": {"$ref": "#/$defs/text"},
                "defaultConfiguration": {
                    "type": "object",
                    "properties": {"level": {"$ref": "#/$defs/level"}},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "level": {"enum": ["none", "note", "warning", "error"]},
        "result": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "ruleId": {"type": "string"},
                "level": {"$ref": "#/$defs/level"},
                "message": {"$ref": "#/$defs/text"},
                "locations": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/location"}},
            },
            "additionalProperties": False,
        },
        "location": {
            "type": "object",
            "required": ["physicalLocation"],
            "properties": {
                "physicalLocation": {
                    "type": "object",
                    "required": ["artifactLocation"],
                    "properties": {
                        "artifactLocation": {
                            "type": "object",
                            "required": ["uri"],
                            "properties": {"uri": {"type": "string", "pattern": "^[!-~]+$"}},
                            "additionalProperties": False,
                        },
                        "region": {
                            "type": "object",
                            "required": ["startLine"],
                            "properties": {
                                "startLine": {"type": "integer", "minimum": 1},
                                "startColumn": {"type": "integer", "minimum": 1},
                            },
                            "additionalProperties": False,
                        },
                    },
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
    },
}


def test_sarif_holds_to_its_structure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jsonschema import Draft202012Validator

    wrong = sorted((Path(__file__).parent.parent / "data" / "wrong").glob("[0-9]*.json"))
    odd = tmp_path / "名 字, 100%.json"
    odd.write_text('{"train_batch_size": "auto"}', encoding="utf-8")
    files = [*map(str, wrong), str(odd), str(tmp_path / "missing.json")]
    assert cli.main(["check", *files, "--deepspeed", "0.19.8", "--format", "sarif"]) == 2
    sarif = json.loads(capsys.readouterr().out)
    assert not [f"{e.json_path}: {e.message}" for e in Draft202012Validator(SARIF).iter_errors(sarif)]
    (run,) = sarif["runs"]
    ids = [r["id"] for r in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    assert {r["ruleId"] for r in run["results"]} == set(ids)
    assert len(run["results"]) > 60


def test_github_lines_survive_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a,b:c\n%.json"
    odd.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}')
    cli.main(["check", str(odd), "--deepspeed", "0.19.8", "--format", "github"])
    for line in capsys.readouterr().out.splitlines():
        assert re.fullmatch(
            r"::(error|warning|notice) file=[^,:\n]+(,line=\d+,col=\d+)?,title=[^,:\n]+::.+", line
        )
        assert "%0A" in line
        assert "%25" in line


def test_concise_and_full_say_each_finding_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}, "x\\ny": 1}',
    )
    _code, data = answer([path, "--deepspeed", "0.19.8"], capsys)
    wanted = [f["code"] for f in data["files"][0]["findings"]]
    cli.main(["check", path, "--deepspeed", "0.19.8", "--format", "concise"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split()[0] for line in lines] == wanted
    cli.main(["check", path, "--deepspeed", "0.19.8", "--format", "full"])
    out = capsys.readouterr().out
    assert [
        line.split(": ")[1].split()[0] for line in out.splitlines()[:-1] if not line.startswith(" ")
    ] == wanted


def test_a_model_makes_the_rules_on_host_memory_speak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    path = write(tmp_path, {**GOOD, "zero_optimization": offload})
    facts = {"schema_version": 1, "host": {"ram_total": 64 << 30, "ram_available": 60 << 30}, "gpus": []}
    machine = write(tmp_path, facts, "facts.json")
    argv = [path, "--deepspeed", "0.19.8", "--facts", machine, "--world-size", "1"]
    _code, without = answer(argv, capsys)
    assert {"code": "DS502", "needs": "model"} in without["files"][0]["skipped"]
    code, data = answer([*argv, "--model", "7B"], capsys)
    (found,) = [f for f in data["files"][0]["findings"] if f["code"] == "DS502"]
    assert "GiB of host RAM" in found["message"]
    assert code == 1
    assert cli.main(["check", path, "--model", "no-such-model-anywhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
