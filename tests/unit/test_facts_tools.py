"""Storage, toolchain, interpreters, Slurm: recorded trees and this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dstui.errors import DstuiError
from dstui.facts.detect import detect, pci_cards, read_facts
from dstui.facts.host import Mount, mounts
from dstui.facts.interpreters import InterpreterReader, installed_packages
from dstui.facts.model import Gpu, Interpreter
from dstui.facts.scheduler import read_scheduler
from dstui.facts.storage import candidates, mount_of, read_storage, rotational, try_direct
from dstui.facts.system import Child, System
from dstui.facts.toolchain import ToolchainReader, cuda_home
from tests.facts_tree import tree


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- storage ----------------------------------------------------------------------------------------------


def mount(device: str, point: str, source: str, kind: str = "ext4") -> str:
    return f"30 1 {device} / {point} rw shared:1 - {kind} {source} rw\n"


def block(
    root: Path, name: str, device: str, spins: int | None, parent: str = "", slaves: tuple[str, ...] = ()
) -> None:
    real = root / "sys/devices" / parent / name
    real.mkdir(parents=True, exist_ok=True)
    if spins is not None:
        (real / "queue").mkdir()
        (real / "queue/rotational").write_text(f"{spins}\n")
    for folder, link in (("sys/dev/block", device), ("sys/class/block", name)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / link).symlink_to(real)
    for s in slaves:
        (real / "slaves").mkdir(exist_ok=True)
        (real / "slaves" / s).mkdir()


def test_rotational_through_partitions_mapper_and_virtual_disks(tmp_path: Path) -> None:
    block(tmp_path, "nvme0n1", "259:0", 0)
    block(tmp_path, "nvme0n1p2", "259:2", None, "nvme0n1")
    block(tmp_path, "sda", "8:0", 1)
    block(tmp_path, "sda1", "8:1", None, "sda")
    block(tmp_path, "dm-0", "253:0", 0, slaves=("nvme0n1p2",))
    block(tmp_path, "dm-1", "253:1", 0, slaves=("nvme0n1p2", "sda1"))
    block(tmp_path, "vda", "254:0", 1)
    system = System(root=str(tmp_path), environ={}, cwd="/")

    def spins(device: str, source: str = "/dev/x") -> bool | None:
        return rotational(system, Mount(device, "/", "/m", "ext4", source, ""))

    assert spins("259:2") is False
    assert spins("8:1") is True
    assert spins("253:0") is False
    assert spins("253:1") is True  # one spinning disk below is enough
    assert spins("254:0") is None  # virtio says 1 without knowing
    assert spins("0:44", "server:/export") is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvme0n1p2").write_text("")
    assert spins("0:45", "/dev/nvme0n1p2") is False  # btrfs has a device number of its own


def test_mount_of_takes_the_longest_and_the_latest() -> None:
    text = (
        mount("1:1", "/", "/dev/a")
        + mount("1:2", "/data", "/dev/b")
        + mount("1:3", "/data/x\\040y", "/dev/c")
        + mount("1:4", "/data", "/dev/d")
    )
    table = _table(text)
    assert mount_of("/data/x y/z", table).source == "/dev/c"  # type: ignore[union-attr]
    assert mount_of("/data/q", table).source == "/dev/d"  # type: ignore[union-attr]
    assert mount_of("/database", table).source == "/dev/a"  # type: ignore[union-attr]


def _table(text: str) -> list[Mount]:
    class Fixed(System):
        def read(self, name: str) -> str | None:
            return text

    return mounts(Fixed(environ={}, cwd="/"))


def test_candidates_are_existing_folders_once(tmp_path: Path) -> None:
    for name in ("work", "tmp", "scratch", "nv", "boot/efi"):
        (tmp_path / name).mkdir(parents=True)
    table = _table(
        mount("259:1", "/nv", "/dev/nvme1n1") + mount("259:2", "/boot/efi", "/dev/nvme0n1p1", "vfat")
    )
    system = System(root=str(tmp_path), environ={"TMPDIR": "/scratch"}, cwd="/work")
    assert candidates(system, table) == ["/work", "/scratch", "/tmp", "/nv"]


def test_o_direct_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    writable, _direct, _why = try_direct(str(tmp_path))
    assert writable is True
    assert list(tmp_path.iterdir()) == []
    assert try_direct(str(tmp_path / "absent"))[0] is False


def test_o_direct_on_a_file_system_that_refuses_it() -> None:
    # /proc takes no files at all: not writable, and said so.
    writable, direct, why = try_direct("/proc")
    assert writable is False and direct is None and why


def test_storage_of_this_machine(tmp_path: Path) -> None:
    found, _unknown = read_storage(System(environ=dict(os.environ), cwd=str(tmp_path)))
    first = found[0]
    s = os.statvfs(tmp_path)
    assert first.path == str(tmp_path) and first.writable
    assert first.total == s.f_blocks * s.f_frsize
    out = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (first.filesystem or "")[:3] == out.stdout[:3]  # ext2/ext3 = ext4 in stat's words


# --- toolchain --------------------------------------------------------------------------------------------


def test_cuda_home_as_torch_finds_it(tmp_path: Path) -> None:
    executable(tmp_path / "opt/cuda/bin/nvcc", "#!/bin/sh\n")
    path = str(tmp_path / "opt/cuda/bin")
    root = str(tmp_path / "empty")
    assert cuda_home(System(root=root, environ={"CUDA_HOME": "/a", "CUDA_PATH": "/b"}, cwd="/")) == "/a"
    assert cuda_home(System(root=root, environ={"CUDA_PATH": "/b", "PATH": path}, cwd="/")) == "/b"
    assert cuda_home(System(root=root, environ={"PATH": path}, cwd="/")) == str(tmp_path / "opt/cuda")
    assert cuda_home(System(root=root, environ={"PATH": "/nowhere"}, cwd="/")) is None
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    assert cuda_home(System(root=str(tmp_path), environ={"PATH": "/nowhere"}, cwd="/")) == "/usr/local/cuda"


@pytest.mark.real
def test_cuda_home_equals_torch_here() -> None:
    # A CPU build of torch sets CUDA_HOME to None whatever is installed; the search itself is the same.
    torch_says = subprocess.run(
        [sys.executable, "-c", "from torch.utils import cpp_extension as c; print(c._find_cuda_home())"],
        capture_output=True,
        text=True,
    )
    if torch_says.returncode:
        pytest.skip("torch is not installed here")
    assert str(cuda_home(System())) == torch_says.stdout.strip().splitlines()[-1]


def test_a_full_toolchain(tmp_path: Path) -> None:
    cuda = tmp_path / "cuda"
    executable(cuda / "bin/nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    binaries = tmp_path / "bin"
    executable(binaries / "my-c++", "#!/bin/sh\necho 'my-c++ (Debian 12.2.0-14+deb12u1) 12.2.0'\n")
    executable(binaries / "apt-get", "#!/bin/sh\n")
    venv = tmp_path / "venv/bin"
    executable(venv / "ninja", "#!/bin/sh\n")
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc/libaio.h").write_text("")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libaio.so").write_text("")
    system = System(
        environ={
            "PATH": str(binaries),
            "CUDA_HOME": str(cuda),
            "CXX": "my-c++ -m64",
            "CFLAGS": f"-O2 -I{tmp_path}/inc",
            "LDFLAGS": f"-L {tmp_path}/lib",
            "TORCH_CUDA_ARCH_LIST": "9.0a",
        },
        cwd=str(tmp_path),
    )
    it = Interpreter(path=str(venv / "python"), origin="project", headers=True)
    tools, unknown = ToolchainReader(system).finish(it, time.monotonic() + 5)
    assert tools.nvcc_version == "12.4" and tools.nvcc == f"{cuda}/bin/nvcc"
    assert tools.compiler == str(binaries / "my-c++") and tools.compiler_version == "12.2.0"
    assert tools.ninja == str(venv / "ninja") and tools.ninja_on_path is False
    assert tools.libaio and tools.libaio_header and tools.python_headers
    assert tools.arch_list == "9.0a" and tools.package_manager == "apt-get"
    assert unknown == {}


def test_an_empty_toolchain_has_reasons(tmp_path: Path) -> None:
    system = System(root=str(tmp_path), environ={"PATH": str(tmp_path)}, cwd=str(tmp_path))
    tools, unknown = ToolchainReader(system).finish(None, time.monotonic() + 5)
    assert tools.compiler is None and tools.nvcc is None and tools.ninja is None
    assert tools.libaio is False and tools.libaio_header is False
    for key in ("cuda_home", "nvcc", "compiler", "ninja", "python_headers"):
        assert f"toolchain.{key}" in unknown


def test_a_hung_compiler_is_given_up(tmp_path: Path) -> None:
    executable(tmp_path / "c++", "#!/bin/sh\n/bin/sleep 31.7\n")
    system = System(root=str(tmp_path / "x"), environ={"PATH": str(tmp_path)}, cwd=str(tmp_path))
    start = time.monotonic()
    tools, unknown = ToolchainReader(system).finish(None, start + 0.3)
    assert time.monotonic() - start < 31, "waited for the compiler"
    assert tools.compiler and tools.compiler_version is None
    assert unknown["toolchain.compiler_version"] == "it did not answer in time"
    # What the wrapper started is gone too, as soon as the kernel has got round to it.
    until = time.monotonic() + 3
    while any(p.info["cmdline"] == ["/bin/sleep", "31.7"] for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_child_that_cannot_start() -> None:
    child = Child(["/nonexistent/program"], {})
    assert child.output(time.monotonic() + 1) is None and child.failure == "No such file or directory"


# --- interpreters -----------------------------------------------------------------------------------------


def venv(
    root: Path, packages: dict[str, str], version: str = "3.12.4", torch_cuda: str | None = None
) -> Path:
    """A virtual environment as files, with a python that must never be run."""
    short = ".".join(version.split(".")[:2])
    python = executable(root / "bin/python", "#!/bin/sh\nexit 9\n")
    base = root.parent / f"base-{root.name}"
    (base / f"include/python{short}").mkdir(parents=True)
    (base / f"include/python{short}/Python.h").write_text("")
    (root / "pyvenv.cfg").write_text(
        f"home = {base}/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    site = root / f"lib/python{short}/site-packages"
    site.mkdir(parents=True)
    for name, v in packages.items():
        info = site / f"{name}-{v}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {v}\n")
    if torch_cuda is not None:
        (site / "torch").mkdir()
        (site / "torch/version.py").write_text(
            "from typing import Optional\n__version__ = '" + packages["torch"] + "'\n"
            f"cuda: Optional[str] = {torch_cuda}\n"
        )
    return python


def readers(tmp_path: Path, python: str | None = None, **environ: str) -> tuple[Interpreter, ...]:
    system = System(
        environ={"PATH": str(tmp_path / "nobin"), "HOME": str(tmp_path), **environ}, cwd=str(tmp_path)
    )
    return InterpreterReader(system, python).finish(time.monotonic() + 10)


def test_a_project_venv_is_read_from_its_files(tmp_path: Path) -> None:
    packages = {"deepspeed": "0.19.8", "torch": "2.11.0+cu130", "ms_swift": "3.9.0", "flash_attn": "2.8.3"}
    python = venv(tmp_path / ".venv", packages, torch_cuda="'13.0'")
    executable(python.parent / "deepspeed", "")
    executable(python.parent / "torchrun", "")
    first = readers(tmp_path)[0]
    assert (first.path, first.origin, first.version) == (str(python), "project", "3.12.4")
    assert first.deepspeed == "0.19.8" and first.torch == "2.11.0+cu130" and first.torch_cuda == "13.0"
    assert first.packages["ms-swift"] == "3.9.0" and first.packages["flash-attn"] == "2.8.3"
    assert first.packages["triton"] is None
    assert first.launchers == ("deepspeed", "torchrun")
    assert first.headers is True and first.can_train and first.externally_managed is False
    assert first.has_pip is False


def test_order_and_no_duplicates(tmp_path: Path) -> None:
    venv(tmp_path / ".venv", {"torch": "2.5.1"}, torch_cuda="None")
    active = venv(
        tmp_path / "active", {"deepspeed": "0.16.0", "torch": "2.5.1"}, "3.10.14", torch_cuda="'12.4'"
    )
    found = readers(tmp_path, VIRTUAL_ENV=str(tmp_path / "active"), CONDA_PREFIX=str(tmp_path / "active"))
    assert [i.origin for i in found[:3]] == ["active", "project", "own"]
    assert found[0].path == str(active)
    assert found[1].torch_cuda == "" and not found[1].can_train
    assert len({i.prefix for i in found}) == len(found)


def test_conda_environments(tmp_path: Path) -> None:
    prefix = tmp_path / "miniconda3/envs/train"
    executable(prefix / "bin/python", "#!/bin/sh\nexit 9\n")
    site = prefix / "lib/python3.11/site-packages"
    (site / "deepspeed-0.15.4.dist-info").mkdir(parents=True)
    (site / "deepspeed-0.15.4.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.15.4\n")
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta/python-3.11.9-h1.json").write_text("{}")
    (prefix / "conda-meta/python-dateutil-2.9.json").write_text("{}")
    conda = [i for i in readers(tmp_path) if i.origin == "conda"]
    assert [(i.version, i.deepspeed) for i in conda] == [("3.11.9", "0.15.4")]
    active = readers(tmp_path, CONDA_PREFIX=str(prefix))
    assert active[0].origin == "active" and active[0].deepspeed == "0.15.4"
    assert sum(i.prefix == str(prefix) for i in active) == 1


def test_a_venv_whose_python_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/nonexistent/python3.9")
    first = readers(tmp_path)[0]
    assert first.origin == "project" and first.problem and "points nowhere" in first.problem
    assert not first.can_train


def test_the_interpreter_asked_for_is_run(tmp_path: Path) -> None:
    found = readers(tmp_path, sys.executable)
    assert found[0].origin == "option" and found[0].problem is None
    assert found[0].version == ".".join(map(str, sys.version_info[:3]))
    assert found[0].prefix == sys.prefix
    assert "own" not in [i.origin for i in found]  # the same prefix, told once


def test_the_interpreter_named_in_the_environment_counts_as_asked_for(tmp_path: Path) -> None:
    venv(tmp_path / ".venv", {"deepspeed": "0.19.8", "torch": "2.11.0"}, torch_cuda="None")
    assert readers(tmp_path, DSTUI_PYTHON=sys.executable)[0].prefix == sys.prefix
    other = venv(tmp_path / "active", {"torch": "2.5.1"}, torch_cuda="None")
    assert readers(tmp_path, sys.executable, DSTUI_PYTHON=str(other))[0].prefix == sys.prefix


def test_a_program_that_is_no_python(tmp_path: Path) -> None:
    liar = executable(tmp_path / "liar", "#!/bin/sh\necho hello\n")
    assert "is it a Python" in (readers(tmp_path, str(liar))[0].problem or "")
    broken = executable(tmp_path / "broken", "#!/bin/sh\necho 'libpython3.so: not found' >&2; exit 127\n")
    assert readers(tmp_path, str(broken))[0].problem == "libpython3.so: not found"


@pytest.mark.parametrize(
    ("name", "words"),
    [("nosuchpython", "on PATH"), ("./nothing/here", "no interpreter at"), ("folder", "no bin/python in")],
)
def test_a_wrong_python_is_an_error_with_the_place(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DstuiError) as e:
        readers(tmp_path, name)
    assert words in e.value.message and e.value.hint


def test_a_file_without_execute_permission(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    with pytest.raises(DstuiError, match="cannot be executed"):
        readers(tmp_path, "./python")


def test_headers_are_where_sysconfig_says(tmp_path: Path) -> None:
    import sysconfig

    truth = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    own = next(i for i in readers(tmp_path) if i.origin == "own")
    asked = readers(tmp_path, sys.executable)[0]
    assert own.headers is asked.headers is truth


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("raise SystemExit('shadowed')")
    assert readers(tmp_path, sys.executable)[0].problem is None


def test_pyenv_shims_are_seen_through(tmp_path: Path) -> None:
    shims = tmp_path / "pyenv/shims"
    executable(shims / "python3", "#!/bin/sh\nexit 9\n")
    (tmp_path / "pyenv/versions/3.9.1/bin").mkdir(parents=True)
    (tmp_path / "pyenv/versions/3.9.1/bin/python3").symlink_to(sys.executable)
    (tmp_path / "pyenv/version").write_text("3.9.1\n")
    found = readers(tmp_path, PATH=str(shims))
    assert not any(i.path.startswith(str(shims)) for i in found)


def test_package_metadata_oddities(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "deepspeed-0.9.5-py3.8.egg-info").mkdir(parents=True)
    (site / "deepspeed-0.9.5-py3.8.egg-info/PKG-INFO").write_text("Name: deepspeed\nVersion: 0.9.5\n")
    (site / "peft-0.1.0.dist-info").mkdir()  # half removed: no METADATA
    (site / "~orch-2.0.0.dist-info").mkdir()
    (site / "Flash.Attn-2.0.dist-info").mkdir()
    (site / "Flash.Attn-2.0.dist-info/METADATA").write_text("Version: 2.0\n")
    source = tmp_path / "source"
    (source / "accelerate.egg-info").mkdir(parents=True)
    (source / "accelerate.egg-info/PKG-INFO").write_text(
        "Metadata-Version: 2.1\nVersion: 1.2.3.dev0\n\nVersion: 9\n"
    )
    found = installed_packages([str(tmp_path / "absent"), str(source), str(site)])
    assert found == {"deepspeed": "0.9.5", "flash-attn": "2.0", "accelerate": "1.2.3.dev0"}


def test_versions_equal_importlib_metadata_here() -> None:
    from importlib import metadata

    from dstui.facts.interpreters import PACKAGES

    mine = installed_packages([p for p in sys.path if p])
    for name in PACKAGES:
        try:
            truth: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            truth = None
        assert mine.get(name) == truth, name


# --- scheduler, PCI, all together ---------------------------------------------------------------------------


def test_slurm_job_login_node_and_hostfile(tmp_path: Path) -> None:
    executable(tmp_path / "bin/srun", "")
    (tmp_path / "hostfile").write_text("a slots=8\n")
    path = str(tmp_path / "bin")
    login = read_scheduler(System(environ={"PATH": path}, cwd=str(tmp_path)), [], False)
    assert login.login_node and login.slurm_present and login.slurm_job is None
    assert login.hostfile == f"{tmp_path}/hostfile"
    assert not read_scheduler(System(environ={"PATH": path}, cwd="/"), [Gpu(index=0)], True).login_node
    # A card whose driver does not answer: no login node either.
    assert not read_scheduler(System(environ={"PATH": path}, cwd="/"), None, True).login_node
    env = {"PATH": "/x", "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "h100:4"}
    job = read_scheduler(System(environ=env, cwd="/"), [], False)
    assert (job.slurm_job, job.slurm_nodes, job.slurm_gpus_on_node, job.login_node) == ("77", 2, 4, False)
    env = {"PATH": "/x", "SLURM_JOB_ID": "77", "SLURM_JOB_GPUS": "0,3"}
    assert read_scheduler(System(environ=env, cwd="/"), [], False).slurm_gpus_on_node == 2
    assert not read_scheduler(System(environ={"PATH": "/x"}, cwd="/"), [], False).slurm_present


def test_pci_cards(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "/sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
            "/sys/bus/pci/devices/0000:01:00.1/vendor": "0x8086\n",
        },
    )
    assert pci_cards(system) == {"0x10de"}


def test_amd_is_said_not_denied(tmp_path: Path) -> None:
    system = tree(tmp_path, {"/dev/kfd": ""})
    facts = read_facts(System(root=system.root, environ={"PATH": "/x", "HOME": "/x"}, cwd=str(tmp_path)))
    assert facts.gpus is None and "AMD" in facts.unknown["gpus"]


def test_no_gpu_is_a_normal_machine(tmp_path: Path) -> None:
    facts = read_facts(System(root=str(tmp_path), environ={"PATH": "/x", "HOME": "/x"}, cwd=str(tmp_path)))
    assert facts.gpus == () and facts.world_size == 1 and facts.driver is None
    assert facts.interpreter is not None and facts.interpreter.origin == "own"


def test_detect_here_twice_gives_the_same_machine(tmp_path: Path) -> None:
    one, two = detect(cwd=tmp_path), detect(cwd=str(tmp_path))
    assert one.interpreters == two.interpreters and one.toolchain == two.toolchain
    assert one.host.ram_total == two.host.ram_total
    assert list(tmp_path.iterdir()) == []
