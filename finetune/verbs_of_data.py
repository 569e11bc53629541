"""The verbs that look at a recipe's data, and those that make a recipe. Heavy imports inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.durable import write_text
from finetune.recipe_file import load_recipe
from finetune.verbs import AsJson, Overrides, RecipeFile, run_verb


def preview(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("-n", "--rows", min=0, help="Rows shown token by token.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write it as a page too.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """What will be learned? Rows as the model sees them, and findings over all data. Exit code 2 if refused."""

    def work() -> dict[str, Any]:
        loaded = load_recipe(recipe, overrides or []).recipe
        from rich.console import Console

        from finetune.pages.preview import preview as look
        from finetune.pages.preview_views import as_page, show

        found = look(loaded, rows)
        if html is not None:
            write_text(html, as_page(found, recipe.name))
        if not as_json:
            show(found, Console())
        return found.as_json() | ({} if found.ok else {"exit_code": 2})

    run_verb(work, as_json=as_json)
