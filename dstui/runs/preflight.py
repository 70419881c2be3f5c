"""What would make a run fail within its first minute, found before anything is started or written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dstui import paths
from dstui.config.document import Document
from dstui.errors import DstuiError
from dstui.facts.advice import install_advice, lacks
from dstui.facts.model import Facts, Gpu, Interpreter
from dstui.i18n import _, clauses, listed, ngettext
from dstui.rules.diagnostic import Severity
from dstui.rules.engine import Context, Engine, check_document
from dstui.runs import command as commands
from dstui.runs import processes, store
from dstui.runs import script as scripts
from dstui.runs.command import Refused
from dstui.runs.nodes import is_here
from dstui.runs.ops import CPU_COLLECTIVES, Lock, extensions_root, find_locks, offload_device, ops_needed
from dstui.runs.processes import stat
from dstui.runs.spec import RunSpec
from dstui.units import GiB, MiB, duration, gib

ProblemSeverity = Literal["error", "warning"]
_NEEDS = {
    "hf": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "llamafactory": ("llamafactory",),
    "swift": ("ms-swift",),
}
"""Packages of an engine; HF Trainer hands DeepSpeed over to accelerate (transformers trainer.py)."""


@dataclass(frozen=True)
class Problem:
    """``error``: the run would fail, or do something else than asked. ``message`` and ``hint`` are translated."""

    code: str
    severity: ProblemSeverity
    message: str
    hint: str = ""


def worst(problems: Iterable[Problem]) -> ProblemSeverity | None:
    found = {p.severity for p in problems}
    return "error" if "error" in found else "warning" if found else None


def preflight(
    spec: RunSpec, facts: Facts, *, environ: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    """Everything that is known to go wrong, errors first. Reads files; starts and writes nothing.

    Takes well under 0.1 s without rules; nothing is imported from the training interpreter. With a hostfile every
    node is asked over ssh, at once; one that does not answer takes 5 s, 20 at most.
    """
    env = os.environ if environ is None else environ
    facts = commands.as_seen(spec, facts)
    found: list[Problem] = []
    try:
        spec = commands.adopt_config_from_arguments(spec)
    except Refused as e:
        found.append(_of(e))
    found += _machine(facts)
    try:
        commands.check_launcher(spec)
    except Refused as e:
        found.append(_of(e))
    found += _interpreter(spec, facts)
    found += _script(spec, facts)
    found += _config(spec, facts, env)
    found += _devices(spec, facts, env)
    found += _port(spec)
    found += _nodes(spec, facts, env)
    found += _disk(spec)
    found += _logout()
    if spec.prediction is not None and spec.prediction.get("verdict") == "no":
        found.append(
            Problem(
                "fit-no",
                "warning",
                _("the estimate says that this does not fit"),
                str(spec.prediction.get("reason") or _("see: dstui estimate")),
            )
        )
    return tuple(sorted(found, key=lambda p: p.severity != "error"))


def rank_problems(
    spec: RunSpec, facts: Facts, *, environ: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    """Where fewer ranks or other devices than asked for are here: what is said even without a preflight."""
    env = os.environ if environ is None else environ
    found = _devices(spec, commands.as_seen(spec, facts), env)
    return tuple(p for p in found if p.code not in ("device-busy", "accelerate-on-cpu"))


def _nodes(spec: RunSpec, facts: Facts, env: Mapping[str, str]) -> Iterator[Problem]:
    if spec.hostfile:
        from dstui.runs.nodecheck import problems  # knows this module

        yield from problems(spec, facts, env)


def _of(e: Refused) -> Problem:
    return Problem(e.problem, "error", e.message, e.hint or "")


def _machine(facts: Facts) -> Iterator[Problem]:
    if facts.source != "detected":
        yield Problem(
            "facts-of-another-machine",
            "error",
            _("these facts describe another machine: a run starts only on this one"),
            _("leave out --facts"),
        )
    elif facts.scheduler.login_node:
        yield Problem(
            "login-node",
            "warning",
            _("this is a login node: SLURM is installed, no job is active, no GPU is here"),
            _("start the run inside a job (salloc, srun or sbatch)"),
        )


def _interpreter(spec: RunSpec, facts: Facts) -> Iterator[Problem]:
    try:
        python = commands.python_for(spec, facts)
    except Refused as e:
        yield _of(e)
        return
    if not os.access(python, os.X_OK):
        yield Problem(
            "python-missing",
            "error",
            _("{path}: no such interpreter").format(path=python),
            _("give another one with --python"),
        )
        return
    it = commands.interpreter_for(spec, facts)
    if it is None:
        return
    advice = install_advice(facts, it)
    if advice is not None:
        yield Problem("cannot-train", "error", advice.reason, _("install: {c}").format(c=advice.command))
    pip = f"{shlex.quote(it.path)} -m pip install"
    for package in _NEEDS.get(spec.engine, ()):
        if package in it.packages and it.packages[package] is None:
            yield Problem(
                "package-missing",
                "error",
                _("{python} has no {package}, which the engine '{engine}' needs").format(
                    python=it.path, package=package, engine=spec.engine
                ),
                f"{pip} {package}",
            )
    if (
        spec.launcher == "accelerate"
        and spec.engine != "accelerate"
        and not it.packages.get("accelerate", "?")
    ):
        yield Problem(
            "package-missing",
            "error",
            _("{python} has no accelerate, which the launcher needs").format(python=it.path),
            f"{pip} accelerate",
        )


def _script(spec: RunSpec, facts: Facts) -> Iterator[Problem]:
    cwd = commands.working_directory(spec)
    if not cwd.is_dir():
        yield Problem(
            "cwd-missing",
            "error",
            _("{path}: no such directory").format(path=cwd),
            _("give another one with --cwd"),
        )
        return
    if spec.engine == "swift":
        return
    path = commands.script_path(spec)
    if not path.is_file():
        hint = _("paths are relative to {cwd}; another directory: --cwd DIR").format(cwd=cwd)
        if path.is_dir():
            yield Problem("script-missing", "error", _("{path}: a directory").format(path=path), hint)
            return
        near = _near(path)
        if near:
            hint = _("did you mean {name}?").format(name=near)
        yield Problem("script-missing", "error", _("{path}: no such script").format(path=path), hint)
        return
    if not os.access(path, os.R_OK):
        yield Problem(
            "script-unreadable",
            "error",
            _("{path}: not readable").format(path=path),
            f"chmod u+r {shlex.quote(str(path))}",
        )
        return
    look = scripts.look(path)
    if look.kind == "other":
        yield Problem(
            "script-not-python",
            "error",
            _("{path}: not a Python script").format(path=path),
            _("name the script that the launcher starts, not the shell script around it"),
        )
        return
    if look.kind == "yaml" and spec.engine != "llamafactory":
        yield Problem(
            "script-not-python",
            "error",
            _("{path}: not a Python script").format(path=path),
            _("for a LLaMA-Factory file: --engine llamafactory"),
        )
        return
    if look.problem:
        yield Problem(
            "script-broken",
            "warning",
            _("{path}: cannot be read as Python ({cause})").format(path=path, cause=look.problem),
            _("the training interpreter may be newer than this one; else correct it"),
        )
    try:
        commands.how_config_reaches(spec, look)
    except Refused as e:
        yield _of(e)
    if commands.trainer_needs_cpu_flag(spec, facts) and not look.hf_parser and not look.sets_cpu:
        yield Problem(
            "trainer-without-use-cpu",
            "warning",
            _(
                "no GPU here, and the script's TrainingArguments do not say so: the Trainer then counts one rank"
            ),
            "TrainingArguments(..., use_cpu=True)",
        )


def _near(path: Path) -> str | None:
    import difflib

    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".py", ".yaml", ".yml")]
    except OSError:
        return None
    found = difflib.get_close_matches(path.name, names, 1)
    return str(path.with_name(found[0])) if found else None


def _config(spec: RunSpec, facts: Facts, env: Mapping[str, str]) -> Iterator[Problem]:
    if spec.engine == "llamafactory" and not spec.has_config:
        return
    try:
        text = commands.config_text(spec)
    except DstuiError as e:
        yield Problem("config-unreadable", "error", e.message, e.hint or _("give another one with --config"))
        return
    it = commands.interpreter_for(spec, facts)
    data: dict[str, Any] = {}
    if text is not None:
        path = spec.config_source or "config.json"
        try:
            doc = Document.parse(text, path=path, strict_json=spec.engine == "hf")
            data = doc.data
        except DstuiError as e:
            yield Problem("config-unreadable", "error", e.message, e.hint or "")
            return
        yield from _rules(doc, spec, facts, it, env)
    yield from _toolchain(data, facts, it, env)
    yield from _locks(data, facts, it, {**env, **spec.env})
    yield from _nvme(data)


RULE_ENGINES: Mapping[str, Engine] = {
    "plain": "deepspeed",
    "hf": "hf",
    "llamafactory": "hf",
    "swift": "hf",
    "accelerate": "accelerate",
}
"""Engine of a run -> who reads its config, for the rules."""


def _rules(
    doc: Document, spec: RunSpec, facts: Facts, it: Interpreter | None, env: Mapping[str, str]
) -> Iterator[Problem]:
    """What the installed release does with the config. Without a known release nothing is said."""
    if it is None or it.deepspeed is None:
        return
    try:
        ranks = sum(commands.ranks_of_nodes(spec, commands.devices_for(spec, facts, env)))
    except Refused:  # said where devices are looked at
        return
    context = Context(
        release=it.deepspeed,
        release_from="interpreter",
        engine=RULE_ENGINES[spec.engine],
        facts=facts,
        world_size=ranks,
        local=True,
    )
    # DS9xx looks at the toolchain, which is looked at here with the ops that this run will really load.
    for finding in check_document(doc, context, ignore=("DS9",)).findings:
        if finding.severity is Severity.ERROR:
            severity: ProblemSeverity = "error"
        elif finding.severity is Severity.SILENT_WRONG:
            severity = "warning"
        else:
            continue
        message = _("{path}: {code} {message}").format(
            path=doc.path if finding.line is None else f"{doc.path}:{finding.line}",
            code=finding.code,
            message=finding.message,
        )
        yield Problem(
            "config-refused" if severity == "error" else "config-wrong", severity, message, finding.hint
        )


def _tag(it: Interpreter | None) -> str:
    """``py311``: how torch names the folder of this Python's ops."""
    return "py" + "".join((it.version or "").split(".")[:2]) if it and it.version else "py"


