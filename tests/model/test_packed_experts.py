"""A mixture's experts in 4 bits: loss and gradients are those of dequantised experts, and nothing else is kept."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig

from finetune.architecture.own_layers.compute import compute_layers
from finetune.errors import FinetuneError
from finetune.model.build import build_model, decoder_parts, structure_alone
from finetune.model.mixtures import NOT_IN_FOUR_BITS, refuse_mixture
from finetune.model.packed_experts import Mxfp4Experts, grouped_product
from finetune.model.quantization import four_bit_weight, packed_experts, quantized_layers, unpacked_weight
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from tests.support.models.architectures import largest_difference, save_shaken
from tests.support.models.quantised import dequantised, in_mxfp4, quantised_recipe
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.rows.mixtures import FOUR_EXPERTS, MIXTURES, OTHERS, save_mixture

CPU, META = torch.device("cpu"), torch.device("meta")
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
PROJECTIONS = ("gate_up_proj", "down_proj")
FAMILIES = [*MIXTURES, *OTHERS]


def recipe(folder: Path, quantization: dict[str, Any] = NF4, *, by_name: bool = True) -> Recipe:
    """With adapters on attention, shared experts and dense layers; `by_name` on routed experts too."""
    lora: dict[str, Any] = {"target_parameters": [f"experts.{name}" for name in PROJECTIONS]} if by_name else {}
    return quantised_recipe(folder, quantization, **lora)


def built(asked: Recipe) -> Any:
    model = build_model(asked, CPU).train()
    compute_layers(model, unpacked_weight)
    shake(model)
    return model


def quantised_settings() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def as_layer(weight: Any) -> Any:
    return SimpleNamespace(weight=weight)


def shake(model: nn.Module) -> None:
    """Matrices B begin at zero, where A has no gradient."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
                assert "lora_" in name


def over_dequantised(model: Any, folder: Path, worth: dict[str, Tensor]) -> Any:
    """The library's own model with every quantised weight replaced by its numbers, and peft's own adapters.

    Args:
        worth: Numbers of parameters that are not in NF4.
    """
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    packed = set(quantized_layers(model))
    replaced = 0
    for name, layer in decoder_parts(model).named_modules():
        if layer not in packed:
            continue
        path, replaced = name.replace(".base_layer", ""), replaced + 1
        if hasattr(layer, "finetune_experts"):
            owner, _, leaf = path.rpartition(".")
            numbers = worth[path] if path in worth else dequantised(layer).view(layer.finetune_experts)
            getattr(plain.get_submodule(owner), leaf).data = numbers
        else:
            plain.get_submodule(path).weight.data = dequantised(layer)
    assert replaced == len(packed) > 8
    adapted = get_peft_model(plain, copy.deepcopy(model.peft_config["default"])).train()
    shake(adapted)
    return adapted


def learned(model: Any, lengths: tuple[int, ...]) -> tuple[float, dict[str, Tensor | None]]:
    """The kit's packed row."""
    loss = model(**flat_batch(lengths))
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def learned_alone(model: Any, lengths: tuple[int, ...]) -> tuple[float, dict[str, Tensor | None]]:
    """One document after another, by logits."""
    batch, start, total = flat_batch(lengths), 0, torch.zeros(())
    for length in lengths:
        ids, labels = (batch[key][:, start : start + length] for key in ("input_ids", "shift_labels"))
        logits = model(input_ids=ids, use_cache=False).logits[0]
        total = total + nn.functional.cross_entropy(logits.float(), labels[0], ignore_index=-100, reduction="sum")
        start += length
    total.backward()
    return total.item(), {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.sample(3, thorough=20)
@pytest.mark.parametrize(("family", "by_name"), [(family, way) for way in (True, False) for family in FAMILIES])
def test_loss_and_gradients_are_those_of_dequantised_experts(family: str, by_name: bool, tmp_path: Path) -> None:
    folder = save_mixture(tmp_path, family)
    model = built(recipe(folder, by_name=by_name))
    assert packed_experts(model)
    assert any(".experts." in name for name, each in model.named_parameters() if each.requires_grad) == by_name
    found = learned(model, (9, 20, 3))
    expected = learned_alone(over_dequantised(model, folder, {}), (9, 20, 3))
    assert found[1].keys() == expected[1].keys()
    assert largest_difference(found, expected) <= 1


def test_mxfp4_stays_as_it_is_stored(tmp_path: Path) -> None:
    """Its numbers by the format's definition; beside attention in NF4."""
    folder = save_mixture(tmp_path, "gpt_oss")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worth = in_mxfp4(folder)
    model = built(recipe(folder))
    layers = [layer for layer in quantized_layers(model) if isinstance(layer, Mxfp4Experts)]
    assert len(layers) == 4
    for layer, numbers in zip(layers, [worth[name] for name in plain.state_dict() if name in worth], strict=True):
        assert torch.equal(layer.unpacked(torch.bfloat16).float(), numbers)
        assert layer.weight.nbytes * 8 == pytest.approx(4.25 * numbers.numel())
    quantization = json.loads((folder / "config.json").read_text())
    del quantization["quantization_config"]
    (folder / "config.json").write_text(json.dumps(quantization))
    plain.save_pretrained(folder)  # with experts in float32, to be replaced
    expected = learned_alone(over_dequantised(model, folder, worth), (9, 20, 3))
    assert largest_difference(learned(model, (9, 20, 3)), expected) <= 1


def test_autograd_keeps_no_weight(tmp_path: Path) -> None:
    """Kept bytes do not grow with the number of experts."""
    kept: dict[int, int] = {}
    for count in (4, 8):
        folder = save_tiny(tmp_path / str(count), "mixtral", **FOUR_EXPERTS | {"num_local_experts": count})
        model = built(recipe(folder, by_name=False))
        storages: dict[int, int] = {}
        weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

        def keep(tensor: Tensor, storages: dict[int, int] = storages, weights: set[int] = weights) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        for layer in model.modules():
            if hasattr(layer, "gradient_checkpointing"):
                layer.gradient_checkpointing = False
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**flat_batch((9, 20, 3)))
        kept[count] = sum(storages.values())
    one_expert = 4 * 3 * 64 * 96  # bytes in float32
    assert abs(kept[8] - kept[4]) < one_expert


