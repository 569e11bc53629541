"""The general set: references that their metrics can find, right sums, and a licence's notice for every source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import finetune

FOLDER = Path(finetune.__file__).parent / "scoring"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (FOLDER / "general.jsonl").read_text("utf-8").splitlines()]


def test_rows_are_questions_with_a_reference() -> None:
    assert 200 <= len(ROWS) <= 250
    assert len({row["prompt"] for row in ROWS}) == len(ROWS)
    assert all(row.keys() == {"prompt", "reference", "metric", "kind", "source"} for row in ROWS)
    assert {row["metric"] for row in ROWS} == {"exact", "normalized", "number", "choice", "contains"}
    assert all(row["reference"].strip() for row in ROWS)
    # Else a repeated question would be an answer.
    assert not [
        row for row in ROWS if row["metric"] == "contains" and row["reference"].lower() in row["prompt"].lower()
    ]


def test_the_sums_are_right() -> None:
    sums = [re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", row["prompt"]) for row in ROWS]
    rows = [(match, row) for match, row in zip(sums, ROWS, strict=True) if match]
    assert len(rows) == 32
    for match, row in rows:
        left, right = int(match[1]), int(match[3])
        assert int(row["reference"]) == {"+": left + right, "-": left - right, "*": left * right}[match[2]]


def test_every_source_names_its_licence_and_has_its_notice() -> None:
    notices = (FOLDER / "general_licences.txt").read_text("utf-8")
    sources = {row["source"] for row in ROWS}
    assert len(sources) == 7
    for source in sources:
        package, licence = source.split(", ", 1)
        assert re.match(r"(MIT|BSD-3-Clause|Apache-2\.0|WordNet 3\.0 License)", licence), source
        assert package == "finetune" or package in notices
