"""The launcher's command line: read as the launcher reads it, and the traps that it alone decides."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstui import cli
from dstui.errors import DstuiError
from dstui.rules.command import FLAGS, Launch, parse_launch, slots_of
from dstui.rules.registry import all_rules
from tests.rules_tools import check, codes

CONFIG = {"train_micro_batch_size_per_gpu": 2}
MINE = {r.code for r in all_rules() if r.code[:4] in ("DS92", "DS93")}


def told(command: str, release: str = "0.19.8", **say: Any) -> list[str]:
    report = check(CONFIG, launch=command, release=release, **say)
    assert "DS100" not in codes(report)
    return [c for c in codes(report) if c in MINE]


FLAGGED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("DS920", "deepspeed -i localhost:0 -e localhost:1 t.py", "0.19.8", {}),
    ("DS920", "deepspeed --exclude=localhost:1 --num_nodes 1 t.py", "0.14.0", {}),
    ("DS920", "CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_nodes 1 t.py", "0.19.8", {}),
    ("DS920", "CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_accelerators 0 t.py", "0.19.8", {}),
    ("DS921", "deepspeed --ssh_port 22 t.py", "0.10.1", {}),
    ("DS921", "deepspeed --node_rank=0 t.py", "0.14.4", {}),
    ("DS921", "deepspeed --no_ssh t.py", "0.14.4", {}),
    ("DS921", "deepspeed --venv_script v t.py", "0.17.0", {}),
    ("DS921", "deepspeed --quiet t.py", "0.17.5", {}),
    ("DS921", "deepspeed -q t.py", "0.17.5", {}),
    ("DS921", "deepspeed --nproc_per_node 4 t.py", "0.19.8", {}),
    ("DS921", "deepspeed --num 4 t.py", "0.19.8", {}),
    ("DS922", "deepspeed --min_elastic_nodes 1 t.py", "0.19.8", {}),
    ("DS922", "deepspeed --max_elastic_nodes=1 t.py", "0.19.8", {}),
    ("DS923", "CUDA_VISIBLE_DEVICES=2,3 deepspeed -i localhost:0,1 t.py", "0.14.0", {}),
    ("DS923", "env CUDA_VISIBLE_DEVICES=GPU-1 deepspeed --num_gpus 1 t.py", "0.19.8", {}),
    ("DS924", "CUDA_VISIBLE_DEVICES=GPU-8f2a,GPU-11aa deepspeed t.py", "0.19.8", {}),
    ("DS924", "CUDA_VISIBLE_DEVICES=0,1, deepspeed t.py", "0.19.8", {}),
    ("DS924", "deepspeed -i localhost:a t.py", "0.19.8", {}),
    ("DS924", "deepspeed -e localhost:a t.py", "0.19.8", {}),
    ("DS925", "deepspeed -i localhost:0,2 t.py", "0.16.0", {"gpus": 2}),
    ("DS925", "deepspeed -e localhost:2 t.py", "0.16.0", {"gpus": 2}),
    ("DS925", "CUDA_VISIBLE_DEVICES=-1 deepspeed t.py", "0.19.8", {"gpus": 2}),
    ("DS926", "deepspeed -H hosts -i a@b:0,1 t.py", "0.15.2", {}),
    ("DS927", "deepspeed --num_accelerators=3 t.py", "0.9.5", {"gpus": 2}),
    ("DS928", "deepspeed t.py --include=localhost:0", "0.19.8", {}),
    ("DS929", "deepspeed --launcher SLURM -H h -i a:0,1@b:0 t.py", "0.19.7", {}),
    ("DS929", "deepspeed --launcher slurm -H h -e a:0,2 t.py", "0.19.8", {}),
    ("DS930", "DS_ENV_FILE=x deepspeed t.py", "0.9.5", {}),
]

QUIET: list[tuple[str, str, dict[str, Any]]] = [
    ("deepspeed --num_gpus 2 --num_nodes 2 -H hosts t.py", "0.19.8", {"gpus": 2}),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed t.py --deepspeed ds.json", "0.19.8", {"gpus": 2}),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 2 t.py", "0.19.8", {"gpus": 2}),
    ("CUDA_VISIBLE_DEVICES= deepspeed --num_gpus 2 t.py", "0.19.8", {}),
    ("CUDA_VISIBLE_DEVICES=MIG-1 deepspeed -H hosts t.py", "0.19.8", {}),
    ("python -m deepspeed.launcher.runner --elastic_training t.py", "0.19.7", {}),
    ("deepspeed --no_ssh --node_rank 0 t.py", "0.14.5", {}),
    ("deepspeed --ssh_port 22 t.py", "0.10.2", {}),
    ("deepspeed --venv_script v t.py", "0.17.1", {}),
    ("deepspeed --log_level=error -q t.py", "0.17.6", {}),
    ("deepspeed -ilocalhost:1 t.py", "0.19.6", {"gpus": 2}),
    ("deepspeed -i localhost t.py", "0.15.1", {"gpus": 2}),
    ("deepspeed -i localhost t.py", "0.19.7", {"gpus": 2}),
    ("deepspeed --num_gpus 2 t.py", "0.19.8", {"gpus": 0}),
    ("deepspeed -i worker-3:9 -H hosts t.py", "0.19.8", {"gpus": 2}),
    ("deepspeed t.py --elastic_training --launcher x --module y", "0.19.8", {}),
    ("deepspeed --launcher slurm -H h -i a:0,1@b:0,1 t.py", "0.19.8", {}),
    ("deepspeed --launcher slurm -H h -i a:1@b:1 t.py", "0.19.6", {}),
    ("deepspeed --launcher slurm -i localhost:1 t.py", "0.19.8", {}),
    ("DS_ENV_FILE=x deepspeed t.py", "0.10.1", {}),
]


@pytest.mark.parametrize(("code", "command", "release", "say"), FLAGGED)
def test_a_trap_is_named(code: str, command: str, release: str, say: dict[str, Any]) -> None:
    assert told(command, release, **say) == [code]


@pytest.mark.parametrize(("command", "release", "say"), QUIET)
def test_a_command_that_works_is_not_flagged(command: str, release: str, say: dict[str, Any]) -> None:
    assert told(command, release, **say) == []


def test_every_rule_of_the_command_line_is_here_or_its_page_shows_it() -> None:
    here = {code for code, *_rest in FLAGGED}
    assert here == MINE
    for rule in all_rules():
        if rule.code in MINE:
            assert rule.context["launch"]


def test_without_a_command_these_rules_are_neither_told_nor_listed_as_skipped() -> None:
    report = check(CONFIG)
    assert not MINE & {*codes(report), *(s.code for s in report.skipped)}


def test_gpus_that_are_not_known_are_what_is_missing() -> None:
    for command, code in (
        ("deepspeed -i localhost:9 t.py", "DS925"),
        ("deepspeed --num_gpus 9 t.py", "DS927"),
    ):
        report = check(CONFIG, launch=command)
        assert [s.needs for s in report.skipped if s.code == code] == ["facts.gpus"]


def test_what_the_hint_of_a_wrong_launcher_release_says() -> None:
    report = check(CONFIG, launch="deepspeed --log_level error t.py", release="0.17.5")
    finding = next(f for f in report.findings if f.code == "DS921")
    assert finding.message == "the launcher of 0.17.5 has no option --log_level"
    assert finding.hint == "the flag came with 0.17.6"
    report = check(CONFIG, launch="deepspeed --num_gpu_s 2 t.py")
    assert "--num_gpus" in next(f for f in report.findings if f.code == "DS921").hint


def test_more_ranks_than_gpus_is_told_once() -> None:
    report = check(CONFIG, launch="deepspeed --num_gpus 4 t.py", gpus=2, world_size=4)
    assert [c for c in codes(report) if c in {"DS901", "DS927"}] == ["DS927"]


def test_parts_of_a_command() -> None:
    found = parse_launch(
        "A=1 env CUDA_VISIBLE_DEVICES=0,1 /opt/bin/deepspeed --num_gpu 4 \\\n --master_port=1 -Hh 'my train.py' -i x --lr 1",
        "0.19.8",
    )
    assert found == Launch(
        "deepspeed",
        {"--num_gpus": "4", "--master_port": "1", "--hostfile": "h"},
        {"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
        "my train.py",
        ("-i", "x", "--lr", "1"),
    )


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("deepspeed t.py", None),
        ("deepspeed --num_gpus 4 t.py", 4),
        ("deepspeed -H h --num_gpus 4 t.py", None),
        ("deepspeed -H h --num_gpus 4 --num_nodes 2 t.py", 8),
        ("deepspeed -i a:0,1@b:0,1,1 t.py", 4),
        ("deepspeed -i a:0@b t.py", None),
        ("CUDA_VISIBLE_DEVICES=3,5 deepspeed t.py", 2),
        ("CUDA_VISIBLE_DEVICES=3,5 deepspeed --num_gpus 1 t.py", 1),
    ],
)
def test_ranks(command: str, ranks: int | None) -> None:
    assert parse_launch(command, "0.19.8").ranks == ranks


@pytest.mark.parametrize(
    "command", ["", "A=1", "torchrun t.py", "python t.py", "deepspeed 't.py", "python -m"]
)
def test_what_is_no_command_of_the_launcher_is_refused(command: str) -> None:
    with pytest.raises(DstuiError) as caught:
        parse_launch(command, "0.19.8")
    assert caught.value.hint


def test_slots_as_the_launcher_reads_them() -> None:
    assert slots_of("a@b:2,0") == {"a": [], "b": [0, 2]}
    assert slots_of("") == {}
    assert slots_of("a:") is None
    assert slots_of("a:0:1") is None


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}', encoding="utf-8")
    base = ["check", str(path), "--deepspeed", "0.19.8"]
    assert cli.main([*base, "--launch", "deepspeed --num_gpus 4 t.py", "--format", "concise"]) == 0
    assert cli.main([*base, "--launch", "deepspeed --num_gpus 3 t.py"]) == 1
    capsys.readouterr()
    assert cli.main([*base, "--launch", "deepspeed --elastic_training t.py"]) == 1
    assert "DS922" in capsys.readouterr().out
    assert cli.main([*base, "--launch", "torchrun t.py"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_the_page_shows_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "DS922"]) == 0
    assert "    deepspeed --elastic_training --num_gpus 2 train.py\n" in capsys.readouterr().out


def _real() -> tuple[str, Callable[[list[str]], argparse.Namespace]]:
    """(release, ``parse_args``) of the installed launcher; the function alone, torch is not imported."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DeepSpeed is not installed")
    root = Path(spec.origin).parent
    tree = ast.parse((root / "launcher" / "runner.py").read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "parse_args")
    names: dict[str, Any] = {
        "argparse": argparse,
        "DLTS_HOSTFILE": "",
        "PDSH_LAUNCHER": "pdsh",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    }
    exec(compile(ast.Module([function], []), "runner.py", "exec"), names)
    from importlib.metadata import version

    return version("deepspeed"), names["parse_args"]


def test_commands_are_read_as_the_installed_launcher_reads_them() -> None:
    release, parse_args = _real()
    rng = random.Random(7)
    pool = [
        *sorted(FLAGS - {"--help"}),
        "-i",
        "-e",
        "-H",
        "-q",
        "--num",
        "--incl",
        "--no_s",
        "--master_p",
        "--foo",
    ]
    pool += ["--num_gpus=2", "-ia:1", "--include=a:0", "-Hx", "t.py", "3", "tune", "info"]
    read = refused = 0
    for _round in range(3000):
        argv = [*rng.choices(pool, k=rng.randint(0, 4)), "t.py", *rng.choices(pool, k=rng.randint(0, 2))]
        ours = parse_launch(" ".join(["deepspeed", *argv]), release)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                theirs = parse_args(argv)
        except SystemExit:
            refused += 1
            continue
        read += 1
        assert ours.unknown is None, argv
        assert (ours.script, list(ours.script_args)) == (theirs.user_script, theirs.user_args), argv
        assert (ours.include, ours.exclude) == (theirs.include, theirs.exclude), argv
        assert (ours.num_gpus, ours.num_nodes) == (theirs.num_gpus, theirs.num_nodes), argv
    assert read > 300
    assert refused > 300
