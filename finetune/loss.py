"""Summed token cross-entropy that never holds all logits.

The language-model head of Llama 3 turns 8,192 tokens into 4.2 GB of float32 logits, and their gradient into as much
again. Here the head is applied to a few hundred tokens at a time, and what backward needs, the gradient of the hidden
states and of the head, is computed in the same pass, so that no logits outlive their chunk and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from finetune.conversations import IGNORE

# One chunk's float32 logits stay near this size: 512 tokens of Llama 3's vocabulary, enough for a matrix product to be
# bound by arithmetic rather than by reading the head, and 32 times less than 16k tokens would need whole.
CHUNK_BYTES = 256 * 2**20


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum over supervised positions of -log softmax(hidden @ weight.T + bias)[target].

    hidden: [..., hidden_size]; weight: [vocabulary, hidden_size]; targets: [...] with IGNORE (-100) where nothing is
    learned, already shifted. Returns a float32 scalar. The matrix products run in autocast's dtype where autocast is
    on, else in `hidden`'s; softmax, sum and the head's gradient accumulate in float32.

    Gradients are those of the summed loss, for one backward: neither `retain_graph` nor higher derivatives work. The
    same idea as torch 2.13's chunked `linear_cross_entropy`, which torch 2.11 lacks and whose sum in bf16 is up to
    3.8 % off.
    """
    if torch.is_grad_enabled():
        return cast(Tensor, _ChunkedCrossEntropy.apply(hidden, weight, bias, targets))  # type: ignore[no-untyped-call]
    return _pass(hidden, weight, bias, targets, (False, False, False))[0]


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        loss, *gradients = _pass(hidden, weight, bias, targets, ctx.needs_input_grad)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a second copy of the head's gradient would be 2.1 GB for Llama 3 8B.
        return (*(None if g is None else g.mul_(upstream[0]) for g in ctx.saved_tensors), None)


def _pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, wants: Sequence[bool]
) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    """One pass over chunks of tokens: loss, and those of the gradients of hidden, weight and bias that are wanted."""
    dtype = _compute_dtype(hidden)
    flat, target = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # [tokens, hidden_size], [tokens]
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(flat) if wants[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[2] else None
    cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, flat.shape[0], chunk):
            now = slice(start, start + chunk)
            part = flat[now].to(dtype)
            logits = F.linear(part, cast_weight, cast_bias).float()  # [chunk, vocabulary]
            loss += F.cross_entropy(logits, target[now], ignore_index=IGNORE, reduction="sum")
            if not any(wants[:3]):
                continue
            slope = _softmax_minus_target(logits, target[now]).to(dtype)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            if grad_hidden is not None:
                grad_hidden[now] = slope @ cast_weight
            if grad_weight is not None:
                grad_weight += slope.T @ part
    gradients = grad_hidden, grad_weight, grad_bias
    whole = (
        None if gradient is None or like is None else gradient.to(like.dtype).view(like.shape)
        for gradient, like in zip(gradients, (hidden, weight, bias), strict=True)
    )
    return loss, *whole


def _softmax_minus_target(logits: Tensor, target: Tensor) -> Tensor:
    """d loss / d logits, written over the logits: softmax minus one at the target, zero where nothing is learned."""
    slope = torch.softmax(logits, dim=1, out=logits)  # [chunk, vocabulary]
    slope.scatter_add_(1, target.clamp(min=0).unsqueeze(1), slope.new_full((len(target), 1), -1.0))
    return slope.mul_((target != IGNORE).unsqueeze(1))
