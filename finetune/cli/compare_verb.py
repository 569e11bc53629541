"""The verb that compares: one recipe, varied in its strategy or in any key."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune import preflight
from finetune.cli.app import AsJson, run_verb, user_path
from finetune.errors import FinetuneError
from finetune.files import check_output
from finetune.launch.script import write_script
from finetune.launch.slurm import array_script
from finetune.wording import counted

STEPS = 20
STRATEGIES = "zero1,zero2,zero2_offload,zero3,zero3_offload,fsdp2"  # where nothing is named


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe file, and what wins over it."),
    ] = None,
    lecture: Annotated[
        str | None,
        typer.Option(hidden=True),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Names of accelerate_configs/, with commas between.", show_default=STRATEGIES)
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B", help="Vary strategy, or any recipe key; repeated: the product.", show_default=False
        ),
    ] = None,
    rows: Annotated[str | None, typer.Option(hidden=True)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of each.", show_default=str(STEPS))] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=20, help="Run each row with so many seeds; shows mean and spread.")
    ] = 1,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks; all GPUs, or 2 on a CPU.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", parser=user_path, help="Output folder; next to the run folder.", show_default=False
        ),
    ] = None,
    only: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run row N alone.", show_default=False)] = None,
    array: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="FILE",
            help="Write Slurm's job array, a row each; runs nothing.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The same steps with other settings: memory, time, loss."""
    recipe, overrides = recipe_and_overrides(words or [])

    def work() -> dict[str, Any]:
        if lecture is not None:
            raise FinetuneError(f"--lecture: the lectures moved; in a checkout, run `python -m lectures {lecture}`")
        if rows is not None:
            raise FinetuneError("--rows: files of rows are gone; write --vary KEY=A,B, or compare in several calls")
        if recipe is None:
            raise FinetuneError("RECIPE: is missing; name a recipe file")
        if folder is not None:
            check_output(folder, "--output", folder=True)
        usual = strategies is None and not vary and seeds == 1
        asked = preflight.rows_of_options(vary or [], STRATEGIES if usual else strategies, seeds)
        words, count = _steps_in(overrides, steps)
        comparison = preflight.plan_comparison(recipe, words, asked, steps=count, processes=processes, folder=folder)
        if array is None:
            return {"ok": True, **preflight.run_and_report(comparison, quiet=as_json, only=only)}
        if only is not None:
            raise FinetuneError("--only: --array writes a job for each row; leave one of them out")
        gpus = max(row.recipe.budget.gpus for row in comparison.rows)
        if gpus and processes:
            gpus = processes
        axes = [word for each in vary or [] for word in ("--vary", each)]
        if usual or strategies:
            axes += ["--strategies", strategies or STRATEGIES]
        axes += ["--seeds", str(seeds), "--steps", str(count), "--processes", str(gpus or comparison.processes)]
        command = ["finetune", "compare", str(recipe), *words, *axes, "-o", str(comparison.folder)]
        names = [row.name for row in comparison.rows]
        write_script(array, array_script(command, f"compare-{recipe.stem}", names, gpus))
        if not as_json:
            print(f"{array}: {counted(len(names), 'job')}; submit: sbatch {shlex.quote(str(array))}")
        return {"ok": True, "file": str(array), "rows": names}

    run_verb(work, as_json=as_json)


def _steps_in(overrides: list[str], steps: int | None) -> tuple[list[str], int]:
    """The overrides without `training.max_steps`, which says the same as --steps, and the steps."""
    key = "training.max_steps="
    named = [word.removeprefix(key) for word in overrides if word.startswith(key)]
    if steps is None and named and named[-1].isdigit() and int(named[-1]) > 0:
        return [word for word in overrides if not word.startswith(key)], int(named[-1])
    return overrides, steps or STEPS


def recipe_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the recipe, unless it is `key=value`."""
    if not words or ("=" in words[0] and not Path(words[0]).is_file()):
        return None, words
    return user_path(words[0]), words[1:]
