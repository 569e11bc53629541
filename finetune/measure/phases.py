"""Memory, time and traffic per phase (load, forward, backward, step, save), on every rank; free when off.

CUDA reports its allocator's bytes, and the tensors in host memory are counted beside them: offloaded state is there.
On a CPU all is host memory, counted by its tensors.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents the class under this name alone

from finetune.measure.collectives import Moved, Traffic
from finetune.measure.live_tensors import TensorBytes

GIB = 2**30


@dataclass
class Phase:
    """What one phase cost on this rank since the last `take`. `host` is CPU memory; on a CPU it is all there is."""

    seconds: float = 0.0
    allocated_bytes: int = 0  # at the end of the phase, latest
    peak_bytes: int = 0
    host_allocated_bytes: int = 0
    host_peak_bytes: int = 0
    moved: dict[str, Moved] = field(default_factory=dict)  # by collective

    def add(self, seconds: float, memory: dict[str, int], moved: dict[str, Moved]) -> None:
        """One more run of the phase."""
        self.seconds += seconds
        self.allocated_bytes, self.host_allocated_bytes = memory["allocated"], memory["host_allocated"]
        self.peak_bytes = max(self.peak_bytes, memory["peak"])
        self.host_peak_bytes = max(self.host_peak_bytes, memory["host_peak"])
        for name, more in moved.items():
            before = asdict(self.moved.get(name, Moved()))
            self.moved[name] = Moved(**{key: before[key] + value for key, value in asdict(more).items()})

    def as_json(self) -> dict[str, Any]:
        """The figures of its line in metrics.jsonl."""
        return {
            "seconds": self.seconds,
            "allocated_gib": self.allocated_bytes / GIB,
            "peak_gib": self.peak_bytes / GIB,
            "host_allocated_gib": self.host_allocated_bytes / GIB,
            "host_peak_gib": self.host_peak_bytes / GIB,
            "collectives": {name: moved.calls for name, moved in self.moved.items()},
            "bytes": {name: moved.payload_bytes for name, moved in self.moved.items()},
            "ring_bytes": sum(moved.ring_bytes for moved in self.moved.values()),
            "textbook_bytes": sum(moved.textbook_bytes for moved in self.moved.values()),
        }


class Phases:
    """A stopwatch and a gauge; with `enabled=False` a `with` over it does nothing."""

    def __init__(
        self,
        device: torch.device,
        enabled: bool,
        existing: Iterable[torch.Tensor] = (),
        ledger: TensorBytes | None = None,
        *,
        watch: bool = True,
    ) -> None:
        """`existing` are tensors made before the first phase, to be counted from its start; a planner brings a
        `ledger` that tells it of each storage. Without `watch` nothing looks at each operation, so no host memory and
        no traffic are counted: on CUDA, where the allocator knows the rest, that costs nothing."""
        self.device = device
        self.enabled = enabled
        self.current = ""  # the phase that runs, or that an error ended
        self._watch = watch
        self._seen: dict[str, Phase] = {}
        self._storages = ledger or TensorBytes(existing if enabled else ())
        self._traffic = Traffic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`; waits for the device at both ends, so only when enabled."""
        if not self.enabled:
            self.current = name
            yield
            self.current = ""
            return
        self._settle()
        self._storages.book_ends()  # of what went since the last phase, in none
        self.current = name
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._storages.restart_peak()
        start = time.perf_counter()
        with self._watching() if self._watch else nullcontext():
            yield
        self._settle()
        seconds = time.perf_counter() - start
        self._seen.setdefault(name, Phase()).add(seconds, self._memory(), self._traffic.take())
        self.current = ""

    @property
    def seen(self) -> dict[str, Phase]:
        """What was measured since the last `take`."""
        return dict(self._seen)

    def take(self) -> dict[str, Phase]:
        """What was measured since the last call."""
        seen, self._seen = self._seen, {}
        return seen

    def lines(self, step: int) -> list[dict[str, Any]]:
        """Since the last call, a line of metrics for each rank and phase: on rank 0 of all ranks, elsewhere none.

        A collective of its own, so every rank must call it; when off it is none, and there are no lines.
        """
        if not self.enabled:
            return []
        mine = {name: phase.as_json() for name, phase in self.take().items()}
        ranks = _gather(mine)
        return [
            {"kind": "phase", "step": step, "rank": rank, "phase": name, **figures}
            for rank, phases in enumerate(ranks)
            for name, figures in phases.items()
        ]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with _loading_in_this_thread(), self._storages.watch_resizes(), _Watch(self._storages, self._traffic):
            yield

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self) -> dict[str, int]:
        host = {"host_allocated": self._storages.live("cpu"), "host_peak": self._storages.peak("cpu")}
        if self.device.type != "cuda":
            kind = self.device.type
            return {"allocated": self._storages.live(kind), "peak": self._storages.peak(kind), **host}
        allocated, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        return {"allocated": allocated, "peak": peak, **host}


class _Watch(TorchDispatchMode):
    """Shows each operation to the ledger of storages and to the count of collectives.

    Autograd carries a mode into backward, DDP's C++ reducer included.
    """

    def __init__(self, storages: TensorBytes, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._storages = storages
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # a plan's tensor is asked where it is; real ones are not by this way
            return args[0].fake_device
        # A wrapper (DTensor) goes first: what it does to its parts comes back here, with its collectives.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self._traffic.see(func, args)
        result = func(*args, **(kwargs or {}))
        self._storages.see((args, kwargs, result))
        return result


@contextmanager
def _loading_in_this_thread() -> Iterator[None]:
    """transformers reads weights in threads of its own, which a dispatch mode does not reach, unless told not to."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _gather(value: Any) -> list[Any]:
    """The value of each rank, on rank 0; nothing elsewhere."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(value, values)
    return values or []


def peak_bytes(device: torch.device) -> int:
    """The most that CUDA's allocator handed out, else the largest resident set of this process, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
