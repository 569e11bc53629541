"""`activation_checkpointing: auto`: the least recomputation that fits, and why."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form import recomputation
from finetune.closed_form.estimate import estimate
from finetune.closed_form.recomputation import (
    MOST_TOKENS_AT_ONCE,
    Chosen,
    choose_recomputation,
    choose_reduction,
    chosen_words,
)
from finetune.model.known_configs import config_if_known, full_config
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.recipe.strategy import read_strategy

ROOT = Path(__file__).resolve().parents[2]
MODEL = "meta-llama/Llama-3.1-8B"


def recipe(setting: Any = "auto", model: str = MODEL, **keys: Any) -> Recipe:
    return Recipe(
        model=ModelSection(name_or_path=model),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=4096),
        # Not auto, which asks this machine's processor.
        training=Training(
            activation_checkpointing=setting,
            **{"compile": False, "mixed_precision": "bf16"} | keys.pop("training", {}),
        ),
        **keys,
    )


def upper(setting: Any) -> int:
    """Bytes that surely suffice for adapters on one GPU."""
    gpus = parse_gpus("80GB")
    assert gpus is not None
    return estimate(recipe(setting), full_config(MODEL)[0], gpus).upper


def chosen_for(asked: Recipe, gpus: Gpus | None, ranks: int = 1) -> Chosen:
    return choose_recomputation(asked, config_if_known(asked.model), gpus, ranks=ranks)


def with_memory(nbytes: int) -> Gpus:
    gpus = parse_gpus("80GB")
    assert gpus is not None
    return dataclasses.replace(gpus, memory=nbytes)


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys", "expected"),
    [
        ("fsdp2", "4x24GB", {}, True),  # adapters: 0.2 GB unsharded
        ("hsdp", "2x4x24GB", {}, True),
        ("fsdp2", "8x80GB", {"lora": None}, True),  # 32 GB
        ("fsdp2", "8x48GB", {"lora": None}, False),
        ("fsdp2", "8x80GB", {"lora": None, "model": "meta-llama/Llama-3.2-1B"}, True),
        ("fsdp2", "4x24GB", {"training": {"global_batch_size": 4}}, None),  # one micro-batch
        ("fsdp2_offload", "4x24GB", {}, None),
        ("fsdp2", "1x80GB", {}, None),
        ("ddp", "4x24GB", {}, None),
        ("zero2", "4x24GB", {}, None),
        ("fsdp2", "4x24GB", {"lora": Lora(lora_dropout=0.1)}, False),
    ],
)
def test_gradients_are_reduced_once_a_step_where_they_fit(
    strategy: str, gpus: str, keys: dict[str, Any], expected: bool | None
) -> None:
    training = {"global_batch_size": 64} | keys.get("training", {})
    asked = recipe(True, **{**keys, "training": training, "accelerate_config": strategy})
    room = parse_gpus(gpus)
    assert room is not None
    found = choose_reduction(
        asked, config_if_known(asked.model), read_strategy(strategy), room, ranks=room.count, memory=0
    )
    assert (found and found.once) == expected
    if found is not None:
        how = "once a step" if found.once else "after each micro-batch"
        assert found.facts["line"].startswith(f"gradients: reduced {how}, because ")


def test_a_cpus_ranks_share_its_memory_and_what_is_free_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "available_bytes", lambda: 0)
    asked = recipe(True, accelerate_config="fsdp2", training={"global_batch_size": 8})
    room = Gpus(2, 1 << 60, "host memory")
    needed = 2 * estimate(asked, full_config(MODEL)[0], room, keeps_gradients=True).needed
    for memory, expected in ((2 * needed, True), (2 * needed - 2, False)):
        found = choose_reduction(
            asked, config_if_known(asked.model), read_strategy("fsdp2"), None, ranks=2, memory=memory
        )
        assert found is not None
        assert found.once == expected


def test_it_is_the_default() -> None:
    assert Training().activation_checkpointing == "auto"
    assert Training().recompute_every == 1  # unless it is resolved


def test_each_needs_less_than_the_one_before() -> None:
    none, selective, second, every = map(upper, RECOMPUTATIONS)
    assert none > selective > second > every


@pytest.mark.parametrize(
    ("memory", "chosen"),
    [
        (upper(False), False),
        (upper(False) - 1, "selective"),
        (upper("selective"), "selective"),
        (upper(2) - 1, True),
        (upper(True), True),
        (upper(True) - 1, True),
    ],
)
def test_the_first_that_fits_with_its_margin(memory: int, chosen: Any) -> None:
    found = chosen_for(recipe(), with_memory(memory))
    assert found.recipe.training.activation_checkpointing == chosen
    assert found.recipe.model_copy(update={"training": Training()}) == recipe().model_copy(
        update={"training": Training()}
    )
    assert found.facts["runs"] == chosen


@pytest.mark.parametrize(("memory", "chosen"), [(upper("selective"), 2 if upper(2) <= upper("selective") else True)])
def test_what_may_be_compiled_is_not_recomputed_selectively(memory: int, chosen: Any) -> None:
    for compiled in ("auto", True):
        asked = recipe(training={"compile": compiled})
        found = chosen_for(asked, with_memory(memory)).recipe.training
        assert found.activation_checkpointing == chosen


def test_the_line_says_why() -> None:
    gib = 2**30
    assert chosen_for(recipe(), with_memory(80 * gib)).line == (
        f"activation checkpointing: none, because the plan needs at most {upper(False) / gib:.1f} of 80.0 GiB"
    )
    assert chosen_for(recipe(), with_memory(38 * gib)).line == (
        f"activation checkpointing: selective, because the plan needs at most {upper('selective') / gib:.1f} "
        f"of 38.0 GiB, and {upper(False) / gib:.1f} with none"
    )
    assert chosen_for(recipe(), with_memory(25 * gib)).line == (
        f"activation checkpointing: all layers, because the plan needs at most {upper(True) / gib:.1f} of 25.0 GiB, "
        f"and {upper(2) / gib:.1f} with one layer of 2"
    )
    assert chosen_for(recipe(), with_memory(20 * gib)).line == (
        f"activation checkpointing: all layers, because even so the plan may need {upper(True) / gib:.1f} of 20.0 GiB"
    )


# Rows of a micro-batch and recomputation on 8, 24 and 80 GB. docs/recipes.md has the same table.
TABLE = {
    "llama3_1b_lora_1x8gb": [(1, False), (6, False), (8, False)],
    "smollm2_1.7b_lora_1x8gb": [(4, True), (3, False), (8, False)],
    "llama3_8b_lora_1x24gb": [(1, True), (1, True), (2, False)],
    "llama3_fsdp": [(1, True), (2, True), (2, False)],
    "smollm2_1.7b_full_text_1x48gb": [(1, True), (1, True), (4, False)],
}


@pytest.mark.parametrize("name", TABLE)
def test_rows_by_memory(name: str) -> None:
    """The most that fit, without recomputation first."""
    asked = load_recipe(
        ROOT / "recipes" / f"{name}.yaml",
        ["training.per_device_batch_size=auto", "training.activation_checkpointing=auto"],
    ).recipe
    found = []
    for size in ("8GB", "24GB", "80GB"):
        gpus = parse_gpus(f"{asked.budget.gpus}x{size}")
        assert gpus is not None
        chosen = chosen_for(asked, gpus)
        training = chosen.recipe.training
        found.append((training.rows_at_once, training.activation_checkpointing))
        assert training.rows_at_once * asked.data.row_tokens <= MOST_TOKENS_AT_ONCE
        assert chosen.rows_facts["runs"] == training.rows_at_once
        fixed = chosen_for(chosen.recipe, gpus)
        assert (fixed.recipe, fixed.line) == (chosen.recipe, ""), "nothing is left to choose"
    assert found == TABLE[name]
    cells = [str(rows) + ", recomputed" * bool(recomputed) for rows, recomputed in found]
    assert f"| `{name}` | {' | '.join(cells)} |" in (ROOT / "docs" / "recipes.md").read_text("utf-8")


@pytest.mark.parametrize(("key", "value"), [("lora", {"lora_dropout": 0.1}), ("accelerate_config", "zero2")])
def test_without_a_closed_form_it_is_one_row(key: str, value: Any) -> None:
    asked = recipe(training={"per_device_batch_size": "auto"})
    values = asked.model_dump(mode="json") | {key: value}
    chosen = chosen_for(Recipe.model_validate(values), with_memory(10**15))
    assert chosen.recipe.training.rows_at_once == 1
    assert "there is no closed form for" in chosen.line


@pytest.mark.parametrize("setting", [False, "selective", 2, 3, True])
def test_what_is_written_stays(setting: Any) -> None:
    found = chosen_for(recipe(setting), with_memory(1))
    assert found.recipe == recipe(setting)
    assert (found.facts, found.line) == ({}, "")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"accelerate_config": "zero3"}, "there is no closed form for accelerate_config: zero3"),
        ({"model": "google/gemma-3-1b-it"}, "there is no closed form for the architecture gemma3_text"),
        ({"quantization": Quantization(load_in_8bit=True)}, "there is no closed form for quantization.load_in_8bit"),
        ({"model": "/nowhere/at/all"}, "the configuration of the model is not known"),
    ],
)
def test_without_a_closed_form_all_layers_are_recomputed(keys: dict[str, Any], why: str) -> None:
    found = chosen_for(recipe(**keys), with_memory(10**15))
    assert (found.recipe.training.activation_checkpointing, found.why) == (True, why)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_on_a_cpu_by_free_host_memory(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the closed form's bytes, and each rank has its share of the machine."""
    host = Gpus(1, 0, "host memory")
    needed = 2 * estimate(recipe(False), full_config(MODEL)[0], host).needed
    job = recipe(training={"mixed_precision": precision})
    for available, ranks, chosen in (
        (needed, 1, False),
        (needed - 1, 1, "selective"),
        (needed, 2, True),
        (10 * needed, 2, False),
    ):
        monkeypatch.setattr(recomputation, "available_bytes", lambda found=available: found)
        found = chosen_for(job, None, ranks=ranks)
        assert found.recipe.training.activation_checkpointing == chosen
        assert found.recipe.training.mixed_precision == precision
        assert re.search(r" of [\d.]+ GiB of free host memory", found.line)


def test_words_for_the_rehearsal_are_of_the_recipes_own_gpus(tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "llama3_8b_lora_1x80gb.yaml").read_text("utf-8")
    page = tmp_path / "recipe.yaml"
    page.write_text(re.sub(r"activation_checkpointing: \w+", "activation_checkpointing: auto", text), "utf-8")
    assert chosen_words(page, ["training.seed=1"]) == ["training.seed=1", "training.activation_checkpointing=false"]
    small = ["budget.gpu_memory_gb=24"]
    assert chosen_words(page, small) == [*small, "training.activation_checkpointing=true"]
    middle = ["budget.gpu_memory_gb=40"]
    assert chosen_words(page, middle) == [*middle, "training.activation_checkpointing=2"]
    written = ["training.activation_checkpointing=2"]
    assert chosen_words(page, written) == written
