"""What benchmarks have found of the recipes of recipes/, and whether it is of what they say now."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.runs.cells import ROOT

RESULTS = ROOT / "benchmarks" / "results"

LONGEST_SECONDS = 200  # of a rehearsal that stands; beside other work on two cores the slowest recorded one took 173


def recipes() -> dict[str, Path]:
    """Every recipe of recipes/ by its name."""
    return {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}


def name_of(word: str) -> str:
    """A recipe's name, of its name or its file: a size has a dot, so it is not the file's stem."""
    return Path(word).name.removesuffix(".yaml")


def sha256_of(path: Path) -> str:
    """Of what a recipe says, without its comments."""
    text = json.dumps(yaml.safe_load(path.read_text("utf-8")), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def known(name: str) -> dict[str, dict[str, Any]]:
    """A benchmark's results so far by recipe, of those recipes that there still are."""
    try:
        rows = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["recipes"]
    except (FileNotFoundError, ValueError):
        return {}
    return {recipe: row for recipe, row in rows.items() if recipe in recipes()}


def stands(row: dict[str, Any] | None, path: Path) -> bool:
    """Whether a rehearsal's result is of what the recipe says now, went well and was quick enough."""
    return bool(row and row["ok"] and row["seconds"] < LONGEST_SECONDS and row["sha256"] == sha256_of(path))
