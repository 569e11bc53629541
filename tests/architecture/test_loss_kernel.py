"""A chunk's loss and slope as one kernel: against float64, beside the loss as written, and where it is left off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from finetune.architecture import loss
from finetune.architecture.compiled import loss_kernel
from finetune.architecture.compiled.loss_kernel import compare_with_written, compiled_loss, loss_in_one_kernel
from finetune.architecture.loss import summed_cross_entropy
from finetune.errors import EnvironmentMismatch
from tests.support.runs.recipes import least_recipe

CPU, BF16, WORDS = torch.device("cpu"), torch.bfloat16, 264


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's place is a CPU's, and no choice outlives the test."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loss, "ONE_KERNEL", {})


@pytest.mark.parametrize("inner", [1.0, 0.25])
def test_loss_and_slope_are_those_of_float64(inner: float) -> None:
    torch.manual_seed(0)
    product, target = (4 * torch.randn(7, WORDS)).bfloat16(), torch.randint(WORDS, (7,))
    exact = product.double().requires_grad_()
    expected = F.cross_entropy(inner * exact, target, reduction="none")
    expected.sum().backward()
    lost = loss_in_one_kernel(product, target, inner)
    assert torch.allclose(lost.squeeze(1).double(), expected.detach(), rtol=2e-6)
    assert exact.grad is not None
    assert torch.allclose(product.double(), exact.grad, rtol=2**-8, atol=1e-7), "rounded once, to bfloat16"


def weights_of(rows: int, trained: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((rows, 32), generator=generator).bfloat16().requires_grad_()
    weight = torch.randn((WORDS, 32), generator=generator).bfloat16().requires_grad_(trained)
    targets = torch.randint(WORDS, (rows,), generator=generator)
    return hidden, weight, targets, torch.arange(rows)[torch.arange(rows) % 5 != 2]


@pytest.mark.parametrize("trained", [False, True])
def test_a_pass_by_one_kernel_is_the_pass_as_written(
    trained: bool, capable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 8 of 40 supervised tokens; of the trained head's slopes several wait. One graph for all of them."""
    monkeypatch.setattr(loss, "chunk_rows", lambda vocabulary: 8)
    monkeypatch.setattr(loss, "gradient_rows", lambda *shape: 16)
    graphs, calls = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def results() -> tuple[torch.Tensor, ...]:
        hidden, weight, targets, supervised = weights_of(51, trained)
        total = summed_cross_entropy(hidden, weight, targets, supervised=supervised)
        total.backward()
        return total.detach(), hidden.grad, weight.grad if trained else torch.zeros(1)

    expected, compute = results(), compiled_loss(backend)

    def counted(*given: Any) -> torch.Tensor:
        calls.append(len(given[0]))
        result: torch.Tensor = compute(*given)
        return result

    monkeypatch.setitem(loss.ONE_KERNEL, "cpu", counted)
    found = results()
    assert calls == [8, 8, 8, 8, 8], "the last token alone is computed as written"
    assert len(graphs) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs.double()).norm()) <= 3e-3 * float(theirs.double().norm())
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)


def test_what_one_kernel_does_not_compute_is_computed_as_written(capable: None) -> None:
    """Float32, capped logits, tokens without a label, a loss without gradients, and a vocabulary of odd words."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the kernel was called")

    loss.ONE_KERNEL["cpu"] = refuse
    hidden, weight, targets, supervised = weights_of(12, trained=False)
    with torch.no_grad():
        summed_cross_entropy(hidden, weight, targets, supervised=supervised)
    summed_cross_entropy(hidden, weight, targets)
    summed_cross_entropy(hidden, weight, targets, supervised=supervised, transform=loss.LogitTransform(0.02, 50.0))
    summed_cross_entropy(hidden, weight[:-1], targets % 200, supervised=supervised)
    summed_cross_entropy(hidden.float(), weight.float(), targets, supervised=supervised)
    with pytest.raises(AssertionError, match="was called"):
        summed_cross_entropy(hidden, weight, targets, supervised=supervised)


def test_a_kernel_that_matches_is_used(capable: None) -> None:
    facts = loss_kernel.use_loss_kernel(least_recipe("x"), WORDS, CPU, BF16, backend="aot_eager")
    assert (facts["one_kernel"], facts["left_off"]) == (True, None)
    assert "cpu" in loss.ONE_KERNEL


@pytest.mark.parametrize("what", ["loss", "gradient", "nothing"])
def test_a_kernel_that_differs_is_left_off(what: str, capable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(product: torch.Tensor, target: torch.Tensor, inner: float) -> torch.Tensor:
        if what == "nothing":
            raise RuntimeError("no compiler")
        lost = loss_in_one_kernel(product, target, inner)
        product[5, 7] += 1e-3 if what == "gradient" else 0
        return lost * (1.0001 if what == "loss" else 1)

    monkeypatch.setattr(loss_kernel, "compiled_loss", lambda backend: wrong)
    loss.ONE_KERNEL["cpu"] = wrong
    facts = loss_kernel.use_loss_kernel(least_recipe("x"), WORDS, CPU, BF16)
    reason = "RuntimeError: no compiler" if what == "nothing" else f"compiled, its {what} differs by"
    assert facts["left_off"].startswith(reason)
    assert not loss.ONE_KERNEL
    with pytest.raises(EnvironmentMismatch, match=r"training\.compile: true: the loss: "):
        loss_kernel.use_loss_kernel(least_recipe("x", training={"compile": True}), WORDS, CPU, BF16)


def test_an_old_gpu_compiles_nothing(capable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    facts = loss_kernel.use_loss_kernel(least_recipe("x"), WORDS, CPU, BF16)
    assert facts == {"one_kernel": False, "left_off": "on a GPU before compute capability 8.0", "seconds": None}


@pytest.mark.thorough
def test_inductors_kernel_is_the_loss_as_written() -> None:
    """Its C++ on a CPU; the Triton kernel is made from the same operations."""
    assert compare_with_written(compiled_loss(), WORDS, CPU, BF16) is None
