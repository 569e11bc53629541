"""What started the trainer, read from the process table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from finetune import launcher
from finetune.launcher import continue_command, read_launch


def test_options_of_the_launcher_not_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["python", "/env/bin/accelerate", "launch", "--config_file=a.yaml", "--num_processes", "3"]
    monkeypatch.setattr(launcher, "arguments_of", lambda process: [*typed, "finetune/train.py", "--num_processes", "9"])
    launch = read_launch({"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "3", "RANK": "2"})
    assert (launch.asked_processes, launch.config_file) == (3, Path("a.yaml"))
    assert (launch.world_size, launch.rank, launch.is_main, launch.by_accelerate) == (3, 2, False, True)


def test_plain_python_has_no_launcher() -> None:
    launch = read_launch({})
    assert (launch.asked_processes, launch.config_file, launch.world_size) == (None, None, 1)
    assert launch.is_main
    assert not launch.by_accelerate


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["/usr/bin/python3", "/env/bin/accelerate", "launch", "finetune/train.py", "r.yaml", "a=b c"],
            "accelerate launch",
        ),
        (["/usr/bin/python3", "/env/bin/torchrun", "--nproc-per-node", "2", "finetune/train.py"], "torchrun --nproc"),
        (["/usr/bin/python3", "-m", "torch.distributed.run", "x.py"], "python -m torch.distributed.run x.py"),
        (["/usr/bin/python3", "-m", "accelerate.commands.launch", "x.py"], "python -m accelerate.commands.launch x.py"),
        (["bash", "run.sh"], "python "),
    ],
)
def test_the_command_that_continues(monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(launcher, "arguments_of", lambda process: arguments)
    assert continue_command(read_launch(), resume="auto").startswith(words)


def test_the_command_that_continues_does_not_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(
        sys, "orig_argv", ["/x/python", "finetune/train.py", "r.yaml", "training.resume=never", "a=b c"]
    )
    assert (
        continue_command(read_launch(), resume="never")
        == "python finetune/train.py r.yaml 'a=b c' training.resume=auto"
    )
    assert (
        continue_command(read_launch(), resume="auto")
        == "python finetune/train.py r.yaml training.resume=never 'a=b c'"
    )
