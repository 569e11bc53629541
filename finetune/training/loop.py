"""The training: one optimizer step, one evaluation, one loop around them.

An optimizer step is the unit of every log, schedule, checkpoint and claim. Its loss is the sum over its supervised
tokens on all ranks and micro-batches, divided once by their number. A method (full, LoRA, QLoRA) is a way to build a
model and a strategy (DDP, FSDP2, ZeRO) a way to build an Accelerator; this file branches on neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.errors import NotFinite
from finetune.measure.metrics import StepRecord, eval_line, evaluation_in_words
from finetune.measure.phases import Phases
from finetune.model.optimizer import set_learning_rate
from finetune.run_folder.train_state import TrainState
from finetune.strategies.loss_scaling import FLOOR, loss_scale, scaler_state
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.run import Run, steps_of


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step, read from the device once."""

    loss: float  # mean over the step's supervised tokens of all ranks
    grad_norm: float  # before clipping
    stop: bool  # some rank received a signal to stop
    loss_scale: float | None  # of this step, under fp16
    skipped: bool  # an fp16 gradient overflowed: no update, and the next step has half the loss scale


def optimizer_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[MicroBatch],
    *,
    micro_steps: int,
    supervised_tokens: int,
    max_grad_norm: float | None,
    seed: int,
    stop: bool,
    phases: Phases,
    skip_gradient_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepResult:
    """Forward and backward of `micro_steps` micro-batches, one clip, one update.

    `supervised_tokens` is the step's count over all ranks, which each rank knows from the tokenised rows. Strategies
    reduce gradients to a mean over ranks; `num_processes` undoes that. `skip_gradient_sync` is entered for every
    micro-batch but the last: a strategy that reduces once a step does not reduce there. One collective besides the
    strategy's own: loss, count and stop flag together. Raises NotFinite before the update if the loss or the gradient
    norm of any rank is not finite; under fp16 gradients may overflow until the loss scale has come down to 1, and the
    step is skipped instead.
    """
    scale = accelerator.num_processes / supervised_tokens
    tally = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss sum, supervised tokens, stop flags
    tally[2] = float(stop)
    for index, batch in enumerate(islice(batches, micro_steps)):
        last = index == micro_steps - 1
        accelerator.sync_gradients = last
        # Dropout follows from (seed, step, rank, micro-step) alone, so that a resumed run needs no generator state.
        _seed_dropout(accelerator.device, seed + index)
        with nullcontext() if last else skip_gradient_sync():
            with phases("forward"):
                loss = model(**batch)
            tally[0] += loss.detach()
            tally[1] += len(batch["supervised"])
            with phases("backward"):
                # 0 * inf and 0 * nan are nan: a loss that is not finite on one rank makes the reduced gradients of all
                # ranks nan, so the one check below covers every rank without another collective.
                accelerator.backward(loss * (scale + 0.0 * loss.detach()))
            del loss  # free its graph before the next forward allocates
    with phases("step"):
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
        tally = accelerator.reduce(tally, reduction="sum")  # [3]
        # The step's one wait for the device: five numbers in one read.
        facts = [tally, _unsharded(norm).double().reshape(1).to(tally), loss_scale(accelerator)]
        loss_sum, counted, stops, grad_norm, scaled_by = torch.cat(facts).tolist()
        assert counted == supervised_tokens, f"{counted} supervised tokens seen, {supervised_tokens} planned"
        loss, fp16_scale = loss_sum / supervised_tokens, scaled_by if accelerator.scaler is not None else None
        if fault := _not_finite_reason(loss, grad_norm, fp16_scale):
            optimizer.zero_grad()
            raise NotFinite(fault)
        skipped = not math.isfinite(grad_norm)
        if skipped:
            # We skip the update ourselves: Accelerate does not notice when the scaler skips a fused AdamW.
            accelerator.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return StepResult(loss, grad_norm, bool(stops), fp16_scale, skipped)


