"""Collectives and their bytes, as torch's dispatcher sees them: counted, not estimated.

Every strategy here communicates through torch's process groups, also from C++ (DDP's reducer). Each call passes the
dispatcher as an operation of `c10d`, or of `_c10d_functional` from DTensor. Three figures are counted. With N ranks in
the group and `full` the unsharded tensor's bytes (all inputs of a reduce_scatter, all outputs of an all_gather):

    payload    full
    ring       what one rank sends in a ring: all_reduce 2 (N-1)/N full, the other collectives (N-1)/N full
    textbook   the ring for large N: 2 full and 1 full; DDP then moves 2P a step and ZeRO-3 3P (Rajbhandari et al.,
               ZeRO, section 7), P being the bytes of the parameters

A backend may implement one call by another: gloo carries out a reduce_scatter as an all_reduce. The strategy's own call
is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed


class _Call(NamedTuple):
    """How to read the arguments of one operation."""

    collective: str
    payload: int  # position of the tensors of full size, -1 for none
    group: int  # position of the group: a boxed ProcessGroup, or its name
    share: int = -1  # position of the number of ranks, where the payload argument is one rank's shard


C10D = {
    "allreduce_": _Call("all_reduce", 0, 1),
    "allreduce_coalesced_": _Call("all_reduce", 0, 1),
    "broadcast_": _Call("broadcast", 0, 1),
    "reduce_": _Call("reduce", 0, 1),
    "allgather_": _Call("all_gather", 0, 2),
    "_allgather_base_": _Call("all_gather", 0, 2),
    "allgather_coalesced_": _Call("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": _Call("all_gather", 0, 2),
    "reduce_scatter_": _Call("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": _Call("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": _Call("reduce_scatter", 1, 2),
    "alltoall_": _Call("all_to_all", 1, 2),
    "alltoall_base_": _Call("all_to_all", 1, 2),
    "scatter_": _Call("scatter", 1, 2),  # empty on all ranks but the root
    "gather_": _Call("gather", 0, 2),  # empty on all ranks but the root
    "gather_into_tensor_": _Call("gather", 0, 2),  # since torch 2.14
    "send": _Call("send", 0, 1),
    "recv_": _Call("recv", 0, 1),
    "recv_any_source_": _Call("recv", 0, 1),
    "barrier": _Call("barrier", -1, 1),
    "monitored_barrier_": _Call("barrier", -1, 1),
}
FUNCTIONAL = {
    "all_reduce": _Call("all_reduce", 0, 2),
    "all_reduce_": _Call("all_reduce", 0, 2),
    "all_reduce_coalesced": _Call("all_reduce", 0, 2),
    "all_reduce_coalesced_": _Call("all_reduce", 0, 2),
    "broadcast": _Call("broadcast", 0, 2),
    "broadcast_": _Call("broadcast", 0, 2),
    "all_gather_into_tensor": _Call("all_gather", 0, 2, share=1),
    "all_gather_into_tensor_out": _Call("all_gather", 0, 2, share=1),
    "all_gather_into_tensor_coalesced": _Call("all_gather", 0, 2, share=1),
    "reduce_scatter_tensor": _Call("reduce_scatter", 0, 3),
    "reduce_scatter_tensor_out": _Call("reduce_scatter", 0, 3),
    "reduce_scatter_tensor_coalesced": _Call("reduce_scatter", 0, 3),
    "all_to_all_single": _Call("all_to_all", 0, 3),
    "isend": _Call("send", 0, 3),
    "irecv": _Call("recv", 0, 3),
}
CALLS = {"c10d": C10D, "_c10d_functional": FUNCTIONAL}
# A rank's sent bytes in a ring, in units of (N-1)/N payloads, and by the textbook, in payloads.
WEIGHT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1, "all_to_all": 1}
WEIGHT |= {"scatter": 1, "gather": 0, "send": 1, "recv": 0, "barrier": 0}


@dataclass
class CollectiveStats:
    """The calls of one collective on one rank: their number, and their bytes by the module's three figures."""

    calls: int = 0
    payload_bytes: int = 0
    ring_bytes: int = 0
    textbook_bytes: int = 0


class Traffic:
    """Counts collectives since the last `take`."""

    def __init__(self) -> None:
        self._stats: dict[str, CollectiveStats] = {}
        self._calls: dict[Any, _Call | None] = {}

    def see(self, operation: Any, args: tuple[Any, ...]) -> None:
        """Count this call if it is a collective; any other call costs one dict lookup."""
        try:
            call = self._calls[operation]
        except KeyError:
            namespace, _, name = str(operation).partition(".")
            call = self._calls[operation] = CALLS.get(namespace, {}).get(name.partition(".")[0])  # None: no collective
        if call is not None:
            self._count(call, args)

    def take(self) -> dict[str, CollectiveStats]:
        """The counts since the last call, by collective."""
        stats, self._stats = self._stats, {}
        return stats

    def _count(self, call: _Call, args: tuple[Any, ...]) -> None:
        ranks = _ranks(args[call.group])
        full = _bytes(args[call.payload]) if call.payload >= 0 else 0
        if call.share >= 0:
            full *= args[call.share]
        stats = self._stats.setdefault(call.collective, CollectiveStats())
        stats.calls += 1
        stats.payload_bytes += full
        if ranks > 1:  # a group of one rank sends nothing
            to_one = call.collective == "send"  # all of the tensor goes to one other rank
            stats.ring_bytes += full if to_one else WEIGHT[call.collective] * full * (ranks - 1) // ranks
            stats.textbook_bytes += WEIGHT[call.collective] * full


def _bytes(values: Any) -> int:
    """Bytes of a tensor's elements, or of all in nested lists."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(_bytes(value) for value in values)


def _ranks(group: Any) -> int:
    """The number of ranks in a collective's group."""
    if isinstance(group, str):
        # torch has no public function for this; tests/measure/test_collectives.py watches that it stays.
        resolve: Any = getattr(distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009
        return int(resolve(group).size())
    if isinstance(group, distributed.ProcessGroup):
        return int(group.size())
    return int(distributed.ProcessGroup.unbox(group).size())
