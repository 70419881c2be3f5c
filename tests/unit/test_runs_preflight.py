"""What preflight finds before anything is started."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dstui.errors import Exit
from dstui.facts.model import Facts, Gpu, GpuProcess, Host, Interpreter, Scheduler, Toolchain
from dstui.facts.visible import select
from dstui.runs import logout
from dstui.runs import preflight as module
from dstui.runs.ops import find_locks, ops_needed
from dstui.runs.preflight import Problem, op_is_built, port_owner, preflight, rank_problems, worst
from dstui.runs.spec import RunSpec
from dstui.runs.start import PreflightFailed, start
from dstui.runs.store import list_runs

PLAIN = "import argparse, deepspeed\ndeepspeed.add_config_arguments(argparse.ArgumentParser())\n"
GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
OFFLOAD = GOOD | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
TOOLS = Toolchain(
    nvcc="/usr/bin/nvcc",
    nvcc_version="13.0",
    compiler="/usr/bin/c++",
    ninja="/usr/bin/ninja",
    python_headers=True,
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLAIN)
    bin_dir = tmp_path / "env" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").symlink_to("/bin/true")
    return tmp_path


def facts(work: Path, gpus: tuple[Gpu, ...] = (), tools: Toolchain = TOOLS, **packages: str | None) -> Facts:
    known: dict[str, str | None] = {
        "deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.0", "accelerate": "1.9"
    }  # fmt: skip
    cuda = "13.0" if gpus else ""
    it = Interpreter(str(work / "env/bin/python"), "active", "3.11.2", {**known, **packages}, torch_cuda=cuda)
    return Facts(
        gpus=gpus, cuda_driver="13.0" if gpus else None, host=Host(cores=4, cores_usable=4), toolchain=tools,
        interpreters=(it,),
    )  # fmt: skip


def look(
    work: Path, where: Facts | None = None, env: dict[str, str] | None = None, **spec: Any
) -> dict[str, Problem]:
    given = {"script": "train.py", "cwd": str(work), "config": GOOD, **spec}
    environ = {"PATH": "/usr/bin", "HOME": str(work), "TORCH_EXTENSIONS_DIR": str(work / "ext")} | (env or {})
    found = preflight(RunSpec(**given), where or facts(work), environ=environ)
    assert [p.severity for p in found] == sorted((p.severity for p in found), key=lambda s: s != "error")
    return {p.code: p for p in found}


def test_a_good_run_has_nothing(work: Path) -> None:
    assert look(work) == {}
    assert look(work, facts(work, (Gpu(0, processes=()),))) == {}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"script": "tarin.py"}, "script-missing", "train.py"),
        ({"script": "env"}, "script-missing", ""),
        ({"script": "go.sh"}, "script-not-python", ""),
        ({"cwd": "/nowhere"}, "cwd-missing", "--cwd"),
        ({"python": "/nowhere/python"}, "python-missing", "--python"),
        ({"python": "no-such-python"}, "python-missing", "--python"),
        ({"config": None, "config_source": "none.json"}, "config-unreadable", "--config"),
        ({"config_text": '{"a": 1, "a": 2}'}, "config-unreadable", ""),
        ({"config": {"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}}, "config-refused", ""),
        ({"master_port": 70000}, "port-impossible", "--master-port"),
        ({"nodes": 2}, "no-hostfile", "hostfile"),
        ({"hostfile": "none"}, "no-hostfile", "slots"),
        ({"devices": ("0",)}, "no-such-device", "CPU"),
        ({"args": ("--deepspeed", "other.json")}, "two-configs", "{config}"),
        ({"launcher": "python", "num_gpus": 2}, "python-starts-one-rank", "torchrun"),
        ({"launcher": "llamafactory"}, "launcher-of-another-engine", "--engine llamafactory"),
        ({"launcher": "swift"}, "launcher-of-another-engine", "--engine swift"),
    ],
)
def test_errors(work: Path, change: dict[str, Any], code: str, words: str) -> None:
    (work / "go.sh").write_text("")
    (work / "other.json").write_text("{}")
    found = look(work, **change)
    assert found[code].severity == "error" and words in found[code].hint, found


def test_a_script_that_takes_no_config(work: Path) -> None:
    (work / "bare.py").write_text("import torch\n")
    assert "DSTUI_CONFIG" in look(work, script="bare.py")["no-config-taken"].hint
    (work / "hard.py").write_text("import deepspeed\ndeepspeed.initialize(config='x.json')\n")
    assert "hard.py:2" in look(work, script="hard.py")["config-hard-coded"].message


def test_a_trainer_without_gpu_must_know_it(work: Path) -> None:
    """Else transformers counts one rank and its batch sizes contradict DeepSpeed's."""
    code = "from transformers import TrainingArguments\nimport sys; sys.argv\na = TrainingArguments('o', deepspeed=f{})\n"
    spec: dict[str, Any] = {"script": "hf.py", "engine": "hf", "args": ("{config}",)}
    (work / "hf.py").write_text(code.replace("{}", ""))
    assert "use_cpu=True" in look(work, **spec)["trainer-without-use-cpu"].hint
    assert look(work, facts(work, (Gpu(0, processes=()),)), **spec) == {}
    (work / "hf.py").write_text(code.replace("{}", ", use_cpu=True"))
    assert look(work, **spec) == {}
    (work / "hf.py").write_text(code.replace("{}", ", **more"))
    assert look(work, **spec) == {}
    (work / "hf.py").write_text("from transformers import HfArgumentParser\nHfArgumentParser(A).parse()\n")
    assert look(work, script="hf.py", engine="hf") == {}  # dstui adds the option itself


