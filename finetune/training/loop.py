"""The training loop: begin a step, read finished ones, log, evaluate, save, stop.

A method (full, LoRA, QLoRA) is a way to build a model. A strategy (DDP, FSDP2, ZeRO) is a way to build an Accelerator.
An objective is a way to turn a micro-batch into a loss. This file branches on none of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from finetune.errors import NotFinite
from finetune.measure.metrics import StepRecord, eval_line, evaluation_in_words
from finetune.model.optimizer import set_learning_rate
from finetune.run_folder.train_state import TrainState
from finetune.strategies.accelerator import scaler_state
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.cast_weights import AS_THEY_ARE, CastWeights
from finetune.training.objectives import ChosenRows, Objective
from finetune.training.run import Run, steps_of
from finetune.training.step import optimizer_step, step_seed
from finetune.training.update import PendingStep

Item = TypeVar("Item")


@dataclass(frozen=True)
class QueuedStep:
    """A step that the host has queued, and the host's facts about it."""

    step: int  # finished steps before it
    rows: np.ndarray
    units: int
    supervised_tokens: int
    learning_rate: float
    started_at: float
    queued_at: float
    data_wait_seconds: float
    pending: PendingStep


def take_steps(run: Run, state: TrainState) -> bool:
    """Train from `state.step` to the end, or to a signal. Returns whether the end was reached.

    On a GPU a step is read after the next one is queued, so that the device never waits for the host. When this
    returns, a checkpoint of the last step exists. Raises NotFinite with the step and its rows.
    """
    plan, parts = run.plan, run.parts
    objective, device = parts.objective, parts.accelerator.device
    overlaps = host_works_ahead(run)
    queued: deque[QueuedStep] = deque()
    last_ready_at = 0.0  # when the step that was read last was computed
    stop = False

    with batches_on_device(run, state.step, ahead=overlaps) as batches:
        while not (stop or is_over(run, state)):
            # Begin: queue the next step at its learning rate.
            step, started_at, waited_before = state.step + len(queued), time.perf_counter(), batches.seconds
            rows = plan.rows_of(step)
            planned_count = objective.planned_count(run.train_rows, rows)
            micro_steps = plan.micro_steps_of(run.train_rows, rows)
            learning_rate = run.schedule.rate(step)
            set_learning_rate(parts.optimizer, learning_rate)
            try:
                pending = optimizer_step(
                    parts,
                    batches,
                    micro_steps=micro_steps,
                    planned_count=planned_count,
                    seed=step_seed(plan, step),
                    stop=run.stop_requested(state.step),
                )
            except NotFinite as error:
                raise NotFinite(_name_rows(run, step, rows, str(error))) from error
            if overlaps:
                pending.enqueue_copy()
            queued.append(
                QueuedStep(
                    step=step,
                    rows=rows,
                    units=planned_count,
                    supervised_tokens=int(run.train_rows.supervised[rows].sum()),
                    learning_rate=learning_rate,
                    started_at=started_at,
                    queued_at=time.perf_counter(),
                    data_wait_seconds=batches.seconds - waited_before,
                    pending=pending,
                )
            )

            # Read and log finished steps: all of them before an evaluation, a save or a stop.
            evaluates, saves = needs_evaluation(run, step + 1), needs_save(run, step + 1)
            scores, logged = needs_scores(run, step + 1), False
            while must_read(queued, overlaps=overlaps, flush=evaluates or scores or saves or stop):
                oldest = queued.popleft()
                try:
                    result = oldest.pending.result()
                except NotFinite as error:
                    raise NotFinite(_name_rows(run, oldest.step, oldest.rows, str(error))) from error
                # A CPU has computed a step when it is queued, a GPU when its figures have come.
                ready_at = oldest.queued_at if device.type == "cpu" else time.perf_counter()
                # Seconds since the later of: this step started, the previous one was ready.
                seconds, last_ready_at = ready_at - max(oldest.started_at, last_ready_at), ready_at
                state.step += 1
                state.skipped_steps += result.skipped
                state.window.records.append(
                    StepRecord(
                        step=state.step,
                        epoch=min(state.step * plan.global_batch_size, plan.total_rows) / plan.rows,
                        loss=result.loss,
                        grad_norm=None if result.skipped else result.grad_norm,
                        learning_rate=oldest.learning_rate,
                        supervised_tokens=oldest.supervised_tokens,
                        tokens=int(run.train_rows.lengths[oldest.rows].sum()),
                        seconds=seconds,
                        data_wait_seconds=oldest.data_wait_seconds,
                        loss_scale=result.loss_scale,
                        skipped_steps=state.skipped_steps,
                        units=oldest.units,
                        metrics=dict(result.metrics),
                    )
                )
                stop = stop or result.stop
                if needs_log(run, state.step):
                    _log(run, state)
                    logged = True

            if evaluates:
                _evaluate_and_compare(run, state)
            if scores:
                _score_and_compare(run, state)
            # A stop saves at any step. Early stopping, which an evaluation decides, also ends with a checkpoint.
            saved = stop or saves or ((evaluates or scores) and is_over(run, state))
            if saved:
                with parts.phases("save"):
                    state.loss_scaler = scaler_state(parts.accelerator)
                    if run.checkpoints is not None:
                        run.checkpoints.save(state)
            if logged or saved:
                for line in parts.phases.lines(state.step):
                    run.write_metrics(line)
    if run.checkpoints is not None:
        run.checkpoints.saves.finish()
    return is_over(run, state)


