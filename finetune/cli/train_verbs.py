"""The verbs that train: a recipe once, or once for each setting. Mistakes are reported before heavy imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.cli.app import AsJson, Overrides, RecipeFile, run_verb, say, user_path
from finetune.files import check_output
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


def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Vary any recipe key; repeated: the product.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Seeds of each setting; shows mean and spread.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each.")] = 20,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="Output folder.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The same steps with other settings: memory, time, loss."""

    def work() -> dict[str, Any]:
        from finetune.compare import plan_comparison, run_and_report, settings_of_rows

        if folder is not None:
            check_output(folder, "--output", folder=True)
        settings = settings_of_rows(vary or [], seeds)
        comparison = plan_comparison(recipe, overrides or [], settings, steps=steps, folder=folder)
        return {"ok": True, **run_and_report(comparison, quiet=as_json)}

    run_verb(work, as_json=as_json)
