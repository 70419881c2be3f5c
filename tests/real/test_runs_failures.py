"""Failures made on purpose, each judged right at first. What needs root or mounts is skipped elsewhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstui.cli import main
from dstui.runs.case import Diagnosis
from dstui.runs.diagnose import diagnose_run
from dstui.runs.store import RunDir, find_run, list_runs
from tests.conftest import EXTENSIONS

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent.parent / "data" / "scripts" / "failing.py"
KEEP = os.environ.get("DSTUI_KEEP_LOGS")
"""A folder that gets the log of each failure (``tests/data/logs``)."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    yield
    for run in list_runs():
        subprocess.run(
            [sys.executable, "-m", "dstui", "stop", "--now", run.id], capture_output=True, check=False
        )
        if KEEP and run.out_log.exists():
            name = request.node.name.removeprefix("test_").replace("[", "-").rstrip("]")
            shutil.copy(run.out_log, Path(KEEP) / f"{name}.log")


def command(tmp_path: Path, how: str, *args: str, options: tuple[str, ...] = (), **config: Any) -> list[str]:
    data = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        **config,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    words = [
        "run",
        "--config",
        str(path),
        "--num-gpus",
        "2",
        "--python",
        sys.executable,
        "--wait",
        "--no-preflight",
    ]
    return [*words, *options, "--", str(SCRIPT), "--how", how, *args]


def judged(words: list[str], code: int = 1) -> tuple[Diagnosis, RunDir]:
    assert main(words) == code
    run = find_run("last")
    return diagnose_run(run), run


def first(found: Diagnosis) -> str | None:
    return found.cause.code if found.cause else None


NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/dev/null/nvme"}}
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("how", "config", "code", "certainty"),
    [
        ("raise", {}, "DR710", "certain"),
        ("batch", {"train_batch_size": 7, "gradient_accumulation_steps": 1}, "DR301", "certain"),
        ("auto", {"train_micro_batch_size_per_gpu": "auto"}, "DR705", "certain"),
        ("client", {"optimizer": None, "zero_optimization": OFFLOAD}, "DR201", "certain"),
        ("unequal", {}, "DR501", "likely"),
        ("arch", {}, "DR703", "certain"),
        ("floor", {}, "DR602", "certain"),
        ("noconf", {}, "DR706", "certain"),
        ("fp16", {"fp16": {"enabled": True}}, "DR705", "certain"),  # the CPU has none
        ("nvcc", {}, "DR702", "certain"),
        ("template", {}, "DR804", "certain"),
        ("files", {}, "DR716", "certain"),
        ("accumulation", {}, "DR304", "likely"),
        ("nosync", {"zero_optimization": {"stage": 2}}, "DR302", "certain"),
        ("twice", {"zero_optimization": {"stage": 2}}, "DR105", "certain"),
        ("index", {}, "DR801", "certain"),
        (
            "weight",
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
            "DR106",
            "certain",
        ),
        ("memory", {}, "DR404", "certain"),
        ("loader", {}, "DR802", "certain"),
        ("ok", {"zero_optimization": NVME}, "DR203", "certain"),  # a path where no folder can be
    ],
)
def test_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, config: Any, code: str, certainty: str
) -> None:
    if how == "arch":
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    found, run = judged(command(tmp_path, how, **config))
    assert first(found) == code, run.out_log.read_text()[-3000:]
    assert found.cause is not None and found.cause.certainty == certainty


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_summary_of_another_launcher(tmp_path: Path, launcher: str) -> None:
    found, run = judged(command(tmp_path, "raise", options=("--launcher", launcher)))
    assert first(found) == "DR710", run.out_log.read_text()[-3000:]
    assert found.cause is not None and "the labels of row 17" in found.cause.detail
    assert found.cause.certainty == "certain"


def test_a_kill_under_torchrun(tmp_path: Path) -> None:
    found, run = judged(command(tmp_path, "kill", options=("--launcher", "torchrun")))
    assert first(found) in ("DR401", "DR721"), run.out_log.read_text()[-3000:]


