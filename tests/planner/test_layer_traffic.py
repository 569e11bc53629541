"""A decoder layer's step launches and moves no more than it did: casts and copies that come back show here first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.memory.layer_traffic import TOKENS, compiled_step, layer_step, loss_step

H, KV, INNER = 4096, 1024, 14336  # hidden size, keys' and values', MLP's
# Kernels, products among them, and bytes a token outside of products and attention. A step that needs fewer lowers its
# row.
MOST = {"lora": (152, 47, 1_252_016), "full": (124, 21, 2_058_580)}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", MOST)
def test_no_more_kernels_and_bytes_than_there_were(method: str, tmp_path: Path) -> None:
    """One kernel more, or one more pass over a hidden state, and this is red."""
    found = layer_step(method, tmp_path)
    row = found["kernels"], found["products"], found["other"] // TOKENS
    assert all(each <= most for each, most in zip(row, MOST[method], strict=True)), row
    # A whole layer was counted: forward, the gradient of the input, and of the weights where they are trained.
    products = 2 * TOKENS * (2 * H * H + 2 * H * KV + 3 * H * INNER) * (3 if method == "full" else 2)
    assert found["product"] == pytest.approx(products, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*should not be instantiated")  # of torch
def test_a_compiled_layer_with_adapters_has_few_products() -> None:
    """93 kernels with 41 products. Layer by layer it has 105 with 56."""
    found = compiled_step("lora", tokens=128, head_dim=64, **SMALL)
    assert (found["kernels"], found["products"], found["attention"]) == (93, 41, 2)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_loss_is_one_kernel_that_reads_and_writes_the_logits_once() -> None:
    """2 + 2 bytes an element; as written 22, in 13 kernels."""
    written, fused = (loss_step(one_kernel=each, vocabulary=4096, rows=64) for each in (False, True))
    assert fused["kernels"] == 1
    assert written["kernels"] >= 10, "13 under torch 2.13"
    assert round(written["bytes"] / (64 * 4096)) == 22
    assert round(fused["bytes"] / (64 * 4096)) == 4
