"""The supervisor with real processes but without DeepSpeed: how runs end, are stopped and are logged."""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dstui import cli
from dstui.errors import DstuiError
from dstui.plain import logs
from dstui.plain import stop as stop_verb
from dstui.plain.runs import summary, table
from dstui.runs import store
from dstui.runs.adopt import adopt, adopt_lost
from dstui.runs.command import free_port
from dstui.runs.control import orphans, remove, stop
from dstui.runs.logkeeper import metric_files
from dstui.runs.preflight import preflight
from dstui.runs.processes import alive, descendants, identify, marked, send
from dstui.runs.spec import RunSpec
from dstui.runs.start import start
from dstui.runs.store import RunDir
from dstui.runs.view import RunView
from tests.supervised import FACTS, ended, events, lost, says, until


def test_finished(begin: Callable[..., RunDir]) -> None:
    run = begin("print('hello')")
    last = ended(run)
    assert (last["outcome"], last["code"], last["signal"]) == ("finished", 0, None)
    assert run.out_log.read_text() == "hello\n"
    assert last["started_at"] <= last["ended_at"] <= time.time()
    assert events(run)[-1] == "exit"
    assert run.supervisor_log.read_text() == ""
    assert not (run.path / ".exit.reserve").exists()


@pytest.mark.parametrize(
    ("source", "code", "signal_"),
    [
        ("import sys; sys.exit(3)", 3, None),
        ("1/0", 1, None),
        ("import os; os.kill(os.getpid(), 9)", None, "SIGKILL"),
        ("import os; os.abort()", None, "SIGABRT"),
    ],
)
def test_failed(begin: Callable[..., RunDir], source: str, code: int | None, signal_: str | None) -> None:
    last = ended(begin(source))
    assert (last["outcome"], last["code"], last["signal"]) == ("failed", code, signal_)
    assert last["reason"]


def test_each_ranks_code_is_seen_though_the_launcher_hides_it(begin: Callable[..., RunDir]) -> None:
    run = begin(
        "import os, time; time.sleep(2); os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)",
        ranks=True,
    )
    last = ended(run)
    assert last["first_rank"] == 1 and last["rank_code"] == -9 and last["signal"] == "SIGKILL"
    assert [r["rank"] for r in last["ranks"]] == [0, 1] and last["ranks"][1]["code"] == -9
    assert last["ranks"][0]["code"] in (-15, None)  # its launcher may reap it before anyone can look
    assert "rank 1 killed by SIGKILL" in last["reason"]


NESTED = """
import subprocess, sys
words = ["run", "--launcher", "python", "--python", sys.executable, "--no-preflight", "--json", "--", "inner.py"]
subprocess.run([sys.executable, "-m", "dstui", *words], stdout=open("inner.json", "w"), check=True)
"""


@pytest.mark.parametrize("how", ["ends", "stopped", "lost"])
def test_a_run_that_a_run_started_is_a_run_of_its_own(
    begin: Callable[..., RunDir], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that starts runs (a sweep) may end, be stopped or lose its supervisor: they go on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(store.__file__).parents[2]))
    (tmp_path / "inner.py").write_text(
        "import time\nwhile True: print('inner', flush=True); time.sleep(0.1)\n"
    )
    outer = begin(
        NESTED + ("" if how == "ends" else "print('up', flush=True)\nimport time; time.sleep(600)\n")
    )
    answer = until(lambda: (tmp_path / "inner.json").exists() and (tmp_path / "inner.json").read_text())
    inner = RunDir(Path(json.loads(answer)["dir"]))
    try:
        if how == "ends":
            last = ended(outer)
            assert (last["outcome"], last["leftovers"]) == ("finished", [])
        elif how == "stopped":
            says(outer, "up")
            assert stop(outer, now=True).state == "stopped"
        else:
            says(outer, "up")
            lost(outer)
            done = stop(outer, now=True)
            assert done.state == "lost" and done.killed
        assert store.state(inner) == "running" and marked(outer.id) == []
        size = inner.out_log.stat().st_size
        until(lambda: inner.out_log.stat().st_size > size)
        assert stop(inner, now=True).state == "stopped" and marked(inner.id) == []
    finally:
        stop(inner, now=True)


