"""A few rows of real tasks (tests/support/rows/real/LICENCE.txt): people's tool calls, and questions with a number."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("real")
NUMBERS = ("sums", "three", "products")


@cache
def real_rows(name: str) -> tuple[dict[str, Any], ...]:
    """The rows of FOLDER/NAME.jsonl."""
    return tuple(json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines())


@cache
def tool_rows() -> tuple[dict[str, Any], ...]:
    """bfcl's rows: one call or several, with tools, and each argument's possible values."""
    return tuple(row for file in sorted(FOLDER.glob("bfcl_*.jsonl")) for row in real_rows(file.stem))


def calls_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a row's answer: name and arguments."""
    return [call["function"] for call in row["messages"][-1]["tool_calls"]]
