"""The weights of the best evaluation are kept, exported and named, under every strategy."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.files import read_lines
from finetune.recipe.loader import load_recipe
from finetune.run_folder.checkpoint import step_folder
from finetune.run_folder.facts import read_run
from finetune.run_folder.trained_tensors import model_tensors
from finetune.strategies.assemble import Assembled
from finetune.train import main
from finetune.training import loop, worst_step
from finetune.training.agreement import Agreed
from finetune.training.run import Run
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.overfitting import (
    STEPS,
    check_exported,
    document,
    evaluations,
    overfitting,
    saved_steps,
    trained_at,
    write_sets,
)

pytestmark = pytest.mark.usefixtures("forget_the_last_run")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_sets(tmp_path_factory.mktemp("sets"))


def check_best(run: Path) -> int:
    """The step of the lowest loss, which is early; its checkpoint is kept and exported, and everything names it."""
    losses = {step: line["loss"] for step, line in evaluations(run).items()}
    best = min((step for step in losses if step), key=lambda step: losses[step])
    assert 0 < best < STEPS - 2, losses
    assert saved_steps(run) == [best, STEPS]
    check_exported(run, best)
    expected = {"step": best, "best": True, "metric": "eval_loss", "loss": losses[best]}
    assert document(run, "receipt.json")["export"] == expected
    state = document(run, "run_state.json")
    assert (state["state"], state["step"], state["exported"]) == ("finished", STEPS, expected)
    return best


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] in ("train", "eval")]


def test_the_best_evaluations_weights_are_exported(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = overfitting(tmp_path, tiny_llama, sets, samples={"count": 1, "max_new_tokens": 4})
    assert main([str(recipe)]) == 0
    best = check_best(tmp_path / "run")
    losses = evaluations(tmp_path / "run")
    said = f"exported: the weights of step {best}, held-out loss {losses[best]['loss']:.4f}, the best evaluation; "
    assert said + f"of step {STEPS}, the last, it is {losses[STEPS]['loss']:.4f}\n" in capsys.readouterr().out
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [(line["when"], line["step"]) for line in samples] == [("before", 0), ("after", STEPS)]
    assert f"step {best}, the best: {losses[best]['loss']:.4f}" in (tmp_path / "run" / "report.html").read_text("utf-8")
    facts = read_run(tmp_path / "run", load_recipe(recipe).recipe)
    assert facts.exported_eval() == losses[best]


@pytest.mark.slow
def test_answers_after_training_are_those_of_the_exported_weights(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a longer run sets aside is named by their step."""
    asked: list[tuple[str, dict[str, torch.Tensor]]] = []

    def look(agreed: Agreed, run: Run, parts: Assembled, *, when: str, step: int) -> None:
        tensors = model_tensors(parts.unwrapped_model)
        asked.append((when, {name: tensor.detach().clone() for name, tensor in tensors.items()}))

    monkeypatch.setattr("finetune.training.session.write_samples", look)
    recipe = overfitting(tmp_path, tiny_llama, sets)
    assert main([str(recipe)]) == 0
    run = tmp_path / "run"
    best = check_best(run)
    expected = trained_at(run, best)
    assert [when for when, _ in asked] == ["after"]
    assert asked[0][1].keys() == expected.keys()
    assert [name for name in expected if not torch.equal(asked[0][1][name], expected[name])] == []
    assert main([str(recipe), f"training.max_steps={STEPS + 2}"]) == 0
    assert document(run, f"exports/end-{STEPS:08d}/export.json") == {"run": "run", "step": best}


