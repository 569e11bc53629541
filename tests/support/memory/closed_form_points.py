"""Points of a grid of models, methods, strategies and lengths: a recipe each, its trace and its closed form.

Points are drawn with a fixed seed, so that the recorded traces of benchmarks/closed_form.py are of the same ones.
"""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

from finetune.closed_form.estimate import estimate
from finetune.model.known_configs import full_config
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training

MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.3-70B",
    "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen3-4B",
    "HuggingFaceTB/SmolLM2-360M",
)
METHODS = ("full", "full pure", "lora", "lora pure", "qlora")
PLACES = (
    ("single", "80GB", 1),
    ("ddp", "4x80GB", 1),
    ("fsdp2", "2x24GB", 1),
    ("fsdp2", "8x80GB", 1),
    ("fsdp2", "8x80GB", 8),
    ("fsdp2_grad_op", "8x80GB", 1),
    ("hsdp", "8x80GB", 2),
)
LENGTHS = (512, 2048, 8192)
ROWS = (1, 4)
CHECKPOINTING: tuple[bool | int, ...] = (False, 2, True)


def points(count: int) -> list[tuple[Any, ...]]:
    """So many of all combinations, the same each time."""
    every = list(product(MODELS, METHODS, PLACES, LENGTHS, ROWS, CHECKPOINTING))
    return random.Random(0).sample(every, count)


def recipe_of(point: tuple[Any, ...], tile: int | None = None) -> tuple[Recipe, Gpus]:
    model, method, (strategy, gpus, nodes), length, rows, every = point
    four_bit = Quantization(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16") if method == "qlora" else None
    recipe = Recipe(
        accelerate_config=strategy,
        model=ModelSection(name_or_path=model, load_in_fp8=method == "lora fp8"),
        quantization=four_bit,
        lora=None if method.startswith("full") else Lora(),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=length),
        training=Training(
            global_batch_size=256,
            per_device_batch_size=rows,
            mixed_precision="bf16",  # not auto, which asks this machine's processor
            pure_bf16=method.endswith("pure"),
            activation_checkpointing=every,
            mlp_tile_tokens=tile,
        ),
    )
    return recipe, parse_gpus(gpus, nodes)


def key_of(point: tuple[Any, ...]) -> str:
    model, method, (strategy, gpus, nodes), length, rows, every = point
    return f"{model} {method} {strategy} {nodes}x{gpus} {rows}x{length} checkpointing={every}"


def traced(point: tuple[Any, ...], *, keeps_gradients: bool = False, tile: int | None = None) -> dict[str, Any]:
    recipe, gpus = recipe_of(point, tile)
    begun = time.perf_counter()
    planned = plan_recipe(recipe, gpus, keeps_gradients=keeps_gradients)
    return {
        "traced_bytes": planned.needed,
        "traced_peaks": {name: phase.peak.nbytes for name, phase in planned.phases.items()},
        "traced_reserved": planned.reserved,
        "traced_upper": planned.upper,
        "trace_seconds": round(time.perf_counter() - begun, 2),
    }


def closed(point: tuple[Any, ...], *, keeps_gradients: bool = False, tile: int | None = None) -> dict[str, Any]:
    recipe, gpus = recipe_of(point, tile)
    config = full_config(recipe.model.name_or_path)[0]
    begun = time.perf_counter()
    found = estimate(recipe, config, gpus, keeps_gradients=keeps_gradients)
    return {
        "closed_bytes": found.needed,
        "closed_peaks": found.peaks,
        "closed_upper": found.upper,
        "closed_milliseconds": round(1000 * (time.perf_counter() - begun), 2),
    }
