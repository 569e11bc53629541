"""The operations that a step computes, as the trainer's own step calls them on tensors without data.

Each operation has its floating-point operations and the bytes that it reads and writes. Only matrix products and
attention have floating-point operations here; a multiply-add counts two. No count is derived from a number of
parameters, so these cases are right: adapters over a base without gradients, recomputed layers, a first layer without
an input gradient, causal attention's half.

torch's own table counts products (torch/utils/flop_counter.py: flop_registry). It does not count attention here: the
table ignores causality, and lacks both the CPU's kernel and the one for documents in one row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from finetune.architecture.operations import nested_tensors
from finetune.measure.collectives import CALLS
from finetune.measure.phases import Phases
from finetune.planner.trace.recorder import AroundOperation, OnOperations

FORMULAS = {str(packet).removeprefix("aten."): formula for packet, formula in flop_registry.items()}
# Multiply-adds of the products that torch's table lacks or cannot count, from their operands.
MULTIPLY_ADDS: dict[str, Callable[..., int]] = {
    "dot": lambda vector, *_: vector.numel(),
    "vdot": lambda vector, *_: vector.numel(),
    "mv": lambda matrix, *_: matrix.numel(),
    "addmv": lambda _, matrix, *__: matrix.numel(),
    "addmm": lambda _, left, right, *__: left.numel() * right.shape[-1],  # torch's own formula takes no out_dtype
    "addbmm": lambda _, left, right: left.numel() * right.shape[-1],  # [b, n, m] and [b, m, p]
    # Experts: tokens [T, m] by [experts, m, n], or backward's [m, T] by [T, n], into [experts, m, n].
    "_grouped_mm": lambda left, right, *_: left.numel() * right.shape[-1],
    "_int_mm": lambda left, right: left.numel() * right.shape[-1],
    "gemm_4bit": lambda given, _, weight_shape, *__: given.numel() * weight_shape[0],  # bitsandbytes: [outputs, inputs]
    "int8_scaled_mm": lambda given, weight, *_: given.numel() * weight.shape[0],
}
# Forward: scores = q k^T, output = p v. Backward: the scores again, dp = do v^T, dq = ds k, dk = ds^T q and dv = p^T do
# (flash_attn/flash_api.cpp).
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# These compute nothing, with any arguments.
NO_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")


# Where an operation runs: on the device, on the host (an offloaded update), or as a copy between the two.
ON_DEVICE, ON_HOST, COPY = "device", "host", "copy"
_COPIES = ("copy_", "_to_copy")
FUSED_UPDATE, FUSED_BLOCKS = "fused_update", "fused_blocks"  # RoundedAdamW's and BlockwiseAdamW's: stand_ins.py


class Operation(NamedTuple):
    """Operations that cost the same."""

    phase: str  # forward, backward, step
    kind: str  # product, attention, FUSED_UPDATE, FUSED_BLOCKS or other
    flops: int
    nbytes: int  # read and written; a copy between host and device counts the bytes that cross, once
    itemsize: int  # bytes of the first operand's numbers
    place: str = ON_DEVICE


class Halves:
    """The phase that runs now.

    A pipeline's stages have one phase for forward and backward, which alternate. This class separates each forward
    from the backwards around it.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases, self._in_forward = phases, False

    def watch(self, runs: Iterable[nn.Module]) -> None:
        """Separate the forwards of a stage's layer runs from the rest. Without a pipeline there are no runs."""

        def entered(*_: Any) -> None:
            self._in_forward = True

        def left(*_: Any) -> None:
            self._in_forward = False

        for run in runs:
            run.register_forward_pre_hook(entered)
            run.register_forward_hook(left)

    def current(self) -> str:
        """The phase's name; empty between phases."""
        if self._in_forward:
            return "forward"
        return self._phases.current


