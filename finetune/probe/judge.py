"""Does a recipe train a small model rightly? If not, name the setting that differs and one that is right."""

from __future__ import annotations

from dataclasses import replace

import torch

from finetune.model.adapter_targets import expert_parameters
from finetune.model.build import attention_name
from finetune.probe.compare import KEPT, Comparison, Difference, LibrarySide, compare, difference, library_side
from finetune.probe.small_model import SmallModel
from finetune.recipe.schema import Recipe

ELSEWHERE = ("sdpa", "eager")  # the library's own attentions, which run on every device
# A model that chooses experts may differ by this much through rounding in 16 bits: a token with two nearly equal best
# experts goes to the other one. A document that sees another document is off by more.
BY_CHOICE = 0.1


class Differs(Exception):
    """Loss or gradients are not the library's; its text is the line for the user."""


def judge(
    recipe: Recipe, small: SmallModel, device: torch.device, compute: torch.dtype | None
) -> tuple[Comparison, str | None]:
    """Compare the recipe's loss and gradients with the library's; returns a right comparison, and a note on it.

    Raises Differs where they differ, FinetuneError where the kit refuses the small model, and what the model's own code
    raises.
    """
    side, note = library_side(recipe, small, device, compute), None
    compared = compare(side, recipe)
    if not compared.is_right and not side.repeats():
        side, note = replace(side, training=False), "compared in evaluation mode: it draws random numbers"
        compared = compare(side, recipe)
    if not compared.is_right and compute is not None and expert_parameters(side.decoder):
        # In float32 rounding hardly changes a mixture's choice of experts.
        exact = compare(replace(side, compute=None, training=True), recipe)
        if exact.is_right:
            side.bound, note = BY_CHOICE, "float32 agrees; in 16 bits rounding decides which experts are chosen"
    if not compared.is_right and compute is None and device.type == "cpu":
        compared = _compared_in_float64(compared, recipe)
    if not compared.is_right:
        raise _refusal(compared, recipe)
    return compared, note


def _compared_in_float64(compared: Comparison, recipe: Recipe) -> Comparison:
    """Compare once more in float64, where rounding is far below the bound, unless an operation has no float64.

    Layers are not recomputed there. Recomputing them must not change a bit, so float32 shows any change it makes.
    """
    own, as_written = next(iter(compared.computed.items()))
    recomputing = difference(as_written, compared.computed[KEPT])
    try:
        wide = replace(compared.side, wide=True)
        result = wide.computed_by(wide.kits_model(recipe), recipe)
    except Exception:  # the model's own code or a kernel
        compared.side.model.float()
        return compared
    kept = wide.difference_of(result)
    both = Difference(max(kept.loss, recomputing.loss), max(kept.gradients, recomputing.gradients), kept.worst)
    return Comparison(wide, {KEPT: result}, {own: both, KEPT: kept})  # equal if the recipe keeps layers


def _refusal(compared: Comparison, recipe: Recipe) -> Differs:
    """The line for the user: the place that differs, by how much, and a setting that is right.

    Only a router's auxiliary loss may differ. Without it, recipes are tried with one other setting, then with two.
    """
    side, small = compared.side, compared.side.small
    if side.router:
        off, side = compared.own, replace(side, router=0.0)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"router_aux_loss_coef": 0.0})})
        compared = compare(side, recipe)
        if compared.is_right:
            return Differs(
                f"model.router_aux_loss_coef: the router's auxiliary loss differs: {small.name}, made small, has a "
                f"loss {off.loss:.1e} and gradients {off.gradients:.1e} from the library's own of one document at a "
                "time; set model.router_aux_loss_coef: 0"
            )
    others = [name for name in ELSEWHERE if name != attention_name(recipe)]
    changes = {f"model.attention: {name}": _changed(recipe, name, packing=recipe.data.packing) for name in others}
    if recipe.data.packing:
        changes["data.packing: false"] = _changed(recipe, recipe.model.attention, packing=False)
        for name in others:
            changes[f"model.attention: {name} and data.packing: false"] = _changed(recipe, name, packing=False)
    if compared.differences[KEPT].largest <= side.bound:
        setting, right = (
            str(recipe.training.activation_checkpointing).lower(),
            ["training.activation_checkpointing: false"],
        )
        place, part = f"training.activation_checkpointing: {setting}", "the recomputation of layers"
    else:
        right = [text for text, changed in changes.items() if _is_right(side, changed)]
        place, part = f"model.name_or_path: {recipe.model.name_or_path}", "its forward"
        if _is_right(side, recipe, by_logits=True):
            part = "the loss"
        elif "data.packing: false" in right:
            place, part = "data.packing: true", "packing"
        elif right:
            place, part = f"model.attention: {recipe.model.attention}", "attention"
            if right[0].endswith("data.packing: false"):
                part = "attention, and packing with any other,"
    remedy = f"set {right[0]}" if right else "choose another model"
    return Differs(
        f"{place}: {part} differs: {small.name}, made small, has a loss {compared.own.loss:.1e} and gradients "
        f"{compared.own.gradients:.1e} from the library's own of one document at a time, where {side.bound:.0e} is "
        f"rounding; {remedy}"
    )


def _changed(recipe: Recipe, attention: str, *, packing: bool) -> Recipe:
    """The recipe with this attention and packing."""
    section = recipe.model.model_copy(update={"attention": attention})
    return recipe.model_copy(update={"model": section, "data": recipe.data.model_copy(update={"packing": packing})})


def _is_right(side: LibrarySide, recipe: Recipe, *, by_logits: bool = False) -> bool:
    try:
        computed = side.computed_by(side.kits_model(recipe), recipe, by_logits=by_logits)
    except Exception:  # refused, or the model's own code fails: nothing to propose
        return False
    return side.difference_of(computed).largest <= side.bound
