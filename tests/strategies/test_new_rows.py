"""New tokens' rows where embeddings and head are shards: on one rank of FSDP2, in the formats of a GPU's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.new_tokens import KNOWN, TEXTS, TOKENS, save_base
from tests.support.models.tiny import flat_batch
from tests.support.runs.one_rank import one_rank
from tests.support.runs.recipes import least_recipe

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
STEPS = 3


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("tied", "quantization"), [(True, None), (False, NF4)], ids=["tied", "untied, over 4 bits"])
def test_sharded_rows_learn_what_whole_ones_do(tmp_path: Path, tied: bool, quantization: dict[str, Any] | None) -> None:
    base = save_base(tmp_path / "base", tie_word_embeddings=tied)
    losses: dict[str, list[float]] = {}
    rows: dict[str, dict[str, torch.Tensor]] = {}
    for strategy in ("single", "fsdp2"):
        recipe = least_recipe(
            base,
            model=TOKENS,
            lora={"r": 4},
            quantization=quantization,
            training={"weight_decay": 0.0},
            accelerate_config=strategy,
            output_dir=str(tmp_path / strategy),
        )
        with one_rank(recipe) as built:
            batch = flat_batch(vocabulary=KNOWN + len(TEXTS))
            losses[strategy] = [float(built.step([batch]).loss) for _ in range(STEPS)]
            trained = built.parts.trained_weights(dtype=None, keep=True)
        rows[strategy] = {name: weight for name, weight in trained.items() if "trainable_tokens_delta" in name}
    assert losses["fsdp2"] == pytest.approx(losses["single"], rel=1e-3)
    assert losses["single"][-1] < losses["single"][0]
    assert len(rows["single"]) == 2, "of embeddings and head, under two names also where they are one tensor"
    for name, weight in rows["fsdp2"].items():
        assert weight.dtype == torch.float32
        apart = (weight - rows["single"][name]).norm() / weight.norm()
        assert apart < 0.01, "where a gradient is rounding, AdamW takes a step of full length all the same"
