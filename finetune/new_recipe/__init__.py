"""A recipe for somebody's own data and machine: `finetune init FILE`.

    propose(target, ...)               reads a sample, finds the columns, chooses model and settings
    print_proposal(proposal, console)  prints the findings, some rows, and the next three commands

Other packages import from here alone. Heavy imports wait inside the functions.

May import: training and the packages below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.new_recipe.proposal import Proposal as Proposal


def propose(
    target: str,
    *,
    columns: str | None = None,
    labels: str | None = None,
    model: str | None = None,
    gpus: str | None = None,
    output: Path | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    choose: Callable[[Sequence[str]], int] | None = None,
) -> Proposal:
    """Propose a recipe for a data file, a folder or a Hub data set, from a sample. Nothing is written.

    Args:
        columns: `instruction=frage,output=antwort`, or the same in YAML. None: found by content.
        labels: `up=true,down=false`: what the labels of judged answers say. None: by their words.
        model: A Hub name or a folder. None: an ungated model that fits.
        gpus: As in every `--gpus`. None: this machine's.
        output: The recipe's file. None: the data's name, in the working folder.
        encoding: A table's or text's code page. None: UTF-8, or what a byte order mark says.
        sheet: A workbook's sheet. None: the first one with a table.
        choose: Asks the user to choose a line, and returns its index. None: nobody can be asked.

    Raises FinetuneError: the file cannot be read or holds no rows, its columns are not clear and nobody can be asked,
    or no model is known to fit.
    """
    from finetune.new_recipe import proposal as module

    mappings = module.read_columns(columns), module.read_labels(labels)
    options = module.Options(*mappings, model, gpus, output, encoding, sheet)
    return module.propose(target, options, choose)


def print_proposal(proposal: Proposal, console: Console) -> None:
    """Print the findings, some rows as the model will see them, and the next commands."""
    from finetune.new_recipe.view import print_proposal as print_it

    print_it(proposal, console)
