"""Adapters on experts, ranks by pattern and LoRA+ under every strategy: one curve, resumed bitwise, exported alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import receipt_of, skip_where_missing
from tests.support.runs.exports import assert_the_last_step_exports_alike
from tests.support.runs.one_curve import LENGTHS, STEPS, checkpointed, curve_of, write_curve_recipe

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 4, "rank_pattern": {"experts.down_proj": 2, "q_proj": 3}, "loraplus_lr_ratio": 4.0}
LORA |= {"target_parameters": EXPERTS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("base") / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def recipe(folder: Path, base: Path, chats: Path, **training: Any) -> Path:
    rows = {"per_device_batch_size": 2, "learning_rate": 5e-4, "activation_checkpointing": True}
    return write_curve_recipe(folder, base, chats, "lora", {"lora": LORA, "training": rows | training})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, base: Path, chats: Path) -> Path:
    page = recipe(tmp_path_factory.mktemp("alone"), base, chats, per_device_batch_size=8)
    assert main([str(page)]) == 0
    return page


# peft says so of an expert's name, and has its rank right, as the tensors that are compared show.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_curve_is_that_of_one_process(strategy: str, alone: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    page = recipe(tmp_path / "two", base, chats)
    assert launch([page], ranks=2, words=[f"accelerate_config={strategy}"], timeout=500) == [0]
    expected = curve_of(alone)
    for found, point in zip(curve_of(page), expected, strict=True):
        assert tuple(found) == pytest.approx(tuple(point), rel=1e-5)
    assert expected[-1].loss < expected[0].loss - 0.005
    receipt = receipt_of(page)
    assert receipt["adapted_modules"]["experts.down_proj"] == 2
    assert receipt["reached_share"] == pytest.approx(receipt_of(alone)["reached_share"])
    assert_the_last_step_exports_alike(page.parent / "run", tmp_path / "exported")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = dict(PeftModel.from_pretrained(plain, page.parent / "run" / "adapter").named_parameters())
    trained = checkpointed(page.parent / "run")
    assert len(trained) == 2 * 2 * 6
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_it_resumes_bitwise(strategy: str, base: Path, chats: Path, tmp_path: Path) -> None:
    words = [f"accelerate_config={strategy}"]
    ranks = 1 if strategy == "single" else 2
    halves = recipe(tmp_path / "halves", base, chats)
    half = [*words, "save_steps=3", "training.lr_scheduler_type=constant"]
    assert launch([halves], ranks=ranks, words=[*half, "training.max_steps=3"], timeout=500) == [0]
    assert launch([halves], ranks=ranks, words=[*half, f"training.max_steps={STEPS}"], timeout=500) == [0]
    again = recipe(tmp_path / "again", base, chats)
    assert launch([again], ranks=ranks, words=half, timeout=500) == [0]
    first, second = checkpointed(halves.parent / "run"), checkpointed(again.parent / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory, base: Path, chats: Path) -> tuple[Path, Path]:
    """Without and with the auxiliary loss of the router: all rows in one forward."""
    pages = []
    for coefficient in (0, 1):
        page = balanced_recipe(tmp_path_factory.mktemp("balanced"), base, chats, 8)
        assert main([str(page), f"model.router_aux_loss_coef={coefficient}"]) == 0
        pages.append(page)
    return pages[0], pages[1]


def balanced_recipe(folder: Path, base: Path, chats: Path, rows: int) -> Path:
    training = {"per_device_batch_size": rows, "activation_checkpointing": True}
    return write_curve_recipe(folder, base, chats, "full", {"training": training})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero3"])
def test_the_routers_loss_has_one_curve(
    strategy: str, balanced: tuple[Path, Path], base: Path, chats: Path, tmp_path: Path
) -> None:
    """In one forward, accumulated in four, and by two ranks; every weight trained, the router's too."""
    skip_where_missing(strategy)
    page = balanced_recipe(tmp_path / "split", base, chats, 2)
    words = [f"accelerate_config={strategy}", "model.router_aux_loss_coef=1"]
    assert launch([page], ranks=1 if strategy == "single" else 2, words=words, timeout=500) == [0]
    plain, expected = map(curve_of, balanced)
    for found, point, without in zip(curve_of(page), expected, plain, strict=True):
        assert tuple(found) == pytest.approx(tuple(point), rel=1e-5)
        assert found.loss > without.loss + 0.5  # of balanced experts it is the number that a token goes to
