"""A device with streams on a CPU, whose copies run as late as they may: when something waits for them.

It stands for `torch.cuda` in architecture/offloading.py. A copy that the present stream does not wait for is not done
when its target is read. A source whose memory was let go of before the copy ran is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Event:
    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class Stream:
    """A queue of copies. An event is a place in the queue: who waits for it runs all copies before it."""

    def __init__(self, *_: Any) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.done, self.ordered = 0, 0

    def wait_stream(self, other: Stream) -> None:
        self.ordered += 1  # the present stream of a CPU has done all that it was asked

    def wait_event(self, event: Event) -> None:
        event.run()

    def record_event(self) -> Event:
        place = len(self.waiting)

        def run() -> None:
            while self.done < place:
                self.waiting[self.done]()
                self.done += 1

        return Event(run)


class LateCopies:
    """The functions of `torch.cuda` that the module uses, and what it did."""

    def __init__(self) -> None:
        self.present, self.copying = Stream(), Stream()

    def Stream(self, *_: Any) -> Stream:  # noqa: N802  # torch.cuda's name
        return self.copying

    def current_stream(self, *_: Any) -> Stream:
        return self.present

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream.ordered == len(stream.waiting) + 1, "a copy that does not wait for the present stream"
        with _Queueing(stream):
            yield


class _Queueing(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, func
        target, source = args[:2]
        sizes = [(each.size(), each.stride(), each.storage_offset(), each.dtype) for each in (target, source)]
        storages = [weakref.ref(each.untyped_storage()) for each in (target, source)]

        def copy() -> None:
            found = [storage() for storage in storages]
            assert None not in found, "memory was let go of before its copy"
            tensors = [
                torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
                for storage, (size, stride, offset, dtype) in zip(found, sizes, strict=True)
            ]
            with torch.no_grad():
                tensors[0].copy_(tensors[1])

        self.stream.waiting.append(copy)
        return target