def test_unmanaged_accumulation_with_offload_on_0_19_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release itself refuses; our fix for it passes our own check."""
    from dstui.config.document import Document
    from dstui.rules.engine import Context, check_document
    from dstui.runs.prices import applied

    from .test_config_oracle_releases import place

    folder = place("0.19.4")
    assert folder is not None
    monkeypatch.setenv("PYTHONPATH", str(folder))
    # an op that this release built has not the functions that the next one calls (DR718)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", f"{EXTENSIONS}-0.19.4")
    data = {"managed_gradient_accumulation": False, "zero_optimization": OFFLOAD}
    found, run = judged(command(tmp_path, "ok", **data))
    assert first(found) == "DR302", run.out_log.read_text()[-3000:]
    assert found.cause is not None and (found.cause.certainty, found.cause.checkpoint) == ("certain", 3)
    config = json.loads(run.config_path.read_text())
    fixed = applied(config, next(f.edits for f in found.fixes if f.edits))
    context = Context("0.19.4", world_size=2)
    before = check_document(Document.parse(json.dumps(config)), context)
    after = check_document(Document.parse(json.dumps(fixed)), context)
    assert any(f.severity == "error" for f in before.findings)
    assert not any(f.severity == "error" for f in after.findings)


def test_a_quota_at_save(tmp_path: Path) -> None:
    found, run = judged(command(tmp_path, "limit", "--save", str(tmp_path / "checkpoints")))
    assert first(found) == "DR901", run.out_log.read_text()[-3000:]


def test_a_checkpoint_of_another_world_size(tmp_path: Path) -> None:
    target = str(tmp_path / "checkpoints")
    assert main(command(tmp_path, "save", "--save", target)) == 0
    words = command(tmp_path, "ok", "--resume", target)
    words[words.index("--num-gpus") + 1] = "1"
    found, run = judged(words)
    assert first(found) == "DR903", run.out_log.read_text()[-3000:]


def test_nan_in_bf16(tmp_path: Path) -> None:
    found, _run = judged(command(tmp_path, "nan", bf16={"enabled": True}), 0)
    assert (first(found), found.outcome) == ("DR601", "finished")


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = str(s.getsockname()[1])
        words = command(tmp_path, "ok", options=("--master-port", port))
        found, run = judged(words)
        assert first(found) == "DR503", run.out_log.read_text()[-3000:]
        words.remove("--no-preflight")
        assert main(words) == 2  # and preflight names the owner


def test_a_script_without_local_rank(tmp_path: Path) -> None:
    words = command(tmp_path, "ok", "--no-local-rank-option", options=("--launcher", "deepspeed"))
    found, run = judged(words)
    assert first(found) == "DR713", run.out_log.read_text()[-3000:]
    assert any("local_rank" in fix.title for fix in found.fixes)


def test_a_missing_nvme_path_is_seen_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/no/such/disk"}}
    words = command(tmp_path, "ok", zero_optimization=zero)
    words.remove("--no-preflight")
    assert main(words) == 2
    assert "/no/such/disk" in capsys.readouterr().err


def in_namespace(setup: str, words: list[str], tmp_path: Path) -> RunDir:
    """Run ``dstui`` words after ``setup`` in a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare (mounts)")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    line = f"{setup} && exec {shlex.join([sys.executable, '-m', 'dstui', *words])}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return find_run("last")


@pytest.mark.parametrize(
    ("how", "size", "says"),
    [
        (
            "shm",
            "148m",
            "unable to allocate shared memory",
        ),  # room for DeepSpeed's buffers, not for the loader's rows
        ("shm", "8m", "No space left on device"),  # none even for a semaphore
        ("bus", "148m", "return code = -7"),  # SIGBUS: a mapped page that finds no room
    ],
)
def test_a_small_dev_shm(tmp_path: Path, how: str, size: str, says: str) -> None:
    run = in_namespace(f"mount -t tmpfs -o size={size} none /dev/shm", command(tmp_path, how), tmp_path)
    found = diagnose_run(run)
    assert says in run.out_log.read_text()
    assert first(found) == "DR403", run.out_log.read_text()[-3000:]


def test_a_full_disk_at_save(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints"
    target.mkdir()
    setup = f"mount -t tmpfs -o size=64k none {target}"
    run = in_namespace(setup, command(tmp_path, "save", "--save", str(target)), tmp_path)
    found = diagnose_run(run)
    assert first(found) == "DR901", run.out_log.read_text()[-3000:]


def test_a_host_oom_kill(tmp_path: Path) -> None:
    """A memory cgroup (v1) of 1.5 GiB; rank 1 eats until the kernel kills it."""
    root = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and cgroup v1")
    group = root / f"dstui-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1536 << 20))
    except OSError as e:
        pytest.skip(f"a memory cgroup cannot be made: {e}")
    words = shlex.join([sys.executable, "-m", "dstui", *command(tmp_path, "eat")])
    try:
        done = subprocess.run(
            ["sh", "-c", f"echo $$ > {group}/cgroup.procs && exec {words}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        run = find_run("last")
        found = diagnose_run(run)
        last = run.exit or {}
        assert (last["rank_code"], last["first_rank"]) == (-9, 1)
        assert last["oom_kills"]["cgroup"] >= 1
        assert found.cause is not None
        assert (found.cause.code, found.cause.certainty) == ("DR401", "certain")
    finally:
        if group.is_dir():
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    import time

                    time.sleep(0.1)
