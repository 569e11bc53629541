"""The text part of a multimodal checkpoint: the whole model's own text logits, and adapters that fit both of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.model.adapter_targets import adapted_paths, part_of
from finetune.model.build import build_model, decoder_parts, load_base, structure_alone
from finetune.model.known_configs import decoder_config, full_config
from finetune.model.new_tokens import load_tokenizer
from finetune.model.text_part import names_in_whole
from finetune.recipe.schema import Data, Recipe
from finetune.rehearse.shrink import shrink_model
from finetune.run_folder.save_restore import export_weights
from finetune.strategies.assemble import Assembled
from tests.support.models.multimodal import FAMILIES, WITH_TEXT_CLASS, answering, save_multimodal
from tests.support.models.tiny import flat_batch, write_chats
from tests.support.runs.recipes import least_recipe, merged

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]
PLAIN: dict[str, Any] = {"model": {"dtype": "float32"}, "training": {"mixed_precision": "no", "seed": 1}}


def recipe_of(folder: Path, run: Path | None = None, **sections: Any) -> Recipe:
    plain = merged(PLAIN, {"lora": {"r": 4}, "output_dir": str(run or folder)})
    return least_recipe(folder, **merged(plain, sections))


def whole_of(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def text_of(whole: Any) -> PreTrainedModel:
    """transformers' own text class with the whole model's weights, put in by their names."""
    config = whole.config.text_config
    config.tie_word_embeddings = whole.config.tie_word_embeddings
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if hasattr(whole, "language_model"):  # Llama 4
        weights = whole.language_model.state_dict()
    else:
        weights = {f"model.{name}": tensor for name, tensor in whole.model.language_model.state_dict().items()}
        weights |= {"lm_head.weight": whole.lm_head.weight}
    model.load_state_dict(weights)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = answering(model)(input_ids=IDS, use_cache=False).logits
    return result


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def trained(recipe: Recipe) -> nn.Module:
    """Two steps on packed documents, by the kit's own forward and loss."""
    model = build_model(recipe, CPU).train()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.02)
    for _ in range(2):
        model(**flat_batch((9, 17, 4), vocabulary=500)).backward()
        optimizer.step()
        optimizer.zero_grad()
    decoder_parts(model).set_attn_implementation("eager")  # which takes rows that do not say where documents end
    return model.eval()


def exported(recipe: Recipe, model: nn.Module) -> Path:
    weights = Assembled(model, model, None).trained_weights(dtype=None, keep=True)
    return export_weights(recipe, model, weights, load_tokenizer(recipe))


@pytest.mark.sample(2, thorough=7)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_loaded_as_a_language_model(family: str, tmp_path: Path) -> None:
    base = save_multimodal(family, tmp_path)
    expected = logits(whole_of(base))
    model = load_base(recipe_of(base, model={"attention": "eager"}), CPU).eval()
    assert torch.equal(logits(model), expected)
    shapes = {name: tensor.shape for name, tensor in structure_alone(recipe_of(base)).named_parameters()}
    assert {name: tensor.shape for name, tensor in model.named_parameters()} == shapes  # of a rank without weights
    alone = family in WITH_TEXT_CLASS
    assert type(model).__name__.endswith("ForCausalLM" if alone else "ForConditionalGeneration")
    assert part_of(model) == (family if alone else None)
    assert any("vis" in name for name in shapes) is not alone