@pytest.mark.slow
def test_without_it_the_last_weights_are_exported(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = overfitting(tmp_path, tiny_llama, sets)
    assert main([str(recipe), "training.load_best_model_at_end=null"]) == 0
    run = tmp_path / "run"
    assert saved_steps(run) == [STEPS]
    check_exported(run, STEPS)
    last = evaluations(run)[STEPS]["loss"]
    expected = {"step": STEPS, "best": False, "metric": "eval_loss", "loss": last}
    assert document(run, "run_state.json")["exported"] == expected
    assert f"exported: the weights of step {STEPS}, held-out loss {last:.4f}, the last\n" in capsys.readouterr().out


@pytest.mark.slow  # one rank of ZeRO: tests/strategies/test_zero_one_rank.py
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("ddp", "lora"),
        ("fsdp2", "lora"),
        ("fsdp2", "full"),
        ("fsdp2_offload", "lora"),
        ("zero1", "full"),
        ("zero2_offload", "lora"),
        ("zero3", "lora"),
        ("zero3", "full"),
        ("zero3_nvme", "full"),
    ],
)
def test_under_every_strategy(
    strategy: str, method: str, tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]
) -> None:
    """With constants of AdamW that are nobody's default: the curve is that of one process (its steps: tests/model/)."""
    skip_where_missing(strategy)
    sections: dict[str, Any] = {"training": {"adam_beta1": 0.85, "adam_beta2": 0.97, "adam_epsilon": 1e-6}}
    if method == "full":
        sections["lora"] = None
    assert main([str(overfitting(tmp_path / "one", tiny_llama, sets, **sections))]) == 0
    recipe = overfitting(tmp_path / "two", tiny_llama, sets, accelerate_config=strategy, **sections)
    assert launch([recipe], ranks=2, timeout=400) == [0]
    check_best(tmp_path / "two" / "run")
    one, two = (losses(tmp_path / name / "run") for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_early_stopping_exports_the_best(tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]) -> None:
    """On by default with patience; the run ends after as many evaluations without a better loss."""
    recipe = overfitting(tmp_path, tiny_llama, sets, training={"early_stopping_patience": 2})
    assert main([str(recipe), "training.load_best_model_at_end=null", "training.max_steps=40"]) == 0
    run = tmp_path / "run"
    losses = {step: line["loss"] for step, line in evaluations(run).items() if step}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 2 * 2
    assert saved_steps(run) == [best, best + 2 * 2]
    check_exported(run, best)


@pytest.mark.thorough
def test_the_evaluation_before_training_does_not_count(tmp_path: Path, tiny_llama: Path, sets: dict[str, Path]) -> None:
    """At this rate every step makes the base worse; the base itself is no adapter that could be exported."""
    recipe = overfitting(tmp_path, tiny_llama, sets)
    assert main([str(recipe), "lora=null", "training.learning_rate=1"]) == 0
    losses = {step: line["loss"] for step, line in evaluations(tmp_path / "run").items()}
    assert min(losses, key=lambda step: losses[step]) == 0, losses
    step = document(tmp_path / "run", "run_state.json")["exported"]["step"]
    assert step == min((step for step in losses if step), key=lambda step: losses[step])


