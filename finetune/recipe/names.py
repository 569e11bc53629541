"""Names for files, folders and repositories: the limits that a shell, a terminal, a disk and the Hub set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from finetune.output_stream import has_controls, printable
from finetune.recipe.sections.base import CrossCheck
from finetune.recipe.yaml_text import shown

SHOWN_PATH = 300  # characters; a message shortens a longer path
LONGEST_NAME, LONGEST_PATH_BYTES = 255, 4096  # bytes, on Linux's disks
MOST_REPOSITORY = 96  # letters of a name on the Hub
REPOSITORY_PART = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)


def name_mistakes(names: Iterable[tuple[str, str]]) -> Iterator[CrossCheck]:
    """The names that a shell, a terminal or a disk cannot take. `names`: key and name."""
    for key, name in names:
        if has_controls(name):
            yield CrossCheck(key, "holds a control character", "write a name that can be seen and typed")
        elif any(len(part.encode(errors="replace")) > LONGEST_NAME for part in name.split("/")):
            yield CrossCheck(key, f"has a part longer than {LONGEST_NAME} bytes, which no disk takes", "shorten it")
        elif len(name.encode(errors="replace")) > LONGEST_PATH_BYTES:
            yield CrossCheck(key, f"is longer than {LONGEST_PATH_BYTES:,} bytes, which no disk takes", "shorten it")
        elif key == "output_dir" and name.startswith("-"):  # the printed commands hold it
            yield CrossCheck(key, "begins with a dash, so commands take it for an option", f"write ./{name[:40]}")


def is_repository(name: str) -> bool:
    """Whether the Hub takes this name, owner/name, by its rules."""
    parts = name.split("/")
    valid = len(parts) == 2 and all(REPOSITORY_PART.fullmatch(part) for part in parts)
    return valid and len(name) <= MOST_REPOSITORY and not name.endswith((".git", ".ipynb"))


def local_model_problem(name: str) -> str | None:
    """The problem with a model's folder; None if there is none, or if the name is a repository on the Hub.

    Only a folder's name has more than one slash, or a dot at its beginning.
    """
    if not (name.startswith((".", os.sep, "~")) or name.count("/") > 1 or os.path.isdir(name)):
        return None
    place = printable(name) if len(name) <= SHOWN_PATH else shown(name)
    remedy = "name a model's folder, or a repository of the Hub as owner/name"
    if os.path.isfile(os.path.join(name, "config.json")):
        return None
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        return f"{place} holds an adapter without its model; name the model that it was trained on"
    if os.path.isdir(name):
        return f"{place} has no config.json; {remedy}"
    if os.path.exists(name):
        return f"{place}: is a file; {remedy}"
    return f"{place}: no such folder (working folder: {os.getcwd()}); {remedy}"
