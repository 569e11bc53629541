"""Splits layers into runs for a pipeline's stages, by the bytes that their weights take during training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel

from finetune.errors import EnvironmentMismatch
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.pipelines import Pipelines
from finetune.strategies.pipeline.layout import Parts
from finetune.wording import counted


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
