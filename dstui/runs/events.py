"""What a line of a training log says, for the formats of DeepSpeed 0.9.5-0.19.8, its launcher, torchrun, Hugging
Face Trainer (4.x and 5.x), LLaMA-Factory, ms-swift and plain scripts.

``Parser.feed(line)`` turns lines into ``Event``s; only the traceback spans lines. Line numbers and file names of
DeepSpeed's logger prefix change with every release and are never matched. Sources of the formats: DeepSpeed
``runtime/engine.py`` (``_report_progress``), ``utils/timer.py``, ``utils/logging.py``, ``launcher/launch.py``,
``runtime/fp16/loss_scaler.py``, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``; torch
``utils/cpp_extension.py``, ``distributed/elastic/multiprocessing/errors``, ``csrc/distributed/c10d/ProcessGroupNCCL.cpp``;
transformers ``trainer_callback.py``; tqdm ``std.py``; LLaMA-Factory ``train/callbacks.py``.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dstui.errors import DstuiError
from dstui.i18n import _, listed
from dstui.runs.tail import Line, clean

KINDS = (
    "step",  # step loss lr grad_norm skipped epoch tokens_per_second samples_per_second step_time total
    "throughput",  # step samples_per_second allocated peak_allocated (bytes)
    "timers",  # fwd bwd step ... in seconds, of one optimizer step
    "memory",  # allocated peak_allocated reserved peak_reserved (bytes)
    "eval",  # eval_loss ...
    "summary",  # train_runtime ...: the Trainer's last line
    "progress",  # done total desc rate: a tqdm bar
    "total",  # total: number of optimizer steps of the run
    "overflow",  # scale, new_scale, floor
    "pinned",  # bytes calls: host memory that DeepSpeed has pinned so far
    "pressure",  # flushes: allocator cache flushes since the last step
    "command",  # the launcher's command line
    "world",  # size
    "spawn",  # pid local_rank
    "killing",  # pid
    "rank_exit",  # pid code rank: a rank ended with this code (negative = signal)
    "failed_rank",  # rank: torchrun's summary names the ranks that failed, the root cause last
    "rank_ok",  # pid
    "signal",  # the launcher was asked to end
    "ops",  # name done: a compiler builds or loaded an op
    "loading",  # weights are being read
    "init",  # the engine is being set up
    "ready",  # the training loop has begun
    "error",  # type message frames: a whole Python traceback
    "oom",  # CUDA out of memory outside of a traceback
    "collective",  # NCCL or gloo complains
)


@dataclass(frozen=True)
class Event:
    """``kind`` is one of KINDS; ``values`` what the line said. ``time``: epoch seconds from the line's own stamp."""

    kind: str
    offset: int
    values: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    time: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Failure:
    """One Python traceback: of a chain (``During handling...``) the first is a Failure of its own.

    ``offset`` is that of the exception line, ``start`` that of ``Traceback (most recent call last)``.
    """

    type: str
    message: str
    details: tuple[str, ...]
    frames: tuple[Frame, ...]
    rank: int | None
    offset: int
    start: int
    source: str = ""
    """What a launcher or scheduler put before its lines: another one is another process."""
    chained: bool = False
    """Another exception follows, raised because of it or while it was handled."""
    aside: bool = False
    """It ended a thread, not its process (``Exception in thread ...``)."""

    @property
    def short(self) -> str:
        """The type without its module."""
        return self.type.rpartition(".")[2]

    @property
    def text(self) -> str:
        return "\n".join((f"{self.type}: {self.message}" if self.message else self.type, *self.details))


