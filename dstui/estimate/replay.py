"""A training run as DeepSpeed allocates it, in program order, through the allocator port.

``replay(shape, settings)`` runs load, ``deepspeed.initialize``, two or three iterations (forward, backward,
optimizer step) and a save for the worst rank, and returns the allocator with the peak of each phase. The
model's own allocations come from ``decoder``; what DeepSpeed does around them is written here after

* stage 0: ``runtime/fp16/fused_optimizer.py``, ``unfused_optimizer.py``, ``engine.py``
* stages 1, 2: ``runtime/zero/stage_1_and_2.py``; stage 1 with bf16 and fp32 accumulation:
  ``runtime/bf16_optimizer.py``
* stage 3: ``runtime/zero/stage3.py``, ``partition_parameters.py``, ``comm/coalesced_collectives.py``

of DeepSpeed 0.19.8; ``settings.release`` selects what older releases did (0.17.0, 0.17.6, 0.18.4, 0.19.0, 0.19.3,
0.19.6, 0.19.8).
Sizes are bytes per rank.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

from dstui.estimate.allocator import (
    ACTIVATIONS,
    BUFFERS,
    GRADS,
    OPTIMIZER,
    PARAMS,
    WORKSPACE,
    Allocator,
    Block,
    OutOfMemory,
)
from dstui.estimate.decoder import TIED, Decoder, decoder
from dstui.estimate.families import split_layers
from dstui.estimate.inputs import ModelShape
from dstui.estimate.program import ALLOC, ENTER, FREE, GIVE, GRAD, HOOK, LEAVE, WORK, Op, Program, Workload
from dstui.estimate.settings import Settings
from dstui.estimate.zero3 import Coordinator

REDUCE_STREAM = 2
_PASSES = 2
"""Iterations until nothing changes any more: the second is the first with moments (and stage 3's trace)."""
_ALLREDUCE = 500_000_000
"""``engine.MEMORY_OPT_ALLREDUCE_SIZE`` in elements: stage 0's flattened all-reduce."""
_NORM_CHUNK = 250_000_000
"""Elements of one piece of stage 3's norm (``_constant_buffered_norm2``)."""


class Peaks(NamedTuple):
    """What one replay found."""

    allocated: int
    reserved: int
    phases: tuple[tuple[str, int, tuple[int, ...]], ...]
    """Phase, allocated bytes at its peak, the same by ``allocator.PARTS``."""
    rest: int
    """Allocated between two steps."""


@lru_cache(maxsize=512)
def _replay(
    shape: ModelShape, extra: tuple[tuple[str, object], ...], settings: Settings, workspace: int
) -> Peaks:
    run = _Run(shape, settings, workspace)
    peaks = run.run()
    _latest.clear()
    _latest[(shape, extra, settings, workspace)] = run
    return peaks


_latest: dict[tuple[object, ...], _Run] = {}
"""The run last replayed, two iterations old, for ``endures`` to go on with."""


def replay(shape: ModelShape, settings: Settings, workspace: int) -> Peaks:
    """Peaks of ``shape`` trained under ``settings``; ``workspace`` = bytes of the cuBLAS workspaces."""
    return _replay(shape, tuple(sorted(shape.extra.items())), settings, workspace)


def endures(shape: ModelShape, settings: Settings, workspace: int, cap: int, *, quick: bool = False) -> str:
    """What becomes of the run where PyTorch may reserve ``cap`` bytes: ``runs`` from its start, ``steps`` (a step
    runs with what cached blocks can be given back, but the start, when moments are made between activations, may
    leave the memory in pieces; always this when ``quick``), ``fails``.

    ``steps`` is what 11 thresholds measured on H200 were compared with: within 0.8 % of each, also where
    fragmentation asks for 3 to 15 % more than is allocated.
    """
    return _endures(shape, tuple(sorted(shape.extra.items())), settings, workspace, cap, quick)


@lru_cache(maxsize=512)
def _endures(
    shape: ModelShape,
    extra: tuple[tuple[str, object], ...],
    settings: Settings,
    workspace: int,
    cap: int,
    quick: bool,
) -> str:
    run = _latest.pop((shape, extra, settings, workspace), None)
    if run is None:
        run = _Run(shape, settings, workspace)
        run.run()
    run.mem.empty_cache()
    run.mem.cap = cap
    whole = _Run(shape, settings, workspace)
    whole.mem.cap = cap
    try:
        run.iteration()
        whole.load()
    except OutOfMemory:
        return "fails"
    if quick:
        return "steps"
    try:
        for _i in range(_PASSES):
            whole.iteration()
    except OutOfMemory:
        return "steps"
    return "runs"


def workload(settings: Settings) -> Workload:
    return Workload(
        micro_batch=settings.micro_batch,
        seq=-(-settings.seq // settings.sequence_parallel),
        together=settings.sequence_parallel,
        element=settings.element,
        half=settings.half,
        attention=settings.attention,
        loss=settings.loss,
        reentrant=settings.reentrant,
        lora_rank=settings.lora_rank,
        lora_targets=settings.lora_targets,
        quant=settings.quant,
        weight=settings.element,
        adapter=settings.adapter,
    )


class _Run:
    def __init__(self, shape: ModelShape, settings: Settings, workspace: int) -> None:
        self.s = settings
        self.workspace = workspace
        if settings.tensor_parallel > 1:
            # since 0.19.8 a tied embedding is split with the head, and the loss works on the pieces
            pieces = bool(shape.tied) and settings.release >= (0, 19, 8)
            shape = split_layers(shape, settings.tensor_parallel, vocab=pieces)
        self.model: Decoder = decoder(shape, workload(settings))
        self.mem = Allocator(settings.expandable)
        self.programs: list[Program] = list(self.model.blocks())
        self.first_module: list[int] = []
        self.first_param: list[int] = []
        self.numel: list[int] = []
        self.nbytes: list[int] = []
        self.trains: list[bool] = []
        self.module_params: list[tuple[int, ...]] = []
        for program in self.programs:
            base = len(self.numel)
            self.first_module.append(len(self.module_params))
            self.first_param.append(base)
            for p in program.params:
                self.numel.append(p.numel)
                self.nbytes.append(p.nbytes)
                self.trains.append(p.trainable and p.numel > 0)
            for _name, params in program.modules:
                self.module_params.append(tuple(0 if i == TIED else base + i for i in params))
        self.trainable = [i for i, t in enumerate(self.trains) if t]
        self.total = sum(self.numel[i] for i in self.trainable)
        self.largest = max((self.numel[i] for i in self.trainable), default=0)
        self.coordinator: Coordinator | None = None
        # before 0.17.6 also without ZeRO, whose states it splits over the ranks all the same
        self.bf16_optimizer = (
            (settings.stage == 1 or (settings.stage == 0 and settings.release < (0, 17, 6)))
            and settings.accumulate == 4
            and settings.element == 2
            and not settings.half
            and settings.offload_optimizer == "none"
        )
        self.hidden = shape.hidden or 1
        self.tied_head = bool(shape.tied)
        self.groups = self._groups()
        """Trained parameters by the optimizer's group."""
        self.parts = [self._partition(group) for group in self.groups]
        self.part = sum(self.parts)
        """Elements of this rank's partitions."""
        self._places: dict[int, tuple[int, int]] = {}
        self.updates: list[Block] = []
        """Those that Muon made of the first group's gradients."""
        self.kept: list[Block] = []
        """Gradients that wait in ``param.grad``."""
        self.buckets: list[Block] = []
        self.elements = 0
        self.members: list[int] = []
        self.large: list[Block] = []
        self.collected: Block | None = None
        """``grads_in_partition`` (stages 1, 2), or the compact fp32 buffer."""
        self.earlier: Block | None = None
        self.tied: Block | None = None
        self.micro = 0
        self.last = True
        """Whether this micro step is the last before the optimizer's step."""
        self.backward = False
        self.workspaces = 0
        self.logits: Block | None = None
        """Those that the loop still names."""
        self.graph: list[Block] = []
        """What nodes of the last micro step's graph hold until it goes."""
        self.moments_made = False
        self.offload = settings.offload_optimizer != "none"

    # -- partitions --------------------------------------------------------------------------------------
    def _groups(self) -> list[list[int]]:
        """Muon orthogonalises the layers' matrices; the others are a second group, of FusedAdam
        (``engine._muon_param_groups``). Several groups of another optimizer are taken for one: the first holds
        nearly all."""
        if self.s.optimizer != "muon" or self.s.stage not in (1, 2):
            return [self.trainable]
        low, high = self.first_param[1], self.first_param[-1]
        wide = 32 * self.hidden
        matrices = [i for i in self.trainable if low <= i < high and self.numel[i] >= wide]
        chosen = set(matrices)
        return [g for g in (matrices, [i for i in self.trainable if i not in chosen]) if g]

    def _partition(self, group: list[int]) -> int:
        """Elements of this rank's partition, padded to 2 x ranks (``nccl_start_alignment_factor``)."""
        s = self.s
        total = sum(self.numel[i] for i in group)
        if s.stage == 0 and not self.bf16_optimizer:
            return total
        if s.stage == 3:
            return sum(-(-self.numel[i] // s.ranks) for i in group)
        align = 2 * s.ranks
        return -(-total // align) * align // s.ranks

    def _whole_in_partition(self) -> int:
        """Elements of ``grads_in_partition`` on the worst rank: parameters that straddle count whole
        (``stage_1_and_2.py: copy_grads_in_partition``)."""
        if self.s.ranks == 1:
            return self.total
        wholes = [self._wholes(group, part) for group, part in zip(self.groups, self.parts, strict=True)]
        return max((sum(found) for found in zip_longest(*wholes, fillvalue=0)), default=0)

    def _wholes(self, group: list[int], part: int) -> list[int]:
        """Elements of the parameters that each rank has a share of."""
        ends = list(accumulate(self.numel[i] for i in group))
        found = []
        for rank in range(min(self.s.ranks, 4096)):
            low, high = rank * part, min((rank + 1) * part, ends[-1] if ends else 0)
            if low >= high:
                break
            first, last = bisect_right(ends, low), bisect_right(ends, high - 1)
            found.append(ends[last] - (ends[first - 1] if first else 0))
        return found

    # -- the run -------------------------------------------------------------------------------------------
    def run(self) -> Peaks:
        s, mem = self.s, self.mem
        self.load()
        rest = 0
        for _i in range(_PASSES):
            self.iteration()
            rest = mem.allocated
        mem.phase("save")
        if (
            s.gather_on_save and s.ranks > 1
        ):  # one module at a time (engine._zero3_consolidated_16bit_state_dict)
            mem.release(mem.malloc(s.element * max(self.numel, default=0), BUFFERS))
        mem.finish()
        phases = tuple((name, peak, parts) for name, (peak, parts) in mem.peaks.items())
        return Peaks(mem.peak, mem.peak_reserved, phases, rest)

    def load(self) -> None:
        """The model and ``deepspeed.initialize``."""
        if self.s.stage == 3:
            self._load_stage3()
        else:
            self._load()

    def _load(self) -> None:
        """Stages 0-2: the whole model on the GPU, then the wrapper's flat copies."""
        s, mem = self.s, self.mem
        originals: dict[int, Block] = {}
        for i, n in enumerate(self.nbytes):
            if self.numel[i]:
                block = mem.malloc(n, PARAMS)
                if self.trains[i]:
                    originals[i] = block
        self._tie()
        mem.phase("init")
        b, p = s.element, self.total
        if s.stage == 0 and not self.bf16_optimizer:
            self._init_stage0(list(originals.values()))
            return
        if self.bf16_optimizer:
            self._flatten(list(originals.values()), b * p)
            mem.malloc(4 * self.part, OPTIMIZER)
            mem.malloc(4 * p, GRADS)  # fp32_groups_gradients_flat: the whole model
            return
        for group, part in zip(self.groups, self.parts, strict=True):
            self._flatten([originals[i] for i in group], b * sum(self.numel[i] for i in group))
            clone = mem.malloc(b * part, PARAMS)
            if self.offload:
                mem.release(clone)  # it moves to the host
            elif b == 2:
                mem.malloc(4 * part, OPTIMIZER)
                mem.release(clone)
            # an fp32 run keeps the clone as its master copy
        if self.offload:
            mem.malloc(b * self.largest, BUFFERS)  # temp_grad_buffer_for_gpu_offload
            return
        for zeros in [mem.malloc(4 * part, GRADS) for part in self.parts]:  # initialize_optimizer_states
            mem.release(zeros)

    def _tie(self) -> None:
        """A model class makes a head of its own before it takes the embedding's weight instead."""
        if self.s.load_on_gpu and self.tied_head:
            self.mem.release(self.mem.malloc(self.nbytes[0], PARAMS))

    def _flatten(self, originals: list[Block], size: int) -> None:
        mem = self.mem
        mem.empty_cache()
        room = mem.cap is None or mem.allocated + size <= mem.cap
        if self.s.release >= (0, 19, 0) and room:  # ``flatten_on_accelerator``
            mem.malloc(size, PARAMS)
            for block in originals:
                mem.release(block)
        else:  # through the CPU: the originals go first
            for block in originals:
                mem.release(block)
            mem.empty_cache()
            mem.malloc(size, PARAMS)

    def _init_stage0(self, originals: list[Block]) -> None:
        s, mem, p = self.s, self.mem, self.total
        if s.element == 4:
            return  # no wrapper: the parameters are the master copy
        if s.fused and not s.client:
            clones = [mem.malloc(s.element * self.numel[i], PARAMS) for i in self.trainable]
            mem.malloc(s.element * p, PARAMS)
            for block in [*clones, *originals]:
                mem.release(block)
            clone = mem.malloc(s.element * p, PARAMS)
            mem.malloc(4 * p, OPTIMIZER)
            mem.release(clone)
            grad = mem.malloc(4 * p, GRADS)
            self._make_moments(p)
            mem.release(grad)
            return
        for i in self.trainable:  # FP16_UnfusedOptimizer: an fp32 copy of each parameter
            mem.malloc(4 * self.numel[i], OPTIMIZER)
        zeros = [mem.malloc(s.element * self.numel[i], GRADS) for i in self.trainable]
        zeros += [mem.malloc(4 * self.numel[i], GRADS) for i in self.trainable]
        self._make_moments_each()
        for block in [*self._temporaries_each(), *zeros]:
            mem.release(block)

    def _make_moments(self, elements: int) -> None:
        moment = self.s.moment
        if moment >= 8:
            self.mem.malloc(moment // 2 * elements, OPTIMIZER)
            self.mem.malloc(moment // 2 * elements, OPTIMIZER)
        elif moment:
            self.mem.malloc(moment * elements, OPTIMIZER)
        self.moments_made = True

    def _make_moments_each(self) -> None:
        """The moments of an optimizer that owns the parameters one by one."""
        for i in self.trainable:
            self._make_moments(self.numel[i])

    def _temporaries_each(self) -> list[Block]:
        return [block for i in self.trainable for block in self._temporaries(self.numel[i])]

    def _load_stage3(self) -> None:
        s, mem = self.s, self.mem
        originals: list[Block | None] = []
        shards: list[Block] = []
        on_gpu = s.offload_param == "none"
        if not s.zero_init:
            originals = [mem.malloc(n, PARAMS) if self.numel[i] else None for i, n in enumerate(self.nbytes)]
            self._tie()
            mem.phase("init")
        for i, n in enumerate(self.nbytes):
            if not self.numel[i]:
                continue
            whole = mem.malloc(n, PARAMS) if s.zero_init else originals[i]
            if on_gpu:
                shard = mem.malloc(-(-n // s.ranks), PARAMS)
                if self.trains[i]:
                    shards.append(shard)
            mem.release(whole)
        mem.phase("init")
        if on_gpu:  # defragment: through the CPU
            for shard in shards:
                mem.release(shard)
            mem.empty_cache()
            mem.malloc(s.element * self.part, PARAMS)
        gpu_groups = [n for i, n in enumerate(self.sub_groups()) if not self._group_on_cpu(i)]
        converted: Block | None = None
        for n in gpu_groups:  # `converted` keeps its name until the next group is converted
            wide = mem.malloc(4 * n, OPTIMIZER)
            mem.release(converted)
            converted = wide
            mem.malloc(4 * n, OPTIMIZER)
        mem.release(converted)
        if not self.offload:
            mem.release(mem.malloc(4 * max(gpu_groups, default=0), GRADS))
        else:
            for n in gpu_groups:  # ratio < 1: these groups' fp32 gradients live on the GPU
                mem.malloc(4 * n, GRADS)
        if s.contiguous:  # in the type of communication
            mem.malloc(s.communication * s.reduce_bucket, BUFFERS)
        if not self.offload:
            mem.malloc(s.accumulate * self.part, GRADS)
        for i in self.trainable:  # each is whole for a moment (``create_reduce_and_remove_grad_hooks``)
            whole = mem.malloc(self.nbytes[i], PARAMS)
            if not on_gpu:
                mem.release(mem.malloc(-(-self.nbytes[i] // s.ranks), PARAMS))
            mem.release(whole)
        self.coordinator = Coordinator(
            mem,
            self.numel,
            self.nbytes,
            prefetch=s.prefetch,
            live=s.live,
            reuse=s.reuse,
            persist=s.persist,
            ranks=s.ranks,
            offloaded=s.offload_param != "none",
            frozen=frozenset(
                i for i, t in enumerate(self.trains) if not t and self.numel[i] and s.release >= (0, 19, 3)
            ),
        )

    def sub_groups(self) -> list[int]:
        """Elements of this rank's share of each sub-group (``stage3._create_fp16_sub_groups``)."""
        s = self.s
        if s.stage != 3:
            return [self.part]
        if s.sub_group >= self.part:
            return [self.part]
        groups, current = [], 0
        for i in self.trainable:
            current += -(-self.numel[i] // s.ranks)
            if current >= s.sub_group:
                groups.append(current)
                current = 0
        if current:
            groups.append(current)
        return groups

    def _group_on_cpu(self, index: int) -> bool:
        """Partial offload acts in whole sub-groups (``_create_fp32_partitions``)."""
        if not self.offload:
            return False
        count = len(self.sub_groups())
        return index >= int((1 - self.s.ratio) * count)

    # -- one iteration ---------------------------------------------------------------------------------------
    def iteration(self) -> None:
        """All micro steps and the optimizer's step."""
        s = self.s
        steps = min(s.accumulation, 3 if s.stage == 3 else 2)
        for i in range(steps):
            self.micro = i
            self.last = i + 1 == steps
            if i and s.stage == 2 and not self.offload and not self._compact():
                self.earlier, self.collected = self.collected, None
            self._micro_step()
            self._after_backward()
        self._step()

    def _compact(self) -> bool:
        """Stage 2 with fp32 accumulation keeps one fp32 buffer (since 0.19.6)."""
        return self.s.accumulate == 4 and self.s.element == 2 and self.s.release >= (0, 19, 6)

    def _micro_step(self) -> None:
        s, mem = self.s, self.mem
        mem.phase("forward")
        self.backward = False
        for block in self.graph:
            mem.release(block)
        self.graph = []
        if self.coordinator is not None:
            self.coordinator.begin()
        once = mem.malloc(self.model.saved_once, ACTIVATIONS) if self.model.saved_once else None
        head, tail = self.programs[0], self.programs[-1]
        slots_head = self._slots(head)
        self._execute(0, head.forward, slots_head)
        x = slots_head[head.output]
        saved: list[tuple[Block | None, list[Block | None]]] = []
        last = len(self.programs) - 1
        for index in range(1, last):
            program = self.programs[index]
            slots = self._slots(program)
            slots[0] = x
            if s.checkpointing:
                self._execute(index, program.inference, slots)
                self._hold(program.inference_held, slots)
                saved.append((x, []))
                x = slots[program.inference_output]
            else:
                self._execute(index, program.forward, slots)
                self._hold(program.held, slots)
                y = slots[program.output]
                slots[program.output] = None
                if not program.input_saved:
                    mem.release(x)
                    x = None
                saved.append((x, slots))
                x = y
        slots = self._slots(tail)
        slots[0] = x
        if s.hold_logits:
            self._execute(last, [op for op in tail.forward if op[:2] != (FREE, tail.logits)], slots)
            mem.release(self.logits)
            self.logits, slots[tail.logits] = slots[tail.logits], None
        else:
            self._execute(last, tail.forward, slots)
        mem.phase("backward")
        self.backward = True
        if s.release < (0, 18, 4) and s.stage in (1, 2) and not self.bf16_optimizer:
            self._setup_buckets()
        slots[tail.grad_output] = mem.malloc(4, ACTIVATIONS)
        self._execute(last, tail.backward, slots)
        mem.release(slots[tail.output])
        grad = slots[tail.grad_input]
        recomputed: list[Block | None] = []
        for index in range(last - 1, 0, -1):
            program = self.programs[index]
            x, slots = saved.pop()
            if s.checkpointing:
                slots = self._slots(program)
                slots[0] = x
                if self.coordinator is not None:
                    owner = next((a for code, a, _n, _t in program.backward if code == ENTER), 0)
                    self.coordinator.recompute(self.first_module[index] + owner)
                self._execute(index, program.forward if s.reentrant else program.recompute, slots)
                if self.coordinator is not None:
                    self.coordinator.recomputed()
                recomputed = [slots[i] for i in program.held]
                if s.reentrant:  # CheckpointFunction.backward names the layer's output
                    recomputed.append(slots[program.output])
            slots[program.grad_output] = grad
            self._execute(index, program.backward, slots)
            for held in recomputed:
                mem.release(held)
            recomputed = []
            grad = slots[program.grad_input]
            mem.release(x)
        slots_head[head.grad_output] = grad
        slots_head[head.output] = None
        self._execute(0, head.backward, slots_head)
        mem.release(once)

    def _hold(self, held: list[int], slots: list[Block | None]) -> None:
        self.graph += [block for i in held if (block := slots[i]) is not None]

    @staticmethod
    def _slots(program: Program) -> list[Block | None]:
        return [None] * program.slots

    def _execute(self, index: int, ops: list[Op], slots: list[Block | None]) -> None:
        malloc, release = self.mem.malloc, self.mem.release
        coordinator = self.coordinator
        base_module, base_param = self.first_module[index], self.first_param[index]
        fresh: dict[int, Block] = {}
        for code, a, n, tag in ops:
            if code == ALLOC:
                slots[a] = malloc(n, tag)
            elif code == FREE:
                release(slots[a])
                slots[a] = None
            elif code == GRAD:
                fresh[a] = malloc(n, GRADS)
            elif code == HOOK:
                self._gradient(base_param + a if a != TIED else TIED, fresh.pop(a))
            elif code == WORK:
                self._work_space()
            elif code == GIVE:
                given = slots[n]
                assert given is not None
                fresh[a], slots[n] = given, None
            elif coordinator is not None:
                module = base_module + a
                if code == ENTER:
                    coordinator.enter(module, self.module_params[module])
                elif code == LEAVE:
                    coordinator.leave(module, self.module_params[module])

    def _work_space(self) -> None:
        """cuBLAS has a handle, and so a workspace, for each thread: the main one's and that of autograd
        (``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
        wanted = 2 if self.backward else 1
        while self.workspaces < wanted and self.workspace:
            self.mem.malloc(self.workspace // 2, WORKSPACE)
            self.workspaces += 1

    # -- gradients -------------------------------------------------------------------------------------------
    def _gradient(self, p: int, block: Block) -> None:
        """The gradient of parameter ``p`` arrives."""
        mem = self.mem
        if p == TIED:  # waits until the embedding's own gradient is added to it
            self.tied = block
            return
        if p == 0 and self.tied is not None:  # summed into a third tensor (input_buffer.cpp)
            total = mem.malloc(self.nbytes[0], GRADS)
            mem.release(block)
            mem.release(self.tied)
            block, self.tied = total, None
        self._hook(p, block)

    def _hook(self, p: int, block: Block) -> None:
        s = self.s
        if s.stage == 0 or self.bf16_optimizer:
            self._keep_gradient(block)
            return
        if s.stage < 3:
            self._setup_buckets()
            if s.stage == 1 and not (s.overlap and self.last):
                self._keep_gradient(block)
                return
            if s.stage == 1 and self.kept:  # added to the gradient of the earlier micro steps
                self.mem.release(block)
                block = self.kept.pop(0)
        self._add_to_bucket(p, block)

    def _keep_gradient(self, block: Block) -> None:
        """``param.grad`` until the boundary; later micro steps add in place."""
        if self.micro:
            self.mem.release(block)
        else:
            self.kept.append(block)

    def _setup_buckets(self) -> None:
        """``setup_buckets``: at the first gradient (since 0.18.4; before, already when backward begins). They go
        in the epilogue, which stage 1 runs only at the boundary (``engine.allreduce_gradients``)."""
        s = self.s
        if s.contiguous and not self.buckets:
            element = s.accumulate if s.stage == 1 and s.release >= (0, 18, 4) else s.element
            for _i in range(2 if s.overlap else 1):
                self.buckets.append(self.mem.malloc(element * s.reduce_bucket, BUFFERS))

    def _add_to_bucket(self, p: int, block: Block) -> None:
        s, n = self.s, self.numel[p]
        if self.elements + n > s.reduce_bucket and self.members:
            self._reduce()
        self.elements += n
        self.members.append(p)
        if n > s.reduce_bucket or not s.contiguous:
            self.large.append(block)
        else:
            self.mem.release(block)

    def _reduce(self) -> None:
        s, mem = self.s, self.mem
        if not self.members:
            return
        if s.stage == 3:
            self._reduce_stage3()
        else:
            stream = REDUCE_STREAM if s.overlap else 0
            spans = self._spans_ranks()
            if spans or self._compact():
                mem.release(mem.malloc(s.element * self.elements, BUFFERS, stream))
            if s.communication > s.element:
                mem.release(mem.malloc(s.communication * self.elements, BUFFERS, stream))
            self._collect()
        for block in self.large:
            mem.release(block)
        self.large = []
        self.members = []
        self.elements = 0

    def _spans_ranks(self) -> bool:
        """A bucket with gradients of several ranks' partitions is flattened for one all-reduce
        (``use_multi_rank_bucket_allreduce``); of one rank it is sent as it lies."""
        if self.s.ranks == 1:
            return False
        owners = set()
        for p in self.members:
            group, offset = self._place(p)
            owners.add(offset // self.parts[group])
            owners.add((offset + self.numel[p] - 1) // self.parts[group])
        return len(owners) > 1

    def _place(self, p: int) -> tuple[int, int]:
        """Group of parameter ``p``, and where it starts in the group's flat buffer."""
        if not self._places:
            for number, group in enumerate(self.groups):
                ends = accumulate(self.numel[i] for i in group)
                for i, end in zip(group, ends, strict=True):
                    self._places[i] = number, end - self.numel[i]
        return self._places[p]

    def _owned(self, p: int) -> int:
        """Elements of parameter ``p`` in rank 0's partition; negative when it starts after that."""
        group, offset = self._place(p)
        return min(self.numel[p], self.parts[group] - offset)

    def _collect(self) -> None:
        """Move what rank 0 owns out of the bucket: to ``grads_in_partition`` or to the CPU. With overlap on the
        reduction stream, whose blocks the main stream cannot use (``reduce_ipg_grads``)."""
        s, mem = self.s, self.mem
        stream = REDUCE_STREAM if s.overlap else 0
        top = max(self._owned(p) for p in self.members)
        if top <= 0:
            return
        if self.offload:
            if s.accumulation > 1 and self.micro + 1 < min(s.accumulation, 2):
                return  # accumulated on the CPU through temp_grad_buffer_for_gpu_offload
            mem.release(mem.malloc(8 * top, BUFFERS, stream))  # norm in fp64
            mem.release(mem.malloc(4 * top, BUFFERS, stream))  # to fp32, then copied
            return
        if self.collected is None:
            if self._compact():
                self.collected = mem.malloc(4 * self.part, GRADS, stream)
            else:
                self.collected = mem.malloc(s.element * self._whole_in_partition(), GRADS, stream)
        if self._compact():
            mem.release(mem.malloc(4 * min(top, self.part), BUFFERS, stream))

    def _reduce_stage3(self) -> None:
        """``reduce_scatter_coalesced`` and ``partition_grads``."""
        s, mem = self.s, self.mem
        single = len(self.members) == 1 and self.numel[self.members[0]] % s.ranks == 0
        flat = None
        sent: list[Block] = []
        if s.communication != s.element:  # gradients too large for the bucket have the model's type still
            sizes = [s.communication * self.numel[p] for p in self.members if self.numel[p] > s.reduce_bucket]
            sent = [mem.malloc(size, BUFFERS, REDUCE_STREAM) for size in sizes]
        if not single:
            padded = sum(-(-self.numel[p] // s.ranks) * s.ranks for p in self.members)
            flat = mem.malloc(s.communication * padded, BUFFERS, REDUCE_STREAM)
        wide = None
        if s.accumulate != s.communication:
            shares = sum(-(-self.numel[p] // s.ranks) for p in self.members)
            wide = mem.malloc(s.accumulate * shares, BUFFERS, REDUCE_STREAM)
        if self.offload:
            self._offload_gradients()
        mem.release(wide)
        mem.release(flat)
        for block in sent:
            mem.release(block)

    def _offload_gradients(self) -> None:
        """``partition_grads``: each share is copied, its norm taken, and it goes down in fp32. On NVMe the fp32 ones
        of a bucket wait for one another (``_offload_grad_partition_at_boundary``)."""
        s, mem = self.s, self.mem
        previous: Block | None = None
        waiting: list[Block] = []
        for p in sorted(self.members):  # ``__reduce_and_partition_ipg_grads`` sorts by id
            share = -(-self.numel[p] // s.ranks)
            copy = mem.malloc(s.accumulate * share, GRADS, REDUCE_STREAM)
            mem.release(previous)
            mem.release(mem.malloc(8 * min(share, _NORM_CHUNK), BUFFERS, REDUCE_STREAM))
            if s.accumulate != 4:
                low = mem.malloc(4 * share, BUFFERS, REDUCE_STREAM)
                if s.offload_optimizer == "nvme":
                    waiting.append(low)
                else:
                    mem.release(low)
            previous = copy
        mem.release(previous)
        for block in waiting:
            mem.release(block)

    def _after_backward(self) -> None:
        """``engine.allreduce_gradients`` after each backward."""
        s, mem = self.s, self.mem
        if self.bf16_optimizer:
            for i in self.trainable:  # each gradient is added to its fp32 sum (``_update_hp_grad``)
                mem.release(mem.malloc(4 * self.numel[i], BUFFERS))
            if (
                self.last and s.communication < 4
            ):  # the fp32 sum is sent as one tensor, in the type of communication
                mem.release(mem.malloc(s.communication * self.total, BUFFERS))
        elif s.stage == 0:
            if self.last:
                self._all_reduce()
        elif s.stage == 1 and not self.last:
            pass
        elif s.stage == 1 and not s.overlap:
            if self.last:
                kept, self.kept = self.kept, []
                order = [p for group in self.groups for p in group]
                by_time = list(reversed(order))
                blocks = dict(zip(by_time[: len(kept)], kept, strict=False))
                for p in order:  # reduce_gradients walks the parameters in their own order
                    block = blocks.get(p)
                    if block is not None:
                        self._add_to_bucket(p, block)
                self._end_reduction()
        else:
            self._end_reduction()
        if self.earlier is not None:
            mem.release(self.collected)
            self.collected, self.earlier = self.earlier, None

    def _end_reduction(self) -> None:
        """``independent_gradient_partition_epilogue``."""
        self._reduce()
        if len(self.groups) > 1 and self.last and not self.offload:
            self._muon_updates()
        if self.s.stage < 3:
            self._free_buckets()

    def _muon_updates(self) -> None:
        """A new tensor for each matrix, in the type of its gradient; the momentum, and a copy in which it is staged,
        stay (``stage_1_and_2.get_flat_partition``, ``_muon_staging_momentum``). Newton-Schulz iterates in 16 bits on
        the matrix and on its Gram matrix (``original_muon.zeropower_via_gram_newtonschulz``)."""
        mem, b, h = self.mem, self.s.element, self.hidden
        if not self.moments_made:
            size = b * max(self._wholes(self.groups[0], self.parts[0]), default=0)
            mem.malloc(size, OPTIMIZER)
            mem.malloc(size, OPTIMIZER)
        for p in self.groups[0]:
            if self._owned(p) <= 0:
                continue
            numel = self.numel[p]
            side = min(h, -(-numel // h))
            old = mem.malloc(2 * numel, OPTIMIZER)
            squares = [mem.malloc(2 * side * side, OPTIMIZER) for _i in range(3)]
            new = mem.malloc(2 * numel, OPTIMIZER)
            mem.release(old)
            for block in squares:
                mem.release(block)
            self.updates.append(mem.malloc(b * numel, GRADS))
            mem.release(new)

    def _step_muon(self) -> None:
        """One parameter group after the other; Adam's moments are those of the second."""
        mem, element = self.mem, self.s.element
        for number, n in enumerate(self.parts):
            flat = mem.malloc(element * n, GRADS)
            grad = mem.malloc(4 * n, GRADS)
            mem.release(flat)
            for block in self.updates if number == 0 else [self.collected]:
                mem.release(block)
            if number and not self.moments_made:
                mem.malloc(4 * n, OPTIMIZER)
                mem.malloc(4 * n, OPTIMIZER)
            mem.release(grad)
        self.updates, self.collected = [], None

    def _all_reduce(self) -> None:
        """Stage 0 flattens parameters in their order until there are more than ``_ALLREDUCE`` elements
        (``engine.allreduce_no_retain``), whatever the number of ranks."""
        s, mem, elements = self.s, self.mem, 0
        for i in [*self.trainable, -1]:
            elements += self.numel[i] if i >= 0 else 0
            if elements and (i < 0 or elements > _ALLREDUCE):
                flat = mem.malloc(s.element * elements, BUFFERS)
                if s.communication != s.element:
                    mem.release(mem.malloc(s.communication * elements, BUFFERS))
                mem.release(flat)
                elements = 0

    def _free_buckets(self) -> None:
        for block in self.buckets:
            self.mem.release(block)
        self.buckets = []

    # -- the optimizer step ------------------------------------------------------------------------------------
    def _temporaries(self, elements: int) -> list[Block]:
        return [self.mem.malloc(4 * elements, OPTIMIZER) for _i in range(self.s.temporaries)]

    def _finish_optimizer(self, elements: int) -> None:
        """Moments at the first step, temporaries at each."""
        if not self.moments_made:
            moment = self.s.moment
            if moment >= 8:
                self.mem.malloc(moment // 2 * elements, OPTIMIZER)
                self.mem.malloc(moment // 2 * elements, OPTIMIZER)
            elif moment:
                self.mem.malloc(moment * elements, OPTIMIZER)
        for block in self._temporaries(elements):
            self.mem.release(block)

    def _step(self) -> None:
        s, mem = self.s, self.mem
        mem.phase("step")
        if s.stage == 0 and not self.bf16_optimizer:
            self._step_stage0()
        elif s.stage == 3:
            self._step_stage3()
        elif self.bf16_optimizer:
            self._finish_optimizer(self.part)  # the norm is that of fp32 tensors: no copy
            self._free_kept()
        elif self.offload:
            if s.release < (0, 17, 0):  # the whole fp32 partition went through the GPU
                mem.release(mem.malloc(4 * self.part, BUFFERS))
        else:
            mem.release(mem.malloc(8 * min(self.largest, self._whole_in_partition()), BUFFERS))
            if self.updates:
                self._step_muon()
            elif self._compact():
                self._finish_optimizer(self.part)
                mem.release(self.collected)
            else:
                size = (s.accumulate if s.accumulate != s.element else s.element) * self.part
                flat = mem.malloc(size, GRADS)
                grad = flat if size == 4 * self.part else mem.malloc(4 * self.part, GRADS)
                if grad is not flat:
                    mem.release(flat)
                if s.param_groups == 1:
                    mem.release(self.collected)
                self._finish_optimizer(self.part)
                mem.release(grad)
                if s.param_groups > 1:  # the gradients of the groups to come are views of the same buffer
                    mem.release(self.collected)
            self.collected = None
        self.moments_made = True

    def _free_kept(self) -> None:
        for block in self.kept:
            self.mem.release(block)
        self.kept = []

    def _step_stage0(self) -> None:
        s, mem = self.s, self.mem
        if s.element == 4:
            self._finish_optimizer(self.total)
            self._free_kept()
            return
        copies = [mem.malloc(4 * self.numel[i], GRADS) for i in self.trainable]
        flat: Block | None = None
        if s.fused and not s.client:
            flat = mem.malloc(4 * self.total, GRADS)
            for block in copies:
                mem.release(block)
            copies = []
            self._free_kept()
        for block in self._temporaries_each():
            mem.release(block)
        self._free_kept()
        mem.release(flat)
        for block in copies:
            mem.release(block)

    def _step_stage3(self) -> None:
        s, mem = self.s, self.mem
        if self.coordinator is not None:
            self.coordinator.reset()
        if not self.offload:
            mem.release(mem.malloc(8 * -(-self.largest // s.ranks), BUFFERS))
        for i, n in enumerate(self.sub_groups()):
            if self._group_on_cpu(i):
                continue
            if self.offload:
                self._finish_optimizer(n)
                continue
            flat = mem.malloc(s.accumulate * n, GRADS)
            grad = flat
            if s.accumulate != 4:
                grad = mem.malloc(4 * n, GRADS)
                mem.release(flat)
            self._finish_optimizer(n)
            mem.release(grad)
        if self.coordinator is not None:
            self.coordinator.gather_persistent()


class Dimensions(NamedTuple):
    """Sizes that the host's part of an estimate needs."""

    trainable: tuple[int, ...]
    """Elements of each trained parameter, in registration order."""
    frozen: tuple[int, ...]
    """Stored bytes of each of the others."""
    part: int
    sub_groups: tuple[int, ...]
    model: int
    """Elements of the whole model, before ranks share its layers and without adapters."""
    twice: int
    """Elements of an embedding that the head shares: a class that is built makes both, and then drops one."""
    largest: int
    """Elements of the largest parameter of one rank's layers."""


def run_dimensions(shape: ModelShape, settings: Settings) -> Dimensions:
    """Trained parameters, stored bytes of the others, and one rank's partition."""
    return _dimensions(shape, tuple(sorted(shape.extra.items())), settings)


@lru_cache(maxsize=512)
def _dimensions(shape: ModelShape, extra: tuple[tuple[str, object], ...], settings: Settings) -> Dimensions:
    run = _Run(shape, settings, 0)
    frozen = tuple(n for n, t in zip(run.nbytes, run.trains, strict=True) if not t and n)
    return Dimensions(
        tuple(run.numel[i] for i in run.trainable),
        frozen,
        run.part,
        tuple(run.sub_groups()),
        shape.params,
        (shape.vocab or 0) * (shape.hidden or 0) if shape.tied else 0,
        max(run.numel, default=0),
    )
