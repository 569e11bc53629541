"""The lecture `qlora`: full, LoRA and QLoRA; each part's memory, planned at full size, tracked on a small model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

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
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.measure.units import GIB
from finetune.model.known_configs import config_if_known
from finetune.output_stream import silenced
from finetune.planner import NF4, Plan, changed, worst_batches
from finetune.recipe.gpus import Gpus, gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Recipe, Training
from lectures.local_ranks import figures_of_ranks
from lectures.output import Chapter, LectureRequest, LectureResult, columns
from lectures.qlora.picture import draw_parts
from lectures.qlora.small_model import (
    LAYERS,
    RECIPE_FILE,
    TOKENS,
    WIDTH,
    PartBytes,
    planned_parts,
    save_small_llama,
)

WITHOUT: dict[str, Any] = {"quantization": None, "training.pure_bf16": False, "training.optim": "adamw"}
NF4_BASE = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
PAGED = "QLoRA, paged AdamW"
WAYS_TO_TRAIN: dict[str, dict[str, Any]] = {
    "full": WITHOUT | {"lora": None},
    "LoRA": WITHOUT,
    "QLoRA": WITHOUT | {"quantization": NF4_BASE},
    PAGED: WITHOUT | {"quantization": NF4_BASE, "training.optim": "paged_adamw_32bit"},
}
ON_CPU = ("full", "LoRA", "QLoRA")  # a CPU has no paged memory
PLAIN_NF4 = 0.5 + 4 / 64  # bytes a weight with a float32 scale for each block of 64
# The rows of the table at full size; what a component of the plan is not named in is in the last.
FULL_SIZE_PARTS: dict[str, tuple[str, ...]] = {
    "weights": (PARAMETERS, MASTERS),
    "16-bit copies": (CAST_WEIGHTS,),
    "gradients": (GRADIENTS, UNSHARDED_GRADIENTS),
    "optimizer states": (OPTIMIZER_STATE,),
}
FULL_SIZE_PARTS["activations, all else"] = tuple(
    name for name in COMPONENTS if name not in sum(FULL_SIZE_PARTS.values(), ())
)
SMALL_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "left": "left by forward",
    "peak": "all, at the peak",
}


@dataclass(frozen=True)
class FullSize:
    """One way to train the recipe's model: its plan, or why there is none."""

    planned: Plan | None
    reason: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each of FULL_SIZE_PARTS at the peak."""
        found = self.planned.peak[1].parts if self.planned else {}
        return {name: sum(found.get(each, 0) for each in components) for name, components in FULL_SIZE_PARTS.items()}

    @property
    def host(self) -> int:
        """Bytes in host memory at the update: the pages of a paged optimizer."""
        return self.planned.host.get("step", 0) if self.planned else 0

    def as_json(self) -> dict[str, Any]:
        if self.planned is None:
            return {"reason": self.reason}
        name, peak = self.planned.peak
        figures = {"phase": name, "parts": self.parts, "components": peak.parts, "peak_bytes": peak.nbytes}
        return figures | {"host_bytes": self.host, "needed_bytes": self.planned.needed, "fits": self.planned.fits}


@dataclass(frozen=True)
class SmallSize:
    """One way to train the small model: both times the bytes of each part."""

    planned: PartBytes
    tracked: PartBytes


def qlora_lecture(asked: LectureRequest) -> LectureResult:
    """Four plans, and three trainings of a small model. Raises FinetuneError, of the recipe; EnvironmentMismatch where
    a training fails, as it does without bitsandbytes."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    recipe = recipe if recipe.lora else changed(recipe, {"lora": {}})
    gpus = gpus_of(recipe.budget)
    full_size = {name: plan_way(asked, recipe, name, gpus) for name in WAYS_TO_TRAIN}
    assert recipe.lora is not None
    count, small_size = _small_sizes(asked, recipe.lora.r)
    sections = [_planned(recipe, full_size, gpus), _bits(full_size), beside_each_other(count, small_size)]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "planned": {name: each.as_json() for name, each in full_size.items()},
        "small_weights": count,
        "small": {
            name: {"planned": vars(each.planned), "tracked": vars(each.tracked)} for name, each in small_size.items()
        },
    }
    picture = partial(draw_parts, _bars(full_size), small_bars(small_size), recipe.model.name_or_path, gpus)
    return LectureResult(sections, facts, picture)


def plan_way(asked: LectureRequest, recipe: Recipe, name: str, gpus: Gpus | None) -> FullSize:
    asked.note(f"planning {asked.recipe.stem}, {name}")
    try:
        config = config_if_known(recipe.model)
        variant = choose_recomputation(changed(recipe, WAYS_TO_TRAIN[name]), config, gpus).recipe
        return FullSize(planner.plan(variant, gpus))
    except ValidationError as error:
        return FullSize(None, str(error.errors()[0]["msg"]))
    except EnvironmentMismatch as error:
        return FullSize(None, str(error))


