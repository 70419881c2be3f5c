"""Start a run that needs nobody: ``start(spec, facts) -> RunDir``."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstui import __version__
from dstui.errors import DstuiError, Exit
from dstui.facts.model import Facts
from dstui.i18n import _
from dstui.runs import answers, hook, measured, redact, store
from dstui.runs import command as commands
from dstui.runs.command import Command
from dstui.runs.nodes import is_here
from dstui.runs.preflight import Problem, worst
from dstui.runs.preflight import preflight as run_preflight
from dstui.runs.processes import for_supervisor, here
from dstui.runs.spec import RunSpec
from dstui.runs.store import RunDir
from dstui.settings import Settings

ACKNOWLEDGE_SECONDS = 30.0
_RELEVANT = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_", "ACCELERATE_",
    "OMP_", "MKL_", "KMP_", "PYTHON", "SLURM_", "LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_DEFAULT_ENV",
    "VIRTUAL_ENV", "WANDB_", "TMPDIR", "MAX_JOBS", "CC", "CXX", "UCX_", "FI_", "TRITON_",
)  # fmt: skip
"""Variables of the caller that change what a training does; the manifest keeps these, redacted."""


class PreflightFailed(DstuiError):
    """Preflight found errors; ``problems`` has all, warnings included. Nothing was started."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        errors = [p for p in problems if p.severity == "error"]
        lines = [errors[0].message]
        lines += [p.message for p in errors[1:]]
        super().__init__("\n       ".join(lines), errors[0].hint, Exit.CANNOT)
        self.problems = problems


def start(
    spec: RunSpec,
    facts: Facts,
    *,
    preflight: bool = True,
    environ: Mapping[str, str] | None = None,
) -> RunDir:
    """Check, write the run directory, start its supervisor; returns when that has started the launcher.

    Raises PreflightFailed (nothing written), or DstuiError when the run could not be started (its
    directory then says so).
    """
    env = dict(os.environ if environ is None else environ)
    spec = commands.adopt_config_from_arguments(spec)
    if preflight:
        problems = run_preflight(spec, facts, environ=env)
        if worst(problems) == "error":
            raise PreflightFailed(problems)
    holder: list[Command] = []

    def fill(folder: RunDir) -> tuple[dict[str, Any], dict[str, str]]:
        command = commands.build(spec, facts, folder.path, environ=env, taken_ports=_ports_of_runs())
        command = measured.equip(command, spec, folder, env)
        holder.append(command)
        return manifest(spec, facts, command, env), dict(command.files)

    run = store.create(fill=fill)
    command = holder[0]
    try:
        _spawn(run, command, facts, env, on_event(spec))
    except DstuiError:
        raise
    except OSError as e:
        raise DstuiError(_("cannot start the supervisor: {cause}").format(cause=e.strerror or e)) from e
    options = [a for a in spec.args if commands.PLACEHOLDER in a]
    if command.config_how == "placeholder" and options:
        _remember(spec)
    return run


def _remember(spec: RunSpec) -> None:
    """``--ds {config}`` once is ``--ds {config}`` always, for this script."""
    options: list[str] = []
    for i, arg in enumerate(spec.args):
        if arg == commands.PLACEHOLDER and i and spec.args[i - 1].startswith("-"):
            before = spec.args[i - 2] if i > 1 else ""
            switch = ["--deepspeed"] if before == "--deepspeed" else []
            options += [*switch, spec.args[i - 1], arg]
        elif commands.PLACEHOLDER in arg and arg.startswith("-"):
            options.append(arg)
    if options:
        answers.remember(commands.script_path(spec), {"options": options})


def _ports_of_runs() -> frozenset[int]:
    """Ports given to runs that may not listen yet."""
    ports = set()
    for run in store.list_runs():
        if run.exit is None:
            try:
                port = run.manifest.get("master_port")
            except DstuiError:
                continue
            if isinstance(port, int):
                ports.add(port)
    return frozenset(ports)


def _source(spec: RunSpec) -> str | None:
    """The user's file with the very config of this run; None where that was never written to a file."""
    if spec.config_source is None:
        return None
    path = commands.working_directory(spec) / Path(spec.config_source).expanduser()
    if spec.config_text is not None:
        try:
            same = path.read_bytes() == spec.config_text.encode()
        except OSError:
            same = False
        if not same:
            return None
    return str(path)


def manifest(spec: RunSpec, facts: Facts, command: Command, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is written down about a run before it starts. Secrets are not in it."""
    place = here()
    interpreter = commands.interpreter_for(spec, facts)
    copy = command.files.get("config.json")
    source = _source(spec)
    shown = redact.environment(command.env)
    if "PATH" in shown:
        shown["PATH"] = str(Path(command.python).parent) + ":$PATH"
    packages = dict(interpreter.packages) if interpreter else {}
    return {
        "name": spec.name,
        "kind": "trial" if spec.trial else "run",
        "dstui": __version__,
        "spec": {**spec.to_json(), "args": redact.arguments(spec.args)},
        "command": redact.arguments(command.argv),
        "cwd": command.cwd,
        "env": shown,
        "env_caller": redact.environment({k: v for k, v in environ.items() if k.startswith(_RELEVANT)}),
        "env_user": sorted(spec.env),
        "script": str(commands.script_path(spec)),
        "engine": spec.engine,
        "launcher_kind": command.launcher,
        "python": command.python,
        "devices": None if command.devices is None else list(command.devices),
        "ranks_per_node": command.ranks_per_node,
        "nodes": spec.nodes,
        "world_size": command.world_size,
        "master_port": command.master_port,
        "hosts": [{"name": name, "ranks": ranks, "here": is_here(name)} for name, ranks in command.hosts],
        "config": None
        if copy is None
        else {
            "source": source,
            "sha256": hashlib.sha256(copy.encode()).hexdigest(),
            "how": command.config_how,
            "options": list(command.config_options),
            "instrumented": spec.instrument,
        },
        "git": git_state(command.cwd),
        "versions": {"python": interpreter.version if interpreter else None, **packages},
        "facts": facts.to_json(),
        "prediction": None if spec.prediction is None else dict(spec.prediction),
        "subject": None if spec.subject is None else dict(spec.subject),
        "log_limit": spec.log_limit,
        "on_event": hook.redacted(on_event(spec)) or None,
        "user": _user(),
        "host": place.host,
        "boot_id": place.boot_id,
        "pid_namespace": place.pid_namespace,
        "supervisor": None,
        "launcher": None,
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def git_state(cwd: str) -> dict[str, Any] | None:
    """Commit, branch and whether files were changed, for a working directory in a git repository."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", cwd, *args],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=3,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": None if changed is None else bool(changed),
    }


