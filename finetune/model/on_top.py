"""A second adapter on top of a frozen one (`lora.on_top`), exported as one adapter.

Both adapters are in peft's model: `default` is trained, `start` is the frozen one from `model.adapter`. A layer adds
both products to its base's:

    y = W x + s1 B1 A1 x + s2 B2 A2 x  =  W x + [s1 B1, s2 B2] [A1; A2] x

The right side is one adapter with the sum of both ranks and a scale of 1. The run exports this adapter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import write_json
from finetune.model.adapters import silenced_peft
from finetune.model.text_part import PEFT_PREFIX, WholeNames
from finetune.recipe.adapter_config import CONFIG, PICKLED, WEIGHTS, lacks_weights, names_a_folder
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.lora import by_pattern
from finetune.untrusted.model_folder import look_at_settings, patterns_of
from finetune.untrusted.programs import refuse_slow_patterns

START = "start"  # the frozen adapter's name in peft's model
# Settings that decide a layer's product. The frozen adapter has no dropout: only the trained one needs it.
KEPT_SETTINGS = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
)
A, B = ".lora_A.weight", ".lora_B.weight"


def start_file(recipe: Recipe, file: str) -> Path:
    """A file of the adapter in `model.adapter`: in its folder, or fetched from the Hub.

    Raises EnvironmentMismatch if the Hub cannot be asked, FinetuneError if the repository has the weights as a pickle.
    """
    name = recipe.model.adapter
    assert name is not None
    if names_a_folder(name):
        return Path(name) / file
    return fetched_adapter_file(name, file, recipe.model.adapter_revision)


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


def add_frozen_adapter(adapted: Any, recipe: Recipe) -> None:
    """Add the adapter in `model.adapter` to peft's model, frozen, active, and of no effect: its B is zero until
    `finetune/training/start_adapter.py` fills it in.

    Raises FinetuneError if one of the two adapts parameters (experts), which peft cannot add twice.
    """
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    settings, layers = _settings(recipe), [path for path, _ in adapted.get_base_model().named_modules()]
    refuse_slow_patterns(f"model.adapter: {recipe.model.adapter}", patterns_of(settings), layers)
    with silenced_peft():
        config = LoraConfig(
            task_type="CAUSAL_LM",
            inference_mode=True,
            **{key: settings[key] for key in KEPT_SETTINGS if key in settings},
        )
        trained = next(parameter for parameter in adapted.parameters() if parameter.requires_grad)
        try:
            adapted.add_adapter(START, config)
        except (ValueError, re.error) as error:
            raise FinetuneError(
                f"model.adapter: {recipe.model.adapter}: {' '.join(str(error).split())}; name an adapter of this base"
            ) from error
        adapted.base_model.set_adapter(["default", START])
    freeze(adapted)
    for _, parameter in frozen_parameters(adapted):
        parameter.data = parameter.data.to(trained.dtype)
    if experts := [name for name, module in adapted.named_modules() if isinstance(module, ParamWrapper)]:
        raise FinetuneError(
            f"lora.on_top: {experts[0]} has its adapter as a parameter (experts), where peft takes one adapter alone; "
            "set lora.target_parameters: [], or merge the adapter into its base first: finetune merge"
        )


def frozen_parameters(adapted: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The frozen adapter's parameters, by the model's names."""
    return ((name, weight) for name, weight in adapted.named_parameters() if f".{START}." in name and ".lora_" in name)


def freeze(adapted: nn.Module) -> None:
    """Freeze the adapter below the trained one. peft makes each active adapter trainable."""
    for _, parameter in frozen_parameters(adapted):
        parameter.requires_grad_(False)


@contextmanager
def as_the_base(adapted: Any) -> Iterator[None]:
    """Within the block, peft's model computes as its base. Afterwards the same weights are trained as before."""
    with adapted.disable_adapter():
        yield
    freeze(adapted)


def fill(adapted: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the frozen adapter its weights, by the model's names. On meta, nothing happens."""
    with torch.no_grad():
        for name, parameter in frozen_parameters(adapted):
            parameter.copy_(tensors[name])


def stack(folder: Path, recipe: Recipe, adapted: nn.Module, whole_names: WholeNames | None) -> None:
    """Make the exported adapter in `folder` the sum of itself and of the frozen one below it.

    Args:
        adapted: The model of both adapters. Its weights are not read.
        whole_names: A text part's names in its whole model, which the frozen adapter's file may have instead.
    """
    below, above = load_file(start_file(recipe, WEIGHTS)), load_file(folder / WEIGHTS)
    frozen, config = _settings(recipe), json.loads((folder / CONFIG).read_text("utf-8"))
    own_names = {name.replace(f".{START}.", "."): name for name, _ in frozen_parameters(adapted)}
    if whole_names is not None:
        for key in own_names.keys() - below.keys():
            below[key] = below[PEFT_PREFIX + whole_names.of(key.removeprefix(PEFT_PREFIX))]
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for layer in sorted(key.removesuffix(A) for key in {*own_names, *above} if key.endswith(A)):
        path = layer.removeprefix(PEFT_PREFIX)
        parts = [
            (part[layer + A].float(), _scale(settings, path) * part[layer + B].float())
            for part, settings in ((below, frozen), (above, config))
            if layer + A in part
        ]
        tensors[layer + A] = torch.cat([down for down, _ in parts])  # [rank, inputs]
        tensors[layer + B] = torch.cat([up for _, up in parts], dim=1)  # [outputs, rank]
        ranks[path] = len(tensors[layer + A])
    usual = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    config |= {"r": usual, "lora_alpha": usual, "rank_pattern": pattern, "alpha_pattern": dict(pattern)}
    config |= {"use_rslora": False, "init_lora_weights": True}
    config |= {"target_modules": sorted(ranks), "exclude_modules": None}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config)


def _settings(recipe: Recipe) -> dict[str, Any]:
    path = start_file(recipe, CONFIG)
    try:
        return look_at_settings(path)
    except FinetuneError as error:
        reason = str(error).removeprefix(f"{path.parent}/")
        raise FinetuneError(f"model.adapter: {recipe.model.adapter}: {reason}") from None


def _scale(settings: Mapping[str, Any], path: str) -> float:
    """peft's scale of a layer's product. Source: peft/tuners/lora/layer.py, update_layer."""
    rank = by_pattern(settings.get("rank_pattern") or {}, path, settings["r"])
    alpha = by_pattern(settings.get("alpha_pattern") or {}, path, settings["lora_alpha"])
    return float(alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank)
