"""Deterministic kernels while a run on a GPU trains, and torch as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

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


def test_experts_count_their_tokens_in_integers() -> None:
    """torch has a deterministic histogram on CUDA for integers alone; transformers before 5.1 counted in float32."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    with torch.device("meta"):  # which takes the branch of CUDA
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.set_experts_implementation("grouped_mm")
        tokens, chosen = torch.empty(8, 32, dtype=torch.bfloat16), torch.empty(8, 2, dtype=torch.long)
        counted = Counted()
        with counted:
            model.model.layers[0].mlp.experts(tokens, chosen, torch.empty(8, 2, dtype=torch.bfloat16))
    assert counted.formats == [torch.int32]


class Counted(TorchFunctionMode):
    """The number formats in which histograms are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.histc:
            self.formats.append(args[0].dtype)
            return args[0].new_empty(kwargs["bins"])  # a histogram has no shape function
        return func(*args, **(kwargs or {}))
