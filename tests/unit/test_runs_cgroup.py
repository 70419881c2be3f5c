"""cgroup v2 (and v1) from recorded trees, as the supervisor and the sampler read them, up to the named cause."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dstui.facts.system import System
from dstui.runs import store
from dstui.runs.diagnose import diagnose_run
from dstui.runs.oomkills import OomKills
from dstui.runs.processes import here
from dstui.runs.samples import HostReader, Sampler, read_peaks, read_samples
from dstui.runs.store import RunDir
from dstui.units import GiB
from tests.facts_tree import tree

CG = "/sys/fs/cgroup"
JOB = f"{CG}/user.slice/user-1000.slice/job_7.scope"
KILLED = """\
[2026-11-02 10:00:00,000] [INFO] [launch.py:351:main] process 4242 spawned with command: ['python', 'train.py']
step 1 loss 2.1
[2026-11-02 10:00:09,000] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9
"""


def events(kills: int) -> str:
    return f"low 0\nhigh 0\nmax 31\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"


def v2(root: Path, **more: str) -> System:
    """A job with a limit of 64 GiB that uses 60, of which 10 are file cache; its step below has no limit of its own."""
    files = {
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/job_7.scope/step_0\n",
        "/proc/self/mountinfo": f"30 1 0:30 / {CG} rw shared:1 - cgroup2 cgroup rw,nsdelegate,memory_recursiveprot\n",
        "/proc/meminfo": f"MemTotal: {256 * GiB // 1024} kB\nMemAvailable: {180 * GiB // 1024} kB\nShmem: 2048 kB\n"
        "SwapTotal: 4096 kB\nSwapFree: 1024 kB\nMlocked: 512 kB\n",
        "/proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n",
        "/proc/vmstat": "nr_free_pages 1\noom_kill 7\n",
        f"{CG}/cgroup.controllers": "cpuset cpu io memory pids\n",
        f"{JOB}/memory.max": f"{64 * GiB}\n",
        f"{JOB}/memory.current": f"{60 * GiB}\n",
        f"{JOB}/memory.stat": f"anon {50 * GiB}\nfile {10 * GiB}\ninactive_file {8 * GiB}\nactive_file {2 * GiB}\n",
        f"{JOB}/memory.events": events(3),
        f"{JOB}/memory.events.local": events(0),
        f"{JOB}/cgroup.procs": "",
        f"{JOB}/step_0/memory.max": "max\n",
        f"{JOB}/step_0/memory.current": f"{60 * GiB}\n",
        f"{JOB}/step_0/memory.stat": "anon 1\ninactive_file 0\n",
        f"{JOB}/step_0/memory.events": events(2),
        f"{JOB}/step_0/memory.events.local": events(2),
        f"{JOB}/step_0/cgroup.procs": "4242\n4243\n",
    }
    return tree(root, {**files, **more})


def test_the_limit_of_the_job_is_the_run_s_memory(tmp_path: Path) -> None:
    host = HostReader(v2(tmp_path))
    use = host.read()
    assert (use.capacity, use.used, use.cgroup) == (64 * GiB, 52 * GiB, 52 * GiB)
    assert use.shm == 2048 * 1024 and use.cpu is None and use.disk is None
    assert (use.swap, use.locked) == (3072 * 1024, 512 * 1024)
    (tmp_path / "proc/stat").write_text("cpu  200 0 200 1000 100 0 0 0 0 0\n")
    assert host.read().cpu == pytest.approx(200 / 500)


def test_without_a_limit_the_machine_s_memory_counts(tmp_path: Path) -> None:
    use = HostReader(v2(tmp_path, **{f"{JOB}/memory.max": "max\n"})).read()
    assert (use.capacity, use.used) == (256 * GiB, 76 * GiB)


def test_a_limit_above_the_machine_s_memory_is_none(tmp_path: Path) -> None:
    use = HostReader(v2(tmp_path, **{f"{JOB}/memory.max": f"{999 * GiB}\n"})).read()
    assert (use.capacity, use.used, use.cgroup) == (256 * GiB, 76 * GiB, 52 * GiB)


def test_a_cgroup_that_disappears_leaves_a_gap(tmp_path: Path) -> None:
    host = HostReader(v2(tmp_path))
    for path in (tmp_path / JOB.lstrip("/")).glob("memory.*"):
        path.unlink()
    use = host.read()
    assert use.cgroup is None and use.used is None and use.capacity == 64 * GiB


@pytest.mark.parametrize(("own", "machine", "expected"), [(1, 1, "certain"), (0, 1, "likely")])
def test_a_kill_is_counted_in_the_run_s_own_cgroup_and_named(
    tmp_path: Path, own: int, machine: int, expected: str
) -> None:
    """``memory.events`` of the own cgroup: what other steps of the job lost does not count as ours."""
    root = tmp_path / "root"
    group = OomKills(v2(root))
    assert group.start == {"cgroup": 2, "system": 7}
    (root / f"{JOB}/memory.events".lstrip("/")).write_text(events(9))  # of a neighbour
    (root / f"{JOB}/step_0/memory.events".lstrip("/")).write_text(events(2 + own))
    (root / "proc/vmstat").write_text(f"oom_kill {7 + machine}\n")
    kills = group.difference()
    assert kills == {"cgroup": own, "system": machine}
    found = diagnose_run(ended(tmp_path, kills)).cause
    assert found is not None and (found.code, found.certainty) == ("DR401", expected)


def ended(folder: Path, kills: dict[str, Any]) -> RunDir:
    place = here()
    manifest = {
        "world_size": 2,
        "host": place.host,
        "boot_id": place.boot_id,
        "command": ["deepspeed", "t.py"],
    }
    run = store.create({**manifest, "pid_namespace": place.pid_namespace}, root=folder / "runs")
    run.out_log.write_text(KILLED)
    last = {"outcome": "failed", "code": 247, "rank_code": -9, "signal": "SIGKILL", "first_rank": 1}
    store.write_json(
        run.exit_path, {"schema_version": 1, **last, "ended_at": time.time(), "oom_kills": kills}
    )
    return run


def test_v2_in_a_container_and_a_kernel_that_does_not_count(tmp_path: Path) -> None:
    inside = {
        "/proc/self/cgroup": "0::/\n",
        f"{CG}/memory.max": f"{16 * GiB}\n",
        f"{CG}/memory.current": f"{GiB}\n",
        f"{CG}/memory.stat": "inactive_file 0\n",
        f"{CG}/memory.events": events(5),
    }
    system = v2(tmp_path / "a", **inside)
    assert OomKills(system).read() == {"cgroup": 5, "system": 7}
    assert HostReader(system).read().capacity == 16 * GiB
    silent = v2(tmp_path / "b", **{f"{JOB}/step_0/memory.events": "low 0\n", "/proc/vmstat": "x 1\n"})
    assert OomKills(silent).difference() == {"cgroup": None, "system": None}
    nothing = OomKills(System(root=str(tmp_path / "c")))
    assert nothing.difference() == {"cgroup": None, "system": None}


def test_v1_is_read_the_same_way(tmp_path: Path) -> None:
    own = f"{CG}/memory/slurm/job_7"
    system = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "4:memory:/slurm/job_7\n",
            "/proc/self/mountinfo": f"30 1 0:30 / {CG}/memory rw shared:1 - cgroup cgroup rw,memory\n",
            "/proc/meminfo": f"MemTotal: {256 * GiB // 1024} kB\nMemAvailable: 1 kB\n",
            "/proc/stat": "cpu 1 1 1 1 1 1 1 1\n",
            f"{own}/memory.limit_in_bytes": f"{32 * GiB}\n",
            f"{own}/memory.usage_in_bytes": f"{20 * GiB}\n",
            f"{own}/memory.stat": f"total_inactive_file {4 * GiB}\n",
            f"{own}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    use = HostReader(system).read()
    assert (use.capacity, use.used) == (32 * GiB, 16 * GiB)
    assert OomKills(system).start == {"cgroup": 1}


def test_the_sampler_writes_it_and_its_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = v2(tmp_path / "root")
    folder = tmp_path / "samples"
    folder.mkdir()
    sampler = Sampler(folder, devices=())
    monkeypatch.setattr(sampler, "_host", HostReader(system))
    sampler.sample([])
    (tmp_path / "root" / f"{JOB}/memory.current".lstrip("/")).write_text(f"{63 * GiB}\n")
    sampler.sample([])
    (tmp_path / "root" / f"{JOB}/memory.current".lstrip("/")).write_text(f"{30 * GiB}\n")
    sampler.sample([])
    sampler.close()
    assert [s.host.used for s in read_samples(folder)] == [52 * GiB, 55 * GiB, 22 * GiB]
    peaks = read_peaks(folder)
    assert peaks is not None and peaks.host_used == peaks.cgroup == 55 * GiB