def op_is_built(op: str, it: Interpreter | None, env: Mapping[str, str]) -> bool:
    """Whether an earlier run, or the installation (DS_BUILD_OPS), left the op behind."""
    root, tag = extensions_root(env), _tag(it)
    for pattern in (f"{op}/{op}.so", f"{tag}*/{op}/{op}.so"):
        if any(root.glob(pattern)):
            return True
    if it is not None:
        for base in {Path(it.path).parent.parent, Path(os.path.realpath(it.path)).parent.parent}:
            if any(base.glob(f"lib*/python3*/site-packages/deepspeed/ops/**/{op}_op*.so")):
                return True
    return False


def _toolchain(
    data: Mapping[str, Any], facts: Facts, it: Interpreter | None, env: Mapping[str, str]
) -> Iterator[Problem]:
    on_gpu = bool(facts.gpus) and env.get("DS_ACCELERATOR") != "cpu"
    ops = ops_needed(data)
    cold = [op for op in ops if not op_is_built(op, it, env)]
    needs_cuda = on_gpu and "fused_adam" in cold
    for lack in lacks(facts, it):
        if lack.code in ("compiler", "headers"):
            relevant = bool(cold)
        elif lack.code == "ninja":
            relevant = bool(ops)  # torch.utils.cpp_extension asks for it even when nothing is to be built
        elif lack.code == "nvcc":
            relevant = needs_cuda
        elif lack.code in ("cuda-mismatch", "arch-list"):
            relevant = on_gpu and bool(cold)
        elif lack.code == "libaio":
            relevant = "async_io" in cold
        else:
            relevant = on_gpu  # torch-cpu, driver-too-old
        if not relevant:
            continue
        if lack.code == "cuda-mismatch" and env.get("DS_SKIP_CUDA_CHECK") == "1":
            continue
        message = lack.message
        if lack.code in ("compiler", "headers", "ninja", "nvcc", "libaio") and ops:
            message = _("{what}; this config needs {ops}").format(what=message, ops=listed(cold or ops))
        yield Problem(lack.code, "error", message, lack.fix)


