"""The files of a base model, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.embedded import in_hub_cache, resolve_model_path
from finetune.errors import FinetuneError
from finetune.model import not_loaded
from finetune.recipe import ModelSection

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class BaseWeights:
    """Where each tensor lies; `shapes` by name too."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the number format on disk; a view of the file, so whoever keeps it makes a copy."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def open_base(section: ModelSection) -> BaseWeights:
    """The recipe's base; what of it is not on this machine is fetched from the Hub.

    Raises FinetuneError when it has no safetensors or is stored quantised, EnvironmentMismatch when the Hub has to be
    asked and does not answer.
    """
    config = read_settings(section, "config.json")
    if config is None:
        raise FinetuneError(f"model.name_or_path: {section.name_or_path} has no config.json; name a whole model")
    if "quantization_config" in config:
        raise FinetuneError(
            f"model.name_or_path: {section.name_or_path} is stored quantised, and into such weights nothing can be "
            "merged; name the model in 16 bits"
        )
    index = read_settings(section, INDEX)
    names = sorted(set(index["weight_map"].values())) if index else [SINGLE]
    found = [base_file(section, name) for name in names]
    files = [path for path in found if path is not None]
    if len(files) < len(names):
        lacking = names[found.index(None)]
        raise FinetuneError(
            f"model.name_or_path: {section.name_or_path} has no {lacking}; merging needs safetensors: save the model "
            "once by transformers' save_pretrained and name that folder"
        )
    return _open(files)


def _open(files: Iterable[Path]) -> BaseWeights:
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    places[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise FinetuneError(f"{path}: is no whole safetensors file ({error}); fetch it again") from error
    return BaseWeights(places, shapes)


def read_settings(section: ModelSection, name: str) -> dict[str, Any] | None:
    """A JSON file of the base as it stands; None where it has none."""
    path = base_file(section, name)
    return None if path is None else dict(json.loads(path.read_text(encoding="utf-8")))


def base_file(section: ModelSection, name: str) -> Path | None:
    """A file of the base on this machine, fetched where need be; None where the base has none of that name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    folder = Path(resolve_model_path(section.name_or_path))
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    cached = in_hub_cache(section.name_or_path, name, section.revision)
    try:
        return cached or Path(hf_hub_download(section.name_or_path, name, revision=section.revision))
    except EntryNotFoundError:  # also where the Hub cannot be asked and the file was never fetched
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise not_loaded(name, section.name_or_path, error) from error
