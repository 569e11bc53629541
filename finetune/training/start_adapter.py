"""The adapter in `model.adapter`: a run's first weights, from a folder or the Hub, under every strategy.

Each rank reads the whole file, which is small, and fills in the ranges that it holds, as from a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finetune.base.identity import BASE_CONTENT, base_identity
from finetune.base.location import published_name, resolve_model_path
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.model.adapters import silenced_peft
from finetune.model.build import build_model, decoder_parts
from finetune.model.text_part import PEFT_PREFIX, names_in_whole
from finetune.recipe.adapter_config import (
    CONFIG,
    PICKLED,
    WEIGHTS,
    config_mistake,
    folder_mistake,
    lacks_weights,
    names_a_folder,
)
from finetune.recipe.schema import Recipe
from finetune.run_folder.tensor_checks import not_finite
from finetune.run_folder.trained_tensors import load_model, model_tensors
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import reshard
from finetune.untrusted.model_folder import look_at_adapter
from finetune.untrusted.safetensors_header import read_metadata


@dataclass(frozen=True)
class StartAdapter:
    """An adapter that fits the recipe's model."""

    name: str  # as the recipe has it
    revision: str | None  # of a Hub repository
    file: Path
    sha256: str
    base: str  # the base model's name, as the adapter has it
    content: str | None  # of the base that it was trained on; None: another tool's adapter, or an older one
    keys: Mapping[str, str]  # the model's parameter -> the file's tensor

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {"name": self.name, "revision": self.revision, "sha256": self.sha256, "base": self.base}

    def note(self, recipe: Recipe) -> str:
        """A line for the user. It also tells if the adapter was made for another base."""
        line = f"model.adapter: training starts from {self.name} ({len(self.keys)} tensors, sha256 {self.sha256[:12]})"
        model, now = recipe.model.name_or_path, base_identity(recipe.model)["content"]
        if self.content and now:  # then names say nothing more
            if self.content != now:
                line += f"; it was made for a base with the content {self.content[:12]}, {model} has {now[:12]}"
        elif self.base and self.base not in (model, published_name(model), resolve_model_path(model)):
            line += f"; it was made for {self.base}, this recipe has {model}: see that the two are one model"
        return line


def fetched_adapter_file(name: str, file: str, revision: str) -> Path:
    """A Hub file's path on this machine. Ranks that ask at the same time wait for the one that downloads."""
    from huggingface_hub import file_exists, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        # LocalEntryNotFoundError is also an EntryNotFoundError, but says that the Hub could not be asked.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError) and file == WEIGHTS:
            pickled = file_exists(name, PICKLED, revision=revision)
            raise FinetuneError(f"model.adapter: {lacks_weights(name, pickled=pickled)}") from error
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentMismatch(
            f"model.adapter: {file} of {name} could not be loaded: {reason}; name a local folder, or log in with "
            "`hf auth login` for a private repository"
        ) from error


