"""PyTorch's CUDA caching allocator in pure Python: which blocks a sequence of requests leaves reserved.

A port of the native backend of ``c10/cuda/CUDACachingAllocator.cpp`` (rules unchanged from PyTorch 2.1 to
2.13): sizes round to 512 bytes; up to 1 MiB is cut from 2 MiB segments, below 10 MiB from 20 MiB segments,
larger requests get their own segment rounded to 2 MiB; best fit by (size, address) within one stream's pool;
a remainder is split off above 512 bytes (small) or 1 MiB (large); freed neighbours merge. Waiting for other
other streams (``record_stream``) is not modelled: a freed block can be used again at once.

With ``expandable`` it is ``expandable_segments:True``: a pool is one range of addresses, mapped by pages of 2 MiB
(small) or 20 MiB as far as it is needed. ``cap`` is what ``set_per_process_memory_fraction``, or the size of the
card, allows: a request that would go beyond gives the free segments back first, then fails.

Sizes are bytes. Every block carries a tag (what it holds), so the bytes live at a peak are known by part.
"""

from __future__ import annotations

from bisect import bisect_left, insort

PARAMS, GRADS, OPTIMIZER, BUFFERS, ACTIVATIONS, LOGITS, WORKSPACE = range(7)
PARTS = ("params", "grads", "optimizer", "buffers", "activations", "logits", "workspace")
"""Names of the tags, in order."""

_MIB = 1 << 20


class Block:
    """A piece of a segment, in use or cached."""

    __slots__ = ("addr", "free", "hole", "next", "pool", "prev", "size", "tag")

    def __init__(self, size: int, addr: int, pool: _Pool) -> None:
        self.size = size
        self.addr = addr
        self.pool = pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.hole = False
        """Addresses without memory (expandable segments)."""
        self.tag = 0


class OutOfMemory(Exception):
    """A request did not fit under ``Allocator.cap``."""


