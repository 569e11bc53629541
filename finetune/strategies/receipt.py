"""Reads what really runs from the built objects, and compares it with the recipe.

Libraries skip silently: a target module that matches nothing, a layer that was not quantised, a layer that is not
recomputed. So the receipt looks at parameters and layers, never at flags that were passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft  # noqa: F401  # early, so that the tensors it allocates are not measured
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.own_layers.lora_linear import OWN, PACKED, computed_by
from finetune.architecture.own_layers.norm_and_gate import norms_and_gates, tiled_mlps
from finetune.architecture.recomputation import keeps_products
from finetune.errors import EnvironmentMismatch
from finetune.files import write_json
from finetune.model.adapter_targets import (
    base_path,
    describe_reach,
    expert_parameters,
    part_of,
    reach,
)
from finetune.model.build import attention_name
from finetune.model.dtypes import COMPUTE, dtype_name
from finetune.model.optimizer import formats
from finetune.model.quantization import float8_layers, frozen_weights, quantized_layers
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.strategies.accelerator import kind_of_scaling
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Elsewhere, full_numel, full_shape, is_trained, local_shard
from finetune.wording import counted

MXFP4_KIND = "Mxfp4Experts"  # experts that stay as their files have them, beside layers in 4 bits
FLOAT8_KIND = "LinearFloat8"  # the kind of a layer in float8, which is torch's class with another forward


def receipt_content(recipe: Recipe, accelerator: Accelerator, parts: Assembled, strategy: Strategy) -> dict[str, Any]:
    """The receipt of a prepared model. Raises EnvironmentMismatch where it differs from the recipe."""
    model, decoder = parts.unwrapped_model, parts.decoder
    trained = [parameter for parameter in model.parameters() if is_trained(parameter)]
    frozen = [parameter for parameter in model.parameters() if not is_trained(parameter)]
    quantised, in_float8 = [*quantized_layers(model)], [*float8_layers(model)]
    frozen_count = frozen_weights(model, lambda weight: 0 if is_trained(weight) else full_numel(weight))
    packed = {id(layer.weight) for layer in (*quantised, *in_float8)}
    reached, whole = reach(model, decoder, full_numel), part_of(decoder)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    tiled = tiled_mlps(model)
    cast_to, master = _compute_dtype(accelerator, parts), _dtypes(trained)
    reduced = master  # gradients are summed over the ranks in their weights' format, unless an engine has its own
    if parts.engine is not None:
        from finetune.strategies.zero_state import master_dtype

        master, reduced = dtype_name(master_dtype(parts.engine)), dtype_name(parts.engine.communication_data_type)
    elif strategy.shards_modules:
        from finetune.strategies.fsdp import reduced_in

        reduced = ", ".join(sorted(map(dtype_name, reduced_in(model)))) or master
    receipt = {
        "strategy": strategy.name,
        "world_size": accelerator.num_processes,
        "device": str(accelerator.device.type),
        # Kernels of a CPU sum in one order anyway; those of a GPU while the run trains (launch/determinism.py).
        "deterministic": accelerator.device.type != "cuda" or recipe.training.deterministic,
        "wrapper": type(parts.model).__name__,
        "architecture": type(decoder).__name__.removeprefix("FSDP"),  # fully_shard puts it before
        "text_part_of": whole,
        "attention": decoder.config._attn_implementation,
        "optimizer": {
            "name": recipe.training.optim,
            "by": OPTIMIZERS[recipe.training.optim].library(sharded=strategy.shards_modules),
        },
        "sharding": sharding_facts(model),
        "pipeline": None if parts.pipeline is None else parts.pipeline.facts(model),
        "dtypes": {
            "master": master,
            "frozen": _dtypes(frozen),
            "compute": cast_to or _dtypes(parameter for parameter in frozen or trained if id(parameter) not in packed),
            "reduce": reduced,
            "optimizer_state": None,  # read off the state, once there is one: Receipt.add_optimizer_state
        },
        "parameters": {
            "trained": sum(full_numel(parameter) for parameter in trained),
            "frozen": frozen_count,
        },
        "loss_scaling": kind_of_scaling(accelerator),
        "quantized_layers": dict(
            Counter(type(layer).__name__ for layer in quantised) + Counter(FLOAT8_KIND for _ in in_float8)
        ),
        "experts": experts_by_format(decoder),
        "adapted_layers": sum(reached["adapted_modules"].values()),
        **computed_layers(accelerator, parts),
        **reached,
        "layers": len(layers),
        "checkpointed_layers": sum(1 for layer in layers if layer.gradient_checkpointing),
        "layers_keeping_products": sum(1 for layer in layers if keeps_products(layer)),
        "layers_with_states_on_host": sum(1 for layer in layers if hasattr(layer, "finetune_states_on_host")),
        "mlp_tiles": {"tokens": tiled[0].finetune_tile_tokens, "layers": len(tiled)} if tiled else None,
        "pinned_memory": recipe.training.non_blocking and accelerator.device.type == "cuda",
        "non_blocking": recipe.training.non_blocking,
        "batches_copied_ahead": int(recipe.training.non_blocking),
    }
    checks = receipt_checks(recipe, strategy, receipt)
    differing = [f"{place}: asked {requested}, runs {runs}" for place, requested, runs in checks if requested != runs]
    if differing:
        raise EnvironmentMismatch("\n".join([*differing, "what is built is not what the recipe asks for"]))
    return receipt


def experts_by_format(base: PreTrainedModel) -> dict[str, int]:
    """The number of routed experts in each number format, over all layers: {"nf4": 6144}. Empty without a mixture."""
    held: dict[str, tuple[str, int]] = {}  # of a layer, whose experts have several parameters
    for path, module in base.named_modules():
        if hasattr(module, "finetune_experts"):
            packing = getattr(module, "packing", None) or vars(module.weight)  # bitsandbytes' parameter has its own
            held[base_path(path).rpartition(".")[0]] = packing["quant_type"], module.finetune_experts[0]
    for path, parameter in expert_parameters(base).items():
        held[base_path(path).rpartition(".")[0]] = dtype_name(parameter.dtype), full_shape(parameter)[0]
    formats_of_experts = Counter[str]()
    for name, count in held.values():
        formats_of_experts[name] += count
    return dict(formats_of_experts)


def computed_layers(accelerator: Accelerator, parts: Assembled) -> dict[str, Any]:
    """The library that computes adapters, and how many norms and gates the kit's own autograd computes."""
    model, cast = parts.unwrapped_model, _compute_dtype(accelerator, parts) is not None
    return {
        "adapters_computed": dict(Counter(computed_by(model, cast=cast))),
        "own_norms_and_gates": norms_and_gates(model),
    }


