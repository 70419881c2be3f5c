"""What to change after a failure: edits of the run's config where the config can do it, each with its price.

An edit is RFC 6902 on the config as the run had it, applies to it, and leaves a config that ``dstui check`` accepts for
the run's release (``tests/unit/test_runs_repairs.py``). Numbers in a price come from the run's own messages or from
the estimator (``dstui.runs.prices``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstui.i18n import _


@dataclass(frozen=True)
class Repair:
    """``edits``: RFC 6902 on the run's config; empty when the change is not in the config. ``price``: what it costs."""

    title: str
    edits: tuple[Mapping[str, Any], ...] = ()
    price: str = ""


def micro_batch(config: Mapping[str, Any] | None) -> list[Repair]:
    """Half the micro batch at the same global batch, where the config holds the numbers."""
    fixes = []
    micro = (config or {}).get("train_micro_batch_size_per_gpu")
    gas = (config or {}).get("gradient_accumulation_steps")
    if isinstance(micro, int) and not isinstance(micro, bool) and micro > 1:
        half = micro // 2
        edits: list[dict[str, Any]] = [
            {"op": "replace", "path": "/train_micro_batch_size_per_gpu", "value": half}
        ]
        if isinstance(gas, int) and micro % 2 == 0:
            edits.append({"op": "replace", "path": "/gradient_accumulation_steps", "value": gas * 2})
        elif gas is None and micro % 2 == 0 and "train_batch_size" not in (config or {}):
            edits.append({"op": "add", "path": "/gradient_accumulation_steps", "value": 2})
        fixes.append(
            Repair(
                _("micro batch {a} -> {b} with the accumulation doubled: the same global batch").format(
                    a=micro, b=half
                ),
                tuple(edits),
                _("more micro steps, each faster; usually a few percent slower"),
            )
        )
    else:
        fixes.append(Repair(_("a smaller micro batch, with more accumulation for the same global batch")))
    fixes.append(Repair(_("activation checkpointing in the script"), price=_("about a third more compute")))
    return fixes


def gpu_memory(config: Mapping[str, Any] | None) -> list[Repair]:
    """The next step up in ZeRO and offload from where the config stands."""
    zero = (config or {}).get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    stage = stage if isinstance(stage, int) else 0
    offload = zero.get("offload_optimizer") or {}
    on_cpu = isinstance(offload, Mapping) and offload.get("device", "none") in ("cpu", "nvme")
    fixes = []
    if config is None:
        return [
            Repair(
                _("a higher ZeRO stage"),
                price=_("stages 1 and 2 cost little, stage 3 communicates half as much again"),
            ),
            Repair(
                _("offload the optimizer to the CPU"),
                price=_("slower steps: the CPU updates the weights over PCIe"),
            ),
        ]
    if stage < 3:
        target = 2 if stage < 2 else 3
        edit: dict[str, Any]
        if isinstance(config.get("zero_optimization"), Mapping):
            op = "replace" if "stage" in zero else "add"
            edit = {"op": op, "path": "/zero_optimization/stage", "value": target}
        else:
            edit = {"op": "add", "path": "/zero_optimization", "value": {"stage": target}}
        fixes.append(
            Repair(
                _("ZeRO stage {a} -> {b}").format(a=stage, b=target),
                (edit,),
                _("little")
                if target == 2
                else _("parameters are gathered for every layer: half as much communication again"),
            )
        )
    if stage >= 1 and not on_cpu:
        op = "replace" if "offload_optimizer" in zero else "add"
        fixes.append(
            Repair(
                _("offload the optimizer to the CPU"),
                ({"op": op, "path": "/zero_optimization/offload_optimizer", "value": {"device": "cpu"}},),
                _("slower steps: the CPU updates the weights over PCIe; 12 bytes a parameter of host RAM"),
            )
        )
    params = zero.get("offload_param") or {}
    if (
        stage == 3
        and on_cpu
        and not (isinstance(params, Mapping) and params.get("device", "none") in ("cpu", "nvme"))
    ):
        op = "replace" if "offload_param" in zero else "add"
        fixes.append(
            Repair(
                _("offload the parameters too"),
                ({"op": op, "path": "/zero_optimization/offload_param", "value": {"device": "cpu"}},),
                _("much slower: weights cross PCIe in every pass"),
            )
        )
    return fixes


