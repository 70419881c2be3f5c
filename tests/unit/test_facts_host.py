"""Host facts: cgroup v1 and v2 from recorded trees, containers, limits, and this machine against psutil."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from dstui.facts.host import container_kind, read_cgroup, read_host
from dstui.facts.model import UNLIMITED, Cgroup, Host
from dstui.facts.system import System
from dstui.units import GiB, MiB
from tests.facts_tree import tree

V1_UNLIMITED = "9223372036854771712"


def mountinfo(*lines: tuple[str, str, str, str]) -> str:
    """(root, point, kind, super options)"""
    return "".join(
        f"{30 + i} 1 0:{30 + i} {root} {point} rw,relatime shared:1 - {kind} cgroup rw,{options}\n"
        for i, (root, point, kind, options) in enumerate(lines)
    )


def v2_files(folder: str, limit: str, usage: int, **stat: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit + "\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": "".join(f"{k} {v}\n" for k, v in stat.items()),
        f"{folder}/memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n",
    }


def v1_files(folder: str, limit: str, usage: int, kills: int = 0, **stat: int) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit + "\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": "".join(f"{k} {v}\n" for k, v in stat.items()),
        f"{folder}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


CG = "/sys/fs/cgroup"


def test_v2_takes_the_tightest_parent_and_its_usage(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/user.slice/job.scope/step\n",
            "/proc/self/mountinfo": mountinfo(("/", CG, "cgroup2", "nsdelegate")),
            **v2_files(f"{CG}/user.slice/job.scope/step", "max", 1 * GiB, inactive_file=0),
            **v2_files(
                f"{CG}/user.slice/job.scope",
                str(64 * GiB),
                40 * GiB,
                inactive_file=8 * GiB,
                active_file=4 * GiB,
                file_dirty=1 * GiB,
                file_writeback=0,
            ),
            **v2_files(f"{CG}/user.slice", str(128 * GiB), 100 * GiB, inactive_file=0),
        },
    )
    group, reason = read_cgroup(system)
    assert reason is None and group is not None
    assert (group.version, group.limit, group.usage) == (2, 64 * GiB, 40 * GiB)
    assert group.reclaimable == 11 * GiB
    assert group.oom_kills == 2
    assert group.path == f"{CG}/user.slice/job.scope"


def test_v2_inside_a_container_namespace(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": mountinfo(("/", CG, "cgroup2", "nsdelegate")),
            **v2_files(CG, str(16 * GiB), 2 * GiB, inactive_file=GiB),
        },
    )
    group, _ = read_cgroup(system)
    assert group is not None and group.limit == 16 * GiB and group.path == CG


def test_v2_without_a_limit(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/init.scope\n",
            "/proc/self/mountinfo": mountinfo(("/", CG, "cgroup2", "")),
            **v2_files(f"{CG}/init.scope", "max", GiB, inactive_file=0),
        },
    )
    group, _ = read_cgroup(system)
    assert group is not None and group.limit == UNLIMITED and group.usage == GiB


def test_v2_root_and_v2_without_the_memory_controller(tmp_path: Path) -> None:
    base = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": mountinfo(("/", CG, "cgroup2", "")),
        f"{CG}/cgroup.controllers": "cpu memory pids\n",
    }
    group, reason = read_cgroup(tree(tmp_path / "a", base))
    assert group is not None and group.limit == UNLIMITED and reason is None
    group, reason = read_cgroup(tree(tmp_path / "b", {**base, f"{CG}/cgroup.controllers": "cpu pids\n"}))
    assert group is None and reason and "memory controller" in reason


def test_v1_takes_the_tightest_and_knows_the_unlimited_number(tmp_path: Path) -> None:
    own = f"{CG}/memory/slurm/uid_1000/job_7/step_0"
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/slurm/uid_1000/job_7/step_0\n0::/\n",
            "/proc/self/mountinfo": mountinfo(
                ("/", f"{CG}/memory", "cgroup", "memory"), ("/", f"{CG}/unified", "cgroup2", "")
            ),
            **v1_files(own, V1_UNLIMITED, GiB, kills=5),
            **v1_files(
                f"{CG}/memory/slurm/uid_1000/job_7",
                str(200 * GiB),
                150 * GiB,
                total_inactive_file=20 * GiB,
                total_active_file=10 * GiB,
                total_dirty=0,
                total_writeback=2 * GiB,
            ),
            **v1_files(f"{CG}/memory/slurm", V1_UNLIMITED, 0),
        },
    )
    group, _ = read_cgroup(system)
    assert group == Cgroup(
        version=1,
        limit=200 * GiB,
        usage=150 * GiB,
        reclaimable=28 * GiB,
        oom_kills=5,
        path=f"{CG}/memory/slurm/uid_1000/job_7",
    )


def test_v1_docker_mount_root_is_the_cgroup_itself(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "4:memory:/docker/abc\n",
            "/proc/self/mountinfo": mountinfo(("/docker/abc", f"{CG}/memory", "cgroup", "memory")),
            **v1_files(f"{CG}/memory", str(8 * GiB), GiB, total_inactive_file=0),
        },
    )
    group, _ = read_cgroup(system)
    assert group is not None and group.limit == 8 * GiB and group.path == f"{CG}/memory"


def test_no_cgroup_is_none_with_a_reason(tmp_path: Path) -> None:
    host, unknown = read_host(tree(tmp_path, {"/proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\n"}))
    assert host.cgroup is None and "host.cgroup" in unknown
    assert host.ram_total == MiB and host.ram_available == MiB // 2
    assert host.cpu_quota is None and "host.cpu_quota" in unknown
    assert host.numa_nodes is None and "host.numa_nodes" in unknown


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/proc/self/cgroup": "0::/a\n", f"{CG}/a/cpu.max": "max 100000\n"}, UNLIMITED),
        ({"/proc/self/cgroup": "0::/a\n", f"{CG}/a/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                f"{CG}/a/cpu.max": "400000 100000\n",
                f"{CG}/a/b/cpu.max": "max 100000\n",
            },
            4.0,
        ),
    ],
)
def test_cpu_quota_v2(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    system = tree(tmp_path, {"/proc/self/mountinfo": mountinfo(("/", CG, "cgroup2", "")), **files})
    assert read_host(system)[0].cpu_quota == quota


def test_cpu_quota_v1(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "3:cpu,cpuacct:/x\n",
            "/proc/self/mountinfo": mountinfo(("/", f"{CG}/cpu", "cgroup", "cpu,cpuacct")),
            f"{CG}/cpu/x/cpu.cfs_quota_us": "150000\n",
            f"{CG}/cpu/x/cpu.cfs_period_us": "100000\n",
            f"{CG}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{CG}/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_host(system)[0].cpu_quota == 1.5


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_NAME": "img.sif"}, "singularity"),
        ({}, {"container": "lxc"}, "lxc"),
        ({"/proc/1/environ": "A=1\0container=lxc\0"}, {}, "lxc"),
        ({"/proc/1/cgroup": "4:memory:/kubepods/burstable/pod1\n"}, {}, "kubernetes"),
        ({"/run/systemd/container": "systemd-nspawn\n"}, {}, "systemd-nspawn"),
    ],
)
def test_containers(tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str) -> None:
    system = tree(tmp_path, {"/proc/version": "x", **files})
    assert container_kind(System(root=system.root, environ=environ, cwd=system.cwd)) == kind


def test_wsl_and_lists(tmp_path: Path) -> None:
    system = tree(
        tmp_path,
        {
            "/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
            "/sys/devices/system/cpu/online": "0-3,8-11,15\n",
            "/sys/devices/system/node/online": "0-1\n",
            "/proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
        },
    )
    host, _ = read_host(system)
    assert host.wsl is True and host.cores == 9 and host.numa_nodes == 2 and host.ipc_lock is True


def test_free_memory_counts_the_cgroup_but_not_its_clean_cache() -> None:
    group = Cgroup(version=2, limit=64 * GiB, usage=60 * GiB, reclaimable=20 * GiB)
    host = Host(ram_total=512 * GiB, ram_available=400 * GiB, cgroup=group)
    assert host.memory_free == 24 * GiB and host.memory_capacity == 64 * GiB
    free_of_limit = Host(
        ram_total=512 * GiB, ram_available=400 * GiB, cgroup=Cgroup(version=2, limit=UNLIMITED)
    )
    assert free_of_limit.memory_free == 400 * GiB and free_of_limit.memory_capacity == 512 * GiB


def test_this_machine_agrees_with_psutil() -> None:
    host, _ = read_host()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    assert host.ram_total == memory.total
    assert abs((host.ram_available or 0) - memory.available) < 1 * GiB  # other processes come and go
    assert host.swap_total == swap.total
    assert host.cores_usable == len(psutil.Process().cpu_affinity() or [])
    soft, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    assert (host.nofile_soft, host.nofile_hard) == (soft, hard)
    shm = psutil.disk_usage("/dev/shm")
    assert host.shm_total == shm.total
    assert host.hostname == os.uname().nodename