def _nvme(data: Mapping[str, Any]) -> Iterator[Problem]:
    """DeepSpeed makes a missing ``nvme_path`` itself (swap_tensor/partitioned_param_swapper.py): on whatever disk
    its parent lies."""
    zero = data.get("zero_optimization")
    paths_named = {
        block["nvme_path"]
        for which in ("offload_optimizer", "offload_param")
        if offload_device(data, which) == "nvme"
        and isinstance(zero, dict)
        and isinstance(block := zero.get(which), dict)
        and isinstance(block.get("nvme_path"), str)
    }
    for text in sorted(paths_named):
        path = Path(text)
        there = _existing(path.absolute())
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
            continue
        if path.exists() or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Problem(
                "nvme-path",
                "error",
                _("{path}: nvme_path is no folder that can be written").format(path=path),
                _("give the mount point of an NVMe disk"),
            )
        else:
            yield Problem(
                "nvme-path",
                "warning",
                _("{path}: nvme_path does not exist; DeepSpeed makes it on the disk of {parent}").format(
                    path=path, parent=there
                ),
                _("give the mount point of an NVMe disk"),
            )


def _locks(
    data: Mapping[str, Any], facts: Facts, it: Interpreter | None, env: Mapping[str, str]
) -> Iterator[Problem]:
    """Locks in the folders of ops: the ranks would wait for them without end and without a word."""
    on_cpu = facts.gpus == () or env.get("DS_ACCELERATOR") == "cpu"
    wanted = {*ops_needed(data), *((CPU_COLLECTIVES,) if on_cpu else ())}
    for lock in find_locks(extensions_root(env), _tag(it)):
        needed = lock.op in wanted
        if lock.holder is not None:
            if needed:
                yield Problem(
                    "op-being-built",
                    "warning",
                    _("the op {op} is being built by pid {pid}: the ranks wait until that is done").format(
                        op=lock.op, pid=lock.holder
                    ),
                    _("see how far it is: ps -o etime,args -p {pid}; its lock: {path}").format(
                        pid=lock.holder, path=lock.path
                    ),
                )
        elif lock.gone:
            message = _(
                "{path}: a build of the op {op} died {age} ago and left its lock; whoever loads the op waits for ever"
            )
            yield Problem(
                "op-lock-stale",
                "error" if needed else "warning",
                message.format(path=lock.path, op=lock.op, age=duration(lock.age)),
                _("delete it: {command}").format(command=f"rm {shlex.quote(str(lock.path))}"),
            )
        elif needed:
            yield Problem("op-lock-unseen", "warning", _unseen(lock), _delete_later(lock))


