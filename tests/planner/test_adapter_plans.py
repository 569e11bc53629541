"""Ranks by pattern, excluded layers and adapters on parameters are counted as they are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.closed_form.estimate import unsupported
from finetune.closed_form.shape import adapter_weights, shape_of
from finetune.model.build import build_model
from finetune.model.known_configs import full_config
from finetune.planner.arithmetic import explain_plan
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.schema import Recipe
from tests.support.models.new_tokens import TEXTS, TOKENS, save_base
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import half_recipe

CASES: dict[str, dict[str, Any]] = {
    "by name": {"rank_pattern": {"q_proj": 3, "mlp.*": 9}},
    "by layer": {"rank_pattern": {r"layers\.5\.mlp\..*": 64, "layers.0.self_attn.q_proj": 1}},
    "excluded": {"exclude_modules": ["k_proj", "layers.3.mlp.up_proj"]},
    "excluded by pattern": {"exclude_modules": r".*layers\.(1|2)\..*"},
    "some layers": {"target_modules": r"model\.layers\.[4-5]\.self_attn\.(q|v)_proj"},
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("deep"), num_hidden_layers=6)


def recipe(base: Path, lora: dict[str, Any]) -> Recipe:
    training = {"activation_checkpointing": False, "mixed_precision": "no", "global_batch_size": 1}
    model, data = {"dtype": "float32"}, {"max_length": 64}
    return half_recipe(base, model=model, lora={"r": 4, **lora}, training=training, data=data)


def trained(asked: Recipe) -> list[torch.Tensor]:
    return [tensor for tensor in build_model(asked, torch.device("meta")).parameters() if tensor.requires_grad]


@pytest.mark.parametrize("lora", CASES.values(), ids=CASES)
def test_the_closed_form_counts_the_adapters_that_are_built(deep: Path, lora: dict[str, Any]) -> None:
    asked = recipe(deep, lora)
    config, _ = full_config(str(deep), "main")
    built = sum(tensor.numel() for tensor in trained(asked))
    assert adapter_weights(asked, config) == built
    assert f"{built:,} weights" in explain_plan(asked, config, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [CASES["by layer"], {"target_modules": ["q_proj"], "target_parameters": ["5.mlp.up_proj.weight"]}], ids=str
)
def test_layers_that_differ_are_all_traced(deep: Path, lora: dict[str, Any]) -> None:
    """Their adapters' gradients and moments, to the byte; an extrapolation from four layers would not have them."""
    asked = recipe(deep, lora)
    tensors = trained(asked)
    weights = sum(tensor.numel() for tensor in tensors)
    for gpus in (None, parse_gpus("1x24gb")):
        step = plan_recipe(asked, gpus).phases["step"].peak.parts
        assert step["gradients"] == 4 * weights
        assert step["optimizer state"] == 8 * weights + 4 * len(tensors)


def test_what_the_closed_form_does_not_know_is_left_to_the_trace(deep: Path) -> None:
    config, _ = full_config(str(deep), "main")
    for lora, known in ((CASES["by name"], True), (CASES["by layer"], False), ({"target_parameters": ["x"]}, False)):
        asked = half_recipe(deep, lora={"r": 4, **lora})
        assert (unsupported(asked, config, parse_gpus("1x24gb")) is None) == known, lora


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(("lora", "tied"), [({"r": 4}, False), (None, True)], ids=["lora", "all weights, tied"])
def test_new_tokens_are_counted(tmp_path: Path, lora: dict[str, Any] | None, tied: bool) -> None:
    """Their rows' weights, gradients and moments, to the byte, of a model with and without a tokenizer beside it."""
    base = save_base(tmp_path, tie_word_embeddings=tied)
    plain = recipe(base, {}).model_copy(update={"lora": recipe(base, lora or {}).lora if lora else None})
    asked = plain.model_copy(update={"model": plain.model.model_copy(update=TOKENS)})
    rows = len(TEXTS) * 64 * (1 if tied else 2)
    config, _ = full_config(str(base), "main")
    if lora:
        assert adapter_weights(asked, config) == sum(tensor.numel() for tensor in trained(asked))
        assert adapter_weights(asked, config) - adapter_weights(plain, config) == rows
    else:
        counted = sum(tensor.numel() for tensor in trained(asked))
        assert shape_of(asked, config).total_weights == counted == shape_of(plain, config).total_weights + rows
    with_rows, without = (plan_recipe(each, None).phases["step"].peak.parts for each in (asked, plain))
    assert with_rows["gradients"] - without["gradients"] == 4 * rows
    kept = 4 * rows * (2 if lora else 1)  # beside adapters the frozen matrices have these rows as well
    assert with_rows["parameters"] - without["parameters"] >= kept
    assert with_rows["optimizer state"] - without["optimizer state"] >= 8 * rows
    halves = {"model": {"dtype": "bfloat16", **TOKENS}, "lora": lora}
    why = unsupported(half_recipe(base, **halves), config, parse_gpus("1x24gb"))
    assert why == ("lora: with model.add_tokens" if lora else None)


@pytest.mark.thorough
def test_adapters_over_four_bits_are_planned_as_the_kit_computes_them(deep: Path) -> None:
    """peft's way would keep a 16-bit copy of every adapter in autocast's cache."""
    asked = half_recipe(
        deep,
        model={"dtype": "bfloat16"},
        quantization={"load_in_4bit": True},
        lora={"r": 4},
        data={"max_length": 64},
        training={"compile": False},
    )
    plan = plan_recipe(asked, parse_gpus("24GB"))
    assert "cast weights" not in plan.phases["forward"].peak.parts
