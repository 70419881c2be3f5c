"""The nodes of a run that DeepSpeed's launcher starts over ssh, and what is asked of them the same way.

``deepspeed --hostfile`` starts ``launch`` on *every* node through pdsh, this one included (launcher/runner.py and
multinode_runner.py, 0.9.5-0.19.8). So no rank is a child of the launcher, and two things are not as on one node:

- SIGINT or SIGTERM to the runner makes it run ``pkill -f "PYTHON -u -m deepspeed.launcher.launc"`` on every node
  (PDSHRunner.get_cmd): that ends *every* DeepSpeed training of this Python there, other runs as well (executed with
  0.19.8). dstui never signals the runner; it finds the run's own processes by their environment, on each node.
- Only PYTHON*, MLFLOW*, MV2*, UCX* (and NCCL* with CUDA) of the environment reach the ranks (EXPORT_ENVS). The rest
  goes through the file that ``DS_ENV_FILE`` names.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstui.i18n import listed, ngettext
from dstui.runs import redact
from dstui.runs.processes import RUN_ID_VARIABLE

NODE_VARIABLE = "DSTUI_NODE"
"""Number of the node, in the environment of what runs there for a run: pdsh puts it in (``%n``). The launcher on this
machine carries only the run's id, so the two are told apart where a node is this machine."""
CONNECT_SECONDS = 5
ANSWER_SECONDS = 20.0
_PARALLEL = 32
_LET_IN = "dstui-let-in"
"""What the node's shell says before its Python is asked."""
_LOOK_SECONDS = 0.5

_HANDED_ON = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_", "ACCELERATE_",
    "OMP_", "MKL_", "KMP_", "LD_LIBRARY_PATH", "WANDB_", "UCX_", "FI_", "TRITON_", "MAX_JOBS", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables of the caller that change what a training does and mean the same on another node."""
_BY_DEEPSPEED = ("PYTHON", "MLFLOW", "MV2", "UCX")
QUOTES_SINCE = (0, 15, 2)
"""First release whose launcher puts quotes around what it exports (launcher/multinode_runner.py)."""
_OF_THIS_NODE = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")

# Runs on the node with any Python from 3.6 on; says one line of JSON.
_PROGRAM = r"""
import errno, json, os, signal, socket, sys

