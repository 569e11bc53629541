"""Checksums of trained tensors: by plain arithmetic, for any number of ranks, and different after any change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from finetune.run_folder import tensor_checks
from finetune.run_folder.tensor_checks import GOLDEN, MIXED, checksums, not_finite
from finetune.strategies.pieces import Piece, Ranks
from tests.support.stand_ins.ranks import made_up_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def values(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)


def by_hand(tensor: torch.Tensor) -> str:
    """The docstring's sum in Python's whole numbers; >> keeps the sign, as int64's does."""
    kind = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[tensor.element_size()]
    bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for position, element in enumerate(np.frombuffer(bits, kind).tolist(), start=1):
        mixed = signed(position * GOLDEN)
        mixed = signed((mixed ^ (mixed >> 29)) * MIXED) | 1
        total += element * mixed
    return f"{total % 2**64:016x}"


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def ranks(sums: list[dict[str, int]]) -> Ranks:
    """The last rank, to which the others' sums are known."""
    return made_up_ranks(len(sums), len(sums) + 1, lambda mine: [*sums, mine])


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_what_the_arithmetic_says(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(dtype)
    assert checksums({"w": tensor}, Ranks()) == {"w": by_hand(tensor)}
    monkeypatch.setattr(tensor_checks, "CHUNK", 4)
    assert checksums({"w": tensor}, Ranks()) == {"w": by_hand(tensor)}


@pytest.mark.parametrize("cut", [0, 1, 17, 35])
def test_is_the_same_for_any_split(cut: int) -> None:
    tensor = values(torch.float32)
    flat, brought = tensor.reshape(-1), []

    def part(start: int, end: int) -> dict[str, Piece]:
        return {"w": Piece(flat[start:end], (7, 5), start)}

    checksums(part(0, cut), made_up_ranks(0, 2, lambda mine: brought.append(mine) or [mine]))  # type: ignore[func-returns-value]
    assert checksums(part(cut, 35), ranks(brought)) == checksums({"w": tensor}, Ranks())


def test_every_single_change_is_seen() -> None:
    tensor = values(torch.float32)
    before, seen = checksums({"w": tensor}, Ranks())["w"], set()
    for index in range(tensor.numel()):
        for bit in (0, 11, 31):
            changed = tensor.clone()
            changed.view(-1).view(torch.int32)[index] ^= torch.tensor(1 << bit).to(torch.int32)
            seen.add(checksums({"w": changed}, Ranks())["w"])
    assert before not in seen
    assert len(seen) == 3 * tensor.numel()


def test_elements_that_changed_places_are_seen() -> None:
    tensor = values(torch.float32)
    assert checksums({"w": tensor.flip(0)}, Ranks()) != checksums({"w": tensor}, Ranks())
    progression = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([2.0, 0.0, 2.0])
    assert len({checksums({"w": each}, Ranks())["w"] for each in progression}) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 8, 34])
def test_not_finite_is_named(bad: float, index: int) -> None:
    good, spoilt = values(torch.float32), values(torch.float32)
    spoilt.view(-1)[index] = bad
    integers = torch.arange(5)
    assert not_finite({"a": good, "b": spoilt, "c": integers, "d": torch.empty(0)}, 0) == ["b"]
    assert not_finite({"b": spoilt}, 1) == [], "rank 0 answers for a whole tensor"
    assert not_finite({"b": Piece(spoilt.view(-1)[8:], (7, 5), 8)}, 1) == (["b"] if index >= 8 else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bad_element_of_many_is_seen_and_the_largest_number_is_good(dtype: torch.dtype) -> None:
    many = torch.full((100_003,), torch.finfo(dtype).max, dtype=dtype)
    assert not_finite({"w": many}, 0) == []
    for index in (0, 7, 50_001, 100_002):
        for bad in (math.nan, -math.inf):
            spoilt = many.clone()
            spoilt[index] = bad
            assert not_finite({"w": spoilt}, 0) == ["w"]
