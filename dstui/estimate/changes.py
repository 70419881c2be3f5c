"""Single changes that may make a run fit, each with what it costs.

``candidates`` proposes them from cheap to dear; ``memory.estimate`` keeps those whose own estimate fits. The
price of a change in words follows from what DeepSpeed does: communication of ZeRO-3 is 1.5 times that of
ZeRO-1/2 (arXiv 1910.02054, section 7), offload moves gradients and parameters over PCIe each step and runs
Adam on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstui.estimate.inputs import Training
from dstui.estimate.settings import Settings
from dstui.i18n import _
from dstui.units import count


@dataclass(frozen=True)
class Candidate:
    title: str
    costs: str
    config: Mapping[str, Any]
    training: Training
    edits: tuple[Mapping[str, Any], ...]


def edited(
    config: Mapping[str, Any], pointer: str, value: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``config`` with ``pointer`` set, and the RFC 6902 operations that do it (parents are added)."""
    keys = pointer.strip("/").split("/")
    data: dict[str, Any] = dict(config)
    node = data
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key)
        if not isinstance(child, Mapping):
            whole: Any = value
            for missing in reversed(keys[depth + 1 :]):
                whole = {missing: whole}
            op = "replace" if key in node else "add"
            node[key] = whole
            return data, [{"op": op, "path": "/" + "/".join(keys[: depth + 1]), "value": whole}]
        node[key] = dict(child)
        node = node[key]
    op = "replace" if keys[-1] in node else "add"
    node[keys[-1]] = value
    return data, [{"op": op, "path": pointer, "value": value}]


def candidates(
    config: Mapping[str, Any], training: Training, s: Settings, where: str, *, cpu_only: bool
) -> list[Candidate]:
    """Changes to try when ``where`` (``gpu``, ``host`` or ``nvme``) is short, cheapest first."""
    if where == "gpu" and not cpu_only:
        return _for_gpu(config, training, s)
    return _for_host(config, training, s, cpu_only)


def _change(
    config: Mapping[str, Any],
    training: Training,
    title: str,
    costs: str,
    *settings: tuple[str, Any],
) -> Candidate:
    data, edits = dict(config), []
    for pointer, value in settings:
        data, made = edited(data, pointer, value)
        edits += made
    return Candidate(title, costs, data, training, tuple(edits))


