"""Write the rows of all skills: python -m data.skills FOLDER

FOLDER gets dates.jsonl, sql.jsonl and tools.jsonl with 800 training rows each, and 100 held-out rows each in
dates_held_out.jsonl, sql_held_out.jsonl and tools_held_out.jsonl. Questions about a house follow, with 320 training
rows and 50 held-out ones: answers.jsonl to begin with, and the pairs shorter.jsonl and polite.jsonl. The same command
writes the same bytes. Standard library only; CC0-1.0.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from data.skills import answers, dates, sql, tools

SEED = 11
TRAINING, HELD_OUT = 800, 100
PREFERENCE_TRAINING, PREFERENCE_HELD_OUT = 320, 50
SKILLS = ("dates", "sql", "tools")
OF_PREFERENCES = ("answers", "shorter", "polite")


def rows_of(skill: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows; no answer to `dates`, `sql` or `tools` is in both, and no question is at all."""
    if skill in OF_PREFERENCES:
        make_answers = {"answers": answers.rows, "shorter": answers.shorter, "polite": answers.polite}[skill]
        return make_answers(random.Random(SEED), PREFERENCE_TRAINING, PREFERENCE_HELD_OUT)
    make = {"dates": dates.rows, "sql": sql.rows, "tools": tools.rows}[skill]
    return make(random.Random(SEED), TRAINING, HELD_OUT)


def main(folder: str) -> int:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for skill in (*SKILLS, *OF_PREFERENCES):
        for name, rows in zip((skill, f"{skill}_held_out"), rows_of(skill), strict=True):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (Path(folder) / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
