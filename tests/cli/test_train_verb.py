"""`finetune train`: refused before torch loads, one process or several, the exit code, Ctrl-C; and `--version`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from finetune.cli import train_verbs
from finetune.cli.main import main
from finetune.files import read_lines
from finetune.launch import local_ranks
from finetune.recipe.loader import load_recipe
from tests.support.rows.others_configs import EXAMPLES
from tests.support.runs.launching import ACCELERATE, REPOSITORY, Started, running, said, wait_all
from tests.support.runs.launching import until_step as until_logged
from tests.support.runs.soak_resume import write_resume_recipe

TWO_RANKS = ["accelerate_config=ddp", "budget.gpus=0"]
FSDP = REPOSITORY / "recipes" / "llama3_fsdp.yaml"  # 4 GPUs


@contextmanager
def training(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`finetune train ...` as the foreground job of a terminal: in a session of its own."""
    rank_variables = ("SLURM_", "RANK", "WORLD_SIZE", "TORCHELASTIC_", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(rank_variables)}
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune.cli.main", "train", *words],
        env=environment | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> list[int]:
    """Waits until the run has logged the step; returns the processes of its ranks."""
    metrics, end = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or max((line["step"] for line in read_lines(metrics)), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([str(FSDP), "training.sed=1"], "did you mean training.seed?"),
        (["nowhere.yaml"], "no such recipe; "),
        ([str(FSDP), "accelerate_config=single"], "runs one process, 1 x 4 GPUs are 4; "),
        ([str(FSDP), "training.global_batch_size=2"], "2 rows a step leave 2 of 4 ranks without one; "),
    ],
)
def test_a_refusal_is_one_line_and_loads_no_torch(words: list[str], said: str) -> None:
    code = f"import sys; from finetune.cli.main import main; code = main({['train', *words]!r}); "
    code += "print(code, sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert process.stdout == "2 []\n"
    assert said in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_several_machines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(FSDP), "budget.nodes=2"]) == 4
    line = capsys.readouterr().err
    assert "made for 2 machines" in line
    assert shlex.join(["torchrun", "--nnodes", "2", "--node-rank", "R"]) in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "gpus_here", "environment", "ranks"),
    [
        ([str(FSDP)], 4, {}, 4),
        ([str(FSDP), *TWO_RANKS], 0, {}, 2),
        ([str(FSDP)], 0, {}, None),
        ([str(FSDP), "accelerate_config=single", "budget.gpus=1"], 1, {}, None),
        ([str(FSDP)], 4, {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, None),
    ],
)
def test_one_process_trains_here_and_several_are_started(
    words: list[str],
    gpus_here: int,
    environment: dict[str, str],
    ranks: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    def started(command: list[str], count: int, *, on_cpu: bool) -> int:
        done.extend([command[1:], count, on_cpu])
        return 3

    def trained(words: list[str]) -> int:
        done.append(words)
        return 130

    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: gpus_here)
    monkeypatch.setattr(local_ranks, "run_ranks", started)
    monkeypatch.setattr(train_verbs, "train_here", trained)
    assert main(["train", *words]) == (130 if ranks is None else 3), "the exit code is handed through"
    script = [str(REPOSITORY / "finetune" / "train.py"), *words]
    assert done == ([words] if ranks is None else [script, ranks, gpus_here == 0])


