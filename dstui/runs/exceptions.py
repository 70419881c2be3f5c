"""What an exception says: which of several is the cause, and what it names.

What the first failing rank says counts; errors of its peers that only lost the connection do not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstui.i18n import _, listed
from dstui.runs import messages, repairs
from dstui.runs.case import (
    SPOKEN_LINES,
    Case,
    Certainty,
    Evidence,
    Finding,
    Named,
    caught,
    ended_by_exception,
    first_line,
    recorded,
)
from dstui.runs.events import Failure
from dstui.runs.ops import extensions_root
from dstui.runs.repairs import Repair
from dstui.units import GiB, gib

SECONDARY = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote worker crashing|Socket Timeout|ncclRemoteError|"
    r"wait timeout|NCCL communicator was aborted|failed to recv|recvValue failed|DistStoreError|"
    r"store.*(?:timed? ?out|timeout)|connection to the C10d store has failed|Timed out waiting \d+ms for (?:recv|send)|unbound_buffer",
    re.IGNORECASE,
)
"""What a rank says when a peer is gone: the effect of a failure elsewhere."""


_WRAPPERS = ("ChildFailedError", "SystemExit", "KeyboardInterrupt", "SignalException", "CalledProcessError",
             "ProcessRaisedException", "ProcessExitedException", "ActorDiedError", "RayActorError", "WorkerCrashedError")  # fmt: skip
"""What launchers raise because a rank failed."""
_PASSED_ON = re.compile(r"exited with non-zero (?:exit )?(?:status|code)|returned non-zero exit status")
"""What a script raises because a program that it started failed: the words of that program are elsewhere."""


def wraps(f: Failure) -> bool:
    """Whether a launcher or a script raised it because another process failed."""
    return f.short in _WRAPPERS or (f.short == "RuntimeError" and _PASSED_ON.search(f.message) is not None)


def candidates(case: Case) -> list[Failure]:
    """Tracebacks that could be the cause, the first failing rank's in the order in which they were raised.

    Of a chain (``During handling of the above exception...``) each is its own. A peer's lost connection counts
    only when nobody says more. Those that somebody caught and printed come last.
    """
    failures = [f for f in case.failures if not wraps(f)]
    inner = [f for f in failures if not re.match(r"Caught \w+ in DataLoader worker", f.message)]
    failures = inner or failures
    real = [f for f in failures if not SECONDARY.search(f.text)]
    first_rank = case.exit.get("first_rank") if case.exit else None
    if first_rank is None:  # torchrun's summary names the first to fail as its last
        first_rank = next((e.values["rank"] for e in reversed(case.of("failed_rank"))), None)
    own = [f for f in real if f.rank is not None and f.rank == first_rank]
    pool = sorted(own or real or failures, key=lambda f: f.offset)
    mine = [f for f in pool if (f.rank, f.source) == (pool[0].rank, pool[0].source)]
    fatal = uncaught(mine)
    return [f for f, ends in zip(mine, fatal, strict=True) if ends] + [
        f for f, ends in zip(mine, fatal, strict=True) if not ends
    ]


def uncaught(failures: Sequence[Failure]) -> list[bool]:
    """For each whether it ended its process: nobody caught it, or what was raised in its wake."""
    found: list[bool] = []
    for f in reversed(failures):
        found.append(not caught(f) or (f.chained and bool(found) and found[-1]))
    return found[::-1]


def said_more(case: Case) -> bool:
    """Whether some rank told more than that its peers are gone."""
    return any(not SECONDARY.search(f.text) for f in candidates(case))


def only_echoes(case: Case) -> bool:
    """Whether every traceback is a peer that lost its connection, and none is of the rank that ended first."""
    failures = candidates(case)
    if said_more(case):
        return False
    first = case.exit.get("first_rank") if case.exit else None
    if first is None:
        first = next((e.values["rank"] for e in case.of("rank_exit") if e.values["code"]), None)
    return first is not None and all(f.rank != first for f in failures)


def exceptions(case: Case) -> Iterator[Finding]:
    """The exception that ended the first failing rank."""
    failures = candidates(case)
    if not failures or case.outcome == "finished":
        return
    certainty = recorded(case, agrees=ended_by_exception(case))
    judged = [(f, *_name(case, f, certainty)) for f in failures[:8]]
    # an exception that only follows another tells more than "the script raised" if it is special
    failure, named, fixes = judged[0]
    if named.code == "DR710":
        failure, named, fixes = next((j for j in judged if j[1].code not in _VAGUE), judged[0])
    if named.code in ("DR705", "DR706"):  # the last of such a chain names the file, the first only a decoder
        failure, named, fixes = [j for j in judged if j[1].code in ("DR705", "DR706")][-1]
    ended = next(ends for f, ends in zip(failures, uncaught(failures), strict=True) if f is failure)
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
    echo = named.code == "DR502" or (named.code == "DR504" and SECONDARY.search(failure.text))
    weight = 40 if echo else 75
    yield Finding(named, tuple(evidence), tuple(fixes), weight=weight)


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


def _name(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
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
        return Named("DR203", certainty, first_line(text)), repairs.of_cause("DR203", case.config, text)
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
        detail = first_line(text) + "; " + _("DeepSpeed found no card and works on the CPU")
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
        return Named("DR501", "likely", first_line(text)), []
    if re.search(r"timed out|timeout", text, re.I) and "init_process_group" in " ".join(
        x.function for x in f.frames
    ):
        return Named("DR504", certainty, first_line(text)), []
    if (
        (said is not None and said.code == "DR502")
        or SECONDARY.search(text)
        or re.search(r"NCCL (?:error|Error)|nccl(?:System|Unhandled|Internal|Invalid)|DistBackendError", text)
    ):
        weaker = "likely" if certainty == "certain" else "possible"
        return Named("DR502", weaker, first_line(text)), []
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
        return Named("DR715", certainty, first_line(f"{f.short}: {f.message}")), []
    return Named("DR710", certainty, _at(f)), []


_CPU_ACCELERATOR = re.compile(r"Setting ds_accelerator to cpu|deepspeed_shm_comm(?:_op)?\b")
"""What DeepSpeed says when it took the CPU for its accelerator: it saw no card, or DS_ACCELERATOR says so."""


def _on_cpu(case: Case) -> bool:
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


def _splits(case: Case, files: str) -> bool:
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
        return first_line(f.message or f.text)
    begin = f.text.rfind("\n", 0, m.start()) + 1
    return first_line(f.text[begin:].strip())


_MISMATCH = re.compile(r"- ds ([\w.]+)=(\S+) vs hf (\w+)=(\S+)|mismatch TrainingArguments values")


def _mismatch(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    """transformers compares the config with TrainingArguments (``integrations/deepspeed.py``)."""
    pairs = [(m.group(1), m.group()[2:]) for m in _MISMATCH.finditer(f.text) if m.group(1)]
    detail = "; ".join(shown for _key, shown in pairs) or first_line(f.text)
    edits = []
    for key, _shown in pairs:
        pointer = "/" + key.replace(".", "/")
        if repairs.has(case.config, pointer):
            edits.append({"op": "replace", "path": pointer, "value": "auto"})
    fixes = [Repair(_("let the Trainer fill these values: auto"), tuple(edits))]
    return Named("DR705", certainty, detail, _checkpoint(detail, None)), fixes


def _extensions(case: Case) -> Path | None:
    """Where this run's ranks look for built ops; None where the environment of the run is not known."""
    if not case.manifest:
        return None
    return extensions_root({**(case.manifest.get("env_caller") or {}), **(case.manifest.get("env") or {})})


