"""A decoder layer's step launches and moves no more than it did: casts and copies that come back show here first."""

from __future__ import annotations

import pytest

from tests.support.memory.compiled_traffic import Kernel, by_column, compiled_kernels
from tests.support.memory.layer_traffic import TOKENS, largest_operations, layer_step, recipe_of

H, KV, INNER = 4096, 1024, 14336  # Llama 3.1 8B: hidden size, keys' and values', MLP's
# Kernels, and bytes a token outside of matrix products and attention. A step that needs fewer lowers its row.
MOST = {"lora": (163, 1_325_104), "full": (124, 2_058_580)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", MOST)
def test_no_more_kernels_and_bytes_than_there_were(method: str) -> None:
    """One kernel more, or one more pass over a hidden state, and this is red."""
    found = layer_step(recipe_of(method, recomputed=False))
    assert (found["kernels"] <= MOST[method][0], found["other bytes a token"] <= MOST[method][1]) == (True, True)
    # A whole layer was counted: forward, the gradient of the input, and of the weights where they are trained.
    products = 2 * TOKENS * (2 * H * H + 2 * H * KV + 3 * H * INNER) * (3 if method == "full" else 2)
    assert found["product TFLOP"] * 1e12 == pytest.approx(products, rel=0.02)


@pytest.mark.slow
def test_the_largest_operations_are_of_these_bytes() -> None:
    recipe = recipe_of("lora", recomputed=False)
    every = largest_operations(recipe, count=1_000)
    assert sum(gigabytes for _, gigabytes in every.values()) == pytest.approx(layer_step(recipe)["other GB"], abs=0.02)
    assert "mul_" in list(every)[:2]
    assert list(largest_operations(recipe, count=3)) == list(every)[:3]


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SHORT = 64  # tokens
# The same of a compiled layer of those sizes: fused kernels, and their bytes.
MOST_COMPILED = {"lora": (47, 2_624_528), "full, pure_bf16": (20, 2_093_584)}
# Of a linear layer: its own and the gradient of its input, those of two factors and of their inputs, three of weights.
PRODUCTS_OF_A_LINEAR = {"lora": 8, "full, pure_bf16": 3}


@pytest.mark.slow
@pytest.mark.parametrize("method", MOST_COMPILED)
def test_no_more_fused_kernels_and_bytes_than_there_were(method: str) -> None:
    kernels = compiled_kernels(method, recomputed=False, tokens=SHORT, **SMALL)
    found, nbytes = by_column(kernels), sum(kernel.nbytes for kernel in kernels if kernel.kind == "fused")
    assert (found["fused"] <= MOST_COMPILED[method][0], nbytes <= MOST_COMPILED[method][1]) == (True, True)
    assert (found["product"], found["attention"]) == (7 * PRODUCTS_OF_A_LINEAR[method], 2)
    assert found["kernels"] == found["fused"] + found["product"] + found["attention"]
    assert found["other GB"] == nbytes / 1e9
    # SwiGLU is one kernel forward, of gate, up and their result, and one backward, of a slope, these and their slopes.
    passes = [kernel.nbytes / (2 * SHORT * SMALL["intermediate_size"]) for kernel in kernels if is_swiglu(kernel)]
    assert passes == [3, 5]


def is_swiglu(kernel: Kernel) -> bool:
    return kernel.kind == "fused" and "exp.default" in kernel.operations
