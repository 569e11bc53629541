"""A job for every recipe: which recipes a command line names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import every_recipe
from benchmarks.every_recipe import EveryRecipe


@pytest.mark.parametrize("word", ["qwen3.5_4b_lora_reasoning_1x24gb", "recipes/qwen3.5_4b_lora_reasoning_1x24gb.yaml"])
def test_a_name_with_a_dot_is_its_own(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(path: Path) -> dict[str, object]:
        ran.append(path.stem)
        return {"ok": True, "seconds": 0}

    monkeypatch.setattr(sys, "argv", ["every", word])
    monkeypatch.setattr(every_recipe, "write_result", lambda name, result: None)
    every = EveryRecipe("no such results", "a test", run, lambda row, path: row is not None, lambda row: "")
    assert every.main("") == 0
    assert ran == ["qwen3.5_4b_lora_reasoning_1x24gb"]
