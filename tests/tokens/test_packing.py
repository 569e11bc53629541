"""Best-fit-decreasing packing: every document once, never over capacity, close to the best, the same every time."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.tokens.packing import pack


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook's way, O(n^2): the fullest row that still takes it, else a new one."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rooms = [(capacity - sum(lengths[member] for member in row), at) for at, row in enumerate(rows)]
        fitting = [(room, at) for room, at in rooms if room >= lengths[index]]
        if fitting:
            rows[min(fitting)[1]].append(index)
        else:
            rows.append([index])
    return rows


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 80))
def test_every_document_once_and_as_full_as_the_textbook(lengths: list[int], capacity: int) -> None:
    packs = pack(lengths, capacity)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= capacity for members in packs)
    assert all(members == sorted(members) for members in packs)
    assert packs == pack(lengths, capacity)
    # Rows of equal room may be chosen in another order; the rooms that are left are the same.
    rooms, expected = (
        sorted(capacity - sum(lengths[index] for index in members) for members in packed)
        for packed in (packs, plain_best_fit(lengths, capacity))
    )
    assert rooms == expected


def test_bounds_and_emptiness() -> None:
    assert pack([], 8) == []
    assert pack([8, 8], 8) == [[0], [1]]
    for wrong in ([9], [0]):
        with pytest.raises(ValueError, match=r"must be in 1\.\.8"):
            pack(wrong, 8)


def test_long_tailed_lengths_fill_nearly_all() -> None:
    draw = random.Random(0)
    lengths = [min(4096, int(draw.lognormvariate(6, 0.8)) + 1) for _ in range(20_000)]
    packs = pack(lengths, 4096)
    assert sum(lengths) / (4096 * len(packs)) > 0.995


def test_work_grows_like_the_number_of_documents() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 4096) for _ in range(16_000)]

    def lines_run(count: int) -> int:
        """Lines of `pack` that are executed: the same on every machine, unlike seconds."""
        seen = 0

        def count_line(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            seen += event == "line"
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            pack(lengths[:count], 4096)
        finally:
            sys.settrace(before)
        return seen

    assert lines_run(16_000) < 9 * lines_run(2_000)  # 8 times as many documents
