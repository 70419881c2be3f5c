"""Why a run failed: ``diagnose(run directory | log | text) -> Diagnosis``.

Evidence is gathered first (tracebacks, the launcher's return codes, exit.json, the kernel's count of OOM
kills, samples), then causes compete. What a *first* failing rank says counts; errors of its peers that only
lost the connection do not. The text of a log alone is never ``certain``: that takes the exit record of the
supervisor. No cause is a valid answer, and a healthy log has none.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dstui.errors import DstuiError
from dstui.i18n import _, ngettext
from dstui.runs import messages, prices, repairs, store
from dstui.runs.causes import BY_CODE, CHECKPOINTS
from dstui.runs.events import Event, Failure, parser_of
from dstui.runs.nodes import elsewhere, left_behind
from dstui.runs.ops import extensions_root
from dstui.runs.processes import signal_name
from dstui.runs.repairs import Repair
from dstui.runs.samples import RankUse, read_samples
from dstui.runs.stall import Stall
from dstui.runs.stall import name as stall_name
from dstui.runs.state import read_config
from dstui.runs.store import RunDir
from dstui.runs.tail import Line, LogFile, clean, split
from dstui.units import GiB, gib

Certainty = Literal["certain", "likely", "possible"]
HEAD = 1 << 20
TAIL = 4 << 20
"""A larger log is read at its beginning and its end."""
SURVIVED = 3
"""Steps after a traceback from which on it is no cause: more than the ranks' buffers can hold back."""
BUFFER = 1 << 14
"""Python holds back 8 KiB of a redirected stdout: steps that are printed after a traceback may be older than it."""
COUNT_LINES = 256 << 20
"""Line numbers are counted up to this offset; beyond it the line is null."""


@dataclass(frozen=True)
class Evidence:
    """``line``: from 1, None when it was not counted or the evidence is no line of a file."""

    file: str
    line: int | None
    text: str


@dataclass(frozen=True)
class Named:
    """A cause as it applies to this run."""

    code: str
    certainty: Certainty
    detail: str = ""
    """One translated sentence with the run's own figures."""

    @property
    def name(self) -> str:
        return BY_CODE[self.code].name

    @property
    def checkpoint(self) -> int | None:
        return self.place or BY_CODE[self.code].checkpoint

    place: int | None = None
    """Overrides the checkpoint of the cause (a refused key belongs to its own)."""


@dataclass(frozen=True)
class Diagnosis:
    outcome: str
    cause: Named | None
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Repair, ...] = ()
    others: tuple[Named, ...] = ()

    def to_json(self) -> dict[str, Any]:
        def named(n: Named) -> dict[str, Any]:
            return {
                "code": n.code,
                "name": n.name,
                "checkpoint": n.checkpoint,
                "certainty": n.certainty,
                "message": BY_CODE[n.code].heading,
                "detail": n.detail,
            }

        return {
            "schema_version": 1,
            "outcome": self.outcome,
            "cause": None if self.cause is None else named(self.cause),
            "evidence": [{"file": e.file, "line": e.line, "text": e.text} for e in self.evidence],
            "fixes": [
                {"title": f.title, "edits": [dict(e) for e in f.edits], "price": f.price} for f in self.fixes
            ],
            "others": [named(n) for n in self.others],
        }


@dataclass
class _Case:
    """All that is known about one run."""

    outcome: str
    file: str
    events: list[Event]
    tail: list[Line] = field(default_factory=list)
    config: Mapping[str, Any] | None = None
    exit: Mapping[str, Any] | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    number: Any = None
    steps: list[int] | None = None
    """Offsets of the lines that report a step."""

    @property
    def failures(self) -> list[Failure]:
        """Tracebacks, without those after which training went on.

        What nobody catches ends its process: where training went on after several of that form, they are data (samples
        that are printed), and so are the last ones, unless a launcher reports an end.
        """
        found = [e.values["failure"] for e in self.events if e.kind == "error"]
        if len(found) > SURVIVED and not self.of("rank_exit"):
            fatal = [not _caught(f) and f.rank is None for f in found]
            if sum(self.survived(f.offset) for f, dies in zip(found, fatal, strict=True) if dies) >= SURVIVED:
                found = [f for f, dies in zip(found, fatal, strict=True) if not dies]
        if not self.of("rank_exit") and self.outcome != "failed":
            # their process went on, to a good end for all we know
            found = [f for f in found if not f.aside and not _by_the_way(f)]
        return [
            f for f in found if not (self.survived(f.offset) and (_caught(f) or self._far_behind(f.offset)))
        ]

    def _far_behind(self, offset: int) -> bool:
        """Whether more was written after this place than a process that ends can still have had in its buffer."""
        return bool(self.steps) and self.steps[-1] - offset > BUFFER  # type: ignore[index]

    def survived(self, offset: int) -> bool:
        """Whether training went on after what the log says here: it was caught, or no failure at all."""
        if self.steps is None:
            self.steps = sorted(e.offset for e in self.events if e.kind == "step")
        return len(self.steps) - bisect_right(self.steps, offset) >= SURVIVED

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.kind == kind]

    def line(self, offset: int, text: str) -> Evidence:
        return Evidence(self.file, self.number(offset) if self.number else None, text.strip()[:600])

    @property
    def rank_code(self) -> int | None:
        """Return code of the rank that ended first, negative for a signal."""
        if self.exit is not None:
            code = self.exit.get("rank_code")
            return code if isinstance(code, int) else None
        codes = [e.values["code"] for e in self.of("rank_exit")]
        return next((c for c in codes if c), None)

    @property
    def stepped(self) -> bool:
        return any(
            e.kind == "step" and (e.values.get("loss") is not None or e.values.get("step", 0) > 0)
            for e in self.events
        )


@dataclass(frozen=True)
class _Finding:
    cause: Named
    evidence: tuple[Evidence, ...]
    fixes: tuple[Repair, ...] = ()
    weight: int = 0
    """The heaviest wins."""


# -- gathering ---------------------------------------------------------------------------------------------------


def diagnose(
    source: RunDir | Path | str, config: Mapping[str, Any] | None = None, *, text: bool = False
) -> Diagnosis:
    """``source``: a run, its directory, a log file, or (``text``) the log itself. ``config``: the DeepSpeed
    config for the edits of fixes; a run's own copy is found by itself. Raises DstuiError for an unreadable file."""
    if isinstance(source, RunDir):
        return diagnose_run(source, config)
    if text:
        data = str(source).encode()
        lines = split(data, 0, final=True)[0]
        return _judge(_log_case("-", lines, [], config, lambda offset: data.count(b"\n", 0, offset) + 1))
    path = Path(source)
    if path.is_dir():
        if not (path / "manifest.json").is_file():
            raise DstuiError(
                _("{path}: not a run directory").format(path=path), _("give a run, a log file or -")
            )
        return diagnose_run(RunDir(path), config)
    head, tail = _read(path)
    file = LogFile(path)
    return _judge(
        _log_case(str(path), head, tail, config, lambda o: file.number(o) if o <= COUNT_LINES else None)
    )


def diagnose_run(run: RunDir, config: Mapping[str, Any] | None = None) -> Diagnosis:
    """The run's logs, exit record, samples and config together."""
    state = store.state(run)
    if state in ("running", "starting"):
        return _living(run, state, config)
    return _judge(_run_case(run, state, config))


def _run_case(run: RunDir, state: str, config: Mapping[str, Any] | None) -> _Case:
    try:
        head, tail = _read(run.out_log)
    except DstuiError:
        head, tail = [], []
    file = LogFile(run.out_log)
    manifest = run.manifest
    events, more = _events(head, tail, manifest)
    return _Case(
        outcome=state,
        file=str(run.out_log),
        events=events,
        tail=more,
        config=config if config is not None else read_config(run.config_path),
        exit=run.exit,
        manifest=manifest,
        number=lambda o: file.number(o) if o <= COUNT_LINES else None,
    )


def _living(run: RunDir, state: str, config: Mapping[str, Any] | None) -> Diagnosis:
    """A run that goes on: what its log says of a rank that has ended or of a collective that timed out, else the
    stall that it is in, if it is in one. Other complaints are no cause yet."""
    from dstui.runs.view import RunView

    view = RunView(run)
    try:
        shot = view.poll()
    finally:
        view.close()
    stall = shot.stall
    state = "running" if stall is None else "stalled"
    case = _run_case(run, state, config)
    if stall is None or stall.kind != "op-lock":  # nothing else ends the wait for a dead lock
        said = _doomed(case, stall)
        if said is not None:
            shown = (*said.evidence, *_seen(stall, view.newest_ranks()))
            return Diagnosis(state, said.cause, shown[:8], _legal(case, said.fixes))
    if stall is None:
        return Diagnosis(shot.state, None)
    evidence = _seen(stall, view.newest_ranks())
    if stall.path:
        evidence.insert(0, Evidence(stall.path, None, "the lock" if stall.kind == "op-lock" else "open"))
    fixes: tuple[Repair, ...] = ()
    if stall.kind == "op-lock":
        fixes = (Repair(_("delete it: {command}").format(command=f"rm {stall.path}")),)
    elif stall.kind == "offload":
        fixes = prices.priced(_legal(case, repairs.offload_return(case.config)), case.config, case.manifest)
    return Diagnosis("stalled", Named(stall.code, "likely", stall.text), tuple(evidence[:8]), fixes)


def _seen(stall: Stall | None, ranks: Iterable[RankUse]) -> list[Evidence]:
    """What the samples of a run that stands still show."""
    if stall is None:
        return []
    quiet = max(0.0, time.time() - stall.since)
    rows = [f"no progress for {quiet:.0f} s; {stall.kind}"]
    rows += [
        f"rank {r.rank} (pid {r.pid}): {r.cpu:.2f} cores, {r.wait or '?'}" for r in ranks if r.cpu is not None
    ]
    return [Evidence("samples/1s.jsonl", None, text) for text in rows]


