"""Run generated SQL in a process of its own: in memory, read-only, with limits on time, rows and memory.

The parent runs this file by its path and with -I, so it imports nothing of the package. It reads one JSON object from
standard input:

    {"jobs": [{"setup": [statement, ...] | null, "file": path | null, "queries": [sql, ...]}], "seconds": 2.0}

and writes a line of JSON for each job: a list with one {"rows": [...]} or {"error": text} for each query.
"""

import json
import resource
import sqlite3
import sys
import time
from typing import Any

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
    """What a query may do: read tables, and call functions that touch no file."""
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def authorize_setup(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    """What the statements that make a database may do: everything inside it, and nothing with other files."""
    if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY if str(second).lower() in FORBIDDEN_FUNCTIONS else sqlite3.SQLITE_OK


def opened(job: dict[str, Any], seconds: float) -> sqlite3.Connection:
    """The job's database, in memory."""
    memory = sqlite3.connect(":memory:")
    if job["file"] is not None:
        source = sqlite3.connect(f"file:{job['file']}?mode=ro", uri=True)
        source.backup(memory)
        source.close()
    memory.set_authorizer(authorize_setup)
    end = time.monotonic() + 5 * seconds
    memory.set_progress_handler(lambda: int(time.monotonic() > end), STEPS_BETWEEN_CHECKS)
    for statement in job["setup"] or ():
        memory.executescript(statement)
    memory.commit()
    return memory


def run_query(database: sqlite3.Connection, query: str, seconds: float) -> dict[str, Any]:
    """The query's rows, or why there are none."""
    end = time.monotonic() + seconds
    database.set_progress_handler(lambda: int(time.monotonic() > end), STEPS_BETWEEN_CHECKS)
    try:
        rows = database.execute(query).fetchmany(MOST_RESULT_ROWS + 1)
    except sqlite3.Error as error:
        late = time.monotonic() > end
        return {"error": f"took more than {seconds:g} s" if late else str(error)[:200]}
    except (sqlite3.Warning, MemoryError, ValueError, OverflowError) as error:
        return {"error": str(error)[:200] or type(error).__name__}
    if len(rows) > MOST_RESULT_ROWS:
        return {"error": f"more than {MOST_RESULT_ROWS:,} rows"}
    return {"rows": [[value.hex() if isinstance(value, bytes) else value for value in row] for row in rows]}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    request = json.load(sys.stdin)
    for job in request["jobs"]:
        try:
            database = opened(job, request["seconds"])
        except sqlite3.Error as error:
            print(json.dumps({"setup": str(error)[:200]}), flush=True)
            continue
        database.set_authorizer(authorize)
        results = [run_query(database, query, request["seconds"]) for query in job["queries"]]
        database.close()
        print(json.dumps(results), flush=True)


main()
