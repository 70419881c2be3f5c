"""Run directories: made whole, found by any reference, judged alive only by identity."""

from __future__ import annotations

import json
import os
import stat as st
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstui import paths
from dstui.errors import DstuiError
from dstui.runs import store
from dstui.runs.processes import Process, alive, descendants, here, identify, marked, send
from dstui.runs.store import RunDir


def place() -> dict[str, Any]:
    p = here()
    return {"host": p.host, "boot_id": p.boot_id, "pid_namespace": p.pid_namespace}


def make(**manifest: Any) -> RunDir:
    return store.create({**place(), "supervisor": None, "launcher": None, **manifest})


def identity(pid: int) -> dict[str, int]:
    found = identify(pid)
    assert found is not None
    return {"pid": found.pid, "start_time": found.start}


def test_a_new_run_is_whole_private_and_versioned() -> None:
    run = store.create({"name": "x"}, '{"a": 1}\n')
    assert st.S_IMODE(run.path.stat().st_mode) == 0o700
    assert st.S_IMODE(run.manifest_path.stat().st_mode) == 0o600
    assert run.manifest["schema_version"] == 1 and run.manifest["id"] == run.id
    assert run.config_path.read_text() == '{"a": 1}\n'
    assert run.out_log.exists() and run.requests_dir.is_dir()
    assert [p.name for p in paths.runs_dir().iterdir()] == [run.id]  # no half-made folder beside it


def test_fill_knows_the_final_path() -> None:
    seen: list[Path] = []

    def fill(run: RunDir) -> tuple[dict[str, Any], dict[str, str]]:
        assert not run.path.exists()
        seen.append(run.path)
        return {"name": "n"}, {"config.json": str(run.path)}

    run = store.create(fill=fill)
    assert seen == [run.path] and run.config_path.read_text() == str(run.path) and run.name == "n"


def test_a_failing_fill_leaves_nothing() -> None:
    def fill(run: RunDir) -> tuple[dict[str, Any], dict[str, str]]:
        raise DstuiError("no")

    with pytest.raises(DstuiError):
        store.create(fill=fill)
    assert list(paths.runs_dir().iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(DstuiError) as e:
        store.create({})
    assert "DSTUI_STATE_HOME" in (e.value.hint or "")


def test_state_home_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(DstuiError) as e:
        store.create({})
    assert "DSTUI_STATE_HOME" in (e.value.hint or "")


def test_find_run(tmp_path: Path) -> None:
    with pytest.raises(DstuiError, match="no runs yet"):
        store.find_run("last")
    a = make(name="alpha", created_at=100.0)
    b = make(name="beta", created_at=200.0)
    c = make(name="beta", created_at=150.0)
    assert [r.id for r in store.list_runs()] == [b.id, c.id, a.id]
    assert store.find_run("last") == b
    assert store.find_run(a.id) == a
    assert store.find_run("alpha") == a
    assert store.find_run(str(a.path)) == a
    assert store.find_run(str(a.out_log)) == a
    length = next(n for n in range(1, 20) if sum(r.id.startswith(a.id[:n]) for r in (a, b, c)) == 1)
    assert store.find_run(a.id[:length]) == a
    with pytest.raises(DstuiError) as e:
        store.find_run("beta")
    assert b.id in (e.value.hint or "") and c.id in (e.value.hint or "")
    with pytest.raises(DstuiError) as e:
        store.find_run("alphq")
    assert "alpha" in (e.value.hint or "")
    with pytest.raises(DstuiError):
        store.find_run("")
    with pytest.raises(DstuiError):
        store.find_run(str(tmp_path))


def test_state_by_identity_not_by_number() -> None:
    me = identity(os.getpid())
    living = make(supervisor=me, launcher=me)
    assert store.state(living) == "running"
    reused = make(supervisor={**me, "start_time": me["start_time"] - 1}, launcher=me)
    assert store.state(reused) == "lost"
    assert store.state(make(supervisor=me)) == "starting"
    assert store.state(make()) == "starting"
    assert store.state(make(created_at=time.time() - 1000)) == "lost"


def test_another_boot_is_lost_another_host_is_judged_by_its_heartbeat() -> None:
    me = identity(os.getpid())
    both = {"supervisor": me, "launcher": me}
    assert store.state(make(**both, boot_id="other")) == "lost"
    elsewhere = make(**both, host="elsewhere", boot_id="other")
    assert store.state(elsewhere) == "running"
    assert store.liveness(elsewhere).supervisor is None
    store.write_json(elsewhere.heartbeat_path, {"t": time.time() - 10})
    assert store.state(elsewhere) == "running"
    store.write_json(elsewhere.heartbeat_path, {"t": time.time() - 1000})
    assert store.state(elsewhere) == "lost"


def test_another_container_on_this_host_is_not_here() -> None:
    me = identity(os.getpid())
    run = make(supervisor=me, launcher=me, pid_namespace="pid:[1]")
    assert store.liveness(run).here is False and store.state(run) == "running"


def test_the_end_wins_over_everything() -> None:
    for outcome in ("finished", "failed", "stopped"):
        run = make(supervisor={"pid": 1, "start_time": -1})
        store.write_json(run.exit_path, {"schema_version": 1, "outcome": outcome})
        assert store.state(run) == outcome


def test_damaged_and_future_manifests() -> None:
    run = make()
    run.manifest_path.write_text("{")
    assert store.list_runs() == [run]
    with pytest.raises(DstuiError) as e:
        _ = run.manifest
    assert run.id in (e.value.hint or "")
    run.manifest_path.write_text('{"schema_version": 2}')
    with pytest.raises(DstuiError, match="format 2"):
        _ = run.manifest


def test_half_written_files_are_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    before = run.manifest_path.read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        store.write_json(run.manifest_path, {"x": 1})
    assert run.manifest_path.read_text() == before
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []


def test_events_are_lines() -> None:
    run = make()
    run.append_event("a", x=1)
    run.append_event("b")
    lines = [json.loads(line) for line in run.events_path.read_text().splitlines()]
    assert [e["event"] for e in lines] == ["a", "b"] and lines[0]["x"] == 1


def test_processes_are_found_by_parent_and_by_mark() -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "DSTUI_RUN_ID": "tst2-0000-0000"}
    )
    try:
        deadline = time.monotonic() + 10
        while len(marked("tst2-0000-0000")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = marked("tst2-0000-0000")
        assert len(found) == 2
        assert set(found) <= {
            Process(child.pid, identity(child.pid)["start_time"]),
            *descendants(os.getpid()),
        }
        mine = identify(child.pid)
        assert mine is not None and alive(mine)
        assert not alive(Process(mine.pid, mine.start + 1))
        assert send(Process(mine.pid, mine.start + 1), 9) is False  # a reused number is never hit
        assert child.poll() is None
        for p in found:
            assert send(p, 9) is True
        child.wait(10)
        assert not alive(mine)
        assert send(mine, 9) is False
    finally:
        child.kill()
        child.wait()


def test_two_runs_never_have_one_name() -> None:
    """Their processes are found by it: with one name, a stop in one state home would end a run of another."""
    names = [store.new_id() for _i in range(1000)]
    assert len(set(names)) == len(names)
    assert all(len(name) == 17 and name[3].isdigit() and name != "last" for name in names)
    assert len({name[:4] for name in names}) > 900  # what a person types is early
