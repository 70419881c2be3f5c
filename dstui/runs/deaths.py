"""How ranks and launchers ended without a word of their own: kills, signals, return codes, nodes that are gone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstui.i18n import _, ngettext
from dstui.runs import repairs
from dstui.runs.case import SPOKEN_LINES, Case, Certainty, Evidence, Finding, Named, first_line, recorded
from dstui.runs.exceptions import only_echoes, said_more
from dstui.runs.nodes import elsewhere, left_behind
from dstui.runs.processes import signal_name
from dstui.runs.repairs import Repair
from dstui.runs.samples import read_samples
from dstui.runs.tail import clean
from dstui.units import GiB, gib


def killed(case: Case) -> Iterator[Finding]:
    """SIGKILL and SIGTERM to a rank: by the kernel for lack of memory, or by somebody."""
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
        yield Finding(Named("DR721", recorded(case, agrees=True), _("a rank got SIGTERM")), shown, weight=55)
        return
    if code != -9 and not exits and not container and not log_137:
        return
    if code is not None and code > 0 and said_more(case):
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
    elif no_kills(case):
        node = _remote_node(case)
        yield Finding(
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
        yield Finding(
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
        yield Finding(Named("DR401", "possible"), tuple(evidence), weight=10)
        return
    else:
        certainty = "likely"
        detail = _("SIGKILL without a message; the kernel's count of out-of-memory kills is not known")
    yield Finding(
        Named("DR401", certainty, detail), tuple(evidence), repairs.host_memory(case.config), weight=80
    )
    if certainty != "certain":
        yield Finding(Named("DR721", "possible"), tuple(evidence), weight=10)


def no_kills(case: Case) -> bool:
    """Whether the supervisor looked at the kernel's counts, and they had not moved."""
    kills = _kills(case)
    return kills.get("system") == 0 and kills.get("cgroup") in (0, *((None,) if _remote_node(case) else ()))


def _remote_node(case: Case) -> str | None:
    """The node whose ranks failed first, where it is not the one of the supervisor: what was sampled is another's."""
    first = (case.exit or {}).get("first_node")
    return str(first) if first in elsewhere(case.manifest)[1] else None


def _kills(case: Case) -> Mapping[str, Any]:
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


def _roomy(case: Case) -> float | None:
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


def _memory_evidence(case: Case) -> list[Evidence]:
    """Host memory at the end, from the samples of the run."""
    if not case.manifest or _remote_node(case):
        return []
    samples = read_samples(Path(case.file).parent / "samples", 60)
    best = max((s for s in samples if s.host.used is not None), key=lambda s: s.host.used or 0, default=None)
    if best is None or not best.host.capacity:
        return []
    text = f"host memory {gib(best.host.used)} of {gib(best.host.capacity)} in the last minute"
    return [Evidence("samples/1s.jsonl", None, text)]


_SIGNALS = (-11, -6, -7, -4, -8)


def native(case: Case) -> Iterator[Finding]:
    """A crash in native code, or SIGBUS for a full /dev/shm."""
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
    certainty = recorded(case, agrees=True) if not shm else "likely" if small else "possible"
    named = Named("DR403" if shm else "DR712", certainty, detail)
    yield Finding(named, tuple(evidence), weight=50 if said_more(case) else 72)


SMALL_SHM = GiB
"""A /dev/shm that a data loader or NCCL fills; containers start with 64 MB, hosts with half of the RAM."""


def _shm_size(manifest: Mapping[str, Any]) -> int | None:
    facts = manifest.get("facts")
    host = facts.get("host") if isinstance(facts, Mapping) else None
    size = host.get("shm_total") if isinstance(host, Mapping) else None
    return size if isinstance(size, int) else None


def lost_node(case: Case) -> Iterator[Finding]:
    """A node that answered at the start and does not at the end."""
    if case.outcome != "failed" or case.exit is None:
        return
    for record in left_behind(case.exit.get("nodes")):
        if record.get("left") is not None or not record.get("met"):
            continue
        text = f"node {record['host']}: {record.get('detail') or record.get('problem')}"
        yield Finding(
            Named("DR723", "likely", _("node {host} does not answer any more").format(host=record["host"])),
            (Evidence("exit.json", None, text),),
            weight=45 if said_more(case) else 79,
        )
        return


def launcher_killed(case: Case) -> Iterator[Finding]:
    """The launcher was killed first, and its ranks were ended."""
    data = case.exit
    if data is None or case.outcome != "failed" or data.get("rank_code"):
        return
    if data.get("launcher_signal") or (
        "launcher" in str(data.get("reason")) and "was killed" in str(data.get("reason"))
    ):
        yield Finding(
            Named("DR722", "certain", str(data.get("reason"))),
            (Evidence("exit.json", None, str(data.get("reason"))),),
            weight=56,
        )


_LOCAL_RANK = 'parser.add_argument("--local_rank", type=int, default=-1)'


def plain_exit(case: Case) -> Iterator[Finding]:
    """A code without any traceback."""
    code = case.rank_code
    if code is None and case.exit is None and not case.failures:
        yield from _bad_arguments(case)
    if code is None or code <= 0 or case.outcome != "failed" or not only_echoes(case):
        return
    evidence = [case.line(e.offset, e.text) for e in case.of("rank_exit")[:1]]
    for line in reversed(case.tail[-200:]):
        if re.search(r"^usage: |: error: ", line.text):
            evidence.insert(0, case.line(line.offset, line.text))
            if re.search(r"unrecognized arguments:.*--local[-_]rank", line.text):
                yield Finding(
                    Named("DR713", recorded(case, agrees=True), line.text.strip()),
                    tuple(evidence),
                    (
                        Repair(_("in the script: {line}").format(line=_LOCAL_RANK)),
                        Repair(_("or leave the option out: {option}").format(option="--launcher torchrun")),
                    ),
                    weight=76,
                )
                return
            break
    yield Finding(
        Named("DR711", recorded(case, agrees=True), _("return code {code}").format(code=code)),
        tuple(evidence),
        weight=42,
    )


_ARGUMENT = re.compile(
    r"^(?:\S+ )?\S+\.py: error: (?:argument|the following arguments|unrecognized|ambiguous option)"
)


def _bad_arguments(case: Case) -> Iterator[Finding]:
    """A log that ends with what argparse says, without a launcher that tells the return code."""
    for line in case.tail[-6:]:
        if _ARGUMENT.search(clean(line.text)):
            shown = (case.line(line.offset, line.text),)
            yield Finding(Named("DR711", "likely", first_line(line.text.strip())), shown, weight=42)
            return


def vanished(case: Case) -> Iterator[Finding]:
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
        yield Finding(
            Named("DR401", "possible", _("a rank is gone without a word, and the launcher ended the others")),
            (case.line(ending.offset, clean(ending.text)),),
            repairs.host_memory(case.config),
            weight=15,
        )
    last = [line for line in case.tail if line.text.strip()][-3:]
    if last and last[-1].text.strip() == "Killed":
        yield Finding(
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
            yield Finding(
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


def ray(case: Case) -> Iterator[Finding]:
    """Ray lost a worker that said nothing; of the causes that it offers then, lack of memory is the first."""
    if case.outcome in ("finished", "stopped") or case.exit is not None:
        return
    gone = next((x for x in case.tail[-SPOKEN_LINES:] if _RAY_GONE.search(x.text)), None)
    if gone is not None and not case.survived(gone.offset):
        yield Finding(
            Named("DR401", "possible", _("a worker of Ray is gone without a word")),
            (case.line(gone.offset, clean(gone.text)),),
            repairs.host_memory(case.config),
            weight=9,
        )
