"""Files and config.json at odds: what is built is what plain transformers loads, or it is refused in a line that helps.

`tests/proofs/test_ties.py` trains such a base under the strategies.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import deepspeed

from finetune.errors import FinetuneError
from finetune.model.build import build_model, decoder_parts, load_base, structure_alone
from finetune.model.known_configs import full_config
from finetune.model.stored_structure import refuse_files, stored_structure
from finetune.model.text_part import auto_class
from finetune.recipe.schema import Recipe
from finetune.strategies.late_quantising import load_unquantised
from tests.support.models.architectures import save_shaken
from tests.support.models.multimodal import save_multimodal
from tests.support.models.ties import (
    EMBEDDINGS,
    HEAD,
    Change,
    changed_base,
    equal_ones,
    head_alone,
    no_head,
    rewrite,
    say,
)
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import least_recipe

CPU, META = torch.device("cpu"), torch.device("meta")


def recipe_of(base: Path, **sections: object) -> Recipe:
    plain = {"model": {"dtype": "float32"}, "training": {"mixed_precision": "no"}, "lora": None}
    return least_recipe(base, **{**plain, **sections})


def with_a_head(base: Path) -> Path:
    """Another matrix than the embeddings, where the file has none: Gemma's are tied."""

    def change(tensors: dict[str, Tensor]) -> None:
        if not any(name.endswith("lm_head.weight") for name in tensors):
            embeddings = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
            tensors[HEAD] = embeddings.flip(0)

    return rewrite(base, change)


def equal_in_two_formats(tensors: dict[str, Tensor]) -> None:
    tensors[EMBEDDINGS] = tensors[EMBEDDINGS].bfloat16()
    tensors[HEAD] = tensors[EMBEDDINGS].float()


def last_number_differs(tensors: dict[str, Tensor]) -> None:
    equal_ones(tensors)
    tensors[HEAD][-1, -1] += 1e-3


def zeros_of_two_signs(tensors: dict[str, Tensor]) -> None:
    tensors[EMBEDDINGS][0, 0] = 0.0
    equal_ones(tensors)
    tensors[HEAD][0, 0] = -0.0


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors[EMBEDDINGS][0, 0] = float("nan")
    equal_ones(tensors)


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (bool, False),
        (head_alone, True),
        (no_head, True),
        (equal_ones, True),
        (equal_in_two_formats, True),
        (last_number_differs, False),
        (zeros_of_two_signs, True),
        (not_a_number, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_configuration_that_ties(change: Change, tied: bool, tmp_path: Path) -> None:
    """With weights or without, the ends are what plain transformers makes of the files."""
    base = changed_base(tmp_path, tied=True, change=change)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is tied
    loaded = load_base(recipe_of(base), CPU)
    for model in (loaded, structure_alone(recipe_of(base))):
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
        assert model.config.tie_word_embeddings is tied
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0, equal_nan=True)
    loaded.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").tie_word_embeddings is tied


