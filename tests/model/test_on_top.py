"""The frozen adapter below a trained one: it stays frozen, its sum keeps both scales, its file is looked at first."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from finetune.errors import FinetuneError
from finetune.model.on_top import add_frozen_adapter, as_the_base, fill, frozen_parameters, stack
from finetune.recipe.schema import Recipe
from finetune.untrusted.model_folder import patterns_of
from tests.support.models.tiny import tiny_model

BOMB = "((.*)*)*((.*)*)*((.*)*)*((.*)*)*((.*)*)*((.*)*)*zz"
LAYERS = "q_proj", "v_proj"


def adapter(folder: Path, seed: int, **settings: Any) -> Path:
    """A folder by peft's own save_pretrained, with an adapter that adds something."""
    torch.manual_seed(seed)
    adapted = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=[*LAYERS], **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder)
    return folder


def recipe_over(below: Path) -> Recipe:
    keys = {
        "model": {"name_or_path": "a/b", "adapter": str(below)},
        "lora": {"on_top": True},
        "data": {"train": [{"path": "a/b"}]},
    }
    return Recipe.model_validate(keys)


def over(below: Path, **settings: Any) -> Any:
    """peft's model with a new adapter over the one in `below`, which has its weights."""
    adapted: Any = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=[*LAYERS], **settings))
    add_frozen_adapter(adapted, recipe_over(below))
    saved = load_file(below / "adapter_model.safetensors")
    fill(adapted, {name: saved[name.replace(".start.", ".")] for name, _ in frozen_parameters(adapted)})
    return adapted


def trained(adapted: Any) -> set[str]:
    return {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}


def test_the_adapter_below_stays_frozen(tmp_path: Path) -> None:
    adapted = over(adapter(tmp_path / "below", 1, r=3), r=2)
    before = trained(adapted)
    assert before == {name for name, _ in adapted.named_parameters() if ".default." in name}
    ids = torch.tensor([[1, 2, 3]])
    base, both = tiny_model()(ids).logits, adapted(ids).logits
    with as_the_base(adapted):
        assert torch.equal(adapted(ids).logits, base)
    assert trained(adapted) == before
    assert torch.equal(adapted(ids).logits, both)
    assert not torch.allclose(both, base, atol=1e-3)


def test_the_sum_keeps_both_scales(tmp_path: Path) -> None:
    """Rank-stabilized both: 6 / sqrt(3) and, by pattern, 5 / sqrt(4) below; 8 / sqrt(2) above."""
    settings = {"use_rslora": True, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 5}}
    below = adapter(tmp_path / "below", 1, r=3, lora_alpha=6, **settings)
    above = adapter(tmp_path / "above", 2, r=2, lora_alpha=8, use_rslora=True)
    parts = [load_file(folder / "adapter_model.safetensors") for folder in (below, above)]
    stack(above, recipe_over(below), over(below, r=2), None)
    summed, config = (
        load_file(above / "adapter_model.safetensors"),
        json.loads((above / "adapter_config.json").read_text()),
    )
    seen = 0
    for key in (key for key in summed if key.endswith(".lora_A.weight")):
        path = key.removesuffix(".lora_A.weight")
        first = 5 / 4**0.5 if path.endswith("v_proj") else 6 / 3**0.5
        expected = sum(
            scale * part[f"{path}.lora_B.weight"] @ part[key]
            for scale, part in zip((first, 8 / 2**0.5), parts, strict=True)
        )
        rank = len(summed[key])
        patterns = config["rank_pattern"].values() if rank != config["r"] else [config["r"]]
        assert rank in patterns
        assert config["use_rslora"] is False
        torch.testing.assert_close(summed[f"{path}.lora_B.weight"] @ summed[key], expected)
        seen += 1
    assert seen == 2 * tiny_model().config.num_hidden_layers


def test_every_pattern_of_an_adapter_is_looked_at() -> None:
    names = ("target_modules", "exclude_modules", "layers_pattern")
    for config in (*({name: BOMB} for name in names), {"layers_pattern": [BOMB]}, {"modules_to_save": [BOMB]}):
        assert patterns_of(config) == [BOMB]
    assert patterns_of({"rank_pattern": {"a": 1}, "alpha_pattern": {"b": 2}}) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"rank_pattern": {BOMB: 4}}, "does not end within 1 second", marks=pytest.mark.thorough),
        pytest.param(
            {"layers_pattern": BOMB, "layers_to_transform": [0]},
            "does not end within 1 second",
            marks=pytest.mark.thorough,
        ),
        ({"rank_pattern": {"(": 4}}, "name an adapter of this base"),
        ({"rank_pattern": [4]}, "rank_pattern is a list, and must be a section"),
    ],
)
def test_a_strangers_patterns_are_tried_in_a_child(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    below = adapter(tmp_path / "below", 1, r=3)
    file = below / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    began = time.process_time()
    with pytest.raises(FinetuneError, match=rf"^model\.adapter: .*{said}"):
        over(below)
    assert time.process_time() - began < 20
