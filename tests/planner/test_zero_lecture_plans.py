"""Plans of the lecture on ZeRO, made by the trace: their time with offload, those that are kept, the whole command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.lectures.command import LECTURES
from finetune.lectures.zero.notes import HOMEWORK
from finetune.lectures.zero.planned import identity_of, kept_plans, plan_row
from finetune.paths import CHECKOUT
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from tests.support.recipes import tiny, write_recipe
from tests.support.tiny import write_chats


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    chats = write_chats(tmp_path / "chats.jsonl", [20, 30, 40, 50])
    content: Mapping[str, Any] = {"lora": None, "data": {"max_length": 64}, "output_dir": str(tmp_path / "run")}
    return write_recipe(tmp_path, tiny(tiny_llama, chats, **content))


def test_offload_is_planned_with_its_time(recipe: Path) -> None:
    pytest.importorskip("deepspeed")
    gpus = parse_gpus("2xA100")
    assert gpus is not None
    rows = {row.name: row for row in HOMEWORK}
    loaded = load_recipe(recipe).recipe
    without, offloaded = (plan_row(rows[name], loaded, gpus) for name in ("zero2", "zero2 + offload"))
    assert (without.reason, offloaded.reason) == (None, None)
    assert without.host == 0.0
    assert offloaded.host > 0.0
    assert offloaded.copies > without.copies
    assert offloaded.end_bytes["step"] < without.end_bytes["step"]


@pytest.mark.slow
def test_a_kept_plan_is_what_the_planner_says() -> None:
    pytest.importorskip("deepspeed")
    of_zero = LECTURES["zero"]
    recipe = load_recipe(CHECKOUT / "recipes" / of_zero.recipe, of_zero.overrides).recipe
    gpus = parse_gpus(of_zero.settings["gpus"])
    assert gpus is not None
    rows, kept = {row.name: row for row in HOMEWORK}, kept_plans(identity_of(recipe, gpus))
    for name in ("zero1", "zero2 + offload"):
        assert plan_row(rows[name], recipe, gpus) == kept[name]


@pytest.mark.slow
def test_the_whole_lecture(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed")
    folder = tmp_path / "held"
    assert main(["compare", "--lecture", "zero", str(recipe), "gpus=2xA100", "-o", str(folder), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    runs = {each["name"]: each for each in facts["measured"]["runs"]}
    assert {name: each["reason"] for name, each in runs.items()} == dict.fromkeys(row.name for row in HOMEWORK)
    micro = facts["measured"]["micro_steps"]
    assert runs["zero1"]["in_weights"]["backward"] == pytest.approx(1.0, rel=0.01)
    for name in ("zero2", "zero2 + offload"):
        assert runs[name]["in_weights"]["backward"] == pytest.approx(micro, rel=0.01)
    assert runs["zero3"]["in_weights"]["forward"] > 0.5 * micro
    assert runs["zero3 + fp16"]["in_weights"]["forward"] == pytest.approx(
        runs["zero3"]["in_weights"]["forward"] / 2, rel=0.01
    )
    assert (folder / "zero.png").is_file()
    assert (folder / "measured" / "compare.json").is_file()
