"""The training: the steps of a run, one evaluation, one loop around them.

A method (full, LoRA, QLoRA) is a way to build a model and a strategy (DDP, FSDP2, ZeRO) a way to build an Accelerator;
this file branches on neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from accelerate import Accelerator
from torch import nn

from finetune.errors import NotFinite
from finetune.measure.metrics import eval_line, evaluation_in_words
from finetune.run_folder.train_state import TrainState
from finetune.strategies.loss_scaling import scaler_state
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.run import Run, steps_of
from finetune.training.step.batches_ahead import made_ahead
from finetune.training.step.cast_weights import AS_THEY_ARE, CastWeights
from finetune.training.step.run_steps import Steps


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    rows: Rows,
    plan: BatchPlan,
    sets: Mapping[str, Rows] | None = None,
    weights: CastWeights = AS_THEY_ARE,
) -> dict[str, float]:
    """`loss`: the mean over all supervised tokens of `rows`, exact for any number of ranks: one sum, one division.

    `sets` are the same rows by data set, where there are several: `NAME_loss` is the mean of each. `weights`: the
    copies that the model computes with. Raises NotFinite, on every rank.
    """
    parts = sets or {"": rows}
    tally = torch.zeros(len(parts), 2, dtype=torch.float64, device=accelerator.device)  # loss sum, supervised tokens

    def forward() -> None:
        for part, counted in zip(parts.values(), tally, strict=True):
            for batch in prefetch(plan.batches_of_all(part), accelerator.device, non_blocking=True):
                counted[0] += model(**batch)
                counted[1] += len(batch["supervised"])

    model.eval()
    with torch.no_grad():
        weights.during(forward)
    model.train()
    sums = accelerator.reduce(tally, reduction="sum").tolist()
    losses = {"loss": sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)}
    if sets:
        losses |= {f"{name}_loss": loss / tokens for name, (loss, tokens) in zip(sets, sums, strict=True)}
    if not math.isfinite(losses["loss"]):
        remedy = "look at the held-out rows, lower training.learning_rate, or lengthen the warmup"
        raise NotFinite(f"the held-out loss is {losses['loss']}: not finite; earlier checkpoints are intact; {remedy}")
    return losses


def train(run: Run, state: TrainState) -> bool:
    """Train from `state.step` to the end, or to a signal. Returns whether the end was reached.

    When it returns, a checkpoint of the last step exists. Raises NotFinite, which names the step and its rows.
    """
    recipe, plan, overlaps, stopped = run.recipe, run.plan, host_works_ahead(run), False
    intervals = steps_of(recipe, plan.total_steps)
    with _batches(run, state.step, ahead=overlaps) as batches:
        steps = Steps(run, state, batches, late=overlaps)
        while not (stopped or _finished(run, state)):
            steps.begin()
            last = steps.started == plan.total_steps
            evaluating = run.eval_rows is not None and (last or steps.started % intervals["eval_steps"] == 0)
            due, logging = last or evaluating or steps.started % intervals["save_steps"] == 0, False
            while steps.to_read(everything=due or stopped):
                stopped = steps.read() or stopped
                if state.step == plan.total_steps or state.step % recipe.logging_steps == 0:
                    _flush(run, state)
                    logging = True
            if evaluating:
                _evaluate_and_compare(run, state)
            saving = stopped or (due and (_finished(run, state) or state.step % intervals["save_steps"] == 0))
            if saving:
                with run.phases("save"):
                    state.loss_scaler = scaler_state(run.accelerator)
                    run.save(state)
            if logging or saving:
                _write_phases(run, state)
    run.wait_for_saves()
    return _finished(run, state)


def host_works_ahead(run: Run) -> bool:
    """Whether the host reads a step while the device computes the next one, and makes batches in a thread meanwhile.

    On a CPU both are the same cores: nothing would be won, and lines would come a step late. Measuring a phase waits
    for the device.
    """
    return run.accelerator.device.type != "cpu" and not run.phases.enabled


@contextmanager
def _batches(run: Run, first_step: int, *, ahead: bool) -> Iterator[Iterator[MicroBatch]]:
    """This rank's micro-batches on the device, from step `first_step` to the end of the run."""
    steps = run.plan.batches_from(first_step, run.train_rows)
    device, non_blocking = run.accelerator.device, run.recipe.training.non_blocking
    if not ahead:
        yield prefetch(chain.from_iterable(steps), device, non_blocking)
        return
    with made_ahead(steps) as made:
        yield prefetch(chain.from_iterable(made), device, non_blocking)


def _finished(run: Run, state: TrainState) -> bool:
    """Whether no step is left, or early stopping ended the run: it follows from the state, so also after a resume."""
    return state.step == run.plan.total_steps or _early_stopped(run, state)


def _early_stopped(run: Run, state: TrainState) -> bool:
    patience = run.recipe.training.early_stopping_patience
    return patience is not None and state.worse_evaluations >= patience


def _flush(run: Run, state: TrainState) -> None:
    line = state.window.flush(run.accelerator.device)
    run.write_metrics(line)
    run.terminal.step(line)


def _write_phases(run: Run, state: TrainState) -> None:
    for line in run.phases.lines(state.step):
        run.write_metrics(line)


def _evaluate_and_compare(run: Run, state: TrainState) -> None:
    assert run.eval_rows is not None
    try:
        losses = evaluate(run.accelerator, run.model, run.eval_rows, run.plan, run.eval_sets, run.weights)
    except NotFinite as error:
        raise NotFinite(f"step {state.step}: {error}") from error
    line = eval_line(state.step, losses)
    run.write_metrics(line)
    run.terminal.log(f"step {state.step}: {evaluation_in_words(line)}")
    state.compare(losses[run.recipe.training.metric_for_best_model.removeprefix("eval_")])
    if _early_stopped(run, state):
        run.terminal.log(f"early stopping: evaluations without a better loss: {state.worse_evaluations}")
        if state.window.records:
            _flush(run, state)
