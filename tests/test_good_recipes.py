"""Every file of recipes/ is one page, passes `finetune check`, and is what an editor holds to be valid."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from finetune.cli import main
from finetune.recipe import Recipe
from finetune.recipe_file import load_recipe
from finetune.row_check import check_rows
from finetune.strategy import read_strategy

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCHEMA = ROOT / "finetune" / "recipe.schema.json"
PROMISED = {"llama3_fsdp", "llama3_full_ddp", "llama3_lora_1x24gb"}


def test_every_recipe_is_seen() -> None:
    assert {file.stem for file in RECIPES} >= PROMISED
    assert len(list((ROOT / "recipes").iterdir())) == len(RECIPES), "something in recipes/ is no .yaml file"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
class TestRecipe:
    def test_is_one_page_that_says_how_to_launch_it(self, file: Path) -> None:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40
        assert lines[0] == "# yaml-language-server: $schema=../finetune/recipe.schema.json"
        header = [line for line in lines if line.startswith("#")]
        assert any("accelerate launch" in line and f"recipes/{file.name}" in line for line in header)

    def test_passes_check(
        self, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)  # data_files are relative to the working folder
        assert main(["check", str(file)]) == 0
        assert capsys.readouterr().err == ""

    def test_is_valid_by_the_schema(self, file: Path) -> None:
        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
        _numbers_that_yaml_takes_for_text(written)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(written)

    def test_budget_strategy_and_sample_fit_together(self, file: Path) -> None:
        recipe: Recipe = load_recipe(file).recipe
        strategy = read_strategy(recipe.accelerate_config)
        assert (strategy.kind == "single") == (recipe.budget.gpus * recipe.budget.nodes <= 1)
        for entry in recipe.data.train:
            files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files or []
            assert all((ROOT / name).is_file() for name in files)


def _numbers_that_yaml_takes_for_text(written: dict[str, object]) -> None:
    """PyYAML reads `2e-4` as text; editors, by YAML 1.2, and our loader read a number."""
    training = written.get("training", {})
    assert isinstance(training, dict)
    for key, value in training.items():
        if isinstance(value, str) and value[:1].isdigit():
            training[key] = float(value)


def test_the_schema_refuses_what_we_refuse() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    good = {"model": {"name_or_path": "x"}, "data": {"train": [{"path": "json"}]}}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(good)
    bad = [
        {**good, "learning_rte": 1},
        {**good, "training": {"learning_rate": "high"}},
        {**good, "training": {"global_batch_size": 0}},
        {"model": {"name_or_path": "x"}},
        {"model": {"name_or_path": "x"}, "data": {"train": []}},
    ]
    assert [validator.is_valid(case) for case in bad] == [False] * 5


def test_the_sample_chat_is_right_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    counts = check_rows(load_recipe("recipes/llama3_fsdp.yaml").recipe.data)
    assert counts == {"data/sample_chat.jsonl": 42}