def test_nothing_to_train_with(work: Path) -> None:
    found = look(work, facts(work, deepspeed=None))
    assert "pip install deepspeed" in found["cannot-train"].hint
    assert "torch" in look(work, facts(work, torch=None, deepspeed=None))["cannot-train"].hint


def test_packages_of_the_engine(work: Path) -> None:
    (work / "hf.py").write_text("from transformers import HfArgumentParser\nHfArgumentParser(1)\n")
    config = {"train_batch_size": 1}
    found = look(work, facts(work, accelerate=None), script="hf.py", engine="hf", config=config)
    assert "pip install accelerate" in found["package-missing"].hint


def test_cpu_offload_without_a_compiler(work: Path) -> None:
    bare = dataclasses.replace(TOOLS, compiler=None, package_manager="apt-get")
    found = look(work, facts(work, tools=bare), config=OFFLOAD)
    assert found["compiler"].severity == "error" and "apt-get install g++" in found["compiler"].hint
    assert "cpu_adam" in found["compiler"].message
    assert look(work, facts(work, tools=bare)) == {}  # nothing to build
    built = work / "ext" / "cpu_adam"
    built.mkdir(parents=True)
    (built / "cpu_adam.so").write_text("")
    assert look(work, facts(work, tools=bare), config=OFFLOAD) == {}  # a warm op cache
    no_ninja = dataclasses.replace(TOOLS, ninja=None)
    assert "ninja" in look(work, facts(work, tools=no_ninja), config=OFFLOAD)  # asked for even then


def test_cuda_toolkit(work: Path) -> None:
    card = (Gpu(0, compute_capability=(9, 0), processes=()),)
    adam = GOOD | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    none = dataclasses.replace(TOOLS, nvcc=None, nvcc_version=None)
    assert "fused_adam" in look(work, facts(work, card, none), config=adam)["nvcc"].message
    assert "nvcc" not in look(work, facts(work, card, none), config=OFFLOAD)
    torch_adam = GOOD | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
    assert look(work, facts(work, card, none), config=torch_adam) == {}
    old = dataclasses.replace(TOOLS, nvcc_version="12.4")
    assert "cuda-mismatch" in look(work, facts(work, card, old), config=OFFLOAD)
    assert look(work, facts(work, card, old), env={"DS_SKIP_CUDA_CHECK": "1"}, config=OFFLOAD) == {}
    arch = dataclasses.replace(TOOLS, arch_list="9.0a")
    found = look(work, facts(work, card, arch), config=OFFLOAD)["arch-list"]
    assert "9.0a" in found.message and "9.0" in found.hint


