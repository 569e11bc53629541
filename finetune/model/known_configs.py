"""Configurations of real models by name: shipped in configs/, in a local folder, a package or the Hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.model.packaged import ONLINE_REPOSITORIES, PREFIX, in_hub_cache, resolve_model_path
from finetune.paths import PACKAGE

CONFIGS = PACKAGE / "model" / "configs"

# Hub names by the file of their configuration; the -Instruct variant has the same one.
HUB_NAMES: dict[str, tuple[str, ...]] = {
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "unsloth/Llama-3.2-1B"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "unsloth/Llama-3.2-3B"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "unsloth/Llama-3.1-8B"),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.1-70B", "unsloth/Llama-3.3-70B"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base"),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M",),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M",),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B",),
}


def full_config(name_or_path: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The real model's configuration, as config.json has it, and where it was found; nothing is downloaded.

    Of a multimodal model it is that of its text part, where that is trained by itself, every default written out.
    Looks into a local folder, an installed package, the configurations shipped here and the Hub's local cache. Raises
    EnvironmentMismatch when it is nowhere, FinetuneError for a package that is not there.
    """
    name = name_or_path
    if name.startswith(PREFIX):
        name = ONLINE_REPOSITORIES.get(name.removeprefix(PREFIX).strip()) or resolve_model_path(name)
    file = Path(name, "config.json")
    if not file.is_file():
        shipped = shipped_config(name)
        file = shipped or in_hub_cache(name, "config.json", revision) or file
    if not file.is_file():
        known = ", ".join(names[0] for names in HUB_NAMES.values())
        raise EnvironmentMismatch(
            f"model.name_or_path: {name_or_path}: its configuration is not on this machine; a local folder with a "
            f"config.json can be rehearsed, and by their Hub names {known}"
        )
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentMismatch(f"model.name_or_path: {file}: cannot be read: {error}; correct it") from error
    if "text_config" in config:
        config = _trained_part(config)
    return config, f"finetune/model/configs/{file.name}" if file.parent == CONFIGS else str(file)


def decoder_config(name_or_path: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The same of a model that is a decoder and nothing else. Raises EnvironmentMismatch for any other too."""
    config, source = full_config(name_or_path, revision)
    if "text_config" in config:
        raise EnvironmentMismatch(
            f"model.name_or_path: {name_or_path}: transformers has no class for the text part of a "
            f"{config.get('model_type')} by itself; such a model is trained as a whole, and can be neither planned nor "
            "rehearsed"
        )
    return config, source


def _trained_part(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig  # takes a second, with torch: only where a model has more parts than one

    from finetune.model.text_part import trained_config

    try:
        whole = AutoConfig.for_model(**config)
    except (KeyError, TypeError, ValueError):  # not known here: building it says so
        return config
    part = trained_config(whole)
    return config if part is whole else json.loads(part.to_json_string(use_diff=False))


def shipped_config(name: str) -> Path | None:
    """The file of `configs/` for a Hub name, None for a name that is not known here."""
    base_name = name.lower().replace("-instruct", "")
    for stem, names in HUB_NAMES.items():
        if base_name in {full_name.lower() for full_name in names}:
            return CONFIGS / f"{stem}.json"
    return None
