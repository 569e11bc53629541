"""A run's random numbers: dropout follows from (seed, step, rank, micro-step) alone, so a resume needs no generator
state.

Seeding costs host time in each micro-step, so a model that draws nothing is not seeded. The generators after a step
show whether it drew. Its modules would not: a router's jitter is no module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from finetune.training.batch_plan import BatchPlan

CHECK_STEPS = 100  # a model that drew nothing in the first step is seeded and checked again every 100 steps


class Seeds:
    """Each step's seed, while the model draws random numbers."""

    def __init__(self, plan: BatchPlan, device: torch.device, first_step: int, log: Callable[[str], None]) -> None:
        self._plan, self._device, self._first_step, self._log = plan, device, first_step, log
        self._draws = False

    def seed_of(self, step: int) -> int | None:
        """The seed for this step's first micro-batch on this rank; None if the model was seen to draw nothing."""
        if self._draws or self._checks(step):
            return step_seed(self._plan, step)
        return None

    def check(self, step: int, micro_steps: int) -> None:
        """After a step: find out whether its last micro-batch drew."""
        if self._draws or not self._checks(step):
            return
        drawn = _states(self._device)
        seed_generators(self._device, step_seed(self._plan, step), micro_steps - 1)
        seeded = _states(self._device)
        self._draws = not all(torch.equal(now, then) for now, then in zip(drawn, seeded, strict=True))
        if self._draws and step != self._first_step:
            self._log(
                f"step {step + 1}: the model drew random numbers, in step {self._first_step + 1} it drew none; the "
                "steps between them were not seeded, and a run resumed from one of them may draw others"
            )

    def _checks(self, step: int) -> bool:
        return step == self._first_step or step % CHECK_STEPS == 0


def step_seed(plan: BatchPlan, step: int) -> int:
    """A seed for this step and rank. Micro-steps add their index, so two steps' seeds are far from each other.

    Each pipeline stage has its own, so that its layers do not drop the same elements as another stage's.
    """
    place = [plan.seed, step, plan.rank, *([plan.stage] if plan.stages > 1 else [])]
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(2))


def seed_generators(device: torch.device, seed: int | None, micro_step: int) -> None:
    """Seed the CPU's and this device's generator for one micro-step; None leaves them as they are.

    torch.manual_seed would also queue a call for every absent accelerator.
    """
    if seed is None:
        return
    torch.default_generator.manual_seed(seed + micro_step)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed + micro_step)


def _states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a model on this device draws from: uint8 in host memory, 5 KB and 16 bytes."""
    state = torch.default_generator.get_state()
    if device.type == "cuda":
        return [state, torch.cuda.get_rng_state(device)]
    return [state]
