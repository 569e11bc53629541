"""The arithmetic behind `Host: about N GB` and `disk: about N GB` in recipes' headers: what offloading takes.

Published shapes come from finetune/model/configs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from tests.support.models.model_shapes import shape_of

GB = 1e9
HALF = 2  # bytes of a 16-bit weight


def host_bytes(recipe: Recipe) -> float:
    """Bytes in the host memory of one node that offloading a full training takes for good; pinned tensors are rounded.

    FSDP2 pins each shard of a weight, and each gradient that it receives. ZeRO-2 pins flat masters, gradients and
    16-bit weights, and a buffer for the largest gradient. ZeRO-3 pins the 16-bit weights twice, one by one as it loads
    them and then flat; torch keeps the first for good. It pins gradients twice too, flat and by the groups that are
    updated at once. Moments are not pinned.
    """
    strategy, shape = read_strategy(recipe.accelerate_config), shape_of(recipe)
    if not strategy.offloaded:
        return 0
    assert recipe.lora is None, "no recipe offloads adapters"
    devices, ranks = strategy.offload_devices, recipe.budget.gpus
    assert recipe.budget.nodes == 1
    own = [size / ranks for size in shape.tensors]  # elements of a rank's part of each
    each, largest = sum(own), max(shape.tensors)
    if strategy.kind == "fsdp":
        return ranks * (2 * sum(_pinned(4 * size) for size in own) + 8 * each)
    if strategy.zero_stage == 2:
        return ranks * (2 * _pinned(4 * each) + _pinned(HALF * each) + _pinned(HALF * largest) + 8 * each)
    weights = _pinned(HALF * each) + sum(_pinned(HALF * size) for size in own)
    groups = _groups(own, largest)
    if devices["optimizer"] == "nvme":
        # Gradients of one group, and DeepSpeed's four buffers for a group's master and moments, locked as they are.
        return ranks * (weights + _pinned(4 * each) + (1 + 4) * 4 * max(groups))
    return ranks * (weights + _pinned(4 * each) + sum(_pinned(4 * size) for size in groups) + 12 * each)


def host_bytes_at_save(recipe: Recipe) -> float:
    """The same while a checkpoint is written: ZeRO's masters and moments are copied for it, 12 bytes a parameter."""
    strategy = read_strategy(recipe.accelerate_config)
    copied = 12 * shape_of(recipe).total if strategy.kind == "deepspeed" and strategy.offloaded else 0
    return host_bytes(recipe) + copied


def _pinned(size: float) -> float:
    """Bytes that torch's allocator of pinned memory takes for so many: the next power of two."""
    return 2.0 ** math.ceil(math.log2(size))


def _groups(own: Sequence[float], least: float) -> list[float]:
    """Elements of the groups that ZeRO-3 updates at once: weights in order, closed when one has `least`."""
    groups = [0.0]
    for size in own:
        if groups[-1] >= least:
            groups.append(0.0)
        groups[-1] += size
    return groups


def disk_bytes(recipe: Recipe) -> float:
    """Bytes on the disk of one node: masters and two moments."""
    nvme = read_strategy(recipe.accelerate_config).offload_devices["optimizer"] == "nvme"
    return 12 * shape_of(recipe).total / recipe.budget.nodes if nvme else 0