def _doomed(case: _Case, stall: Stall | None = None) -> _Finding | None:
    """What ends a run although it has not ended yet, or was stopped before it could: a collective that timed out
    (torch's process stays for a minute to write its records), or an exception that nobody caught in one rank
    while the others wait for it. Only what the log says before anybody asked the run to stop."""
    asked = [e.offset for e in case.events if e.kind in ("killing", "signal")]
    asked += [x.offset for x in case.tail if _ASKED.search(x.text)]
    events = [e for e in case.events if not asked or e.offset < min(asked)]
    restarts = [x.offset for x in case.tail if _RESTARTED.search(x.text)]
    events = [e for e in events if not restarts or e.offset > restarts[-1]]
    sure = [e for e in events if e.kind != "error" or not _caught(e.values["failure"])]
    before = replace(case, events=sure, steps=None)
    found = list(_collectives(before, stall))
    if any(f.cause.code == "DR501" for f in found):
        found = [f for f in found if f.cause.code == "DR501"]
    else:
        found = []
    if asked or case.outcome != "stopped":
        ended = [f for f in _failures(before) if _SECONDARY.search(f.text) is None]
        if ended and (case.outcome != "running" or any(f.rank is not None for f in ended)):
            found += _exceptions(before)
    return max(found, key=lambda f: f.weight, default=None)


_ASKED = re.compile(r"Received \d+ death signal|Sending process \d+ closing signal|got signal: (?:2|15)\b")
"""How torchrun says that it was asked to end."""


def _log_case(
    name: str, head: list[Line], tail: list[Line], config: Mapping[str, Any] | None, number: Any
) -> _Case:
    def case_of(head: list[Line], tail: list[Line]) -> _Case:
        events, more = _events(_opened(head), tail, {})
        case = _Case("unknown", name, events, more, config, number=number)
        case.outcome = _outcome(case)
        return case

    last = _last_attempt(head, tail)
    if last is not None:
        case = case_of(last, [])
        if case.outcome == "finished" or len(case.of("step")) >= SURVIVED or _judge(case).cause is not None:
            return case
    return case_of(head, tail)


_LAUNCHED = re.compile(r"\[runner\.py:\d+:main\] cmd = ")
_RESTARTED = re.compile(r"will restart worker group")
_BEGUN = re.compile(
    r"\[runner\.py:\d+:main\] cmd = |torch/distributed/run\.py:\d+\] Setting OMP_NUM_THREADS|"
    r"^WARNING:__main__:\s*$|WARNING:torch\.distributed\.run:"
)
_RAN = re.compile(r"sigkill_handler\]|exits successfully|ChildFailedError|'loss': |step=\d+, skipped=")
"""What a run that did something leaves behind."""


def _last_attempt(head: list[Line], tail: list[Line]) -> list[Line] | None:
    """The lines of the last run where a file holds several, one after the other: a script starts one after another,
    a log is appended to, torchrun starts its workers again. None where there is only one."""
    starts = [
        (part, i)
        for part in (head, tail)
        for i, x in enumerate(part)
        if _LAUNCHED.search(x.text) or _RESTARTED.search(x.text)
    ]
    if len(starts) < 2 and not any(_RESTARTED.search(part[i].text) for part, i in starts):
        # the beginning of the first is missing, or torchrun started them
        again = (
            (part, i)
            for part in (tail, head)
            for i in reversed(range(len(part)))
            if _BEGUN.search(part[i].text)
        )
        starts = [at for at in itertools.islice(again, 1) if any(_RAN.search(x.text) for x in at[0][: at[1]])]
    if not starts:
        return None
    part, i = starts[-1]
    return part[i:] if part is tail or not tail else part[i:] + tail


_INSIDE = re.compile(r'^(.*?)\s+File "[^"]+", line \d+, in \S')
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)")


_BOX = re.compile(r"^(.*?)[│|] \S.*?:\d+ in\b")
_BOX_END = re.compile(r"[╰└+][─-]+[╯┘+]")


def _opened(lines: list[Line]) -> list[Line]:
    """A text as it was before somebody cut it inside tracebacks, or put it into a block that is set in."""
    depth = min((len(x.text) - len(x.text.lstrip(" ")) for x in lines if x.text.strip()), default=0)
    if depth:
        lines = [x._replace(text=x.text[depth:]) for x in lines]
    heads: dict[int, str] = {}
    known: set[str] = set()
    for i, line in enumerate(lines[:1000]):
        if "Traceback (most recent call last)" in line.text:
            known.add(line.text.partition("Traceback (most")[0].strip())
            if not known - {""}:
                break  # without tags the first of them opens all that follows
            continue
        m = _INSIDE.match(line.text)
        box = None if m or known else _BOX.match(line.text)
        tag = str((m or box).group(1)) if m or box else None  # type: ignore[union-attr]
        if tag is None or any(k == tag.strip() or (tag.strip() and k.startswith(tag.strip())) for k in known):
            continue  # a logger may put more before the first line only
        known.add(tag.strip())
        rest = [x.text[len(tag) :] for x in lines[i : i + 400] if x.text.startswith(tag)]
        rest = list(itertools.takewhile(lambda x: "Traceback (most recent call last)" not in x, rest))
        if box is not None:
            end = next((n for n, x in enumerate(rest) if _BOX_END.match(x)), len(rest))
            if any(_RAISED.match(x.strip()) for x in rest[end + 1 : end + 2]):
                heads[i] = f"{tag}╭─ Traceback (most recent call last) ─╮"
        elif any(len(x) - len(x.lstrip()) < 2 and _RAISED.match(x.strip()) for x in rest):
            heads[i] = f"{tag}{' ' if tag else ''}Traceback (most recent call last):"
        if not tag.strip():
            break
    return [y for i, x in enumerate(lines) for y in ((x._replace(text=heads[i]), x) if i in heads else (x,))]


def _read(path: Path) -> tuple[list[Line], list[Line]]:
    """Beginning and end of a log; the end is empty when the beginning is all of it."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116
        with path.open("rb") as f:
            if size <= HEAD + TAIL:
                return split(f.read(), 0, final=True)[0], []
            head = split(f.read(HEAD), 0)[0]
    except OSError as e:
        raise DstuiError(_("{path}: {cause}").format(path=path, cause=e.strerror or e)) from e
    found: list[Line] = []
    for at, data in LogFile(path).blocks(size - TAIL, size):
        found += split(data, at, final=True)[0]
    return head, found[1:]


def _events(
    head: list[Line], tail: list[Line], manifest: Mapping[str, Any]
) -> tuple[list[Event], list[Line]]:
    parser = parser_of(manifest)
    events = parser.feed_all(head) + parser.finish()
    if tail:
        parser = parser_of(manifest)
        events += parser.feed_all(tail) + parser.finish()
    return events, tail or head


def _outcome(case: _Case) -> str:
    """The fate of a run of which only the log is known."""
    if case.of("rank_exit"):
        return "failed"
    last = case.tail[-30:]
    m = next(
        (
            m
            for line in reversed(last)
            if (m := re.match(r"^exit(?:ed with)?(?: code)?:? (-?\d+)$", line.text.strip()))
        ),
        None,
    )
    if m:
        return "finished" if int(m.group(1)) == 0 else "failed"
    ends = [e.offset for e in (*case.of("rank_ok"), *case.of("summary"))]
    failures = [f for f in case.failures if f.short not in ("KeyboardInterrupt",)]
    if ends and not any(f.offset > ends[-1] for f in failures):
        return "finished"
    if failures or _ooms(case):
        return "failed"
    return "unknown"


# -- judging -----------------------------------------------------------------------------------------------------


def _judge(case: _Case) -> Diagnosis:
    found: list[_Finding] = []
    for look in (
        _stopped,
        _killed,
        _exceptions,
        _native,
        _out_of_step,
        _collectives,
        _builds,
        _numerics,
        _lost_node,
        _launcher,
        _unparsed,
        _plain_exit,
        _oom_lines,
        _spoken,
        _vanished,
        _ray,
        _slow,
    ):
        found += look(case)
    found.sort(key=lambda f: -f.weight)
    if not found:
        return Diagnosis(case.outcome, None)
    best = found[0]
    others: list[Named] = []
    for f in found[1:]:
        if f.cause.code != best.cause.code and all(o.code != f.cause.code for o in others):
            others.append(f.cause)
    evidence = best.evidence
    node = (case.exit or {}).get("first_node")
    if node and case.outcome == "failed" and not any(e.file == "exit.json" for e in evidence):
        evidence += (Evidence("exit.json", None, str((case.exit or {}).get("reason"))),)
    fixes = _legal(case, best.fixes)
    if best.cause.code in _MEMORY:
        fixes = prices.priced(fixes, case.config, case.manifest)
    return Diagnosis(case.outcome, best.cause, evidence, fixes, tuple(others[:4]))


def _legal(case: _Case, fixes: Iterable[Repair]) -> tuple[Repair, ...]:
    """Those that leave a config which this run's DeepSpeed takes."""
    engine = str(case.manifest.get("engine") or "plain")
    return prices.legal(tuple(fixes), case.config, _release(case), _world(case), engine)


_MEMORY = ("DR101", "DR102", "DR103", "DR108", "DR401", "DR404")
"""Causes whose repairs the estimator can price."""


_ABORTED_AT_EXIT = "terminate called without an active exception"
"""What libstdc++ prints when an interpreter that ends leaves a thread of torch behind (then SIGABRT)."""