def _unseen(lock: Lock) -> str:
    text = _(
        "{path}: locked {age} ago by a process that cannot be seen from here; the ranks would wait for it"
    )
    return text.format(path=lock.path, age=duration(lock.age))


def _delete_later(lock: Lock) -> str:
    command = f"rm {shlex.quote(str(lock.path))}"
    return _("when no other machine or user builds it: {command}").format(command=command)


def _devices(spec: RunSpec, facts: Facts, env: Mapping[str, str]) -> Iterator[Problem]:
    devices = commands.devices_for(spec, facts, env)
    ranks = commands.ranks_for(spec, devices)
    try:
        commands.ranks_of_nodes(spec, devices)
    except Refused as e:
        yield _of(e)
    if spec.hostfile:
        return  # the other nodes' cards are not known here
    on_cpu = facts.gpus == () or env.get("DS_ACCELERATOR") == "cpu"
    if on_cpu and spec.engine == "accelerate" and ranks > 1:
        # Seen with accelerate 1.x: state.py has no CPU backend beside DeepSpeed, so Accelerator says
        # DEEPSPEED with num_processes 1 on each of the ranks, and none of them gets its share of the data.
        yield Problem(
            "accelerate-on-cpu",
            "error",
            _(
                "accelerate with DeepSpeed on {n} CPU ranks: each rank would take itself for the only one"
            ).format(n=ranks),
            _("give --num-gpus 1, or use a machine with GPUs"),
        )
    yield from _hidden(spec, facts, env)
    if facts.gpus is None or env.get("DS_ACCELERATOR") == "cpu":
        return
    if not facts.gpus:
        if spec.devices:
            yield Problem(
                "no-such-device",
                "error",
                _("device {name} asked for, but there is no GPU here").format(name=spec.devices[0]),
                _("leave out --devices to train on the CPU"),
            )
        return
    cards: dict[str, Gpu] = {}
    for gpu in facts.gpus:
        cards[commands.device_name(gpu)] = gpu
        if gpu.uuid:
            cards[gpu.uuid] = gpu
    chosen: list[Gpu] = []
    for name in devices or ():
        if name in cards:
            chosen.append(cards[name])
        else:
            yield Problem(
                "no-such-device",
                "error",
                _("device {name} is not here").format(name=name),
                _("devices: {names}").format(names=listed(commands.device_name(g) for g in facts.gpus)),
            )
    if len({id(g) for g in chosen}) < len(chosen):
        yield Problem(
            "device-twice",
            "error",
            _("a device is named twice: {names}").format(names=",".join(devices or ())),
            _("NCCL refuses two ranks on one GPU"),
        )
    if devices is not None and ranks > len(devices):
        yield Problem(
            "more-ranks-than-devices",
            "error",
            ngettext("{ranks} ranks on {n} GPU", "{ranks} ranks on {n} GPUs", len(devices)).format(
                ranks=ranks, n=len(devices)
            ),
            _("give --num-gpus {n} or fewer").format(n=len(devices)),
        )
    for gpu in chosen:
        if gpu.processes:
            owners = listed(_owner(p.pid, p.user, p.name, p.memory) for p in gpu.processes[:3])
            free = [commands.device_name(g) for g in facts.gpus if g.busy is False]
            refused = bool(gpu.busy) and not spec.share_gpus
            hint = (
                _("idle: --devices {names}").format(names=",".join(free))
                if free
                else _("wait for it, or expect less memory than estimated")
            )
            yield Problem(
                "device-busy",
                "error" if refused else "warning",
                _("GPU {index} is in use by {owners}; {free} free").format(
                    index=gpu.index, owners=owners, free=gib(gpu.memory_free)
                ),
                clauses([hint, _("all the same: --share-gpus")]) if refused else hint,
            )


