"""Execution accuracy of generated SQL: do the answer's query and the reference's give the same rows?

Queries run in a child process (sql_child.py), on a copy of the database in memory. SQLite's authorizer lets them read
and nothing else, and each has a time limit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.output_stream import one_line
from finetune.paths import open_regular, read_regular

QUERY_SECONDS = 2.0  # of one query
START_SECONDS = 20.0  # of the child, besides its queries
SQLITE_MAGIC = b"SQLite format 3\0"
MOST_SCRIPT_BYTES = 64 * 2**20
MOST_QUERY_STARTS = 20  # places where a query may begin
_FENCED = re.compile(r"(?:```|~~~)[\w+-]*[^\S\n]*\n?(.*?)(?:```|~~~|$)", re.DOTALL)
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|$)|[();]|\w+", re.DOTALL)
_START = re.compile(r"\(*\s*\b(?:select|with|values)\b", re.IGNORECASE)
_SQL_WORDS = re.compile(
    r"(?i)(?:select|from|where|and|or|not|in|on|join|left|right|inner|outer|full|cross|natural|order|group|having|limit|"
    r"offset|union|except|intersect|as|by|case|when|then|else|end|using|window|values|is|like|between)\b|\W"
)


def queries_in(text: str) -> list[str]:
    """Candidates for an answer's query; the first one that SQLite can read is it.

    The first ``` block that begins with SELECT, WITH or VALUES; or a query from the first of these words, or from one
    that begins a line or follows a colon. It ends at a semicolon, or before a paragraph that is no SQL.
    """
    blocks = [block for block in _FENCED.findall(text) if _START.match(_uncommented(block))]
    code = _uncommented(blocks[0] if blocks else text)
    queries: list[str] = []
    for match in [*_START.finditer(code)][:MOST_QUERY_STARTS]:
        before = code[: match.start()].rstrip(' \t*"')
        if queries and before and not before.endswith((":", "`", "\n\n", ".\n", ":\n")):
            continue
        if re.search(r"(?i)\bexplain(?:\s+query\s+plan)?\s*$", before):
            break  # its rows are SQLite's plan
        query = code[match.start() :]
        query = query[: next((token.start() for token in _TOKEN.finditer(query) if token[0] == ";"), None)].strip()
        for end in re.finditer(r"\n\s*\n|$(?!\n)|\n(?=[A-Z][^=<>()*;]*[.:!](?:\s|$))|`", query):
            rest = query[end.end() :].lstrip()
            if not rest or not _SQL_WORDS.match(rest):
                queries.append(_without_outer_parentheses(query[: end.start()].strip()))
        queries.sort(key=len, reverse=True)
        if match.start() == 0 or blocks:
            break
    return queries


def _uncommented(code: str) -> str:
    """Without the comments before the first statement."""
    return re.sub(r"\A(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)+", "", code, flags=re.DOTALL)


def _without_outer_parentheses(query: str) -> str:
    """SQLite knows no (select 1)."""
    while query.startswith("(") and query.endswith(")"):
        depth = 0
        for token in _TOKEN.finditer(query):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if not depth:
                break
        if depth or token.end() != len(query):
            break
        query = query[1:-1].strip()
    return query


def outer_clauses(query: str) -> tuple[int | None, int | None]:
    """Where the outermost statement's ORDER BY begins, and where its LIMIT does; None: it has none."""
    depth, order, limit, word = 0, None, None, ("", 0)
    for token in _TOKEN.finditer(query):
        if token[0].startswith(("--", "/*")):
            continue
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth and word[0] == "order" and token[0].lower() == "by":
            order = word[1]
        elif not depth and token[0].lower() == "limit":
            limit = token.start()
        word = (token[0].lower(), token.start())
    return order, limit


def execution_scores(
    answers: Sequence[str], references: Sequence[str], databases: Sequence[Any]
) -> list[float | ValueError]:
    """1 if both queries give the same rows, else 0. A ValueError says why a row cannot be scored.

    Rows have an order only if the reference's outermost statement has one. Rows that are equal by it may change places.

    Args:
        databases: For each row: a path to an SQLite file or a script, a script, or a list of statements.
    """
    jobs: list[dict[str, Any]] = []
    problems: dict[int, ValueError] = {}
    for index, (answer, reference, database) in enumerate(zip(answers, references, databases, strict=True)):
        expected = queries_in(reference)
        clauses = [[query, *outer_clauses(query)] for query in expected]
        try:
            if not expected:
                raise ValueError(f"the reference {reference[:40]!r} holds no query; write SELECT, WITH or VALUES")
            opened = _opened(database)
        except ValueError as error:
            problems[index] = error
            opened = {"setup": [], "file": None}
            clauses = [["select 1", None, None]]
        jobs.append(opened | {"reference": clauses, "answer": queries_in(answer)})
    scores: list[float | ValueError] = []
    for index, result in enumerate(_run(jobs)):
        if index in problems:
            scores.append(problems[index])
        elif "setup" in result:
            scores.append(
                ValueError(f"its database cannot be made: {one_line(result['setup'], 200)}; correct the column db")
            )
        elif "error" in result:
            scores.append(ValueError(f"the reference's query fails: {one_line(result['error'], 200)}; correct it"))
        else:
            scores.append(float(result["score"]))
    return scores


def _opened(database: Any) -> dict[str, Any]:
    """The statements that make a database, or its file."""
    if isinstance(database, list) and all(isinstance(statement, str) for statement in database):
        return {"setup": database, "file": None}
    if not isinstance(database, str) or not database.strip():
        raise ValueError("sql needs a database: a column db with statements, or the option sql:db=FILE")
    is_script = ";" in database or "\n" in database
    try:
        path = Path(os.path.expanduser(database))
        with open_regular(path) as file:
            if file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
                return {"setup": None, "file": str(path.resolve())}
        content = read_regular(path, MOST_SCRIPT_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if is_script:
            return {"setup": [database], "file": None}
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{one_line(database, 200)}: the database cannot be read: {reason}") from None
    return {"setup": [content.decode("utf-8", "replace")], "file": None}


def _run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each job's result. A child that dies at a job is started again after it."""
    results: list[dict[str, Any]] = []
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        request = json.dumps({"jobs": rest, "seconds": QUERY_SECONDS})  # lone surrogates are escaped
        command = [sys.executable, "-I", str(Path(__file__).with_name("sql_child.py"))]
        try:
            child = subprocess.run(
                command,
                input=request,
                capture_output=True,
                text=True,
                timeout=START_SECONDS + 20 * QUERY_SECONDS * len(rest),  # the child's own limits end it earlier
            )
            output = child.stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        except OSError as error:
            raise FinetuneError(f"metric sql: the process for the queries does not start: {error}") from error
        lines = [json.loads(line) for line in output.splitlines() if line.endswith(("}", "]"))]
        ended = [line for line in lines if isinstance(line, dict)]
        results += ended
        if len(ended) < len(rest):
            # SQLite does not interrupt one long call of a function. [stage] is what the last job had begun.
            stages = {"database": "setup", "reference": "error", "answer": "score"}
            stage = lines[-1][0] if lines and isinstance(lines[-1], list) else "database"
            results.append({stages[stage]: 0.0 if stage == "answer" else "it takes too much time or memory"})
    return results
