"""Every mistake of the data before anything heavy is loaded: file, line, what is wrong, remedy.

Needs neither tokenizer nor torch; memory holds a few rows. What only a chat template or a tokenizer can know (a role
order it refuses, a length) comes up in the same form when the rows are tokenised, still before the model is loaded.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from finetune.data.row_reader import RowReader, notes_of
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data
from finetune.wording import counted

SHOWN_MISTAKES = 20
FIRST_NOTE_SECONDS, SECONDS_BETWEEN_NOTES = 2.0, 10.0  # a file of 91 kB may hold 30 million equal rows
_MORE = re.compile(r"and (\d+) more")


class Mistakes:
    """The first SHOWN mistakes, and the number of all."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, mistake: str) -> None:
        """Count a mistake, and keep it if it is to be shown."""
        self.count += 1
        if len(self.shown) < SHOWN_MISTAKES:
            self.shown.append(mistake)

    def add_alike(self, mistakes: list[str]) -> None:
        """Add one mistake that several rows have, the first with the number of the others."""
        if mistakes:
            others = f"; the same in {counted(len(mistakes) - 1, 'more row')}" if mistakes[1:] else ""
            self.add(mistakes[0] + others)

    def raise_if_any(self) -> None:
        """Raises DataError with those shown and how many more there are."""
        if self.count:
            more = [f"and {self.count - SHOWN_MISTAKES} more"] if self.count > SHOWN_MISTAKES else []
            raise DataError([*self.shown, *more])

    def take(self, error: DataError) -> None:
        """Add the mistakes of an error; an error that left some out counts those too."""
        *_, last = error.mistakes
        match = _MORE.fullmatch(last)
        for mistake in error.mistakes[:-1] if match else error.mistakes:
            self.add(mistake)
        self.count += int(match[1]) if match else 0


def check_rows(data: Data, log: Callable[[str], object] = lambda note: None) -> dict[str, int]:
    """Check every local row; returns how many rows each data set has, and tells what their owner should know.

    Raises DataError with every mistake.
    """
    mistakes = Mistakes()
    counts: dict[str, int] = {}
    notes: list[str] = []
    for entry in data.sets:
        try:
            source = resolve(entry)
            if source.kind != "hub":
                reader = RowReader(source)
                counts[source.name] = _good_rows(reader, source.name, mistakes)
                notes += notes_of(source.name, reader.facts())
        except DataError as error:
            mistakes.take(error)
    mistakes.raise_if_any()
    for note in notes:
        log(note)
    return counts


def _good_rows(reader: RowReader, name: str, mistakes: Mistakes) -> int:
    count, due = 0, time.monotonic() + FIRST_NOTE_SECONDS
    for number, row in enumerate(reader.rows(), start=1):
        if time.monotonic() > due:
            due = time.monotonic() + SECONDS_BETWEEN_NOTES
            print(f"checking {name}: {counted(number, 'row')}", file=sys.stderr, flush=True)
        if row.problem is None:
            count += 1
        else:
            mistakes.add(f"{row.place}: {row.problem}")
    return count