def host_memory(config: Mapping[str, Any] | None) -> tuple[Repair, ...]:
    zero = (config or {}).get("zero_optimization")
    fixes = []
    if isinstance(zero, Mapping):
        params, optimizer = zero.get("offload_param"), zero.get("offload_optimizer")
        if isinstance(params, Mapping) and params.get("device", "none") != "none":
            fixes.append(
                Repair(
                    _("offload the optimizer only: drop offload_param"),
                    ({"op": "remove", "path": "/zero_optimization/offload_param"},),
                    _("2 bytes a parameter divided by the ranks go back to the GPUs"),
                )
            )
        for key, value in (("offload_optimizer", optimizer), ("offload_param", params)):
            if (
                isinstance(value, Mapping)
                and value.get("device") == "cpu"
                and value.get("pin_memory") is not False
            ):
                op = "replace" if "pin_memory" in value else "add"
                fixes.append(
                    Repair(
                        _("do not pin the buffers of {key} (true by default from 0.19.5 on)").format(key=key),
                        ({"op": op, "path": f"/zero_optimization/{key}/pin_memory", "value": False},),
                        _("slower copies between host and GPU"),
                    )
                )
    fixes.append(Repair(_("fewer ranks on a node, or a higher memory limit for the job")))
    return tuple(fixes)


