"""The lecture `memory`: sums of terms, and the plan's bytes a parameter against counts of real tensors."""

from __future__ import annotations

import pytest
import torch

from lectures.memory import WAYS
from tests.support.lectures import held

LLAMA_1B = 1_235_814_400  # of meta-llama/Llama-3.2-1B
ANGLES = 2 * 32 * 4  # bytes of the rotary frequencies and of those before scaling: float32, half a head of 64
COUNTS = (16 * 9 + 2) * 4  # of AdamW's step count of each tensor: nine a layer, embeddings, last norm


def test_sixteen_eighteen_twenty() -> None:
    assert [sum(terms) for terms in WAYS.values()] == [16, 18, 20]


def test_adamw_has_two_moments_as_wide_as_the_weight() -> None:
    """What the terms are made of, of torch itself."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight])
        optimizer.step()
        moments = sum(each.nbytes for each in optimizer.state[weight].values() if each.dim())
        assert (weight.nbytes + weight.grad.nbytes + moments) / weight.numel() == 4 * dtype.itemsize


@pytest.mark.slow
def test_the_plan_of_one_billion() -> None:
    facts = held("memory").facts
    assert facts["parameters"] == LLAMA_1B
    variants = {name: each["parts"] for name, each in facts["variants"].items()}
    assert list(variants) == ["as written", "float32", "all bf16", "int8 + LoRA"], "as written has 16-bit copies"
    full, half, written = variants["float32"], variants["all bf16"], variants["as written"]
    assert (full["parameters"], full["optimizer state"]) == (4 * LLAMA_1B + ANGLES, 8 * LLAMA_1B + COUNTS)
    assert (half["parameters"], half["optimizer state"]) == (2 * LLAMA_1B + ANGLES, 4 * LLAMA_1B), "one count for all"
    assert written["parameters"] == 4 * LLAMA_1B + ANGLES
    assert written["cast weights"] == 2 * LLAMA_1B
    for each in facts["variants"].values():
        assert sum(each["parts"].values()) == each["peak_bytes"]
    assert facts["variants"]["float32"]["state_bytes"] == 16 * LLAMA_1B + ANGLES + COUNTS


@pytest.mark.slow
def test_own_recipe_takes_its_own_settings() -> None:
    facts = held("memory", "recipes/smollm2_135m_full_cpu.yaml", "training.optim=adamw_8bit").facts
    assert facts["recipe"].endswith("smollm2_135m_full_cpu.yaml")
    parts = facts["variants"]["as written"]["parts"]
    assert 2 * facts["parameters"] < parts["optimizer state"] < 5 * facts["parameters"]
