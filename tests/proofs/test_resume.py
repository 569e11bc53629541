"""A resumed run is the run: killed, stopped or failed anywhere, it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import train
from finetune.files import read_lines
from finetune.run_folder.facts import read_state
from finetune.training import session
from tests.support.runs.curve_table import KILLED
from tests.support.runs.soak_resume import fingerprint, write_resume_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
SOAK = Path(__file__).resolve().parents[1] / "support" / "runs" / "soak_resume.py"
# The full proof is FINETUNE_KILLS=30: three minutes more.
KILLS = int(os.environ.get("FINETUNE_KILLS", "3"))
FULL = KILLS >= 30
LAUNCHES = [(1, "SIGTERM"), (2, "SIGTERM")] + FULL * [(1, "SIGINT"), (1, "SIGKILL"), (2, "SIGINT"), (2, "SIGKILL")]


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["1:single", "2:ddp", "2:zero3"] + FULL * ["1:single,2:ddp", "2:fsdp2,1:single"])
def test_killed_at_random_moments(tmp_path: Path, ways: str) -> None:
    """Under every strategy: benchmarks/resume.py."""
    command = [sys.executable, str(SOAK), "--ways", ways, "--kills", str(KILLS), "--folder", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1])["kills"] >= KILLS


def test_killed_under_every_strategy() -> None:
    """The committed record: five kills on the same ranks each, and two with the ranks changing."""
    record = json.loads((REPOSITORY / "benchmarks" / "results" / "resume.json").read_text("utf-8"))["strategies"]
    assert list(record) == list(KILLED)
    for strategy, kinds in record.items():
        assert kinds["same_ranks"]["ways"] == [f"{KILLED[strategy]} x {strategy}"]
        assert kinds["same_ranks"]["kills"] >= 5
        if strategy != "single":
            assert kinds["other_ranks"]["ways"] == [f"{KILLED[strategy]} x {strategy}", "1 x single"]
            assert kinds["other_ranks"]["kills"] >= 2


def state_of(run_dir: Path) -> dict[str, Any]:
    state = read_state(run_dir)
    assert state is not None
    return state


def rewrite(recipe: Path, **changes: Any) -> None:
    body = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(body | changes))


@contextmanager
def launched(recipe: Path, run_dir: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """The main job as a user starts it, in its own session, as under a terminal."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if ranks > 1:
        command += ["--config_file", "accelerate_configs/cpu_2proc.yaml"]
    else:
        command += ["--cpu", "--num_processes", "1"]
    strategy = "ddp" if ranks > 1 else "single"
    command += ["finetune/train.py", str(recipe), f"output_dir={run_dir}", f"accelerate_config={strategy}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = run_dir.with_suffix(".log")
    with open(log, "a") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(run_dir: Path, condition: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, run_dir.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), LAUNCHES)
def test_a_signal_to_the_launcher_saves_and_the_printed_command_continues(
    tmp_path: Path, ranks: int, name: str
) -> None:
    steps = 200
    recipe = write_resume_recipe(tmp_path, steps=steps, dropout=0.1)
    rewrite(recipe, save_steps=1000, eval_steps=1000, logging_steps=1)  # only the signal saves
    run_dir = tmp_path / "run"
    with launched(recipe, run_dir, ranks) as launcher:
        wait_until(
            run_dir, lambda: (run_dir / "metrics.jsonl").exists() and len(read_lines(run_dir / "metrics.jsonl")) > 3
        )
        if name == "SIGINT" and ranks == 1:  # several ranks live in sessions of their own
            os.killpg(launcher.pid, signal.SIGINT)  # a terminal's Ctrl-C
        else:
            launcher.send_signal(getattr(signal, name))
        assert launcher.wait(60) != 0
        wait_until(run_dir, lambda: state_of(run_dir)["state"] == "stopped", 30)
    state = state_of(run_dir)
    assert 0 < state["step"] < steps
    saved = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert saved == [f"step-{state['step']:08d}"]
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")[1:]] == list(range(1, state["step"] + 1))
    # The command is printed after the state is written, by a rank that outlives its launcher.
    wait_until(run_dir, lambda: state["command"] in run_dir.with_suffix(".log").read_text(), 30)
    assert "accelerate" in state["command"]
    if ranks > 1 and not FULL:
        return
    with launched(recipe, run_dir, ranks):
        wait_until(run_dir, lambda: read_lines(run_dir / "metrics.jsonl")[-1]["step"] > state["step"])


