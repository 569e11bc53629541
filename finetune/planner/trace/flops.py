"""What a step computes: its operations, as the trainer's own step calls them on tensors without data.

Each operation has its arithmetic (of matrix products and attention; two operations to a multiply-add) and the bytes it
reads and writes. Nothing is derived from a parameter count, so what a count gets wrong is right by itself: adapters
whose base gets no gradient, layers computed twice, a first layer whose input needs none, causal attention's half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents the class under this name alone

from finetune.measure.collectives import CALLS, Moved
from finetune.measure.phases import Phases
from finetune.planner.constants import DDP_BUCKET, DDP_FIRST_BUCKET
from finetune.planner.trace.recorder import tensors_in

# Position of the matrix whose columns are summed over.
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "addbmm": 1, "mv": 0, "dot": 0}
PRODUCTS |= {"gemm_4bit": 0, "int8_scaled_mm": 0}  # bitsandbytes'
# A flash kernel's backward recomputes the scores: five matrix products to forward's two.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# Of these nothing is computed, whatever their arguments are.
NO_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")

TALLY = 3 * 8  # loss, count of tokens and stop flag: loop.py


class Operation(NamedTuple):
    """Operations that cost alike."""

    phase: str  # forward, backward, step
    kind: str  # product, attention or other
    flops: int
    nbytes: int  # read and written
    itemsize: int  # bytes of the first operand's numbers


@dataclass(frozen=True)
class StepWork:
    """What one rank computes and sends; forward and backward once, an update once."""

    operations: Mapping[Operation, float]  # how often
    moved: Mapping[str, Mapping[str, Moved]] = field(default_factory=dict)  # by phase and collective

    def flops(self, phase: str, *kinds: str) -> float:
        """Arithmetic of a phase; of these kinds, or of all."""
        return sum(times * op.flops for op, times in self._of(phase, kinds))

    def nbytes(self, phase: str, *kinds: str) -> float:
        """Bytes read and written in a phase."""
        return sum(times * op.nbytes for op, times in self._of(phase, kinds))

    def _of(self, phase: str, kinds: tuple[str, ...]) -> Iterator[tuple[Operation, float]]:
        return (
            (op, times)
            for op, times in self.operations.items()
            if op.phase == phase and (not kinds or op.kind in kinds)
        )


class Work(TorchDispatchMode):
    """Counts the operations of the phases that it is told of."""

    def __init__(self, phases: Phases, fake_mode: Any = None) -> None:
        """`fake_mode`: a planner's; then operations on its tensors are counted, and no others."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self.operations: Counter[Operation] = Counter()
        self._phases = phases
        self._fake_mode = fake_mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # a wrapper: its parts come back here
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._phases.current:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in NO_WORK or func.namespace in (*CALLS, "prim"):
            return
        if any(getattr(tensor, "fake_mode", None) is not self._fake_mode for tensor in tensors_in([args, result])):
            return  # DTensor asks fakes of its own, as large as the ranks' parts together, what an operation would give
        itemsize = next((tensor.itemsize for tensor in tensors_in(args)), 0)
        kind, flops = _arithmetic(name, func, args, kwargs, result)
        nbytes = _bytes(func, name, args, kwargs, result)
        if flops or nbytes:
            self.operations[Operation(self._phases.current, kind, flops, nbytes, itemsize)] += 1


def _arithmetic(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, int]:
    if name in PRODUCTS:
        return "product", 2 * result.numel() * int(args[PRODUCTS[name]].shape[-1])
    if "attention" in name or "varlen_attn" in name:
        return "attention", _attention(name, func, args, kwargs)
    return "other", 0