class _Pool:
    __slots__ = ("blocks", "holes", "keys", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.holes: list[Block] = []
        """In order of address."""


class Allocator:
    """Counts what is allocated and reserved, and keeps the peak of each phase.

    ``allocated`` and ``reserved`` equal ``torch.cuda.memory_allocated()`` and ``memory_reserved()`` for the
    same requests; ``peak_reserved`` is the maximum since construction.
    """

    def __init__(self, expandable: bool = False, cap: int | None = None) -> None:
        self.expandable = expandable
        self.cap = cap
        self.allocated = 0
        self.reserved = 0
        self.peak_reserved = 0
        self.live = [0] * len(PARTS)
        self.peaks: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Phase -> (allocated bytes at its peak, the same by part)."""
        self._phase = "load"
        self._peak = 0
        self._peak_parts: tuple[int, ...] = (0,) * len(PARTS)
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._top = 0

    def phase(self, name: str) -> None:
        """Later requests belong to phase ``name`` (a phase may be entered again)."""
        self._close()
        self._phase = name
        peak, parts = self.peaks.get(name, (0, self._peak_parts))
        self._peak, self._peak_parts = peak, parts
        if self.allocated > peak:
            self._peak, self._peak_parts = self.allocated, tuple(self.live)

    def _close(self) -> None:
        self.peaks[self._phase] = (self._peak, self._peak_parts)

    def finish(self) -> None:
        """Close the phase in progress; call before reading ``peaks``."""
        self._close()

    @property
    def peak(self) -> int:
        """Highest ``allocated`` of all phases."""
        return max([self._peak, *(p for p, _parts in self.peaks.values())])

    def malloc(self, nbytes: int, tag: int, stream: int = 0) -> Block:
        """A block for ``nbytes`` (0 takes 512, as a one-element tensor does). Raises OutOfMemory."""
        need = (nbytes + 511) & -512 if nbytes > 0 else 512
        small = need <= _MIB
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[(stream, small)] = _Pool(small)
        keys = pool.keys
        i = bisect_left(keys, (need, -1))
        if i < len(keys):
            block = pool.blocks.pop(keys.pop(i))
        else:
            if small:
                size = 2 * _MIB
            elif need < 10 * _MIB:
                size = 20 * _MIB
            else:
                size = (need + 2 * _MIB - 1) & -(2 * _MIB)
            if self.cap is not None and self.reserved + size > self.cap:
                self.empty_cache()
                if self.reserved + size > self.cap:
                    raise OutOfMemory
            if self.expandable:
                block = self._expand(pool, need)
            else:
                block = Block(size, self._top, pool)
                self._top += size + (1 << 40)  # segments never touch
                self.reserved += size
            if self.reserved > self.peak_reserved:
                self.peak_reserved = self.reserved
        rest = block.size - need
        if rest >= 512 if small or self.expandable else rest > _MIB:
            tail = Block(rest, block.addr + need, pool)
            tail.prev, tail.next, tail.free = block, block.next, True
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            block.size = need
            key = (rest, tail.addr)
            insort(keys, key)
            pool.blocks[key] = tail
        block.free = False
        block.tag = tag
        size = block.size
        self.live[tag] += size
        self.allocated += size
        if self.allocated > self._peak:
            self._peak = self.allocated
            self._peak_parts = tuple(self.live)
        return block

    def release(self, block: Block | None) -> None:
        """Give ``block`` back to its pool, merged with free neighbours. ``None`` is ignored."""
        if block is None:
            return
        pool = block.pool
        size = block.size
        self.allocated -= size
        self.live[block.tag] -= size
        block.free = True
        keys, blocks = pool.keys, pool.blocks
        left = block.prev
        if left is not None and left.free:
            key = (left.size, left.addr)
            keys.pop(bisect_left(keys, key))
            del blocks[key]
            block.addr = left.addr
            block.size += left.size
            block.prev = left.prev
            if left.prev is not None:
                left.prev.next = block
        right = block.next
        if right is not None and right.free:
            key = (right.size, right.addr)
            keys.pop(bisect_left(keys, key))
            del blocks[key]
            block.size += right.size
            block.next = right.next
            if right.next is not None:
                right.next.prev = block
        key = (block.size, block.addr)
        insort(keys, key)
        blocks[key] = block

    def _expand(self, pool: _Pool, need: int) -> Block:
        """Memory for the lowest addresses that are free for ``need`` bytes (``try_allocate_expandable_block``)."""
        page = 2 * _MIB if pool.small else 20 * _MIB
        if not pool.holes:
            hole = Block(1 << 50, self._top, pool)
            self._top += 1 << 51
            hole.hole = True
            pool.holes.append(hole)
        for hole in pool.holes:
            block = hole.prev if hole.prev is not None and hole.prev.free else hole
            found, after = 0, block
            while found < need and (after.hole or after.free):
                found += after.size
                if after.next is None:
                    break
                after = after.next
            if found >= need:
                break
        if block.hole:
            block = self._map(block, page, need)
        else:
            self._take(block)
        while block.size < need:
            following = block.next
            assert following is not None
            if following.hole:
                following = self._map(following, page, need - block.size)
            else:
                self._take(following)
            block.size += following.size
            block.next = following.next
            if block.next is not None:
                block.next.prev = block
        return block

    def _take(self, block: Block) -> None:
        """Out of its pool's free blocks."""
        key = (block.size, block.addr)
        keys = block.pool.keys
        keys.pop(bisect_left(keys, key))
        del block.pool.blocks[key]
        block.free = False

    def _map(self, hole: Block, page: int, need: int) -> Block:
        """The front of ``hole``, in whole pages, as a block."""
        size = min(hole.size, -(-need // page) * page)
        self.reserved += size
        block = Block(size, hole.addr, hole.pool)
        block.prev, block.next = hole.prev, hole
        if hole.prev is not None:
            hole.prev.next = block
        hole.prev = block
        hole.addr += size
        hole.size -= size
        if not hole.size:
            hole.pool.holes.remove(hole)
            block.next = hole.next
            if hole.next is not None:
                hole.next.prev = block
        return block

    def _unmap(self, pool: _Pool) -> None:
        """Whole pages of free blocks go back; their addresses become holes."""
        page = 2 * _MIB if pool.small else 20 * _MIB
        if not pool.holes:
            return
        base = pool.holes[-1]
        while base.prev is not None:
            base = base.prev
        origin = base.addr
        for key in list(pool.keys):
            block = pool.blocks[key]
            start = origin + -(-(block.addr - origin) // page) * page
            stop = origin + (block.addr + block.size - origin) // page * page
            if stop <= start:
                continue
            self._take(block)
            self.reserved -= stop - start
            pieces = [(block.addr, start, False), (start, stop, True), (stop, block.addr + block.size, False)]
            left, right = block.prev, block.next
            for low, high, is_hole in pieces:
                if low == high:
                    continue
                piece = Block(high - low, low, pool)
                piece.prev = left
                if left is not None:
                    left.next = piece
                if is_hole:
                    piece.hole = True
                    pool.holes.append(piece)
                else:
                    piece.free = True
                    insort(pool.keys, (piece.size, piece.addr))
                    pool.blocks[(piece.size, piece.addr)] = piece
                left = piece
            assert left is not None
            left.next = right
            if right is not None:
                right.prev = left
        pool.holes.sort(key=lambda h: h.addr)
        kept: list[Block] = []
        for hole in pool.holes:  # neighbours become one
            if kept and kept[-1].next is hole:
                first = kept[-1]
                first.size += hole.size
                first.next = hole.next
                if hole.next is not None:
                    hole.next.prev = first
            else:
                kept.append(hole)
        pool.holes = kept

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``: segments (or pages) without a live block go back to the driver."""
        if self.expandable:
            for pool in self._pools.values():
                self._unmap(pool)
            return
        for pool in self._pools.values():
            keep: list[tuple[int, int]] = []
            for key in pool.keys:
                block = pool.blocks[key]
                if block.prev is None and block.next is None:
                    self.reserved -= block.size
                    del pool.blocks[key]
                else:
                    keep.append(key)
            pool.keys[:] = keep  # in place: a request may be waiting for it
