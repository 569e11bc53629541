"""CUDA's memory peaks of this process so far, whatever was reset meanwhile.

Each measured phase resets the allocator's peak, which would then be the last phase's alone: without loading, and with
phases measured without forward and backward. So what the peak was is kept before each reset.
"""

from __future__ import annotations

import torch

_kept: dict[int, tuple[int, int]] = {}  # by GPU: bytes allocated and reserved at their peaks before the last reset


def restart_peak(device: torch.device) -> None:
    """Begin a peak of its own for what runs next; the peaks below keep what was before."""
    _kept[_index(device)] = peak_allocated(device), peak_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_allocated(device: torch.device) -> int:
    """Bytes of tensors at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[0], torch.cuda.max_memory_allocated(device))


def peak_reserved(device: torch.device) -> int:
    """Bytes that the allocator took of the GPU at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[1], torch.cuda.max_memory_reserved(device))


def give_back_cached_memory(device: torch.device) -> None:
    """Return what the allocator has cached, and no tensor lies in, to the GPU; on a CPU nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
