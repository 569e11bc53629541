"""What a pipeline cannot train with is refused in a line, before anything is loaded; what it can is let through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.recipe.sections.pipelines import SCHEDULES
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from tests.support.runs.launching import ALONE, check_launch
from tests.support.runs.recipes import SETTING, least_recipe

FOUR = replace(ALONE, world_size=4, on_cpu=True)
recipe = partial(least_recipe, training={"mixed_precision": "no"})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_file_of_this_name_is_a_pipeline(schedule: str, tmp_path: Path) -> None:
    """Wherever it lies; a DDP file of another name is none."""
    strategy = read_strategy(schedule)
    assert (strategy.kind, strategy.schedule) == ("pipeline", schedule)
    assert (strategy.stage_count(4), strategy.data_rank_count(4)) == (4, 1)
    text = (CONFIG_FOLDER / f"{schedule}.yaml").read_text("utf-8")
    for name, expected in ((schedule, schedule), ("mine", None)):
        copy = tmp_path / f"{name}.yaml"
        copy.write_text(text, "utf-8")
        assert read_strategy(str(copy)).schedule == expected
    plain = read_strategy("ddp")
    assert (plain.schedule, plain.stage_count(4), plain.data_rank_count(4)) == (None, 1, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_fits_is_let_through(schedule: str) -> None:
    assert check_launch(recipe(accelerate_config=schedule), FOUR).schedule == schedule


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"quantization": {"load_in_8bit": True}}, "quantization.load_in_8bit"),
        ({"training": {"mixed_precision": "fp16"}}, "training.mixed_precision"),
        ({"model": {"attention": "sdpa"}}, "model.attention"),
        ({"model": {"add_tokens": ["<date>"]}}, "model.add_tokens"),
        ({"training": {"compile": True}}, "training.compile"),
    ],
)
def test_what_it_cannot_is_refused(changes: dict[str, Any], place: str) -> None:
    content = {"accelerate_config": "gpipe", "model": {"name_or_path": "x"}} | changes
    content["model"] = {"name_or_path": "x"} | changes.get("model", {})
    with pytest.raises(EnvironmentMismatch) as caught:
        check_launch(least_recipe(**content), FOUR)
    assert str(caught.value).startswith(f"{place}: ")
    assert "\n" not in str(caught.value)


def test_four_bits_are_split() -> None:
    content = recipe(accelerate_config="gpipe", quantization={"load_in_4bit": True})
    assert check_launch(content, FOUR).schedule == "gpipe"


def test_1f1b_wants_a_micro_batch_a_stage() -> None:
    few: dict[str, Any] = {"global_batch_size": 6, "per_device_batch_size": 2, "mixed_precision": "no"}
    for schedule in ("gpipe", "naive"):
        check_launch(least_recipe(accelerate_config=schedule, training=few), FOUR)
    with pytest.raises(EnvironmentMismatch, match="3 micro-batches a step are fewer than the 4 stages") as caught:
        check_launch(least_recipe(accelerate_config="1f1b", training=few), FOUR)
    assert "\n" not in str(caught.value)
    remedies = [word.split("=") for word in SETTING.findall(str(caught.value)) if word.startswith("training.")]
    assert remedies == [["training.global_batch_size", "8"]]
    for rows in (7, 8):  # of seven, the fourth micro-batch has one row
        check_launch(least_recipe(accelerate_config="1f1b", training=few | {"global_batch_size": rows}), FOUR)


def test_interleaved_wants_rounds_of_equal_size() -> None:
    """Nine micro-batches over four stages: two rounds, of which one would have five."""
    some: dict[str, Any] = {"global_batch_size": 9, "per_device_batch_size": 1, "mixed_precision": "no"}
    check_launch(least_recipe(accelerate_config="1f1b", training=some), FOUR)
    with pytest.raises(
        EnvironmentMismatch, match="rounds of equal size, each with 4 micro-batches or more; 9 a step make none"
    ) as caught:
        check_launch(least_recipe(accelerate_config="interleaved_1f1b", training=some), FOUR)
    assert "\n" not in str(caught.value)
    remedies = dict(word.split("=") for word in SETTING.findall(str(caught.value)))
    assert remedies == {"training.global_batch_size": "12"}
    for fitting in (4, 6, 8, 10, 12):
        training = some | {"global_batch_size": fitting}
        check_launch(least_recipe(accelerate_config="interleaved_1f1b", training=training), FOUR)


def test_pipelines_beside_each_other() -> None:
    """Of as many stages, two or more; each has its share of a step's rows."""
    strategy = read_strategy("1f1b_ddp2")
    assert (strategy.kind, strategy.schedule, strategy.pipelines) == ("pipeline", "1f1b", ("1f1b", 2))
    assert (strategy.stage_count(8), strategy.data_rank_count(8)) == (4, 2)
    assert check_launch(recipe(accelerate_config="1f1b_ddp2"), FOUR) == strategy
    for ranks, fitting in ((2, 4), (3, 4), (5, 4), (7, 6)):
        with pytest.raises(EnvironmentMismatch, match="cannot be divided so") as caught:
            check_launch(recipe(accelerate_config="1f1b_ddp2"), replace(FOUR, world_size=ranks))
        assert str(caught.value).endswith(f"{ranks} processes cannot be divided so: launch {fitting}")
    few: dict[str, Any] = {"global_batch_size": 2, "per_device_batch_size": 1, "mixed_precision": "no"}
    with pytest.raises(
        EnvironmentMismatch, match="1 micro-batch a step in each pipeline are fewer than the 2"
    ) as caught:
        check_launch(least_recipe(accelerate_config="1f1b_ddp2", training=few), FOUR)
    assert "training.global_batch_size=4" in str(caught.value)
    check_launch(least_recipe(accelerate_config="1f1b_ddp2", training=few | {"global_batch_size": 4}), FOUR)


