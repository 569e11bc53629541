"""A run's number formats: the first start chooses those that the device computes fastest, later starts keep them."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from finetune.architecture.attention import AMPERE
from finetune.errors import EnvironmentMismatch
from finetune.launch.launcher import Launch
from finetune.measure.product_speed import product_seconds
from finetune.model.dtypes import COMPUTE, dtype_name
from finetune.recipe.mixed_precision import (
    BASE_FORMAT,
    MUCH_SLOWER,
    PRECISION,
    ChosenFormats,
    FastestFormat,
    fastest_by_flags,
    fastest_by_products,
    fastest_on_gpu,
    in_float32,
)
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.schema import Recipe
from finetune.run_folder.folder import read_state
from finetune.strategies.accelerator import device_of

BASE_FORMATS = ("bfloat16", "float16", "float32")


def choose_formats(loaded: LoadedRecipe, launch: Launch) -> tuple[LoadedRecipe, ChosenFormats]:
    """Settle `auto` for this rank's device, before anything is built. An existing run keeps its formats.

    Raises FinetuneError if the run's state cannot be read.
    """
    if not loaded.auto_formats:
        return loaded.formats_for(FastestFormat("bf16", ""))
    run_dir = Path(loaded.recipe.run_dir)
    began_with = _formats_of_run(run_dir) if loaded.recipe.training.resume == "auto" else None
    if began_with is not None:
        return loaded.with_formats(began_with, f"the run in {run_dir} began with it", kept=True)
    return loaded.formats_for(_fastest_on(device_of(launch)))


def _fastest_on(device: torch.device) -> FastestFormat:
    if device.type == "cpu":
        return fastest_by_products(fastest_by_flags(), *product_seconds([torch.bfloat16, torch.float32]))
    has_bfloat16 = torch.cuda.get_device_capability(device) >= AMPERE
    return fastest_on_gpu(torch.cuda.get_device_name(device), has_bfloat16=has_bfloat16)


def _formats_of_run(run_dir: Path) -> dict[str, str] | None:
    """The formats of the run in the folder; None if there is no run, or it records no formats."""
    identity = (read_state(run_dir) or {"identity": {}})["identity"]
    precision, base = identity.get(PRECISION), identity.get(BASE_FORMAT)
    if precision in COMPUTE and base in BASE_FORMATS:
        return {PRECISION: precision, BASE_FORMAT: base}
    return None


def slow_formats_note(recipe: Recipe, device: torch.device) -> str:
    """A line if this CPU emulates the recipe's compute format; empty if it does not, and on a GPU."""
    if device.type != "cpu":
        return ""
    formats: set[torch.dtype | None] = {COMPUTE[recipe.training.mixed_precision]}
    if recipe.lora is not None:
        formats.add(getattr(torch, recipe.model.dtype))
    if recipe.quantization is not None and recipe.quantization.load_in_4bit:
        formats.add(getattr(torch, recipe.quantization.bnb_4bit_compute_dtype))
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in formats]
    if not narrow:
        return ""
    *seconds, in_32_bits = product_seconds([*narrow, torch.float32])
    slowest = max(seconds)
    if slowest < MUCH_SLOWER * in_32_bits:
        return ""
    name = dtype_name(narrow[seconds.index(slowest)])
    return (
        f"this CPU emulates {name}: small products take {1e3 * slowest:.3g} ms in it and {1e3 * in_32_bits:.3g} in "
        f"float32; a new run is faster with {' '.join(in_float32(recipe))}"
    )


def check_same_formats(accelerator: Accelerator, recipe: Recipe, chosen: ChosenFormats) -> None:
    """Every rank computes in the same format. Raises EnvironmentMismatch if `auto` chose differently on two ranks.

    With several ranks this is a collective. They read the same recipe, so all take part or none.
    """
    if accelerator.num_processes == 1 or not chosen.keys:
        return
    names = [f"{one} {two}" for one in COMPUTE for two in BASE_FORMATS]
    own = names.index(f"{recipe.training.mixed_precision} {recipe.model.dtype}")
    found = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
    for rank, other in enumerate(found):
        if other != found[0]:
            # A run that has begun keeps its formats in its identity. A new one takes a format that no CPU emulates.
            precision, base = names[found[0]].split() if chosen.kept else ("no", "float32")
            raise EnvironmentMismatch(
                f"{' and '.join(chosen.keys)}: auto chose {names[found[0]]} on rank 0 and {names[other]} on rank "
                f"{rank}, whose devices differ; set {PRECISION}={precision} {BASE_FORMAT}={base} for all ranks"
            )