def _attention(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Pairs of a query and a key that it sees, times the head's width, times the products of the kernel."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    query, key = given["query"], given["key"]
    products = BACKWARD_PRODUCTS if "backward" in name else FORWARD_PRODUCTS
    if "varlen" in name:  # [tokens, heads, head_dim]; rows are taken as full: documents as long as the longest
        tokens, heads, width = query.shape
        pairs = tokens * (given["max_q"] + 1) // 2
        return int(2 * products * heads * width * pairs)
    *outer, queries, width = query.shape
    keys = key.shape[-2]
    pairs = queries * (keys + 1) // 2 if given.get("is_causal") else queries * keys
    return int(2 * products * math.prod(outer) * width * pairs)


def _bytes(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operands once, results once; what is written in place once more."""
    if name == "embedding":  # the rows that are looked up, not the table
        return 2 * _size(result)
    total, seen = 0, set()
    arguments = {argument.name: argument for argument in func._schema.arguments}
    for name_of_it, value in (*zip(arguments, args, strict=False), *kwargs.items()):
        argument = arguments[name_of_it]
        updated = argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for tensor in tensors_in(value):
            seen.add(id(tensor))
            total += _size(tensor) * (1 + updated)
    return total + sum(_size(tensor) for tensor in tensors_in(result) if id(tensor) not in seen)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def per_step(
    operations: Mapping[Operation, float],
    moved: Mapping[str, Mapping[str, Moved]],
    *,
    steps: int,
    micro_steps: int,
    reduces_once: bool = False,
) -> StepWork:
    """Of one forward, one backward and one update, from a trace of so many steps of so many micro-steps.

    `reduces_once`: backward sends in the last micro-step alone, and what it sends is given for that.
    """
    times = {"forward": steps * micro_steps, "backward": steps * micro_steps, "step": steps}
    done = {op: count / times[op.phase] for op, count in operations.items() if op.phase in times}
    if reduces_once:
        times["backward"] = steps
    sent = {
        phase: {name: _scaled(each, times[phase]) for name, each in found.items()}
        for phase, found in moved.items()
        if phase in times
    }
    return StepWork(done, sent)


def of_ddp(work: StepWork, gradient_bytes: int) -> StepWork:
    """With what DDP's reducer sends, which is C++ and not traced: all gradients once a step, in buckets of 25 MiB
    after a first one of 1 MiB (torch's own sizes); and with the loop's three numbers."""
    buckets = 1 + math.ceil(max(0, gradient_bytes - DDP_FIRST_BUCKET) / DDP_BUCKET)
    return StepWork(
        work.operations,
        {"backward": {"all_reduce": Moved(buckets, gradient_bytes)}, "step": {"all_reduce": Moved(1, TALLY)}},
    )


def at_depth(work: Mapping[int, StepWork], layers: int) -> StepWork:
    """Of a model with so many layers, from one of that depth or two of others."""
    if layers in work:
        return work[layers]
    few, more = sorted(work)
    return deeper(work[few], work[more], (layers - few) / (more - few))


def deeper(shallow: StepWork, more: StepWork, times: float) -> StepWork:
    """Layers are alike: what `more` has beside `shallow`, so many times more."""
    operations = {
        op: shallow.operations.get(op, 0.0) + times * (more.operations.get(op, 0.0) - shallow.operations.get(op, 0.0))
        for op in {**shallow.operations, **more.operations}
    }
    moved = {
        phase: {
            name: _line(shallow.moved.get(phase, {}).get(name, Moved()), each, times) for name, each in found.items()
        }
        for phase, found in more.moved.items()
    }
    return StepWork(operations, moved)


def _of(work: StepWork, phase: str, collective: str) -> Moved:
    return work.moved.get(phase, {}).get(collective, Moved())


def _scaled(moved: Moved, share: float) -> Moved:
    return Moved(*(round(value / share) for value in _figures(moved)))


def _line(here: Moved, there: Moved, times: float) -> Moved:
    return Moved(*(round(a + times * (b - a)) for a, b in zip(_figures(here), _figures(there), strict=True)))


def _figures(moved: Moved) -> tuple[int, int, int, int]:
    return moved.calls, moved.payload_bytes, moved.ring_bytes, moved.textbook_bytes
