"""The text part of a multimodal checkpoint under every strategy: one curve, and an adapter for the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from finetune.train import main
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import receipt_of, skip_where_missing
from tests.support.runs.exports import assert_the_last_step_exports_alike
from tests.support.runs.one_curve import LENGTHS, curve_of, write_curve_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_multimodal("gemma3", tmp_path_factory.mktemp("base") / "gemma3")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def recipe(folder: Path, base: Path, chats: Path, **training: Any) -> Path:
    rows = {"per_device_batch_size": 2, "learning_rate": 5e-4, "activation_checkpointing": True}
    return write_curve_recipe(folder, base, chats, "lora", {"training": rows | training})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, base: Path, chats: Path) -> Path:
    page = recipe(tmp_path_factory.mktemp("alone"), base, chats, per_device_batch_size=8)
    assert main([str(page)]) == 0
    return page


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_curve_is_that_of_one_process(strategy: str, alone: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    page = recipe(tmp_path / "two", base, chats)
    assert launch([page], ranks=2, words=[f"accelerate_config={strategy}"], timeout=500) == [0]
    for found, point in zip(curve_of(page), curve_of(alone), strict=True):
        assert tuple(found) == pytest.approx(tuple(point), rel=1e-5)
    receipt = receipt_of(page)
    assert (receipt["architecture"], receipt["text_part_of"]) == ("Gemma3ForCausalLM", "gemma3")
    assert_the_last_step_exports_alike(page.parent / "run", tmp_path / "exported")
    tuned = [
        PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32), each.parent / "run" / "adapter"
        )
        for each in (page, alone)
    ]
    for (name, found), (_, expected) in zip(*(model.named_parameters() for model in tuned), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=name)