_NUMBER = r"[-+]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf"
_PREFIX = re.compile(
    r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.]?(\d*)\] \[([A-Z]+)\] \[[^\]]*\] ?(?:\[Rank (\d+)\] )?"
)
_RANK = re.compile(r"^\[(?:default|rank|Rank )(\d+)\]:? ?(?:\[rank\d+\]:? ?)?")
_STREAM = re.compile(
    r"^(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?|\d{1,4}: |"
    r"(?:\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})?\[\d+,\d+\]<std(?:out|err)>: ?|"
    r"\((?:[\w.]+ )?(?:rank=\d+,? ?)?pid=\d+(?:, ip=[\d.]+)?\) ?|[\w.-]{1,64} +\| |"
    r"[\w.-]{1,64}: (?=\[\d{4}-\d\d-\d\d |\[rank|\[default|\{'|\s*\w*Traceback \(|MA \d|steps: |\d+%\|))+"
)
"""What srun, mpirun, pdsh, Ray, docker and Kubernetes put before the lines of a process."""
_STEP = re.compile(r"step=(\d+), skipped=(\d+), lr=\[(.*?)\], mom=\[(.*)\]")
_THROUGHPUT = re.compile(
    r"micro_step=(\d+)/global_step=(\d+), RunningAvgSamplesPerSec=([\d.einf+-]+), CurrSamplesPerSec=([\d.einf+-]+)"
    r"(?:, MemAllocated=([\d.]+)GB, MaxMemAllocated=([\d.]+)GB)?"
)
_TIMERS = re.compile(r"time \(ms\)((?: \| [\w.]+: [\d.]+)+)")
_MEMORY = re.compile(r"^MA ([\d.]+) GB\s+Max_MA ([\d.]+) GB\s+CA ([\d.]+) GB\s+Max_CA (\d+) GB")
_COMM = re.compile(r"comm op: (\w+).*?\| time \(ms\): ([\d.]+)")
"""One collective of rank 0, as ``comms_logger`` prints it with ``verbose``."""
_PIPE = re.compile(r"^steps: (\d+) loss: ([\d.einfa+-]+) .*?iter time \(s\): ([\d.]+) samples/sec: ([\d.]+)")
_DICT = re.compile(r"\{'[^{}]*\}")
_PAIR = re.compile(r"'([\w/ .()-]+)': '?([^',}]+)'?")
_BAR = re.compile(r"^(?:(.*?):? *)?(\d{1,3})%\|[^|]*\| *(\d+)/(\d+) \[([^\]]*)\]")
_RATE = re.compile(r"([\d.]+)(it/s|s/it)")
_TOTAL = re.compile(r"(?:Total optimization steps|max_steps)\s*[=:]\s*([\d,]+)")
_FIELD = re.compile(
    r"(?<![\w.])(step|steps|iter|iteration|global_step|loss|train_loss|train/loss|lm loss|lr|learning[ _]rate|"
    r"grad[ _]norm|gnorm|grad\.? ?norm|tokens/s|tok/s|tokens_per_s(?:ec)?|tokens/sec(?:ond)?|samples/s(?:ec)?|"
    rf"step[ _]time|epoch)\s*[:=]?\s*\[?({_NUMBER})(?:\s*/\s*(\d+))?(?![\w])",
    re.IGNORECASE,
)
_SPEED = re.compile(r"(?<![\w.])(\d[\d,]*\.?\d*) ?(tok(?:ens?)?/s(?:ec)?|samples?/s(?:ec)?)\b", re.IGNORECASE)
"""A rate with its unit behind it."""
_NAMES = {
    "steps": "step", "iter": "step", "iteration": "step", "global_step": "step",
    "train_loss": "loss", "train/loss": "loss", "lm loss": "loss",
    "learning_rate": "lr", "learning rate": "lr",
    "grad norm": "grad_norm", "gnorm": "grad_norm", "grad.norm": "grad_norm", "grad. norm": "grad_norm",
    "tok/s": "tokens_per_second", "tokens/s": "tokens_per_second", "tokens/sec": "tokens_per_second",
    "tokens_per_s": "tokens_per_second", "tokens_per_sec": "tokens_per_second", "tokens/second": "tokens_per_second",
    "samples/s": "samples_per_second", "samples/sec": "samples_per_second",
    "step time": "step_time",
}  # fmt: skip
_HELD_OUT = re.compile(r"(?:eval|evaluation|val|valid|validation|test)[ /:-]*$", re.IGNORECASE)
"""Before ``loss``: it is not the training loss."""
_OVERFLOW = re.compile(r"OVERFLOW!|Reducing dynamic loss scale|Current loss scale already at minimum")
_SCALES = re.compile(r"(?:loss scale:? |from )([\d.e+]+),? ?(?:reducing )?to ([\d.e+]+)")
_OOM = re.compile(
    r"(?:CUDA|HIP|NPU) out of memory|OutOfMemoryError|Tried to allocate [\d.]+ [KMG]iB|CUBLAS_STATUS_ALLOC_FAILED|"
    r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA [cm]alloc"
)
_PINNED = re.compile(
    r"^\[pinned-memory[^\]]*\] (?:crossed [\d.]+ \w+: )?([\d.]+) ([KMG]?B) pinned across (\d+) alloc"
)
"""``utils/pin_memory_tracker.py``, read in 0.19.8."""
_PINNED_UNIT = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_FLUSH = re.compile(r"(\d+) pytorch allocator cache flushes since last step")
_SPAWNED = re.compile(r"process (\d+) spawned with command")
_RETURN = re.compile(r"return code = (-?\d+)")
_LOCAL = re.compile(r"'--local[-_]rank=(\d+)'")
_DIED = re.compile(r"died with <Signals\.SIG\w+: (\d+)>|terminated with signal SIG(KILL|SEGV|ABRT|BUS|TERM)")
_SUMMARY_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)")
_SUCCESS = re.compile(r"Process (\d+) exits successfully")
_KILLING = re.compile(r"Killing subprocess (\d+)")
_ELASTIC = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_WORLD = re.compile(r"dist_world_size=(\d+)")
_OPS = re.compile(
    r"Building extension module (\w+)|Emitting ninja build file .*/(\w+)/build\.ninja|Loading extension module (\w+)|"
    r"Time to load (\w+) op: ([\d.]+)|^DeepSpeed ([\w.]+) built successfully|^\[\d+/\d+\] \S*(?:nvcc|c\+\+|g\+\+|hipcc) |"
    r"Creating extension directory \S*?/(\w+)\.\.\.|^ninja: no work to do"
)
_LOADING = re.compile(r"Loading checkpoint shards|loading weights file|Loading weights|Fetching \d+ files")
_INIT = re.compile(
    r"DeepSpeed info: version=|Creating .{0,30}ZeRO stage|DeepSpeed Basic Optimizer|DeepSpeed Final Optimizer|"
    r"DeepSpeedEngine configuration|distributed groups summary|Initializing TorchBackend|Stage3 initialize|"
    r"[Aa]dam [Oo]ptimizer #\d+ is created"
)
_READY = re.compile(r"\*{3,} Running training \*{3,}")
_COLLECTIVE = re.compile(
    r"Watchdog caught collective operation timeout|NCCL WARN (?!.*(?:libibverbs|[Pp]lugin|MSCCL|NUMA|cuMem))|NCCL error|ncclRemoteError|ncclSystemError|"
    r"ncclUnhandledCudaError|ncclInternalError|Some NCCL operations have failed or timed out|"
    r"Connection (?:closed by peer|reset by peer)|Gloo connectFullMesh failed|collective operation timeout|due to collective timeout|failure detected by watchdog|"
    r"watchdog got stuck for|ProcessGroupNCCL watchdog hang|failed to pass monitoredBarrier"
)
_TIMED_OUT = re.compile(r"timeout|timed out|watchdog|monitoredBarrier")
_TRACEBACK = re.compile(r"^(.*?)(?:Original )?Traceback \(most recent call last\):\s*$")
_BOXED = re.compile(r"^(.*?)[╭┌+][─-]+ Traceback \(most recent call last\) [─-]+[╮┐+]\s*$")
"""Tracebacks as rich draws them: accelerate to 0.25, Lightning, typer."""
_BOX_FRAME = re.compile(r"^[│|] (\S.*?):(\d+) in (\S+)")
_DRAWN = re.compile(r"^.*\d%\|.*?\| *\d+/\d+ \[[^\]]*\] *")
"""A bar that was being drawn when something else began."""
_MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?|\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}"
)
_IGNORED = re.compile(r"^(.*?)Exception ignored in")
_THREAD = re.compile(r"^(.*?)Exception in thread \S")
_FRAME = re.compile(r'^\s+File "(.*?)", line (\d+), in (.*)$')
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$")
_INSET = re.compile(r"^ {1,8}[A-Za-z_][\w.]*(?:Error|Exception)(?:: \S.*)?$")
"""An exception that somebody set in: below the frames it can be nothing else."""
_AFTER = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|\[\d{4}-\d\d-\d\d|"
    r"\[?[WEIF]\d{4} \d\d:\d\d|\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\[(?:rank|default)\d+\]|(?:step|iter)\b|\{'|"
    r"\s*\[(?:WARNING|INFO|ERROR)\]|(?:WARNING|INFO|ERROR):|Exception (?:ignored in|in thread)|srun: |slurmstepd: ",
    re.IGNORECASE,
)
"""Lines that are no longer part of an exception's message."""
_TRIGGER = re.compile(
    r"step|loss|pinned across|time \(ms\)|MA \d|\d%\||OVERFLOW|cache flushes|spawned|exits |Killing sub|exitcode|world_size=|extension|"
    r"built successfully|op: |^\[\d+/\d+\]|^ninja|oading|etching|DeepSpeed|ZeRO stage|is created|groups summary|"
    r"Tried to allocate|ALLOC_FAILED|TorchBackend|Running training|NCCL|nccl|Gloo|collective|monitoredBarrier|Connection|Traceback|out of memory|OutOfMemory|SIGTERM|"
    r"SIGINT|cmd = |iter|return code|signal SIG|Signals\.SIG|^\s*rank +: |Exception i",
    re.IGNORECASE,
)
GB = 1 << 30
"""DeepSpeed divides by 1024**3 and prints GB (``utils/timer.py``, ``runtime/utils.py`` see_memory_usage)."""


