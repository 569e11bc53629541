"""Whole runs with hidden states in host memory: the same curve to the bit, said in terminal and receipt, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form import states_on_host
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.exports import contents, product_of
from tests.support.runs.one_curve import LENGTHS, write_curve_recipe
from tests.support.runs.preferences import preference_recipe, write_base
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

OFFLOADS = {"training": {"activation_checkpointing": True, "activation_offloading": True}}
RESIDENT = {"training": {"activation_checkpointing": True}}


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Steps and evaluations, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    kept = ("kind", "step", "loss", "grad_norm", "reward_accuracy", "reward_margin")
    return [{key: line[key] for key in kept if key in line} for line in lines]


def receipt_of(run: Path) -> dict[str, Any]:
    receipt: dict[str, Any] = json.loads((run / "receipt.json").read_text("utf-8"))
    return receipt


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["supervised", "dpo", "kto"])
def test_the_same_curve_to_the_bit(
    kind: str, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With adapters over rows, with the worst step, evaluations and a reference model's forwards."""
    found = []
    for name, setting in (("resident", RESIDENT), ("offloaded", OFFLOADS)):
        folder = tmp_path / name
        folder.mkdir()
        if kind == "supervised":
            chats = write_chats(folder / "chats.jsonl", [24, 60, 33, 47] * 3)
            more = {"training": {"max_steps": 3}, "output_dir": str(folder / "run"), "eval_steps": 1}
            recipe = write_recipe(folder, tiny_lora(tiny_llama, chats, **merged(more, setting)))
        else:
            recipe = preference_recipe(folder, write_base(folder / "base"), kind, {"lora": {"r": 4}}, setting)
        assert main([str(recipe)]) == 0
        found.append(lines_of(folder / "run"))
        layers = receipt_of(folder / "run")["layers_with_states_on_host"]
        assert layers == (2 if name == "offloaded" else 0)
    assert found[0] == found[1]
    assert {line["kind"] for line in found[0]} >= {"train"}
    assert "training.activation_offloading: hidden states take 0.0 GiB of host memory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_ranks_train_the_same_weights_to_the_bit(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Two gloo ranks, several micro-batches a step, with all weights and with adapters: curve and exported weights."""
    skip_where_missing(strategy)
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    split = {"training": {"per_device_batch_size": 2, "max_steps": 3}}
    pages = [
        write_curve_recipe(tmp_path / f"{method}-{name}", tiny_llama, chats, method, setting, split)
        for method in ("full", "lora")
        for name, setting in (("resident", RESIDENT), ("offloaded", OFFLOADS))
    ]
    words = [f"accelerate_config={strategy}"]
    assert launch(pages, ranks=2, words=words, timeout=500) == [0] * 4
    runs = [page.parent / "run" for page in pages]
    assert [receipt_of(run)["layers_with_states_on_host"] for run in runs] == [0, 2, 0, 2]
    assert {(receipt_of(run)["strategy"], receipt_of(run)["world_size"]) for run in runs} == {(strategy, 2)}
    for resident, offloaded in (runs[:2], runs[2:]):
        assert lines_of(resident) == lines_of(offloaded)
        losses = [line["loss"] for line in lines_of(resident) if line["kind"] == "train"]
        assert losses[0] > losses[-1]
        expected, weights = (
            {name: content for name, content in contents(product_of(run)).items() if name.endswith(".safetensors")}
            for run in (resident, offloaded)
        )
        assert len(expected) == 1
        assert weights == expected


@pytest.mark.thorough
def test_a_resumed_run_may_turn_it_on_and_off(tmp_path: Path, tiny_llama: Path) -> None:
    """Each session one step further, with another setting."""
    curves = []
    for name, settings in (("never", [RESIDENT] * 3), ("in turn", [RESIDENT, OFFLOADS, RESIDENT])):
        folder = tmp_path / name
        folder.mkdir()
        chats = write_chats(folder / "chats.jsonl", [24, 60, 33, 47] * 3)
        for steps, setting in enumerate(settings, start=1):
            training = {"max_steps": steps, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
            more = {"training": training, "output_dir": str(folder / "run"), "lora": {"r": 4, "lora_dropout": 0.2}}
            recipe = write_recipe(folder, tiny_lora(tiny_llama, chats, **merged(more, setting)))
            assert main([str(recipe)]) == 0
        curves.append([line for line in lines_of(folder / "run") if line["kind"] == "train"])
    assert [line["step"] for line in curves[0]] == [1, 2, 3]
    assert curves[0] == curves[1]


def test_a_machine_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(states_on_host, "available_bytes", lambda: 1000)
    chats = write_chats(tmp_path / "chats.jsonl", [24] * 4)
    more = merged({"output_dir": str(tmp_path / "run")}, OFFLOADS)
    assert main([str(write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **more)))]) == 3
    said = capsys.readouterr().err
    assert "training.activation_offloading: hidden states take 0.0 GiB of host memory on a machine with 1 rank" in said
    assert "are free; set it to false" in " ".join(said.split())
    assert not (tmp_path / "run").exists()
