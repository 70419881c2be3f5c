"""The user's command on end, failure and stall: really run, by a real supervisor, without disturbing the run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import hook, store
from dstui.runs.adopt import adopt_lost
from dstui.runs.control import stop
from dstui.runs.hook import Hooks
from dstui.runs.processes import Process, alive, identify
from dstui.runs.store import RunDir
from dstui.settings import Settings
from tests.supervised import ended, events, lost, says, until

WRITE = 'printf \'%s|\' "$DSTUI_EVENT" "$DSTUI_STATE" "$DSTUI_EXIT_CODE" "$DSTUI_RUN_NAME" > said; cat > told'


def hook_events(run: RunDir) -> list[dict[str, Any]]:
    return until(lambda: [e for e in run.events() if e["event"] == "hook"])


def test_a_finished_run_tells(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    run = begin("print('hello')", on_event=WRITE, name="mine")
    (done,) = hook_events(run)
    assert (done["of"], done["state"], done["code"], done["ended"]) == ("end", "finished", 0, False)
    assert (tmp_path / "said").read_text() == "end|finished|0|mine|"
    told = json.loads((tmp_path / "told").read_text())
    assert told["schema_version"] == 1 and told["run"] == run.id and told["dir"] == str(run.path)
    assert told["exit"] == run.exit  # it is written before anyone is told
    assert told["stall"] is None and told["name"] == "mine"


def test_a_failure_tells_its_cause(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    source = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    run = begin(source, on_event='printf "%s %s %s" "$DSTUI_EVENT" "$DSTUI_CAUSE" "$DSTUI_MESSAGE" > said')
    (done,) = hook_events(run)
    assert done["of"] == "failure"
    end = run.exit or {}
    code = (end["cause"] or {}).get("code", "")
    assert (tmp_path / "said").read_text() == f"failure {code} {end['reason']}"


def test_a_stop_is_an_end_and_reaches_no_hook(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    run = begin(
        "import time; print('up', flush=True); time.sleep(99)",
        on_event="sleep 1; echo $DSTUI_EVENT $DSTUI_STATE > said",
    )
    says(run, "up")
    assert stop(run).state == "stopped"  # does not wait for the command
    assert hook_events(run)[0]["code"] == 0
    assert (tmp_path / "said").read_text() == "end stopped\n"


def test_output_goes_to_its_file_and_the_run_s_log_stays_clean(begin: Callable[..., RunDir]) -> None:
    run = begin("print('hello')", on_event="echo out; echo err >&2; exit 3")
    (done,) = hook_events(run)
    assert done["code"] == 3
    head, *rest = (run.path / "hook.log").read_text().splitlines()
    assert head.startswith("--- ") and head.endswith("end (finished)") and sorted(rest) == ["err", "out"]
    assert run.out_log.read_text() == "hello\n" and run.supervisor_log.read_text() == ""
    assert (run.path / "hook.log").stat().st_mode & 0o777 == 0o600


def test_the_setting_counts_where_the_run_says_nothing(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    settings = Settings.load()
    settings.set("on_event", "echo setting >> said")
    settings.save()
    hook_events(begin("pass"))
    hook_events(begin("pass", on_event="echo option >> said"))
    silent = begin("pass", on_event="")
    ended(silent)
    supervisor = silent.process("supervisor")
    assert supervisor is not None
    until(lambda: not alive(supervisor))
    assert (tmp_path / "said").read_text() == "setting\noption\n"
    assert "hook" not in events(silent)


def test_what_it_sees_and_what_is_written_down(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's environment, secrets included; no secret in a file of the run."""
    monkeypatch.setenv("MY_HOOK_TOKEN", "s3cret")
    command = (
        "echo $MY_HOOK_TOKEN $PWD ${DSTUI_RUN_ID-none} > said; : --api-key=s3cret https://h.example/s3cret"
    )
    run = begin("pass", on_event=command)
    hook_events(run)
    assert (tmp_path / "said").read_text() == f"s3cret {tmp_path} none\n"
    for path in run.path.rglob("*"):
        if path.is_file():
            assert b"s3cret" not in path.read_bytes(), path
    assert "--api-key=***" in run.manifest["on_event"] and "https://h.example/***" in run.manifest["on_event"]


