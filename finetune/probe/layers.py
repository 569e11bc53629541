"""The kinds of layers that a decoder has, and which of them make a shallow model with two of each.

Two layers are of one kind when their modules, parameters and settings have the same names, classes and values; their
place in the model and their widths are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

OF_EACH_KIND = 2
DEPTHS = re.compile(r"^(num_)?(hidden_|decoder_)?(n_)?(layers?|blocks)$|^depth$")
LAYER_NUMBERS = re.compile(r"idx|idxs|index|indices|layer_id|layer_number|_ids$|(^|_)layers$")


def decoder_layers(model: nn.Module, depth: int | None) -> list[nn.Module]:
    """The repeated layers: the first list of `depth` modules, else the longest list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    of_depth = [layers for layers in lists if len(layers) == depth]
    return max(of_depth or lists, key=len, default=[])


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """The kind of each layer, as a number: equal where layers are alike."""
    signatures = [signature(layer) for layer in layers]
    order = list(dict.fromkeys(signatures))
    return [order.index(each) for each in signatures]


def signature(layer: nn.Module) -> tuple[Any, ...]:
    """What makes a layer its kind."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(sorted(_settings(module).items())),
            tuple(name for name, _ in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> dict[str, str]:
    """Settings of a module as text. A factor may be its layer's own; only whether there is one is compared."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: repr(bool(value) if isinstance(value, float) else value)
        for name, value in values.items()
        if (value is None or isinstance(value, bool | int | float | str)) and not LAYER_NUMBERS.search(name)
    }


def chosen_layers(kinds: Sequence[int]) -> list[int]:
    """The first two layers of each kind, in the order that they have."""
    return sorted(
        index for kind in set(kinds) for index in [at for at, other in enumerate(kinds) if other == kind][:OF_EACH_KIND]
    )


def first_layers(kinds: Sequence[int]) -> list[int]:
    """The fewest layers from the first one on that have two of each kind, or as many as there are."""
    return list(range(max(chosen_layers(kinds), default=-1) + 1))


def with_layers_alone(config: Mapping[str, Any], depth: int, chosen: Sequence[int]) -> dict[str, Any]:
    """The configuration of a model that has the layers `chosen` and no others.

    A list with an entry for each layer keeps theirs, a list of layers those that stay, under their new numbers. What
    else says which layer is of which kind (every n-th, the first n) stays: whether the layers are those that were
    wanted is looked at in the model.
    """
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name == "num_hidden_layers" or (value == depth and DEPTHS.search(name)):
            small[name] = len(chosen)
        elif isinstance(value, list) and len(value) == depth and "token" not in name:
            small[name] = [value[index] for index in chosen]
        elif isinstance(value, list) and LAYER_NUMBERS.search(name) and _are_places(value, depth):
            small[name] = [chosen.index(place) for place in value if place in chosen]
        else:
            small[name] = value
    return small


def _are_places(values: Sequence[Any], depth: int) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < depth for one in values)
