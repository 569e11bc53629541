"""The lecture `memory`: bytes a parameter, by three ways of keeping numbers and by the plan of one's own recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import planner
from finetune.closed_form.constants import (
    CAST_WEIGHTS,
    COMPONENTS,
    GRADIENTS,
    MASTERS,
    OPTIMIZER_STATE,
    PARAMETERS,
    UNSHARDED_GRADIENTS,
)
from finetune.closed_form.recomputation import choose_recomputation
from finetune.model.known_configs import config_if_known, planned_config
from finetune.planner import Plan, changed
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.report.pictures import COLOURS, new_figure
from lectures.output import Chapter, LectureRequest, LectureResult, columns

HALF, SINGLE = torch.bfloat16.itemsize, torch.float32.itemsize
# Bytes of one parameter: weights as they are computed with, masters, gradients in 16 and in 32 bits, AdamW's moments.
# The rows and their sums are those of Megatron Core's page on its distributed optimizer ("non-distributed optim").
WAYS = {
    "float32 throughout": (SINGLE, 0, 0, SINGLE, 2 * SINGLE),
    "16-bit weights, float32 gradients": (HALF, SINGLE, 0, SINGLE, 2 * SINGLE),
    "16-bit weights and gradients": (HALF, SINGLE, HALF, SINGLE, 2 * SINGLE),
}
TERMS = ("weights", "masters", "16-bit grads", "float32 grads", "moments")
# What belongs to parameters, whatever the batch; a cast weight is the 16-bit copy of a float32 one.
STATES = (PARAMETERS, MASTERS, CAST_WEIGHTS, GRADIENTS, UNSHARDED_GRADIENTS, OPTIMIZER_STATE)
INT8 = {"quantization": {"load_in_8bit": True}, "lora": {}}
VARIANTS: dict[str, dict[str, Any]] = {
    "as written": {},
    "float32": {"training.mixed_precision": "no", "training.pure_bf16": False},
    "bf16 copies": {"training.mixed_precision": "bf16", "training.pure_bf16": False},
    "all bf16": {"training.mixed_precision": "bf16", "training.pure_bf16": True},
    "int8 + LoRA": INT8,
}
# The notes' slide for one billion parameters: bytes of a number, GB of the weights, GB of training.
NOTES = {"float32": (4, 4, 80), "all bf16": (2, 2, 40), "int8 + LoRA": (1, 1, 20)}


@dataclass(frozen=True)
class MemoryVariant:
    """A recipe as it is, or with its numbers kept in another way, and its plan."""

    name: str
    recipe: Recipe
    planned: Plan

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes at the peak, by component."""
        return self.planned.peak[1].parts

    @property
    def states(self) -> int:
        return sum(self.parts.get(name, 0) for name in STATES)

    @property
    def total(self) -> int:
        return self.planned.peak[1].nbytes


def memory_lecture(asked: LectureRequest) -> LectureResult:
    """Plans of the recipe and of its variants. Raises FinetuneError, of the recipe or of a model that is not known."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    recipe = choose_recomputation(recipe, config_if_known(recipe.model), gpus_of(recipe.budget)).recipe
    count = parameter_count(recipe)
    variants = [_planned(name, each, asked) for name, each in _variants(recipe).items()]
    sections = [_ways(), _components(recipe, count, variants), *_beside_the_notes(count, variants)]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "parameters": count,
        "ways": {name: dict(zip(TERMS, terms, strict=True)) for name, terms in WAYS.items()},
        "variants": {each.name: _facts(each) for each in variants},
        "notes_gb_of_1e9": {name: {"weights": gb, "training": most} for name, (_, gb, most) in NOTES.items()},
    }
    return LectureResult(sections, facts, partial(_draw, count, variants, recipe.model.name_or_path))


def parameter_count(recipe: Recipe) -> int:
    """Weights of the base model, each once; from its configuration alone."""
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def _variants(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe and each variant that is valid and differs from all before it."""
    result: dict[str, Recipe] = {}
    for name, changes in VARIANTS.items():
        if changes is INT8 and recipe.quantization is not None:
            continue
        try:
            variant = changed(recipe, {"lora": recipe.lora or {}, **changes} if changes is INT8 else changes)
        except ValidationError:
            continue
        if variant not in result.values():
            result[name] = variant
    return result


