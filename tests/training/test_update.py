"""The update that the device decides on: what torch's clip and AdamW would do, and nothing of a step that is bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.errors import NotFinite
from finetune.model.build import build_model
from finetune.model.optimizer import make_optimizer
from finetune.model.optimizers.rounded_adamw import RoundedAdamW
from finetune.training import update
from finetune.training.step import optimizer_step
from finetune.training.update import PendingStep, StepResult, gradient_norm, updates_on_device
from tests.support.models.tiny import flat_batch
from tests.support.runs.one_rank import half_recipe, one_rank
from tests.support.runs.stepping import CPU, CountReads, float32_recipe, step_parts

TOKENS = 17


class Bench:
    """A tiny model with the recipe's fused AdamW, which decays weights."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision="no")
        recipe = float32_recipe(folder, weight_decay=0.1, learning_rate=1e-2)
        model: nn.Module = build_model(recipe, CPU)
        self.model, self.optimizer = self.accelerator.prepare(model.train(), make_optimizer(model, recipe))

    def begin(self, seed: int, max_grad_norm: float | None = 1.0) -> PendingStep:
        batches = [flat_batch(seed=seed), flat_batch(seed=seed + 100)]
        with CountReads() as counter:
            pending = self.give(batches, max_grad_norm)
        assert not counter.reads
        return pending

    def give(self, batches: list[Any], max_grad_norm: float | None) -> PendingStep:
        return optimizer_step(
            step_parts(self.accelerator, self.model, self.optimizer, max_grad_norm=max_grad_norm),
            iter(batches),
            micro_steps=2,
            planned_count=2 * TOKENS,
            seed=None,
            stop=False,
        )

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and step counts, copied."""
        optimizer = self.optimizer.optimizer
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert state.keys() == other.keys()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, other[name])] == []


def by_torch(bench: Bench, seed: int, max_grad_norm: float | None) -> float:
    """The step by torch's own functions, which clip in a pass over the gradients."""
    for each in (seed, seed + 100):
        (bench.model(**flat_batch(seed=each)) / (2 * TOKENS)).backward()
    norm = torch.nn.utils.clip_grad_norm_(bench.model.parameters(), max_grad_norm or math.inf)
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    return float(norm)


@pytest.mark.parametrize("max_grad_norm", [None, 1e3, 1e-2])
def test_it_is_torch_s_clip_and_update(tiny_llama: Path, max_grad_norm: float | None) -> None:
    bench, other = Bench(tiny_llama), Bench(tiny_llama)
    for seed in range(4):
        norm = bench.begin(seed, max_grad_norm).result().grad_norm
        assert norm == pytest.approx(by_torch(other, seed, max_grad_norm), rel=1e-6)
    assert max_grad_norm != 1e-2 or norm > 1e-2, "it clipped"
    ours, theirs = bench.state(), other.state()
    assert ours.keys() == theirs.keys()
    # Divided by the inverse of what torch multiplies with, so the last bit may differ where it clips; AdamW makes much
    # of it where a gradient is as small as its epsilon. Updates are of 1e-2.
    least = 1e-5 if max_grad_norm == 1e-2 else 1e-8
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-8 if ":" in name else least)
    assert {float(tensor) for name, tensor in ours.items() if name.endswith(":step")} == {4.0}


def test_nothing_is_read_before_it_is_asked_for(tiny_llama: Path) -> None:
    pending = Bench(tiny_llama).begin(0)  # which counts too
    assert not pending.is_ready
    with CountReads() as counter:
        pending.result()
    assert sum(counter.reads.values()) == 1, counter.reads


def nan_gradient(model: nn.Module) -> Any:
    return next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)


def infinite_gradient(model: nn.Module) -> Any:
    return list(model.parameters())[-1].register_hook(lambda gradient: gradient + math.inf)


def infinite_loss(model: nn.Module) -> Any:
    """With gradients that are finite by themselves."""
    return model.register_forward_hook(lambda _, __, loss: loss + math.inf)


