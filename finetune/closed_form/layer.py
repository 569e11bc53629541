"""One decoder layer's bytes, step by step: the tensors that each step saves for backward, and its temporaries.

Written from transformers (models/llama/modeling_llama.py: LlamaDecoderLayer, apply_rotary_pos_emb),
architecture/own_layers/ (lora_linear.py, norm_and_gate.py), bitsandbytes (autograd/_functions.py: MatMul4Bit) and
CUDA's autocast lists (ATen/autocast_mode.h). The trace runs all of these; tests/closed_form/test_closed_form.py
compares the two.
Shapes: T tokens, h hidden, f inner, q = heads x head size, k = key-value heads x head size, r rank.

To add a tensor: find the step that makes it, and write one line with its shape, times HALF or FLOAT32 bytes.

    saved_for_backward     it lives until this step's own backward: an input or output that autograd saves
    forward_transient      it is there when the step ends forward, and nothing saves it: a result, a float32 copy
    backward_transient     it is there while the step's backward runs: gradients of its inputs and outputs
    kept_when_selective    selective recomputation keeps it: a product's result, attention's output

A transient that several steps see (a norm's output, the gradient that bypasses attention) is added to each of them, as
`norm_output` and `residual_gradient` are below. Then run tests/closed_form/test_closed_form.py; if the trace has
another figure, `finetune plan RECIPE --json` shows the trace's bytes by component.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from finetune.closed_form.constants import FLASH_BLOCK, FLOAT32, HALF, rounded_up
from finetune.closed_form.shape import QUANTISED_BLOCK, Linear, Shape

NORMS = ("norm1", "norm2")  # the steps with which a half of a layer begins


@dataclass(frozen=True)
class LayerNumerics:
    """A micro-batch's tokens, and the number formats in which a layer computes them."""

    tokens: int
    documents: int  # rows of the batch; flash attention begins a new block at each
    base_trained: bool  # the layer's own weights, not adapters
    adapters_cast: bool  # adapters are float32, and autocast casts them at each use
    four_bit: bool
    float8: bool = False  # the frozen weights, and inputs and gradients as they come
    tile: int | None = None  # tokens that the MLP computes at once; None: all


@dataclass(frozen=True)
class LayerStep:
    """One step of a layer; all sizes in bytes."""

    name: str
    saved_for_backward: int = 0  # activations; they live until this step's backward
    cast_weights: int = 0  # they live until this step's backward
    forward_transient: int = 0  # besides these two when the step ends forward, without the layer's input
    backward_transient: int = 0  # it lives while the step's backward runs
    # In place of `forward_transient` during recomputation, where that is less: recomputation stops as soon as
    # everything that backward needs is there. 0: as many bytes.
    recompute_transient: int = 0
    dequantised_weights: int = 0  # 4-bit weights in bfloat16, or an input's float32 quotients, for a part of the step
    dequantise_transient: int = 0  # it lives forward, while those do
    backward_workspace: int | None = None  # in place of `dequantised_weights` in backward; None: the same
    weight_gradients: int = 0  # made by the step's backward, in the computation's number format
    # Under selective recomputation it lives from forward until the step is recomputed, whose result includes it.
    kept_when_selective: int = 0


def layer_steps(shape: Shape, numerics: LayerNumerics) -> list[LayerStep]:
    """The steps in forward's order."""
    mlp = _tiled_mlp_half if numerics.tile else _mlp_half
    return [*_attention_half(shape, numerics), *mlp(shape, numerics)]


def _residual(shape: Shape, numerics: LayerNumerics) -> int:
    """[T, h] bfloat16: hidden states between layers, a norm's output, and the gradients of both."""
    return HALF * numerics.tokens * shape.hidden


