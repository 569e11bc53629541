"""A layer's step launches and moves no more than was recorded: casts and copies that come back show here first."""

from __future__ import annotations

import json

import pytest

from benchmarks.layer_traffic import METHODS, RECOMPUTED, layer_step, recipe_of
from tests.support.recipe_results import RESULTS

RECORD = json.loads((RESULTS / "layer_traffic.json").read_text("utf-8"))
H, KV, INNER = 4096, 1024, 14336  # Llama 3.1 8B: hidden size, keys' and values', MLP's


@pytest.mark.parametrize(("method", "name"), [("lora", "lora"), ("full", "full, recomputed")])
def test_kernels_and_bytes_stay(method: str, name: str) -> None:
    """One kernel more, or one more pass over a hidden state of 2 bytes, and this is red."""
    now, then = layer_step(recipe_of(method, recomputed="recomputed" in name)), RECORD["layer"][name]
    assert now["kernels"] <= then["kernels"]
    assert now["forward kernels"] <= then["forward kernels"]
    assert now["other bytes a token"] <= then["other bytes a token"]


def test_the_record_is_of_every_method() -> None:
    assert len(RECORD["layer"]) == len(METHODS) * len(RECOMPUTED)
    for name, row in RECORD["layer"].items():
        products = 2 * RECORD["tokens"] * (2 * H * H + 2 * H * KV + 3 * H * INNER)
        # Forward and the gradient of the input; of the weights too where they are trained; and forward again.
        times = 2 + name.startswith("full") + ("recomputed" in name)
        assert 0.9 < row["product TFLOP"] * 1e12 / (times * products) < 1.05, name
        assert row["other bytes a token"] * RECORD["tokens"] == pytest.approx(1e9 * row["other GB"], rel=1e-6)
