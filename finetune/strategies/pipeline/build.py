"""The stage of this rank, built from a recipe.

Layers are split into runs by the bytes that their weights take during training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from finetune.architecture.families import router_coefficient
from finetune.architecture.own_layers.compute import compute_layers
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.launch.rendezvous import collective_timeout
from finetune.model.build import decoder_parts, structure_alone
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import make_optimizer
from finetune.model.optimizers.rounded_adamw import Range, RoundedAdamW, places_of
from finetune.model.quantization import unpacked_weight
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.pipelines import Pipelines
from finetune.recipe.strategy import Strategy
from finetune.strategies.late_quantising import load_unquantised, make_plain
from finetune.strategies.pipeline.holding import place_stage
from finetune.strategies.pipeline.layout import Parts, parts_of
from finetune.strategies.pipeline.ranks import StagePlace
from finetune.strategies.pipeline.schedule import Pipeline
from finetune.strategies.pipeline.stage import runs_of
from finetune.wording import counted


def parts_of_recipe(recipe: Recipe) -> Parts:
    """The parts of its model. Raises FinetuneError if its layers are not a line."""
    plain = recipe.model_copy(update={"quantization": None})  # 4-bit layers have no forward on meta
    return parts_of(structure_alone(plain, torch.bfloat16))  # experts have products in 16 bits alone on meta


def staged(
    recipe: Recipe, strategy: Strategy, accelerator: Accelerator, build: Callable[..., nn.Module], parts: Parts | None
) -> tuple[nn.Module, Pipeline, Any]:
    """The model with this rank's part on its device and the rest on meta, its pipeline, and its part's optimizer.

    Every rank reads the model into host memory before it gives up the other stages' layers, so each rank needs host
    memory for the whole model. Each stage reads and quantises its own 4-bit weights, one by one. Raises FinetuneError,
    on all ranks, if the model cannot be split.

    Args:
        parts: From `parts_of_recipe`; None: found here.
    """
    parts = parts or parts_of_recipe(recipe)
    pipelines, device = strategy.pipelines, accelerator.device
    assert pipelines is not None
    place = StagePlace.of(dist.get_rank(), dist.get_world_size(), pipelines.copies)
    unwrapped = build(recipe, torch.device("cpu"), **({"load": load_unquantised} if recipe.quantization else {}))
    late, decoder = make_plain(unwrapped), decoder_parts(unwrapped)
    if router_coefficient(decoder.config, recipe):
        raise FinetuneError(
            "model.router_aux_loss_coef: a stage sees the routers of its own layers alone; set it to 0, or take "
            "accelerate_config=fsdp2"
        )
    layers = layers_of_runs(recipe, decoder, parts, pipelines, place.stages)
    # Without a trained weight no gradient comes out of a run of layers.
    named = dict(decoder.named_parameters(remove_duplicate=False))
    run_of = {name: parts.run_of(name, layers) for name in named}
    training = {run_of[name] for name, weight in named.items() if weight.requires_grad}
    if idle := set(range(len(layers))) - training:
        held = layers[min(idle)]
        raise FinetuneError(
            f"lora.target_modules: stage {min(idle)} of {len(layers)}, layers {held.start} to {held.stop - 1}, would "
            "train nothing; choose modules that every stage has, or launch fewer processes"
        )
    embedded = next(decoder.get_input_embeddings().parameters()).dtype
    dtype = COMPUTE[recipe.training.mixed_precision] if strategy.casts_weights_once(recipe) else None
    # Each trained weight's place among all of the model's. A stage's own numbering would draw other random bits.
    places = places_of(make_optimizer(unwrapped, recipe), unwrapped) if recipe.training.pure_bf16 else {}
    holding, trained = place_stage(unwrapped, decoder, run_of, place, device, late)
    compute_layers(unwrapped, unpacked_weight, mlp_tile_tokens=recipe.training.mlp_tile_tokens)
    own = range(place.stage, len(layers), place.stages)
    runs = runs_of(decoder, parts, layers, own, accelerator.autocast, dtype or embedded)
    timeout = collective_timeout(recipe)
    pipeline = Pipeline(runs, layers, pipelines.schedule, holding, trained, device, timeout)
    return unwrapped, pipeline, accelerator.prepare(staged_optimizer(unwrapped, recipe, places))


def staged_optimizer(stage: nn.Module, recipe: Recipe, places: Mapping[str, int]) -> torch.optim.Optimizer:
    """The optimizer over this stage's weights. Stochastic rounding uses their places in the whole model."""
    optimizer = make_optimizer(stage, recipe)
    if isinstance(optimizer, RoundedAdamW):
        own = ((name, weight) for name, weight in stage.named_parameters() if weight.requires_grad)
        optimizer.round_as((weight, Range(places[name], 0, 0, weight.numel())) for name, weight in own)
    return optimizer


