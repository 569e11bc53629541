"""Write the rows of all three skills: python -m data.skills FOLDER

FOLDER gets dates.jsonl, sql.jsonl and tools.jsonl with 800 training rows each, and 100 held-out rows each in
dates_held_out.jsonl, sql_held_out.jsonl and tools_held_out.jsonl. The same command writes the same bytes. Standard
library only; CC0-1.0.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from data.skills import dates, sql, tools

SEED = 11
TRAINING, HELD_OUT = 800, 100


def rows_of(skill: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows of `dates`, `sql` or `tools`; no answer of one is in the other."""
    make = {"dates": dates.rows, "sql": sql.rows, "tools": tools.rows}[skill]
    return make(random.Random(SEED), TRAINING, HELD_OUT)


def main(folder: str) -> int:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for skill in ("dates", "sql", "tools"):
        for name, rows in zip((skill, f"{skill}_held_out"), rows_of(skill), strict=True):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (Path(folder) / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
