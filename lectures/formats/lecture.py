"""The lecture `formats`: a number of one's own in bits, formats over a real model's numbers, and a curve under each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.planner import changed
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.report.pictures import COLOURS, new_figure
from lectures.formats import rounding
from lectures.formats.bits import (
    ADDED,
    FLOAT_FORMATS,
    TIMES,
    binary_digits,
    fields_of,
    int8_of,
    meaning,
    numbers_of,
    range_rows,
)
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number
from lectures.real_model import RealModel, real_model, short_runs

# The notes' fields of 0.1: exponent and fraction.
NOTED = {"float16": ("01011", "0001100110"), "bfloat16": ("01111011", "0001100")}
# Each row trains the same adapters; what differs is the base's format and that of the computation.
CURVE_ROWS: Mapping[str, Sequence[str]] = {
    "fp32": ("model.dtype=float32", "training.mixed_precision=no", "quantization=null"),
    "bf16": ("model.dtype=bfloat16", "training.mixed_precision=bf16", "quantization=null"),
    "fp16": ("model.dtype=float16", "training.mixed_precision=fp16", "quantization=null"),
    "int8 base": ("model.dtype=bfloat16", "training.mixed_precision=bf16", "quantization={load_in_8bit: true}"),
    "NF4 base": ("model.dtype=bfloat16", "training.mixed_precision=bf16", "quantization={load_in_4bit: true}"),
}
Losses = Mapping[str, Sequence[float]]


def formats_lecture(asked: LectureRequest) -> LectureResult:
    """Raises FinetuneError for numbers that are none, and what a run of the recipe raises."""
    numbers, steps = numbers_of(asked.settings["numbers"]), whole_number(asked.settings, "steps")
    recipe = load_recipe(asked.recipe, asked.overrides, here=True).recipe
    asked.note("reading the model, and the gradients of one micro-batch in float32")
    weights, gradients = _model_numbers(recipe)
    rounded = {
        "weights": {name: rounding.rounded(weights, to) for name, to in rounding.WEIGHTS.items()},
        "gradients": {name: rounding.rounded(gradients, to) for name, to in rounding.GRADIENTS.items()},
    }
    exponents = {"weights": rounding.by_exponent(weights), "gradients": rounding.by_exponent(gradients)}
    del weights, gradients  # before other processes load the model
    losses, skipped = _losses(asked, recipe, steps)
    sections = [*_bits(numbers), _ranges(), _rounding(rounded), _curves(losses, skipped)]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "numbers": {repr(number): _number_facts(number) for number in numbers},
        "rounded": {kind: {name: vars(each) for name, each in rows.items()} for kind, rows in rounded.items()},
        "exponents": {
            kind: {str(rounding.LOWEST + at): count for at, count in enumerate(counts.tolist()) if count}
            for kind, counts in exponents.items()
        },
        "losses": dict(losses),
        "skipped": skipped,
    }
    return LectureResult(sections, facts, partial(_draw, exponents, losses))


def _model_numbers(recipe: Recipe) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Weights and gradients in float32, all of them trained."""
    plain = {"lora": None, "quantization": None, "training.mixed_precision": "no", "training.pure_bf16": False}
    plain |= {"training.activation_checkpointing": False, "model.adapter": None, "training.optim": "adamw"}
    real: RealModel = real_model(changed(recipe, plain))
    gradients = rounding.gradients(real)
    return [weight.detach() for weight in rounding.watched(real)], gradients


def _losses(asked: LectureRequest, recipe: Recipe, steps: int) -> tuple[Losses, dict[str, int]]:
    """Of each run the loss of every step, and the updates that were skipped for an overflow."""
    adapters = ("lora={}",) if recipe.lora is None else ()
    overrides = (*asked.overrides, *adapters)
    lines = short_runs(asked.recipe, overrides, CURVE_ROWS, asked.folder, steps=steps, at_once=3, note=asked.note)
    train = {name: [line for line in each if line["kind"] == "train"] for name, each in lines.items()}
    losses = {name: [line["loss"] for line in each] for name, each in train.items()}
    return losses, {name: sum(line["grad_norm"] is None for line in each) for name, each in train.items()}


def _number_facts(number: float) -> dict[str, Any]:
    largest = max(1.0, abs(number))
    result = {name: vars(fields_of(number, dtype)) for name, dtype in FLOAT_FORMATS.items()}
    return result | {"int8": vars(int8_of(number, largest)) | {"largest": largest}}


def _bits(numbers: Sequence[float]) -> list[Chapter]:
    sections = []
    for number in numbers:
        largest = max(1.0, abs(number))
        stored = {name: fields_of(number, dtype) for name, dtype in FLOAT_FORMATS.items()} | {
            f"int8, largest {largest:g}": int8_of(number, largest),
        }
        rows = [
            (name, each.sign, each.exponent or "-", each.fraction, f"{each.value:.10g}", _off(each.value, number))
            for name, each in stored.items()
        ]
        lines = columns(("format", "sign", "exponent", "fraction", "stored as", "off"), rows, left=4)
        sections.append(Chapter(f"{number!r} in bits, as torch stores it", lines))
        if number == 0.1:
            sections.append(_beside_the_notes(number))
    return sections


