"""What each field should be here, why, and which options are open: pure functions of the state.

``RECOMMEND[id](state) -> (value, reason)``, ``OPTIONS[id](state)``, ``WHY_NOT[id](state)`` (text when the field
does not apply). They read other fields through ``state.get`` only, along the order of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstui.i18n import _, listed, phrases
from dstui.session import engines
from dstui.session.model import Option
from dstui.units import GiB, count, gib

if TYPE_CHECKING:
    from dstui.estimate.plan import Recommendation
    from dstui.session.state import State

ROOM = 0.80
"""Share of a card that the states may take; the rest is for activations, buckets and fragmentation."""
SAMPLES_A_STEP = 32
"""Recommended global batch when nothing else is known."""
BUCKET = 500_000_000
SMALL_CARD_BUCKET = 200_000_000


# --- machine -------------------------------------------------------------------------------------------------


def _machine(s: State) -> tuple[Any, str]:
    if s.detected is not None and s.detected.source != "detected":
        return "file", _("the facts that were given")
    if s.is_login_node:
        return "describe", _("a login node has no GPU: describe the machine that will train")
    return "this", ""


def _machine_options(s: State) -> tuple[Option, ...]:
    why = ""
    if s.is_login_node:
        why = _("this is a login node: the run will be elsewhere")
    return (
        Option("this", _("this machine"), "", not why, why),
        Option("describe", _("a machine that I describe"), "8x80GiB"),
        Option("file", _("a facts file"), "detect --json"),
    )


def _cards(s: State) -> tuple[Any, str]:
    facts = s.facts
    gpus = (facts.gpus if facts else None) or ()
    free = tuple(s.card_key(g) for g in gpus if not g.busy)
    if len(free) < len(gpus):
        return free, _("{free} of {all} are free").format(free=len(free), all=len(gpus))
    return free, _("all are free") if gpus and facts and facts.source == "detected" else ""


def _card_options(s: State) -> tuple[Option, ...]:
    out = []
    for g in (s.facts.gpus if s.facts else None) or ():
        size = gib(g.memory_total)
        note = ""
        if g.processes:
            owners = listed(f"{p.user or '?'} {p.name or p.pid} {gib(p.memory)}" for p in g.processes[:2])
            note = _("busy: {who}").format(who=owners)
        elif g.memory_free is not None and s.facts and s.facts.source == "detected":
            note = _("{size} free").format(size=gib(g.memory_free))
        out.append(Option(s.card_key(g), f"{g.index} {g.name or 'GPU'} {size}", note))
    return tuple(out)


def _no_cards(s: State) -> str:
    if s.facts is None:
        return _("looking at the machine")
    if s.facts.gpus is None:
        return s.facts.unknown.get("gpus") or _("the GPUs cannot be read")
    return "" if s.facts.gpus else _("no GPU here: the run uses the CPU")


def _no_ranks(s: State) -> str:
    if s.facts is None:
        return _("looking at the machine")
    return _("one rank a card") if s.facts.gpus or s.is_login_node else ""


def _python(s: State) -> tuple[Any, str]:
    facts = s.detected
    it = facts.interpreter if facts else None
    if it is None:
        return "", ""
    if not it.can_train:
        return it.path, it.problem or _("no deepspeed found here")
    return it.path, _("has deepspeed {version}").format(version=it.deepspeed)


def _python_options(s: State) -> tuple[Option, ...]:
    origins = {
        "option": _("given"),
        "active": _("active"),
        "project": "./.venv",
        "conda": "conda",
        "own": _("dstui's own"),
        "path": "PATH",
    }
    out = []
    for it in s.detected.interpreters if s.detected else ():
        parts = [
            f"{name} {it.packages.get(name)}"
            for name in ("deepspeed", "torch", "transformers")
            if it.packages.get(name)
        ]
        note = phrases([origins.get(it.origin, it.origin), f"Python {it.version or '?'}", *parts])
        why = "" if it.can_train else it.problem or _("no deepspeed or no torch")
        out.append(Option(it.path, it.path, note, it.can_train, why))
    return tuple(out)


# --- script --------------------------------------------------------------------------------------------------


def _engine(s: State) -> tuple[Any, str]:
    script = s.typed.get("script")
    if script:
        if s.guess:
            return s.guess
        return "plain", _("nothing in the script names another")
    if s.typed.get("model"):
        return "plain", _("a model was named")
    if s.base_kind == "preset" and s.preset_engine in ("hf", "llamafactory"):
        return s.preset_engine, _("the preset is for it")
    if s.base_kind == "file":
        if s.base_autos:
            return "hf", _("the file says `auto`: the Trainer fills that")
        return "plain", ""
    return "demo", _("the bundled tiny GPT: tries the whole path in a minute")


def _engine_options(s: State) -> tuple[Option, ...]:
    it = s.interpreter

    def lacks(package: str) -> str:
        if it is None or it.packages.get(package):
            return ""
        return _("not installed")

    return (
        Option("demo", _("demo"), _("the bundled tiny GPT")),
        Option("plain", _("plain DeepSpeed"), "deepspeed.initialize"),
        Option("hf", _("HF Trainer"), lacks("transformers") or "--deepspeed FILE"),
        Option("llamafactory", "LLaMA-Factory", lacks("llamafactory") or _("a YAML file with `deepspeed:`")),
    )


def _script(s: State) -> tuple[Any, str]:
    if s.get("engine") == "demo":
        return str(s.demo_script), _("bundled")
    return "", ""


def _args(s: State) -> tuple[Any, str]:
    return ("--steps 60", "") if s.get("engine") == "demo" else ("", "")


def _launcher_options(s: State) -> tuple[Option, ...]:
    names = (
        ("auto", "llamafactory", "torchrun")
        if s.get("engine") == "llamafactory"
        else ("auto", "deepspeed", "torchrun", "python")
    )
    notes = {
        "auto": _("the one that works here"),
        "python": _("one process, for a debugger"),
    }
    one = s.world == 1
    return tuple(
        Option(
            n, n, notes.get(n, ""), n != "python" or one, "" if n != "python" or one else _("one rank only")
        )
        for n in names
    )


# --- model ---------------------------------------------------------------------------------------------------


def _model(s: State) -> tuple[Any, str]:
    if s.get("engine") == "demo":
        return "demo", _("the bundled tiny GPT")
    named = engines.argument(s.args, "model_name_or_path", "model_name", "model")
    if named:
        return named, _("from the script's arguments")
    return "", ""


def _demo_only(s: State) -> str:
    return _("the demo brings its own") if s.get("engine") == "demo" else ""


def _seq(s: State) -> tuple[Any, str]:
    named = engines.argument(
        s.args, "seq", "max_seq_length", "max_length", "block_size", "cutoff_len", "seq_length"
    )
    if named and named.isdigit() and int(named) > 0:
        return int(named), _("from the script's arguments")
    if s.get("engine") == "demo":
        return 64, _("the demo's default")
    shape = s.shape
    if shape and shape.max_positions and shape.max_positions < 2048:
        return shape.max_positions, _("the model's longest")
    return 2048, ""


def _method(s: State) -> tuple[Any, str]:
    if engines.argument(s.args, "use_peft", "lora_rank", "lora_r") is not None and s.get("engine") != "demo":
        return "lora", _("from the script's arguments")
    return "full", ""


def _method_options(s: State) -> tuple[Option, ...]:
    demo = s.get("engine") == "demo"
    why = _("the demo trains all of it") if demo else ""
    return (
        Option("full", _("full"), _("all parameters")),
        Option("lora", "LoRA", _("small adapters; model frozen"), not demo, why),
        Option("qlora", "QLoRA", _("LoRA on a 4-bit model"), not demo, why),
    )


def _checkpointing(s: State) -> tuple[Any, str]:
    if s.get("engine") == "demo":
        return False, _("the model is tiny")
    return True, _("activations are recomputed, not kept")


def _attention_options(s: State) -> tuple[Option, ...]:
    return (
        Option("sdpa", "sdpa", _("PyTorch's own, no score matrix")),
        Option("flash", "flash", "flash-attn"),
        Option("eager", "eager", _("keeps heads x seq x seq")),
    )


# --- ZeRO stage ----------------------------------------------------------------------------------------------


def trained(s: State) -> int | None:
    """Parameters that get gradients and optimizer states."""
    shape = s.shape
    if shape is None:
        return None
    if s.get("method") == "full":
        return shape.params
    if shape.hidden and shape.layers:
        # rank x (in + out) of the seven linear layers of a decoder block
        inner = shape.intermediate or 4 * shape.hidden
        return int(s.get("lora_rank") * shape.layers * (8 * shape.hidden + 3 * (shape.hidden + inner)))
    return max(1, shape.params // 100)


def copy16(s: State) -> int | None:
    """Bytes of the model's copy on a card that is not split: 2 a parameter (4 in fp32; 0.5 frozen in 4 bit)."""
    shape = s.shape
    if shape is None:
        return None
    if s.get("method") == "qlora":
        return shape.params // 2 + 2 * (trained(s) or 0)
    return (4 if s.get("precision") == "fp32" else 2) * shape.params


