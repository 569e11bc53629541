"""ZeRO-3 with weights on a disk: each part of a weight has a buffer, for real models on any number of ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from finetune.model.build import structure_alone
from finetune.model.known_configs import CONFIGS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import CONFIG_FOLDER
from finetune.strategies.zero import fit_swap, swap_buffers
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import TOLERANCE, skip_where_missing, worst
from tests.support.runs.one_curve import LENGTHS, curve_of, reference, write_curve_recipe

METHODS = ("full", "lora")


def structure(name: str, folder: Path) -> nn.Module:
    """A real model's weights, without their data."""
    (folder / "model").mkdir()
    shutil.copy(CONFIGS / f"{name}.json", folder / "model" / "config.json")
    data = {"train": [{"path": "json"}]}
    return structure_alone(Recipe.model_validate({"model": {"name_or_path": str(folder / "model")}, "data": data}))


def swapper(buffers: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's own, with its check of sizes and its count of buffers, but neither files nor memory."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

    config = DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/nowhere", **buffers)
    monkeypatch.setattr(partitioned_param_swapper, "print_rank_0", lambda *_, **__: None)  # asks for its rank
    bare = object.__new__(partitioned_param_swapper.AsyncPartitionedParameterSwapper)
    bare.numel_alignment = 512
    bare.elements_per_buffer = config.buffer_size
    bare.aligned_elements_per_buffer = bare._io_aligned_numel(config.buffer_size)
    bare.available_buffer_ids = list(range(config.buffer_count))
    elements = bare.aligned_elements_per_buffer * config.buffer_count
    bare.buffers = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    bare.param_id_to_numel, bare.param_id_to_buffer_id, bare.param_id_to_swap_buffer = {}, {}, {}
    return bare


def in_use_at_once(model: nn.Module) -> list[nn.Parameter]:
    """A layer that is recomputed, and what is outside of layers: only matrices are large enough for the disk."""
    members = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    inside = {parameter for layer in members for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if parameter not in inside]
    return [parameter for parameter in (*members[0].parameters(), *outside) if parameter.ndim > 1]


@pytest.mark.sample(4, thorough=12)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("name", "largest", "at_once"),
    [("llama-3.1-8b", 525_336_576, 9), ("llama-3.3-70b", 1_050_673_152, 9), ("llama-3.2-1b", 262_668_288, 8)],
)
def test_every_weights_part_has_a_buffer(
    name: str, largest: int, at_once: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    model = structure(name, tmp_path)
    buffers = swap_buffers(model, ranks)
    assert buffers == {"buffer_size": -(-largest // ranks), "buffer_count": at_once}
    disk = swapper(buffers, monkeypatch)
    used = in_use_at_once(model)
    for number, parameter in enumerate(used):
        part = -(-parameter.numel() // ranks)
        assert disk.get_buffer(SimpleNamespace(ds_id=number), part).numel() == part
    assert len(used) == at_once
    assert max(parameter.numel() for parameter in used) == largest


def test_deepspeeds_own_buffers_are_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they are set: should this fail, its defaults have grown."""
    pytest.importorskip("deepspeed")
    embedding = max(parameter.numel() for parameter in structure("llama-3.1-8b", tmp_path).parameters())
    with pytest.raises(AssertionError, match="More elements 131334144 than buffer size 100000000"):
        swapper({}, monkeypatch).get_buffer(SimpleNamespace(ds_id=0), embedding // 4)


@pytest.mark.parametrize("device", ["nvme", "cpu", None])
def test_they_are_set_before_anything_is_loaded(device: str | None, tmp_path: Path) -> None:
    """transformers partitions while it loads, by the config that it was given last."""
    sections: list[Any] = []
    section: dict[str, Any] = {"stage": 3} | ({"offload_param": {"device": device}} if device else {})
    plugin: Any = SimpleNamespace(deepspeed_config={"zero_optimization": section})
    plugin.set_deepspeed_weakref = lambda: sections.append(dict(section["offload_param"]))
    fit_swap(plugin, lambda: structure("llama-3.2-1b", tmp_path), 2)
    fitted = {"device": "nvme", "buffer_size": 131_334_144, "buffer_count": 8}
    assert sections == ([fitted] if device == "nvme" else [])


@pytest.mark.slow
def test_a_run_with_its_weights_on_a_disk(tmp_path: Path) -> None:
    """Matrices over a megabyte are there; the curve is the reference's, on two ranks, with and without adapters."""
    skip_where_missing("zero3_nvme")
    config = tmp_path / "weights_on_disk.yaml"
    shipped = (CONFIG_FOLDER / "zero3_nvme.yaml").read_text("utf-8")
    config.write_text(re.sub("offload_param_device: cpu", "offload_param_device: nvme", shipped), "utf-8")
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    wide = save_tiny(tmp_path / "wide", hidden_size=1024, intermediate_size=2048, head_dim=128)
    settings = {"accelerate_config": str(config), "training": {"per_device_batch_size": 1}}
    recipes = [write_curve_recipe(tmp_path / method, wide, chats, method, settings) for method in METHODS]
    assert launch(recipes, ranks=2, timeout=400) == [0, 0]
    for recipe in recipes:
        assert worst(curve_of(recipe), reference(wide, chats, recipe.parent.name)) <= TOLERANCE
