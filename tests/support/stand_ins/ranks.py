"""Ranks whose gathering a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Ranks:
    rank: int
    world: int
    gather: Callable[[Any], list[Any]]
    broken_off: Any = None


def made_up_ranks(rank: int, world: int, gather: Callable[[Any], list[Any]]) -> Any:
    """In place of `strategies.pieces.Ranks`."""
    return _Ranks(rank, world, gather)
