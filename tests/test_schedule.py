"""The learning rate against transformers' own scheduler, stepped through."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from finetune.errors import RecipeError
from finetune.recipe import Scheduler, Training
from finetune.schedule import learning_rate_schedule

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


@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_stepped_scheduler(name: str) -> None:
    total, warmup = 20, 3
    training = Training(
        learning_rate=3e-4, lr_scheduler_type=name, lr_scheduler_kwargs=CASES[name], warmup_steps=warmup
    )
    ours = learning_rate_schedule(training, total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=dict(CASES[name]))
    for step in range(total):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_warmup_ratio_rounds_up_and_steps_win() -> None:
    by_ratio = learning_rate_schedule(Training(warmup_ratio=0.1, lr_scheduler_type="linear"), 11)
    assert by_ratio(1) == pytest.approx(2e-4 / 2)
    by_steps = learning_rate_schedule(Training(warmup_ratio=0.1, warmup_steps=4, lr_scheduler_type="linear"), 11)
    assert by_steps(1) == pytest.approx(2e-4 / 4)


def test_refused_arguments_are_named() -> None:
    training = Training(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0})
    with pytest.raises(RecipeError, match=r"training\.lr_scheduler_kwargs.*polynomial"):
        learning_rate_schedule(training, 10)