def find_start_adapter(recipe: Recipe) -> StartAdapter | None:
    """Find the recipe's adapter, fetch it if necessary, and compare it with the model; None: the recipe names none.

    Its weights stay on disk. Raises FinetuneError if it does not fit, EnvironmentMismatch if it cannot be fetched.
    """
    name = recipe.model.adapter
    if name is None:
        return None
    if names_a_folder(name):
        mistake, folder, revision = folder_mistake(name, recipe.lora), Path(name), None
    else:
        revision = recipe.model.adapter_revision
        folder = fetched_adapter_file(name, CONFIG, revision).parent
        mistake = config_mistake(name, (folder / CONFIG).read_text(encoding="utf-8"), recipe.lora)
    if mistake is not None:
        raise FinetuneError(f"model.adapter: {mistake}")
    file = folder / WEIGHTS if revision is None else fetched_adapter_file(name, WEIGHTS, revision)
    try:
        base = str(look_at_adapter(folder).get("base_model_name_or_path") or "")
    except FinetuneError as error:
        reason = str(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: ")
        raise FinetuneError(f"model.adapter: {name}: {reason}") from None
    keys = _fitting_keys(recipe, name, file)
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return StartAdapter(name, revision, file, sha256, base, read_metadata(file).get(BASE_CONTENT), keys)


def _fitting_keys(recipe: Recipe, name: str, file: Path) -> dict[str, str]:
    """Compare names and shapes with the model's, built without weights. Returns {the model's parameter: file's tensor}.

    Raises FinetuneError.
    """
    from peft import get_peft_model_state_dict

    with silenced_peft():
        model = build_model(recipe, torch.device("meta"))
        every = model.named_parameters(remove_duplicate=False)
        named = {name: weight for name, weight in every if weight.requires_grad}
        parameters = model_tensors(model)  # tied ones once
        saved = get_peft_model_state_dict(model, state_dict=dict(named), save_embedding_layers=False)
    # peft saves under names of its own. Its state dict holds the same tensor objects, so `id` finds the parameter.
    parameter_of_tensor = {id(named[parameter]): parameter for parameter in parameters}
    expected = {key: parameter_of_tensor[id(tensor)] for key, tensor in saved.items()}
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FinetuneError(
            f"model.adapter: {name}: {WEIGHTS} is damaged ({error}); fetch or export it again"
        ) from None
    if whole_names := names_in_whole(decoder_parts(model)):
        # The model is a multimodal model's text part. The file may use the part's names, the whole model's, or both:
        #   own:   base_model.model.model.layers.0...
        #   whole: base_model.model.model.language_model.layers.0...
        # A tensor under both names counts once, under its own name.
        own_names = {PEFT_PREFIX + whole_names.of(key.removeprefix(PEFT_PREFIX)): key for key in expected}
        for whole_name, own_name in own_names.items():
            if whole_name == own_name or whole_name not in shapes:
                continue
            if own_name in shapes:
                del shapes[whole_name]
            else:
                expected[whole_name] = expected.pop(own_name)
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    wrong = [
        f"{key} is {shapes[key]} there and {tuple(parameters[expected[key]].shape)} in the model"
        for key in sorted(expected.keys() & shapes.keys())
        if shapes[key] != tuple(parameters[expected[key]].shape)
    ]
    mistakes = [f"has no {key}" for key in missing]
    mistakes += [f"has {key}, which is not trained" for key in unexpected]
    mistakes += wrong
    if mistakes:
        raise FinetuneError(
            f"model.adapter: {name}: {mistakes[0]} ({len(mistakes)} of its tensors do not fit); give "
            "lora.target_modules and lora.modules_to_save as the adapter was trained with, and its own base as "
            "model.name_or_path"
        )
    return {parameter: key for key, parameter in expected.items()}


def start_from(parts: Assembled, adapter: StartAdapter) -> None:
    """Fill the trained weights, in place on every rank. Raises FinetuneError if they are not finite."""
    with safe_open(adapter.file, framework="pt") as opened:
        tensors: dict[str, Tensor] = {name: opened.get_tensor(key) for name, key in adapter.keys.items()}
    if bad := not_finite(tensors, 0):
        raise FinetuneError(f"model.adapter: {adapter.name}: not finite: {bad[0]}; export an earlier step of its run")
    # ZeRO's engine trains float32 masters and copies them into the model's parameters.
    if parts.engine is not None:
        from finetune.strategies.zero_state import load_masters

        load_masters(parts.engine, {name: tensor.float() for name, tensor in tensors.items()})
        return
    reshard(parts.unwrapped_model)
    dtypes = {name: tensor.dtype for name, tensor in model_tensors(parts.unwrapped_model).items()}
    own_tensors = {name: tensor.to(dtypes[name]) for name, tensor in parts.of_this_stage(tensors).items()}
    load_model(parts.unwrapped_model, own_tensors)
