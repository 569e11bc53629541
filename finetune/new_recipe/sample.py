"""Reads a sample of rows within seconds, however large the file is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.cells import BadRow
from finetune.data.readers import parse_object
from finetune.data.sources import Source
from finetune.errors import DataError
from finetune.paths import open_regular

ROWS_OF_HEAD = 2000
SLICES, ROWS_OF_SLICE = 8, 100  # of a large JSON Lines file, besides its head: a sorted file begins with one kind
SAMPLE_SECONDS = 4.0
WHOLE_BELOW = 64 * 2**20  # bytes; smaller files are read whole
ALWAYS_WHOLE = 4 * 2**20


@dataclass(frozen=True)
class Sample:
    """Some rows, and the data set's size."""

    rows: list[Mapping[str, Any]]
    problems: list[str]  # rows that could not be read, with their places
    total: int | None  # rows: counted, or estimated for a large file; None if neither is possible
    nbytes: int
    is_whole: bool


def read_sample(source: Source) -> Sample:
    """Read the first rows, and slices from the middle if it is one large JSON Lines file.

    Raises DataError if no row is readable.
    """
    nbytes = sum(file.stat().st_size for file in source.files)
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    most: int | None = ROWS_OF_HEAD
    if nbytes <= WHOLE_BELOW and source.kind != "hub":
        most = None
    # A small text is read whole on a slow machine too: a label's last value may be in its last row.
    is_small = nbytes <= ALWAYS_WHOLE and all(
        file.suffix in (".csv", ".tsv", ".json", ".jsonl") for file in source.files
    )
    end = time.monotonic() + SAMPLE_SECONDS
    is_whole, read = True, 0
    for row in islice(source.rows(), most):
        read += 1
        if row.values is None:
            problems.append(f"{row.place}: {row.problem}")
        else:
            rows.append(row.values)
        if time.monotonic() > end and read >= 100 and not is_small:
            is_whole = False
            break
    is_whole = is_whole and (most is None or read < most)
    if not rows:
        raise DataError(problems[:3] or [f"{source.name}: no rows; give it at least one row"])
    total: int | None = None
    if is_whole:
        total = read
    elif source.kind == "json" and len(source.files) == 1:
        slices, total = _slices(source.files[0], nbytes)
        rows += slices
    elif source.kind == "parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        total = 0
        for file in source.files:
            with open_regular(file) as stored, pyarrow.parquet.ParquetFile(stored) as table:
                total += int(table.metadata.num_rows)
    return Sample(rows, problems, total, nbytes, is_whole)


def _slices(file: Path, nbytes: int) -> tuple[list[Mapping[str, Any]], int | None]:
    """Rows from evenly spaced places in a JSON Lines file, and the file's estimated number of rows.

    The estimate divides the file's bytes by the mean line. A compressed file and a JSON array give no rows and None.
    """
    rows: list[Mapping[str, Any]] = []
    if file.suffix == ".gz":
        return rows, None
    lines, line_bytes = 0, 0
    with open_regular(file) as stream:
        if stream.read(64).lstrip().startswith(b"["):
            return rows, None
        for index in range(SLICES + 1):
            stream.seek(nbytes * index // (SLICES + 1))
            stream.readline(WHOLE_BELOW)  # the rest of a line
            for raw in islice(iter(stream.readline, b""), ROWS_OF_SLICE):
                lines, line_bytes = lines + 1, line_bytes + len(raw)
                if not index:
                    continue  # the sample has the file's head already
                with suppress(BadRow, UnicodeDecodeError):
                    rows.append(parse_object(raw.decode("utf-8").strip()))
    if not line_bytes:
        return rows, None
    return rows, round(nbytes * lines / line_bytes)