class Products(TorchDispatchMode):
    """Counts grouped products and dequantised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func._schema.name.partition("::")[2]] += 1
        return func(*args, **kwargs or {})


def test_a_recomputed_layer_ends_before_its_last_product(tmp_path: Path) -> None:
    """Of two layers the first is recomputed: forward 2 products each, again gate and up, backward 2 each."""
    model = built(recipe(save_mixture(tmp_path, "mixtral"), by_name=False))
    loss = model(**flat_batch((9, 20, 3)))
    with Products() as products:
        loss = model(**flat_batch((9, 20, 3)))
        assert products.counted["_grouped_mm"] == 2 * 2
        loss.backward()
    assert products.counted["_grouped_mm"] == 2 * 2 + 1 + 2 * 2


def test_the_grouped_product_without_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before Ampere take experts that have tokens one after another."""
    rows, weights, ends = torch.randn(6, 8), torch.randn(4, 8, 16), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expected = grouped_product(rows, weights, ends)
    pretended = rows.as_subclass(_OnAnOldGpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    torch.testing.assert_close(grouped_product(pretended, weights, ends).as_subclass(Tensor), expected)


class _OnAnOldGpu(Tensor):
    device = torch.device("cuda")  # type: ignore[assignment]


def test_pieces_are_quantised_to_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = quantised_settings()
    values = torch.randn(96, 64, dtype=torch.bfloat16)
    whole = four_bit_weight(values, config)
    monkeypatch.setattr("finetune.model.quantization.PIECE", 64 * 64)
    pieces = four_bit_weight(values, config)
    assert torch.equal(whole, pieces)
    assert torch.equal(dequantised(as_layer(whole)), dequantised(as_layer(pieces)))


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mixtral", {"quantization": {"load_in_8bit": True}}, "load_in_8bit: .* leaves the experts of .* in 16 bits"),
        ("mixtral", {"accelerate_config": "1f1b"}, "1f1b: stages do not split experts in 4 bits; .*fsdp2"),
        ("gpt_oss", {"accelerate_config": "zero3"}, "zero3 does not cut experts in MXFP4; .*fsdp2"),
        ("jetmoe", {}, r"experts of .* \(jetmoe\) compute in a way that is not known"),
    ],
)
def test_what_is_not_trained_is_one_line(family: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_mixture(tmp_path, family) if family in MIXTURES else tmp_path / family
    if family == "gpt_oss":
        in_mxfp4(folder)
    config = {"model_type": family, "num_local_experts": 4}
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
    asked = recipe(folder, by_name=False)
    asked = asked.model_copy(update={key: value for key, value in change.items() if key == "accelerate_config"})
    if "quantization" in change:
        asked = recipe(folder, change["quantization"], by_name=False)
    with pytest.raises(FinetuneError, match=words) as caught:
        refuse_mixture(asked, read_strategy(asked.accelerate_config), config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["jetmoe", "inkling_text", "longcat_flash"])
def test_experts_that_compute_otherwise_are_refused_before_weights_are_read(family: str, tmp_path: Path) -> None:
    """By the trial; the list that `check` reads without torch is what it finds."""
    assert family in NOT_IN_FOUR_BITS
    save_shaken(family, tmp_path)
    with pytest.raises(FinetuneError, match=r"way that is not known in 4 bits .*set quantization: null"):
        structure_alone(recipe(tmp_path, by_name=False))


@pytest.mark.thorough
def test_a_stored_tensor_that_holds_several_parameters_is_quantised(tmp_path: Path) -> None:
    """transformers hands all of them over at once."""
    if "lara_mini" not in CONFIG_MAPPING:
        pytest.skip("transformers 5.17 does not have this family")
    save_shaken("lara_mini", tmp_path)
    model = build_model(recipe(tmp_path, by_name=False), CPU)
    layers = {path: layer for path, layer in model.named_modules() if path.endswith("in_proj_qkv.base_layer")}
    assert layers
    assert all(layer.weight.quant_state is not None for layer in layers.values())