@pytest.mark.parametrize("name", ["1f1b_ddp", "gpipe_ddp1", "naive_ddp02", "interleaved_1f1b_ddp2b"])
def test_a_name_that_nearly_says_it_is_refused(name: str, tmp_path: Path) -> None:
    """It would silently be plain DDP."""
    copy = tmp_path / f"{name}.yaml"
    copy.write_text((CONFIG_FOLDER / "1f1b_ddp2.yaml").read_text("utf-8"), "utf-8")
    schedule = name.partition("_ddp")[0]
    with pytest.raises(RecipeError, match=f"{name}: its name does not say how many.*; name it {schedule}_ddp2"):
        read_strategy(str(copy))
    copy.rename(tmp_path / f"{schedule}_ddp12.yaml")
    assert read_strategy(str(tmp_path / f"{schedule}_ddp12.yaml")).pipelines == (schedule, 12)


def test_one_process_is_no_pipeline() -> None:
    with pytest.raises(EnvironmentMismatch, match="gpipe runs on several processes"):
        check_launch(recipe(accelerate_config="gpipe"), ALONE)


def test_the_launcher_has_to_mean_the_same_schedule() -> None:
    for file in ("1f1b", "ddp"):
        launch = replace(FOUR, config_file=CONFIG_FOLDER / f"{file}.yaml")
        with pytest.raises(EnvironmentMismatch, match=f"gpipe.*{file}"):
            check_launch(recipe(accelerate_config="gpipe"), launch)
    same = replace(FOUR, config_file=CONFIG_FOLDER / "gpipe.yaml")
    assert check_launch(recipe(accelerate_config="gpipe"), same).schedule == "gpipe"


def test_our_keys_would_be_no_accelerate_file(tmp_path: Path) -> None:
    """Why the name says it: Accelerate's own loader refuses what it does not know, and so do we."""
    odd = tmp_path / "gpipe.yaml"
    odd.write_text((CONFIG_FOLDER / "gpipe.yaml").read_text("utf-8") + "pipeline_stages: 2\n", "utf-8")
    with pytest.raises(RecipeError, match="pipeline_stages"):
        read_strategy(str(odd))
