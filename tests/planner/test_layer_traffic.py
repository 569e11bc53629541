"""A decoder layer's step launches and moves no more than it did: casts and copies that come back show here first."""

from __future__ import annotations

import pytest

from tests.support.layer_traffic import TOKENS, layer_step, recipe_of

H, KV, INNER = 4096, 1024, 14336  # Llama 3.1 8B: hidden size, keys' and values', MLP's
# Kernels, and bytes a token outside of matrix products and attention. A step that needs fewer lowers its row.
MOST = {"lora": (174, 1_890_304), "full": (133, 2_591_004)}


@pytest.mark.parametrize("method", MOST)
def test_no_more_kernels_and_bytes_than_there_were(method: str) -> None:
    """One kernel more, or one more pass over a hidden state, and this is red."""
    found = layer_step(recipe_of(method, recomputed=False))
    assert (found["kernels"] <= MOST[method][0], found["other bytes a token"] <= MOST[method][1]) == (True, True)
    # A whole layer was counted: forward, the gradient of the input, and of the weights where they are trained.
    products = 2 * TOKENS * (2 * H * H + 2 * H * KV + 3 * H * INNER) * (3 if method == "full" else 2)
    assert found["product TFLOP"] * 1e12 == pytest.approx(products, rel=0.02)
