"""Another tool's configuration while it is converted: its values, the recipe so far, and the keys left out.

Every key with a value ends in one of two places: a line of the recipe, or the list of what was left out. A key that no
converter reads gets its reason from its tool's table in recipe/other_tools/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from finetune.errors import RecipeError
from finetune.importers import LeftOut, Level
from finetune.recipe.foreign_keys import answers, line_of
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Lora, Quantization, Recipe
from finetune.recipe.sections.base import MOST
from finetune.recipe.yaml_text import dotted, shown

UNKNOWN = "nothing here corresponds to it"
NOT_GIVEN: Any = object()
_SECRET = re.compile(r"(hub_token|auth_token|api_key|password|secret|webhook_url)$", re.IGNORECASE)
_NONE_AT_0 = ("label_smoothing_factor", "neftune_noise_alpha", "freeze_trainable_layers")


@dataclass
class ForeignConfig:
    """A tool's values, and the recipe made of them: dotted recipe keys, each with its value and its origin."""

    tool: str
    values: Mapping[str, Any]
    gpus: int  # on all machines together
    nodes: int
    folder: Path  # where the configuration file is; it may name other files there
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
        if value in ("", [], {}):
            return None
        return value

    def is_null(self, key: str) -> bool:
        """Whether a key is given as null, which some tools tell from a key that is not given."""
        return key in self.values and self.values[key] is None

    def replace_nulls(self, **meanings: Any) -> None:
        """Replace these keys' nulls by the value that means the same to the tool, whose default is another."""
        self.values = {**self.values, **{key: value for key, value in meanings.items() if self.is_null(key)}}

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, which counts as read from now on."""
        self._read.add(key)
        self.last_read = key
        value = self.peek(key)
        if value is None:
            return default
        return value

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
        if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
            self.refuse(key, "write a name, or a list of names")
        return list(values)

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings that has a value, and the value; else the last spelling and None."""
        spelled = [(key, value) for key in keys if (value := self.get(key)) is not None]
        for key, value in spelled[1:]:
            self.leave(key, "look", f"{spelled[0][0]} sets it already", value)
        if spelled:
            return spelled[0]
        return (keys[-1], None)

    def write(self, recipe_key: str, value: Any, origin: str) -> None:
        """Add a line to the recipe. A comment behind the line names its origin."""
        self.carried[recipe_key] = (value, origin)

    def origin(self, key: str) -> str:
        """The key if it has a value, else the words for the tool's default."""
        return key if self.peek(key) else f"{self.tool}'s default"

    def default(self, recipe_key: str, value: Any) -> None:
        """Write the tool's default, but only if the recipe's own default differs."""
        if value != recipe_default(recipe_key):
            self.write(recipe_key, value, f"{self.tool}'s default")

    def carry(
        self, recipe_key: str, *keys: str, default: Any = NOT_GIVEN, change: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Write one of the tool's keys under the recipe's name. Returns the value written, or the default."""
        key, value = self.first(*keys)
        if value is not None:
            self.write(recipe_key, change(value), key)
            return change(value)
        if default is NOT_GIVEN:
            return None
        self.default(recipe_key, default)
        return default

    def leave(self, key: str, level: Level, reason: str, value: Any = NOT_GIVEN) -> None:
        """Add a line to the list of settings that are left out or carried over in another form."""
        self._read.add(key)
        if value is NOT_GIVEN:
            value = self.peek(key)
        if _SECRET.search(key):
            value = "[hidden]"
        self.left_out.append(LeftOut(key, value, level, reason))

    def leave_unread(self) -> None:
        """Leave out every key with a value that no converter has read, for the reason in recipe/other_tools/."""
        for key, value in list(self.unread()):
            level, reason = reason_for(key, value)
            self.leave(key, level, reason, value)

    def leave_unused(self, beginning: str, reason: str) -> None:
        """Leave out unread keys with this beginning, because they have no effect in the tool either."""
        for key, value in list(self.unread()):
            if key.startswith(beginning):
                self.leave(key, "same", reason, value)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The leaves with a value that no converter has read."""
        for path, value in leaves(self.values):
            sections = (dotted(path[:end]) for end in range(1, len(path) + 1))
            if value not in (None, "", [], {}) and not any(section in self._read for section in sections):
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
    """2.0 as 2: a count that was written as a fraction. Anything else stays, for the recipe's own check."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def positive_or_none(value: Any) -> Any:
    """None where 0 means never, as transformers reads max_grad_norm."""
    if isinstance(value, (int, float)) and value > 0:
        return value
    return None


def reason_for(key: str, value: object) -> tuple[Level, str]:
    """Why this key is left out. An unknown key counts as a change to the training, unless its value is false.

    A switch that is off changes nothing, even if the key would change the training. Inside a section false is a value.
    """
    if known := line_of(key):
        is_off = (value is False and "." not in key) or (value == 0 and key in _NONE_AT_0)
        if is_off and known.kind == "differs":
            return "same", "is off there too"
        return cast(Level, known.kind), known.text
    if answer := answers("instead").get(key):
        return "look", answer.removesuffix("; remove the key")
    return "look" if value is False else "differs", UNKNOWN
