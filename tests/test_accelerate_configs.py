"""accelerate_configs/ holds genuine Accelerate config files: its own loader reads them, and knows every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from finetune.runtime import read_strategy

FOLDER = Path(__file__).resolve().parent.parent / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
KINDS = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "cpu_2proc": "ddp"}
PROCESSES = {"single": 1, "cpu_2proc": 2}


def test_every_file_is_seen() -> None:
    assert {file.stem for file in FILES} == set(KINDS)
    assert len(FILES) == 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_it(file: Path) -> None:
    config = load_config_from_file(str(file))  # raises for a key that it does not know
    assert config.mixed_precision is None, "the recipe owns the precision"
    # -1: `accelerate launch` asks for --num_processes instead of taking a number meant for another machine.
    assert config.num_processes == PROCESSES.get(file.stem, -1)
    # The loader takes any key inside fsdp_config; the launcher then drops those it has no argument for.
    known = {action.dest for action in launch_command_parser()._actions}  # argparse has no public listing
    assert set(config.fsdp_config) <= known


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_we_read_it_alike(file: Path) -> None:
    strategy = read_strategy(file.stem)
    assert strategy.path == file
    assert strategy.kind == KINDS[file.stem]
    assert strategy.num_processes == PROCESSES.get(file.stem)
    assert strategy.only_where == (file.stem == "cpu_2proc")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_first_line_says_what_it_is_and_how_to_launch_it(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert f"accelerate launch --config_file accelerate_configs/{file.name}" in first


def test_fsdp2_is_fsdp2() -> None:
    settings = load_config_from_file(str(FOLDER / "fsdp2.yaml")).fsdp_config
    assert settings["fsdp_version"] == 2, "without it accelerate takes FSDP1"
    assert settings["fsdp_reshard_after_forward"] is True
    assert settings["fsdp_activation_checkpointing"] is False, "the recipe owns it"
