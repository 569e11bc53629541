"""Bytes of live tensors by device: on a CPU the substitute for CUDA's allocator statistics, exact to the byte.

Each storage is counted once, however many tensors view it. The resident set would not do: the allocator's spare pages,
libraries and Python itself are larger than a small model. Bytes that a kernel allocates and frees within one operation
are not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Key = int
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types without parts, which are most of what is seen
# Called at each change with the storage's serial number (from 0, never reused), its device, and its bytes from now on;
# with serial number NONE at the begin of a phase.
NONE = -1
Callback = Callable[[int, str, int], None]


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]  # its callback notes the storage's end
    device: str
    nbytes: int
    serial: int


class LiveTensors:
    """A ledger of live storages. `see` each operation's inputs and outputs; frees are noticed without a call.

    torch keeps one Python object per storage as long as the storage lives. So its `id` is a key, and a weak reference
    to it ends with the storage, even if only C++ holds it: a tensor saved for backward, a gradient bucket.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = (), callback: Callback | None = None) -> None:
        self.fake_mode: Any = None  # set by the planner: only fake tensors of this mode are counted
        self._callback = callback
        self._seen = 0
        self._storages: dict[Key, _Storage] = {}
        # Storages may end in any thread and in the middle of any line here, so their ends are queued and booked later.
        self._ended: deque[Key] = deque()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self.see(list(existing))

    def see(self, values: Any) -> None:
        """Count the storages of all tensors in `values`: tensors, or nested lists, tuples and dicts with them."""
        self.book_ends()
        self._walk(values)

    def live(self, device: str) -> int:
        """Bytes of live storages on this device type ("cpu", "cuda")."""
        self.book_ends()
        return self._live.get(device, 0)

    def peak(self, device: str) -> int:
        """The most that was live since `restart_peak`."""
        return max(self.live(device), self._peak.get(device, 0))

    def restart_peak(self) -> None:
        """Begin a phase."""
        self.book_ends()
        self._peak = dict(self._live)
        if self._callback is not None:
            self._callback(NONE, "", 0)

    @contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Book each `UntypedStorage.resize_` while the block runs.

        FSDP2 frees and reallocates its gathered parameters by it, and a dispatch mode does not see it.
        """
        storage_class: Any = torch.UntypedStorage
        original = storage_class.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            ledger.book_ends()
            known = ledger._storages.get(id(storage))
            ledger._count(storage, storage.device.type if known is None else known.device)
            return result

        storage_class.resize_ = resize_
        try:
            yield
        finally:
            storage_class.resize_ = original

    def _walk(self, values: Any) -> None:
        kind = type(values)
        if kind in PLAIN and self.fake_mode is None and values.layout is torch.strided:
            self._count(values.untyped_storage(), values.device.type)
        elif isinstance(values, torch.Tensor):
            for tensor in parts(values):
                # Ignore the fake tensors that DTensor infers shapes with: they hold no memory.
                if getattr(tensor, "fake_mode", None) is self.fake_mode:
                    self._count(tensor.untyped_storage(), tensor.device.type)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self._walk(value)
        elif isinstance(values, dict):
            for value in values.values():
                self._walk(value)

    def _count(self, storage: torch.UntypedStorage, device: str) -> None:
        """`device` is the tensor's: a fake tensor's storage is on meta, whatever device the tensor has."""
        if device == "meta":  # meta tensors hold no memory
            return
        known = self._storages.get(id(storage))
        nbytes = storage.nbytes()
        if known is None:
            reference = weakref.ref(storage, partial(_enqueue, self._ended, id(storage)))
            self._storages[id(storage)] = _Storage(reference, device, nbytes, self._seen)
            self._add(self._seen, device, nbytes, nbytes)
            self._seen += 1
        elif known.nbytes != nbytes:
            self._add(known.serial, device, nbytes - known.nbytes, nbytes)
            known.nbytes = nbytes

    def serial(self, storage: torch.UntypedStorage) -> int | None:
        """The serial number of a live storage; None for one not seen yet."""
        known = self._storages.get(id(storage))
        if known is None:
            return None
        return known.serial

    def _add(self, serial: int, device: str, change: int, nbytes: int) -> None:
        live = self._live[device] = self._live.get(device, 0) + change
        if live > self._peak.get(device, 0):
            self._peak[device] = live
        if self._callback is not None:
            self._callback(serial, device, nbytes)

    def book_ends(self) -> None:
        """Subtract the storages that have ended by now."""
        while self._ended:
            ended = self._storages.pop(self._ended.popleft())
            self._add(ended.serial, ended.device, -ended.nbytes, 0)


def _enqueue(queue: deque[Key], key: Key, _: weakref.ref[torch.UntypedStorage]) -> None:
    queue.append(key)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage in `tensor`: itself, or a wrapper's (DTensor) parts; none for a sparse tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # torch 2.13 names a DTensor's mesh here too
                yield from parts(inner)
    elif tensor.layout == torch.strided:
        yield tensor
