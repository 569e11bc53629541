"""The learning rate as a pure function of the step: transformers' own shapes, without a scheduler's state.

A prepared scheduler steps once per rank and must be saved; a function of the step needs neither.

transformers begins a warmup at rate 0: the first step then trains nothing, and a run of one step nothing at all. Here
step s of a warmup of n steps (from 0) has the shape's rate at (s + 1) / n, so the warmup ends at the highest rate.
Every step after it has transformers' rate of the same step: shifting those too would put the last step at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from finetune.errors import RecipeError
from finetune.recipe import Training


def warmup_steps(training: Training, total_steps: int) -> int:
    """Optimizer steps of the warmup: `warmup_steps`, or `warmup_ratio` of the run rounded up."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return math.ceil(training.warmup_ratio * total_steps)


def learning_rate_schedule(training: Training, total_steps: int) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ... `total_steps - 1`; above 0 in the first and the last of them.

    Returns a pure function. transformers builds the shape around a throw-away optimizer of one parameter; only
    its lambda is kept. Raises RecipeError when the shape refuses its arguments, the warmup is longer than the run, or
    steps at either end would train nothing.
    """
    warmup = warmup_steps(training, total_steps)
    if warmup > total_steps:
        raise RecipeError([_too_long(training, warmup, total_steps)])
    factor = _shape(training, warmup, total_steps)

    def rate(step: int) -> float:
        if step >= warmup:
            return training.learning_rate * factor(step)
        # The shape is at its top at (warmup / warmup); what it makes of step `warmup` is the decay's business.
        return training.learning_rate * (1.0 if step + 1 == warmup else factor(step + 1))

    _refuse_idle_ends(training, rate, total_steps)
    return rate


def _shape(training: Training, warmup: int, total_steps: int) -> Callable[[int], float]:
    """transformers' factor of each step, 1 at the highest rate."""
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    try:
        scheduler = get_scheduler(
            training.lr_scheduler_type,
            carrier,
            num_warmup_steps=warmup,
            # Given both, transformers takes the stable steps and warns.
            num_training_steps=None if "num_stable_steps" in training.lr_scheduler_kwargs else total_steps,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )
    except (TypeError, ValueError) as error:
        place = "training.lr_scheduler_kwargs"
        raise RecipeError([f"{place}: {training.lr_scheduler_type} refuses these: {error}; correct them"]) from error
    assert isinstance(scheduler, LambdaLR)
    factor = scheduler.lr_lambdas[0]
    return lambda step: float(factor(step))


def _too_long(training: Training, warmup: int, total_steps: int) -> str:
    remedy = f"set training.warmup_steps to at most {total_steps}, or train for more steps"
    return f"training.warmup_steps: a warmup of {warmup:,} steps is longer than the run of {total_steps:,}; {remedy}"


def _refuse_idle_ends(training: Training, rate: Callable[[int], float], total_steps: int) -> None:
    """Raises RecipeError where the first or the last steps have rate 0: they would cost time and train nothing."""
    shape, last = training.lr_scheduler_type, total_steps - 1
    moving = next((step for step in range(total_steps) if rate(step) > 0), None)
    if moving is None:
        problem = f"the highest rate of all {total_steps:,} steps is 0 (learning_rate {training.learning_rate:g})"
        raise RecipeError([f"training.lr_scheduler_type: {shape}: {problem}; {_REMEDY}"])
    if moving == 0 and rate(last) > 0:
        return
    ended = next(step for step in range(last, -1, -1) if rate(step) > 0)
    first, until = (1, moving) if moving else (ended + 2, total_steps)
    idle = f"the rate of steps {first:,} to {until:,} of {total_steps:,} is 0"
    raise RecipeError([f"training.lr_scheduler_type: {shape}: {idle}; {_REMEDY}"])


_REMEDY = "correct training.lr_scheduler_kwargs or training.learning_rate, or train for another number of steps"