def sharding_facts(model: nn.Module) -> dict[str, Any]:
    """The weights that this rank holds, read off the storage of the parameters themselves."""
    elements = local_elements = sharded = 0
    meshes, places = set(), set()
    for parameter in model.parameters():
        elements += full_numel(parameter)
        if isinstance(parameter, Elsewhere):
            continue
        if (part := local_shard(parameter)) is not parameter:
            sharded += full_numel(parameter)
            local = part
        elif isinstance(parameter, DTensor):
            sharded += parameter.numel()
            local = parameter.to_local()
            mesh = parameter.device_mesh
            meshes.add(tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))
        else:
            local = parameter
        local_elements += local.numel()
        places.add(local.device.type)
    return {
        "sharded_parameters": sharded,
        "held_share": local_elements / elements,
        "mesh": dict(meshes.pop()) if meshes else {},
        "weights_on": sorted(places),
    }


class Receipt:
    """receipt.json, which grows while the run is built and trained. Every rank holds its content, rank 0 writes it."""

    def __init__(self, recipe: Recipe, strategy: Strategy, content: dict[str, Any], *, writes: bool) -> None:
        self._recipe, self._strategy, self._writes, self.content = recipe, strategy, writes, content

    def write(self) -> None:
        if self._writes:
            write_json(Path(self._recipe.run_dir) / "receipt.json", self.content)

    def add(self, section: str, facts: dict[str, Any]) -> None:
        """Add or replace a section, and write the receipt."""
        self.content[section] = facts
        self.write()

    def add_optimizer_state(self, elements: Counter[str]) -> None:
        """Note the optimizer state's formats, and how much of it this rank holds.

        8 bits are for tensors with 4,096 elements or more. Small adapters may have none; the receipt then says float32.
        `elements` counts this rank's elements of moments in each format.

        Raises EnvironmentMismatch if the number format, or the share under ZeRO, is not as asked for.
        """
        training, dtypes, spec = self._recipe.training, formats(elements), OPTIMIZERS[self._recipe.training.optim]
        requested = spec.state_dtypes("bfloat16" if training.pure_bf16 else "float32")
        if not set(dtypes.split(", ")) <= set(requested):
            raise EnvironmentMismatch(
                f"training.optim: state of {training.optim} in {' or '.join(requested)} was asked for, it is {dtypes}"
            )
        share = elements.total() / (len(spec.moments) * self.content["parameters"]["trained"])
        if self._strategy.uses_engine and self.content["world_size"] > 1 and share > 0.9:
            raise EnvironmentMismatch(
                f"accelerate_config: {self._strategy.name} shards optimizer state, this rank holds {share:.0%}"
            )
        self.content["dtypes"]["optimizer_state"] = dtypes
        self.content["optimizer"]["state_elements"] = dict(elements)
        self.content["sharding"]["optimizer_share"] = share
        self.write()


