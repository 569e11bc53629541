"""The lecture `mixed-precision` on a tiny model: dtypes of the six steps, their arithmetic, and the overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lectures.mixed_precision import mixed_precision_lecture
from lectures.output import LectureRequest, LectureResult
from tests.support.models.tiny import save_tiny, tiny_model, write_chats
from tests.support.runs.recipes import tiny, write_recipe


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> LectureResult:
    folder = tmp_path_factory.mktemp("lecture")
    base, chats = save_tiny(folder / "model"), write_chats(folder / "chats.jsonl", [60] * 8)
    training = {"global_batch_size": 1, "learning_rate": 1e-3}
    recipe = write_recipe(folder, tiny(base, chats, lora=None, data={"max_length": 128}, training=training))
    return mixed_precision_lecture(LectureRequest(recipe, (), {"scale": "30"}, folder, lambda _: None))


def test_dtypes_of_the_six_steps(result: LectureResult) -> None:
    steps = {each["step"].split()[0]: set() for each in result.facts["steps"]}
    for each in result.facts["steps"]:
        steps[each["step"].split()[0]].add(each["dtype"])
    float32 = {"float32"}
    assert steps == {
        "1": float32,
        "2": {"float16"},
        "3": float32,
        "4": {"float16", "float32"},
        "5": float32,
        "6": float32,
    }


def test_the_arithmetic_between_the_steps(result: LectureResult) -> None:
    master, half, loss, scaled, half_gradient, kept, unscaled, mean, updated = (
        each["value"] for each in result.facts["steps"]
    )
    scale = scaled / loss
    assert half == torch.tensor(master).half().item()
    assert scale == result.facts["tries"][-1]["scale_after"]
    assert kept == half_gradient, "the float32 gradient is the 16-bit one, cast"
    assert unscaled == pytest.approx(half_gradient / scale, rel=1e-6)
    assert updated != master
    assert abs(updated - master) < 1.1e-3, "AdamW moves a weight by about its rate"
    assert mean != 0


def test_an_overflow_is_survived(result: LectureResult) -> None:
    tries = result.facts["tries"]
    assert len(tries) > 1, "the first scale did not overflow"
    for each in tries[:-1]:
        assert each["skipped"]
        assert each["infinite"] > 0
        assert not each["weight_moved"]
        assert each["scale_after"] == each["scale"] / 2
    last = tries[-1]
    assert (last["skipped"], last["infinite"], last["weight_moved"]) == (False, 0, True)
    assert len({each["loss"] for each in tries}) == 1, "one batch, one model: skipped updates changed nothing"


def test_what_is_lost_without(result: LectureResult) -> None:
    """A thousandth is lost for weights of 1, the norms', in bfloat16 alone: all others here are small."""
    weights = list(tiny_model().parameters())
    norms = sum(each.numel() for each in weights if each.dim() == 1)
    share = norms / sum(each.numel() for each in weights)
    assert result.facts["updates_lost"] == {"float32": 0, "float16": 0, "bfloat16": pytest.approx(share)}
    assert 0 <= result.facts["zero_without_scale"] <= 1


def test_the_picture_is_drawn(result: LectureResult, tmp_path: Path) -> None:
    result.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