def _attention_half(shape: Shape, numerics: LayerNumerics) -> Iterator[LayerStep]:
    tokens, residual = numerics.tokens, _residual(shape, numerics)
    residual_gradient = residual  # [T, h], which bypasses attention
    # [T, h]: LlamaDecoderLayer.forward refers to it until attention returns; counted here unless q, k, v save it.
    norm_output = residual * (not _norm_output_saved(shape, numerics, "qkv"))
    queries = HALF * tokens * shape.query_size  # [T, q] bfloat16
    keys_values = HALF * tokens * 2 * shape.key_size  # [T, k] bfloat16 each
    log_sums = FLOAT32 * tokens * shape.heads  # [heads, T] float32: logsumexp of each row of scores

    yield _rms_norm(NORMS[0], shape, numerics, users="qkv")  # rank.py counts its input, the layer's
    projected = 0  # [T, q] and [T, k] bfloat16, as far as they are computed; backward has their gradients instead
    for name in "qkv":
        # Backward: two more [T, h], the gradient of the norm's output and what this projection adds to it.
        bypassing = residual_gradient + 2 * residual
        yield _linear(shape.linears[name], numerics, norm_output + projected, bypassing + projected)
        projected += HALF * tokens * shape.linears[name].outputs
    if shape.normed_heads:  # Qwen3's RMSNorm over each head's queries and keys
        # The norms' inputs [T, q + k] bfloat16, and a root for each head, [heads, T] float32.
        head_roots = FLOAT32 * tokens * (shape.heads + shape.key_value_heads)
        yield LayerStep(
            "norm of heads",
            saved_for_backward=HALF * tokens * (shape.query_size + shape.key_size) + head_roots,
            forward_transient=norm_output + projected,  # where the outputs take the place of the inputs
            # For the queries [T, q]: their gradient times the weight in bfloat16, and one tensor in float32.
            backward_transient=residual_gradient + projected + (HALF + FLOAT32) * tokens * shape.query_size,
        )
    # q * cos, rotate_half(q), and that times sin: [T, q] bfloat16 each. Backward: gradients of q, k, v before and after
    # the rotation, and three of [T, q] again.
    rotating = 3 * HALF * tokens * shape.query_size
    yield LayerStep(
        "rope",
        forward_transient=norm_output + projected + rotating,
        backward_transient=residual_gradient + 2 * projected + rotating,
    )
    output = queries  # [T, q] bfloat16
    # flash_attn/flash_api.cpp, mha_varlen_bwd, whose documents are a block apart. In float32: dq_accum [rows, heads,
    # rounded head size] and softmax_d [heads, rows]. Where heads share keys: dk_expanded and dv_expanded [T, q].
    rows = tokens + FLASH_BLOCK * numerics.documents
    flash = rows * shape.heads * (rounded_up(shape.head_size, 32 if shape.head_size <= 128 else 64) + 1) * FLOAT32
    if shape.heads != shape.key_value_heads:
        flash += 2 * HALF * tokens * shape.query_size
    yield LayerStep(
        "attention",
        saved_for_backward=queries + keys_values + output + log_sums,
        forward_transient=norm_output,
        # Gradients of the output [T, q], of queries [T, q], keys and values [T, k]; [heads, T] float32 sums once more.
        backward_transient=residual_gradient + output + queries + keys_values + log_sums + flash,
        kept_when_selective=output + log_sums,
    )
    yield _linear(shape.linears["o"], numerics, norm_output, residual_gradient + output)


def _mlp_half(shape: Shape, numerics: LayerNumerics) -> Iterator[LayerStep]:
    residual = _residual(shape, numerics)
    residual_gradient = residual  # [T, h], which bypasses the MLP
    inner = HALF * numerics.tokens * shape.inner  # [T, f] bfloat16
    # The norm's output [T, h] lives from the norm to the MLP's end; counted here unless gate and up save it.
    live = residual * (not _norm_output_saved(shape, numerics, ("gate", "up")))

    norm = _rms_norm(NORMS[1], shape, numerics, users=("gate", "up"))
    # Its input [T, h], which is added to the MLP's output.
    yield replace(norm, saved_for_backward=norm.saved_for_backward + residual)
    # Backward: gradients of the norm's output [T, h], of the stream that bypasses the MLP [T, h], and of gate [T, f].
    yield _linear(shape.linears["gate"], numerics, live, 2 * residual_gradient + inner)
    # Forward: gate's output [T, f] besides. Backward: gradients of up's output and of gate's, [T, f] each.
    yield _linear(shape.linears["up"], numerics, live + inner, residual_gradient + 2 * inner)
    # Saves both outputs, makes silu(gate) * up [T, f]; backward: the gradients of all three.
    yield LayerStep(
        "product", 2 * inner, forward_transient=live + inner, backward_transient=residual_gradient + 3 * inner
    )
    down = shape.linears["down"]
    # [T, f] bfloat16: the product is saved by down itself where a weight's gradient needs it as it is.
    product_saved = numerics.base_trained or down.rank > 0
    product = inner * (not product_saved)
    step = _linear(down, numerics, live + product, residual_gradient)
    yield replace(
        step,
        saved_for_backward=step.saved_for_backward + inner * product_saved,
        # x A^T [T, r] alone: backward does not ask for the last product of a layer.
        kept_when_selective=HALF * numerics.tokens * down.rank,
        recompute_transient=live + product,  # which ends before the product: its weight and its input are there
    )


