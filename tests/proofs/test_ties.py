"""What the files hold decides whether head and embeddings are one matrix, under every strategy, and in what is written.

A base whose config.json ties them, while the file has two different matrices, is trained with two, as plain
transformers loads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.models.ties import changed_base
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import TOLERANCE, skip_where_missing, worst
from tests.support.runs.one_curve import LENGTHS, curve_of, reference, write_curve_recipe

RANKS = ("ddp", "fsdp2", "zero2", "zero3", "1f1b")
SPLIT = {"data": {"packing": False}, "training": {"per_device_batch_size": 2}}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def trained(
    folder: Path, base: Path, chats: Path, strategies: Sequence[str], method: str, **sections: object
) -> dict[str, Path]:
    """The recipes, each trained under its strategy on two ranks."""
    recipes = {}
    for name in strategies:
        (folder / name).mkdir(parents=True)
        extra = {"accelerate_config": name, **sections}
        recipes[name] = write_curve_recipe(folder / name, base, chats, method, SPLIT, **extra)
    assert launch(list(recipes.values()), ranks=2, timeout=500) == [0] * len(recipes)
    return recipes


def assert_the_export_says_what_it_holds(run: Path) -> None:
    """It has two matrices, and its config.json does not tie them."""
    config = json.loads((run / "model" / "config.json").read_text("utf-8"))
    assert config["tie_word_embeddings"] is False
    weights = load_file(run / "model" / "model.safetensors")
    head, embeddings = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert not torch.equal(head, embeddings)
    loaded = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, head.float())
    assert torch.equal(loaded.model.embed_tokens.weight, embeddings.float())


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies", [("fsdp2", "zero3"), pytest.param(("ddp", "zero2", "1f1b"), marks=pytest.mark.slow)], ids="+".join
)
def test_two_matrices_are_trained_as_two(strategies: tuple[str, ...], chats: Path, tmp_path: Path) -> None:
    for name in strategies:
        skip_where_missing(name)
    base = changed_base(tmp_path / "base", tied=True)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert plain.lm_head.weight is not plain.model.embed_tokens.weight
    expected = reference(base, chats, "full")
    for name, recipe in trained(tmp_path / "runs", base, chats, strategies, "full").items():
        assert worst(curve_of(recipe), expected) <= TOLERANCE, name
        assert_the_export_says_what_it_holds(tmp_path / "runs" / name / "run")


@pytest.mark.slow
def test_adapters_on_two_matrices(chats: Path, tmp_path: Path) -> None:
    """Each strategy trains them on the same frozen base."""
    base = changed_base(tmp_path / "base", tied=True)
    expected = reference(base, chats, "lora")
    for name, recipe in trained(tmp_path / "runs", base, chats, RANKS, "lora").items():
        assert worst(curve_of(recipe), expected) <= TOLERANCE, name
