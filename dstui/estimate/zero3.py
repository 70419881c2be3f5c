"""ZeRO-3's parameter coordinator: which parameters are whole on the GPU at each module call.

A port of ``fetch_sub_module`` and ``release_sub_module`` of
``deepspeed/runtime/zero/partitioned_param_coordinator.py`` (0.19.8; the same logic since 0.9). The first
iteration records the order of modules and fetches only what a module needs; later ones prefetch. Gathers are
allocated on the all-gather stream (``partition_parameters.py``): a coalesced one as a flat buffer for each type and
then a copy per parameter (``AllGatherCoalescedHandle.wait``), one parameter alone as a single buffer
(``_all_gather_sequential``). Partitions in host RAM first come to the GPU one by one (``_all_gather_dtype``). With one
rank there is no gather: views of the partition where it is on the GPU, else a block a parameter
(``NoGatherCoalescedHandle``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from dstui.estimate.allocator import PARAMS, Allocator, Block

GATHER_STREAM = 1


class _Gather:
    __slots__ = ("blocks", "done", "flats", "params", "waiting")

    def __init__(self, params: list[int], flats: list[Block], blocks: dict[int, Block]) -> None:
        self.params = params
        self.waiting = set(params)
        self.flats = flats
        """Gathered as one, to be copied out of."""
        self.blocks = blocks
        """Parameters that have their own block already."""
        self.done = False


class Coordinator:
    """``numel`` and ``nbytes`` of each parameter; limits in elements as the config has them."""

    def __init__(
        self,
        allocator: Allocator,
        numel: Sequence[int],
        nbytes: Sequence[int],
        *,
        prefetch: int,
        live: int,
        reuse: int,
        persist: int,
        ranks: int,
        offloaded: bool,
        frozen: frozenset[int] = frozenset(),
    ) -> None:
        self.allocator = allocator
        self.numel = numel
        self.nbytes = nbytes
        self.prefetch, self.live, self.reuse = prefetch, live, reuse
        self.ranks, self.offloaded = ranks, offloaded
        self.frozen = frozen
        self.owner: int | None = None
        """The module in whose backward pass a checkpointed layer is computed again."""
        self.owned: set[int] = set()
        self.recomputing = False
        self.persistent = {i for i, n in enumerate(numel) if 0 < n <= persist}
        self.available: dict[int, Block | None] = {}
        self.inflight: dict[int, _Gather] = {}
        self.active: dict[int, set[int]] = {}
        self.count = 0
        """Elements fetched or in flight, DeepSpeed's ``__n_available_params``."""
        self.order: list[tuple[int, tuple[int, ...]]] = []
        self.complete = False
        self.step = 0
        self._queue: deque[tuple[int, int]] = deque()
        self._latest: dict[int, int] = {}
        self._uses: dict[int, list[int]] = {}
        """Parameter -> the steps at which a module needs it, in order."""
        self._before: list[int] = []
        """Elements that the modules before each step need."""

    def begin(self) -> None:
        """Start of a forward pass: the trace is complete once one iteration has been recorded."""
        if self.order and not self.complete:
            self.complete = True
            total = 0
            for step, (_module, params) in enumerate(self.order):
                self._before.append(total)
                for p in params:
                    self._uses.setdefault(p, []).append(step)
                    total += self.numel[p]
        self.step = 0
        self.count = 0
        self._latest = {}
        self._queue = deque(
            (step, p) for step, (_module, params) in enumerate(self.order) for p in sorted(params)
        )

    def enter(self, module: int, params: tuple[int, ...]) -> None:
        """``fetch_sub_module``: gather what ``module`` needs, wait for it, prefetch what comes next."""
        if not self.complete:
            self.order.append((module, params))
        needed = [p for p in params if p not in self.available and p not in self.inflight]
        if needed:
            self._gather(needed)
        for p in params:
            users = self.active.setdefault(p, set())
            users.add(module)
            if self.recomputing and self.owner is not None and p in self.frozen:
                users.add(self.owner)
                self.owned.add(p)
            if p in self.inflight:
                self._wait(p)
        if self.complete:
            self._prefetch(params)
        self.step += 1

    def _prefetch(self, params: tuple[int, ...]) -> None:
        latest, queue = self._latest, self._queue
        fresh = sum(1 for p in params if latest.get(p, -1) < self.step)
        for _i in range(fresh):
            if not queue:
                break
            step, p = queue.popleft()
            latest[p] = step
        if self.prefetch <= 0:
            return
        room = min(self.live - self.count, self.prefetch)
        total = 0
        wanted: list[int] = []
        chosen: set[int] = set()
        while queue and total < room:
            step, p = queue.popleft()
            latest[p] = max(latest.get(p, -1), step)
            if p not in chosen and p not in self.available and p not in self.inflight:
                wanted.append(p)
                chosen.add(p)
                total += self.numel[p]
        if wanted:
            self._gather(wanted)

    def _gather(self, params: list[int]) -> None:
        params = sorted(params)
        self.count += sum(self.numel[p] for p in params)
        blocks: dict[int, Block] = {}
        flats: list[Block] = []
        if self.ranks == 1:
            if self.offloaded:
                blocks = {p: self._malloc(self.nbytes[p]) for p in params}
        elif len(params) == 1:
            blocks = {params[0]: self._malloc(self.nbytes[params[0]])}
            self._stage(params)
        else:
            for element in sorted({self.nbytes[p] // self.numel[p] for p in params}):
                alike = [p for p in params if self.nbytes[p] // self.numel[p] == element]
                flats.append(self._malloc(sum(self.nbytes[p] for p in alike)))
                self._stage(alike)
        gather = _Gather(params, flats, blocks)
        for p in params:
            self.inflight[p] = gather

    def _malloc(self, nbytes: int) -> Block:
        return self.allocator.malloc(nbytes, PARAMS, GATHER_STREAM)

    def _stage(self, params: list[int]) -> None:
        """This rank's shares of ``params`` come to the GPU and go into the buffer."""
        if self.offloaded:
            for block in [self._malloc(-(-self.nbytes[p] // self.ranks)) for p in params]:
                self.allocator.release(block)

    def _wait(self, p: int) -> None:
        gather = self.inflight.pop(p)
        if not gather.done:
            gather.done = True
            for q in gather.params:
                block = gather.blocks.get(q)
                if block is None and gather.flats:
                    block = self._malloc(self.nbytes[q])
                self.available[q] = block
        gather.waiting.discard(p)
        if not gather.waiting:
            for flat in gather.flats:
                self.allocator.release(flat)
            gather.flats = []

    def leave(self, module: int, params: tuple[int, ...]) -> None:
        """``release_sub_module``: free what nobody needs soon."""
        if not params:
            return
        keep = self._needed_soon(params) if self.complete else frozenset()
        for p in params:
            self.active.get(p, set()).discard(module)
            if p in self.persistent and self.complete:
                continue
            if p in keep or self._latest.get(p, -1) > self.step:
                continue
            self._release(p)
        if module == self.owner and not self.recomputing:
            self.owner = None
            for p in sorted(self.owned):
                self.active[p].discard(module)
                if p not in self.persistent:
                    self._release(p)
            self.owned.clear()

    def recompute(self, owner: int) -> None:
        """A checkpointed layer is computed again while the backward pass of module ``owner`` waits for a tensor that
        it saved. Frozen parameters then stay until that module is done, and go with it whatever needs them next
        (``update_recompute_parameters``, ``release_sub_module``): no backward hook of their own releases them."""
        if self.frozen:
            self.owner, self.recomputing = owner, True

    def recomputed(self) -> None:
        self.recomputing = False

    def _needed_soon(self, params: tuple[int, ...]) -> frozenset[int]:
        """Those of ``params`` used again within the reuse distance (``__params_to_release``)."""
        step = self.step
        if self.reuse <= 0 or step >= len(self._before):
            return frozenset()
        limit = self._before[step] + self.reuse
        found = []
        for p in params:
            uses = self._uses[p]
            i = bisect_left(uses, step)
            if i < len(uses) and self._before[uses[i]] < limit:
                found.append(p)
        return frozenset(found)

    def _release(self, p: int) -> None:
        if p in self.available and not self.active.get(p):
            self.allocator.release(self.available.pop(p))
            self.count -= self.numel[p]

    def reset(self) -> None:
        """Before the optimizer's step every parameter is released (``release_and_reset_all``)."""
        for p in list(self.inflight):
            if p in self.inflight:
                self._wait(p)
        self.active.clear()
        for p in list(self.available):
            self._release(p)

    def gather_persistent(self) -> None:
        """After the step the persistent parameters are whole again (``stage3._post_step``), each in a buffer of the
        main stream, and not counted as fetched."""
        wanted = sorted(self.persistent)
        if self.ranks == 1 and not self.offloaded:
            self.available.update(dict.fromkeys(wanted))
            return
        shares = []
        if self.ranks > 1 and self.offloaded:
            shares = [self.allocator.malloc(-(-self.nbytes[p] // self.ranks), PARAMS) for p in wanted]
        for p in wanted:
            self.available[p] = self.allocator.malloc(self.nbytes[p], PARAMS)
        for block in shares:
            self.allocator.release(block)
