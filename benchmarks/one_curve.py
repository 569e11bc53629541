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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import scratch, write_result
from tests.support.curve_table import METHODS, RANKS, SPLITS, Cell, references, trained_cells
from tests.support.one_curve import LENGTHS
from tests.support.tiny import save_tiny, write_chats

PAGE = Path(__file__).resolve().parent.parent / "docs" / "one_curve.md"
HEAD = """# One curve: strategy x method x split

Written by `python benchmarks/one_curve.py`. Each figure comes from four trainings of six steps: each rank's rows at
once, accumulated one by one, packed into three rows, and with every layer recomputed. It is the largest relative
difference in the loss of any step / in the gradient norm of any step, over the four. In float32, full and LoRA are
compared with a loop of its own that takes one document at a time and shares no code with the program
(tests/support/reference.py); the others with their own run over the whole batch in one process. Two gloo ranks on a
CPU, four for hsdp.

A cell counts only if the run's receipt showed the engine asked for in the storage of weights and optimizer state.
"""


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
    page = "\n".join(lines(cells, strategies, methods)) + "\n"
    if (strategies, methods) != (list(RANKS), list(METHODS)):
        print(page)
        return 0 if all(cell.holds for cell in cells) else 1
    print(write_result("one_curve", {"cells": [asdict(cell) for cell in cells]}))
    PAGE.write_text(page, "utf-8")
    return 0 if all(cell.holds for cell in cells) else 1


def lines(cells: Sequence[Cell], strategies: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    """The page: a table with a column for each method, and below it what was refused, and why."""
    found: Mapping[tuple[str, str], list[Cell]] = {
        (strategy, method): [cell for cell in cells if (cell.strategy, cell.method) == (strategy, method)]
        for strategy in strategies
        for method in methods
    }
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))
    yield HEAD
    yield "| strategy | " + " | ".join(methods) + " |"
    yield "|---|" + "---|" * len(methods)
    for strategy in strategies:
        row = [_figure(found[strategy, method], reasons) for method in methods]
        yield f"| {strategy} | " + " | ".join(row) + " |"
    bounds = [f"{METHODS[name].loss:.1e} / {METHODS[name].norm:.1e}" for name in methods]
    yield "| *bound* | " + " | ".join(bounds) + " |"
    yield f"\n{len(cells)} cells, {sum(cell.reason is None for cell in cells)} trained, the others refused:\n"
    for number, reason in enumerate(reasons, 1):
        yield f"{number}. {reason}"


def _figure(cells: Sequence[Cell], reasons: Sequence[str]) -> str:
    assert len(cells) == len(SPLITS)
    refused = [cell.reason for cell in cells if cell.reason]
    if refused:
        assert refused == [refused[0]] * len(cells)
        return f"refused ({reasons.index(refused[0]) + 1})"
    loss, norm = (max(getattr(cell, key) for cell in cells) for key in ("loss", "norm"))
    return f"{loss:.1e} / {norm:.1e}"


if __name__ == "__main__":
    sys.exit(main())
