"""The learning rate as a pure function of the step: transformers' own shapes, without a scheduler's state.

A prepared scheduler steps once per rank and must be saved; a function of the step needs neither.
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
    """Steps of warming up: as given, else the share of the steps, rounded up."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return math.ceil(training.warmup_ratio * total_steps)


def learning_rate_schedule(training: Training, total_steps: int) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ... `total_steps - 1`.

    Returns a pure function. transformers builds the shape around a throw-away optimizer of one parameter; only
    its lambda is kept. Raises RecipeError when the shape refuses its arguments.
    """
    warmup = warmup_steps(training, total_steps)
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    try:
        scheduler = get_scheduler(
            training.lr_scheduler_type,
            carrier,
            num_warmup_steps=warmup,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )
    except (TypeError, ValueError) as error:
        place = "training.lr_scheduler_kwargs"
        raise RecipeError([f"{place}: {training.lr_scheduler_type} refuses these: {error}; correct them"]) from error
    assert isinstance(scheduler, LambdaLR)
    factor = scheduler.lr_lambdas[0]
    return lambda step: training.learning_rate * float(factor(step))