def _ended_by_exception(case: _Case) -> bool:
    """The record tells of a rank that ended as Python does after an exception."""
    code = case.rank_code
    if code is None or case.outcome != "failed":
        return False
    aborted = code == -6 and any(line.text.strip() == _ABORTED_AT_EXIT for line in case.tail)
    return code > 0 or aborted


def _recorded(case: _Case, *, agrees: bool) -> Certainty:
    """``certain`` only where the supervisor's record says the same as the log."""
    return "certain" if case.exit is not None and agrees else "likely"


def _stopped(case: _Case) -> Iterator[_Finding]:
    if case.exit is not None and case.exit.get("outcome") == "stopped":
        by = case.exit.get("stopped_by") or {}
        who = by.get("user") or by.get("signal") or "?"
        detail = _("stopped by {who}").format(who=who)
        yield _Finding(
            Named("DR720", "certain", detail),
            (Evidence("exit.json", None, f"stopped_by: {json.dumps(by)}"),),
            weight=100,
        )
        doomed = _doomed(case)
        if doomed is not None:
            yield replace(doomed, weight=101)
        return
    asked = [f for f in case.failures if f.short in ("KeyboardInterrupt", "SignalException")]
    if asked and len(asked) == len(
        [f for f in case.failures if f.short not in ("SystemExit", "ChildFailedError")]
    ):
        yield _Finding(
            Named("DR720", "likely", _first_line(asked[0].text)),
            (case.line(asked[0].offset, asked[0].text),),
            weight=60,
        )
        return
    if case.exit is not None and case.exit.get("ended_for_node"):
        return  # the signals were the supervisor's: the ranks of another node had failed
    for e in case.of("signal"):
        yield _Finding(Named("DR720", "likely"), (case.line(e.offset, e.text),), weight=60)
        return


def _killed(case: _Case) -> Iterator[_Finding]:
    code = case.rank_code
    exits = [e for e in case.of("rank_exit") if e.values["code"] in (-9, 137)]
    container = case.exit is not None and case.exit.get("code") in (137,)
    log_137 = any(
        re.search(
            r"(?:^|\s)exit(?:ed)?(?: with)?(?: exit)?(?: code| status)?:? (?:247|137|-9)$", line.text.strip()
        )
        for line in case.tail[-10:]
    )
    if code == -15 and case.outcome == "failed":
        shown = tuple(case.line(e.offset, e.text) for e in case.of("rank_exit")[:1])
        yield _Finding(
            Named("DR721", _recorded(case, agrees=True), _("a rank got SIGTERM")), shown, weight=55
        )
        return
    if code != -9 and not exits and not container and not log_137:
        return
    if code is not None and code > 0 and _said(case):
        return  # an exception came first; the kills are the launcher's
    evidence = [case.line(e.offset, e.text) for e in exits[:2]]
    kills = _kills(case)
    own, system = kills.get("cgroup"), kills.get("system")
    if case.exit is not None:
        who = _killed_rank(case.exit)
        evidence.append(
            Evidence(
                "exit.json",
                None,
                f"{who} ended by SIGKILL, oom_kills: {json.dumps(kills)}",
            )
        )
    evidence += _memory_evidence(case)
    evidence += [case.line(e.offset, e.text) for e in case.of("pinned")[-1:]]
    if own:
        certainty: Certainty = "certain"
        detail = ngettext(
            "the kernel killed {n} process of this run's memory group",
            "the kernel killed {n} processes of this run's memory group",
            own,
        ).format(n=own)
    elif system:
        certainty = "likely"
        detail = _("the kernel killed a process for lack of memory while this run went on")
    elif _no_kills(case):
        node = _remote_node(case)
        yield _Finding(
            Named(
                "DR721",
                "likely",
                _("SIGKILL, but the kernel of node {host} counted no out-of-memory kill").format(host=node)
                if node
                else _("SIGKILL, but the kernel counted no out-of-memory kill"),
            ),
            tuple(evidence),
            weight=70,
        )
        return
    elif (room := _roomy(case)) is not None:
        yield _Finding(
            Named(
                "DR721",
                "likely",
                _("SIGKILL, but the memory was never more than {share} % full in the last minute").format(
                    share=math.ceil(100 * room)
                ),
            ),
            tuple(evidence),
            weight=70,
        )
        yield _Finding(Named("DR401", "possible"), tuple(evidence), weight=10)
        return
    else:
        certainty = "likely"
        detail = _("SIGKILL without a message; the kernel's count of out-of-memory kills is not known")
    yield _Finding(
        Named("DR401", certainty, detail), tuple(evidence), repairs.host_memory(case.config), weight=80
    )
    if certainty != "certain":
        yield _Finding(Named("DR721", "possible"), tuple(evidence), weight=10)


def _no_kills(case: _Case) -> bool:
    """Whether the supervisor looked at the kernel's counts, and they had not moved."""
    kills = _kills(case)
    return kills.get("system") == 0 and kills.get("cgroup") in (0, *((None,) if _remote_node(case) else ()))


def _remote_node(case: _Case) -> str | None:
    """The node whose ranks failed first, where it is not the one of the supervisor: what was sampled is another's."""
    first = (case.exit or {}).get("first_node")
    return str(first) if first in elsewhere(case.manifest)[1] else None


def _kills(case: _Case) -> Mapping[str, Any]:
    """Processes that the kernel killed for memory meanwhile, on the node that matters."""
    data = case.exit or {}
    node = _remote_node(case)
    if node is None:
        return data.get("oom_kills") or {}
    records = [r for r in data.get("nodes") or () if isinstance(r, dict) and r.get("host") == node]
    return {"system": next((r.get("oom_kills") for r in records), None)}


def _killed_rank(record: Mapping[str, Any]) -> str:
    first = record.get("first_rank")
    if first is None:  # a supervisor that took the run over does not know who was first
        first = next((r.get("rank") for r in record.get("ranks") or () if r.get("code") == -9), None)
    where = f" on node {record['first_node']}" if record.get("first_node") else ""
    return ("a process" if first is None else f"rank {first}") + where


ROOMY = 0.7
"""Share of host RAM and of the cgroup's limit below which a second before the end nobody was near an out-of-memory kill."""


def _roomy(case: _Case) -> float | None:
    """The fullest that host or cgroup were through the last minute, where that is clearly not full; else None.

    Only with samples up to the end: an allocation that fills the memory within a second leaves no trace in them.
    """
    if not case.manifest or case.exit is None or _remote_node(case):
        return None
    ends = [r["ended_at"] for r in case.exit.get("ranks") or () if r.get("ended_at")]
    samples = read_samples(Path(case.file).parent / "samples", 60)
    if not ends or not samples or min(ends) - samples[-1].t > 3.0 or len(samples) < 10:
        return None
    shares = [s.host.used / s.host.capacity for s in samples if s.host.used is not None and s.host.capacity]
    if len(shares) < len(samples):
        return None
    fullest = max(shares)
    return fullest if fullest < ROOMY else None


def _memory_evidence(case: _Case) -> list[Evidence]:
    """Host memory at the end, from the samples of the run."""
    if not case.manifest or _remote_node(case):
        return []
    samples = read_samples(Path(case.file).parent / "samples", 60)
    best = max((s for s in samples if s.host.used is not None), key=lambda s: s.host.used or 0, default=None)
    if best is None or not best.host.capacity:
        return []
    text = f"host memory {gib(best.host.used)} of {gib(best.host.capacity)} in the last minute"
    return [Evidence("samples/1s.jsonl", None, text)]


_SECONDARY = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote worker crashing|Socket Timeout|ncclRemoteError|"
    r"wait timeout|NCCL communicator was aborted|failed to recv|recvValue failed|DistStoreError|"
    r"store.*(?:timed? ?out|timeout)|connection to the C10d store has failed|Timed out waiting \d+ms for (?:recv|send)|unbound_buffer",
    re.IGNORECASE,
)
"""What a rank says when a peer is gone: the effect of a failure elsewhere."""


def _caught(f: Failure) -> bool:
    """Whether somebody printed this traceback and went on: it begins where it was caught, not at the main module.
    torch's prefix of the rank is put only before what nobody caught."""
    if f.aside:
        return True
    if f.rank is not None and "rank" in f.source:
        return False
    return not f.frames or f.frames[0].function not in ("<module>", "_run_module_as_main")


_SERVICES = re.compile(r"/(?:wandb|swanlab|mlflow|comet_ml|clearml|trackio|aim|tensorboard|neptune)/")


def _by_the_way(f: Failure) -> bool:
    """Printed by a service that only watches the training, in a thread of its own."""
    return bool(f.frames) and _caught(f) and all(_SERVICES.search(x.file) for x in f.frames)


_WRAPPERS = ("ChildFailedError", "SystemExit", "KeyboardInterrupt", "SignalException", "CalledProcessError",
             "ProcessRaisedException", "ProcessExitedException", "ActorDiedError", "RayActorError", "WorkerCrashedError")  # fmt: skip
"""What launchers raise because a rank failed."""
_PASSED_ON = re.compile(r"exited with non-zero (?:exit )?(?:status|code)|returned non-zero exit status")
"""What a script raises because a program that it started failed: the words of that program are elsewhere."""


def _wraps(f: Failure) -> bool:
    return f.short in _WRAPPERS or (f.short == "RuntimeError" and _PASSED_ON.search(f.message) is not None)


