"""The line before training, and what it adds where data, batch and ranks do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from finetune.cli.main import main
from finetune.model.known_configs import beyond_stated
from finetune.model.new_tokens import load_tokenizer
from finetune.planner import changed
from finetune.recipe.loader import load_recipe
from finetune.recipe.optimizers import far_rate
from finetune.recipe.schema import Recipe
from finetune.tokens.dataset import Prepared, prepare
from finetune.training.batch_notes import (
    FEW,
    batch_notes,
    few_steps,
    idle_ranks,
    large_micro_batch,
    notes_before_launch,
    positions_of,
)
from finetune.training.batch_plan import BatchPlan, plan_batches
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import SETTING, least, least_recipe, write_recipe


def recipe_with(model: Path, chats: Path, *words: str, **training: Any) -> Recipe:
    data = {"train": [{"path": "json", "data_files": str(chats)}], "max_length": 128}
    return load_recipe(write_recipe(chats.parent, least(model, data=data, training=training)), list(words)).recipe


def plan_of(recipe: Recipe, rows: int, ranks: int = 1) -> BatchPlan:
    return plan_batches(recipe, rows, world_size=ranks, rank=0, flat=True)


def notes_of(recipe: Recipe, ranks: int = 1) -> list[str]:
    prepared: Prepared = prepare(recipe, load_tokenizer(recipe))
    return batch_notes(recipe, prepared, plan_of(recipe, len(prepared.train), ranks), positions_of(recipe))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 chats of 50 tokens: two fill a row of 128."""
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", [50] * 90)


def test_one_line_where_all_is_well(tiny_llama: Path, chats: Path) -> None:
    assert notes_of(recipe_with(tiny_llama, chats, global_batch_size=2, num_train_epochs=2, warmup_ratio=0.1)) == [
        "data: 45 rows of up to 128 tokens (4,500 tokens an epoch); 45 steps of 2 rows, about 200 tokens each, "
        "5 of them warming up"
    ]


def test_the_line_of_rows_that_are_not_packed(tiny_llama: Path, chats: Path) -> None:
    recipe = recipe_with(tiny_llama, chats, "data.packing=false", global_batch_size=4, warmup_steps=3)
    assert notes_of(recipe) == [
        "data: 90 rows of up to 50 tokens (4,500 tokens); 23 steps of 4 rows, about 200 tokens each, "
        "3 of them warming up"
    ]


def test_few_steps_are_reported_with_their_reason(tiny_llama: Path, chats: Path) -> None:
    notes = notes_of(recipe_with(tiny_llama, chats))
    assert notes == [
        "data: 45 rows of up to 128 tokens (4,500 tokens); 3 steps of 16 rows, about 1,600 tokens each, "
        "1 of them warming up",
        "training.global_batch_size: 3 steps are few: 45 rows x 1 epoch, 16 rows a step; for 20 or more set "
        "training.global_batch_size=2",
    ]


# An edge of 20 steps; more rows at once than there are; a batch that no number of ranks divides.
@example(rows=1, per_device=8, ranks=16)
@example(rows=19, per_device=1, ranks=1)
@example(rows=20, per_device=3, ranks=2)
@example(rows=39, per_device=2, ranks=4)
@example(rows=278, per_device=3, ranks=16)
@example(rows=10_000, per_device=1, ranks=1)
@given(rows=st.integers(1, 400), per_device=st.integers(1, 8), ranks=st.sampled_from([1, 2, 3, 4, 16]))
@settings(max_examples=15, deadline=None)
def test_the_settings_named_give_enough_steps(
    tiny_llama: Path, chats: Path, rows: int, per_device: int, ranks: int
) -> None:
    training: dict[str, Any] = {"global_batch_size": 16, "per_device_batch_size": per_device}
    recipe = recipe_with(tiny_llama, chats, **training)
    plan = plan_of(recipe, rows, ranks)
    lines = list(few_steps(recipe, plan))
    assert bool(lines) == (plan.total_steps < FEW)
    if lines:
        named = SETTING.findall(lines[0])
        mended = recipe_with(tiny_llama, chats, *named, **training)
        plan = plan_of(mended, rows, ranks)
        assert list(few_steps(mended, plan)) == list(idle_ranks(plan)) == []
        assert plan.total_steps < 3 * FEW, "no smaller a batch, and no more epochs, than is needed"
        if named[0].startswith("training.global_batch_size"):
            assert list(large_micro_batch(plan)) == []
            assert plan.global_batch_size % (ranks * plan.per_device_batch_size) == 0, "as many rows on each rank"


def test_a_warmup_longer_than_the_run(tiny_llama: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_with(tiny_llama, chats, global_batch_size=2, warmup_steps=50)
    command = ["check", str(chats.parent / "recipe.yaml"), "--data"]
    assert main(command) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("training.warmup_steps: ")]
    assert "a warmup of 50 steps is longer than the run of 23, which" in line
    assert main([*command, SETTING.findall(line)[0]]) == 0
    assert "training.warmup_steps: " not in capsys.readouterr().out