@pytest.mark.slow
def test_a_refusal_of_rank_0_ends_both_ranks_at_once(tmp_path: Path) -> None:
    recipe = write_resume_recipe(tmp_path, steps=5, dropout=0.1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "thesis.tex").write_text("")
    with launched(recipe, run_dir, 2) as launcher:
        wait_until(run_dir, lambda: "holds other files" in run_dir.with_suffix(".log").read_text())
        began = time.monotonic()
        assert launcher.wait(60) != 0
        assert time.monotonic() - began < 15, "torchrun had to kill a rank that waited for the other"


def run(recipe: Path, run_dir: Path) -> int:
    return train.main([str(recipe), f"output_dir={run_dir}", "accelerate_config=single"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing disturbed. Its recipe is beside it."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = write_resume_recipe(folder, steps=4, dropout=0.1)
    rewrite(recipe, save_steps=2)
    assert run(recipe, folder / "whole") == 0
    return folder / "whole"


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_a_failure_is_recorded_and_the_run_continues(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = whole.parent / "recipe.yaml"

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the export broke")

    with monkeypatch.context() as patch:
        patch.setattr(session, "export", broken)
        with pytest.raises(RuntimeError, match="the export broke"):
            run(recipe, tmp_path / "failed")
    state = state_of(tmp_path / "failed")
    assert (state["state"], state["phase"], state["rank"], state["step"]) == ("failed", "export", 0, 4)
    assert state["error"] == "RuntimeError: the export broke"
    assert run(recipe, tmp_path / "failed") == 0
    assert fingerprint(tmp_path / "failed") == fingerprint(whole)
    before = (whole / "metrics.jsonl").read_bytes()
    assert run(recipe, whole) == 0
    assert (whole / "metrics.jsonl").read_bytes() == before, "a finished run is left as it is"


@pytest.mark.sample(1, thorough=3)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("phase", "step"), [("try_worst_step", 0), ("look_before", 0), ("write_samples", 4)])
def test_a_signal_outside_the_steps_stops_at_once_and_the_run_continues(
    phase: str,
    step: int,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = whole.parent / "recipe.yaml"
    genuine = getattr(session, phase)

    def with_signal(*arguments: Any, **named: Any) -> None:
        genuine(*arguments, **named)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(session, phase, with_signal)
        assert run(recipe, tmp_path / "stopped") == 130
    words = f"stopped at step {step}; continue with:" if step else "stopped before the first step; start again with:"
    assert f"{words}\n  " in capsys.readouterr().err
    state = state_of(tmp_path / "stopped")
    assert (state["state"], state["step"]) == ("stopped", step)
    assert run(recipe, tmp_path / "stopped") == 0
    assert fingerprint(tmp_path / "stopped") == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_stopped_early_does_not_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_resume_recipe(tmp_path, steps=20, dropout=0.1)
    training = yaml.safe_load(recipe.read_text())["training"]
    # At such a rate weights move by 1e-30: the second evaluation is not better than the first.
    training |= {"learning_rate": 1e-30, "early_stopping_patience": 1}
    rewrite(recipe, eval_steps=3, logging_steps=2, training=training)
    with monkeypatch.context() as patch:
        patch.setattr(session, "export", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(recipe, tmp_path / "run") == 130
    ended = state_of(tmp_path / "run")["step"]
    assert ended < 20
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert run(recipe, tmp_path / "run") == 0
    assert state_of(tmp_path / "run")["step"] == ended
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    trained = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert trained[-1] == ended, "the last steps are logged although logging_steps does not divide them"
