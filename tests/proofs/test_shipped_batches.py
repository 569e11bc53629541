"""The recipes of the first page on rows of one's own: enough steps, each with a rate, and a held-out loss that falls.

The model is a tiny one and the rows are made here; batches, lengths, rates, schedule, epochs and precision are as
shipped. tests/proofs/test_as_written.py trains every recipe on its own data set.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.recipe_list import method_of
from finetune.files import read_lines
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.tokens.dataset import prepare
from finetune.train import main
from finetune.training.batch_notes import FEW, batch_notes, positions_of
from finetune.training.batch_plan import BatchPlan, plan_batches
from tests.support.models.tiny import WORDS, save_tiny
from tests.support.runs.cells import ROOT, launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.recipes import SETTING

RECIPES = {"llama3_qlora": 1, "llama3_ddp": 2, "llama3_fsdp": 2, "llama3_full": 2, "llama3_zero3": 2}  # gloo ranks
pytestmark = pytest.mark.usefixtures("forget_the_last_run")
QUICKLY = "llama3_qlora"
LEAST_STEPS = {"lora": 30, "qlora": 30, "full": 20}


def write_many(file: Path, chats: int) -> Path:
    """Chats of about 300 tokens."""
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    with file.open("w", encoding="utf-8") as out:
        for _ in range(chats):
            turns = {"user": text(10), "assistant": text(250 + draw.randrange(60))}
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "chats.jsonl", 2_000)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small layer, for half a million bfloat16 tokens take a CPU long; weights large enough for a loss to fall."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    positions = {"max_position_embeddings": 131_072}  # of Llama 3.1
    return save_tiny(tmp_path_factory.mktemp("llama"), **small, **positions, initializer_range=0.1)


def shipped(name: str, folder: Path, model: Path, chats: Path) -> tuple[Path, list[str]]:
    """The recipe's own text with a run folder, and what has to differ on a machine without GPU and weights."""
    recipe = folder / f"{name}.yaml"
    text = (ROOT / "recipes" / f"{name}.yaml").read_text("utf-8")
    recipe.write_text(f"{text}output_dir: {folder / 'run'}\n", "utf-8")
    own = json.dumps([{"path": "json", "data_files": str(chats)}])
    rows = [f"data.train={own}", "data.eval={fraction: 0.05}"]
    return recipe, ["budget.gpus=0", f"model.name_or_path={model}", *rows]


def planned(name: str, folder: Path, model: Path, chats: Path, *settings: str) -> tuple[BatchPlan, list[str]]:
    """The steps on as many ranks as the recipe is made for, and what is said of them before training."""
    recipe, words = shipped(name, folder, model, chats)
    requested, ranks = load_recipe(recipe, [*words, *settings]).recipe, load_recipe(recipe).recipe.budget.gpus
    prepared = prepare(requested, load_tokenizer(requested))
    plan = plan_batches(requested, len(prepared.train), world_size=ranks, rank=0, flat=True)
    return plan, batch_notes(requested, prepared, plan, positions_of(requested))


def trained(name: str, folder: Path, model: Path, chats: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a whole run."""
    recipe, words = shipped(name, folder, model, chats)
    if (ranks := RECIPES[name]) == 1:
        assert main([str(recipe), *words]) == 0
    else:
        output = Path(f"{recipe}.rank0.said")
        assert launch([recipe], ranks=ranks, words=words, timeout=600) == [0], output.read_text("utf-8")
    return read_lines(folder / "run" / "metrics.jsonl")


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize("name", RECIPES)
def test_two_thousand_chats_are_steps(name: str, llama: Path, chats: Path, tmp_path: Path) -> None:
    plan, notes = planned(name, tmp_path, llama, chats)
    method = method_of(load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe)
    assert plan.total_steps >= LEAST_STEPS[method]
    assert len(notes) == 1, "nothing is wrong with them"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_two_thousand_chats_are_a_training(name: str, llama: Path, chats: Path, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
    skip_where_missing(recipe.accelerate_config)
    lines = trained(name, tmp_path, llama, chats)
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) >= LEAST_STEPS[method_of(recipe)]
    assert [line["step"] for line in steps if line["learning_rate"] == 0] == []
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", RECIPES)
def test_forty_chats_are_reported_as_few(name: str, llama: Path, tmp_path: Path) -> None:
    """And the settings named are enough."""
    chats = write_many(tmp_path / "chats.jsonl", 40)
    few = [line for line in planned(name, tmp_path, llama, chats)[1] if " few: " in line]
    assert len(few) == 1
    assert re.match(r"training\.(num_train_epochs|global_batch_size): (1 step is|2 steps are) few: ", few[0]), few
    plan, notes = planned(name, tmp_path, llama, chats, *SETTING.findall(few[0]))
    assert plan.total_steps >= FEW
    assert len(notes) == 1, "nothing but the line that there always is"


@pytest.mark.thorough
def test_it_is_shown_before_weights_are_loaded(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write_many(tmp_path / "chats.jsonl", 40)
    none = tmp_path / "no weights"
    shutil.copytree(llama, none, ignore=shutil.ignore_patterns("*.safetensors"))
    recipe, words = shipped(QUICKLY, tmp_path, none, chats)
    assert main([str(recipe), *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"data: \d rows of up to 2,048 tokens \([\d,]+ tokens an epoch\); 1 step of 14 rows, "
        r"about [\d,]+ tokens each, 1 of them warming up",
        lines[1],
    )
    assert "1 step is few" in lines[2]
