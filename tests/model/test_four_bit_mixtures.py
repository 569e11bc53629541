"""Mixtures with frozen experts in 4 bits compute what their dequantised weights would, and keep none of these."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from finetune.model.build import build_model, decoder_parts
from finetune.model.quantization import plain_quantized_weights, quantized_layers
from tests.support.models.architecture_columns import shake, trained
from tests.support.models.architectures import Trained, Way, largest_difference, save_shaken
from tests.support.models.four_bit_mixtures import (
    FAMILIES,
    NF4,
    expected,
    expected_of_peft,
    from_mxfp4,
    in_four_bits,
    mixture_recipe,
    plain_base,
    save_mixture,
    stored_in_mxfp4,
)
from tests.support.models.tiny import flat_batch

CPU, META = torch.device("cpu"), torch.device("meta")
PACKED = Way("auto", packing=True)
ATTENTION = ["q_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
WIDE: dict[str, dict[str, Any]] = {"qwen3_moe": {"moe_intermediate_size": 256}, "gpt_oss": {}}


def shaken(folder: Path, quantization: Any = NF4, **settings: Any) -> nn.Module:
    """The kit's model with adapters whose both factors move the loss."""
    model = build_model(mixture_recipe(folder, quantization, **settings), CPU)
    shake(model)
    return model


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapters
    return adapters


def assert_same(found: Trained, wanted: Trained) -> None:
    difference = largest_difference(found, wanted)
    assert difference <= 1, f"{difference:.1f} times the bound"


def four_bit_layers(model: nn.Module) -> list[str]:
    """The paths of linear layers in 4 bits, without experts."""
    packed = set(quantized_layers(model))
    paths = [path for path, layer in decoder_parts(model).named_modules() if layer in packed]
    return [path.removesuffix(".base_layer") for path in paths if ".experts" not in path]


@pytest.mark.sample(3, thorough=10)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_dequantised_weights(family: str, tmp_path: Path) -> None:
    """Adapters on linear layers, of shared experts and dense layers too. In a layer's packed row some experts get no
    token."""
    save_mixture(family, tmp_path)
    model = shaken(tmp_path, target_parameters=[])
    base = in_four_bits(plain_base(tmp_path), four_bit_layers(model))
    assert_same(trained(model, PACKED), expected(base, adapters_of(model)))


@pytest.mark.thorough
@pytest.mark.parametrize("container", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_containers_and_scales(family: str, double: bool, container: str, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, which FSDP2 needs, changes no number; single scales change some."""
    save_mixture(family, tmp_path)
    settings = {"bnb_4bit_quant_storage": container, "bnb_4bit_use_double_quant": double}
    model = shaken(tmp_path, NF4 | settings, target_parameters=[], recomputed=True)
    base = in_four_bits(plain_base(tmp_path), four_bit_layers(model), double=double)
    assert_same(trained(model, PACKED), expected(base, adapters_of(model)))


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "glm4_moe"])
def test_adapters_on_experts_are_pefts_over_the_dequantised_experts(family: str, tmp_path: Path) -> None:
    """Experts are [experts, inputs, outputs] in gpt-oss and Llama 4, and the other way round elsewhere."""
    save_mixture(family, tmp_path)
    targets = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
    model = shaken(tmp_path, **targets)
    adapters = adapters_of(model)
    assert sum("experts" in name for name in adapters) >= 3 * 2 * 2  # layers, parameters, factors
    base = in_four_bits(plain_base(tmp_path), four_bit_layers(model))
    first = trained(model, PACKED)
    assert_same(first, expected_of_peft(base, adapters, **targets))
    again = trained(model, PACKED)  # peft over a parametrised weight adds its adapter once more at each forward
    assert again[0] == first[0]


@pytest.mark.parametrize("on_experts", [False, True])
def test_experts_in_mxfp4_stay_as_stored(on_experts: bool, tmp_path: Path) -> None:
    save_shaken("gpt_oss", tmp_path)
    stored_in_mxfp4(tmp_path)
    targets = {"target_modules": ATTENTION, "target_parameters": EXPERTS if on_experts else []}
    model = shaken(tmp_path, **targets)
    held = sum(tensor.nbytes for path, tensor in tensors_of(model) if "experts" in path and ".lora_" not in path)
    numbers = 4 * (4 * 32 * 128 + 4 * 64 * 32)
    biases = 4 * 4 * (128 + 32) * 4
    assert held == numbers // 2 + numbers // 32 + biases
    base = plain_base_of_mxfp4(tmp_path, four_bit_layers(model))
    assert_same(trained(model, PACKED), expected_of_peft(base, adapters_of(model), **targets))


def plain_base_of_mxfp4(folder: Path, layers: list[str]) -> Any:
    values = from_mxfp4(folder)
    base = in_four_bits(plain_base(folder), layers, experts=False)
    for path, numbers in values.items():
        base.get_parameter(path).data = numbers
    return base


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_backward_keeps_the_packed_bytes_alone(family: str, tmp_path: Path) -> None:
    """Two tokens of 64 numbers and experts of 64 * 256: no tensor of tokens is as large as one expert's matrix."""
    save_shaken(family, tmp_path, hidden_size=64, intermediate_size=256, **WIDE[family])
    model = shaken(tmp_path, target_modules=ATTENTION, target_parameters=[]).train()
    expert = 64 * 256
    assert max(tensor.numel() for _, tensor in tensors_of(model) if tensor.is_floating_point()) < expert
    held = {tensor.untyped_storage().data_ptr() for tensor in living_tensors()}
    batch, kept = flat_batch((2,), vocabulary=97), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch)
    assert max(tensor.numel() for tensor in kept if tensor.is_floating_point()) < expert
    # An object that a node holds beside autograd's own list is alive too.
    new = [tensor for tensor in living_tensors() if tensor.untyped_storage().data_ptr() not in held]
    assert max(tensor.numel() for tensor in new if tensor.is_floating_point()) < expert
    loss.backward()


def living_tensors() -> list[Tensor]:
    gc.collect()
    found = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor)]
    return [tensor for tensor in found if not isinstance(tensor, FakeTensor)]  # of a plan in the same process


def trained_shapes(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(model)}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_meta_has_the_structure_of_the_real_one(family: str, tmp_path: Path) -> None:
    """As the planner and ranks without weights build it."""
    save_mixture(family, tmp_path)
    recipe = mixture_recipe(tmp_path, target_parameters=[])
    hollow, real = (build_model(recipe, device) for device in (META, CPU))
    for model in (hollow, real):
        plain_quantized_weights(model)
    assert trained_shapes(hollow) == trained_shapes(real)
    assert sum("experts" in name for name, _ in tensors_of(real)) >= 4 * 2


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_evaluation_leaves_the_weights_as_they_are(family: str, tmp_path: Path) -> None:
    save_mixture(family, tmp_path)
    model = shaken(tmp_path, target_modules=ATTENTION, target_parameters=EXPERTS)
    before, batch = [tensor.clone() for _, tensor in tensors_of(model)], flat_batch((19,), vocabulary=97)
    loss = model.train()(**batch).item()
    with torch.no_grad():
        assert model.eval()(**batch).item() == pytest.approx(loss, rel=1e-6)
    assert model.train()(**batch).item() == loss
    assert all(torch.equal(one, tensor) for one, (_, tensor) in zip(before, tensors_of(model), strict=True))
