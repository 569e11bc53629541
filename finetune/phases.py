"""Memory and time per phase (load, forward, backward, step, save); free when off.

CUDA reports its allocator's allocated and peak bytes. A CPU has no allocator that counts, so there the resident set
of the process stands for both.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

GIB = 2**30


@dataclass
class Phase:
    """What one phase cost since the last `take`."""

    seconds: float = 0.0
    allocated_bytes: int = 0  # at the end of the phase, latest
    peak_bytes: int = 0


@dataclass
class Phases:
    """A stopwatch and a memory gauge; with `enabled=False` a `with` over it does nothing."""

    device: torch.device
    enabled: bool
    _seen: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`; waits for the device at both ends, so only when enabled."""
        if not self.enabled:
            yield
            return
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        yield
        self._settle()
        phase = self._seen.setdefault(name, Phase())
        phase.seconds += time.perf_counter() - start
        phase.allocated_bytes, peak = memory_now(self.device)
        phase.peak_bytes = max(phase.peak_bytes, peak)

    def take(self) -> dict[str, Phase]:
        """What was measured since the last call."""
        seen, self._seen = self._seen, {}
        return seen

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory_now(device: torch.device) -> tuple[int, int]:
    """Allocated and peak bytes: of CUDA's allocator, else of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    resident = int(psutil.Process().memory_info().rss)
    return resident, max(resident, peak_bytes(device))


def peak_bytes(device: torch.device) -> int:
    """The most that CUDA's allocator handed out, else the largest resident set of this process, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