def test_no_command_delays_the_run_s_end(begin: Callable[..., RunDir]) -> None:
    words = "sleep 3607"
    run = begin("pass", on_event=words)
    ended(run)
    supervisor = run.process("supervisor")
    assert supervisor is not None and alive(supervisor)  # it waits for its command
    until(lambda: _session_leaders(words))
    for pid in {p.pid for p in _session_leaders(words)}:
        os.kill(pid, 9)
    until(lambda: not alive(supervisor))


def _session_leaders(words: str) -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            process = identify(int(entry.name))
            if line.strip() in (words, f"/bin/sh -c {words}") and process is not None:
                found.append(process)
    return found


def test_a_daemon_of_the_command_is_no_leftover_of_the_run(
    begin: Callable[..., RunDir], tmp_path: Path
) -> None:
    """Even one that left its session: it lives on, and the run ends without it."""
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); open('pid','w').write(str(os.getpid())); time.sleep(60)"
    run = begin("pass", on_event=f'{sys.executable} -c "{daemon}"; while [ ! -s pid ]; do sleep 0.1; done')
    hook_events(run)
    supervisor = run.process("supervisor")
    assert supervisor is not None
    until(lambda: not alive(supervisor))
    pid = int((tmp_path / "pid").read_text())
    left = identify(pid)
    assert left is not None and alive(left)
    assert (run.exit or {})["leftovers"] == []
    os.kill(pid, 9)


def test_the_adopter_of_a_lost_run_tells(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    run = begin(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)",
        on_event="echo $DSTUI_EVENT $DSTUI_STATE > said",
    )
    lost(run)
    assert adopt_lost() == [run]
    (tmp_path / "go").touch()
    hook_events(run)
    assert (tmp_path / "said").read_text() == "failure lost\n"


def test_a_new_run_of_the_same_kind_never_runs_a_blanked_command(begin: Callable[..., RunDir]) -> None:
    from dstui.runs.rerun import spec_of

    whole = begin("pass", on_event="echo done")
    blanked = begin("pass", on_event="curl https://h.example/s3cret")
    ended(whole), ended(blanked)
    assert spec_of(whole.id, whole.manifest, "{}", None).on_event == "echo done"
    assert spec_of(blanked.id, blanked.manifest, "{}", None).on_event is None


class Alone:
    """Hooks without a supervisor: this test reaps."""

    def __init__(self, command: str) -> None:
        self.notes: list[dict[str, Any]] = []
        self.run = store.create({"name": None})
        self.hooks = Hooks(self.run, command, {"cwd": "/", "host": "here"}, self.note)

    def note(self, name: str, **fields: Any) -> None:
        self.notes.append(fields)

    def settle(self) -> None:
        while self.hooks.busy:
            self.hooks.tick(time.monotonic())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                assert self.hooks.reaped(pid, os.waitstatus_to_exitcode(status))
            time.sleep(0.02)


def test_the_time_limit_ends_the_whole_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SECONDS", 0.3)
    monkeypatch.setattr(hook, "GRACE", 0.3)
    alone = Alone("trap '' TERM; sleep 987 & sleep 987; sleep 987; sleep 987")
    alone.hooks.fire("finished", message="")
    alone.settle()
    assert alone.notes == [
        {"of": "end", "state": "finished", "code": -9, "seconds": alone.notes[0]["seconds"], "ended": True}
    ]
    until(lambda: not _session_leaders("sleep 987"))


def test_a_flood_is_ended_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "FLOOD", 1 << 20)
    monkeypatch.setattr(hook, "OUTPUT", 1 << 16)
    alone = Alone("yes flood")
    alone.hooks.fire("failed", message="")
    alone.settle()
    assert alone.notes[0]["ended"]
    assert alone.hooks.log.stat().st_size <= 1 << 16


def test_one_at_a_time_and_a_stall_that_is_over_is_not_told() -> None:
    alone = Alone("sleep 0.3; echo $DSTUI_STATE >> " + "$DSTUI_RUN_DIR/said")
    alone.hooks.fire("stalled", message="a")
    alone.hooks.fire("stalled", message="b")
    alone.hooks.calm()
    alone.hooks.fire("stalled", message="c")
    alone.hooks.fire("finished", message="d")
    alone.settle()
    assert (alone.run.path / "said").read_text() == "stalled\nfinished\n"
    assert [n["state"] for n in alone.notes] == ["stalled", "finished"]


def test_a_command_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone("true")

    def refuse(*_args: Any, **_more: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(hook.subprocess, "Popen", refuse)
    alone.hooks.fire("finished", message="")
    assert not alone.hooks.busy and "temporarily" in alone.notes[0]["problem"]
