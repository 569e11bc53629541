"""Weights that are stored quantised: read in 16 bits, loaded as the recipe says, or refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from finetune.errors import FinetuneError
from finetune.model.build import load_base, refuse_early, structure_alone
from finetune.model.dtypes import widening
from finetune.recipe.schema import Recipe
from finetune.train import main
from tests.support.models.quantised import in_mxfp4, say_quantised
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.recipes import least_recipe, tiny_lora, write_recipe

CPU = torch.device("cpu")
BLOCK = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def in_fp8(folder: Path) -> dict[str, Tensor]:
    """Store the layers' matrices in eight bits with a scale for each block; returns what they are worth."""
    tensors, worth = load_file(folder / "model.safetensors"), {}
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and ".layers." in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        eight = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        worth[name] = (eight.float() * scales[:, None, :, None]).view(rows, columns)
        tensors |= {name: eight.view(rows, columns), name.replace("weight", "weight_scale_inv"): scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    say_quantised(folder, FP8)
    return worth


def in_four_bits(folder: Path, base: Path, **settings: Any) -> Path:
    asked = BitsAndBytesConfig(load_in_4bit=True, **settings)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=asked, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def refusal(recipe: Recipe) -> str:
    told = set()
    for way in (refuse_early, lambda each: load_base(each, CPU)):
        with pytest.raises(FinetuneError) as caught:
            way(recipe)
        told.add(str(caught.value))
    (line,) = told
    assert caught.value.exit_code == 2
    return line


@pytest.mark.parametrize(("family", "store"), [("llama", in_fp8), ("gpt_oss", in_mxfp4)])
def test_fewer_bits_are_read_as_what_they_are_worth(family: str, store: Any, tmp_path: Path) -> None:
    base = save_mixture(tmp_path, family) if family == "gpt_oss" else save_tiny(tmp_path, family)
    worth = store(base)
    recipe = least_recipe(base, model={"dtype": "bfloat16"})
    assert widening(AutoConfig.from_pretrained(base), recipe).dequantize, "whatever kernels a GPU has"
    model = load_base(recipe, CPU)
    tensors = model.state_dict()
    assert worth
    for name, expected in worth.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], expected.to(torch.bfloat16)), name
    for each in (model, structure_alone(recipe)):
        assert "quantization_config" not in each.config.to_dict(), "what is saved of it would be said to be quantised"


@pytest.mark.thorough
def test_an_fp8_model_is_trained(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    in_fp8(base)
    chats = write_chats(tmp_path / "chats.jsonl", [40, 60, 30, 50])
    content = tiny_lora(base, chats, training={"max_steps": 2}, output_dir=str(tmp_path / "run"))
    assert main([str(write_recipe(tmp_path, content))]) == 0
    assert json.loads((tmp_path / "run" / "receipt.json").read_text())["adapted_layers"] == 14


def test_what_is_stored_in_fewer_bits_is_not_quantised_again(tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "llama")
    in_fp8(base)
    assert refusal(least_recipe(base, quantization={"load_in_4bit": True})) == (
        f"model.name_or_path: {base} is stored quantised (fp8), and 4 or 8 bits are made of 16; name the model in 16 "
        "bits, or leave quantization out"
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_other_formats_are_refused(method: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "llama")
    say_quantised(base, {"quant_method": method, "bits": 4})
    assert refusal(least_recipe(base)) == (
        f"model.name_or_path: {base} is stored quantised ({method}), which cannot be trained; name the model in 16 bits"
    )


def test_four_bits_are_those_of_the_recipe(tmp_path: Path) -> None:
    base = in_four_bits(tmp_path / "four", save_tiny(tmp_path / "base", "llama"), bnb_4bit_quant_type="fp4")
    settings = (
        "set quantization: {load_in_4bit: true, load_in_8bit: false, bnb_4bit_quant_type: fp4, "
        "bnb_4bit_use_double_quant: false, bnb_4bit_compute_dtype: float32, bnb_4bit_quant_storage: uint8}, or "
        "name the model in 16 bits"
    )
    for asked in (None, {"load_in_4bit": True}, {"load_in_8bit": True}):
        assert refusal(least_recipe(base, quantization=asked)) == (
            f"model.name_or_path: {base} is stored quantised (bitsandbytes); {settings}"
        )
    right = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
    right |= {"bnb_4bit_compute_dtype": "float32"}
    model = load_base(least_recipe(base, quantization=right), CPU)
    packed = load_file(base / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(model.get_submodule("model.layers.0.mlp.up_proj").weight, packed)


@pytest.mark.parametrize("quantization", [None, {"load_in_4bit": True}])
def test_a_format_that_is_null_is_none(quantization: dict[str, Any] | None, tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "llama")
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    model = load_base(least_recipe(base, quantization=quantization), CPU)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert type(layer).__name__ == ("Linear4bit" if quantization else "Linear")
