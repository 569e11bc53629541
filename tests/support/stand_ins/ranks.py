"""Ranks whose gathering a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _Ranks:
    rank: int
    world: int
    gather: Callable[[Any], list[Any]]
    broken_off: Any = None
    apart: Mapping[int, int] = field(default_factory=dict)


def made_up_ranks(rank: int, world: int, gather: Callable[[Any], list[Any]]) -> Any:
    """In place of `strategies.pieces.Ranks`."""
    return _Ranks(rank, world, gather)
