"""The learning rate against transformers' own scheduler, stepped through."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from finetune.errors import RecipeError
from finetune.model.optimizer import Schedule
from finetune.recipe.schema import Scheduler, Training
from finetune.recipe.sections.training import SCHEDULER_ARGUMENTS

CASES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


def test_every_name_of_the_recipe_is_tried() -> None:
    assert set(CASES) == set(get_args(Scheduler))


def transformers_rates(name: str, warmup: int, total: int, kwargs: dict[str, Any]) -> list[float]:
    """transformers' rates, by stepping its scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=dict(kwargs))
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates_of(name: str, warmup: int, total: int, kwargs: dict[str, Any]) -> list[float]:
    training = Training(learning_rate=3e-4, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=warmup)
    rate = Schedule(training, total).rate
    return [rate(step) for step in range(total)]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_after_the_warmup_each_step_has_transformers_rate(name: str, warmup: int) -> None:
    first = 0 if name == "constant" else warmup  # which has no warmup
    mine, its = rates_of(name, warmup, 20, CASES[name]), transformers_rates(name, warmup, 20, CASES[name])
    assert mine[first:] == pytest.approx(its[first:], rel=1e-12)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"constant"}))
def test_a_warmup_rises_from_a_share_to_the_highest_rate(name: str) -> None:
    assert rates_of(name, 4, 20, CASES[name])[:5] == pytest.approx([3e-4 * share for share in (0.25, 0.5, 0.75, 1, 1)])


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_a_curved_warmup_has_its_shape_at_the_same_shares(shape: str) -> None:
    """By the shapes' formulas; a lowest rate is where the warmup would begin, before the first step."""
    arguments = {"num_decay_steps": 4, "warmup_type": shape, "min_lr_ratio": 0.2}
    curve = {
        "linear": lambda x: x,
        "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
        "1-sqrt": lambda x: 1 - (1 - x) ** 0.5,
    }
    expected = [3e-4 * (0.2 + 0.8 * curve[shape](step / 4)) for step in (1, 2, 3, 4)]
    assert rates_of("warmup_stable_decay", 4, 20, arguments)[:4] == pytest.approx(expected)


@pytest.mark.parametrize("total", [1, 2, 3, 20])
@pytest.mark.parametrize("name", sorted(CASES))
def test_no_step_is_at_rate_0(name: str, total: int) -> None:
    for warmup in {0, 1, total // 2, total}:
        rates = rates_of(name, warmup, total, CASES[name])
        assert min(rates) > 0, (warmup, rates)
        assert max(rates) <= 3e-4 * (1 + 1e-12)


def test_warmup_ratio_rounds_up_and_steps_win() -> None:
    by_ratio = Schedule(Training(warmup_ratio=0.1, lr_scheduler_type="linear"), 11).rate
    assert [by_ratio(0), by_ratio(1)] == pytest.approx([2e-4 / 2, 2e-4])
    by_steps = Schedule(Training(warmup_ratio=0.1, warmup_steps=4, lr_scheduler_type="linear"), 11).rate
    assert by_steps(0) == pytest.approx(2e-4 / 4)
    assert (Training(warmup_ratio=0.1).warmup_of(11), Training(warmup_steps=4).warmup_of(11)) == (2, 4)


@pytest.mark.parametrize(
    ("training", "text"),
    [
        (
            {"warmup_steps": 12},
            "warmup of 12 steps is longer than the run of 11; set training.warmup_steps to at most 11",
        ),
        (
            {"learning_rate": 5e-324, "lr_scheduler_type": "linear", "warmup_steps": 11},
            "rate of steps 1 to 5 of 11 is 0",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_stable_steps": 0, "num_decay_steps": 0},
                "warmup_steps": 0,
            },
            "the highest rate of all 11 steps is 0",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_stable_steps": 3, "num_decay_steps": 4},
                "warmup_steps": 2,
            },
            "rate of steps 10 to 11 of 11 is 0",
        ),
    ],
)
def test_steps_that_would_train_nothing_are_refused_with_the_numbers(training: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(text)):
        Schedule(Training(**training), 11)


ODD: list[Any] = [
    0, -1, -0.5, 0.5, 1, 2.5, 1e-300, 1e-9, 1e9, 1e15, 1e300, float("inf"), -float("inf"), float("nan"), 10**400,
    -(10**400), 2**31, True, "half", None, [1],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name, arguments in SCHEDULER_ARGUMENTS.items() for each in arguments]
)
def test_a_number_that_gives_no_schedule_is_refused_by_its_place(name: str, argument: str) -> None:
    """What a recipe takes, training takes: each rate is from 0 to the highest, or the steps at rate 0 are named."""
    refused = 0
    for value in ODD:
        arguments = {argument: value} | CASES[name] | {argument: value}
        if argument == "min_lr":
            del arguments["min_lr_rate"]
        place = re.escape(f"lr_scheduler_kwargs.{argument}: ")
        for total, warmup in ((1, 0), (20, 3), (20, 0)):
            try:
                given = {"lr_scheduler_type": name, "lr_scheduler_kwargs": arguments, "warmup_steps": warmup}
                training = Training(learning_rate=3e-4, **given)
            except ValidationError as error:
                assert re.search(place + r".*; \w+", str(error))  # noqa: PT017  # other values are taken
                refused += 1
                continue
            try:
                rate = Schedule(training, total).rate
            except RecipeError as error:
                assert "is 0" in str(error)  # noqa: PT017  # how many steps a run has is known only then
                continue
            assert all(0 <= rate(step) <= 3e-4 * (1 + 1e-12) for step in range(total)), (value, total, warmup)
    assert refused >= 3 * 9
