"""Methods as ways to build a model: what is trained, in which format, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.recomputation import keeps_products
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.model import adapters, build
from finetune.model.build import build_model, decoder_parts, refuse_early
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.schema import Recipe
from tests.support.models.tiny import FAMILIES, flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")


def recipe(folder: Path | str, *, model: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return least_recipe(folder, model={"dtype": "float32", **(model or {})}, **changes)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.sample(2, thorough=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_equals_the_librarys_logits(tmp_path: Path, family: str) -> None:
    model = build_model(recipe(save_tiny(tmp_path, family), lora=None), CPU)
    batch = flat_batch((19,))
    loss = model(**batch)
    inner = decoder_parts(model)
    inner.set_attn_implementation("eager")
    logits = model(input_ids=batch["input_ids"]).logits[0, :-1]
    expected = F.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_full_trains_everything_in_float32(tiny_llama: Path) -> None:
    model = build_model(recipe(tiny_llama, lora=None, model={"dtype": "bfloat16"}), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(trained(model)) == len(list(model.parameters()))


def test_pure_bf16_is_an_explicit_choice(tiny_llama: Path) -> None:
    model = build_model(recipe(tiny_llama, lora=None, training={"pure_bf16": True}), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_lora_trains_adapters_alone_in_float32_over_a_bfloat16_base(tiny_llama: Path) -> None:
    model = build_model(recipe(tiny_llama, lora={"r": 4}, model={"dtype": "bfloat16"}), CPU)
    adapters = trained(model)
    assert len(adapters) == 2 * 7 * 2  # A and B, seven linear layers, two blocks; not the head
    assert all("lora_" in name and parameter.dtype == torch.float32 for name, parameter in adapters.items())
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "norm"])
def test_modules_trained_in_full_are_float32_too(tiny_llama: Path, saved: str, device: str) -> None:
    """peft 0.21 makes adapters float32 and leaves the modules it copies in the base's format."""
    requested = recipe(tiny_llama, lora={"r": 4, "modules_to_save": [saved]}, model={"dtype": "bfloat16"})
    model = build_model(requested, torch.device(device))
    actual = trained(model)
    assert {parameter.dtype for parameter in actual.values()} == {torch.float32}
    copied = [name for name in actual if "lora_" not in name]
    assert copied
    assert all(saved in name for name in copied)
    for name in copied:
        original = model.get_parameter(name.replace("modules_to_save.default", "original_module"))
        assert original.dtype == torch.bfloat16
        if device == "cpu":
            assert torch.equal(actual[name], original.float())


@pytest.mark.sample(2, thorough=7)
@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
        {"target_modules": r".*\.mlp\..*_proj"},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_variants_of_lora_reach_peft(tiny_llama: Path, lora: dict[str, Any]) -> None:
    model = build_model(recipe(tiny_llama, lora={"r": 4, **lora}), CPU).train()
    model(**flat_batch()).backward()
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    assert all(gradient is not None for gradient in gradients.values())
    config = model.peft_config["default"]
    for key, value in lora.items():
        actual = getattr(config, key)
        assert (set(actual) == set(value)) if isinstance(value, list) else (actual == value)


def test_a_saved_head_trains_its_own_weight(tiny_llama: Path) -> None:
    model = build_model(recipe(tiny_llama, lora={"r": 4, "modules_to_save": ["lm_head"]}), CPU).train()
    head = next(parameter for name, parameter in trained(model).items() if "lm_head" in name)
    before = model(**flat_batch()).item()
    with torch.no_grad():
        head.mul_(1.5)
    assert model(**flat_batch()).item() != before


def test_ranks_draw_the_same_adapters(tiny_llama: Path) -> None:
    first = trained(build_model(recipe(tiny_llama, lora={"r": 4}), CPU))
    torch.manual_seed(99)
    second = trained(build_model(recipe(tiny_llama, lora={"r": 4}), CPU))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize(
    ("setting", "layers"), [(False, [False] * 4), (True, [True] * 4), (2, [True, False] * 2), ("selective", [True] * 4)]
)
def test_checkpointing_of_every_nth_layer(tmp_path: Path, setting: bool | int | str, layers: list[bool]) -> None:
    folder = save_tiny(tmp_path, num_hidden_layers=4)
    model = build_model(recipe(folder, lora=None, training={"activation_checkpointing": setting}), CPU)
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert [bool(layer.gradient_checkpointing) for layer in found] == layers
    assert [keeps_products(layer) for layer in found] == [setting == "selective"] * 4


