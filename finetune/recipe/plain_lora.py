"""Adapters that began as a part of their base.

peft subtracts that part from the base again. An engine without peft would add the adapter to the complete base.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from finetune.recipe.schema import Recipe


def why_not_plain(recipe: Recipe) -> str:
    """Why plain LoRA cannot hold the adapter's change: base plus a product of two matrices; empty if it can."""
    assert recipe.lora is not None
    if recipe.lora.use_dora:
        return "lora.use_dora: true scales each weight"
    if recipe.quantization is not None:
        return "quantization: the rest of each weight was quantised, and the weight itself was not"
    return ""


def only_by_peft(recipe: Recipe, run_dir: Path | str) -> str:
    """A warning if other engines would serve this run's adapter as another model; empty for other runs."""
    if recipe.lora is None or not recipe.lora.takes_from_the_base:
        return ""
    command = ["finetune", "export", str(run_dir), "--plain"]
    if why_not_plain(recipe):
        command = ["finetune", "merge", str(run_dir)]
    return (
        f"lora.init_lora_weights: {recipe.lora.init_lora_weights} took a part of the base into the adapter, so only "
        f"peft loads it rightly. For vLLM and others: {shlex.join(command)}"
    )
