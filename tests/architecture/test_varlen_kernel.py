"""What a GPU alone runs, on a CPU with a stand-in for the kernel: the formulas, and the operator's arguments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from finetune.architecture.varlen_kernel import attend_on_cuda
from finetune.errors import EnvironmentMismatch
from tests.support import varlen_stand_in

LENGTHS = (5, 20, 1, 13)
SCALE = 0.3


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (4,)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def starts() -> Tensor:
    return torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def plainly(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """As transformers' eager attention: one more score in each softmax, whose share is thrown away."""
    documents = []
    for start, end in pairwise(starts().tolist()):
        q, k, v = (x[0, :, start:end].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance < (window or end))
        scores = (q @ k.mT * SCALE).masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, end - start, 1)], dim=-1)
        documents.append((scores.softmax(-1)[..., : end - start] @ v).transpose(0, 1))
    return torch.cat(documents)[None]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_sinks_forward_and_backward(with_sinks: bool, window: int | None) -> None:
    *inputs, sinks = drawn()
    leaves = [*inputs, sinks] if with_sinks else inputs
    output = attend_on_cuda(
        *inputs, starts=starts(), longest=20, scale=SCALE, window=window, sinks=sinks if with_sinks else None
    )
    expected = plainly(*inputs, sinks if with_sinks else None, window)
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * slope).sum(), leaves)
    theirs = torch.autograd.grad((expected * slope).sum(), leaves)
    for name, our, their in zip(("query", "key", "value", "sinks"), ours, theirs, strict=False):
        assert (our - their).norm() <= 1e-5 * their.norm(), name


def test_sinks_in_16_bits_are_rounded_once() -> None:
    *inputs, sinks = (x.detach().bfloat16() for x in drawn())
    output = attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None, sinks=sinks)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.double(), plainly(*inputs, sinks, None), rtol=2**-6, atol=2**-7)


def test_a_log_sum_exp_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        query: Tensor, *_: Any, scale: float, window_size: Any, return_aux: Any, enable_gqa: bool = False
    ) -> Any:  # torch 2.11's has no enable_gqa
        return query, torch.zeros(query.shape[:2])  # as torch's text has it

    *inputs, sinks = drawn()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    with pytest.raises(EnvironmentMismatch, match=r"log-sum-exp of shape \(39, 4\)"):
        attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None, sinks=sinks)


def test_the_operator_has_the_arguments_that_are_known() -> None:
    assert varlen_stand_in
    operator = torch.ops.torch_attn._varlen_attn_backward.default
    known = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
    assert [argument.name for argument in operator._schema.arguments] == known.split()