def _micro_batch(config: Mapping[str, Any], training: Training, s: Settings) -> list[Candidate]:
    out: list[Candidate] = []
    for micro in sorted({max(1, s.micro_batch // 2), 1}, reverse=True):
        if micro >= s.micro_batch or s.micro_batch % micro:
            continue
        steps = s.accumulation * s.micro_batch // micro
        settings: list[tuple[str, Any]] = [
            ("/train_micro_batch_size_per_gpu", micro),
            ("/gradient_accumulation_steps", steps),
        ]
        out.append(
            _change(
                config,
                replace(training, micro_batch=micro),
                _("micro batch {micro}, {steps} accumulation steps").format(micro=micro, steps=steps),
                _("same global batch, more and smaller kernels"),
                *settings,
            )
        )
    return out


def _zero_init(config: Mapping[str, Any], training: Training, s: Settings) -> list[Candidate]:
    """Otherwise each rank first holds the whole model, on its card or in RAM. bitsandbytes makes its weights itself."""
    if s.zero_init or s.quant != "none":
        return []
    return [
        Candidate(
            _("build the model under zero.Init"),
            _("a small change of the script"),
            config,
            replace(training, zero_init=True),
            (),
        )
    ]


def _for_gpu(config: Mapping[str, Any], training: Training, s: Settings) -> list[Candidate]:
    out: list[Candidate] = []
    if not training.checkpointing:
        out.append(
            Candidate(
                _("turn on gradient checkpointing"),
                _("about a third more computation"),
                config,
                replace(training, checkpointing=True),
                (),
            )
        )
    if s.stage == 3:
        out += _zero_init(config, training, s)
    out += _micro_batch(config, training, s)
    if s.overlap and s.stage in (1, 2):
        out.append(
            _change(
                config, training, _("overlap_comm off"), _("communication is no longer hidden behind backward"),
                ("/zero_optimization/overlap_comm", False),
            )
        )  # fmt: skip
    for size in (200_000_000, 50_000_000):
        if s.stage and size < s.reduce_bucket:
            out.append(
                _change(
                    config,
                    training,
                    _("reduce_bucket_size {size}").format(size=count(size)),
                    _("more, smaller messages"),
                    ("/zero_optimization/reduce_bucket_size", size),
                )
            )
    if s.stage == 3 and s.sub_group > 100_000_000 and s.offload_optimizer == "none":
        out.append(
            _change(
                config, training, _("sub_group_size {size}").format(size=count(100_000_000)),
                _("almost nothing: the step runs in more pieces"), ("/zero_optimization/sub_group_size", 100_000_000),
            )
        )  # fmt: skip
    if s.stage == 3 and s.live > 100_000_000 and s.ranks > 1:
        out.append(
            _change(
                config,
                training,
                _("keep fewer gathered parameters alive"),
                _("more gathers of the same parameters"),
                ("/zero_optimization/stage3_max_live_parameters", 100_000_000),
                ("/zero_optimization/stage3_max_reuse_distance", 100_000_000),
                ("/zero_optimization/stage3_prefetch_bucket_size", 20_000_000),
            )
        )
    for stage in (1, 2, 3):
        if stage > s.stage and (s.ranks > 1 or stage == 3):
            costs = (
                _("1.5 times the communication of stage 2; needs fast links")
                if stage == 3
                else _("no more communication than data parallel")
            )
            out.append(
                _change(
                    config,
                    training,
                    _("ZeRO stage {stage}").format(stage=stage),
                    costs,
                    ("/zero_optimization/stage", stage),
                )
            )
            if stage == 3:
                out += [
                    replace(
                        c,
                        title=_("ZeRO stage 3, the model built under zero.Init"),
                        costs=f"{costs}; {c.costs}",
                        edits=out[-1].edits,
                    )
                    for c in _zero_init(out[-1].config, training, s)
                ]
    if s.offload_optimizer == "none":
        stage = max(2, s.stage)
        out.append(
            _change(
                config,
                training,
                _("stage {stage} with the optimizer in host RAM").format(stage=stage),
                _("gradients and parameters cross PCIe every step, Adam runs on the CPU"),
                ("/zero_optimization/stage", stage),
                ("/zero_optimization/offload_optimizer", {"device": "cpu", "pin_memory": s.pin_optimizer}),
            )
        )
    if s.offload_param == "none":
        out.append(
            _change(
                config,
                training,
                _("stage 3 with optimizer and parameters in host RAM"),
                _("every layer's parameters cross PCIe in forward and backward"),
                ("/zero_optimization/stage", 3),
                ("/zero_optimization/offload_optimizer", {"device": "cpu", "pin_memory": s.pin_optimizer}),
                ("/zero_optimization/offload_param", {"device": "cpu", "pin_memory": s.pin_param}),
            )
        )
    if training.loss == "standard":
        out.append(
            Candidate(
                _("a fused cross entropy (Liger): no whole logits"),
                _("a small change of the script"),
                config,
                replace(training, loss="fused"),
                (),
            )
        )
    if training.seq > 512:
        seq = training.seq // 2
        out.append(
            Candidate(
                _("sequences of {seq} tokens").format(seq=seq),
                _("longer examples are cut"),
                config,
                replace(training, seq=seq),
                (),
            )
        )
    if not training.lora_rank:
        out.append(
            Candidate(
                _("train a LoRA adapter of rank 16 instead of all weights"),
                _("another model: only low-rank updates are learnt"),
                config,
                replace(training, lora_rank=16),
                (),
            )
        )
    if training.quant == "none" and s.stage < 3:
        out.append(
            Candidate(
                _("LoRA on a 4-bit model (QLoRA)"),
                _("the frozen weights are rounded to 4 bits"),
                config,
                replace(training, lora_rank=training.lora_rank or 16, quant="nf4"),
                (),
            )
        )
    return out


def _for_host(config: Mapping[str, Any], training: Training, s: Settings, cpu_only: bool) -> list[Candidate]:
    out: list[Candidate] = []
    if cpu_only:
        if not training.checkpointing:
            out.append(
                Candidate(
                    _("turn on gradient checkpointing"),
                    _("about a third more computation"),
                    config,
                    replace(training, checkpointing=True),
                    (),
                )
            )
        return [*out, *_micro_batch(config, training, s)]
    if s.offload_optimizer != "none" and s.pin_optimizer:
        out.append(
            _change(
                config,
                training,
                _("pin_memory off for the optimizer"),
                _("slower copies; pinned blocks are rounded up to a power of two"),
                ("/zero_optimization/offload_optimizer/pin_memory", False),
            )
        )
    if s.offload_param == "cpu":
        out.append(
            _change(
                config,
                training,
                _("parameters stay on the GPU"),
                _("more GPU memory, less PCIe traffic"),
                ("/zero_optimization/offload_param", {"device": "none"}),
            )
        )
    if s.offload_optimizer != "none":
        out.append(
            _change(
                config,
                training,
                _("no optimizer offload"),
                _("more GPU memory, a faster step"),
                ("/zero_optimization/offload_optimizer", {"device": "none"}),
                ("/zero_optimization/offload_param", {"device": "none"}),
            )
        )
    if s.stage == 3:
        out += _zero_init(config, training, s)
    if training.load_dtype == "float32" or s.load == 4:
        out.append(
            Candidate(
                _("load the model in 16 bits"),
                _("a small change of the script"),
                config,
                replace(training, load_dtype="bfloat16"),
                (),
            )
        )
    return out
