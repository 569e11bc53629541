"""DeepSpeed's own keys in a strategy file: taken as DeepSpeed takes them, or refused in one line with its place."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.errors import RecipeError
from finetune.recipe.sections.engine_keys import ENGINE_KEYS, engine_notes
from finetune.recipe.strategy import read_strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed_keys.md"


def strategy_file(folder: Path, *lines: str, stage: int = 2) -> Path:
    """A strategy file with these lines in `deepspeed_config`, the first of them its line 4."""
    file = folder / "mine.yaml"
    head = ("distributed_type: DEEPSPEED", "deepspeed_config:", f"zero_stage: {stage}")
    file.write_text("\n".join((*head[:2], *(f"  {line}" for line in (head[2], *lines)))) + "\n")
    return file


# The homework's own settings, in YAML: 5e8 is text to PyYAML, and to Accelerate nothing at all.
HOMEWORK = """reduce_scatter: true
allgather_partitions: true
allgather_bucket_size: 5e8
overlap_comm: true
contiguous_gradients: true
reduce_bucket_size: 5e8
sub_group_size: 1e9
loss_scale: 0
initial_scale_power: 16
loss_scale_window: 1000
hysteresis: 2
min_loss_scale: 1
offload_optimizer_device: cpu
offload_optimizer_pin_memory: true
offload_param_device: cpu
offload_param_pin_memory: true""".splitlines()


def test_the_homeworks_keys_are_taken(tmp_path: Path) -> None:
    found = read_strategy(str(strategy_file(tmp_path, *HOMEWORK, stage=3))).engine_settings
    assert found == {
        "zero_optimization": {
            "reduce_scatter": True,
            "allgather_partitions": True,
            "allgather_bucket_size": 500_000_000,
            "reduce_bucket_size": 500_000_000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1_000_000_000,
        },
        "fp16": {
            "loss_scale": 0.0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "offload_optimizer": {"pin_memory": True},
        "offload_param": {"pin_memory": True},
    }
    assert {type(value) for section in found.values() for value in section.values()} == {bool, int, float}
    assert sum(map(len, found.values())) == len(ENGINE_KEYS)


MISTAKES: dict[str, tuple[int, list[str], str]] = {
    "misspelt": (2, ["reduce_bucket_sise: 5e8"], "4: deepspeed_config.reduce_bucket_sise: has no effect here; did you"),
    "text": (
        2,
        ["reduce_bucket_size: big"],
        "4: deepspeed_config.reduce_bucket_size: 'big': write a whole number from 1",
    ),
    "a fraction": (2, ["reduce_bucket_size: 1.5"], "4: deepspeed_config.reduce_bucket_size: 1.5: write a whole number"),
    "nothing": (2, ["reduce_bucket_size: 0"], "4: deepspeed_config.reduce_bucket_size: 0: write a whole number from 1"),
    "empty": (2, ["reduce_bucket_size:"], "4: deepspeed_config.reduce_bucket_size: None: write a whole number from 1"),
    "odd": (2, ["allgather_bucket_size: 1001"], "1001: write an even whole number from 2"),
    "a number for a truth": (2, ["overlap_comm: 1"], "4: deepspeed_config.overlap_comm: 1: write true or false"),
    "a truth for a number": (
        2,
        ["hysteresis: true"],
        "4: deepspeed_config.hysteresis: True: write a whole number from 1",
    ),
    "no window": (2, ["loss_scale_window: 0"], "0: write a whole number from 1"),
    "a power too far": (2, ["initial_scale_power: 33"], "33: write a whole number from 0 to 32"),
    "a negative scale": (2, ["loss_scale: -1"], "-1: write a number from 0 to 4,294,967,296"),
    "infinite": (2, ["loss_scale: .inf"], "inf: write a number from 0"),
    "of another stage": (
        2,
        ["sub_group_size: 1e9"],
        "4: deepspeed_config.sub_group_size: '1e9': has no effect under zero",
    ),
    "not gathered": (2, ["allgather_partitions: false"], "False: DeepSpeed gathers updated weights all the same"),
    "offload and scattered": (
        2,
        ["offload_optimizer_device: cpu", "contiguous_gradients: false"],
        "5: deepspeed_config.contiguous_gradients: False: offload_optimizer_device needs contiguous gradients",
    ),
    "nothing to pin": (2, ["offload_optimizer_pin_memory: true"], "has no effect without offload_optimizer_device"),
    "static and dynamic": (
        2,
        ["loss_scale: 512", "hysteresis: 2"],
        "5: deepspeed_config.hysteresis: 2: has no effect beside",
    ),
    "a floor above the first": (2, ["initial_scale_power: 4", "min_loss_scale: 32"], "32: is above the first scale"),
    "DeepSpeed's file": (
        2,
        ["deepspeed_config_file: zero2.json"],
        "has no effect here; write its keys beside zero_stage",
    ),
    "DeepSpeed's section": (
        2,
        ["fp16: {enabled: true}"],
        "4: deepspeed_config.fp16: has no effect here; write its keys",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_place(name: str, tmp_path: Path) -> None:
    stage, lines, words = MISTAKES[name]
    file = strategy_file(tmp_path, *lines, stage=stage)
    with pytest.raises(RecipeError) as caught:
        read_strategy(str(file))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"accelerate_config: {file}:")
    assert words in line


def test_check_ends_with_2_and_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = strategy_file(tmp_path, "overlap_com: true")
    assert main(["check", "recipes/llama3_fsdp.yaml", f"accelerate_config={file}"]) == 2
    error = capsys.readouterr().err
    assert f"{file}:4: deepspeed_config.overlap_com: has no effect here; did you mean overlap_comm?" in error
    assert "Traceback" not in error


def test_the_limits_themselves_are_taken(tmp_path: Path) -> None:
    edges = ["initial_scale_power: 4", "min_loss_scale: 16", "hysteresis: 1", "loss_scale_window: 1"]
    file = strategy_file(tmp_path, *edges, "reduce_bucket_size: 1", "allgather_bucket_size: 2")
    assert read_strategy(str(file)).engine_settings["fp16"]["min_loss_scale"] == 16


def test_what_changes_nothing_is_said() -> None:
    section: dict[str, Any] = {"zero_stage": 2, "allgather_bucket_size": 2, "hysteresis": 2, "reduce_bucket_size": 4}
    first, second = engine_notes(section, "bf16")
    assert "allgather_bucket_size changes nothing" in first
    assert "hysteresis: only for training.mixed_precision: fp16; here it is bf16" in second
    assert list(engine_notes(section, "fp16")) == [first]
    assert list(engine_notes({"zero_stage": 2, "reduce_bucket_size": 4}, "bf16")) == []


def page_rows() -> dict[str, list[str]]:
    """Key -> the other cells of its row in docs/deepspeed_keys.md."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {key: [cell.strip() for cell in cells.split("|")] for key, cells in rows}


