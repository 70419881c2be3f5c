"""The run directory: what a run leaves on disk, found and read by any terminal on any host.

Layout of one run (docs/runs.md); every format carries ``schema_version`` and only grows::

    manifest.json   what was started: command, environment difference, config, facts, process identities
    config.json     the run's own copy of the DeepSpeed config
    out.log         stdout and stderr of every process, written by them directly (append mode)
    rank-logs/      one file a rank, where the launcher writes them
    metrics/        csv_monitor's files
    probe/          the probe of a trial and what it measured, one file a rank (``dstui.runs.trial``)
    trial.json      predicted beside measured, once a measured run is over
    events.jsonl    one JSON object a line: {"t": epoch seconds, "event": name, ...}
    samples/        GPU and host samples
    hook.log        output of the user's command on an event (``dstui.runs.hook``)
    requests/       files asking the supervisor for something: ``stop-*.json``
    heartbeat       {"t": epoch seconds, "pids": [...], "state": "running", "stall": {...}}; rewritten every few seconds
    exit.json       how it ended; appears once, complete, and never changes
    supervisor.log  messages of the supervisor itself; normally empty

``out.log`` is never moved or cut while a process writes to it. When it outgrows its limit, the blocks
of its *middle* are given back to the file system (a hole), so its beginning, its newest part and every
byte offset stay valid; a reader meets a run of NUL bytes there and skips it.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.errors import DstuiError
from dstui.i18n import _, listed
from dstui.runs.processes import Place, Process, alive, here

SCHEMA_VERSION = 1
STATES = ("starting", "running", "stalled", "finished", "failed", "stopped", "lost")
LIVE = STATES[:3]
"""Of a run that has not ended."""
HEARTBEAT_INTERVAL = 5.0
"""Seconds between two heartbeats of a supervisor."""
HEARTBEAT_LOST = 90.0
"""Age in seconds from which a supervisor on another host counts as gone."""
_LETTERS = "abcdefghjkmnpqrstuvwxyz"
_DIGITS = "23456789"


def write_json(path: Path, data: Any, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data`` in one step (temporary file, fsync, rename). Raises OSError."""
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    write_text(path, text, mode)


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace ``path`` by ``text`` in one step (temporary file, fsync, rename). Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None when it is missing, unreadable or no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


_NUMBER, _TABLE, _ROW = (int, float), (dict,), (list,)
_MANIFEST: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "created_at",
            "started_at",
            "world_size",
            "world_size_asked",
            "ranks_per_node",
            "nodes",
            "master_port",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        ("spec", "env", "env_caller", "config", "git", "versions", "facts", "prediction"), _TABLE
    ),
    **dict.fromkeys(("supervisor", "launcher"), _TABLE),
    **dict.fromkeys(("command", "env_user", "devices", "adopted", "hosts"), _ROW),
    **dict.fromkeys(("name", "script", "engine", "host", "cwd", "python", "on_event"), (str,)),
}
_EXIT: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("code", "rank_code", "first_rank"), (int,)),
    **dict.fromkeys(("ended_at", "started_at"), _NUMBER),
    **dict.fromkeys(("outcome", "signal", "reason", "first_node", "ended_for_node"), (str,)),
    **dict.fromkeys(("ranks", "leftovers", "locks_removed", "nodes"), _ROW),
    **dict.fromkeys(("oom_kills", "stopped_by", "cause"), _TABLE),
}
_RANK: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "pid", "code"), (int,)),
    "ended_at": _NUMBER,
    "signal": (str,),
}
"""What the fields of these files hold; another kind of value counts as none: a file that was damaged, or edited."""


