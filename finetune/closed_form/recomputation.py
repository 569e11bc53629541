"""`activation_checkpointing: auto`: the least recomputation that fits, by the closed form with its margin.

On a GPU layers are compiled unless the recipe says otherwise, so selective recomputation is not a candidate there.

On a CPU only host memory is known, and the closed form counts a GPU's bfloat16 activations. A CPU computes in float32
at most, twice that, so estimates count twice there. For SmolLM2-135M and Qwen3-0.6B, full and adapters, traces on a CPU
take 35 to 48 % of the estimate. Python and its libraries come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.closed_form.estimate import estimate, unsupported
from finetune.errors import FinetuneError
from finetune.measure.host_memory import available_bytes
from finetune.measure.units import GIB
from finetune.model.known_configs import planned_config
from finetune.recipe.gpus import Gpus, gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS, RECOMPUTATIONS_IF_COMPILED
from finetune.wording import recomputation_in_words

ON_HOST = 2  # a tensor's bytes on a CPU, as a multiple of its bytes on a GPU, at most


@dataclass(frozen=True)
class Chosen:
    """A recipe in which `auto` is replaced, and the reason."""

    recipe: Recipe
    why: str | None = None  # None: the recipe says so itself

    @property
    def facts(self) -> dict[str, Any]:
        """For the receipt and JSON; empty where nothing was chosen."""
        if self.why is None:
            return {}
        runs = self.recipe.training.activation_checkpointing
        return {"asked": "auto", "runs": runs, "why": self.why, "line": self.line}

    @property
    def line(self) -> str:
        """For the terminal; empty where nothing was chosen."""
        if self.why is None:
            return ""
        runs = recomputation_in_words(self.recipe.training.activation_checkpointing)
        return f"activation checkpointing: {runs}, because {self.why}"


def choose_recomputation(recipe: Recipe, gpus: Gpus | None, *, ranks: int = 1) -> Chosen:
    """The recipe with `auto` resolved for these GPUs. Any other setting stays as written.

    Args:
        gpus: None: a CPU, whose memory `ranks` share.
    """
    if recipe.training.activation_checkpointing != "auto":
        return Chosen(recipe)
    try:
        config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    except FinetuneError:
        return Chosen(_changed(recipe, True), "the configuration of the model is not known")
    room = gpus or Gpus(ranks, available_bytes() // ranks, "host memory")
    if why := unsupported(_estimated(recipe, False, gpus), config, room):
        return Chosen(_changed(recipe, True), f"there is no closed form for {why}")
    settings = RECOMPUTATIONS
    if gpus is not None and recipe.training.compile is not False:
        settings = RECOMPUTATIONS_IF_COMPILED
    # The settings are tried from the least recomputation on; the last one stays if none fits.
    needs: list[int] = []
    for setting in settings:
        found = estimate(_estimated(recipe, setting, gpus), config, room)
        needs.append(found.upper if gpus else ON_HOST * found.needed)
        if needs[-1] <= room.memory:
            break
    memory = f"{room.memory / GIB:.1f} GiB"
    if gpus is None:
        memory += " of free host memory"
    if needs[-1] > room.memory:
        why = f"even so the plan may need {needs[-1] / GIB:.1f} of {memory}"
    else:
        why = f"the plan needs at most {needs[-1] / GIB:.1f} of {memory}"
        if len(needs) > 1:
            why += f", and {needs[-2] / GIB:.1f} with {recomputation_in_words(settings[len(needs) - 2])}"
    return Chosen(_changed(recipe, settings[len(needs) - 1]), why)


def chosen_words(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """A recipe file's overrides, with `auto` resolved for its own GPUs."""
    loaded = load_recipe(recipe, overrides).recipe
    chosen = choose_recomputation(loaded, gpus_of(loaded.budget))
    if chosen.why is None:
        return [*overrides]
    setting = chosen.recipe.training.activation_checkpointing
    return [*overrides, f"training.activation_checkpointing={str(setting).lower()}"]


def _estimated(recipe: Recipe, setting: bool | int | str, gpus: Gpus | None) -> Recipe:
    """The recipe with a setting, in formats that the closed form knows: on a CPU ON_HOST covers float32."""
    if gpus is not None:
        return _changed(recipe, setting)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    return _changed(recipe, setting, mixed_precision="bf16")


def _changed(recipe: Recipe, setting: bool | int | str, **further: Any) -> Recipe:
    changes = {"activation_checkpointing": setting, **further}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
