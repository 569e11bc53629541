"""The verbs that look at a recipe's data, and those that make a recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune import importers, new_recipe
from finetune.base.location import refuse_unreachable
from finetune.cli.app import AsJson, Overrides, RecipeFile, name_next, run_verb, ticking, user_path
from finetune.errors import EnvironmentMismatch
from finetune.files import check_output, write_text
from finetune.output_stream import rich_console
from finetune.recipe.loader import load_recipe


def preview(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("-n", "--rows", min=0, help="Rows shown token by token.")] = 3,
    html: Annotated[
        Path | None, typer.Option(parser=user_path, help="Write it as a page too.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows as the model sees them. Exit code 2: bad rows."""

    def work() -> dict[str, Any]:
        if html is not None:
            check_output(html, "--html")
        loaded = load_recipe(recipe, overrides or [], here=True).recipe
        refuse_unreachable(loaded.model.name_or_path, loaded.model.revision)  # before torch is imported
        with ticking() as begin:
            begin("reading and tokenising the rows")
            from finetune.report.preview import preview as look
            from finetune.report.preview_views import as_page, print_preview
            from finetune.training.batch_notes import notes_before_launch

            result = look(loaded, rows, lambda prepared: notes_before_launch(loaded, prepared))
        if html is not None:
            write_text(html, as_page(result, recipe.name))
        if not as_json:
            print_preview(result, rich_console())
            if result.ok:
                name_next(["finetune", "train", recipe, *(overrides or [])])
        return result.as_json() | ({} if result.ok else {"exit_code": 2})

    run_verb(work, as_json=as_json)


def _ask_which(lines: Sequence[str]) -> int:
    """Ask the user which line is meant. Returns its index."""
    typer.echo("The data may be read in several ways:")
    for number, line in enumerate(lines, 1):
        typer.echo(f"  {number}  {line}")
    while True:
        number = int(typer.prompt("Which one?", type=int, default=1))
        if 1 <= number <= len(lines):
            return number - 1
        typer.echo(f"Write a number from 1 to {len(lines)}.")


def init(
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="A data file, a folder, or a Hub data set.", show_default=False)
    ],
    columns: Annotated[
        str | None, typer.Option(help="Our columns to yours: 'instruction=frage,output=antwort'.", show_default=False)
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Judged answers: 'up=true,down=false'.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hub name or folder; chosen by memory.", show_default=False)
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="1x24GB, 4xL4, cpu; this machine's.", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", parser=user_path, help="The recipe; FILE's name.yaml.", show_default=False),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="A table's code page: cp1252, cp1254, mac_roman; UTF-8.", show_default=False)
    ] = None,
    sheet: Annotated[
        str | None, typer.Option(help="A workbook's sheet; the first with a table.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a recipe for your own data and this machine."""

    def work() -> dict[str, Any]:
        typer.echo(f"reading {target}", err=True)
        can_ask = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
        proposal = new_recipe.propose(
            target,
            columns=columns,
            labels=labels,
            model=model,
            gpus=gpus,
            output=output,
            encoding=encoding,
            sheet=sheet,
            choose=_ask_which if can_ask else None,
        )
        write_text(proposal.file, proposal.text)
        if not as_json:
            new_recipe.print_proposal(proposal, rich_console())
        return {"ok": True, **proposal.as_json()}

    run_verb(work, as_json=as_json)


def import_recipe(
    config: Annotated[
        Path, typer.Argument(parser=user_path, metavar="CONFIG", help="Another tool's YAML.", show_default=False)
    ],
    gpus: Annotated[
        str | None, typer.Option(help="GPUs it was written for: 4x24GB, 2x8xH100, cpu; one GPU.", show_default=False)
    ] = None,
    tool: Annotated[str | None, typer.Option(help="axolotl, llamafactory or trl.", show_default="by its keys")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="A file to write.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration from axolotl, LLaMA-Factory or TRL."""

    def work() -> dict[str, Any]:
        if output is not None:
            check_output(output, "--output")
        imported = importers.convert(config, tool=importers.known_tool(tool), gpus=gpus)
        if output is not None:
            importers.write_recipe(output, imported.text)
        if not as_json:
            typer.echo(
                "\n".join(importers.listed(imported.left_out)) if output else imported.text, nl=output is not None
            )
            if output:
                name_next(["finetune", "check", output])
        return {"ok": True, "file": output and str(output), **imported.as_json()}

    run_verb(work, as_json=as_json)


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(parser=user_path, metavar="[RECIPE]", help="Also what it needs.", show_default=False),
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hub what the token may do.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is this machine fit for a run? Exit code 4: it is not.

    Small trainings prove its GPUs, in a checkout: python benchmarks/gpu.py proofs
    """

    def work() -> dict[str, Any]:
        from finetune.doctor import as_text, examine_machine

        loaded = load_recipe(recipe, here=True) if recipe else None
        findings = []
        for finding in examine_machine(loaded, online=online):
            findings.append(finding)
            if not as_json:
                typer.echo(as_text(finding))
        bad = any(finding.state == "bad" for finding in findings)
        code = {"exit_code": EnvironmentMismatch.exit_code} if bad else {}
        return {"ok": not bad, "findings": [vars(finding) for finding in findings], **code}

    run_verb(work, as_json=as_json)
