"""Run generated SQL in a process of its own: in memory, read-only, with limits on time, rows and memory.

The parent runs this file by its path and with -I, so it imports nothing of the package. It reads one JSON object from
standard input:

    {"jobs": [{"setup": [statement, ...] | null, "file": path | null, "reference": [[sql, order, limit], ...],
               "answer": [sql, ...]}], "seconds": 2.0}

`order` and `limit` are where these clauses begin, or null. The first query that SQLite can read counts. For each job it
writes lines of JSON: [stage] for each stage that begins, then {"score": 0 or 1}, or {"setup" or "error": text}.
"""

import json
import os
import resource
import signal
import sqlite3
import stat
import sys
import time
from collections import Counter
from typing import Any

MOST_DATABASE_BYTES = 512 * 2**20
MOST_VALUE_BYTES = 16 * 2**20  # of one value
MOST_RESULT_BYTES = 64 * 2**20
MOST_RESULT_ROWS = 10_000
CHILD_BYTES = 2 * 10**9  # of this process
STEPS_BETWEEN_CHECKS = 10_000  # of SQLite's virtual machine
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}


def authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    """Let a query read tables, and call functions that touch no file."""
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def authorize_setup(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    """Let the statements that make a database do everything inside it, and nothing with other files."""
    if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY if str(second).lower() in FORBIDDEN_FUNCTIONS else sqlite3.SQLITE_OK


def opened(job: dict[str, Any], seconds: float) -> sqlite3.Connection:
    """The job's database, in memory. Its file is read here, so that SQLite opens and makes none."""
    memory = sqlite3.connect(":memory:")
    memory.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    memory.text_factory = lambda value: value.decode("utf-8", "surrogateescape")
    if job["file"] is not None:
        # A database file's bytes.
        path = job["file"]
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is no regular file")
            if os.fstat(descriptor).st_size > MOST_DATABASE_BYTES:
                raise ValueError(f"is larger than {MOST_DATABASE_BYTES / 2**20:,.0f} MiB")
            content = bytearray(file.read(MOST_DATABASE_BYTES))
        if os.path.exists(path + "-wal") and os.path.getsize(path + "-wal"):
            raise ValueError("has changes in a -wal file beside it; run: PRAGMA wal_checkpoint(TRUNCATE)")
        content[18:20] = b"\1\1"  # a journal of its own, not a -wal file, which a database in memory cannot have
        memory.deserialize(bytes(content))
    memory.set_authorizer(authorize_setup)
    end = time.monotonic() + 5 * seconds
    memory.set_progress_handler(lambda: int(time.monotonic() > end), STEPS_BETWEEN_CHECKS)
    for statement in job["setup"] or ():
        memory.executescript(statement)
    memory.commit()
    memory.execute("select count(*) from sqlite_schema").fetchall()  # a damaged file fails here
    return memory


def rows_of(database: sqlite3.Connection, query: str, seconds: float) -> list[tuple[Any, ...]]:
    """The query's rows, floats in 12 digits. Raises sqlite3.Error, ValueError, MemoryError or OverflowError."""
    end = time.monotonic() + seconds
    database.set_progress_handler(lambda: int(time.monotonic() > end), STEPS_BETWEEN_CHECKS)
    rows, size = [], 0
    try:
        for row in database.execute(query):
            rows.append(tuple(map(comparable, row)))
            size += sum(len(value) for value in row if isinstance(value, str | bytes))
            if len(rows) > MOST_RESULT_ROWS or size > MOST_RESULT_BYTES:
                raise ValueError(f"more than {MOST_RESULT_ROWS:,} rows, or {MOST_RESULT_BYTES / 2**20:.0f} MiB")
    except sqlite3.OperationalError as error:
        if time.monotonic() > end:
            raise ValueError(f"took more than {seconds:g} s") from error
        raise
    return rows


def comparable(value: Any) -> Any:
    """A float in 12 digits, because sums depend on their order; 3.0 stays, and equals the integer 3."""
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 2**53):
        return float(f"{value:.12g}")
    return value


def readable(database: sqlite3.Connection, query: str) -> str | None:
    """Why SQLite cannot read the query's syntax; None if it can, though a table or column may be missing."""
    try:
        database.execute("explain " + query)
    except (sqlite3.Error, ValueError) as error:
        if (
            not isinstance(error, sqlite3.OperationalError)
            or "syntax error" in str(error)
            or "incomplete" in str(error)
        ):
            return str(error)
    return None


def groups_of(
    database: sqlite3.Connection, query: str, order: int, limit: int | None, seconds: float
) -> list[Any] | None:
    """The rows of an ordered query without its limit, in groups that its order does not tell apart.

    Sorted by the query's order and then by all columns, once up and once down, both results have the same rows up to a
    place only where a group ends. None if the query cannot be run so.
    """
    head = query[:limit] if limit is not None else query
    try:
        columns = len(database.execute(query).description)
        ups, downs = (
            rows_of(database, head + "\n" + "".join(f", {n + 1} {direction}" for n in range(columns)), seconds)
            for direction in ("asc", "desc")
        )
    except (sqlite3.Error, ValueError, MemoryError, OverflowError):
        return None
    groups: list[Any] = []
    start, open_rows = 0, Counter[Any]()
    for end, (up, down) in enumerate(zip(ups, downs, strict=False), 1):
        open_rows[up] += 1
        open_rows[down] -= 1
        for row in (up, down):
            if not open_rows[row]:
                del open_rows[row]
        if not open_rows:
            groups.append(Counter(ups[start:end]))
            start = end
    return groups if start == len(ups) == len(downs) else None


def score(database: sqlite3.Connection, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The job's score, or why its reference has no rows."""
    kinds = (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError)
    problems = [readable(database, query[0]) for query in job["reference"]]
    query, order, limit = next(
        (query for query, bad in zip(job["reference"], problems, strict=True) if bad is None), job["reference"][0]
    )
    try:
        expected = rows_of(database, query, seconds)
    except kinds as error:
        return {"error": str(error)[:200] or type(error).__name__}
    groups = None
    if order is not None and not (limit is not None and any(mark in query[limit:].lower() for mark in (",", "offset"))):
        groups = groups_of(database, query, order, limit, seconds)
    print('["answer"]', flush=True)
    answer = next((query for query in job["answer"] if readable(database, query) is None), None)
    if answer is None:
        return {"score": 0}
    try:
        given = rows_of(database, answer, seconds)
    except kinds:
        return {"score": 0}
    if order is None:
        return {"score": int(Counter(given) == Counter(expected))}
    if given == expected or groups is None or len(given) != len(expected):
        return {"score": int(given == expected)}
    at = 0
    for group in groups:
        taken = Counter(given[at : at + group.total()])
        if not taken <= group:
            return {"score": 0}
        at += group.total()
    return {"score": 1}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    seconds, last, database = request["seconds"], None, None
    for job in request["jobs"]:
        signal.setitimer(signal.ITIMER_REAL, 16 * seconds)  # SIGALRM ends this process
        print('["database"]', flush=True)
        if database is None or last != [job["setup"], job["file"]]:  # queries only read, so rows may share one
            if database is not None:
                database.close()
            database, last = None, [job["setup"], job["file"]]
            try:
                database = opened(job, seconds)
            except (sqlite3.Error, sqlite3.Warning, ValueError, OSError, MemoryError, OverflowError) as error:
                print(json.dumps({"setup": str(error)[:200] or type(error).__name__}), flush=True)
                continue
            database.set_authorizer(authorize)
        print('["reference"]', flush=True)
        print(json.dumps(score(database, job, seconds)), flush=True)


if __name__ == "__main__":
    main()
