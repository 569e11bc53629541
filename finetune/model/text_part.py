"""The text part of a multimodal checkpoint: the language model inside it, and its module names in the whole model.

If transformers has a causal class for a configuration's text section (Gemma 3 and 4, Mistral 3, Llama 4, Qwen 3.5),
that class is trained, with the weights that the whole class loads. Otherwise (Qwen 2.5 VL and 3 VL) the whole class is
trained on text, with adapters in its language model alone.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import set_zero3_state

from finetune.architecture.loss import decoder_of
from finetune.errors import FinetuneError
from finetune.files import write_json
from finetune.model.adapter_targets import adapted_paths, base_path
from finetune.model.quantization import quantize_structure
from finetune.recipe.sections.lora import by_pattern

PEFT_PREFIX = "base_model.model."  # of peft's names in files


@dataclass(frozen=True)
class WholeNames:
    """The names of a trained model's modules in the whole model, which may be itself, and in its files."""

    places: Mapping[str, str]  # path in the text part -> path in the whole model; none where it is trained as a whole
    whole: PreTrainedModel  # on meta

    def of(self, path: str) -> str:
        """The path in the whole model for a module or tensor of the text part."""
        for own, place in self.places.items():
            if path == own or path.startswith(f"{own}."):
                return place + path.removeprefix(own)
        return path

    def second(self, paths: Iterable[str]) -> set[str]:
        """Of paths by both names, those that are only the whole model's."""
        return {self.of(path) for path in paths if self.of(path) != path}

    def in_file(self, path: str, files: Mapping[str, Any]) -> str:
        """A tensor's name among the whole model's `files`, which may have names from earlier releases."""
        name = self.of(path)
        if name in files:
            return name
        return self._saved.get(name, name)

    @cached_property
    def _saved(self) -> Mapping[str, str]:
        """The names under which transformers saves the whole model's tensors, without those that it takes apart."""
        tensors = self.whole.state_dict()
        with torch.no_grad():
            saved = {id(tensor): name for name, tensor in revert_weight_conversion(self.whole, tensors).items()}
        return {name: saved[id(tensor)] for name, tensor in tensors.items() if id(tensor) in saved}


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether transformers has a class for images and text for it, with a section that is the text's."""
    has_text = isinstance(getattr(config, "text_config", None), PreTrainedConfig)
    return has_text and not hasattr(config, "auto_map") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' automatic class that loads all of this model."""
    if is_multimodal(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def answering_part(model: PreTrainedModel) -> PreTrainedModel:
    """The module that computes text logits: `model` itself, or the causal model inside Llama 4.

    transformers 5.24 asks Llama 4's text model for image outputs, which it does not have: the whole model's forward
    raises for every input.
    """
    inner: PreTrainedModel = model.get_decoder()
    if inner.get_output_embeddings() is None:
        return model
    return inner


def trained_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The trained model's configuration: a multimodal model's text section, if a causal class has one."""
    if not is_multimodal(config) or type(config.text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    text: PreTrainedConfig = copy.deepcopy(config.text_config)
    # Each of the two has a default, and Mistral 3's say different things; a head of its own is never lost by this.
    text.tie_word_embeddings = all(getattr(settings, "tie_word_embeddings", True) for settings in (config, text))
    text._name_or_path = config._name_or_path
    return text


def text_alone(whole: PreTrainedModel, quantization: BitsAndBytesConfig | None = None) -> PreTrainedModel:
    """The text part with the loaded model's weights. Nothing refers to the other parts any more.

    Args:
        quantization: The settings with which the whole model's layers were quantised at loading.

    Raises FinetuneError if the language model inside differs from the text section's class.
    """
    stated = trained_config(whole.config).tie_word_embeddings
    part = _part_on_meta(whole)
    part.config.tie_word_embeddings = stated  # ranks without weights build the model by it
    # peft's card reads both.
    part.config._name_or_path, part.name_or_path = whole.config._name_or_path, whole.name_or_path
    if quantization is not None:  # so that it says of itself what the loaded model does
        quantize_structure(part, quantization)
    for own, place in _places(part, whole).items():
        part.set_submodule(own, whole.get_submodule(place))
    loaded = set(map(id, whole.parameters()))
    if lacking := [name for name, parameter in part.named_parameters() if id(parameter) not in loaded]:
        raise _no_part(whole, f"lacks {lacking[0]} of {type(part).__name__}")
    embeddings, head = part.get_input_embeddings(), part.get_output_embeddings()
    if (head.weight is embeddings.weight) != stated:
        raise FinetuneError(
            f"model.name_or_path: {type(whole).__name__} has {'two tensors' if stated else 'one tensor'} for its head "
            f"and its embeddings, and tie_word_embeddings: {str(stated).lower()}; write in its config.json, in "
            f"text_config too, tie_word_embeddings: {str(not stated).lower()}"
        )
    part.generation_config = whole.generation_config
    remember_whole(part, whole.config)
    return part


def remember_whole(part: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Note the configuration of the whole model at its text part, for `names_in_whole`."""
    noted: Any = part
    if trained_config(config) is not config:
        noted.finetune_whole = config


def names_in_whole(model: PreTrainedModel) -> WholeNames | None:
    """A text part's names in its whole model, which is built on meta; None for a model that is no text part.

    Raises FinetuneError as `text_alone` does.
    """
    config = getattr(model, "finetune_whole", None)
    if config is None:
        return None
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    # Other parts are built by from_config, which shards them under ZeRO-3, with collectives, unless told not to.
    with torch.device("meta"), set_zero3_state():
        whole = kind(config)
    return WholeNames(_places(_part_on_meta(whole), whole), whole)


def name_for_both(folder: Path, adapted: nn.Module, names: WholeNames) -> None:
    """Make an exported adapter load in plain peft onto the text part and onto the whole model.

    peft looks for the present model's names and ignores others. So the file has each tensor under both names: twice the
    bytes. Layers are named by a pattern for whole paths, because `q_proj` alone would mean a vision tower's too.
    """
    file, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    theirs = {PEFT_PREFIX + names.of(key.removeprefix(PEFT_PREFIX)): tensor for key, tensor in tensors.items()}
    added = {key: tensor.clone() for key, tensor in theirs.items() if key not in tensors}
    save_file(tensors | added, file, metadata={"format": "pt"})
    config = json.loads(settings.read_text(encoding="utf-8"))
    paths = adapted_paths(adapted)
    config |= {"target_modules": _pattern(adapted, paths, names) or [], "exclude_modules": None}
    if parameters := config.get("target_parameters"):
        config["target_parameters"] = sorted({*parameters, *map(names.of, parameters)})
    if saved := config.get("modules_to_save"):
        copied = {base_path(path) for path, _ in adapted.named_modules() if path.endswith(".original_module")}
        reached = {path for path, _ in names.whole.named_modules() if path.endswith(tuple(saved))}  # as peft does
        if reached != set(map(names.of, copied)):  # names match modules in other parts too
            config["modules_to_save"] = sorted({*copied, *map(names.of, copied)})
    for key in ("rank_pattern", "alpha_pattern"):
        # Each key is joined by the paths in the whole model that it alone does not fit.
        patterns = config.get(key) or {}
        keys, joined = {pattern: pattern for pattern in patterns}, {pattern: pattern for pattern in patterns}
        for path in paths:
            pattern = by_pattern(keys, path, "")
            if pattern and by_pattern(keys, names.of(path), "") != pattern:
                joined[pattern] += "|" + re.escape(names.of(path))
        config[key] = {joined[pattern]: value for pattern, value in patterns.items()}
    write_json(settings, config)


def _pattern(adapted: nn.Module, paths: Iterable[str], names: WholeNames) -> str:
    """A pattern for the adapted layers in both models; a kind of layer that is adapted in all places is named once."""
    every, targets = {base_path(path) for path, _ in adapted.named_modules()}, set(paths)
    parts: list[str] = []
    for own, place in names.places.items():
        kinds: dict[str, list[str]] = {}
        for path in sorted(name for name in every if name.startswith(f"{own}.")):
            inside = path.removeprefix(f"{own}.")
            kind = r"\d+".join(map(re.escape, re.split(r"(?<![^.])\d+(?![^.])", inside)))
            kinds.setdefault(kind, []).append(path)
        patterns: list[str] = []
        for kind, members in kinds.items():
            reached = [path for path in members if path in targets]
            whole = len(reached) == len(members)
            patterns += [kind] if whole else [re.escape(path.removeprefix(f"{own}.")) for path in reached]
        if patterns:
            parts.append(rf"({re.escape(own)}|{re.escape(place)})\.({'|'.join(patterns)})")
    return "|".join(parts)


def _part_on_meta(whole: PreTrainedModel) -> PreTrainedModel:
    """The text section's class, by the very configuration that the whole model's layers refer to."""
    config = _decoder(whole).config
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):  # not by from_config: under ZeRO-3 that would shard what is built
        part: PreTrainedModel = kind(config)
    return part


def _decoder(whole: PreTrainedModel) -> PreTrainedModel:
    return decoder_of(whole.get_decoder())  # Llama 4's has its head inside


def _places(part: PreTrainedModel, whole: PreTrainedModel) -> dict[str, str]:
    """Where decoder and head are in the two."""
    own, theirs = decoder_of(part), _decoder(whole)
    if type(own) is not type(theirs):
        raise _no_part(whole, f"has a {type(theirs).__name__} where {type(part).__name__} has a {type(own).__name__}")
    heads = part.get_output_embeddings(), whole.get_output_embeddings()
    return {_path(part, own): _path(whole, theirs), _path(part, heads[0]): _path(whole, heads[1])}


def _path(model: PreTrainedModel, wanted: Any) -> str:
    paths = (path for path, module in model.named_modules() if module is wanted)
    return str(next(paths))


def _no_part(whole: PreTrainedModel, reason: str) -> FinetuneError:
    return FinetuneError(
        f"model.name_or_path: {type(whole).__name__} {reason}, so its text part cannot be trained by itself; "
        "choose another model"
    )
