"""The probe in plain Python processes: who is measured, whose sitecustomize still runs, what an error of ours does."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dstui.runs import probe
from dstui.runs.command import Command
from dstui.runs.measured import equip, read_probe
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir

SOURCE = Path(probe.__file__).read_text(encoding="utf-8")
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run" / "probe"
    made.mkdir(parents=True)
    (made / "sitecustomize.py").write_text(SOURCE)
    (made / "settings.json").write_text('{"schema_version": 1, "steps": 3, "end": true}')
    return made


def python(
    folder: Path, code: str, *options: str, path: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join(p for p in (str(folder), path) if p)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**environ, "PYTHONPATH": places, **(RANK if env is None else env)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def events(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    path = folder / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_file_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module).partition(".")[0])
    assert names <= set(sys.stdlib_module_names), names
    heavy = {"pathlib", "json", "typing", "functools", "ctypes", "threading"}
    top = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    assert not top & heavy  # it is loaded in every Python process of the run


def test_a_rank_is_measured_until_it_ends_by_itself(folder: Path) -> None:
    done = python(folder, "x = bytearray(50 << 20)")
    assert (done.returncode, done.stderr) == (0, "")
    start, load, end = events(folder)
    assert start["event"] == "start" and start["rank"] == 0
    assert load["phase"] == "load" and load["unfinished"] is True
    assert int(str(load["rss_peak"])) > 50 << 20
    assert end["event"] == "end" and end["reason"] == "script" and end["steps"] == 0


@pytest.mark.parametrize("env", [{}, {"RANK": "0"}, {"RANK": "x", "LOCAL_RANK": "0"}])
def test_other_processes_are_left_alone(folder: Path, env: dict[str, str]) -> None:
    code = "import os, sys; print(os.environ['PYTHONPATH']); print([type(f).__name__ for f in sys.meta_path])"
    done = python(folder, code, env=env)
    assert done.stdout.splitlines()[0] == str(folder)  # so that the ranks which they start still find it
    assert "'Finder'" not in done.stdout
    assert not list(folder.glob("rank-*"))


def test_launchers_and_helpers_are_no_ranks() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0"}
    assert probe.is_rank(env, ["python", "-u", "train.py", "-m", "deepspeed.launcher"])
    assert not probe.is_rank(env, ["python", "-m", "torch.distributed.run", "train.py"])
    assert not probe.is_rank(env, ["python", "-m", "deepspeed.launcher.launch", "train.py"])
    assert not probe.is_rank(env, ["python", "-c", "from multiprocessing.spawn import spawn_main; ..."])


def test_what_a_rank_starts_sees_nothing_of_it(folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "print(os.environ.get('PYTHONPATH'))\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(any(\"probe\" in p for p in sys.path))'])\n"
        "print(any('probe' in p for p in sys.path))\n"
    )
    own = tmp_path / "own"
    own.mkdir()
    lines = sorted(python(folder, code, path=str(own)).stdout.split())
    assert lines == sorted([str(own), "False", "False"])
    assert sorted(python(folder, code).stdout.split()) == sorted(["None", "False", "False"])


def test_a_forked_child_writes_nothing(folder: Path) -> None:
    code = "import os, sys\npid = os.fork()\nif not pid: sys.exit(0)\nos.waitpid(pid, 0)"
    assert python(folder, code).returncode == 0
    assert [e["event"] for e in events(folder)].count("end") == 1


@pytest.mark.parametrize("rank", [RANK, {}])
def test_the_users_sitecustomize_still_runs(folder: Path, tmp_path: Path, rank: dict[str, str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.mark = __name__ + ' ' + __file__\nVALUE = 7\n")
    (own / "usercustomize.py").write_text("import sys\nsys.user_mark = True\n")
    code = "import sys, sitecustomize as s; print(sys.mark); print(s.VALUE, s.__file__); print(hasattr(sys, 'user_mark'))"
    done = python(folder, code, path=str(own), env=rank)
    where = str(own / "sitecustomize.py")
    import site

    assert done.stdout.splitlines()[:2] == [f"sitecustomize {where}", f"7 {where}"], done.stderr
    assert done.stdout.splitlines()[2] == str(bool(site.ENABLE_USER_SITE))
    assert bool(events(folder)) == bool(rank)


def test_an_error_in_the_users_sitecustomize_is_told_as_python_tells_it(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    with_probe = python(folder, "print('goes on')", path=str(own))
    without = python(own, "print('goes on')")
    assert (with_probe.returncode, with_probe.stdout) == (without.returncode, without.stdout)
    assert "RuntimeError: mine" in with_probe.stderr and "RuntimeError: mine" in without.stderr


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_isolated_python_is_not_measured_and_not_hurt(folder: Path, option: str) -> None:
    done = python(folder, "print('ran')", option)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    assert not events(folder)


@pytest.mark.parametrize("damage", ["no settings", "bad settings", "no place"])
def test_a_probe_that_cannot_start_says_so_and_lets_the_script_run(folder: Path, damage: str) -> None:
    if damage == "no settings":
        (folder / "settings.json").unlink()
    elif damage == "bad settings":
        (folder / "settings.json").write_text("{")
    else:
        (folder / "rank-0.jsonl").mkdir()
    done = python(folder, "print('ran')")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith("[dstui] this rank is not measured:") and done.stderr.count("\n") == 1


def test_hooked_modules_are_imported_as_ever(folder: Path, tmp_path: Path) -> None:
    """The very spec and loader of Python's own, before and after; a failing import fails as ever."""
    own = tmp_path / "own"
    (own / "deepspeed" / "runtime").mkdir(parents=True)
    (own / "deepspeed" / "__init__.py").write_text("")
    (own / "deepspeed" / "runtime" / "__init__.py").write_text("")
    (own / "deepspeed" / "runtime" / "engine.py").write_text("class DeepSpeedEngine:\n    pass\n")
    (own / "torch.py").write_text("raise ImportError('broken torch')\n")
    code = (
        "import importlib, sys\n"
        "try:\n    import torch\nexcept ImportError as e: print(e)\n"
        "import deepspeed.runtime.engine as m\n"
        "print(type(m.__spec__.loader).__name__, 'exec_module' in vars(m.__spec__.loader))\n"
        "importlib.reload(m); print('reloaded')\n"
    )
    done = python(folder, code, path=str(own))
    assert done.stdout.splitlines() == ["broken torch", "SourceFileLoader False", "reloaded"], done.stderr


