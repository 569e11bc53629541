"""One rank of the lecture: `python -m lectures.collectives.ranks FOLDER RANK MIB`; its figures as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.measure.collectives import Traffic

RANKS = 4
ROUNDS, PLAYED_ROUNDS = 5, 3  # of each timed operation, of those over a played link; the median counts
PIECES = 8  # that a ring's tensor is sent in
LINK = 10e6  # bytes/s of the link that is played by sleeping
PLAYED_MIB = 8  # of the broadcasts over it: 0.84 s for one link to send
TIMEOUT = timedelta(seconds=60)
Send = Callable[[Tensor, int], None]


class Counted(TorchDispatchMode):
    """Counts the collectives of a block, as torch's dispatcher sees them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.traffic.see(func, args)
        return func(*args, **(kwargs or {}))


def broadcast(row: Tensor) -> Tensor:
    """Every rank gets rank 0's row."""
    dist.broadcast(row, 0)
    return row


def reduce(row: Tensor) -> Tensor:
    """Rank 0 gets the sums. The others' rows are the operation's to use, so a copy is returned of each."""
    result = row.clone()
    dist.reduce(result, 0)
    return result if dist.get_rank() == 0 else row


def all_reduce(row: Tensor) -> Tensor:
    """Every rank gets the sums."""
    dist.all_reduce(row)
    return row


def all_gather(row: Tensor) -> Tensor:
    """Every rank gives its own column's piece and gets those of all ranks."""
    piece = row.chunk(RANKS)[dist.get_rank()].contiguous()
    result = torch.empty_like(row)
    dist.all_gather_into_tensor(result, piece)
    return result


def reduce_scatter(row: Tensor) -> Tensor:
    """Every rank gets one piece of the sums."""
    result = torch.empty_like(row.chunk(RANKS)[0])
    dist.reduce_scatter_tensor(result, row)
    return result


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Broadcast": broadcast,
    "Reduce": reduce,
    "AllReduce": all_reduce,
    "AllGather": all_gather,
    "ReduceScatter": reduce_scatter,
}


def example_row(rank: int) -> list[int]:
    """in[r][c]: the rank's number in front of the column's."""
    return [10 * (rank + 1) + column for column in range(RANKS)]


def naive_broadcast(tensor: Tensor, send: Send) -> None:
    """Rank 0 sends all of it to one rank after another."""
    if dist.get_rank() == 0:
        for other in range(1, RANKS):
            send(tensor, other)
    else:
        dist.recv(tensor, 0)


def ring_broadcast(tensor: Tensor, send: Send) -> None:
    """Each rank passes a piece on while the next piece comes in."""
    rank = dist.get_rank()
    for piece in tensor.chunk(PIECES):
        if rank > 0:
            dist.recv(piece, rank - 1)
        if rank < RANKS - 1:
            send(piece, rank + 1)


def played_link(tensor: Tensor, other: int) -> None:
    """Send as a link of LINK bytes/s would: the rank sleeps for as long as its bytes would be on the way."""
    time.sleep(tensor.nbytes / LINK)
    dist.send(tensor, other)


def plain_send(tensor: Tensor, other: int) -> None:
    """As fast as gloo and this machine are."""
    dist.send(tensor, other)


def timed(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median seconds until the last rank is done."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def run_operation(operation: Callable[[Tensor], Tensor], rank: int, elements: int) -> dict[str, Any]:
    """The example's rows after it; bytes and seconds of a tensor of so many float32 elements."""
    after = operation(torch.tensor(example_row(rank), dtype=torch.int64)).tolist()
    tensor = torch.ones(elements)
    with Counted() as counted:
        operation(tensor)
    (stats,) = counted.traffic.take().values()
    return {"after": after, **vars(stats), "seconds": timed(lambda: operation(tensor))}


def run_broadcast(way: Callable[[Tensor, Send], None], send: Send, rank: int, elements: int) -> dict[str, Any]:
    """Bytes that this rank sends in it, and its seconds. Asserts that every rank has rank 0's numbers."""
    tensor = torch.arange(elements, dtype=torch.float32) if rank == 0 else torch.zeros(elements)
    sent = 0

    def counting(piece: Tensor, other: int) -> None:
        nonlocal sent
        sent += piece.nbytes
        dist.send(piece, other)

    way(tensor, counting)
    assert torch.equal(tensor, torch.arange(elements, dtype=torch.float32))
    rounds = PLAYED_ROUNDS if send is played_link else ROUNDS
    return {"sent_bytes": sent, "seconds": timed(lambda: way(tensor, send), rounds)}


def main(words: list[str]) -> None:
    """All of one rank, in the order that every rank has."""
    folder, rank, elements = Path(words[0]), int(words[1]), int(words[2]) * 2**20 // 4
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    played = PLAYED_MIB * 2**20 // 4
    result = {
        "before": example_row(rank),
        "operations": {name: run_operation(each, rank, elements) for name, each in OPERATIONS.items()},
        "broadcasts": {
            "naive": run_broadcast(naive_broadcast, plain_send, rank, elements),
            "ring": run_broadcast(ring_broadcast, plain_send, rank, elements),
        },
        "played": {
            "naive": run_broadcast(naive_broadcast, played_link, rank, played),
            "ring": run_broadcast(ring_broadcast, played_link, rank, played),
        },
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