def test_few_steps_that_were_asked_for(tiny_llama: Path, chats: Path) -> None:
    """The remedy is never the same number again: it is the epochs, or settings that give more steps."""
    for rows, remedy in (
        (450, "; without it there are 29: 450 rows x 1 epoch"),
        (45, "; for 20 or more leave it out and set training.global_batch_size=2"),
        (4, "; for 20 or more add rows, or leave it out and set training.global_batch_size=1 "
            "training.num_train_epochs=5"),
    ):  # fmt: skip
        recipe = recipe_with(tiny_llama, chats, max_steps=1)
        assert list(few_steps(recipe, plan_of(recipe, rows))) == [f"training.max_steps: 1 step is few{remedy}"]
    mended = recipe_with(tiny_llama, chats, "training.num_train_epochs=5", global_batch_size=1)
    assert list(few_steps(mended, plan_of(mended, 4))) == []
    recipe = recipe_with(tiny_llama, chats, max_steps=20)
    assert list(few_steps(recipe, plan_of(recipe, 45))) == []


@pytest.mark.parametrize(
    ("batch", "rows", "expected"),
    [
        (4, 45, []),
        (
            3,
            45,
            [
                "training.global_batch_size: 3 rows a step leave 1 of 4 ranks without one; set "
                "training.global_batch_size=4, or take fewer ranks"
            ],
        ),
        (
            8,
            1,
            [
                "data.train: 1 row in all leave 3 of 4 ranks without one; set training.num_train_epochs=4, or take "
                "fewer ranks"
            ],
        ),
    ],
)
def test_ranks_without_a_row(tiny_llama: Path, chats: Path, batch: int, rows: int, expected: list[str]) -> None:
    plan = plan_of(recipe_with(tiny_llama, chats, global_batch_size=batch), rows, ranks=4)
    assert list(idle_ranks(plan)) == expected
    for line in expected:
        mended = recipe_with(tiny_llama, chats, SETTING.findall(line)[0], global_batch_size=batch)
        assert list(idle_ranks(plan_of(mended, rows, ranks=4))) == []


def test_a_micro_batch_larger_than_a_step(tiny_llama: Path, chats: Path) -> None:
    def lines_of(**training: int) -> list[str]:
        return list(large_micro_batch(plan_of(recipe_with(tiny_llama, chats, **training), 45, ranks=2)))

    assert lines_of(global_batch_size=8, per_device_batch_size=4) == []
    assert lines_of(global_batch_size=7, per_device_batch_size=4) == [
        "training.per_device_batch_size: 4 rows at a time on each of 2 ranks are 8, a step has 7; set "
        "training.per_device_batch_size=3"
    ]
    assert lines_of(global_batch_size=7, per_device_batch_size=3) == []
    assert lines_of(global_batch_size=1, per_device_batch_size=1) == [], "that a rank has none is another line"
    alone = plan_of(recipe_with(tiny_llama, chats, global_batch_size=2, per_device_batch_size=4), 45)
    assert list(large_micro_batch(alone)) == [
        "training.per_device_batch_size: 4 rows at a time, a step has 2; set training.per_device_batch_size=2"
    ]