def _failures(case: _Case) -> list[Failure]:
    """Tracebacks that could be the cause, the first failing rank's in the order in which they were raised.

    Of a chain (``During handling of the above exception...``) each is its own. A peer's lost connection counts
    only when nobody says more. Those that somebody caught and printed come last.
    """
    failures = [f for f in case.failures if not _wraps(f)]
    inner = [f for f in failures if not re.match(r"Caught \w+ in DataLoader worker", f.message)]
    failures = inner or failures
    real = [f for f in failures if not _SECONDARY.search(f.text)]
    first_rank = case.exit.get("first_rank") if case.exit else None
    if first_rank is None:  # torchrun's summary names the first to fail as its last
        first_rank = next((e.values["rank"] for e in reversed(case.of("failed_rank"))), None)
    own = [f for f in real if f.rank is not None and f.rank == first_rank]
    pool = sorted(own or real or failures, key=lambda f: f.offset)
    mine = [f for f in pool if (f.rank, f.source) == (pool[0].rank, pool[0].source)]
    fatal = _uncaught(mine)
    return [f for f, ends in zip(mine, fatal, strict=True) if ends] + [
        f for f, ends in zip(mine, fatal, strict=True) if not ends
    ]


def _uncaught(failures: Sequence[Failure]) -> list[bool]:
    """For each whether it ended its process: nobody caught it, or what was raised in its wake."""
    found: list[bool] = []
    for f in reversed(failures):
        found.append(not _caught(f) or (f.chained and bool(found) and found[-1]))
    return found[::-1]


def _said(case: _Case) -> bool:
    """Whether some rank told more than that its peers are gone."""
    return any(not _SECONDARY.search(f.text) for f in _failures(case))


def _only_echoes(case: _Case) -> bool:
    """Whether every traceback is a peer that lost its connection, and none is of the rank that ended first."""
    failures = _failures(case)
    if _said(case):
        return False
    first = case.exit.get("first_rank") if case.exit else None
    if first is None:
        first = next((e.values["rank"] for e in case.of("rank_exit") if e.values["code"]), None)
    return first is not None and all(f.rank != first for f in failures)


def _exceptions(case: _Case) -> Iterator[_Finding]:
    failures = _failures(case)
    if not failures or case.outcome == "finished":
        return
    certainty = _recorded(case, agrees=_ended_by_exception(case))
    judged = [(f, *_name(case, f, certainty)) for f in failures[:8]]
    # an exception that only follows another tells more than "the script raised" if it is special
    failure, named, fixes = judged[0]
    if named.code == "DR710":
        failure, named, fixes = next((j for j in judged if j[1].code not in _VAGUE), judged[0])
    if named.code in ("DR705", "DR706"):  # the last of such a chain names the file, the first only a decoder
        failure, named, fixes = [j for j in judged if j[1].code in ("DR705", "DR706")][-1]
    ended = next(ends for f, ends in zip(failures, _uncaught(failures), strict=True) if f is failure)
    if not ended and named.certainty == "certain":
        named = replace(
            named, certainty="likely"
        )  # it was printed, and the process may have ended for another reason
    evidence = [
        case.line(failure.offset, failure.text if failure.details else f"{failure.type}: {failure.message}")
    ]
    frame = _user_frame(failure)
    if frame:
        evidence.append(Evidence(frame[0], frame[1], f"in {frame[2]}"))
    echo = named.code == "DR502" or (named.code == "DR504" and _SECONDARY.search(failure.text))
    weight = 40 if echo else 75
    yield _Finding(named, tuple(evidence), tuple(fixes), weight=weight)


_VAGUE = ("DR710", "DR502", "DR504", "DR803", "DR904")
"""Causes that an exception in the wake of another does not prove."""


def _user_frame(failure: Failure) -> tuple[str, int, str] | None:
    """The innermost frame of the user's own code."""
    for f in reversed(failure.frames):
        if (
            "site-packages" not in f.file
            and "dist-packages" not in f.file
            and not f.file.startswith("<")
            and "/lib/python" not in f.file
            and "/deepspeed/" not in f.file
            and not f.file.endswith("/probe/sitecustomize.py")  # ours (dstui.runs.probe)
        ):
            return f.file, f.line, f.function
    return None


