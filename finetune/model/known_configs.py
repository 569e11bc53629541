"""Configurations of real models by name: in a folder, a package, configs/, the Hub's cache or on the Hub."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.base.location import folder_of, in_hub_cache, online_name, resolve_model_path
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.model.stored_structure import unties
from finetune.paths import PACKAGE
from finetune.recipe.schema import ModelSection, Recipe
from finetune.recipe.sections.model import PREFIX
from finetune.untrusted.config_sizes import read_config

CONFIGS = PACKAGE / "model" / "configs"

# Hub names by the file of their configuration; the -Instruct variant has the same one. Of multimodal models it is the
# text part. docs/planner.md says where the figures of each are from.
HUB_NAMES: dict[str, tuple[str, ...]] = {
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "unsloth/Llama-3.2-1B", "NousResearch/Llama-3.2-1B"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "unsloth/Llama-3.2-3B"),
    "llama-3.1-8b": (
        *("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "unsloth/Llama-3.1-8B"),
        "NousResearch/Meta-Llama-3.1-8B",
    ),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.1-70B", "unsloth/Llama-3.3-70B"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B",),
    "llama-4-scout-17b-16e": ("meta-llama/Llama-4-Scout-17B-16E", "unsloth/Llama-4-Scout-17B-16E"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base"),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"),
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B-Base"),
    "qwen3.5-4b": ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B-Base"),
    "qwen3.5-9b": ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base"),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B",),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B-Base"),
    "gemma-3-1b": ("google/gemma-3-1b-it", "google/gemma-3-1b-pt", "unsloth/gemma-3-1b-it"),
    "gemma-3-4b": ("google/gemma-3-4b-it", "google/gemma-3-4b-pt", "unsloth/gemma-3-4b-it"),
    "gemma-3-12b": ("google/gemma-3-12b-it", "google/gemma-3-12b-pt", "unsloth/gemma-3-12b-it"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt", "unsloth/gemma-3-27b-it"),
    "gemma-4-e2b": ("google/gemma-4-E2B-it", "google/gemma-4-E2B", "unsloth/gemma-4-E2B-it"),
    "gemma-4-e4b": ("google/gemma-4-E4B-it", "google/gemma-4-E4B", "unsloth/gemma-4-E4B-it"),
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B", "unsloth/gemma-4-26B-A4B-it"),
    "gemma-4-31b": ("google/gemma-4-31B-it", "google/gemma-4-31B", "unsloth/gemma-4-31B-it"),
    "phi-4": ("microsoft/phi-4",),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "unsloth/gpt-oss-20b"),  # in MXFP4
    "gpt-oss-20b-bf16": ("unsloth/gpt-oss-20b-BF16",),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "unsloth/gpt-oss-120b"),
    "gpt-oss-120b-bf16": ("unsloth/gpt-oss-120b-BF16",),
    "olmo-3-7b": ("allenai/Olmo-3-7B", "allenai/Olmo-3-1025-7B", "allenai/Olmo-3-7B-Think"),
    "olmo-3-32b": ("allenai/Olmo-3-1125-32B", "allenai/Olmo-3-32B-Think"),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B-Base", "HuggingFaceTB/SmolLM3-3B-checkpoints"),
    "glm-4-9b-0414": ("zai-org/GLM-4-9B-0414", "THUDM/GLM-4-9B-0414"),
    "ministral-3-3b": ("mistralai/Ministral-3-3B-Instruct-2512", "mistralai/Ministral-3-3B-Base-2512"),
    "ministral-3-8b": ("mistralai/Ministral-3-8B-Instruct-2512", "mistralai/Ministral-3-8B-Base-2512"),
    "ministral-3-14b": ("mistralai/Ministral-3-14B-Instruct-2512", "mistralai/Ministral-3-14B-Base-2512"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M",),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M",),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B",),
}
MIRRORS = ("nousresearch", "unsloth")  # owners of ungated copies under the model's own last name
# Beginnings of gated names: the Hub shows their files after a request. doctor says so without asking the Hub.
GATED = ("meta-llama/", "google/gemma-3")
ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Names of sizes by which planner and rehearsal read any architecture; GPT-2's own are n_layer, n_embd and n_head.
COMMON_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
FAMILIES_NAMED = ("llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "gpt-oss-20b")  # of those that a message names


def full_config(name_or_path: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The real model's configuration, as in config.json, and where it was found.

    For a multimodal model whose text part is trained by itself, it is the text part's, with every default written out.
    This looks into a local folder, an installed package, the configurations shipped here and the Hub's local cache.
    Then it asks the Hub for config.json and nothing else. Raises EnvironmentMismatch if it is nowhere, FinetuneError
    for a missing package.
    """
    name = resolve_model_path(online_name(name_or_path))
    file = Path(name, "config.json")
    if not file.is_file():
        shipped = shipped_config(name)
        file = shipped or in_hub_cache(name, "config.json", revision) or _from_hub(name_or_path, name, revision)
    config = json.loads(json.dumps(read_config(file)), object_hook=_as_number)
    if unties(file.parent, config):
        config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        from transformers import AutoConfig  # takes a second, with torch: only where a model has more parts than one

        from finetune.model.text_part import trained_config

        with suppress(Exception):  # not known here, or with values that no model has: building it says so
            whole = AutoConfig.for_model(**config)
            part = trained_config(whole)
            if part is not whole:
                config = json.loads(part.to_json_string(use_diff=False))
    return config, f"finetune/model/configs/{file.name}" if file.parent == CONFIGS else str(file)