@contextmanager
def count_operations(
    phases: Phases, *others: AroundOperation, current: Callable[[], str] | None = None, fake_mode: Any = None
) -> Iterator[Counter[Operation]]:
    """Count the operations in the block by the phase in which they run.

    Args:
        others: Further functions that run around each operation, inside the count.
        current: Returns the phase, or an empty string where nothing is counted. By default `phases` says it.
        fake_mode: Count the operations on this mode's tensors, and no others.
    """
    operations: Counter[Operation] = Counter()

    def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        result = run()
        name = func._schema.name.partition("::")[2]
        phase = phases.current
        if current is not None:
            phase = current()
        if not phase or func.is_view or name in NO_WORK or func.namespace in (*CALLS, "prim"):
            return result
        if any(getattr(tensor, "fake_mode", None) is not fake_mode for tensor in nested_tensors([args, result])):
            return result  # skip DTensor's own shape-inference fakes, which have the unsharded size
        operands = args
        if name.removesuffix("_") == "addmm":  # the first operand is added to the product, and may be wider
            operands = args[1:]
        itemsize = next((tensor.itemsize for tensor in nested_tensors(operands)), 0)
        kind, flops = _arithmetic(name, func, args, kwargs, result)
        tensors = list(nested_tensors([args, kwargs, result]))
        place = operation_place(name, phases.device, tensors)
        nbytes = crossing_bytes(tensors) if place == COPY else _bytes(func, name, args, kwargs, result)
        if flops or nbytes:
            operations[Operation(phase, kind, flops, nbytes, itemsize, place)] += 1
        return result

    with OnOperations(count, *others):
        yield operations


def operation_place(name: str, device: torch.device, tensors: Sequence[torch.Tensor]) -> str:
    """Where an operation with these operands and results runs. A plan for a CPU has one place.

    An operation on the device may have a number in host memory as an operand.
    """
    on_host = [tensor.device.type == "cpu" for tensor in tensors]
    if device.type == "cpu" or not any(on_host):
        return ON_DEVICE
    if all(on_host):
        return ON_HOST
    if name in _COPIES:
        return COPY
    return ON_DEVICE


def crossing_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that a copy between host and device sends: its source or its result, the narrower one."""
    sides = [[tensor for tensor in tensors if (tensor.device.type == "cpu") is host] for host in (False, True)]
    return min(max(map(_size, side)) for side in sides)


def _arithmetic(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, int]:
    """An operation's kind, and its floating-point operations."""
    if name in (FUSED_UPDATE, FUSED_BLOCKS):
        return name, 0
    if "attention" in name or "varlen_attn" in name:
        return "attention", _attention(name, func, args, kwargs)
    name = name.removesuffix("_")  # in place
    if name in MULTIPLY_ADDS:
        return "product", 2 * int(MULTIPLY_ADDS[name](*args))
    formula = FORMULAS.get(name)
    if formula is None:
        return ("other", 0)
    return ("product", int(formula(*args, **kwargs, out_val=result)))


def _attention(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """2 x the kernel's products x heads x head size x pairs (a query, and a key that it sees)."""
    arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    query, key = arguments["query"], arguments["key"]
    products = BACKWARD_PRODUCTS if "backward" in name else FORWARD_PRODUCTS
    if "varlen" in name:  # [tokens, heads, head_dim]; rows are taken as full: documents as long as the longest
        tokens, heads, head_size = query.shape
        pairs = tokens * (arguments["max_q"] + 1) // 2
        return int(2 * products * heads * head_size * pairs)
    *batch_and_heads, queries, head_size = query.shape  # [batch, heads, tokens, head_dim]
    keys = key.shape[-2]
    pairs = queries * keys
    if arguments.get("is_causal"):  # 4 queries see 1 + 2 + 3 + 4 = 4 * 5 / 2 keys
        pairs = queries * (keys + 1) // 2
    return int(2 * products * math.prod(batch_and_heads) * head_size * pairs)


def _bytes(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operands once, results once, and an operand that is written in place once more."""
    if name == "embedding":  # the rows that are looked up and their copies, not the whole table
        return 2 * _size(result)
    if name == FUSED_UPDATE:
        args = args[:4]  # the weight, its moments and its gradient; the others are a few numbers
    total, counted = 0, set()
    arguments = {argument.name: argument for argument in func._schema.arguments}
    for key, value in (*zip(arguments, args, strict=False), *kwargs.items()):
        argument = arguments[key]
        updated = argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for tensor in nested_tensors(value):
            counted.add(id(tensor))
            total += _size(tensor) * (1 + updated)
    return total + sum(_size(tensor) for tensor in nested_tensors(result) if id(tensor) not in counted)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
