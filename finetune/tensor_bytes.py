"""Bytes of the tensors that live, by device: a CPU's substitute for CUDA's allocator, exact and free of other programs.

Counted are storages, once each, however many tensors view them; not the resident set, in which the allocator's spare
pages, libraries and Python itself drown a small model. Bytes that a kernel takes and gives back within one operation
are not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Key = int


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]  # kept, for its callback tells the end
    device: str
    nbytes: int


class TensorBytes:
    """A ledger of live storages. `see` what an operation took and gave; frees and resizes are seen by themselves.

    A storage has one Python object for as long as it lives (torch preserves it), so its identity is a key and a weak
    reference to it ends with the storage, also when only C++ holds it: a tensor saved for backward, a gradient bucket.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        self._storages: dict[Key, _Storage] = {}
        # Storages may end in any thread and in the middle of any line here, so their ends are queued, not booked.
        self._ended: deque[Key] = deque()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self.see(list(existing))

    def see(self, values: Any) -> None:
        """Count the storages of all tensors in `values`: tensors, or lists, tuples and dicts of them, nested."""
        self._book_ends()
        self._walk(values)

    def live(self, device: str) -> int:
        """Bytes of live storages on this type of device ("cpu", "cuda")."""
        self._book_ends()
        return self._live.get(device, 0)

    def peak(self, device: str) -> int:
        """The most that was live since `restart_peak`."""
        return max(self.live(device), self._peak.get(device, 0))

    def restart_peak(self) -> None:
        """Begin a phase."""
        self._book_ends()
        self._peak = dict(self._live)

    @contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Book `UntypedStorage.resize_` while the block runs.

        FSDP2 frees and refills its gathered parameters by it, and it is no operation that a dispatch mode sees.
        """
        storage_class: Any = torch.UntypedStorage
        original = storage_class.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            ledger._book_ends()
            ledger._count(storage)
            return result

        storage_class.resize_ = resize_
        try:
            yield
        finally:
            storage_class.resize_ = original

    def _walk(self, values: Any) -> None:
        if isinstance(values, torch.Tensor):
            for tensor in _parts(values):
                self._count(tensor.untyped_storage())
        elif isinstance(values, list | tuple):
            for value in values:
                self._walk(value)
        elif isinstance(values, dict):
            for value in values.values():
                self._walk(value)

    def _count(self, storage: torch.UntypedStorage) -> None:
        device = storage.device.type
        if device == "meta":  # fake and meta tensors hold nothing
            return
        known = self._storages.get(id(storage))
        nbytes = storage.nbytes()
        if known is None:
            reference = weakref.ref(storage, partial(_enqueue, self._ended, id(storage)))
            self._storages[id(storage)] = _Storage(reference, device, nbytes)
            self._add(device, nbytes)
        elif known.nbytes != nbytes:
            self._add(device, nbytes - known.nbytes)
            known.nbytes = nbytes

    def _add(self, device: str, nbytes: int) -> None:
        live = self._live[device] = self._live.get(device, 0) + nbytes
        if live > self._peak.get(device, 0):
            self._peak[device] = live

    def _book_ends(self) -> None:
        while self._ended:
            gone = self._storages.pop(self._ended.popleft())
            self._live[gone.device] -= gone.nbytes


def _enqueue(queue: deque[Key], key: Key, _: weakref.ref[torch.UntypedStorage]) -> None:
    queue.append(key)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors with storages of their own: of a wrapper (DTensor) its parts, of a sparse one none here."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor
