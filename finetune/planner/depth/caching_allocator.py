"""Bytes that torch's caching allocator reserves on a GPU for a timeline: a replay of its rules, by default settings.

Tensors request bytes (*allocated*); the allocator requests segments from CUDA (*reserved*) and splits blocks off them,
which it keeps when a tensor is freed. A free block between live ones may be too small for the next request, so more may
be reserved than was ever allocated at a time. Rules as in c10/cuda/CUDACachingAllocator.cpp of torch 2.13:

    sizes are rounded up to 512 bytes
    up to 1 MiB come from the pool of small blocks, in segments of 2 MiB
    more than that from the pool of large ones: up to 10 MiB in segments of 20 MiB, else in their own, rounded to 2 MiB
    the smallest free block that is large enough is taken, of the same stream and pool, and split where the rest is at
    least 512 bytes (small) or more than 1 MiB (large); a freed block is merged with its free neighbours
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from finetune.planner.constants import rounded_up
from finetune.planner.depth.repeat_layers import StorageChange

MIB = 2**20
ROUND = 512
SMALL = MIB  # the largest request of the pool of small blocks
SMALL_SEGMENT = 2 * MIB
MIDDLE = 10 * MIB  # larger ones get a segment of their own
MIDDLE_SEGMENT = 20 * MIB


class NoMemory(Exception):
    """CUDA has no memory left, although all cached segments were returned to it."""


@dataclass(eq=False, slots=True)
class _Block:
    nbytes: int
    address: int
    pool: tuple[int, bool]  # stream, and whether of small blocks
    free: bool = True
    before: _Block | None = None  # neighbours in the segment
    after: _Block | None = None


_Free = tuple[int, int, _Block]  # in a pool's list: bytes, address; smallest first, then lowest


@dataclass
class CachingAllocator:
    """The allocator of one device; bytes. With a `capacity` it raises NoMemory where that is not enough."""

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _pools: dict[tuple[int, bool], list[_Free]] = field(default_factory=dict)
    _blocks: dict[Hashable, _Block] = field(default_factory=dict)
    _segments: int = 0

    def malloc(self, key: Hashable, nbytes: int, stream: int = 0) -> None:
        """Allocate a block for `key`; for 0 bytes none."""
        if not nbytes:
            return
        nbytes = rounded_up(nbytes, ROUND)
        pool = stream, nbytes <= SMALL
        block = self._best_fit(pool, nbytes) or self._new_segment(pool, nbytes)
        self._split(block, nbytes)
        block.free = False
        self._blocks[key] = block
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        """Free the block of `key`, if it has one."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        self.allocated -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
        if block.before is not None and block.before.free:
            block = _merged(block.before, block)
        if block.after is not None and block.after.free:
            block = _merged(block, block.after)
        self._insert(block)

    def restart_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        """Return segments without a live block to CUDA."""
        for pool, blocks in self._pools.items():
            self._pools[pool] = [free for free in blocks if free[2].before is not None or free[2].after is not None]
            self.reserved -= sum(free[0] for free in blocks) - sum(free[0] for free in self._pools[pool])

    def _best_fit(self, pool: tuple[int, bool], nbytes: int) -> _Block | None:
        blocks = self._pools.setdefault(pool, [])
        index = bisect.bisect_left(blocks, (nbytes, -1))
        return blocks.pop(index)[2] if index < len(blocks) else None

    def _new_segment(self, pool: tuple[int, bool], nbytes: int) -> _Block:
        own = rounded_up(nbytes, 2 * MIB)
        nbytes = SMALL_SEGMENT if nbytes <= SMALL else MIDDLE_SEGMENT if nbytes < MIDDLE else own
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.empty_cache()
            if self.reserved + nbytes > self.capacity:
                raise NoMemory(f"{nbytes} bytes of {self.capacity - self.reserved}")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments += 1
        return _Block(nbytes, self._segments << 48, pool)  # far apart; the later, the higher

    def _split(self, block: _Block, nbytes: int) -> None:
        remainder = block.nbytes - nbytes
        if remainder < ROUND or not (block.pool[1] or remainder > SMALL):
            return
        rest = _Block(remainder, block.address + nbytes, block.pool, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._insert(rest)

    def _insert(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._pools.setdefault(block.pool, []), (block.nbytes, block.address, block))

    def _remove(self, block: _Block) -> None:
        blocks = self._pools[block.pool]
        index = bisect.bisect_left(blocks, (block.nbytes, block.address))
        assert blocks[index][2] is block
        blocks.pop(index)


def _merged(first: _Block, second: _Block) -> _Block:
    first.nbytes += second.nbytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


@dataclass(frozen=True)
class AllocatorPeak:
    """The most bytes that the allocator allocated and reserved during a phase."""

    allocated: int
    reserved: int


def replay(changes: Iterable[StorageChange], capacity: int | None = None) -> dict[str, AllocatorPeak]:
    """By phase, over all its runs. Raises NoMemory where `capacity` bytes are not enough."""
    allocator, peaks, running = CachingAllocator(capacity), dict[str, AllocatorPeak](), ""
    for storage, nbytes, phase, stream in chain(changes, [StorageChange(None, 0, "")]):  # the end of the last phase
        if running and (storage is None or phase != running):
            before = peaks.get(running, AllocatorPeak(0, 0))
            allocated = max(before.allocated, allocator.peak_allocated)
            peaks[running] = AllocatorPeak(allocated, max(before.reserved, allocator.peak_reserved))
            running = ""
        if storage is None:  # storages that ended before it are freed just before it, under its name
            allocator.restart_peaks()
            running = phase
        else:
            allocator.free(storage)
            allocator.malloc(storage, nbytes, stream)
    return peaks
