"""The verb that trains. The recipe is checked before anything heavy is imported."""

from __future__ import annotations

import sys
from typing import Any

from finetune.cli.app import Overrides, RecipeFile, run_verb, say
from finetune.launch.plan import plan_launch
from finetune.paths import TRAIN_SCRIPT
from finetune.recipe.loader import load_recipe


def train(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train the recipe on this machine, on all its ranks. Ctrl-C saves."""
    words = [str(recipe), *(overrides or [])]

    def work() -> dict[str, Any]:
        from finetune.launch.launcher import take_out_left_over
        from finetune.launch.local_ranks import is_rank_already, ranks_here, run_ranks

        load_recipe(recipe, words[1:], here=True)  # reports mistakes; each rank reads it again, train.py
        if left_over := take_out_left_over():
            say(left_over, err=True)
        if is_rank_already():
            return {"exit_code": train_here(words)}
        plan = plan_launch(recipe, words[1:], launcher="torchrun")
        count = ranks_here(plan)
        if count == 1:
            return {"exit_code": train_here(words)}
        command = [sys.executable, str(TRAIN_SCRIPT), *words]
        return {"exit_code": run_ranks(command, count, on_cpu=not plan.gpus)}

    run_verb(work, as_json=False)


def train_here(words: list[str]) -> int:
    """Train in this process; returns the trainer's exit code."""
    from finetune.train import process_main

    return process_main(words)