@pytest.mark.thorough
def test_under_another_launcher_a_refusal_is_repeated_below_its_report() -> None:
    words = ["finetune/train.py", str(FSDP), "training.sed=1"]
    launcher = f"""
import os, subprocess, sys, time
os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
code = subprocess.run([sys.executable, *{words!r}]).returncode
time.sleep(0.5)
print(f"Traceback: {{code}}", file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", launcher], cwd=REPOSITORY, capture_output=True, text=True)
    line = "command line: training.sed: is unknown; did you mean training.seed?"
    assert process.stderr.split("\n") == [line, "Traceback: 2", "", line, ""]


@pytest.mark.slow
def test_under_another_launcher_the_command_that_continues_is_repeated_below_its_report(tmp_path: Path) -> None:
    recipe, run_dir = write_resume_recipe(tmp_path, steps=4000, dropout=0.0), tmp_path / "run"
    with running([Started(ACCELERATE)], recipe, run_dir, []) as processes:
        until_logged(run_dir, 6)
        processes[0].send_signal(signal.SIGINT)
        wait_all(processes, run_dir)
    command = json.loads((run_dir / "run_state.json").read_text())["command"]
    end = time.monotonic() + 20
    while not said(run_dir, 0).endswith(f"continue with:\n  {command}\n"):
        assert time.monotonic() < end, said(run_dir, 0)[-2000:]
        time.sleep(0.1)
    assert "Traceback" in said(run_dir, 0), "the launcher no longer reports: nothing needs to be repeated"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert capsys.readouterr().out == f"finetune {newest[1]}\n"


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["check", "train", "plan"])
def test_another_tools_configuration_is_named_and_the_command_converts_it(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, example in enumerate(EXAMPLES.values()):
        file = tmp_path / f"my {example.tool} {number}.yml"
        file.write_text(yaml.safe_dump(example.values), "utf-8")
        assert main([verb, file.name]) == 2
        line = capsys.readouterr().err
        assert len(line.splitlines()) == 1
        assert "not a recipe; convert it" in line
        words = shlex.split(line[line.index(": finetune import") + 2 :])
        assert main(words[1:]) == 0, capsys.readouterr().err
        assert load_recipe(words[-1]).recipe, "what it writes is a recipe; its model may be on another machine"
        capsys.readouterr()
    assert len(EXAMPLES) >= 10


@pytest.mark.slow
def test_one_process_finishes_and_goes_on_by_the_same_words(tmp_path: Path) -> None:
    recipe, run_dir = write_resume_recipe(tmp_path, steps=4, dropout=0.0), tmp_path / "run"
    with training(str(recipe), f"output_dir={run_dir}") as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "finished: " in out
    state = json.loads((run_dir / "run_state.json").read_text())
    words = ["python", "-m", "finetune.cli.main", "train", str(recipe), f"output_dir={run_dir}"]
    assert (state["state"], shlex.split(state["command"])) == ("finished", words)


@pytest.mark.slow
def test_two_ranks_are_the_run_of_one(tmp_path: Path) -> None:
    recipe, curves = write_resume_recipe(tmp_path, steps=4, dropout=0.0), []
    for name, more in (("one", []), ("two", TWO_RANKS)):
        run_dir = tmp_path / name
        with training(str(recipe), f"output_dir={run_dir}", *more) as process:
            _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        curves.append([line["loss"] for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == "train"])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    receipt = json.loads((tmp_path / "two" / "receipt.json").read_text())
    assert (receipt["strategy"], receipt["world_size"], receipt["local_world_size"]) == ("ddp", 2, 2)
    assert "finetune.cli.main train" in json.loads((tmp_path / "two" / "run_state.json").read_text())["command"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sent", [["SIGINT"], ["SIGTERM"], ["SIGINT", "SIGINT"], ["SIGKILL"]], ids=" ".join)
def test_signals_in_the_middle(ranks: int, sent: list[str], tmp_path: Path) -> None:
    """Saved, or broken off at once; no traceback, no orphan. When the launcher itself is killed its ranks save."""
    recipe, run_dir = write_resume_recipe(tmp_path, steps=4000, dropout=0.0), tmp_path / "run"
    more = TWO_RANKS if ranks == 2 else []
    with training(str(recipe), f"output_dir={run_dir}", *more) as process:
        pids = until_step(process, run_dir, 6)
        assert len(pids) == (2 if ranks == 2 else 0)
        for name in sent:
            os.killpg(process.pid, getattr(signal, name))  # what a terminal does
            time.sleep(0.005)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if sent == ["SIGKILL"] else 130), err
    end = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.05)
    assert "Traceback" not in err
    state = json.loads((run_dir / "run_state.json").read_text())["state"]
    if len(sent) == 1 and (sent != ["SIGKILL"] or ranks == 2):
        assert state == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_of_the_trainer_has_its_exit_code_and_no_traceback(ranks: int, tmp_path: Path) -> None:
    recipe = write_resume_recipe(tmp_path, steps=4, dropout=0.0)
    more = TWO_RANKS if ranks == 2 else []
    began = time.monotonic()
    with training(str(recipe), "data.train.0.data_files=nowhere.jsonl", *more) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 2
    assert out.count("importing torch") == len(out.splitlines()) == 1, out
    assert err.count("nowhere.jsonl") == len(err.splitlines()) == 1, err
    assert time.monotonic() - began < 200