def test_the_world_that_the_launcher_made_counts(begin: Callable[..., RunDir]) -> None:
    """Asked for three ranks, the launcher makes two: the manifest, the list and the monitor say two."""
    run = begin("import time; time.sleep(60)", ranks=True, num_gpus=3)
    until(lambda: run.manifest["world_size"] == 2)
    assert run.manifest["world_size_asked"] == 3
    view = RunView(run)
    assert view.poll().world_size == 2
    view.close()
    row = summary(run)
    assert (row["world_size"], row["world_size_asked"]) == (2, 3)
    assert "3 ranks were asked for, the launcher started 2" in table([row])
    until(lambda: events(run).count("rank") == 2)
    assert events(run).count("world_size") == 1


def test_the_launchers_word_counts_when_a_rank_was_too_quick(begin: Callable[..., RunDir]) -> None:
    run = begin("print('[...] exits with return code = -11')")
    last = ended(run)
    assert (last["outcome"], last["rank_code"], last["signal"]) == ("failed", -11, "SIGSEGV")


def test_what_it_leaves_behind_is_ended_and_said(begin: Callable[..., RunDir]) -> None:
    """A daemon of the training, with a session of its own and without the run's environment."""
    run = begin(
        "import os, subprocess\nif os.fork() == 0:\n    os.setsid()\n"
        "    os.execve('/bin/sleep', ['sleep', '600'], {})\nprint('over')\n"
    )
    last = ended(run)
    assert last["outcome"] == "finished" and [x["name"] for x in last["leftovers"]] == ["sleep"]
    view = RunView(run)
    shot = view.poll()
    view.close()
    assert shot.ending is not None
    assert (
        f"1 process that it left behind was ended: sleep ({last['leftovers'][0]['pid']})" in shot.ending.text
    )
    assert not Path(f"/proc/{last['leftovers'][0]['pid']}").exists()


def test_stop_reaches_everything_also_what_hides(begin: Callable[..., RunDir]) -> None:
    """A grandchild that left the session and its parents is still the run's."""
    run = begin(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    subprocess.Popen([sys.executable, '-c', 'import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(99)'])\n"
        "print('up', flush=True)\ntime.sleep(99)\n",
        ranks=True,
    )
    until(lambda: run.out_log.read_text().count("up") == 2 and len(marked(run.id)) >= 4)
    time.sleep(0.3)
    done = stop(run)
    assert done.ended and done.state == "stopped"
    assert marked(run.id) == []
    last = run.exit or {}
    assert last["outcome"] == "stopped" and last["stopped_by"]["pid"] == os.getpid()
    assert stop(run).already


def test_a_stubborn_run_is_killed(begin: Callable[..., RunDir]) -> None:
    run = begin(
        "import signal, time\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, lambda *_: print('no', flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(1)\n"
    )
    says(run, "up")
    began = time.monotonic()
    assert stop(run, now=True).state == "stopped"
    assert 2 < time.monotonic() - began < 10  # TERM, 3 s, KILL
    last = run.exit or {}
    assert last["outcome"] == "stopped" and last["launcher_signal"] == "SIGKILL"


def test_a_graceful_end_within_a_stop_is_a_stop(begin: Callable[..., RunDir]) -> None:
    run = begin(
        "import time\nprint('up', flush=True)\n"
        "try: time.sleep(99)\nexcept KeyboardInterrupt: print('saved', flush=True)\n"
    )
    says(run, "up")
    assert stop(run).state == "stopped"
    assert "saved" in run.out_log.read_text() and (run.exit or {})["code"] == 0


def test_a_request_file_is_enough(begin: Callable[..., RunDir]) -> None:
    """As a stop from another host arrives: no signal, only a file."""
    run = begin("import time; print('up', flush=True); time.sleep(99)")
    says(run, "up")
    (run.requests_dir / "nonsense.json").write_text("{")
    (run.requests_dir / "other.json").write_text('{"request": "dance"}')
    until(lambda: events(run).count("request_refused") == 2)
    assert store.state(run) == "running"
    request = {"request": "stop", "now": False, "by": {"host": "elsewhere"}}
    (run.requests_dir / "stop-1.json").write_text(json.dumps(request))
    assert ended(run, 10)["stopped_by"] == {"host": "elsewhere"}