def shaped(data: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """``data`` with null in place of a value that is not of its kind; a number is finite, a time one that has a date."""
    return {k: v if k not in kinds or _is(k, v, kinds[k]) else None for k, v in data.items()}


def _is(name: str, value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, (int, float)) or abs(value) < (1e11 if name.endswith("_at") else 1e18)


def _figures(table: Any) -> bool:
    return table is None or (
        isinstance(table, dict) and all(v is None or _is("", v, (int, float)) for v in table.values())
    )


def sound_prediction(value: Any) -> dict[str, Any] | None:
    """An estimate as JSON; None where a figure of it is none, or stands where none belongs."""
    if not isinstance(value, dict):
        return None
    sides = [value.get(name) for name in ("gpu", "host")]
    notes = value.get("assumptions") or []
    if not (isinstance(notes, list) and all(isinstance(x, str) for x in notes)):
        return None
    for side in sides:
        if side is None:
            continue
        if not isinstance(side, dict):
            return None
        phases = side.get("phases") or []
        listed = phases if isinstance(phases, list) else []
        tables = [side.get(name) for name in ("allocated", "reserved", "device", "peak", "parts")]
        tables.append({name: side.get(name) for name in ("capacity", "pinned", "pageable")})
        if not all(isinstance(p, dict) for p in listed):
            return None
        if not all(_figures(t) for t in (*tables, *(p.get("parts") for p in listed))):
            return None
    return value


@dataclass(frozen=True)
class Liveness:
    """What can be known now about a run's processes.

    ``here``: the run belongs to this host, boot and pid namespace, so pids can be compared.
    ``supervisor``, ``launcher``: alive, dead, or None when it cannot be told from here.
    ``age``: seconds since the last heartbeat; None before the first.
    """

    here: bool
    supervisor: bool | None
    launcher: bool | None
    age: float | None


class RunDir:
    """One run on disk. Cheap to make; each property reads the file at that moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def out_log(self) -> Path:
        return self.path / "out.log"

    @property
    def rank_logs(self) -> Path:
        return self.path / "rank-logs"

    @property
    def metrics_dir(self) -> Path:
        """csv_monitor's ``output_path``; its files lie in ``metrics/<job_name>/`` (DeepSpeed monitor/csv_monitor.py)."""
        return self.path / "metrics"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples_dir(self) -> Path:
        return self.path / "samples"

    @property
    def requests_dir(self) -> Path:
        return self.path / "requests"

    @property
    def heartbeat_path(self) -> Path:
        return self.path / "heartbeat"

    @property
    def exit_path(self) -> Path:
        return self.path / "exit.json"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as last written. Raises DstuiError when it is unreadable or of a later major format."""
        data = read_json(self.manifest_path)
        if data is None:
            raise DstuiError(
                _("{path}: not a readable run manifest").format(path=self.manifest_path),
                _("the folder may be damaged; `dstui rm {id}` removes it").format(id=self.id),
            )
        if data.get("schema_version") != SCHEMA_VERSION:
            raise DstuiError(
                _("{path}: written in format {version}, this dstui reads {known}").format(
                    path=self.manifest_path, version=data.get("schema_version"), known=SCHEMA_VERSION
                ),
                _("install the dstui release that started the run"),
            )
        data = shaped(data, _MANIFEST)
        versions = data.get("versions") or {}
        data |= {"versions": shaped(versions, dict.fromkeys(versions, (str,)))}
        data["prediction"] = sound_prediction(data.get("prediction"))
        if data.get("command") is not None:
            data["command"] = [str(word) for word in data["command"]]
        return data

    @property
    def exit(self) -> dict[str, Any] | None:
        """How the run ended; None while it runs (or when its supervisor died before it could write)."""
        data = read_json(self.exit_path)
        if data is None:
            return None
        data = shaped(data, _EXIT)
        ranks = [shaped(r, _RANK) for r in data.get("ranks") or () if isinstance(r, dict)]
        kills = shaped(data.get("oom_kills") or {}, dict.fromkeys(("cgroup", "system"), (int,)))
        return {**data, "ranks": [r for r in ranks if r.get("rank") is not None], "oom_kills": kills}

    def has_ended(self) -> bool:
        return self.exit is not None

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        return read_json(self.heartbeat_path)

    @property
    def name(self) -> str | None:
        name = self.manifest.get("name")
        return str(name) if name else None

    @property
    def created_at(self) -> float:
        """Epoch seconds; the folder's own time when the manifest cannot be read."""
        data = read_json(self.manifest_path)
        if data and isinstance(data.get("created_at"), (int, float)):
            return float(data["created_at"])
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def process(self, role: str) -> Process | None:
        """Identity of the ``supervisor`` or the ``launcher``, from the manifest; None before it started."""
        entry = self.manifest.get(role)
        if not isinstance(entry, dict) or not isinstance(entry.get("pid"), int):
            return None
        return Process(entry["pid"], int(entry.get("start_time", -1)))

    def place(self) -> Place:
        """Host, boot and pid namespace that the run's pids belong to."""
        m = self.manifest
        return Place(str(m.get("host")), m.get("boot_id"), m.get("pid_namespace"))

    def append_event(self, event: str, **fields: Any) -> None:
        """Add one line to ``events.jsonl`` (one write, so lines of two writers never mix). Raises OSError."""
        line = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, ensure_ascii=False) + "\n"
        fd = os.open(self.events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def events(self) -> list[dict[str, Any]]:
        """What the supervisor wrote down, oldest first; torn lines are left out."""
        found = []
        try:
            lines = self.events_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                found.append(entry)
        return found


def new_id() -> str:
    """A short name that is easy to type and has a unique prefix early: ``kfw7-1129-1920x8q``.

    Processes are known by it (``dstui.runs.processes.marked``), so it must be like no other's on this machine, those
    of other state homes included: 2.9e9 names a minute. With the head alone (1e5) two homes did meet.
    """
    rng = random.SystemRandom()
    head = "".join(rng.choice(_LETTERS) for _i in range(3)) + rng.choice(_DIGITS)
    tail = "".join(rng.choice(_LETTERS + _DIGITS) for _i in range(3))
    return head + time.strftime("-%m%d-%H%M") + tail


Fill = Callable[["RunDir"], "tuple[Mapping[str, Any], Mapping[str, str]]"]
"""Given the run at its final path (which does not exist yet): its manifest and its files, name -> text."""


def create(
    manifest: Mapping[str, Any] | None = None,
    config_text: str | None = None,
    *,
    root: Path | None = None,
    fill: Fill | None = None,
) -> RunDir:
    """A new run directory, complete before it appears under its name (mode 0700).

    The manifest gets ``schema_version``, ``id`` and ``created_at``. Raises DstuiError when the state
    home cannot be written.
    """
    home = paths.runs_dir() if root is None else root
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            run_id = new_id()
            target = home / run_id
            if not target.exists():
                break
        head = {"schema_version": SCHEMA_VERSION, "id": run_id, "created_at": time.time()}
        whole, files = {**head, **(manifest or {})}, {}
        if fill is not None:
            more, texts = fill(RunDir(target))
            whole, files = {**whole, **more}, dict(texts)
        if config_text is not None:
            files["config.json"] = config_text
        temporary = home / f".new-{run_id}"
        temporary.mkdir(mode=0o700)
        try:
            for name in ("requests", "samples", "metrics"):
                (temporary / name).mkdir(mode=0o700)
            for name in ("out.log", "events.jsonl"):
                os.close(os.open(temporary / name, os.O_WRONLY | os.O_CREAT, 0o600))
            for name, text in files.items():
                (temporary / name).parent.mkdir(mode=0o700, exist_ok=True)
                write_text(temporary / name, text)
            write_json(temporary / "manifest.json", whole)
            temporary.rename(target)
        except BaseException:
            import shutil

            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as e:
        raise DstuiError(
            _("cannot write the run directory under {path}: {cause}").format(
                path=home, cause=e.strerror or e
            ),
            _("set DSTUI_STATE_HOME to a folder that you can write, with free space"),
        ) from e
    return RunDir(target)


def list_runs(root: Path | None = None) -> list[RunDir]:
    """Every run, newest first. Folders without a manifest are not runs."""
    home = paths.runs_dir() if root is None else root
    try:
        entries = [Path(e.path) for e in os.scandir(home) if e.is_dir() and not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise DstuiError(
            _("cannot read {path}: {cause}").format(path=home, cause=e.strerror),
            _("set DSTUI_STATE_HOME to the folder that holds your runs"),
        ) from e
    runs = [RunDir(p) for p in entries if (p / "manifest.json").exists()]
    return sorted(runs, key=lambda r: r.created_at, reverse=True)


def find_run(
    reference: str = "last", root: Path | None = None, *, newest: Callable[[str], None] | None = None
) -> RunDir:
    """The run that ``reference`` names: an id, ``last``, a name, a unique prefix of an id, or a path.

    ``newest``: take the newest of several runs of that name, and tell it which. Raises DstuiError with the near
    names, or with the candidates when it is ambiguous.
    """
    if "/" in reference or reference in (".", ".."):
        path = Path(reference).expanduser().resolve()
        path = path.parent if path.is_file() else path
        if (path / "manifest.json").is_file():
            return RunDir(path)
        raise DstuiError(_("{path}: not a run directory").format(path=reference), _("see `dstui runs`"))
    runs = list_runs(root)
    if not runs:
        raise DstuiError(_("there are no runs yet"), _("start one: `dstui demo` or `dstui run -- SCRIPT`"))
    if reference == "last":
        return runs[0]
    for run in runs:
        if run.id == reference:
            return run
    names = {run: str((read_json(run.manifest_path) or {}).get("name") or "") for run in runs}
    named = [run for run in runs if names[run] == reference]
    if len(named) > 1 and newest is not None:
        newest(
            _("{n} runs are named '{name}'; this is the newest, {id}").format(
                n=len(named), name=reference, id=named[0].id
            )
        )
        return named[0]
    found = named or [run for run in runs if reference and run.id.startswith(reference)]
    if len(found) == 1:
        return found[0]
    if found:
        lines = [f"{run.id}  {names[run]}".rstrip() for run in found[:10]]
        raise DstuiError(
            _("'{name}' fits {n} runs").format(name=reference, n=len(found)),
            _("give more of the id:") + "\n    " + "\n    ".join(lines),
        )
    if len(reference) > 2 and (paths.state_home() / "ab" / reference / "ab.json").is_file():
        raise DstuiError(
            _("{id} is an A/B, not a run").format(id=reference),
            _("its result: dstui ab --join {id}; end it: dstui ab --stop {id}").format(id=reference),
        )
    near = difflib.get_close_matches(
        reference, [run.id for run in runs] + [n for n in names.values() if n], 3, 0.5
    )
    raise DstuiError(
        _("there is no run '{name}'").format(name=reference),
        _("did you mean: {names}?").format(names=listed(near)) if near else _("see `dstui runs`"),
    )


def rebooted(run: RunDir) -> bool:
    """Whether this very host was started anew since: nothing of the run lives, and its pids mean nothing."""
    return run.place().host == here().host and run.place().boot_id != here().boot_id


def liveness(run: RunDir) -> Liveness:
    """Compare host, boot id, pid namespace, pid and start time; a heartbeat's age for another host."""
    beat = run.heartbeat
    age = None
    if beat and isinstance(beat.get("t"), (int, float)):
        age = max(0.0, time.time() - float(beat["t"]))
    if run.place() != here():
        gone = age is not None and age > HEARTBEAT_LOST
        dead = False if gone or rebooted(run) else None
        return Liveness(False, dead, dead, age)
    supervisor, launcher = run.process("supervisor"), run.process("launcher")
    return Liveness(
        True,
        alive(supervisor) if supervisor else None,
        alive(launcher) if launcher else None,
        age,
    )


def state_word(state: str) -> str:
    """The state in the reader's language; what is no state stays as it is."""
    return {
        "starting": _("starting"),
        "running": _("running"),
        "stalled": _("stalled"),
        "finished": _("finished"),
        "failed": _("failed"),
        "stopped": _("stopped"),
        "lost": _("lost"),
    }.get(state, state)


def state(run: RunDir) -> str:
    """``starting running finished failed stopped lost``; ``stalled`` needs a look at its progress (state.py).

    A dead supervisor without exit.json is ``lost``, also when ranks live on: nobody saw how it ended.
    """
    ended = run.exit
    if ended is not None:
        outcome = str(ended.get("outcome"))
        return outcome if outcome in STATES else "failed"
    manifest = run.manifest
    look = liveness(run)
    if look.supervisor is False:
        ended = run.exit  # it may have ended between the two looks
        return "lost" if ended is None else str(ended.get("outcome", "failed"))
    if manifest.get("supervisor") is None:
        # Between mkdir and the supervisor's first write: seconds. Older than that, it never came up.
        return "starting" if time.time() - run.created_at < HEARTBEAT_LOST else "lost"
    return "running" if manifest.get("launcher") else "starting"