def _not_finite_reason(loss: float, grad_norm: float, loss_scale: float | None) -> str | None:
    """Why the run must end here; None where it may continue.

    Gradients that overflow fp16 are not a reason while a smaller loss scale is left to try.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    if loss_scale is None or not math.isfinite(loss):
        return f"loss {loss}, gradient norm {grad_norm}"
    if loss_scale / 2 < FLOOR:
        return f"gradients overflow fp16 even at a loss scale of {loss_scale:g} (mixed_precision: bf16 has the range)"
    return None


def _unsharded(norm: torch.Tensor) -> torch.Tensor:
    """The gradient norm as a plain tensor: of sharded gradients it is a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _seed_dropout(device: torch.device, seed: int) -> None:
    """torch.manual_seed for the CPU and this device alone: that one also queues a call for every absent accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def evaluate(
    accelerator: Accelerator, model: nn.Module, rows: Rows, plan: BatchPlan, sets: Mapping[str, Rows] | None = None
) -> dict[str, float]:
    """`loss`: the mean over all supervised tokens of `rows`, exact for any number of ranks: one sum, one division.

    `sets` are the same rows by data set, where there are several: `NAME_loss` is the mean of each. Raises NotFinite,
    on every rank.
    """
    parts = sets or {"": rows}
    tally = torch.zeros(len(parts), 2, dtype=torch.float64, device=accelerator.device)  # loss sum, supervised tokens
    model.eval()
    with torch.no_grad():
        for part, counted in zip(parts.values(), tally, strict=True):
            for batch in prefetch(plan.batches_of_all(part), accelerator.device, non_blocking=True):
                counted[0] += model(**batch)
                counted[1] += len(batch["supervised"])
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
    recipe, plan, device = run.recipe, run.plan, run.accelerator.device
    batches = prefetch(plan.batches_from(state.step, run.train_rows), device, recipe.training.non_blocking)
    stopped, steps = False, steps_of(recipe, plan.total_steps)
    while not (stopped or _finished(run, state)):
        stopped = step_and_record(run, state, batches)
        last = state.step == plan.total_steps
        logging = last or state.step % recipe.logging_steps == 0
        if logging:
            _flush(run, state)
        if run.eval_rows is not None and (last or state.step % steps["eval_steps"] == 0):
            _evaluate_and_compare(run, state)
        saving = _finished(run, state) or stopped or state.step % steps["save_steps"] == 0
        if saving:
            with run.phases("save"):
                state.loss_scaler = scaler_state(run.accelerator)
                run.save(state)
        if logging or saving:
            _write_phases(run, state)
    run.wait_for_saves()
    return _finished(run, state)


def _finished(run: Run, state: TrainState) -> bool:
    """Whether no step is left, or early stopping ended the run: it follows from the state, so also after a resume."""
    return state.step == run.plan.total_steps or _early_stopped(run, state)


def _early_stopped(run: Run, state: TrainState) -> bool:
    patience = run.recipe.training.early_stopping_patience
    return patience is not None and state.worse_evaluations >= patience


def step_and_record(run: Run, state: TrainState, batches: Iterator[MicroBatch]) -> bool:
    """One optimizer step at its learning rate, recorded in `state`; returns whether a rank was asked to stop."""
    plan, began = run.plan, time.perf_counter()
    indices = plan.rows_of(state.step)
    rate = run.learning_rate(state.step)
    set_learning_rate(run.optimizer, rate)
    supervised = int(run.train_rows.supervised[indices].sum())
    timed = _Timed(batches)
    try:
        result = optimizer_step(
            run.accelerator,
            run.model,
            run.optimizer,
            timed,
            micro_steps=plan.micro_steps(len(indices)),
            supervised_tokens=supervised,
            max_grad_norm=run.recipe.training.max_grad_norm,
            seed=_step_seed(plan, state.step),
            stop=run.stop_requested(),
            phases=run.phases,
            skip_gradient_sync=run.skip_gradient_sync,
        )
    except NotFinite as error:
        raise NotFinite(_name_rows(run, state.step, indices, str(error))) from error
    state.step += 1
    state.skipped_steps += result.skipped
    state.window.records.append(
        StepRecord(
            step=state.step,
            epoch=min(state.step * plan.global_batch_size, plan.total_rows) / plan.rows,
            loss=result.loss,
            grad_norm=None if result.skipped else result.grad_norm,
            learning_rate=rate,
            supervised_tokens=supervised,
            tokens=int(run.train_rows.lengths[indices].sum()),
            seconds=time.perf_counter() - began,
            data_wait_seconds=timed.seconds,
            loss_scale=result.loss_scale,
            skipped_steps=state.skipped_steps,
        )
    )
    return result.stop


class _Timed:
    """An iterator that adds up the seconds its source takes."""

    def __init__(self, source: Iterator[MicroBatch]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        began = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.seconds += time.perf_counter() - began


def _step_seed(plan: BatchPlan, step: int) -> int:
    """A seed for this step and rank; micro-steps add their index to it, so two steps' seeds are far from each other."""
    return int(np.random.SeedSequence([plan.seed, step, plan.rank]).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _name_rows(run: Run, step: int, indices: Sequence[int] | np.ndarray, reason: str) -> str:
    """The message of a step that was not finite: where its rows come from, and what to change."""
    places = [place for index in indices for place in run.train_rows.places(int(index))]
    names = ", ".join(places[:16]) + (f" and {len(places) - 16} more" if len(places) > 16 else "")
    return (
        f"step {step + 1}: {reason}: not finite; the weights are those of step {step}; look at its rows, {names}, "
        "lower training.learning_rate, or lengthen the warmup"
    )


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
        losses = evaluate(run.accelerator, run.model, run.eval_rows, run.plan, run.eval_sets)
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
