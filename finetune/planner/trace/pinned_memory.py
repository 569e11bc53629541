"""Pinned host memory, as torch's host allocator gives it to a GPU's process.

`CachingHostAllocator` rounds each request up to a power of two. It reuses a freed block for a later request that rounds
to the same size, but never returns it to the system. So the pinned gradients of FSDP2's offload still occupy memory
after the update has freed them. With float32 weights of Llama-3.1-8B on one GPU:

    each layer     3 x 224 MiB -> 3 x 256, 2 x 64 and 2 x 16 unrounded       928 MiB instead of 832
    embeddings     2 x 1.96 GiB -> 2 x 2
    in all         33.0 GiB for weights, and 33.0 for gradients; the values of each are 29.9 GiB
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from finetune.measure.host_memory import pinned_bytes
from finetune.planner.trace.recorder import AroundOperation, Recorder


def pinned_memory(recorder: Recorder) -> AroundOperation:
    """Give each operation that pins memory a result as large as the block that torch's allocator takes.

    Three operations pin: `pin_memory()`, a factory with `pin_memory=True`, and a copy from the GPU to the host with
    `non_blocking=True` (ATen/native/TensorConversions.cpp: `pin_out`).
    """
    pinned: set[int] = set()  # ids of live storages
    ended: deque[tuple[int, int]] = deque()  # id and bytes of storages that ended in any thread, not booked yet
    cached: dict[int, list[torch.Tensor]] = {}  # bytes -> freed blocks that the allocator keeps

    def book_ends() -> None:
        while ended:
            identity, nbytes = ended.popleft()
            pinned.discard(identity)
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            recorder.ledger.see(block)
            recorder.mark([block], "other")
            cached.setdefault(nbytes, []).append(block)

    def allocate(like: torch.Tensor) -> torch.Tensor:
        """A pinned tensor with the meta tensor's shape, strides and dtype."""
        extent = 0
        if like.numel():  # elements from the first to the last: [2, 3] with strides (4, 1) spans 1 + 4 + 2 = 7
            extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        nbytes = pinned_bytes(extent * like.itemsize)
        if cached.get(nbytes):
            cached[nbytes].pop()
        block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        recorder.ledger.see(block)
        storage = block.untyped_storage()
        pinned.add(id(storage))
        weakref.finalize(storage, ended.append, (id(storage), nbytes)).atexit = False
        return block.view(like.dtype).as_strided(like.shape, like.stride())

    def around(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        book_ends()
        name = str(func)
        if name == "aten.is_pinned.default":
            return id(args[0].untyped_storage()) in pinned
        if name == "aten._pin_memory.default":
            result = allocate(torch.empty_like(args[0], device="meta"))
            recorder.mark([result], recorder.component(args[0]) or "other", certain=False)
            return result
        if kwargs.get("pin_memory"):
            return allocate(func(*args, **kwargs | {"device": torch.device("meta"), "pin_memory": False}))
        if name == "aten._to_copy.default" and kwargs.get("non_blocking") and args[0].device.type != "cpu":
            to = kwargs.get("device")
            if to is not None and torch.device(to).type == "cpu":
                return allocate(func(*args, **kwargs | {"device": torch.device("meta"), "non_blocking": False}))
        return run()

    return around
