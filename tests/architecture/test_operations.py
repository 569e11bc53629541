"""An operation on meta that is asked for again is answered as the first time, and what differs is not taken for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from finetune.architecture.operations import Watching

OPERATIONS: list[Callable[[Tensor], Any]] = [
    lambda x: x * 1,
    lambda x: x * 1.0,
    lambda x: x * True,
    lambda x: x > 1,
    lambda x: x.sum(0),
    lambda x: x.sum(1),
    lambda x: x.sum(1, keepdim=True),
    lambda x: x.T.contiguous(),
    lambda x: x.to(torch.float16),
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat([x, x], dim=1),
    lambda x: x.new_empty(3),
    lambda x: x.new_empty(3, dtype=torch.int8),
    lambda x: x.max(0),
]


def tensors() -> Iterator[Tensor]:
    for dtype in (torch.int64, torch.float32):
        yield from (torch.empty(2, 5, dtype=dtype, device="meta"), torch.empty(5, 2, dtype=dtype, device="meta").T)


def look_of(result: Any) -> list[tuple[Any, ...]]:
    each = [result] if isinstance(result, Tensor) else list(result)
    return [(one.shape, one.stride(), one.dtype, one.device.type) for one in each]


def test_what_is_asked_for_again_looks_the_same() -> None:
    asked = [(operation, tensor) for tensor in tensors() for operation in OPERATIONS]
    expected = [look_of(operation(tensor)) for operation, tensor in asked]
    seen: list[str] = []
    with Watching(lambda name, *_: seen.append(name)) as watching:
        first = [look_of(operation(tensor)) for operation, tensor in asked]
        remembered, calls = len(watching.known), len(seen)
        again = [look_of(operation(tensor)) for operation, tensor in asked]
    assert first == again == expected
    assert len(watching.known) == remembered
    assert len(seen) == 2 * calls  # and each is still looked at


def test_views_and_changes_in_place_are_torchs_own() -> None:
    tensor = torch.empty(2, 5, device="meta")
    with Watching():
        for _ in range(2):
            assert tensor.T._base is tensor
            assert tensor.add_(1) is tensor


def test_tensors_that_hold_values_are_computed() -> None:
    made = []
    with Watching():
        made += [torch.tensor(value) + 1 for value in (1, 2)]
    assert [each.item() for each in made] == [2, 3]