def needs_log(run: Run, step: int) -> bool:
    """Whether a line of metrics follows this many finished steps."""
    return step == run.plan.total_steps or step % run.recipe.logging_steps == 0


def needs_evaluation(run: Run, step: int) -> bool:
    """Whether an evaluation follows this many finished steps."""
    if run.eval_rows is None:
        return False
    return step == run.plan.total_steps or step % steps_of(run.recipe, run.plan.total_steps)["eval_steps"] == 0


def needs_scores(run: Run, step: int) -> bool:
    """Whether a scored generation follows this many finished steps."""
    if run.scorer is None:
        return False
    return step == run.plan.total_steps or step % steps_of(run.recipe, run.plan.total_steps)["score_steps"] == 0


def needs_save(run: Run, step: int) -> bool:
    """Whether a checkpoint follows this many finished steps."""
    return step == run.plan.total_steps or step % steps_of(run.recipe, run.plan.total_steps)["save_steps"] == 0


def must_read(queued: deque[QueuedStep], *, overlaps: bool, flush: bool) -> bool:
    """Whether the oldest queued step is read before the next one begins. `flush`: no step may stay unread."""
    if not queued:
        return False
    if flush or not overlaps:
        return True
    return len(queued) > 1 or queued[-1].pending.is_ready


def is_over(run: Run, state: TrainState) -> bool:
    """Whether no step is left, or early stopping ended the run. It follows from the state, so also after a resume."""
    return state.step == run.plan.total_steps or _stopped_early(run, state)


def _stopped_early(run: Run, state: TrainState) -> bool:
    patience = run.recipe.training.early_stopping_patience
    return patience is not None and state.worse_evaluations >= patience


def host_works_ahead(run: Run) -> bool:
    """Whether the host reads a step while the device computes the next, and makes batches in a thread meanwhile.

    On a CPU both use the same cores: nothing would be gained, and lines would come a step late. Measured phases wait
    for the device.
    """
    return run.parts.accelerator.device.type != "cpu" and not run.parts.phases.enabled