def _off(value: float, number: float) -> str:
    return f"{abs(value / number - 1):.1e}" if number else "0"


def _beside_the_notes(number: float) -> Chapter:
    """Their fraction fields are digits of the number, and not of what follows its leading 1."""
    rows = []
    for name, (exponent, fraction) in NOTED.items():
        ours, digits = fields_of(number, FLOAT_FORMATS[name]), binary_digits(number, len(fraction))
        rows.append(
            (name, exponent, ours.exponent, fraction, digits, ours.fraction, f"{meaning(exponent, fraction):g}")
        )
    head = ("format", "exponent: notes", "torch", "fraction: notes", "digits of 0.1", "torch", "notes' fields mean")
    lines = [
        *columns(head, rows, left=6),
        "The notes write the first binary digits of 0.1 = 0.000110011... into the fraction field. A float keeps those",
        "behind the leading 1 of 1.6 x 2^-4, rounded, so that no bit is spent on zeros: the exponent has counted them.",
    ]
    return Chapter("0.1 in the notes", lines)


def _ranges() -> Chapter:
    head = ("format", "sign", "exponent", "fraction", "smallest", "normal from", "largest", "next after 1: +", "sum")
    lines = [
        *columns(head, range_rows()),
        f"sum: 1 and {TIMES:,} times {ADDED:g}, one after another; 2 would be right. In bfloat16 each {ADDED:g} is",
        "rounded away: an update below 1/512 of a weight never moves it, one below 1/256 moves some weights.",
    ]
    return Chapter("Ranges, from torch.finfo", lines)


def _rounding(rounded: Mapping[str, Mapping[str, rounding.Rounded]]) -> Chapter:
    rows = [
        (kind, name, f"{100 * each.zero:.3f}", f"{100 * each.infinite:.3f}", f"{100 * each.error:.3f}")
        for kind, formats in rounded.items()
        for name, each in formats.items()
    ]
    head = ("numbers", "brought into", "become 0, %", "infinite, %", "error, %")
    return Chapter(
        f"The model's own numbers in each format, of the matrices of every {rounding.EVERY}rd layer",
        columns(head, rows, left=2),
        measured=True,
    )


def _curves(losses: Losses, skipped: Mapping[str, int]) -> Chapter:
    reference = losses["fp32"]
    shown = sorted({0, len(reference) // 2, len(reference) - 1})
    rows = []
    for name, each in losses.items():
        apart = statistics.fmean(abs(ours - first) for ours, first in zip(each, reference, strict=True))
        rows.append((name, *(f"{each[step]:.4f}" for step in shown), f"{apart:.4f}", f"{skipped[name]}"))
    head = ("run", *(f"step {step + 1}" for step in shown), "mean distance to fp32", "updates skipped")
    return Chapter("Loss of the same steps under each format", columns(head, rows), measured=True)


def _draw(exponents: Mapping[str, Tensor], losses: Losses, file: Path) -> None:
    """Histograms over powers of two with each format's range below them, and the curves."""
    figure = new_figure(figsize=(9.0, 8.0))
    top, bottom = figure.subplots(2, 1, height_ratios=[1.3, 1])
    place = range(rounding.LOWEST, rounding.HIGHEST + 1)
    for (kind, counts), colour in zip(exponents.items(), COLOURS, strict=False):
        share = [value or math.nan for value in (counts / counts.sum()).tolist()]
        top.step(place, share, where="mid", color=colour, label=kind)
        top.fill_between(place, share, 1e-9, step="mid", color=colour, alpha=0.25)
    top.set_yscale("log")
    top.set_ylim(1e-13, 1)
    top.set_xlim(-60, 20)
    for level, (name, dtype) in enumerate(FLOAT_FORMATS.items()):
        info = torch.finfo(dtype)
        least, most = math.log2(info.smallest_normal * info.eps), math.log2(info.max)
        height = 10 ** (-12.4 + level)
        top.plot([max(-60, least), min(20, most)], [height, height], color=COLOURS[3 + level], linewidth=6)
        top.annotate(f"{name}: 2^{least:.0f} to 2^{most:.0f}", (-8, height * 1.5), fontsize=9, ha="center")
    top.set_xlabel("size of a number, as a power of two")
    top.set_ylabel("share of the numbers")
    top.set_title("Weights and gradients of one micro-batch, and what formats reach", loc="left", fontsize=11)
    top.legend(frameon=False)
    for (name, each), colour in zip(losses.items(), COLOURS, strict=False):
        bottom.plot(range(1, len(each) + 1), each, color=colour, label=name, marker="o", markersize=3, linewidth=1.2)
    bottom.set_xlabel("optimizer step")
    bottom.set_ylabel("loss")
    bottom.set_title("The same steps under each format", loc="left", fontsize=11)
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