@pytest.mark.parametrize(
    ("lora", "rate", "said"),
    [
        (True, 2e-3, None),
        (True, 1e-5, None),
        (True, 3e-3, "0.003 is far above what LoRA takes, 0.00001 to 0.002; set training.learning_rate=0.0002"),
        (True, 5e-6, "0.000005 is far below what LoRA takes, 0.00001 to 0.002; set training.learning_rate=0.0002"),
        (False, 1e-4, None),
        (False, 1e-6, None),
        (
            False,
            2e-4,
            "0.0002 is far above what full training takes, 0.000001 to 0.0001; set training.learning_rate=0.00001",
        ),
        (
            False,
            1e-7,
            "0.0000001 is far below what full training takes, 0.000001 to 0.0001; set training.learning_rate=0.00001",
        ),
    ],
)
def test_a_rate_of_another_method(tiny_llama: Path, chats: Path, lora: bool, rate: float, said: str | None) -> None:
    words = [] if lora else ["lora=null"]
    notes = list(far_rate(recipe_with(tiny_llama, chats, *words, learning_rate=rate)))
    assert notes == ([] if said is None else [f"training.learning_rate: {said}"])
    for note in notes:
        mended = recipe_with(tiny_llama, chats, *words, *SETTING.findall(note), learning_rate=rate)
        assert list(far_rate(mended)) == []


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["lora=null"], "full training takes, 0.000001 to 0.0001"),
        ([], "LoRA takes, 0.00001 to 0.002"),
        (["quantization={load_in_4bit: true}"], "QLoRA takes, 0.00001 to 0.002"),
        (["quantization={load_in_8bit: true}"], "QLoRA takes, 0.00001 to 0.002"),
    ],
)
@pytest.mark.parametrize("rate", ["2", "1e-30", "1e300", "0.05"])
def test_check_warns_of_a_rate_without_reading_rows(
    rate: str, words: list[str], method: str, tiny_llama: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with(tiny_llama, chats)
    command = ["check", str(chats.parent / "recipe.yaml"), *words]
    assert main([*command, f"training.learning_rate={rate}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("training.learning_rate: ")]
    assert method in line
    assert len(line) < 160
    assert main([*command, *SETTING.findall(line)]) == 0
    assert "training.learning_rate: " not in capsys.readouterr().out


def test_the_line_tells_idle_ranks(tiny_llama: Path, chats: Path) -> None:
    told = notes_of(recipe_with(tiny_llama, chats, global_batch_size=2), ranks=4)
    assert told[0].endswith("23 steps of 2 rows, about 200 tokens each, 1 of them warming up; 2 of 4 ranks idle")


def test_ranks_of_the_budget_before_a_launch(tiny_llama: Path, chats: Path) -> None:
    words = ["budget.gpus=4", "budget.gpu_memory_gb=24", "accelerate_config=ddp"]
    recipe = recipe_with(tiny_llama, chats, *words, global_batch_size=3)
    told = notes_before_launch(recipe, prepare(recipe, load_tokenizer(recipe)))
    figures = {name: told[name] for name in told if name != "notes"}
    assert figures == {
        "rows": 45, "tokens": 4500, "steps": 15, "tokens_per_step": 300, "warmup_steps": 1,
        "ranks": 4, "idle_ranks": 1,
    }  # fmt: skip
    assert [note.split(":")[0] for note in told["notes"]] == [
        "data", "training.num_train_epochs", "training.global_batch_size"
    ]  # fmt: skip
    alone = recipe_with(tiny_llama, chats, *words[:2], "accelerate_config=single", global_batch_size=3)
    assert notes_before_launch(alone)["ranks"] == 1
    assert notes_before_launch(recipe, ranks=2)["ranks"] == 2


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 100 positions."""
    return save_tiny(tmp_path_factory.mktemp("short"), max_position_embeddings=100)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_documents_beyond_the_positions(short: Path, tmp_path: Path, packing: str) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [50] * 88 + [110, 120])
    recipe = recipe_with(short, chats, f"data.packing={packing}", global_batch_size=2)
    assert notes_of(recipe)[1:] == [
        "data.max_length: 2 documents are longer than the model's 100 positions, the longest 120 tokens "
        f"({chats}:90); set data.max_length=100 data.truncation=right, or model.rope_scaling"
    ]
    mended = recipe_with(short, chats, *SETTING.findall(notes_of(recipe)[1])[-2:], global_batch_size=2)
    assert len(notes_of(mended)) == 1


def test_max_length_beyond_the_positions(short: Path, chats: Path) -> None:
    """Of packed documents none is beyond the positions, however long the row is."""
    assert notes_of(recipe_with(short, chats, global_batch_size=2))[1:] == [
        "data.max_length: 128 is beyond the model's 100 positions; positions begin anew in each document of a row and "
        "the longest has 50 tokens, so none is beyond them; to have longer ones refused set data.max_length=100"
    ]
    alone = notes_of(recipe_with(short, chats, "data.packing=false", global_batch_size=2))[1:]
    assert len(alone) == 1
    assert "a row is one document and the longest has 50 tokens" in alone[0]
    assert notes_of(recipe_with(short, chats, "data.max_length=100", global_batch_size=2))[1:] == []


def test_max_length_beyond_the_positions_where_no_data_are_read(short: Path, tmp_path: Path) -> None:
    """`check` and `plan` of a recipe whose data are on the Hub."""
    recipe = least_recipe(short, data={"train": [{"path": "some/where"}], "max_length": 250})
    assert list(beyond_stated(recipe)) == [
        "data.max_length: 250 is beyond the model's 100 positions; for documents as long set model.rope_scaling: "
        "{rope_type: yarn, factor: 3.0}, or data.max_length=100"
    ]
    for scaling in ({"rope_type": "yarn", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.5}):
        assert list(beyond_stated(changed(recipe, {"model.rope_scaling": scaling}))) == []
    assert (
        len(list(beyond_stated(changed(recipe, {"model.rope_scaling": {"rope_type": "linear", "factor": 2.0}})))) == 1
    )


def test_positions_that_a_model_states(tmp_path: Path, chats: Path, tiny_llama: Path) -> None:
    def positions(**config: Any) -> int | None:
        AutoConfig.for_model(**{"model_type": "llama", **config}).save_pretrained(tmp_path / "model")
        return positions_of(recipe_with(tmp_path / "model", chats))

    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert positions_of(recipe_with(tiny_llama, chats)) == 2048
    assert positions(max_position_embeddings=131072, rope_parameters=llama3) == 131072  # already extended
    assert positions(max_position_embeddings=32768, rope_parameters=yarn) == 131072
    llama32 = llama3 | {"factor": 32.0}  # of 8,192: it was trained on 131,072
    assert positions(max_position_embeddings=131072, rope_parameters=llama32) == 131072
    assert positions(model_type="gpt2", n_positions=1024) == 1024
    assert positions(model_type="bloom") is None
    assert positions_of(recipe_with(tmp_path / "nowhere", chats)) is None
