"""Evaluations and checkpoints by share of the run, and the refusal of evaluations that would not be saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.recipe.sections.base import steps_between
from finetune.run_folder.checkpoint import step_folder
from finetune.train import main
from tests.support.runs.overfitting import document, evaluations, overfitting, saved_steps, write_sets
from tests.support.runs.recipes import tiny_lora, write_recipe

pytestmark = pytest.mark.usefixtures("forget_the_last_run")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("share", [0.001, 0.07, 0.1, 1 / 3, 0.5, 0.999])
@pytest.mark.parametrize("total", [1, 3, 20, 100, 12_345])
def test_a_share_is_as_many_steps_as_in_transformers(share: float, total: int) -> None:
    from transformers import TrainerState, TrainingArguments

    state = TrainerState()
    state.compute_steps(TrainingArguments(eval_strategy="steps", eval_steps=share, save_steps=share), total)
    assert steps_between(share, total) == state.eval_steps == state.save_steps


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "evaluated", "saved"),
    [
        (["eval_steps=0.1", "save_steps=0.2"], [3, 6, 9, 12, 15, 18, 21, 23], [5, 10, 15, 20, 23]),
        (["eval_steps=0.5", "save_steps=7"], [12, 23], [7, 14, 21, 23]),
        (["eval_steps=100", "save_steps=100"], [23], [23]),
    ],
    ids=str,
)
def test_evaluations_and_checkpoints_by_share_of_the_run(
    settings: list[str], evaluated: list[int], saved: list[int], tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]
) -> None:
    """Every ceil(23 x share) steps, and at the last step."""
    recipe = overfitting(tmp_path, tiny_llama, sets, training={"load_best_model_at_end": False}, save_total_limit=9)
    assert main([str(recipe), "training.max_steps=23", "training.learning_rate=1e-3", *settings]) == 0
    assert [step for step in evaluations(tmp_path / "run") if step] == evaluated
    assert saved_steps(tmp_path / "run") == saved


@pytest.mark.slow
def test_a_resumed_run_has_the_same_shares(tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]) -> None:
    """Of the whole run: after 8 of 20 steps a fifth is still four of them, and not three."""
    fifths = {"eval_steps": 0.2, "save_steps": 0.2, "save_total_limit": 9}
    recipe = overfitting(tmp_path, tiny_llama, sets, training={"max_steps": 20, "learning_rate": 1e-3}, **fifths)
    assert main([str(recipe)]) == 0
    run, whole = tmp_path / "run", [4, 8, 12, 16, 20]
    for step in whole[2:]:
        shutil.rmtree(step_folder(run, step))
    (run / "run_state.json").write_text(json.dumps(document(run, "run_state.json") | {"state": "stopped", "step": 8}))
    assert main([str(recipe)]) == 0
    assert [step for step in evaluations(run) if step] == saved_steps(run) == whole


@pytest.mark.slow
def test_the_default_evaluates_and_saves_ten_times(tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]) -> None:
    content = tiny_lora(tiny_llama, sets["train"], training={"max_steps": 20}, output_dir=str(tmp_path / "run"))
    assert main([str(write_recipe(tmp_path, content))]) == 0
    assert list(evaluations(tmp_path / "run")) == list(range(0, 21, 2))
    assert saved_steps(tmp_path / "run") == [18, 20]
    batch = document(tmp_path / "run", "receipt.json")["batch"]
    assert (batch["eval_steps"], batch["save_steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["eval_steps=0.1", "save_steps=0.4"], "save_steps: evaluations every 1 steps of 6 are not all saved"),
        (["eval_steps=3", "save_steps=0.3"], "write save_steps: 3, as eval_steps is, or eval_steps: 4"),
    ],
)
def test_an_evaluation_without_a_checkpoint_is_refused(
    settings: list[str],
    words: str,
    tmp_path: Path,
    tiny_llama: Path,
    sets: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows decide how many steps there are; nothing is written."""
    recipe = overfitting(tmp_path, tiny_llama, sets, training={"max_steps": None, "num_train_epochs": 3.0})
    assert main([str(recipe), "data.packing=false", *settings]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()
