"""The random numbers of a run: dropout follows from (seed, step, rank, micro-step) alone, so that a resumed run needs
no generator state.

Seeding costs host time in each micro-step, so a model that draws nothing is not seeded: whether it draws is seen on the
generators after a step and not guessed from its modules, for a router's jitter is no module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from finetune.training.batch_plan import BatchPlan

LOOK_STEPS = 100  # a model that drew nothing in the first step is seeded and looked at again every so many


class Seeds:
    """The seed of each step while the model draws random numbers."""

    def __init__(self, plan: BatchPlan, device: torch.device, first_step: int, log: Callable[[str], None]) -> None:
        self._plan, self._device, self._first_step, self._log = plan, device, first_step, log
        self._draws = False

    def of(self, step: int) -> int | None:
        """The seed of this step's first micro-batch on this rank; None where the model was seen to draw nothing."""
        return step_seed(self._plan, step) if self._draws or self._looks(step) else None

    def look(self, step: int, micro_steps: int) -> None:
        """After the micro-batches of a step: whether the last one drew."""
        if self._draws or not self._looks(step):
            return
        drawn = _states(self._device)
        seed_generators(self._device, step_seed(self._plan, step) + micro_steps - 1)
        seeded = _states(self._device)
        self._draws = not all(torch.equal(now, then) for now, then in zip(drawn, seeded, strict=True))
        if self._draws and step != self._first_step:
            self._log(
                f"step {step + 1}: the model drew random numbers, in step {self._first_step + 1} it drew none; the "
                "steps between them were not seeded, and a run resumed from one of them may draw others"
            )

    def _looks(self, step: int) -> bool:
        return step == self._first_step or step % LOOK_STEPS == 0


def step_seed(plan: BatchPlan, step: int) -> int:
    """A seed for this step and rank; micro-steps add their index to it, so two steps' seeds are far from each other.
    Each stage of a pipeline has its own, that its layers do not drop what those of another one do."""
    place = [plan.seed, step, plan.rank, *([plan.stage] if plan.stages > 1 else [])]
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(2))


def seed_generators(device: torch.device, seed: int) -> None:
    """torch.manual_seed for the CPU and this device alone: that one also queues a call for every absent accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that a model on this device may draw from; uint8 in host memory, 5 KB and 16 bytes."""
    state = torch.default_generator.get_state()
    return [state, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [state]