def config_here(name_or_path: str, revision: str = "main") -> dict[str, Any] | None:
    """config.json as it is written, if it is on this machine; the Hub is not asked.

    A package whose model is known here has the shipped one, so that this does not convert the package.
    """
    if name_or_path.startswith(PREFIX) and (shipped := shipped_config(online_name(name_or_path))) is not None:
        return read_config(shipped)
    try:
        folder = folder_of(name_or_path, revision)
        file = Path(folder, "config.json") if folder is not None else shipped_config(name_or_path)
        return read_config(file) if file is not None and file.is_file() else None
    except FinetuneError:
        return None


def positions_in(text: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> int | None:
    """The positions that the text part's configuration reaches, with its own or the recipe's scaling; None: unknown."""
    positions = text.get("max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:
        return None
    if scaling is not None:
        from finetune.model.rope_scaling import scaled_rope

        return scaled_rope(text, scaling)[2]
    # A configuration with YaRN may state the number that the model was trained with, as Qwen's model cards do.
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if factor and original and rope.get("rope_type", rope.get("type")) == "yarn":
        return max(positions, int(factor * original))
    return positions


def beyond_stated(recipe: Recipe) -> Iterator[str]:
    """A line for rows beyond the model's positions, where no document has been read."""
    config = config_here(recipe.model.name_or_path, recipe.model.revision) or {}
    length, text = recipe.data.max_length, config.get("text_config") or config
    positions = positions_in(text, recipe.model.rope_scaling)
    if positions is not None and length > positions:
        scaling = recipe.model.rope_scaling or {"rope_type": "yarn", "factor": 1.0}
        factor = math.ceil(length / positions * scaling["factor"])
        yield (
            f"data.max_length: {length:,} is beyond the model's {positions:,} positions; for documents as long set "
            f"model.rope_scaling: {{rope_type: {scaling['rope_type']}, factor: {factor}.0}}, or "
            f"data.max_length={positions}"
        )


def _as_number(content: dict[str, Any]) -> Any:
    """transformers writes numbers that are not finite, limits of Mamba's steps, as {"__float__": "Infinity"}."""
    if content.keys() != {"__float__"}:
        return content
    try:
        return float(content["__float__"])
    except (TypeError, ValueError):
        return None


def _from_hub(name_or_path: str, name: str, revision: str) -> Path:
    """A Hub repository's config.json, downloaded into the Hub's cache with this machine's token.

    The file's head is requested first, once, because a download without a network tries for half a minute.
    """
    why, remedy = "", ""
    if ON_HUB.fullmatch(name) and not Path(name).exists():
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
            return Path(hf_hub_download(name, "config.json", revision=revision))
        except OfflineModeIsEnabled:
            why, remedy = ", and HF_HUB_OFFLINE is set", "unset it; "
        except GatedRepoError:
            why = ", and the Hub shows it to those alone who asked for access"
            remedy = f"ask on its page, https://huggingface.co/{name}, and log in with `hf auth login`; "
        except RepositoryNotFoundError:
            why = ", and the Hub has no such model or does not show it to this token"
            remedy = "correct the name, or log in with `hf auth login`; "
        except (RevisionNotFoundError, EntryNotFoundError):
            why = f", and revision {revision} on the Hub has no config.json"
            remedy = "correct model.revision, or choose another model; "
        except HFValidationError:
            pass
        except Exception as error:  # of the connection, by the client's own library; a proxy's answer
            why = f", and the Hub could not be reached ({type(error).__name__})"
    own = name.rpartition("/")[2].lower().replace("-instruct", "").replace("meta-", "")
    for known_name in chain.from_iterable(HUB_NAMES.values()):
        if known_name.rpartition("/")[2].lower() == own:  # a mirror
            remedy += f"{known_name} has this name and is known here: model.name_or_path={known_name}; "
            break
    known = ", ".join(HUB_NAMES[stem][0] for stem in FAMILIES_NAMED)
    raise EnvironmentMismatch(
        f"model.name_or_path: {name_or_path}: its configuration is not on this machine{why}; {remedy}a local folder "
        f"with a config.json will do, and Hub names that are known here, such as {known}"
    )


def decoder_config(name_or_path: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The same of a model that is a decoder and nothing else. Raises EnvironmentMismatch for any other too."""
    config, source = full_config(name_or_path, revision)
    if "text_config" in config:
        raise EnvironmentMismatch(
            f"model.name_or_path: {name_or_path}: transformers has no class for the text part of a "
            f"{config.get('model_type')} by itself; such a model is trained as a whole, and can be neither planned nor "
            "rehearsed"
        )
    if "model_type" in config and not all(name in config for name in COMMON_NAMES):
        from transformers import CONFIG_MAPPING  # takes a second, with torch: only where names are missing

        if config["model_type"] in CONFIG_MAPPING:  # its classes accept the common names beside the architecture's own
            own_names = CONFIG_MAPPING[config["model_type"]].attribute_map
            renamed = {own_names[name]: name for name in COMMON_NAMES if name in own_names and name not in config}
            config = {renamed.get(name, name): value for name, value in config.items()}
    return config, source


def planned_config(name_or_path: str, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The configuration with its number of layers, from which a full plan is made. Raises FinetuneError if there is no
    such number: Nemotron-H lists its layers' kinds instead.
    """
    config, source = decoder_config(name_or_path, revision)
    if "num_hidden_layers" in config:
        return config, source
    problem = f"model.name_or_path: {source}: has no num_hidden_layers"
    if "layers_block_type" in config:
        raise EnvironmentMismatch(f"{problem}, but lists its layers: cannot be planned; `finetune compare` measures it")
    raise FinetuneError(f"{problem}; correct the file, or fetch it again")


def config_if_known(section: ModelSection) -> dict[str, Any] | None:
    """`planned_config`'s configuration; None if it raises FinetuneError."""
    try:
        return planned_config(section.name_or_path, section.revision)[0]
    except FinetuneError:
        return None


def shipped_config(name: str) -> Path | None:
    """The file of `configs/` for a Hub name, None for a name that is not known here."""
    spellings = {name.lower(), name.lower().replace("-instruct", "")}
    owner = name.lower().partition("/")[0]
    for stem, names in HUB_NAMES.items():
        known = {full_name.lower() for full_name in names}
        if owner in MIRRORS:
            known |= {f"{owner}/{full_name.partition('/')[2]}" for full_name in known}
        if spellings & known:
            return CONFIGS / f"{stem}.json"
    return None