def pinning(config: Mapping[str, Any] | None) -> list[Repair]:
    fixes = [Repair(_("raise the limit for locked memory: ulimit -l unlimited"))]
    zero = (config or {}).get("zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        value = zero.get(key) if isinstance(zero, Mapping) else None
        if isinstance(value, Mapping):
            op = "replace" if "pin_memory" in value else "add"
            edit = {"op": op, "path": f"/zero_optimization/{key}/pin_memory", "value": False}
            fixes.append(Repair(_("do not pin the buffers of {key}").format(key=key), (edit,)))
    return fixes


def batch(config: Mapping[str, Any] | None, text: str) -> list[Repair]:
    m = re.search(r"(\d+) != (\d+) \* (\d+) \* (\d+)", text)
    fixes: list[Repair] = []
    if m and int(m.group(4)) == 1:
        total, each = int(m.group(1)), int(m.group(2)) * int(m.group(3))
        if each and total % each == 0 and total // each > 1:
            fixes.append(
                Repair(
                    _(
                        "DeepSpeed saw 1 rank, the numbers are right for {n}: start with a launcher, and create no "
                        "zero.Init or config before the ranks are up (DeepSpeed 0.9.0 read it too early)"
                    ).format(n=total // each)
                )
            )
    if not m or "train_batch_size" not in (config or {}):
        return [*fixes, Repair(_("leave train_batch_size out and let DeepSpeed derive it"))]
    micro, gas, world = (int(x) for x in m.groups()[1:])
    product = micro * gas * world
    return [
        *fixes,
        Repair(
            _("train_batch_size {a} -> {b} (= {micro} x {gas} x {world} ranks)").format(
                a=m.group(1), b=product, micro=micro, gas=gas, world=world
            ),
            ({"op": "replace", "path": "/train_batch_size", "value": product},),
        ),
        Repair(
            _("leave train_batch_size out and let DeepSpeed derive it"),
            ({"op": "remove", "path": "/train_batch_size"},),
        ),
    ]


def offload_return(config: Mapping[str, Any] | None) -> list[Repair]:
    """The GPUs wait for the CPU's step: fewer steps, more cores, or no offload."""
    fixes = [Repair(_("more cores for each rank: OMP_NUM_THREADS, or fewer ranks on a node"))]
    steps = (config or {}).get("gradient_accumulation_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and "train_batch_size" not in (config or {}):
        edit: dict[str, Any] = {"op": "replace", "path": "/gradient_accumulation_steps", "value": 2 * steps}
        fixes.append(
            Repair(
                _("accumulation {a} -> {b}: half as many steps for the same samples").format(
                    a=steps, b=2 * steps
                ),
                (edit,),
                _("the global batch doubles"),
            )
        )
    if has(config, "/zero_optimization/offload_optimizer"):
        fixes.append(
            Repair(
                _("do without optimizer offload"),
                ({"op": "remove", "path": "/zero_optimization/offload_optimizer"},),
                _("its states stay on the GPU"),
            )
        )
    return fixes


def saving(config: Mapping[str, Any] | None) -> list[Repair]:
    """Save the pieces of the ranks instead of gathering them on one GPU."""
    for key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        if has(config, f"/zero_optimization/{key}"):
            edit = {"op": "replace", "path": f"/zero_optimization/{key}", "value": False}
            return [
                Repair(
                    _("do not gather the weights on one GPU when saving"),
                    (edit,),
                    _("the 16-bit file is made afterwards: zero_to_fp32.py in the checkpoint's folder"),
                )
            ]
    return []


def nvme(config: Mapping[str, Any] | None) -> list[Repair]:
    fixes = []
    zero = (config or {}).get("zero_optimization")
    edits: list[dict[str, Any]] = []
    for key in ("offload_optimizer", "offload_param"):
        value = zero.get(key) if isinstance(zero, Mapping) else None
        if isinstance(value, Mapping) and value.get("device") == "nvme":
            edits.append({"op": "replace", "path": f"/zero_optimization/{key}/device", "value": "cpu"})
            edits += [
                {"op": "remove", "path": f"/zero_optimization/{key}/{name}"}
                for name in ("nvme_path",)
                if name in value
            ]
    fixes.append(Repair(_("name a writable folder on a local NVMe disk as nvme_path")))
    if edits:
        fixes.append(
            Repair(
                _("offload to the CPU instead of NVMe"), tuple(edits), _("the states then lie in host RAM")
            )
        )
    return fixes


def boundary(config: Mapping[str, Any] | None, text: str) -> list[Repair]:
    config = config or {}
    zero = config.get("zero_optimization")
    fixes = []
    if config.get("managed_gradient_accumulation") is False:
        fixes.append(
            Repair(
                _("let DeepSpeed manage the accumulation again"),
                ({"op": "remove", "path": "/managed_gradient_accumulation"},),
                _("the script must then call engine.step after every micro batch"),
            )
        )
        if isinstance(zero, Mapping) and "offload" in text:
            fixes.append(Repair(_("or upgrade DeepSpeed: offload goes with it from 0.19.5 on")))
    elif "no_sync" in text and isinstance(zero, Mapping) and zero.get("stage") in (2, 3):
        fixes.append(
            Repair(
                _("ZeRO stage 1 allows no_sync"),
                ({"op": "replace", "path": "/zero_optimization/stage", "value": 1},)
                if not offloads(config)
                else (),
                _("gradients, and at stage 3 parameters, are no longer split over the ranks"),
            )
        )
        fixes.append(Repair(_("or drop no_sync from the loop: the engine reduces at the boundary by itself")))
    return fixes


def toolkit(config: Mapping[str, Any] | None) -> list[Repair]:
    """Without nvcc: the optimizer of torch needs no op of DeepSpeed."""
    fixes = [Repair(_("install the CUDA toolkit of torch's release and set CUDA_HOME"))]
    optimizer = (config or {}).get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        params = optimizer.get("params")
        edit: dict[str, Any] = (
            {
                "op": "replace" if "torch_adam" in params else "add",
                "path": "/optimizer/params/torch_adam",
                "value": True,
            }
            if isinstance(params, Mapping)
            else {"op": "add", "path": "/optimizer/params", "value": {"torch_adam": True}}
        )
        fixes.append(
            Repair(
                _("use torch's Adam, which needs no compiled op"),
                (edit,),
                _("with offload the step on the CPU gets much slower") if offloads(config) else _("little"),
            )
        )
    return fixes


def cpu_optimizer(config: Mapping[str, Any] | None) -> list[Repair]:
    edits: tuple[Mapping[str, Any], ...] = ()
    if config is not None:
        op = "replace" if "zero_force_ds_cpu_optimizer" in config else "add"
        edits = ({"op": op, "path": "/zero_force_ds_cpu_optimizer", "value": False},)
    return [
        Repair(_("use DeepSpeedCPUAdam in the script, or name the optimizer in the config")),
        Repair(_("accept another optimizer on the CPU"), edits, _("the step on the CPU gets much slower")),
    ]


def precision(config: Mapping[str, Any] | None) -> list[Repair]:
    fixes = []
    fp16 = (config or {}).get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled"):
        op = "replace" if "bf16" in (config or {}) else "add"
        fixes.append(
            Repair(
                _("bf16 instead of fp16"),
                (
                    {"op": "replace", "path": "/fp16/enabled", "value": False},
                    {"op": op, "path": "/bf16", "value": {"enabled": True}},
                ),
                _("needs compute capability 8.0"),
            )
        )
    fixes.append(Repair(_("a lower learning rate, with warm-up and gradient clipping 1.0")))
    return fixes


def number_types(config: Mapping[str, Any] | None) -> list[Repair]:
    """Source: DeepSpeedEngine.forward casts its inputs under fp16.auto_cast only (0.19.8)."""
    fixes = []
    for name, kind in (("bf16", "torch.bfloat16"), ("fp16", "torch.float16")):
        section = (config or {}).get(name)
        if not isinstance(section, Mapping) or not section.get("enabled"):
            continue
        fixes.append(Repair(_("cast the inputs in the script: x = x.to({dtype})").format(dtype=kind)))
        if name == "fp16":
            op = "replace" if "auto_cast" in section else "add"
            fixes.append(
                Repair(_("let DeepSpeed cast them"), ({"op": op, "path": "/fp16/auto_cast", "value": True},))
            )
        fixes.append(
            Repair(
                _("train in fp32"),
                ({"op": "replace", "path": f"/{name}/enabled", "value": False},),
                _("parameters and gradients take twice the memory"),
            )
        )
    return fixes


def build(config: Mapping[str, Any] | None) -> list[Repair]:
    fixes = [Repair(_("install what is missing for the op builder: dstui detect names it"))]
    zero = (config or {}).get("zero_optimization")
    if isinstance(zero, Mapping) and isinstance(zero.get("offload_optimizer"), Mapping):
        fixes.append(
            Repair(
                _("do without optimizer offload"),
                ({"op": "remove", "path": "/zero_optimization/offload_optimizer"},),
                _("its states stay on the GPU"),
            )
        )
    return fixes


def foreign_op(text: str, root: Path | None) -> list[Repair]:
    """``root``: where the run looks for built ops; the op's folder lies there or one below (``py311_cpu``)."""
    op = re.search(
        r"module '(\w+)' has no attribute|\b(?:create|destroy)_(ada)\w+\(\)|\b(ada)\w+_update", text
    )
    name = (op.group(1) or "cpu_ada*") if op else "*"
    folders = sorted([*root.glob(name), *root.glob(f"*/{name}")]) if root is not None and name != "*" else []
    built = [str(f) for f in folders if any(f.glob("*.so"))]
    shown = shlex.join(built) if built else f"~/.cache/torch_extensions/*/{name}"
    return [
        Repair(_("delete the op's folder, it is built again: {command}").format(command=f"rm -r {shown}")),
        Repair(
            _("give each DeepSpeed release its own folder of ops: TORCH_EXTENSIONS_DIR in its environment"),
            price=_("each op is built once more"),
        ),
    ]


def offloads(config: Mapping[str, Any] | None) -> bool:
    zero = (config or {}).get("zero_optimization")
    return isinstance(zero, Mapping) and any(
        isinstance(zero.get(k), Mapping) and zero[k].get("device", "none") != "none"
        for k in ("offload_optimizer", "offload_param")
    )


def of_cause(code: str, config: Mapping[str, Any] | None, text: str) -> list[Repair]:
    """Repairs of a cause that a message names."""
    if code == "DR301":
        return batch(config, text)
    if code in ("DR102", "DR108"):
        return [*micro_batch(config), *gpu_memory(config)]
    if code == "DR201":
        return cpu_optimizer(config)
    if code == "DR203":
        return nvme(config)
    if code == "DR302":
        return boundary(config, text)
    if code in ("DR401", "DR404"):
        return list(host_memory(config))
    if code == "DR402":
        return pinning(config)
    if code == "DR503":
        return [Repair(_("let dstui choose a free port: --master-port auto"))]
    if code == "DR602":
        return precision(config)
    if code == "DR715" and re.search(r"expected, but not set|compatible with MP", text):
        return [Repair(_("start the script with a launcher: dstui run, deepspeed or torchrun"))]
    if code == "DR701":
        return build(config)
    if code == "DR702":
        return toolkit(config)
    if code == "DR703":
        return [Repair(_("run with TORCH_CUDA_ARCH_LIST unset"))]
    return []


def has(config: Mapping[str, Any] | None, pointer: str) -> bool:
    at: Any = config
    for part in pointer.strip("/").split("/"):
        if not isinstance(at, Mapping) or part not in at:
            return False
        at = at[part]
    return True