@pytest.mark.parametrize("quantization", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_quantised_base_trains_adapters(tiny_llama: Path, quantization: dict[str, bool]) -> None:
    model = build_model(recipe(tiny_llama, lora={"r": 4}, quantization=quantization), CPU).train()
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    assert kinds & {"Params4bit", "Int8Params"}
    loss = model(**flat_batch())
    loss.backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


def test_an_adapter_on_the_head_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(FinetuneError, match="modules_to_save"):
        build_model(recipe(tiny_llama, lora={"target_modules": ["lm_head"]}), CPU)


@pytest.mark.sample(2, thorough=7)
@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["q_porj", "v_proj"]}, "lora.target_modules: q_porj matches no module.* q_proj"),
        ({"target_modules": ["q_proj", "w1"]}, "lora.target_modules: w1 .*linear layers are q_proj, k_proj"),
        ({"target_modules": ["self_attn.q_porj"]}, "self_attn.q_porj .*nearest are q_proj"),
        ({"target_modules": "q_proj"}, r"lora.target_modules: q_proj .*whole paths: write \[q_proj\]"),
        ({"target_modules": r".*\.(q|v)_porj"}, "matches no module of LlamaForCausalLM; the nearest are"),
        ({"target_modules": "*.q_proj"}, "is not a pattern"),
        ({"modules_to_save": ["lm_haed"]}, "lora.modules_to_save: lm_haed .*nearest are lm_head"),
    ],
    ids=str,
)
def test_a_name_that_no_module_has_is_refused_with_the_nearest(
    tiny_llama: Path, tmp_path: Path, lora: dict[str, Any], words: str
) -> None:
    """Before weights are read, and where they are."""
    bare = shutil.copytree(tiny_llama, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    for refuse in (
        lambda: refuse_early(recipe(bare, lora={"r": 4, **lora})),
        lambda: build_model(recipe(tiny_llama, lora={"r": 4, **lora}), CPU),
    ):
        with pytest.raises(FinetuneError, match=words) as caught:
            refuse()
        assert caught.value.exit_code == 2


def test_every_name_that_no_module_has_gets_its_line(tiny_llama: Path) -> None:
    with pytest.raises(FinetuneError) as caught:
        build_model(recipe(tiny_llama, lora={"target_modules": ["q_porj", "k_proj", "x"]}), CPU)
    assert [line.split()[1] for line in str(caught.value).splitlines()] == ["q_porj", "x"]


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("gemma2", {"attention_dropout": 0.1}, "a soft cap together with dropout"),
        ("stablelm", {}, "where documents end"),
    ],
)
def test_models_that_would_train_something_else_are_refused(
    tmp_path: Path, family: str, config: dict[str, Any], words: str
) -> None:
    folder = save_tiny(tmp_path, family, **config)
    with pytest.raises(FinetuneError, match=words):
        build_model(recipe(folder, lora=None), CPU)


@pytest.mark.parametrize("damage", ["missing", "unexpected"])
def test_weights_of_another_architecture_are_refused(tmp_path: Path, damage: str) -> None:
    folder = save_tiny(tmp_path)
    weights = load_file(folder / "model.safetensors")
    if damage == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    else:
        weights["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FinetuneError, match=f"{damage} keys"):
        build_model(recipe(folder, lora=None), CPU)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(FinetuneError, match="pickles are never read") as raised:
        build_model(recipe(folder, lora=None), CPU)
    assert raised.value.exit_code == 2


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    missing = recipe(tmp_path / "nowhere")
    for load in (load_tokenizer, lambda asked: build_model(asked, CPU)):
        with pytest.raises(EnvironmentMismatch) as caught:
            load(missing)
        assert "\n" not in str(caught.value)
        assert "model.name_or_path" in str(caught.value)


def test_sizes_that_clash_are_one_line(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 6}), "utf-8")
    for device in ("cpu", "meta"):
        with pytest.raises(FinetuneError, match=r"hidden size .* is not a multiple of") as raised:
            build_model(recipe(folder), torch.device(device))
        assert "\n" not in str(raised.value)


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "quantization", "zero3", "expected"),
    [
        (CPU, None, False, None),
        (GPU, None, False, {"": "cuda:1"}),
        (GPU, None, True, None),  # transformers shards on the device what it reads, and takes no map
        (GPU, {"load_in_4bit": True}, False, {"": "cuda:1"}),
    ],
    ids=["host", "gpu", "zero3", "4 bits"],
)
def test_weights_are_read_straight_to_where_they_are_used(
    device: torch.device,
    quantization: dict[str, Any] | None,
    zero3: bool,
    expected: dict[str, str] | None,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(*_: Any, **options: Any) -> None:
        asked.update(options)
        raise OSError("no further")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    monkeypatch.setattr(build, "is_deepspeed_zero3_enabled", lambda: zero3)
    with pytest.raises(EnvironmentMismatch, match="no further"):
        build.load_base(recipe(tiny_llama, lora={"r": 4}, quantization=quantization), device)
    assert asked.get("device_map") == expected


def test_adapters_are_drawn_on_the_host_wherever_the_base_is(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU draws other numbers by the same seed; on one, torch's default device is where adapters are made."""
    requested, drawn = recipe(tiny_llama, lora={"r": 4}), []
    genuine = adapters.add_adapters

    def add_adapters(model: Any, *rest: Any) -> nn.Module:
        drawn.append(torch.empty(0).device)
        return genuine(model, *rest)

    def load(*_: Any, **__: Any) -> Any:
        base = build.load_base(requested, CPU)
        monkeypatch.setattr(type(base), "device", GPU)
        return base

    monkeypatch.setattr(adapters, "add_adapters", add_adapters)
    expected = trained(build_model(requested, CPU))
    monkeypatch.setattr(build, "add_rows", lambda *_: [])
    actual = trained(build_model(requested, CPU, load=load))
    assert drawn == [CPU, CPU]
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
