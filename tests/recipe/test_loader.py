"""YAML to recipe: what is read, what wins, what is written again, and that nothing at all makes it fall over."""

from __future__ import annotations

import importlib
import inspect
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import optimization

from finetune.cli.main import main
from finetune.errors import RecipeError
from finetune.recipe.foreign_keys import answers
from finetune.recipe.loader import load_recipe, recipe_from_resolved
from finetune.recipe.reference import AUTO, REFERENCE_FILE, SCHEMA_FILE, json_schema, reference_page
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import SCHEDULER_ARGUMENTS

SMALL = "model: {name_or_path: x}\ndata:\n  train:\n    - {path: json, data_files: a.jsonl}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def mistakes(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("3", 3.0), ("1.5e-3", 1.5e-3), (".5", 0.5), ("1_000", 1000.0), ("2.0e-4", 2e-4)],
)
def test_numbers_are_numbers(tmp_path: Path, written: str, value: float) -> None:
    path = write(tmp_path, SMALL + f"training: {{learning_rate: {written}}}\n")
    assert load_recipe(path).recipe.training.learning_rate == value


def test_no_is_the_precision_and_a_date_is_text(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "  date_string: 2024-07-26\ntraining: {mixed_precision: no}\n")
    recipe = load_recipe(path).recipe
    assert recipe.training.mixed_precision == "no"
    assert recipe.data.date_string == "2024-07-26"


def test_overrides_win_and_say_so(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "training: {seed: 1, learning_rate: 1e-4}\n")
    loaded = load_recipe(path, ["training.seed=7", "data.train.0.path=csv", "lora=null", "data.eval={fraction: 0.1}"])
    assert loaded.recipe.training.seed == 7
    assert loaded.recipe.data.train[0].path == "csv"
    assert loaded.recipe.lora is None
    origin = loaded.origins
    assert origin["training.seed"] == origin["data.train.0.path"] == origin["lora"] == "command line"
    assert origin["data.eval.fraction"] == "command line"
    assert origin["training.learning_rate"] == "recipe"
    assert origin["training.weight_decay"] == "default"


@pytest.mark.parametrize("part", ["1", "first"])
def test_an_override_names_an_entry_of_a_list_that_is_there(tmp_path: Path, part: str) -> None:
    said = mistakes(write(tmp_path, SMALL), f"data.train.{part}.path=csv")
    assert said == f"command line: data.train.{part}.path: data.train is a list of 1; name one by number, from 0"


def test_more_mistakes_than_a_page_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "".join(f"wrong_{number}: 1\n" for number in range(150)))
    with pytest.raises(RecipeError, match=r"and 100 more mistakes$") as caught:
        load_recipe(path)
    assert caught.value.count == 150


def test_the_run_folder_is_named_after_the_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, SMALL)).recipe.output_dir == "runs/recipe"
    assert load_recipe(write(tmp_path, SMALL), ["output_dir=here"]).recipe.run_dir == "here"


def test_what_is_resolved_loads_again(tmp_path: Path) -> None:
    extra = "samples: {prompts: ['a: b', \"c # d\", 'ünï\\n']}\nquantization: {load_in_4bit: true}\n"
    extra += "training: {mixed_precision: no, learning_rate: 1e-5, lr_scheduler_kwargs: {num_cycles: 0.5}}\n"
    path = write(tmp_path, SMALL + "    - {path: b, weight: 0.5}\n  eval: [{path: c}]\n" + extra)
    loaded = load_recipe(path)
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(loaded), encoding="utf-8")
    assert recipe_from_resolved(again) == loaded.recipe
    assert set(load_recipe(again).origins.values()) == {"recipe"}


def test_all_mistakes_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {}\ndata:\n  train: []\ntraning: {}\nlora: {r: 0}\n")
    text = mistakes(path, "training.sed=1")
    heads = [line for line in text.splitlines() if not line.startswith("    ")]
    assert [head.split(": ")[0].removeprefix(str(path)) for head in heads] == [
        ":1:1",
        ":3:10",
        ":4:1",
        ":5:11",
        "command line",
    ]


