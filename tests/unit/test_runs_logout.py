"""Where logging out would kill a run: the scope of the user's systemd, with stand-ins for systemd's commands.

What logind itself does is not tried here: these tests see the command lines that dstui writes.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dstui.runs import logout
from dstui.runs.preflight import Problem, _logout
from dstui.runs.store import RunDir
from tests.supervised import ended

SYSTEMD_RUN = """#!/bin/sh
printf '%s\\n' "$@" > {record}
while [ "${{1#--}}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine booted with systemd whose logind kills; its commands are stand-ins on PATH."""
    root = tmp_path / "root"
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "etc/systemd").mkdir(parents=True)
    (root / "etc/systemd/logind.conf").write_text("[Login]\nKillUserProcesses=yes\n")
    runtime = tmp_path / "runtime"
    (runtime / "systemd").mkdir(parents=True)
    (runtime / "systemd/private").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(logout, "ROOT", str(root))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    stand_in(tmp_path, "systemd-run", SYSTEMD_RUN.format(record=tmp_path / "systemd-run.argv"))
    stand_in(tmp_path, "loginctl", f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/loginctl.argv\necho no\n")
    return tmp_path


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def test_the_supervisor_is_started_in_a_scope(system: Path, begin: Callable[..., RunDir]) -> None:
    run = begin("import os; print(os.getsid(0) == os.getpid())")
    assert ended(run)["outcome"] == "finished"
    argv = (system / "systemd-run.argv").read_text().splitlines()
    assert argv[:5] == ["--user", "--scope", "--quiet", "--collect", f"--unit=dstui-{run.id}"]
    assert argv[6:9] == ["-m", "dstui.runs.supervisor", str(run.path)]
    assert run.manifest["detached"] == {"how": "scope", "unit": f"dstui-{run.id}.scope", "problem": None}
    assert run.out_log.read_text() == "True\n"


def test_a_systemd_that_cannot_be_asked_does_not_stop_the_start(
    system: Path, begin: Callable[..., RunDir]
) -> None:
    stand_in(
        system, "systemd-run", "#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n"
    )
    run = begin("print('up')")
    assert ended(run)["outcome"] == "finished" and run.out_log.read_text() == "up\n"  # and once
    assert run.manifest["detached"] == {
        "how": "setsid",
        "unit": None,
        "problem": "Failed to connect to bus: No medium found",
    }


@pytest.mark.parametrize("missing", ["kill", "manager", "tool"])
def test_a_session_of_its_own_is_enough_elsewhere(
    system: Path, begin: Callable[..., RunDir], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "kill":
        (system / "root/etc/systemd/logind.conf").write_text("[Login]\n")
    elif missing == "manager":
        (system / "runtime/systemd/private").unlink()
    else:
        (system / "bin/systemd-run").unlink()
        monkeypatch.setenv("PATH", f"{system}/bin")
    run = begin("print('up')")
    ended(run)
    assert run.manifest["detached"] == {"how": "setsid", "unit": None, "problem": None}
    assert not (system / "systemd-run.argv").exists()


def problems() -> list[Problem]:
    return list(_logout())


def test_preflight_asks_for_linger(system: Path) -> None:
    (found,) = problems()
    assert found.code == "logout-kills" and "loginctl enable-linger" in found.hint
    asked = (system / "loginctl.argv").read_text().splitlines()
    assert asked == ["show-user", getpass.getuser(), "--property=Linger", "--value"]
    stand_in(system, "loginctl", "#!/bin/sh\necho yes\n")
    assert problems() == []
    stand_in(system, "loginctl", "#!/bin/sh\nexit 1\n")
    linger = system / "root/var/lib/systemd/linger"
    linger.mkdir(parents=True)
    (linger / getpass.getuser()).touch()
    assert problems() == []
    (system / "bin/systemd-run").unlink()
    if logout.systemd_run() is None:
        assert [p.code for p in problems()] == ["logout-kills"]  # without the tool there is no scope


def test_the_way_is_written_down(begin: Callable[..., RunDir]) -> None:
    run = begin("pass")
    ended(run)
    assert json.loads(run.manifest_path.read_text())["detached"]["how"] in ("setsid", "scope")