def test_ops_needed() -> None:
    adam = {"optimizer": {"type": "Adam"}}
    assert ops_needed({}) == ()
    assert ops_needed(adam) == ("fused_adam",)
    assert ops_needed(adam | {"zero_optimization": {"offload_optimizer": {"device": "none"}}}) == (
        "fused_adam",
    )
    assert ops_needed({"zero_optimization": {"cpu_offload": True}}) == ("cpu_adam",)
    nvme = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    assert ops_needed(nvme) == ("async_io",)
    lion = {"optimizer": {"type": "Lion"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert ops_needed(lion) == ("cpu_lion",)


def test_op_cache_of_this_interpreter(tmp_path: Path) -> None:
    it = Interpreter("/x/bin/python", "active", "3.12.1")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").write_text("")
    assert not op_is_built("cpu_adam", it, env)  # another Python's
    assert op_is_built("cpu_adam", dataclasses.replace(it, version="3.11.9"), env)


def test_devices(work: Path) -> None:
    user = GpuProcess(77, user="bob", name="python", memory=3 << 30)
    cards = (Gpu(0, uuid="GPU-a", memory_free=4 << 30, processes=(user,)), Gpu(1, uuid="GPU-b", processes=()))
    where = facts(work, cards)
    busy = look(work, where)["device-busy"]
    assert busy.severity == "error" and "bob" in busy.message and "77" in busy.message
    assert "--devices 1" in busy.hint and "--share-gpus" in busy.hint
    shared = look(work, where, share_gpus=True)["device-busy"]
    assert shared.severity == "warning" and "--share-gpus" not in shared.hint
    for harmless in (
        GpuProcess(9, user="root", name="Xorg", kind="graphics"),
        GpuProcess(8, user="root", name="nvidia-cuda-mps-server", kind="compute"),
    ):
        desktop = facts(work, (Gpu(0, uuid="GPU-a", memory_free=4 << 30, processes=(harmless,)),))
        assert look(work, desktop)["device-busy"].severity == "warning"
    assert look(work, where, devices=("1",)) == {}
    assert look(work, where, devices=("GPU-b",)) == {}
    assert "0, 1" in look(work, where, devices=("7",))["no-such-device"].hint
    assert "2" in look(work, where, num_gpus=4)["more-ranks-than-devices"].hint
    assert "device-twice" in look(work, where, devices=("1", "1"))


def test_devices_that_are_hidden(work: Path) -> None:
    cards = (Gpu(0, uuid="GPU-a", processes=()), Gpu(1, uuid="GPU-b", processes=()))

    def visible(value: str) -> Facts:
        chosen, remark = select(value, cards)
        unknown = {"visible_devices": remark} if remark else {}
        return dataclasses.replace(facts(work, tuple(chosen)), visible_devices=value, unknown=unknown)

    assert look(work, visible("1")) == {}
    for value in ("", "-1"):
        found = look(work, visible(value))
        assert set(found) == {"gpus-hidden"} and found["gpus-hidden"].severity == "warning"
        assert "CPU" in found["gpus-hidden"].message
        assert look(work, visible(value), launcher="deepspeed")["gpus-shown-again"].severity == "error"
    on_cpu = {"DS_ACCELERATOR": "cpu"}
    assert look(work, visible("-1"), on_cpu) == {}  # it was asked for
    assert set(look(work, visible("-1"), on_cpu, launcher="deepspeed")) == {"gpus-shown-again"}
    found = look(work, visible("3,4"))["gpus-hidden"]
    assert found.severity == "error" and "3" in found.message
    found = look(work, visible("0,5"))["fewer-visible-devices"]
    assert found.severity == "error" and "5" in found.message
    assert look(work, visible("0,5"), devices=("0",)) == {}
    hidden = preflight(
        RunSpec("train.py", cwd=str(work), config=GOOD, env={"CUDA_VISIBLE_DEVICES": ""}),
        facts(work, cards),
        environ={"PATH": "/usr/bin"},
    )
    assert ("gpus-hidden", "warning") in {(p.code, p.severity) for p in hidden}


def test_what_is_said_without_preflight(work: Path) -> None:
    where = facts(work, (Gpu(0, uuid="GPU-a", processes=()), Gpu(1, uuid="GPU-b", processes=())))
    spec = RunSpec("train.py", cwd=str(work), config=GOOD, launcher="torchrun")

    def said(**more: Any) -> list[str]:
        return [p.code for p in rank_problems(dataclasses.replace(spec, **more), where, environ={})]

    assert said() == said(num_gpus=1) == said(devices=("1",)) == []
    assert said(num_gpus=3) == ["more-ranks-than-devices"]
    assert said(devices=("0", "5")) == ["no-such-device"]
    assert said(nodes=2) == ["no-hostfile"]


def test_busy_port_names_its_owner(work: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert port_owner(port) == (os.getpid(), Path("/proc/self/comm").read_text().strip())
        found = look(work, master_port=port)["port-busy"]
        assert found.severity == "error" and str(os.getpid()) in found.message
    assert port_owner(port) is None


def test_state_home(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "file").write_text("")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(work / "file" / "state"))
    assert "DSTUI_STATE_HOME" in look(work)["state-home-read-only"].hint
    monkeypatch.setenv("DSTUI_STATE_HOME", str(work / "new"))
    monkeypatch.setattr(module, "_free", lambda path: 10 << 20)
    found = look(work)
    assert found["disk-full"].severity == "error" and "10 MiB" in found["disk-full"].message
    assert not (work / "new").exists()  # preflight writes nothing


def test_described_machines_and_login_nodes(work: Path) -> None:
    other = dataclasses.replace(facts(work), source="described")
    assert look(work, other)["facts-of-another-machine"].severity == "error"
    login = dataclasses.replace(facts(work), scheduler=Scheduler(slurm_present=True, login_node=True))
    assert look(work, login)["login-node"].severity == "warning"


def test_accelerate_does_not_share_cpu_ranks(work: Path) -> None:
    assert "accelerate-on-cpu" in look(work, engine="accelerate", num_gpus=2)
    assert look(work, engine="accelerate", num_gpus=1) == {}


def test_an_estimate_that_does_not_fit_warns(work: Path) -> None:
    assert look(work, prediction={"verdict": "no", "reason": "too big"})["fit-no"].hint == "too big"
    assert look(work, prediction={"verdict": "tight"}) == {}


def test_start_refuses_and_writes_nothing(work: Path) -> None:
    with pytest.raises(PreflightFailed) as e:
        start(RunSpec("none.py", cwd=str(work)), facts(work))
    assert e.value.code == Exit.CANNOT and worst(e.value.problems) == "error" and "none.py" in e.value.message
    assert list_runs() == []


def test_kill_user_processes(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert not logout.kills_user_processes(str(tmp_path))
    etc = tmp_path / "etc/systemd"
    etc.mkdir(parents=True)
    (etc / "logind.conf").write_text("[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\n")
    assert logout.kills_user_processes(str(tmp_path))
    (etc / "logind.conf.d").mkdir()
    (etc / "logind.conf.d/site.conf").write_text("[Login]\nKillUserProcesses=no\n")
    assert not logout.kills_user_processes(str(tmp_path))


def test_unreadable_llamafactory_yaml_is_named(work: Path) -> None:
    found = look(work, script="x.yaml", engine="llamafactory", config=None)
    assert found["script-missing"].severity == "error"
    (work / "x.yaml").write_text("deepspeed: gone.json\n")
    found = look(work, script="x.yaml", engine="llamafactory", config=None)
    assert "gone.json" in found["config-unreadable"].message
    (work / "ds.json").write_text(json.dumps({"train_batch_size": 1}))
    assert "script-not-python" in look(work, script="x.yaml")


def plant(root: Path, op: str = "cpu_adam", tag: str = "") -> Path:
    folder = root / tag / op
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    path.touch()
    return path


def test_a_lock_whose_build_died_is_named_with_its_removal(work: Path) -> None:
    lock = plant(work / "ext")
    found = look(work, config=OFFLOAD)
    assert found["op-lock-stale"].severity == "error"
    assert str(lock) in found["op-lock-stale"].message and f"rm {lock}" in found["op-lock-stale"].hint
    lock.unlink()
    assert "op-lock-stale" not in look(work, config=OFFLOAD)


def test_a_lock_of_an_op_that_is_not_needed_only_warns(work: Path) -> None:
    plant(work / "ext")
    assert look(work)["op-lock-stale"].severity == "warning"


def test_a_lock_held_by_a_living_build_is_waited_for(work: Path) -> None:
    lock = plant(work / "ext")
    with lock.open("rb"):
        found = look(work, config=OFFLOAD)
        assert "op-lock-stale" not in found
        assert (
            found["op-being-built"].severity == "warning"
            and str(os.getpid()) in found["op-being-built"].message
        )
        assert [(x.op, x.holder, x.gone) for x in find_locks(work / "ext")] == [
            ("cpu_adam", os.getpid(), False)
        ]


def test_locks_of_another_python_are_not_ours(work: Path) -> None:
    plant(work / "ext", tag="py39_cpu")
    assert "op-lock-stale" not in look(work, config=OFFLOAD)
    plant(work / "ext", tag="py311_cu130")
    assert "op-lock-stale" in look(work, config=OFFLOAD)
    assert len(find_locks(work / "ext")) == 2


def test_a_lock_on_a_shared_disk_may_be_held_elsewhere(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstui.runs import ops

    lock = plant(work / "ext")
    monkeypatch.setattr(ops, "_filesystem", lambda path: "nfs4")
    found = look(work, config=OFFLOAD)
    assert "op-lock-stale" not in found and found["op-lock-unseen"].severity == "warning"
    os.utime(lock, (1, 1))
    assert "op-lock-stale" in look(work, config=OFFLOAD)


def test_nvme_path(work: Path) -> None:
    def zero(path: Path) -> dict[str, Any]:
        block = {"device": "nvme", "nvme_path": str(path)}
        return GOOD | {"zero_optimization": {"stage": 3, "offload_optimizer": block}}

    (work / "nvme").mkdir()
    (work / "file").touch()
    assert "nvme-path" not in look(work, config=zero(work / "nvme"))
    assert look(work, config=zero(work / "file"))["nvme-path"].severity == "error"
    assert look(work, config=zero(work / "file" / "below"))["nvme-path"].severity == "error"
    missing = look(work, config=zero(work / "no" / "disk"))["nvme-path"]
    assert missing.severity == "warning" and str(work) in missing.message
