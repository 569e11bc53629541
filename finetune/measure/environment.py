"""Versions and devices of a run, for environment.json."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from finetune.measure.host_memory import usable_cores

_LIBRARIES = (
    *("finetune", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors"),
    *("huggingface_hub", "numpy", "bitsandbytes", "deepspeed", "liger-kernel"),
)


def environment() -> dict[str, Any]:
    """Versions and devices, for environment.json. No environment variables, no names of users or hosts."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": devices,
        "versions": installed_versions(_LIBRARIES),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The versions of these packages; None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in packages:
        versions[name] = None
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