def test_a_head_in_another_file(tmp_path: Path) -> None:
    base = say(save_tiny(tmp_path), tied=True)
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    shards = {"model-1.safetensors": {HEAD: tensors.pop(HEAD)}, "model-2.safetensors": tensors}
    for name, part in shards.items():
        save_file(part, base / name, metadata={"format": "pt"})
    places = {tensor: name for name, part in shards.items() for tensor in part}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    assert structure_alone(recipe_of(base)).config.tie_word_embeddings is False
    equal_ones(tensors)
    save_file({HEAD: tensors.pop(HEAD)}, base / "model-1.safetensors", metadata={"format": "pt"})
    assert structure_alone(recipe_of(base)).config.tie_word_embeddings is True, "the files were read anew"


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llama4", "qwen3_vl"])
def test_multimodal_ones(name: str, tmp_path: Path) -> None:
    """The head that the file has is trained, whatever config.json says of it, and its text_config."""
    base = with_a_head(say(save_multimodal(name, tmp_path), tied=False))
    two = stored_structure(recipe_of(base).model)
    say(base, tied=True)
    found, plain = stored_structure(recipe_of(base).model), auto_class(AutoConfig.from_pretrained(base))
    whole = plain.from_pretrained(base)
    ends = whole.get_input_embeddings(), whole.get_output_embeddings() or whole.language_model.get_output_embeddings()
    assert two is not None
    assert found is not None
    assert two.problem == found.problem == ""
    is_one = ends[0].weight is ends[1].weight
    assert (found.tied, is_one) == (False, False)
    recipe = recipe_of(base, lora={"r": 4})
    for device in (CPU, META):
        model = decoder_parts(build_model(recipe, device))
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        assert model.config.get_text_config().tie_word_embeddings is False


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "phi", "mixtral", "qwen3_moe", "gpt_oss", "mamba", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_as_transformers_decides(name: str, tied: bool, tmp_path: Path) -> None:
    """Architectures with other names, prefixes and conversions; saved with and without a head of its own."""
    save_shaken(name, tmp_path)
    say(tmp_path, tied=tied)
    found = stored_structure(recipe_of(tmp_path).model)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert found is not None
    assert bool(found.tied) is (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert bool(found.problem) is bool(info["missing_keys"] or info["unexpected_keys"])


def test_a_base_that_is_quantised_as_it_is_sharded(tmp_path: Path) -> None:
    """Rank 0's model, and that of ranks without weights."""
    base = changed_base(tmp_path, tied=True)
    nf4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    recipe = recipe_of(base, quantization=nf4, lora={"r": 4})
    first = decoder_parts(build_model(recipe, CPU, load=load_unquantised))
    other = decoder_parts(build_model(recipe, META))
    stored = load_file(base / "model.safetensors")
    for model in (first, other):
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert torch.equal(first.get_output_embeddings().weight, stored[HEAD])
    assert [name for name, _ in first.named_parameters()] == [name for name, _ in other.named_parameters()]


def test_a_head_that_is_missing_and_its_remedy(tmp_path: Path) -> None:
    base = changed_base(tmp_path, tied=False, change=no_head)
    with pytest.raises(FinetuneError, match=r"have no lm_head.weight, .* write tie_word_embeddings: true") as refusal:
        refuse_files(recipe_of(base), stored_structure(recipe_of(base).model))
    assert (refusal.value.exit_code, str(refusal.value).count("\n")) == (2, 0)
    say(base, tied=True)
    refuse_files(recipe_of(base), stored_structure(recipe_of(base).model))
    load_base(recipe_of(base), CPU)


@pytest.mark.sample(2, thorough=8)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 missing keys, first model.norm.weight;"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "1 unexpected keys, first extra;"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            r"1 mismatched keys, first model.norm.weight \(3 in the files, 64 by config.json\);",
        ),
        (lambda tensors: (tensors.pop(HEAD), tensors.pop(EMBEDDINGS)), "2 missing keys, first lm_head.weight;"),
    ],
    ids=["missing", "unexpected", "another shape", "no ends"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_other_tensors_are_refused_without_reading_any(change: Change, words: str, tied: bool, tmp_path: Path) -> None:
    base = changed_base(tmp_path, tied=tied, change=change)
    with pytest.raises(FinetuneError, match=words) as refusal:
        refuse_files(recipe_of(base), stored_structure(recipe_of(base).model))
    assert (refusal.value.exit_code, str(refusal.value).count("\n")) == (2, 0)


def test_new_tokens_under_adapters_need_a_configuration_that_is_right(tmp_path: Path) -> None:
    base = changed_base(tmp_path, tied=True)
    recipe = least_recipe(base, model={"add_tokens": ["<|zap|>"]}, lora={"r": 4})
    with pytest.raises(FinetuneError, match=r"^model.add_tokens: .* tie_word_embeddings: false"):
        refuse_files(recipe, stored_structure(recipe.model))
    say(base, tied=False)
    refuse_files(recipe, stored_structure(recipe.model))


@pytest.mark.thorough
def test_plans_count_both(tmp_path: Path) -> None:
    """The planner's configuration is that of the files, where they are at hand."""
    assert full_config(str(changed_base(tmp_path / "two", tied=True)))[0]["tie_word_embeddings"] is False
    assert (
        full_config(str(changed_base(tmp_path / "equal", tied=True, change=equal_ones)))[0]["tie_word_embeddings"]
        is True
    )
    part = with_a_head(say(save_multimodal("gemma3", tmp_path / "gemma3"), tied=True))
    assert full_config(str(part))[0]["tie_word_embeddings"] is False
    (tmp_path / "two" / "model.safetensors").unlink()
    assert full_config(str(tmp_path / "two"))[0]["tie_word_embeddings"] is True


def test_under_zero_3_transformers_is_not_asked_to_shard(tmp_path: Path) -> None:
    """Names are compared without an engine, whose handle is there again afterwards."""

    class Config:
        config: dict[str, object] = {}  # noqa: RUF012

        def is_zero3(self) -> bool:
            return True

    engine, base = Config(), changed_base(tmp_path, tied=True)
    deepspeed.set_hf_deepspeed_config(engine)
    try:
        found = stored_structure(recipe_of(base).model)
        assert found is not None
        assert found.is_at_odds
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
