"""The optimizer step: one count, one wait for the device, nothing bad reaches the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.measure.metrics import StepRecord
from finetune.model.build import build_model
from finetune.model.optimizer import Schedule
from finetune.run_folder.train_state import TrainState
from finetune.training.batch_plan import BatchPlan, plan_batches
from finetune.training.loop import NotFinite, evaluate, take_steps
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import Run
from finetune.training.run_output import RunOutput
from finetune.training.step import optimizer_step
from finetune.training.update import StepResult
from tests.support.models.tiny import Documents, flat_batch
from tests.support.runs.stepping import CPU, CountReads, float32_recipe, step_parts, weights


class Bench:
    """A prepared tiny model with its optimizer."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision="no")
        model: nn.Module = build_model(float32_recipe(folder), CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model.train(), optimizer)

    def step(self, micro_steps: int, batches: list[dict[str, Any]] | None = None, **changes: Any) -> StepResult:
        options: dict[str, Any] = {"max_grad_norm": 1.0, "stop": False, **changes}
        stop = options.pop("stop")
        return optimizer_step(
            step_parts(self.accelerator, self.model, self.optimizer, **options),
            iter(batches or [flat_batch(seed=seed) for seed in range(micro_steps)]),
            micro_steps=micro_steps,
            planned_count=17 * micro_steps,
            seed=5,
            stop=stop,
        ).result()


@pytest.fixture
def bench(tiny_llama: Path) -> Bench:
    return Bench(tiny_llama)


@pytest.mark.parametrize("micro_steps", [1, 2, 5])
def test_one_read_a_step_however_many_micro_steps(bench: Bench, micro_steps: int) -> None:
    batches = [flat_batch(seed=seed) for seed in range(micro_steps)]
    with CountReads() as counter:
        bench.step(micro_steps, batches)
    assert sum(counter.reads.values()) == 1, counter.reads


def test_the_counter_of_reads_can_fail(bench: Bench) -> None:
    with CountReads() as counter:
        float(torch.ones(1))
        bool(torch.ones(1) > 0)
        torch.ones(1).item()
    assert sum(counter.reads.values()) == 3


def test_one_reduction_a_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    reduce = bench.accelerator.reduce
    monkeypatch.setattr(bench.accelerator, "reduce", lambda *a, **k: (calls.append(a), reduce(*a, **k))[1])
    bench.step(3)
    assert len(calls) == 1


def spoil_gradient(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)


def spoil_loss(model: nn.Module) -> None:
    inner = model.forward
    # Infinite, with gradients that are finite by themselves.
    model.forward = lambda **batch: inner(**batch) + math.inf


@pytest.mark.parametrize("spoil", [spoil_gradient, spoil_loss])
def test_what_is_not_finite_never_reaches_the_weights(bench: Bench, spoil: Callable[[nn.Module], None]) -> None:
    before = weights(bench.model)
    spoil(bench.model)
    with pytest.raises(NotFinite):
        bench.step(2)
    assert all(torch.equal(x, y) for x, y in zip(before, weights(bench.model), strict=True))
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_a_wrong_count_is_our_own_bug(bench: Bench) -> None:
    before = weights(bench.model)
    bench.accelerator.reduce = lambda tally, reduction: tally + 1
    with pytest.raises(AssertionError, match="planned"):
        bench.step(1)
    assert all(torch.equal(x, y) for x, y in zip(before, weights(bench.model), strict=True))


def test_no_clipping_leaves_the_gradient_whole(tiny_llama: Path) -> None:
    clipped, unclipped = Bench(tiny_llama), Bench(tiny_llama)
    first, second = clipped.step(1, max_grad_norm=1e-3), unclipped.step(1, max_grad_norm=None)
    assert first.grad_norm == second.grad_norm > 1e-3
    start = Bench(tiny_llama)
    moved = [
        float(torch.stack([(a - b).norm() for a, b in zip(weights(m), weights(start.model), strict=True)]).norm())
        for m in (clipped.model, unclipped.model)
    ]
    assert moved[0] == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert moved[1] == pytest.approx(0.1 * second.grad_norm, rel=1e-3)


def test_the_stop_flag_comes_back(bench: Bench) -> None:
    assert bench.step(1, stop=True).stop
    assert not bench.step(1).stop


@pytest.mark.parametrize(
    ("training", "rows", "steps", "total_rows"),
    [
        ({"global_batch_size": 4, "num_train_epochs": 1.0}, 10, 3, 10),
        ({"global_batch_size": 4, "num_train_epochs": 2.5}, 10, 7, 25),
        ({"global_batch_size": 4, "max_steps": 5}, 10, 5, 20),
        ({"global_batch_size": 64, "num_train_epochs": 1.0}, 3, 1, 3),
    ],
)
def test_the_arithmetic_of_a_run(
    tmp_path: Path, training: dict[str, Any], rows: int, steps: int, total_rows: int
) -> None:
    plan = plan_batches(float32_recipe(tmp_path, **training), rows, world_size=2, rank=0, flat=True)
    assert (plan.total_steps, plan.total_rows) == (steps, total_rows)
    seen = [row for step in range(plan.total_steps) for row in plan.rows_of(step).tolist()]
    assert len(seen) == total_rows
    assert sorted(seen[:rows]) == list(range(rows))