def layers_of_runs(
    recipe: Recipe, decoder: PreTrainedModel, parts: Parts, pipelines: Pipelines, stages: int
) -> list[range]:
    """The layers of each run, one at least; run r is stage r % stages. Raises EnvironmentMismatch where there are fewer
    layers than runs.

    Counted are weights, gradients and optimizer state, embeddings with the first run, norm and head with the last;
    tied ones with both. Activations are not: they are alike in every layer.
    """
    count, runs = len(parts.layers), stages * pipelines.runs
    if runs > count:
        of_two = f" of {pipelines.runs} runs of layers each" if pipelines.runs > 1 else ""
        most = count // pipelines.runs * pipelines.copies
        remedy = f"launch at most {most} processes" if most > pipelines.copies else "take accelerate_config=1f1b"
        raise EnvironmentMismatch(f"accelerate_config: {stages} stages{of_two} for {counted(count, 'layer')}; {remedy}")
    nbytes: Counter[int] = Counter()
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        nbytes[parts.place(name)] += bytes_while_trained(recipe, parameter)
    return split_layers([nbytes[index] for index in range(count)], nbytes[-1], nbytes[count], runs)


def bytes_while_trained(recipe: Recipe, parameter: nn.Parameter) -> int:
    """A weight's bytes with its gradient and moments. A frozen weight has only its own."""
    if not parameter.requires_grad:
        return parameter.nbytes
    width = parameter.element_size()
    return parameter.numel() * (2 * width + OPTIMIZERS[recipe.training.optim].state_bytes(width))


def split_layers(layers: Sequence[int], first: int, last: int, stages: int) -> list[range]:
    """The layers of each stage: the largest stage is as small as possible, and all are as even as that allows.

    With costs (1, 1, 1, 1) and a last stage that also has a head with cost 2, two stages get 3 and 1 layers: 3 and 3.

    Args:
        layers: Each layer's cost.
        first, last: Additional cost on the first and the last stage.
    """
    sums = [sum(layers[:index]) for index in range(len(layers) + 1)]

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == stages - 1)

    largest, _ = _best(len(layers), stages, lambda before, *held: max(before, cost(*held)))

    def even(before: float, *held: int) -> float:
        if cost(*held) <= largest:
            return before + cost(*held) ** 2
        return math.inf

    return list(_best(len(layers), stages, even)[1])


def _best(layers: int, stages: int, join: Callable[..., float]) -> tuple[float, tuple[range, ...]]:
    """The least value over all splits, and its split. `join` combines the earlier stages with one that has layers
    [begin, end).
    """
    ending: dict[int, tuple[float, tuple[range, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        further: dict[int, tuple[float, tuple[range, ...]]] = {}
        ends = range(layers, layers + 1) if stage == stages - 1 else range(stage + 1, layers - stages + stage + 2)
        for begin, (before, held) in ending.items():
            for end in ends:
                if end > begin and (value := join(before, stage, begin, end)) < further.get(end, (math.inf,))[0]:
                    further[end] = value, (*held, range(begin, end))
        ending = further
    return ending[layers]
