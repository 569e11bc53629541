"""A finished run goes on for more epochs: with a constant rate it is, bitwise, the run planned with them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.cli.main import main as cli
from finetune.files import read_lines
from finetune.run_folder.checkpoint import checkpoint_steps, step_folder
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.exports import assert_same_product, contents
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]  # all of them rows, none held out
PEAK = 1e-2


def written(folder: Path, base: Path, *, epochs: float, rows: int, **changes: Any) -> Path:
    """Twelve rows an epoch, `rows` of them a step; several recipes of a folder share its run."""
    folder.mkdir(exist_ok=True)
    content = tiny_lora(base, write_chats(folder / "chats.jsonl", LENGTHS), output_dir=str(folder / "run"))
    plain: dict[str, Any] = {
        "data": {"packing": False, "eval": None},
        "training": {"global_batch_size": rows, "lr_scheduler_type": "constant", "num_train_epochs": epochs},
        "save_steps": 2,
        "lora": {"lora_dropout": 0.1},
    }
    return write_recipe(folder, merged(content, plain, changes), f"epochs-{epochs:g}.yaml")


def curve(run: Path) -> list[tuple[int, float, float, float]]:
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (4, "finished after 3 steps, goes on from step 3 to 6; its learning rates so far are those of a run planned"),
        (5, "goes on from step 2 to 5; its learning rates so far are those of a run planned with 5 steps; step 3 had "
            "2 of 5 rows and is repeated with all of them"),
    ],
    ids=["last step full", "last step short"],
)  # fmt: skip
def test_with_a_constant_rate_it_is_the_run_planned_so(
    tmp_path: Path, tiny_llama: Path, rows: int, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = {"save_total_limit": 9}
    one, two = (written(tmp_path / "longer", tiny_llama, epochs=epochs, rows=rows, **keep) for epochs in (1, 2))
    planned = written(tmp_path / "planned", tiny_llama, epochs=2, rows=rows, **keep)
    run = tmp_path / "longer" / "run"
    assert main([str(one)]) == 0
    handed_over = contents(run / "adapter")
    (run / "hub.json").write_text('{"state": "pushed"}')
    capsys.readouterr()
    assert main([str(two)]) == main([str(planned)]) == 0
    captured = capsys.readouterr()
    assert note in captured.err
    assert_same_product(run, tmp_path / "planned" / "run")
    assert curve(run) == curve(tmp_path / "planned" / "run")
    ended = {3} if rows == 4 else set()  # a short last step's checkpoint is another run's
    assert {*checkpoint_steps(run)} == {*checkpoint_steps(tmp_path / "planned" / "run")} | ended
    receipt = json.loads((run / "receipt.json").read_text())
    state = json.loads((run / "run_state.json").read_text())
    assert receipt["batch"]["total_steps"] == state["step"] == len(curve(run))
    assert state["identity"]["training.num_train_epochs"] == 2
    assert "num_train_epochs: 2" in (run / "recipe.yaml").read_text()
    assert not (run / "hub.json").exists(), "the longer run is pushed again"
    before = run / "exports" / "end-00000003"
    assert contents(before / "adapter") == handed_over
    assert max(step for step, *_ in curve(before)) == 3
    assert cli(["chat", str(before), "--prompt", "hi", "--max-new-tokens", "2"]) == 0
    assert main([str(two)]) == 0
    assert "this run is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_short_last_step_without_a_checkpoint_before_it_is_told(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (written(tmp_path, tiny_llama, epochs=epochs, rows=5, save_total_limit=1) for epochs in (1, 2))
    assert main([str(one)]) == 0
    assert checkpoint_steps(tmp_path / "run") == [3]
    assert main([str(two)]) == 0
    assert "step 3 had 2 of 5 rows, no checkpoint before it is left: 3 rows are skipped" in capsys.readouterr().err
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_another_schedule_goes_on_with_its_new_length_and_says_so(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = {"lr_scheduler_type": "cosine", "warmup_steps": 1}
    one, two = (written(tmp_path, tiny_llama, epochs=epochs, rows=4, training=cosine) for epochs in (1, 2))
    assert main([str(one)]) == main([str(two)]) == 0
    # By hand: step 1 is the warmup, the cosine falls to 0 over the other five.
    rates = [PEAK] + [PEAK * (1 + math.cos(math.pi * step / 5)) / 2 for step in (0, 1, 2, 3, 4)]
    assert [rate for *_, rate in curve(tmp_path / "run")][3:] == pytest.approx(rates[3:])
    told = f"learning rate: cosine of 6 steps, {rates[3]:.3g} at step 4"
    assert told in (error := capsys.readouterr().err)
    assert "the curve is not that of a run planned with 6 steps" in error


@pytest.mark.slow
def test_max_steps_too_and_after_a_kill_it_is_still_the_longer_run(tmp_path: Path, tiny_llama: Path) -> None:
    def steps(number: int) -> list[str]:
        return [str(written(tmp_path, tiny_llama, epochs=1, rows=4)), f"training.max_steps={number}"]

    assert main(steps(2)) == main(steps(4)) == 0
    run = tmp_path / "run"
    state = json.loads((run / "run_state.json").read_text())
    shutil.rmtree(step_folder(run, 4))
    (run / "run_state.json").write_text(json.dumps(state | {"state": "running", "step": 2}))
    whole = contents(run / "adapter")
    shutil.rmtree(run / "adapter")
    assert main(steps(4)) == 0
    assert contents(run / "adapter") == whole
    assert [step for step, *_ in curve(run)] == [1, 2, 3, 4]


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["training.num_train_epochs=0.5"], "training.num_train_epochs: 1.0 there, 0.5 now"),
        (["training.max_steps=2"], "training.max_steps: None there, 2 now"),
        (["training.num_train_epochs=2", "training.learning_rate=0.5"], "training.learning_rate: 0.01 there, 0.5 now"),
        (["training.num_train_epochs=2", "lora.r=8"], "lora.r: 4 there, 8 now"),
    ],
)
def test_anything_else_is_refused_and_stays_as_it_was(
    tmp_path: Path, tiny_llama: Path, changes: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(tmp_path, tiny_llama, epochs=1, rows=4)
    assert main([str(recipe)]) == 0
    before = contents(tmp_path / "run")
    assert main([str(recipe), *changes]) == 2
    assert words in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_that_stopped_early_is_not_continued(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = {"training": {"learning_rate": 1e-9, "early_stopping_patience": 1}, "eval_steps": 1, "save_steps": 1}
    recipe = written(tmp_path, tiny_llama, epochs=9, rows=2, data={"eval": {"fraction": 0.3}}, **idle)
    assert main([str(recipe)]) == 0
    step = json.loads((tmp_path / "run" / "run_state.json").read_text())["step"]
    before = contents(tmp_path / "run")
    assert main([str(recipe), "training.num_train_epochs=20"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"early stopping ended this run at step {step} of " in error
    assert f"begin a new run with its result: model.adapter={tmp_path / 'run' / 'adapter'}" in error
    assert len(error.splitlines()) == 1
    assert contents(tmp_path / "run") == before
    at_its_end = [str(recipe), f"output_dir={tmp_path / 'end'}"]
    assert main([*at_its_end, f"training.max_steps={step}"]) == 0
    assert main([*at_its_end, "training.max_steps=20"]) == 2
    assert f"early stopping ended this run at step {step} of {step}; begin" in capsys.readouterr().err


def test_without_a_checkpoint_it_cannot_go_on(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(tmp_path, tiny_llama, epochs=1, rows=4)
    assert main([str(recipe)]) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main([str(recipe), "training.num_train_epochs=2"]) == 2
    assert "has no checkpoint to go on from; begin a new run with its result" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_under_fsdp2(tmp_path: Path, tiny_llama: Path) -> None:
    recipes = [written(tmp_path / "longer", tiny_llama, epochs=epochs, rows=4) for epochs in (1, 2)]
    recipes.append(written(tmp_path / "planned", tiny_llama, epochs=2, rows=4))
    assert launch(recipes, ranks=2, words=["accelerate_config=fsdp2"]) == [0, 0, 0]
    found, planned = (
        load_file(tmp_path / name / "run" / "adapter" / "adapter_model.safetensors") for name in ("longer", "planned")
    )
    assert all(found[name].equal(planned[name]) for name in planned)
