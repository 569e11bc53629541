"""How little memory suffices where torch's allocator, once there is none left, returns what it caches."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.planner.depth.caching_allocator import MIDDLE_SEGMENT, NoMemory, replay
from finetune.planner.depth.repeat_layers import StorageChange


def least_room(changes: Sequence[StorageChange], allocated: int, reserved: int, *, expandable: bool) -> int:
    """Bytes in which a replay of the changes succeeds, found by bisection to 20 MiB, a page of the allocator.

    Args:
        allocated: Bytes at the peak, which is the least that there can be.
        reserved: Bytes that the allocator reserves where nothing limits it, which are enough.
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
