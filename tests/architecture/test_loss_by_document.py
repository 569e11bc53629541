"""Sums by document against torch's own cross-entropy in float64, with another slope for each document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from finetune.architecture import loss as loss_module
from finetune.architecture.loss import AS_IT_IS, LogitTransform, OwnRows, chunk_rows, summed_cross_entropy
from finetune.architecture.operations import nested_tensors
from finetune.planner.trace.recorder import OnOperations
from finetune.tokens.tokenizer import IGNORE

VOCABULARY, HIDDEN = 61, 16
LENGTHS = (5, 9, 1, 12)  # supervised tokens of four documents
SLOPES = torch.tensor([0.3, -1.7, 2.0, 0.0], dtype=torch.float64)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 40, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, (1, 40), generator=generator)
    supervised = torch.randperm(40, generator=generator)[: sum(LENGTHS)].sort().values
    kept = torch.full_like(targets, IGNORE)
    kept[0, supervised] = targets[0, supervised]
    return hidden, weight, bias, kept, supervised


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, supervised: Tensor, transform: LogitTransform
) -> tuple[Tensor, list[Tensor]]:
    leaves = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    logits = transform.inner * F.linear(*leaves)[0]
    if transform.outer is not None:
        logits = transform.outer * logits.tanh()
    losses = F.cross_entropy(logits[supervised], targets[0, supervised], reduction="none")
    sums = torch.stack([part.sum() for part in losses.split(list(LENGTHS))])
    return sums, list(torch.autograd.grad((sums * SLOPES).sum(), leaves))


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())


@pytest.mark.parametrize("transform", [AS_IT_IS, LogitTransform(0.5), LogitTransform(1 / 3, 3.0)])
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [4, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1.2e-2)])
def test_sums_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    bound: float,
    tokens_per_chunk: int,
    trains_head: bool,
    transform: LogitTransform,
) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: tokens_per_chunk)
    hidden, weight, bias, targets, supervised = inputs(dtype)
    expected, gradients = reference(hidden, weight, bias, targets, supervised, transform)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(trains_head), bias.requires_grad_(trains_head)]
    sums = summed_cross_entropy(hidden, weight, targets, bias, supervised, transform, answer_lengths=LENGTHS)
    assert sums.dtype == torch.float32
    assert far(sums, expected) < bound
    (sums * SLOPES.float()).sum().backward()
    for leaf, gradient in zip(leaves[: 3 if trains_head else 1], gradients, strict=False):
        assert leaf.grad is not None
        assert far(leaf.grad, gradient) < bound
    with torch.no_grad():
        again = summed_cross_entropy(hidden, weight, targets, bias, supervised, transform, answer_lengths=LENGTHS)
    assert torch.equal(again, sums)


def test_rows_of_their_own_are_trained() -> None:
    hidden, weight, _, targets, supervised = inputs(torch.float32)
    ids = torch.tensor([3, 40])
    rows = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    whole = weight.double().index_copy(0, ids, rows.detach().double()).requires_grad_()
    losses = F.cross_entropy(F.linear(hidden.double(), whole)[0][supervised], targets[0, supervised], reduction="none")
    expected = torch.stack([part.sum() for part in losses.split(list(LENGTHS))])
    gradient = torch.autograd.grad((expected * SLOPES).sum(), whole)[0][ids]
    sums = summed_cross_entropy(
        hidden.requires_grad_(), weight, targets, None, supervised, AS_IT_IS, OwnRows(ids, rows), LENGTHS
    )
    (sums * SLOPES.float()).sum().backward()
    assert far(sums, expected) < 1e-6
    assert rows.grad is not None
    assert far(rows.grad, gradient) < 1e-6


def test_a_document_alone_has_the_sum_that_it_has_beside_others() -> None:
    hidden, weight, bias, targets, supervised = inputs(torch.float32)
    together = summed_cross_entropy(hidden, weight, targets, bias, supervised, answer_lengths=LENGTHS)
    first = supervised[: LENGTHS[0]]
    end = int(first[-1]) + 1
    alone = summed_cross_entropy(hidden[:, :end], weight, targets[:, :end], bias, first, answer_lengths=LENGTHS[:1])
    torch.testing.assert_close(alone, together[:1], rtol=1e-6, atol=0)


def test_no_document_gives_no_sum_and_a_graph() -> None:
    hidden, weight, bias, targets, _ = inputs(torch.float32)
    nothing = torch.empty(0, dtype=torch.int64)
    sums = summed_cross_entropy(hidden.requires_grad_(), weight, targets, bias, nothing, answer_lengths=())
    assert sums.shape == (0,)
    sums.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("trains_head", [False, True])
def test_no_tensor_has_all_logits(trains_head: bool) -> None:
    """Of 4,096 tokens and 32,000 words: forward and backward hold a chunk's logits at a time."""
    vocabulary, tokens = 32_000, 4096
    hidden = torch.randn(1, tokens, 8).requires_grad_()
    weight = torch.randn(vocabulary, 8).requires_grad_(trains_head)
    targets = torch.randint(0, vocabulary, (1, tokens))
    largest = 0

    def note(func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        nonlocal largest
        result = run()
        largest = max([largest, *(tensor.numel() for tensor in nested_tensors(result))])
        return result

    with OnOperations(note):
        sums = summed_cross_entropy(hidden, weight, targets, None, torch.arange(tokens), answer_lengths=(2048, 2048))
        (sums * torch.tensor([0.5, -0.5])).sum().backward()
    assert largest == chunk_rows(vocabulary) * vocabulary < tokens * vocabulary / 1.9
