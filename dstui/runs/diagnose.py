"""Why a run failed: ``diagnose(run directory | log | text) -> Diagnosis``.

Evidence is gathered first (tracebacks, the launcher's return codes, exit.json, the kernel's count of OOM
kills, samples), then causes compete. What a *first* failing rank says counts; errors of its peers that only
lost the connection do not. The text of a log alone is never ``certain``: that takes the exit record of the
supervisor. No cause is a valid answer, and a healthy log has none.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _, listed, ngettext
from dstui.runs import prices, repairs, store
from dstui.runs.case import (
    SURVIVED,
    Case,
    Diagnosis,
    Evidence,
    Finding,
    Named,
    caught,
    deepspeed_release,
    first_line,
    world_of,
)
from dstui.runs.causes import BY_CODE, CHECKPOINTS
from dstui.runs.deaths import killed, launcher_killed, lost_node, native, plain_exit, ray, vanished
from dstui.runs.events import Event, parser_of
from dstui.runs.exceptions import SECONDARY, candidates, exceptions
from dstui.runs.logtext import RESTARTED, last_attempt, opened, read_log
from dstui.runs.repairs import Repair
from dstui.runs.samples import RankUse
from dstui.runs.signs import (
    builds,
    collectives,
    numerics,
    oom_lines,
    ooms,
    out_of_step,
    slow,
    spoken,
    unparsed,
)
from dstui.runs.stall import Stall
from dstui.runs.state import read_config
from dstui.runs.store import RunDir
from dstui.runs.tail import Line, LogFile, split

COUNT_LINES = 256 << 20
"""Line numbers are counted up to this offset; beyond it the line is null."""


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
    head, tail = read_log(path)
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


def _run_case(run: RunDir, state: str, config: Mapping[str, Any] | None) -> Case:
    try:
        head, tail = read_log(run.out_log)
    except DstuiError:
        head, tail = [], []
    file = LogFile(run.out_log)
    manifest = run.manifest
    events, more = _events(head, tail, manifest)
    return Case(
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


def _doomed(case: Case, stall: Stall | None = None) -> Finding | None:
    """What ends a run although it has not ended yet, or was stopped before it could: a collective that timed out
    (torch's process stays for a minute to write its records), or an exception that nobody caught in one rank
    while the others wait for it. Only what the log says before anybody asked the run to stop."""
    asked = [e.offset for e in case.events if e.kind in ("killing", "signal")]
    asked += [x.offset for x in case.tail if _ASKED.search(x.text)]
    events = [e for e in case.events if not asked or e.offset < min(asked)]
    restarts = [x.offset for x in case.tail if RESTARTED.search(x.text)]
    events = [e for e in events if not restarts or e.offset > restarts[-1]]
    sure = [e for e in events if e.kind != "error" or not caught(e.values["failure"])]
    before = replace(case, events=sure, steps=None)
    found = list(collectives(before, stall))
    if any(f.cause.code == "DR501" for f in found):
        found = [f for f in found if f.cause.code == "DR501"]
    else:
        found = []
    if asked or case.outcome != "stopped":
        ended = [f for f in candidates(before) if SECONDARY.search(f.text) is None]
        if ended and (case.outcome != "running" or any(f.rank is not None for f in ended)):
            found += exceptions(before)
    return max(found, key=lambda f: f.weight, default=None)


_ASKED = re.compile(r"Received \d+ death signal|Sending process \d+ closing signal|got signal: (?:2|15)\b")
"""How torchrun says that it was asked to end."""


def _log_case(
    name: str, head: list[Line], tail: list[Line], config: Mapping[str, Any] | None, number: Any
) -> Case:
    def case_of(head: list[Line], tail: list[Line]) -> Case:
        events, more = _events(opened(head), tail, {})
        case = Case("unknown", name, events, more, config, number=number)
        case.outcome = _outcome(case)
        return case

    last = last_attempt(head, tail)
    if last is not None:
        case = case_of(last, [])
        if case.outcome == "finished" or len(case.of("step")) >= SURVIVED or _judge(case).cause is not None:
            return case
    return case_of(head, tail)


def _events(
    head: list[Line], tail: list[Line], manifest: Mapping[str, Any]
) -> tuple[list[Event], list[Line]]:
    parser = parser_of(manifest)
    events = parser.feed_all(head) + parser.finish()
    if tail:
        parser = parser_of(manifest)
        events += parser.feed_all(tail) + parser.finish()
    return events, tail or head


def _outcome(case: Case) -> str:
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
    if failures or ooms(case):
        return "failed"
    return "unknown"


def _judge(case: Case) -> Diagnosis:
    found: list[Finding] = []
    for look in (
        _stopped,
        killed,
        exceptions,
        native,
        out_of_step,
        collectives,
        builds,
        numerics,
        lost_node,
        launcher_killed,
        unparsed,
        plain_exit,
        oom_lines,
        spoken,
        vanished,
        ray,
        slow,
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


def _legal(case: Case, fixes: Iterable[Repair]) -> tuple[Repair, ...]:
    """Those that leave a config which this run's DeepSpeed takes."""
    engine = str(case.manifest.get("engine") or "plain")
    return prices.legal(tuple(fixes), case.config, deepspeed_release(case), world_of(case), engine)


_MEMORY = ("DR101", "DR102", "DR103", "DR108", "DR401", "DR404")
"""Causes whose repairs the estimator can price."""


def _stopped(case: Case) -> Iterator[Finding]:
    if case.exit is not None and case.exit.get("outcome") == "stopped":
        by = case.exit.get("stopped_by") or {}
        who = by.get("user") or by.get("signal") or "?"
        detail = _("stopped by {who}").format(who=who)
        yield Finding(
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
        yield Finding(
            Named("DR720", "likely", first_line(asked[0].text)),
            (case.line(asked[0].offset, asked[0].text),),
            weight=60,
        )
        return
    if case.exit is not None and case.exit.get("ended_for_node"):
        return  # the signals were the supervisor's: the ranks of another node had failed
    for e in case.of("signal"):
        yield Finding(Named("DR720", "likely"), (case.line(e.offset, e.text),), weight=60)
        return


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
    names = listed(f"{x.get('name') or '?'} ({x.get('pid')})" for x in left[:4])
    text = ngettext(
        "; {n} process that it left behind was ended: {names}",
        "; {n} processes that it left behind were ended: {names}",
        len(left),
    )
    return text.format(n=len(left), names=names + (", ..." if len(left) > 4 else ""))


def checkpoint_text(number: int) -> str:
    """``(checkpoint 2 of 5: offload target)``, translated."""
    return _("(checkpoint {n} of 5: {name})").format(n=number, name=_(CHECKPOINTS[number - 1]))
