"""The arithmetic of a plan with one recipe's figures: bytes per weight, Adam, ZeRO, recomputation, the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.closed_form.constants import FLOAT32, HALF, loss_chunk_rows
from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.shape import FAMILIES, Shape, adapter_weights, shape_of
from finetune.planner.remedies import changed
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: half, one per block of 64, four per 256 such blocks
LOGIT_BYTES = 12  # bytes a logit where all are kept: bfloat16, float32, and float32 logarithms that turn into gradients
CHUNK_LOGIT_BYTES = HALF + FLOAT32  # in a chunk, where bfloat16 gradients take the place of bfloat16 logits


def explain_plan(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None) -> str:
    """Paragraphs that follow the plan; one line where the arithmetic does not know the architecture."""
    if config.get("model_type") not in FAMILIES:
        return f"The arithmetic is that of {', '.join(FAMILIES)}; {config.get('model_type')} is planned by its trace."
    shape = shape_of(recipe, config)
    ranks = gpus.count * gpus.nodes if gpus else 1
    trained = shape.total_weights if recipe.lora is None else adapter_weights(recipe, config)
    parts = [_weights(recipe, shape, trained), _adam(recipe, trained), _zero(recipe, trained, ranks)]
    if gpus is not None and unsupported(recipe, config, gpus) is None:
        parts += [_recomputation(recipe, config, gpus), _loss(recipe, shape)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _gb(nbytes: float) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:,.1f} GB"
    return f"{nbytes / 1e6:,.0f} MB"


def _weights(recipe: Recipe, shape: Shape, trained: int) -> Iterator[str]:
    total, matrices = shape.total_weights, shape.matrix_weights * shape.layers
    rest = total - matrices
    yield f"Weights: {total:,}, of which {matrices:,} in the matrices of {shape.layers} layers."
    yield (
        f"  float32 takes 4 bytes each, {_gb(4 * total)}; bfloat16 and float16 2, {_gb(2 * total)}; int8 1 "
        f"in the matrices, {_gb(matrices + 2 * rest)}; NF4 with its scales {NF4:.3f} there, "
        f"{_gb(NF4 * matrices + 2 * rest)}."
    )
    if recipe.lora is not None:
        share = 100 * trained / total
        yield f"  This recipe trains adapters of rank {recipe.lora.r}: {trained:,} weights, {share:.2f} % as many."
    else:
        yield "  This recipe trains all of them."


def _adam(recipe: Recipe, trained: int) -> Iterator[str]:
    width, spec = HALF if recipe.training.pure_bf16 else FLOAT32, OPTIMIZERS[recipe.training.optim]
    moments = spec.state_bytes(width)
    each = 2 * width + moments
    state = "its two moments {} together" if len(spec.moments) == 2 else "its moment {}"
    yield (
        f"{spec.title}: a trained weight takes {width} bytes, its gradient {width}, {state.format(moments)}: "
        f"{each} bytes, {_gb(each * trained)} for all weights that this recipe trains."
    )


def _zero(recipe: Recipe, trained: int, ranks: int) -> Iterator[str]:
    width = HALF if recipe.training.pure_bf16 else FLOAT32
    yield f"Sharding these {_gb(4 * width * trained)} over {ranks} GPU{'s' if ranks > 1 else ''}, bytes on each:"
    for name, whole in (
        ("no sharding (DDP)", (1, 1, 1)),
        ("moments (ZeRO-1)", (1, 1, ranks)),
        ("gradients too (ZeRO-2)", (1, ranks, ranks)),
        ("weights too (ZeRO-3, FSDP2)", (ranks, ranks, ranks)),
    ):
        weights, gradients, moments = (width * trained // cut for cut in whole)
        yield f"  {name:<28} {_gb(weights + gradients + 2 * moments):>10}"


def _recomputation(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> Iterator[str]:
    tokens = recipe.training.per_device_batch_size * recipe.data.max_length
    variants = [changed(recipe, {"training.activation_checkpointing": each}) for each in (False, "selective", True)]
    estimates = [estimate(variant, config, gpus) for variant in variants]
    kept = [each.phases["backward"].get("activations", 0) for each in estimates]
    yield (
        f"Activations: what {tokens:,} tokens leave for backward takes {_gb(kept[0])} without recomputation, "
        f"{_gb(kept[1])} where layers keep their products and attention outputs (activation_checkpointing: selective) "
        f"and {_gb(kept[2])} where they are recomputed whole (true), which costs a third more compute."
    )
    total = [_gb(each.needed) for each in estimates]
    yield f"  In total {total[0]} a GPU without recomputation, {total[1]} with selective and {total[2]} with true."


def _loss(recipe: Recipe, shape: Shape) -> Iterator[str]:
    tokens = recipe.training.per_device_batch_size * recipe.data.max_length
    logits = tokens * shape.vocabulary
    chunk = min(tokens, loss_chunk_rows(shape.vocabulary)) * shape.vocabulary
    yield (
        f"The loss: {tokens:,} tokens times {shape.vocabulary:,} words are {logits / 1e6:,.0f} million logits, "
        f"{_gb(LOGIT_BYTES * logits)} if all were kept at once; a chunk at a time they take "
        f"{_gb(CHUNK_LOGIT_BYTES * chunk)}."
    )
