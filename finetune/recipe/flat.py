"""Nested settings as flat ones: every leaf with its path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from finetune.recipe.yaml_text import Path

# Which lists are opened, so that each of their elements is a leaf or holds some: those that hold a mapping, or all.
OpenedLists = Literal["none", "with mappings", "all"]


def leaves(value: Any, path: Path = (), *, lists: OpenedLists = "with mappings") -> Iterator[tuple[Path, Any]]:
    """Every leaf of a nested value with its path of keys and of indices, in order; what is empty is a leaf."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list) and _is_opened(value, lists):
        entries = enumerate(value)
    if not entries:
        yield path, value
    for key, inner in entries:
        yield from leaves(inner, (*path, key), lists=lists)


def _is_opened(values: list[Any], lists: OpenedLists) -> bool:
    if lists == "with mappings":
        return any(isinstance(value, Mapping) for value in values)
    return lists == "all" and bool(values)
