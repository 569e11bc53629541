"""accelerate_configs/ holds genuine Accelerate config files: its own loader reads them, and knows every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from finetune.errors import RecipeError
from finetune.recipe.sections.pipelines import SCHEDULES
from finetune.recipe.strategy import read_strategy

FOLDER = Path(__file__).resolve().parents[2] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
FSDP = ("fsdp2", "fsdp2_grad_op", "fsdp2_offload", "hsdp")
BESIDE = ("gpipe_ddp2", "1f1b_ddp2")  # two pipelines
ZERO = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
KINDS = {"single": "single", "ddp": "ddp", "cpu_2proc": "ddp"} | dict.fromkeys(FSDP, "fsdp")
KINDS |= dict.fromkeys(ZERO, "deepspeed") | dict.fromkeys((*SCHEDULES, *BESIDE), "pipeline")
PROCESSES = {"single": 1, "cpu_2proc": 2}


def test_every_file_is_seen() -> None:
    assert {file.stem for file in FILES} == set(KINDS)
    assert len(FILES) == 19


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_it(file: Path) -> None:
    config = load_config_from_file(str(file))  # raises for a key that it does not know
    assert config.mixed_precision is None, "the recipe owns the precision"
    # -1: `accelerate launch` asks for --num_processes instead of taking a number meant for another machine.
    assert config.num_processes == PROCESSES.get(file.stem, -1)
    # The loader takes any key inside fsdp_config; the launcher then drops those it has no argument for.
    options = {action.dest for action in launch_command_parser()._actions}  # argparse has no public listing
    assert set(config.fsdp_config) <= options


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


def test_what_distinguishes_the_sharded_ones() -> None:
    strategies = {name: read_strategy(name) for name in FSDP}
    assert {name: strategy.reshard_after_forward for name, strategy in strategies.items()} == {
        "fsdp2": True,
        "fsdp2_grad_op": False,
        "fsdp2_offload": True,
        "hsdp": True,
    }
    assert [name for name, strategy in strategies.items() if strategy.offloaded] == ["fsdp2_offload"]
    assert [name for name, strategy in strategies.items() if strategy.replicates] == ["hsdp"]


GOOD = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt inside": (
        {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_foward": True}},
        "did you mean fsdp_re",
    ),
    "no version": ({"fsdp_config": {}}, "fsdp_version: is missing"),
    "no section": ({"fsdp_config": None}, "fsdp_version: is missing"),
    "a list": ({"fsdp_config": [1]}, "is not a section"),
    "precision": ({"mixed_precision": "bf16"}, "training.mixed_precision"),
    "checkpointing": (
        {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
        "the recipe owns it",
    ),
    "another engine": ({"distributed_type": "MEGATRON_LM"}, "distributed_type is not one of"),
    "stage four": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 4}}, "one of 1, 2, 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_file_is_named(name: str, tmp_path: Path) -> None:
    """Accelerate silently reads most of these."""
    changes, words = MISTAKES[name]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(GOOD | changes))
    with pytest.raises(RecipeError, match=words) as caught:
        read_strategy(str(file))
    assert str(file) in str(caught.value)
    file.write_text(yaml.safe_dump(GOOD))
    assert read_strategy(str(file)).kind == "fsdp"