def _hidden(spec: RunSpec, facts: Facts, env: Mapping[str, str]) -> Iterator[Problem]:
    """``CUDA_VISIBLE_DEVICES`` leaves fewer cards than it names, or none."""
    remark = facts.unknown.get("visible_devices")
    if remark is None or spec.devices is not None:
        return
    value = (facts.visible_devices or "").strip()
    if facts.gpus:
        yield Problem(
            "fewer-visible-devices",
            "error",
            remark,
            _("correct CUDA_VISIBLE_DEVICES, or choose the cards with --devices"),
        )
        return
    meant = not value or value.startswith("-")
    if {**env, **spec.env}.get("DS_ACCELERATOR") != "cpu":  # else it was asked for
        yield Problem(
            "gpus-hidden",
            "warning" if meant else "error",
            _("{why}; this run would train on the CPU").format(why=remark),
            _("unset CUDA_VISIBLE_DEVICES to train on the GPUs")
            if meant
            else _("correct CUDA_VISIBLE_DEVICES; for the CPU set it to -1"),
        )
    if spec.launcher == "deepspeed":
        yield Problem(
            "gpus-shown-again",
            "error",
            _(
                "DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES anew: the ranks would see the hidden GPUs again"
            ),
            _("use --launcher torchrun"),
        )


