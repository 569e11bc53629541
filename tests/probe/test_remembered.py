"""A probe costs once: what it found is recalled, under all that it follows from; a bad cache costs seconds alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from finetune.errors import EnvironmentMismatch
from finetune.probe import compare, remembered
from finetune.probe.probe import probe
from finetune.recipe.schema import Recipe
from tests.support.models.own_model import save_own_model
from tests.support.runs.recipes import half_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every probe that is computed; the computation is that of one model, done once."""
    calls: list[Any] = []
    genuine = compare.judge

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return genuine(*arguments)

    monkeypatch.setattr(compare, "judge", counted)
    return calls


def test_the_second_time_nothing_is_built(tiny_llama: Path, built: list[Any]) -> None:
    first, second = (probe(half_recipe(tiny_llama, lora=None)) for _ in range(2))
    assert len(built) == 1
    assert not first.remembered
    assert second.remembered
    assert first.facts == second.facts


@pytest.mark.slow
def test_a_refusal_is_remembered_too_and_code_that_changes_is_tried_anew(tmp_path: Path, built: list[Any]) -> None:
    folder = save_own_model(tmp_path / "own", "previous", hidden_size=64, num_hidden_layers=3)
    recipe = half_recipe(folder, lora=None, model={"trust_remote_code": True})
    lines = []
    for _ in range(2):
        with pytest.raises(EnvironmentMismatch, match="packing differs") as raised:
            probe(recipe)
        lines.append(str(raised.value))
    assert lines[0] == lines[1]
    assert len(built) == 1
    code = folder / "modeling_own.py"
    code.write_text(code.read_text("utf-8").replace('config.way == "previous"', 'config.way == "none"'), "utf-8")
    with pytest.raises(EnvironmentMismatch):
        probe(recipe)
    assert len(built) == 2


DAMAGED = ["", "{", "[]", "7", "null", "{}", '{"value": {}}', '{"key": "another", "facts": {}}', "[" * 100_000, "\0"]


@pytest.mark.parametrize("content", [*DAMAGED, *(f'{{"digest": "0", "value": {each}}}' for each in DAMAGED)])
def test_a_file_that_is_not_what_was_written_is_as_none(
    tiny_llama: Path, own_cache: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key, file = kept(tiny_llama, own_cache)
    file.write_text(content, "utf-8")
    assert remembered.recall(key) is None
    assert capsys.readouterr().err == f"{file}: is not what was written there; it is made again\n"


@pytest.mark.parametrize(
    "change", [("architecture", "parts"), ('"x"', "null"), ('"x"', "{}"), ('"facts"', '"refusal"')]
)
def test_a_field_that_was_changed_is_not_believed(tiny_llama: Path, own_cache: Path, change: tuple[str, str]) -> None:
    key, file = kept(tiny_llama, own_cache)
    text = file.read_text("utf-8")
    assert change[0] in text
    file.write_text(text.replace(*change), "utf-8")
    assert remembered.recall(key) is None


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tiny_llama: Path, own_cache: Path) -> None:
    key, file = kept(tiny_llama, own_cache)
    file.unlink()
    os.mkfifo(file)
    assert remembered.recall(key) is None
    remembered.remember(key, {"facts": {}})
    assert remembered.recall(key) is not None


def kept(model: Path, cache: Path) -> tuple[str, Path]:
    """A result that is remembered: its key and its file."""
    key = remembered.probe_key(half_recipe(model), PreTrainedConfig(), CPU, None)
    remembered.remember(key, {"facts": {"architecture": "x"}})
    found = remembered.recall(key)
    assert found is not None
    assert found["facts"] == {"architecture": "x"}
    return key, cache / "probes" / f"{key}.json"


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_costs_the_probe_again(
    tiny_llama: Path, built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert not probe(half_recipe(tiny_llama, lora=None)).remembered
    assert len(built) == 2


CHANGES: dict[str, dict[str, Any]] = {
    "attention": {"model": {"attention": "sdpa"}},
    "packing": {"data": {"packing": False}},
    "rows": {"training": {"per_device_batch_size": 2}},
    "checkpointing": {"training": {"activation_checkpointing": False}},
    "precision": {"training": {"mixed_precision": "no"}},
    "format": {"model": {"dtype": "float16"}},
    "adapters": {"lora": {"r": 3}},
    "no adapters": {"lora": None},
    "quantised": {"quantization": {"load_in_4bit": True}},
    "double quantised": {"quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": False}},
    "router": {"model": {"router_aux_loss_coef": 0.02}},
    "another router": {"model": {"router_aux_loss_coef": 0.01}},
    "all in 16 bits": {"lora": None, "training": {"pure_bf16": True}},
}


def key_of(recipe: Recipe, width: int = 64, device: torch.device = CPU, compute: torch.dtype | None = None) -> str:
    return remembered.probe_key(recipe, PreTrainedConfig(hidden_size=width), device, compute)


def test_the_key_covers_what_the_result_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(half_recipe()), *(key_of(half_recipe(**change)) for change in CHANGES.values())]
    keys.append(key_of(half_recipe(), 128))
    keys.append(key_of(half_recipe(), device=torch.device("meta")))
    keys.append(key_of(half_recipe(), compute=torch.bfloat16))
    here = remembered.installed()
    for name in ("torch", "transformers", "peft", "flash-linear-attention"):
        with monkeypatch.context() as patched:
            patched.setattr(remembered, "installed", lambda name=name: here | {name: "9"})
            keys.append(key_of(half_recipe()))
    with monkeypatch.context() as patched:
        patched.setattr(remembered, "own_code", lambda: "another")
        keys.append(key_of(half_recipe()))
    assert len(set(keys)) == len(keys) == len(CHANGES) + 9
    assert key_of(half_recipe(data={"max_length": 64})) == keys[0]  # this changes nothing of the model
    without = {"router_aux_loss_coef": 0.0}  # preferences have no router's loss
    preferences = half_recipe(training={"objective": "dpo"}, model={"router_aux_loss_coef": 0.02})
    assert key_of(preferences) == key_of(half_recipe(model=without)) != keys[0]
    assert key_of(half_recipe(model={"attention": "varlen"})) == keys[0]  # which auto is