_OOM = re.compile(
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDA out of memory|HIP out of memory|NPU out of memory|"
    r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA [cm]alloc"
)
"""The last two are NCCL's words for a card without room for its buffers."""
_TRIED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB|KiB|bytes)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB|; ([\d.]+) GiB total capacity")
_MINE = re.compile(r"this process has ([\d.]+) (GiB|MiB) memory in use")
_ALLOWED = re.compile(r"([\d.]+) (GiB|MiB) allowed;")
"""``torch.cuda.set_per_process_memory_fraction``."""
_TAKEN = re.compile(r"[Oo]f the allocated memory ([\d.]+) (GiB|MiB) is allocated by PyTorch")
_FREE = re.compile(r"of which ([\d.]+) (GiB|MiB|bytes) is free")
_CACHED = re.compile(r"and ([\d.]+) (GiB|MiB) is reserved by PyTorch but unallocated")
_DTYPES = re.compile(
    r"(?:to )?have (?:the )?same dtype, but|expected scalar type \w+ but found|expect parameter to have scalar type"
    r"|Input type \(\S+\) and (?:bias|weight) type \(\S+\) should be the same|does not match weight dtype"
)
"""What torch 2.13 says to mixed types: linear, matmul, convolution, norm, RNN and attention layers, each executed."""
_UNIT = {"GiB": GiB, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    m = pattern.search(text)
    if not m:
        return None
    groups = [g for g in m.groups() if g]
    unit = _UNIT[groups[1]] if len(groups) > 1 else GiB
    return int(float(groups[0]) * unit)


_SAVING = (
    "save_checkpoint",
    "save_16bit_model",
    "_zero3_consolidated_16bit_state_dict",
    "save_model",
    "_save_checkpoint",
)
"""DeepSpeed's and the Trainer's ways into saving."""


def oom_phase(failure: Failure) -> str:
    """``init forward backward step save other`` by the outermost telling frame of a traceback."""
    for f in failure.frames:
        where, name = f.file, f.function
        if name in _SAVING:
            return "save"
        if "/deepspeed/" in where:
            if name == "initialize" or (name == "__init__" and ("engine.py" in where or "/zero/" in where)):
                return "init"
            if name == "step" or name == "_take_model_step":
                return "step"
            if name == "backward":
                return "backward"
            if name == "forward":
                return "forward"
        if "torch/nn/modules/module.py" in where and name in ("_call_impl", "_wrapped_call_impl"):
            return "forward"
        if name in ("from_pretrained", "load_checkpoint", "_load_pretrained_model", "load_state_dict"):
            return "init"
        if "torch/autograd" in where and name in ("backward", "_engine_run_backward"):
            return "backward"
        if "torch/optim" in where and name == "step":
            return "step"
    return "other"


def _name(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    """Cause and repairs for one exception. Order: from the special to the general."""
    text = f.text
    files = " ".join(x.file for x in f.frames)
    pinning = any(x.function == "pin_memory" for x in f.frames) or "pin_memory" in text
    if re.search(r"^(?:\S+: )?CUDA error: out of memory", text, re.I) or (
        pinning and re.search(r"CUDA error|out of memory", text)
    ):
        return _driver_oom(case, f, certainty)
    if f.short == "OutOfMemoryError" or _OOM.search(text):
        return _gpu_oom(case, f, certainty)
    if "invalid literal for int() with base 10" in text and "op_builder" in files:
        return Named("DR703", certainty, f.message), repairs.of_cause("DR703", case.config, text)
    shared = "shm" in text.lower() or "multiprocessing/synchronize.py" in files
    if shared and re.search(r"No space left on device|Disk quota exceeded", text):
        # multiprocessing's semaphores and queues live in /dev/shm, and the message does not say so
        return Named("DR403", certainty, f.message), []
    if re.search(r"(?:No such file|Permission denied)[^']*'[^']*/bin/nvcc", text):
        return Named("DR702", certainty, f.message), repairs.of_cause("DR702", case.config, text)
    if "swap_tensor" in files and (f.short == "TypeError" or "[Errno" in text):
        return Named("DR203", certainty, _first_line(text)), repairs.of_cause("DR203", case.config, text)
    said = messages.of_exception(text)
    if said is not None and said.code == "DR401":
        said = None  # a launcher's words
    if f.short == "KeyError" and re.search(
        r"norm_for_param_grads|complete_grad_norm", " ".join(x.function for x in f.frames)
    ):
        return Named("DR204", certainty, _at(f)), []
    if f.short == "IndexError" and "partitioned_param_coordinator" in files:
        return Named("DR107", certainty, _at(f)), []
    if f.short in ("BrokenPipeError", "ConnectionResetError", "EOFError") and _LOADER.search(files):
        return Named("DR802", certainty, _at(f)), []
    if (said is None and _is_build(f, files, text)) or (said is not None and said.code == "DR701"):
        return _build(case, f, certainty)
    if f.short in ("ModuleNotFoundError", "ImportError") and (said is None or said.code != "DR714"):
        m = re.search(r"No module named '([\w.]+)'", text)
        fixes = []
        if m:
            python = case.manifest.get("python") or "python"
            fixes.append(
                Repair(
                    _("install it: {command}").format(
                        command=f"{python} -m pip install {m.group(1).partition('.')[0]}"
                    )
                )
            )
        return Named("DR704", certainty, f.message), fixes
    if said is None and _unlike(f):
        return Named("DR714", certainty, _at(f)), []
    if said is not None and said.code == "DR508" and _on_cpu(case):
        detail = _first_line(text) + "; " + _("DeepSpeed found no card and works on the CPU")
        return Named("DR707", certainty, detail), []
    if said is not None and said.code == "DR718":
        return Named("DR718", certainty, f.message), repairs.foreign_op(text, _extensions(case))
    if _DTYPES.search(text):
        return Named("DR603", certainty, _at(f)), repairs.number_types(case.config)
    if _MISMATCH.search(text):
        return _mismatch(case, f, certainty)
    if said is not None and said.code not in ("DR501", "DR502", "DR803", "DR904"):
        weaker: Certainty = (
            "likely" if certainty == "certain" and said.code == "DR901" and "Errno" not in text else certainty
        )
        return Named(said.code, weaker, _telling(said, f)), repairs.of_cause(said.code, case.config, text)
    if re.search(r"Type \w+ is not supported on your device|setup doesn't support bf16", text):
        return Named("DR705", certainty, f.message), repairs.precision(case.config)[:1]
    own = _of_deepspeed(f)
    if own is not None:
        return Named(own, certainty, _at(f)), repairs.of_cause(own, case.config, text)
    if _in_config(f):
        return _refused(case, f, certainty)
    if said is not None and said.code == "DR501":
        return Named("DR501", "likely", _first_line(text)), []
    if re.search(r"timed out|timeout", text, re.I) and "init_process_group" in " ".join(
        x.function for x in f.frames
    ):
        return Named("DR504", certainty, _first_line(text)), []
    if (
        (said is not None and said.code == "DR502")
        or _SECONDARY.search(text)
        or re.search(r"NCCL (?:error|Error)|nccl(?:System|Unhandled|Internal|Invalid)|DistBackendError", text)
    ):
        weaker = "likely" if certainty == "certain" else "possible"
        return Named("DR502", weaker, _first_line(text)), []
    if said is not None:
        return Named(said.code, certainty, f.message), []
    if (
        f.short == "FileNotFoundError"
        or "No such file or directory" in text
        or re.search(
            r"is not a local folder and is not a valid model identifier|Error no file named|"
            r"does not appear to have a file named|Can't load (?:tokenizer|the configuration|config|the model) for|"
            r"(?:file|path|directory|folder) \S+ (?:does not exist|not found)|Unable to find '",
            text,
            re.I,
        )
    ):
        return Named("DR803", certainty, f.message), []
    if re.search(r"The size of tensor a \(0\) must match|size of tensor b \(0\) at", text) and _splits(
        case, files
    ):
        return Named("DR106", certainty, f.message), []
    if _LAUNCHER.search(files):
        return Named("DR715", certainty, _first_line(f"{f.short}: {f.message}")), []
    return Named("DR710", certainty, _at(f)), []


_CPU_ACCELERATOR = re.compile(r"Setting ds_accelerator to cpu|deepspeed_shm_comm(?:_op)?\b")
"""What DeepSpeed says when it took the CPU for its accelerator: it saw no card, or DS_ACCELERATOR says so."""


def _on_cpu(case: _Case) -> bool:
    return any(_CPU_ACCELERATOR.search(line.text) for line in case.tail[:SPOKEN_LINES])


_PACKAGES = re.compile(
    r"/(?:site|dist)-packages/(?:torch|transformers|accelerate|deepspeed|peft|trl|datasets|swift|llamafactory|lightning|"
    r"pytorch_lightning|bitsandbytes|flash_attn|liger_kernel|unsloth|vllm)/"
)


_PARTS = (
    # file of the innermost frame, words of the message, cause: the first that fits
    (r"/swap_tensor/", "", "DR203"),
    (r"/checkpoint/|/utils/zero_to_fp32\.py", "", "DR903"),
    (r"/zero/partition_parameters\.py", r"in DeepSpeed Config|enabled at once|[Ii]nvalid data type|Please provide only one", "DR705"),
    (r"/zero/partition_parameters\.py", r"in ?flight", "DR107"),
    (r"/zero/partition_parameters\.py", "", "DR106"),
    (r"/zero/(?:partitioned_param_coordinator|parameter_offload)\.py", "", "DR107"),
    (r"/lr_schedules\.py", r"must be|expected", "DR705"),
    (r"/sequence_parallel/", r"sequence_parallel_size", "DR705"),
    (r"", r"without accelerator|Accelerator is not detected", "DR707"),
)  # fmt: skip
"""What DeepSpeed's own checks are about, by the part that made them (read in 0.19.8, the files since 0.9.5)."""
_LOADERS = ("load_checkpoint", "_load_checkpoint", "_load_zero_checkpoint", "load_module_state_dict", "load_moe_state_dict",
            "_load_legacy_checkpoint", "_rigid_load_state_dict")  # fmt: skip
_CHECKS = ("AssertionError", "RuntimeError", "ValueError", "KeyError", "FileNotFoundError", "TypeError", "SystemError",
           "NotImplementedError", "ZeRORuntimeException")  # fmt: skip


def _of_deepspeed(f: Failure) -> str | None:
    """The cause behind a check of DeepSpeed's own that no message names."""
    last = f.frames[-1].file if f.frames else ""
    if "/deepspeed/" not in last or f.short not in _CHECKS:
        return None
    if any(x.function in _LOADERS and "/deepspeed/" in x.file for x in f.frames):
        return "DR903"
    part = "/deepspeed/" + last.rpartition("/deepspeed/")[2]
    return next(
        (code for file, words, code in _PARTS if re.search(file, part) and re.search(words, f.message)), None
    )


def _unlike(f: Failure) -> bool:
    """One package calls another with an argument, or by a name, that its release does not have."""
    if f.short == "AttributeError" and re.search(
        r"module '(?:torch|transformers|numpy)\b[^']*' has no attribute", f.message
    ):
        return True
    last = f.frames[-1].file if f.frames else ""
    return (
        f.short == "TypeError" and "unexpected keyword argument" in f.message and bool(_PACKAGES.search(last))
    )


_LOADER = re.compile(r"/torch/utils/data/(?:dataloader|_utils/\w+)\.py")


def _splits(case: _Case, files: str) -> bool:
    """Whether ZeRO 3 was at work."""
    zero = (case.config or {}).get("zero_optimization")
    return (isinstance(zero, Mapping) and zero.get("stage") == 3) or "/zero/stage3.py" in files


_LAUNCHER = re.compile(
    r"/deepspeed/launcher/(?:runner|launch|multinode_runner)\.py|/torch/distributed/(?:run|launcher/api)\.py|"
    r"/accelerate/commands/launch\.py"
)
"""Nothing of the script runs in these processes."""


def _telling(said: messages.Message, f: Failure) -> str:
    """The line of an exception that named the cause."""
    m = said.pattern.search(f.text)
    if m is None or m.start() < len(f.type) + 2 + len(f.message):
        return _first_line(f.message or f.text)
    begin = f.text.rfind("\n", 0, m.start()) + 1
    return _first_line(f.text[begin:].strip())


_MISMATCH = re.compile(r"- ds ([\w.]+)=(\S+) vs hf (\w+)=(\S+)|mismatch TrainingArguments values")


def _mismatch(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    """transformers compares the config with TrainingArguments (``integrations/deepspeed.py``)."""
    pairs = [(m.group(1), m.group()[2:]) for m in _MISMATCH.finditer(f.text) if m.group(1)]
    detail = "; ".join(shown for _key, shown in pairs) or _first_line(f.text)
    edits = []
    for key, _shown in pairs:
        pointer = "/" + key.replace(".", "/")
        if repairs.has(case.config, pointer):
            edits.append({"op": "replace", "path": pointer, "value": "auto"})
    fixes = [Repair(_("let the Trainer fill these values: auto"), tuple(edits))]
    return Named("DR705", certainty, detail, _checkpoint(detail, None)), fixes


def _extensions(case: _Case) -> Path | None:
    """Where this run's ranks look for built ops; None where the environment of the run is not known."""
    if not case.manifest:
        return None
    return extensions_root({**(case.manifest.get("env_caller") or {}), **(case.manifest.get("env") or {})})


def _is_build(f: Failure, files: str, text: str) -> bool:
    return "cpp_extension.py" in files or (
        f.short in ("AttributeError", "ImportError", "OSError")
        and ("op_builder" in files or "ds_opt_adam" in text)
    )


def _build(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    text = f.text
    if "async_io" in text or "libaio" in text:
        hint = Repair(
            _("install libaio with its headers (Debian, Ubuntu: libaio-dev): NVMe offload needs it")
        )
        return Named("DR701", certainty, _first_line(text)), [hint]
    half = re.search(r"(/\S+)/[^/\s]+\.so: cannot open shared object file", text)
    again = (
        [Repair(_("delete the half-built op: rm -r {folder}").format(folder=half.group(1)))] if half else []
    )
    return Named("DR701", certainty, _first_line(text)), [*again, *repairs.build(case.config)]


def _driver_oom(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    """The driver's own error, not the allocator's: host memory that could not be pinned (WSL2 limits it), or a card
    with no room for a context."""
    functions = " ".join(x.function for x in f.frames)
    pinned = "pin_memory" in functions or "pin_memory" in f.text or "page-lock" in f.text
    weaker: Certainty = certainty if pinned else "possible"
    if pinned or not f.frames or repairs.offloads(case.config):
        return Named("DR402", weaker, _first_line(f.text)), repairs.pinning(case.config)
    return Named("DR104", weaker, _first_line(f.text)), [
        Repair(_("choose free cards, or end what holds memory there: dstui detect"))
    ]


def _at(f: Failure) -> str:
    """The exception with the innermost line of the user's own code."""
    frame = _user_frame(f)
    detail = f"{f.short}: {f.message}" if f.message else f.short
    if frame:
        detail += " " + _("(in {file}, line {line})").format(file=frame[0], line=frame[1])
    return detail


def _first_line(text: str) -> str:
    return text.splitlines()[0][:400] if text else ""


def _gpu_oom(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    text = f.text
    tried, capacity = _size(_TRIED, text), _size(_CAPACITY, text)
    mine, free, cached = _size(_MINE, text), _size(_FREE, text), _size(_CACHED, text)
    allowed = _size(_ALLOWED, text)
    if mine is None:  # a container without the names of its processes
        taken = _size(_TAKEN, text)
        mine = None if taken is None else taken + (cached or 0) + GiB // 2
    limited = allowed is not None and capacity is not None and allowed < 0.95 * capacity
    if limited:
        capacity = allowed
    phase = oom_phase(f)
    words = (
        _("{tried} more were asked for, this process may take {capacity} of the card")
        if limited
        else _("{tried} more were asked for, the card has {capacity}")
    )
    detail = words.format(tried=gib(tried), capacity=gib(capacity))
    if tried is None or capacity is None:
        detail = _first_line(text)
    if f.rank is not None:
        detail = _("rank {rank}: ").format(rank=f.rank) + detail
    if (
        capacity
        and mine is not None
        and free is not None
        and not limited
        and mine < 0.5 * capacity
        and capacity - mine - free > 0.3 * capacity
    ):
        held = capacity - mine - free
        detail += "; " + _("other processes hold {size} of it").format(size=gib(held))
        return Named("DR104", certainty, detail), [
            Repair(_("choose free cards, or end what holds memory there: dstui detect"))
        ]
    fixes: list[Repair] = []
    if cached and capacity and cached > 0.1 * capacity and (tried or 0) < cached:
        fixes.append(
            Repair(
                _(
                    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ({size} lay unused in the cache)"
                ).format(size=gib(cached)),
                price=_("none on Linux"),
            )
        )
    memory = repairs.gpu_memory(case.config)
    batch = repairs.micro_batch(case.config)
    if phase == "init" or (phase == "other" and not case.stepped):
        return Named("DR101", certainty, detail), [*memory, *fixes]
    if phase == "save":
        return Named("DR109", certainty, detail), [*repairs.saving(case.config), *fixes]
    if phase == "step":
        return Named("DR103", certainty, detail), [*memory, *fixes]
    return Named("DR102", certainty, detail), [*batch, *memory, *fixes]


_MODELS = {
    "DeepSpeedZeroConfig": ("/zero_optimization", None),
    "DeepSpeedZeroOffloadParamConfig": ("/zero_optimization/offload_param", 2),
    "DeepSpeedZeroOffloadOptimizerConfig": ("/zero_optimization/offload_optimizer", 2),
    "DeepSpeedFP16Config": ("/fp16", None),
    "DeepSpeedBF16Config": ("/bf16", None),
    "ZenFlowConfig": ("/zero_optimization/zenflow", 2),
}
"""pydantic model -> where it lies in the file, and the checkpoint that it belongs to."""


def _in_config(f: Failure) -> bool:
    """Raised while DeepSpeed (or the Trainer) read and checked the config."""
    if f.short in ("DeepSpeedConfigError", "ValidationError", "JSONDecodeError", "HjsonDecodeError"):
        return True
    where = ("deepspeed/runtime/config", "deepspeed/runtime/zero/config", "deepspeed/runtime/precision_config", "config_utils.py",
             "integrations/deepspeed.py", "accelerate/utils/dataclasses.py")  # fmt: skip
    last = f.frames[-3:]
    if (
        last
        and "/deepspeed/" in last[-1].file
        and f.short
        in ("AssertionError", "ValueError", "NotImplementedError", "ZeRORuntimeException", "Exception")
        and any(x.function == "initialize" and "deepspeed" in x.file for x in f.frames)
    ):
        return True  # an assertion of the engine or of an optimizer about settings that exclude each other
    return any(part in x.file for x in last for part in where) or any(
        x.function == "load_ds_config" for x in last
    )


def _refused(case: _Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    text = f.text
    if re.search(r"JSONDecodeError|Decode|binascii|Duplicate keys|Expected a string path|base64|No such file|is not a valid|does not exist", text) or f.short in (
        "FileNotFoundError", "JSONDecodeError", "HjsonDecodeError",
    ):  # fmt: skip
        return Named("DR706", certainty, _first_line(text)), [
            Repair(_("dstui check on the file shows the place"))
        ]
    fixes: list[Repair] = []
    place: int | None = None
    detail = _first_line(text)
    m = re.search(r"validation errors? for (\w+)", text)
    if m and f.details:
        base, place = _MODELS.get(m.group(1), ("", None))
        pairs = _pydantic(f.details)
        if pairs:
            key, problem = pairs[0]
            pointer = base + "/" + key.replace(".", "/")
            place = _checkpoint(pointer, place)
            detail = f"{pointer.strip('/').replace('/', '.')}: {problem}"
            if "extra_forbidden" in problem or "Extra inputs" in problem or "extra fields" in problem:
                edits: tuple[Mapping[str, Any], ...] = ()
                if repairs.has(case.config, pointer):
                    edits = ({"op": "remove", "path": pointer},)
                fixes.append(
                    Repair(
                        _("remove {key}: this release does not know it").format(
                            key=pointer.strip("/").replace("/", ".")
                        ),
                        edits,
                    )
                )
    else:
        left = _autos(case.config) if f.short == "TypeError" or "auto" in text else []
        if left:
            names = ", ".join(p.strip("/").replace("/", ".") for p in left[:6])
            detail = _("'auto' is left over in {keys}: only the Hugging Face Trainer fills it").format(
                keys=names
            )
            fixes.append(Repair(_("write values for {keys}").format(keys=names)))
        place = _checkpoint(" ".join((text, *left, *(x.function for x in f.frames[-1:]))), None)
    fixes.append(Repair(_("dstui check shows every finding of this file with its fix")))
    return Named("DR705", certainty, detail, place), fixes


def _autos(config: Mapping[str, Any] | None, base: str = "") -> list[str]:
    """Pointers of values that are ``"auto"``."""
    found = []
    for key, value in (config or {}).items():
        if value == "auto":
            found.append(f"{base}/{key}")
        elif isinstance(value, Mapping):
            found += _autos(value, f"{base}/{key}")
    return found


def _pydantic(details: Sequence[str]) -> list[tuple[str, str]]:
    """(dotted location, problem) pairs of a pydantic message: a location line, then an indented problem."""
    found = []
    for a, b in itertools.pairwise(details):
        if a and not a[0].isspace() and b[:1].isspace() and not b.strip().startswith("For further"):
            found.append((a.strip(), b.strip()))
    return found


def _checkpoint(text: str, default: int | None) -> int | None:
    """The checkpoint that a refused key belongs to."""
    for pattern, checkpoint in (
        (r"pin_memory|pinned", 4),
        (r"offload", 2),
        (r"batch|gradient_accumulation", 3),
        (r"overlap_comm|bucket|allgather|reduce_scatter|communication", 5),
        (r"zero_optimization|stage|ZeRO", 1),
    ):
        if re.search(pattern, text):
            return checkpoint
    return default


_SIGNALS = (-11, -6, -7, -4, -8)


def _native(case: _Case) -> Iterator[_Finding]:
    code = case.rank_code
    if code not in _SIGNALS:
        return
    evidence = [case.line(e.offset, e.text) for e in case.of("rank_exit")[:1]]
    if case.exit is not None:
        evidence.append(Evidence("exit.json", None, str(case.exit.get("reason"))))
    for line in reversed(case.tail[-400:]):
        if re.search(
            r"Segmentation fault|terminate called|Assertion .* failed|what\(\):|Bus error|Fatal Python error|Illegal instruction",
            line.text,
        ):
            evidence.insert(0, case.line(line.offset, line.text))
            break
    shm = code == -7
    detail = _("a rank ended by {signal}").format(signal=signal_name(-code))
    size = _shm_size(case.manifest) if shm else None
    small = size is not None and size <= SMALL_SHM
    if size is not None:
        evidence.append(Evidence("manifest.json", None, f"/dev/shm: {gib(size)}"))
    certainty = _recorded(case, agrees=True) if not shm else "likely" if small else "possible"
    named = Named("DR403" if shm else "DR712", certainty, detail)
    yield _Finding(named, tuple(evidence), weight=50 if _said(case) else 72)


SMALL_SHM = GiB
"""A /dev/shm that a data loader or NCCL fills; containers start with 64 MB, hosts with half of the RAM."""


def _shm_size(manifest: Mapping[str, Any]) -> int | None:
    facts = manifest.get("facts")
    host = facts.get("host") if isinstance(facts, Mapping) else None
    size = host.get("shm_total") if isinstance(host, Mapping) else None
    return size if isinstance(size, int) else None


def _out_of_step(case: _Case) -> Iterator[_Finding]:
    """A rank was through and ended well, the others then missed it in a collective."""
    well = case.of("rank_ok")
    failures = _failures(case)
    waited = [e for e in case.of("collective") if e.values.get("timeout")]
    if not well or case.outcome != "failed" or _said(case) or not (failures or waited):
        return
    shown = [case.line(well[0].offset, well[0].text)]
    shown += [case.line(f.offset, f"{f.type}: {f.message}") for f in failures[:1]]
    shown += [case.line(e.offset, e.text) for e in waited[:1]]
    yield _Finding(
        Named(
            "DR304",
            "likely" if case.stepped else "possible",
            _("a rank ended well while the others went on"),
        ),
        tuple(shown),
        weight=77,
    )


def _collectives(case: _Case, stall: Stall | None = None) -> Iterator[_Finding]:
    """``stall``: what the samples show of a run that has not ended; of one that has they are looked up."""
    if case.outcome == "finished":
        return
    lines = [e for e in case.of("collective") if not case.survived(e.offset)]
    timeouts = [e for e in lines if e.values.get("timeout")]
    if timeouts:
        first = timeouts[0]
        m = re.search(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)", first.text)
        detail = ""
        if m:
            detail = _("{operation} waited {seconds} s").format(
                operation=m.group(1), seconds=int(m.group(2)) // 1000
            )
        stall = stall or _stood(case)
        seen = stall is not None and stall.kind != "timeout"
        missing = _missing_ranks(case, timeouts)
        apart = _apart(timeouts)
        parts = [detail] if detail else []
        if apart:
            parts.append(
                _("the ranks are in different operations: {operations}").format(
                    operations=", ".join(apart[:4])
                )
            )
        elif missing and not (seen and stall is not None and stall.ranks):
            parts.append(
                _("no complaint from rank {ranks}: look there").format(ranks=", ".join(map(str, missing)))
            )
        if seen and stall is not None:
            parts.append(stall.seen)
        yield _Finding(
            Named("DR501", "likely", "; ".join(parts)),
            tuple(case.line(e.offset, e.text) for e in timeouts[:3]),
            weight=74 if not _failures(case) else 58,
        )
    elif lines and case.outcome == "failed":
        yield _Finding(Named("DR502", "possible"), (case.line(lines[0].offset, lines[0].text),), weight=30)


def _stood(case: _Case) -> Stall | None:
    """What the ranks of a run that has ended did in the last seconds in which all of them were there."""
    if not case.manifest:
        return None
    samples = read_samples(Path(case.file).parent / "samples", 180)
    most = max((len(s.ranks) for s in samples), default=0)
    there = [i for i, s in enumerate(samples) if most and len(s.ranks) == most]
    if not there:
        return None
    until = samples[: there[-1] + 1]
    offload = repairs.offloads(case.config)
    return stall_name(until, until[-1].t, until[0].t, offload=offload, world=_world(case))


def _apart(timeouts: Iterable[Event]) -> list[str]:
    """Operations of one sequence number that differ between ranks: they took different paths through the model."""
    by: dict[str, set[str]] = {}
    for e in timeouts:
        m = re.search(r"SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)", e.text)
        if m:
            by.setdefault(m.group(1), set()).add(f"{m.group(2)} ({m.group(3)})")
    return next((sorted(kinds) for kinds in by.values() if len(kinds) > 1), [])


def _missing_ranks(case: _Case, timeouts: Iterable[Event]) -> list[int]:
    """Ranks that did not wait: the one that never came. A rank that was told of it by another did not complain."""
    timeouts = [e for e in timeouts if "dump signal" not in e.text]
    waiting = {int(m.group(1)) for e in timeouts for m in [re.search(r"\bRank (\d+)\]", e.text)] if m}
    waiting |= {e.rank for e in timeouts if e.rank is not None}
    worlds = [e.values["size"] for e in case.of("world")]
    world = worlds[-1] if worlds else case.manifest.get("world_size")
    if not world or not waiting:
        return []
    missing = [r for r in range(int(world)) if r not in waiting]
    return missing if len(missing) <= 8 else []


_BUILD = re.compile(
    r"Error building extension '(\w+)'|^\s*FAILED: \S+\.o\b|ninja: build stopped|fatal error: .*: No such file or directory|nvcc fatal|error: command .* failed"
)


def _builds(case: _Case) -> Iterator[_Finding]:
    if case.outcome == "finished":
        return
    for line in case.tail[-3000:]:
        if _BUILD.search(line.text):
            yield _Finding(
                Named("DR701", "likely", line.text.strip()[:300]),
                (case.line(line.offset, line.text),),
                tuple(repairs.build(case.config)),
                weight=45,
            )
            return


def _numerics(case: _Case) -> Iterator[_Finding]:
    losses = [e for e in case.events if e.kind in ("step", "progress") and e.values.get("loss") is not None]
    bad = [e for e in losses if not _sound(e)]
    together = losses[-1:] if losses and _zero_and_nan(losses[-1]) else []
    if (len(bad) >= 2 and losses and not _sound(losses[-1])) or together:
        bad = bad or together
        first = bad[0]
        step = first.values.get("step")
        detail = (
            _("not finite from step {step} on").format(step=step)
            if step is not None
            else _("not finite to the end")
        )
        evidence = [case.line(first.offset, first.text)]
        evidence += [case.line(e.offset, e.text) for e in case.of("overflow")[:1]]
        certainty: Certainty = "certain" if case.exit is not None else "likely"
        yield _Finding(
            Named("DR601", certainty, detail),
            tuple(evidence),
            (*_known(case), *repairs.precision(case.config)),
            weight=35,
        )
        return
    zeros = list(itertools.takewhile(lambda e: e.values["loss"] == 0, reversed(losses)))
    sank = (
        len(zeros) < len(losses) and losses[-len(zeros) - 1].values["loss"] < 0.01
    )  # printed with few digits
    if len(zeros) >= 3 and not sank and not any("reward" in e.text for e in zeros[:3]):
        first = zeros[-1]
        yield _Finding(
            Named("DR604", "likely" if len(zeros) < len(losses) else "possible"),
            (case.line(first.offset, first.text),),
            (*_known(case), *repairs.precision(case.config)),
            weight=33,
        )
        return
    floors = [
        e
        for e in case.of("overflow")
        if e.values.get("floor") or (e.values.get("scale") == 1 and e.values.get("new_scale") == 1)
    ]
    if floors:
        yield _Finding(
            Named("DR602", "likely"),
            (case.line(floors[0].offset, floors[0].text),),
            tuple(repairs.precision(case.config)),
            weight=34,
        )
        return
    overflows = case.of("overflow")
    steps = max((e.values.get("step") or 0 for e in case.of("step")), default=0)
    scale = overflows[-1].values.get("new_scale") if overflows else None
    deep = scale is None or scale <= 64  # the default scale of 2^16 or 2^32 walks down first, in all health
    if deep and len(overflows) >= 10 and len(overflows) > 0.5 * max(steps, 1):
        yield _Finding(
            Named("DR601", "possible", _("{n} steps were skipped for overflow").format(n=len(overflows))),
            tuple(case.line(e.offset, e.text) for e in overflows[-2:]),
            tuple(repairs.precision(case.config)),
            weight=20,
        )


def _known(case: _Case) -> tuple[Repair, ...]:
    """Wrong results that this release is known for with this config."""
    return prices.of_rules(case.config, _release(case), _world(case), ("silent-wrong",))


def _release(case: _Case) -> str | None:
    """The run's DeepSpeed, from the manifest or from what it printed."""
    release = prices.release_of(case.manifest)
    if release is None:
        printed = [
            m.group(1)
            for e in case.of("init")
            for m in [re.search(r"info: version=(\d[\d.]*\d)", e.text)]
            if m
        ]
        release = printed[0] if printed else None
    return release


def _world(case: _Case) -> int | None:
    world = case.manifest.get("world_size")
    return world if isinstance(world, int) else None


def _sound(e: Event) -> bool:
    """Whether loss and gradient norm of a step are numbers."""
    norm = e.values.get("grad_norm")
    return math.isfinite(e.values["loss"]) and (norm is None or not math.isnan(norm))


def _zero_and_nan(e: Event) -> bool:
    """Trainers show a NaN loss as 0 (``logging_nan_inf_filter``); the gradient norm tells."""
    norm = e.values.get("grad_norm")
    return bool(e.values["loss"] == 0) and norm is not None and math.isnan(norm)


def _lost_node(case: _Case) -> Iterator[_Finding]:
    """A node that answered at the start and does not at the end."""
    if case.outcome != "failed" or case.exit is None:
        return
    for record in left_behind(case.exit.get("nodes")):
        if record.get("left") is not None or not record.get("met"):
            continue
        text = f"node {record['host']}: {record.get('detail') or record.get('problem')}"
        yield _Finding(
            Named("DR723", "likely", _("node {host} does not answer any more").format(host=record["host"])),
            (Evidence("exit.json", None, text),),
            weight=45 if _said(case) else 79,
        )
        return


def _launcher(case: _Case) -> Iterator[_Finding]:
    data = case.exit
    if data is None or case.outcome != "failed" or data.get("rank_code"):
        return
    if data.get("launcher_signal") or (
        "launcher" in str(data.get("reason")) and "was killed" in str(data.get("reason"))
    ):
        yield _Finding(
            Named("DR722", "certain", str(data.get("reason"))),
            (Evidence("exit.json", None, str(data.get("reason"))),),
            weight=56,
        )


_LOCAL_RANK = 'parser.add_argument("--local_rank", type=int, default=-1)'


def _plain_exit(case: _Case) -> Iterator[_Finding]:
    """A code without any traceback."""
    code = case.rank_code
    if code is None and case.exit is None and not case.failures:
        yield from _bad_arguments(case)
    if code is None or code <= 0 or case.outcome != "failed" or not _only_echoes(case):
        return
    evidence = [case.line(e.offset, e.text) for e in case.of("rank_exit")[:1]]
    for line in reversed(case.tail[-200:]):
        if re.search(r"^usage: |: error: ", line.text):
            evidence.insert(0, case.line(line.offset, line.text))
            if re.search(r"unrecognized arguments:.*--local[-_]rank", line.text):
                yield _Finding(
                    Named("DR713", _recorded(case, agrees=True), line.text.strip()),
                    tuple(evidence),
                    (
                        Repair(_("in the script: {line}").format(line=_LOCAL_RANK)),
                        Repair(_("or leave the option out: {option}").format(option="--launcher torchrun")),
                    ),
                    weight=76,
                )
                return
            break
    yield _Finding(
        Named("DR711", _recorded(case, agrees=True), _("return code {code}").format(code=code)),
        tuple(evidence),
        weight=42,
    )


_ARGUMENT = re.compile(
    r"^(?:\S+ )?\S+\.py: error: (?:argument|the following arguments|unrecognized|ambiguous option)"
)


def _bad_arguments(case: _Case) -> Iterator[_Finding]:
    """A log that ends with what argparse says, without a launcher that tells the return code."""
    for line in case.tail[-6:]:
        if _ARGUMENT.search(clean(line.text)):
            shown = (case.line(line.offset, line.text),)
            yield _Finding(Named("DR711", "likely", _first_line(line.text.strip())), shown, weight=42)
            return


def _ooms(case: _Case) -> list[Event]:
    """Lines about memory after which training did not go on. Where it went on after such words before (a batch that
    is left out, a sample that is printed), only a failure that somebody else reports makes the last ones count."""
    lines = case.of("oom")
    rest = [e for e in lines if not case.survived(e.offset)]
    return rest if len(rest) == len(lines) or case.of("rank_exit") else []


_GRAMMAR = re.compile(r"(?:^|[^\w'\"`(])((?:SyntaxError|IndentationError|TabError): .*)")


def _unparsed(case: _Case) -> Iterator[_Finding]:
    """A script that Python cannot read: it says so without a traceback."""
    if case.outcome in ("finished", "stopped"):
        return
    lines = case.tail[-2000:]
    for i, line in enumerate(lines):
        m = _GRAMMAR.search(clean(line.text))
        place = m and re.search(
            r'File "(.+?)", line (\d+)\s*$', "\n".join(clean(x.text) for x in lines[max(0, i - 3) : i]), re.M
        )
        if not m or not place or case.survived(line.offset) or _failures(case):
            continue
        file, number = place.group(1), int(place.group(2))
        detail = m.group(1) + " " + _("(in {file}, line {line})").format(file=file, line=number)
        code = case.rank_code
        certainty = _recorded(case, agrees=code is not None and code > 0)
        shown = (case.line(line.offset, line.text), Evidence(file, number, m.group(1)))
        yield _Finding(Named("DR710", certainty, detail), shown, weight=74)
        return


def _oom_lines(case: _Case) -> Iterator[_Finding]:
    """`CUDA out of memory` without a traceback: a cut log, or a script that caught it and printed it itself."""
    lines = _ooms(case)
    if not lines or case.outcome == "finished":
        return
    e = lines[0]
    near = " ".join(line.text for line in case.tail if -4000 <= line.offset - e.offset <= 400)
    code = "DR102" if case.stepped else "DR101"
    if re.search(r"pin_memory|page-lock", near):
        code = "DR402"
    elif re.search(r"exp_avg|in step$|optimizer\.step|_take_model_step", near):
        code = "DR103"
    elif re.search(
        r"in (?:forward|backward)\b|softmax|attention|loss\.backward|cross_entropy|_call_impl|training_step",
        near,
    ):
        code = "DR102"
    fixes = {"DR102": repairs.micro_batch(case.config), "DR402": repairs.pinning(case.config)}.get(code)
    yield _Finding(
        Named(code, "possible", _first_line(e.text)),
        (case.line(e.offset, e.text),),
        tuple(repairs.gpu_memory(case.config) if fixes is None else fixes),
        weight=49
        if code == "DR402"
        else 43
        if (case.rank_code or 0) > 0
        else 28,  # it says more than a bare code
    )


def _spoken(case: _Case) -> Iterator[_Finding]:
    """Messages on lines of their own: cut logs, exceptions that a script caught and printed, words of C++ and of
    launchers. Never after a good end, and not where training went on afterwards."""
    if case.outcome in ("finished", "stopped"):
        return
    traced = [f for f in case.failures if not _wraps(f)]
    lines = case.tail[-SPOKEN_LINES:]
    for i, said in messages.on_lines([clean(line.text) for line in lines]):
        line = lines[i]
        if case.survived(line.offset) or any(f.start <= line.offset <= f.offset for f in traced):
            continue
        certainty: Certainty = "likely" if case.outcome == "failed" and said.weight > 20 else "possible"
        text = line.text.strip()
        if said.code == "DR303" and re.search(r"to (\d+) from \1\b", text):
            continue
        if said.code == "DR401" and _no_kills(case) and not re.search(r"oom|out of memory", text, re.I):
            continue
        yield _Finding(
            Named(said.code, certainty, _first_line(clean(text))),
            (case.line(line.offset, clean(text)),),
            tuple(repairs.of_cause(said.code, case.config, text)),
            weight=_weight(said, text),
        )


_KERNEL_KILL = re.compile(r"oom[-_]kill|Out of memory: Killed|OOM ?Killed|: Out Of Memory$", re.IGNORECASE)


def _weight(said: messages.Message, text: str) -> int:
    if said.code == "DR402" and "mlock" in text:
        return 73
    if said.code == "DR401" and _KERNEL_KILL.search(text):
        return 75  # the others miss the rank that was killed, and time out
    return said.weight


SPOKEN_LINES = 20_000
"""Lines at the end of a log that are searched for messages."""


def _vanished(case: _Case) -> Iterator[_Finding]:
    """The launcher ends the others, and the rank that went first left neither a word nor a code."""
    if (
        case.outcome in ("finished", "stopped")
        or case.exit is not None
        or case.failures
        or case.of("rank_exit")
    ):
        return
    ending = next(
        (x for x in case.tail if re.search(r"Killing subprocess|closing signal SIGTERM", x.text)), None
    )
    if ending is not None and not case.survived(ending.offset) and not case.of("signal"):
        yield _Finding(
            Named("DR401", "possible", _("a rank is gone without a word, and the launcher ended the others")),
            (case.line(ending.offset, clean(ending.text)),),
            repairs.host_memory(case.config),
            weight=15,
        )
    last = [line for line in case.tail if line.text.strip()][-3:]
    if last and last[-1].text.strip() == "Killed":
        yield _Finding(
            Named("DR401", "possible", _("the shell says that a process was killed")),
            (case.line(last[-1].offset, last[-1].text),),
            tuple(repairs.host_memory(case.config)),
            weight=16,
        )
    loaded = any(re.search(r"Time to load|Loading extension module", line.text) for line in last)
    for line in last:
        if not loaded and re.search(
            r"as PyTorch extensions root\.\.\.|Detected CUDA files, patching ldflags", line.text
        ):
            yield _Finding(
                Named("DR708", "possible", _("the log ends where an op is to be built or loaded")),
                (case.line(line.offset, line.text),),
                (
                    Repair(
                        _(
                            "look for a file `lock` below ~/.cache/torch_extensions and delete it when nobody builds"
                        )
                    ),
                ),
                weight=14,
            )
            return


_RAY_GONE = re.compile(r"worker process has died|A worker died or was killed while executing a task")


def _ray(case: _Case) -> Iterator[_Finding]:
    """Ray lost a worker that said nothing; of the causes that it offers then, lack of memory is the first."""
    if case.outcome in ("finished", "stopped") or case.exit is not None:
        return
    gone = next((x for x in case.tail[-SPOKEN_LINES:] if _RAY_GONE.search(x.text)), None)
    if gone is not None and not case.survived(gone.offset):
        yield _Finding(
            Named("DR401", "possible", _("a worker of Ray is gone without a word")),
            (case.line(gone.offset, clean(gone.text)),),
            repairs.host_memory(case.config),
            weight=9,
        )


def _slow(case: _Case) -> Iterator[_Finding]:
    """Complaints about speed, for a log whose end is not known."""
    if case.outcome != "unknown":
        return
    pressure, steps = case.of("pressure"), len(case.of("step"))
    often = len(pressure) >= max(3, 0.2 * steps) if steps else True  # one flush at an odd batch is no trouble
    if often and sum(e.values["flushes"] for e in pressure) >= 2:
        yield _Finding(
            Named("DR108", "possible", _first_line(pressure[-1].text)),
            tuple(case.line(e.offset, e.text) for e in pressure[-2:]),
            tuple(repairs.of_cause("DR108", case.config, "")),
            weight=11,
        )


# -- words -------------------------------------------------------------------------------------------------------


def ending_text(state: str, data: Mapping[str, Any], found: Diagnosis | None, step: int | None) -> str:
    """How a run ended, in one translated sentence."""
    if state == "finished":
        text = _("finished after {n} steps").format(n=step) if step else _("finished")
        return text + _left_behind(data)
    if state == "lost":
        return _("lost: its supervisor is gone, nobody saw how it ended")
    cause = found.cause if found else None
    if state == "stopped":
        by = data.get("stopped_by") or {}
        who = by.get("user") or by.get("signal")
        return _("stopped by {who}").format(who=who) if who else _("stopped")
    if cause is None:
        code = data.get("code")
        return (
            _("failed (exit code {code}); no cause found").format(code=code)
            if code is not None
            else _("failed; no cause found")
        )
    text = _("failed: {title}").format(title=BY_CODE[cause.code].heading)
    if cause.checkpoint:
        text += " " + checkpoint_text(cause.checkpoint)
    return text


def _left_behind(data: Mapping[str, Any]) -> str:
    """What a training that was over had left running (a daemon): the supervisor ended it."""
    left = [x for x in data.get("leftovers") or () if isinstance(x, dict)]
    if not left:
        return ""
    names = ", ".join(f"{x.get('name') or '?'} ({x.get('pid')})" for x in left[:4])
    text = ngettext(
        "; {n} process that it left behind was ended: {names}",
        "; {n} processes that it left behind were ended: {names}",
        len(left),
    )
    return text.format(n=len(left), names=names + (", ..." if len(left) > 4 else ""))


def checkpoint_text(number: int) -> str:
    return _("(checkpoint {n} of 5: {name})").format(n=number, name=_(CHECKPOINTS[number - 1]))