def test_the_page_explains_every_key() -> None:
    assert list(page_rows()) == list(ENGINE_KEYS)
    assert {len(cells) for cells in page_rows().values()} == {4}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.filterwarnings("ignore")
def test_the_pages_defaults_are_the_installed_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    stages = {stage: DeepSpeedZeroConfig(stage=stage, **zero).model_dump() for stage in (2, 3)}
    for name, key in ENGINE_KEYS.items():
        if key.where == "fp16":
            values = [DeepSpeedFP16Config().model_dump()[name]]
        elif key.where == "zero_optimization":
            values = [stages[stage][name] for stage in (2, 3)]
        else:
            values = [stages[3][key.where]["pin_memory"]]
        said = json.loads(f"[{page_rows()[name][0].replace(' (ZeRO-3: ', ',').replace(')', '')}]")
        assert [float(value) for value in said] == sorted({float(value) for value in values}), name


def test_accelerate_reads_such_a_file(tmp_path: Path) -> None:
    """And leaves to us what it has no argument for."""
    from accelerate.commands.config.config_args import load_config_from_file

    file = strategy_file(tmp_path, *HOMEWORK, stage=3)
    section = load_config_from_file(str(file)).deepspeed_config
    assert section == yaml.safe_load(file.read_text())["deepspeed_config"]
