"""Decides whether a run's layers are compiled: the recipe asks, the strategy and the architecture allow it."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from finetune.architecture.attention import AMPERE
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers, why_not_compiled
from finetune.architecture.families import router_coefficient
from finetune.errors import EnvironmentMismatch
from finetune.files import cache_folder
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.recipe.strategy_fit import not_compiled

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SWITCHED_OFF = "training.compile: false"
# No flash kernel takes float32, so a compiled layer attends by one operator, which computes attention a second time in
# backward. Nobody has measured whether the rest of the layer makes up for that.
NOT_BY_AUTO = ("no",)
FLOAT32 = "in float32, where compiled attention is computed twice; training.compile: true compiles it"


def compile_as_asked(
    recipe: Recipe, strategy: Strategy, model: PreTrainedModel, device: torch.device, log: Callable[[str], None]
) -> CompiledLayers:
    """Have the layers of an assembled model compiled, where the recipe asks for it and it can be.

    Raises EnvironmentMismatch where `training.compile: true` cannot be.
    """
    asked = recipe.training.compile
    compiled = CompiledLayers(required=asked is True, log=log)
    if asked is False:
        compiled.stopped = SWITCHED_OFF
    elif asked == "auto" and device.type != "cuda":
        compiled.stopped = "on a CPU, where training.compile: auto compiles nothing"
    elif asked == "auto" and (older := torch.cuda.get_device_capability(device)) < AMPERE:
        # Triton supports compute capability 8.0 and later. Before, its compilers may end the process by a signal, which
        # nothing here can catch.
        compiled.stopped = (
            f"on a GPU of compute capability {older[0]}.{older[1]}; training.compile: auto compiles from 8.0 on"
        )
    elif reason := why_left_off(recipe, strategy, model):
        if asked is True:
            raise _refused(reason)
        compiled.stopped = reason
    else:
        keep_graphs()
        compile_layers(model, compiled)
    return compiled


def why_left_off(recipe: Recipe, strategy: Strategy, model: PreTrainedModel) -> str | None:
    """Why layers run as they are written on any GPU; None where nothing is known against compiling them."""
    if recipe.training.compile is False:
        return SWITCHED_OFF
    if recipe.training.compile == "auto" and recipe.training.mixed_precision in NOT_BY_AUTO:
        return FLOAT32
    return not_compiled(recipe, strategy) or why_not_compiled(model) or _routers_are_read(recipe, model)


def keep_graphs(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Have compiled graphs kept in the kit's cache folder, so that the next start of the same training finds them; in
    another folder where the user has named one."""
    return Path(environment.setdefault(CACHE_VARIABLE, str(cache_folder() / "compiled")))


def _routers_are_read(recipe: Recipe, model: PreTrainedModel) -> str | None:
    """transformers' hooks collect the routers' outputs inside the layers. They also collect them in a layer's trial,
    whose graph is gone when the loss reads them.
    """
    if router_coefficient(model.config, recipe):
        return "the router's auxiliary loss reads routers inside of the layers"
    return None


def _refused(reason: str) -> EnvironmentMismatch:
    return EnvironmentMismatch(f"training.compile: true: {reason}; set training.compile: false")
