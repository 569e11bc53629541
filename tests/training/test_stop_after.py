"""`run.stop_after`: stopped by it again and again, a run is bitwise the run; ranks stop together; the grace period."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.launch import signals
from finetune.launch.signals import StopRequest, grace_period
from finetune.recipe.stop_time import StopTime
from finetune.run_folder.status import read_status
from finetune.train import main
from finetune.training.held_state import planned_save
from tests.support.runs.soak_resume import fingerprint, same, write_resume_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 5
LONG_OVER = "run.stop_after=1s"  # this process began before; so each start takes one step
# Rank 1's clock is hours ahead of rank 0's, and its limit would have come before the first step.
AHEAD = """
import os, sys, time
if os.environ["RANK"] == "1":
    monotonic = time.monotonic
    from finetune.recipe import stop_time
    class Ahead:
        time = staticmethod(lambda: time.time() + 9e9)
        monotonic = staticmethod(lambda: monotonic() + 9e9)
    stop_time.time = Ahead
from finetune.train import process_main
sys.exit(process_main())
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_resume_recipe(tmp_path_factory.mktemp("stop_after"), steps=STEPS, dropout=0.1)


@pytest.mark.thorough
@pytest.mark.usefixtures("forget_the_last_run")
def test_stopped_by_it_at_each_step_it_is_bitwise_the_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), f"output_dir={tmp_path}/whole"]) == 0
    codes = []
    for start in range(1, STEPS + 1):
        codes.append(main([str(recipe), f"output_dir={tmp_path}/stopped", LONG_OVER]))
        if start < STEPS:
            state = json.loads((tmp_path / "stopped" / "run_state.json").read_text())
            assert (state["state"], state["step"], state["reason"]) == ("stopped", start, "run.stop_after: 1s")
            assert f"stopped and saved at step {start} (run.stop_after: 1s); continue with:" in capsys.readouterr().out
            found = read_status(tmp_path / "stopped")
            assert (found.state, found.reason, found.step) == ("stopped", "run.stop_after: 1s", start)
            assert found.checkpoint is not None
            assert found.checkpoint["step"] == start
    assert codes == [130] * (STEPS - 1) + [0]  # at the last step there is nothing to stop
    same(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "whole"), bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["1s", "2s"])
def test_ranks_whose_clocks_differ_stop_at_one_step(limit: str, recipe: Path, tmp_path: Path) -> None:
    """Rank 0 alone decides: with the limit that has come for both, and with one that has come for rank 1 alone."""
    (tmp_path / "rank.py").write_text(AHEAD)
    stop_after = limit if limit == "1s" else "9h"
    words = [str(tmp_path / "rank.py"), str(recipe), f"output_dir={tmp_path}/run", "accelerate_config=ddp"]
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    variables |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "FINETUNE_RANKS": "2", "PYTHONPATH": str(REPOSITORY)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words, f"run.stop_after={stop_after}", "budget.gpus=0"],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    expected = ([130, 130], "stopped", 1) if limit == "1s" else ([0, 0], "finished", STEPS)
    assert [rank.wait(500) for rank in ranks] == expected[0]
    found = read_status(tmp_path / "run")
    assert (found.state, found.step) == expected[1:]


def test_it_counts_in_the_steps_alone() -> None:
    stop = StopRequest(stop_time=StopTime("1s", 0.0, is_date=False))
    assert not stop  # loading, the worst step
    with stop.finishes_step():
        assert stop
    assert not stop  # export
    assert stop.reason == "run.stop_after: 1s"
    stop.signal_name = "SIGTERM"
    assert stop.reason == "SIGTERM"
    assert StopRequest().reason == "a signal to another rank"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1"}, (30.0, "Slurm")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (30.0, "Kubernetes")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "FINETUNE_GRACE_SECONDS": "600"}, (600.0, "FINETUNE_GRACE_SECONDS")),
        ({"FINETUNE_GRACE_SECONDS": "600", "TORCHELASTIC_RUN_ID": "x"}, (30.0, "torchrun")),
        (
            {"FINETUNE_GRACE_SECONDS": "300", "TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270"},
            (270.0, "torchrun"),
        ),
        ({"FINETUNE_GRACE_SECONDS": "soon", "SLURM_JOB_ID": "1"}, (30.0, "Slurm")),
    ],
)
def test_the_grace_period_is_the_shortest_that_is_known(environment: dict[str, str], expected: Any) -> None:
    assert grace_period(environment) == expected


@pytest.mark.thorough
def test_a_checkpoint_that_takes_longer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a sample, written and synced, times the checkpoint's size."""
    clock = iter([10.0, 10.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    planned = planned_save(tmp_path, 64 * 2**30, 270.0, "torchrun")  # 1,024 samples of 64 MiB, 0.5 s each
    assert planned.facts() == {
        "checkpoint_bytes": 64 * 2**30,
        "seconds": 512.0,
        "grace_seconds": 270.0,
        "killer": "torchrun",
    }
    assert planned.warning.startswith(
        "stop: a checkpoint of 64.0 GiB takes about 512 s on this disk, and torchrun ends"
    )
    assert "\n" not in planned.warning
    assert list(tmp_path.iterdir()) == []
    clock = iter([10.0, 10.5])
    assert planned_save(tmp_path, 64 * 2**20, 270.0, "torchrun").warning == ""


@pytest.mark.usefixtures("forget_the_last_run")
def test_the_start_says_so(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(signals.GRACE_VARIABLE, "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run = tmp_path / "run"
    assert main([str(recipe), f"output_dir={run}", LONG_OVER]) == 130
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stop: a checkpoint of")]
    assert len(lines) == 1
    assert "FINETUNE_GRACE_SECONDS ends the run 0 s after a signal" in lines[0]
    planned = json.loads((run / "receipt.json").read_text())["stop"]
    files = (run / "checkpoints" / "step-00000001").glob("*.safetensors")
    written = sum(tensor.nbytes for file in files for name, tensor in load_file(file).items() if ":step" not in name)
    assert planned["checkpoint_bytes"] == written
