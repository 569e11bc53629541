"""What else the kit does with an architecture of docs/families.md: adapters, a 4-bit base, a plan, a rehearsal.

Each on the tiny model that `architectures.save_shaken` writes, in a way of bringing documents to it that is right. The
rehearsal's model is made of the architecture's own default configuration, as `finetune rehearse` makes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from finetune.errors import FinetuneError
from finetune.model.adapter_targets import base_path, expert_parameters, kind_of, reach
from finetune.model.build import build_model, decoder_parts
from finetune.model.quantization import quantized_layers
from finetune.recipe.schema import Data, Recipe
from finetune.rehearse.shrink import shrink_model
from finetune.tokens.batches import micro_batches
from tests.support.models.architectures import BOUND, WAYS, Outcome, Rows, Trained, Way, largest_difference
from tests.support.models.quantised import dequantised
from tests.support.runs.recipes import least_recipe

COLUMNS = ("adapters", "4-bit", "experts", "rehearsal", "plan")
CPU, META = torch.device("cpu"), torch.device("meta")
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
PLANNED_ROW = 64  # tokens; a state-space layer's scan is traced token by token
SHAKEN = 0.02  # what is added to fresh adapters, whose second factors are zero, and the first ones' gradients with them
# Where a default configuration cannot be built, or lacks what the architecture is for.
CONVOLUTIONS = {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8}
WHOLE: dict[str, dict[str, Any]] = {
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default"} for kind in ("sliding_attention", "full_attention")}
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256},
        **{"indexer_budget": 2048, "indexer_compress_ratio": 4},
    },
}


@dataclass(frozen=True)
class Cell:
    """Of the table: what is shown, and the reason where it is not simply right."""

    shown: str
    why: str = ""


def refused(error: FinetuneError) -> Cell:
    """The kit's line, without the model's name, which the table's own line has."""
    line = re.sub(r"^model\.name_or_path: \S+:? (this architecture )?", "", str(error))
    return Cell("refused", re.sub(r"; rehearse with a small local model.*|(?<=weights) of \S+", "", line))


def right_way(found: Mapping[Way, Outcome]) -> Way | None:
    """The first way in which the architecture is trained rightly."""
    return next((way for way in WAYS if found[way].word == "right"), None)


def cell(column: str, name: str, folder: Path, way: Way) -> Cell:
    """Of this column. Anything but FinetuneError gets through."""
    match column:
        case "adapters":
            return adapters_reach(folder, way)
        case "4-bit":
            return four_bits(folder, way)
        case "experts":
            return packed_experts(folder, way)
        case "rehearsal":
            return rehearsal(name, folder, way)
        case _:
            return planned(folder, way)


def adapters_on(folder: Path, way: Way, quantization: dict[str, Any] | None = None) -> Recipe:
    """A recipe of adapters on all that they reach."""
    model, data = {"dtype": "float32", "attention": way.attention}, {"packing": way.packing}
    training = {"activation_checkpointing": False, "per_device_batch_size": 2, "mixed_precision": "no"}
    lora = {"r": 4, "target_modules": "all-linear"}
    return least_recipe(folder, model=model, data=data, lora=lora, training=training, quantization=quantization)


def adapters_reach(folder: Path, way: Way) -> Cell:
    """The share of the matrices' weights that all-linear reaches, by the receipt's own account."""
    try:
        model = build_model(adapters_on(folder, way), META)
    except FinetuneError as error:
        return refused(error)
    found = reach(model, decoder_parts(model), torch.numel)
    return Cell(_share(found["reached_share"]), _list(found["left_out"]))


def four_bits(folder: Path, way: Way) -> Cell:
    """The share of the matrices' weights that a 4-bit base has in 4 bits; loss and the adapters' gradients are those of
    a base of the numbers that these stand for, to BOUND."""
    try:
        quantised = build_model(adapters_on(folder, way, NF4), CPU)
    except FinetuneError as error:
        return refused(error)
    plain = build_model(adapters_on(folder, way), CPU)
    layers = decoder_parts(quantised).named_modules()
    chosen = set(quantized_layers(quantised))
    packed = {path: layer for path, layer in layers if layer in chosen}
    blocks = dict(decoder_parts(plain).named_parameters())
    for path, layer in packed.items():
        numbers = dequantised(layer)
        if path in blocks:  # all experts of a layer, [experts, outputs, inputs]
            blocks[path].data = numbers.view(blocks[path].shape)
            continue
        base: Any = decoder_parts(plain).get_submodule(path)
        base.weight.data = numbers.T.contiguous() if isinstance(base, Conv1D) else numbers
    shake(quantised)
    copies = dict(plain.named_parameters())  # where these have more adapters, the others' are zero
    adapters = {name: parameter for name, parameter in quantised.named_parameters() if parameter.requires_grad}
    for name, parameter in adapters.items():
        copies[name].data = parameter.data.clone()
    expected = _of(adapters, trained(plain, way))
    worst = largest_difference(trained(quantised, way), expected)
    if worst > 1 and not worst <= _rounding(plain, way, adapters, expected):
        return Cell("WRONG", f"{worst * BOUND:.1e} from its dequantised weights")
    left, in_four_bits = Counter[str](), set(map(base_path, packed))
    matrices = matrix_sizes(plain)
    for path, size in matrices.items():
        if base_path(path) not in in_four_bits:
            left[kind_of(base_path(path))] += size
    total = sum(matrices.values())
    share = {kind: size / total for kind, size in left.most_common()}
    past = [reach(model, decoder_parts(model), torch.numel)["left_out"] for model in (quantised, plain)]
    without = ", ".join(sorted(past[0].keys() - past[1].keys()))
    why = _list(share) + (f", and has no adapter on {without}" if without else "")
    return Cell(_share(1 - sum(share.values())), why)