def _planned(name: str, recipe: Recipe, asked: LectureRequest) -> MemoryVariant:
    asked.note(f"planning {asked.recipe.stem}, {name}")
    return MemoryVariant(name, recipe, planner.plan(recipe, gpus_of(recipe.budget)))


def _facts(variant: MemoryVariant) -> dict[str, Any]:
    phase = variant.planned.peak[0]
    return {"phase": phase, "parts": dict(variant.parts), "state_bytes": variant.states, "peak_bytes": variant.total}


def _ways() -> Chapter:
    rows = [(name, *map(str, terms), str(sum(terms))) for name, terms in WAYS.items()]
    lines = columns(("bytes of one parameter under AdamW", *TERMS, "sum"), rows)
    return Chapter("Where 16, 18 and 20 come from (rows: Megatron Core's page on its distributed optimizer)", lines)


def _components(recipe: Recipe, count: int, variants: Sequence[MemoryVariant]) -> Chapter:
    """Bytes a parameter, by component of the plan's peak."""
    shown = [name for name in COMPONENTS if any(each.parts.get(name, 0) >= count // 500 for each in variants)]
    own, others = [name for name in shown if name in STATES], [name for name in shown if name not in STATES]

    def row(title: str, figures: Sequence[float]) -> tuple[str, ...]:
        return title, *(f"{figure / count:.2f}" for figure in figures)

    def rows_of(names: Sequence[str]) -> list[tuple[str, ...]]:
        return [row(f"  {name}", [each.parts.get(name, 0) for each in variants]) for name in names]

    rows = [
        *rows_of(own),
        row("of parameters", [each.states for each in variants]),
        *rows_of(others),
        row("all tensors", [each.total for each in variants]),
    ]
    tokens = recipe.training.rows_at_once * recipe.data.max_length
    title = f"{recipe.model.name_or_path}: {count:,} parameters, micro-batches of {tokens:,} tokens"
    peaks = ", ".join(f"{each.name} in {each.planned.peak[0]}" for each in variants)
    lines = columns(("planned bytes a parameter, at the peak", *(each.name for each in variants)), rows)
    return Chapter(title, [*lines, f"The peak is: {peaks}."])


def _beside_the_notes(count: int, variants: Sequence[MemoryVariant]) -> list[Chapter]:
    """The notes' "about 20 times the weights", for 1e9 parameters, beside the plans."""
    rows = []
    for each in variants:
        if each.name not in NOTES:
            continue
        width, weights, most = NOTES[each.name]
        each_weight = [nbytes / count for nbytes in (each.states, each.total)]
        planned = [f"{figure:.1f}" for nbytes in each_weight for figure in (nbytes, nbytes / width)]
        rows.append((each.name, f"{weights}", f"{most}", f"{most / weights:.0f}", *planned))
    if not rows:
        return []
    head = ("GB for 1e9 parameters", "weights", "notes", "times", "states", "times", "peak", "times")
    lines = [
        *columns(head, rows),
        "notes: the training memory on their slide. states, peak: the plan's bytes a parameter from above.",
        "The course counts weights 4, gradients 4, AdamW 8 and activations 8: 24 bytes in float32. 20 of them",
        "are not weights. 20 bytes are 5 times a float32 weight; 20 times would be 80 bytes.",
    ]
    return [Chapter("Beside the notes: training takes about 20 times the weights' memory", lines)]


def _draw(count: int, variants: Sequence[MemoryVariant], name: str, file: Path) -> None:
    """Stacked bars: bytes a parameter by component."""
    figure = new_figure(figsize=(9.0, 5.0))
    axes = figure.subplots()
    bottoms = [0.0] * len(variants)
    shown = [part for part in COMPONENTS if any(each.parts.get(part, 0) >= count // 500 for each in variants)]
    for index, part in enumerate(shown):
        heights = [each.parts.get(part, 0) / count for each in variants]
        hatch = "" if part in STATES else "///"
        colour = COLOURS[index % len(COLOURS)]
        axes.bar([each.name for each in variants], heights, 0.6, bottoms, label=part, color=colour, hatch=hatch)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    for place, (each, top) in enumerate(zip(variants, bottoms, strict=True)):
        rest = each.total - each.states
        text = f"{each.states / count:.1f} + {rest / count:.1f} = {each.total / count:.1f}"
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylabel("bytes a parameter at the peak")
    axes.set_title(f"{name}: bytes of parameters + all else (hatched) at the peak", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
