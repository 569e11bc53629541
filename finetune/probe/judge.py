"""Does a recipe train a small model rightly? If not, name the setting that differs and one that is right."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from finetune.architecture import attention
from finetune.model.adapter_targets import expert_parameters
from finetune.model.build import attention_name, decoder_parts
from finetune.model.dtypes import dtype_name
from finetune.probe.compare import Difference, LibrarySide, difference, library_side, set_checkpointing
from finetune.probe.small_model import SmallModel
from finetune.recipe.schema import Recipe

ELSEWHERE = ("sdpa", "eager")  # the library's own attentions, which run on every device
ANYWHERE = (attention.NAME, *ELSEWHERE)
_LAYERS = {False: "kept", True: "recomputed"}  # in backward
# A model that chooses experts may differ by this much through rounding in 16 bits: a token with two nearly equal best
# experts goes to the other one. A document that sees another document is off by more.
BY_CHOICE = 0.1


class Differs(Exception):
    """Loss or gradients are not the library's; its text is the line for the user."""


@dataclass(frozen=True)
class Judgement:
    """The differences of a recipe that trains rightly."""

    differences: dict[str, Difference]  # "kept" or "recomputed" layers: the recipe's way first, then the other one
    bound: float
    precision: str
    note: str | None = None


def judge(recipe: Recipe, small: SmallModel, device: torch.device, compute: torch.dtype | None) -> Judgement:
    """Compare the recipe's loss and gradients with the library's. Raises Differs where they differ,
    FinetuneError where the kit refuses the small model, and what the model's own code raises."""
    note = None
    with_library = library_side(recipe, small, device, compute)
    differences = _both_ways(with_library, recipe, small)
    if not _right(with_library, differences) and not with_library.repeats():
        with_library, note = with_library.without_randomness(), "compared in evaluation mode: it draws random numbers"
        differences = _both_ways(with_library, recipe, small)
    if compute is not None and not _right(with_library, differences):
        # In float32 rounding hardly changes a mixture's choice of experts.
        exact = library_side(recipe, small, device, None)
        mixture = expert_parameters(decoder_parts(exact.model))
        if mixture and _right(exact, _both_ways(exact, recipe, small)):
            with_library.bound = BY_CHOICE
            note = "float32 agrees; in 16 bits rounding decides which experts are chosen"
    exact_on_cpu = compute is None and device.type == "cpu"
    if not _right(with_library, differences) and exact_on_cpu and (wide := _in_float64(with_library, recipe, small)):
        with_library, differences = wide
    if not _right(with_library, differences):
        raise _refusal(recipe, small, with_library, differences)
    precision = dtype_name(compute or torch.float32)
    if with_library.wide:
        precision = "float64"
    return Judgement(differences, with_library.bound, precision, note)


def _refusal(
    recipe: Recipe, small: SmallModel, with_library: LibrarySide, differences: dict[str, Difference]
) -> Differs:
    """Ask first whether only a router's auxiliary loss differs; then search everything else, without that loss."""
    if with_library.router:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"router_aux_loss_coef": 0.0})})
        off, with_library = next(iter(differences.values())), replace(with_library, router=0.0)
        differences = _both_ways(with_library, recipe, small)
        if _right(with_library, differences):
            return Differs(
                f"model.router_aux_loss_coef: the router's auxiliary loss differs: {small.name}, made small, has a "
                f"loss {off.loss:.1e} and gradients {off.gradients:.1e} from the library's own of one document at a "
                "time; set model.router_aux_loss_coef: 0"
            )
    return _Trial(recipe, small, with_library, differences).refusal()


def _both_ways(with_library: LibrarySide, recipe: Recipe, small: SmallModel) -> dict[str, Difference]:
    """The differences with layers recomputed as the recipe says, then the other way if the model can."""
    model, recomputes = with_library.built(recipe, small), bool(recipe.training.recompute_every)
    differences = {_LAYERS[recomputes]: with_library.difference_of(model, recipe)}
    if set_checkpointing(model, on=not recomputes) is not recomputes:
        differences[_LAYERS[not recomputes]] = with_library.difference_of(model, recipe)
    return differences


