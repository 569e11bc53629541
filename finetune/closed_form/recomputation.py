"""`activation_checkpointing: auto`: the least recomputation that fits, by the closed form with its margin.

On a GPU layers are compiled unless the recipe says otherwise, so selective recomputation is not a candidate there.

On a CPU only host memory is known, and the closed form counts a GPU's bfloat16 activations. A CPU computes in float32
at most, twice that, so estimates count twice there. For SmolLM2-135M and Qwen3-0.6B, full and adapters, traces on a CPU
take 35 to 48 % of the estimate. Python and its libraries come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

ON_HOST = 2  # bytes of a tensor on a CPU, of those on a GPU, at most


@dataclass(frozen=True)
class Chosen:
    """A recipe with settled recomputation, and the reason."""

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
        return _with(recipe, True, "the configuration of the model is not known")
    room = gpus or Gpus(ranks, available_bytes() // ranks, "host memory")
    if why := unsupported(_estimated(recipe, False, gpus), config, room):
        return _with(recipe, True, f"there is no closed form for {why}")
    return _least(recipe, config, gpus, room)


def chosen_words(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """A recipe file's overrides, with `auto` resolved for its own GPUs."""
    asked = load_recipe(recipe, overrides).recipe
    chosen = choose_recomputation(asked, gpus_of(asked.budget))
    setting = chosen.recipe.training.activation_checkpointing
    words = [] if chosen.why is None else [f"training.activation_checkpointing={str(setting).lower()}"]
    return [*overrides, *words]


def _least(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None, room: Gpus) -> Chosen:
    needs: list[int] = []
    compiled = gpus is not None and recipe.training.compile is not False
    settings = RECOMPUTATIONS_IF_COMPILED if compiled else RECOMPUTATIONS
    for setting in settings:
        found = estimate(_estimated(recipe, setting, gpus), config, room)
        needs.append(found.upper if gpus else ON_HOST * found.needed)
        if needs[-1] <= room.memory:
            break
    fits, of = needs[-1] <= room.memory, f"{room.memory / GIB:.1f} GiB{'' if gpus else ' of free host memory'}"
    why = f"the plan needs at most {needs[-1] / GIB:.1f} of {of}"
    if not fits:
        why = f"even so the plan may need {needs[-1] / GIB:.1f} of {of}"
    elif len(needs) > 1:
        why += f", and {needs[-2] / GIB:.1f} with {recomputation_in_words(settings[len(needs) - 2])}"
    return _with(recipe, settings[len(needs) - 1], why)


def _estimated(recipe: Recipe, setting: bool | int | str, gpus: Gpus | None) -> Recipe:
    """As the closed form knows it: float32 throughout is covered by ON_HOST."""
    changes: dict[str, Any] = {"activation_checkpointing": setting}
    if gpus is None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        changes["mixed_precision"] = "bf16"
    return _changed(recipe, changes)


def _with(recipe: Recipe, setting: bool | int | str, why: str) -> Chosen:
    return Chosen(_changed(recipe, {"activation_checkpointing": setting}), why)


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=dict(changes))})
