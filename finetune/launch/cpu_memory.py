"""What libraries keep of a process's memory on a CPU, bounded.

oneDNN compiles kernels for each shape of a product, and rows have ever-new lengths. It keeps those of 1,024 products,
and so does torch's wrapper of it; what one of the two lets go the other still holds. Figures: docs/log.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

_SPINS = "1000"  # a few microseconds, then a waiting thread of GNU's OpenMP sleeps
_KEPT = "256"  # products, 0.3 MB each; a row of SmolLM2 with adapters takes about 60, forward and backward


def bound_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch's libraries read once, at their first product; what the user has set stays.

    To be called before torch is imported. A waiting thread spins for microseconds and then sleeps: a step of the
    quickstart takes 0.46 s on two cores, 1.0 s beside another program; where threads spin for as long as torch would
    have them, 0.41 s and 1.5 to 1.8 s. Threads that sleep at once made 0.90 s of an earlier 0.57 s (docs/log.md).
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in environment:  # oneDNN's older name of the same, which it reads second
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT)
    environment.setdefault("LRU_CACHE_CAPACITY", _KEPT)


def give_back_freed_memory() -> None:
    """Have glibc return the free pages of its heap to the kernel; elsewhere nothing.

    A small allocation that lives on, at the end of a heap of freed activations, keeps all of them resident.
    """
    if sys.platform != "linux":
        return
    import ctypes  # `finetune check` has no use for it

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
