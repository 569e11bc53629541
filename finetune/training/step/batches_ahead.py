"""Batches made in a thread: those of the next step while this one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


@contextmanager
def made_ahead(items: Iterable[Item]) -> Iterator[Iterator[Item]]:
    """The items in their order, each made in a thread while the one before it is used.

    What making one raises is raised where that one is asked for. Leaving the block ends the thread, after the item that
    it is making.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        yield _taken(iter(items), thread)


def _taken(source: Iterator[Item], thread: ThreadPoolExecutor) -> Iterator[Item]:
    coming = thread.submit(next, source, _END)
    while (item := coming.result()) is not _END:
        coming = thread.submit(next, source, _END)
        yield item  # type: ignore[misc]  # not the end