@pytest.mark.sample(1, thorough=2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_loads_in_plain_peft_on_the_whole_model_and_on_its_text_part(family: str, tmp_path: Path) -> None:
    base = save_multimodal(family, tmp_path / "base")
    recipe = recipe_of(base, tmp_path)
    model = trained(recipe)
    learned = logits(model)
    adapter = exported(recipe, model)
    whole = whole_of(base)
    before = logits(whole)
    assert (learned - before).abs().max() > 1e-2 * before.abs().max()
    models = [text_of(whole)] if family in WITH_TEXT_CLASS else []
    for plain in (*models, whole):
        tuned = PeftModel.from_pretrained(plain, adapter).eval()
        assert_close(logits(tuned), learned)
        assert len(adapted_paths(tuned)) == len(adapted_paths(model))


@pytest.mark.thorough
def test_an_adapter_on_a_few_layers_with_ranks_of_their_own(tmp_path: Path) -> None:
    """Embeddings trained in full, one layer's adapters, and a rank by a path that only the text part has."""
    base = save_multimodal("mistral3", tmp_path / "base")
    saved = ["embed_tokens", "lm_head", "norm"]  # the projector of images has a norm too
    lora = {"target_modules": ["model.layers.1.mlp.up_proj", "q_proj"], "modules_to_save": saved}
    ranks = {"rank_pattern": {"model.layers.1.self_attn.q_proj": 2}, "exclude_modules": ["model.layers.0.mlp"]}
    recipe = recipe_of(base, tmp_path, lora={**lora, **ranks})
    model = trained(recipe)
    adapter = exported(recipe, model)
    whole = whole_of(base)
    for plain in (text_of(whole), whole):
        tuned = PeftModel.from_pretrained(plain, adapter).eval()
        assert_close(logits(tuned), logits(model))
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_modules"] == (
        r"(model|model\.language_model)\.(layers\.1\.mlp\.up_proj|layers\.\d+\.self_attn\.q_proj)"
    )


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("family", ["gemma3", "mistral3"])  # embeddings that are the head, and a head of its own
def test_all_weights_are_exported_as_a_language_model(family: str, tmp_path: Path) -> None:
    base = save_multimodal(family, tmp_path / "base")
    recipe = recipe_of(base, tmp_path, lora=None)
    model = trained(recipe)
    folder = exported(recipe, model)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert type(loaded) is type(decoder_parts(model))
    assert_close(logits(loaded.eval()), logits(model))


def test_a_quantised_base_says_so_of_its_text_part(tmp_path: Path) -> None:
    base = save_multimodal("mistral3", tmp_path)
    recipe = recipe_of(base, model={"dtype": "bfloat16"}, quantization={"load_in_4bit": True})
    loaded, alone = load_base(recipe, CPU), structure_alone(recipe)
    for model in (loaded, alone):
        assert model.is_loaded_in_4bit  # type: ignore[attr-defined]
        layers = {path: type(module).__name__ for path, module in model.named_modules() if "_proj" in path}
        assert (len(layers), set(layers.values())) == (14, {"Linear4bit"})
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    tuned = build_model(recipe, CPU)
    tuned(**flat_batch(vocabulary=500)).backward()
    assert len(adapted_paths(tuned)) == 14


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("names", [["multi_modal_projector"], ["vision_tower"], r".*vision_tower.*\.q_proj"])
def test_targets_of_a_part_that_is_not_trained_are_refused(names: Any, tmp_path: Path) -> None:
    base = save_multimodal("gemma3", tmp_path)
    with pytest.raises(FinetuneError, match=r"matches no module of Gemma3ForCausalLM, the text part of gemma3") as no:
        build_model(recipe_of(base, lora={"target_modules": names}), torch.device("meta"))
    assert "q_proj" in str(no.value).rpartition(";")[2]
    assert (no.value.exit_code, str(no.value).count("\n")) == (2, 0)


def test_without_a_text_class_adapters_alone_are_trained(tmp_path: Path) -> None:
    base = save_multimodal("qwen3_vl", tmp_path)
    with pytest.raises(FinetuneError, match=r"^lora: Qwen3VLForConditionalGeneration .*; train it with adapters") as no:
        build_model(recipe_of(base, lora=None), torch.device("meta"))
    assert no.value.exit_code == 2


def test_plans_and_rehearsals_see_the_text_part(tmp_path: Path) -> None:
    base = save_multimodal("gemma3", tmp_path / "gemma3")
    config, _ = decoder_config(str(base))
    expected = AutoConfig.from_pretrained(base).text_config
    assert (config["model_type"], config["hidden_size"]) == ("gemma3_text", 32)
    assert config["layer_types"] == expected.layer_types
    data = Data.model_validate({"train": [{"path": "json", "data_files": str(write_chats(tmp_path / "chats", [40]))}]})
    assert shrink_model(str(base), "main", data, tmp_path / "small").architecture == "Gemma3ForCausalLM"
    vision = save_multimodal("qwen3_vl", tmp_path / "qwen3_vl")
    assert "vision_config" in full_config(str(vision))[0]
    with pytest.raises(EnvironmentMismatch, match="no class for the text part of a qwen3_vl"):
        decoder_config(str(vision))


def test_names_in_files_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """transformers saves Gemma 3 under names that its classes had before."""
    base = save_multimodal("gemma3", tmp_path)
    names = names_in_whole(structure_alone(recipe_of(base)))
    assert names is not None
    path = "model.layers.0.self_attn.q_proj.weight"
    assert names.of(path) == "model.language_model.layers.0.self_attn.q_proj.weight"
    assert names.in_file(path, {}) == "language_model.model.layers.0.self_attn.q_proj.weight"
    assert names.in_file(path, {names.of(path): None}) == names.of(path)
