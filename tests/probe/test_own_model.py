"""A configuration nobody prepared for: the probe passes the right one and refuses those that are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finetune.architecture.loss import AS_IT_IS
from finetune.errors import FinetuneError
from finetune.probe.probe import probe
from finetune.recipe.schema import Recipe
from tests.support.models.own_model import save_own_model
from tests.support.runs.recipes import least_recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def recipe(folder: Path, **changes: Any) -> Recipe:
    changes["model"] = {"trust_remote_code": True, **changes.get("model", {})}
    return least_recipe(folder, **changes)


def refusal(folder: Path, way: str, **changes: Any) -> str:
    with pytest.raises(FinetuneError) as raised:
        probe(recipe(save_own_model(folder, way), **changes))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_right_one_passes(tmp_path: Path) -> None:
    found = probe(recipe(save_own_model(tmp_path / "own"))).as_json()
    assert found["architecture"] == "OwnForCausalLM"
    assert set(found["found"]) == {"recomputed", "kept"}
    assert max(off for way in found["found"].values() for off in (way["loss"], way["gradients"])) <= 1e-5
    assert found["small"]["layers"] == 6  # every third layer is gated, and there are two of each kind
    assert found["small"]["kinds"] == 2
    assert found["small"]["parameters"] < 200_000


@pytest.mark.slow
def test_one_that_reads_the_token_before_across_documents_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "own", "previous", lora=None)
    assert message.startswith("data.packing: true: packing differs: OwnForCausalLM")
    assert message.endswith("; set data.packing: false")
    probe(recipe(tmp_path / "own", lora=None, data={"packing": False}))  # what was proposed is right


@pytest.mark.thorough
def test_one_that_reads_it_within_a_document_passes(tmp_path: Path) -> None:
    probe(recipe(save_own_model(tmp_path / "own", "previous, within a document")))


@pytest.mark.thorough
def test_a_loss_that_is_not_of_the_last_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial without data sees it too, and is off here: numbers alone decide."""
    monkeypatch.setattr("finetune.architecture.families.check_head_is_last", lambda *_, **__: AS_IT_IS)
    message = refusal(tmp_path / "own", "scaled states")
    assert re.match(r"model\.name_or_path: \S+: the loss differs: .*; choose another model$", message)


@pytest.mark.thorough
def test_one_that_draws_random_numbers_is_compared_without_them(tmp_path: Path) -> None:
    found = probe(recipe(save_own_model(tmp_path / "own", "noise"))).as_json()
    assert found["note"] == "compared in evaluation mode: it draws random numbers"


def test_one_that_cannot_be_built_is_a_line(tmp_path: Path) -> None:
    message = refusal(tmp_path / "own", "does not build")
    assert "this model has a bad day and says so at length" in message
