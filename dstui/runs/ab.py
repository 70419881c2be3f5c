"""Two kinds of a training against each other, as real runs in turn: two configs, or one under two interpreters.

``begin(plan)`` checks both kinds before anything starts, makes ``<state home>/ab/<id>/`` and leaves the work to a
controller in its own session, which needs the terminal as little as a run does. The folder holds::

    ab.json          what is compared, in which order, the runs so far, how it stands; rewritten whole
    stop             a file that asks the controller to end the present run and itself
    controller.log   its messages; normally empty

The controller gets the specs on its stdin: arguments and environment may hold secrets, and those are never written.
Should it die with the machine, the runs stay what they are, and ``result`` compares those there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui import paths
from dstui.errors import DstuiError
from dstui.i18n import _, aside, clauses, listed
from dstui.runs import command as commands
from dstui.runs import control, pace, store
from dstui.runs.compare import Column, Comparison, compare
from dstui.runs.logout import kills_user_processes, systemd_run
from dstui.runs.ops import extensions_root
from dstui.runs.preflight import preflight, worst
from dstui.runs.processes import Place, Process, alive, for_supervisor, here, identify
from dstui.runs.spec import RunSpec
from dstui.runs.start import PreflightFailed, await_answer, start
from dstui.runs.store import LIVE, RunDir, write_json

SCHEMA_VERSION = 1
ORDERS = ("abba", "abab")
"""``abba``: each pair in the other order than the one before, so that a drift of the machine hits both alike."""
BREAKDOWN_STEPS = 30
MEASURED_STEPS = 5000
"""Steps that the probe measures where the script ends by itself."""
FREE_SECONDS = 120.0
"""How long the cards of the run before may take to be free."""
_POLL, _FREE_POLL = 0.5, 2.0
_COMMS = {"enabled": True, "verbose": True, "prof_all": True, "debug": False}
"""``verbose`` prints each operation; without it a script would have to call ``deepspeed.comm.log_summary()``."""


@dataclass(frozen=True)
class Plan:
    """``specs``: the two kinds. ``steps``: end each run after so many (None: when the script ends). ``minutes``: and
    at the latest after so many. ``total_minutes``: all of it; no pair is begun that would take longer.
    ``breakdown``: one more run of each kind with DeepSpeed's timers on."""

    specs: tuple[RunSpec, RunSpec]
    labels: tuple[str, str]
    pairs: int = 1
    order: str = "abba"
    steps: int | None = None
    minutes: float | None = None
    total_minutes: float | None = None
    breakdown: bool = False
    probe: bool = True

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise DstuiError(_("--pairs {n}: at least 1").format(n=self.pairs))
        if self.steps is not None and self.steps < 1:
            raise DstuiError(_("--steps {n}: at least 1").format(n=self.steps))
        if self.minutes is not None and not self.minutes > 0:
            raise DstuiError(_("--minutes {n}: more than 0").format(n=self.minutes))
        if self.total_minutes is not None and not self.total_minutes > 0:
            raise DstuiError(_("--total-minutes {n}: more than 0").format(n=self.total_minutes))

    def turns(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(number of a pair, its kinds 0 and 1 in their order)."""
        for pair in range(self.pairs):
            first = pair % 2 if self.order == "abba" else 0
            yield pair, (first, 1 - first)

    def to_json(self) -> dict[str, Any]:
        """All of it, secrets included: for the controller's stdin only."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**data, "specs": [dataclasses.asdict(s) for s in self.specs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        a, b = (RunSpec(**s) for s in data["specs"])
        first, second = data["labels"]
        return cls(**{**data, "specs": (a, b), "labels": (first, second)})


class AbDir:
    """One A/B on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def data(self) -> dict[str, Any]:
        """``ab.json``. Raises DstuiError when it is unreadable or of a later format."""
        path = self.path / "ab.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise DstuiError(
                _("{path}: {cause}").format(path=path, cause=getattr(e, "strerror", None) or e)
            ) from e
        if data.get("schema_version") != SCHEMA_VERSION:
            raise DstuiError(
                _("{path}: written in format {version}, this dstui reads {known}").format(
                    path=path, version=data.get("schema_version"), known=SCHEMA_VERSION
                )
            )
        return dict(data)

    @property
    def state(self) -> str:
        """``running finished failed stopped``; ``lost``: the controller is gone without a word."""
        data = self.data
        state = str(data["state"])
        if state != "running":
            return state
        place = Place(str(data.get("host")), data.get("boot_id"), data.get("pid_namespace"))
        c = data.get("controller") or {}
        if place == here() and c and not alive(Process(int(c["pid"]), int(c["start_time"]))):
            return str(self.data["state"]) if self.data["state"] != "running" else "lost"
        rebooted = place.host == here().host and place.boot_id != here().boot_id
        return "lost" if rebooted else state

    def runs(self, kind: int, breakdown: bool = False) -> list[RunDir]:
        """Those of one kind that are there and have ended well enough to be measured, by pair."""
        found = []
        for entry in self.data["runs"]:
            if entry["kind"] == kind and entry["breakdown"] is breakdown:
                run = RunDir(paths.runs_dir() / entry["run"])
                state = store.state(run) if run.manifest_path.exists() else None
                if state == "finished" or (state == "stopped" and pace.read(run).step_time is not None):
                    found.append((entry["pair"], run))
        return [run for _pair, run in sorted(found, key=lambda x: x[0])]

    def living(self) -> list[RunDir]:
        """Its runs that go on."""
        runs = [RunDir(paths.runs_dir() / entry["run"]) for entry in self.data["runs"]]
        return [
            run
            for run in runs
            if run.manifest_path.exists() and store.state(run) in (*LIVE, "lost") and not run.exit
        ]


def home() -> Path:
    return paths.state_home() / "ab"


def _created(path: Path) -> float:
    try:
        return float(AbDir(path).data["created_at"])
    except (DstuiError, KeyError, TypeError):
        return 0.0


def find(reference: str = "last") -> AbDir:
    """By id, unique prefix or ``last``. Raises DstuiError."""
    try:
        there = sorted(
            (p for p in home().iterdir() if (p / "ab.json").is_file()),
            key=_created,
            reverse=True,
        )
    except OSError:
        there = []
    if not there:
        raise DstuiError(_("there is no A/B yet"), _("see `dstui ab --help`"))
    found = there[:1] if reference == "last" else [p for p in there if p.name.startswith(reference)]
    if len(found) != 1:
        raise DstuiError(
            _("'{name}' names {n} A/Bs").format(name=reference, n=len(found))
            if found
            else _("there is no A/B '{name}'").format(name=reference),
            listed(p.name for p in (found or there)[:10]),
        )
    return AbDir(found[0])


def detect(spec: RunSpec) -> Any:
    from dstui.facts.detect import detect as look

    return look(python=spec.python, cwd=spec.cwd)


def begin(plan: Plan, *, environ: Mapping[str, str] | None = None) -> AbDir:
    """Check both kinds, then start the controller. Raises PreflightFailed (nothing was started) or DstuiError."""
    env = dict(os.environ if environ is None else environ)
    specs = [dataclasses.replace(s, cwd=str(commands.working_directory(s))) for s in plan.specs]
    plan = dataclasses.replace(
        plan, specs=(specs[0], specs[1])
    )  # the controller's own directory is another one
    facts = [detect(s) for s in plan.specs]
    plan = _apart(plan, facts, env)
    for number, spec in enumerate(plan.specs):
        problems = preflight(spec, facts[number], environ=env)
        if worst(problems) == "error":
            failed = PreflightFailed(problems)
            failed.message = f"{plan.labels[number]}: {failed.message}"
            raise failed
        if plan.breakdown:
            with_timers(spec)
    place = here()
    try:
        home().mkdir(parents=True, exist_ok=True, mode=0o700)
        ab = AbDir(home() / store.new_id())
        ab.path.mkdir(mode=0o700)
        write_json(
            ab.path / "ab.json",
            {
                "schema_version": SCHEMA_VERSION,
                "id": ab.id,
                "created_at": time.time(),
                "ended_at": None,
                "state": "running",
                "problem": None,
                "labels": list(plan.labels),
                "configs": [s.config_source for s in plan.specs],
                "pythons": [s.python for s in plan.specs],
                "script": plan.specs[0].script,
                "pairs": plan.pairs,
                "order": plan.order,
                "steps": plan.steps,
                "minutes": plan.minutes,
                "total_minutes": plan.total_minutes,
                "breakdown": plan.breakdown,
                "runs": [],
                "host": place.host,
                "boot_id": place.boot_id,
                "pid_namespace": place.pid_namespace,
                "controller": None,
            },
        )
    except OSError as e:
        raise DstuiError(
            _("{path}: {cause}").format(path=home(), cause=e.strerror or e),
            _("set DSTUI_STATE_HOME to a folder that you can write, with free space"),
        ) from e
    _spawn(ab, plan, env)
    return ab


def _apart(plan: Plan, facts: Sequence[Any], environ: Mapping[str, str]) -> Plan:
    """Two releases build ops of the same names from other sources: in one folder each run would build them again."""
    installed = [commands.interpreter_for(s, f) for s, f in zip(plan.specs, facts, strict=True)]
    keys = [f"deepspeed-{i.deepspeed}-torch-{i.torch}" if i else "" for i in installed]
    if keys[0] == keys[1]:
        return plan
    root = extensions_root(environ)
    specs = [
        s
        if "TORCH_EXTENSIONS_DIR" in s.env or not key
        else dataclasses.replace(s, env={**s.env, "TORCH_EXTENSIONS_DIR": str(root / key)})
        for s, key in zip(plan.specs, keys, strict=True)
    ]
    return dataclasses.replace(plan, specs=(specs[0], specs[1]))


def _spawn(ab: AbDir, plan: Plan, env: Mapping[str, str]) -> None:
    """The controller, in its own session and where logging out does not reach it (as ``runs.start`` does)."""
    tool = systemd_run() if kills_user_processes() else None
    scope = [tool, "--user", "--scope", "--quiet", "--collect", f"--unit=dstui-ab-{ab.id}"] if tool else []
    read_end, write_end = os.pipe()
    log = (ab.path / "controller.log").open("ab")
    try:
        child = subprocess.Popen(
            [*scope, sys.executable, "-m", "dstui.runs.ab", str(ab.path), str(write_end)],
            cwd=str(Path(__file__).resolve().parents[2]),
            env=for_supervisor(env, ab.id),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    finally:
        os.close(write_end)
        log.close()
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(plan.to_json()).encode())
        answer = await_answer(read_end)
        child.wait()
    finally:
        os.close(read_end)
    if answer is None:
        raise DstuiError(
            _("the controller of A/B {id} did not start").format(id=ab.id),
            _("its messages: {path}").format(path=ab.path / "controller.log"),
        )


def stop(ab: AbDir) -> list[RunDir]:
    """Ask the controller to end its present run and itself; where it was killed, end the run. Returns the runs that
    were ended here. Raises DstuiError."""
    state = ab.state
    if state == "lost":
        left = ab.living()
        for run in left:
            control.stop(run, timeout=None)
        return left
    if state != "running":
        return []
    try:
        (ab.path / "stop").touch(mode=0o600)
    except OSError as e:
        raise DstuiError(_("{path}: {cause}").format(path=ab.path, cause=e.strerror or e)) from e
    return []


def result(ab: AbDir, price_per_gpu_hour: float | None = None) -> Comparison:
    """The runs that there are, side by side. Raises DstuiError when a side has none."""
    data = ab.data
    sides = [ab.runs(kind) for kind in (0, 1)]
    for kind, runs in enumerate(sides):
        if not runs and ab.state == "lost":
            text = _("A/B {id}: its controller was killed before a run of {label} had ended").format(
                id=ab.id, label=data["labels"][kind]
            )
            left = [run.id for run in ab.living()]
            hint = _("run {id} goes on; end it: {command}") if left else _("begin it anew: dstui ab ...")
            command = f"dstui ab --stop {ab.id}"
            raise DstuiError(text, hint.format(id=listed(left), command=command))
        if not runs:
            raise DstuiError(
                _("A/B {id}: no run of {label} went through").format(id=ab.id, label=data["labels"][kind]),
                data.get("problem") or _("see `dstui runs`"),
            )
    columns = [
        Column(tuple(runs), label, tuple(ab.runs(kind, breakdown=True)))
        for kind, (runs, label) in enumerate(zip(sides, data["labels"], strict=True))
    ]
    return compare(columns, price_per_gpu_hour, paired=len(sides[0]) == len(sides[1]))


def with_timers(spec: RunSpec) -> RunSpec:
    """``spec`` with ``wall_clock_breakdown`` and ``comms_logger`` in its config. Both wait for the device at each
    timer and each collective, so the speed of such a run is not the training's. Raises DstuiError."""
    from dstui.config.document import Document

    spec = commands.adopt_config_from_arguments(spec)
    text = commands.config_text(spec)
    if text is None:
        raise DstuiError(
            _("--breakdown needs a DeepSpeed config to switch its timers on"), _("give one with --config")
        )
    doc = Document.parse(text, path=spec.config_source or "config.json", strict_json=spec.engine == "hf")
    edits = [
        {"op": "replace" if key in doc.data else "add", "path": f"/{key}", "value": value}
        for key, value in (("wall_clock_breakdown", True), ("comms_logger", _COMMS))
    ]
    return dataclasses.replace(spec, config_text=doc.edited(edits).text, steps_per_print=1)


@dataclass(frozen=True)
class Taken:
    """What one run took, seconds: until its first step, and from there until the next run could start."""

    kind: int
    loading: float
    rest: float


def _taken(run: RunDir, kind: int, seconds: float) -> Taken:
    first, began = pace.read(run).first_at, (run.exit or {}).get("started_at")
    loading = min(max(0.0, first - began), seconds) if first and began else seconds
    return Taken(kind, loading, seconds - loading)


# -- the controller ---------------------------------------------------------------------------------------------


class Controller:
    """Starts one run after the other and writes down how it stands."""

    def __init__(self, ab: AbDir, plan: Plan, environ: Mapping[str, str]) -> None:
        self.ab, self.plan, self.environ = ab, plan, environ
        self.stopping = False
        self.problem: str | None = None
        self.failed: set[int] = set()
        self.began = time.monotonic()
        self.seconds: list[Taken] = []
        me = identify(os.getpid())
        assert me is not None
        self._put(controller={"pid": me.pid, "start_time": me.start})

    def run(self) -> None:
        """Until all is done, or there is no use in going on."""
        try:
            in_time = True
            for pair, kinds in self.plan.turns():
                if not (in_time := self._time_for(kinds)):
                    break
                for kind in kinds:
                    in_time = self._left() > 0
                    if in_time and not self.stopping and self._useful(kind):
                        self._one(kind, pair, False)
            if self.plan.breakdown and not self.stopping and not self.failed:
                for kind in (0, 1):
                    if not self._time_for((kind,)):
                        in_time = False
                        break
                    self._one(kind, 0, True)
        except DstuiError as e:
            self._end("failed", e.message + aside(e.hint or ""))
            return
        if self.stopping:
            self._end("stopped", self.problem)
        elif self.failed:
            self._end("failed", self._complaint())
        else:
            text = _("the {n:g} minutes are up: no further run was started")
            self._end("finished", None if in_time else text.format(n=self.plan.total_minutes))

    def _left(self) -> float:
        """Seconds until all has to be over."""
        if self.plan.total_minutes is None:
            return math.inf
        return self.began + 60 * self.plan.total_minutes - time.monotonic()

    def _time_for(self, kinds: Sequence[int]) -> bool:
        """Whether a run of each of ``kinds`` would end in time. The very first one is always tried."""
        if self.plan.total_minutes is None or not self.seconds:
            return True
        loading = min(t.loading for t in self.seconds)  # what the first run built is not built again
        need = 0.0
        for kind in kinds:
            own = [t.rest for t in self.seconds if t.kind == kind]
            need += loading + max(own or [t.rest for t in self.seconds])
        return need <= self._left()

    def _useful(self, kind: int) -> bool:
        """A kind that failed is not tried again; of the other, one run tells what there is to tell."""
        if kind in self.failed:
            return False
        return not self.failed or not self.ab.runs(kind)

    def _one(self, kind: int, pair: int, breakdown: bool) -> None:
        if self._stop_asked():
            return
        started = self._start(self._spec(kind, pair, breakdown))
        if started is None:
            return
        run, busy = started
        entry = {"run": run.id, "kind": kind, "pair": pair, "breakdown": breakdown, "busy": busy}
        self._put(runs=[*self.ab.data["runs"], entry])
        began = time.monotonic()
        deadline = began + min(60 * self.plan.minutes if self.plan.minutes else math.inf, self._left())
        while store.state(run) in LIVE:
            if self._stop_asked() or time.monotonic() > deadline:
                control.stop(run, timeout=None)
                break
            time.sleep(_POLL)
        else:
            if store.state(run) == "stopped":  # by somebody who wants these cards, or his patience, back
                self.stopping = True
                self.problem = _("run {id} was stopped").format(id=run.id)
        if store.state(run) not in ("finished", "stopped") and not breakdown:
            self.failed.add(kind)
        if self.plan.total_minutes is not None:
            self.seconds.append(_taken(run, kind, time.monotonic() - began))

    def _spec(self, kind: int, pair: int, breakdown: bool) -> RunSpec:
        spec = self.plan.specs[kind]
        steps = self.plan.steps
        if breakdown:
            spec = with_timers(spec)
            steps = min(steps or BREAKDOWN_STEPS, BREAKDOWN_STEPS)
        measure = (steps or MEASURED_STEPS) if steps or self.plan.probe else None
        every = (
            1 if measure is None else spec.steps_per_print
        )  # without the probe, the step lines tell the time
        number = "timers" if breakdown else str(pair + 1)
        return dataclasses.replace(
            spec,
            name=f"{self.ab.id} {'AB'[kind]} {number}",
            measure=measure,
            trial=steps is not None,
            steps_per_print=every,
        )

    def _start(self, spec: RunSpec) -> tuple[RunDir, str | None] | None:
        """The run, and what shares its cards if anything does. Waits while the cards of the run before are not free
        yet, and where somebody came to use them meanwhile; at most FREE_SECONDS."""
        patience = time.monotonic() + min(FREE_SECONDS, max(0.0, self._left()))
        while not self._stop_asked():
            facts = detect(spec)
            # ``begin`` has refused cards that were busy then: whoever comes later is waited for, then named
            shared = dataclasses.replace(spec, share_gpus=True)
            found = preflight(shared, facts, environ=self.environ)
            busy = next((p.message for p in found if p.code == "device-busy"), None)
            first = not self.ab.data["runs"]
            hopeless = first or time.monotonic() >= patience
            if worst(found) == "error" and hopeless:
                raise PreflightFailed(found)
            if worst(found) != "error" and (busy is None or hopeless):
                return start(spec, facts, preflight=False, environ=self.environ), busy
            time.sleep(_FREE_POLL)
        return None

    def _stop_asked(self) -> bool:
        self.stopping = self.stopping or (self.ab.path / "stop").exists()
        return self.stopping

    def _complaint(self) -> str:
        last = {entry["kind"]: entry["run"] for entry in self.ab.data["runs"]}
        return clauses(
            _("{label}: run {id} failed; dstui diagnose {id}").format(label=self.plan.labels[k], id=last[k])
            for k in sorted(self.failed)
        )

    def _put(self, **fields: Any) -> None:
        write_json(self.ab.path / "ab.json", {**self.ab.data, **fields})

    def _end(self, state: str, problem: str | None) -> None:
        self._put(state=state, problem=problem, ended_at=time.time())


def main(argv: Sequence[str]) -> int:
    """``python -m dstui.runs.ab DIR ACK_FD``, the plan on stdin."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ab, acknowledge = AbDir(Path(argv[0])), int(argv[1])
    os.set_inheritable(acknowledge, False)
    plan = Plan.from_json(json.load(sys.stdin))
    if os.fork():  # nobody's child, so nobody has to wait for it
        os._exit(0)
    controller = Controller(ab, plan, dict(os.environ))

    def leave(_number: int, _frame: Any) -> None:
        controller.stopping = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    os.write(acknowledge, b'{"ok": true}')
    os.close(acknowledge)
    controller.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
