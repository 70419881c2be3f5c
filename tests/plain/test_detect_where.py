"""The detect and where verbs: text, JSON, options, errors, and what they import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dstui import cli, i18n, paths
from dstui.facts.describe import load_facts
from dstui.facts.model import (
    UNLIMITED,
    Cgroup,
    Facts,
    Gpu,
    GpuProcess,
    Host,
    Interpreter,
    Scheduler,
    Storage,
    Toolchain,
)
from dstui.plain.detect import render
from dstui.units import GiB, MiB

FULL = Facts(
    gpus=(
        Gpu(
            index=0,
            uuid="GPU-aaaa1111-0000-0000-0000-000000000000",
            name="NVIDIA H200",
            memory_total=143771 * MiB,
            memory_free=100000 * MiB,
            compute_capability=(9, 0),
            pcie_generation=5,
            pcie_generation_max=5,
            pcie_width=16,
            pcie_width_max=16,
            nvlink_peers=(1, 2, 3, 5),
            p2p_peers=(1, 2, 3, 5),
            numa_node=1,
            mig_enabled=False,
            processes=(
                GpuProcess(pid=4242, user="ann", name="python train.py", memory=40 * GiB, kind="compute"),
            ),
        ),
        Gpu(index=1, name="NVIDIA H200", memory_total=143771 * MiB, memory_free=143771 * MiB),
        Gpu(index=2),
    ),
    driver="580.95.05",
    cuda_driver="13.0",
    visible_devices="0,1,2",
    host=Host(
        hostname="node7",
        ram_total=2000 * GiB,
        ram_available=1500 * GiB,
        cgroup=Cgroup(version=2, limit=512 * GiB, usage=100 * GiB, reclaimable=60 * GiB, oom_kills=1),
        memlock_soft=65536,
        memlock_hard=UNLIMITED,
        nofile_soft=1024,
        nofile_hard=4096,
        shm_total=64 * MiB,
        shm_free=64 * MiB,
        cores=128,
        cores_usable=16,
        cpu_quota=7.5,
        numa_nodes=2,
        container="docker",
        wsl=True,
    ),
    storage=(
        Storage("/local_nvme", "/local_nvme", "xfs", "/dev/nvme0n1", 4 << 40, 3 << 40, False, True, True),
        Storage("/a/very/long/working/directory", "/", "nfs4", "srv:/x", 1 << 40, 1 << 30, None, False, None),
    ),
    toolchain=Toolchain(ninja="/v/bin/ninja", ninja_on_path=False, libaio=False, libaio_header=True),
    interpreters=(
        Interpreter(
            path="/v/bin/python",
            origin="active",
            version="3.11.7",
            packages={"deepspeed": "0.19.8", "torch": "2.11.0", "peft": None},
            torch_cuda="13.0",
            launchers=("deepspeed", "torchrun"),
        ),
        Interpreter(path="/x/bin/python", origin="conda", problem="it does not start"),
    ),
    scheduler=Scheduler(
        slurm_present=True, login_node=False, slurm_job="77", slurm_nodes=2, hostfile="/job/hostfile"
    ),
    unknown={"gpus.2": "the GPU has fallen off the bus", "toolchain.compiler": "no C++ compiler"},
)


def test_everything_is_told_in_80_columns() -> None:
    text = render(FULL)
    flat = " ".join(text.split())
    for words in (
        "GPUs: 3 cards",
        "NVIDIA H200, 97.7 GiB free of 140.4 GiB, sm_90",
        "PCIe gen 5 x16 (max 5 x16), NVLink to 1-3,5, NUMA node 1",
        "used by ann: python train.py (pid 4242), 40.0 GiB",
        "unknown: the GPU has fallen off the bus",
        "580.95.05, CUDA up to 13.0",
        "CUDA_VISIBLE_DEVICES=0,1,2",
        "limit 512.0 GiB, in use 100.0 GiB of which 60.0 GiB is cache (v2), 1 process",
        "soft 64 KiB, hard unlimited",
        "16 of 128 cores usable, CPU time for 7.5, 2 NUMA nodes",
        "WSL2",
        "3072.0 GiB free, xfs, solid state, O_DIRECT yes",
        "not writable",
        "unknown: no C++ compiler",
        "/v/bin/ninja (not on PATH)",
        "* /v/bin/python",
        "torch 2.11.0 (CUDA 13.0)",
        "conda environment, Python ?: it does not start",
        "job 77, 2 nodes, ? GPUs on this node",
        "/job/hostfile",
    ):
        assert words in flat, words
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_login_node_is_told_what_to_do() -> None:
    text = render(Facts(gpus=(), scheduler=Scheduler(slurm_present=True, login_node=True)))
    assert "login node" in text and "--gpus 8x80GiB" in text


def test_unknown_gpus_have_their_reason() -> None:
    text = render(Facts(unknown={"gpus": "the NVIDIA driver did not answer within 3 s"}))
    assert "unknown: the NVIDIA driver did not answer within 3 s" in text


def test_json_of_this_machine_is_a_facts_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["detect", "--json"]) == 0
    out = capsys.readouterr().out
    (tmp_path / "facts.json").write_text(out)
    facts = load_facts(str(tmp_path / "facts.json"))
    assert facts.to_json() == {**json.loads(out), "source": "file"}
    assert cli.main(["detect", "--facts", str(tmp_path / "facts.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts.to_json()


def test_json_is_the_same_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["detect", "--gpus", "8xH200", "--nodes", "2", "--json", "--lang", "zh"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["gpus"]) == 8 and data["nodes"] == 2 and data["source"] == "described"
    i18n.set_language("en")


def test_text_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["detect"]) == 0
    text = capsys.readouterr().out
    assert "RAM" in text and sys.prefix in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpus", "8xH10"], "no card called 'H10'"),
        (["--gpus", "8xA100"], "A100-80G, A100-40G"),
        (["--facts", "/absent.json"], "/absent.json: cannot be read"),
        (["--python", "/absent/python"], "no interpreter at /absent/python"),
        (["--gpus", "8x80GiB", "--facts", "x"], "both describe"),
        (["--gpus", "8x80GiB", "--ram", "lots"], "'lots' is not a size"),
    ],
)
def test_errors_leave_with_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["detect", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_where(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path))
    assert cli.main(["where", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1
    assert data["runs"] == str(tmp_path / "runs")
    assert data["cache"] is None  # nothing is written there
    assert set(data) == {
        "schema_version",
        "settings",
        "presets",
        "runs",
        "cache",
        "schemas",
        "shipped_presets",
    }
    assert cli.main(["where"]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}/runs  (moved by DSTUI_STATE_HOME, not made yet)" in text


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs itself is asked")
@pytest.mark.parametrize("variable", [None, "", "  ", "/x/y"])
def test_homes_are_those_of_platformdirs(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    for kind in ("CONFIG", "STATE"):
        if variable is None:
            monkeypatch.delenv(f"XDG_{kind}_HOME")
        else:
            monkeypatch.setenv(f"XDG_{kind}_HOME", variable)
    assert paths.config_home() == Path(platformdirs.user_config_dir("dstui"))
    assert paths.state_home() == Path(platformdirs.user_state_dir("dstui"))


def test_no_heavy_import() -> None:
    code = (
        "import sys; from dstui.cli import main; main(['detect', '--json']);"
        "bad = {'torch','deepspeed','textual','rich','transformers','numpy','psutil','jsonschema','pynvml'};"
        "found = bad & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_where_names_a_folder_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, **_more: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths, "data_dir", lambda name: Path(name))
    monkeypatch.setattr(Path, "is_dir", refused)
    assert cli.main(["where"]) == 0
    assert "not readable" in capsys.readouterr().out
