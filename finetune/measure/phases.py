"""Memory, time and collectives of each phase (load, forward, backward, step, save), on every rank; free when off.

On CUDA the allocator reports its bytes, and host tensors are counted too, since offloaded state is there. On a CPU all
memory is host memory, counted by its tensors.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents the class under this name alone

from finetune.files import loading_in_this_thread
from finetune.measure.collectives import CollectiveStats, Traffic
from finetune.measure.host_memory import available_bytes
from finetune.measure.live_tensors import LiveTensors
from finetune.wording import GIB


@dataclass
class Phase:
    """The cost of one phase on this rank since the last `take`. `host` is CPU memory; on a CPU it equals the rest."""

    seconds: float = 0.0
    allocated_bytes: int = 0  # at the end of the phase, latest
    peak_bytes: int = 0
    host_allocated_bytes: int = 0
    host_peak_bytes: int = 0
    collectives: dict[str, CollectiveStats] = field(default_factory=dict)  # by name

    def add(self, seconds: float, memory: dict[str, int], collectives: dict[str, CollectiveStats]) -> None:
        """One more run of the phase."""
        self.seconds += seconds
        self.allocated_bytes, self.host_allocated_bytes = memory["allocated"], memory["host_allocated"]
        self.peak_bytes = max(self.peak_bytes, memory["peak"])
        self.host_peak_bytes = max(self.host_peak_bytes, memory["host_peak"])
        for name, more in collectives.items():
            before = asdict(self.collectives.get(name, CollectiveStats()))
            total = {key: before[key] + value for key, value in asdict(more).items()}
            self.collectives[name] = CollectiveStats(**total)

    def as_json(self) -> dict[str, Any]:
        """The figures of its line in metrics.jsonl."""
        return {
            "seconds": self.seconds,
            "allocated_gib": self.allocated_bytes / GIB,
            "peak_gib": self.peak_bytes / GIB,
            "host_allocated_gib": self.host_allocated_bytes / GIB,
            "host_peak_gib": self.host_peak_bytes / GIB,
            "collectives": {name: stats.calls for name, stats in self.collectives.items()},
            "bytes": {name: stats.payload_bytes for name, stats in self.collectives.items()},
            "ring_bytes": sum(stats.ring_bytes for stats in self.collectives.values()),
            "textbook_bytes": sum(stats.textbook_bytes for stats in self.collectives.values()),
        }


class Phases:
    """Measures named phases: `with phases("forward"): ...`. With `enabled=False` it only notes the current one."""

    def __init__(
        self,
        device: torch.device,
        enabled: bool,
        existing: Iterable[torch.Tensor] = (),
        ledger: LiveTensors | None = None,
        *,
        watch: bool = True,
    ) -> None:
        """Args:
        existing: Tensors made before the first phase, counted from its start.
        ledger: The planner's, whose callback records each storage.
        watch: Examine operations. Without it, host memory and collectives are not counted; on CUDA the allocator
            counts the rest, so measuring is free.
        """
        self.device = device
        self.enabled = enabled
        self.current = ""  # the phase that runs, or in which an error was raised
        self._watch = watch
        self._seen: dict[str, Phase] = {}
        self._storages = ledger or LiveTensors(existing if enabled else ())
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
        self._storages.book_ends()  # storages freed since the last phase belong to none
        self.current = name
        if self.device.type == "cuda":
            restart_peak(self.device)
        self._storages.restart_peak()
        start = time.perf_counter()
        with ExitStack() as stack:
            if self._watch:
                stack.enter_context(loading_in_this_thread())
                stack.enter_context(self._storages.watch_resizes())
                stack.enter_context(_Watch(self._storages, self._traffic))
            yield
        self._settle()
        seconds = time.perf_counter() - start
        self._seen.setdefault(name, Phase()).add(seconds, self._memory(), self._traffic.take())
        self.current = ""

    @property
    def seen(self) -> dict[str, Phase]:
        """The measurements since the last `take`."""
        return dict(self._seen)

    def take(self) -> dict[str, Phase]:
        """The measurements since the last call."""
        phases, self._seen = self._seen, {}
        return phases

    @contextmanager
    def measured(self) -> Iterator[dict[str, Phase]]:
        """The block's phases, filled in at its end; measured even where the run does not measure its phases."""
        enabled, self.enabled = self.enabled, True
        phases: dict[str, Phase] = {}
        yield phases
        phases |= self.take()
        self.enabled = enabled

    def lines(self, step: int) -> list[dict[str, Any]]:
        """Return the metrics lines since the last call, one per rank and phase. Only rank 0 gets lines.

        This is a collective, so every rank must call it. If phases are not measured, it returns an empty list at once.
        """
        if not self.enabled:
            return []
        own = {name: phase.as_json() for name, phase in self.take().items()}
        ranks: list[Any] = [own]
        if distributed.is_available() and distributed.is_initialized():
            ranks *= distributed.get_world_size()
            distributed.gather_object(own, ranks if distributed.get_rank() == 0 else None)
            if distributed.get_rank() != 0:
                return []
        return [
            {"kind": "phase", "step": step, "rank": rank, "phase": name, **figures}
            for rank, phases in enumerate(ranks)
            for name, figures in phases.items()
        ]

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
    """Pass each operation to the storage ledger and to the collective counter.

    Autograd keeps a dispatch mode active in backward, also for DDP's C++ reducer.
    """

    def __init__(self, storages: LiveTensors, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._storages = storages
        self._traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch compiles under this mode too. The mode then sees a compiled graph's calls, not the operations it
        fuses."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # of fake tensors alone; real ones do not dispatch it
            return args[0].fake_device
        # A wrapper (DTensor) handles the operation first: those on its parts, and its collectives, come back here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self._traffic.see(func, args)
        result = func(*args, **(kwargs or {}))
        self._storages.see((args, kwargs, result))
        return result


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes."""

    total: int
    taken: int  # by this process; on a CPU by all processes, and beyond a container's limit
    peak: int  # of this process so far
    others: int = 0  # taken by other programs, where that is known
    sharing: int = 1  # ranks that have it together

    @property
    def free(self) -> int:
        """Bytes for this process, with what the allocator keeps for later."""
        return (self.total - self.taken - self.others) // self.sharing


def memory_of(device: torch.device) -> Memory:
    """The device's memory at this moment."""
    if device.type != "cuda":
        host = psutil.virtual_memory()
        taken, ranks = host.total - min(host.total, available_bytes()), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return Memory(host.total, taken, peak_bytes(device), sharing=ranks)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return Memory(total, torch.cuda.memory_allocated(device), peak_bytes(device), max(0, total - free - reserved))


def peak_of(device: torch.device) -> Literal["tensors", "process"]:
    """The subject of `peak_bytes`."""
    if device.type == "cuda":
        return "tensors"
    return "process"


def peak_bytes(device: torch.device) -> int:
    """This process's peak so far: CUDA's allocated bytes, or on a CPU the resident set."""
    if device.type == "cuda":
        return peak_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


# Each measured phase resets CUDA's peak, which would then be the last phase's alone. So it is kept before each reset.
_kept: dict[int, tuple[int, int]] = {}  # by GPU: bytes allocated and reserved at their peaks before the last reset


def restart_peak(device: torch.device) -> None:
    """Start a new peak for the next phase. The peaks below keep the earlier ones."""
    _kept[_index(device)] = peak_allocated(device), peak_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_allocated(device: torch.device) -> int:
    """Bytes of tensors at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[0], torch.cuda.max_memory_allocated(device))


def peak_reserved(device: torch.device) -> int:
    """Bytes that the allocator took of the GPU at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[1], torch.cuda.max_memory_reserved(device))


def give_back_cached_memory(device: torch.device) -> None:
    """Return cached memory without tensors to the GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    if device.index is None:
        return torch.cuda.current_device()
    return device.index
