"""torchtune's ${output_dir}: the value of another key of the same file, as OmegaConf reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.recipe.yaml_text import MAX_BYTES, Parsed, dotted, shown

_REFERENCE = re.compile(r"\$\{([^${}]{0,200})\}")
_MOST_STEPS = 8  # references in a row; each value has at most 20 levels, so recursion stays shallow
_WEIGHT_OF_A_VALUE = 8  # characters that a number or a bracket counts as


def interpolated(file: Path, parsed: Parsed) -> dict[str, Any]:
    """A file's values with every ${key} replaced. Each value is built once. Together they may have as many characters
    as a file may have.

    Raises RecipeError, with line and column, for a missing key, for keys that name each other, and for text that grows
    beyond this limit.
    """
    return _Interpolation(file, parsed).all()


class _Interpolation:
    def __init__(self, file: Path, parsed: Parsed) -> None:
        self._file, self._parsed = file, parsed
        self._top: Mapping[str, Any] = parsed.value
        self._done: dict[str, tuple[Any, int]] = {}  # top-level key -> value, and its weight in characters
        self._open: list[str] = []

    def all(self) -> dict[str, Any]:
        values, total = {}, 0
        for key in self._top:
            values[key], weight = self._of(key, (key,))
            total = self._bounded(total + weight, (key,))
        return values

    def _of(self, key: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        """A top-level key's value, and its weight."""
        if key in self._open:
            raise self._refused(path, f"${{{key}}} leads back to itself; write the value out")
        if len(self._open) > _MOST_STEPS:
            raise self._refused(path, f"${{...}} leads through more than {_MOST_STEPS} keys; write the value out")
        if key not in self._done:
            self._open.append(key)
            self._done[key] = self._inside(self._top[key], (key,))
            self._open.pop()
        return self._done[key]

    def _inside(self, value: Any, path: tuple[str | int, ...]) -> tuple[Any, int]:
        if isinstance(value, str):
            return self._text(value, path)
        if not isinstance(value, dict | list):
            return value, _WEIGHT_OF_A_VALUE
        keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
        results, total = [], _WEIGHT_OF_A_VALUE
        for key in keys:
            result, weight = self._inside(value[key], (*path, key))
            results.append(result)
            total = self._bounded(total + weight + len(str(key)), path)
        return (dict(zip(keys, results, strict=True)) if isinstance(value, dict) else results), total

    def _text(self, text: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        match = _REFERENCE.fullmatch(text)
        if match:
            return self._named(match[1], path)
        parts, total, end = [], 0, 0
        for match in _REFERENCE.finditer(text):
            value, weight = self._named(match[1], path)
            total = self._bounded(total + weight + match.start() - end, path)
            parts += [text[end : match.start()], str(value)]
            end = match.end()
        return "".join([*parts, text[end:]]), total + len(text) - end

    def _named(self, name: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        """The value at a dotted name. A part of a section gets the whole section's weight, an upper bound."""
        first, *rest = name.strip().split(".")
        if first not in self._top:
            what = "no value of this file" if ":" in name else "no key of this file"
            raise self._refused(path, f"${{{shown(name)}}} is {what}; write the value out")
        value, weight = self._of(first, path)
        for part in rest:
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise self._refused(path, f"${{{shown(name)}}} is no key of this file; write the value out")
        return value, weight

    def _bounded(self, weight: int, path: tuple[str | int, ...]) -> int:
        if weight > MAX_BYTES:
            raise self._refused(path, "${...} makes more than 1 MiB of it; write the value out")
        return weight

    def _refused(self, path: tuple[str | int, ...], problem: str) -> RecipeError:
        place = self._parsed.values.get(path)
        where = f":{place.line}:{place.column}" if place else ""
        return RecipeError([f"{self._file}{where}: {shown(dotted(path))}: {problem}"])