def states(s: State, stage: int, offload: str) -> int | None:
    """Bytes of parameters, gradients and optimizer states on one card.

    Mixed precision with Adam: 2 + 2 + 12 bytes a trained parameter (ZeRO, arXiv:1910.02054 section 3); a stage
    splits optimizer (1), gradients (2), parameters (3) over the ranks.
    """
    copy, t = copy16(s), trained(s)
    if copy is None or t is None:
        return None
    world = max(1, s.world)
    optimizer = 0 if offload in ("optimizer", "both") else 12 * t // (world if stage >= 1 else 1)
    grads = 2 * t // (world if stage >= 2 else 1)
    if stage >= 2 and offload in ("optimizer", "both"):
        grads = 0
    params = 0 if offload in ("param", "both") else copy // (world if stage == 3 else 1)
    return params + grads + optimizer


def on_cpu(s: State) -> bool:
    """Whether the machine that is planned for has no GPU: a rank's memory is its share of RAM."""
    return s.used is not None and s.used.gpus == ()


def card(s: State) -> int | None:
    """Usable bytes of the smallest chosen card; of a rank's share of RAM without GPU; None when unknown."""
    facts = s.used
    if facts is None:
        return None
    if facts.gpus:
        sizes = [g.memory_free if g.memory_free is not None else g.memory_total for g in facts.gpus]
        return None if any(x is None for x in sizes) else min(x for x in sizes if x is not None)
    free = facts.host.memory_free or facts.host.memory_capacity
    return None if free is None else free // max(1, s.world)


