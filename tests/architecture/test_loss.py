"""The chunked loss against torch's own, in float64, for heads of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from finetune.architecture import loss as loss_module
from finetune.architecture.loss import AS_IT_IS, LogitTransform, OwnRows, summed_cross_entropy
from finetune.tokens.tokenizer import IGNORE

VOCABULARY, HIDDEN = 97, 32
ALL, SUPERVISED = 100, 91  # positions in `inputs`


def inputs(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, 50, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, VOCABULARY, (2, 50), generator=generator)
    targets[0, :9] = IGNORE
    return hidden, weight, offset, targets


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform = AS_IT_IS
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = transform.inner * F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    logits = logits if transform.outer is None else transform.outer * logits.tanh()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, list(torch.autograd.grad(loss * 0.3, leaves))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def positions(targets: Tensor) -> Tensor:
    return (targets.flatten() != IGNORE).nonzero().flatten()


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 8, 100, 1000])  # 8: the last chunk is not a whole one
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bound: float, tokens_per_chunk: int, bias: bool, indexed: bool
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * VOCABULARY * tokens_per_chunk)
    hidden, weight, offset, targets = inputs(dtype, bias=bias)
    assert (targets.numel(), len(positions(targets))) == (ALL, SUPERVISED)
    expected, gradients = reference(hidden, weight, offset, targets)
    loss = summed_cross_entropy(hidden, weight, targets, offset, positions(targets) if indexed else None)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.item() / expected.item() - 1) < (1e-6 if dtype == torch.float32 else 1e-3)
    (loss * 0.3).backward()
    for ours, theirs in zip([x for x in (hidden, weight, offset) if x is not None], gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < bound


@pytest.mark.parametrize("transform", [LogitTransform(0.25), LogitTransform(1 / 3, 3.0), LogitTransform(2.0, 0.7)])
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_and_capped_logits(monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, bias: bool) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * VOCABULARY * 8)
    hidden, weight, offset, targets = inputs(torch.float32, bias=bias)
    expected, gradients = reference(hidden, weight, offset, targets, transform)
    assert expected.item() != pytest.approx(reference(hidden, weight, offset, targets)[0].item(), rel=0.01)
    loss = summed_cross_entropy(hidden, weight, targets, offset, positions(targets), transform)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        evaluated = summed_cross_entropy(hidden, weight, targets, offset, None, transform)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss * 0.3).backward()
    for ours, theirs in zip([x for x in (hidden, weight, offset) if x is not None], gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 1e-6


@pytest.mark.parametrize("transform", [AS_IT_IS, LogitTransform(1 / 3, 3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("tokens_per_chunk", [8, 1000])
def test_rows_that_stand_in_the_heads(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, transform: LogitTransform
) -> None:
    """Against a head that is put together first; those rows are targets too, and the head itself learns nothing."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * VOCABULARY * tokens_per_chunk)
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    ids = torch.tensor([3, 95, 40])
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    targets[1, ::7] = 95
    leaves = [hidden.detach().double().requires_grad_(), rows.double().requires_grad_()]
    logits = transform.inner * F.linear(leaves[0], weight.detach().double().index_copy(0, ids, leaves[1]))
    logits = logits if transform.outer is None else transform.outer * logits.tanh()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    gradients = torch.autograd.grad(expected * 0.3, leaves)
    frozen, own = weight.detach(), OwnRows(ids, rows.requires_grad_())
    loss = summed_cross_entropy(hidden, frozen, targets, None, positions(targets), transform, own)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        evaluated = summed_cross_entropy(hidden, frozen, targets, None, None, transform, own)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss * 0.3).backward()
    for ours, theirs in zip((hidden, rows), gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 1e-6


def test_a_chunk_size_leaves_a_rest_in_both_counts() -> None:
    assert ALL % 8
    assert SUPERVISED % 8


def test_frozen_head_gets_no_gradient_and_hidden_the_same_one() -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    _, gradients = reference(hidden, weight, None, targets)
    (summed_cross_entropy(hidden, weight.detach(), targets) * 0.3).backward()
    assert hidden.grad is not None
    assert relative(hidden.grad, gradients[0]) < 1e-6


def test_trained_head_under_frozen_hidden() -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    _, gradients = reference(hidden, weight, None, targets)
    (summed_cross_entropy(hidden.detach(), weight, targets) * 0.3).backward()
    assert weight.grad is not None
    assert relative(weight.grad, gradients[1]) < 1e-6


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
def test_nothing_learned_is_zero(indexed: bool) -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    none = torch.full_like(targets, IGNORE)
    loss = summed_cross_entropy(hidden, weight, none, None, positions(none) if indexed else None)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
def test_autocast_multiplies_in_its_own_dtype(indexed: bool) -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    where = positions(targets) if indexed else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_cross_entropy(hidden, weight, targets, None, where)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    expected = summed_cross_entropy(rounded[0], rounded[1], targets, None, where)
    assert loss.item() == expected.item()
    loss.backward()
    expected.backward()
    for ours, theirs in zip((hidden, weight), rounded, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad.bfloat16(), theirs.grad)


def test_no_gradient_wanted_computes_none() -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    with torch.no_grad():
        loss = summed_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    assert loss.item() == summed_cross_entropy(hidden, weight, targets).item()


def test_all_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    linear = F.linear

    def watched(*arguments: Tensor) -> Tensor:
        nonlocal largest
        logits = linear(*arguments)
        largest = max(largest, logits.numel())
        return logits

    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * VOCABULARY * 10)
    monkeypatch.setattr(loss_module.F, "linear", watched)
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    summed_cross_entropy(hidden, weight, targets).backward()
    assert largest == VOCABULARY * 10


def test_the_head_is_applied_to_what_is_learned_alone() -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    targets[1, 5:] = IGNORE
    products = 2 * HIDDEN * VOCABULARY * 3  # forward, the gradient of hidden, that of the head
    for supervised, count in ((None, 100), (positions(targets), 41 + 5)):
        with FlopCounterMode(display=False) as counter:
            summed_cross_entropy(hidden, weight, targets, None, supervised).backward()
        assert counter.get_total_flops() == products * count
