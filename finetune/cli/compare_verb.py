"""The verb that compares: strategies over one recipe, or what a lecture asks. Heavy imports inside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.cli.app import AsJson, run_verb, user_path
from finetune.errors import FinetuneError


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe file, and what wins over it."),
    ] = None,
    lecture: Annotated[
        str | None,
        typer.Option(help="A lecture instead, over its own recipe or yours: docs/learn/.", show_default=False),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Names of accelerate_configs/, with commas between.")
    ] = "zero1,zero2,zero2_offload,zero3,zero3_offload,fsdp2",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each.")] = 20,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks; all GPUs, or 2 on a CPU.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", parser=user_path, help="Output folder; next to the run folder.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The same steps under several strategies: memory per phase, time, traffic; a table and a picture."""
    recipe, overrides = recipe_and_overrides(words or [])

    def work() -> dict[str, Any]:
        if lecture is not None:
            from finetune.lectures.command import hold_lecture

            text, facts = hold_lecture(lecture, recipe, overrides, folder, note=partial(typer.echo, err=True))
            if not as_json:
                typer.echo(text)
            return {"ok": True, **facts}
        if recipe is None:
            raise FinetuneError("RECIPE: is missing; name a recipe file, or a lecture with --lecture NAME")
        from finetune.preflight.compare import plan_comparison
        from finetune.preflight.compare_report import run_and_report

        comparison = plan_comparison(
            recipe, overrides, strategies=strategies, steps=steps, processes=processes, folder=folder
        )
        return {"ok": True, **run_and_report(comparison, quiet=as_json)}

    run_verb(work, as_json=as_json)


def recipe_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the recipe, unless it is `key=value`."""
    if not words or ("=" in words[0] and not Path(words[0]).is_file()):
        return None, words
    return user_path(words[0]), words[1:]