@dataclass(frozen=True)
class Plan:
    """What to start with: the cheapest placement that fits (``dstui.estimate.plan``), and the deciding line."""

    stage: int
    offload: str
    optimizer_device: str
    param_device: str
    micro: int | None
    """The largest micro batch that still fits; None when it was given or nothing is known."""
    reason: str
    short: str
    """The reason in at most two rows of 58 columns."""
    in_all: str
    """What it takes, in a few words."""
    fits: bool | None
    """None: cannot be told (no model, or no machine)."""


NO_PLAN = Plan(2, "none", "cpu", "cpu", None, "", "", "", None)
"""The everyday choice, while the model or the machine is unknown."""


def plan_key(s: State) -> Hashable | None:
    """All that ``plan`` depends on; None when nothing can be planned."""
    facts, shape = s.used, s.shape
    if shape is None or facts is None or card(s) is None:
        return None
    gpus = tuple((g.memory_total, g.memory_free, g.name) for g in facts.gpus or ())
    host = (facts.host.memory_capacity, facts.host.memory_free, tuple(x.free for x in facts.storage))
    model = (s.get("model"), shape.name, shape.params, shape.source)
    return (model, s.training(s.given_micro), s.get("precision"), s.release, s.world, s.nodes, gpus, host)


def same_subject(a: Any, b: Any) -> bool:
    """Whether two keys of ``plan_key`` differ in what is trained how, not in the model or the machine."""
    return bool(a[0] == b[0] and a[3:] == b[3:])