def _sampled(facts: Facts, command: Command) -> list[str] | None:
    """Cards to sample, by UUID where it is known; None = all that there are, [] = none."""
    if facts.gpus == ():
        return []
    if not command.devices:
        return None
    uuids = {commands.device_name(gpu): gpu.uuid for gpu in facts.gpus or ()}
    return [uuids.get(d) or d for d in command.devices]


def on_event(spec: RunSpec) -> str:
    """The command that the supervisor runs on end, failure and stall; ``""``: none."""
    return str(Settings.load().get("on_event")) if spec.on_event is None else spec.on_event


def _spawn(run: RunDir, command: Command, facts: Facts, env: Mapping[str, str], on_event: str) -> None:
    job = {
        "argv": list(command.argv),
        "cwd": command.cwd,
        "env": dict(command.env),
        "umask": _umask(),
        "devices": _sampled(facts, command),
        "on_event": on_event,
    }
    scope = _scope(run)
    if scope:
        job["detached"] = {"how": "scope", "unit": f"dstui-{run.id}.scope", "problem": None}
        code, answer, errors = _supervise(run, job, env, scope)
        if code == 0:
            _expect(run, answer, errors)
            return
        # systemd-run failed before it became the supervisor: start all the same, and let the manifest say how.
        problem = errors.strip() or "systemd-run failed"
        job["detached"] = {"how": "setsid", "unit": None, "problem": problem}
    else:
        job["detached"] = {"how": "setsid", "unit": None, "problem": None}
    _code, answer, errors = _supervise(run, job, env, [])
    _expect(run, answer, errors)


def _supervise(
    run: RunDir, job: Mapping[str, Any], env: Mapping[str, str], scope: list[str]
) -> tuple[int, dict[str, Any] | None, str]:
    """Start the supervisor: exit code of the first process (it forks and ends), answer, what came on stderr."""
    package_root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-m", "dstui.runs.supervisor", str(run.path)]
    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            [*scope, *argv, str(write_end)],
            cwd=package_root,  # `-m` finds this very dstui there, and nothing of the user's directory
            env=for_supervisor(env, run.id),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    finally:
        os.close(write_end)
    try:
        _out, errors = _feed(child, json.dumps(job).encode())
        answer = await_answer(read_end) if child.returncode == 0 else None
    finally:
        os.close(read_end)
    return child.returncode, answer, errors.decode(errors="replace")


def _expect(run: RunDir, answer: dict[str, Any] | None, errors: str) -> None:
    """Raises DstuiError unless the supervisor said that the launcher runs."""
    if answer is None:
        detail = errors.strip() or _tail(run.supervisor_log)
        raise DstuiError(
            _("the supervisor of run {id} did not start").format(id=run.id),
            detail or _("its messages: {path}").format(path=run.supervisor_log),
        )
    if "error" in answer:
        raise DstuiError(
            _("run {id} did not start: {cause}").format(id=run.id, cause=answer["error"]),
            _("its directory: {path}").format(path=run.path),
        )


def _feed(child: subprocess.Popen[bytes], data: bytes) -> tuple[bytes, bytes]:
    """The first process ends as soon as it has the job and has forked."""
    try:
        return child.communicate(data, timeout=ACKNOWLEDGE_SECONDS)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        return child.communicate()


def await_answer(fd: int) -> dict[str, Any] | None:
    """What a supervisor that was just started says on its pipe; None when it says nothing in time."""
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    data = b""
    while True:
        ready, _w, _x = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        part = os.read(fd, 65536)
        if not part:
            break
        data += part
    try:
        answer = json.loads(data)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()[-500:]
    except OSError:
        return ""


def _umask() -> int:
    """The caller's umask: the training's files get it, the run directory is 0700 anyway."""
    try:  # os.umask() can only be read by setting it, which other threads would notice
        status = Path("/proc/self/status").read_text()
        return int(status.partition("Umask:")[2].split()[0], 8)
    except (OSError, ValueError, IndexError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def _scope(run: RunDir) -> list[str]:
    """``systemd-run --user --scope`` where logging out would kill every process of the session.

    That is logind's ``KillUserProcesses=yes``; the scope lives on when the user lingers, which the
    preflight checks.
    """
    from dstui.runs.logout import kills_user_processes, systemd_run

    tool = systemd_run()
    if tool is None or not kills_user_processes():
        return []
    return [tool, "--user", "--scope", "--quiet", "--collect", f"--unit=dstui-{run.id}"]