def _owner(pid: int, user: str | None, name: str | None, memory: int | None) -> str:
    parts = [name or "?", f"pid {pid}", *([user] if user else []), *([gib(memory)] if memory else [])]
    return f"{parts[0]} ({', '.join(parts[1:])})"


def port_owner(port: int) -> tuple[int, str] | None:
    """(pid, name) of the process that listens on ``port``; None when it is another user's or unknown."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # LISTEN
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            for fd in os.scandir(f"{entry.path}/fd"):
                if os.readlink(fd.path) in inodes:  # noqa: PTH115 - thousands of them
                    found = stat(int(entry.name))
                    return int(entry.name), found.name if found else "?"
        except OSError:
            continue
    return None


def _port(spec: RunSpec) -> Iterator[Problem]:
    port = spec.master_port
    if port == "auto":
        return
    if not 0 < port < 65536:
        yield Problem(
            "port-impossible",
            "error",
            _("{port} is not a TCP port").format(port=port),
            _("leave out --master-port: a free one is taken"),
        )
        return
    if _elsewhere(spec):
        return
    if commands.port_is_free(port):
        yield from _promised(port)
        return
    owner = port_owner(port)
    who = (
        _("{name} (pid {pid})").format(name=owner[1], pid=owner[0]) if owner else _("another user's process")
    )
    yield Problem(
        "port-busy",
        "error",
        _("port {port} is in use by {who}").format(port=port, who=who),
        _("leave out --master-port: a free one is taken"),
    )


def _promised(port: int) -> Iterator[Problem]:
    """A run that was started just now does not listen yet."""
    for run in store.list_runs():
        if run.exit is not None:
            continue
        try:
            if run.manifest.get("master_port") != port or store.state(run) not in store.LIVE:
                continue
            here = run.place() == processes.here()
        except DstuiError:
            continue
        if here:
            yield Problem(
                "port-promised",
                "error",
                _("port {port} was given to run {id}, which goes on").format(port=port, id=run.id),
                _("leave out --master-port: a free one is taken"),
            )
            return


def _elsewhere(spec: RunSpec) -> bool:
    """Whether rank 0 listens on another machine."""
    try:
        hosts = commands.hosts_over_ssh(spec)
    except Refused:
        return False
    return bool(hosts) and not is_here(hosts[0][0])


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free(path: Path) -> int | None:
    try:
        s = os.statvfs(path)
    except OSError:
        return None
    return s.f_bavail * s.f_frsize


def _disk(spec: RunSpec) -> Iterator[Problem]:
    home = paths.runs_dir()
    there = _existing(home)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Problem(
            "state-home-read-only",
            "error",
            _("{path}: cannot be written; the run's directory belongs there").format(path=home),
            _("set DSTUI_STATE_HOME to a folder that you can write"),
        )
    else:
        free = _free(there)
        if free is not None and free < 64 * MiB:
            yield Problem(
                "disk-full",
                "error",
                _("{path}: only {free} free for the run's directory").format(path=home, free=gib(free)),
                _("make room, or set DSTUI_STATE_HOME to another disk"),
            )
        elif free is not None and free < GiB:
            yield Problem(
                "disk-nearly-full",
                "warning",
                _("{path}: only {free} free for logs and samples").format(path=home, free=gib(free)),
                _("make room, or set DSTUI_STATE_HOME to another disk"),
            )
    cwd = commands.working_directory(spec)
    free = _free(cwd)
    if free is not None and free < GiB and cwd.is_dir():
        yield Problem(
            "disk-nearly-full",
            "warning",
            _("{path}: only {free} free for what the training writes").format(path=cwd, free=gib(free)),
            _("make room, or let the script save elsewhere"),
        )


def _logout() -> Iterator[Problem]:
    from dstui.runs.logout import kills_user_processes, lingers, systemd_run

    if not kills_user_processes() or (systemd_run() is not None and lingers()):
        return
    yield Problem(
        "logout-kills",
        "warning",
        _("this machine ends every process of yours when you log out (KillUserProcesses=yes)"),
        _("allow them once: loginctl enable-linger"),
    )
