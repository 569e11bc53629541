"""Limits the memory that libraries keep in a process on a CPU.

oneDNN compiles kernels for each product's shape, and rows have ever-new lengths. It keeps kernels for 1,024 products,
and so does torch's wrapper around it: a kernel that one drops, the other still holds. Figures: docs/log.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from finetune.output_stream import one_line

_SPINS = "1000"  # a few microseconds, then a waiting thread of GNU's OpenMP sleeps
_KEPT = "256"  # products, 0.3 MB each; a row of SmolLM2 with adapters takes about 60, forward and backward


def readable_threads(environment: MutableMapping[str, str] = os.environ) -> str:
    """Make the thread counts numbers that every library reads. Returns a line about a change; empty without one.

    OpenMP takes a list by level (4,2), and a container's limit may be written there (500m). Accelerate takes a number.
    """
    changes = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environment.get(name)
        if value is None or (value.strip().isdecimal() and int(value) > 0):
            continue
        first = value.split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            environment[name] = first
            changes.append(f"{name}={one_line(value, 40)}: its first number counts, {first}")
        else:
            del environment[name]
            changes.append(f"{name}={one_line(value, 40)} is no number of threads and is left out")
    return "; ".join(changes)


def bound_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch's libraries read once, at their first product. The user's own settings stay.

    Call it before torch is imported. A waiting thread spins for microseconds and then sleeps: a quickstart step takes
    0.46 s on two cores, 1.0 s beside another program. With torch's longer spinning it takes 0.41 s and 1.5 to 1.8 s.
    Threads that sleep at once made 0.90 s out of an earlier 0.57 s (docs/log.md).
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in environment:  # oneDNN's older name of the same, which it reads second
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT)
    environment.setdefault("LRU_CACHE_CAPACITY", _KEPT)


def give_back_freed_memory() -> None:
    """Make glibc return its heap's free pages to the kernel; elsewhere do nothing.

    One small allocation that lives on at the end of a heap with freed activations keeps all of them resident.
    """
    if sys.platform != "linux":
        return
    import ctypes  # `finetune check` has no use for it

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