def test_shutdown_of_the_machine_is_a_stop(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; print('up', flush=True); time.sleep(99)")
    says(run, "up")
    supervisor = run.process("supervisor")
    assert supervisor is not None
    send(supervisor, signal.SIGTERM)
    assert ended(run, 10)["stopped_by"] == {"signal": "SIGTERM", "to": "supervisor"}


def test_no_signal_but_kill_takes_the_supervisor(begin: Callable[..., RunDir]) -> None:
    run = begin("import time\nwhile True: print('on', flush=True); time.sleep(0.1)\n")
    says(run, "on")
    supervisor = run.process("supervisor")
    assert supervisor is not None
    for name in [
        "HUP",
        "INT",
        "QUIT",
        "PIPE",
        "USR1",
        "ALRM",
        "VTALRM",
        "PROF",
        "IO",
        "TSTP",
        "TTIN",
        "TTOU",
        "WINCH",
        "CONT",
        "XFSZ",
        "URG",
    ]:
        send(supervisor, signal.Signals[f"SIG{name}"])
    size = run.out_log.stat().st_size
    until(lambda: run.out_log.stat().st_size > size)
    beat = (run.heartbeat or {})["t"]
    until(lambda: (run.heartbeat or {})["t"] > beat)
    assert alive(supervisor) and store.state(run) == "running"


def test_a_frozen_supervisor_obeys_once_it_goes_on(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; time.sleep(600)")
    supervisor = run.process("supervisor")
    assert supervisor is not None
    send(supervisor, signal.SIGSTOP)
    try:
        done = stop(run, timeout=1)
        assert not done.ended and done.state == "running"
    finally:
        send(supervisor, signal.SIGCONT)
    assert ended(run)["outcome"] == "stopped"


def test_lost_is_never_given_a_code(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; print('up', flush=True); time.sleep(99)")
    says(run, "up")
    supervisor, launcher = run.process("supervisor"), run.process("launcher")
    assert supervisor is not None and launcher is not None
    send(supervisor, signal.SIGKILL)
    until(lambda: store.state(run) == "lost")
    assert alive(launcher)
    done = stop(run)
    assert done.ended and done.state == "lost" and launcher.pid in done.killed
    assert not alive(launcher) and run.exit is None
    assert stop(run).already


def test_what_the_training_sees(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's whole environment and umask, its directory; SIGHUP ignored, SIGINT not; no terminal."""
    monkeypatch.setenv("MY_SECRET", "s3cret")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")  # must not reach the supervisor
    before = os.umask(0o027)
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under `nohup sh -c '... &'`
    try:
        run = begin(
            "import os, signal, sys\n"
            "print(os.environ['MY_SECRET'], os.environ['ADDED'], os.getcwd())\n"
            "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
            "print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', os.environ['DSTUI_RUN_ID'])\n"
            "open('out', 'w').close()\n",
            env={"ADDED": "also s3cret", "ADDED_KEY": "s3cret"},
        )
        ended(run)
    finally:
        os.umask(before)
        signal.signal(signal.SIGINT, old)
    assert run.out_log.read_text().splitlines() == [
        f"s3cret also s3cret {tmp_path}",
        "True True",
        f"True True {run.id}",
    ]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640
    written = "".join(p.read_text() for p in run.path.glob("*.json"))
    assert '"ADDED_KEY": "***"' in written
    assert written.count("s3cret") == 1  # ADDED: its name is no secret's


def test_a_launcher_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    spec = RunSpec("train.py", launcher="python", python="/nowhere/python", cwd=str(tmp_path))
    with pytest.raises(DstuiError, match="did not start"):
        start(spec, FACTS, preflight=False)
    run = store.find_run("last")
    assert store.state(run) == "failed" and "/nowhere/python" in (run.exit or {})["reason"]


def test_small_and_quiet(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; print('up', flush=True); time.sleep(99)")
    says(run, "up")
    time.sleep(2)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    status = Path(f"/proc/{supervisor.pid}/status").read_text()
    rss = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert rss < 60 << 20
    maps = Path(f"/proc/{supervisor.pid}/maps").read_text()
    assert "torch" not in maps
    assert not [t for t in Path(f"/proc/{supervisor.pid}/fd").iterdir() if "tty" in str(t.readlink())]
    stop(run, now=True)


def test_the_log_is_bounded_and_nothing_is_cut(begin: Callable[..., RunDir]) -> None:
    run = begin(
        "import time\n"
        "for i in range(36):\n"
        "    print(f'block {i:06}', flush=True)\n"
        "    for j in range(1024): print('x' * 1023)\n"
        "    time.sleep(0.05)\n"
        "print('the end')\n",
        log_limit=16 << 20,
    )
    ended(run, 60)
    size = run.out_log.stat()
    assert size.st_size > 36 << 20
    if "log_trimmed" not in events(run):
        pytest.skip("this file system cannot punch holes")
    assert size.st_blocks * 512 < 30 << 20  # between two ticks it may grow above its limit
    seen: list[bytes] = []
    logs.copy(run, seen.append)
    text = b"".join(seen)
    assert text.startswith(b"block 000000") and text.endswith(b"the end\n") and b"\0" not in text
    assert b"given up for space" in text
    tail: list[bytes] = []
    logs.copy(run, tail.append, lines=2)
    assert b"".join(tail) == b"x" * 1023 + b"\nthe end\n"


def test_an_hour_of_ten_lines_a_second_leaves_small_files(begin: Callable[..., RunDir]) -> None:
    """All at once: 36 000 lines. Nothing but the log itself grows with them, the supervisor's memory neither."""
    run = begin("for i in range(36_000): print(f'step {i:6} ' + 'x' * 150)\nimport time; time.sleep(3)")
    supervisor = run.process("supervisor")
    assert supervisor is not None
    says(run, "step  35999")
    status = Path(f"/proc/{supervisor.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) * 1024 < 40 << 20
    ended(run)
    assert run.out_log.read_text().count("\n") == 36_000
    others = [p for p in run.path.rglob("*") if p.is_file() and p != run.out_log]
    assert sum(p.stat().st_size for p in others) < 64 << 10, {p.name: p.stat().st_size for p in others}


def test_a_deleted_log_comes_back(begin: Callable[..., RunDir]) -> None:
    run = begin("import time\nfor i in range(40):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n")
    says(run, "line 5")
    run.out_log.unlink()
    ended(run)
    lines = run.out_log.read_text().splitlines()
    assert lines[0].startswith("[dstui]") and lines[1:] == [f"line {i}" for i in range(40)]


def test_a_deleted_run_directory_does_not_leave_a_supervisor(begin: Callable[..., RunDir]) -> None:
    import shutil

    run = begin("import time; print('up', flush=True); time.sleep(4)")
    says(run, "up")
    supervisor = run.process("supervisor")
    assert supervisor is not None

    def gone() -> bool:  # it may write a file into a folder that is just being emptied
        shutil.rmtree(run.path, ignore_errors=True)
        return not run.path.exists()

    until(gone)
    until(lambda: not alive(supervisor), 20)
    assert not run.path.exists()


def test_a_full_disk_cannot_take_the_last_word(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "small"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(home)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        monkeypatch.setenv("DSTUI_STATE_HOME", str(home))
        run = begin(
            "import sys, time\n"
            "try:\n"
            "    while True: print('x' * 4095, flush=True)\n"
            "except OSError as e: full = e.errno\n"
            "time.sleep(3)\nsys.exit(full)\n"
        )
        last = ended(run)
        assert (last["outcome"], last["code"]) == ("failed", 28)  # the training's own ENOSPC
        assert json.loads(run.exit_path.read_text()) == last
    finally:
        subprocess.run(["umount", "-l", str(home)], check=False)


def test_the_callers_descendants_do_not_grow(begin: Callable[..., RunDir]) -> None:
    before = len(descendants(os.getpid()))
    run = begin("import time; time.sleep(1)")
    assert (
        len(descendants(os.getpid())) == before
    )  # not our child: nothing to reap, nothing that dies with us
    ended(run)


def test_an_answer_is_remembered(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    """`--cfg {config}` once, and the next run of this script needs to say it no more."""
    source = "import sys, fire; print(sys.argv[1:])"
    (tmp_path / "fire.py").write_text("")
    first = begin(source, "--cfg", "{config}", config={})
    second = begin(source, "--lr", "1", config={})
    ended(first), ended(second)
    assert second.out_log.read_text() == f"['--lr', '1', '--cfg', '{second.config_path}']\n"


def test_a_lost_run_is_adopted_and_its_code_is_never_guessed(
    begin: Callable[..., RunDir], tmp_path: Path
) -> None:
    wait = "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nsys.exit(3)"
    run = begin(wait, ranks=True)
    until(lambda: len((run.heartbeat or {}).get("ranks", {})) == 2)
    lost(run)
    assert adopt_lost() == [run]
    assert store.state(run) == "running"
    assert adopt_lost() == []  # somebody is at work
    assert run.manifest["adopted"] and not adopt(run)
    lost(run)  # and again
    assert adopt_lost() == [run]
    (tmp_path / "go").touch()
    last = until(lambda: run.exit, 20)
    assert (last["outcome"], last["code"], last["signal"], last["cause"]) == ("lost", None, None, None)
    assert "unknown" in last["reason"] and store.state(run) == "lost"
    assert [r["rank"] for r in last["ranks"]] == [0, 1]
    assert {r["code"] for r in last["ranks"]} <= {3, -15, None}  # seen as a zombie, or not at all
    assert marked(run.id) == [] and adopt_lost() == []


def test_a_run_that_is_watched_gets_another_supervisor_at_once(begin: Callable[..., RunDir]) -> None:
    """Nobody who looks on is told that it is lost while its ranks live."""
    run = begin("import time; time.sleep(600)", ranks=True)
    until(lambda: len((run.heartbeat or {}).get("ranks", {})) == 2)
    view, onlooker = RunView(run, keep=True), RunView(run)
    assert (view.poll().state, onlooker.poll().state) == ("running", "running")
    lost(run)
    until(lambda: run.manifest.get("adopted") or view.poll().state != "running" or None)
    assert view.poll().state == "running" and len(run.manifest["adopted"]) == 1
    view.close(), onlooker.close()


@pytest.mark.parametrize("verb", ["runs", "logs", "watch --once", "diagnose", "diagnose DIR", "rm", "stop"])
def test_whoever_looks_at_a_lost_run_takes_it_over(begin: Callable[..., RunDir], verb: str) -> None:
    run = begin("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    says(run, "up")
    lost(run)
    before = run.process("supervisor")
    words = verb.split() if verb.endswith("DIR") else [*verb.split(), *([] if verb == "runs" else [run.id])]
    words = [str(run.path) if w == "DIR" else w for w in words]
    done = subprocess.run(
        [sys.executable, "-m", "dstui", *words], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert run.process("supervisor") != before
    if verb == "stop":
        last = ended(run)
        assert (last["outcome"], last["code"]) == ("stopped", None) and marked(run.id) == []
        return
    assert store.state(run) == "running"
    if verb == "rm":
        assert done.returncode == 2 and "dstui stop" in done.stderr and run.path.exists()


@pytest.mark.parametrize("words", [("logs", "-f"), ("run", "--wait")])
def test_whoever_waits_for_a_run_outlives_its_supervisor(
    begin: Callable[..., RunDir], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """They go on to its real end, not to the death of its supervisor."""
    source = "import os, time\nwhile not os.path.exists('end'): print('on', flush=True); time.sleep(0.1)\nprint('over')\n"
    command = [sys.executable, "-m", "dstui", *words]
    if words[0] == "run":
        (tmp_path / "train.py").write_text(source)
        command += ["--launcher", "python", "--python", sys.executable, "--no-preflight", "--", "train.py"]
    else:
        command.append(begin(source).id)
    env = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as waiting:
        run = until(lambda: next((r for r in store.list_runs() if r.process("launcher") is not None), None))
        says(run, "on")
        before = run.process("supervisor")
        lost(run)
        until(lambda: run.process("supervisor") != before)
        assert waiting.poll() is None
        (tmp_path / "end").touch()
        assert waiting.stdout is not None
        text = waiting.stdout.read()
    assert (run.exit or {})["outcome"] == "lost"
    if words[0] == "logs":
        assert text.endswith("over\n") and waiting.returncode == 0
    else:
        assert waiting.returncode == 1


def test_one_that_cannot_be_stopped_leaves_the_others_no_less_stopped(
    begin: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    away = begin("import time; time.sleep(600)")
    here = begin("import time; time.sleep(600)")
    lost(away)
    for p in marked(away.id):
        send(p, signal.SIGKILL)
    manifest = away.manifest | {"host": "elsewhere"}
    store.write_json(away.manifest_path, manifest)
    store.write_json(away.heartbeat_path, {"t": 1.0})
    assert cli.main(["stop", "--now", "--json", away.id, here.id]) == 2
    answer = json.loads(capsys.readouterr().out)["runs"]
    assert [(r["run"], r["ended"]) for r in answer] == [(away.id, False), (here.id, True)]
    assert "elsewhere" in answer[0]["problem"] and answer[1]["problem"] is None
    assert (here.exit or {})["outcome"] == "stopped"
    with pytest.raises(DstuiError):
        stop_verb.run(argparse.Namespace(runs=[here.id, "nosuch"], now=True, timeout=1, json=True))
    remove(away)


def test_an_adopted_run_is_stopped_like_any_other(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; time.sleep(600)", ranks=True)
    until(lambda: len((run.heartbeat or {}).get("ranks", {})) == 2)
    lost(run)
    bystander = subprocess.Popen(["sleep", "60"])
    assert adopt_lost() == [run]
    done = stop(run)
    assert (done.ended, done.state, done.killed) == (True, "stopped", ())
    assert (run.exit or {})["code"] is None and (run.exit or {})["stopped_by"]["pid"] == os.getpid()
    assert marked(run.id) == []
    assert bystander.poll() is None  # nothing else is ever signalled
    bystander.kill()
    bystander.wait()


def test_a_run_that_died_with_its_supervisor_gets_its_end(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; time.sleep(600)")
    launcher = run.process("launcher")
    assert launcher is not None
    supervisor = run.process("supervisor")
    assert supervisor is not None
    send(supervisor, signal.SIGSTOP)
    send(launcher, signal.SIGKILL)
    lost(run)
    assert adopt_lost() == [run]
    last = until(lambda: run.exit)
    assert (last["outcome"], last["code"], last["ended_at"]) == ("lost", None, None)


def test_runs_of_another_host_are_not_adopted(begin: Callable[..., RunDir]) -> None:
    run = begin("import time; time.sleep(600)")
    lost(run)
    manifest = run.manifest
    store.write_json(run.manifest_path, manifest | {"host": "another"})
    assert adopt_lost() == []
    store.write_json(run.manifest_path, manifest)
    stop(run, now=True)


def test_after_a_reboot_nothing_of_a_run_is_looked_for(
    begin: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    """Pids and start times count from the boot: after another one a stranger may have both."""
    run = begin("print('up', flush=True)\nimport time; time.sleep(600)")
    says(run, "up")
    lost(run)
    for p in marked(run.id):
        send(p, signal.SIGKILL)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        same = identify(stranger.pid)
        assert same is not None
        store.write_json(run.heartbeat_path, {"t": time.time(), "processes": [[same.pid, same.start]]})
        manifest = run.manifest
        store.write_json(run.manifest_path, manifest | {"boot_id": "the one before"})
        assert orphans(run) == []
        assert cli.main(["stop", run.id]) == 0 and "had ended: lost" in capsys.readouterr().out
        run.manifest_path.write_text("")  # and where nobody can tell which boot it was
        assert orphans(run) == [] and stop(run, now=True).already
        assert stranger.poll() is None
        store.write_json(run.manifest_path, manifest | {"boot_id": "the one before"})
        assert cli.main(["rm", run.id]) == 0
        stranger.kill()


PRINTS = """
import os, sys, time
n = 0
while True:
    n += 1
    print("step", n, "x" * 1000, flush=True)
    with open("steps.new", "w") as f:
        f.write(str(n))
    os.replace("steps.new", "steps")  # it is read while this runs
    time.sleep(0.005)
"""


def test_training_goes_on_when_the_state_disk_is_full(tmp_path: Path) -> None:
    """A disk of 70 MB of its own (root, mounts) that fills up under a script that dies if it cannot print."""
    if (
        os.geteuid() != 0
        or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root and mount namespaces")
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "train.py").write_text(PRINTS)
    (tmp_path / "driver.py").write_text(
        f"""
import json, os, sys, time
from pathlib import Path
from dstui.facts.model import Facts, Interpreter
from dstui.runs.command import free_port
from dstui.runs.control import orphans, remove, stop
from dstui.runs.spec import RunSpec
from dstui.runs.start import start

facts = Facts(gpus=(), interpreters=(Interpreter(sys.executable, "option", "3.11.0"),))
run = start(RunSpec("train.py", launcher="python", cwd={str(tmp_path)!r}), facts, preflight=False)
time.sleep(3)
with open({str(state)!r} + "/hog", "wb", buffering=0) as hog:
    try:
        while True:
            hog.write(b"x" * (1 << 20))
    except OSError:
        pass
    try:
        while True:
            hog.write(b"x")
    except OSError:
        pass
full = int(Path("steps").read_text())
time.sleep(15)
went_on = int(Path("steps").read_text()) - full
free = os.statvfs({str(state)!r}).f_bavail
size = run.out_log.stat().st_size
done = stop(run)
print(json.dumps(dict(went_on=went_on, free=free, size=size, state=done.state, exit=run.exit and run.exit["outcome"],
                      tail=run.out_log.read_bytes()[-300:].decode(errors="replace"))))
"""
    )
    mount = f"mount -t tmpfs -o size=70m none {state} && exec {sys.executable} driver.py"
    env = {**os.environ, "DSTUI_STATE_HOME": str(state), "PYTHONPATH": str(Path(store.__file__).parents[2])}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr
    assert answer["went_on"] > 500, answer  # it did not die of a print
    assert answer["state"] == answer["exit"] == "stopped"  # and the last word was written


def test_a_read_only_state_home_is_refused_before_anything_starts(tmp_path: Path) -> None:
    if (
        os.geteuid() != 0
        or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root and mount namespaces")
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "train.py").write_text("open('started', 'w').close()")
    run = f"{sys.executable} -m dstui run --launcher python --python {sys.executable} --no-preflight -- train.py"
    mount = f"mount -t tmpfs -o ro,size=1m none {state} && exec {run}"
    env = {**os.environ, "DSTUI_STATE_HOME": str(state), "PYTHONPATH": str(Path(store.__file__).parents[2])}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "DSTUI_STATE_HOME" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "started").exists()


def test_a_state_home_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DSTUI_STATE_HOME", str(blocked))
    with pytest.raises(DstuiError) as e:
        start(RunSpec("train.py", launcher="python", cwd=str(tmp_path)), FACTS, preflight=False)
    assert "DSTUI_STATE_HOME" in (e.value.hint or "")


def test_the_family_is_found_without_reading_every_stranger_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from dstui.runs import processes

    read: list[int] = []
    real = processes.stat

    def counting(pid: int) -> processes.Stat | None:
        read.append(pid)
        return real(pid)

    monkeypatch.setattr(processes, "stat", counting)
    family = processes.Family(os.getpid())
    first = family.stats(0.0)
    assert os.getpid() in first and len(read) == len(set(read)) > 1
    read.clear()
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        found = family.stats(1.0)
        assert {child.pid, grandchild} <= found.keys()
        everyone = set(processes.all_stats())
        read.clear()
        again = family.stats(2.0)
        own = {p.pid for p in descendants(os.getpid(), again)}
        assert {child.pid, grandchild} <= own
        assert len(read) < len(everyone)  # strangers were not read again
        read.clear()
        family.stats(2.0 + family.ANEW)
        assert len(read) >= len(own) + 2  # but now and then they are
        os.kill(grandchild, signal.SIGKILL)
        child.wait()
    assert not {child.pid, grandchild} & family.stats(3.0 + family.ANEW).keys()


def test_csv_monitor_s_files_are_there_before_the_first_step(begin: Callable[..., RunDir]) -> None:
    """DeepSpeed opens them at every step and dies where the disk is full: blocks are kept for them from the start."""
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    run = begin("import os, sys, time, fire\ntime.sleep(3)", "--cfg", "{config}", config=config)
    folder = run.metrics_dir / "csv"
    files = sorted(p.name for p in until(lambda: list(folder.glob("*.csv")) if folder.is_dir() else None))
    assert files == ["Train_Samples_loss_scale.csv", "Train_Samples_lr.csv"]
    assert all((folder / name).stat().st_size == 0 for name in files)
    if (folder / files[0]).stat().st_blocks == 0:
        pytest.skip("this file system keeps no blocks")
    assert all((folder / name).stat().st_blocks * 512 >= 128 << 10 for name in files)
    own = {"csv_monitor": {"enabled": True, "output_path": "/x/mine", "job_name": "j"}}
    assert metric_files(own, run.metrics_dir) == []
    ended(run)


@pytest.mark.parametrize("damage", ["", "{", "[]", None])
def test_a_damaged_manifest_is_made_whole_again(begin: Callable[..., RunDir], damage: str | None) -> None:
    run = begin("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    says(run, "up")
    before = run.manifest
    if damage is None:
        run.manifest_path.unlink()
    else:
        run.manifest_path.write_text(damage)
    until(lambda: store.read_json(run.manifest_path))
    assert run.manifest == before and store.state(run) == "running"
    assert "manifest_restored" in events(run)


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_with_a_damaged_manifest_can_be_stopped(begin: Callable[..., RunDir], alive: bool) -> None:
    run = begin("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    says(run, "up")
    manifest = run.manifest
    if not alive:
        lost(run)
    run.manifest_path.write_text("")
    done = stop(run, now=True)
    assert done.ended and done.state == ("stopped" if alive else "lost") and bool(done.killed) == (not alive)
    assert marked(run.id) == [] and list(run.requests_dir.glob("*.json")) == []
    store.write_json(run.manifest_path, manifest)


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_needs_no_room_on_the_disk(begin: Callable[..., RunDir], now: bool) -> None:
    """No request can be written (here: its folder is a file): the supervisor is asked by a signal."""
    run = begin(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('int', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('term', flush=True), exit(0)))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    says(run, "up")
    run.requests_dir.rmdir()
    run.requests_dir.write_text("")
    done = stop(run, now=now, timeout=0.0 if not now else 60)
    if not now:
        says(run, "int")  # politely first
        done = stop(run, now=True)  # somebody lost patience
    assert done.ended and done.state == "stopped"
    assert run.out_log.read_text().split() == (["up", "term"] if now else ["up", "int", "term"])
    assert "signal" in (run.exit or {})["stopped_by"]


def test_a_heartbeat_needs_no_room_on_the_disk(begin: Callable[..., RunDir]) -> None:
    """Its temporary file cannot be made (here: a folder has the name): other hosts still see that it lives."""
    run = begin("import time; time.sleep(600)")
    until(lambda: run.heartbeat)
    while True:
        try:
            (run.path / ".heartbeat.tmp").mkdir()
            break
        except FileExistsError:  # just being written
            time.sleep(0.01)
    before = (run.heartbeat or {"t": 0.0})["t"]
    until(lambda: (run.heartbeat or {"t": 0.0})["t"] > before + 2 * store.HEARTBEAT_INTERVAL - 1)
    assert {"t", "state", "processes"} <= (run.heartbeat or {}).keys()


def test_a_log_that_is_cut_says_so(begin: Callable[..., RunDir]) -> None:
    run = begin("import time\nwhile True: print('on' * 50, flush=True); time.sleep(0.05)\n")
    until(lambda: run.out_log.stat().st_size > 2000)
    samples = run.samples_dir / "1s.jsonl"
    until(lambda: samples.exists() and len(samples.read_text().splitlines()) > 2)  # it has looked at the log
    os.truncate(run.out_log, 0)
    until(lambda: "log_gap" in events(run))
    says(run, "out.log was cut here")
    size = run.out_log.stat().st_size
    until(lambda: run.out_log.stat().st_size > size + 1000)
    view = RunView(run)
    assert "on" in view.poll().log[-1]
    view.close()


SAVES = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
done = []
signal.signal(signal.SIGTERM, lambda *_: done.append(1))
print("up", flush=True)
while not done: time.sleep(0.1)
print("term", flush=True)
while True: time.sleep(1)
"""


def test_ranks_whose_launcher_dies_of_a_stop_have_its_time_and_no_more(
    begin: Callable[..., RunDir], tmp_path: Path
) -> None:
    """DeepSpeed's runner ends at once of SIGINT; its ranks may be saving."""
    (tmp_path / "launcher.py").write_text(
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '1'}\n"
        "subprocess.Popen([sys.executable, 'train.py'], env=env).wait()\n"
    )
    run = begin(SAVES, ranks=True, num_gpus=1)
    says(run, "up")
    until(lambda: (run.heartbeat or {}).get("ranks"))
    launcher = run.process("launcher")
    assert launcher is not None
    assert not stop(run, timeout=0).ended
    until(lambda: not alive(launcher))
    time.sleep(8)  # longer than the ranks of a launcher that died of something else have
    assert "term" not in run.out_log.read_text() and run.exit is None
    began = time.monotonic()
    assert stop(run, now=True).state == "stopped"  # somebody lost patience
    assert time.monotonic() - began < 9  # TERM, 3 s, KILL: not the ladder of leftovers
    assert "term" in run.out_log.read_text() and marked(run.id) == []
    assert [(r["rank"], r["code"]) for r in (run.exit or {})["ranks"]] == [(0, -9)]


def test_a_port_that_was_given_to_a_run_is_refused(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    """It does not listen yet: two starts within a second would both find the port free."""
    port = free_port()
    run = begin("import time; time.sleep(600)", master_port=port)
    spec = RunSpec("train.py", launcher="python", cwd=str(tmp_path), master_port=port)
    found = {p.code: p for p in preflight(spec, FACTS)}
    assert found["port-promised"].severity == "error" and run.id in found["port-promised"].message
    stop(run, now=True)
    assert "port-promised" not in {p.code for p in preflight(spec, FACTS)}
