"""The verb that compares: one recipe, trained once for each setting of any keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finetune import preflight
from finetune.cli.app import AsJson, run_verb, user_path
from finetune.errors import FinetuneError
from finetune.files import check_output

Gone = Annotated[str | None, typer.Option(hidden=True)]
_OWN_ARRAY = "in a job array of your own, run `finetune train RECIPE KEY=VALUE output_dir=DIR` for each setting"


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe file, and what wins over it."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Vary any recipe key; repeated: the product.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Seeds of each setting; shows mean and spread.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each.")] = 20,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="Output folder.", show_default=False)
    ] = None,
    strategies: Gone = None,
    array: Gone = None,
    only: Gone = None,
    processes: Gone = None,
    as_json: AsJson = False,
) -> None:
    """Train each setting for some steps and rank them: held-out loss, time, memory, traffic; a table and a picture."""
    recipe, overrides = recipe_and_overrides(words or [])
    gone = {
        "--strategies": (strategies, f"write --vary accelerate_config={strategies}"),
        "--array": (array, _OWN_ARRAY),
        "--only": (only, _OWN_ARRAY),
        "--processes": (processes, f"the recipe's budget says it: budget.gpus={processes}; on a CPU its strategy does"),
    }

    def work() -> dict[str, Any]:
        for option, (value, instead) in gone.items():
            if value is not None:
                raise FinetuneError(f"{option}: is gone; {instead}")
        if recipe is None:
            raise FinetuneError("RECIPE: is missing; name a recipe file")
        if folder is not None:
            check_output(folder, "--output", folder=True)
        asked = preflight.settings_of_rows(vary or [], seeds)
        comparison = preflight.plan_comparison(recipe, overrides, asked, steps=steps, folder=folder)
        return {"ok": True, **preflight.run_and_report(comparison, quiet=as_json)}

    run_verb(work, as_json=as_json)


def recipe_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the recipe, unless it is `key=value`."""
    if not words or ("=" in words[0] and not Path(words[0]).is_file()):
        return None, words
    return user_path(words[0]), words[1:]