def number(text: Any) -> float | None:
    """A float from what logs hold: ``'6.971'``, ``1,024``, ``nan``; None for anything else."""
    try:
        return float(str(text).replace(",", "").replace("_", ""))
    except ValueError:
        return None


def _stamp(date: str, millis: str) -> float | None:
    second = _second(date)
    return None if second is None else second + (int(millis) / 1000 if millis else 0)


@lru_cache(maxsize=256)
def _second(date: str) -> float | None:
    """Lines of one second are many; reading a date is dear."""
    try:
        return time.mktime(time.strptime(date, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _first(text: str) -> float | None:
    """First number of ``0.001, 0.002``."""
    return number(text.partition(",")[0].strip(" []'"))


STEP_NAMES = ("step", "total", "loss", "lr", "grad_norm", "epoch", "tokens_per_second", "samples_per_second",
              "step_time")  # fmt: skip


def step_pattern(text: str) -> re.Pattern[str]:
    """A regular expression of a person for the lines on which a script reports a step, with named groups of
    STEP_NAMES: ``it (?P<step>\\d+) .* L=(?P<loss>[\\d.]+)``. Raises DstuiError."""
    try:
        pattern = re.compile(text)
    except re.error as e:
        raise DstuiError(
            _("--progress {text}: no regular expression: {cause}").format(text=text, cause=e)
        ) from None
    names = set(pattern.groupindex)
    if not names or not names <= set(STEP_NAMES):
        raise DstuiError(
            _("--progress {text}: it needs named groups").format(text=text),
            _("(?P<step>...) and others of: {names}").format(names=listed(STEP_NAMES)),
        )
    return pattern


class _Trace:
    """A traceback that is still being printed.

    ``tag``: what a launcher, scheduler or logger puts before each of its lines; times in it change from line to line.
    """

    def __init__(self, start: int, tag: str, boxed: bool = False) -> None:
        self.start = start
        self.tag = tag
        self.boxed = boxed
        self.note: str | None = None
        self.rank = _rank_of(tag)
        self.prefix = _as_prefix(tag)
        self.frames: list[Frame] = []
        self.head: tuple[int, str, str] | None = None
        self.details: list[str] = []
        self.lines = 0
        self.chained = False

    def done(self) -> Failure | None:
        if self.head is None or self.note == "ignored":
            return None
        offset, kind, message = self.head
        while self.details and not self.details[-1].strip():
            self.details.pop()
        return Failure(
            kind,
            message,
            tuple(self.details),
            tuple(self.frames[-60:]),
            self.rank,
            offset,
            self.start,
            _MOMENT.sub("", self.tag).strip(),
            self.chained,
            self.note == "thread",
        )


def _rank_of(tag: str) -> int | None:
    m = re.search(r"(?:rank|default|Rank |rank=)(\d+)\]?", tag) or re.match(r"^(\d{1,4}): ?$", tag)
    return int(m.group(1)) if m else None


def _as_prefix(tag: str) -> re.Pattern[str] | None:
    if not tag.strip():
        return None
    parts = [re.escape(part) for part in _MOMENT.split(tag.rstrip())]
    moment = r"(?:\d{4}-\d\d-\d\d\S*(?: \d\d:\d\d:\d\d\S*)?|\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})"
    return re.compile(moment.join(parts) + " ?")


class Parser:
    """Lines in, events out. Keeps nothing but the tracebacks that are open, one for each source of lines."""

    MAX_DETAILS = 40
    MAX_LINES = 2000

    def __init__(self, pattern: str | None = None) -> None:
        """``pattern``: how the script reports a step (``step_pattern``)."""
        self._open: dict[str, _Trace] = {}
        self._own = step_pattern(pattern) if pattern else None
        self._notes: dict[str, str] = {}
        """What Python said before the next traceback of a source: that it goes on (``Exception ignored in``), or that
        a thread ended by it."""

    def feed_all(self, lines: Iterable[Line]) -> list[Event]:
        events: list[Event] = []
        for line in lines:
            events += self.feed(line)
        return events

    def feed(self, line: Line) -> list[Event]:
        """Events of one line; a traceback becomes an event with the first line that is no longer part of it."""
        text = line.text
        if self._open:
            closed = self._in_traceback(line)
            if closed is None:
                return []
            return closed + self._one(line, text)
        if (
            "step" not in text  # most of the lines that count have it; this search is the dear one
            and not _TRIGGER.search(text)
            and not (self._own and self._own.search(text))
        ):
            return []
        return self._one(line, text)

    def finish(self) -> list[Event]:
        """Tracebacks that the end of the log closes."""
        return [e for tag in list(self._open) for e in self._close(tag)]

    def progress(self, line: Line) -> list[Event]:
        """What an unterminated line tells (a bar that is being drawn); opens and closes nothing."""
        return self._bar(line, clean(line.text)) if "%|" in line.text else []

    # -- tracebacks ------------------------------------------------------------------------------------------------

    def _close(self, tag: str) -> list[Event]:
        trace = self._open.pop(tag)
        failure = trace.done()
        if failure is None:
            return []
        return [Event("error", failure.offset, {"failure": failure}, rank=failure.rank, text=failure.text)]

    def _start(self, line: Line, text: str) -> list[Event] | None:
        """Open the traceback that begins here; None when none does."""
        if "Traceback (most recent call last)" not in text:
            return None
        if "%|" in text:
            text = _DRAWN.sub("", text)
        m = _TRACEBACK.match(text)
        boxed = None if m else _BOXED.match(text)
        if m is None and boxed is None:
            return None
        tag = str((m or boxed).group(1))  # type: ignore[union-attr]
        if len(tag) > 120:
            tag = ""
        key = _MOMENT.sub("", tag).strip()
        closed = self._close(key) if key in self._open else []
        trace = _Trace(line.offset, tag, boxed is not None)
        trace.note = self._notes.pop(key, None)
        self._open[key] = trace
        return closed

    def _owner(self, text: str) -> tuple[str, str] | None:
        """Key of the open traceback that a line belongs to, and the line without its tag."""
        best: tuple[int, str] | None = None
        for key, trace in self._open.items():
            m = trace.prefix.match(text) if trace.prefix else None
            if m and (best is None or m.end() > best[0]):
                best = (m.end(), key)
        if best is not None:
            return best[1], text[best[0] :]
        if "" not in self._open and _FRAME.match(text):
            # a logger's prefix stood before the first line only
            fresh = next((k for k, t in self._open.items() if not t.frames and t.head is None), None)
            if fresh is not None:
                self._open[""] = self._open.pop(fresh)
                self._open[""].prefix = None
        if "" in self._open and not _RANK.match(text):
            return "", text
        return None

    def _in_traceback(self, line: Line) -> list[Event] | None:
        """None: the line belongs to an open traceback. Otherwise the tracebacks that it closed.

        torch prefixes a rank's lines with ``[rankN]:`` once the process group is up, so two ranks stay apart;
        before that their lines may interleave, and the first exception line is taken.
        """
        text = clean(line.text) if "\x1b" in line.text else line.text
        owned = self._owner(text)
        if owned is None:
            return []
        key, body = owned
        trace = self._open[key]
        if trace.head is not None and self._note(text):
            return self._close(key)
        trace.lines += 1
        if trace.lines > self.MAX_LINES or "Traceback (most recent call last)" in body:
            return self._close(key)
        if trace.head is None:
            if trace.boxed and body[:1] in "│|╰└+":
                boxed = _BOX_FRAME.match(body)
                if boxed:
                    trace.frames.append(Frame(boxed.group(1), int(boxed.group(2)), boxed.group(3)))
                return None
            frame = _FRAME.match(body)
            if frame:
                trace.frames.append(Frame(frame.group(1), int(frame.group(2)), frame.group(3)))
                return None
            inset = _INSET.match(body) if trace.frames else None
            if (body[:1].isspace() or not body) and not inset:
                return None
            m = _EXCEPTION.match(body.lstrip() if inset else body)
            if m and (m.group(2) is not None or m.group(1)[0].isupper() or "." in m.group(1)):
                trace.head = (line.offset, m.group(1), (m.group(2) or "").strip())
                # torchrun's summary follows: its lines are events of their own
                return self._close(key) if m.group(1).endswith("ChildFailedError") else None
            return []
        if len(trace.details) >= self.MAX_DETAILS or _AFTER.match(body) or _bar_like(body):
            trace.chained = "above exception" in body
            return self._close(key)
        trace.details.append(clean(body))
        return None

    # -- one line --------------------------------------------------------------------------------------------------

    def _one(self, line: Line, raw: str) -> list[Event]:
        text = clean(raw)
        opened = self._start(line, text)
        if opened is not None:
            return opened
        rank: int | None = None
        stamp: float | None = None
        stream = _STREAM.match(text)
        rest = text[stream.end() :] if stream else text
        m = _PREFIX.match(rest)
        if m:
            stamp = _stamp(m.group(1), m.group(2))
            rank = int(m.group(4)) if m.group(4) else None
        else:
            m = _RANK.match(rest)
            rank = int(m.group(1)) if m else None
        body = rest[m.end() :] if m else rest
        self._note(text)
        found = self._read(line, body, text)
        if not found:
            return []
        kind, values = found
        return [Event(kind, line.offset, values, rank, stamp, text)]

    def _note(self, text: str) -> bool:
        """Whether the line says what the next traceback of its source is worth."""
        if "Exception i" not in text:
            return False
        for pattern, note in ((_IGNORED, "ignored"), (_THREAD, "thread")):
            m = pattern.match(text)
            if m:
                self._notes[_MOMENT.sub("", m.group(1)).strip()] = note
                return True
        return False

    def _bar(self, line: Line, text: str) -> list[Event]:
        found = self._read_bar(text)
        return [Event("progress", line.offset, found, text=text)] if found else []

    def _read_bar(self, text: str) -> dict[str, Any] | None:
        m = _BAR.match(text.strip())
        if not m:
            return None
        speed = _RATE.search(m.group(5))
        rate = number(speed.group(1)) if speed else None
        seconds = None if not rate or not speed else rate if speed.group(2) == "s/it" else 1 / rate
        found: dict[str, Any] = {
            "desc": (m.group(1) or "").strip(" :"),
            "done": int(m.group(3)),
            "total": int(m.group(4)),
            "seconds": seconds,
        }
        shown = _read_fields(m.group(5))  # tqdm's postfix: `, loss=1.23, lr=1e-5`
        if shown:
            found["loss"], found["lr"] = shown[1].get("loss"), shown[1].get("lr")
        return found

    def _read_own(self, text: str) -> tuple[str, dict[str, Any]] | None:
        m = self._own.search(text) if self._own else None
        if m is None:
            return None
        values = {name: number(value) for name, value in m.groupdict().items() if value is not None}
        known: dict[str, Any] = {k: v for k, v in values.items() if v is not None}
        for name in ("step", "total"):
            if name in known:
                if not math.isfinite(known[name]):
                    return None
                known[name] = int(known[name])
        return ("step", {**known, "source": "script"}) if known else None

    def _read(self, line: Line, body: str, text: str) -> tuple[str, dict[str, Any]] | None:
        own = self._read_own(text)
        if own is not None:
            return own
        if "step=" in body:
            m = _STEP.search(body)
            if m:
                return "step", {
                    "step": int(m.group(1)),
                    "skipped": int(m.group(2)),
                    "lr": _first(m.group(3)),
                    "source": "deepspeed",
                }
            m = _THROUGHPUT.search(body)
            if m:
                return "throughput", {
                    "step": int(m.group(2)),
                    "samples_per_second": number(m.group(4)),
                    "samples_per_second_mean": number(m.group(3)),
                    "allocated": _bytes(m.group(5)),
                    "peak_allocated": _bytes(m.group(6)),
                }
        if "comm op:" in body:
            m = _COMM.search(body)
            if m:
                return "comm", {"op": m.group(1), "seconds": float(m.group(2)) / 1000}
        if "time (ms)" in body:
            m = _TIMERS.search(body)
            if m:
                values = {
                    k: float(v) / 1000
                    for k, v in (p.split(": ") for p in m.group(1).strip(" |").split(" | "))
                }
                return "timers", values
        if body.startswith("MA "):
            m = _MEMORY.match(body)
            if m:
                names = ("allocated", "peak_allocated", "reserved", "peak_reserved")
                return "memory", {n: _bytes(v) for n, v in zip(names, m.groups(), strict=True)}
        if "%|" in body:
            bar = self._read_bar(body)
            if bar:
                if _LOADING.search(bar["desc"]):
                    return "loading", bar
                return "progress", bar
        if "{'" in body:
            found = self._read_dict(body)
            if found:
                return found
        if body.startswith('{"'):
            found = _read_json(body)
            if found:
                return found
        if _OVERFLOW.search(body):
            m = _SCALES.search(body)
            return "overflow", {
                "scale": number(m.group(1)) if m else None,
                "new_scale": number(m.group(2)) if m else None,
                "floor": "already at minimum" in body,
            }
        for pattern, read in _SIMPLE:
            m = pattern.search(body)
            if m:
                told = _read_fields(body[: m.start()]) if pattern is _OOM else None
                if told and told[0] == "step" and told[1].get("loss") is not None:
                    return told  # a report with a sample beside it that speaks of memory
                return read(m, body)  # type: ignore[no-any-return]
        if _TOTAL.search(body):
            m = _TOTAL.search(body)
            total = number(m.group(1)) if m else None
            if total and total > 0:
                return "total", {"total": int(total)}
        return _read_fields(body)

    def _read_dict(self, body: str) -> tuple[str, dict[str, Any]] | None:
        m = _DICT.search(body)
        if not m:
            return None
        pairs = {k: v.strip() for k, v in _PAIR.findall(m.group())}
        known = {k: number(v) for k, v in pairs.items()}
        values: dict[str, Any] = {
            "loss": known.get("loss"),
            "lr": known.get("learning_rate", known.get("lr")),
            "grad_norm": known.get("grad_norm"),
            "epoch": known.get("epoch"),
            "source": "trainer",
        }
        pace = known.get("train_speed(iter/s)")
        if pace:
            values["step_time"] = 1 / pace
        counter = pairs.get("global_step/max_steps", "")
        if "/" in counter:
            done, _, total = counter.partition("/")
            values["step"], values["total"] = int(done), int(total)
        if "train_runtime" in known:
            return "summary", {k: v for k, v in known.items() if v is not None}
        if any(k.startswith("eval_") for k in known):
            return "eval", {k: v for k, v in known.items() if v is not None}
        if values["loss"] is None:
            return None
        return "step", {k: v for k, v in values.items() if v is not None}


def parser_of(manifest: Mapping[str, Any]) -> Parser:
    """A parser that knows how this run's script reports a step."""
    spec = manifest.get("spec")
    own = spec.get("progress") if isinstance(spec, Mapping) else None
    return Parser(own if isinstance(own, str) else None)


def _bar_like(text: str) -> bool:
    return "%|" in text and _BAR.match(text.strip()) is not None


def _bytes(text: str | None) -> int | None:
    return None if text is None else round(float(text) * GB)


def _read_json(body: str) -> tuple[str, dict[str, Any]] | None:
    """LLaMA-Factory's ``trainer_log.jsonl`` and ms-swift's ``logging.jsonl``."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    step = data.get("current_steps")
    total = data.get("total_steps")
    counter = data.get("global_step/max_steps")
    if isinstance(counter, str) and "/" in counter:
        step, total = (int(x) for x in counter.split("/", 1))
    if step is None:
        return None
    values = {
        "step": step,
        "total": total,
        "loss": number(data.get("loss")),
        "lr": number(data.get("lr", data.get("learning_rate"))),
        "grad_norm": number(data.get("grad_norm")),
        "epoch": number(data.get("epoch")),
        "tokens_per_second": number(data.get("throughput")),
        "source": "trainer",
    }
    return "step", {k: v for k, v in values.items() if v is not None}


def _read_fields(body: str) -> tuple[str, dict[str, Any]] | None:
    """``step 3 loss 1.25 lr 1e-4``, ``iter 30: loss=2.1``, ``[10/100] loss: 3.0`` as scripts print them."""
    values: dict[str, Any] = {}
    for m in _FIELD.finditer(body):
        name = m.group(1).lower()
        name = _NAMES.get(name, name.replace(" ", "_"))
        value = number(m.group(2))
        if value is None or name in values:
            continue
        if name == "loss" and _HELD_OUT.search(body[: m.start()]):
            continue
        if name == "step":
            if value != int(value) if value == value and abs(value) != float("inf") else True:
                continue
            values["step"] = int(value)
            if m.group(3):
                values["total"] = int(m.group(3))
        else:
            values[name] = value
    speed = _SPEED.search(body)
    if speed and not {"tokens_per_second", "samples_per_second"} & set(values):
        values["samples_per_second" if speed.group(2)[0] in "sS" else "tokens_per_second"] = number(
            speed.group(1)
        )
    if "loss" not in values and not (
        "step" in values and len(values) > 1 and set(values) - {"step", "epoch", "total"}
    ):
        return None
    if "step" not in values:
        m2 = re.match(r"^\s*\[?(\d+)/(\d+)\]?", body)
        if m2:
            values["step"], values["total"] = int(m2.group(1)), int(m2.group(2))
    values["source"] = "script"
    return "step", values


def _ops(m: re.Match[str], body: str) -> tuple[str, dict[str, Any]]:
    name = next(
        (g for g in (m.group(1), m.group(2), m.group(3), m.group(4), m.group(6), m.group(7)) if g), None
    )
    done = m.group(4) is not None or m.group(6) is not None
    return "ops", {"name": name.rpartition(".")[2] if name else None, "done": done}


def _signal(m: re.Match[str]) -> int:
    return (
        int(m.group(1))
        if m.group(1)
        else {"KILL": 9, "SEGV": 11, "ABRT": 6, "BUS": 7, "TERM": 15}[m.group(2)]
    )


def _spawn(m: re.Match[str], body: str) -> tuple[str, dict[str, Any]]:
    local = _LOCAL.search(body)
    return "spawn", {"pid": int(m.group(1)), "local_rank": int(local.group(1)) if local else None}


def _return(m: re.Match[str], body: str) -> tuple[str, dict[str, Any]]:
    local = _LOCAL.search(body)
    return "rank_exit", {"code": int(m.group(1)), "rank": int(local.group(1)) if local else None, "pid": None}


_SIMPLE: tuple[tuple[re.Pattern[str], Any], ...] = (
    (_PINNED, lambda m, b: ("pinned", {"bytes": round(float(m.group(1)) * _PINNED_UNIT[m.group(2)]), "calls": int(m.group(3))})),
    (_FLUSH, lambda m, b: ("pressure", {"flushes": int(m.group(1))})),
    (_SPAWNED, _spawn),
    (_RETURN, _return),
    (_SUMMARY_CODE, lambda m, b: ("rank_exit", {"code": int(m.group(1)), "rank": None, "pid": int(m.group(2))})),
    (_SUMMARY_RANK, lambda m, b: ("failed_rank", {"rank": int(m.group(1))})),
    (_DIED, lambda m, b: ("rank_exit", {"code": -_signal(m), "rank": None, "pid": None})),
    (_ELASTIC, lambda m, b: ("rank_exit", {"code": int(m.group(1)), "rank": int(m.group(2)), "pid": int(m.group(3))})),
    (_SUCCESS, lambda m, b: ("rank_ok", {"pid": int(m.group(1))})),
    (_KILLING, lambda m, b: ("killing", {"pid": int(m.group(1))})),
    (_WORLD, lambda m, b: ("world", {"size": int(m.group(1))})),
    (re.compile(r"^cmd = "), lambda m, b: ("command", {})),
    (re.compile(r"Main process received SIG(?:TERM|INT)"), lambda m, b: ("signal", {})),
    (_OOM, lambda m, b: ("oom", {})),
    (_COLLECTIVE, lambda m, b: ("collective", {"timeout": "NCCL WARN" not in b and _TIMED_OUT.search(b) is not None})),
    (_OPS, _ops),
    (_READY, lambda m, b: ("ready", {})),
    (_LOADING, lambda m, b: ("loading", {})),
    (_PIPE, lambda m, b: ("step", {"step": int(m.group(1)), "loss": number(m.group(2)), "step_time": number(m.group(3)),
                                   "samples_per_second": number(m.group(4)), "source": "deepspeed"})),
    (_INIT, lambda m, b: ("init", {})),
)  # fmt: skip