def test_what_ranks_wrote_is_read_whatever_was_cut(tmp_path: Path) -> None:
    from dstui.runs.store import RunDir

    run = RunDir(tmp_path)
    assert read_probe(run) is None
    (tmp_path / "probe").mkdir()
    G = 1 << 30  # noqa: N806
    for rank in (0, 1):
        lines = [
            {"event": "start", "t": 1},
            {"event": "phase", "t": 1, "phase": "load", "rss_peak": G},
            {"event": "phase", "t": 1, "phase": "forward", "rss_peak": 2 * G, "allocated": 10 * G + rank, "reserved": 12 * G,
             "reserved_now": 11 * G, "card": 13 * G, "card_before": 600 << 20, "pinned": G, "retries": rank},
            {"event": "step", "t": 1, "step": 1, "seconds": 9.0},
            {"event": "step", "t": 1, "step": 2, "seconds": 1.0},
            {"event": "step", "t": 1, "step": 3, "seconds": 2.0 + rank},
            {"event": "model", "t": 1, "params": 5},
        ]  # fmt: skip
        text = "\n".join(json.dumps(line) for line in lines) + '\n{"event": "phase", "pha'
        (tmp_path / "probe" / f"rank-{rank}.jsonl").write_text(text)
    m = read_probe(run)
    assert m is not None
    assert (m.ranks, m.steps, m.retries) == (2, 3, 1)
    assert (m.allocated, m.reserved, m.host, m.pinned) == (10 * G + 1, 12 * G, 4 * G, 2 * G)
    assert (m.overhead, m.device) == (
        2 * G,
        14 * G,
    )  # 12 reserved at the peak, and 2 beside what is reserved now
    assert m.step_time == 2.0  # the median of 1 and 3 on the slower rank; the first step does not count
    assert m.seen == {"params": 5}


