"""The rows of a Parquet file, one batch of 1,000 in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.wording import counted


def repetitions(rows: int, file: Path) -> str:
    """The problem of a small file with very many rows: only equal rows compress to less than a byte each."""
    size = counted(file.stat().st_size, "byte")
    return f"{counted(rows, 'row')} in {size} are the same few again and again; write each row once"


def parquet_rows(
    file: Path, most_depth: int, most_repetitions: int
) -> Iterator[tuple[int, dict[str, Any] | None, str | None]]:
    """(number, values, None) for each row from 1. A fault gives (number, None, problem) and ends the file.

    Raises OSError if the file cannot be read.

    Args:
        most_depth: Levels of values within values.
        most_repetitions: The most rows that a file with fewer bytes than rows may have.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with open_regular(file) as stored, pyarrow.parquet.ParquetFile(stored) as table:
            if problem := _schema_problem(table.schema_arrow, most_depth):
                yield 1, None, problem
                return
            rows = table.metadata.num_rows
            if rows >= most_repetitions and rows > file.stat().st_size:
                yield 1, None, repetitions(rows, file)
                return
            for batch in table.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values, None
    except OSError as error:
        if error.errno is not None:  # of the file; others are pyarrow's, about what it holds
            raise
        yield number + 1, None, _not_readable(error)
    except Exception as error:  # of the table, or of a value that Python has no like of: text that is not UTF-8, a date
        yield number + 1, None, _not_readable(error)


def _not_readable(error: Exception) -> str:
    first_line = one_line((str(error).splitlines() or [""])[0]) or type(error).__name__
    return f"not readable as Parquet: {first_line}; write the file again"


def _schema_problem(schema: Any, most_depth: int) -> str | None:
    """Two columns of one name, of which a row would hold the last; values within values without end."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        return f"the column {one_line(repr(twice[0]), 60)} appears twice; rename one"
    level, depth = [field.type for field in schema], 1
    while level := [kind.field(index).type for kind in level for index in range(kind.num_fields)]:
        depth += 1
        if depth > most_depth:
            return f"nested deeper than {most_depth} levels; a row needs at most ten"
    return None
