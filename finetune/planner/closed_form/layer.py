"""What one decoder layer holds in GPU memory, step by step: what each step leaves for backward, and what it takes while
it runs, forward and backward. Bytes, by arithmetic.

Written from transformers' Llama layer, peft's LoRA layer and CUDA's autocast lists, as they stand in an installation;
`tests/planner/test_closed_form.py` compares it with the trace, which runs them. Names of sizes: h hidden, f inner,
q queries, k keys, n heads, t tokens. `2 * t * h` are t x h numbers of two bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from finetune.planner.closed_form.shape import Linear, Shape

HALF, FLOAT32 = 2, 4
FLASH_BLOCK = 128  # rows that a block of flash attention's backward works on
QUANTISED_BLOCK = 64  # weights to a scale


@dataclass(frozen=True)
class Way:
    """How numbers flow through a layer."""

    tokens: int
    rows: int  # documents, or rows of a batch
    stream: int  # bytes of a number between layers: 4 where float32 weights are cast at each use
    trained: bool  # the layer's own weights are
    wide: bool  # adapters are float32 and cast at each use
    four_bit: bool
    whole_gradients: bool  # backward leaves a layer's gradients whole, for a strategy that reduces layer by layer


@dataclass(frozen=True)
class Step:
    """One part of a layer, in bytes.

    `kept` (activations) and `casts` (of weights) stay until this step's backward. `ahead` is what else lives while it
    runs forward, from the layer's beginning on, beside its input; `again`, while it is recomputed, where that is less:
    it stops as soon as all is there that backward needs; `back`, what else lives while it runs backward. `unpacked` are
    4-bit weights, written out for a part of the step, while `beside` lives forward. `gradients` of weights, in the
    computation's number format.
    """

    name: str
    kept: int = 0
    casts: int = 0
    ahead: int = 0
    back: int = 0
    again: int = 0
    unpacked: int = 0
    beside: int = 0
    gradients: int = 0


def layer_steps(shape: Shape, way: Way) -> list[Step]:
    """The steps in forward's order."""
    return [*_attention_half(shape, way), *_mlp_half(shape, way)]


def _attention_half(shape: Shape, way: Way) -> Iterator[Step]:
    t, s = way.tokens, way.stream
    h, q, k = shape.hidden, shape.queries, shape.keys
    wide = s == FLOAT32
    # Alive all the while beside the layer's input: its norm, which the decoder layer's frame holds.
    held, gradient = 0 if _keeps_norm(shape, way, "qkv") else s * t * h, s * t * h
    yield _norm("norm1", shape, way, "qkv", 0)
    done = 0
    for name in "qkv":
        linear = shape.linears[name]
        yield _linear(linear, way, ahead=held + done, back=gradient + 2 * s * t * h + done)
        done += HALF * t * linear.outputs
    if shape.normed_heads:
        # Each a norm over its heads: float32 copies, and what their own weights' gradients need.
        extra = (FLOAT32 + HALF * way.trained) * t * (q + k) + FLOAT32 * t * (shape.heads + shape.groups)
        yield Step("norm of heads", kept=extra, ahead=held + done + 10 * t * q, back=gradient + done + 20 * t * q)
    rotated = s * t * (q + k)
    yield Step("rope", ahead=held + done + 3 * s * t * q, back=gradient + 2 * done + 3 * s * t * q)
    output = HALF * t * q
    kept = HALF * t * (q + 2 * k) + output + FLOAT32 * t * shape.heads
    back = gradient + output + HALF * t * (q + 2 * k) + FLOAT32 * t * shape.heads + _flash(shape, way)
    yield Step("attention", kept=kept, ahead=held + rotated * wide, back=back)
    yield _linear(
        shape.linears["o"],
        way,
        ahead=held + rotated * wide,
        back=gradient + (HALF * t * h if wide else 0) + output,
        shared=True,
    )


