"""Weights that are quantised one by one as they are sharded: the bytes that transformers quantises, one of them at a
time in host memory, and no collective that lasts longer than one takes."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.errors import EnvironmentMismatch
from finetune.model.build import build_model, load_base
from finetune.model.quantization import quantized_layers
from finetune.recipe.schema import Recipe
from finetune.strategies.late_quantising import Unquantised, load_unquantised, state_tensors
from tests.support.models.tiny import flat_batch, save_tiny, tiny_model
from tests.support.runs.one_rank import HERE, one_rank
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
MIB = 2**20
KINDS = {
    "nf4, double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "fp4, double": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "fp4": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
}
FAST = [("fsdp2", "nf4, double"), ("fsdp2", "fp4"), ("zero3", "nf4, double")]
REST = [(strategy, kind) for strategy in ("fsdp2", "zero3") for kind in KINDS if (strategy, kind) not in FAST]


def quantised(base: Path, run: Path, strategy: str, kind: str = "nf4, double", **lora: Any) -> Recipe:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", **KINDS[kind]}
    place = {"output_dir": str(run), "accelerate_config": strategy}
    training = {"activation_checkpointing": False}
    return least_recipe(base, quantization=settings, lora={"r": 4, **lora}, training=training, **place)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model, unsharded, by name; a 4-bit layer's QuantState by the names of buffers."""
    import deepspeed

    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = parameter.full_tensor()
        elif hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach()
    found |= dict(model.named_buffers())
    layers = set(quantized_layers(model))
    for path, layer in model.named_modules():
        if layer in layers and not hasattr(layer, "packing"):
            found |= {f"{path}.{name}": tensor for name, tensor in state_tensors(layer.weight.quant_state)}
    return {name: tensor.as_subclass(Tensor) for name, tensor in found.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        trained = "lora_" in name  # ZeRO-3 keeps its float32 value in the engine's masters
        assert torch.equal(*map(in_bytes, (actual[name], tensor.to(actual[name].dtype) if trained else tensor))), name


def in_bytes(tensor: Tensor) -> Tensor:
    """Packed weights are not numbers, and some are NaN in the format under whose name they travel."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "kind"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)])
def test_the_bytes_are_those_that_transformers_quantises(strategy: str, kind: str, tmp_path: Path) -> None:
    """48 columns: rows that are not whole blocks. A bias is not quantised."""
    base = save_tiny(tmp_path / "base", "qwen2", intermediate_size=48)
    recipe = quantised(base, tmp_path / "run", strategy, kind)
    expected = tensors_of(build_model(recipe, CPU, dtype=torch.bfloat16))
    suffixes = {name.rpartition(".")[2] for name in expected}
    assert ("quant_offset" in suffixes) == ("double" in kind)
    with one_rank(recipe) as built:
        assert_same(tensors_of(built.parts.unwrapped_model), expected)
        assert math.isfinite(built.step([flat_batch()]).loss)


@pytest.mark.thorough
def test_weights_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=256)
    recipe = quantised(base, tmp_path / "run", "fsdp2")
    expected = tensors_of(build_model(recipe, CPU))
    with one_rank(recipe) as built:
        assert_same(tensors_of(built.parts.unwrapped_model), expected)


@pytest.mark.slow
def test_a_base_that_is_stored_in_4_bits_is_loaded_as_it_is(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    stored = tmp_path / "stored"
    load_base(quantised(base, tmp_path, "fsdp2"), CPU).save_pretrained(stored)
    recipe = quantised(stored, tmp_path / "run", "zero3")
    expected = tensors_of(build_model(recipe, CPU))
    assert any("quant_absmax" in name for name in expected)
    with one_rank(recipe) as built:
        assert_same(tensors_of(built.parts.unwrapped_model), expected)


def test_what_waits_holds_the_file_and_no_packed_weight(tmp_path: Path) -> None:
    recipe = quantised(save_tiny(tmp_path / "base"), tmp_path, "fsdp2")
    model = load_unquantised(recipe, CPU)
    layers = list(quantized_layers(model))
    assert len(layers) == 14
    for layer in layers:
        assert layer.weight.untyped_storage().nbytes() == 2
        assert (layer.out_features, layer.in_features) == layer.unquantised.values.shape


def test_a_mixer_that_reads_packed_weights_is_refused_all_the_same(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "mamba", state_size=8, num_attention_heads=None)
    with pytest.raises(EnvironmentMismatch, match="MambaMixer reads the packed weights"):
        load_unquantised(quantised(base, tmp_path, "fsdp2"), CPU)


WIDTH, MATRICES = 4096, 8
WEIGHT = WIDTH * WIDTH * 2  # bytes, in bfloat16
EXTRA_SECONDS = 1.0  # that each weight is slower to quantise


def save_wide(folder: Path) -> Path:
    """Eight matrices of 4096 x 4096, each in a file of its own, and little else."""
    shape: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 32, "num_key_value_heads": 32}
    model = tiny_model(**shape, head_dim=WIDTH // 32, intermediate_size=64)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="34MB")
    return folder


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """Bytes that this process allocates at most in the block, as the kernel counts them, in a list afterwards; pages of
    mapped files are not its own. The kernel keeps no peak of these, so a thread looks."""
    peak, begin, over = [0], own_memory(), threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], own_memory() - begin)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def rank_main(rank: int, strategy: str, folder: Path, results: Any) -> None:
    """A small model's bytes; what quantising one large weight takes; then eight, by a group that waits for three."""
    import bitsandbytes.functional

    launch = replace(HERE, rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    recipe = quantised(folder / "small", folder / "run of small", strategy)
    with one_rank(recipe, launch) as built:
        actual = tensors_of(built.parts.unwrapped_model)
    assert_same(actual, tensors_of(build_model(recipe, CPU, dtype=torch.bfloat16)))

    settings = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.uint8}
    waiting, begun = Unquantised(torch.randn(WIDTH, WIDTH).to(torch.bfloat16), settings), time.monotonic()
    with peak_of_own_memory() as work:
        waiting.quantised(CPU)
    timeout = 3 * (time.monotonic() - begun + EXTRA_SECONDS)
    del waiting
    genuine = bitsandbytes.functional.quantize_4bit

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(EXTRA_SECONDS)
        return genuine(*args, **kwargs)

    bitsandbytes.functional.quantize_4bit = slow
    begun = time.monotonic()
    recipe = quantised(folder / "wide", folder / "run of wide", strategy)
    with peak_of_own_memory() as peak, one_rank(recipe, launch, timedelta(seconds=timeout)):
        seconds = time.monotonic() - begun
    results.put((rank, work[0], peak[0], timeout, seconds))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_one_weight_at_a_time_in_memory_and_in_collectives(strategy: str, tmp_path: Path) -> None:
    """Beyond its shard a rank needs less than three of eight unpacked weights; rank 0 four more, and the work on one:
    malloc keeps what lies between shards."""
    save_tiny(tmp_path / "small", "qwen2", intermediate_size=48)
    save_wide(tmp_path / "wide")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, strategy, tmp_path, results)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    found = {rank: rest for rank, *rest in (results.get(timeout=400) for _ in ranks)}
    for each in ranks:
        each.join(60)
    lines = [f"{peak / MIB:.0f} MiB, {work / MIB:.0f} of work" for _, (work, peak, *_) in sorted(found.items())]
    print(strategy, lines)
    (work, first, *_), (_, second, *_) = found[0], found[1]
    assert all(seconds > timeout for _, _, timeout, seconds in found.values()), "else nothing is shown of waiting"
    assert second < MATRICES * WEIGHT // 4 // 2 + 3 * WEIGHT, lines
    assert first < second + work + 4 * WEIGHT, lines
