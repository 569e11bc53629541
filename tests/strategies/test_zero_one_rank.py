"""DeepSpeed's engines, one rank in this process: a step's gradients are added up in float32, and used once."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from finetune.errors import NotFinite
from finetune.recipe.schema import Recipe
from finetune.run_folder.save_restore import Exported, save, weights_to_export
from finetune.run_folder.train_state import TrainState
from finetune.strategies.pieces import all_ranks
from finetune.strategies.zero_state import trained_pieces
from finetune.training.held_state import hold_state
from tests.support.models.tiny import flat_batch
from tests.support.runs.one_rank import LEARNING_RATE, OneRank, half_recipe, one_rank
from tests.support.runs.saving import in_the_foreground

# The slow tests have all, and the disk, for which DeepSpeed compiles.
STRATEGIES = ("zero1", "zero2", "zero2_offload", "zero3")
FAST = ("zero3",)


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STRATEGIES])
def strategy(request: pytest.FixtureRequest) -> str:
    if find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    return str(request.param)


def trained(rank: OneRank) -> dict[str, Tensor]:
    """Masters by name, and `name:exp_avg`, `name:step` of the optimizer."""
    groups = trained_pieces(rank.parts.engine)
    return {name: piece.tensor for group in groups.values() for name, piece in group.items()}


@pytest.mark.sample(1)
def test_gradients_of_micro_batches_add_up_in_float32(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Sixteen times the same: each sixteenth is the whole's gradient to the bit but for its exponent, so that only
    their sum could be rounded. After one step the first moment is a tenth of the gradient."""
    result, norms = [], []
    for micro_steps in (1, 16):
        with one_rank(half_recipe(tiny_llama, tmp_path / str(micro_steps), strategy)) as rank:
            assert rank.parts.engine.communication_data_type == torch.float32
            norms.append(rank.step([flat_batch()] * micro_steps).grad_norm)
            result.append({name: tensor for name, tensor in trained(rank).items() if name.endswith(":exp_avg")})
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert result[0].keys() == result[1].keys() != set()
    for name, gradient in result[0].items():
        torch.testing.assert_close(result[1][name], gradient, rtol=1e-6, atol=0, msg=name)


@pytest.mark.thorough
def test_a_step_is_one_update(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    with one_rank(half_recipe(tiny_llama, tmp_path, strategy)) as rank:
        start = trained(rank)
        for step in (1, 2):
            rank.step([flat_batch(seed=seed) for seed in range(3)])
            now = trained(rank)
            counts = [float(tensor) for name, tensor in now.items() if name.endswith(":step")]
            assert set(counts) == {step}
            moved = max(float((now[name] - start[name]).abs().max()) for name in start)
            assert moved == pytest.approx(step * LEARNING_RATE, rel=0.01)  # AdamW's first steps, of about that each


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("before", [0, 1])
def test_the_worst_step_goes_back_to_the_bit(before: int, strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """From host memory, without and with moments."""
    with one_rank(half_recipe(tiny_llama, tmp_path, strategy)) as rank:
        for _ in range(before):
            rank.step([flat_batch(seed=0)])
        held = hold_state(rank.recipe, rank.parts, all_ranks(), on_host=True)
        assert held.nbytes > 0
        expected = trained(rank)
        rank.step([flat_batch(seed=1)])
        assert any(
            not torch.equal(tensor, expected[name]) for name, tensor in trained(rank).items() if name in expected
        )
        held.restore()
        found = trained(rank)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name] if name in expected else torch.zeros_like(tensor)), name


def with_training(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=settings)})


@pytest.mark.thorough
def test_a_step_has_the_recipes_constants(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """AdamW's first step from its definition; the engine's own first moment says what the gradient was."""
    recipe = half_recipe(tiny_llama, tmp_path, strategy)
    constants = {"adam_beta1": 0.75, "adam_beta2": 0.9375, "adam_epsilon": 1e-2}
    with one_rank(with_training(recipe, **constants)) as rank:
        start = trained(rank)
        rank.step([flat_batch()])
        now = trained(rank)
        for name in [name for name in now if ":" not in name]:
            gradient = now[f"{name}:exp_avg"] / 0.25
            torch.testing.assert_close(now[f"{name}:exp_avg_sq"], gradient**2 / 16, rtol=1e-5, atol=0, msg=name)
            expected = start[name] - LEARNING_RATE * gradient / (gradient.abs() + 1e-2)
            torch.testing.assert_close(now[name], expected, rtol=0, atol=1e-7, msg=name)


@pytest.mark.slow
def test_the_best_evaluations_weights_are_exported(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Masters and the weights that are computed with are those of its checkpoint, to the bit; moments stay."""
    recipe = with_training(half_recipe(tiny_llama, tmp_path, strategy), load_best_model_at_end=True)
    batch, state, seen = flat_batch(seed=9), TrainState(), {}
    with one_rank(recipe) as rank:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
            rank.step([flat_batch(seed=step)])
            state.step = step
            state.compare(loss)
            save(recipe, rank.parts, state, in_the_foreground())
            with torch.no_grad():
                seen[step] = trained(rank), float(rank.parts.model(**batch))
        assert weights_to_export(recipe, rank.parts, state, all_ranks()) == Exported(2, True, "eval_loss", 1.0)
        (best, loss), now = seen[2], trained(rank)
        exported = rank.parts.trained_weights(dtype=None, keep=True)
        for name, tensor in now.items():
            expected = seen[3][0] if ":" in name else best
            assert torch.equal(tensor, expected[name]), name
            if ":" not in name:
                assert torch.equal(exported[name].reshape(-1), best[name].reshape(-1)), name
                assert not torch.equal(tensor, seen[3][0][name]), name
        with torch.no_grad():
            assert float(rank.parts.model(**batch)) == loss
    assert loss != seen[3][1]


@pytest.mark.slow
def test_the_last_micro_batch_alone_ends_a_step(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Between ranks ZeRO-1 reduces there all that was added up: a second time if each were marked as a boundary."""
    boundaries: list[bool] = []
    with one_rank(half_recipe(tiny_llama, tmp_path, strategy)) as rank:
        engine = rank.parts.engine
        backward = engine.backward

        def watched(loss: Tensor, **options: Any) -> Any:
            boundaries.append(engine.is_gradient_accumulation_boundary())
            return backward(loss, **options)

        with mock.patch.object(engine, "backward", watched):
            for _ in range(2):
                rank.step([flat_batch(seed=seed) for seed in range(3)])
    assert boundaries == [False, False, True] * 2


class Spoilt(nn.Module):
    """Infinite loss, through which gradients are not finite."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = [inner]  # not a member: DeepSpeed's hooks know the engine alone

    def forward(self, **batch: Any) -> Tensor:
        loss: Tensor = self._inner[0](**batch)
        return loss * math.inf


@pytest.mark.slow
def test_gradients_of_a_refused_step_are_not_used_again(strategy: str, tiny_llama: Path, tmp_path: Path) -> None:
    batches, ends, steps = [flat_batch(seed=seed) for seed in range(2)], [], []
    for spoils in (False, True):
        with one_rank(half_recipe(tiny_llama, tmp_path / str(spoils), strategy)) as rank:
            if spoils:
                start = trained(rank)
                with pytest.raises(NotFinite):
                    rank.step([flat_batch(seed=9)], Spoilt(rank.parts.model))
                after = trained(rank)
                assert all(torch.equal(tensor, after[name]) for name, tensor in start.items())
            steps.append(rank.step(batches))
            ends.append(trained(rank))
    assert steps[0] == steps[1]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