@pytest.mark.slow
def test_a_resumed_run_remembers_the_best(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended between two checkpoints after the best, it goes on from the newest and exports the best."""
    recipe = overfitting(tmp_path, tiny_llama, sets, save_steps=1, save_total_limit=2)
    original = loop.optimizer_step
    calls = []

    def ends_at_11(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 11:
            raise RuntimeError("the power is gone")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "optimizer_step", ends_at_11)
        patch.setattr(worst_step, "optimizer_step", original)  # tried before the first, whenever that is imported
        with pytest.raises(RuntimeError, match="the power is gone"):
            main([str(recipe)])
    run = tmp_path / "run"
    before = saved_steps(run)
    assert before[-2:] == [9, 10]
    assert len(before) == 3
    assert main([str(recipe)]) == 0
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert (steps, len(calls)) == (list(range(1, STEPS + 1)), 11)
    assert saved_steps(run) == [before[0], STEPS - 1, STEPS]
    check_exported(run, before[0])
    assert document(run, "run_state.json")["exported"]["step"] == before[0]


@pytest.mark.slow
def test_a_lost_best_is_told_and_looked_for_anew(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = overfitting(tmp_path, tiny_llama, sets, save_total_limit=9)
    assert main([str(recipe)]) == 0
    run = tmp_path / "run"
    best = document(run, "run_state.json")["exported"]["step"]
    for step in (best, 10, 12):
        shutil.rmtree(step_folder(run, step))
    state = document(run, "run_state.json") | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")
    assert main([str(recipe)]) == 0
    assert f"the best evaluation so far, of step {best}, cannot be exported (MANIFEST.json is missing)" in (
        capsys.readouterr().out
    )
    losses = {step: line["loss"] for step, line in evaluations(run).items() if step > 8}
    check_exported(run, min(losses, key=lambda step: losses[step]))


@pytest.mark.slow
def test_a_damaged_best_is_a_line(
    tmp_path: Path,
    tiny_llama: Path,
    sets: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by its hashes at the end; the line names what still can be exported, and that works."""
    recipe = overfitting(tmp_path, tiny_llama, sets)
    run, original = tmp_path / "run", loop.take_steps

    def spoil_the_best(*given: Any) -> bool:
        finished = original(*given)
        file = step_folder(run, saved_steps(run)[0]) / "model-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return finished

    with monkeypatch.context() as patch:
        patch.setattr("finetune.training.session.take_steps", spoil_the_best)
        assert main([str(recipe)]) == 2
    best = saved_steps(run)[0]
    errors = capsys.readouterr().err
    assert f"step-{best:08d}: the best evaluation's checkpoint cannot be exported: model-00000.safetensors is" in errors
    assert "training.load_best_model_at_end=false" in errors
    assert not (run / "adapter").exists()
    assert main([str(recipe), "training.load_best_model_at_end=false"]) == 0
    check_exported(run, STEPS)


@pytest.mark.slow
def test_several_sets_and_the_best_of_one(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`loss` is the token-weighted mean of the sets' own; each has its name in metrics.jsonl and may decide."""
    entries = [{"path": "json", "data_files": str(sets[name])} for name in ("held", "more")]
    recipe = overfitting(tmp_path, tiny_llama, sets, data={"eval": entries})
    assert main([str(recipe), "training.metric_for_best_model=eval_more_loss"]) == 0
    lines = evaluations(tmp_path / "run")
    assert set(lines[2]) == {"kind", "step", "loss", "held_loss", "more_loss", "perplexity"}
    alone = {}
    for name in ("held", "more"):
        single = overfitting(tmp_path / name, tiny_llama, sets, data={"eval": [entries[name == "more"]]})
        assert main([str(single)]) == 0
        alone[name] = {step: line["loss"] for step, line in evaluations(tmp_path / name / "run").items()}
    tokens = {name: supervised_tokens(sets[name], tiny_llama) for name in alone}
    for step, line in lines.items():
        assert {name: line[f"{name}_loss"] for name in alone} == pytest.approx(
            {name: losses[step] for name, losses in alone.items()}, rel=1e-6
        )
        both = sum(alone[name][step] * tokens[name] for name in alone) / sum(tokens.values())
        assert line["loss"] == pytest.approx(both, rel=1e-6)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    best = min((step for step in lines if step), key=lambda step: lines[step]["more_loss"])
    expected = {"step": best, "best": True, "metric": "eval_more_loss", "loss": lines[best]["more_loss"]}
    assert document(tmp_path / "run", "run_state.json")["exported"] == expected
    check_exported(tmp_path / "run", best)
    told = capsys.readouterr().out
    assert f"held {lines[2]['held_loss']:.4f}, more {lines[2]['more_loss']:.4f}\n" in told
    assert f"weights of step {best}, eval_more_loss {lines[best]['more_loss']:.4f}" in told


def supervised_tokens(chats: Path, base: Path) -> int:
    """Of the answers and their end of turn, counted by the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    answers = [json.loads(line)["messages"][-1]["content"] for line in chats.read_text("utf-8").splitlines()]
    return sum(len(tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)) for answer in answers)


def test_a_set_whose_rows_are_all_trained_on_cannot_decide(
    tmp_path: Path, tiny_llama: Path, sets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [{"path": "json", "data_files": str(sets[name])} for name in ("held", "train")]
    recipe = overfitting(tmp_path, tiny_llama, sets, data={"eval": entries})
    assert main([str(recipe), "training.metric_for_best_model=eval_train_loss"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "data.eval: no held-out document is left for eval_train_loss, which finds the best step; name other rows, or "
        "training.metric_for_best_model: eval_held_loss"
    ]
