"""Every mistake of the data before anything heavy is loaded: file, line, what is wrong, remedy.

Needs neither tokenizer nor torch; memory holds one row. What only a chat template or a tokenizer can know (a role
order it refuses, a length) comes up in the same form when the rows are tokenised, still before the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from finetune.data.formats import detect_format, read_row
from finetune.data.readers import BadRow, SourceRow
from finetune.data.sources import Source, resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data, DataSet, RowFormat

SHOWN_MISTAKES = 20
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


class FormatOfSource:
    """The layout of a data set's rows: the entry's own, or that of its first good row, which all must have."""

    def __init__(self, entry: DataSet) -> None:
        self.format: RowFormat = entry.format

    def of(self, row: SourceRow) -> RowFormat:
        """The layout to read this row by. Raises BadRow."""
        assert row.values is not None
        if self.format == "auto":
            self.format = detect_format(row.values)
        return self.format


def check_rows(data: Data) -> dict[str, int]:
    """Check every local row; returns how many rows each data set has. Raises DataError with every mistake."""
    mistakes, counts = Mistakes(), {}
    for entry in data.sets:
        try:
            source = resolve(entry)
        except DataError as error:
            mistakes.take(error)
            continue
        if source.kind != "hub":
            counts[source.name] = sum(1 for _ in _good_rows(source, mistakes))
    mistakes.raise_if_any()
    return counts


def _good_rows(source: Source, mistakes: Mistakes) -> Iterator[SourceRow]:
    layout = FormatOfSource(source.entry)
    for row in source.rows():
        try:
            if row.values is None:
                raise BadRow(row.problem)
            read_row(row.values, layout.of(row))
        except BadRow as error:
            mistakes.add(f"{row.place}: {error}")
        else:
            yield row
