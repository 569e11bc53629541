"""Quantised bases: layers compute what their dequantised weights would, in training, evaluation and when sharded."""

from __future__ import annotations

import multiprocessing
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.functional import has_avx512bf16
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import EnvironmentMismatch, FinetuneError, RecipeError
from finetune.model.build import bitsandbytes_config, build_model, decoder_parts
from finetune.model.new_tokens import load_tokenizer
from finetune.model.quantization import (
    TENSORS,
    as_quantized,
    frozen_weights,
    plain_quantized_weights,
    quantize_structure,
    quantized_layers,
)
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Quantization
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import unfit
from finetune.run_folder.save_restore import export_adapter
from finetune.strategies.assemble import Assembled
from tests.support.models.architectures import save_shaken
from tests.support.models.quantised import dequantised, quantised_recipe
from tests.support.models.tiny import flat_batch, save_tiny, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4, plain scales": NF4 | {"bnb_4bit_use_double_quant": False},
    "fp4": NF4 | {"bnb_4bit_quant_type": "fp4"},
    "nf4 in bfloat16 containers": NF4 | {"bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2: q, k and v have biases, of a size that shows (fresh ones are zero)."""
    folder, model = tmp_path_factory.mktemp("biased"), tiny_model("qwen2")
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def over_dequantised(model: nn.Module, folder: Path) -> nn.Module:
    """The same adapters over the dequantised weights, by peft and plain linear layers."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for name, layer in decoder_parts(model).named_modules():
        if layer in set(quantized_layers(model)):
            base.get_submodule(name.removesuffix(".base_layer")).weight.data = dequantised(layer)
    plain = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear"))
    for name, parameter in trained(plain).items():
        parameter.data = trained(model)[name].data.clone()
    return plain


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_dequantised_weights(kind: str, biased: Path) -> None:
    model = build_model(quantised_recipe(biased, KINDS[kind]), CPU).train()
    for parameter in trained(model).values():  # B is zero at first, and A's gradient with it
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    plain = over_dequantised(model, biased)
    batch = flat_batch((19,))
    model(**batch).backward()
    logits = plain(input_ids=batch["input_ids"]).logits[0, :-1]
    nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="sum").backward()
    for name, parameter in trained(plain).items():
        actual = trained(model)[name].grad
        assert actual is not None
        assert (actual - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@pytest.mark.sample(2, thorough=8)
@pytest.mark.parametrize("plain", [False, True], ids=["as loaded", "as sharded"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])
def test_rows_that_are_not_whole_blocks_have_their_own_scales(kind: str, plain: bool, tmp_path: Path) -> None:
    """On a CPU bitsandbytes 0.50 takes the scales of other blocks for them."""
    recipe = quantised_recipe(save_tiny(tmp_path, intermediate_size=96), KINDS[kind])
    model = build_model(recipe, CPU)
    layers = {layer: dequantised(layer) for layer in quantized_layers(model) if layer.in_features == 96}
    assert len(layers) == 2
    if plain:
        plain_quantized_weights(model)
    hidden = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for layer, weight in layers.items():
        assert torch.allclose(layer(hidden), hidden @ weight.T, atol=1e-5)
        (found,) = torch.autograd.grad(layer(hidden).square().sum(), hidden)
        (expected,) = torch.autograd.grad((hidden @ weight.T).square().sum(), hidden)
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_weight_as_quantised_has_its_own_scales() -> None:
    weight = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    quantization = Quantization(load_in_4bit=True)
    in_rows_of_blocks = as_quantized(weight.view(6, 64), quantization)
    assert torch.equal(as_quantized(weight, quantization), in_rows_of_blocks.view(8, 48))


def test_a_mixer_that_multiplies_packed_weights_itself_is_refused(tmp_path: Path) -> None:
    save_shaken("mamba", tmp_path)
    with pytest.raises(
        EnvironmentMismatch, match=r"quantization: MambaMixer reads .*; set quantization: null"
    ) as raised:
        build_model(quantised_recipe(tmp_path, NF4), CPU)
    assert "\n" not in str(raised.value)


@pytest.mark.sample(1, thorough=5)
@pytest.mark.parametrize("kind", KINDS)
def test_only_layers_between_embeddings_and_head_are_quantised(kind: str, tiny_llama: Path) -> None:
    model = build_model(quantised_recipe(tiny_llama, KINDS[kind], dtype="bfloat16"), CPU)
    layers = list(quantized_layers(model))
    assert {type(layer).__name__ for layer in layers} == {"Linear8bitLt" if kind == "int8" else "Linear4bit"}
    assert len(layers) == 14
    decoder = decoder_parts(model)
    for end in (decoder.get_input_embeddings(), decoder.get_output_embeddings()):
        assert type(end) in (nn.Embedding, nn.Linear)
        assert end.weight.dtype == torch.bfloat16, "not cast up to float32, 2.1 GB for Llama 3 8B"
    assert {parameter.dtype for parameter in trained(model).values()} == {torch.float32}
    unquantised = build_model(quantised_recipe(tiny_llama, None), CPU)
    assert frozen_weights(model, torch.numel) == frozen_weights(unquantised, torch.numel) > 100_000


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_left_alone(tied: bool, tmp_path: Path) -> None:
    model = build_model(quantised_recipe(save_tiny(tmp_path, tie_word_embeddings=tied), NF4), CPU)
    assert type(decoder_parts(model).get_output_embeddings()) is nn.Linear


def packed(model: nn.Module) -> list[Tensor]:
    """Bytes, for as numbers some are NaN, and unequal to themselves."""
    return [layer.weight.data.view(torch.uint8).clone() for layer in quantized_layers(model)]


def test_int8_layers_keep_no_input_of_checkpointed_layers(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_forward() -> tuple[int, dict[str, Tensor]]:
        """How many inputs of int8 layers are alive between forward and backward, and the gradients."""
        model, inputs = build_model(quantised_recipe(tiny_llama, KINDS["int8"]), CPU).train(), []
        for layer in quantized_layers(decoder_parts(model).model.layers[0]):
            layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
        loss = model(**flat_batch())
        alive = sum(kept() is not None for kept in inputs)
        assert inputs
        loss.backward()
        return alive, {name: parameter.grad for name, parameter in trained(model).items() if parameter.grad is not None}

    alive, gradients = after_forward()
    monkeypatch.setattr("finetune.model.build.forget_inputs", lambda _: None)
    kept, plain = after_forward()
    assert alive == 0 < kept
    assert gradients.keys() == plain.keys()
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


@pytest.mark.sample(1, thorough=5)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_leaves_the_weights_as_they_are(kind: str, tiny_llama: Path) -> None:
    model, batch = build_model(quantised_recipe(tiny_llama, KINDS[kind]), CPU).train(), flat_batch()
    loss, before = model(**batch).item(), packed(model)
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch).item()
    # int8 on a CPU: trained over dequantised weights, evaluated by LLM.int8(), whose inputs are rounded to 8 bits too.
    assert evaluated == pytest.approx(loss, rel=1e-3 if kind == "int8" else 1e-7)
    assert model.train()(**batch).item() == loss
    assert all(map(torch.equal, before, packed(model)))


@pytest.mark.slow
@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes repacks on CPUs with AVX512-BF16 alone")
def test_bitsandbytes_would_repack_them_for_good(tiny_llama: Path) -> None:
    """When this turns red, check_quantized can lose its first half."""
    model = build_model(quantised_recipe(tiny_llama, NF4), CPU).eval()
    before = packed(model)
    for layer in quantized_layers(model):
        layer.support_avx512bf16_for_cpu = True
    with torch.no_grad():
        model(**flat_batch())
    assert not any(map(torch.equal, before, packed(model)))


@pytest.mark.sample(1, thorough=5)
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_loads_on_a_plain_base(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    requested = quantised_recipe(tiny_llama, KINDS[kind])
    model = build_model(requested, CPU)
    for parameter in trained(model).values():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    weights = Assembled(model, model, None).trained_weights(dtype=None, keep=True)
    folder = export_adapter(model, weights, load_tokenizer(requested), tmp_path, base=str(tiny_llama))
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(folder))
    ours = over_dequantised(model, tiny_llama)
    for name, layer in decoder_parts(ours).named_modules():
        if name.endswith(".base_layer"):  # the dequantised base under the loaded adapter
            decoder_parts(loaded).get_submodule(name).weight.data = layer.weight.data
    tokens = flat_batch((19,))["input_ids"]
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, ours(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_a_model_clamps_as_stored_are_refused(device: str, tmp_path: Path) -> None:
    """Gemma 3n clamps its prediction_coefs in each forward of a training."""
    save_shaken("gemma3n_text", tmp_path)
    with pytest.raises(FinetuneError, match=r"altup\.\w+_coefs has \d+ weights.*set quantization: null$"):
        build_model(quantised_recipe(tmp_path, NF4), torch.device(device))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["quantization.load_in_8bit=true", "lora.init_lora_weights=orthogonal"], "not quantised"),
        (["quantization.load_in_8bit=true", "lora.use_dora=true"], "DoRA"),
        (["quantization.load_in_4bit=true", "lora=null"], "cannot be trained"),
        (["quantization.load_in_4bit=true", "training.mixed_precision=fp16"], "float16"),
    ],
)
def test_what_libraries_cannot_do_is_a_recipe_error(changes: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name_or_path: x}\ndata: {train: [{path: json}]}\n")
    with pytest.raises(RecipeError, match=words):
        load_recipe(str(path), changes)


@pytest.mark.parametrize(
    ("quantization", "lora", "words"),
    [
        ({"load_in_8bit": True}, {}, "load_in_4bit"),
        ({"load_in_4bit": True}, {}, "bnb_4bit_quant_storage=bfloat16"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, {}, "bnb_4bit_quant_storage=float32"),
        (NF4 | {"bnb_4bit_quant_storage": "float32"}, {"use_dora": True}, "use_dora"),
        (NF4 | {"bnb_4bit_quant_storage": "float32"}, {}, None),
        (None, {}, None),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    quantization: dict[str, Any] | None, lora: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    requested = quantised_recipe(tmp_path, quantization, **lora)
    if words is None:
        assert list(unfit(requested, read_strategy("fsdp2"))) == []
        return
    (line,) = map(str, unfit(requested, read_strategy("fsdp2")))
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload", "zero3", "gpipe", "1f1b"])
def test_dora_in_4_bits_needs_whole_layers(strategy: str, tmp_path: Path) -> None:
    requested = quantised_recipe(tmp_path, NF4 | {"bnb_4bit_quant_storage": "float32"}, use_dora=True)
    requested = requested.model_copy(update={"accelerate_config": strategy})
    lines = [str(line) for line in unfit(requested, read_strategy(strategy)) if line.key == "lora.use_dora"]
    assert len(lines) == 1
    assert "set it to false, or accelerate_config=ddp" in lines[0]
    assert not [line for line in unfit(requested, read_strategy("ddp")) if line.key == "lora.use_dora"]


FOUR_BIT = [kind for kind in KINDS if kind != "int8"]


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_plain_weights_compute_the_same(kind: str, biased: Path) -> None:
    losses, gradients = [], []
    for plain in (False, True):
        model = build_model(quantised_recipe(biased, KINDS[kind]), CPU).train()
        assert sum(layer.bias is not None for layer in quantized_layers(model)) == 6
        if plain:
            plain_quantized_weights(model)
            assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        loss = model(**flat_batch())
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in trained(model).values()])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *gradients))


@pytest.mark.sample(3, thorough=10)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_weight_becomes_is_its_layers_dequantised_weight(kind: str, dtype: str, tiny_llama: Path) -> None:
    """Of each layer of a loaded model; that is what is merged when the adapter was trained with it."""
    requested = quantised_recipe(tiny_llama, KINDS[kind], dtype)
    assert requested.quantization is not None
    unquantised = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, dtype))
    model = decoder_parts(build_model(requested, CPU))
    packed_layers = set(quantized_layers(model))
    layers = {
        name.removesuffix(".base_layer"): layer for name, layer in model.named_modules() if layer in packed_layers
    }
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = unquantised.get_submodule(name).weight.detach()
        actual, expected = as_quantized(weight, requested.quantization), dequantised(layer)
        assert (actual.float() - weight.float()).abs().max() > 1e-4, "it was rounded"
        torch.testing.assert_close(actual.float(), expected, rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-8)


def structure(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named}


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_plain_weights_may_go_between_forward_and_backward(kind: str, tiny_llama: Path) -> None:
    """As under ZeRO-3, which gathers them again for the backward pass."""
    gradients: list[dict[str, Tensor]] = []
    for gathered_again in (False, True):
        model = build_model(quantised_recipe(tiny_llama, KINDS[kind]), CPU).train()
        plain_quantized_weights(model)
        loss = model(**flat_batch())
        if gathered_again:
            storages = [weakref.ref(layer.weight.untyped_storage()) for layer in quantized_layers(model)]
            for layer in quantized_layers(model):
                layer.weight.data = layer.weight.data.clone()
            assert not any(storage() for storage in storages)
        loss.backward()
        gradients.append({name: weight.grad for name, weight in trained(model).items() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_a_model_on_meta_has_the_structure_of_the_real_one(kind: str, tiny_llama: Path) -> None:
    requested = quantised_recipe(tiny_llama, KINDS[kind], dtype="bfloat16")
    real = build_model(requested, CPU)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_llama), dtype=torch.bfloat16)
        quantize_structure(base, bitsandbytes_config(requested.quantization, base.config))
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear")
        hollow = get_peft_model(base, config)
    plain_quantized_weights(real)
    plain_quantized_weights(hollow)
    assert structure(hollow) == structure(real)
    packings = [[layer.packing for layer in quantized_layers(model)] for model in (hollow, real)]
    assert packings[0] == packings[1]
    assert {tensor.device.type for tensor in hollow.parameters()} == {"meta"}


def test_the_buffers_are_all_of_the_state(tiny_llama: Path) -> None:
    """A tensor that bitsandbytes adds to its state would be lost on the other ranks."""
    model = build_model(quantised_recipe(tiny_llama, NF4), CPU)
    state = next(quantized_layers(model)).weight.quant_state
    inner = {f"state2.{key}" for key, value in vars(state.state2).items() if isinstance(value, Tensor)}
    assert {key for key, value in vars(state).items() if isinstance(value, Tensor)} | inner == set(TENSORS.values())


def train_sharded(rank: int, port: int, folder: Path, quantization: dict[str, Any], losses: Any) -> None:
    """Four steps under FSDP2; rank 1 starts from a base of zeros and gets rank 0's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    dtype = quantization["bnb_4bit_compute_dtype"]
    model = build_model(quantised_recipe(folder, quantization, dtype), CPU).train()
    compute = getattr(torch, dtype)
    plain_quantized_weights(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if rank:
            tensor.data.zero_()
        dist.broadcast(tensor.data, src=0)
    decoder = decoder_parts(model)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for unit in (*layers, decoder):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    assert all(isinstance(layer.weight, DTensor) for layer in quantized_layers(model))
    assert all(len(layer.weight.to_local()) * 2 == len(layer.weight) for layer in quantized_layers(model))
    actual = four_steps(model, compute)
    if rank == 0:
        losses.put(actual)
    dist.destroy_process_group()


def four_steps(model: nn.Module, compute: torch.dtype) -> list[float]:
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    result = []
    for seed in range(4):
        with torch.autocast("cpu", dtype=compute, enabled=compute != torch.float32):
            loss = model(**flat_batch(seed=seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_weights_are_sharded_by_fsdp2(dtype: str, tiny_llama: Path) -> None:
    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    losses = fork.Queue()
    ranks = [
        fork.Process(target=train_sharded, args=(rank, port, tiny_llama, quantization, losses)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    alone = build_model(quantised_recipe(tiny_llama, quantization, dtype), CPU).train()
    # Both ranks see the same batch, so their mean gradient is one's.
    assert losses.get() == pytest.approx(four_steps(alone, getattr(torch, dtype)), rel=1e-6)