def read(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError:
        return b""

def processes(run):
    want, found = ("%(id)s=" + run).encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        env = read("/proc/" + name + "/environ").split(b"\0")
        if want not in env or not any(x.startswith(b"%(node)s=") for x in env):
            continue
        stat = read("/proc/" + name + "/stat").rpartition(b")")[2].split()
        if not stat or stat[0] in (b"Z", b"X"):
            continue
        rank = [x[5:].decode() for x in env if x.startswith(b"RANK=")]
        found.append((int(name), stat[19], int(rank[0]) if rank and rank[0].isdigit() else None))
    return found

def tell(process, number):
    pid, start, _rank = process
    fd = None
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            try:
                fd = os.pidfd_open(pid)
            except OSError as e:
                if e.errno not in (errno.ENOSYS, errno.EINVAL):
                    return
        stat = read("/proc/%%d/stat" %% pid).rpartition(b")")[2].split()
        if not stat or stat[19] != start:
            return
        if fd is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
    finally:
        if fd is not None:
            os.close(fd)

def signalled(run, number):
    found = processes(run)
    if number:
        for process in found:
            tell(process, number)
    kills = [x.split()[1] for x in read("/proc/vmstat").splitlines() if x.startswith(b"oom_kill ")]
    return {"oom_kills": int(kills[0]) if kills else None, "processes": len(found), "ranks": sorted(r for _p, _s, r in found if r is not None)}

def seen(path):
    try:
        digest = None
        if os.path.isfile(path):
            import hashlib
            digest = hashlib.sha256(read(path)).hexdigest()
        return [os.stat(path).st_ino, os.path.isdir(path), digest]
    except OSError:
        return None

def checked(cwd, files, packages, port):
    answer = {"host": socket.gethostname(), "python": "%%d.%%d.%%d" %% sys.version_info[:3], "packages": {}}
    answer["place"] = [read("/proc/sys/kernel/random/boot_id").decode().strip(), os.readlink("/proc/self/ns/pid")]
    answer["place"].append(os.readlink("/proc/self/ns/net"))
    try:
        from importlib import metadata
        for name in packages:
            try:
                answer["packages"][name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                answer["packages"][name] = None
    except ImportError:
        pass
    answer["cwd"] = os.path.isdir(cwd)
    answer["files"] = {path: seen(path) for path in files}
    answer["gpus"] = sum(n.startswith("nvidia") and n[6:].isdigit() for n in os.listdir("/dev"))
    try:
        answer["interfaces"] = sorted(name for _n, name in socket.if_nameindex())
    except (OSError, AttributeError):
        answer["interfaces"] = None
    answer["address"] = None
    if port is not None:
        out = os.popen("hostname -I 2>/dev/null").read().split()
        answer["address"] = out[0] if out else None
        answer["port"] = free(port)
    return answer

def free(port):
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            s = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            s.bind(("", port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
        finally:
            s.close()
    return True

def reached(address, port):
    try:
        socket.create_connection((address, port), 3).close()
    except socket.timeout:
        return {"reached": False, "why": "no answer within 3 s"}
    except OSError as e:
        # Nobody listens before the start: a refusal came from the very machine.
        return {"reached": e.errno == errno.ECONNREFUSED, "why": e.strerror or str(e)}
    return {"reached": True, "why": ""}

asked = json.loads(%(asked)r)
print("dstui" + json.dumps(globals()[asked.pop("do")](**asked)))
"""


@dataclass(frozen=True)
class Answer:
    """What one node said. ``problem``: None, or why it said nothing: ``unreachable key host-key
    host-key-changed name python silent``;
    ``detail``: the last words of ssh or of the node, as they are."""

    host: str
    said: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    detail: str = ""


_PROBLEMS = (
    ("host-key-changed", r"REMOTE HOST IDENTIFICATION HAS CHANGED"),
    ("host-key", r"Host key verification failed"),
    ("key", r"Permission denied|Too many authentication failures"),
    ("name", r"Could not resolve hostname"),
    ("unreachable", r"timed out|Connection refused|No route to host|Connection (?:closed|reset)|unreachable"),
)


PASSING = ("unreachable", "silent")
"""Problems of a node that may answer again."""


def ssh_command(host: str, words: str, env: Mapping[str, str]) -> list[str]:
    """As pdsh reaches it (its ``PDSH_SSH_ARGS_APPEND`` too), but without a question and without a long wait."""
    try:
        more = shlex.split(env.get("PDSH_SSH_ARGS_APPEND", ""))
    except ValueError:
        more = []
    options = ["-x", "-a", "-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}", "-oConnectionAttempts=1"]
    options += ["-oServerAliveInterval=5", "-oServerAliveCountMax=2"]
    return ["ssh", *options, *more, "--", host, words]


def ask(
    host: str, python: str, do: str, env: Mapping[str, str], *, timeout: float = ANSWER_SECONDS, **given: Any
) -> Answer:
    """One question to one node, by its own ``python``; never raises."""
    program = _PROGRAM % {
        "id": RUN_ID_VARIABLE,
        "node": NODE_VARIABLE,
        "asked": json.dumps({"do": do, **given}),
    }
    argv = ssh_command(host, f"echo {_LET_IN}; {shlex.quote(python)} -", env)
    try:
        done = subprocess.run(
            argv,
            input=program,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=dict(env),
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError:
        return Answer(host, problem="unreachable", detail="ssh: not installed")
    except subprocess.TimeoutExpired:
        return Answer(host, problem="silent", detail=f"no answer within {timeout:.0f} s")
    except OSError as e:
        return Answer(host, problem="unreachable", detail=str(e))
    for line in done.stdout.splitlines():
        if line.startswith("dstui{"):  # a login script may print as well
            try:
                said = json.loads(line[5:])
            except ValueError:
                break
            return Answer(host, said)
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    detail = words[-1] if words else ""
    # Not by the exit code: a supervisor reaps every child, this one too.
    if any(line.strip() == _LET_IN for line in done.stdout.splitlines()):
        return Answer(host, problem="python", detail=detail)
    for problem, pattern in _PROBLEMS:
        if re.search(pattern, done.stderr):
            return Answer(host, problem=problem, detail=detail)
    return Answer(host, problem="unreachable", detail=detail)


def ask_all(
    hosts: Iterable[str],
    python: str,
    do: str,
    env: Mapping[str, str],
    *,
    timeout: float = ANSWER_SECONDS,
    **given: Any,
) -> dict[str, Answer]:
    """The same question to all of them at once."""
    names = list(hosts)
    if not names:
        return {}
    with ThreadPoolExecutor(min(_PARALLEL, len(names))) as pool:
        answers = pool.map(lambda h: ask(h, python, do, env, timeout=timeout, **given), names)
        return dict(zip(names, answers, strict=True))


class Reach:
    """Signals to the run's processes on all of its nodes, without waiting for the slowest: a thread asks, the owner
    looks at ``left`` when ``busy`` is False again."""

    def __init__(self, hosts: Sequence[str], python: str, run_id: str, env: Mapping[str, str]) -> None:
        self.hosts = tuple(hosts)
        self._python, self._run_id, self._env = python, run_id, env
        self._thread: threading.Thread | None = None
        self.answers: dict[str, Answer] = {}
        """The last answer of each node."""
        self.met: set[str] = set()
        """Nodes that have answered at least once."""
        self._kills: dict[str, int] = {}
        """What each node's kernel had counted when it was first asked."""

    def tell(self, number: int) -> None:
        """``number`` to every process of the run on every node; 0 only looks. Not while ``busy``."""
        self._thread = threading.Thread(target=self._tell, args=(number,), name="nodes", daemon=True)
        self._thread.start()

    def _tell(self, number: int) -> None:
        found = ask_all(
            self.hosts, self._python, "signalled", self._env, run=self._run_id, number=int(number)
        )
        for host, answer in found.items():
            if answer.problem is None:
                self.met.add(host)
            kills = answer.said.get("oom_kills")
            if isinstance(kills, int):
                self._kills.setdefault(host, kills)
        self.answers = found

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _more_kills(self, host: str, now: Any) -> int | None:
        """Processes that the kernel of that node killed for memory since it was first asked."""
        return now - self._kills[host] if isinstance(now, int) and host in self._kills else None

    @property
    def clear(self) -> bool:
        """Every node answered, and none has a process of the run."""
        return bool(self.answers) and all(
            a.problem is None and not a.said.get("processes") for a in self.answers.values()
        )

    @property
    def silent(self) -> bool:
        """Some do not answer; those that do have no process of the run."""
        return not self.clear and all(
            a.problem is not None or not a.said.get("processes") for a in self.answers.values()
        )

    @property
    def hopeless(self) -> bool:
        """What does not answer will not do so later either: ssh lets nobody in, or there is no Python."""
        return all(a.problem not in PASSING for a in self.answers.values())

    def end(self, ladder: Sequence[tuple[int, float]]) -> None:
        """Signal after signal, each with its seconds, until every node that answers is clear. Waits."""
        for number, seconds in ladder:
            deadline = time.monotonic() + seconds
            self.tell(number)
            self.join()
            while not (self.clear or self.silent) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                self.tell(0)
                self.join()
            if self.clear:
                return

    def records(self) -> list[dict[str, Any]]:
        """For ``exit.json``: what is left on each node (null: it did not answer), and why."""
        return [
            {
                "host": host,
                "left": None if a.problem else int(a.said.get("processes") or 0),
                "ranks": list(a.said.get("ranks") or ()),
                "oom_kills": self._more_kills(host, a.said.get("oom_kills")),
                "met": host in self.met,
                "problem": a.problem,
                "detail": a.detail or None,
            }
            for host, a in self.answers.items()
        ]


def host_names(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The nodes that a run was started on over ssh; () for a run on one machine."""
    hosts = manifest.get("hosts") or ()
    return tuple(str(h["name"]) for h in hosts if isinstance(h, dict) and h.get("name"))


def elsewhere(manifest: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """How many ranks of a run are on nodes that its supervisor does not see, and the names of these nodes."""
    hosts = [h for h in manifest.get("hosts") or () if isinstance(h, dict) and h.get("here") is False]
    ranks = [h["ranks"] for h in hosts if isinstance(h.get("ranks"), int)]
    return sum(ranks), tuple(str(h.get("name")) for h in hosts)


def elsewhere_text(ranks: int, world: int | None, names: Sequence[str]) -> str:
    """What is not seen of a run on several nodes."""
    return ngettext(
        "{n} of {all} ranks is on another node, not sampled: {names}",
        "{n} of {all} ranks are on other nodes, not sampled: {names}",
        ranks,
    ).format(n=ranks, all=world, names=listed([*names[:3], *(["..."] if len(names) > 3 else [])]))


def left_behind(records: Any) -> list[dict[str, Any]]:
    """The records of ``exit.json`` of nodes where something of the run lives, or may live.

    Not those that never let ssh in, or had no Python: nothing was started there.
    """
    found = [r for r in records if isinstance(r, dict)] if isinstance(records, list) else []
    never = [r for r in found if r.get("met") is False and r.get("problem") not in PASSING]
    return [r for r in found if r.get("host") and r.get("left") != 0 and r not in never]


# -- the environment of the ranks ------------------------------------------------------------------------


def environment_file(
    added: Mapping[str, str],
    caller: Mapping[str, str],
    *,
    cwd: str,
    python: str,
    run_id: str,
    release: str | None = None,
) -> tuple[bytes, tuple[str, ...]]:
    """What ``DS_ENV_FILE`` gives to every node, and the names that cannot go that way.

    DeepSpeed reads NAME=VALUE lines, puts ``"`` around a value and escapes nothing, and writes it into the command that
    pdsh hands to each node's shell (multinode_runner.py add_export; before 0.15.2 without the ``"``, from 0.16.5 only
    where there is a special character). So ``$``, quotes and ``\\`` are escaped here, and ``%`` for pdsh; a line break
    cannot be carried. ``release``: the DeepSpeed that starts it; unknown: a recent one.

    In order, the later wins: the caller's variables (secrets left out: the command line of pdsh and ssh shows them to
    everyone on these nodes), lines of the caller's own ``.deepspeed_env`` as they are, what dstui adds, ``--env``.
    """
    lines: dict[str, str] = {}
    dropped: list[str] = []
    numbers = tuple(int(n) for n in re.findall(r"\d+", release or "")[:3])
    quote = '"' if numbers and numbers < QUOTES_SINCE else ""
    for name in sorted(caller):
        if not name.startswith(_HANDED_ON) or name in _OF_THIS_NODE or name in added:
            continue
        if redact.is_secret(name) or not _put(lines, name, caller[name], quote):
            dropped.append(name)
    own = caller.get("DS_ENV_FILE") or ".deepspeed_env"
    for folder in (caller.get("HOME") or str(Path.home()), cwd):
        try:
            text = (Path(folder) / own).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.strip() not in added:
                lines[name.strip()] = value.strip()
    for name, value in added.items():
        if name in _OF_THIS_NODE or name == "PATH" or name.startswith(_BY_DEEPSPEED):
            continue
        if not _put(lines, name, value, quote):
            dropped.append(name)
    # Each node's own PATH; the op builder looks for ninja there.
    lines["PATH"] = f"{quote}{_escaped(str(Path(python).parent))}:$PATH{quote}"
    lines[RUN_ID_VARIABLE] = run_id
    lines[NODE_VARIABLE] = "%n"
    return "".join(f"{k}={v}\n" for k, v in lines.items()).encode(), tuple(
        name for name in dropped if name not in lines
    )


def _put(lines: dict[str, str], name: str, value: str, quote: str) -> bool:
    if "\n" in value or "\r" in value or not re.fullmatch(r"[A-Za-z_]\w*", name):
        return False
    lines[name] = f"{quote}{_escaped(value)}{quote}"
    return True


def _escaped(value: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", value).replace("%", "%%")


# -- names -----------------------------------------------------------------------------------------------


def is_here(name: str) -> bool:
    """Whether a node's name means this machine: an address of ours, that a socket can be bound to."""
    name = name.rpartition("@")[2]
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    for address in found:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.bind((address, 0))
                return True
        except OSError:
            continue
    return False
