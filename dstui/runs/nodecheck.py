"""What each node of a hostfile lacks, asked over ssh before anything is started: seconds, all nodes at once."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.facts.model import Facts
from dstui.i18n import _, listed, ngettext
from dstui.runs import command as commands
from dstui.runs.command import Refused
from dstui.runs.nodes import Answer, ask_all, environment_file, is_here
from dstui.runs.preflight import Problem
from dstui.runs.spec import RunSpec

_PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")
ANY_PORT = 29500
"""Asked for where the run's port is not known yet: only whether packets arrive matters."""


def problems(spec: RunSpec, facts: Facts, env: Mapping[str, str]) -> Iterator[Problem]:
    """Nothing where the launcher starts its ranks itself. A Refused hostfile is said by ``preflight._devices``."""
    try:
        hosts = commands.hosts_over_ssh(spec)
        python = commands.python_for(spec, facts)
    except Refused:
        return
    if not hosts:
        return
    lacking = False
    for tool, code, hint in (
        ("pdsh", "pdsh-missing", _("install it: apt-get install pdsh (dnf install pdsh-rcmd-ssh)")),
        ("ssh", "ssh-missing", _("install OpenSSH's client")),
    ):
        if shutil.which(tool, path=env.get("PATH")) is None:
            lacking = True
            message = _("{tool} is not installed here: DeepSpeed starts the ranks on every node through it")
            yield Problem(code, "error", message.format(tool=tool), hint)
    if lacking and shutil.which("ssh", path=env.get("PATH")) is None:
        return
    yield from _secrets(spec, python, env)
    names = [name for name, _ranks in hosts]
    known = _known_files(spec)
    port = spec.master_port if isinstance(spec.master_port, int) else ANY_PORT
    answers = ask_all(
        names,
        python,
        "checked",
        {**env, **spec.env},
        cwd=str(commands.working_directory(spec)),
        files=[path for path, _code in known],
        packages=list(_PACKAGES),
        port=port,
    )
    for host, answer in answers.items():
        yield from _of_host(host, answer, python, spec, facts)
    heard = {h: a.said for h, a in answers.items() if a.problem is None}
    yield from _files(known, heard)
    yield from _releases(heard, facts, spec, python)
    yield from _twice(heard)
    yield from _slots(dict(hosts), heard, facts, {**env, **spec.env})
    yield from _interfaces(heard, {**env, **spec.env})
    first = names[0]
    if first in heard:
        if isinstance(spec.master_port, int) and heard[first].get("port") is False and not is_here(first):
            yield Problem(
                "port-busy",
                "error",
                _("node {host}: port {port} is in use there").format(host=first, port=port),
                _("leave out --master-port, or name another one"),
            )
        yield from _meeting(spec, names, heard, python, port, env)


def _secrets(spec: RunSpec, python: str, env: Mapping[str, str]) -> Iterator[Problem]:
    """On one machine the ranks get the whole environment; over ssh a token would stand in everyone's ``ps``."""
    _text, dropped = environment_file(
        spec.env, env, cwd=str(commands.working_directory(spec)), python=python, run_id=""
    )
    if dropped:
        yield Problem(
            "node-environment",
            "warning",
            _("not handed on to the ranks: {names}").format(names=listed(sorted(dropped))),
            _(
                "log in on each node (hf auth login, wandb login); --env NAME=VALUE hands it on, for every user there to see"
            ),
        )


def _known_files(spec: RunSpec) -> list[tuple[str, str]]:
    """What every node must see, with the code of its problem."""
    found = [(str(commands.script_path(spec)), "node-script")]
    if spec.has_config:
        home = paths.runs_dir()
        while not home.exists() and home != home.parent:
            home = home.parent
        found.append((str(home), "node-state-home"))
    return found


def _of_host(host: str, answer: Answer, python: str, spec: RunSpec, facts: Facts) -> Iterator[Problem]:
    test = f"ssh {shlex.quote(host)} true"
    if answer.problem is not None:
        text, hint = {
            "key": (
                _("node {host}: ssh is refused: {detail}"),
                _("let this user in without a password: ssh-copy-id {host}; test it: {test}"),
            ),
            "host-key": (
                _("node {host}: its host key is not known here: {detail}"),
                _("look at it once: {test} (or ssh-keyscan {host} >> ~/.ssh/known_hosts)"),
            ),
            "host-key-changed": (
                _("node {host}: its host key is another one than before: {detail}"),
                _("if it was installed anew: ssh-keygen -R {host}, then {test}"),
            ),
            "name": (
                _("node {host}: no such name here: {detail}"),
                _("correct the hostfile, or add the name to /etc/hosts of every node"),
            ),
            "python": (
                _("node {host}: no {python} there: {detail}"),
                _("every node needs the same Python under the same path; another one: --python"),
            ),
            "silent": (
                _("node {host}: lets ssh in, then says nothing: {detail}"),
                _("look at its load and its file systems: {test}"),
            ),
        }.get(
            answer.problem,
            (
                _("node {host}: cannot be reached by ssh: {detail}"),
                _("is it up, and sshd on it? test it: {test}"),
            ),
        )
        values = {"host": host, "detail": answer.detail, "python": python, "test": test}
        yield Problem(f"node-{answer.problem}", "error", text.format(**values), hint.format(**values))
        return
    if answer.said.get("cwd") is False:
        yield Problem(
            "node-cwd",
            "error",
            _("node {host}: no folder {path} there").format(host=host, path=commands.working_directory(spec)),
            _("every node needs the same files under the same paths: a shared file system, or copies"),
        )


