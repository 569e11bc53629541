"""Configurations of other trainers (axolotl, LLaMA-Factory, TRL) become recipes: `finetune import`.

    imported = convert(Path("lora.yaml"), tool=None, gpus="4x80GB")
    print("\\n".join(listed(imported.left_out)))    # settings that the recipe does not have, and why
    write_recipe(Path("recipe.yaml"), imported.text)

Other packages import this module alone. Its functions import what they need when they are called.

May import: recipe, files, errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.errors import FinetuneError
from finetune.files import write_text

if TYPE_CHECKING:
    from finetune.recipe.foreign_keys import Tool

__all__ = ["Imported", "LeftOut", "Level", "convert", "known_tool", "listed", "write_recipe"]

MARK = "# Made by `finetune import` from "  # a recipe's first words
# differs: without the key the training differs; look: a person must decide; same: the training is the same.
Level = Literal["differs", "look", "same"]


@dataclass(frozen=True)
class LeftOut:
    """A key of the tool that the recipe lacks, or has with another value, and why."""

    key: str
    value: Any
    level: Level
    reason: str


@dataclass(frozen=True)
class Imported:
    """A recipe's text, the values it carries over and the keys that were left out."""

    tool: Tool
    text: str
    carried: Mapping[str, tuple[Any, str]]  # dotted recipe key -> value, and the tool's key it came from
    left_out: tuple[LeftOut, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "recipe": self.text,
            "carried": {key: {"value": value, "from": origin} for key, (value, origin) in self.carried.items()},
            "left_out": [vars(entry) for entry in self.left_out],
        }


def convert(file: Path, *, tool: Tool | None = None, gpus: str | None = None) -> Imported:
    """The recipe that trains as `file` does on these GPUs (`4x80GB`, as for every `--gpus`). None: one GPU of any size.

    Without `tool`, the file's keys decide whose configuration it is. Raises RecipeError for a file that cannot be read,
    is no known tool's, or describes another kind of training.
    """
    from finetune.importers.conversion import convert_file

    return convert_file(file, tool, gpus)


def known_tool(name: str | None) -> Tool | None:
    """The tool of this name, however it is spelt (`LLaMA-Factory`); None for None. Raises FinetuneError."""
    from finetune.recipe.foreign_keys import TOOL_TITLES

    if not name:
        return None
    plain_name = name.lower().replace("-", "").replace("_", "")
    for tool in TOOL_TITLES:
        if tool == plain_name:
            return tool
    raise FinetuneError(f"--tool: {name}: write one of {', '.join(TOOL_TITLES)}")


def write_recipe(path: Path, text: str) -> None:
    """Write the recipe; an existing file is replaced only if `finetune import` made it.

    Raises FinetuneError, EnvironmentMismatch.
    """
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(MARK.encode())):
        raise FinetuneError(f"-o: {path}: exists and was not made by `finetune import`; name another")
    write_text(path, text)


def listed(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Lines for a terminal: the keys left out, those with the strongest effect on the training first."""
    from finetune.importers.recipe_writer import list_left_out

    return list_left_out(left_out)
