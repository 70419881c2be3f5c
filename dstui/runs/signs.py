"""What lines that are no traceback tell: time-outs, losses, messages, builds, words about memory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dstui.i18n import _, listed
from dstui.runs import messages, prices, repairs
from dstui.runs.case import (
    SPOKEN_LINES,
    Case,
    Certainty,
    Evidence,
    Finding,
    Named,
    deepspeed_release,
    first_line,
    recorded,
    world_of,
)
from dstui.runs.deaths import no_kills
from dstui.runs.events import Event
from dstui.runs.exceptions import candidates, said_more, wraps
from dstui.runs.repairs import Repair
from dstui.runs.samples import read_samples
from dstui.runs.stall import Stall
from dstui.runs.stall import name as stall_name
from dstui.runs.tail import clean


def out_of_step(case: Case) -> Iterator[Finding]:
    """A rank was through and ended well, the others then missed it in a collective."""
    well = case.of("rank_ok")
    failures = candidates(case)
    waited = [e for e in case.of("collective") if e.values.get("timeout")]
    if not well or case.outcome != "failed" or said_more(case) or not (failures or waited):
        return
    shown = [case.line(well[0].offset, well[0].text)]
    shown += [case.line(f.offset, f"{f.type}: {f.message}") for f in failures[:1]]
    shown += [case.line(e.offset, e.text) for e in waited[:1]]
    yield Finding(
        Named(
            "DR304",
            "likely" if case.stepped else "possible",
            _("a rank ended well while the others went on"),
        ),
        tuple(shown),
        weight=77,
    )


def collectives(case: Case, stall: Stall | None = None) -> Iterator[Finding]:
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
                _("the ranks are in different operations: {operations}").format(operations=listed(apart[:4]))
            )
        elif missing and not (seen and stall is not None and stall.ranks):
            parts.append(
                _("no complaint from rank {ranks}: look there").format(ranks=listed(map(str, missing)))
            )
        if seen and stall is not None:
            parts.append(stall.seen)
        yield Finding(
            Named("DR501", "likely", "; ".join(parts)),
            tuple(case.line(e.offset, e.text) for e in timeouts[:3]),
            weight=74 if not candidates(case) else 58,
        )
    elif lines and case.outcome == "failed":
        yield Finding(Named("DR502", "possible"), (case.line(lines[0].offset, lines[0].text),), weight=30)


def _stood(case: Case) -> Stall | None:
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
    return stall_name(until, until[-1].t, until[0].t, offload=offload, world=world_of(case))


def _apart(timeouts: Iterable[Event]) -> list[str]:
    """Operations of one sequence number that differ between ranks: they took different paths through the model."""
    by: dict[str, set[str]] = {}
    for e in timeouts:
        m = re.search(r"SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)", e.text)
        if m:
            by.setdefault(m.group(1), set()).add(f"{m.group(2)} ({m.group(3)})")
    return next((sorted(kinds) for kinds in by.values() if len(kinds) > 1), [])


def _missing_ranks(case: Case, timeouts: Iterable[Event]) -> list[int]:
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


def builds(case: Case) -> Iterator[Finding]:
    """What compilers say about an op, without a traceback."""
    if case.outcome == "finished":
        return
    for line in case.tail[-3000:]:
        if _BUILD.search(line.text):
            yield Finding(
                Named("DR701", "likely", line.text.strip()[:300]),
                (case.line(line.offset, line.text),),
                tuple(repairs.build(case.config)),
                weight=45,
            )
            return


def numerics(case: Case) -> Iterator[Finding]:
    """Losses that are not finite or 0, a loss scale at its floor, overflow in most steps."""
    losses = [e for e in case.events if e.kind in ("step", "progress") and e.values.get("loss") is not None]
    if not losses:
        yield from _norms(case)
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
        yield Finding(
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
        yield Finding(
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
        yield Finding(
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
        yield Finding(
            Named("DR601", "possible", _("{n} steps were skipped for overflow").format(n=len(overflows))),
            tuple(case.line(e.offset, e.text) for e in overflows[-2:]),
            tuple(repairs.precision(case.config)),
            weight=20,
        )


_SKIPPED = re.compile(r"skipped iterations: *[1-9]")


def _norms(case: Case) -> Iterator[Finding]:
    """A log whose steps show no loss: gradients that are not numbers in each of the last steps, none of them skipped
    (a loss scale that walks down skips them)."""
    steps = [e for e in case.of("step") if e.values.get("grad_norm") is not None]
    bad = list(itertools.takewhile(lambda e: math.isnan(e.values["grad_norm"]), reversed(steps)))
    if len(bad) >= 3 and not any(_SKIPPED.search(e.text) for e in bad):
        yield Finding(
            Named("DR601", "likely", _("the gradient norm is not a number")),
            (case.line(bad[-1].offset, bad[-1].text),),
            (*_known(case), *repairs.precision(case.config)),
            weight=35,
        )


def _known(case: Case) -> tuple[Repair, ...]:
    """Wrong results that this release is known for with this config."""
    return prices.of_rules(case.config, deepspeed_release(case), world_of(case), ("silent-wrong",))


def _sound(e: Event) -> bool:
    """Whether loss and gradient norm of a step are numbers."""
    norm = e.values.get("grad_norm")
    return math.isfinite(e.values["loss"]) and (norm is None or not math.isnan(norm))


def _zero_and_nan(e: Event) -> bool:
    """Trainers show a NaN loss as 0 (``logging_nan_inf_filter``); the gradient norm tells."""
    norm = e.values.get("grad_norm")
    return bool(e.values["loss"] == 0) and norm is not None and math.isnan(norm)


def ooms(case: Case) -> list[Event]:
    """Lines about memory after which training did not go on. Where it went on after such words before (a batch that
    is left out, a sample that is printed), only a failure that somebody else reports makes the last ones count."""
    lines = case.of("oom")
    rest = [e for e in lines if not case.survived(e.offset)]
    return rest if len(rest) == len(lines) or case.of("rank_exit") else []


_GRAMMAR = re.compile(r"(?:^|[^\w'\"`(])((?:SyntaxError|IndentationError|TabError): .*)")


def unparsed(case: Case) -> Iterator[Finding]:
    """A script that Python cannot read: it says so without a traceback."""
    if case.outcome in ("finished", "stopped"):
        return
    lines = case.tail[-2000:]
    for i, line in enumerate(lines):
        m = _GRAMMAR.search(clean(line.text))
        place = m and re.search(
            r'File "(.+?)", line (\d+)\s*$', "\n".join(clean(x.text) for x in lines[max(0, i - 3) : i]), re.M
        )
        if not m or not place or case.survived(line.offset) or candidates(case):
            continue
        file, number = place.group(1), int(place.group(2))
        detail = m.group(1) + " " + _("(in {file}, line {line})").format(file=file, line=number)
        code = case.rank_code
        certainty = recorded(case, agrees=code is not None and code > 0)
        shown = (case.line(line.offset, line.text), Evidence(file, number, m.group(1)))
        yield Finding(Named("DR710", certainty, detail), shown, weight=74)
        return


def oom_lines(case: Case) -> Iterator[Finding]:
    """`CUDA out of memory` without a traceback: a cut log, or a script that caught it and printed it itself."""
    lines = ooms(case)
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
    yield Finding(
        Named(code, "possible", first_line(e.text)),
        (case.line(e.offset, e.text),),
        tuple(repairs.gpu_memory(case.config) if fixes is None else fixes),
        weight=49
        if code == "DR402"
        else 43
        if (case.rank_code or 0) > 0
        else 28,  # it says more than a bare code
    )


def spoken(case: Case) -> Iterator[Finding]:
    """Messages on lines of their own: cut logs, exceptions that a script caught and printed, words of C++ and of
    launchers. Never after a good end, and not where training went on afterwards."""
    if case.outcome in ("finished", "stopped"):
        return
    traced = [f for f in case.failures if not wraps(f)]
    lines = case.tail[-SPOKEN_LINES:]
    for i, said in messages.on_lines([clean(line.text) for line in lines]):
        line = lines[i]
        if case.survived(line.offset) or any(f.start <= line.offset <= f.offset for f in traced):
            continue
        certainty: Certainty = "likely" if case.outcome == "failed" and said.weight > 20 else "possible"
        text = line.text.strip()
        if said.code == "DR303" and re.search(r"to (\d+) from \1\b", text):
            continue
        if said.code == "DR401" and no_kills(case) and not re.search(r"oom|out of memory", text, re.I):
            continue
        yield Finding(
            Named(said.code, certainty, first_line(clean(text))),
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


def slow(case: Case) -> Iterator[Finding]:
    """Complaints about speed, for a log whose end is not known."""
    if case.outcome != "unknown":
        return
    pressure, steps = case.of("pressure"), len(case.of("step"))
    often = len(pressure) >= max(3, 0.2 * steps) if steps else True  # one flush at an odd batch is no trouble
    if often and sum(e.values["flushes"] for e in pressure) >= 2:
        yield Finding(
            Named("DR108", "possible", first_line(pressure[-1].text)),
            tuple(case.line(e.offset, e.text) for e in pressure[-2:]),
            tuple(repairs.of_cause("DR108", case.config, "")),
            weight=11,
        )
