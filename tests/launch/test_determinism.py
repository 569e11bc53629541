"""Deterministic kernels while a run on a GPU trains, and torch as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from finetune.errors import EnvironmentMismatch
from finetune.launch.determinism import deterministic_algorithms

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def state() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = state()
    yield
    assert state() == before
    torch.use_deterministic_algorithms(False)


def test_within_the_block_alone() -> None:
    assert state() == (False, False, True)
    with deterministic_algorithms(True, GPU):
        assert state() == (True, False, False)
    for wanted, device in ((False, GPU), (True, CPU)):
        with deterministic_algorithms(wanted, device):
            assert state() == (False, False, True)


def test_what_the_user_set_comes_back_after_an_error_too() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True, GPU):
        raise ZeroDivisionError
    assert state() == (True, True, True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operation", ["cumsum_cuda_kernel", "_histc_cuda with floating point input"])
def test_an_operation_without_such_a_kernel_is_named_in_a_line(operation: str) -> None:
    refusal = (
        f"{operation} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms("
        "True)'. You can turn off determinism just for this operation"
    )
    with pytest.raises(EnvironmentMismatch) as caught, deterministic_algorithms(True, GPU):
        raise RuntimeError(refusal)
    text = str(caught.value)
    assert text.startswith("training.deterministic: torch ")
    assert f"no deterministic kernel for {operation}, " in text
    assert "set training.deterministic=false" in text
    assert "\n" not in text


def test_torch_words_its_refusal_so() -> None:
    """By an operation that is refused on a CPU too."""
    values, index = torch.zeros(2, 2), torch.zeros(1, dtype=torch.long)
    with (
        pytest.raises(EnvironmentMismatch, match="no deterministic kernel for put_"),
        deterministic_algorithms(True, GPU),
    ):
        values.put_(index, torch.ones(1), accumulate=False)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot"), deterministic_algorithms(True, GPU):
        torch.ones(2, 3) @ torch.ones(2, 3)
