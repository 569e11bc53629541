"""Selective recomputation under every kind of strategy: the bits of a run without recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.one_curve import LENGTHS, curve_of, write_curve_recipe

PACKED = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"training": {"mixed_precision": "bf16"}}),
    "lora": ("lora", {}),
    "4 bits": (
        "lora",
        {"quantization": PACKED, "model": {"dtype": "bfloat16"}, "training": {"mixed_precision": "bf16"}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_offload", "zero2", "zero3", "zero3_offload"])
def test_the_curve_is_bitwise_that_without_recomputation(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    pages: dict[str, list[Path]] = {}
    for name, (method, changes) in METHODS.items():
        for setting in (False, "selective"):
            split = {"training": {"per_device_batch_size": 1, "max_steps": 2, "activation_checkpointing": setting}}
            folder = tmp_path / f"{name}-{setting}".replace(" ", "-")
            page = write_curve_recipe(folder, tiny_llama, chats, method, changes, split, accelerate_config=strategy)
            pages.setdefault(name, []).append(page)
    every = [page for both in pages.values() for page in both]
    assert launch(every, ranks=2, timeout=600) == [0] * 6
    alike = {name: curve_of(kept) == curve_of(recomputed) for name, (kept, recomputed) in pages.items()}
    assert alike == dict.fromkeys(METHODS, True)
    for _, recomputed in pages.values():
        receipt = json.loads((recomputed.parent / "run" / "receipt.json").read_text("utf-8"))
        assert (receipt["checkpointed_layers"], receipt["layers_keeping_products"]) == (2, 2)
