"""Adapters that began as a part of their base. Engines without peft would add them to the whole base."""

from __future__ import annotations

import shlex
from pathlib import Path

from finetune.recipe.schema import Recipe


def why_not_plain(recipe: Recipe) -> str:
    """Why the adapter's change is not a product of two matrices added to the base; empty if it is one."""
    assert recipe.lora is not None
    if recipe.lora.use_dora:
        return "lora.use_dora: true scales each weight"
    if recipe.quantization is not None:
        return "quantization: the rest of each weight was quantised, and the weight itself was not"
    return ""


def only_by_peft(recipe: Recipe, run_dir: Path | str) -> str:
    """A line for a run with an adapter that other engines would serve as another model; empty for other runs."""
    if recipe.lora is None or not recipe.lora.takes_from_the_base:
        return ""
    command = (
        ["finetune", "merge", str(run_dir)]
        if why_not_plain(recipe)
        else ["finetune", "export", str(run_dir), "--plain"]
    )
    return (
        f"lora.init_lora_weights: {recipe.lora.init_lora_weights} took a part of the base into the adapter, so only "
        f"peft loads it rightly. For vLLM and others: {shlex.join(command)}"
    )
