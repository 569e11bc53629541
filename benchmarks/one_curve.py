"""The strategy table: every strategy x method x split, trained for six steps on gloo ranks, against its reference.

    python benchmarks/one_curve.py            (about twenty minutes on two cores; `--strategies fsdp2,zero3` for some)
    python benchmarks/one_curve.py --strategies zero1,zero2 --methods 'full, fp16;lora, fp16' --again

Writes benchmarks/results/one_curve.json and docs/one_curve.md: with all cells, or with `--again` those that were made,
in place of the same cells of the record, which says so. A cell is the worst relative difference of a step's loss
and of its gradient norm; tests/support/curve_table.py says from what, and what a cell's receipt must show. A
combination that the program refuses is a row with the program's own words.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import scratch, write_result
from tests.support.curve_table import METHODS, PAGE, RANKS, Cell, page_lines, references, trained_cells
from tests.support.one_curve import LENGTHS
from tests.support.recipe_results import RESULTS
from tests.support.tiny import save_tiny, write_chats


RECORD = RESULTS / "one_curve.json"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(RANKS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--again", action="store_true", help="put these cells into the record, and write the page anew")
    arguments = parser.parse_args(words)
    strategies, methods = arguments.strategies.split(","), arguments.methods.split(";")
    cells: list[Cell] = []
    with scratch() as folder:
        model, chats = save_tiny(folder / "model"), write_chats(folder / "chats.jsonl", LENGTHS)
        curves = references(folder, model, chats, methods)
        for strategy in strategies:
            began = time.monotonic()
            (folder / strategy).mkdir()
            cells += trained_cells(folder / strategy, strategy, curves, model, chats)
            print(f"{strategy}: {time.monotonic() - began:.0f} s", flush=True)
    held = all(cell.holds for cell in cells)
    if arguments.again:
        cells, strategies, methods = into_record(cells, RECORD), list(RANKS), list(METHODS)
    elif (strategies, methods) == (list(RANKS), list(METHODS)):
        write_result("one_curve", {"cells": [asdict(cell) for cell in cells]})
    page = "\n".join(page_lines(cells, strategies, methods)) + "\n"
    if (strategies, methods) == (list(RANKS), list(METHODS)):
        PAGE.write_text(page, "utf-8")
    else:
        print(page)
    return 0 if held else 1


def into_record(made: Sequence[Cell], file: Path) -> list[Cell]:
    """All cells of the record in `file`, with those that were made in their places; written there, with today's date."""
    record = json.loads(file.read_text("utf-8"))
    places = {(cell.strategy, cell.method, cell.split): cell for cell in made}
    before = [Cell(**each) for each in record["cells"]]
    cells = [places.pop((cell.strategy, cell.method, cell.split), cell) for cell in before]
    if places:
        raise SystemExit(f"{file}: has no cell {next(iter(places))}; make the whole table")
    again = {"date": datetime.date.today().isoformat(), "cells": len(made)}
    names = {kind: list(dict.fromkeys(getattr(cell, kind) for cell in made)) for kind in ("strategy", "method")}
    record["made_again"] = [*record.get("made_again", []), again | names]
    cells_last = {key: value for key, value in record.items() if key != "cells"}
    file.write_text(json.dumps(cells_last | {"cells": [asdict(cell) for cell in cells]}, indent=2) + "\n", "utf-8")
    return cells


if __name__ == "__main__":
    sys.exit(main())
