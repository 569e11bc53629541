"""The caching allocator's rules, each by an example worked out by hand."""

from __future__ import annotations

import random

import pytest

from finetune.planner.depth.caching_allocator import MIB, AllocatorPeak, CachingAllocator, NoMemory, replay
from finetune.planner.depth.repeat_layers import StorageChange


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", 1)
    allocator.malloc("b", 513)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    for index in range(2):
        allocator.malloc(index, MIB)  # one fits beside them, the next does not
    assert allocator.reserved == 4 * MIB


def test_middle_blocks_share_and_large_ones_do_not() -> None:
    allocator = CachingAllocator()
    for index in range(3):
        allocator.malloc(index, 9 * MIB)
    assert allocator.reserved == 40 * MIB  # two to a segment of 20
    allocator.malloc("large", 11 * MIB + 1)
    assert allocator.reserved == (40 + 12) * MIB
    # What is left of a large segment is cut off above 1 MiB; here 1 MiB less 512 bytes, which the block keeps.
    assert allocator.allocated == 27 * MIB + 12 * MIB


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([11 * MIB], 12 * MIB, 12 * MIB),  # 1 MiB is left of a large segment: not more than that, so it is not cut off
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),  # 512 bytes more are
        ([MIB, MIB - 512], 2 * MIB - 512, 2 * MIB),  # 512 bytes are left of a small one, and cut off
        ([MIB, MIB], 2 * MIB, 2 * MIB),  # the largest request of the pool of small blocks
        ([MIB + 1], MIB + 512, 20 * MIB),  # and the smallest of the other
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),  # the largest that shares a segment
        ([10 * MIB], 10 * MIB, 10 * MIB),  # and the smallest with one of its own
    ],
)
def test_the_edge_of_each_rule(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for index, nbytes in enumerate(requests):
        allocator.malloc(index, nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_hole_that_is_too_small_makes_another_segment() -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", 100 * MIB)
    allocator.free("a")
    allocator.malloc("b", 60 * MIB)
    allocator.malloc("c", 30 * MIB)
    assert allocator.reserved == 100 * MIB
    allocator.malloc("d", 20 * MIB)  # only 10 are left behind c
    assert allocator.reserved == 120 * MIB
    allocator.free("b")
    allocator.free("c")  # joins both its neighbours
    allocator.malloc("e", 100 * MIB)
    assert (allocator.reserved, allocator.allocated) == (120 * MIB, 120 * MIB)


def test_streams_do_not_share_and_an_emptied_cache_is_given_back() -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", 50 * MIB)
    allocator.free("a")
    allocator.malloc("b", 50 * MIB, stream=1)
    assert allocator.reserved == 100 * MIB
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 50 * MIB


def test_nothing_is_lost_in_many_random_steps() -> None:
    allocator, held, order = CachingAllocator(), {}, random.Random(0)
    for key in range(5000):
        nbytes = order.choice((100, 4000, 700_000, 3 * MIB, 15 * MIB))
        allocator.malloc(key, nbytes)
        held[key] = nbytes
        if order.random() < 0.97 and len(held) > 40:
            gone = order.choice(list(held))
            allocator.free(gone)
            del held[gone]
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
    for key in held:
        allocator.free(key)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_phases() -> None:
    """60 MiB from load on; 30 more in forward, which go as backward begins; a resized storage moves."""
    changes = [
        StorageChange(None, 0, "load"),
        StorageChange("a", 60 * MIB, "load"),
        StorageChange(None, 0, "forward"),
        StorageChange("b", 30 * MIB, "forward"),
        StorageChange("b", 0, "backward"),  # booked late
        StorageChange(None, 0, "backward"),
        StorageChange("a", 40 * MIB, "backward"),
    ]
    assert replay(changes) == {
        "load": AllocatorPeak(60 * MIB, 60 * MIB),
        "forward": AllocatorPeak(90 * MIB, 90 * MIB),
        "backward": AllocatorPeak(60 * MIB, 90 * MIB),
    }


def expanding(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, expandable=True)


def test_an_expandable_segment_grows_where_others_are_added() -> None:
    """Rows of ever-new lengths: each a little longer than what is cached."""
    reserved = []
    for allocator in (CachingAllocator(), expanding()):
        for nbytes in (30 * MIB, 40 * MIB, 50 * MIB):
            allocator.malloc("row", nbytes)
            allocator.free("row")
        reserved.append(allocator.reserved)
    assert reserved == [120 * MIB, 60 * MIB]  # pages of 20


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([MIB], MIB, 2 * MIB),  # a small page
        ([MIB, MIB, 512], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),  # a large one
        ([11 * MIB], 11 * MIB, 20 * MIB),  # split off from 512 bytes on: 12 MiB by default
        ([11 * MIB, 9 * MIB], 20 * MIB, 20 * MIB),
        ([11 * MIB, 9 * MIB + 512], 20 * MIB + 512, 40 * MIB),  # 9 are left of the page, and one more is mapped
        ([50 * MIB, 9 * MIB, 3 * MIB], 62 * MIB, 80 * MIB),
    ],
)
def test_pages_of_an_expandable_segment(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = expanding()
    for index, nbytes in enumerate(requests):
        allocator.malloc(index, nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert allocator.peak_reserved == reserved


def test_a_block_that_could_grow_is_taken_last() -> None:
    """By default the smallest that is large enough, here the end of the range, of 30 MiB."""
    allocator = expanding()
    for key, nbytes in (("hole", 40 * MIB), ("between", 10 * MIB), ("end", 30 * MIB)):
        allocator.malloc(key, nbytes)
    allocator.free("hole")
    allocator.free("end")
    allocator.malloc("small", 20 * MIB)  # in the hole, so that the end stays whole
    allocator.malloc("large", 50 * MIB)  # 30 at the end, and one page more
    assert allocator.reserved == 100 * MIB


def test_pages_between_live_blocks_are_unmapped_and_mapped_again() -> None:
    allocator = expanding(capacity=100 * MIB)
    for key, nbytes in (("before", 10 * MIB), ("hole", 50 * MIB), ("behind", 20 * MIB)):
        allocator.malloc(key, nbytes)
    assert allocator.reserved == 80 * MIB
    allocator.free("hole")  # from 10 to 60 MiB: two whole pages
    allocator.malloc("large", 55 * MIB)  # at the end, 60 MiB more: 140 with the hole's pages, 100 without
    assert (allocator.reserved, allocator.allocated) == (100 * MIB, 85 * MIB)
    with pytest.raises(NoMemory):
        allocator.malloc("too large", 30 * MIB)
    allocator.free("large")
    allocator.malloc("again", 45 * MIB)  # in the hole: 10 MiB that stayed, and two pages that were not mapped
    assert allocator.allocated == 75 * MIB
    assert allocator.reserved <= 100 * MIB
    for key in ("before", "behind", "again"):
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
    allocator.malloc("all", 100 * MIB)
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize("capacity", [None, 600 * MIB])
def test_nothing_is_lost_of_an_expandable_segment(capacity: int | None) -> None:
    allocator, held, order = expanding(capacity), {}, random.Random(0)
    for key in range(3000):
        nbytes = order.choice((100, 4000, 700_000, 3 * MIB, 15 * MIB, 23 * MIB))
        try:
            allocator.malloc(key, nbytes, stream=key % 2)
        except NoMemory:
            gone = max(held, key=lambda each: held[each])  # and all else stays as it was
            allocator.free(gone)
            del held[gone]
            continue
        held[key] = nbytes
        if order.random() < 0.97 and len(held) > 40:
            gone = order.choice(list(held))
            allocator.free(gone)
            del held[gone]
        if order.random() < 0.02:
            allocator.empty_cache()
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
        assert allocator.reserved <= (capacity or allocator.reserved)
    for key in held:
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_phases_of_an_expandable_segment() -> None:
    changes = [
        StorageChange(None, 0, "load"),
        StorageChange("a", 60 * MIB, "load"),
        StorageChange("b", 11 * MIB, "load"),
    ]
    assert replay(changes)["load"].reserved == 72 * MIB
    assert replay(changes, expandable=True)["load"].reserved == 80 * MIB
