"""The verb that compares: one recipe, trained once for each setting of any keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.cli.app import AsJson, Overrides, RecipeFile, run_verb, user_path
from finetune.files import check_output


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
