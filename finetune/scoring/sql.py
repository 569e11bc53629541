"""Execution accuracy of generated SQL: do the answer's query and the reference's give the same rows?

Queries run in a child process (sql_child.py), on a copy of the database in memory. SQLite's authorizer lets them read
and nothing else, and each has a time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.scoring.texts import without_fence

QUERY_SECONDS = 2.0  # of one query
START_SECONDS = 20.0  # of the child, besides its queries
SQLITE_MAGIC = b"SQLite format 3\0"
_ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)
_QUERY = re.compile(r"\b(?:select|with)\b.*", re.IGNORECASE | re.DOTALL)


def query_in(text: str) -> str:
    """The query of an answer: in a ``` block, or from its first SELECT or WITH to the first semicolon."""
    code = without_fence(text)
    match = _QUERY.search(code)
    query = match.group() if match else code
    end = _end_of_statement(query)
    return query[:end].strip()


def _end_of_statement(query: str) -> int:
    """Where the first statement ends: at a semicolon outside quotes."""
    quote = ""
    for index, letter in enumerate(query):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"`":
            quote = letter
        elif letter == ";":
            return index
    return len(query)


def same_rows(given: list[list[Any]], expected: list[list[Any]], *, ordered: bool) -> bool:
    """Equal rows, in any order unless the reference orders them. Floats agree to 6 digits."""

    def comparable(row: list[Any]) -> tuple[Any, ...]:
        return tuple(float(f"{value:.6g}") if isinstance(value, float) else value for value in row)

    ours, theirs = [*map(comparable, given)], [*map(comparable, expected)]
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


def execution_scores(
    answers: Sequence[str], references: Sequence[str], databases: Sequence[Any]
) -> list[float | ValueError]:
    """1 if both queries give the same rows, else 0. A ValueError says why a row cannot be scored.

    Args:
        databases: For each row: a path to an SQLite file or a script, a script, or a list of statements.
    """
    jobs, problems = [], {}
    for index, (answer, reference, database) in enumerate(zip(answers, references, databases, strict=True)):
        try:
            opened = _opened(database)
        except ValueError as error:
            problems[index] = error
            opened = {"setup": [], "file": None}
        jobs.append(opened | {"queries": [query_in(reference), query_in(answer)]})
    results = _run(jobs)
    scores: list[float | ValueError] = []
    for index, (result, reference) in enumerate(zip(results, references, strict=True)):
        if index in problems:
            scores.append(problems[index])
        elif isinstance(result, dict):
            scores.append(ValueError(f"its database cannot be made: {result['setup']}; correct the column db"))
        elif "error" in result[0]:
            scores.append(ValueError(f"the reference's query fails: {result[0]['error']}; correct it"))
        elif "error" in result[1]:
            scores.append(0.0)
        else:
            ordered = _ORDERED.search(reference) is not None
            scores.append(float(same_rows(result[1]["rows"], result[0]["rows"], ordered=ordered)))
    return scores


def _opened(database: Any) -> dict[str, Any]:
    """The statements that make a database, or its file."""
    if isinstance(database, list) and all(isinstance(statement, str) for statement in database):
        return {"setup": database, "file": None}
    if not isinstance(database, str) or not database.strip():
        raise ValueError("sql needs a database: a column db with statements, or the option sql:db=FILE")
    if ";" in database or "\n" in database:
        return {"setup": [database], "file": None}
    path = Path(database).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{database}: the database cannot be read: {error.strerror}") from None
    if content.startswith(SQLITE_MAGIC):
        return {"setup": None, "file": str(path.resolve())}
    return {"setup": [content.decode("utf-8", "replace")], "file": None}


def _run(jobs: list[dict[str, Any]]) -> list[Any]:
    """Each job's results. A child that dies at a job is started again after it: that answer counts as failed."""
    results: list[Any] = []
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        request = json.dumps({"jobs": rest, "seconds": QUERY_SECONDS})
        command = [sys.executable, "-I", str(Path(__file__).with_name("sql_child.py"))]
        try:
            child = subprocess.run(
                command,
                input=request,
                capture_output=True,
                text=True,
                timeout=START_SECONDS + 2 * QUERY_SECONDS * len(rest),
            )
            output = child.stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        except OSError as error:
            raise FinetuneError(f"metric sql: the process for the queries does not start: {error}") from error
        results += [json.loads(line) for line in output.splitlines()]
        if len(results) < len(jobs):
            # A query that SQLite does not interrupt, or that took all memory. The reference ran before the answer.
            results.append([{"rows": []}, {"error": "the process ended"}])
    return results
