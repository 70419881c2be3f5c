"""Described machines, facts files, the round trip, advice."""

from __future__ import annotations

import dataclasses
import io
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstui.errors import DstuiError
from dstui.facts.advice import (
    arch_list,
    bad_arch_entries,
    install_advice,
    lacks,
    torch_requirement,
)
from dstui.facts.cards import CARDS, find_card
from dstui.facts.describe import describe, facts_for, load_facts
from dstui.facts.detect import detect
from dstui.facts.model import Facts, Gpu, Host, Interpreter, Scheduler, Toolchain
from dstui.facts.schema import json_schema
from dstui.paths import data_dir
from dstui.units import GiB, MiB

# --- described ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "memory", "capability"),
    [
        ("8x80GiB", 8, 80 * GiB, None),
        ("80GiB", 1, 80 * GiB, None),
        ("4 x 24GB", 4, 24 * 10**9, None),
        ("2X24g", 2, 24 * 10**9, None),
        ("8xA100-80G", 8, 81920 * MiB, (8, 0)),
        ("8xa100 80gb", 8, 81920 * MiB, (8, 0)),
        ("8xH100", 8, 81559 * MiB, (9, 0)),
        ("h200", 1, 143771 * MiB, (9, 0)),
        ("8x4090", 8, 24564 * MiB, (8, 9)),
        ("2xRTX 4090", 2, 24564 * MiB, (8, 9)),
        ("1xNVIDIA GeForce RTX 3090", 1, 24576 * MiB, (8, 6)),
        ("4xTesla V100-SXM2-32GB", 4, 32768 * MiB, (7, 0)),
        ("16xT4", 16, 15360 * MiB, (7, 5)),
        ("8xB200", 8, 183359 * MiB, (10, 0)),
    ],
)
def test_described(text: str, count: int, memory: int, capability: tuple[int, int] | None) -> None:
    facts = describe(text)
    assert facts.source == "described" and facts.gpus is not None
    assert len(facts.gpus) == count == facts.world_size
    assert {g.memory_total for g in facts.gpus} == {memory}
    assert facts.gpus[-1].index == count - 1
    assert facts.gpus[0].compute_capability == capability
    assert ("gpus.compute_capability" in facts.unknown) == (capability is None)


def test_nodes_and_ram() -> None:
    facts = describe("8x80GiB", nodes=2, ram="512GiB")
    assert facts.world_size == 16
    assert facts.host.memory_capacity == facts.host.memory_free == 512 * GiB
    assert describe("8x80GiB").host.ram_total is None
    assert "host.ram_total" in describe("8x80GiB").unknown
    assert describe("0", ram="64GiB").gpus == ()


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("8xA100", "no card called 'A100'", "A100-80G, A100-40G"),
        ("8xH1000", "no card called 'H1000'", "H100"),
        ("4xRTX4900", "no card called 'RTX4900'", "4090"),
        ("8xgarbage!", "no card called", "8x80GiB"),
        ("", "no GPUs are given", "8x80GiB"),
        ("0x80GiB", "0 GPUs", "--nodes"),
        ("99999x80GiB", "99999 GPUs", "--nodes"),
        ("8x80MiB", "not possible", "80GiB"),
        ("8x900TiB", "not possible", "80GiB"),
    ],
)
def test_described_wrongly(text: str, words: str, hint: str) -> None:
    with pytest.raises(DstuiError) as e:
        describe(text)
    assert words in e.value.message
    assert hint in (e.value.hint or "")


@pytest.mark.parametrize(
    ("more", "words"),
    [({"nodes": 0}, "0 nodes"), ({"ram": "12"}, "too little"), ({"ram": "x"}, "not a size")],
)
def test_described_with_wrong_numbers(more: dict[str, Any], words: str) -> None:
    with pytest.raises(DstuiError, match=words):
        describe("8x80GiB", **more)


def test_the_table_is_sound() -> None:
    assert len({c.key for c in CARDS}) == len(CARDS)
    for card in CARDS:
        assert find_card(card.key) is card and find_card(card.name) is card
        for alias in card.aliases:
            assert find_card(alias) is card
        assert 8 * GiB < card.memory < 300 * GiB and (7, 0) <= card.capability <= (12, 1)
    # An "80 GB" card is not 80 GiB.
    assert find_card("H100").memory < 80 * GiB == find_card("A100-80G").memory


# --- files --------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of type ``kind`` may hold."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.none() | st.one_of([values(a) for a in args if a is not type(None)])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values(args[0]), max_size=2).map(tuple)
        return st.tuples(*[values(a) for a in args])
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(_TEXT, values(args[1]), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-1, 1 << 60),
        bool: st.booleans(),
        str: _TEXT,
        float: st.floats(0, 1e6),
    }
    return simple[kind]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(values(Facts))