def test_places_and_carets(tmp_path: Path) -> None:
    text = mistakes(write(tmp_path, SMALL + "training:\n  seed: x\n")).splitlines()
    assert text[0].endswith(
        "recipe.yaml:6:9: training.seed: is x; it must be a whole number; write digits, without units or expressions"
    )
    assert text[1] == "      seed: x"
    assert text[2].index("^") == text[1].index("x")


def test_a_missing_recipe_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    assert "did you mean" in mistakes(tmp_path / "recip.yaml")
    assert "is a folder" in mistakes(tmp_path)


def test_at_least_sixty_foreign_keys_and_all_lead_to_ours() -> None:
    assert len(answers("ours")) + len(answers("instead")) >= 60
    known = set()

    def collect(model: Any, prefix: str) -> None:
        for key, value in model.items():
            known.add(prefix + key)
            inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
            if isinstance(inner, dict):
                collect(inner, f"{prefix}{key}.")

    full = {
        "model": {"name_or_path": "x"},
        "quantization": {"load_in_4bit": True},
        "data": {"train": [{"path": "x"}], "eval": {"fraction": 0.1}},
    }
    collect(Recipe.model_validate(full).model_dump(), "")
    for key, ours in {**answers("ours"), "gradient_accumulation_steps": "training.global_batch_size"}.items():
        path = ours.split(":")[0].split(" ")[0]
        assert path in known or path == "report", f"{key} leads to {path}, which is not a key"
        assert key not in known, f"{key} is a key of ours"


def test_arguments_of_the_schedule_are_transformers_own() -> None:
    own = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name, ours in SCHEDULER_ARGUMENTS.items():
        function = optimization.TYPE_TO_SCHEDULER_FUNCTION[name]
        assert set(ours) == set(inspect.signature(function).parameters) - own, name


def test_generated_files_are_fresh() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == json_schema()
    assert REFERENCE_FILE.read_text(encoding="utf-8") == reference_page()


def test_each_auto_names_the_function_that_decides_it() -> None:
    section, taking = "", set()
    for line in reference_page().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `") and "`auto`" in line.split(" | ")[1]:
            taking.add(f"{section}.{line.split('`')[1]}")
    assert taking == {*AUTO}
    assert len(taking) == 8
    for place in set(AUTO.values()):
        module, _, name = place.rpartition(".")
        assert callable(getattr(importlib.import_module(f"finetune.{module}"), name)), place


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, SMALL)
    assert main(["check", str(path), "--json", "--resolved"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert result["recipe"]["training"]["seed"] == 42
    assert main(["check", str(path), "training.sed=1", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["mistakes"] == [
        "command line: training.sed: is unknown; did you mean training.seed?"
    ]
    assert captured.err == ""


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("arguments", "seconds"), [(["--help"], 0.3), (["check", "RECIPE"], 0.5)])
def test_help_and_check_import_no_torch(tmp_path: Path, arguments: list[str], seconds: float) -> None:
    """The bound on CPU time is shown by benchmarks/start.py; this holds what makes it possible."""
    path = write(tmp_path, SMALL)
    words = [str(path) if word == "RECIPE" else word for word in arguments]
    program = f"import sys; from finetune.cli.main import main; code = main({words!r}); "
    program += "print(sorted(sys.modules)); sys.exit(code)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = process.stdout.splitlines()[-1]
    assert not {"'torch'", "'transformers'", "'datasets'", "'numpy'"} & set(modules.strip("[]").split(", "))
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 5 * seconds, used  # five times, since a busy machine counts more; start.py has the figure


TEXTS = st.one_of(
    st.text(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)), inner, max_size=3)
        ),
        max_leaves=12,
    ).map(yaml.safe_dump),
)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_no_text_makes_it_fall_over(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome = "read"
    try:
        load_recipe(path)
    except RecipeError as error:
        outcome = str(error)
    assert outcome
    assert "Input should" not in outcome
