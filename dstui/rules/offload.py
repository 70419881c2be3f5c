"""DS3xx: offload of optimizer states and parameters to the host or to NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import MISSING, Subject, as_number

ZERO = "/zero_optimization"
OPTIMIZER = ZERO + "/offload_optimizer"
PARAM = ZERO + "/offload_param"


@rule(
    "DS301",
    "offload-optimizer-at-stage-0",
    Severity.NO_EFFECT,
    "init",
    what=N_("offload_optimizer with a device at ZeRO stage 0."),
    why=N_(
        "Stage 0 has no partitioned optimizer to move. DeepSpeed accepts the block; nothing is offloaded, but Adam is swapped for the CPU one, which then stops at the first step because the parameters are on the GPU."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Use stage 1, 2 or 3, or remove offload_optimizer."),
    source="deepspeed/runtime/engine.py zero_use_cpu_optimizer, ops/adam/cpu_adam.py step @ 0.19.8; executed on CPU",
)
def offload_optimizer_at_stage_0(s: Subject) -> Iterator[Hit]:
    if s.stage == 0 and s.offloads_optimizer:
        yield Hit(
            OPTIMIZER if s.written(OPTIMIZER) else ZERO + "/cpu_offload",
            _("optimizer offload does nothing at stage 0"),
            effect=_("optimizer states stay on every GPU, and on CUDA the CPU Adam stops at the first step"),
            hint=_("use stage 1, 2 or 3, or remove it"),
            fix=put(ZERO + "/stage", 2, there=s.written(ZERO + "/stage"), safe=False),
        )


@rule(
    "DS302",
    "offload-without-device",
    Severity.NO_EFFECT,
    "parse",
    what=N_("An offload block without a device, or with device auto."),
    why=N_(
        "The default device is none, whatever DeepSpeed's documentation says: the block switches nothing on."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": true}}}',
    fix=N_('Add "device": "cpu" (or "nvme"), or remove the block.'),
    source="deepspeed/runtime/zero/offload_config.py: device = OffloadDeviceEnum.none @ 0.9.5-0.19.8",
)
def offload_without_device(s: Subject) -> Iterator[Hit]:
    for pointer in (OPTIMIZER, PARAM):
        block = s.get(pointer)
        if block == "auto":
            yield Hit(
                pointer,
                _('"auto" means no offload here'),
                effect=_("nothing is offloaded"),
                hint=_("write the block with a device, or remove it"),
            )
        elif isinstance(block, Mapping) and block.get("device", "auto") == "auto":
            where = pointer + "/device"
            yield Hit(
                where if s.written(where) else pointer,
                _("no device is named, and the default is none"),
                effect=_("nothing is offloaded"),
                hint=_('add "device": "cpu" or "nvme", or remove the block'),
                fix=put(where, "cpu", there=s.written(where), safe=False),
            )


@rule(
    "DS303",
    "nvme-below-stage-3",
    Severity.SILENT_WRONG,
    "init",
    what=N_("offload_optimizer to nvme below ZeRO stage 3."),
    why=N_(
        "Only the stage 3 optimizer can swap to files. Stages 1 and 2 read nvme as cpu: the states fill the host RAM and nvme_path is never opened."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}}',
    fix=N_("Use stage 3, or write device cpu if the host has the RAM."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:220 @ 0.19.8; executed on 0.14.5-0.19.8",
)
def nvme_below_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage in (1, 2) and s.offload("offload_optimizer") == "nvme":
        yield Hit(
            OPTIMIZER + "/device",
            _("nvme works as cpu at stage {stage}").format(stage=s.stage),
            effect=_("the optimizer states go to host RAM; nvme_path is never used"),
            hint=_("use stage 3, or write cpu"),
            fix=put(OPTIMIZER + "/device", "cpu", there=True, safe=False),
        )


_NO_FOLDER = (None, "", "auto", "none")
"""What nvme_path may hold without naming a folder."""


def _nvme_paths(s: Subject) -> Iterator[tuple[str, str, Any]]:
    """(section, its pointer, nvme_path as written or None) of each section that stage 3 swaps to NVMe."""
    if s.stage == 3:
        for name, pointer in (("offload_optimizer", OPTIMIZER), ("offload_param", PARAM)):
            if s.offload(name) == "nvme":
                yield name, pointer, s.get(pointer + "/nvme_path", None)


def _nvme_folders(s: Subject, state: str, hit: Callable[[str, str], Hit]) -> Iterator[Hit | Lacks]:
    """``hit(pointer of nvme_path, folder)`` of each folder that is in ``state`` here, as ``Subject.folder`` says it."""
    for _name, pointer, path in _nvme_paths(s):
        if isinstance(path, str) and path not in _NO_FOLDER:
            found = s.folder(path)
            if found is None:
                yield Lacks("facts.storage")
            elif found == state:
                yield hit(pointer + "/nvme_path", path)


@rule(
    "DS304",
    "nvme-without-path",
    Severity.ERROR,
    "init",
    what=N_("Offload to nvme at stage 3 without nvme_path."),
    why=N_(
        "There is no default folder. Parsing succeeds; building the swapper then stops with a TypeError (optimizer) or an assertion (parameters) after the model was loaded."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
    fix=N_("Add nvme_path: a folder on a local NVMe disk."),
    source="deepspeed/runtime/zero/stage3.py:841, partition_parameters.py:1229 @ 0.19.8; executed on 0.19.8",
)
def nvme_without_path(s: Subject) -> Iterator[Hit]:
    for name, pointer, path in _nvme_paths(s):
        if path in _NO_FOLDER:
            yield Hit(
                pointer + ("/nvme_path" if s.written(pointer + "/nvme_path") else "/device"),
                _("{block} goes to nvme, but nvme_path names no folder").format(block=name),
                effect=_("the engine stops at start, after the model was loaded"),
                hint=_('add "nvme_path": a folder on a local NVMe disk'),
            )


@rule(
    "DS305",
    "nvme-path-unusable",
    Severity.ERROR,
    "init",
    what=N_("nvme_path names a place where this machine cannot write."),
    why=N_(
        "DeepSpeed makes the folder itself if it may; if no parent folder exists that it may write to, it stops after the model was loaded."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/etc/passwd/swap"}}}',
    fix=N_("Name a folder that exists on a local NVMe disk and that you may write to."),
    source="deepspeed/runtime/zero/stage3.py:841 os.makedirs(nvme_swap_folder, exist_ok=True) @ 0.19.8",
    context={"local": True},
)
def nvme_path_unusable(s: Subject) -> Iterator[Hit | Lacks]:
    def hit(pointer: str, path: str) -> Hit:
        return Hit(
            pointer,
            _("{path} cannot be written on this machine").format(path=path),
            effect=_("the engine stops at start, after the model was loaded"),
            hint=_("name a folder on a local NVMe disk that you may write to"),
        )

    return _nvme_folders(s, "unwritable", hit)


@rule(
    "DS306",
    "nvme-path-missing",
    Severity.WARNING,
    "init",
    what=N_("nvme_path names a folder that does not exist on this machine."),
    why=N_(
        "DeepSpeed creates it, so a misspelt path or a disk that is not mounted fills the wrong disk, often the root file system."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/no_such_disk_here"}}}',
    fix=N_("Mount the disk, or correct the path."),
    source="deepspeed/runtime/zero/stage3.py:841 os.makedirs(nvme_swap_folder, exist_ok=True) @ 0.19.8",
    context={"local": True},
)
def nvme_path_missing(s: Subject) -> Iterator[Hit | Lacks]:
    def hit(pointer: str, path: str) -> Hit:
        return Hit(
            pointer,
            _("{path} does not exist here; DeepSpeed would create it").format(path=path),
            effect=_("if the disk is not mounted, the files land on another file system"),
            hint=_("check the path and the mount"),
        )

    return _nvme_folders(s, "missing", hit)


@rule(
    "DS307",
    "partial-offload-below-stage-3",
    Severity.ERROR,
    "parse",
    since="0.15.0",
    what=N_("offload_optimizer.ratio below 1 at a stage other than 3."),
    why=N_("Partial (Twin-Flow) offload exists at stage 3 only; the config is refused."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}',
    fix=N_("Use stage 3, or remove ratio."),
    source="deepspeed/runtime/zero/config.py:399 @ 0.19.8",
)
def partial_offload_below_stage_3(s: Subject) -> Iterator[Hit]:
    pointer = OPTIMIZER + "/ratio"
    ratio = as_number(s.get(pointer, 1.0))
    if s.stage in (0, 1, 2) and ratio is not None and 0 <= ratio < 1:
        yield Hit(
            pointer,
            _("ratio {ratio} needs stage 3, this is stage {stage}").format(ratio=ratio, stage=s.stage),
            effect=_("the config is refused"),
            hint=_("use stage 3 or remove ratio"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS308",
    "super-offload-below-stage-3",
    Severity.NO_EFFECT,
    "init",
    since="0.18.0",
    what=N_("super_offload or cpuadam_cores_perc at a stage below 3."),
    why=N_("SuperOffload is a variant of the stage 3 optimizer; below it the keys are parsed and ignored."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true}}}',
    fix=N_("Use stage 3, or remove super_offload."),
    source="deepspeed/runtime/engine.py _configure_zero_optimizer @ 0.19.8",
)
def super_offload_below_stage_3(s: Subject) -> Iterator[Hit]:
    pointer = OPTIMIZER + "/super_offload"
    if s.stage in (0, 1, 2) and s.flag(pointer):
        yield Hit(
            pointer,
            _("super_offload does nothing at stage {stage}").format(stage=s.stage),
            effect=_("the ordinary optimizer offload runs"),
            hint=_("use stage 3, or remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS309",
    "partial-offload-without-cpu-adam",
    Severity.ERROR,
    "init",
    since="0.12.3",
    what=N_("offload_optimizer.ratio below 1 with an optimizer other than Adam or AdamW."),
    why=N_("The hybrid optimizer step is written for DeepSpeedCPUAdam only."),
    example='{"train_batch_size": 8, "optimizer": {"type": "Lion", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}',
    fix=N_("Use AdamW, or remove ratio."),
    source="deepspeed/runtime/zero/stage3.py:316 @ 0.19.8",
)
def partial_offload_without_cpu_adam(s: Subject) -> Iterator[Hit]:
    pointer = OPTIMIZER + "/ratio"
    ratio = as_number(s.get(pointer, 1.0))
    if s.stage != 3 or not s.offloads_optimizer or ratio is None or not 0 <= ratio < 1 or s.optimizer is None:
        return
    if s.optimizer.lower() not in ("adam", "adamw") or s.get("/optimizer/params/torch_adam", False) is True:
        yield Hit(
            pointer,
            _("partial offload works with DeepSpeed's CPU Adam only, not with {type}").format(
                type=s.optimizer
            ),
            effect=_("the engine stops at start"),
            hint=_("use AdamW or remove ratio"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS310",
    "script-optimizer-with-offload",
    Severity.INFO,
    "init",
    what=N_("Optimizer offload in a config without an optimizer section."),
    why=N_(
        "Then the script makes the optimizer. DeepSpeed accepts only its own DeepSpeedCPUAdam or DeepSpeedCPULion with offload and stops on any other, unless zero_force_ds_cpu_optimizer is false (slow: the step runs in Python on the CPU)."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_(
        "Add an optimizer section, create deepspeed.ops.adam.DeepSpeedCPUAdam in the script, or set zero_force_ds_cpu_optimizer to false."
    ),
    source="deepspeed/runtime/engine.py:2342-2346 @ 0.19.8; executed on 0.14.5-0.19.8",
)
def script_optimizer_with_offload(s: Subject) -> Iterator[Hit]:
    forced = s.get("/zero_force_ds_cpu_optimizer", True)
    if s.strict and s.stage and s.offloads_optimizer and "optimizer" not in s.data and forced is not False:
        yield Hit(
            OPTIMIZER if s.written(OPTIMIZER) else ZERO + "/cpu_offload",
            _("offload without an optimizer section: the script must create DeepSpeedCPUAdam"),
            hint=_("or add an optimizer section, or set zero_force_ds_cpu_optimizer to false"),
        )


@rule(
    "DS311",
    "offload-with-torch-adam",
    Severity.WARNING,
    "step",
    what=N_("torch_adam: true together with optimizer offload."),
    why=N_(
        "torch_adam wins over DeepSpeed's vectorised CPU Adam: the offloaded step runs in plain PyTorch on the CPU, several times slower."
    ),
    example='{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    fix=N_("Remove torch_adam."),
    source="deepspeed/runtime/engine.py get_optimizer_configuration @ 0.19.8",
)
def offload_with_torch_adam(s: Subject) -> Iterator[Hit]:
    pointer = "/optimizer/params/torch_adam"
    if s.stage and s.offloads_optimizer and s.get(pointer, False) is True:
        yield Hit(
            pointer,
            _("torch_adam makes the offloaded optimizer step slow"),
            effect=_("the step runs in plain PyTorch on the CPU"),
            hint=_("remove torch_adam"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS312",
    "nvme-path-unused",
    Severity.INFO,
    "init",
    what=N_("nvme_path in an offload block whose device is not nvme."),
    why=N_("The path is read only when the device is nvme."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/local_nvme"}}}',
    fix=N_("Leave it or remove it; write device nvme if you meant the disk."),
    source="deepspeed/runtime/zero/offload_config.py @ 0.19.8",
)
def nvme_path_unused(s: Subject) -> Iterator[Hit]:
    for name, pointer in (("offload_optimizer", OPTIMIZER), ("offload_param", PARAM)):
        path = s.get(pointer + "/nvme_path")
        if path is not MISSING and path is not None and s.offload(name) in ("cpu", "none"):
            yield Hit(
                pointer + "/nvme_path",
                _("nvme_path is not used: the device is {device}").format(device=s.offload(name)),
            )


@rule(
    "DS313",
    "super-offload-without-cores",
    Severity.ERROR,
    "init",
    since="0.18.0",
    what=N_("super_offload with cpuadam_cores_perc: 0."),
    why=N_("Zero passes parsing, but SuperOffload then refuses to start without a core."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true, "cpuadam_cores_perc": 0}}}',
    fix=N_("Use a share above 0, for example 0.8."),
    source="deepspeed/runtime/superoffload/superoffload_utils.py:190 @ 0.19.8",
)
def super_offload_without_cores(s: Subject) -> Iterator[Hit]:
    pointer = OPTIMIZER + "/cpuadam_cores_perc"
    if s.stage == 3 and s.flag(OPTIMIZER + "/super_offload") and as_number(s.get(pointer, 0.8)) == 0:
        yield Hit(
            pointer,
            _("SuperOffload needs at least some cores"),
            effect=_("the engine stops at start"),
            hint=_("0.8 is the default"),
            fix=drop(pointer, safe=False),
        )
