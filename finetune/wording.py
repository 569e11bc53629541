"""Counts in messages: 1 row, 2 rows, 12,345 rows."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """The number and its noun; `plural` where that is not the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
