# ruff: noqa: PTH100, PTH118, PTH120, PTH123, RUF007, B905
"""Measures a training from inside: memory by phase and step times of each rank, into ``rank-N.jsonl`` beside itself.

This one file is copied into a run's folder as ``probe/sitecustomize.py``, whose folder comes first in PYTHONPATH
(``dstui.runs.trial``). So Python loads it in every process of the run, under any launcher, without a change to the
script. It needs Python >= 3.8 and the standard library, imports nothing of dstui, and:

- then runs the sitecustomize that it stands before, and takes its own folder off ``sys.path``;
- does nothing in a process that is no rank (no RANK and LOCAL_RANK, or a launcher's module);
- in a rank puts PYTHONPATH back, so that what the rank starts is not touched;
- waits until the script imports torch and deepspeed, then wraps ``DeepSpeedEngine.__init__``, ``forward``,
  ``backward``, ``step``, ``_take_model_step``, ``save_checkpoint`` and ``save_16bit_model`` (runtime/engine.py,
  0.14.0-0.19.8). ``python -I``, ``-E`` and ``-S`` load no sitecustomize: nothing is measured then;
- never lets an error of its own reach the script.

Phases: ``load`` (until the engine is made), ``init`` (its ``__init__``), ``forward`` (the call and the loss that
follows it), ``backward``, ``step``, ``save``. Peaks are those of the phase: torch's peak counters and the kernel's
VmHWM are set back where a phase ends. A script that resets torch's counters itself loses us nothing.

After ``steps`` optimizer steps it stops measuring; with ``end`` it ends the rank there: a barrier, then SystemExit(0)
out of ``engine.step()``, so that ``finally`` blocks and exit handlers run. All ranks do so at the same step, because
DeepSpeed counts steps alike on every rank. Only then, last of all exit handlers, it leaves with code 0: with gloo an
interpreter may abort in its own teardown (torch 2.13), which would make a run that is done look failed.

Lines: ``{"event": "start" | "model" | "phase" | "step" | "trouble" | "end", "t": epoch seconds, ...}``; bytes, seconds.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # typing itself would cost milliseconds in each process
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

SCHEMA_VERSION = 1
WATCHDOG_SECONDS = 60.0
"""A rank that was told to end and still lives after this leaves at once."""
MOST_LINES = 20000
MOST_SKIPPED = 20
_LAUNCHERS = (
    "deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.launch",
    "torch.distributed.launcher.api", "accelerate.commands.launch", "swift.cli.main",
)  # fmt: skip
_ENGINE = "deepspeed.runtime.engine"


def command_line() -> list[str]:
    """The words that this process was started with; sys.argv is not there yet."""
    try:
        with open("/proc/self/cmdline", "rb") as f:
            return [w.decode("utf-8", "replace") for w in f.read().split(b"\0")]
    except OSError:
        return []


def is_rank(environ: Mapping[str, str], words: Sequence[str]) -> bool:
    """Whether this process is one that trains."""
    if not (environ.get("RANK", "").isdigit() and environ.get("LOCAL_RANK", "").isdigit()):
        return False
    for before, word in zip(words, words[1:]):
        if before == "-m" and word in _LAUNCHERS:
            return False
        if before == "-c" and "multiprocessing" in word:
            return False
    return True


def without(folder: str, value: str) -> str | None:
    """A PYTHONPATH without ``folder``; None when nothing is left."""
    kept = [p for p in value.split(os.pathsep) if not same(p, folder)]
    return os.pathsep.join(kept) if kept else None


def same(a: Any, b: Any) -> bool:
    return bool(a) and os.path.realpath(a) == os.path.realpath(b)


def run_next(folder: str) -> None:
    """Run the sitecustomize that would have run without us, as ``site`` does: its errors are its own."""
    sys.path[:] = [p for p in sys.path if not same(p, folder)]
    sys.path_importer_cache.pop(folder, None)
    own = sys.modules.pop("sitecustomize", None)
    spec = None
    try:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find("sitecustomize", None) if find is not None else None
            if spec is not None and spec.loader is not None:
                break
    finally:
        if spec is None and own is not None:
            sys.modules["sitecustomize"] = own
    if spec is None or spec.loader is None:
        return
    from _frozen_importlib import module_from_spec  # what importlib.util offers, without loading contextlib

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class Nvml:
    """Bytes in use on each card as the driver counts them, by UUID. Needs no CUDA context."""

    def __init__(self) -> None:
        import ctypes

        self.c = ctypes
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        if self.lib.nvmlInit_v2() != 0:
            raise OSError("nvmlInit_v2 failed")

    def cards(self) -> dict[str, tuple[Any, int]]:
        """UUID -> handle and bytes in use."""
        c = self.c
        count = c.c_uint()
        if self.lib.nvmlDeviceGetCount_v2(c.byref(count)) != 0:
            return {}
        found = {}
        for i in range(count.value):
            handle, name = c.c_void_p(), c.create_string_buffer(96)
            if (
                self.lib.nvmlDeviceGetHandleByIndex_v2(c.c_uint(i), c.byref(handle)) == 0
                and self.lib.nvmlDeviceGetUUID(handle, name, c.c_uint(96)) == 0
            ):
                used = self.used(handle)
                if used is not None:
                    found[name.value.decode()] = (handle, used)
        return found

    def used(self, handle: Any) -> int | None:
        """As nvidia-smi shows it: without the driver's own reserve where the driver tells that apart (>= 510)."""
        c = self.c
        second = getattr(self.lib, "nvmlDeviceGetMemoryInfo_v2", None)
        if second is not None:
            # nvmlMemory_v2_t: unsigned version, then total, reserved, free, used; the version holds the size (nvml.h)
            memory = (c.c_ulonglong * 5)()
            memory[0] = c.sizeof(memory) | (2 << 24)
            if second(handle, memory) == 0:
                return int(memory[4])
        memory = (c.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used, the driver's reserve in the last
        return int(memory[2]) if self.lib.nvmlDeviceGetMemoryInfo(handle, memory) == 0 else None


class Probe:
    """One rank. Every method that the script's calls reach is guarded (``_guarded``)."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.steps = int(settings.get("steps") or 5)
        self.end = bool(settings.get("end"))
        self.talk = bool(settings.get("talk"))
        self.pid = os.getpid()
        self.rank = int(os.environ["RANK"])
        self.fd = os.open(
            os.path.join(folder, f"rank-{self.rank}.jsonl"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        self.lines = 0
        self.troubles = 0
        self.on = True
        self.phase = "load"
        self.step = 0
        self.depth = 0
        self.engine: Any = None
        self.counter = "step"
        self.useful = self.marked = 0
        self.bank: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.pending: dict[str, Any] | None = None
        self.marks: list[tuple[int, Any, float, int]] = []
        self.tokens = 0
        self.longest = 0
        self.shortest: int | None = None
        self.rows = 0
        self.model: dict[str, Any] = {}
        self.described: dict[str, Any] | None = None
        self.ending = False
        self.refused = 0
        self.closed = False
        self.undo: list[tuple[Any, str, Any]] = []
        self.reset_peaks: Any = None
        self.nvml: Nvml | None = None
        self.before: dict[str, tuple[Any, int]] = {}
        self.before_save = "between"
        self.hwm_resets = self._reset_hwm()
        self.write("start", schema_version=SCHEMA_VERSION, pid=self.pid, rank=self.rank,
                   local_rank=int(os.environ["LOCAL_RANK"]), python=".".join(map(str, sys.version_info[:3])),
                   hwm_resets=self.hwm_resets, node=os.environ.get("DSTUI_NODE"))  # fmt: skip

    # -- writing -------------------------------------------------------------------------------------

    def write(self, event: str, **fields: Any) -> None:
        import json

        if self.lines >= MOST_LINES and event != "end":
            return
        self.lines += 1
        data = {"event": event, "t": round(time.time(), 3)}
        data.update(fields)
        os.write(self.fd, (json.dumps(data, default=str) + "\n").encode())

    def trouble(self, where: str, error: BaseException) -> None:
        """Say it once or twice, then give up measuring."""
        self.troubles += 1
        try:
            self.write("trouble", where=where, error=f"{type(error).__name__}: {str(error)[:300]}")
        except Exception:
            pass
        if self.troubles >= 3:
            self.on = False

    # -- reading -------------------------------------------------------------------------------------

    @staticmethod
    def _reset_hwm() -> bool:
        """Set VmHWM to VmRSS (proc(5): 5 into clear_refs); False where the kernel does not let us."""
        try:
            fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"5")
            finally:
                os.close(fd)
            return True
        except OSError:
            return False

    def cuda(self) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
            return None
        return torch

    def read(self, whole: bool = False) -> dict[str, Any]:
        """Figures of the phase that ends now; then the counters start again.

        ``whole``: the card and pinned blocks as well, where the time of a step does not matter or it is over: the
        first only grows, the other count keeps its peak.
        """
        out: dict[str, Any] = {}
        with open("/proc/self/status", "rb") as f:
            for line in f:
                key, _colon, value = line.partition(b":")
                if key in (b"VmRSS", b"VmHWM"):
                    out["rss" if key == b"VmRSS" else "rss_peak"] = int(value.split()[0]) * 1024
        if self.hwm_resets:
            self._reset_hwm()
        torch = self.cuda()
        if torch is not None:
            out.update(self._torch_peaks(torch))
            if self.reset_peaks is not None:
                self.reset_peaks()
            if self.bank:
                for name, high in self.bank.items():
                    out[name] = max(out.get(name, 0), high)
                self.bank = {}
            if whole:
                out.update(self.card(torch))
                out.update(self.pinned(torch))
        return out

    @staticmethod
    def _torch_peaks(torch: Any) -> dict[str, int]:
        s = torch.cuda.memory_stats()
        return {
            "allocated": s.get("allocated_bytes.all.peak", 0),
            "reserved": s.get("reserved_bytes.all.peak", 0),
            "allocated_now": s.get("allocated_bytes.all.current", 0),
            "reserved_now": s.get("reserved_bytes.all.current", 0),
            "retries": s.get("num_alloc_retries", 0),
        }

    @staticmethod
    def pinned(torch: Any) -> dict[str, int]:
        """Pinned blocks as rounded, where torch counts them (2.8 and later); VmLck knows nothing of cudaHostAlloc."""
        read = getattr(torch.cuda, "host_memory_stats", None)
        if read is None:
            return {}
        try:
            s = read()
        except Exception:
            return {}
        value = s.get("allocated_bytes.peak", s.get("allocated_bytes.current"))
        return {} if value is None else {"pinned": int(value)}

    def card(self, torch: Any) -> dict[str, int]:
        """What the driver counts on this rank's card, now and before torch was imported; all processes together."""
        if self.nvml is None:
            return {}
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
        name = str(uuid)
        name = name if name.startswith(("GPU-", "MIG-")) else "GPU-" + name
        if uuid is None or name not in self.before:
            return {}
        handle, before = self.before[name]
        now = self.nvml.used(handle)
        return {} if now is None else {"card": now, "card_before": before}

    # -- hooks ---------------------------------------------------------------------------------------

    def on_torch(self, torch: Any) -> None:
        """Before a context exists: what others hold on the cards; and nobody resets the counters unseen."""
        try:
            self.nvml = Nvml()
            self.before = self.nvml.cards()
        except Exception:
            self.nvml = None
        memory = getattr(torch.cuda, "memory", None)
        original = getattr(torch.cuda, "reset_peak_memory_stats", None)
        if original is None:
            return
        self.reset_peaks = original
        probe = self

        def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> Any:
            if probe.on and os.getpid() == probe.pid:
                try:
                    now = probe.cuda()
                    if now is not None:
                        for key, value in probe._torch_peaks(now).items():
                            if key in ("allocated", "reserved"):
                                probe.bank[key] = max(value, probe.bank.get(key, 0))
                except Exception as e:
                    probe.trouble("reset", e)
            return original(*args, **kwargs)

        reset_peak_memory_stats.__doc__ = original.__doc__
        for owner in (torch.cuda, memory):
            if owner is not None and getattr(owner, "reset_peak_memory_stats", None) is original:
                owner.reset_peak_memory_stats = reset_peak_memory_stats
                self.undo.append((owner, "reset_peak_memory_stats", original))

    def on_engine(self, module: Any) -> None:
        if self.talk:
            self.let_it_talk()
        cls = module.DeepSpeedEngine
        if "_take_model_step" in cls.__dict__:
            self.counter = "_take_model_step"
        self.wrap(cls, "__init__", self.init_enter, self.init_exit)
        self.wrap(cls, "forward", self.forward_enter, self.forward_exit)
        self.wrap(cls, "backward", self.backward_enter, self.backward_exit)
        self.wrap(cls, "step", self.step_enter, self.step_exit)
        self.wrap(cls, "_take_model_step", self.update_enter, self.update_exit)
        self.wrap(cls, "save_checkpoint", self.save_enter, self.save_exit)
        self.wrap(cls, "save_16bit_model", self.save_enter, self.save_exit)

    @staticmethod
    def let_it_talk() -> None:
        """0.17.6-0.19.2 make DeepSpeed's logger with the level WARNING (utils/logging.py), which hides every line of
        comms_logger, and have no key for it."""
        import logging

        logger = logging.getLogger("DeepSpeed")
        logger.setLevel(min(logger.level, logging.INFO))
        for handler in logger.handlers:
            handler.setLevel(min(handler.level, logging.INFO))

    def wrap(self, cls: Any, name: str, enter: Any, leave: Any) -> None:
        import functools

        original = cls.__dict__.get(name)
        if original is None or not callable(original):
            return
        probe = self

        @functools.wraps(original)
        def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() != probe.pid:
                return original(engine, *args, **kwargs)
            if probe.ending:
                probe.leave()
            before = probe.counts(engine) if name == probe.counter else None
            if probe.on:
                probe.guarded(name, enter, engine, args, kwargs)
            try:
                result = original(engine, *args, **kwargs)
            except BaseException as e:
                if probe.on:
                    probe.guarded(name, probe.failed, e)
                raise
            if before is not None:
                probe.guarded(name, probe.count, engine, before)
            if probe.on:
                probe.guarded(name, leave, engine)
            elif probe.end and probe.enough():  # what cannot be measured must end all the same
                probe.finish("steps")
                probe.ending = True
            if probe.ending:
                probe.leave()
            return result

        setattr(cls, name, wrapper)
        self.undo.append((cls, name, original))

    @staticmethod
    def counts(engine: Any) -> tuple[int, int]:
        try:
            return int(engine.global_steps), int(engine.skipped_steps)
        except Exception:
            return 0, 0

    def count(self, engine: Any, before: tuple[int, int]) -> None:
        """DeepSpeed's counters are compared around each step: a checkpoint that is loaded moves them as well."""
        if self.engine is not None and engine is not self.engine:
            return
        steps, skipped = self.counts(engine)
        if steps > before[0]:
            self.step += 1
            self.useful += skipped == before[1]

    def enough(self) -> bool:
        """Steps that fp16's loss scaling skipped update nothing; they are waited for, within reason."""
        return self.useful >= self.steps or self.step >= self.steps + MOST_SKIPPED

    def guarded(self, where: str, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as e:
            self.trouble(where, e)

    def release(self) -> None:
        """Give every wrapped function back; what others wrapped meanwhile stays."""
        for owner, name, original in self.undo:
            current = getattr(owner, name, None)
            if current is not None and (
                current is original or getattr(current, "__wrapped__", original) is original
            ):
                setattr(owner, name, original)
        self.undo = []

    # -- phases --------------------------------------------------------------------------------------

    def put(self, phase: str, figures: Mapping[str, Any], **more: Any) -> None:
        for key in ("allocated", "reserved", "rss_peak"):
            self.highest[key] = max(figures.get(key, 0), self.highest.get(key, 0))
        self.write("phase", phase=phase, step=self.marked, **dict(figures, **more))

    def between(self) -> None:
        """What the script does beside the engine is written only where it is a peak of the whole run."""
        figures = self.read()
        if any(
            figures.get(key, 0) > self.highest.get(key, 0) for key in ("allocated", "reserved", "rss_peak")
        ):
            self.put("between", figures)

    @staticmethod
    def higher(a: Any, b: Any) -> dict[str, Any]:
        out = dict(b)
        for key in ("allocated", "reserved", "rss_peak", "pinned", "card"):
            if key in a:
                out[key] = max(a[key], b.get(key, a[key]))
        return out

    def failed(self, error: BaseException) -> None:
        """The script's own failure in the middle of a phase: its peak so far is worth keeping."""
        if self.closed:
            return
        figures = self.read()
        if self.pending is not None:
            figures, self.pending = self.higher(self.pending, figures), None
        self.put(self.phase, figures, failed=type(error).__name__)

    def init_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1 or self.engine is not None:
            return
        self.put("load", self.read(whole=True))
        self.phase = "init"
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        self.model = {}
        if model is not None and hasattr(model, "parameters"):
            first = next(iter(model.parameters()), None)
            if first is not None:
                self.model["loaded_dtype"] = str(first.dtype).replace("torch.", "")
                self.model["loaded_on"] = first.device.type
                self.model["zero_init"] = hasattr(first, "ds_id")
        names = set()
        frame: Any = sys._getframe()
        while frame is not None:
            names.add(str(frame.f_globals.get("__name__")))
            frame = frame.f_back
        self.model["trainer"] = "transformers.trainer" in names

    def init_exit(self, engine: Any) -> None:
        self.depth -= 1
        if self.depth or self.engine is not None:
            return
        self.engine = engine
        self.put("init", self.read(whole=True))
        self.phase = "between"
        self.describe(engine)
        self.mark()

    def describe(self, engine: Any) -> None:
        """What an estimate needs to know about this training; read from the engine, so it is what really runs."""
        m: dict[str, Any] = dict(self.model)
        module: Any = engine.module
        m["class"] = type(module).__name__
        total = trained = 0
        for p in module.parameters():
            n = int(getattr(p, "ds_numel", None) or p.numel())
            total += n
            trained += n if p.requires_grad else 0
        m["params"], m["trainable"] = total, trained
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            m["config"] = config.to_dict()
            m["attention"] = getattr(config, "_attn_implementation", None)
        peft = getattr(module, "peft_config", None)
        if isinstance(peft, dict) and peft:
            one = next(iter(peft.values()))
            m["lora_rank"] = getattr(one, "r", None)
            targets = getattr(one, "target_modules", None)
            m["lora_targets"] = sorted(targets) if isinstance(targets, (set, list, tuple)) else targets
        m["quant"] = (
            "nf4" if getattr(module, "is_loaded_in_4bit", False)
            else "int8" if getattr(module, "is_loaded_in_8bit", False) else "none"
        )  # fmt: skip
        for key, name in (
            ("micro_batch", "train_micro_batch_size_per_gpu"),
            ("accumulation", "gradient_accumulation_steps"),
            ("stage", "zero_optimization_stage"),
        ):
            try:
                m[key] = int(getattr(engine, name)())
            except Exception:
                m[key] = None
        resolved = getattr(getattr(engine, "_config", None), "_param_dict", None)
        if isinstance(resolved, dict):  # what the Trainer has made of every `auto`
            m["ds_config"] = resolved
        inner = getattr(engine, "basic_optimizer", None)
        m["optimizer"] = type(inner).__name__ if inner is not None else None
        m["fused"] = bool(getattr(inner, "defaults", {}).get("fused"))
        groups = getattr(inner, "param_groups", None)
        m["param_groups"] = len(groups) if groups else None
        m["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
        for name in ("torch", "deepspeed", "transformers"):
            m[name + "_version"] = str(getattr(sys.modules.get(name), "__version__", "")) or None
        m["expandable"] = any(
            "expandable_segments:True" in os.environ.get(n, "").replace(" ", "")
            for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        )
        torch = self.cuda()
        if torch is not None:
            m["card"] = torch.cuda.get_device_name()
        self.described = m

    def describe_batch(self, engine: Any, args: Any, kwargs: Any) -> None:
        """Rows and tokens of a micro batch: the first two-dimensional tensor of whole numbers."""
        for value in list(kwargs.values()) + list(args):
            values = list(value.values()) if isinstance(value, dict) else [value]
            for v in values:
                if len(getattr(v, "shape", ())) == 2 and "int" in str(getattr(v, "dtype", "")):
                    rows, tokens = int(v.shape[0]), int(v.shape[1])
                    self.rows = max(self.rows, rows)
                    self.longest = max(self.longest, tokens)
                    self.shortest = tokens if self.shortest is None else min(self.shortest, tokens)
                    self.tokens += rows * tokens
                    return

    def checkpointing(self, module: Any) -> bool | None:
        """Whether the modules recompute activations, as transformers marks it; None where nothing says so."""
        if hasattr(module, "is_gradient_checkpointing"):
            return bool(module.is_gradient_checkpointing)
        return None

    def forward_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        if engine is not self.engine or self.phase in ("update", "save"):
            return
        if not engine.module.training:
            return
        if self.described is not None and "checkpointing" not in self.described:
            self.described["checkpointing"] = self.checkpointing(engine.module)
        self.pending = None
        self.between()
        self.phase = "forward"
        self.describe_batch(engine, args, kwargs)

    def forward_exit(self, engine: Any) -> None:
        if engine is self.engine and self.phase == "forward":
            self.pending = self.read()

    def backward_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        if engine is not self.engine or self.phase != "forward":
            return
        figures, self.pending = self.higher(self.pending or {}, self.read()), None
        self.put("forward", figures)
        self.phase = "backward"

    def backward_exit(self, engine: Any) -> None:
        if engine is self.engine and self.phase == "backward":
            self.put("backward", self.read())
            self.phase = "after-backward"

    def step_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        if engine is not self.engine:
            return
        if self.phase == "forward":  # loss.backward() of torch's own, no engine.backward
            if self.pending is not None:
                self.put("forward", self.pending)
                self.pending = None
            self.put("backward", self.read())
        else:
            self.between()
        self.phase = "step"

    def update_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        if engine is self.engine and self.phase != "step":  # the pipeline engine steps by itself
            self.put("backward", self.read())
            self.phase = "update"

    def update_exit(self, engine: Any) -> None:
        if engine is self.engine and self.phase == "update":
            self.stepped(engine)

    def step_exit(self, engine: Any) -> None:
        if engine is self.engine and self.phase == "step":
            self.stepped(engine)

    def stepped(self, engine: Any) -> None:
        self.put("step", self.read(whole=True))
        self.phase = "between"
        if self.step == self.marked:
            return  # no accumulation boundary
        self.marked = self.step
        self.mark()
        if self.described is not None:  # now the batch is known as well
            self.described.update(rows=self.rows or None, seq=self.longest or None)
            self.write("model", **self.described)
            self.described = None
        if self.enough():
            self.finish("steps")
            self.ending = self.end

    def save_enter(self, engine: Any, args: Any, kwargs: Any) -> None:
        if engine is self.engine:
            self.between()
            self.before_save, self.phase = self.phase, "save"

    def save_exit(self, engine: Any) -> None:
        if engine is self.engine and self.phase == "save":
            self.put("save", self.read(whole=True))
            self.phase = self.before_save

    # -- times ---------------------------------------------------------------------------------------

    def mark(self) -> None:
        """A point in time on the card's stream, or on the clock; read when it has passed."""
        torch = self.cuda()
        event = None
        if torch is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((self.step, event, time.perf_counter(), self.tokens))
        self.tokens = 0
        self.read_marks(wait=False)

    def read_marks(self, wait: bool) -> None:
        while len(self.marks) > 1:
            (_n, first, began, _t), (step, second, ended, tokens) = self.marks[:2]
            if second is not None:
                if wait:
                    second.synchronize()
                elif not second.query():
                    return
            seconds = ended - began
            by = "clock"
            if first is not None and second is not None:
                seconds, by = first.elapsed_time(second) / 1000.0, "cuda"
            self.write("step", step=step, seconds=round(seconds, 6), by=by, tokens=tokens or None)
            self.marks.pop(0)

    # -- the end -------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """Write what is left; nothing is measured after it."""
        if self.closed:
            return
        self.closed = True
        try:
            if reason != "steps":
                if self.pending is not None:
                    self.put("forward", self.pending)
                if self.phase in ("load", "init", "backward", "step", "save"):
                    self.put(self.phase, self.read(), unfinished=True)
            self.read_marks(wait=reason == "steps")
            if self.described is not None:
                self.described.update(rows=self.rows or None, seq=self.longest or None)
                self.write("model", **self.described)
        except Exception as e:
            self.trouble("finish", e)
        try:
            self.write("end", reason=reason, steps=self.step, seq=[self.shortest, self.longest or None])
        except Exception:
            pass
        if not self.end:
            self.on = False
            self.release()

    def leave(self) -> None:
        """End this rank here, with all others: SystemExit(0) through the script."""
        if self.refused == 0:
            if self.rank == 0:
                sys.stderr.write(f"[dstui] trial: {self.step} steps measured, ending here\n")
            self.watchdog()
            try:
                torch = self.cuda()
                if torch is not None:
                    torch.cuda.synchronize()
                self.together()
            except Exception as e:
                self.trouble("barrier", e)
        self.refused += 1
        if self.refused > 3:  # the script catches SystemExit and goes on
            self.exit()
        raise SystemExit(0)

    @staticmethod
    def together() -> None:
        """No rank tears its process group down while another still talks."""
        torch: Any = sys.modules.get("torch")
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()

    def watchdog(self) -> None:
        import threading

        def wait() -> None:
            time.sleep(WATCHDOG_SECONDS)
            self.exit()

        threading.Thread(target=wait, name="dstui-probe", daemon=True).start()

    @staticmethod
    def exit() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        os._exit(0)

    def at_exit(self) -> None:
        if os.getpid() != self.pid:
            return
        if not self.closed:
            self.finish("script")
        if self.ending and self.refused:
            try:
                dist = sys.modules["torch"].distributed
                if dist.is_available() and dist.is_initialized():
                    dist.destroy_process_group()
            except Exception:
                pass
            self.exit()


class Finder:
    """Tells the probe when a module has been imported. The import itself is left to the other finders."""

    def __init__(self, wanted: Any) -> None:
        self.wanted = dict(wanted)
        self.busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if self.busy or name not in self.wanted:
            return None
        self.busy = True
        try:
            spec = None
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec = find(name, path, target)
                if spec is not None:
                    break
        finally:
            self.busy = False
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original, work = loader.exec_module, self.wanted.pop(name)

        def exec_module(module: Any) -> None:
            try:
                del loader.exec_module
            except AttributeError:
                pass
            original(module)
            work(module)
            if not self.wanted and self in sys.meta_path:
                sys.meta_path.remove(self)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass
        return spec


def install(folder: str) -> Probe:
    """Measure this rank."""
    import atexit
    import json

    with open(os.path.join(folder, "settings.json"), encoding="utf-8") as f:
        settings = json.load(f)
    probe = Probe(folder, settings)
    atexit.register(probe.at_exit)  # first registered, so the last to run
    hooks = {"torch": probe.on_torch, _ENGINE: probe.on_engine}
    sys.meta_path.insert(
        0, Finder({name: lambda m, n=name, h=hook: probe.guarded(n, h, m) for name, hook in hooks.items()})
    )
    return probe


def start(folder: str) -> None:
    """What happens in each Python process of the run."""
    try:
        if is_rank(os.environ, command_line()):
            rest = without(folder, os.environ.get("PYTHONPATH", ""))
            if rest is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = rest
            install(folder)
    except Exception as e:
        sys.stderr.write(f"[dstui] this rank is not measured: {e}\n")
    run_next(folder)


if __name__ == "sitecustomize":
    start(os.path.dirname(os.path.abspath(__file__)))
