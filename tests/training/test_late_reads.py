"""Steps that are read after the next one has begun, as on a GPU: the same run, and nothing of a bad step is kept.

Here on a CPU, told to work ahead; tests/proofs/test_pretended_gpu.py does so as a GPU is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.files import read_lines
from finetune.train import main
from finetune.training import loop
from finetune.training.batch_plan import BatchPlan
from finetune.training.update import PendingStep
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny_lora, write_recipe

TIMES = {"step_seconds", "tokens_per_second", "data_wait_fraction", "peak_memory_gib"}
STEPS = 7


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55] * 2)


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, chats: Path) -> Path:
    steps = {"training": {"max_steps": STEPS}, "eval_steps": 3, "save_steps": 5, "lora": {"r": 4, "lora_dropout": 0.1}}
    return write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host works ahead; how many steps were unread whenever one was read."""
    monkeypatch.setattr(loop, "host_works_ahead", lambda run: True)
    must_read, unread = loop.must_read, []

    def noting(queued: Any, **options: bool) -> bool:
        reads: bool = must_read(queued, **options)
        if reads:
            unread.append(len(queued))
        return reads

    monkeypatch.setattr(loop, "must_read", noting)
    return unread


def run(recipe: Path, run_dir: Path, *words: str) -> int:
    code = main([str(recipe), f"output_dir={run_dir}", *words])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    return code


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = read_lines(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def adapter(run_dir: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    return tensors


def assert_the_same(run_dir: Path, other: Path) -> None:
    assert metrics(run_dir) == metrics(other)
    ours, theirs = adapter(run_dir), adapter(other)
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_lines_and_weights_are_those_of_a_run_that_is_read_at_once(
    logging_steps: int, recipe: Path, tmp_path: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"logging_steps={logging_steps}"]
    assert run(recipe, tmp_path / "ahead", *words) == 0
    # One stays unread until the next has begun; none before steps 3, 5, 6 and 7, which evaluate, save or end.
    assert ahead == [2, 2, 1, 2, 1, 1, 1]
    monkeypatch.undo()
    assert run(recipe, tmp_path / "at_once", *words) == 0
    assert_the_same(tmp_path / "ahead", tmp_path / "at_once")
    seconds = [line["step_seconds"] for line in read_lines(tmp_path / "ahead" / "metrics.jsonl") if "epoch" in line]
    assert min(seconds) > 0.1 * sorted(seconds)[len(seconds) // 2], "each step has its own time"


@pytest.mark.slow
def test_steps_that_the_host_decides_on_are_read_at_once(
    recipe: Path, tmp_path: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RoundedAdamW's are, bitsandbytes' and DeepSpeed's."""
    monkeypatch.setattr("finetune.training.update.updates_on_device", lambda *_: False)
    assert run(recipe, tmp_path / "run") == 0
    assert ahead == [1] * STEPS


def spoil(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A gradient that is not a number in this step of the training, counted from 1."""
    original, calls = loop.optimizer_step, []

    def spoilt(parts: Any, *args: Any, **kwargs: Any) -> PendingStep:
        calls.append(1)
        trained = next(parameter for parameter in parts.model.parameters() if parameter.requires_grad)
        hook = trained.register_hook(lambda gradient: gradient * (math.nan if len(calls) == at else 1.0))
        try:
            return original(parts, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(loop, "optimizer_step", spoilt)


# Step 2 is read when step 3 has begun; 3 is before an evaluation, 5 before a save, 7 the last.
@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [2, 3, 5, STEPS])
def test_a_bad_step_is_named_and_nothing_of_it_is_kept(
    at: int,
    recipe: Path,
    tmp_path: Path,
    ahead: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    with monkeypatch.context() as fault:
        spoil(fault, at)
        assert run(recipe, run_dir) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"step {at}: loss "), errors
    assert f"gradient norm nan: not finite; the weights are those of step {at - 1}; look at its rows, " in errors
    assert "Traceback" not in errors
    state = json.loads((run_dir / "run_state.json").read_text())
    assert (state["state"], state["phase"], state["step"]) == ("failed", "training", at - 1)
    assert [line["step"] for line in metrics(run_dir) if line["kind"] == "train"] == list(range(1, at))
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("*")) == ["step-00000005"] * (at > 5)
    assert not (run_dir / "adapter").exists()
    assert run(recipe, run_dir) == 0, "without the fault the same command continues"
    monkeypatch.undo()
    assert run(recipe, tmp_path / "whole") == 0
    assert_the_same(run_dir, tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_is_seen_a_step_later_and_the_run_continues_bitwise(
    recipe: Path, tmp_path: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = loop.optimizer_step, []

    def stops(*args: Any, **kwargs: Any) -> PendingStep:
        calls.append(1)
        if len(calls) == 1:  # the flag of step 1 is taken by then
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "optimizer_step", stops)
        assert run(recipe, tmp_path / "run") == 130
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["step"]) == ("stopped", 3), "step 2 carries the flag, step 3 had begun"
    assert [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "train"] == [1, 2, 3]
    assert run(recipe, tmp_path / "run") == 0
    monkeypatch.undo()
    assert run(recipe, tmp_path / "whole") == 0
    assert_the_same(tmp_path / "run", tmp_path / "whole")


def test_batches_that_cannot_be_made_end_the_run_where_they_are_needed(
    recipe: Path, tmp_path: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of, main_thread = BatchPlan.rows_of, threading.get_ident()

    def broken(plan: BatchPlan, step: int) -> Any:
        if step == 3 and threading.get_ident() != main_thread:
            raise OSError("the disk is gone")
        return rows_of(plan, step)

    monkeypatch.setattr(BatchPlan, "rows_of", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        run(recipe, tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    assert [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "train"] == [1, 2, 3]
