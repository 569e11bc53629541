"""An exported adapter's effect on a base weight, one layer at a time, by peft's own merging; and the base's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from finetune.base.location import base_file
from finetune.errors import FinetuneError
from finetune.library_errors import library_errors
from finetune.model.adapters import silenced_peft
from finetune.model.text_part import PEFT_PREFIX, WholeNames
from finetune.recipe.schema import ModelSection
from finetune.recipe.sections.lora import by_pattern
from finetune.untrusted.config_sizes import read_config
from finetune.untrusted.json_files import read_object
from finetune.untrusted.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MOST_INDEX,
    look_at_adapter,
    patterns_of,
    plain_names,
)
from finetune.untrusted.programs import refuse_slow_patterns

TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
# An adapter's forward depends on these settings. The recipe sets no others.
ADAPTER_SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora")


@dataclass(frozen=True)
class AdapterFile:
    """adapter_config.json and the tensors in adapter_model.safetensors, which stay on disk."""

    settings: Mapping[str, Any]
    patterns: tuple[Mapping[str, int], Mapping[str, float]]  # rank_pattern, alpha_pattern
    init: str
    path: Path
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # layer -> peft's name in it -> key
    replaced: Mapping[str, str] = field(default_factory=dict)  # the model's tensor, trained in full -> key
    target_parameters: tuple[str, ...] = ()
    new_rows: Mapping[str, tuple[str, list[int]]] = field(default_factory=dict)  # the model's tensor -> key, rows
    trained_as: Mapping[str, str] = field(default_factory=dict)  # layer -> its path in training, if that differs

    def settings_of(self, layer: str) -> Mapping[str, Any]:
        """The adapter's settings on one layer or parameter."""
        rank_pattern, alpha_pattern = self.patterns
        path = self.trained_as.get(layer, layer)  # the patterns were written for the training's paths
        return {
            **self.settings,
            "r": by_pattern(rank_pattern, path, self.settings["r"]),
            "lora_alpha": by_pattern(alpha_pattern, path, self.settings["lora_alpha"]),
        }

    @property
    def moves_the_base(self) -> bool:
        """Whether training began by moving a part of the base into the adapter, as two starts of release 0.1.0 did."""
        return self.init in ("pissa", "olora")

    def read(self, key: str) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    def start(self, layer: str, weight: Tensor) -> Tensor:
        """The weight's rest after the adapter's initialisation, in the weight's number format."""
        if not self.moves_the_base or self._is_embedding(layer):
            return weight
        settings = {**self.settings_of(layer), "init_lora_weights": self.init}
        remainder: Tensor = _adapted(nn.Linear, weight, settings).get_base_model().layer.get_base_layer().weight
        return remainder.detach()

    def _is_embedding(self, layer: str) -> bool:
        return any(name.startswith("embedding") for name in self.layers[layer])

    def merged(self, layer: str, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter in it, float32.

        `weight` is the frozen weight of the adapter's training, float32 [out, in], or [rows, width] for embeddings. The
        call needs memory for two tensors of this size, with DoRA four. Raises FinetuneError if adapter and weight do
        not fit.
        """
        tensors = self.layers[layer]
        kind = nn.Embedding if self._is_embedding(layer) else nn.Linear
        adapted = _adapted(kind, weight, self.settings_of(layer))
        loaded = load_adapter(adapted, layer, {f"layer.lora_{name}": self.read(key) for name, key in tensors.items()})
        wrong = [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if ".lora_" in name)]
        if wrong:
            raise FinetuneError(f"{self.path}: {layer}: {wrong[0]} does not match adapter_config.json")
        merged: Tensor = adapted.merge_and_unload().layer.weight.detach()
        if not merged.isfinite().all():
            raise FinetuneError(f"{layer}: weight and adapter add up to numbers that are not finite; nothing is merged")
        return merged


def load_adapter(adapted: Any, layer: str, tensors: Mapping[str, Tensor]) -> Any:
    """Give peft's model the adapter's tensors; returns peft's record of missing and unexpected names.

    Raises FinetuneError if they do not fit.
    """
    try:
        return set_peft_model_state_dict(adapted, {f"{PEFT_PREFIX}{name}": part for name, part in tensors.items()})
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FinetuneError(f"{layer}: the adapter does not fit this base: {reason}; name its own base") from error


def open_adapter(folder: Path, names: WholeNames) -> AdapterFile:
    """Open a finished run's adapter, by the trained model's names."""
    config, path = look_at_adapter(folder), folder / ADAPTER_WEIGHTS
    layers, replaced = dict[str, dict[str, str]](), dict[str, str]()
    new_rows: dict[str, tuple[str, list[int]]] = {}
    with library_errors(f"{folder}: not an adapter of this model"):
        indices: Mapping[str, list[int]] = config.get("trainable_token_indices") or {}
        with safe_open(path, framework="pt") as file:
            keys = [key.removeprefix(PEFT_PREFIX) for key in file.keys()]  # noqa: SIM118  # not a dict
        # Adapted layers, new tokens' rows, and tensors trained in full. A text part's adapter holds each tensor under
        # two names. Read the text part's own one.
        for key in sorted(set(keys) - names.second(keys)):
            layer, is_lora, name = key.partition(".lora_")
            if is_lora:
                layers.setdefault(layer, {})[name] = PEFT_PREFIX + key
            elif layer.endswith(TOKEN_ROWS):
                path_of_rows = layer.removesuffix(TOKEN_ROWS)
                new_rows[f"{path_of_rows}.weight"] = PEFT_PREFIX + key, indices[path_of_rows]
            else:
                replaced[layer] = PEFT_PREFIX + key
        refuse_slow_patterns(str(folder / ADAPTER_CONFIG), patterns_of(config), layers)
        settings = {name: config[name] for name in ADAPTER_SETTINGS}
        patterns = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        init, parameters = str(config.get("init_lora_weights", True)), tuple(config.get("target_parameters") or ())
        return AdapterFile(settings, patterns, init, path, layers, replaced, parameters, new_rows)


def _adapted(kind: type[nn.Linear | nn.Embedding], weight: Tensor, settings: Mapping[str, Any]) -> Any:
    rows, width = weight.shape
    with torch.device("meta"):  # no memory for weights that are replaced at once
        layer = nn.Embedding(rows, width) if kind is nn.Embedding else nn.Linear(width, rows, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with silenced_peft():
        return get_peft_model(nn.ModuleDict({"layer": layer}), LoraConfig(target_modules=["layer"], **settings))


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class BaseWeights:
    """Each tensor's file and shape, by name."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    stored_as: Mapping[str, str] = field(default_factory=dict)  # for tensors with another name in their file

    def renamed(self, old: str, new: str) -> BaseWeights:
        """A copy with one tensor under another name."""
        names = {name: new if name == old else name for name in self.files}
        files = {names[name]: path for name, path in self.files.items()}
        shapes = {names[name]: shape for name, shape in self.shapes.items()}
        return BaseWeights(files, shapes, {**self.stored_as, new: old})

    def layer(self, path: str, names: WholeNames) -> str:
        """The name in these files for the trained model's layer `path`."""
        return names.in_file(f"{path}.weight", self.files).removesuffix(".weight")

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the number format on disk. It is a view of the file, so copy it to keep it."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.stored_as.get(name, name))
        return tensor


def open_base(section: ModelSection) -> BaseWeights:
    """Open the recipe's base. Files that are not on this machine are fetched from the Hub.

    Raises FinetuneError if it has no safetensors or is stored quantised. Raises EnvironmentMismatch if a file is only
    on the Hub and the Hub does not answer.
    """
    config = read_settings(section, "config.json")
    if config is None:
        raise FinetuneError(f"model.name_or_path: {section.name_or_path} has no config.json; name a whole model")
    if config.get("quantization_config"):  # some state it as null
        raise FinetuneError(
            f"model.name_or_path: {section.name_or_path} is stored quantised, and into such weights nothing can be "
            "merged; name the model in 16 bits"
        )
    index = base_file(section, INDEX)
    names = [SINGLE]
    if index is not None:
        names = sorted({*plain_names(index, read_object(index, MOST_INDEX, unique=True).get("weight_map")).values()})
    paths = [base_file(section, name) for name in names]
    files = [path for path in paths if path is not None]
    if len(files) < len(names):
        lacking = names[paths.index(None)]
        raise FinetuneError(
            f"model.name_or_path: {section.name_or_path} has no {lacking}; merging needs safetensors: save the model "
            "once by transformers' save_pretrained and name that folder"
        )
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict
                    places[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise FinetuneError(f"{path}: is not a complete safetensors file ({error}); fetch it again") from error
    return BaseWeights(places, shapes)


def read_settings(section: ModelSection, name: str) -> dict[str, Any] | None:
    """One of the base's JSON files, unchanged; None if there is none."""
    path = base_file(section, name)
    if path is None:
        return None
    if name == "config.json":
        return read_config(path)
    return read_object(path)
