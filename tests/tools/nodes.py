"""Two nodes on one machine: network, process and host names of their own, an sshd each, one file system.

    python -m tests.tools.nodes FOLDER          (as root; Ctrl+C or SIGTERM ends both)
    sh FOLDER/enter one COMMAND                 (a command on the node `one`)

Needs root, util-linux' ``unshare`` and ``nsenter``, ``ip`` and OpenSSH. Each node is a tree of processes below its own
init: that one killed, the node is gone at once with all that ran on it, as when its power fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMES = ("one", "two")
_INIT = """\
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh /etc/ssh
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd
ip link set lo up
touch {folder}/{name}.ready
while [ ! -e {folder}/wired ]; do sleep 0.05; done
exec {sshd} -D -e -f {folder}/sshd_config >{folder}/{name}.log 2>&1
"""


def lacks() -> str | None:
    """Why no nodes can be made here; None when they can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"
    for tool in ("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen", "hostname"):
        if shutil.which(tool, path=path) is None:
            return f"needs {tool}"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True, check=False
    )
    return None if done.returncode == 0 else f"no namespaces: {done.stderr.decode().strip()}"


class Nodes:
    """Keys, logs and configuration lie in ``folder``, which is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.init: dict[str, int] = {}
        """Node -> pid of its init, as this machine numbers it."""
        self._outer: dict[str, subprocess.Popen[bytes]] = {}
        self._switch: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ssh").mkdir()
        for name in ("key", "host"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate(NAMES)}
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for n, a in addresses.items()), "10.77.0.9 nobody"]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        host_key = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"{n} {host_key}\n" for n in NAMES))
        (folder / "ssh/ssh_config").write_text(
            f"Host *\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
            "  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
        )
        (folder / "sshd_config").write_text(
            f"Port 22\nListenAddress 0.0.0.0\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\nPrintMotd no\nPrintLastLog no\n"
        )
        for name in NAMES:
            self.up(name)
        # Both hang on a switch of its own, so that the address of one stays when the other is gone.
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        switch = str(self._switch.pid)
        own = Path("/proc/self/ns/net").readlink()
        _until(lambda: Path(f"/proc/{switch}/ns/net").readlink() != own)
        at = ["nsenter", "--net", "-t", switch, "ip", "link"]
        subprocess.run([*at, "add", "switch", "type", "bridge"], check=True)
        subprocess.run([*at, "set", "switch", "up"], check=True)
        for name, address in addresses.items():
            enter = ["nsenter", "--net", "-t", str(self.init[name])]
            peer = ["peer", "name", name, "netns", switch]
            _ip("link", "add", "veth", "netns", str(self.init[name]), "type", "veth", *peer)
            subprocess.run([*at, "set", name, "master", "switch", "up"], check=True)
            subprocess.run([*enter, "ip", "addr", "add", f"{address}/24", "dev", "veth"], check=True)
            subprocess.run([*enter, "ip", "link", "set", "veth", "up"], check=True)
        (folder / "wired").touch()
        words = " ".join(f"{n}) pid={pid};;" for n, pid in self.init.items())
        (folder / "enter").write_text(
            f'case "$1" in {words} esac; shift\nexec nsenter -t $pid -n -u -p -m --wdns="$PWD" -- "$@"\n'
        )
        for name in NAMES:
            _until(lambda name=name: self.run(NAMES[0], ["ssh", name, "true"]).returncode == 0)

    def up(self, name: str) -> None:
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        script = _INIT.format(name=name, folder=self.folder, sshd=sshd)
        self._outer[name] = subprocess.Popen(
            ["unshare", "--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "sh", "-ec", script],
            stdin=subprocess.DEVNULL,
        )
        _until(lambda: (self.folder / f"{name}.ready").exists())
        children = Path(f"/proc/{self._outer[name].pid}/task/{self._outer[name].pid}/children").read_text()
        self.init[name] = int(children.split()[0])

    def command(self, name: str, words: list[str]) -> list[str]:
        """``words`` on the node ``name``, in the working directory of the caller."""
        enter = ["nsenter", "-t", str(self.init[name]), "-n", "-u", "-p", "-m", f"--wdns={Path.cwd()}", "--"]
        return [*enter, *words]

    def run(
        self, name: str, words: list[str], env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name, words), env=env, capture_output=True, text=True, check=False, timeout=timeout
        )

    def cut(self, name: str) -> None:
        """Its network is gone, the node lives on."""
        subprocess.run(
            ["nsenter", "--net", "-t", str(self.init[name]), "ip", "link", "set", "veth", "down"], check=True
        )

    def mend(self, name: str) -> None:
        subprocess.run(
            ["nsenter", "--net", "-t", str(self.init[name]), "ip", "link", "set", "veth", "up"], check=True
        )

    def vanish(self, name: str) -> None:
        """All that runs on it is killed at once, its network with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init[name], signal.SIGKILL)
        self._outer[name].wait()

    def stop(self) -> None:
        for name in self._outer:
            if name in self.init:
                self.vanish(name)
            else:
                self._outer[name].kill()
                self._outer[name].wait()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.stop()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


if __name__ == "__main__":
    # A shell starts what is in the background without SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with two_nodes(Path(sys.argv[1]).absolute()) as made:
        print(made.init, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
