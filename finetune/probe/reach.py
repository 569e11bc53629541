"""Which of a model's matrices carry adapters, and which share of all matrices' weights that is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from finetune.model.adapter_reach import language_paths
from finetune.model.build import decoder_parts


@dataclass(frozen=True)
class Reach:
    """Matrices by the last names of their paths, and the share of their weights that adapters change.

    Embeddings and the head are not counted: they are looked up or trained in full, or neither.
    """

    carry: dict[str, int]
    without: dict[str, int]
    share: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """For the terminal."""
        rest = f"; without: {', '.join(self.without)}" if self.without else ""
        return f"adapters on {', '.join(self.carry)}: {self.share:.0%} of the matrices' weights{rest}"


def adapters_reach(model: nn.Module) -> Reach:
    """What the adapters of a model reach; its weights may be on meta, and quantised."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    decoder = decoder_parts(model)
    ends = {id(decoder.get_input_embeddings()), id(decoder.get_output_embeddings())}
    adapted: dict[str, Any] = {
        path: module for path, module in decoder.named_modules() if isinstance(module, BaseTunerLayer)
    }
    carry, without, sizes = Counter[str](), Counter[str](), Counter[bool]()
    inside = language_paths(decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, nn.Embedding) or id(module) in ends or not inside(path):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            owner = _adapter_of(path, name, adapted)
            if parameter.ndim < 2 or _is_adapters(path):
                continue
            numel = getattr(module, "in_features", 0) * getattr(module, "out_features", 0) or parameter.numel()
            called = _called(path, name)
            (carry if owner else without)[called] += 1
            sizes[owner is not None] += numel
    return Reach(dict(carry), dict(without), sizes[True] / max(1, sizes.total()))


def _adapter_of(path: str, name: str, adapted: Mapping[str, Any]) -> str | None:
    """The path of the adapter around a module's parameter: peft has one for a whole layer, or for one parameter."""
    while path.endswith("base_layer"):
        path = path.removesuffix("base_layer").rstrip(".")
        around = getattr(adapted.get(path), "parameter_name", None)
        if path in adapted and around in (None, name):
            return path
    return None


def _is_adapters(path: str) -> bool:
    """peft's own modules, and those that it trains in full, with what they were."""
    return re.search(r"(^|\.)lora_|modules_to_save|original_module|token_adapter", path) is not None


def _called(path: str, name: str) -> str:
    """As a recipe names it: the layer's name, and a parameter's own where it is not its weight."""
    last = [part for part in path.split(".") if part != "base_layer" and not part.isdigit()]
    layer = last[-1] if last else ""
    return layer if name == "weight" else f"{layer}.{name}"
