"""After how many decoder layers their kinds repeat, and how deep a model must be to stand for the full one.

Layers differ in many families: sliding and full attention with heads of their own, delta rules and attention, dense and
sparse. A shallow model has the first and the last layers of the full one (`extrapolate.with_layers`); what lies between
are whole periods, so each kind is among the first and among the last.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.model.small import decoder_layers
from finetune.planner.depth.repeat_layers import FIRST
from finetune.planner.trace.timeline import LAYER

SHALLOW = 4  # where layers are alike: the first, the last, and two between


def kinds_of_layers(config: Mapping[str, Any]) -> list[Hashable]:
    """What takes memory in each decoder layer of the full model, which is built on meta: its modules and the shapes of
    its parameters. Windows and rotary angles are none of it.

    Layers that a timeline does not know by their names are each of a kind of their own.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    depth = int(config["num_hidden_layers"])
    layers = decoder_layers(model, depth)
    names = [name for name, module in model.named_modules() if layers and module is layers[0]]
    if len(layers) != depth or not any(map(LAYER.search, names)):
        return list(range(depth))
    return [
        tuple(
            (name, type(module).__qualname__, tuple(each.shape for each in module.parameters(recurse=False)))
            for name, module in layer.named_modules()
        )
        for layer in layers
    ]


def period_and_depth(kinds: Sequence[Hashable], every: int) -> tuple[int, int]:
    """Layers after which kinds and recomputation repeat, and a depth from which on each such period adds the same.

    As many irregular layers as a replay keeps at either end (repeat_layers.py: FIRST) may be of other kinds. All layers
    where nothing repeats, or where two shallow models would have as many layers as the full one.

    Args:
        every: Every n-th layer is recomputed in backward.
    """
    layers = len(kinds)
    for alike in range(1, layers):
        differ = [at for at in range(layers - alike) if kinds[at] != kinds[at + alike]]
        if any(FIRST <= at < layers - alike - FIRST for at in differ):
            continue
        period = math.lcm(alike, every)
        if alike == 1 and not differ:
            return period, SHALLOW
        depth = 2 * (period + (FIRST if differ else 0))
        few = depth + (layers - depth) % period
        return (period, depth) if 2 * few + period < layers else (every, layers)
    return every, layers