def _compute_dtype(accelerator: Accelerator, parts: Assembled) -> str | None:
    """The number format that weights are gathered in, or that autocast has in a forward, where it is on."""
    if parts.gathered_in is not None:
        return dtype_name(parts.gathered_in)
    with accelerator.autocast():
        device = accelerator.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is None:
        return None
    return dtype_name(dtype)


def _dtypes(parameters: Iterable[torch.Tensor]) -> str:
    """The number formats of these parameters, most frequent first."""
    count = Counter(dtype_name(parameter.dtype) for parameter in parameters)
    return ", ".join(name for name, _ in count.most_common()) or "none"


def receipt_checks(recipe: Recipe, strategy: Strategy, receipt: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The place in the recipe, the value it asks for, and the value that runs."""
    every = recipe.training.recompute_every
    expected_master = "bfloat16" if recipe.training.pure_bf16 else "float32"
    precision = recipe.training.mixed_precision
    compute = COMPUTE[precision]
    computes = receipt["dtypes"]["compute"] if compute is None else dtype_name(compute)
    reduces = "float32" if strategy.reduces_in_float32 else receipt["dtypes"]["reduce"]
    quantised = []
    if recipe.model.load_in_fp8:
        quantised = [FLOAT8_KIND]
    elif recipe.quantization is not None:
        quantised = ["Linear4bit" if recipe.quantization.load_in_4bit else "Linear8bitLt"]
    return [
        ("training.mixed_precision: number format of the computation", computes, receipt["dtypes"]["compute"]),
        ("training.mixed_precision: number format of the reduction", reduces, receipt["dtypes"]["reduce"]),
        ("training.mixed_precision: loss scaling", precision == "fp16", receipt["loss_scaling"] is not None),
        ("model.attention", attention_name(recipe), receipt["attention"]),
        ("training.pure_bf16: number format of trained weights", expected_master, receipt["dtypes"]["master"]),
        ("lora: layers with an adapter", recipe.lora is not None, receipt["adapted_layers"] > 0),
        ("lora.target_modules: weights are trained", True, receipt["parameters"]["trained"] > 0),
        (
            "accelerate_config: weights sharded",
            strategy.shards_parameters,
            receipt["sharding"]["sharded_parameters"] > 0,
        ),
        ("accelerate_config: schedule of the pipeline", strategy.schedule, (receipt["pipeline"] or {}).get("schedule")),
        (
            "accelerate_config: pipelines beside each other",
            strategy.pipelines.copies if strategy.pipelines else 0,
            (receipt["pipeline"] or {}).get("copies", 0),
        ),
        (
            "quantization: kinds of quantised layers",
            quantised,
            [kind for kind in receipt["quantized_layers"] if kind != MXFP4_KIND],
        ),
        (
            "training.activation_checkpointing: layers recomputed",
            -(-receipt["layers"] // every) if every else 0,
            receipt["checkpointed_layers"],
        ),
        (
            "training.activation_checkpointing: recomputed layers that keep their products",
            receipt["checkpointed_layers"] if recipe.training.keeps_products else 0,
            receipt["layers_keeping_products"],
        ),
        (
            "training.activation_offloading: layers",
            receipt["layers"] * recipe.training.activation_offloading,
            receipt["layers_with_states_on_host"],
        ),
        ("training.mlp_tile_tokens", recipe.training.mlp_tile_tokens, (receipt["mlp_tiles"] or {}).get("tokens")),
    ]


def describe(receipt: dict[str, Any]) -> str:
    """The run in a few lines, before its first step: what is trained, on what, in which batches."""
    parameters, dtypes = receipt["parameters"], receipt["dtypes"]
    share = parameters["trained"] / (parameters["trained"] + parameters["frozen"])
    name, whole = receipt["architecture"], receipt.get("text_part_of")
    name += f", the text part of {whole}" if whole else ""
    tiled = receipt.get("mlp_tiles") or {"layers": 0, "tokens": 0}
    tiles = f"MLPs of {tiled['layers']} of {receipt.get('layers')} layers run in tiles of {tiled['tokens']:,} tokens\n"
    tiles *= tiled["layers"] > 0
    pipeline = f"{describe_stages(receipt)}\n" if receipt.get("pipeline") else ""
    others = {why: count for why, count in receipt.get("adapters_computed", {}).items() if why not in (OWN, PACKED)}
    reasons = ", ".join(f"{why} ({count})" for why, count in others.items())
    by_peft = f"computed by peft, with more memory traffic: {reasons}\n" if others else ""
    return (
        f"{name}: {parameters['trained']:,} parameters trained ({share:.2%}) in {dtypes['master']}, "
        f"computed in {dtypes['compute']}, {receipt['strategy']} on {receipt['world_size']} x {receipt['device']}\n"
        f"{describe_reach(receipt)}{by_peft}{tiles}"
        f"{pipeline}"
        f"{describe_batch(receipt)}"
    )


def describe_batch(receipt: dict[str, Any]) -> str:
    """Two lines: the documents, and a step's micro-steps. Pairs that are packed need fewer than one for each pair."""
    batch, data = receipt["batch"], receipt["data"]
    unit, learned = batch.get("unit", "row"), counted(data["supervised_tokens"], "token")
    documents = f"{counted(data['documents'], 'document')} in rows that are {data['fill']:.0%} full, {learned} learned"
    if unit != "row":
        documents = f"{counted(data['documents'], unit)}, {learned} in answers"
    micro_steps = counted(batch["micro_steps"], "micro-step")
    share = counted(batch["per_device_batch_size"], unit)
    if "row_tokens" in batch:
        micro_steps = f"at most {micro_steps}"
        share = f"{counted(batch['per_device_batch_size'], 'row')} of {unit}s, up to {batch['row_tokens']:,} tokens"
    return f"data: {documents}\nbatch: {counted(batch['world_size'], 'rank')} x {micro_steps} x {share}"


def describe_stages(receipt: dict[str, Any]) -> str:
    """A line about each pipeline stage's layers, and how long it waits if all stages take equally long."""
    from finetune.strategies.pipeline.timeline import bubble_of_equal_stages

    pipeline, batch = receipt["pipeline"], receipt["batch"]
    schedule, stages, copies = (pipeline[key] for key in ("schedule", "stages", "copies"))
    held = ", ".join(f"{last - first + 1}" for first, last in pipeline["layers"])
    idle = bubble_of_equal_stages(schedule, stages, batch["micro_steps"])
    what = f"{copies} pipelines beside each other" if copies > 1 else "pipeline"
    runs = ", which take runs of so many in turn" if len(pipeline["layers"]) > stages else ""
    return (
        f"{what}: {schedule}, {counted(stages, 'stage')} of {held} layers{runs}; micro-batches of "
        f"{batch['width']:,} tokens, {batch['padding_share']:.0%} of them padding; each stage idle {idle:.0%} of the "
        "time where all are as fast"
    )