@pytest.mark.sample(2)
@pytest.mark.parametrize("spoil", [nan_gradient, infinite_gradient, infinite_loss])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_bad_step_and_those_after_it_change_nothing(
    tiny_llama: Path, spoil: Callable[[nn.Module], Any], max_grad_norm: float | None
) -> None:
    bench = Bench(tiny_llama)
    bench.begin(0, max_grad_norm).result()
    before = bench.state()
    hook = spoil(bench.model)
    bad = bench.begin(1, max_grad_norm)
    hook.remove()
    later = [bench.begin(seed, max_grad_norm) for seed in (2, 3)]
    assert_equal(bench.state(), before)
    assert all(parameter.grad is None for parameter in bench.model.parameters())
    with pytest.raises(NotFinite, match=r"^loss .*, gradient norm (nan|inf)$"):
        bad.result()
    for pending in later:
        with pytest.raises(NotFinite, match="an earlier step"):
            pending.result()
    assert_equal(bench.state(), before)


def test_a_wrong_count_is_our_own_bug(tiny_llama: Path) -> None:
    bench = Bench(tiny_llama)
    bench.accelerator.reduce = lambda tally, reduction: tally + 1
    with pytest.raises(AssertionError, match="planned"):
        bench.begin(0).result()


def test_an_overflow_ends_a_run_at_the_lowest_scale_alone() -> None:
    def judged(scale: float, lowest: float) -> StepResult:
        return update._result((2.0, 2.0, 0.0, math.inf), 2, {}, (scale, lowest))

    assert judged(64.0, 1.0).skipped
    assert judged(2.0, 1.0).skipped, "half of it is the lowest scale, which is still to try"
    for last in (1.0, 1.5):
        with pytest.raises(NotFinite, match=f"even at a loss scale of {last:g} "):
            judged(last, 1.0)


def test_the_others_wait_for_the_host(tiny_llama: Path) -> None:
    bench = Bench(tiny_llama)
    weights = [nn.Parameter(torch.ones(2))]
    assert updates_on_device(bench.accelerator, bench.optimizer)
    assert updates_on_device(bench.accelerator, torch.optim.AdamW(weights, fused=True))
    for other in (
        torch.optim.AdamW(weights, fused=False),
        torch.optim.Adam(weights, fused=True),
        torch.optim.SGD(weights),
        RoundedAdamW(weights, seed=0),
    ):
        assert not updates_on_device(bench.accelerator, other)
    elsewhere = torch.optim.AdamW([nn.Parameter(torch.ones(2, device="meta"))], fused=False)
    elsewhere.param_groups[0]["fused"] = True
    assert not updates_on_device(bench.accelerator, elsewhere)
    scales = SimpleNamespace(scaler=object(), distributed_type="NO", device=CPU)
    assert not updates_on_device(scales, bench.optimizer)  # type: ignore[arg-type]  # fp16's


def test_the_norm_is_over_all_groups() -> None:
    parts = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parts[0].grad, parts[1].grad = torch.full((3,), 2.0), torch.ones(2, 2)
    groups = [{"params": parts[:1]}, {"params": parts[1:], "weight_decay": 0.1}]
    assert float(gradient_norm(torch.optim.AdamW(groups))) == 4.0


def test_sharded_weights_too(tiny_llama: Path, tmp_path: Path) -> None:
    """FSDP2 of one rank: gradients, weights and moments are DTensors; the flag and the divisor are not."""
    batches = [flat_batch(seed=seed) for seed in range(2)]
    with one_rank(half_recipe(tiny_llama, tmp_path, "fsdp2")) as rank:
        assert updates_on_device(rank.accelerator, rank.parts.optimizer)
        trained = list(rank.parts.unwrapped_model.parameters())
        start = [parameter.full_tensor().clone() for parameter in trained]
        rank.step(batches)
        moved = [parameter.full_tensor().clone() for parameter in trained]
        assert not any(torch.equal(a, b) for a, b in zip(start, moved, strict=True))
        rank.parts.model.register_forward_hook(lambda _, __, loss: loss * math.inf)
        with pytest.raises(NotFinite, match="gradient norm nan"):
            rank.step(batches)
        assert all(torch.equal(parameter.full_tensor(), b) for parameter, b in zip(trained, moved, strict=True))
        steps = [state["step"] for state in rank.parts.optimizer.optimizer.state.values()]
        assert {float(step) for step in steps} == {1.0}
