"""The strategy table: every strategy x method x split, trained for six steps on gloo ranks, against its reference.

    python benchmarks/one_curve.py            (about twenty minutes on two cores; `--strategies fsdp2,zero3` for some)

Writes benchmarks/results/one_curve.json and docs/one_curve.md. A cell is the worst relative difference of a step's loss
and of its gradient norm; tests/support/curve_table.py says from what, and what a cell's receipt must show. A
combination that the program refuses is a row with the program's own words.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import scratch, write_result
from tests.support.curve_table import METHODS, PAGE, RANKS, Cell, page_lines, references, trained_cells
from tests.support.one_curve import LENGTHS
from tests.support.tiny import save_tiny, write_chats


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(RANKS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
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
    page = "\n".join(page_lines(cells, strategies, methods)) + "\n"
    if (strategies, methods) != (list(RANKS), list(METHODS)):
        print(page)
        return 0 if all(cell.holds for cell in cells) else 1
    print(write_result("one_curve", {"cells": [asdict(cell) for cell in cells]}))
    PAGE.write_text(page, "utf-8")
    return 0 if all(cell.holds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
