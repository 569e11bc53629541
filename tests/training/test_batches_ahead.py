"""Batches made in a thread: the same ones, one ahead, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from finetune.training.loop import made_ahead


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_they_come_in_order_and_one_ahead() -> None:
    made: list[tuple[int, str]] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for item in range(5):
            made.append((item, threading.current_thread().name))
            if item == 2:
                third.set()
            yield item

    with made_ahead(items()) as ahead:
        assert not made, "none before the first is asked for"
        assert [next(ahead), next(ahead)] == [0, 1]
        assert third.wait(60), "the third is made before it is asked for"
        assert [item for item, _ in made] == [0, 1, 2], "and no other"
        assert list(ahead) == [2, 3, 4]
    assert all(name.startswith("batches") for _, name in made)
    assert threads() == []


def test_what_making_one_raises_is_raised_where_it_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with made_ahead(items()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)
    assert threads() == []


def test_leaving_early_ends_the_thread() -> None:
    def leave() -> None:
        with made_ahead(iter(range(1000))) as ahead:
            next(ahead)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert threads() == []