def _mlp_half(shape: Shape, way: Way) -> Iterator[Step]:
    t, s = way.tokens, way.stream
    h, inner = shape.hidden, HALF * way.tokens * shape.inner
    wide = s == FLOAT32
    entering = 0 if wide else s * t * h
    held = entering + (0 if _keeps_norm(shape, way, ("gate", "up")) else s * t * h)
    gradient = s * t * h
    yield _norm("norm2", shape, way, ("gate", "up"), entering + (s * t * h if wide else 0))
    yield _linear(shape.linears["gate"], way, ahead=held, back=2 * gradient + inner)
    yield Step("silu", kept=inner, ahead=held + inner, back=2 * gradient + 2 * inner)
    yield _linear(shape.linears["up"], way, ahead=held + inner, back=gradient + 2 * inner)
    down = shape.linears["down"]
    yield Step("product", kept=2 * inner, ahead=held + inner, back=gradient + 3 * inner)
    product_kept = way.trained or (down.rank > 0 and not way.wide)
    flowing = inner * (not product_kept)
    last = _linear(down, way, ahead=held + flowing, back=gradient + HALF * t * h * wide, shared=True)
    # Recomputed when the adapter's second product asks for what it kept, of which the gradient is scaled by then.
    needed = 0 if way.trained or not down.rank else 2 * HALF * t * h + 2 * inner * way.wide
    yield replace(last, kept=last.kept + inner * product_kept, again=held + flowing + needed)


def _norm(name: str, shape: Shape, way: Way, users: tuple[str, ...] | str, entering: int) -> Step:
    """RMSNorm: float32 inside, back in the stream's format before it is scaled by its weight."""
    t, s, h = way.tokens, way.stream, shape.hidden
    wide = s == FLOAT32
    kept = FLOAT32 * t * h + FLOAT32 * t  # the input in float32, and one root a token
    kept += s * t * h * way.trained  # the norm, for its weight's gradient
    out = s * t * h
    keeps_output = _keeps_norm(shape, way, users)
    ahead = entering + (0 if wide else FLOAT32 * t * h + s * t * h * (not way.trained)) + out * (not keeps_output)
    # Backward of x * rsqrt(mean(x^2)): five float32 tensors at once, beside the gradient that goes around the norm.
    # What is kept of the norm for its weight and for its users is gone by then.
    back = 5 * FLOAT32 * t * h + s * t * h - s * t * h * way.trained - out * keeps_output
    return Step(name, kept + out * keeps_output, ahead=ahead, back=back)


def _keeps_norm(shape: Shape, way: Way, users: tuple[str, ...] | str) -> bool:
    """Whether the norm's output itself is what its users keep, rather than a cast of it each."""
    if way.stream == FLOAT32:
        return False
    return way.trained or (not way.wide and any(shape.linears[name].rank for name in users))


def _linear(linear: Linear, way: Way, *, ahead: int, back: int, shared: bool = False) -> Step:
    """A matrix product and its adapter. `ahead` and `back` are what lives around it; `shared`: its input is in the
    computation's format already and kept by another step."""
    t, rank, given, made = way.tokens, linear.rank, linear.inputs, HALF * way.tokens * linear.outputs
    unpacked = HALF * linear.weights + FLOAT32 * linear.weights // QUANTISED_BLOCK if way.four_bit else 0
    if way.trained:
        casting = way.stream == FLOAT32
        kept = HALF * t * given if casting and not shared else 0
        casts = HALF * linear.weights if casting else 0
        took = HALF * t * given + kept  # where the input was cast its gradient is too
        return Step(linear.name, kept, casts, ahead + made, back + took, gradients=HALF * linear.weights)
    if not rank:
        took = HALF * t * given
        return Step(linear.name, ahead=ahead + made, back=back + took, unpacked=unpacked, beside=ahead + made)
    kept, casts, widened = HALF * t * rank, 0, 0
    if way.wide:
        kept += HALF * t * given  # the adapter's input, cast down again
        casts = HALF * linear.adapter
        widened = FLOAT32 * t * given
    # The base's product, the adapter's, that times its scale; the sum comes when one of them is gone.
    took = max(made, 2 * HALF * t * given)
    return Step(
        linear.name,
        kept,
        casts,
        ahead=ahead + widened + 3 * made,
        back=back + took,
        unpacked=unpacked,
        beside=ahead + made,
        gradients=HALF * linear.adapter,
    )


def _flash(shape: Shape, way: Way) -> int:
    """What flash attention's backward sums in float32, and keys' and values' gradients of every head of a group."""
    rows = way.tokens + FLASH_BLOCK * way.rows
    multiple = 32 if shape.head <= 128 else 64
    sums = rows * shape.heads * (-(-shape.head // multiple) * multiple + 1) * FLOAT32
    return sums + (2 * HALF * way.tokens * shape.queries if shape.heads != shape.groups else 0)
