"""Reads a sample of rows within seconds, however large the file is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from finetune.data.readers import SourceRow
from finetune.data.sources import Source
from finetune.errors import DataError
from finetune.paths import open_regular

ROWS_OF_HEAD = 2000
SAMPLE_SECONDS = 4.0
WHOLE_BELOW = 64 * 2**20  # bytes; smaller files are read whole
ALWAYS_WHOLE = 4 * 2**20


@dataclass(frozen=True)
class Sample:
    """Some rows, and the data set's size."""

    rows: list[SourceRow]  # with those that could not be read
    total: int | None  # rows: counted, or estimated for a large file; None if neither is possible
    is_whole: bool
    notes: Mapping[str, int]  # the reader's, for the file's owner

    @cached_property
    def values(self) -> list[Mapping[str, Any]]:
        """The readable rows' cells by column."""
        return [row.values for row in self.rows if row.values is not None]


def read_sample(source: Source) -> Sample:
    """Read all rows of a small data set, and the first ones of a large one.

    Raises DataError if no row is readable.
    """
    nbytes = sum(file.stat().st_size for file in source.files)
    rows: list[SourceRow] = []
    most: int | None = ROWS_OF_HEAD
    if nbytes <= WHOLE_BELOW and source.kind != "hub":
        most = None
    # A small text is read whole on a slow machine too: a label's last value may be in its last row.
    is_small = nbytes <= ALWAYS_WHOLE and all(
        file.suffix in (".csv", ".tsv", ".json", ".jsonl") for file in source.files
    )
    end = time.monotonic() + SAMPLE_SECONDS
    is_whole = True
    for row in islice(source.rows(), most):
        rows.append(row)
        if time.monotonic() > end and len(rows) >= 100 and not is_small:
            is_whole = False
            break
    is_whole = is_whole and (most is None or len(rows) < most)
    if all(row.values is None for row in rows):
        problems = [f"{row.place}: {row.problem}" for row in rows[:3]]
        raise DataError(problems or [f"{source.name}: no rows; give it at least one row"])
    total: int | None = None
    if is_whole:
        total = len(rows)
    elif source.kind == "json" and len(source.files) == 1 and source.files[0].suffix != ".gz":
        # By the first lines' mean length; unknown for an array.
        with open_regular(source.files[0]) as stream:
            is_array = stream.read(64).lstrip().startswith(b"[")
            stream.seek(0)
            lengths = [len(line) for line in islice(iter(stream.readline, b""), ROWS_OF_HEAD)]
        if not is_array:
            total = round(nbytes * len(lengths) / sum(lengths))
    elif source.kind == "parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        total = 0
        for file in source.files:
            with open_regular(file) as stored, pyarrow.parquet.ParquetFile(stored) as table:
                total += int(table.metadata.num_rows)
    return Sample(rows, total, is_whole, source.notes)