def _in_float64(
    with_library: LibrarySide, recipe: Recipe, small: SmallModel
) -> tuple[LibrarySide, dict[str, Difference]] | None:
    """Compare once more in float64, where rounding is far below the bound; None if an operation has no float64.

    Layers are not recomputed there. Recomputing them must not change a bit, so float32 shows any change it makes.
    """
    model, recomputes = with_library.built(recipe, small), bool(recipe.training.recompute_every)
    as_written = with_library.computed_by(model, recipe)
    set_checkpointing(model, on=False)
    recomputing = difference(as_written, with_library.computed_by(model, recipe))
    try:
        wide = with_library.widened()
        kept = wide.of(recipe, small)
    except Exception:  # the model's own code or a kernel
        with_library.narrowed()
        return None
    both = Difference(max(kept.loss, recomputing.loss), max(kept.gradients, recomputing.gradients), kept.worst)
    return wide, {_LAYERS[recomputes]: both} | ({_LAYERS[False]: kept} if recomputes else {})


def _right(with_library: LibrarySide, differences: dict[str, Difference]) -> bool:
    """Judge by the recipe's own way, which comes first."""
    return next(iter(differences.values())).largest <= with_library.bound


@dataclass
class _Trial:
    """The search for the setting that differs: try recipes with one other setting, and then with two."""

    recipe: Recipe
    small: SmallModel
    with_library: LibrarySide
    differences: dict[str, Difference]
    tried: dict[Any, bool] = field(default_factory=dict)

    def refusal(self) -> Differs:
        """The line for the user: the place that differs, by how much, and a setting that is right."""
        off = next(iter(self.differences.values()))
        place, part = self._locate()
        return Differs(
            f"{place}: {part} differs: {self.small.name}, made small, has a loss {off.loss:.1e} and gradients "
            f"{off.gradients:.1e} from the library's own of one document at a time, where "
            f"{self.with_library.bound:.0e} is rounding; {self._remedy()}"
        )

    def _locate(self) -> tuple[str, str]:
        """The place in the recipe, and the part of the computation that differs there."""
        recipe, name = self.recipe, self.recipe.model.attention
        if self._recomputation_differs:
            setting = recipe.training.activation_checkpointing
            return f"training.activation_checkpointing: {str(setting).lower()}", "the recomputation of layers"
        if self._is_right(recipe, by_logits=True):
            return f"model.name_or_path: {recipe.model.name_or_path}", "the loss"
        if recipe.data.packing and self._is_right(_changed(recipe, packing=False)):
            return "data.packing: true", "packing"
        if any(self._is_right(_changed(recipe, attention=other)) for other in ELSEWHERE):
            return f"model.attention: {name}", "attention"
        if recipe.data.packing and any(self._is_right(_changed(recipe, other, packing=False)) for other in ELSEWHERE):
            return f"model.attention: {name}", "attention, and packing with any other,"
        return f"model.name_or_path: {recipe.model.name_or_path}", "its forward"

    @property
    def _recomputation_differs(self) -> bool:
        """Whether layers are recomputed, and everything is right without that."""
        kept = self.differences.get(_LAYERS[False])
        return len(self.differences) == 2 and kept is not None and kept.largest <= self.with_library.bound

    def _remedy(self) -> str:
        if self._recomputation_differs:
            return "set training.activation_checkpointing: false"
        recipe, own = self.recipe, attention_name(self.recipe)
        others = [name for name in ELSEWHERE if name != own]
        proposals = {f"model.attention: {name}": _changed(recipe, name) for name in others}
        if recipe.data.packing:
            proposals["data.packing: false"] = _changed(recipe, packing=False)
            for name in others:
                proposals[f"model.attention: {name} and data.packing: false"] = _changed(recipe, name, packing=False)
        right = (text for text, changed in proposals.items() if self._is_right(changed))
        return f"set {text}" if (text := next(right, "")) else "choose another model"

    def _is_right(self, recipe: Recipe, *, by_logits: bool = False) -> bool:
        key = attention_name(recipe), recipe.data.packing, recipe.training.activation_checkpointing, by_logits
        if key not in self.tried:
            try:
                off = self.with_library.of(recipe, self.small, by_logits=by_logits)
                self.tried[key] = off.largest <= self.with_library.bound
            except Exception:  # refused, or the model's own code fails: nothing to propose
                self.tried[key] = False
        return self.tried[key]


def _changed(recipe: Recipe, attention: str | None = None, *, packing: bool | None = None) -> Recipe:
    """The recipe with another attention, or without packing."""
    section = recipe.model.model_copy(update={"attention": attention or recipe.model.attention})
    data = recipe.data.model_copy(update={"packing": recipe.data.packing if packing is None else packing})
    return recipe.model_copy(update={"model": section, "data": data})
