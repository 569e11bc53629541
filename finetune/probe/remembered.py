"""Keeps the probe's results in the cache folder, under a key made from everything that they depend on.

A damaged file is reported in a line and made again. If the folder cannot be written, the next start probes again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import PreTrainedConfig

from finetune.errors import FinetuneError
from finetune.files import cache_folder, read_sealed, write_sealed
from finetune.measure.environment import installed_versions
from finetune.model.build import attention_name
from finetune.model.dtypes import COMPUTE, dtype_name
from finetune.model.stored_structure import NOT_OF_STRUCTURE
from finetune.paths import PACKAGE
from finetune.recipe.schema import Recipe
from finetune.tokens.cache import content_key

REMEMBERED_FORMAT = 3  # 1 lacks padding, 2 lacks a digest
# Packages whose code computes, and kernels that transformers uses if they are installed. Absent ones count as None.
COMPUTES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "triton", "kernels")
KERNELS = (
    *("flash-attn", "flash-attn-3", "flash-attn-4", "flash-linear-attention", "causal-conv1d", "mamba-ssm"),
    *("xformers", "torchao"),
)
LONGEST_PROBE = 120.0  # seconds
OWN_CODE = ("model", "architecture", "probe", "tokens")


def probe_key(recipe: Recipe, config: PreTrainedConfig, device: torch.device, compute: torch.dtype | None) -> str:
    """The name under which a probe's result is kept.

    Args:
        config: The model's configuration.
        compute: The format that the probe computes in; None: float32.
    """
    content: dict[str, Any] = config.to_dict()
    content |= {"code": getattr(config, "_commit_hash", None) if "auto_map" in content else None}
    structure = {name: value for name, value in content.items() if name not in NOT_OF_STRUCTURE}
    # Code files of a model in a folder. On the Hub the configuration names the code's commit instead.
    code = sorted(Path(recipe.model.name_or_path).glob("*.py")) if recipe.model.trust_remote_code else []
    training = recipe.training
    settings = {
        "attention": attention_name(recipe),
        "packing": recipe.data.packing,
        "several rows": training.rows_at_once > 1,
        "recomputed": training.activation_checkpointing,
        "new tokens": bool(recipe.model.new_tokens),
        "precision": [training.mixed_precision, training.pure_bf16, recipe.model.dtype],
        "router": recipe.model.router_aux_loss_coef if recipe.preferences is None else 0.0,
        "lora": None if recipe.lora is None else recipe.lora.model_dump(mode="json"),
        "quantization": None if recipe.quantization is None else recipe.quantization.model_dump(mode="json"),
    }
    computes = {"versions": installed(), "own code": own_code(), "device": device_kind(device)}
    parts = {"format": REMEMBERED_FORMAT, "config": structure, "code": _digest(code), "asked": settings, **computes}
    key = content_key(json.loads(json.dumps(parts, default=str)))
    return f"{key}-{dtype_name(compute)}" if compute else key


@cache
def installed() -> dict[str, str | None]:
    """The versions of all packages that compute."""
    return installed_versions((*COMPUTES, *KERNELS))


@cache
def own_code() -> str:
    """A digest of our modules that compute or probe."""
    return _digest(sorted(file for folder in OWN_CODE for file in (PACKAGE / folder).rglob("*.py")))


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def device_kind(device: torch.device) -> str:
    """The kind of device, a GPU by its name and compute capability."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}"


def recall(key: str) -> dict[str, Any] | None:
    """The kept result; None if there is none, or its file was changed."""
    content: dict[str, Any] | None = read_sealed(_file(key))
    if content is not None and content.get("key") == key:
        return content
    return None


def remember(key: str, result: dict[str, Any]) -> None:
    """Keep a result, if the cache folder can be written."""
    with suppress(OSError, FinetuneError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        write_sealed(_file(key), result | {"key": key})


@contextmanager
def one_at_a_time(key: str) -> Iterator[dict[str, Any] | None]:
    """Yields the kept result. If there is none, no other process of this machine probes this key in the block: it
    waits, and then recalls the result."""
    lock = None
    known = recall(key)
    if known is None:
        with suppress(OSError):
            _file(key).parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(_file(key).with_suffix(".lock"))
            lock.acquire(timeout=LONGEST_PROBE)  # its Timeout is an OSError, so a stopped process does not block others
    try:
        yield known or recall(key)
    finally:
        if lock is not None:
            lock.release()


def _file(key: str) -> Path:
    return cache_folder() / "probes" / f"{key}.json"


def precision_on(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """The format that the run computes in on a GPU. None on a CPU: float32 there tells the most."""
    if device.type == "cpu":
        return None
    if recipe.training.pure_bf16:
        return torch.bfloat16
    return COMPUTE[recipe.training.mixed_precision]
