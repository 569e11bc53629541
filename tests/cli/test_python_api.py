"""`finetune.fit` and `finetune.load`: the command from Python, and a run's folder as an object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import finetune
from finetune.cli import python_api
from finetune.errors import FinetuneError, RecipeError, Stopped
from finetune.files import read_lines
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny_lora, write_recipe


@pytest.fixture
def content(tmp_path: Path, tiny_llama: Path) -> dict[str, Any]:
    rows = write_chats(tmp_path / "chats.jsonl", [24] * 30)
    return tiny_lora(tiny_llama, rows, output_dir=str(tmp_path / "run"), training={"max_steps": 2})


def trained_by(run: finetune.TrainedRun) -> list[float]:
    return [line["loss"] for line in read_lines(run.folder / "metrics.jsonl") if line["kind"] == "train"]


def test_a_training_from_python(tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = finetune.fit(content, training={"max_steps": 3}, **{"training.seed": 5})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (run.folder, run.adapter, run.model) == (tmp_path / "run", tmp_path / "run" / "adapter", None)
    assert "step 3/3" in capsys.readouterr().out
    recorded = load_recipe(run.folder / "recipe.yaml").recipe
    assert (recorded.training.max_steps, recorded.training.seed) == (3, 5)
    metrics = run.metrics
    assert list(metrics[metrics.kind == "train"].loss) == trained_by(run)
    again = finetune.load(str(run.folder))
    assert again.metrics.equals(metrics)
    first = again.chat("one two", max_new_tokens=4)
    assert again.chat("one two", max_new_tokens=4) != "" or first == "", "the conversation goes on"
    assert [turn["role"] for turn in again._session.tuned.history] == ["user", "assistant"] * 2


@pytest.mark.thorough
def test_a_path_and_a_recipe_train_as_their_content(tmp_path: Path, content: dict[str, Any]) -> None:
    file = write_recipe(tmp_path, content)
    losses = []
    for number, recipe in enumerate((content, file, str(file), load_recipe(file).recipe)):
        losses.append(trained_by(finetune.fit(recipe, output_dir=str(tmp_path / f"run-{number}"))))
    assert len(losses[0]) == 2
    assert losses == [losses[0]] * 4


def test_mistakes_are_the_commands(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean data"):
        finetune.fit({**content, "dta": 3})
    with pytest.raises(RecipeError, match=r"command line: training\.max_steps: "):
        finetune.fit(content, training={"max_steps": "many"})
    with pytest.raises(FinetuneError, match="not a run folder"):
        finetune.load(tmp_path)
    assert not (tmp_path / "run").exists()


def test_values_of_python_are_a_files_values(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Recipe] = []
    monkeypatch.setattr(
        python_api, "_run_command", lambda _, file, *words: trained.append(load_recipe(file, words).recipe)
    )
    (first,) = content["data"]["train"]
    content["data"]["train"] = [first, {**first, "weight": 2.0}]
    content["output_dir"] = tmp_path / "run"
    values = {"training": {"max_steps": np.int64(3), "learning_rate": np.float64(2e-4)}}
    run = finetune.fit(content, **values, output_dir=tmp_path / "other", data={"train": [{**first, "weight": 3.0}]})
    assert run.folder == tmp_path / "other"
    assert (trained[0].training.max_steps, trained[0].training.learning_rate) == (3, 2e-4)
    assert [(source.path, source.weight) for source in trained[0].data.train] == [(first["path"], 3.0)], (
        "a list replaces"
    )
    finetune.fit(content, training=MappingProxyType({"max_steps": 4}), samples={"prompts": ("one", "two")})
    assert trained[1].training.max_steps == 4
    assert (len(trained[1].data.train), trained[1].samples.prompts) == (2, ["one", "two"])
    finetune.fit(content, data={"date_string": date(2026, 11, 30)})
    assert trained[2].data.date_string == "2026-11-30"
    with pytest.raises(RecipeError, match=r"^data\.train\.0\.path: is of Python's type set; give a text or a number$"):
        finetune.fit(content, data={"train": [{"path": {"json"}}]})


@pytest.mark.thorough
def test_what_fails_in_the_training_is_raised(content: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text(rows.read_text("utf-8") + '{}\n{"messages": 3}\n', "utf-8")
    with pytest.raises(FinetuneError) as caught:
        finetune.fit(content)
    assert all(f"chats.jsonl:{line}: " in str(caught.value) for line in (31, 32)), "every mistake, as the command says"


@pytest.mark.thorough
def test_an_interrupt_saves_and_the_same_call_goes_on(content: dict[str, Any], tmp_path: Path) -> None:
    content["training"]["max_steps"] = 400  # 10 ms each: the signal must come before the last one

    def interrupt() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.is_file() and '"step": 2,' in metrics.read_text("utf-8")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores the signal
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Stopped):
            finetune.fit(content)
    finally:
        signal.signal(signal.SIGINT, before)
    state = json.loads((tmp_path / "run" / "run_state.json").read_text("utf-8"))
    assert 2 <= state["step"] < 400
    run = finetune.fit(content)
    assert run.adapter is not None
    assert len(trained_by(run)) == 400


def test_importing_finetune_loads_no_torch() -> None:
    program = "import sys, finetune; finetune.fit, finetune.load; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