def _tiled_mlp_half(shape: Shape, numerics: LayerNumerics) -> Iterator[LayerStep]:
    """architecture/own_layers/tiled_mlp.py: a norm whose output is kept, and one step that holds a tile's tensors."""
    residual = _residual(shape, numerics)
    norm = _rms_norm(NORMS[1], shape, numerics, users=("gate", "up"))
    yield replace(norm, saved_for_backward=norm.saved_for_backward + residual)  # its input [T, h], as in `_mlp_half`
    tile = replace(numerics, tokens=min(numerics.tokens, numerics.tile or 0), tile=None)
    _, *steps = _mlp_half(shape, tile)
    held, forward, backward = 0, [0], [0]  # bytes of one tile
    for step in steps:
        held += step.saved_for_backward + step.cast_weights
        forward += [held + step.forward_transient, held + step.dequantise_transient + step.dequantised_weights]
    for step in reversed(steps):
        workspace = step.dequantised_weights if step.backward_workspace is None else step.backward_workspace
        backward.append(held + step.backward_transient + workspace)
        held -= step.saved_for_backward + step.cast_weights
    gradients = sum(step.weight_gradients for step in steps)  # of a tile, in 16 bits
    yield LayerStep(
        "tiles",
        forward_transient=residual + max(forward),  # the output [T, h]
        # The gradients of the output, which bypasses the MLP too, and of the input, [T, h] each; sums in float32.
        backward_transient=2 * residual + max(*forward, *backward) + 2 * gradients,
        recompute_transient=HALF,  # which ends before the first tile
        weight_gradients=gradients,
    )


def _rms_norm(name: str, shape: Shape, numerics: LayerNumerics, *, users: tuple[str, ...] | str) -> LayerStep:
    """x * rsqrt(mean(x^2)), rounded to bfloat16, times the weight; without its input x.

    Args:
        users: The linears that take its output.
    """
    residual = _residual(shape, numerics)  # [T, h]
    saved = FLOAT32 * numerics.tokens  # rsqrt [T, 1] float32
    # Backward: the output's gradient, that gradient times the weight, one [T, h] float32 (or that and the result), and
    # the gradient that bypasses the norm.
    backward = 3 * residual + FLOAT32 * numerics.tokens * shape.hidden
    if _norm_output_saved(shape, numerics, users):  # which is freed before this step's backward
        return LayerStep(name, saved + residual, backward_transient=backward - residual)
    return LayerStep(name, saved, forward_transient=residual, backward_transient=backward)


def _norm_output_saved(shape: Shape, numerics: LayerNumerics, users: tuple[str, ...] | str) -> bool:
    """Whether linears, or an MLP in tiles, save the norm's output [T, h]."""
    if numerics.tile and "up" in users:
        return True
    return numerics.base_trained or any(shape.linears[name].rank for name in users)


def _linear(linear: Linear, numerics: LayerNumerics, forward_live: int, backward_live: int) -> LayerStep:
    """The base product plus the two adapter products, which add into the same output and input gradient.

    The step that makes the input counts it.

    Args:
        forward_live: Bytes of other steps' tensors that live during forward.
        backward_live: Bytes that live during backward.
    """
    given = HALF * numerics.tokens * linear.inputs  # [T, inputs] bfloat16: the input, or its gradient
    result = HALF * numerics.tokens * linear.outputs  # [T, outputs] bfloat16: the output, or its gradient
    if numerics.base_trained:
        return LayerStep(
            linear.name,
            forward_transient=forward_live + result,
            backward_transient=backward_live + given,
            weight_gradients=HALF * linear.weights,  # [outputs, inputs] bfloat16
            kept_when_selective=result,
        )
    # bitsandbytes: the weight [outputs, inputs] in bfloat16, and a float32 scale for each block.
    dequantised = 0
    if numerics.four_bit:
        dequantised = HALF * linear.weights + FLOAT32 * linear.weights // QUANTISED_BLOCK
    quantising, as_stored = 0, 0
    if numerics.float8:
        # Quotients [T, inputs] float32 and their float8 numbers; then those beside the result.
        dequantised, as_stored = 5 * numerics.tokens * linear.inputs, numerics.tokens * linear.inputs
        # Backward: the gradient times the scales in bfloat16, quotients, float8 numbers [T, outputs]; then those beside
        # W8 transposed and the product [T, inputs], which is added to the adapters' part.
        quantising = max(
            7 * numerics.tokens * linear.outputs, linear.weights + numerics.tokens * linear.outputs + given
        )
    base = LayerStep(
        linear.name,
        forward_transient=forward_live + result + as_stored,
        backward_transient=backward_live + given,
        dequantised_weights=dequantised,
        dequantise_transient=forward_live + result * (not numerics.float8),
        backward_workspace=quantising if numerics.float8 else None,
        kept_when_selective=result,
    )
    if not linear.rank:
        return base
    inner = HALF * numerics.tokens * linear.rank  # [T, r] bfloat16: x A^T, and its gradient
    adapter_weights = HALF * linear.adapter_weights  # [r, inputs] and [outputs, r] bfloat16
    return replace(
        base,
        saved_for_backward=inner,
        cast_weights=adapter_weights * numerics.adapters_cast,
        backward_transient=base.backward_transient + inner,
        weight_gradients=adapter_weights,
        kept_when_selective=result + inner,
    )