def test_round_trip(facts: Facts) -> None:
    facts = dataclasses.replace(facts, schema_version=1)
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_the_shipped_schema_is_the_model_and_accepts_this_machine() -> None:
    import jsonschema

    shipped = json.loads((data_dir("schemas") / "facts.json").read_text())
    assert shipped == json_schema(), "make it again: python -m dstui.facts.schema > schemas/facts.json"
    validator = jsonschema.Draft202012Validator(shipped)
    validator.check_schema(shipped)
    for facts in (detect(), describe("8xH100", ram="1TiB"), Facts(gpus=None)):
        validator.validate(facts.to_json())
    assert not validator.is_valid({"schema_version": 1, "gpus": [{"name": "no index"}]})
    assert not validator.is_valid({})


def test_file_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(gpus=(Gpu(0, name="NVIDIA H200"),), host=Host(ram_total=1 << 40))
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts.to_json()))
    assert load_facts(str(file)) == dataclasses.replace(facts, source="file")
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(file.read_bytes())))
    assert load_facts("-").source == "file"
    file.write_text(json.dumps(describe("8x80GiB").to_json()))
    assert load_facts(str(file)).source == "described"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(facts.to_json()).encode())  # a Windows editor's mark
    assert load_facts(str(file)).gpus == facts.gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1:1: is not JSON"),
        ('{"schema_version": 1,\n  oops}', ":2:3: is not JSON"),
        ("[]", "not a facts file"),
        ('{"train_batch_size": 8}', "not a facts file"),
        ('{"schema_version": 2}', "version 2"),
        ('{"schema_version": "x"}', "facts.schema_version: expected integer, found 'x'"),
        ('{"schema_version": 1, "gpus": 8}', "facts.gpus: expected array, found 8"),
        ('{"schema_version": 1, "gpus": [{"name": "x"}]}', "facts.gpus.0: 'index' is missing"),
        ('{"schema_version": 1, "gpus": [{"index": true}]}', "facts.gpus.0.index: expected integer"),
        ('{"schema_version": 1, "gpus": [{"index": 0, "compute_capability": [9]}]}', "compute_capability"),
        ('{"schema_version": 1, "host": {"ram_total": "64"}}', "facts.host.ram_total: expected integer"),
        ('{"schema_version": 1, "nodes": null}', "facts.nodes: expected integer, found None"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_wrong_files_name_the_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text)
    with pytest.raises(DstuiError) as e:
        load_facts(str(file))
    assert words in e.value.message and e.value.message.startswith(str(file))
    assert e.value.hint


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DstuiError, match="cannot be read: No such file"):
        load_facts(str(tmp_path / "absent.json"))
    with pytest.raises(DstuiError, match="cannot be read: Is a directory"):
        load_facts(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DstuiError, match="not UTF-8"):
        load_facts(str(tmp_path / "binary"))


def test_keys_of_a_later_release_are_ignored() -> None:
    data = {**Facts().to_json(), "new": 1}
    data["host"]["new"] = {"a": 1}
    assert Facts.from_json(data) == Facts()


def test_options_choose_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps(Facts(gpus=(Gpu(0),), host=Host(ram_total=GiB)).to_json()))
    assert facts_for(facts=str(file)).source == "file"
    assert facts_for(facts=str(file), nodes=4).world_size == 4
    bigger = facts_for(facts=str(file), ram="2TiB")
    assert bigger.host.ram_total == 2048 * GiB and bigger.gpus == (Gpu(0),)
    assert facts_for(gpus="2xL4", nodes=2).world_size == 4
    with pytest.raises(DstuiError, match="both describe"):
        facts_for(facts=str(file), gpus="8x80GiB")


# --- advice -------------------------------------------------------------------------------------------------

TOOLS = Toolchain(
    cuda_home="/usr/local/cuda",
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_version="13.0",
    compiler="/usr/bin/c++",
    compiler_version="12.2.0",
    ninja="/usr/bin/ninja",
    ninja_on_path=True,
    libaio=True,
    libaio_header=True,
    python_headers=True,
    package_manager="apt-get",
)
H200 = Gpu(0, name="NVIDIA H200", compute_capability=(9, 0))


def trainer(**packages: str | None) -> Interpreter:
    return Interpreter(
        path="/v/bin/python", origin="project", version="3.11.7", packages=packages, has_pip=True
    )


def machine(it: Interpreter | None, **changes: Any) -> Facts:
    base = Facts(
        gpus=(H200,),
        driver="580.95.05",
        cuda_driver="13.0",
        toolchain=TOOLS,
        interpreters=(it,) if it else (),
    )
    return dataclasses.replace(base, **changes)


def with_torch(cuda: str, torch: str = "2.11.0") -> Interpreter:
    return dataclasses.replace(trainer(deepspeed="0.19.8", torch=torch), torch_cuda=cuda)


def test_nothing_to_advise() -> None:
    assert install_advice(machine(with_torch("13.0"))) is None
    assert lacks(machine(with_torch("13.0"))) == ()


