"""Every strategy is the same training: strategy x method x split against one document at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.cells import ROOT, launch
from tests.reference import Step
from tests.test_one_curve import LENGTHS, curve_of, reference, write_recipe
from tests.tiny import save_tiny, write_chats

pytestmark = pytest.mark.slow

ZERO = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
RANKS = {"ddp": 2, "fsdp2": 2, "fsdp2_grad_op": 2, "fsdp2_offload": 2, "hsdp": 4} | dict.fromkeys(ZERO, 2)
ALONE = {"per_device_batch_size": 1}
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {"training": {"per_device_batch_size": len(LENGTHS)}},  # each rank all of its rows at once
    "accumulated": {"training": ALONE},
    "packed": {"data": {"packing": True, "max_length": 350}, "training": ALONE | {"global_batch_size": 3}},
    "checkpointed": {"training": ALONE | {"activation_checkpointing": True}},
}
METHODS = ("full", "lora")
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def curves(tiny_llama: Path, chats: Path) -> dict[str, list[Step]]:
    return {method: reference(tiny_llama, chats, method) for method in METHODS}


def config_of(strategy: str, folder: Path) -> str:
    """A strategy's name; HSDP repeats between nodes, which on one host is to be told."""
    if strategy != "hsdp":
        return strategy
    text = (ROOT / "accelerate_configs" / "hsdp.yaml").read_text("utf-8")
    mesh = "parallelism_config: {parallelism_config_dp_replicate_size: 2}"
    file = folder / "hsdp.yaml"
    file.write_text("\n".join(mesh if line.startswith("parallelism_config:") else line for line in text.splitlines()))
    return str(file)


def worst(curve: list[Step], expected: list[Step]) -> float:
    """Largest relative difference of loss and gradient norm over the steps."""
    pairs = [pair for mine, theirs in zip(curve, expected, strict=True) for pair in zip(mine, theirs, strict=True)]
    return max(abs(mine / theirs - 1) for mine, theirs in pairs)


def receipt_of(recipe: Path) -> Mapping[str, Any]:
    receipt: Mapping[str, Any] = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
    return receipt


def assert_it_ran(strategy: str, receipt: Mapping[str, Any]) -> None:
    """The engine asked for, seen in the storage of weights and optimizer state."""
    sharding = receipt["sharding"]
    whole = receipt["parameters"]["trained"] + receipt["parameters"]["frozen"]
    assert (receipt["strategy"], receipt["world_size"]) == (strategy, RANKS[strategy])
    cut = strategy.startswith(("fsdp", "hsdp", "zero3"))
    # Vectors stay whole under ZeRO-3; they are a five hundredth here.
    assert sharding["sharded_parameters"] == (pytest.approx(whole, rel=0.005) if cut else 0)
    assert sharding["held_share"] == pytest.approx(0.5 if cut else 1.0, abs=0.02)
    if strategy.startswith(("fsdp", "hsdp")):
        assert sharding["mesh"] == ({"copies": 2, "shards": 2} if strategy == "hsdp" else {"shards": 2})
    assert receipt["wrapper"] == "DeepSpeedEngine" or strategy not in ZERO
    assert sharding["optimizer_share"] == pytest.approx(1.0 if strategy == "ddp" else 0.5, abs=0.02)


@pytest.mark.parametrize("strategy", RANKS)
def test_one_curve(strategy: str, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    cells = {(method, split): tmp_path / f"{method}_{split}" for method in METHODS for split in SPLITS}
    recipes = {}
    for (method, split), folder in cells.items():
        folder.mkdir()
        recipes[method, split] = write_recipe(folder, tiny_llama, chats, method, SPLITS[split])
    words = [f"accelerate_config={config_of(strategy, tmp_path)}"]
    codes = launch(list(recipes.values()), ranks=RANKS[strategy], words=words)
    assert codes == [0] * 8
    for (method, split), recipe in recipes.items():
        difference = worst(curve_of(recipe), curves[method])
        assert difference <= TOLERANCE, f"{strategy} {method} {split}: {difference}"
        assert_it_ran(strategy, receipt_of(recipe))
    assert_exports_are_the_same(tiny_llama, recipes["full", "whole"].parent, recipes["lora", "whole"].parent)


def assert_exports_are_the_same(base: Path, full: Path, lora: Path) -> None:
    """What is handed over loads in the plain libraries and is what the last checkpoint holds."""
    model = AutoModelForCausalLM.from_pretrained(full / "run" / "model", dtype=torch.float32)
    held = checkpointed(full / "run")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), held[name], rtol=0, atol=0)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora / "run" / "adapter", is_trainable=True
    )
    held = checkpointed(lora / "run")
    found = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert found.keys() == held.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.detach(), held[name], rtol=0, atol=0)


def checkpointed(run: Path) -> dict[str, torch.Tensor]:
    from finetune.checkpoint import newest_valid, read_checkpoint

    checkpoint, _ = newest_valid(run)
    assert checkpoint is not None
    return read_checkpoint(checkpoint)[0]["model"]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_tied_heads_and_other_families(family: str, chats: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", family, tie_word_embeddings=True)
    recipe = write_recipe(tmp_path, model, chats, "full", SPLITS["accumulated"])
    assert launch([recipe], ranks=2, words=["accelerate_config=fsdp2"]) == [0]
    assert worst(curve_of(recipe), reference(model, chats, "full")) <= TOLERANCE
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_resume_on_another_number_of_ranks(
    before: int, after: int, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_llama, chats, "lora", SPLITS["accumulated"])
    content = json.loads(recipe.read_text("utf-8")) | {"save_steps": 3}
    recipe.write_text(json.dumps(content), "utf-8")
    named = {1: "single", 2: "fsdp2", 4: "fsdp2"}
    assert launch([recipe], ranks=before, words=[f"accelerate_config={named[before]}"]) == [0]
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")
    assert launch([recipe], ranks=after, words=[f"accelerate_config={named[after]}"]) == [0]
    assert receipt_of(recipe)["world_size"] == after
    assert worst(curve_of(recipe), curves["lora"]) <= TOLERANCE