def _small_sizes(asked: LectureRequest, rank: int) -> tuple[int, dict[str, SmallSize]]:
    """The number of the small model's weights, and its trainings."""
    result = {}
    with tempfile.TemporaryDirectory(prefix="finetune-qlora-") as name:
        folder = Path(name)
        with silenced():
            count = save_small_llama(folder / "model")
        for way in ON_CPU:
            asked.note(f"training a small model, {way}")
            recipe = changed(small_recipe(folder / "model", rank), WAYS_TO_TRAIN[way])
            (folder / RECIPE_FILE).write_text(recipe.model_dump_json(), "utf-8")
            tracked = figures_of_ranks("qlora", "lectures.qlora.small_model", folder, 1)[0]
            planned = planner.plan(recipe, None, batches=worst_batches(recipe, 1))
            result[way] = SmallSize(planned_parts(planned), PartBytes(**tracked))
    return count, result


def small_recipe(model: Path, rank: int) -> Recipe:
    """One row a step, adapters on all linear layers, nothing recomputed."""
    return Recipe(
        model=ModelSection(name_or_path=str(model), dtype="bfloat16"),
        lora=Lora(r=rank),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=TOKENS),
        training=Training(global_batch_size=1, per_device_batch_size=1, activation_checkpointing=False),
    )


def _planned(recipe: Recipe, full_size: Mapping[str, FullSize], gpus: Gpus | None) -> Chapter:
    planned = {name: each.planned for name, each in full_size.items() if each.planned}
    if not planned:
        raise FinetuneError(next(each.reason for each in full_size.values()))

    def row(title: str, figures: Mapping[str, int]) -> tuple[str, ...]:
        return title, *(f"{nbytes / GIB:.2f}" for nbytes in figures.values())

    rows = [row(part, {name: full_size[name].parts[part] for name in planned}) for part in FULL_SIZE_PARTS]
    rows += [
        row("all tensors", {name: each.peak[1].nbytes for name, each in planned.items()}),
        row("in host memory", {name: full_size[name].host for name in planned}),
    ]
    if gpus is not None:
        rows.append((f"fits {gpus.gb:g} GB", *("yes" if each.fits else "no" for each in planned.values())))
    refused = [f"{name}: is not planned: {each.reason}" for name, each in full_size.items() if not each.planned]
    tokens = recipe.training.rows_at_once * recipe.data.max_length
    title = f"{recipe.model.name_or_path}, micro-batches of {tokens:,} tokens: planned GiB of a GPU at the peak"
    peaks = ", ".join(f"{name} in {each.peak[0]}" for name, each in planned.items())
    return Chapter(title, [*columns(("", *planned), rows), f"The peak is: {peaks}.", *refused])


def _bits(full_size: Mapping[str, FullSize]) -> Chapter:
    """Where QLoRA's bytes a weight come from: NF4 in blocks of 64, scales of 4 bytes or quantised in blocks of 256."""
    rows = [
        ("bfloat16", "2", "16.00"),
        ("NF4, scales in float32", "1/2 + 4/64", f"{8 * PLAIN_NF4:.2f}"),
        ("NF4, scales quantised too", "1/2 + 1/64 + 4/(64 x 256)", f"{8 * NF4:.2f}"),
    ]
    lines = columns(("a base weight", "bytes", "bits"), rows, left=2)
    saved = f"Double quantisation saves {8 * (PLAIN_NF4 - NF4):.2f} bits a weight"
    lora, qlora, paged = (full_size[name] for name in ("LoRA", "QLoRA", PAGED))
    if lora.planned and qlora.planned:
        less = lora.parts["weights"] - qlora.parts["weights"]
        weights = less / (2 - NF4)  # those that went from 2 bytes to NF4's
        lines.append(
            f"{saved}: {weights * (PLAIN_NF4 - NF4) / GIB:.2f} GiB of the {less / GIB + weights * NF4 / GIB:.2f} in "
            f"bfloat16; {weights / 1e9:.2f}e9 weights are in 4 bits."
        )
    if paged.planned and qlora.planned:
        moved = qlora.parts["optimizer states"] - paged.parts["optimizer states"]
        lines += [
            f"A paged AdamW has {moved / GIB:.2f} GiB of the moments in CUDA's managed memory, whose pages go to the",
            "host when the GPU is full and come back for the update; the plan counts them on the host. Moments of",
            "fewer than 100,000 elements have no pages (bitsandbytes).",
        ]
    return Chapter("Bits of a base weight, double quantisation, pages", lines)


def beside_each_other(count: int, small_size: Mapping[str, SmallSize]) -> Chapter:
    rows = []
    for name, each in small_size.items():
        for key, title in SMALL_PARTS.items():
            planned, tracked = getattr(each.planned, key), getattr(each.tracked, key)
            rows.append((name, title, f"{planned:,}", f"{tracked:,}"))
    lines = [
        *columns(("bytes", "part", "planned", "tracked"), rows, left=2),
        f"A Llama of {LAYERS} layers of width {WIDTH}, {count:,} weights; one row of {TOKENS} tokens; nothing "
        "recomputed.",
        "left by forward, for backward: activations, the loss's gradient, 16-bit copies of trained float32 weights.",
    ]
    return Chapter("The plan and a training on this CPU", lines, measured=True)


def _bars(full_size: Mapping[str, FullSize]) -> dict[str, dict[str, int]]:
    return {name: each.parts for name, each in full_size.items() if each.planned}


def small_bars(small_size: Mapping[str, SmallSize]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Plan and tracked parts of each way, by the names of the table."""
    return {
        name: tuple(  # type: ignore[misc]
            {title: getattr(parts, key) for key, title in SMALL_PARTS.items() if key != "peak"}
            for parts in (each.planned, each.tracked)
        )
        for name, each in small_size.items()
    }