def test_a_card_that_others_use_gives_no_device_figure(tmp_path: Path) -> None:
    from dstui.runs.store import RunDir

    (tmp_path / "probe").mkdir()
    line = {"event": "phase", "phase": "load", "rss_peak": 1, "allocated": 5, "reserved": 6, "reserved_now": 6,
            "card": 9 << 30, "card_before": 4 << 30}  # fmt: skip
    (tmp_path / "probe" / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    m = read_probe(RunDir(tmp_path))
    assert m is not None and m.reserved == 6 and m.device is None and m.overhead is None


@pytest.mark.parametrize(("driver", "used"), [({}, 20000), ({"STUB_OLD": "1"}, 20600)])
def test_a_card_is_read_as_the_sampler_reads_it(tmp_path: Path, driver: dict[str, str], used: int) -> None:
    """As nvidia-smi shows it: the driver's own reserve is not part of what is used, where the driver tells it apart."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("no C compiler for the NVML stand-in")
    stub = Path(__file__).resolve().parent.parent / "data" / "nvml_stub.c"
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(stub)], check=True)
    code = """
from dstui.facts.gpu import NvmlSession
from dstui.runs.probe import Nvml
session = NvmlSession(None)
assert session.open()
print([n for _handle, n in Nvml().cards().values()], [g.memory_used for g in session.sample()])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), **driver},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = [used << 20, (used - 20000 + 4) << 20]
    assert done.stdout.strip() == f"{seen} {seen}"


@pytest.mark.parametrize(
    ("comms", "level"),
    [
        ({"enabled": True, "verbose": True}, "INFO"),
        ({"enabled": True, "verbose": False}, "WARNING"),
        ({"enabled": False, "verbose": True}, "WARNING"),
        (None, "WARNING"),
    ],
)
def test_a_logger_of_warnings_talks_where_the_config_asks_for_lines(
    tmp_path: Path, comms: dict[str, bool] | None, level: str
) -> None:
    """0.17.6-0.19.2 make it so (utils/logging.py); nothing else of the script's logging changes."""
    run = RunDir(tmp_path / "run")
    config = json.dumps({} if comms is None else {"comms_logger": comms})
    command = Command((), {}, ".", "python", sys.executable, 1, 1, None, None, files={"config.json": config})
    equipped = equip(command, RunSpec(script="x.py", measure=3), run, {})
    folder = run.path / "probe"
    folder.mkdir(parents=True)
    for name in ("sitecustomize.py", "settings.json"):
        (folder / name).write_text(equipped.files[f"probe/{name}"])
    own = tmp_path / "own" / "deepspeed" / "runtime"
    own.mkdir(parents=True)
    (own.parent / "__init__.py").write_text(
        "import logging\nlogger = logging.getLogger('DeepSpeed')\nlogger.setLevel(logging.WARNING)\n"
        "handler = logging.StreamHandler()\nhandler.setLevel(logging.WARNING)\nlogger.addHandler(handler)\n"
    )
    (own / "__init__.py").write_text("")
    (own / "engine.py").write_text("class DeepSpeedEngine:\n    pass\n")
    code = (
        "import logging, deepspeed.runtime.engine\nlogger = logging.getLogger('DeepSpeed')\n"
        "print(*{logging.getLevelName(x.level) for x in [logger, *logger.handlers]}, logging.getLogger().level)"
    )
    done = python(folder, code, path=str(tmp_path / "own"))
    assert done.stdout.split() == [level, "30"], done.stderr
