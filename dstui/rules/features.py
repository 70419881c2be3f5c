"""DS61x-DS62x, DS22x: tensor, expert, sequence and pipeline parallelism, DeepCompile and other switches of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dstui.i18n import N_, _
from dstui.rules.diagnostic import Severity
from dstui.rules.edits import drop, put
from dstui.rules.registry import Hit, Lacks, rule
from dstui.rules.subject import MISSING, Subject, as_int

ZERO = "/zero_optimization"
_STOPS = N_("the engine stops at start")


def autotp_size(s: Subject) -> int:
    """Ranks that share each layer; 0 when AutoTP is off or its size is no whole number."""
    return as_int(s.get("/tensor_parallel/autotp_size", 0)) or 0


def offloads_anything(s: Subject) -> bool:
    return s.offloads_optimizer or s.offload("offload_param") in ("cpu", "nvme")


@rule(
    "DS611",
    "autotp-at-stage-3",
    Severity.ERROR,
    "init",
    since="0.16.4",
    until="0.19.3",
    what=N_("tensor_parallel.autotp_size above 1 at ZeRO stage 3, on a release that refuses the pair."),
    why=N_("Stage 3 with automatic tensor parallelism is allowed from 0.19.4 on."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}',
    fix=N_("Use 0.19.4 or later, or stage 1 or 2."),
    source="deepspeed/runtime/engine.py:633 @ 0.19.3; allowed @ 0.19.4 (#8167, #8168)",
    context={"release": "0.19.3", "world_size": 2},
)
def autotp_at_stage_3(s: Subject) -> Iterator[Hit]:
    if s.stage == 3 and autotp_size(s) > 1:
        yield Hit(
            "/tensor_parallel/autotp_size",
            _("tensor parallelism does not go with stage 3 in this release"),
            effect=_(_STOPS),
            hint=_("use 0.19.4 or later, or stage 2"),
            fix=put(ZERO + "/stage", 2, there=True, safe=False),
        )


@rule(
    "DS612",
    "autotp-sizes-differ",
    Severity.ERROR,
    "init",
    since="0.18.6",
    what=N_("tensor_parallel.tp.tp_size that is neither 1 nor autotp_size."),
    why=N_("The engine takes autotp_size and refuses another tp_size beside it."),
    example='{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}',
    fix=N_("Write autotp_size only."),
    source="deepspeed/runtime/engine.py:1021 @ 0.19.8",
)
def autotp_sizes_differ(s: Subject) -> Iterator[Hit]:
    for name in ("tp", "tensor_parallel"):
        pointer = f"/tensor_parallel/{name}/tp_size"
        size, auto = as_int(s.get(pointer, 1)), autotp_size(s)
        if size is not None and size != 1 and auto > 1 and size != auto:
            yield Hit(
                pointer,
                _("tp_size {size} contradicts autotp_size {auto}").format(size=size, auto=auto),
                effect=_(_STOPS),
                hint=_("write autotp_size only"),
                fix=drop(pointer, safe=False),
            )


@rule(
    "DS613",
    "expert-parallel-refused",
    Severity.ERROR,
    "init",
    since="0.19.2",
    what=N_("An expert_parallel section that contradicts itself, the number of ranks or another feature."),
    why=N_(
        "The section is a plain dictionary: parsing takes anything, the engine checks it after the model was loaded. Its width must divide the ranks; expert tensor parallelism is not there yet; with tensor parallelism it excludes sequence parallelism, DeepCompile, offload and (to 0.19.7) stage 3; at stage 3 it excludes sequence parallelism, hpZ and quantized gradients."
    ),
    example='{"train_batch_size": 8, "expert_parallel": {"enabled": true, "autoep_size": 3}}',
    fix=N_("Change what the message names."),
    source="deepspeed/module_inject/auto_ep_folding.py:106-249, auto_ep_config.py:177-233, runtime/engine.py:2220-2226 @ 0.19.8; in part executed",
    context={"world_size": 8},
)
def expert_parallel_refused(s: Subject) -> Iterator[Hit | Lacks]:
    block = s.block("/expert_parallel")
    if block.get("enabled") is not True:
        return
    size = as_int(block.get("autoep_size", 1)) or 1
    tensor, sequence = autotp_size(s), as_int(s.get("/sequence_parallel_size", 1)) or 1

    def hit(key: str, text: str, hint: str) -> Hit:
        pointer = f"/expert_parallel/{key}"
        return Hit(pointer if key in block else "/expert_parallel", text, effect=_(_STOPS), hint=hint)

    deepep = s.at_least("0.19.7") and block.get("comm_backend") == "deepep"
    if deepep and not as_int(block.get("comm_max_tokens_per_rank", 0)):
        yield hit(
            "comm_backend",
            _("comm_backend deepep needs comm_max_tokens_per_rank"),
            _("write micro batch x longest padded sequence"),
        )
    if not s.at_least("0.19.3"):
        return
    expert_tensor = as_int(block.get("expert_tensor_parallel_size", 1))
    if expert_tensor != 1:
        yield hit(
            "expert_tensor_parallel_size", _("only expert_tensor_parallel_size 1 exists yet"), _("write 1")
        )
    elif size > 1 and not s.world_known:
        yield Lacks("world_size")
    elif size > 1 and s.world_size % size:
        yield hit(
            "autoep_size",
            _("autoep_size {size} does not divide {world} ranks").format(size=size, world=s.world_size),
            _("use a divisor of the number of ranks"),
        )
    if tensor > 1:
        if size == 1:
            yield hit(
                "autoep_size", _("with autotp_size above 1, autoep_size must be above 1 too"), _("raise it")
            )
        for on, name in (
            (sequence > 1, "sequence_parallel_size"),
            (s.flag("/compile/deepcompile"), "DeepCompile"),
            (bool(s.stage) and offloads_anything(s), _("offload")),
            (s.stage == 3 and s.before("0.19.8"), _("ZeRO stage 3")),
        ):
            if on:
                yield hit(
                    "autoep_size",
                    _("expert with tensor parallelism does not go with {feature}").format(feature=name),
                    _("remove one of the two"),
                )
    if s.stage == 3:
        hpz = s.integer(ZERO + "/zero_hpz_partition_size") or 1
        for on, name in (
            (sequence > 1 and tensor <= 1, "sequence_parallel_size"),
            (hpz > 1, "zero_hpz_partition_size"),
            (s.flag(ZERO + "/zero_quantized_gradients"), "zero_quantized_gradients"),
        ):
            if on:
                yield hit(
                    "enabled",
                    _("expert parallelism at stage 3 does not go with {feature}").format(feature=name),
                    _("remove one of the two"),
                )


@rule(
    "DS614",
    "deepcompile-offloads-collide",
    Severity.ERROR,
    "init",
    since="0.19.4",
    what=N_("Two ways of offloading in one DeepCompile run."),
    why=N_(
        "compile.offload_opt_states excludes ZeRO's optimizer offload, compile.offload_parameters (on by itself when both ZeRO offloads go to the CPU) excludes offload_opt_states, and offload_activation excludes both. engine.compile() raises."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "compile": {"deepcompile": true, "offload_opt_states": true}}',
    fix=N_("Keep one of them."),
    source="deepspeed/compile/init_z3.py:94, 101, 148 @ 0.19.8",
)
def deepcompile_offloads_collide(s: Subject) -> Iterator[Hit]:
    if not s.flag("/compile/deepcompile") or s.stage != 3:
        return
    states = s.flag("/compile/offload_opt_states")
    both = s.offload("offload_optimizer") == "cpu" and s.offload("offload_param") == "cpu"
    params = s.flag("/compile/offload_parameters") or both
    pairs = (
        (states and s.offloads_optimizer, "offload_opt_states", "offload_optimizer"),
        (states and params, "offload_opt_states", "offload_parameters"),
        (
            s.at_least("0.19.6") and s.flag("/compile/offload_activation") and (params or states),
            "offload_activation",
            "offload_parameters" if params else "offload_opt_states",
        ),
    )
    told: set[str] = set()
    for wrong, key, other in pairs:
        if wrong and key not in told:
            told.add(key)
            yield Hit(
                f"/compile/{key}",
                _("compile.{key} does not go with {other}").format(key=key, other=other),
                effect=_("engine.compile() raises a ValueError"),
                hint=_("keep one of the two"),
                fix=drop(f"/compile/{key}", safe=False),
            )


@rule(
    "DS615",
    "gds-without-gpu",
    Severity.WARNING,
    "parse",
    since="0.15.0",
    needs=("facts.gpus",),
    what=N_("aio.use_gds on a machine without an NVIDIA GPU."),
    why=N_("GPUDirect storage works with CUDA only: on another accelerator the config is refused."),
    example='{"train_batch_size": 8, "aio": {"use_gds": true}}',
    fix=N_("Remove use_gds."),
    source="deepspeed/runtime/swap_tensor/aio_config.py:39 @ 0.19.8",
    context={"gpus": 0},
)
def gds_without_gpu(s: Subject) -> Iterator[Hit]:
    if s.facts is not None and s.facts.gpus == () and s.get("/aio/use_gds", False) is True:
        yield Hit(
            "/aio/use_gds",
            _("GPUDirect storage needs CUDA, and there is no GPU here"),
            effect=_("the config is refused on this machine"),
            hint=_("remove use_gds"),
            fix=drop("/aio/use_gds", safe=False),
        )


@rule(
    "DS616",
    "datastates-on-by-presence",
    Severity.SILENT_WRONG,
    "init",
    since="0.18.1",
    what=N_("datastates_ckpt with null or an empty object."),
    why=N_(
        "Only false switches this checkpoint engine off; every other value, null and {} too, switches it on."
    ),
    example='{"train_batch_size": 8, "datastates_ckpt": {}}',
    fix=N_("Write false, or remove the key."),
    source="deepspeed/runtime/config.py get_datastates_config, checkpoint_engine/utils.py @ 0.18.1-0.19.8; executed",
)
def datastates_on_by_presence(s: Subject) -> Iterator[Hit]:
    value = s.get("/datastates_ckpt")
    if value is None or (value in ({}, [], "", 0) and value is not False):
        yield Hit(
            "/datastates_ckpt",
            _("this switches the DataStates checkpoint engine on"),
            effect=_("checkpoints are written by another engine, which must be installed"),
            hint=_("write false, or remove the key"),
            fix=drop("/datastates_ckpt", safe=False),
        )


@rule(
    "DS617",
    "sequence-parallel-unseen-in-file",
    Severity.SILENT_WRONG,
    "init",
    since="0.15.0",
    until="0.18.5",
    what=N_("sequence_parallel_size in a config file, on a release that looks for it in the path."),
    why=N_(
        "To 0.18.5 DeepSpeed tests whether the word is in the config it was given; given a path it searches the path. A dictionary works. 0.18.6 reads the file first."
    ),
    example='{"train_batch_size": 8, "sequence_parallel_size": 2, "data_parallel_size": 1}',
    fix=N_("Use 0.18.6 or later, or load the file in the script and pass the dictionary."),
    source="deepspeed/__init__.py initialize @ 0.15.0-0.18.5, runtime/tensor_parallel/init_utils.py load_ds_config @ 0.18.6; read",
    context={"release": "0.18.5", "world_size": 2},
)
def sequence_parallel_unseen_in_file(s: Subject) -> Iterator[Hit]:
    pointer = "/sequence_parallel_size"
    if s.strict and (as_int(s.get(pointer, 1)) or 1) > 1:
        yield Hit(
            pointer,
            _("not seen when the config is given as a file in this release"),
            effect=_("no sequence groups are made; every rank works on whole sequences"),
            hint=_("use 0.18.6 or later, or pass a dictionary"),
        )


@rule(
    "DS618",
    "pipeline-with-gradient-partitioning",
    Severity.WARNING,
    "init",
    what=N_("A pipeline section together with ZeRO stage 2 or 3."),
    why=N_(
        "The section is read by PipelineModule only, and the pipeline engine refuses stages 2 and 3: micro batches of one step would have to be reduced one by one."
    ),
    example='{"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}',
    fix=N_("Use stage 0 or 1 with a PipelineModule; otherwise remove the section."),
    source="deepspeed/runtime/pipe/engine.py:76 @ 0.19.8",
)
def pipeline_with_gradient_partitioning(s: Subject) -> Iterator[Hit]:
    if isinstance(s.get("/pipeline"), Mapping) and s.stage in (2, 3):
        yield Hit(
            "/pipeline",
            _("pipeline parallelism allows stage 0 or 1 only; this is stage {stage}").format(stage=s.stage),
            effect=_("a PipelineModule stops at start; any other model ignores the section"),
            hint=_("use stage 1, or remove the section"),
        )


@rule(
    "DS619",
    "universal-load-left-on",
    Severity.WARNING,
    "save",
    what=N_("checkpoint.load_universal: true."),
    why=N_(
        "It makes the engine read a universal checkpoint. Left on for the rest of the run, ZeRO-3 checkpoints that this run writes were reported incomplete."
    ),
    example='{"train_batch_size": 8, "checkpoint": {"load_universal": true}, "zero_optimization": {"stage": 3}}',
    fix=N_("Switch it off once the run has resumed."),
    source="deepspeed/runtime/engine.py load_universal_checkpoint @ 0.19.8; a public report for 0.17",
)
def universal_load_left_on(s: Subject) -> Iterator[Hit]:
    pointer = "/checkpoint/load_universal"
    if s.stage == 3 and s.get(pointer, False) is True:
        yield Hit(
            pointer,
            _("load_universal is meant for resuming, not for the whole run"),
            effect=_("checkpoints written while it is on may be incomplete at stage 3"),
            hint=_("remove it after the run has resumed and saved once without it"),
        )


@rule(
    "DS217",
    "quantized-gradients-need-full-nodes",
    Severity.ERROR,
    "init",
    since="0.10.0",
    needs=("facts.gpus",),
    what=N_("zero_quantized_gradients on more ranks than one node has GPUs, but fewer than two nodes."),
    why=N_(
        "The quantized all-to-all has a step within and a step between nodes; it needs one node or whole nodes."
    ),
    example='{"train_batch_size": 6, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}',
    fix=N_("Use as many ranks as GPUs of a node, or a multiple."),
    source="deepspeed/utils/groups.py _get_local_all_to_all_group @ 0.19.8",
    context={"world_size": 6, "gpus": 4},
)
def quantized_gradients_need_full_nodes(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/zero_quantized_gradients"
    cards = len(s.facts.gpus or ()) if s.facts else 0
    if s.stage == 3 and s.flag(pointer) and s.world_known and cards and cards < s.world_size < 2 * cards:
        yield Hit(
            pointer,
            _("{world} ranks are neither one node of {gpus} GPUs nor several").format(
                world=s.world_size, gpus=cards
            ),
            effect=_(_STOPS),
            hint=_("use {gpus} ranks or a multiple").format(gpus=cards),
        )


@rule(
    "DS218",
    "quantized-frozen-weights-need-fp16",
    Severity.WARNING,
    "init",
    since="0.10.2",
    what=N_("zero_quantized_nontrainable_weights without fp16."),
    why=N_("The frozen parameters that it quantizes must be fp16: others stop the engine with an assertion."),
    example='{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}}',
    fix=N_("Train in fp16, or remove the key."),
    source="deepspeed/runtime/zero/stage3.py:2189 @ 0.19.8",
)
def quantized_frozen_weights_need_fp16(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/zero_quantized_nontrainable_weights"
    if s.stage == 3 and s.flag(pointer) and not s.precision("fp16"):
        yield Hit(
            pointer,
            _("frozen parameters can be quantized from fp16 only"),
            effect=_("with frozen parameters the engine stops at start"),
            hint=_("use fp16, or remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS219",
    "leaf-module-below-stage-3",
    Severity.NO_EFFECT,
    "init",
    since="0.18.0",
    what=N_("A leaf_module section below ZeRO stage 3."),
    why=N_(
        "Leaf modules are gathered whole at stage 3; below it nothing is gathered and the section is not read."
    ),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "leaf_module": {"classes": ["MixtralSparseMoeBlock"]}}}',
    fix=N_("Use stage 3, or remove the section."),
    source="deepspeed/runtime/zero/parameter_offload.py @ 0.18.0-0.19.8: stage 3 only; executed",
)
def leaf_module_below_stage_3(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/leaf_module"
    if s.stage in (0, 1, 2) and isinstance(s.get(pointer), Mapping):
        yield Hit(
            pointer,
            _("leaf_module does nothing at stage {stage}").format(stage=s.stage),
            effect=_("ignored in silence"),
            hint=_("use stage 3, or remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS220",
    "unused-parameters-stop",
    Severity.INFO,
    "step",
    what=N_("ignore_unused_parameters: false at ZeRO stage 1 or 2 with optimizer offload."),
    why=N_("Then a trainable parameter that got no gradient in backward stops the run with an assertion."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "ignore_unused_parameters": false, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("Freeze what the loss does not use, or leave the key out."),
    source="deepspeed/runtime/zero/stage_1_and_2.py:1934 @ 0.19.8",
)
def unused_parameters_stop(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/ignore_unused_parameters"
    if s.stage in (1, 2) and s.offloads_optimizer and s.get(pointer) is not MISSING and not s.flag(pointer):
        yield Hit(
            pointer,
            _("a parameter that the loss does not use stops the run"),
            hint=_("freeze it, or leave ignore_unused_parameters out"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS221",
    "compute-grad-norm-stage",
    Severity.ERROR,
    "parse",
    since="0.19.7",
    what=N_("compute_grad_norm: false at ZeRO stage 0 or 3."),
    why=N_("Only stages 1 and 2 can leave the norm out; the config is refused."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "compute_grad_norm": false}}',
    fix=N_("Remove the key, or use stage 1 or 2."),
    source="deepspeed/runtime/zero/config.py:392 @ 0.19.8",
)
def compute_grad_norm_stage(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/compute_grad_norm"
    if any(p.pointer == pointer for p in s.problems) and s.stage in (0, 3) and not s.flag(pointer):
        yield Hit(
            pointer,
            _("compute_grad_norm: false needs stage 1 or 2, this is stage {stage}").format(stage=s.stage),
            effect=_("the config is refused"),
            hint=_("remove it"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS314",
    "super-offload-without-gpu",
    Severity.ERROR,
    "init",
    since="0.18.0",
    needs=("facts.gpus",),
    what=N_("super_offload on a machine without an NVIDIA GPU."),
    why=N_("SuperOffload is written for CUDA; on another accelerator the engine stops at start."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true}}}',
    fix=N_("Remove super_offload: ordinary offload works everywhere."),
    source="deepspeed/runtime/superoffload/superoffload_stage3.py:23 @ 0.19.8",
    context={"gpus": 0},
)
def super_offload_without_gpu(s: Subject) -> Iterator[Hit]:
    pointer = ZERO + "/offload_optimizer/super_offload"
    if s.stage == 3 and s.flag(pointer) and s.facts is not None and s.facts.gpus == ():
        yield Hit(
            pointer,
            _("SuperOffload needs CUDA, and there is no GPU here"),
            effect=_(_STOPS),
            hint=_("remove super_offload"),
            fix=drop(pointer, safe=False),
        )


@rule(
    "DS507",
    "pinned-memory-on-wsl",
    Severity.WARNING,
    "init",
    needs=("facts",),
    what=N_("Pinned host buffers on Windows Subsystem for Linux."),
    why=N_("WSL 2 lets CUDA pin only a part of the memory; larger blocks fail with an out-of-memory error."),
    example='{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}',
    fix=N_("Write pin_memory: false."),
    source="NVIDIA's CUDA on WSL guide (pinned system memory is limited); deepspeed/accelerator/cuda_accelerator.py pin_memory @ 0.19.8",
    context={"wsl": True},
)
def pinned_memory_on_wsl(s: Subject) -> Iterator[Hit]:
    if s.facts is None or not s.facts.host.wsl or not s.stage:
        return
    for name in ("offload_optimizer", "offload_param"):
        pointer = f"{ZERO}/{name}/pin_memory"
        used = name == "offload_optimizer" or s.stage == 3
        if used and s.offload(name) == "cpu" and s.flag(pointer):
            yield Hit(
                pointer if s.written(pointer) else f"{ZERO}/{name}",
                _("this is WSL, where only a part of the memory can be pinned"),
                effect=_("larger buffers stop the run with an out-of-memory error of CUDA"),
                hint=_("write pin_memory: false"),
                fix=put(pointer, False, there=s.written(pointer), safe=False),
            )


@rule(
    "DS222",
    "stage-3-between-nodes",
    Severity.INFO,
    "step",
    since="0.10.0",
    needs=("facts",),
    what=N_("ZeRO stage 3 on several nodes without zero_hpz_partition_size."),
    why=N_(
        "Each layer's parameters are gathered over all nodes, forward and backward. With hpZ (ZeRO++) the backward gather stays inside a node, for a second 16-bit copy of the parameters per node."
    ),
    example='{"train_batch_size": 16, "zero_optimization": {"stage": 3}}',
    fix=N_("On a slow fabric set zero_hpz_partition_size to the GPUs of one node, if memory allows."),
    source="deepspeed/runtime/zero/partition_parameters.py secondary partition @ 0.10.0-0.19.8; public reports",
    context={"world_size": 16, "gpus": 8, "nodes": 2},
)
def stage_3_between_nodes(s: Subject) -> Iterator[Hit]:
    size = s.integer(ZERO + "/zero_hpz_partition_size") or 1
    if s.stage == 3 and s.facts is not None and s.facts.nodes > 1 and size <= 1:
        yield Hit(
            ZERO + "/stage",
            _("parameters are gathered over {nodes} nodes for every layer").format(nodes=s.facts.nodes),
            hint=_("on a slow fabric set zero_hpz_partition_size to the GPUs of one node"),
        )