def test_micro_steps_round_up() -> None:
    plan = BatchPlan(9, 9, 1, 9, 2, world_size=2, rank=0, seed=0, flat=True)
    assert [plan.micro_steps(rows) for rows in (1, 4, 5, 9)] == [1, 1, 2, 3]


def through_json(state: TrainState) -> TrainState:
    return TrainState.from_json(json.loads(json.dumps(state.as_json(), allow_nan=False)))


def test_the_state_survives_json() -> None:
    state = TrainState(
        step=3,
        best_eval_loss=1.25,
        best_step=2,
        last_eval_loss=1.5,
        worse_evaluations=2,
        skipped_steps=4,
        loss_scaler={"scale": 512.0, "_growth_tracker": 7},
        start_checksums={"lm_head.weight": "1f"},
    )
    state.window.records.append(StepRecord(3, 0.1, 1.5, 0.2, 1e-4, 10, 20, 0.5, 0.01, 512.0, 4))
    new = TrainState()
    assert [field.name for field in fields(state) if getattr(state, field.name) == getattr(new, field.name)] == []
    assert through_json(state) == state
    assert through_json(new) == new
    assert new.best_eval_loss == math.inf


STEPS = 4


class SeesSeeds(nn.Module):
    """Notes what each forward would draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seeds: list[int] = []

    def forward(self, supervised: torch.Tensor, **_: Any) -> torch.Tensor:
        self.seeds.append(torch.initial_seed())
        return self.weight.sum() * len(supervised)


def seeds_of_a_run(folder: Path, seed: int = 0, rank: int = 0, first_step: int = 0) -> list[int]:
    """Of one of three ranks in steps of two micro-batches, each of one row a rank."""
    requested = float32_recipe(folder, global_batch_size=6, per_device_batch_size=1, max_steps=STEPS, seed=seed)
    rows, model = Documents([5] * 6), SeesSeeds()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    accelerator.reduce = lambda tally, reduction: 3 * tally  # the ranks' rows are alike
    run = Run(
        recipe=requested,
        parts=step_parts(accelerator, model, torch.optim.SGD(model.parameters())),
        train_rows=rows,
        eval_rows=None,
        plan=plan_batches(requested, len(rows), world_size=3, rank=rank, flat=True),
        schedule=Schedule(requested.training, STEPS),
        output=RunOutput(requested, STEPS, silent=True, writes=False),
    )
    assert take_steps(run, TrainState(step=first_step))
    return model.seeds


def test_dropout_is_drawn_anew_for_every_rank_step_and_micro_batch(tmp_path: Path) -> None:
    seen = {(seed, rank): seeds_of_a_run(tmp_path, seed, rank) for seed in (0, 1) for rank in range(3)}
    assert {len(seeds) for seeds in seen.values()} == {4 * 2}
    assert len({seed for seeds in seen.values() for seed in seeds}) == 6 * 4 * 2
    # From the step alone, so that a resumed run draws what the run would have drawn.
    assert seeds_of_a_run(tmp_path, 0, 1, first_step=2) == seen[0, 1][2 * 2 :]
    # These very numbers, so that one resumed after an upgrade does too.
    assert seen[0, 0][:4] == [
        3948308845846928943,
        3948308845846928943 + 1,
        1459132311362927889,
        1459132311362927889 + 1,
    ]
    assert seen[1, 2][:4] == [
        1939807794001100581,
        1939807794001100581 + 1,
        2288990342127131567,
        2288990342127131567 + 1,
    ]


@pytest.mark.parametrize(("world_size", "per_device_batch_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (7, 1)])
def test_an_evaluation_is_over_all_rows_whatever_divides_them(
    bench: Bench, world_size: int, per_device_batch_size: int
) -> None:
    rows = Documents([7, 12, 5, 9, 16])
    once = BatchPlan(5, 5, 1, 5, 5, world_size=1, rank=0, seed=0, flat=True)
    expected = evaluate(bench.accelerator, bench.model, rows, once, Supervised())["loss"]
    alone = []
    for row in range(5):
        (batch,) = once.micro_batches(rows, np.array([row]))
        with torch.no_grad():
            alone.append(float(bench.model(**batch)))
    assert expected == pytest.approx(sum(alone) / rows.supervised.sum(), rel=1e-6)
    tallies: list[torch.Tensor] = []
    bench.accelerator.reduce = lambda tally, reduction: (tallies.append(tally), torch.ones(1, 2))[1]
    for rank in range(world_size):
        plan = BatchPlan(5, 5, 1, 5, per_device_batch_size, world_size=world_size, rank=rank, seed=0, flat=True)
        evaluate(bench.accelerator, bench.model, rows, plan, Supervised())
    loss_sum, tokens = torch.stack(tallies).sum(0)[0].tolist()
    assert tokens == rows.supervised.sum()
    assert loss_sum / tokens == pytest.approx(expected, rel=1e-6)