def plan(s: State) -> Plan:
    """The recommendation for this model on the chosen cards (``plan_key`` is not None)."""
    facts, shape = s.used, s.shape
    assert shape is not None and facts is not None
    from dstui.config.schema import newest
    from dstui.estimate.plan import recommend

    micro = s.given_micro
    precision = s.get("precision")
    found = recommend(
        shape,
        s.training(micro),
        facts,
        release=s.release or newest(),
        config_data={
            "bf16": {"enabled": precision == "bf16"},
            "fp16": {"enabled": precision == "fp16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        },
        world_size=s.world,
    )
    optimizer, param = found.offload_optimizer, found.offload_param
    offload = {
        (False, False): "none",
        (True, False): "optimizer",
        (False, True): "param",
        (True, True): "both",
    }[optimizer != "none", param != "none"]
    return Plan(
        found.stage,
        offload,
        optimizer if optimizer != "none" else "cpu",
        param if param != "none" else "cpu",
        found.micro_batch if micro is None and found.fits else None,
        "; ".join(filter(None, (_copy_line(s, found.stage) if found.fits else "", *found.reasons[:2]))),
        _short(s, found),
        _in_all(found),
        found.fits,
    )


def _short(s: State, found: Recommendation) -> str:
    """The deciding line: short enough for two rows of 58 columns."""
    if not found.fits:
        first, *rest = found.reasons
        return _("nothing fits: {why}").format(why=rest[0]) if rest else first
    copy = _copy_line(s, found.stage)
    return f"{copy}; {_in_all(found)}" if copy else found.reasons[0]


def _in_all(found: Recommendation) -> str:
    peak = found.estimate.gpu.device
    return found.reasons[0] if peak is None else _("{size} in all").format(size=gib(peak.expected))


def _copy_line(s: State, stage: int) -> str:
    """The first of the five checkpoints: does the copy that is not split fit on one card?"""
    copy, room = copy16(s), card(s)
    facts = s.used
    if copy is None or room is None or facts is None or not facts.gpus:
        return ""
    if copy > room * ROOM:
        return _("16-bit copy {copy} of {room} a card: does not fit, so stage 3").format(
            copy=gib(copy), room=gib(room)
        )
    if stage == 3:
        return _("16-bit copy {copy} of {room} a card fits, the rest beside it does not: stage 3").format(
            copy=gib(copy), room=gib(room)
        )
    return _("16-bit copy {copy} of {room} a card: fits, so stage {stage}").format(
        copy=gib(copy), room=gib(room), stage=stage
    )


def _stage(s: State) -> tuple[Any, str]:
    if s.plan.fits is None:
        return s.plan.stage, _("the everyday choice") + "; " + _unplanned(s)
    return s.plan.stage, s.plan.reason


def _unplanned(s: State) -> str:
    """Why there is no plan, or none yet."""
    if s.shape is None:
        return _("the model's size is not known yet")
    if s.facts is None:
        return _("the machine is not known yet")
    return _("the best one is being computed") if s.pending else _("the memory of the cards is not known")


def _stage_options(s: State) -> tuple[Option, ...]:
    titles = {
        0: _("plain data parallel"),
        1: _("optimizer states split"),
        2: _("+ gradients split"),
        3: _("+ parameters split"),
    }
    out = []
    for stage, title in titles.items():
        need = states(s, stage, "none")
        text = _("{size} of states a rank") if on_cpu(s) else _("{size} of states a card")
        note = text.format(size=gib(need)) if need is not None else ""
        out.append(Option(stage, f"{stage}  {title}", note))
    return tuple(out)


# --- offload -------------------------------------------------------------------------------------------------


def _offload(s: State) -> tuple[Any, str]:
    stage = s.get("stage")
    if on_cpu(s):
        return "none", _("without GPU everything is in RAM as it is")
    if stage == s.plan.stage:
        return s.plan.offload, s.plan.reason if s.plan.offload != "none" else _(
            "nothing needs to leave the GPU"
        )
    if stage == 0:
        return "none", _("stage 0 has nothing to offload")
    room = card(s)
    for offload in ("none", "optimizer") if stage < 3 else ("none", "optimizer", "both"):
        need = states(s, stage, offload)
        if need is None or room is None:
            return "none", ""
        if need <= room * ROOM:
            return offload, _("states {need} of {room} a card").format(need=gib(need), room=gib(room))
    return ("optimizer" if stage < 3 else "both"), _(
        "even so it does not fit: use a higher stage or more cards"
    )


def _offload_options(s: State) -> tuple[Option, ...]:
    stage = s.get("stage")
    no_optimizer = _("needs stage 1-3") if stage < 1 else ""
    if not no_optimizer and s.typed.get("optimizer") == "script":
        no_optimizer = _("an optimizer made by the script stays where the script puts it")
    no_param = _("needs stage 3") if stage < 3 else ""

    def saves(offload: str) -> str:
        if on_cpu(s):
            return _("in RAM as it is")
        a, b = states(s, stage, "none"), states(s, stage, offload)
        return _("frees {size} a card").format(size=gib(a - b)) if a is not None and b is not None else ""

    both = no_param or no_optimizer
    return (
        Option("none", _("none"), _("all stays in RAM") if on_cpu(s) else _("all stays on the GPU")),
        Option("optimizer", _("optimizer"), saves("optimizer"), not no_optimizer, no_optimizer),
        Option("param", _("parameters"), saves("param"), not no_param, no_param),
        Option("both", _("optimizer + parameters"), saves("both"), not both, both),
    )


def _device_options(s: State) -> tuple[Option, ...]:
    why = _("needs stage 3") if s.get("stage") < 3 else ""
    return (
        Option("cpu", _("host RAM"), ""),
        Option("nvme", "NVMe", _("slow; needs libaio"), not why, why),
    )


def _no_optimizer_offload(s: State) -> str:
    return "" if s.get("offload") in ("optimizer", "both") else _("the optimizer is not offloaded")


def _no_param_offload(s: State) -> str:
    return "" if s.get("offload") in ("param", "both") else _("the parameters are not offloaded")


def _no_nvme(s: State) -> str:
    return "" if "nvme" in offload_devices(s) else _("nothing goes to NVMe")


def offload_devices(s: State) -> set[str]:
    """The devices to which states go by what is chosen: ``cpu``, ``nvme``, both or none."""
    offload = s.get("offload")
    out = set()
    if offload in ("optimizer", "both"):
        out.add(s.get("optimizer_device"))
    if offload in ("param", "both"):
        out.add(s.get("param_device"))
    return out


def _nvme_path(s: State) -> tuple[Any, str]:
    facts = s.facts
    fit = [x for x in (facts.storage if facts else ()) if x.writable and not x.rotational and x.o_direct]
    if fit:
        best = max(fit, key=lambda x: x.free or 0)
        return best.path, _("{size} free, {fs}").format(size=gib(best.free), fs=best.filesystem or "?")
    return "/local_nvme", _("change it to a folder on a local disk")


# --- batch ---------------------------------------------------------------------------------------------------


def _micro(s: State) -> tuple[Any, str]:
    if s.micro_argument is not None:
        return s.micro_argument, _("from the script's arguments")
    if s.get("engine") == "demo":
        return 4, ""
    if s.plan.micro is not None and s.get("stage") == s.plan.stage:
        return s.plan.micro, _("the largest power of two that fits")
    return 1, _("the smallest; raise it while it fits")


def _accumulation(s: State) -> tuple[Any, str]:
    named = engines.argument(s.args, "gradient_accumulation_steps")
    if named and named.isdigit() and int(named) > 0:
        return int(named), _("from the script's arguments")
    if s.get("engine") == "demo":
        return 1, ""
    steps = max(1, SAMPLES_A_STEP // max(1, s.get("micro_batch") * s.world))
    return steps, _("about {n} samples a step").format(n=SAMPLES_A_STEP) if steps > 1 else ""


# --- pinned memory -------------------------------------------------------------------------------------------


def host_states(s: State) -> int | None:
    """Bytes that offload keeps in the RAM of one node, each rank's part rounded up to a power of two as
    PyTorch's pinned allocator does (measured, DeepSpeed 0.19.8): 16 a trained parameter with the optimizer,
    2 with the parameters."""
    shape, t = s.shape, trained(s)
    if shape is None or t is None:
        return None
    offload = s.get("offload")
    each = 0
    world = max(1, s.world)
    if offload in ("optimizer", "both") and s.get("optimizer_device") == "cpu":
        each += sum(_power(n * t // world) for n in (4, 4, 4, 4))
    if offload in ("param", "both") and s.get("param_device") == "cpu":
        each += _power(2 * shape.params // world)
    return each * max(1, s.world // max(1, s.nodes))


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length() if n > 0 else 0


def _pin(s: State) -> tuple[Any, str]:
    facts = s.used
    if facts is not None and not facts.gpus:
        return False, _("without GPU nothing is pinned")
    need, have = host_states(s), facts.host.memory_capacity if facts else None
    if need is not None and have is not None and need > 0.7 * have:
        return False, _(
            "{need} pinned of {have} RAM is too much: pageable is slower but can be swapped"
        ).format(need=gib(need), have=gib(have))
    return True, _("full PCIe speed and overlap")


# --- communication -------------------------------------------------------------------------------------------


def _overlap(s: State) -> tuple[Any, str]:
    if s.used is not None and not s.used.gpus:
        return False, _("on the CPU there is nothing to overlap")
    if s.world == 1:
        return False, _("one rank: nothing to reduce")
    return True, _("hides the reduction behind backward")


def _bucket(s: State) -> tuple[int, str]:
    room = card(s)
    best = SMALL_CARD_BUCKET if room is not None and room < 48 * GiB else BUCKET
    if s.shape is not None and s.shape.params < best:
        step = 10 ** max(3, int(math.log10(s.shape.params)) - 1)
        return -(-s.shape.params // step) * step, _("no larger than the model")
    return best, _("DeepSpeed's default") if best == BUCKET else _("less memory on a small card")


def _allgather(s: State) -> tuple[Any, str]:
    value, why = _bucket(s)
    return value + value % 2, why


def _prefetch(s: State) -> tuple[Any, str]:
    if s.shape is not None and s.shape.params < 50_000_000:
        return _bucket(s)
    return 50_000_000, _("DeepSpeed's default")


def _persistence(s: State) -> tuple[Any, str]:
    return 100_000, _("DeepSpeed's default")


def _timeout(s: State) -> tuple[Any, str]:
    if s.get("engine") in ("hf", "llamafactory"):
        return 30, _("the Trainer's default")
    release = s.release
    # deepspeed/constants.py: 30 minutes until 0.19.5, 10 from 0.19.6 (PR 8253)
    old = release is not None and _version(release) < (0, 19, 6)
    return (30 if old else 10), _("default of DeepSpeed {version}").format(version=release or "0.19.6+")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split("+")[0].split(".")[:3] if p.isdigit())


def _no_comm(s: State) -> str:
    return _("stage 0 uses none of it") if s.get("stage") == 0 else ""


def _no_allgather(s: State) -> str:
    return "" if s.get("stage") in (1, 2) else _("stage 1 and 2 only")


def _no_stage3(s: State) -> str:
    return "" if s.get("stage") == 3 else _("stage 3 only")


def _no_timeout(s: State) -> str:
    return _("set ddp_timeout in the YAML file") if s.get("engine") == "llamafactory" else ""


# --- precision -----------------------------------------------------------------------------------------------


def _precision(s: State) -> tuple[Any, str]:
    facts = s.used
    old = [
        g
        for g in (facts.gpus if facts else None) or ()
        if g.compute_capability and g.compute_capability < (8, 0)
    ]
    if old:
        return "fp16", _("{name} has no bf16").format(name=old[0].name or "GPU")
    return "bf16", _("no loss scaling, no overflow")


def _precision_options(s: State) -> tuple[Option, ...]:
    return (
        Option("bf16", "bf16", _("Ampere and later, CPU")),
        Option("fp16", "fp16", _("with dynamic loss scaling")),
        Option("fp32", "fp32", _("twice the memory")),
    )


def _optimizer(s: State) -> tuple[Any, str]:
    return "AdamW", ""


def _optimizer_options(s: State) -> tuple[Option, ...]:
    offloaded = s.get("offload") in ("optimizer", "both")
    why = _("offload needs an optimizer that DeepSpeed makes") if offloaded else ""
    names = ["AdamW", "Adam", "Lion"]
    current = s.base_values.get("optimizer")
    if current and current not in (*names, "script"):
        names.append(current)
    return (
        *(Option(n, n, _("half the states") if n == "Lion" else "") for n in names),
        Option("script", _("made by the script"), "", not why, why),
    )


def _lr(s: State) -> tuple[Any, str]:
    named = engines.argument(s.args, "learning_rate", "lr")
    if named:
        try:
            return float(named), _("from the script's arguments")
        except ValueError:
            pass
    if s.get("engine") == "demo":
        return 1e-3, ""
    if s.get("method") != "full":
        return 2e-4, _("usual for LoRA")
    return 1e-5, _("usual for full fine-tuning; above 5e-5 it often diverges")


def _no_optimizer(s: State) -> str:
    return _("the script makes the optimizer") if s.get("optimizer") == "script" else ""


# --- review --------------------------------------------------------------------------------------------------


def _output(s: State) -> tuple[Any, str]:
    if s.base_kind == "file" and s.base_path not in (None, "-"):
        return str(s.base_path), _("the file that was opened; a backup is kept")
    return str(Path(s.get("cwd")) / "ds_config.json"), ""


Recommend = Callable[["State"], tuple[Any, str]]
Options = Callable[["State"], tuple[Option, ...]]
WhyNot = Callable[["State"], str]


def _fixed(value: Any, reason: str = "") -> Recommend:
    return lambda s: (value, reason)


RECOMMEND: dict[str, Recommend] = {
    "machine": _machine,
    "gpus": _fixed(""),
    "facts_file": _fixed(""),
    "cards": _cards,
    "ranks": lambda s: (2, _("two show that ranks work together")),
    "nodes": lambda s: (s.facts.nodes if s.facts else 1, ""),
    "ram": lambda s: (None, ""),
    "python": _python,
    "engine": _engine,
    "script": _script,
    "args": _args,
    "cwd": lambda s: (str(s.cwd), ""),
    "launcher": _fixed("auto"),
    "model": _model,
    "seq": _seq,
    "method": _method,
    "lora_rank": _fixed(16),
    "checkpointing": _checkpointing,
    "attention": _fixed("sdpa"),
    "stage": _stage,
    "offload": _offload,
    "optimizer_device": lambda s: (s.plan.optimizer_device if s.get("stage") == 3 else "cpu", ""),
    "param_device": lambda s: (s.plan.param_device if s.get("stage") == 3 else "cpu", ""),
    "nvme_path": _nvme_path,
    "micro_batch": _micro,
    "accumulation": _accumulation,
    "global_batch": lambda s: (s.get("micro_batch") * s.get("accumulation") * s.world, ""),
    "pin_optimizer": _pin,
    "pin_param": _pin,
    "overlap_comm": _overlap,
    "reduce_bucket_size": _bucket,
    "allgather_bucket_size": _allgather,
    "prefetch_bucket_size": _prefetch,
    "persistence_threshold": _persistence,
    "timeout": _timeout,
    "precision": _precision,
    "optimizer": _optimizer,
    "lr": _lr,
    "weight_decay": lambda s: (0.01 if s.get("engine") == "demo" else 0.0, ""),
    "gradient_clipping": _fixed(1.0),
    "output": _output,
    "name": _fixed(""),
    "instrument": _fixed(True),
}

OPTIONS: dict[str, Options] = {
    "machine": _machine_options,
    "cards": _card_options,
    "python": _python_options,
    "engine": _engine_options,
    "launcher": _launcher_options,
    "method": _method_options,
    "attention": _attention_options,
    "stage": _stage_options,
    "offload": _offload_options,
    "optimizer_device": _device_options,
    "param_device": _device_options,
    "precision": _precision_options,
    "optimizer": _optimizer_options,
}

WHY_NOT: dict[str, WhyNot] = {
    "gpus": lambda s: "" if s.get("machine") == "describe" else _("for a described machine"),
    "facts_file": lambda s: "" if s.get("machine") == "file" else _("for another machine"),
    "cards": _no_cards,
    "ranks": _no_ranks,
    "ram": lambda s: "" if s.get("machine") == "describe" else _("for a described machine"),
    "script": lambda s: _("the demo brings its own") if s.get("engine") == "demo" else "",
    "model": _demo_only,
    "lora_rank": lambda s: _("for LoRA") if s.get("method") == "full" else "",
    "attention": _demo_only,
    "optimizer_device": _no_optimizer_offload,
    "param_device": _no_param_offload,
    "nvme_path": _no_nvme,
    "pin_optimizer": _no_optimizer_offload,
    "pin_param": _no_param_offload,
    "overlap_comm": _no_comm,
    "reduce_bucket_size": _no_comm,
    "allgather_bucket_size": _no_allgather,
    "prefetch_bucket_size": _no_stage3,
    "persistence_threshold": _no_stage3,
    "timeout": _no_timeout,
    "lr": _no_optimizer,
    "weight_decay": _no_optimizer,
}


def size_line(s: State) -> str:
    """Model in one line for ``deciding``."""
    shape = s.shape
    return (
        ""
        if shape is None
        else _("{name}: {params} parameters").format(name=shape.name, params=count(shape.params))
    )
