"""MLPs in tiles of tokens: the same loss and gradients, two products a token, and one tile's wide tensors in memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.own_layers.compute import GATES, compute_layers, leave_to_library
from finetune.architecture.own_layers.tiled_mlp import tiled_mlps
from finetune.errors import FinetuneError
from finetune.measure.live_tensors import LiveTensors
from finetune.model.build import build_model
from finetune.model.quantization import unpacked_weight
from tests.support.models.architectures import save_shaken
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
TILE = 5  # of the 24 tokens of `flat_batch`: the last tile is smaller
METHODS: dict[str, dict[str, Any]] = {
    "full": {"lora": None},
    "lora": {"lora": {"r": 4}},
    "two adapters' formats": {"lora": {"r": 4}, "model": {"dtype": "bfloat16"}},
    "DoRA": {"lora": {"r": 4, "use_dora": True}},
    "only o": {"lora": {"r": 4, "target_modules": ["o_proj"]}},
    "only gate": {"lora": {"r": 4, "target_modules": ["gate_proj"]}},
    "4 bits": {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}},
    "8 bits": {"lora": {"r": 4}, "quantization": {"load_in_8bit": True}},
}


def model_of(folder: Path, method: str, tile: int | None, recompute: bool | int = True) -> nn.Module:
    settings = {"model": {"dtype": "float32"}} | METHODS[method]
    recipe = least_recipe(folder, training={"activation_checkpointing": recompute}, **settings)
    model = build_model(recipe, CPU).train()
    compute_layers(model, unpacked_weight, mlp_tile_tokens=tile)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def trained(model: nn.Module, *, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(**flat_batch(vocabulary=97))
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def distance(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> float:
    """The largest relative difference of the loss and all gradients."""
    assert found[1].keys() == expected[1].keys() != set()
    pairs = [(found[0], expected[0]), *((found[1][name], each) for name, each in expected[1].items())]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs if other.norm())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("method", "recompute"),
    [("full", True), ("lora", True), ("4 bits", True), ("only gate", 2), *((name, False) for name in METHODS)],
)
def test_loss_and_gradients_as_without_tiles(tmp_path: Path, method: str, recompute: bool | int) -> None:
    folder = save_tiny(tmp_path)
    expected = trained(model_of(folder, method, None, recompute))
    limit = 2e-2 if "formats" in method else 1e-6
    assert distance(trained(model_of(folder, method, TILE, recompute)), expected) < limit


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "olmo2"])
def test_layers_with_norms_elsewhere(tmp_path: Path, family: str) -> None:
    save_shaken(family, tmp_path)
    assert distance(trained(model_of(tmp_path, "full", TILE)), trained(model_of(tmp_path, "full", None))) < 1e-6


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bfloat16_sums_tiles_in_float32(tmp_path: Path, method: str) -> None:
    """Tiles of one token are 24 sums. In bfloat16 each would round once more."""
    folder = save_tiny(tmp_path)
    exact = trained(model_of(folder, method, None))
    whole = distance(trained(model_of(folder, method, None), autocast=True), exact)
    assert distance(trained(model_of(folder, method, 1), autocast=True), exact) < 1.3 * whole


class Products(TorchDispatchMode):
    """Tokens that went through products of the MLP's width."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width, self.tokens = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # gate and up make [tokens, width] of [tokens, hidden]; down and backward make others.
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_") and result.shape[-1] == self.width:
            factor = args[-2]
            if factor.shape[0] == result.shape[0] and factor.shape[1] != self.width:
                self.tokens += result.shape[0]
        return result
