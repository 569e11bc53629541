"""Finds every mistake in the data before anything heavy is loaded: file, line, what is wrong, remedy.

Needs neither tokenizer nor torch; memory holds a few rows. Some mistakes are known only to a chat template or a
tokenizer (a role order it refuses, a length). They are reported in the same form when the rows are tokenised, which is
still before the model is loaded.
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
    """The first SHOWN_MISTAKES mistakes, and the number of all."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, mistake: str) -> None:
        """Count a mistake, and keep it if it is to be shown."""
        self.count += 1
        if len(self.shown) < SHOWN_MISTAKES:
            self.shown.append(mistake)

    def add_alike(self, mistakes: list[str]) -> None:
        """Add one mistake that several rows have: the first row's line, with the number of the other rows."""
        if len(mistakes) > 1:
            self.add(f"{mistakes[0]}; the same in {counted(len(mistakes) - 1, 'more row')}")
        elif mistakes:
            self.add(mistakes[0])

    def raise_if_any(self) -> None:
        """Raises DataError with the mistakes shown, and with how many more there are."""
        if self.count > SHOWN_MISTAKES:
            raise DataError([*self.shown, f"and {self.count - SHOWN_MISTAKES} more"])
        if self.count:
            raise DataError(self.shown)

    def take(self, error: DataError) -> None:
        """Add the mistakes of an error. "and 7 more" in its last line counts as 7."""
        mistakes = list(error.mistakes)
        match = _MORE.fullmatch(mistakes[-1])
        if match:
            self.count += int(match[1])
            mistakes.pop()
        for mistake in mistakes:
            self.add(mistake)


def check_rows(data: Data, log: Callable[[str], object] = lambda note: None) -> dict[str, int]:
    """Check every local row. Returns how many rows each data set has, and logs notes for the owner of the data.

    Raises DataError with every mistake.
    """
    mistakes = Mistakes()
    counts: dict[str, int] = {}
    notes: list[str] = []
    for entry in data.sets:
        try:
            source = resolve(entry)
            if source.kind == "hub":
                continue
            reader = RowReader(source)
            counts[source.name] = 0
            next_note = time.monotonic() + FIRST_NOTE_SECONDS
            for number, row in enumerate(reader.rows(), start=1):
                if time.monotonic() > next_note:
                    next_note = time.monotonic() + SECONDS_BETWEEN_NOTES
                    print(f"checking {source.name}: {counted(number, 'row')}", file=sys.stderr, flush=True)
                if row.problem is None:
                    counts[source.name] += 1
                else:
                    mistakes.add(f"{row.place}: {row.problem}")
            notes += notes_of(source.name, reader.facts())
        except DataError as error:
            mistakes.take(error)
    mistakes.raise_if_any()
    for note in notes:
        log(note)
    return counts
