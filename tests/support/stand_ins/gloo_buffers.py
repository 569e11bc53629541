"""The buffers of gloo's collectives, dropped before the call returns: what a rank tracks has then one answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from finetune.architecture.operations import nested_tensors

SECONDS = 60.0  # after which a collective's buffers are held by somebody else
# What FSDP2 and DeepSpeed call, and what DTensor calls; "single" are names since torch 2.13.
COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"),
)
FUNCTIONAL = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor")


def let_go_at_once() -> None:
    """gloo's own threads drop a collective's buffers a moment after it is done; tracked bytes would depend on it."""
    for name in COLLECTIVES:
        if hasattr(torch.distributed, name):
            dropped = _and_dropped(getattr(torch.distributed, name))
            for module in (torch.distributed, distributed_c10d):  # in which collectives of objects look it up
                setattr(module, name, dropped)
    for name in FUNCTIONAL:
        setattr(_functional_collectives, name, _waited_for(getattr(_functional_collectives, name)))


def _and_dropped(collective: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = list(nested_tensors((args, kwargs)))
        before = _holders(tensors)
        work = collective(*args, **kwargs)
        if work is not None:
            work.wait()
            work = _Done()
        _wait_until_held_by(tensors, before)
        return work

    return call


def _waited_for(collective: Any) -> Any:
    """Of a functional collective, whose result is a new tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        result = result.trigger_wait() if isinstance(result, AsyncCollectiveTensor) else result
        _wait_until_held_by([result], _holders([torch.empty(1)]))
        return result

    return call


class _Done:
    """Stands for the handle of a collective that is over, which would hold its buffers."""

    def wait(self) -> None:
        pass


def _holders(tensors: Sequence[torch.Tensor]) -> int:
    """Who holds these tensors and their storages, threads of C++ too. Neither count is public; were they to count
    otherwise, tracked and planned bytes would differ."""
    storages = sum(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors)
    return storages + sum(tensor._use_count() for tensor in tensors)


def _wait_until_held_by(tensors: Sequence[torch.Tensor], before: int) -> None:
    """Until gloo's threads have dropped them, and the copies that the same threads made for them."""
    end = time.monotonic() + SECONDS
    while _holders(tensors) > before or _another_thread_runs():
        assert time.monotonic() < end, f"{_holders(tensors)} hold these tensors, {before} did before: {tensors}"
        time.sleep(0.0005)


def _another_thread_runs() -> bool:
    """Whether a thread of this process other than this one runs or waits for a core."""
    own = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if int(task.name) != own and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