def test_the_command_names_interpreter_torch_and_archs() -> None:
    advice = install_advice(machine(trainer()))
    assert advice is not None
    assert advice.command == "TORCH_CUDA_ARCH_LIST=9.0 /v/bin/python -m pip install torch deepspeed"
    only = install_advice(machine(dataclasses.replace(trainer(torch="2.11.0"), torch_cuda="13.0")))
    assert only is not None and only.command.endswith("pip install deepspeed")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "torch"),
        ({"cuda_driver": "12.4"}, "torch<2.11"),
        ({"gpus": (Gpu(0, compute_capability=(7, 0)),)}, "torch<2.11"),
        ({"toolchain": dataclasses.replace(TOOLS, nvcc_version="12.8")}, "torch<2.11"),
        ({"gpus": (), "cuda_driver": None}, "torch"),
    ],
)
def test_torch_matches_driver_card_and_nvcc(changes: dict[str, Any], wanted: str) -> None:
    assert torch_requirement(machine(trainer(), **changes)) == wanted


def test_a_requirement_with_a_comparison_is_quoted_for_the_shell() -> None:
    advice = install_advice(machine(trainer(), cuda_driver="12.4"))
    assert advice is not None and "'torch<2.11'" in advice.command


def test_system_python_gets_a_venv_and_pipless_ones_get_pip() -> None:
    managed = dataclasses.replace(trainer(), path="/usr/bin/python3", externally_managed=True)
    advice = install_advice(machine(managed, gpus=()))
    assert advice is not None
    assert (
        advice.command == "/usr/bin/python3 -m venv .venv && .venv/bin/python -m pip install torch deepspeed"
    )
    bare = install_advice(machine(dataclasses.replace(trainer(), has_pip=False), gpus=()))
    assert bare is not None and bare.command.startswith("/v/bin/python -m ensurepip && ")
    nobody = install_advice(machine(None, gpus=()))
    assert nobody is not None and nobody.command.startswith("python3 -m venv .venv && ")


@pytest.mark.parametrize(
    ("facts", "code", "fix"),
    [
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, compiler=None)),
            "compiler",
            "apt-get install g++",
        ),
        (
            machine(
                with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, compiler=None, package_manager="dnf")
            ),
            "compiler",
            "dnf install gcc-c++",
        ),
        (
            machine(
                with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, compiler=None, package_manager=None)
            ),
            "compiler",
            "install a C++ compiler",
        ),
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, compiler=None, cxx="icpc")),
            "compiler",
            "unset CXX",
        ),
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, python_headers=False)),
            "headers",
            "apt-get install python3.11-dev",
        ),
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, ninja=None)),
            "ninja",
            "pip install ninja",
        ),
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, libaio=False)),
            "libaio",
            "libaio-dev",
        ),
        (machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, nvcc=None)), "nvcc", "CUDA 13.0"),
        (machine(with_torch("12.8", "2.10.0")), "cuda-mismatch", "CUDA 12.8"),
        (
            # CUDA 13 is not in the builder's list of interchangeable minor releases (0.19.8).
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, nvcc_version="13.1")),
            "cuda-mismatch",
            "DS_SKIP_CUDA_CHECK=1",
        ),
        (machine(with_torch("13.0"), cuda_driver="12.4"), "driver-too-old", "torch<2.11"),
        (machine(with_torch("", "2.13.0+cpu")), "torch-cpu", "--force-reinstall torch"),
        (
            machine(with_torch("13.0"), toolchain=dataclasses.replace(TOOLS, arch_list="9.0a")),
            "arch-list",
            "export TORCH_CUDA_ARCH_LIST=9.0",
        ),
    ],
)
def test_what_is_lacking(facts: Facts, code: str, fix: str) -> None:
    found = {lack.code: lack for lack in lacks(facts)}
    assert list(found) == [code]
    assert fix in found[code].fix and found[code].message


def test_cuda_12_minor_releases_are_interchangeable() -> None:
    facts = machine(with_torch("12.8", "2.10.0"), toolchain=dataclasses.replace(TOOLS, nvcc_version="12.4"))
    assert lacks(facts) == ()


def test_a_cpu_machine_is_not_told_about_cuda() -> None:
    tools = dataclasses.replace(TOOLS, nvcc=None, nvcc_version=None, cuda_home=None)
    assert lacks(machine(with_torch("", "2.13.0+cpu"), gpus=(), toolchain=tools)) == ()


def test_arch_lists() -> None:
    two = (Gpu(0, compute_capability=(9, 0)), Gpu(1, compute_capability=(8, 6)), H200)
    assert arch_list(Facts(gpus=two)) == "8.6;9.0"
    assert arch_list(Facts(gpus=())) is None and arch_list(Facts(gpus=(Gpu(0),))) is None
    assert bad_arch_entries("8.0;9.0+PTX 7.5") == []
    assert bad_arch_entries("8.0;9.0a Hopper") == ["9.0a", "Hopper"]


def test_the_training_interpreter() -> None:
    own = Interpreter(path="/o", origin="own")
    good = dataclasses.replace(with_torch("13.0"), path="/g")
    assert Facts(interpreters=(own, good)).interpreter is good
    asked = Interpreter(path="/a", origin="option")
    assert Facts(interpreters=(asked, good)).interpreter is asked  # --python is obeyed, then advised about
    assert Facts().interpreter is None and Facts().deepspeed is None
    assert Facts(interpreters=(own,)).interpreter is own


def test_described_machines_get_no_toolchain_advice() -> None:
    assert lacks(describe("8xH100")) == ()
    assert Scheduler().login_node is False
