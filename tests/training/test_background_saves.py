"""Training goes on while a checkpoint is written; what fails or dies meanwhile costs that checkpoint alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import train
from finetune.files import read_lines
from finetune.run_folder import checkpoint
from finetune.run_folder.checkpoint import checkpoint_steps
from finetune.run_folder.facts import read_state
from finetune.training import run as runs
from finetune.training import session
from finetune.training.run_output import RunOutput
from tests.support.runs.saving import full, held_up
from tests.support.runs.soak_resume import fingerprint, fork_ranks, wait_all, write_resume_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 8  # saved after 3, 6 and 8


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_resume_recipe(tmp_path, steps=STEPS, dropout=0.1)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"logging_steps": 1}))
    return path


def run(recipe: Path, run_dir: Path) -> int:
    return train.main([str(recipe), f"output_dir={run_dir}", "accelerate_config=single"])


def state_of(run_dir: Path) -> dict[str, Any]:
    state = read_state(run_dir)
    assert state is not None
    return state


def of_step(path: Path, step: int) -> bool:
    """Whether a file is one of this step's checkpoint, which has not got its name yet."""
    return path.parent.name.endswith(f"step-{step:08d}")


def full_at(step: int) -> Callable[[Any, Path], None]:
    """A disk that is full when a step's checkpoint is written."""
    real = checkpoint.save_file
    return lambda tensors, path: (full if of_step(path, step) else real)(tensors, path)


@pytest.mark.slow
def test_steps_are_taken_while_a_checkpoint_is_written(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3's files are written when step 5 has been logged, and are those of step 3."""
    assert run(recipe, tmp_path / "whole") == 0
    real, write_metrics, reached = checkpoint.save_file, RunOutput.write_metrics, threading.Event()
    seen = []

    def save_file(tensors: Any, path: Path) -> None:
        if of_step(path, 3):
            assert reached.wait(30), "the training waits for the checkpoint"
            seen.append(path.name)
        real(tensors, path)

    def noting(output: RunOutput, line: dict[str, Any]) -> None:
        write_metrics(output, line)
        if line["step"] == 5:
            assert checkpoint_steps(tmp_path / "run") == []
            reached.set()

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    monkeypatch.setattr(RunOutput, "write_metrics", noting)
    assert run(recipe, tmp_path / "run") == 0
    assert seen == ["model-00000.safetensors", "optimizer-00000.safetensors"]
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    ours, whole = (
        {path.relative_to(folder): path.read_bytes() for path in (folder / "checkpoints").glob("*/*.safetensors")}
        for folder in (tmp_path / "run", tmp_path / "whole")
    )
    assert len(ours) == 4
    assert ours == whole


@pytest.mark.slow
def test_a_failed_write_ends_the_run_at_the_next_step_with_its_reason(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, save = tmp_path / "run", runs.save

    def save_and_settle(*parts: Any) -> None:
        save(*parts)
        parts[3].join()  # so that the failure is known when the next step begins

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save", save_and_settle)
        patch.setattr(checkpoint, "save_file", full_at(6))
        assert run(recipe, run_dir) == 4
    line = next(line for line in capsys.readouterr().err.splitlines() if "could not be written" in line)
    assert line.startswith(f"{run_dir}/checkpoints/step-00000006: could not be written: the disk is full (")
    assert line.endswith(
        "MiB free); earlier checkpoints are intact; free some space or choose another output_dir, then run the same "
        "command again"
    )
    state = state_of(run_dir)
    assert (state["state"], state["phase"], state["step"]) == ("failed", "training", 7)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
    assert run(recipe, run_dir) == 0, "with space the same command continues"
    assert run(recipe, tmp_path / "whole") == 0
    assert fingerprint(run_dir) == fingerprint(tmp_path / "whole")


@pytest.mark.thorough
def test_a_failure_of_the_last_write_ends_the_run_before_its_export(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", full_at(STEPS))
    assert run(recipe, tmp_path / "run") == 4
    assert state_of(tmp_path / "run")["state"] == "failed"
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.slow
def test_a_stop_waits_for_its_checkpoint(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, write_metrics = tmp_path / "run", RunOutput.write_metrics

    def stop_at_4(output: RunOutput, line: dict[str, Any]) -> None:
        write_metrics(output, line)
        if line["kind"] == "train" and line["step"] == 4:
            go.clear()
            threading.Timer(1.0, go.set).start()
            os.kill(os.getpid(), signal.SIGTERM)

    marked, mark_run = [], session.mark_run

    def noting(folder: Path, state: Any, **facts: Any) -> str:
        marked.append((state, checkpoint_steps(folder)))
        return mark_run(folder, state, **facts)

    monkeypatch.setattr(session, "mark_run", noting)
    monkeypatch.setattr(RunOutput, "write_metrics", stop_at_4)
    with held_up(monkeypatch) as go:
        go.set()
        assert run(recipe, run_dir) == 130
    state = state_of(run_dir)
    assert (state["state"], state["step"]) == ("stopped", 5)
    assert marked == [("stopped", [3, 5])]


@pytest.mark.slow
def test_killed_while_writing_it_resumes_from_the_older_one_bitwise(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL when half a file of step 6 is written and a later step is logged."""
    run_dir, real = tmp_path / "run", checkpoint.save_file

    def die(tensors: Any, path: Path) -> None:
        real(tensors, path)
        if of_step(path, 6):
            os.truncate(path, path.stat().st_size // 2)
            while read_lines(run_dir / "metrics.jsonl")[-1]["step"] < 7:
                pass
            os.kill(os.getpid(), signal.SIGKILL)

    assert run(recipe, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", die)
        codes = wait_all(fork_ranks(recipe, run_dir, 1, "single"), 120)
    assert codes == [-signal.SIGKILL], run_dir.with_suffix(".rank0.log").read_text()
    assert checkpoint_steps(run_dir) == [3]
    assert (run_dir / "checkpoints" / ".tmp-step-00000006").is_dir()
    assert read_lines(run_dir / "metrics.jsonl")[-1]["step"] >= 7
    assert run(recipe, run_dir) == 0
    assert fingerprint(run_dir) == fingerprint(tmp_path / "whole")
