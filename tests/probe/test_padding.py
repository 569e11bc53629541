"""Whether prompts may share a left-padded batch: found out on the small model, said in the facts, and remembered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.generation.settings import may_share_a_batch
from finetune.probe import padding, remembered
from finetune.probe.padding import PROMPT_LENGTHS, SAME, compare_padded
from finetune.probe.probe import probe
from finetune.probe.small_model import SmallModel
from tests.support.models.architectures import ARCHITECTURES, Way, recipe_of, save_shaken
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
# Positions that decay whatever the mask says; chunks and pools of tokens that are counted from the row's beginning.
NOT_SHARED = {"llama4_text": "auto", "rwkv": "auto", "deepseek_v4": "eager"}  # under an attention that trains it
REFUSED = ("FinetuneError", "EnvironmentMismatch")
SLOW = ("llama", "mistral", "qwen3_next", "lfm2")
# Their code for answers fails on models so small: no attention layer among four, heads of eight.
CANNOT_ANSWER = {"bailing_hybrid", "granitemoehybrid", "xlstm"}


def padded(name: str, folder: Path, attention: str = "auto") -> dict[str, Any]:
    save_shaken(name, folder)
    small = SmallModel(folder, name, layers=4, kinds=1, parameters=0, special=frozenset({0, 1, 2}))
    recipe = recipe_of(folder, Way(attention, packing=False), checkpointing=False)
    return compare_padded(recipe, small, CPU)


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("name", ["gpt2", "mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_is_masked_may(name: str, tmp_path: Path) -> None:
    found = padded(name, tmp_path)
    assert found["same"] is True
    assert found["difference"] < SAME / 10
    assert may_share_a_batch({"padding": found})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "attention"), NOT_SHARED.items())
def test_what_sees_its_padding_may_not(name: str, attention: str, tmp_path: Path) -> None:
    found = padded(name, tmp_path, attention)
    assert found["same"] is False
    assert found["difference"] > 10 * SAME
    assert not may_share_a_batch({"padding": found})


def test_a_mask_that_is_not_looked_at_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = padding.left_padded

    def without_mask(*arguments: Any) -> dict[str, torch.Tensor]:
        batch = genuine(*arguments)
        return batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}

    monkeypatch.setattr(padding, "left_padded", without_mask)
    assert padded("llama", tmp_path)["difference"] > 100 * SAME


def test_code_that_fails_says_no_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise ValueError("padding is not supported\nhere")

    monkeypatch.setattr(padding, "left_padded", refuses)
    found = padded("llama", tmp_path)
    assert found == {"same": False, "difference": None, "reason": "ValueError: padding is not supported here"}


def test_prompts_differ_in_length_by_no_multiple_of_a_chunk() -> None:
    longest = max(PROMPT_LENGTHS)
    assert all((longest - length) % chunk for length in PROMPT_LENGTHS if length < longest for chunk in (6, 8))


@pytest.mark.parametrize("facts", [{}, {"padding": None}, {"padding": True}, {"padding": {"same": "yes"}}])
def test_facts_that_do_not_know_say_no(facts: dict[str, Any]) -> None:
    assert not may_share_a_batch(facts)


@pytest.mark.thorough
def test_a_probe_says_it_and_remembers_it(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    recipe = least_recipe(tiny_llama)
    first, second = probe(recipe).as_json(), probe(recipe).as_json()
    assert first["padding"]["same"] is True
    assert (second["remembered"], second["padding"]) == (True, first["padding"])
    assert may_share_a_batch(second)


@pytest.mark.thorough
def test_what_an_older_version_remembered_is_not_read(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its facts have no word of padding, and its key another format."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    recipe = least_recipe(tiny_llama)
    with monkeypatch.context() as older:
        older.setattr(remembered, "REMEMBERED_FORMAT", 1)
        probe(recipe)
    assert remembered.REMEMBERED_FORMAT == 3
    for file in (tmp_path / "cache" / "probes").glob("*.json"):
        known = copy.deepcopy(remembered.recall(file.stem))
        assert known is not None
        del known["facts"]["padding"]
        remembered.remember(file.stem, known)
    now = probe(recipe).as_json()
    assert not now["remembered"]
    assert may_share_a_batch(now)


@pytest.mark.slow
def test_every_architecture_that_trains(tmp_path: Path) -> None:
    """All that run here but those known share a batch; what the kit refuses is not asked."""
    not_shared, asked = set(), 0
    for name in ARCHITECTURES:
        found: dict[str, Any] | None = None
        for attention in ("auto", "sdpa", "eager"):
            try:
                found = padded(name, tmp_path / f"{name}-{attention}", attention)
            except (EnvironmentMismatch, FinetuneError):
                continue
            if not (found["reason"] or "").startswith(REFUSED):
                asked += 1
                not_shared |= set() if found["same"] else {name}
                break
    assert asked >= 90
    assert not_shared == NOT_SHARED.keys() | CANNOT_ANSWER, not_shared
