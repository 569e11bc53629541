"""8-bit AdamW under FSDP2: one byte a moment on shards, one process's curve, and state for any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from finetune.model.optimizer import unwrap_optimizer
from finetune.run_folder.checkpoint import newest_valid, read_checkpoint
from finetune.train import main
from tests.support.models.tiny import flat_batch, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import worst
from tests.support.runs.one_curve import LENGTHS, curve_of, write_curve_recipe
from tests.support.runs.one_rank import as_before, half_recipe, one_rank

# Gradients of two ranks and of one differ in float32's last bits, so a moment between two codes may get either.
SAME_BLOCKS = 1e-5
# bitsandbytes' blocks and its rounding of the smallest are others. 8e-5 was measured, of the norm of the gradient.
OTHER_BLOCKS = 5e-4


def eight_bit(folder: Path, model: Path, chats: Path) -> Path:
    changes = {"training": {"optim": "adamw_8bit", "per_device_batch_size": 2}}
    return write_curve_recipe(folder, model, chats, "full", changes, save_steps=3)


def back_to_step_3(recipe: Path) -> None:
    run = recipe.parent / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")


def all_tensors(recipe: Path) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_valid(recipe.parent / "run")
    assert checkpoint is not None
    assert checkpoint.step == 6
    groups, _ = read_checkpoint(checkpoint)
    return {f"{group} {name}": tensor for group, named in groups.items() for name, tensor in named.items()}


def optimizer_of(recipe: Path) -> str:
    receipt = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
    return str(receipt["optimizer"]["by"])


def test_shards_of_matrices_have_one_byte_a_moment(tiny_llama: Path, tmp_path: Path) -> None:
    asked = half_recipe(tiny_llama, tmp_path, "fsdp2")
    recipe = asked.model_copy(update={"training": asked.training.model_copy(update={"optim": "adamw_8bit"})})
    with one_rank(recipe) as rank:
        before = [parameter.full_tensor().detach().clone() for parameter in rank.parts.model.parameters()]
        rank.step([flat_batch()])
        states = unwrap_optimizer(rank.parts.optimizer).state
        for name, parameter in rank.parts.unwrapped_model.named_parameters():
            large = parameter.numel() >= 4096 and "embed" not in name  # no vector has as many
            tensors = {key: each for key, each in states[parameter].items() if key != "step"}
            assert all(isinstance(each, DTensor) for each in tensors.values())
            assert all(each.placements == parameter.placements for each in tensors.values())
            scales = {"absmax1", "absmax2"} if large else set()
            assert tensors.keys() == {"state1", "state2"} | scales, name
            assert tensors["state1"].dtype == (torch.uint8 if large else torch.float32), name
        after = [parameter.full_tensor().detach().clone() for parameter in rank.parts.model.parameters()]
    assert not any(map(torch.equal, before, after))


@pytest.mark.slow
def test_two_ranks_are_one_process_and_resume_to_the_bit(tiny_llama: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    names = ("two", "resumed", "resumed on one", "one", "bitsandbytes")
    recipes = {name: eight_bit(tmp_path / name, tiny_llama, chats) for name in names}
    sharded = [recipes[name] for name in names[:3]]
    assert launch(sharded, ranks=2, words=["accelerate_config=fsdp2"], timeout=600) == [0, 0, 0]
    for name in names[1:3]:
        back_to_step_3(recipes[name])
    assert launch([recipes["resumed"]], ranks=2, words=["accelerate_config=fsdp2"], timeout=600) == [0]
    for name, strategy in (("resumed on one", "single"), ("one", "fsdp2_offload"), ("bitsandbytes", "single")):
        with as_before():
            assert main([str(recipes[name]), f"accelerate_config={strategy}"]) == 0
    makers = {name: optimizer_of(recipe) for name, recipe in recipes.items()}
    assert makers == dict.fromkeys(names, "finetune") | dict.fromkeys(
        ("resumed on one", "bitsandbytes"), "bitsandbytes"
    )

    two = curve_of(recipes["two"])
    assert worst(two, curve_of(recipes["one"])) <= SAME_BLOCKS
    assert SAME_BLOCKS < worst(two, curve_of(recipes["bitsandbytes"])) <= OTHER_BLOCKS
    assert worst(two, curve_of(recipes["resumed on one"])) <= OTHER_BLOCKS
    expected, found = all_tensors(recipes["two"]), all_tensors(recipes["resumed"])
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    assert any(name.endswith("absmax2") for name in expected)
