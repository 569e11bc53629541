"""The main job from recipe to run folder, on a tiny model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli.main import main as cli
from finetune.model import build
from finetune.recipe.loader import load_recipe
from finetune.train import main
from finetune.training import loop
from finetune.training.start import choose, prepare, refuse
from tests.support.models.tiny import write_chats
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import tiny_lora, write_recipe

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, chats: Path) -> Path:
    steps: dict[str, Any] = {"training": {"max_steps": 6}, "eval_steps": 2, "save_steps": 4}
    rest = {"samples": {"count": 2, "max_new_tokens": 4}, "output_dir": str(tmp_path / "run")}
    return write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps, **rest))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_start_reads_the_bases_configuration_once(
    recipe: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the probe computes its result."""
    folders: list[Path] = []
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "look_at_config", folders.append)
    choices = choose(refuse(load_recipe(recipe), ALONE))
    assert choices.probed["remembered"] is False
    start = prepare(choices)
    assert start.claim is not None
    start.claim.release()
    assert folders.count(tiny_llama) == 1


def test_the_run_folder_holds_what_is_promised(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe)]) == 0
    assert "adapters on 14 layers: q_proj 2, k_proj 2, " in capsys.readouterr().out
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    train = [line for line in metrics if line["kind"] == "train"]
    evals = [line for line in metrics if line["kind"] == "eval"]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert set(train[0]) == {
        "kind", "step", "epoch", "loss", "grad_norm", "learning_rate", "supervised_tokens", "tokens", "step_seconds",
        "tokens_per_second", "data_wait_fraction", "peak_memory_gib",
    }  # fmt: skip
    assert [line["step"] for line in evals] == [0, 2, 4, 6]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert evals[0]["perplexity"] == pytest.approx(math.exp(evals[0]["loss"]))
    samples = lines(run / "samples.jsonl")
    assert [(line["when"], line["step"]) for line in samples] == [("before", 0)] * 2 + [("after", 6)] * 2
    assert samples[0]["prompt"] == samples[2]["prompt"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert json.loads((run / "run_state.json").read_text())["state"] == "finished"
    receipt = json.loads((run / "receipt.json").read_text())
    assert (receipt["strategy"], receipt["world_size"], receipt["non_blocking"]) == ("single", 1, True)
    assert receipt["dtypes"]["master"] == "float32"
    assert receipt["batch"]["total_steps"] == 6
    assert (receipt["probe"]["precision"], receipt["probe"]["adapters"]["reached_share"]) == ("float32", 1.0)
    assert set(receipt["probe"]["found"]) == {"kept", "recomputed"}
    seven = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (receipt["adapted_layers"], receipt["adapted_modules"]) == (14, dict.fromkeys(seven, 2))
    assert receipt["adapters_computed"] == {"own": 14}
    assert json.loads((run / "environment.json").read_text())["versions"]["torch"]
    assert {path.name for path in run.iterdir()} >= {"recipe.yaml", "adapter"}


@pytest.mark.parametrize(
    ("override", "words"), [("lora.target_modules=[q_porj]", "q_proj"), ("lora.modules_to_save=[lm_haed]", "lm_head")]
)
def test_a_misspelt_module_is_a_line_before_data_are_prepared(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    words: str,
) -> None:
    prepared: list[object] = []
    monkeypatch.setattr("finetune.tokens.dataset.prepare", lambda *given: prepared.append(given))
    assert main([str(recipe), override]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words in errors[0]
    assert not prepared
    assert not (tmp_path / "run").exists()


def test_the_adapter_loads_in_plain_peft(recipe: Path, tmp_path: Path, tiny_llama: Path) -> None:
    assert main([str(recipe), "samples.count=0", "lora.lora_dropout=0.1"]) == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        moved = tuned(input_ids=ids).logits
        with tuned.disable_adapter():
            still = tuned(input_ids=ids).logits
        base_alone = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(input_ids=ids).logits
    assert torch.equal(still, base_alone)
    assert not torch.equal(moved, still)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter").chat_template


@pytest.mark.thorough
def test_full_weights_load_in_plain_transformers(recipe: Path, tmp_path: Path, tiny_llama: Path) -> None:
    assert main([str(recipe), "lora=null", "training.learning_rate=1e-3", "samples.count=0"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))


def test_a_finished_run_is_left_alone(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recipe)]) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main([str(recipe)]) == 0
    assert "finished" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert main([str(recipe), "training.resume=never"]) == 0
    assert (tmp_path / "run.previous-1" / "metrics.jsonl").read_bytes() == before


@pytest.mark.thorough
def test_another_recipe_in_the_same_folder_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe)]) == 0
    assert main([str(recipe), "training.learning_rate=1e-3"]) == 2
    errors = capsys.readouterr().err
    assert "training.learning_rate" in errors
    assert "training.resume=never" in errors


