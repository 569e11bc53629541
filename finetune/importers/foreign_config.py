"""Another tool's configuration while it is converted: its values, the recipe so far, and the keys left out.

Every key with a value ends in one of two places: a line of the recipe, or the list of what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from finetune.errors import RecipeError
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Lora, Quantization, Recipe
from finetune.recipe.sections.base import MOST
from finetune.recipe.yaml_text import dotted, shown

# differs: without the key the training differs; look: a person must decide; same: the training is the same.
Level = Literal["differs", "look", "same"]
_SECRET = re.compile(r"(hub_token|auth_token|api_key|password|secret|webhook_url)$", re.IGNORECASE)
NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class LeftOut:
    """A key of the tool that is not in the recipe, or with another value, and why."""

    key: str
    value: Any
    level: Level
    reason: str


@dataclass
class ForeignConfig:
    """A tool's values, and the recipe made of them: dotted recipe keys, each with its value and its origin."""

    tool: str
    values: Mapping[str, Any]
    gpus: int  # of all machines
    nodes: int
    folder: Path  # of the configuration file, which may name files in it
    carried: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    last_read: str = ""  # the last key read; a message names it if a later computation fails
    _read: set[str] = field(default_factory=set)

    def peek(self, key: str) -> Any:
        """The value at a dotted key, None where it is missing or empty; it does not count as read."""
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
        self.last_read = key
        value = self.peek(key)
        return default if value is None else value

    def count(self, key: str, default: Any = None) -> Any:
        """A whole number above 0, or the default if the key has no value. Raises RecipeError for anything else."""
        value = as_count(self.get(key))
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
            self.refuse(key, "write a whole number above 0")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """A number above 0, or the default if the key has no value. Raises RecipeError for anything else."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST:
            self.refuse(key, "write a number above 0")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A section, empty if the key has no value. Raises RecipeError for anything else."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.refuse(key, "write a section of key: value")
        return dict(value)

    def names(self, key: str) -> list[str]:
        """A list of texts, or one text; empty if the key has no value. Raises RecipeError for anything else."""
        value = self.get(key, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            self.refuse(key, "write a name, or a list of names")
        return list(values)

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings that has a value, and the value; else the last spelling and None."""
        spelled = [(key, value) for key in keys if (value := self.get(key)) is not None]
        for key, value in spelled[1:]:
            self.leave(key, "look", f"{spelled[0][0]} sets it already", value)
        return spelled[0] if spelled else (keys[-1], None)

    def write(self, recipe_key: str, value: Any, why: str) -> None:
        """A line of the recipe."""
        self.carried[recipe_key] = (value, why)

    def default(self, recipe_key: str, value: Any, why: str = "") -> None:
        """The tool's default: a line of the recipe where the recipe's own default differs."""
        if value != recipe_default(recipe_key):
            self.write(recipe_key, value, why or f"{self.tool}'s default")

    def carry(
        self, recipe_key: str, *keys: str, default: Any = NOT_GIVEN, change: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """One of the tool's keys under the recipe's name; returns the value written, or the default."""
        key, value = self.first(*keys)
        if value is None:
            if default is not NOT_GIVEN:
                self.default(recipe_key, default)
            return None if default is NOT_GIVEN else default
        self.write(recipe_key, change(value), key)
        return change(value)

    def leave(self, key: str, level: Level, reason: str, value: Any = NOT_GIVEN) -> None:
        """Add a line to the list of settings that are left out or carried over in another form."""
        self._read.add(key)
        value = self.peek(key) if value is NOT_GIVEN else value
        printed = "[hidden]" if _SECRET.search(key) else value
        self.left_out.append(LeftOut(key, printed, level, reason))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The leaves that say something and that no converter has read."""
        for path, value in leaves(self.values):
            above = (dotted(path[:end]) for end in range(1, len(path) + 1))
            if value not in (None, "", [], {}) and not any(key in self._read for key in above):
                yield dotted(path), value

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises RecipeError: no recipe can do the same."""
        raise RecipeError([f"{key}: is {shown(self.peek(key))}; {reason}"])


@cache
def _defaults() -> dict[str, Any]:
    least = {"model": {"name_or_path": "-"}, "data": {"train": [{"path": "-"}]}}
    values = Recipe.model_validate(least).model_dump()
    values["lora"] = Lora().model_dump()
    values["quantization"] = Quantization(load_in_4bit=True).model_dump() | {"load_in_4bit": False}
    return values


def recipe_default(key: str) -> Any:
    """The recipe's default at a dotted key."""
    value: Any = _defaults()
    for part in key.split("."):
        value = value[part]
    return value


def as_count(value: Any) -> Any:
    """2.0 as 2: a count that was written as a fraction. Anything else as it is, for the recipe's own check."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def positive_or_none(value: Any) -> Any:
    """None where 0 means never, as transformers reads max_grad_norm."""
    return value if isinstance(value, (int, float)) and value > 0 else None
