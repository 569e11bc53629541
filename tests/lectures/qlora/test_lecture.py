"""The lecture `qlora`: parts at full size against arithmetic, and the small model's plan against what was tracked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form.constants import COMPONENTS
from finetune.errors import EnvironmentMismatch
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from lectures.output import LectureRequest
from lectures.qlora import lecture
from lectures.qlora.lecture import FullSize, SmallSize
from lectures.qlora.picture import draw_parts
from lectures.qlora.small_model import LAYERS, TOKENS, VOCABULARY, WIDTH, PartBytes
from tests.support.lectures import held
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe

LLAMA_8B, EMBEDDINGS = 8_030_261_248, 2 * 128_256 * 4_096
NORMS = (2 * 32 + 1) * 4_096
ADAPTERS, ADAPTED = 41_943_040, 7 * 32  # of rank 16 on all linear layers: weights, layers
ANGLES = 2 * 64 * 4  # bytes of the rotary frequencies and of those before scaling: float32, half a head of 128
COUNT = 4  # bytes of AdamW's step count of a tensor
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight

# The small model, by hand: attention of 8 heads and 4 of keys and values, an MLP of 11/4 of the width.
MLP = 11 * WIDTH // 4
MATRICES = LAYERS * (3 * WIDTH**2 + 3 * WIDTH * MLP)  # queries and outputs are whole, keys and values half
SMALL = MATRICES + 2 * VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH
SMALL_ADAPTERS = LAYERS * 16 * (2 * (WIDTH + WIDTH) + 2 * (WIDTH + WIDTH // 2) + 3 * (WIDTH + MLP))


@pytest.mark.slow
def test_parts_at_full_size() -> None:
    """Weights, gradients and moments by the counts of Llama 3.1 8B's configuration."""
    planned = held("qlora").facts["planned"]
    parts = {name: each["components"] for name, each in planned.items()}
    tensors = 9 * 32 + 3  # of the model, each with a step count
    assert parts["full"]["parameters"] == 4 * LLAMA_8B + ANGLES
    assert parts["full"]["optimizer state"] == 8 * LLAMA_8B + COUNT * tensors
    assert parts["LoRA"]["parameters"] == 2 * LLAMA_8B + 4 * ADAPTERS + ANGLES
    assert parts["LoRA"]["optimizer state"] == 8 * ADAPTERS + 2 * ADAPTED * COUNT
    expected = NF4 * (LLAMA_8B - EMBEDDINGS - NORMS) + 2 * (EMBEDDINGS + NORMS) + 4 * ADAPTERS
    assert parts["QLoRA"]["parameters"] == pytest.approx(expected, rel=1e-4)
    assert parts["QLoRA, paged AdamW"]["parameters"] == parts["QLoRA"]["parameters"]
    paged = 32 * 3 * 14_336 * 16  # of the MLP's adapters, the only ones of 100,000 elements and more
    assert parts["QLoRA, paged AdamW"]["optimizer state"] == 8 * (ADAPTERS - paged)
    assert [each["host_bytes"] for each in planned.values()] == [0, 0, 0, 8 * paged]
    assert [each["fits"] for each in planned.values()] == [False, False, True, True]
    for each in planned.values():
        assert sum(each["parts"].values()) == each["peak_bytes"]


@pytest.mark.slow
def test_the_small_models_plan_is_its_training_to_the_byte() -> None:
    facts = held("qlora").facts
    assert facts["small_weights"] == SMALL
    assert list(facts["small"]) == ["full", "LoRA", "QLoRA"]
    for name, each in facts["small"].items():
        assert each["planned"] == each["tracked"], name


@pytest.mark.slow
def test_the_small_models_parts_by_arithmetic() -> None:
    found = {name: each["tracked"] for name, each in held("qlora").facts["small"].items()}
    full, lora, qlora = found["full"], found["LoRA"], found["QLoRA"]
    assert full["gradients"] == 4 * SMALL
    assert full["states"] == 8 * SMALL + COUNT * (9 * LAYERS + 3)
    for each in (lora, qlora):
        assert each["gradients"] == 4 * SMALL_ADAPTERS
        assert each["states"] == 8 * SMALL_ADAPTERS + COUNT * 2 * 7 * LAYERS
    saved = lora["weights"] - qlora["weights"]
    assert saved == pytest.approx((2 - NF4) * MATRICES, rel=0.01)
    # Copies in 16 bits, and of each layer and token at least the inputs of its products.
    least = LAYERS * TOKENS * 2 * (4 * WIDTH + 3 * MLP)
    assert full["left"] > 2 * SMALL + least
    assert full["left"] - lora["left"] > 2 * (SMALL - SMALL_ADAPTERS)


def small_sizes() -> dict[str, SmallSize]:
    pair = SmallSize(PartBytes(4, 4, 8, 3, 20), PartBytes(4, 4, 8, 3, 21))
    return dict.fromkeys(lecture.ON_CPU, pair)


def test_a_difference_is_shown() -> None:
    chapter = lecture.beside_each_other(1000, small_sizes())
    rows = [line.split() for line in chapter.lines if line.startswith("QLoRA")]
    assert rows[-1] == ["QLoRA", "all,", "at", "the", "peak", "20", "21"]
    assert chapter.measured


def test_a_way_that_a_recipe_cannot_take_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: Path
) -> None:
    def planned(recipe: Any, gpus: Any) -> Any:
        raise EnvironmentMismatch(f"refused: {recipe.training.optim}")

    chats = write_chats(tmp_path / "chats.jsonl", [20, 30])
    recipe = write_recipe(tmp_path, tiny(tiny_llama, chats))
    monkeypatch.setattr(lecture.planner, "plan", planned)
    asked = LectureRequest(recipe, (), {}, tmp_path, lambda _: None)
    found = lecture.plan_way(asked, load_recipe(recipe).recipe, "QLoRA, paged AdamW", None)
    assert found == FullSize(None, "refused: paged_adamw_32bit")
    assert found.as_json() == {"reason": "refused: paged_adamw_32bit"}


def test_the_picture_has_a_bar_for_each_part(tmp_path: Path) -> None:
    full = {name: dict.fromkeys(lecture.FULL_SIZE_PARTS, 2**30) for name in lecture.WAYS_TO_TRAIN}
    draw_parts(full, lecture.small_bars(small_sizes()), "a/model", parse_gpus("1x24GB"), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_every_component_is_in_one_part() -> None:
    named = [component for components in lecture.FULL_SIZE_PARTS.values() for component in components]
    assert sorted(named) == sorted(COMPONENTS)
