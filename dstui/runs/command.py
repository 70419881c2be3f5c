"""From a RunSpec to a command line: launcher, devices, port, environment, and how the config gets in.

Launcher facts: DeepSpeed launcher/runner.py and launch.py, torch distributed/run.py, accelerate
commands/launch.py, llamafactory launcher.py. Everything goes through the *training interpreter*
(``{python} -m ...``), never through a launcher that happens to be first on PATH.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.facts.model import Facts, Gpu, Interpreter
from dstui.facts.visible import select
from dstui.i18n import _, ngettext
from dstui.runs import answers, ranklogs
from dstui.runs import script as scripts
from dstui.runs.nodes import is_here
from dstui.runs.script import CONFIG_FLAGS, Look
from dstui.runs.spec import RunSpec

PLACEHOLDER = "{config}"
CONFIG_VARIABLE = "DSTUI_CONFIG"
LOG_LEVEL_SINCE = (0, 19, 3)
"""First release whose ``log_level`` key brings the step lines back (runtime/config.py)."""
_PORTS = range(29500, 32000)
"""Below Linux' ephemeral range (32768), so that no outgoing connection takes it before rank 0 does."""


class Refused(DstuiError):
    """The script cannot get the config. ``problem`` is the preflight's name for it."""

    def __init__(self, problem: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.problem = problem


@dataclass(frozen=True)
class Command:
    """All that is needed to start a run. Nothing has been written yet."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to the caller's environment."""
    cwd: str
    launcher: str
    python: str
    ranks_per_node: int
    world_size: int
    devices: tuple[str, ...] | None
    master_port: int | None
    hosts: tuple[tuple[str, int], ...] = ()
    """Name and ranks of each node that is reached over ssh (all of them, this one too); () where the launcher starts
    its ranks itself."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name in the run directory -> text (``config.json``, a copied YAML)."""
    config_how: str = "none"
    """``placeholder options remembered env yaml accelerate none``."""
    config_options: tuple[str, ...] = ()
    """The options that carry the config, with ``{config}``."""


def version_tuple(release: str | None) -> tuple[int, ...]:
    """``0.19.8+cu`` -> (0, 19, 8); () when unknown."""
    m = re.match(r"\d+(?:\.\d+)*", release or "")
    return tuple(int(p) for p in m.group().split(".")) if m else ()


def interpreter_for(spec: RunSpec, facts: Facts) -> Interpreter | None:
    """The facts of the interpreter that will train; None when nothing is known about it."""
    if spec.python is None:
        return facts.interpreter
    wanted = Path(spec.python).absolute()
    for it in facts.interpreters:
        if Path(it.path).absolute() == wanted or it.path == spec.python:
            return it
    return next((it for it in facts.interpreters if it.origin == "option"), None)


def python_for(spec: RunSpec, facts: Facts) -> str:
    """Path of the training interpreter, absolute, links kept (a venv is its link). Raises DstuiError."""
    if spec.python is not None:
        if "/" not in spec.python:
            import shutil

            found = shutil.which(spec.python)
            if found is None:
                raise Refused(
                    "python-missing",
                    _("{name}: no such interpreter on PATH").format(name=spec.python),
                    _("give its path: --python /path/to/bin/python"),
                )
            return found
        return str(Path(spec.python).expanduser().absolute())
    it = facts.interpreter
    if it is None:
        raise Refused(
            "python-missing",
            _("no Python interpreter to train with was found"),
            _("name one: --python /path/to/bin/python"),
        )
    return str(Path(it.path).absolute())


def working_directory(spec: RunSpec) -> Path:
    return Path(spec.cwd).expanduser().absolute() if spec.cwd else Path.cwd()


def script_path(spec: RunSpec) -> Path:
    path = Path(spec.script).expanduser()
    return path if path.is_absolute() else working_directory(spec) / path


def devices_for(
    spec: RunSpec, facts: Facts, environ: Mapping[str, str] | None = None
) -> tuple[str, ...] | None:
    """Devices of the run in order; None without GPUs, on the CPU, or when nothing is known about them."""
    env = os.environ if environ is None else environ
    if spec.env.get("DS_ACCELERATOR", env.get("DS_ACCELERATOR")) == "cpu":
        return None
    if spec.devices is not None:
        names = {gpu.uuid: device_name(gpu) for gpu in facts.gpus or ()}
        return tuple(names.get(d, d) for d in spec.devices)
    if facts.gpus == ():
        return None
    if "CUDA_VISIBLE_DEVICES" in spec.env:
        text = spec.env["CUDA_VISIBLE_DEVICES"]
    elif facts.gpus:
        text = ",".join(device_name(gpu) for gpu in facts.gpus)
    else:
        text = env.get("CUDA_VISIBLE_DEVICES", "")
    named = tuple(d.strip() for d in text.split(",") if d.strip())
    if not named:
        return None
    return named[: spec.num_gpus] if spec.num_gpus else named


def device_name(gpu: Gpu) -> str:
    """The physical index, which DeepSpeed's launcher needs; a MIG instance has only its UUID."""
    return gpu.uuid if gpu.mig_parent and gpu.uuid else str(gpu.index)


def ranks_for(spec: RunSpec, devices: tuple[str, ...] | None) -> int:
    """Ranks on each node."""
    if spec.num_gpus:
        return spec.num_gpus
    return len(devices) if devices else 1


_HOST = re.compile(r"^(\S+)\s+slots=(\d+)")  # launcher/runner.py _parse_hostfile, 0.9.5-0.19.8


def hosts(spec: RunSpec) -> tuple[tuple[str, int], ...]:
    """Name and slots of each node of the hostfile, as DeepSpeed's launcher reads it; () without a hostfile.

    Raises Refused for a file that it would not take.
    """
    if not spec.hostfile:
        return ()
    path = working_directory(spec) / Path(spec.hostfile).expanduser()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise Refused(
            "no-hostfile",
            _("{path}: no such hostfile").format(path=path),
            _("one line a node: NAME slots=GPUS"),
        ) from None
    except OSError as e:
        raise Refused("no-hostfile", _("{path}: {cause}").format(path=path, cause=e.strerror or e)) from e
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        m = _HOST.search(line)
        if m is not None and m.group(1) in found:
            raise Refused(
                "hostfile-broken",
                _("{path}:{line}: {name} is named a second time, which DeepSpeed's launcher refuses").format(
                    path=path, line=number, name=m.group(1)
                ),
                _("one line a node: NAME slots=GPUS"),
            )
        if m is None:
            raise Refused(
                "hostfile-broken",
                _("{path}:{line}: DeepSpeed's launcher refuses this line: {text}").format(
                    path=path, line=number, text=line
                ),
                _("one line a node: NAME slots=GPUS"),
            )
        found[m.group(1)] = int(m.group(2))
    if not found:
        raise Refused(
            "hostfile-broken",
            _("{path}: names no node").format(path=path),
            _("one line a node: NAME slots=GPUS"),
        )
    return tuple(found.items())


def ranks_of_nodes(spec: RunSpec, devices: tuple[str, ...] | None) -> tuple[int, ...]:
    """Ranks on each node. Raises Refused without a hostfile that names as many nodes as asked for."""
    known = hosts(spec)
    if not known and spec.nodes > 1:
        raise Refused(
            "no-hostfile",
            _("{n} nodes without a hostfile").format(n=spec.nodes),
            _("give --hostfile FILE with one line a node: NAME slots=GPUS"),
        )
    if not known:
        return (1 if spec.launcher == "python" else ranks_for(spec, devices),)
    if spec.nodes > len(known):
        raise Refused(
            "more-nodes-than-hosts",
            _("{n} nodes asked for, the hostfile names {known}").format(n=spec.nodes, known=len(known)),
            _("give --nodes {n} or fewer, or add lines to {path}").format(n=len(known), path=spec.hostfile),
        )
    return tuple(spec.num_gpus or slots for _name, slots in known[: spec.nodes])


def hosts_over_ssh(spec: RunSpec) -> tuple[tuple[str, int], ...]:
    """Name and ranks of the nodes that the launcher reaches over ssh; () where it starts its ranks itself.

    A hostfile with one node in use is started on this machine, whatever its name (launcher/runner.py main): such a
    name of another machine gets ``--force_multi``. Raises Refused as ``hosts``.
    """
    used = tuple((name, spec.num_gpus or slots) for name, slots in hosts(spec)[: spec.nodes])
    return used if len(used) > 1 or (used and not is_here(used[0][0])) else ()


def as_seen(spec: RunSpec, facts: Facts) -> Facts:
    """``facts`` without GPUs where the run's own ``CUDA_VISIBLE_DEVICES`` (``--env``) hides them all."""
    value = spec.env.get("CUDA_VISIBLE_DEVICES")
    if value is None or not facts.gpus or (value.strip() and not value.strip().startswith("-")):
        return facts
    _none, remark = select(value, facts.gpus)
    unknown = {**facts.unknown, "visible_devices": remark or ""}
    return dataclasses.replace(facts, gpus=(), visible_devices=value, unknown=unknown)


def hides_gpus(facts: Facts) -> bool:
    """Whether there are GPUs here that ``CUDA_VISIBLE_DEVICES`` hides, every one of them."""
    return facts.gpus == () and "visible_devices" in facts.unknown


def choose_launcher(
    spec: RunSpec, interpreter: Interpreter | None, devices: tuple[str, ...] | None, facts: Facts
) -> str:
    """The spec's, else the engine's own, else ``deepspeed``; torchrun where DeepSpeed's launcher cannot.

    ``deepspeed`` turns device names into ints (UUIDs and MIG ids end in ValueError), and works with
    N gloo ranks on a machine without GPUs (``--num_gpus N``; run with 0.19.8). It gives each rank
    ``CUDA_VISIBLE_DEVICES=0..N-1`` whatever the caller set, "" and -1 included (launcher/launch.py; run with 0.19.8):
    cards that the caller hid would be seen again.
    """
    if spec.launcher is not None:
        check_launcher(spec)
        return spec.launcher
    if spec.engine in ("llamafactory", "swift", "accelerate"):
        return spec.engine
    if devices and not all(d.isdigit() for d in devices):
        return "torchrun"
    if hides_gpus(facts) and not spec.hostfile:
        return "torchrun"
    if interpreter is not None and interpreter.deepspeed is None and interpreter.torch is not None:
        return "torchrun"
    return "deepspeed"


def check_launcher(spec: RunSpec) -> None:
    """Raises Refused where the launcher that was asked for cannot start this run."""
    if spec.devices is not None and "CUDA_VISIBLE_DEVICES" in spec.env:
        raise Refused(
            "two-device-lists",
            _("two lists of devices: --devices, and CUDA_VISIBLE_DEVICES in --env"),
            _("give one of them"),
        )
    if spec.devices is not None and spec.hostfile:
        raise Refused(
            "two-device-lists",
            _("--devices names cards of this machine; with a hostfile each node takes its first slots"),
            _("leave out --devices; fewer ranks on each node: --num-gpus N"),
        )
    if spec.launcher in ("llamafactory", "swift") and spec.engine != spec.launcher:
        raise Refused(
            "launcher-of-another-engine",
            _("the launcher '{launcher}' starts only its own training, no script").format(
                launcher=spec.launcher
            ),
            _("leave out --launcher, or give --engine {engine}").format(engine=spec.launcher),
        )
    asked = spec.num_gpus or len(spec.devices or ())
    if spec.launcher == "python" and asked > 1:
        raise Refused(
            "python-starts-one-rank",
            _("{n} ranks: the launcher 'python' starts one").format(n=asked),
            _("use --launcher torchrun or deepspeed"),
        )


def check_ranks(launcher: str, per_node: int, devices: tuple[str, ...] | None) -> None:
    """Raises Refused where DeepSpeed's launcher would start fewer ranks than asked for.

    ``--include`` starts one rank a device, and a device that is named twice counts once (launcher/runner.py
    parse_node_config_list, _stable_remove_duplicates). ``--num_gpus N`` starts N whatever is there (0.9.5-0.19.8),
    but on cards 0..N-1, which may not be those that the caller left visible.
    """
    if launcher != "deepspeed" or not devices:
        return
    if len(set(devices)) < len(devices):
        raise Refused(
            "device-twice",
            _("a device is named twice: {names}").format(names=",".join(devices)),
            _("NCCL refuses two ranks on one GPU"),
        )
    if per_node > len(devices):
        raise Refused(
            "more-ranks-than-devices",
            ngettext("{ranks} ranks on {n} GPU", "{ranks} ranks on {n} GPUs", len(devices)).format(
                ranks=per_node, n=len(devices)
            ),
            _("DeepSpeed's launcher starts one rank a GPU: give --num-gpus {n} or fewer").format(
                n=len(devices)
            ),
        )


def trainer_needs_cpu_flag(spec: RunSpec, facts: Facts) -> bool:
    """Whether this is a Trainer's run without GPU whose arguments do not say so.

    Then transformers counts one rank whatever the launcher started, so its batch sizes contradict
    DeepSpeed's, and refuses ``--bf16`` (TrainingArguments.__post_init__ and _setup_devices @ 5.24; executed).
    Nothing is known of the cards of other nodes: a machine without GPU may start a run on nodes that have them.
    """
    if spec.hostfile:
        return False
    named = {a[2:].partition("=")[0].replace("-", "_") for a in spec.args if a.startswith("--")}
    return spec.engine == "hf" and facts.gpus == () and not named & {"use_cpu", "no_cuda"}


def port_is_free(port: int) -> bool:
    """Whether rank 0 could listen there (both address families that torch's TCPStore may take)."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.bind(("", port))
        except OSError as e:
            if e.errno == 98:  # EADDRINUSE; anything else: this family is not here
                return False
    return True


def free_port(taken: frozenset[int] = frozenset()) -> int:
    """A free port that no other run of ours was given. Raises DstuiError."""
    start = random.SystemRandom().randrange(len(_PORTS))
    for i in range(len(_PORTS)):
        port = _PORTS[(start + i) % len(_PORTS)]
        if port not in taken and port_is_free(port):
            return port
    raise DstuiError(
        _("no free port between {first} and {last}").format(first=_PORTS[0], last=_PORTS[-1]),
        _("give one with --master-port"),
    )


# -- the config ------------------------------------------------------------------------------------------


def adopt_config_from_arguments(spec: RunSpec) -> RunSpec:
    """``train.py --deepspeed ds.json`` (or a LLaMA-Factory YAML) names its config itself: it becomes the run's.

    A value counts when it names an existing file. Raises Refused when another config was given as well.
    """
    args = list(spec.args)
    found: tuple[int, str, str] | None = None
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag not in (*CONFIG_FLAGS, "--deepspeed"):
            continue
        value = value if equals else (args[i + 1] if i + 1 < len(args) else "")
        if not value or value.startswith("-") or PLACEHOLDER in value:
            continue
        path = Path(value).expanduser()
        path = path if path.is_absolute() else working_directory(spec) / path
        if path.suffix.lower() in (".json", ".hjson") or path.is_file():
            found = (i if equals else i + 1, f"{flag}={PLACEHOLDER}" if equals else PLACEHOLDER, str(path))
            break
    if found is None:
        return _adopt_from_yaml(spec)
    index, text, source = found
    if spec.has_config:
        if spec.config_source and os.path.realpath(spec.config_source) == os.path.realpath(source):
            args[index] = text
            return dataclasses.replace(spec, args=tuple(args))
        raise Refused(
            "two-configs",
            _("two configs: --config, and {path} among the script's arguments").format(path=source),
            _("give one of them; write {placeholder} where the script takes its path").format(
                placeholder=PLACEHOLDER
            ),
        )
    args[index] = text
    return dataclasses.replace(spec, args=tuple(args), config_source=source)


def _adopt_from_yaml(spec: RunSpec) -> RunSpec:
    if spec.engine != "llamafactory" or spec.has_config:
        return spec
    try:
        named = yaml_deepspeed(script_path(spec).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return spec  # preflight says why
    if not named:
        return spec
    return dataclasses.replace(spec, config_source=str(working_directory(spec) / Path(named).expanduser()))


def config_text(spec: RunSpec) -> str | None:
    """The config as the user wrote it; None when the run has none. Raises DstuiError."""
    if spec.config_text is not None:
        return spec.config_text
    if spec.config is not None:
        return json.dumps(dict(spec.config), indent=2, ensure_ascii=False) + "\n"
    if spec.config_source is None:
        return None
    path = Path(spec.config_source).expanduser()
    path = path if path.is_absolute() else working_directory(spec) / path
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DstuiError(_("{path}: not UTF-8 text").format(path=path)) from e
    except OSError as e:
        raise DstuiError(_("{path}: {cause}").format(path=path, cause=e.strerror)) from e


def instrument(
    text: str,
    metrics_dir: Path,
    release: str | None,
    *,
    steps_per_print: int = 10,
    strict_json: bool = False,
    path: str = "config.json",
) -> str:
    """``text`` with the keys that a monitor needs; what the user set stays.

    ``steps_per_print``: no default from 0.15.2 on, no step line without it. ``log_level: info``: from
    0.19.3 the engine's INFO lines are hidden without it. ``csv_monitor``: one file a metric (monitor/csv_monitor.py).
    In 0.19.8 these are the learning rate and, with fp16, the loss scale (runtime/engine.py); the loss comes from the
    pipeline engine only (runtime/pipe/engine.py). Raises DstuiError for text that is no config.
    """
    from dstui.config.document import Document

    doc = Document.parse(text, path=path, strict_json=strict_json)
    edits: list[dict[str, Any]] = []
    if "steps_per_print" not in doc.data:
        edits.append({"op": "add", "path": "/steps_per_print", "value": steps_per_print})
    if version_tuple(release) >= LOG_LEVEL_SINCE and "log_level" not in doc.data:
        edits.append({"op": "add", "path": "/log_level", "value": "info"})
    monitor = doc.data.get("csv_monitor")
    if not (isinstance(monitor, dict) and monitor.get("enabled")):
        op = "replace" if "csv_monitor" in doc.data else "add"
        value = {"enabled": True, "output_path": str(metrics_dir), "job_name": "csv"}
        edits.append({"op": op, "path": "/csv_monitor", "value": value})
    return doc.edited(edits).text if edits else text


def config_copy(spec: RunSpec, folder: Path, release: str | None) -> str | None:
    """Text of the run's own ``config.json`` (``folder``: the run directory); None without a config."""
    text = config_text(spec)
    if text is None or not spec.instrument:
        return text
    return instrument(
        text,
        folder / "metrics",
        release,
        steps_per_print=spec.steps_per_print,
        strict_json=spec.engine == "hf",
        path=spec.config_source or "config.json",
    )


def guess_engine(look: Look) -> str:
    """The engine of a script whose user named none."""
    if look.kind == "yaml":
        return "llamafactory"
    if look.adds_deepspeed_arguments or look.config_flag:
        return "plain"
    if look.hf_parser or look.uses_trainer:
        return "hf"
    if look.uses_accelerate and not look.imports_deepspeed:
        return "accelerate"
    return "plain"


def how_config_reaches(spec: RunSpec, look: Look) -> tuple[str, tuple[str, ...]]:
    """(how, options to append with ``{config}``). Raises Refused with the line to add to the script."""
    if not spec.has_config:
        return "none", ()
    if any(PLACEHOLDER in a for a in spec.args):
        return "placeholder", ()
    if spec.engine == "llamafactory":
        return "yaml", ()
    if spec.engine == "accelerate":
        return "accelerate", ()
    if spec.engine == "swift":
        return "options", ("--deepspeed", PLACEHOLDER)
    if look.reads_dstui_config:
        return "env", ()
    known = answers.options(script_path(spec))
    if known:
        return "remembered", tuple(known)
    if spec.engine == "hf":
        if look.hf_parser or look.flags.get("--deepspeed"):
            return "options", ("--deepspeed", PLACEHOLDER)
    else:
        flag = look.config_flag
        if flag:
            switch = ("--deepspeed",) if look.flags.get("--deepspeed") is False else ()
            return "options", (*switch, flag, PLACEHOLDER)
        if look.flags.get("--deepspeed"):
            return "options", ("--deepspeed", PLACEHOLDER)
        if look.hf_parser:
            return "options", ("--deepspeed", PLACEHOLDER)
    raise _takes_no_config(spec, look)


def _takes_no_config(spec: RunSpec, look: Look) -> Refused:
    env = f'os.environ["{CONFIG_VARIABLE}"]'
    if spec.engine == "hf" or (look.uses_trainer and not look.adds_deepspeed_arguments):
        line = f"TrainingArguments(..., deepspeed={env})"
    else:
        line = f"deepspeed.initialize(..., config={env})"
    if look.hard_coded is not None:
        h = look.hard_coded
        return Refused(
            "config-hard-coded",
            _("{file}:{line} hard-codes the config '{value}': the one chosen here would not be used").format(
                file=h.file, line=h.line, value=h.value
            ),
            _("change that line to: {line}").format(line=line),
        )
    hint = _("write {placeholder} among its arguments where it takes the path, or add to the script: {line}")
    if look.open_cli:
        message = _("{script}: cannot tell which of its options takes the DeepSpeed config")
    else:
        message = _("{script}: takes no DeepSpeed config")
    if spec.engine == "plain" and look.reads_arguments and not look.hf_parser and not look.uses_trainer:
        line = "parser = deepspeed.add_config_arguments(parser)"
    return Refused(
        "no-config-taken",
        message.format(script=spec.script),
        hint.format(placeholder=PLACEHOLDER, line=line),
    )


def yaml_with_deepspeed(text: str, config: str) -> str:
    """A LLaMA-Factory YAML (or JSON) whose top-level ``deepspeed:`` names ``config``; all else as written."""
    if text.lstrip().startswith("{"):
        data = json.loads(text)
        return json.dumps({**data, "deepspeed": config}, indent=2, ensure_ascii=False) + "\n"
    line = f"deepspeed: {json.dumps(config)}"
    new, n = re.subn(r"(?m)^deepspeed[ \t]*:.*$", lambda _m: line, text, count=1)
    if n:
        return new
    return text + ("" if text.endswith("\n") or not text else "\n") + line + "\n"


def yaml_deepspeed(text: str) -> str | None:
    """The path that a LLaMA-Factory YAML names under ``deepspeed:``."""
    m = re.search(r"(?m)^deepspeed[ \t]*:[ \t]*([^#\n]+?)[ \t]*(?:#.*)?$", text)
    return m.group(1).strip("'\"") if m else None


# -- the command -----------------------------------------------------------------------------------------


def build(
    spec: RunSpec,
    facts: Facts,
    folder: Path,
    *,
    environ: Mapping[str, str] | None = None,
    taken_ports: frozenset[int] = frozenset(),
) -> Command:
    """The command of ``spec`` on this machine for the run directory ``folder``. Raises DstuiError."""
    env = os.environ if environ is None else environ
    spec = adopt_config_from_arguments(spec)
    facts = as_seen(spec, facts)
    interpreter = interpreter_for(spec, facts)
    python = python_for(spec, facts)
    cwd, script = working_directory(spec), script_path(spec)
    check_launcher(spec)
    devices = devices_for(spec, facts, env)
    launcher = choose_launcher(spec, interpreter, devices, facts)
    if (spec.nodes > 1 or spec.hostfile) and launcher != "deepspeed":
        raise Refused(
            "nodes-need-deepspeed",
            _("{n} nodes: only the deepspeed launcher starts other nodes").format(n=spec.nodes),
            _("use --launcher deepspeed --hostfile FILE"),
        )
    nodes = ranks_of_nodes(spec, devices)
    per_node = max(nodes)
    if spec.hostfile:
        devices = None  # other nodes' cards; the launcher takes the first slots of each
    else:
        check_ranks(launcher, per_node, devices)
        if devices is not None and launcher != "python":
            devices = devices[:per_node]
    port = free_port(taken_ports) if spec.master_port == "auto" else spec.master_port
    look = scripts.look(script) if launcher != "swift" else Look()
    how, options = how_config_reaches(spec, look)

    files: dict[str, str] = {}
    config = folder / "config.json"
    copy = config_copy(spec, folder, interpreter.deepspeed if interpreter else None)
    if copy is not None:
        files["config.json"] = copy
    args = [a.replace(PLACEHOLDER, str(config)) for a in (*spec.args, *options)]
    if trainer_needs_cpu_flag(spec, facts) and look.hf_parser:
        args.append("--use_cpu")
    # A launcher starts in cwd as well: the path is given as the user wrote it, which is shorter to read.
    target = spec.script if (cwd / spec.script).exists() else str(script)

    added = _environment(spec, facts, env, python, launcher, devices, per_node)
    if copy is not None:
        added[CONFIG_VARIABLE] = str(config)
    if how == "yaml":
        name = "train" + script.suffix.lower()
        files[name] = yaml_with_deepspeed(script.read_text(encoding="utf-8"), str(config))
        target = str(folder / name)
    if how == "accelerate" and launcher != "accelerate":
        added["ACCELERATE_USE_DEEPSPEED"] = "true"
        added["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)

    logs, more = ranklogs.options(launcher, folder / "rank-logs") if spec.rank_logs else ([], {})
    added.update(more)
    if launcher == "deepspeed":
        argv = _deepspeed(spec, python, devices, per_node, port, look, facts)
        argv += [*logs, target, *args]
    elif launcher == "torchrun":
        argv = [*_torchrun(python, per_node, port), *logs, target, *args]
    elif launcher == "accelerate":
        files["accelerate.yaml"] = accelerate_config(config if copy is not None else None, per_node, port)
        argv = [python, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
        argv += [*logs, target, *args]
    elif launcher == "llamafactory":
        # What `FORCE_TORCHRUN=1 llamafactory-cli train` starts through a shell. `-m llamafactory.cli` is no
        # way: in some releases that module does nothing when it is run (cli.py without a main guard).
        added["FORCE_TORCHRUN"] = "1"
        argv = [*_torchrun(python, per_node, port), *logs, "-m", "llamafactory.launcher", target, *args]
    elif launcher == "swift":
        added.update(NPROC_PER_NODE=str(per_node), MASTER_PORT=str(port))
        argv = [python, "-m", "swift.cli.main", spec.script, *args]
    else:
        added.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        argv = [python, "-u", target, *args]
    added.update(spec.env)
    return Command(
        argv=tuple(argv),
        env=added,
        cwd=str(cwd),
        launcher=launcher,
        python=python,
        ranks_per_node=per_node,
        world_size=sum(nodes),
        devices=devices,
        master_port=port,
        hosts=hosts_over_ssh(spec),
        files=files,
        config_how=how,
        config_options=options,
    )


def _torchrun(python: str, per_node: int, port: int) -> list[str]:
    argv = [python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(per_node)]
    argv += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    if _knows_signals_option(python):
        argv.append("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT")  # its agent dies of SIGHUP otherwise
    return argv


def _deepspeed(
    spec: RunSpec,
    python: str,
    devices: tuple[str, ...] | None,
    per_node: int,
    port: int,
    look: Look,
    facts: Facts,
) -> list[str]:
    argv = [python, "-m", "deepspeed.launcher.runner"]
    if spec.hostfile:
        argv += ["--hostfile", str(working_directory(spec) / Path(spec.hostfile).expanduser())]
        argv += ["--num_nodes", str(spec.nodes)]
        if spec.master_addr:
            argv += ["--master_addr", spec.master_addr]
        if not hosts_over_ssh(spec):
            argv += ["--no_ssh_check", *([] if spec.master_addr else ["--master_addr", "127.0.0.1"])]
        elif spec.nodes == 1:
            argv.append("--force_multi")
        if spec.num_gpus:
            argv += ["--num_gpus", str(spec.num_gpus)]  # else each node's own slots
    else:
        if facts.scheduler.hostfile or Path("/job/hostfile").is_file():
            argv += ["--hostfile", os.devnull]  # the default file would make it a multi-node run
        if devices:
            # --num_gpus would drop CUDA_VISIBLE_DEVICES and take ids 0..N-1 (launcher/runner.py main).
            argv += ["--include", "localhost:" + ",".join(devices)]
        else:
            argv += ["--num_gpus", str(per_node)]
    argv += ["--master_port", str(port)]
    if not (look.local_rank or look.open_cli) or spec.engine in ("hf", "accelerate"):
        argv.append("--no_local_rank")  # it is in LOCAL_RANK as well
    return argv


def _environment(
    spec: RunSpec,
    facts: Facts,
    env: Mapping[str, str],
    python: str,
    launcher: str,
    devices: tuple[str, ...] | None,
    per_node: int,
) -> dict[str, str]:
    """Additions to the caller's environment; a variable that the caller set is left alone."""
    added: dict[str, str] = {}

    def default(name: str, value: str) -> None:
        if name not in env:
            added[name] = value

    bin_dir = str(Path(python).parent)
    if bin_dir not in env.get("PATH", "").split(os.pathsep):
        # DeepSpeed's op builder looks for ninja on PATH, launchers for each other.
        added["PATH"] = os.pathsep.join(p for p in (bin_dir, env.get("PATH", os.defpath)) if p)
    default("PYTHONUNBUFFERED", "1")  # out.log shows a line when it is printed, under every launcher
    if devices:
        if launcher != "deepspeed":
            added["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if all(d.isdigit() for d in devices):
            added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which the facts number the cards
    elif facts.gpus == () and not spec.hostfile:
        default("DS_ACCELERATOR", "cpu")
        cores = facts.host.cores_usable or facts.host.cores
        if cores:
            # Without it every rank starts a thread a core, and torchrun sets 1.
            default("OMP_NUM_THREADS", str(max(1, cores // per_node)))
    return added


def _knows_signals_option(python: str) -> bool:
    """Whether that interpreter's torchrun has ``--signals-to-handle`` (a recent torch)."""
    for base in {Path(python).parent.parent, Path(os.path.realpath(python)).parent.parent}:
        for source in base.glob("lib*/python3*/site-packages/torch/distributed/run.py"):
            try:
                return "--signals-to-handle" in source.read_text(encoding="utf-8")
            except OSError:
                return False
    return False


def accelerate_config(config: Path | None, ranks: int, port: int) -> str:
    """``accelerate launch``'s config file. Only what a ds_config does not say: accelerate refuses the rest twice."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: DEEPSPEED",
        "machine_rank: 0",
        "num_machines: 1",
        f"num_processes: {ranks}",
        f"main_process_port: {port}",
        "main_training_function: main",
        "use_cpu: false",
        "deepspeed_config:",
    ]
    if config is not None:
        lines.append(f"  deepspeed_config_file: {json.dumps(str(config))}")
    lines.append("  zero3_init_flag: true")
    return "\n".join(lines) + "\n"