def _of(adapters: Mapping[str, Any], found: Trained) -> Trained:
    loss, gradients = found
    return loss, {name: gradients[name] for name in adapters}


def _rounding(plain: nn.Module, way: Way, adapters: Mapping[str, Any], expected: Trained) -> float:
    """How far the library's other way to add up experts is from `expected`: 16 bounds where Mamba layers lie before
    them."""
    expected = expected[0], {name: None if one is None else one.clone() for name, one in expected[1].items()}
    plain.zero_grad()
    decoder_parts(plain).set_experts_implementation("batched_mm")
    return largest_difference(_of(adapters, trained(plain, way)), expected)


def packed_experts(folder: Path, way: Way) -> Cell:
    """The share of the experts' weights that a 4-bit base has in 4 bits. `four_bits` holds their numbers."""
    try:
        plain = expert_parameters(decoder_parts(build_model(adapters_on(folder, way), META)))
        if not plain:
            return Cell("-")
        quantised = build_model(adapters_on(folder, way, NF4), META)
    except FinetuneError as error:
        return refused(error)
    chosen = set(quantized_layers(quantised))
    packed = {base_path(path) for path, layer in decoder_parts(quantised).named_modules() if layer in chosen}
    sizes = {path: block.numel() for path, block in plain.items()}
    return Cell(_share(sum(size for path, size in sizes.items() if path in packed) / sum(sizes.values())))


def shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += SHAKEN * torch.randn(parameter.shape, generator=generator)


def matrix_sizes(model: nn.Module) -> dict[str, int]:
    """Weights of each matrix between embeddings and head, by the path of its layer, of an expert by its own."""
    decoder, sizes = decoder_parts(model), {}
    ends = {id(decoder.get_input_embeddings()), id(decoder.get_output_embeddings())}
    for path, module in decoder.named_modules():
        if id(module) in ends or isinstance(module, nn.Embedding | nn.Conv1d) or ".lora_" in path:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not name.endswith("bias"):
                sizes[path if name == "weight" else f"{path}.{name}"] = parameter.numel()
    return sizes


def trained(model: nn.Module, way: Way) -> Trained:
    """Loss of the documents of this way, and the gradients."""
    rows, loss = Rows(way), 0.0
    settings: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": 2, "flat": way.attention == "auto"}
    model.train()
    for batch in micro_batches(rows, range(len(rows.rows)), **settings):
        part = model(**batch)
        part.backward()
        loss += part.item()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def rehearsal(name: str, folder: Path, way: Way) -> Cell:
    """Whether the small model of a rehearsal can be made, and its step has a loss and gradients."""
    config = CONFIG_MAPPING[name](**WHOLE.get(name, {}))
    whole = folder / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config.to_dict(), default=str), "utf-8")
    rows = folder / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a river"}]}\n', "utf-8")
    data = Data.model_validate({"train": [{"path": "json", "data_files": str(rows)}]})
    try:
        shrunk = shrink_model(str(whole), "main", data, folder / "small")
        loss, gradients = trained(build_model(adapters_on(shrunk.folder, way), CPU), way)
    except FinetuneError as error:
        return refused(error)
    finite = all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients.values())
    moved = any(gradient is not None and bool(gradient.any()) for gradient in gradients.values())
    return Cell("runs") if finite and moved and loss == loss else Cell("WRONG", f"loss {loss}")


def planned(folder: Path, way: Way) -> Cell:
    """Whether adapters on one GPU are planned, with the weights held that the model has. Traces: not for a process
    that has run a backward pass before `pretend_device`."""
    from finetune.planner.plan_recipe import plan_recipe
    from finetune.recipe.gpus import parse_gpus

    settings = {"model": {"attention": way.attention}, "data": {"packing": way.packing, "max_length": PLANNED_ROW}}
    training = {"global_batch_size": 1, "per_device_batch_size": 1, "activation_checkpointing": False}
    recipe = least_recipe(folder, lora={"target_modules": "all-linear"}, training=training, **settings)
    try:
        plan = plan_recipe(recipe, parse_gpus("1x24GB"))
    except FinetuneError as error:
        return refused(error)
    model = build_model(recipe, META)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    expected = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held = plan.phases["load"].end["parameters"]
    return Cell("planned") if held == expected else Cell("WRONG", f"{held:,} bytes of weights planned, {expected:,}")


def _share(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.1f} %"


def _list(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.items())
