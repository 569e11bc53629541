"""The strategy table: every strategy x method x split, trained for six steps on gloo ranks, against its reference.

    python benchmarks/one_curve.py            (about half an hour on two cores; `--strategies fsdp2,zero3` for some)

Writes benchmarks/results/one_curve.json and docs/one_curve.md, and keeps what it has of the other strategies. A cell is
the worst relative difference of a step's loss and of its gradient norm; tests/support/runs/curve_table.py says from
what, and what a cell's receipt must show. A combination that the program refuses is a row with the program's own words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, scratch, write_result
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.curve_table import (
    METHODS,
    PAGE,
    PIPELINES,
    ROWS,
    STAGED_LAYERS,
    Cell,
    page_lines,
    references,
    trained_cells,
)
from tests.support.runs.one_curve import LENGTHS


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(ROWS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    arguments = parser.parse_args(words)
    strategies, methods = arguments.strategies.split(","), arguments.methods.split(";")
    cells: list[Cell] = []
    with scratch() as folder:
        chats = write_chats(folder / "chats.jsonl", LENGTHS)
        for staged in (False, True):
            some = [strategy for strategy in strategies if (strategy in PIPELINES) == staged]
            layers = {"num_hidden_layers": STAGED_LAYERS} if staged else {}
            cells += _of_model(folder / f"staged {staged}", some, methods, layers, chats)
    if methods != list(METHODS):
        print("\n".join(page_lines(cells, strategies, methods)))
        return 0 if all(cell.holds for cell in cells) else 1
    every = _with_those_kept(cells)
    print(write_result("one_curve", {"cells": [asdict(cell) for cell in every]}))
    known = [strategy for strategy in ROWS if any(cell.strategy == strategy for cell in every)]
    PAGE.write_text("\n".join(page_lines(every, known, methods)) + "\n", "utf-8")
    return 0 if all(cell.holds for cell in cells) else 1


def _of_model(
    folder: Path, strategies: Sequence[str], methods: Sequence[str], layers: dict[str, int], chats: Path
) -> Iterator[Cell]:
    """The cells of these strategies, which train one model and have one reference for each method."""
    if not strategies:
        return
    folder.mkdir()
    model = save_tiny(folder / "model", **layers)
    curves = references(folder, model, chats, methods)
    for strategy in strategies:
        began = time.monotonic()
        (folder / strategy).mkdir()
        yield from trained_cells(folder / strategy, strategy, curves, model, chats)
        print(f"{strategy}: {time.monotonic() - began:.0f} s", flush=True)


def _with_those_kept(cells: Sequence[Cell]) -> list[Cell]:
    """With the cells of other strategies that an earlier call wrote, in the table's order."""
    file = RESULTS / "one_curve.json"
    earlier = [Cell(**cell) for cell in json.loads(file.read_text("utf-8"))["cells"]] if file.is_file() else []
    now = {cell.strategy for cell in cells}
    every = [*(cell for cell in earlier if cell.strategy not in now), *cells]
    return [cell for strategy in ROWS for cell in every if cell.strategy == strategy]


if __name__ == "__main__":
    sys.exit(main())