@pytest.mark.thorough
def test_early_stopping_ends_and_exports(recipe: Path, tmp_path: Path) -> None:
    overrides = ["training.learning_rate=1e-30", "training.early_stopping_patience=1", "eval_steps=1", "save_steps=1"]
    # At such a rate weights move by 1e-30: the second evaluation is not better than the first.
    assert main([str(recipe), *overrides, "training.max_steps=40"]) == 0
    steps = [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert steps[-1] < 40
    assert (tmp_path / "run" / "adapter").is_dir()
    assert json.loads((tmp_path / "run" / "run_state.json").read_text())["state"] == "finished"


def test_what_is_not_finite_names_step_and_rows(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = loop.optimizer_step
    calls = []

    def spoiled(parts: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            next(p for p in parts.model.parameters() if p.requires_grad).register_hook(
                lambda gradient: gradient * math.nan
            )
        return original(parts, *args, **kwargs)

    monkeypatch.setattr(loop, "optimizer_step", spoiled)
    assert main([str(recipe), "samples.count=0"]) == 2
    errors = capsys.readouterr().err
    assert "step 3" in errors
    assert "rows" in errors
    assert "Traceback" not in errors
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["phase"], state["rank"]) == ("failed", "training", 0)


@pytest.mark.slow
def test_logging_every_third_step_weighs_by_tokens(recipe: Path, tmp_path: Path) -> None:
    assert main([str(recipe), "samples.count=0", f"output_dir={tmp_path / 'each'}"]) == 0
    assert main([str(recipe), "samples.count=0", "logging_steps=3", f"output_dir={tmp_path / 'third'}"]) == 0
    each, third = (
        [line for line in lines(tmp_path / name / "metrics.jsonl") if line["kind"] == "train"]
        for name in ("each", "third")
    )
    assert [line["step"] for line in third] == [3, 6]
    for index, line in enumerate(third):
        part = each[3 * index : 3 * index + 3]
        tokens = sum(step["supervised_tokens"] for step in part)
        assert line["supervised_tokens"] == tokens
        expected = sum(step["loss"] * step["supervised_tokens"] for step in part) / tokens
        assert line["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough
def test_phases_are_measured_when_asked(recipe: Path, tmp_path: Path) -> None:
    assert main([str(recipe), "samples.count=0", "measure_phases=true", "training.max_steps=2"]) == 0
    phases = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "phase"]
    trained = {(name, step) for name in ("forward", "backward", "step") for step in (1, 2)}
    expected = trained | {("load", 0), ("save", 2)}
    assert {(line["phase"], line["step"]) for line in phases} == expected
    assert len(phases) == len(expected)
    for line in phases:
        assert line["seconds"] > 0
        assert 0 < line["allocated_gib"] <= line["peak_gib"]
        assert (line["rank"], line["collectives"], line["textbook_bytes"]) == (0, {}, 0)


@pytest.mark.slow
def test_measuring_changes_no_bit(recipe: Path, tmp_path: Path) -> None:
    curves = []
    for number, measured in enumerate(("true", "false")):
        folder = tmp_path / str(number)
        words = ["samples.count=0", "training.max_steps=3", f"measure_phases={measured}", f"output_dir={folder}"]
        assert main([str(recipe), *words]) == 0
        train = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "train"]
        curves.append([(line["loss"], line["grad_norm"]) for line in train])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 3


@pytest.mark.thorough
def test_chat_answers_from_both(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recipe), "samples.count=0", "training.learning_rate=0.1"]) == 0
    capsys.readouterr()
    arguments = ["chat", str(tmp_path / "run"), "--prompt", "a river", "--max-new-tokens", "6"]
    assert cli([*arguments, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["who"] for answer in answers] == ["base", "tuned"]
    assert answers[0]["answer"] != answers[1]["answer"]
    assert cli(arguments) == 0
    output = capsys.readouterr().out
    assert "base:" in output
    assert "tuned:" in output


@pytest.mark.parametrize("name", ["missing", "unfinished"])
def test_chat_with_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    if name == "unfinished":
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("")
    assert cli(["chat", str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["{r: 4}", "null"])
def test_bf16_learns_too(recipe: Path, tmp_path: Path, method: str) -> None:
    command = [sys.executable, "finetune/train.py", str(recipe), "training.mixed_precision=bf16", f"lora={method}"]
    command += ["model.dtype=bfloat16", "training.learning_rate=3e-3"]
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert (receipt["dtypes"]["compute"], receipt["dtypes"]["master"]) == ("bfloat16", "float32")
    evals = [line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"]
    assert evals[-1] < evals[0]


@pytest.mark.slow
def test_silently_alone_is_refused(recipe: Path, tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` silently starts one process."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    process = subprocess.run(
        [*command, "finetune/train.py", str(recipe)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert process.returncode != 0
    assert "2 processes were asked for" in process.stderr
    assert not (tmp_path / "run").exists()
