"""A plan by arithmetic: no torch, a few milliseconds, so that thousands of variants can be looked through.

The same phases and components as the trace; `tests/planner/test_closed_form.py` compares the two. Each phase's peak is
the largest of a few moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.planner.closed_form.layer import HALF
from finetune.planner.closed_form.peaks import backward, forward
from finetune.planner.closed_form.rank import Job, Parts, read_strategy
from finetune.planner.closed_form.shape import FAMILIES
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe

CONTEXT, NCCL = 500_000_000, 700_000_000  # job.py
# What the allocator may hold beside what is needed, as a part of that: the most that it held in the replays of the grid
# of benchmarks/closed_form.py, with all the room it asked for, rounded up. Sharding frees and takes large buffers of
# different sizes all the time, on streams of their own; its most is a 7B model on 64 GPUs, which needs 5 GiB of each.
RESERVED = {"single": 0.18, "ddp": 0.14, "fsdp": 0.42}


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes on one rank's GPU: bytes by component at the peak of each phase."""

    phases: dict[str, Parts]
    outside: Parts
    reserved: float = 0.0  # of what is needed, beside it, at most

    @property
    def peaks(self) -> dict[str, int]:
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def needed(self) -> int:
        """Bytes of tensors at the largest peak, and what lies beside them."""
        return max(self.peaks.values()) + sum(self.outside.values())

    @property
    def upper(self) -> int:
        """What surely suffices: what is needed, and what the allocator may hold beside it."""
        return int(self.needed * (1 + self.reserved))


def unknown(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None) -> str | None:
    """Why there is no closed form for this recipe; None where there is one."""
    strategy, training, lora = read_strategy(recipe.accelerate_config), recipe.training, recipe.lora
    if gpus is None:
        return "on a CPU"
    if config.get("model_type") not in FAMILIES:
        return f"the architecture {config.get('model_type')}"
    if strategy.kind not in RESERVED or strategy.offloaded:
        return f"accelerate_config: {strategy.name}"
    if training.mixed_precision == "no":
        return "training.mixed_precision: no"
    if recipe.model.attention != "auto":
        return f"model.attention: {recipe.model.attention}"
    if OPTIMIZERS[training.optim].moment_bytes is not None:
        return f"training.optim: {training.optim}"
    if recipe.quantization is not None and recipe.quantization.load_in_8bit:
        return "quantization.load_in_8bit"
    if lora is not None and (lora.use_dora or lora.lora_dropout or lora.modules_to_save):
        return "lora: DoRA, dropout or modules_to_save"
    if lora is not None and recipe.model.dtype == "float32":
        return "model.dtype: float32 under lora"
    return None


def estimate(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> Estimate:
    """Estimate one rank. Only for recipes of which `unknown` says None."""
    job = Job(recipe, config, gpus)
    phases = {
        "load": _load(job),
        "forward": _largest(forward(job)),
        "backward": _largest(backward(job)),
        "step": job.static | {"gradients": job.gradients},
        "save": job.static,
    }
    outside = {"CUDA context": CONTEXT} | ({"NCCL": NCCL} if job.ranks > 1 else {})
    held = {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}
    return Estimate(held, outside, RESERVED[job.strategy.kind])


def _largest(moments: Iterator[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _load(job: Job) -> Parts:
    shape = job.shape
    if not job.sharded:
        return {"parameters": job.parameters} | job.buckets
    # Each tensor lies whole on rank 0's GPU while it is cut: embeddings first, the head last.
    width = job.width if job.full else HALF
    first = width * job.cut(shape.vocabulary, shape.hidden)
    last = shape.linears["down"].weights // (4 if job.four_bit else 1) if shape.tied else shape.table
    moments = [
        {"parameters": first, "communication buffers": width * shape.table},
        {"parameters": job.parameters, "communication buffers": width * last},
    ]
    return _largest(iter(moments))
