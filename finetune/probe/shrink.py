"""The user's own model, small: narrow, two layers of each kind, random weights, in a folder.

Sizes are tried from the smallest on until a model can be built whose layers are of the same kinds, and which runs.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import EnvironmentMismatch
from finetune.probe import layers
from finetune.probe.sizes import Factors, factors, special_tokens, with_small_sizes

LARGEST_SMALL = 8_000_000  # parameters: 32 MB, and twice as much with gradients and the library's model
NOT_OF_STRUCTURE = ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version")

Make = Callable[[PreTrainedConfig], PreTrainedModel]  # a model's class


@dataclass(frozen=True)
class SmallModel:
    """A small model in a folder, as `model.name_or_path` takes it."""

    folder: Path
    name: str  # the class
    layers: int
    kinds: int  # different ones among them
    parameters: int
    special: frozenset[int]  # tokens of the vocabulary that are no text


def small_models(model: PreTrainedModel, folder: Path) -> Iterator[SmallModel]:
    """Small models of the same making as `model`, which may be on meta, each with its weights in `folder`.

    The first one that runs is the one to take. Raises EnvironmentMismatch, in one line, after the last.
    """
    kind, reason = type(model), "it has too many weights"
    for by in factors(model.config.get_text_config().to_dict()):
        try:
            config = _small_config(kind, model.config, by)
            if config is None:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # decays and steps of state-space layers stay what they begin as
                small = kind(config)
            draw_weights(small)
        except Exception as error:  # whatever the model's own code raises of sizes that do not go together
            reason = shortened(error)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        small.save_pretrained(folder)
        copy_code(model, folder)
        text = config.get_text_config()
        found = layers.kinds_of(layers.decoder_layers(small, getattr(text, "num_hidden_layers", None)))
        tokens = frozenset(special_tokens(config.to_dict()))
        size = sum(parameter.numel() for parameter in small.parameters())
        yield SmallModel(folder, kind.__name__, len(found), len(set(found)), size, tokens)
    raise cannot_probe(kind.__name__, f"it cannot be made small ({reason})")


def cannot_probe(name: str, reason: str) -> EnvironmentMismatch:
    """The one-line error for a model that the probe has no answer for."""
    return EnvironmentMismatch(
        f"model.name_or_path: {name} could not be probed for wrong losses and gradients: {reason}; choose another "
        "model, or correct its code"
    )


def shortened(error: Exception) -> str:
    """A library's error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _small_config(kind: Make, config: PreTrainedConfig, by: Factors) -> PreTrainedConfig | None:
    """A small configuration; None where it is still too large. Raises what the model raises of sizes that clash."""
    narrow = _narrow(config, config.get_text_config(), by)
    depth = getattr(narrow.get_text_config(), "num_hidden_layers", None)
    shallow = _shallow(kind, narrow, layers.decoder_layers(_on_meta(kind, narrow), depth)) or narrow
    size = sum(parameter.numel() for parameter in _on_meta(kind, shallow).parameters())
    return shallow if size <= LARGEST_SMALL else None


def _shallow(kind: Make, config: PreTrainedConfig, deep: list[nn.Module]) -> PreTrainedConfig | None:
    """The configuration with two layers of each kind; None where only the whole depth has them all."""
    signatures = [layers.signature(layer) for layer in deep]
    kinds = layers.kinds_of(deep)
    for chosen in (layers.chosen_layers(kinds), layers.first_layers(kinds)):
        if not 0 < len(chosen) < len(deep):
            continue
        try:
            shallow = _with_text(config, lambda text, chosen=chosen: layers.with_layers_alone(text, len(deep), chosen))  # type: ignore[misc]
            built = layers.decoder_layers(_on_meta(kind, shallow), len(chosen))
        except Exception:  # a list that belongs to layers and was not known as one
            continue
        if [layers.signature(layer) for layer in built] == [signatures[index] for index in chosen]:
            return shallow
    return None


def _narrow(config: PreTrainedConfig, text: PreTrainedConfig, by: Factors) -> PreTrainedConfig:
    """The configuration with small sizes; a section that is not the text's has factors of its own."""
    if text is config:
        return _of_dict(config, with_small_sizes(config.to_dict(), by))
    inner = with_small_sizes(text.to_dict(), by)
    hidden = {text.hidden_size: inner["hidden_size"]} if "hidden_size" in inner else None
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        section = getattr(config, name, None)
        if section is text:
            small[name] = inner
        elif isinstance(section, PreTrainedConfig):
            small[name] = with_small_sizes(value, next(factors(value)), hidden=hidden)
        else:
            small[name] = with_small_sizes({name: value}, by)[name]
    return _of_dict(config, small)


def _with_text(config: PreTrainedConfig, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> PreTrainedConfig:
    text, content = config.get_text_config(), config.to_dict()
    if text is config:
        return _of_dict(config, change(content))
    name = next(name for name in content if getattr(config, name, None) is text)
    return _of_dict(config, content | {name: change(content[name])})


def _of_dict(like: PreTrainedConfig, content: dict[str, Any]) -> PreTrainedConfig:
    kept = {name: value for name, value in content.items() if name not in NOT_OF_STRUCTURE}
    made: PreTrainedConfig = type(like).from_dict(kept)
    made.architectures = like.architectures
    made._attn_implementation = "eager"  # as from_config sets it; what is asked for is set where the model is built
    return made


def _on_meta(kind: Make, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return kind(copy.deepcopy(config))


def draw_weights(model: nn.Module, *, trained_alone: bool = False) -> None:
    """Draw weights so large that attention, gates and biases matter: those that training starts from at 0 or 1 too.

    The same for every call. They are numbers of bfloat16, so that loading them in 16 bits changes none.

    Args:
        trained_alone: Draw adapters, at half the size: their product is then about as large as the matrix they adapt.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if trained_alone and not parameter.requires_grad:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            embeds = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            scaled = _scaled(parameter, drawn, embeds=embeds)
            parameter.copy_((0.5 * scaled if trained_alone else scaled).bfloat16())


def _scaled(parameter: Tensor, drawn: Tensor, *, embeds: bool) -> Tensor:
    if parameter.ndim < 2:
        return parameter.cpu().float() + 0.3 * drawn
    return drawn * (0.5 if embeds else parameter.shape[-1] ** -0.5)


def copy_code(model: PreTrainedModel, folder: Path) -> None:
    """Code that came with the model (trust_remote_code), so that the small one is loaded by it too."""
    sources = code_files(model)
    if not sources:
        return
    for source in sources:
        shutil.copy(source, folder / source.name)
    file = folder / "config.json"
    content = json.loads(file.read_text("utf-8"))
    known = getattr(model.config, "auto_map", None) or {}
    content["auto_map"] = {name: _here(reference) for name, reference in known.items()}
    file.write_text(json.dumps(content), "utf-8")


def _here(reference: Any) -> Any:
    """A reference to a class, "repository--module.Class", as it is called within the repository itself."""
    return reference.rpartition("--")[2] if isinstance(reference, str) else [_here(each) for each in reference]


def code_files(model: PreTrainedModel) -> list[Path]:
    """The files of code that came with the model; none of a class of the installed transformers."""
    import inspect

    files: set[Path] = set()
    for kind in (type(model), type(model.config)):
        if kind.__module__.startswith("transformers_modules"):
            files |= set(Path(inspect.getfile(kind)).parent.glob("*.py"))
    return sorted(file for file in files if file.name != "__init__.py")
