"""Environment variables that torch and cuBLAS read once on a GPU. Each rank sets its own under every launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

# torch reads one of these. If several are set, its releases differ in the one that they read.
# The first is the name since torch 2.11; newer versions warn about the others.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
COMPILE_WORKERS, MOST_COMPILE_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS", 8
REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")  # with any other, torch refuses matrix products in deterministic mode


def set_gpu_environment(*, deterministic: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set them for a training, before torch is imported. The user's own settings stay. A run on a CPU reads none.

    Rows have ever-new lengths, and so has every activation. With expandable segments the allocator's cache is one
    address range, so a request takes its end instead of a new segment. For a deterministic training cuBLAS gets eight
    workspaces with 4 MiB each. This is one of the two settings with which it sums in one order even when several
    streams multiply.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES) and not on_wsl():
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if deterministic:
        environment.setdefault(CUBLAS_VARIABLE, REPRODUCIBLE_WORKSPACES[0])


def share_compile_workers(cores: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch compile with at most this rank's cores, before torch is imported. The user's own setting stays.

    torch starts up to 32 compile workers for each rank, and each is a process.
    """
    environment.setdefault(COMPILE_WORKERS, str(min(MOST_COMPILE_WORKERS, cores)))


def expands_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a training that starts in this environment allocates by expandable segments."""
    settings = [environment[name] for name in ALLOCATOR_VARIABLES if name in environment]
    if not settings:
        return not on_wsl()
    return "expandable_segments:true" in settings[0].replace(" ", "").lower()


def on_wsl(release: Path = KERNEL_RELEASE) -> bool:
    """Whether this is Linux under Windows. Its drivers before R615 refuse expandable segments, in several words."""
    return release.is_file() and "microsoft" in release.read_text("utf-8", "replace").lower()


def gpu_of_rank(local_rank: int) -> int:
    """This rank's GPU number among the GPUs that its process sees.

    A launcher shows every rank all GPUs on the machine. `srun --gpus-per-task=1`, or one container per rank, shows each
    rank one GPU as number 0. If ranks 2 and 3 see only two of four GPUs, these are numbers 0 and 1.
    """
    import torch

    return local_rank % torch.cuda.device_count()


@contextmanager
def libraries_on_gpu(index: int, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Make libraries use this GPU from now on: DeepSpeed and torch's device meshes read its number from LOCAL_RANK.

    If the block raises, LOCAL_RANK is restored, because it decides which rank on the machine prints for all.
    """
    before = environment.get("LOCAL_RANK")
    if before is not None:
        environment["LOCAL_RANK"] = str(index)
    try:
        yield
    except BaseException:
        if before is not None:
            environment["LOCAL_RANK"] = before
        raise
