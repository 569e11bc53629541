"""torch's variable-length flash attention on a CPU, by its formulas and in float32: importing this registers it.

The backward is what the kernel on a GPU computes: probabilities are exp(score - lse) of the `lse` that it is given, and
what is subtracted from the gradient of a probability is the product of `out` and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators
from torch import Tensor

assert torch.nn.attention.varlen

# What another implementation's results are multiplied with, output and gradients, and when it computed
# (tests/support/stand_ins/flash_stand_in.py).
FACTORS = {"output": 1.0, "gradients": 1.0}
# Heads of the keys that the kernel was given, for each forward.
KEY_HEADS: list[int] = []
# torch 2.11's operator has no enable_gqa and takes keys of fewer heads without a word.
SAYS_SHARED = any(each.name == "enable_gqa" for each in torch.ops.torch_attn._varlen_attn.default._schema.arguments)


def refuse_as_the_kernel(query: Tensor, key: Tensor, value: Tensor) -> None:
    """mha_varlen_fwd of torch's flash_api.cpp: what it checks before it computes."""
    width = query.shape[-1]
    if width > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if width % 8:
        raise RuntimeError("head_size should be a multiple of 8, this is ensured by padding!")
    if 192 < width <= 224:
        raise RuntimeError("CUDA error: invalid argument")  # of the backward, on GPUs with little shared memory
    if key.shape[-1] != width or value.shape[-1] != width:
        raise RuntimeError("k must have shape (total_k, num_heads_k, head_size)")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def _scores(
    query: Tensor, key: Tensor, starts: Tensor, scale: float, window: list[int]
) -> Iterator[tuple[slice, Tensor]]:
    """Of each document: where it is, and its masked scores [heads, tokens, tokens]."""
    for start, end in pairwise(starts.tolist()):
        at = slice(start, end)
        keys = key[at].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        yield at, (torch.einsum("qhd,khd->hqk", query[at], keys) * scale).masked_fill(~seen, float("-inf"))


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert scale is not None
    assert is_causal == (list(window_size) == [-1, 0])
    assert not SAYS_SHARED or enable_gqa == (query.shape[1] != key.shape[1])
    refuse_as_the_kernel(query, key, value)
    KEY_HEADS.append(key.shape[1])
    dtype, (query, key, value) = query.dtype, (x.float() for x in (query, key, value))
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for at, scores in _scores(query, key, cu_seq_q, scale, list(window_size)):
        lse[:, at] = scores.logsumexp(-1)
        values = value[at].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        output[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return (output * FACTORS["output"]).to(dtype), lse, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert scale is not None
    assert grad_out.stride(-1) == 1
    dtype, (grad_out, query, key, value, out) = query.dtype, (x.float() for x in (grad_out, query, key, value, out))
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    group = query.shape[1] // key.shape[1]
    for at, scores in _scores(query, key, cu_seq_q, scale, list(window_size)):
        probabilities = torch.exp(scores - lse[:, at, None])
        keys, values = (x[at].repeat_interleave(group, dim=1) for x in (key, value))
        of_values = torch.einsum("hqk,qhd->khd", probabilities, grad_out[at])
        product = (grad_out[at] * out[at]).sum(-1).T.unsqueeze(-1)  # [heads, tokens, 1]
        of_scores = probabilities * (torch.einsum("qhd,khd->hqk", grad_out[at], values) - product) * scale
        grads[0][at] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, query[at])
        for grad, each in ((grads[1], of_keys), (grads[2], of_values)):
            grad[at] = each.unflatten(1, (-1, group)).sum(2)
    of_query, of_key, of_value = ((each * FACTORS["gradients"]).to(dtype) for each in grads)
    return of_query, of_key, of_value
