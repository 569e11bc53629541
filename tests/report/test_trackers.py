"""Trackers get what metrics.jsonl says; a failing one is reported and disabled, and the training continues."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import read_strategy
from finetune.report.trackers import metric_values, tracked_settings
from finetune.strategies.machine import machine_problems
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import tiny, write_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path) -> Path:
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80, 25])
    content: dict[str, Any] = {
        "lora": {"r": 2},
        "data": {"eval": {"fraction": 0.2}, "max_length": 128},
        "training": {"global_batch_size": 2, "max_steps": 4},
        "samples": {"count": 1, "max_new_tokens": 3},
        "eval_steps": 2,
        "save_steps": 2,
        "output_dir": str(tmp_path / "run"),
    }
    return write_recipe(tmp_path, tiny(tiny_llama, chats, **content))


def metrics(run: Path, kind: str, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {line["step"]: line[key] for line in lines if line["kind"] == kind}


def as_killed_after_step_2(run: Path) -> None:
    """Step 4's checkpoint and the export are not there."""
    for name in ("checkpoints/step-00000004", "adapter"):
        shutil.rmtree(run / name)
    state = json.loads((run / "run_state.json").read_text("utf-8"))
    (run / "run_state.json").write_text(json.dumps(state | {"state": "running"}), "utf-8")


def board(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    return read


@pytest.mark.slow
def test_tensorboard_has_every_number_once_after_a_resume_too(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert (
        main([str(recipe), "report_to=[tensorboard]", "training.lr_scheduler_type=constant", "training.max_steps=4"])
        == 0
    )
    state = json.loads((run / "run_state.json").read_text("utf-8"))
    # As after a kill between the checkpoint of step 2 and the end: step 4's checkpoint and export are not there.
    for name in ("checkpoints/step-00000004", "adapter"):
        subprocess.run(["rm", "-r", str(run / name)], check=True)
    (run / "run_state.json").write_text(json.dumps(state | {"state": "running"}), "utf-8")
    assert (
        main([str(recipe), "report_to=[tensorboard]", "training.lr_scheduler_type=constant", "training.max_steps=4"])
        == 0
    )
    read = board(run)
    for kind, key in (("train", "loss"), ("train", "learning_rate"), ("train", "tokens_per_second"), ("eval", "loss")):
        values = {event.step: event.value for event in read.Scalars(f"{kind}/{key}")}
        assert values == pytest.approx(metrics(run, kind, key), rel=1e-6)
        assert len(read.Scalars(f"{kind}/{key}")) == len(values)
    assert {"train/peak_memory_gib", "train/grad_norm"} <= set(read.Tags()["scalars"])
    assert read.Tags()["images"] == ["report/loss", "report/memory"]
    assert any("samples/0" in tag for tag in read.Tags()["tensors"])


@pytest.mark.slow
def test_a_failing_tracker_is_reported_once_and_the_run_continues(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe)]) == 0
    as_killed_after_step_2(tmp_path / "run")
    (tmp_path / "run" / "tensorboard").write_text("in the way", "utf-8")
    assert main([str(recipe), "report_to=[tensorboard]"]) == 0
    output = capsys.readouterr().out
    assert output.count("report_to: tensorboard failed and is disabled for the rest of this run: FileExistsError") == 1
    assert list(metrics(tmp_path / "run", "train", "loss")) == [1, 2, 3, 4]


def test_what_is_not_installed_is_one_line_before_anything_is_read(recipe: Path) -> None:
    missing = [name for name in ("trackio", "wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("all trackers are installed")
    loaded = load_recipe(recipe, [f"report_to=[{missing[0]}]"]).recipe
    ((topic, problem),) = machine_problems(loaded, read_strategy("single"), ALONE)
    assert topic == "trackers"
    assert f"report_to: {missing[0]} is not installed; pip install {missing[0]}" in problem


def test_lines_become_numbers_under_their_kind() -> None:
    line = {"kind": "train", "step": 3, "loss": 1.5, "grad_norm": None, "tokens": 7, "skipped": True}
    assert dict(metric_values(line)) == {"train/loss": 1.5, "train/tokens": 7.0}
    phase = {"kind": "phase", "step": 3, "rank": 0, "phase": "forward", "peak_gib": 2.0, "seconds": 1.0}
    assert dict(metric_values(phase)) == {"memory/forward_peak_gib": 2.0}
    assert dict(metric_values(phase | {"rank": 1})) == {}


def test_settings_are_flat() -> None:
    nested = {"training": {"learning_rate": 0.1, "optim": "adamw"}, "lora": None, "data": {"train": [{"path": "x"}]}}
    flat = {"training.learning_rate": 0.1, "training.optim": "adamw", "lora": "null", "data.train": '[{"path": "x"}]'}
    assert dict(tracked_settings(nested)) == flat


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_offline_for_real_and_without_the_token(recipe: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    token = "hf_" + "planted" * 5
    own = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "HF_TOKEN": token, "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW"))} | own
    command = [sys.executable, "finetune/train.py", str(recipe), f"report_to=[{name}]"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "failed" not in ended.stdout
    run = tmp_path / "run"
    FOUND[name](run, tmp_path / "home")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if token.encode() in path.read_bytes()] == []
    assert token not in ended.stdout + ended.stderr


def _found_by_trackio(run: Path, home: Path) -> None:
    (database,) = home.rglob("finetune*.db")
    rows = sqlite3.connect(database).execute("select metrics from metrics").fetchall()
    assert sum(b"train/loss" in bytes(row[0]) for row in rows) == 4


def _found_by_wandb(run: Path, home: Path) -> None:
    (log,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/loss" in log.read_bytes()


def _found_by_mlflow(run: Path, home: Path) -> None:
    rows = sqlite3.connect(run / "mlflow.db").execute("select step, value from metrics where key = 'train/loss'")
    assert dict(rows.fetchall()) == pytest.approx(metrics(run, "train", "loss"))
    assert list((run / "mlflow").rglob("report.html"))


FOUND = {"trackio": _found_by_trackio, "wandb": _found_by_wandb, "mlflow": _found_by_mlflow}
