"""Worst step first: a run that would fail for memory, disk or data fails in its first minute, not in its tenth hour.

It takes one optimizer step on the longest rows, evaluates the longest held-out rows, and writes, verifies and reads a
checkpoint. Reading that checkpoint also restores weights and optimizer to the bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType

from finetune.errors import NotFinite
from finetune.measure.phases import Phase, Phases, peak_bytes, peak_of
from finetune.measure.units import GIB
from finetune.model.optimizer import allocate_optimizer_state
from finetune.strategies.loss_scaling import load_scaler_state, scaler_state
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.objectives import ChosenRows
from finetune.training.run import Run
from finetune.training.step import optimizer_step
from finetune.training.update import keep_refusal_flag, updates_on_device
from finetune.wording import counted


@dataclass(frozen=True)
class WorstStep:
    """The worst step's cost."""

    tokens: int  # of the longest micro-batch, over all ranks
    step_seconds: float
    save_seconds: float
    peak_bytes: int  # so far
    phases: dict[str, Phase] = field(default_factory=dict)  # state (the optimizer's), forward, backward, step
    peak_of: str = "process"  # on a GPU: tensors

    def facts(self) -> dict[str, int | float]:
        """For the receipt."""
        seconds = {"step_seconds": round(self.step_seconds, 2), "save_seconds": round(self.save_seconds, 2)}
        return {"tokens": self.tokens, **seconds, "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        tokens, gib = counted(self.tokens, "token"), self.peak_bytes / GIB
        return (
            f"worst step first: {tokens} forward, backward, updated and evaluated in "
            f"{self.step_seconds:.1f} s, peak of {self.peak_of} {gib:.1f} GiB; saved and read back in "
            f"{self.save_seconds:.1f} s"
        )


def worst_step_first(run: Run, save: Callable[[], Path], restore: Callable[[Path], None]) -> WorstStep:
    """Try the step that takes most memory, then restore the state before it, to the bit. Every rank calls it.

    Args:
        save: Writes a checkpoint of the present state and returns its folder.
        restore: Verifies that checkpoint and fills weights and optimizer from it.

    Raises:
        NotFinite: the loss or its gradient is not finite.
        EnvironmentMismatch: the checkpoint cannot be written.
    """
    began = time.perf_counter()
    run.output.terminal.progress("worst step first: saving a checkpoint to try")
    scaler = scaler_state(run.parts.accelerator)
    folder = save()
    saved = time.perf_counter()
    device = run.parts.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout seeds the generators
        with measured_phases(run.parts.phases) as phases, _phases_shown(run):
            with run.parts.phases("state"):
                # The moments are resident during every later step, so allocate them here too. DeepSpeed's engines
                # have theirs from the start. The flag of an optimizer that can refuse an update stays as well.
                if run.parts.accelerator.distributed_type != DistributedType.DEEPSPEED:
                    allocate_optimizer_state(run.parts.optimizer)
                if updates_on_device(run.parts.accelerator, run.parts.optimizer):
                    keep_refusal_flag(run.parts.optimizer, device)
            tokens = _step(run)
        if run.eval_rows is not None:
            run.output.terminal.progress("worst step first: evaluating the longest held-out rows")
            _evaluate(run, run.eval_rows)
    stepped = time.perf_counter()
    run.output.terminal.progress("worst step first: reading the checkpoint back")
    restore(folder)
    load_scaler_state(run.parts.accelerator, scaler)
    restored = time.perf_counter()
    peak = max(peak_bytes(device), *(phase.peak_bytes for phase in phases.values()))
    return WorstStep(tokens, stepped - saved, (saved - began) + (restored - stepped), peak, phases, peak_of(device))


@contextmanager
def measured_phases(phases: Phases) -> Iterator[dict[str, Phase]]:
    """The phases of the block, filled in at its end; measured even where the run does not measure its phases."""
    enabled, phases.enabled = phases.enabled, True
    measured: dict[str, Phase] = {}
    yield measured
    measured |= phases.take()
    phases.enabled = enabled


@contextmanager
def _phases_shown(run: Run) -> Iterator[None]:
    """Inside this context the terminal names the running part of the worst step: a part may take many seconds."""
    times, begun = micro_steps_to_try(run.plan), Counter[str]()
    words = {"state": "allocating the optimizer's state", "step": "updating the weights"}

    def show(phase: str) -> None:
        begun[phase] += 1
        doing = words.get(phase, f"{phase} of micro-batch {min(begun[phase], times)} of {times}")
        run.output.terminal.progress(f"worst step first: {doing}")

    run.parts.phases.entered = show
    try:
        yield
    finally:
        run.parts.phases.entered = lambda phase: None


def longest_groups(rows: Rows, plan: BatchPlan) -> list[list[int]]:
    """The rows of the micro-batch with most tokens over all ranks, longest first; rows that are computed as one row are
    a group."""
    share = plan.per_device_batch_size * plan.world_size
    order = np.argsort(-np.asarray(rows.lengths), kind="stable")
    if plan.capacity is None:
        return [[int(row)] for row in order[:share]]
    groups = [[int(order[place]) for place in places] for places in plan.groups(rows, order)]
    return sorted(groups, key=lambda group: -int(rows.lengths[group].sum()))[:share]


def longest_rows(rows: Rows, plan: BatchPlan) -> np.ndarray:
    """The rows of `longest_groups`, one after another."""
    return np.concatenate([np.asarray(group, dtype=np.int64) for group in longest_groups(rows, plan)])


class AllTokensSupervised(Rows):
    """Rows with every token supervised, prompts too: the most logits that the head can compute for them."""

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(ids, ids) for ids, _ in super().documents(row)]

    @property
    def two_answers(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """None: the longest rows stand beside themselves."""
        return ()


def worst_batches_of(run: Run, rows: Rows) -> tuple[list[MicroBatch], int]:
    """This rank's micro-batch with most tokens, and its units over all ranks; every token is supervised."""
    groups = longest_groups(rows, run.plan)
    few = rows.subset([row for group in groups for row in group])
    # A document's last token predicts nothing.
    supervised = few.lengths - np.asarray([len(few.documents(row)) for row in range(len(few))])
    values = {each.name: getattr(few, each.name) for each in fields(few)}
    all_supervised = AllTokensSupervised(**(values | {"supervised": supervised}))
    numbers = iter(range(len(few)))
    numbered = [[next(numbers) for _ in group] for group in groups]
    objective, indices = run.parts.objective, np.arange(len(few))
    batches = objective.batches(ChosenRows(run.plan, all_supervised, indices, groups=numbered))
    return batches, objective.planned_count(all_supervised, indices)


def micro_steps_to_try(plan: BatchPlan) -> int:
    """How often the worst step runs its micro-batch: twice where steps accumulate, since the second forward runs while
    the first one's gradients are resident; under a pipeline as often as a step does, for their activations wait."""
    of_a_step = plan.micro_steps(min(plan.global_batch_size, plan.total_rows))
    if plan.stages > 1:
        return of_a_step
    return min(2, of_a_step)


def _step(run: Run) -> int:
    """An optimizer step on the longest rows."""
    rows, plan = run.train_rows, run.plan
    longest, times = longest_rows(rows, plan), micro_steps_to_try(plan)
    tokens, units = int(rows.lengths[longest].sum()), 0
    batches: list[MicroBatch] = []
    for _ in range(times):  # each with tensors of its own
        made, count = worst_batches_of(run, rows)
        batches, units = batches + made, units + count
    try:
        optimizer_step(
            run.parts,
            prefetch(batches, run.parts.accelerator.device, run.recipe.training.non_blocking),
            micro_steps=times,
            planned_count=units,
            seed=plan.seed,
            stop=False,
        ).result()
    except NotFinite as error:
        places = ", ".join(place for index in longest[:4] for place in rows.places(int(index)))
        raise NotFinite(f"worst step first: {error}: not finite; look at the longest rows, {places}") from error
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths[longest].max()), "a training step")
        raise
    return tokens


def _evaluate(run: Run, rows: Rows) -> None:
    batches, _ = worst_batches_of(run, rows)
    model, objective, accelerator = run.parts.model, run.parts.objective, run.parts.accelerator
    model.eval()
    try:
        with torch.no_grad(), run.parts.weights.cast():
            for batch in prefetch(batches, run.parts.accelerator.device, non_blocking=True):
                if objective.needs_whole_step:
                    objective.before_step(model, [batch], partial(accelerator.reduce, reduction="sum"))
                objective.loss(model, batch)
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths.max()), "an evaluation")
        raise
    finally:
        model.train()


def _name_what_ran(error: BaseException, run: Run, tokens: int, doing: str) -> None:
    """Add a note that measure/out_of_memory.py puts into its message."""
    error.add_note(
        f"{doing} on {counted(run.recipe.training.per_device_batch_size, 'row')} of {counted(tokens, 'token')}"
    )
