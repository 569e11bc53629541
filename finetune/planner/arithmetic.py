"""A plan's arithmetic with one recipe's figures: bytes per weight, Adam, ZeRO, recomputation, the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.closed_form.constants import FLOAT32, HALF, loss_chunk_rows
from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.shape import FAMILIES, adapter_weights, shape_of
from finetune.planner.remedies import changed
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.wording import counted

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: half, one per block of 64, four per 256 such blocks
LOGIT_BYTES = 12  # bytes a logit if all are kept: bfloat16, float32, and float32 logarithms that turn into gradients
CHUNK_LOGIT_BYTES = HALF + FLOAT32  # in a chunk, because bfloat16 gradients take the place of bfloat16 logits


def explain_plan(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None) -> str:
    """Paragraphs that follow the plan; one line if the arithmetic does not know the architecture."""
    if config.get("model_type") not in FAMILIES:
        return f"The arithmetic is that of {', '.join(FAMILIES)}; {config.get('model_type')} is planned by its trace."
    shape = shape_of(recipe, config)
    ranks = gpus.count * gpus.nodes if gpus else 1
    total, matrices = shape.total_weights, shape.matrix_weights * shape.layers
    rest = total - matrices
    trained, trains = total, "all of them"
    if recipe.lora is not None:
        trained = adapter_weights(recipe, config)
        trains = f"adapters of rank {recipe.lora.r}: {trained:,} weights, {100 * trained / total:.2f} % as many"
    paragraphs = [
        f"Weights: {total:,}, of which {matrices:,} in the matrices of {shape.layers} layers.\n"
        f"  float32 takes 4 bytes each, {_gb(4 * total)}; bfloat16 and float16 2, {_gb(2 * total)}; int8 1 "
        f"in the matrices, {_gb(matrices + 2 * rest)}; NF4 with its scales {NF4:.3f} there, "
        f"{_gb(NF4 * matrices + 2 * rest)}.\n"
        f"  This recipe trains {trains}."
    ]

    width, optimizer = HALF if recipe.training.pure_bf16 else FLOAT32, OPTIMIZERS[recipe.training.optim]
    moments = optimizer.state_bytes(width)
    weight_bytes = 2 * width + moments  # a weight, its gradient, its moments
    state = "its two moments {} together" if len(optimizer.moments) == 2 else "its moment {}"
    paragraphs.append(
        f"{optimizer.title}: a trained weight takes {width} bytes, its gradient {width}, {state.format(moments)}: "
        f"{weight_bytes} bytes, {_gb(weight_bytes * trained)} for all weights that this recipe trains."
    )

    lines = [f"Sharding these {_gb(4 * width * trained)} over {counted(ranks, 'GPU')}, bytes on each:"]
    # Each kind of sharding with the number of ranks that share weights, gradients and the two moments.
    for name, weight_ranks, gradient_ranks, moment_ranks in (
        ("no sharding (DDP)", 1, 1, 1),
        ("moments (ZeRO-1)", 1, 1, ranks),
        ("gradients too (ZeRO-2)", 1, ranks, ranks),
        ("weights too (ZeRO-3, FSDP2)", ranks, ranks, ranks),
    ):
        nbytes = width * trained
        on_each = nbytes // weight_ranks + nbytes // gradient_ranks + 2 * (nbytes // moment_ranks)
        lines.append(f"  {name:<28} {_gb(on_each):>10}")
    paragraphs.append("\n".join(lines))

    if gpus is None or unsupported(recipe, config, gpus) is not None:
        return "\n\n".join(paragraphs)
    tokens = recipe.training.rows_at_once * recipe.data.row_tokens
    variants = [
        changed(recipe, {"training.activation_checkpointing": setting}) for setting in (False, "selective", True)
    ]
    estimates = [estimate(variant, config, gpus) for variant in variants]
    kept = [estimated.phases["backward"].get("activations", 0) for estimated in estimates]
    needed = [_gb(estimated.needed) for estimated in estimates]
    paragraphs.append(
        f"Activations: what {tokens:,} tokens leave for backward takes {_gb(kept[0])} without recomputation, "
        f"{_gb(kept[1])} where layers keep their products and attention outputs (activation_checkpointing: selective) "
        f"and {_gb(kept[2])} where they are recomputed whole (true), which costs a third more compute.\n"
        f"  In total {needed[0]} a GPU without recomputation, {needed[1]} with selective and {needed[2]} with true."
    )
    logits = tokens * shape.vocabulary
    chunk = min(tokens, loss_chunk_rows(shape.vocabulary)) * shape.vocabulary
    paragraphs.append(
        f"The loss: {tokens:,} tokens times {shape.vocabulary:,} words are {logits / 1e6:,.0f} million logits, "
        f"{_gb(LOGIT_BYTES * logits)} if all were kept at once; a chunk at a time they take "
        f"{_gb(CHUNK_LOGIT_BYTES * chunk)}."
    )
    return "\n\n".join(paragraphs)


def _gb(nbytes: float) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:,.1f} GB"
    return f"{nbytes / 1e6:,.0f} MB"
