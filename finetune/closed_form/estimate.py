"""A plan by arithmetic: no torch, a few milliseconds, so that thousands of variants can be searched.

The phases and components are the trace's; tests/closed_form/test_closed_form.py compares the two. Each phase's peak
is the largest of a few moments.

    shape.py     the sizes of the model's matrices, from config.json
    layer.py     the tensors of one layer, step by step
    rank.py      the tensors that one rank holds: weights, gradients, AdamW's state, gathered weights
    peaks.py     the moments of forward and backward at which these add up to a peak
    estimate.py  the largest moment of each phase

Each file says at its top how to add a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.closed_form import constants as c
from finetune.closed_form.constants import CUDA_CONTEXT, FLOAT32, HALF, NCCL_BUFFERS, ROUNDED_AT_ONCE
from finetune.closed_form.peaks import backward, forward
from finetune.closed_form.rank import Bytes, RankSizes, cached_strategy
from finetune.closed_form.shape import FAMILIES
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe

# The allocator may reserve this share on top of the needed bytes: the largest share, rounded up, that
# benchmarks/closed_form.py's replays had with all the room they asked for. Sharding frees and allocates large buffers
# with different sizes all the time, on several streams. A 7B model on 64 GPUs, with 5 GiB on each, had the largest.
RESERVED = {"single": 0.18, "ddp": 0.14, "fsdp": 0.42}


@dataclass(frozen=True)
class Estimate:
    """A recipe's memory on one rank's GPU: bytes by component at each phase's peak."""

    phases: dict[str, dict[str, int]]
    outside: dict[str, int]  # bytes outside of tensors
    reserved: float = 0.0  # bytes that the allocator reserves on top, at most: a share of the needed bytes

    @property
    def peaks(self) -> dict[str, int]:
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def needed(self) -> int:
        """Bytes of tensors at the largest peak, and those outside tensors."""
        return max(self.peaks.values()) + sum(self.outside.values())

    @property
    def upper(self) -> int:
        """Bytes that surely suffice: those needed, and the allocator's possible reserve."""
        return int(self.needed * (1 + self.reserved))


def unsupported(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None) -> str | None:
    """Why there is no closed form for this recipe; None where there is one."""
    strategy, training, lora = cached_strategy(recipe.accelerate_config), recipe.training, recipe.lora
    family, attention, quantization = config.get("model_type"), recipe.model.attention, recipe.quantization
    reasons = (
        (gpus is None, "on a CPU"),
        (family not in FAMILIES, f"the architecture {family}"),
        (strategy.kind not in RESERVED or strategy.offloaded, f"accelerate_config: {strategy.name}"),
        (training.mixed_precision == "no", "training.mixed_precision: no"),
        (attention != "auto", f"model.attention: {attention}"),
        (config.get("attention_dropout"), "attention dropout"),
        (OPTIMIZERS[training.optim].moment_bytes is not None, f"training.optim: {training.optim}"),
        (quantization and quantization.load_in_8bit, "quantization.load_in_8bit"),
        (recipe.model.load_in_fp8 and training.keeps_products, "model.load_in_fp8 with selective recomputation"),
        (lora and (lora.use_dora or lora.lora_dropout or lora.modules_to_save), "lora: DoRA, dropout, modules_to_save"),
        (lora and (lora.target_parameters or lora.names_single_layers), "lora: target_parameters, or names of layers"),
        (lora and recipe.model.new_tokens, "lora: with model.add_tokens"),
        (lora and recipe.model.dtype == "float32", "model.dtype: float32 under lora"),
    )
    return next((why for applies, why in reasons if applies), None)


def estimate(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus, *, keeps_gradients: bool = False) -> Estimate:
    """Estimate one rank. `unsupported` must return None for the recipe.

    Args:
        keeps_gradients: FSDP2 keeps unsharded gradients until a step's last micro-batch.
    """
    rank = RankSizes(recipe, config, gpus, keeps_gradients=keeps_gradients)
    # torch's fused kernel holds nothing in an update, and model/optimizers/fused_update.py a few thousand bytes. Where
    # nothing is compiled, rounded_adamw.py holds six float32 tensors for the largest weight, up to a limit: weight, two
    # moments, gradient, random bits, their shift. Adapters are so small that their update is no peak.
    update = 0
    if rank.trained_weight_bytes == HALF and rank.base_trained and recipe.training.compile is False:
        largest = rank.shard_of(rank.shape.vocabulary, rank.shape.hidden)  # the embeddings' shard of [vocabulary, h]
        update = 6 * FLOAT32 * min(ROUNDED_AT_ONCE, largest)
    phases: dict[str, Mapping[str, int]] = {
        "load": _load(rank),
        "forward": _largest(forward(rank)),
        "backward": _largest(backward(rank)),
        "step": rank.static | {c.GRADIENTS: rank.gradient_bytes, c.OTHER: rank.static[c.OTHER] + update},
        "save": rank.static,
    }
    outside = {"CUDA context": CUDA_CONTEXT}
    if rank.ranks > 1:
        outside["NCCL"] = NCCL_BUFFERS
    nonzero = {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}
    return Estimate(nonzero, outside, RESERVED[rank.strategy.kind])


def _largest(moments: Iterable[Bytes]) -> Bytes:
    return max(moments, key=Bytes.total)


def _load(rank: RankSizes) -> Mapping[str, int]:
    shape = rank.shape
    if not rank.sharded:
        return {c.PARAMETERS: rank.parameter_bytes} | rank.ddp_buckets
    # Rank 0 holds each tensor unsharded while it scatters it: the embeddings first, the head or the last matrix last.
    width = rank.trained_weight_bytes if rank.base_trained else HALF
    last = table = shape.embedding_weights  # [vocabulary, h]
    if shape.tied:  # the last matrix is down's [h, f]; four 4-bit weights take the bytes of one in bfloat16
        last = shape.linears["down"].weights
        if rank.four_bit:
            last //= 4
    first_shard = width * rank.shard_of(shape.vocabulary, shape.hidden)
    at_first = Bytes({c.PARAMETERS: first_shard, c.COMMUNICATION_BUFFERS: width * table})
    at_last = Bytes({c.PARAMETERS: rank.parameter_bytes, c.COMMUNICATION_BUFFERS: width * last})
    return _largest((at_first, at_last))
