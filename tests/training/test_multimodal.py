"""Trainings on multimodal checkpoints, from the command to the adapter in plain peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from finetune.model.text_part import answering_part
from finetune.recipe.loader import load_recipe
from finetune.train import main
from finetune.training.start_adapter import find_start_adapter
from tests.support.models.multimodal import FAMILIES, WITH_TEXT_CLASS, save_multimodal
from tests.support.models.tiny import write_chats
from tests.support.runs.finished import finished_run
from tests.support.runs.recipes import tiny_lora, write_recipe

QUICK = ("gemma3", "qwen2_5_vl")  # by its text part, and as a whole
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def page_of(family: str, folder: Path, **sections: Any) -> Path:
    base = save_multimodal(family, folder / "base")
    chats = write_chats(folder / "chats.jsonl", [40, 60, 30, 50])
    training = {"training": {"max_steps": 2}, "output_dir": str(folder / "run")}
    return write_recipe(folder, tiny_lora(base, chats, **training | sections))


def answering(model: Any) -> Any:
    """The part that answers text: Llama 4 as a whole does not, in the installed transformers."""
    return answering_part(model.get_base_model() if isinstance(model, PeftModel) else model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = answering(model.eval())(input_ids=torch.arange(3, 40)[None]).logits
    return result


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_a_training_ends_in_an_adapter_for_the_whole_model(family: str, tmp_path: Path) -> None:
    assert main([str(page_of(family, tmp_path))]) == 0
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["text_part_of"] == (family if family in WITH_TEXT_CLASS else None)
    # A family that rounds more than the bound in float32 is compared in float64, where no layer is recomputed.
    found = {"float32": {"kept", "recomputed"}, "float64": {"kept"}}
    assert set(receipt["probe"]["found"]) == found[receipt["probe"]["precision"]]
    assert receipt["probe"]["adapters"] == {key: receipt[key] for key in receipt["probe"]["adapters"]}
    assert receipt["reached_share"] > 0.99
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = logits(whole)
    tuned: Any = PeftModel.from_pretrained(whole, tmp_path / "run" / "adapter")
    assert (logits(tuned) - before).abs().max() > 1e-2
    adapted = [path for path, _ in tuned.named_parameters() if ".lora_B." in path]
    assert len(adapted) == receipt["adapted_layers"]
    assert all("language_model" in path for path in adapted)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("names", ["of both", "of the whole model", "of the text part"])
def test_a_training_starts_from_an_adapter_by_either_name(names: str, tmp_path: Path) -> None:
    """peft's own adapter on the whole model, or on the text class, has that one's names alone."""
    run = finished_run(tmp_path, save_multimodal("gemma3", tmp_path / "base"))
    file = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    theirs = {name: tensor for name, tensor in tensors.items() if "language_model" in name}
    ours = {name: tensor for name, tensor in tensors.items() if "language_model" not in name}
    assert len(ours) == len(theirs) == 28
    kept = {"of both": tensors, "of the whole model": theirs, "of the text part": ours}[names]
    save_file(kept, file)
    adapter = find_start_adapter(load_recipe(tmp_path / "recipe.yaml", [f"model.adapter={run / 'adapter'}"]).recipe)
    assert adapter is not None
    assert len(adapter.keys) == 28
    for name, key in adapter.keys.items():
        assert torch.equal(kept[key], ours[name.replace(".default", "")])
