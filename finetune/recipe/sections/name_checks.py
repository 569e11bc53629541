"""Checks a recipe's names for files, folders and repositories: a shell, a terminal and a disk must accept them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.output_stream import has_controls
from finetune.recipe.cross_checks import CrossCheck

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

LONGEST_NAME, LONGEST_PATH_BYTES = 255, 4096  # bytes, of Linux's disks
MOST_REPOSITORY = 96  # letters of a name on the Hub
REPOSITORY_PART = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)


def name_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """A mistake for each name that cannot be one, or that a command line would take for something else."""
    for key, name in _names(recipe):
        if has_controls(name):
            yield CrossCheck(key, "holds a control character", "write a name that can be seen and typed")
        elif any(len(part.encode(errors="replace")) > LONGEST_NAME for part in name.split("/")):
            yield CrossCheck(key, f"has a part of more than {LONGEST_NAME} bytes, which no disk takes", "shorten it")
        elif len(name.encode(errors="replace")) > LONGEST_PATH_BYTES:
            yield CrossCheck(key, f"is longer than {LONGEST_PATH_BYTES:,} bytes, which no disk takes", "shorten it")
        elif key == "output_dir" and name.startswith("-"):  # it is in the commands that are printed
            yield CrossCheck(key, "begins with a dash, which commands take for an option", f"write ./{name[:40]}")
    repository = recipe.hub.repo_id
    if repository and not is_repository(repository):
        remedy = "write owner/name of letters, digits, - _ and ., without -- .. or .git at its end"
        yield CrossCheck("hub.repo_id", "is not a repository name", remedy)


def _names(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield "model.name_or_path", recipe.model.name_or_path
    yield "model.adapter", recipe.model.adapter or ""
    yield "output_dir", recipe.output_dir or ""
    yield "accelerate_config", recipe.accelerate_config
    if "{" not in (template := recipe.data.chat_template or ""):
        yield "data.chat_template", template
    for section, entries in (("train", recipe.data.train), ("eval", recipe.data.eval_sets)):
        for number, entry in enumerate(entries):
            files = entry.data_files or []
            yield f"data.{section}.{number}.path", entry.path
            for name in [files] if isinstance(files, str) else files:
                yield f"data.{section}.{number}.data_files", name


def is_repository(name: str) -> bool:
    """Whether the Hub takes this name, owner/name, by its rules."""
    parts = name.split("/")
    valid = len(parts) == 2 and all(REPOSITORY_PART.fullmatch(part) for part in parts)
    return valid and len(name) <= MOST_REPOSITORY and not name.endswith((".git", ".ipynb"))
