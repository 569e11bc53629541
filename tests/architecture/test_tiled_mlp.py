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
from finetune.architecture.own_layers.norm_and_gate import tiled_mlps
from finetune.errors import FinetuneError
from finetune.measure.live_tensors import LiveTensors
from finetune.model.build import build_model
from finetune.model.quantization import unpacked_weight
from tests.support.models.architectures import save_shaken
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins.compiling import Counting

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

IN_FLOAT64 = [method for method in METHODS if method not in ("two adapters' formats", "4 bits", "8 bits")]
LIMITS = dict.fromkeys(METHODS, 1e-5) | dict.fromkeys(IN_FLOAT64, 1e-14) | {"two adapters' formats": 2e-2}


def model_of(folder: Path, method: str, tile: int | None, recompute: bool | int = True) -> nn.Module:
    settings = {"model": {"dtype": "float32"}} | METHODS[method]
    recipe = least_recipe(folder, training={"activation_checkpointing": recompute}, **settings)
    model = build_model(recipe, CPU).train()
    compute_layers(model, unpacked_weight, mlp_tile_tokens=tile)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def exact_model(folder: Path, method: str, tile: int | None, recompute: bool | int = True) -> nn.Module:
    """In float64, except quantised layers, which have none: a CPU's products of a tile may round otherwise than the
    row's, and small gradients of queries magnify that, by 3e-4 on AVX-512 in float32.
    """
    model = model_of(folder, method, tile, recompute)
    return model.double() if method in IN_FLOAT64 else model


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
    expected = trained(exact_model(folder, method, None, recompute))
    assert distance(trained(exact_model(folder, method, TILE, recompute)), expected) < LIMITS[method]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "olmo2"])
def test_layers_with_norms_elsewhere(tmp_path: Path, family: str) -> None:
    save_shaken(family, tmp_path)
    assert distance(trained(exact_model(tmp_path, "full", TILE)), trained(exact_model(tmp_path, "full", None))) < 1e-14


def test_weights_gradients_are_summed_in_float32(tmp_path: Path) -> None:
    """200 tiles of one token. Each sum in bfloat16 would round once more."""
    generator = torch.Generator().manual_seed(3)
    hidden, slope = (torch.randn(200, 64, generator=generator).bfloat16() for _ in range(2))
    gradients = []
    for tile in (None, 1):
        model = model_of(save_tiny(tmp_path), "full", tile, False).bfloat16()
        mlp: Any = next(module for module in model.modules() if hasattr(module, "down_proj"))
        (mlp(hidden).double() * slope).sum().backward()
        gradients.append([each.grad.double() for each in mlp.parameters()])
    for whole, tiled in zip(*gradients, strict=True):
        assert float((tiled - whole).norm() / whole.norm()) < 3e-3, "half a unit in bfloat16's last place is 2e-3"


def test_backward_computes_in_forwards_number_format(tmp_path: Path) -> None:
    model, formats = model_of(save_tiny(tmp_path), "lora", TILE), list[tuple[bool, torch.dtype]]()
    for mlp in tiled_mlps(model):
        mlp.down_proj.register_forward_hook(
            lambda _, given, result: formats.append((torch.is_autocast_enabled("cpu"), result.dtype))
        )
    trained(model, autocast=True)
    assert len(formats) > 10
    assert set(formats) == {(True, torch.bfloat16)}


class Products(TorchDispatchMode):
    """Counts tokens that go through products which make rows of one width from rows of another."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.tokens = (inputs, outputs), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            if tuple(right.shape) == self.sizes and right.stride(0) == 1:  # a weight as forward has it, transposed
                self.tokens += left.shape[0]
        return result


@pytest.mark.parametrize("tile", [None, TILE])
def test_products_run_twice_for_each_token(tmp_path: Path, tile: int | None) -> None:
    """In forward and once in backward. Checkpoints of tiles would run a third time: the layer's recomputation."""
    model = model_of(save_tiny(tmp_path, hidden_size=48, intermediate_size=112), "full", tile)
    tokens = flat_batch()["input_ids"].numel()
    with Products(48, 112) as up, Products(112, 48) as down:
        trained(model)
    layers, times = 2, 2
    assert up.tokens == 2 * layers * times * tokens, "gate and up"
    assert down.tokens == layers * tokens * (2 if tile else 1), "without tiles recomputation stops before it"


@pytest.mark.parametrize("recompute", [True, False])
def test_backward_holds_one_tile(tmp_path: Path, recompute: bool) -> None:
    """Wide tensors are [tokens, 640] float32, five of them at backward's peak; of a tile they are a 30th."""
    folder = save_tiny(tmp_path, hidden_size=16, intermediate_size=640, head_dim=4, vocab_size=64)
    batch, peaks = flat_batch((150, 150), vocabulary=64), {}
    for tile in (None, 10):
        model = model_of(folder, "lora", tile, recompute)
        peaks[tile] = peak_of(model, batch, LiveTensors())
    wide = 300 * 640 * 4
    assert peaks[None] > 5 * wide
    assert peaks[10] < 1.2 * wide


def peak_of(model: nn.Module, batch: dict[str, Any], live: LiveTensors) -> int:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            live.see([result])
            return result

    live.see([*model.parameters(), *model.buffers()])
    before = live.live("cpu")
    with Seen():
        model(**batch).backward()
    return live.peak("cpu") - before


@pytest.mark.parametrize("method", ["full", "lora"])
def test_each_parameter_gets_its_gradient_once(tmp_path: Path, method: str) -> None:
    """As DDP's and FSDP2's hooks need it."""
    model, times = model_of(save_tiny(tmp_path), method, TILE), list[int]()
    trained_weights = [each for each in model.parameters() if each.requires_grad]
    for each in trained_weights:
        each.register_post_accumulate_grad_hook(lambda weight: times.append(id(weight)))
    trained(model)
    assert sorted(times) == sorted(map(id, trained_weights))


def test_without_gradients_it_runs_in_tiles_too(tmp_path: Path) -> None:
    model, seen = model_of(save_tiny(tmp_path), "lora", TILE).eval(), list[int]()
    for mlp in tiled_mlps(model):
        mlp.gate_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0]))
        leave_to_library(model, GATES)
    with torch.no_grad():
        model(**flat_batch())
    assert set(seen) <= {TILE, flat_batch()["input_ids"].numel() % TILE}


@pytest.mark.parametrize("method", ["full", "lora", pytest.param("4 bits", marks=pytest.mark.thorough)])
def test_a_tile_is_compiled_and_its_layer_is_not(tmp_path: Path, method: str) -> None:
    folder, counting = save_tiny(tmp_path), Counting()
    expected = trained(exact_model(folder, method, None))
    model = exact_model(folder, method, TILE)
    compiled = CompiledLayers(required=True, say=pytest.fail, backend=counting)
    compile_layers(model, compiled)
    assert distance(trained(model), expected) < LIMITS[method]
    assert (counting.graphs, len(compiled.seconds), compiled.stopped) == (1, 1, None)
    model.zero_grad()
    for length in (33, 21, 6):  # a tile of one token too
        model(**flat_batch((length,))).backward()
    assert counting.graphs == 1


def test_experts_stay_as_they_are(tmp_path: Path) -> None:
    """And a model that has nothing else is refused."""
    save_shaken("mixtral", tmp_path)
    with pytest.raises(
        FinetuneError, match=r"^training.mlp_tile_tokens: 5: no layer of this model has a dense gated MLP"
    ):
        model_of(tmp_path, "full", TILE)
