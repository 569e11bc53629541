"""An exported adapter, one layer at a time: what it makes of a base weight, by peft's own merging."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.tuned import takes_from_the_base

PREFIX = "base_model.model."
# The settings of an adapter that its forward depends on; the recipe knows no others.
SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora")


@dataclass(frozen=True)
class AdapterFile:
    """adapter_config.json and the tensors of adapter_model.safetensors, which stay on disk."""

    settings: Mapping[str, Any]
    init: str
    path: Path
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # layer -> peft's name in it -> key
    replaced: Mapping[str, str] = field(default_factory=dict)  # tensor of the model, trained in full -> key

    @property
    def moves_the_base(self) -> bool:
        return takes_from_the_base(self.init)

    def read(self, key: str) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    def start(self, weight: Tensor) -> Tensor:
        """What the adapter's initialisation left of a layer's weight, in its number format."""
        if not self.moves_the_base:
            return weight
        adapted = _adapted(nn.Linear, weight, {**self.settings, "init_lora_weights": self.init})
        left: Tensor = adapted.get_base_model().layer.get_base_layer().weight
        return left.detach()

    def merged(self, layer: str, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter in it, float32.

        `weight` is the frozen one beside which the adapter was trained, float32 [out, in], or [rows, width] of
        embeddings. Held meanwhile are two tensors of its size, with DoRA four. Raises FinetuneError when adapter and
        weight do not fit.
        """
        tensors = self.layers[layer]
        kind = nn.Embedding if any(name.startswith("embedding") for name in tensors) else nn.Linear
        adapted = _adapted(kind, weight, self.settings)
        state = {f"{PREFIX}layer.lora_{name}": self.read(key) for name, key in tensors.items()}
        try:
            result: Any = set_peft_model_state_dict(adapted, state)
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FinetuneError(f"{layer}: the adapter does not fit this base: {reason}; name its own base") from error
        wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if ".lora_" in name)]
        if wrong:
            raise FinetuneError(f"{self.path}: {layer}: {wrong[0]} is not what adapter_config.json tells of")
        merged: Tensor = adapted.merge_and_unload().layer.weight.detach()
        if not merged.isfinite().all():
            raise FinetuneError(f"{layer}: weight and adapter add up to numbers that are not finite; nothing is merged")
        return merged


def open_adapter(folder: Path) -> AdapterFile:
    """The adapter of a finished run."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    init = str(config.get("init_lora_weights", True))
    path, replaced = folder / "adapter_model.safetensors", {}
    layers: dict[str, dict[str, str]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # it is no dict
            layer, lora, name = key.removeprefix(PREFIX).partition(".lora_")
            if lora:
                layers.setdefault(layer, {})[name] = key
            else:
                replaced[layer] = key
    return AdapterFile({name: config[name] for name in SETTINGS}, init, path, layers, replaced)


class _Holder(nn.Module):
    """One layer, as a model that peft can adapt."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def _adapted(kind: type[nn.Linear | nn.Embedding], weight: Tensor, settings: Mapping[str, Any]) -> Any:
    rows, width = weight.shape
    with torch.device("meta"):
        layer = nn.Embedding(rows, width) if kind is nn.Embedding else nn.Linear(width, rows, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.2x by a name that is deprecated there.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(_Holder(layer), LoraConfig(target_modules=["layer"], **settings))
