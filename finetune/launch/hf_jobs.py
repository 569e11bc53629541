"""Hugging Face Jobs: the command of `finetune launch --on hf-jobs`, one machine that bills by the minute."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import FinetuneError
from finetune.launch.plan import LaunchPlan
from finetune.wording import counted


@dataclass(frozen=True)
class Flavour:
    """A machine that HF Jobs lends."""

    name: str  # of `hf jobs run --flavor`
    gpu: str = ""  # empty: none
    memory_gb: int = 0  # of one GPU, as its maker states it
    computes_float8: bool = False


# By memory, then by price. Without T4s, which have no bfloat16. `hf jobs hardware` lists them.
_FLAVOURS: dict[int, tuple[Flavour, ...]] = {
    0: (Flavour("cpu-upgrade"),),
    1: (
        Flavour("l4x1", "L4", 24, True),
        Flavour("a10g-small", "A10G", 24),
        Flavour("l40sx1", "L40S", 48, True),
        Flavour("a100-large", "A100", 80),
        Flavour("rtx-pro-6000", "RTX PRO 6000", 96, True),
        Flavour("h200", "H200", 141, True),
    ),
    2: (
        Flavour("a10g-largex2", "A10G", 24),
        Flavour("rtx-pro-6000x2", "RTX PRO 6000", 96, True),
        Flavour("h200x2", "H200", 141, True),
    ),
    4: (
        Flavour("l4x4", "L4", 24, True),
        Flavour("a10g-largex4", "A10G", 24),
        Flavour("l40sx4", "L40S", 48, True),
        Flavour("a100x4", "A100", 80),
        Flavour("rtx-pro-6000x4", "RTX PRO 6000", 96, True),
        Flavour("h200x4", "H200", 141, True),
    ),
    8: (
        Flavour("l40sx8", "L40S", 48, True),
        Flavour("a100x8", "A100", 80),
        Flavour("rtx-pro-6000x8", "RTX PRO 6000", 96, True),
        Flavour("h200x8", "H200", 141, True),
    ),
}


def flavour_of(plan: LaunchPlan) -> Flavour:
    """The first flavour with the budget's GPUs. Raises FinetuneError if there is none."""
    float8, needed = plan.loaded.recipe.model.load_in_fp8, 0.0
    if plan.gpus:
        needed = plan.loaded.recipe.budget.gpu_memory_gb
    for flavour in _FLAVOURS.get(plan.gpus, ()):
        if flavour.memory_gb >= needed and (flavour.computes_float8 or not float8):
            return flavour
    raise FinetuneError(
        f"budget: HF Jobs has no machine with {counted(plan.gpus, 'GPU', 'GPUs')} of {needed:g} GB; it has 1, 2, 4 or "
        "8 of up to 141 GB, so set budget.gpus to one of these"
    )


def hub_job(plan: LaunchPlan, head: Sequence[str], timeout: str) -> str:
    """The file's text: the command that submits the job.

    Args:
        head: Comments for its beginning.
        timeout: As `hf jobs run --timeout` takes it; the job is ended then.
    """
    flavour = flavour_of(plan)
    # The token's name alone: `hf` takes its value from this machine's login, and no file or history has it.
    lines = [f"hf jobs run --detach --flavor {flavour.name} --timeout {timeout} --secrets HF_TOKEN"]
    storage = plan.loaded.recipe.storage
    if storage is not None and storage.startswith("s3://"):
        lines += ["--secrets AWS_ACCESS_KEY_ID", "--secrets AWS_SECRET_ACCESS_KEY"]
    command, recipe = ["finetune", "train"], plan.shipped_recipe
    if recipe is None:
        # An own recipe travels in a variable, in letters that every shell and parser leaves alone.
        recipe = plan.loaded.path.name
        lines.append(f"--env RECIPE=\"$(base64 < {shlex.quote(str(plan.loaded.path))} | tr -d '\\n')\"")
        command = ["bash", "-c", 'base64 -d <<< "$RECIPE" > "./$1" && exec finetune train "./$1" "${@:2}"', "train"]
    lines.append(shlex.join([plan.options.image or "", *command, recipe, *plan.arguments]))
    text = ["#!/usr/bin/env bash", *head, "# Submit, where `hf auth login` was done: bash THIS_FILE"]
    if storage is None:
        text.append(
            "# A job's disk ends with it. With run.storage=hf://OWNER/NAME@BRANCH the next job goes on from there."
        )
    return "\n".join([*text, "", " \\\n  ".join(lines)]) + "\n"