class TimedBatches:
    """An iterator over micro-batches that adds up the seconds it waits for them."""

    def __init__(self, source: Iterator[MicroBatch]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        started_at = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.seconds += time.perf_counter() - started_at


@contextmanager
def batches_on_device(run: Run, first_step: int, *, ahead: bool) -> Iterator[TimedBatches]:
    """This rank's micro-batches on the device, from step `first_step` to the end of the run.

    `ahead`: a thread makes the next step's batches while this one is computed.
    """
    plan, objective = run.plan, run.parts.objective
    steps = (
        objective.batches(ChosenRows(plan, run.train_rows, plan.rows_of(step), first=step * plan.global_batch_size))
        for step in range(first_step, plan.total_steps)
    )
    with made_ahead(steps) if ahead else nullcontext(steps) as made:
        batches = chain.from_iterable(made)
        yield TimedBatches(prefetch(batches, run.parts.accelerator.device, run.recipe.training.non_blocking))


@contextmanager
def made_ahead(items: Iterable[Item]) -> Iterator[Iterator[Item]]:
    """The items in order, each made in a thread while the one before it is used.

    An error is raised where its item is asked for. Leaving the block ends the thread, after the item that it is making.
    """
    end = object()
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:

        def taken() -> Iterator[Item]:
            coming = thread.submit(next, source, end)
            while (item := coming.result()) is not end:
                coming = thread.submit(next, source, end)
                yield item  # type: ignore[misc]  # not the end

        yield taken()


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    rows: Rows,
    plan: BatchPlan,
    objective: Objective,
    sets: Mapping[str, Rows] | None = None,
    weights: CastWeights = AS_THEY_ARE,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """`loss`: the mean over all units (supervised tokens) of `rows`, exact for any number of ranks: one sum, one
    division. Beside it the objective's metrics.

    Args:
        sets: The same rows by data set, if there are several: `NAME_loss` is each one's mean.
        weights: The copies that the model computes with.
        show: Receives the progress before each micro-batch.

    Raises NotFinite, on every rank.
    """
    parts = sets or {"": rows}
    batch_count = sum(plan.micro_steps_of(part, np.arange(len(part))) for part in parts.values())
    batch_number = 0
    # Loss sum, units, then the objective's metrics.
    width = 2 + len(objective.metric_names)
    tally = torch.zeros(len(parts), width, dtype=torch.float64, device=accelerator.device)
    model.eval()
    first = 0
    with torch.no_grad(), weights.cast():
        for part, counted in zip(parts.values(), tally, strict=True):
            if objective.needs_whole_step:
                batches = prefetch(objective.eval_batches(plan, part, first), accelerator.device, non_blocking=True)
                objective.before_step(model, batches, partial(accelerator.reduce, reduction="sum"))
            for batch in prefetch(objective.eval_batches(plan, part, first), accelerator.device, non_blocking=True):
                batch_number += 1
                show(f"held-out loss: micro-batch {batch_number} of {batch_count}")
                loss = objective.loss(model, batch)
                counted[0] += loss.total
                counted[1] += loss.count
                for position, metric in enumerate(loss.metrics, start=2):
                    counted[position] += metric
            first += len(part)
    model.train()
    by_part = accelerator.reduce(tally, reduction="sum").tolist()
    loss_sum, units, *metrics = (sum(column) for column in zip(*by_part, strict=True))
    losses = {"loss": loss_sum / units}
    losses |= objective.means(dict(zip(objective.metric_names, metrics, strict=True)), units)
    if sets:
        losses |= {f"{name}_loss": sums[0] / sums[1] for name, sums in zip(sets, by_part, strict=True)}
    if not math.isfinite(losses["loss"]):
        remedy = "look at the held-out rows, lower training.learning_rate, or lengthen the warmup"
        raise NotFinite(f"the held-out loss is {losses['loss']}: not finite; earlier checkpoints are intact; {remedy}")
    return losses


def evaluate_run(run: Run) -> dict[str, float]:
    """`evaluate` over the run's held-out rows; there must be some."""
    assert run.eval_rows is not None
    parts = run.parts
    return evaluate(
        parts.accelerator,
        parts.model,
        run.eval_rows,
        run.plan,
        parts.objective,
        run.eval_sets,
        parts.weights,
        run.output.terminal.progress,
    )


def _evaluate_and_compare(run: Run, state: TrainState) -> None:
    try:
        losses = evaluate_run(run)
    except NotFinite as error:
        raise NotFinite(f"step {state.step}: {error}") from error
    line = eval_line(state.step, losses)
    run.write_metrics(line)
    run.output.terminal.say(f"step {state.step}: {evaluation_in_words(line)}")
    if not run.recipe.best_by_score:
        metric = run.recipe.training.metric_for_best_model.removeprefix("eval_")
        state.compare(losses[metric], higher_is_better=run.recipe.best_is_highest)
        _say_early_stop(run, state)


def _score_and_compare(run: Run, state: TrainState) -> None:
    assert run.scorer is not None
    line = run.scorer.score(state.step)
    if run.recipe.best_by_score:
        metric = run.recipe.training.metric_for_best_model.removeprefix("eval_")
        state.compare(line[f"score_{metric}"], higher_is_better=True)
        _say_early_stop(run, state)


def _say_early_stop(run: Run, state: TrainState) -> None:
    if _stopped_early(run, state):
        what = "loss"
        if run.recipe.best_is_highest:
            what = "score" if run.recipe.best_by_score else "reward"
        run.output.terminal.say(f"early stopping: evaluations without a better {what}: {state.worse_evaluations}")
        if state.window.records:
            _log(run, state)


def _log(run: Run, state: TrainState) -> None:
    line = state.window.flush(run.parts.accelerator.device)
    run.write_metrics(line)
    run.output.terminal.step(line)


def _name_rows(run: Run, step: int, indices: np.ndarray, reason: str) -> str:
    """The message for a step that was not finite: its rows' places, and the settings to change."""
    places = [place for index in indices for place in run.train_rows.places(int(index))]
    names = ", ".join(places[:16])
    if len(places) > 16:
        names += f" and {len(places) - 16} more"
    return (
        f"step {step + 1}: {reason}: not finite; the weights are those of step {step}; look at its rows, {names}, "
        "lower training.learning_rate, or lengthen the warmup"
    )
