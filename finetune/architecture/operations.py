"""How an operation in a forward on meta treats positions.

The number of tokens is a prime that no axis in a model has. So an axis with that size is the position axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # no public name; tests/architecture/test_families.py would turn red
)

LENGTHS = (67, 46)  # of the documents
TOKENS = sum(LENGTHS)
# Which argument, and which axis of it, a product sums over.
SUMMED = {"mm": (0, 1), "bmm": (0, 2), "addmm": (1, 1), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 0)}
# These name an axis but do not mix what is along it. Experts get their tokens by gather, scatter and the like.
UNMIXED = {
    *("unsqueeze", "squeeze", "transpose", "permute", "stack"),
    *("gather", "scatter", "scatter_add", "index_add", "index_select"),
}


class Unsuitable(Exception):
    """The kit would compute something wrongly for this architecture; the text says why."""


class Watching(TorchDispatchMode):
    """Passes every operation to `look`. A value that the model's code reads is 0; a search by `nonzero` finds none."""

    def __init__(self, look: Callable[..., None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.look = look
        self.known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return torch.zeros((), dtype=args[0].dtype).item()
        if name == "nonzero":
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        result = self._result(func, args, kwargs or {})
        if self.look is not None:
            self.look(name, func, args, kwargs or {}, result)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result. torch takes 0.2 ms to work out in Python how a sum of two meta tensors looks. Similar
        layers repeat the same operation, so results are remembered by their inputs.
        """
        schema = func._schema
        new = not schema.is_mutable and [returned.alias_info for returned in schema.returns] == [None]
        key = (func, _form(args), _form(kwargs)) if new else ()
        if new and (known := self.known.get(key)) is not None:
            shape, strides, dtype = known
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if new and isinstance(result, Tensor) and result.is_meta:
            self.known[key] = (result.shape, result.stride(), result.dtype)
        return result


def _form(value: Any) -> Any:
    """All that a result on meta depends on; equal for no two tensors that hold values."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return (value.shape, value.stride(), value.dtype)
        return object()
    if isinstance(value, dict):
        return tuple((key, _form(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return (type(value), value)


def mixes_positions(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether this operation brings one position's values to others."""
    if "convolution" in name or "scaled_dot_product" in name:
        return TOKENS in args[0].shape
    if name in SUMMED:
        which, axis = SUMMED[name]
        return bool(args[which].shape[axis] == TOKENS)
    tensor = next(iter(args), None)
    if isinstance(tensor, list | tuple):
        tensor = next(iter(tensor), None)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim < 2:
        return False
    if name == "constant_pad_nd":
        padded = [tensor.ndim - 1 - index // 2 for index, width in enumerate(args[1]) if width]
        return any(tensor.shape[axis] == TOKENS for axis in padded)
    if name in UNMIXED or (name == "slice" and result.shape == tensor.shape):
        return False
    return any(tensor.shape[axis] == TOKENS for axis in _axes(func, args, kwargs) if axis < tensor.ndim)


def counts_positions(name: str, args: Any, result: Any) -> bool:
    """Whether positions may be counted here without any being given: by adding ones up, or by the first lines of a
    table. One that `arange` makes is certain."""
    if name == "cumsum":
        return not args[0].is_floating_point() and TOKENS in args[0].shape
    return name == "slice" and TOKENS in result.shape and TOKENS not in args[0].shape


def placed_tensors(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested value, with its place in it."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from placed_tensors(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from placed_tensors(entry, f"{where}.{index}")


def nested_tensors(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries: an operation's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from nested_tensors(value)


def token_axes(value: Any) -> dict[str, tuple[int, ...]]:
    """The position axes of each tensor in a nested value, by its place."""
    return {
        where: tuple(axis for axis, size in enumerate(tensor.shape) if size == TOKENS)
        for where, tensor in placed_tensors(value)
    }


def place() -> str:
    """The library module's class whose forward is running."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            return type(owner).__name__
        frame = frame.f_back
    return "its forward"


def _axes(func: Any, args: Any, kwargs: Any) -> list[int]:
    """The axes that an operation works along."""
    axes: list[int] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims", "dimension"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            axes += [value] if isinstance(value, int) else list(value or ())
    return axes
