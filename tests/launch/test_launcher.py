"""What started the trainer, read from the process table."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.launch import launcher
from finetune.launch.launcher import continue_command, read_launch
from finetune.train import main as train_main


def test_options_of_the_launcher_not_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["python", "/env/bin/accelerate", "launch", "--config_file=a.yaml", "--num_processes", "3"]
    monkeypatch.setattr(launcher, "arguments_of", lambda process: [*typed, "finetune/train.py", "--num_processes", "9"])
    launch = read_launch({"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "3", "RANK": "2"})
    assert (launch.requested_processes, launch.config_file) == (3, Path("a.yaml"))
    assert (launch.world_size, launch.rank, launch.is_main, launch.by_accelerate) == (3, 2, False, True)


ACCELERATE = ["python", "/env/bin/accelerate", "launch"]
TORCHRUN = ["python", "/env/bin/torchrun"]
SCRIPT = ["finetune/train.py", "r.yaml"]


@pytest.mark.parametrize(
    ("options", "above", "requested"),
    [
        ([*ACCELERATE, "--num_machines", "2", "--num_processes", "6"], {}, 6),  # over all machines
        ([*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "3"], {}, 6),  # on each
        ([*TORCHRUN, "--nnodes=2", "--nproc_per_node=3"], {}, 6),
        ([*TORCHRUN, "--nproc-per-node", "3"], {}, 3),
        ([*TORCHRUN, "--nnodes", "1:4", "--nproc-per-node", "3"], {}, None),  # as many as come
        ([*TORCHRUN, "--nproc-per-node", "gpu"], {}, None),
        (TORCHRUN, {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2"}, 6),
        ([*TORCHRUN, "--nnodes", "1"], {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2"}, 3),
        (ACCELERATE, {"PET_NPROC_PER_NODE": "3"}, None),  # not read by accelerate
    ],
)
def test_how_many_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: list[str], above: dict[str, str], requested: int | None
) -> None:
    environment = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "RANK": "4"}
    monkeypatch.setattr(launcher, "_find_launcher", lambda _: (launcher.launcher_words([*options, *SCRIPT]), above))
    launch = read_launch(environment)
    assert launch.requested_processes == requested
    assert launch.settings == tuple(f"{name}={above[name]}" for name in sorted(above))
    command = continue_command(launch, resume="auto")
    assert command.startswith("PET_NNODES=2 PET_NPROC" if launch.by_torchrun and len(above) == 2 else launch.words[0])


@pytest.mark.parametrize(
    ("text", "on_cpu"), [("use_cpu: true", True), ("use_cpu: false", False), ("[", False), (None, False)]
)
def test_the_cpu_that_a_config_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, on_cpu: bool
) -> None:
    """accelerate 1.15 passes it to ranks in the environment only where it starts one process."""
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text, "utf-8")
    typed = ["python", "/env/bin/accelerate", "launch", "--config_file", str(config), *SCRIPT]
    monkeypatch.setattr(launcher, "arguments_of", lambda process: typed)
    assert read_launch({"ACCELERATE_MIXED_PRECISION": "no"}).on_cpu is on_cpu
    assert read_launch({"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}).on_cpu


def test_machines_and_their_ranks() -> None:
    address = {"MASTER_ADDR": "localhost"}
    variables = address | {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
    }
    launch = read_launch(variables)
    assert (launch.local_rank, launch.local_world_size, launch.nodes) == (1, 2, 3)
    assert read_launch({"RANK": "1", "WORLD_SIZE": "2"} | address).local_world_size == 2  # by hand, on one machine
    alone = read_launch({})
    assert (alone.local_rank, alone.local_world_size, alone.nodes) == (0, 1, 1)


def test_a_rank_of_srun_continues_by_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/x/python", "finetune/train.py", "r.yaml"])
    launch = read_launch({"SLURM_PROCID": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    assert continue_command(launch, resume="auto") == "srun python finetune/train.py r.yaml"


def test_plain_python_has_no_launcher() -> None:
    launch = read_launch({})
    assert (launch.requested_processes, launch.config_file, launch.world_size) == (None, None, 1)
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
        (["/usr/bin/python3", "/env/bin/finetune", "train", "r.yaml", "a=b c"], "finetune train r.yaml 'a=b c'"),
        (
            ["/usr/bin/python3", "-m", "finetune.cli.main", "train", "r.yaml"],
            "python -m finetune.cli.main train r.yaml",
        ),
        (["/usr/bin/python3", "/env/bin/finetune", "rehearse", "r.yaml"], "python "),
        (["bash", "run.sh"], "python "),
    ],
)
def test_the_command_that_continues(monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(launcher, "arguments_of", lambda process: arguments)
    assert continue_command(read_launch(), resume="auto").startswith(words)


def test_one_process_of_the_train_verb_continues_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/x/python", "/env/bin/finetune", "train", "my r.yaml", "training.resume=never"]
    monkeypatch.setattr(sys, "orig_argv", words)
    launch = read_launch({})
    assert (launch.words[0], launch.recipe, launch.requested_processes) == ("finetune", "my r.yaml", None)
    assert continue_command(launch, resume="never") == "finetune train 'my r.yaml' training.resume=auto"


def test_a_rank_of_the_train_verb_is_found_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/x/python", "-m", "finetune.cli.main", "train", "r.yaml"]
    monkeypatch.setattr(launcher, "arguments_of", lambda process: words)
    environment = {"FINETUNE_RANKS": "2", "RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    launch = read_launch(environment)
    assert (launch.rank, launch.world_size, launch.recipe) == (1, 2, "r.yaml")
    assert not launch.by_accelerate
    assert not launch.by_torchrun


def test_a_child_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FINETUNE_RANKS", "RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    assert not {"FINETUNE_RANKS", "RANK", "ACCELERATE_USE_CPU"} & launcher.environment_for_child().keys()


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


GPU_LISTS = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("words", "above", "own", "shared"),
    [
        (TORCHRUN, {}, {}, True),
        (TORCHRUN, {GPU_LISTS: "0,1"}, {GPU_LISTS: "0,1"}, True),
        (TORCHRUN, {GPU_LISTS: "3"}, {GPU_LISTS: "3"}, True),
        (TORCHRUN, {GPU_LISTS: "0,1"}, {GPU_LISTS: "1"}, False),  # --virtual-local-rank, or a script between the two
        (TORCHRUN, {}, {GPU_LISTS: "0"}, False),
        (TORCHRUN, {}, {"HIP_VISIBLE_DEVICES": "1"}, False),
        (ACCELERATE, {}, {}, True),
        ([*ACCELERATE, "--gpu_ids", "0,2"], {}, {GPU_LISTS: "0,2"}, True),
        ([*ACCELERATE, "--gpu_ids=0"], {GPU_LISTS: "0,1"}, {GPU_LISTS: "0"}, True),
        ([*ACCELERATE, "--config_file", "CONFIG"], {}, {GPU_LISTS: "0"}, True),
        ([*ACCELERATE, "--config_file", "CONFIG"], {}, {GPU_LISTS: "1"}, False),
        ([], {}, {GPU_LISTS: "0", "SLURM_PROCID": "1"}, False),  # srun gives every task a GPU, which it calls 0
    ],
)
def test_whether_ranks_see_the_same_gpus(
    words: list[str],
    above: dict[str, str],
    own: dict[str, str],
    shared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gpu_ids: 0\nnum_processes: 2\n", "utf-8")
    typed = [str(config) if word == "CONFIG" else word for word in words]
    monkeypatch.setattr(
        launcher, "_find_launcher", lambda environment: ([*typed, *SCRIPT], above) if typed else ([], own)
    )
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    assert read_launch({**ranks, **own}).shares_gpus == shared


def test_a_folder_that_was_deleted_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert train_main(["/r.yaml"]) == 4
    assert capsys.readouterr().err == "the folder that this shell is in was deleted; cd to another one\n"