def _files(known: Sequence[tuple[str, str]], heard: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    for host, said in heard.items():
        for path, code in known:
            there = (said.get("files") or {}).get(path)
            if there is None:
                yield Problem(
                    code,
                    "error",
                    _("node {host}: {path} is not there").format(host=host, path=path),
                    _("the ranks there read it: put it on a shared file system")
                    if code == "node-script"
                    else _("the ranks read their config there: set DSTUI_STATE_HOME to a shared folder"),
                )
            elif code == "node-script" and there[2] is not None and there[2] != _digest(Path(path)):
                yield Problem(
                    "node-script-differs",
                    "warning",
                    _("node {host}: {path} has other content there").format(host=host, path=path),
                    _("copy it again, or put it on a shared file system"),
                )
            elif code == "node-state-home" and there[0] != _inode(path):
                yield Problem(
                    code,
                    "warning",
                    _("node {host}: {path} seems to be another folder than here").format(
                        host=host, path=path
                    ),
                    _("the ranks read their config there: set DSTUI_STATE_HOME to a shared folder"),
                )


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _releases(
    heard: Mapping[str, Mapping[str, Any]], facts: Facts, spec: RunSpec, python: str
) -> Iterator[Problem]:
    it = commands.interpreter_for(spec, facts)
    for host, said in heard.items():
        there: Mapping[str, Any] = said.get("packages") or {}
        for name in _PACKAGES:
            here = (it.packages.get(name) if it is not None else None) or None
            if name not in there or here is None or there[name] == here:
                continue
            if there[name] is None:
                yield Problem(
                    "node-package",
                    "error",
                    _("node {host}: {python} has no {package} there").format(
                        host=host, python=python, package=name
                    ),
                    _("on it: {command}").format(
                        command=f"{shlex.quote(python)} -m pip install {name}=={here}"
                    ),
                )
                continue
            yield Problem(
                "node-release",
                "error" if name in ("deepspeed", "torch") else "warning",
                _("node {host}: {package} {there} there, {here} here").format(
                    host=host, package=name, there=there[name], here=here
                ),
                _("ranks of two releases hang or compute apart; on it: {command}").format(
                    command=f"{shlex.quote(python)} -m pip install {name}=={here}"
                ),
            )


def _twice(heard: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for host, said in heard.items():
        place = str(said.get("place"))
        if place in seen:
            yield Problem(
                "node-twice",
                "error",
                _("{a} and {b} are the same machine").format(a=seen[place], b=host),
                _("name each machine once in the hostfile, with all of its slots"),
            )
        else:
            seen[place] = host


def _slots(
    hosts: Mapping[str, int], heard: Mapping[str, Mapping[str, Any]], facts: Facts, env: Mapping[str, str]
) -> Iterator[Problem]:
    if env.get("DS_ACCELERATOR") == "cpu" or not any(said.get("gpus") for said in heard.values()):
        return
    for host, said in heard.items():
        there = said.get("gpus")
        if isinstance(there, int) and there < hosts[host]:
            yield Problem(
                "node-slots",
                "error",
                ngettext(
                    "node {host}: {slots} ranks on {n} GPU", "node {host}: {slots} ranks on {n} GPUs", there
                ).format(host=host, slots=hosts[host], n=there),
                _("correct its slots= in the hostfile, or give --num-gpus"),
            )


def _interfaces(heard: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]) -> Iterator[Problem]:
    """``GLOO_SOCKET_IFNAME`` is a list of names; ``NCCL_SOCKET_IFNAME`` of prefixes, ``=`` exact, ``^`` not these."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(variable, "").strip()
        if not value or value.startswith("^"):
            continue
        exact = variable.startswith("GLOO") or value.startswith("=")
        wanted = [w.strip().partition(":")[0] for w in value.lstrip("=").split(",") if w.strip()]
        for host, said in heard.items():
            there = said.get("interfaces")
            if not isinstance(there, list):
                continue
            found = [any(n == w or (not exact and str(n).startswith(w)) for n in there) for w in wanted]
            if (all if variable.startswith("GLOO") else any)(found):
                continue
            yield Problem(
                "node-interface",
                "error",
                _("node {host}: {variable}={value}, but its network interfaces are {names}").format(
                    host=host, variable=variable, value=value, names=listed(map(str, there))
                ),
                _("name one that every node has, or unset {variable}").format(variable=variable),
            )


def _meeting(
    spec: RunSpec,
    names: Sequence[str],
    heard: Mapping[str, Mapping[str, Any]],
    python: str,
    port: int,
    env: Mapping[str, str],
) -> Iterator[Problem]:
    """Whether the others reach the first node by the address that DeepSpeed gives them."""
    first = names[0]
    address = spec.master_addr or heard[first].get("address")
    if not address:
        yield Problem(
            "node-address",
            "error",
            _("node {host}: `hostname -I` tells no address, which DeepSpeed gives to the ranks").format(
                host=first
            ),
            _("name it: --master-addr ADDRESS"),
        )
        return
    others = [name for name in names[1:] if name in heard]
    found = ask_all(others, python, "reached", {**env, **spec.env}, address=address, port=port)
    for host, answer in found.items():
        if answer.problem is None and answer.said.get("reached") is False:
            yield Problem(
                "node-cannot-meet",
                "error",
                _("node {host}: cannot reach {first} at {address}, port {port}: {why}").format(
                    host=host, first=first, address=address, port=port, why=answer.said.get("why")
                ),
                _("another address of {first}: --master-addr; or let the nodes' firewalls pass").format(
                    first=first
                ),
            )
