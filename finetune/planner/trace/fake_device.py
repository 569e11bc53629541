"""A fake accelerator, "pretend": a device that is not the host, in a torch without a GPU.

torch lets a program register one device of its own ("PrivateUse1"). This one computes nothing, because fake tensors run
no kernels. A trace on it takes a GPU run's branches (streams, pinned host memory, fused and foreach kernels, CUDA's
lists for autocast, CUDA's attention), and separates device memory from host memory.

The registration cannot be undone: from then on torch sees an accelerator in this process. So do not register it in a
process that trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.planner.trace.cuda_dispatch import register_dispatch

DEVICE_NAME = "pretend"


class _Event(torch.Event):
    """torch's own event. A backend in Python cannot wait for that; here everything before it has completed."""

    def synchronize(self) -> None:
        """Return at once."""


class _Stream(torch.Stream):
    """torch's own stream, with events that can be waited for."""

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """An event at this place in the stream."""
        event = event or _Event(device=torch.device(DEVICE_NAME, 0))
        event.record(self)
        return event


class _Module:
    """The functions of `torch.cuda`, as `torch.pretend`: one device, always idle."""

    def __init__(self) -> None:
        self.streams = 0  # created so far; number 0 is the default stream
        self.current = 0

    def is_available(self) -> bool:
        """No: callers ask because they want to compute on it."""
        return False

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _do_nothing(self, *_: Any) -> None:
        pass

    set_device = synchronize = manual_seed = manual_seed_all = set_rng_state = _do_nothing

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")  # as large as CUDA's

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def Stream(self, *_: Any, **__: Any) -> torch.Stream:  # noqa: N802  # torch.cuda's name
        self.streams += 1
        return _stream(self.streams)

    def Event(self, *_: Any, **__: Any) -> torch.Event:  # noqa: N802  # torch.cuda's name
        return _Event(device=torch.device(DEVICE_NAME, 0))

    def current_stream(self, *_: Any) -> torch.Stream:
        return _stream(self.current)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before, self.current = self.current, stream.stream_id
        try:
            yield
        finally:
            self.current = before


def _stream(number: int) -> torch.Stream:
    device = torch.Stream(device=torch.device(DEVICE_NAME, 0))
    return _Stream(stream_id=number, device_index=0, device_type=device.device_type)


_module = _Module()


def stream_in_use() -> int:
    """The current stream's number. The allocator does not reuse one stream's memory on another."""
    return _module.current


def pretend_device() -> torch.device:
    """The device; the first call registers it and CUDA's dispatch for it."""
    if not hasattr(torch, DEVICE_NAME):
        # torch's name for it is not public yet (2.11 to 2.13); tests/planner/test_fake_device.py watches it.
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register

        register(DEVICE_NAME, backend_module=_module)
        register_dispatch(DEVICE_NAME)
    return torch.device(DEVICE_NAME, 0)
