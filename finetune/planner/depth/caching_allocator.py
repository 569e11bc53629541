"""Bytes that torch's caching allocator reserves on a GPU for a timeline: a replay of its rules.

Tensors request bytes (*allocated*). The allocator requests segments from CUDA (*reserved*), splits blocks off them, and
keeps a block when its tensor is freed. A free block between live ones may be too small for the next request, so more
may be reserved than was ever allocated at a time. Rules as in torch 2.13's c10/cuda/CUDACachingAllocator.cpp:

    rounding    sizes are rounded up to 512 bytes
    small       up to 1 MiB, in segments with 2 MiB
    large       more than 1 MiB: up to 10 MiB in segments with 20 MiB, else in their own segment, rounded to 2 MiB
    choice      the smallest free block that is large enough, in the same stream and pool
    splitting   if the rest is at least 512 bytes (small) or more than 1 MiB (large)
    merging     a freed block is merged with its free neighbours

A training asks for expandable segments (launch/gpu_environment.py). Then each stream's pool is one range of addresses.
Pages with 2 MiB (small) or 20 MiB (large) are mapped as they are needed:

    mapping     if no free block is large enough, pages are mapped after the first free block that they make large
                enough; that is nearly always the one at the range's end
    choice      a free block before unmapped pages is taken last
    splitting   from 512 bytes on, in both pools
    emptying    unmaps the whole pages within each free block, also between live ones
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from finetune.closed_form.constants import rounded_up
from finetune.planner.depth.repeat_layers import StorageChange

MIB = 2**20
ROUND = 512
SMALL = MIB  # the largest request to the pool of small blocks
SMALL_SEGMENT = 2 * MIB
MIDDLE = 10 * MIB  # a request from this size on gets a segment of its own
MIDDLE_SEGMENT = 20 * MIB
ENDLESS = 2**62  # bytes of a range's unmapped end


class NoMemory(Exception):
    """CUDA has no memory left, although all cached segments were returned to it."""


@dataclass(eq=False, slots=True)
class _Block:
    nbytes: int
    address: int
    pool: tuple[int, bool]  # stream, and whether it has small blocks
    free: bool = True
    before: _Block | None = None  # neighbours in the segment
    after: _Block | None = None
    mapped: bool = True  # not mapped: no memory yet, and not free

    @property
    def expanded(self) -> int:
        """The block's bytes, and the unmapped bytes right behind it."""
        if self.after is None or self.after.mapped:
            return self.nbytes
        return self.nbytes + self.after.nbytes

    @property
    def page(self) -> int:
        """Bytes that CUDA maps at once for the block's pool."""
        return SMALL_SEGMENT if self.pool[1] else MIDDLE_SEGMENT


_Free = tuple[int, int, _Block]  # in a pool's list: bytes, address; smallest first, then lowest


@dataclass
class CachingAllocator:
    """One device's allocator; all sizes in bytes. It raises NoMemory if a `capacity` is not enough."""

    capacity: int | None = None
    expandable: bool = False
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _pools: dict[tuple[int, bool], list[_Free]] = field(default_factory=dict)
    _blocks: dict[Hashable, _Block] = field(default_factory=dict)
    _segments: int = 0
    _unmapped: dict[tuple[int, bool], list[_Block]] = field(default_factory=dict)  # of expandable segments, by address

    def malloc(self, key: Hashable, nbytes: int, stream: int = 0) -> None:
        """Allocate a block for `key`; for 0 bytes none."""
        if not nbytes:
            return
        nbytes = rounded_up(nbytes, ROUND)
        pool = stream, nbytes <= SMALL
        blocks = self._pools.setdefault(pool, [])
        index = bisect.bisect_left(blocks, (nbytes, -1))
        while self.expandable and index + 1 < len(blocks) and blocks[index + 1][2].expanded < blocks[index][2].expanded:
            index += 1
        if index < len(blocks):
            block = blocks.pop(index)[2]
        else:
            block = self._expand(pool, nbytes) if self.expandable else self._new_segment(pool, nbytes)
        rest = block.nbytes - nbytes
        if rest >= ROUND and (block.pool[1] or self.expandable or rest > SMALL):  # split it off
            free = _Block(rest, block.address + nbytes, block.pool, True, block, block.after)
            if block.after is not None:
                block.after.before = free
            block.after, block.nbytes = free, nbytes
            self._insert(free)
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

    def empty_cache(self) -> None:
        """Return segments without a live block to CUDA; with expandable segments, pages."""
        if self.expandable:
            for blocks in self._pools.values():
                for _, _, block in list(blocks):
                    self._unmap(block)
            return
        for pool, blocks in self._pools.items():
            self._pools[pool] = [free for free in blocks if free[2].before is not None or free[2].after is not None]
            self.reserved -= sum(free[0] for free in blocks) - sum(free[0] for free in self._pools[pool])

    def _new_segment(self, pool: tuple[int, bool], nbytes: int) -> _Block:
        if nbytes <= SMALL:
            nbytes = SMALL_SEGMENT
        elif nbytes < MIDDLE:
            nbytes = MIDDLE_SEGMENT
        else:
            nbytes = rounded_up(nbytes, 2 * MIB)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.empty_cache()
            if self.reserved + nbytes > self.capacity:
                raise NoMemory(f"{nbytes} bytes of {self.capacity - self.reserved}")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments += 1
        return _Block(nbytes, self._segments << 48, pool)  # far apart; the later, the higher

    def _expand(self, pool: tuple[int, bool], nbytes: int) -> _Block:
        """A free block with at least so many bytes, with pages that were not mapped."""
        if pool not in self._unmapped:
            self._unmapped[pool] = [_Block(ENDLESS, 0, pool, free=False, mapped=False)]
        if (block := self._mapped(pool, nbytes)) is None:
            self.empty_cache()
            block = self._mapped(pool, nbytes)
        if block is None:
            raise NoMemory(f"{nbytes} bytes of {(self.capacity or 0) - self.reserved}")
        return block

    def _mapped(self, pool: tuple[int, bool], nbytes: int) -> _Block | None:
        """Map pages as torch's try_allocate_expandable_block does; None if the capacity is not enough."""
        # A request ends in a hole, and starts at the free block before that or at the hole itself.
        starts = (hole.before if hole.before and hole.before.free else hole for hole in self._unmapped[pool])
        block = next(start for start in starts if _has_room(start, nbytes))
        if block.mapped:
            self._remove(block)
        while block.nbytes < nbytes or not block.mapped:
            hole, missing_bytes = block, nbytes
            if block.mapped:
                assert block.after is not None
                hole, missing_bytes = block.after, nbytes - block.nbytes
            mapped_bytes = min(rounded_up(missing_bytes, block.page), hole.nbytes)
            if self.capacity is not None and self.reserved + mapped_bytes > self.capacity:
                if block.mapped:
                    self._insert(block)
                return None
            block = self._map(hole, mapped_bytes)
        return block

    def _map(self, hole: _Block, nbytes: int) -> _Block:
        """Map a hole's first bytes. Returns the free block with them and their free neighbours; it is in no list."""
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(nbytes, hole.address, hole.pool, True, hole.before, hole)
        if hole.before is not None:
            hole.before.after = block
        hole.before = block
        hole.address, hole.nbytes = hole.address + nbytes, hole.nbytes - nbytes
        if not hole.nbytes:
            self._unmapped[hole.pool].remove(hole)
            block.after = hole.after
            if hole.after is not None:
                hole.after.before = block
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = _merged(block, block.after)
        if block.before is not None and block.before.free:  # the request's first block, which is in no list either
            block = _merged(block.before, block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Unmap the whole pages within a free block. The rest before and behind them stays free.

        address     first              last    end
           | free     |    unmapped      | free |      first and last are multiples of a page
        """
        end = block.address + block.nbytes
        first, last = rounded_up(block.address, block.page), end // block.page * block.page
        if first >= last:
            return
        self._remove(block)
        self.reserved -= last - first
        hole = _Block(last - first, first, block.pool, False, block.before, block.after, mapped=False)
        pieces = [hole]
        if first > block.address:
            pieces.insert(0, _Block(first - block.address, block.address, block.pool, True, block.before, hole))
        if last < end:
            pieces.append(_Block(end - last, last, block.pool, True, hole, block.after))
        if pieces[0] is not hole:
            hole.before = pieces[0]
        if pieces[-1] is not hole:
            hole.after = pieces[-1]
        if block.before is not None:
            block.before.after = pieces[0]
        if block.after is not None:
            block.after.before = pieces[-1]
        for piece in pieces:
            if piece is not hole:
                self._insert(piece)
        holes = self._unmapped[block.pool]
        bisect.insort(holes, hole, key=lambda unmapped: unmapped.address)
        if hole.before is not None and not hole.before.mapped:
            holes.remove(hole)
            hole = _merged(hole.before, hole)
        if hole.after is not None and not hole.after.mapped:
            holes.remove(hole.after)
            _merged(hole, hole.after)

    def _insert(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._pools.setdefault(block.pool, []), (block.nbytes, block.address, block))

    def _remove(self, block: _Block) -> None:
        blocks = self._pools[block.pool]
        index = bisect.bisect_left(blocks, (block.nbytes, block.address))
        assert blocks[index][2] is block
        blocks.pop(index)


def _has_room(block: _Block | None, nbytes: int) -> bool:
    """Whether free and unmapped blocks from this one on have so many bytes together."""
    while nbytes > 0 and block is not None and (block.free or not block.mapped):
        nbytes -= block.nbytes
        block = block.after
    return nbytes <= 0


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


def replay(
    changes: Iterable[StorageChange], capacity: int | None = None, *, expandable: bool = False
) -> dict[str, AllocatorPeak]:
    """Each phase's peak, over all its runs. Raises NoMemory if `capacity` bytes are not enough."""
    allocator, peaks, running = CachingAllocator(capacity, expandable), dict[str, AllocatorPeak](), ""
    for storage, nbytes, phase, stream in chain(changes, [StorageChange(None, 0, "")]):  # the end of the last phase
        if running and (storage is None or phase != running):
            before = peaks.get(running, AllocatorPeak(0, 0))
            allocated = max(before.allocated, allocator.peak_allocated)
            peaks[running] = AllocatorPeak(allocated, max(before.reserved, allocator.peak_reserved))
            running = ""
        if storage is None:  # storages that ended before it are freed just before it, under its name
            allocator.peak_allocated, allocator.peak_reserved = allocator.allocated, allocator.reserved
            running = phase
        else:
            allocator.free(storage)
            allocator.malloc(storage, nbytes, stream)
    return peaks


def least_room(changes: Sequence[StorageChange], allocated: int, reserved: int, *, expandable: bool) -> int:
    """The fewest bytes in which a replay of the changes succeeds. Bisection finds them to 20 MiB, the allocator's page.

    Args:
        allocated: Bytes at the peak. No fewer can suffice.
        reserved: Bytes that the allocator reserves if nothing limits it. They suffice.
    """
    while reserved - allocated > MIDDLE_SEGMENT:
        middle = (allocated + reserved) // 2
        try:
            replay(changes, middle, expandable=expandable)
        except NoMemory:
            allocated = middle
        else:
            reserved = middle
    return reserved
