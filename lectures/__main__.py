"""`python -m lectures NAME`, in a checkout: hold one lecture over its own recipe or yours. See docs/learn/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.cli.app import AsJson, run_verb, user_path
from finetune.launch.cpu_memory import bound_libraries
from finetune.output_stream import plain_output
from lectures.command import LECTURES, run_lecture


def hold(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(LECTURES)}.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, the lecture's settings, recipe overrides."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="Output folder.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold one lecture: a question, its answer in figures and pictures."""

    def work() -> dict[str, Any]:
        recipe, overrides = recipe_and_overrides(words or [])
        text, facts = run_lecture(name, recipe, overrides, folder, note=partial(typer.echo, err=True))
        if not as_json:
            typer.echo(text)
        return {"ok": True, **facts}

    run_verb(work, as_json=as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """A command line without `python -m lectures`. Returns the exit code."""
    eyes = sys.stdout.isatty() and sys.stderr.isatty()  # no frames in a file or a pipe
    app = typer.Typer(rich_markup_mode="rich" if eyes else None, add_completion=False, pretty_exceptions_enable=False)
    app.command()(hold)
    try:
        with plain_output():
            app(args=None if argv is None else list(argv), prog_name="python -m lectures")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def recipe_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the recipe, unless it is `key=value`."""
    if not words or ("=" in words[0] and not Path(words[0]).is_file()):
        return None, words
    return user_path(words[0]), words[1:]


if __name__ == "__main__":
    bound_libraries()  # before torch loads
    sys.exit(main())