def _is_build(f: Failure, files: str, text: str) -> bool:
    return "cpp_extension.py" in files or (
        f.short in ("AttributeError", "ImportError", "OSError")
        and ("op_builder" in files or "ds_opt_adam" in text)
    )


def _build(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    text = f.text
    if "async_io" in text or "libaio" in text:
        hint = Repair(
            _("install libaio with its headers (Debian, Ubuntu: libaio-dev): NVMe offload needs it")
        )
        return Named("DR701", certainty, first_line(text)), [hint]
    half = re.search(r"(/\S+)/[^/\s]+\.so: cannot open shared object file", text)
    again = (
        [Repair(_("delete the half-built op: rm -r {folder}").format(folder=half.group(1)))] if half else []
    )
    return Named("DR701", certainty, first_line(text)), [*again, *repairs.build(case.config)]


def _driver_oom(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    """The driver's own error, not the allocator's: host memory that could not be pinned (WSL2 limits it), or a card
    with no room for a context."""
    functions = " ".join(x.function for x in f.frames)
    pinned = "pin_memory" in functions or "pin_memory" in f.text or "page-lock" in f.text
    weaker: Certainty = certainty if pinned else "possible"
    if pinned or not f.frames or repairs.offloads(case.config):
        return Named("DR402", weaker, first_line(f.text)), repairs.pinning(case.config)
    return Named("DR104", weaker, first_line(f.text)), [
        Repair(_("choose free cards, or end what holds memory there: dstui detect"))
    ]


def _at(f: Failure) -> str:
    """The exception with the innermost line of the user's own code."""
    frame = _user_frame(f)
    detail = f"{f.short}: {f.message}" if f.message else f.short
    if frame:
        detail += " " + _("(in {file}, line {line})").format(file=frame[0], line=frame[1])
    return detail


def _gpu_oom(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
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
        detail = first_line(text)
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


def _refused(case: Case, f: Failure, certainty: Certainty) -> tuple[Named, list[Repair]]:
    text = f.text
    if re.search(r"JSONDecodeError|Decode|binascii|Duplicate keys|Expected a string path|base64|No such file|is not a valid|does not exist", text) or f.short in (
        "FileNotFoundError", "JSONDecodeError", "HjsonDecodeError",
    ):  # fmt: skip
        return Named("DR706", certainty, first_line(text)), [
            Repair(_("dstui check on the file shows the place"))
        ]
    if (
        "requires --deepspeed_config" in text
    ):  # deepspeed/__init__.py: neither config= nor args.deepspeed_config
        return Named("DR705", certainty, first_line(text)), [
            Repair(
                _(
                    "the script got no config: give it the file where the script takes one (dstui run ... -- SCRIPT "
                    "--deepspeed --deepspeed_config {config}), or hand it to deepspeed.initialize as config="
                )
            )
        ]
    fixes: list[Repair] = []
    place: int | None = None
    detail = first_line(text)
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
            names = listed(p.strip("/").replace("/", ".") for p in left[:6])
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
