"""The lecture `qlora`: parts against arithmetic, and the small model's plan against its run."""

from __future__ import annotations

import pytest

from finetune.planner.explain import NF4
from tests.support.lectures import held

LLAMA_8B, EMBEDDINGS = 8_030_261_248, 2 * 128_256 * 4_096
ADAPTERS = 41_943_040  # of rank 16 on all linear layers


@pytest.mark.slow
def test_parts_at_full_size() -> None:
    planned = held("qlora").facts["planned"]
    parts = {name: each["phases"][each["peak"]]["parts"] for name, each in planned.items()}
    assert parts["full"]["parameters"] == 4 * LLAMA_8B
    assert parts["full"]["optimizer state"] == 8 * LLAMA_8B
    assert parts["LoRA"]["parameters"] == 2 * LLAMA_8B + 4 * ADAPTERS
    assert parts["LoRA"]["optimizer state"] == 8 * ADAPTERS
    matrices = LLAMA_8B - EMBEDDINGS
    for name, each in (("QLoRA", NF4), ("QLoRA, plain scales", 0.5 + 4 / 64)):
        expected = each * matrices + 2 * EMBEDDINGS + 4 * ADAPTERS
        assert parts[name]["parameters"] == pytest.approx(expected, rel=1e-3)
    assert parts["QLoRA, paged AdamW"].get("optimizer state", 0) < 8 * ADAPTERS
    assert not planned["full"]["fits"]
    assert planned["QLoRA"]["fits"]


@pytest.mark.slow
def test_the_small_models_plan_is_its_run() -> None:
    facts = held("qlora").facts
    for name, phases in facts["small_measured"].items():
        for phase, seen in phases.items():
            planned = facts["small_planned"][name]["phases"][phase]["peak_bytes"]
            assert seen["peak"] == pytest.approx(planned, rel=0.1), (name, phase)
