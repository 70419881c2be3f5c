"""A run started over ssh outlives the connection; another login joins and ends it. With a real sshd on this machine."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dstui.runs import store
from dstui.runs.processes import alive, all_stats, descendants, identify, marked
from dstui.runs.store import RunDir
from tests.conftest import EXTENSIONS, REPO

pytest.importorskip("deepspeed")
pexpect = pytest.importorskip("pexpect")
pytestmark = [pytest.mark.real, pytest.mark.pty]
DEMO = ("demo", "--ranks", "2", "--stage", "2", "--offload", "none", "--steps", "1000000")


@dataclass
class Server:
    """An sshd of this user's own on a high port: key, host key and configuration lie in the test's folder."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    environment: dict[str, str]

    def command(self, *words: str, tty: bool = False) -> list[str]:
        remote = " ".join(f"{k}={shlex.quote(v)}" for k, v in self.environment.items())
        remote = f"cd {shlex.quote(str(REPO))} && env {remote} {shlex.join(words)}"
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        out = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(self.folder / "key"),
            "-p",
            str(self.port),
            "-tt" if tty else "-T",
        ]
        out += [x for o in options for x in ("-o", o)]
        return [*out, f"{getpass.getuser()}@127.0.0.1", remote]

    def dstui(self, *words: str) -> subprocess.CompletedProcess[str]:
        """In a login of its own."""
        argv = self.command(sys.executable, "-m", "dstui", *words)
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)

    def sessions(self) -> list[int]:
        """The processes that serve connections."""
        stats = all_stats()
        return [p.pid for p in descendants(self.process.pid, stats) if stats[p.pid].name.startswith("sshd")]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs OpenSSH: sshd, ssh and ssh-keygen (Debian: openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its unprivileged part lives there
    for name in ("key", "host"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    (tmp_path / "authorized_keys").write_bytes((tmp_path / "key.pub").read_bytes())
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {tmp_path}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\n"
    )
    log = (tmp_path / "sshd.log").open("wb")
    process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
    log.close()
    state = tmp_path / "state"
    monkeypatch.setenv("DSTUI_STATE_HOME", str(state))
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "PATH", "LANG")
    environment = {name: os.environ[name] for name in names}
    environment |= {"DSTUI_STATE_HOME": str(state), "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    made = Server(tmp_path, port, process, environment)
    try:
        wait_for(lambda: listens(made), 20, "sshd: " + (tmp_path / "sshd.log").read_text())
        greeting = subprocess.run(
            made.command("true"), capture_output=True, text=True, check=False, timeout=60
        )
        if greeting.returncode:  # no login shell, a locked account...
            pytest.skip(f"this sshd lets nobody in: {greeting.stderr}{(tmp_path / 'sshd.log').read_text()}")
        yield made
    finally:
        for run in store.list_runs():
            subprocess.run(
                [sys.executable, "-m", "dstui", "stop", "--now", run.id], capture_output=True, check=False
            )
        process.terminate()
        process.wait()


def listens(server: Server) -> bool:
    assert server.process.poll() is None, (server.folder / "sshd.log").read_text()
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", server.port)) == 0


def wait_for(condition: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


def step(run: RunDir) -> int:
    lines = [x for x in run.out_log.read_text(errors="replace").splitlines() if x.startswith("step ")]
    return int(lines[-1].split()[1]) if lines else 0


@pytest.mark.parametrize("how", ["client", "session"])
def test_the_connection_dies_the_run_goes_on(server: Server, how: str) -> None:
    """``client``: the monitor is open on the remote terminal and the ssh client is killed. ``session``: the run was
    started without a screen, and the server's own processes of the connection are killed."""
    words = [sys.executable, "-m", "dstui", *DEMO, "--python", sys.executable]
    words += ["--detach"] if how == "session" else []
    shell = server.command(*words, tty=True)
    shell[-1] += "; echo back in the shell; exec sleep 600"  # as a shell that waits for the next command
    login = pexpect.spawn(shell[0], shell[1:], dimensions=(24, 80), timeout=60, encoding=None)
    try:
        seen = drain(login, lambda: store.list_runs(), 60)
        run = store.find_run("last")
        seen += drain(login, lambda: run.exit or step(run) > 2, 300)
        assert run.exit is None, run.out_log.read_text()[-3000:]
        served = server.sessions()
        assert served
        if how == "client":
            os.kill(login.pid, signal.SIGKILL)
        else:
            assert b"back in the shell" in seen
            for pid in served:
                process = identify(pid)
                if process is not None:
                    os.kill(pid, signal.SIGKILL)
    finally:
        login.close(force=True)
    wait_for(lambda: not any(pid in server.sessions() for pid in served), 30, "the end of the session")
    supervisor = run.process("supervisor")
    assert supervisor is not None and alive(supervisor)
    ranks = descendants(supervisor.pid)
    at = step(run)
    wait_for(lambda: step(run) > at + 3, 60, "more steps")
    joined = server.dstui("watch", "--once", run.id)
    assert joined.returncode == 0 and "running" in joined.stdout, joined.stdout + joined.stderr
    ended = server.dstui("stop", run.id)
    assert ended.returncode == 0 and "stopped" in ended.stdout, ended.stdout + ended.stderr
    wait_for(lambda: not any(alive(p) for p in [supervisor, *ranks]), 15, "the end of every process")
    assert marked(run.id) == []


def drain(login: Any, condition: Any, seconds: float) -> bytes:
    """What the remote terminal draws until ``condition`` holds; read, so that nobody stands before a full pipe."""
    seen = b""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, seen[-2000:]
        try:
            seen += login.read_nonblocking(1 << 16, 0.2)
        except pexpect.TIMEOUT:
            continue
        except pexpect.EOF:
            raise AssertionError(f"the login ended: {seen[-2000:]!r}") from None
    return seen
