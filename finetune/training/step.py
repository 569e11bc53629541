"""One optimizer step: forward and backward for its micro-batches, one clip, one update.

The optimizer step is the unit for every log, schedule, checkpoint and claim. Its loss is the sum over its units
(supervised tokens) on all ranks and micro-batches, divided once by their number.

Dropout follows from (seed, step, rank, micro-step) alone, so a resume needs no generator state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice

import numpy as np
import torch
from accelerate.utils import DistributedType

from finetune.tokens.batches import MicroBatch
from finetune.training.batch_plan import BatchPlan
from finetune.training.run import StepParts
from finetune.training.update import PendingStep, clip_and_update


def optimizer_step(
    parts: StepParts,
    batches: Iterator[MicroBatch],
    *,
    micro_steps: int,
    planned_count: int,
    seed: int | None,
    stop: bool,
) -> PendingStep:
    """Take one step. Nothing is read to the host where the device can refuse the update itself.

    One collective beside the strategy's own: loss, count and stop flag together.

    Args:
        batches: This rank's micro-batches; the step takes `micro_steps` of them.
        planned_count: The step's units over all ranks (supervised tokens), which each rank knows from the rows.
        seed: For the first micro-batch's random numbers; micro-step n takes seed + n. None: the model draws none.
        stop: This rank was asked to stop.

    Raises NotFinite before the update where the host decides on it. Under fp16, gradients may overflow until the loss
    scale is down to 1; the step is then skipped.
    """
    accelerator, objective, phases = parts.accelerator, parts.objective, parts.phases
    # Loss sum, counted units, stop flags, then the objective's metrics.
    tally = torch.zeros(3 + len(objective.metric_names), dtype=torch.float64, device=accelerator.device)
    counted = 0
    step_batches: Iterable[MicroBatch] = islice(batches, micro_steps)

    with parts.weights.cast(phases("forward")):
        if objective.needs_whole_step:
            step_batches = list(step_batches)
            with torch.no_grad():
                objective.before_step(parts.model, step_batches, partial(accelerator.reduce, reduction="sum"))

        if parts.pipeline is not None:
            step_batches = list(step_batches)
            counted = sum(objective.count(batch) for batch in step_batches)
            parts.pipeline.forward_and_backward(
                step_batches,
                divisor=planned_count,
                loss_sum=tally[0],
                before_each=lambda index: seed_generators(accelerator.device, seed, index),
                phases=phases,
            )
        else:
            # Strategies reduce gradients to a mean over ranks. The factor num_processes makes it a sum again.
            scale = accelerator.num_processes / planned_count
            for index, batch in enumerate(step_batches):
                is_last = index == micro_steps - 1
                accelerator.sync_gradients = is_last
                seed_generators(accelerator.device, seed, index)
                with nullcontext() if is_last else parts.accumulating():
                    with phases("forward"):
                        loss = objective.loss(parts.model, batch)
                    value = loss.total.detach()
                    tally[0].add_(value)
                    counted += loss.count
                    for position, metric in enumerate(loss.metrics, start=3):
                        tally[position].add_(metric.detach())
                    with phases("backward"):
                        # 0 * inf and 0 * nan are nan: a loss that is not finite on one rank makes the reduced gradients
                        # nan on all ranks. So the step's one check covers every rank without another collective.
                        gradient = scale + 0.0 * value
                        if accelerator.distributed_type == DistributedType.DEEPSPEED:  # its engine takes only a loss
                            accelerator.backward(loss.total * gradient)
                        else:
                            accelerator.backward(loss.total, gradient=gradient)
                    del loss  # free its graph before the next forward allocates

    with phases("step"):
        tally[1] = counted
        if stop:
            tally[2] = 1
        return clip_and_update(parts, tally, planned_count)


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
