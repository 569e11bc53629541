"""Checks that `model.adapter`'s adapter fits the recipe's `lora`, from its adapter_config.json; no torch.

The recipe alone decides the training. An adapter with other settings is refused, with the section to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.paths import RECIPES, open_regular
from finetune.recipe.names import local_model_problem
from finetune.recipe.schema import Lora, Recipe
from finetune.recipe.sections.preferences import names_second_model

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
SCALARS = ("r", "lora_alpha", "use_rslora", "use_dora")
BY_PATTERN = ("rank_pattern", "alpha_pattern")
MOST_CONFIG_BYTES = 16 * 2**20  # read from adapter_config.json
LISTS = ("target_parameters", "modules_to_save")
# peft's settings that this kit's adapters do not have. Each changes the weights' meaning.
NOT_OFFERED = (
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)
# Initialisations that move a part of the base into the adapter.
MOVES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def names_a_folder(name: str) -> bool:
    """Whether `model.adapter` means a folder on this machine, present or not, rather than a Hub repository."""
    if Path(name).is_dir() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return True
    return Path(name).parent.is_dir()


def folder_mistakes(recipe: Recipe) -> Iterator[tuple[tuple[str, str], str]]:
    """(key, mistake) if the recipe's model, adapter or reference names a folder that holds no such thing."""
    if problem := local_model_problem(recipe.model.name_or_path):
        yield ("model", "name_or_path"), problem
    if problem := folder_mistake(recipe.model.adapter, recipe.lora):
        yield ("model", "adapter"), problem
    section = recipe.preferences
    if section is not None and names_second_model(section) and (problem := reference_problem(section.reference)):
        yield (recipe.training.objective, "reference"), problem


def reference_problem(name: str) -> str | None:
    """The problem with a reference's folder, and the remedy; None if it may be a model, or is on the Hub."""
    folder = Path(name)
    adapter = next((place for place in (folder, folder / "adapter") if (place / CONFIG).is_file()), None)
    if adapter is not None and not (folder / "config.json").is_file():
        remedy = f"set model.adapter: {adapter} and reference: start, or merge it into its base (finetune merge)"
        return f"{name}: is an adapter, and a reference is a whole model; {remedy}"
    if (folder / "model" / "config.json").is_file():  # a run's folder
        return f"{name}: is a run's folder; name {folder / 'model'}"
    return local_model_problem(name)


def folder_mistake(name: str | None, lora: Lora | None) -> str | None:
    """The problem with an adapter's folder, and the remedy; None if it fits the recipe, or is on the Hub."""
    if name is None or not names_a_folder(name):
        return None
    folder = Path(name)
    if not folder.is_dir():
        remedy = f"name a folder with {CONFIG}, or owner/name on the Hub"
        if folder.name == "adapter" and (RECIPES / f"{folder.parent.name}.yaml").is_file():  # a run that is to come
            remedy = f"train recipes/{folder.parent.name}.yaml first, or {remedy}"
        return f"{name}: no such folder; {remedy}"
    if not (folder / CONFIG).is_file():
        remedy = "name the folder of an adapter that peft saved"
        if (folder / "adapter" / CONFIG).is_file():  # a run's folder
            remedy = f"name {folder / 'adapter'}"
        return f"{name}: has no {CONFIG}; {remedy}"
    if not (folder / WEIGHTS).is_file():
        return lacks_weights(name, pickled=(folder / PICKLED).is_file())
    with open_regular(folder / CONFIG) as file:
        return config_mistake(name, file.read(MOST_CONFIG_BYTES).decode("utf-8", "replace"), lora)


def lacks_weights(name: str, *, pickled: bool) -> str:
    """The mistake in an adapter without safetensors."""
    problem = f"has no {WEIGHTS}"
    if pickled:
        problem = f"has {PICKLED}, a pickle, which is never read"
    return f"{name}: {problem}; save the adapter once more by peft's save_pretrained, which writes safetensors"


def config_mistake(name: str, text: str, lora: Lora | None) -> str | None:
    """The adapter_config.json's settings that the recipe cannot train, and the remedy; None if they fit."""
    try:
        config = json.loads(text)
        kind = config.get("peft_type")
    except (ValueError, AttributeError, RecursionError):  # not JSON, not a mapping, nested too deeply
        return f"{name}: {CONFIG} is not JSON of an adapter; name the folder of an adapter that peft saved"
    if kind != "LORA":
        return f"{name}: is an adapter of kind {kind}; name a LoRA adapter"
    if wrong := next((key for key in LISTS if not isinstance(config.get(key) or [], list)), None):
        return f"{name}: {CONFIG}: {wrong} is not a list of names; name the folder of an adapter that peft saved"
    not_offered = [key for key in NOT_OFFERED if config.get(key)]
    if config.get("bias", "none") != "none":
        not_offered.append("bias")
    init = str(config.get("init_lora_weights", True))
    if init.startswith(MOVES_THE_BASE):
        not_offered.append(f"init_lora_weights: {init}")
    if not_offered:
        settings = ", ".join(not_offered)
        return f"{name}: has {settings}, which is not offered here; merge it into its base and name the result"
    if lora is None:
        return None  # schema.py reports it
    differing = list(_differing_settings(lora, config))
    if not differing:
        return None
    problems = ", ".join(
        f"lora.{key} is {_in_yaml(ours)} and the adapter's {_in_yaml(theirs)}" for key, ours, theirs in differing
    )
    section = ", ".join(f"{key}: {_in_yaml(theirs)}" for key, _, theirs in differing)
    return f"{name}: {problems}; write lora: {{{section}}}, or merge it into its base and name the result"


def _differing_settings(lora: Lora, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, the recipe's value, the adapter's value). Layers by pattern are compared later, with the model at hand."""
    for key in SCALARS:
        is_switch = Lora.model_fields[key].annotation is bool
        theirs = config.get(key, False if is_switch else None)
        if getattr(lora, key) != theirs:
            yield key, getattr(lora, key), theirs
    targets = config.get("target_modules")
    if isinstance(lora.target_modules, list) and isinstance(targets, list):
        ours, theirs = _last_names(lora.target_modules), _last_names(targets)
        if ours != theirs:
            yield "target_modules", lora.target_modules, theirs
    for key in BY_PATTERN:
        if getattr(lora, key) != (config.get(key) or {}):
            yield key, getattr(lora, key), config.get(key) or {}
    parameters = config.get("target_parameters") or []
    if lora.target_parameters is not None and _last_names(lora.target_parameters) != _last_names(parameters):
        yield "target_parameters", lora.target_parameters, sorted(parameters)
    saved = config.get("modules_to_save") or []
    if {*_last_names(lora.modules_to_save)} != {*_last_names(saved)}:
        yield "modules_to_save", lora.modules_to_save, saved


def _last_names(targets: Iterable[str]) -> list[str]:
    """Layers by the last part of their path. Under all-linear, peft writes each layer's full path."""
    return sorted({str(target).rpartition(".")[2] for target in targets})


def _in_yaml(value: Any) -> str:
    """The value in one line of YAML: 32.0 as 32, a list without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value).replace('"', "")
