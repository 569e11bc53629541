"""Reads a sample of a data set's rows within seconds, however large the file is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.readers import BadRow, parse_object
from finetune.data.sources import Source
from finetune.errors import DataError
from finetune.paths import open_regular

ROWS_OF_HEAD = 2000
SLICES, ROWS_OF_SLICE = 8, 100  # of a large file of JSON Lines, besides its head: sorted files begin with one kind
SAMPLE_SECONDS = 4.0
WHOLE_BELOW = 64 * 2**20  # bytes; smaller files are read whole
MOST_BYTES_OF_OBJECT = 64 * 2**20


@dataclass(frozen=True)
class Sample:
    """Rows of a data set, and how many it has."""

    rows: list[Mapping[str, Any]]
    problems: list[str]  # rows that could not be read, with their places
    total: int | None  # rows: counted, or estimated for a large file; None where neither is possible
    nbytes: int
    is_whole: bool


def read_sample(source: Source) -> Sample:
    """The first rows, and for a large file of JSON Lines some from its middle. Raises DataError if none is readable."""
    nbytes = sum(file.stat().st_size for file in source.files)
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    most = None if nbytes <= WHOLE_BELOW and source.kind != "hub" else ROWS_OF_HEAD
    end = time.monotonic() + SAMPLE_SECONDS
    is_whole, read = True, 0
    for row in islice(source.rows(), most):
        read += 1
        if row.values is None:
            problems.append(f"{row.place}: {row.problem}")
        else:
            rows.append(row.values)
        if time.monotonic() > end and read >= 100:
            is_whole = False
            break
    is_whole = is_whole and (most is None or read < most)
    if not rows:
        if source.kind == "json" and (problem := _one_object(source.files[0])) is not None:
            raise DataError([problem])
        raise DataError(problems[:3] or [f"{source.name}: no rows; give it at least one row"])
    total = read if is_whole else None
    if not is_whole and source.kind == "json" and len(source.files) == 1:
        further = list(_slices(source.files[0], nbytes))
        rows += further
        total = _estimated_rows(source.files[0], nbytes)
    elif not is_whole and source.kind == "parquet":
        total = sum(_parquet_rows(file) for file in source.files)
    return Sample(rows, problems, total, nbytes, is_whole)


def _slices(file: Path, nbytes: int) -> Iterator[Mapping[str, Any]]:
    """Rows from evenly spaced places of a file of JSON Lines; none for one JSON array."""
    if file.suffix == ".gz":
        return
    with open_regular(file) as stream:
        if stream.read(64).lstrip().startswith(b"["):
            return
        for index in range(1, SLICES + 1):
            stream.seek(nbytes * index // (SLICES + 1))
            stream.readline(WHOLE_BELOW)  # the rest of a line
            for raw in islice(iter(stream.readline, b""), ROWS_OF_SLICE):
                try:
                    yield parse_object(raw.decode("utf-8").strip())
                except (BadRow, UnicodeDecodeError):
                    continue


def _estimated_rows(file: Path, nbytes: int) -> int | None:
    """Rows of JSON Lines, by the mean line in nine places."""
    if file.suffix == ".gz":
        return None
    lines, read = 0, 0
    with open_regular(file) as stream:
        if stream.read(64).lstrip().startswith(b"["):
            return None
        for index in range(SLICES + 1):
            stream.seek(nbytes * index // (SLICES + 1))
            stream.readline(WHOLE_BELOW)
            for raw in islice(iter(stream.readline, b""), ROWS_OF_SLICE):
                lines, read = lines + 1, read + len(raw)
    return round(nbytes * lines / read) if read else None


def _parquet_rows(file: Path) -> int:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with open_regular(file) as stored, pyarrow.parquet.ParquetFile(stored) as table:
        return int(table.metadata.num_rows)


def _one_object(file: Path) -> str | None:
    """The message for a file that is one JSON object with a list of rows in it; None for any other file."""
    if file.stat().st_size > MOST_BYTES_OF_OBJECT or file.suffix == ".gz":
        return None
    try:
        with open_regular(file) as stream:
            value = json.loads(stream.read().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for key, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            return (
                f"{file}: is one object whose {key!r} holds {len(inner):,} rows; write one row a line: "
                f"jq -c '.{key}[]' {file} > rows.jsonl"
            )
    return f'{file}: is one JSON object, so one row at most; write one object a line: {{"question": ..., ...}}'
