"""The record of the one-curve table: some cells made again stand in their places, beside all others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.one_curve import RECORD, into_record
from tests.support.curve_table import METHODS, PAGE, RANKS, SPLITS, Cell, page_lines

BEFORE = [Cell("zero1", "full", "whole", 1e-8, 2e-8), Cell("zero1", "full, fp16", "whole", reason="no fp16")]


def record(folder: Path) -> Path:
    file = folder / "record.json"
    file.write_text(json.dumps({"date": "2026-01-01", "cells": [asdict(cell) for cell in BEFORE]}), "utf-8")
    return file


def test_cells_made_again_take_their_places(tmp_path: Path) -> None:
    file, made = record(tmp_path), Cell("zero1", "full, fp16", "whole", 3e-6, 4e-5)
    assert into_record([made], file) == [BEFORE[0], made]
    written = json.loads(file.read_text("utf-8"))
    assert (written["date"], written["cells"]) == ("2026-01-01", [asdict(BEFORE[0]), asdict(made)])
    (again,) = written["made_again"]
    assert (again["cells"], again["strategy"], again["method"]) == (1, ["zero1"], ["full, fp16"])


def test_a_cell_that_the_record_has_not_is_refused(tmp_path: Path) -> None:
    file = record(tmp_path)
    before = file.read_text("utf-8")
    with pytest.raises(SystemExit, match="has no cell"):
        into_record([Cell("zero9", "full", "whole", 0.0, 0.0)], file)
    assert file.read_text("utf-8") == before


def test_the_page_is_that_of_the_record() -> None:
    cells = [Cell(**each) for each in json.loads(RECORD.read_text("utf-8"))["cells"]]
    assert len(cells) == len(RANKS) * len(METHODS) * len(SPLITS)
    assert all(cell.holds for cell in cells)
    assert PAGE.read_text("utf-8") == "\n".join(page_lines(cells, list(RANKS), list(METHODS))) + "\n"
