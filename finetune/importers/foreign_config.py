"""Another tool's configuration on its way into a recipe: what was read of it, what became of it, what was left out.

Every key that says something ends in one of two places: a line of the recipe, or the list of what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from finetune.errors import RecipeError
from finetune.recipe.flat import leaves
from finetune.recipe.schema import Lora, Quantization, Recipe
from finetune.recipe.yaml_text import dotted, shown

# differs: the training is another one without it; look: only a person can say; same: nothing is learned otherwise.
Level = Literal["differs", "look", "same"]
_SECRET = re.compile(r"(hub_token|auth_token|api_key|password|secret|webhook_url)$", re.IGNORECASE)
NOTHING: Any = object()


@dataclass(frozen=True)
class LeftOut:
    """A key of theirs that is not in the recipe, or not as it stood, and why."""

    key: str
    value: Any
    level: Level
    reason: str


@dataclass
class ForeignConfig:
    """Their values, and the recipe that grows from them: dotted keys of ours, each with its value and its origin."""

    tool: str
    values: Mapping[str, Any]
    gpus: int  # of all machines
    nodes: int
    folder: Path  # of their file: what it names may lie beside it
    carried: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def peek(self, key: str) -> Any:
        """The value at a dotted key, None where it says nothing; it does not count as read."""
        value: Any = self.values
        for part in key.split("."):
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping):
                value = value.get(part)
            else:
                return None
        return None if value in ("", [], {}) else value

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, which counts as read from now on."""
        self._read.add(key)
        value = self.peek(key)
        return default if value is None else value

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings that says something, and its value; the last one and None."""
        found = [(key, value) for key in keys if (value := self.get(key)) is not None]
        for key, value in found[1:]:
            self.leave(key, "look", f"{found[0][0]} says it already", value)
        return found[0] if found else (keys[-1], None)

    def write(self, ours: str, value: Any, why: str) -> None:
        """A line of the recipe."""
        self.carried[ours] = (value, why)

    def default(self, ours: str, value: Any, why: str = "") -> None:
        """What the other tool does where nothing is said: a line of the recipe where ours would do something else."""
        if value != our_default(ours):
            self.write(ours, value, why or f"{self.tool}'s default")

    def carry(
        self, ours: str, *theirs: str, default: Any = NOTHING, change: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """A key of theirs under our name; returns its value there, or the default's."""
        key, value = self.first(*theirs)
        if value is None:
            if default is not NOTHING:
                self.default(ours, default)
            return None if default is NOTHING else default
        self.write(ours, change(value), key)
        return change(value)

    def leave(self, key: str, level: Level, reason: str, value: Any = NOTHING) -> None:
        """A line of the list of what was left out."""
        self._read.add(key)
        value = self.peek(key) if value is NOTHING else value
        told = "[hidden]" if _SECRET.search(key) else value
        self.left_out.append(LeftOut(key, told, level, reason))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The leaves that say something and that no converter has read."""
        for path, value in leaves(self.values):
            above = (dotted(path[:end]) for end in range(1, len(path) + 1))
            if value not in (None, "", [], {}) and not any(key in self._read for key in above):
                yield dotted(path), value

    def refuse(self, key: str, reason: str) -> None:
        """Raises RecipeError: there is no recipe for what they do."""
        raise RecipeError([f"{key}: is {shown(self.peek(key))}; {reason}"])


@cache
def _defaults() -> dict[str, Any]:
    least = {"model": {"name_or_path": "-"}, "data": {"train": [{"path": "-"}]}}
    values = Recipe.model_validate(least).model_dump()
    values["lora"] = Lora().model_dump()
    values["quantization"] = Quantization(load_in_4bit=True).model_dump() | {"load_in_4bit": False}
    return values


def our_default(key: str) -> Any:
    """What a recipe says at a dotted key where it says nothing."""
    value: Any = _defaults()
    for part in key.split("."):
        value = value[part]
    return value


def whole(value: Any) -> Any:
    """2.0 as 2: a count that was written as a fraction. Anything else as it is, for the recipe's own check."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def positive_or_none(value: Any) -> Any:
    """None where 0 means never, as transformers reads max_grad_norm."""
    return value if isinstance(value, (int, float)) and value > 0 else None
