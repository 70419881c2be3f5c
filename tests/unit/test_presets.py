"""Preset files: shipped ones, the user's, names, collisions, broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstui import i18n, paths
from dstui.config import presets
from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.session.check import check_text
from tests.walks import OPENED

SHIPPED = [p.name for p in presets.list_presets() if p.shipped]


def user(name: str, text: str) -> Path:
    folder = paths.user_presets_dir()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(text)
    return path


def test_the_shipped_ones() -> None:
    assert SHIPPED == [
        "plain-dp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero-infinity",
        "lora-zero2", "inference-zero3", "hf-zero2-offload", "hf-zero3-offload",
    ]  # fmt: skip
    for p in presets.list_presets():
        raw = json.loads((paths.data_dir("presets") / f"{p.name}.json").read_text())
        assert raw["name"] == p.name and raw["schema_version"] == 1
        for key in ("title", "when", "needs", "source"):
            assert raw[key].strip(), (p.name, key)
        assert p.engine in ("plain", "hf")
        assert ("auto" in json.dumps(p.config)) == (p.engine == "hf")


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("release", ["0.19.4", "0.19.8"])
def test_no_rule_has_anything_against_a_shipped_preset(name: str, release: str) -> None:
    p = presets.load(name)
    report = check_text(presets.export(name), engine=p.engine, path=name, release=release, world_size=8)
    assert report.verdict != "rejected"
    bad = [
        (f.code, f.message)
        for f in report.findings
        if f.severity.value in ("error", "silent-wrong", "no-effect")
    ]
    assert not bad


@pytest.mark.parametrize("name", SHIPPED)
def test_offload_blocks_say_pin_memory(name: str) -> None:
    zero = presets.load(name).config["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        if key in zero:
            assert isinstance(zero[key]["pin_memory"], bool)


def test_save_load_copy_rename_delete() -> None:
    made = presets.copy("zero2", "mine")
    assert made.path == paths.user_presets_dir() / "mine.json" and not made.shipped
    assert presets.load("mine").config == presets.load("zero2").config
    renamed = presets.rename("mine", "mine.v2")
    assert renamed.name == "mine.v2" and json.loads(renamed.path.read_text())["name"] == "mine.v2"
    with pytest.raises(DstuiError):
        presets.load("mine")
    assert presets.rename("mine.v2", "Mine.V2").name == "Mine.V2"  # case alone may change
    gone = presets.delete("Mine.V2")
    assert not gone.exists()
    assert [p.name for p in presets.list_presets()] == SHIPPED


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "-x", "a b", "é", "x" * 65, "con", "x.", "a\n"]
)
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(DstuiError, match="preset name"):
        presets.copy("zero2", name)
    assert not paths.user_presets_dir().exists() or list(paths.user_presets_dir().iterdir()) == []


def test_collisions_are_refused() -> None:
    presets.copy("zero2", "mine")
    for taken in ("mine", "MINE", "zero3", "Zero3"):
        with pytest.raises(DstuiError, match="exists already"):
            presets.copy("zero1", taken)
    presets.copy("zero2", "other")
    with pytest.raises(DstuiError, match="exists already"):
        presets.rename("other", "mine")
    with pytest.raises(DstuiError, match="read-only"):
        presets.save_user(presets.load("zero2"), overwrite=True)


@pytest.mark.parametrize("what", ["delete", "rename"])
def test_shipped_ones_are_read_only(what: str) -> None:
    with pytest.raises(DstuiError, match="read-only") as e:
        presets.delete("zero2") if what == "delete" else presets.rename("zero2", "x")
    assert "copy zero2" in (e.value.hint or "")


def test_an_unknown_name_gets_a_near_one() -> None:
    with pytest.raises(DstuiError) as e:
        presets.load("zero-3")
    assert "zero3" in (e.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"schema_version": 1}', '{"schema_version": "1", "config": {}}',
        '{"schema_version": 1, "config": []}', '{"schema_version": 9, "config": {}}',
        '{"schema_version": 1, "config": {}, "engine": "x"}', '{"schema_version": 1, "config": {}, "title": 3}',
        '{"schema_version": 1, "config": {}, "config": {}}', '{"schema_version": 1, "config": {}, "fields": 1}', "\x00",
    ],
)  # fmt: skip
def test_a_broken_file_is_listed_with_its_problem(text: str) -> None:
    user("broken", text)
    presets.copy("zero2", "good")
    found = {p.name: p for p in presets.list_presets()}
    assert found["broken"].problem and not found["good"].problem
    with pytest.raises(DstuiError):
        presets.load("broken")
    presets.delete("broken")
    assert presets.find("broken") is None


def test_import_takes_a_config_as_people_pass_it_round(tmp_path: Path) -> None:
    for i, data in enumerate(OPENED):
        path = tmp_path / f"config {i}.json"
        path.write_text("// mine\n" + json.dumps(data))
        made = presets.import_config(str(path))
        assert made.name == f"config-{i}" and made.config == data
        assert made.engine == ("hf" if "auto" in json.dumps(data) else "plain")
        assert json.loads(presets.export(made.name)) == data


def test_import_of_a_preset_file_keeps_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(presets.export("zero3", whole=True))
    made = presets.import_config(str(path), "given3")
    assert made.title == "ZeRO-3" and made.when == presets.load("zero3").when and not made.shipped


def test_the_seed_files_load_and_their_old_names_are_explained(shared: Path) -> None:
    for path in sorted((shared / "corpus" / "seed").glob("*.json")):
        made = presets.import_config(str(path), path.stem)
        assert made.engine == "hf"
        report = check_text(presets.export(made.name), engine=made.engine, path=made.name, world_size=8)
        named = {f.pointer for f in report.findings}
        assert any(p.startswith("/bfloat16") for p in named), [f.message for f in report.findings]
        if "zero3" in path.stem:
            assert "/zero_optimization/stage3_gather_fp16_weights_on_model_save" in named


def test_floats_stay_floats() -> None:
    assert '"gradient_clipping": 1.0' in presets.export("zero2")


def test_a_draft_that_is_no_preset_changes_nothing(tmp_path: Path) -> None:
    made = presets.copy("zero2", "mine")
    assert made.path is not None
    before = made.path.read_bytes()
    draft = tmp_path / "d.json"
    draft.write_text('{"schema_version": 1}')
    with pytest.raises(DstuiError):
        presets.replace_file("mine", draft)
    assert made.path.read_bytes() == before
    draft.write_text('// kept\n{"schema_version": 1, "config": {"train_batch_size": 4}}')
    assert presets.replace_file("mine", draft).config == {"train_batch_size": 4}
    assert "// kept" in made.path.read_text()


def test_titles_are_translated_and_files_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "_", lambda text: f"<{text}>")
    p = presets.load("zero2")
    assert p.title == "<ZeRO-2>" and p.source.startswith("ZeRO paper")
    assert '"title": "ZeRO-2"' in presets.export("zero2", whole=True)
    assert i18n.language() == "en"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSTUI_CONFIG_HOME", str(tmp_path / "file" / "x"))
    assert len(presets.list_presets()) == len(SHIPPED)
    with pytest.raises(DstuiError, match="cannot be made"):
        presets.copy("zero2", "mine")


def test_user_presets_are_read_as_deepspeed_reads(tmp_path: Path) -> None:
    text = (
        '{"schema_version": 1, "engine": "plain", "title": "T", // c\n "config": {"train_batch_size": 8,},}'
    )
    user("mine", text)
    config: Any = presets.load("mine").config
    assert config == Document.parse('{"train_batch_size": 8}').data
