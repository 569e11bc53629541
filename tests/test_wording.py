"""Counts in messages."""

from __future__ import annotations

import pytest

from finetune.strategies.receipt import describe
from finetune.wording import counted


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1234567, "1,234,567 rows")]
)
def test_a_count_and_its_noun(count: int, expected: str) -> None:
    assert counted(count, "row") == expected


def test_a_plural_of_its_own() -> None:
    assert [counted(count, "process", "processes") for count in (1, 2)] == ["1 process", "2 processes"]


def test_a_run_of_one_of_everything() -> None:
    """The run's description, whose four counts were "1 ranks x 1 micro-steps x 1 rows" before."""
    receipt = {
        "architecture": "LlamaForCausalLM",
        "parameters": {"trained": 10, "frozen": 90},
        "dtypes": {"master": "float32", "compute": "float32"},
        "strategy": "single",
        "world_size": 1,
        "device": "cpu",
        "adapted_modules": {"q_proj": 1},
        "reached_share": 0.25,
        "left_out": {"self_attn.k_proj": 0.75},
        "adds_left_out": "lora.target_modules: all-linear",
        "data": {"documents": 1, "fill": 0.5, "supervised_tokens": 1},
        "batch": {"world_size": 1, "micro_steps": 1, "per_device_batch_size": 1},
    }
    assert describe(receipt).splitlines()[1:] == [
        "adapters on 1 layer: q_proj 1; 25% of the matrices' weights",
        "left out: self_attn.k_proj 75%; lora.target_modules: all-linear adds them",
        "data: 1 document in rows that are 50% full, 1 token learned",
        "batch: 1 rank x 1 micro-step x 1 row",
    ]
