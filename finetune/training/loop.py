"""The training: one optimizer step, one evaluation, one loop around them.

An optimizer step is the unit of every log, schedule, checkpoint and claim. Its loss is the sum over its supervised
tokens on all ranks and micro-batches, over their number. A method is a way to build a model and a strategy a way to
build an Accelerator; neither shows here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
from finetune.measure.metrics import StepRecord, eval_line
from finetune.measure.phases import Phases
from finetune.run_folder.train_state import TrainState
from finetune.strategies.loss_scaling import FLOOR, loss_scale, scaler_state
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.run import BatchPlan, Run


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gives back to the host, read from the device once."""

    loss: float  # mean over the step's supervised tokens of all ranks
    grad_norm: float  # before clipping
    stop: bool  # some rank was asked to stop
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

    `supervised_tokens` is the step's count over all ranks, known to each from the tokenised rows. Every rank reduces
    gradients to a mean over ranks, hence the factor. `hold` keeps a strategy that reduces once from reducing before the
    last micro-batch. One collective beside the strategy's own: loss, count and stop flag together. Raises NotFinite
    before the update if the loss or the gradient norm of any rank is not finite; under fp16 gradients may overflow
    until the loss scale is down at 1, and the step is skipped instead.
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
                # 0 * inf and 0 * nan are nan: a bad loss on one rank spoils the reduced gradients of all of them,
                # so that the one check below speaks for every rank, without a collective of its own.
                accelerator.backward(loss * (scale + 0.0 * loss.detach()))
            del loss  # what its graph still holds is not to be there in the next forward
    with phases("step"):
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
        tally = accelerator.reduce(tally, reduction="sum")  # [3]
        # The step's one wait for the device.
        facts = [tally, _whole(norm).double().reshape(1).to(tally), loss_scale(accelerator)]
        loss_sum, counted, stops, grad_norm, scaled_by = torch.cat(facts).tolist()
        assert counted == supervised_tokens, f"{counted} supervised tokens seen, {supervised_tokens} planned"
        loss, fp16_scale = loss_sum / supervised_tokens, scaled_by if accelerator.scaler is not None else None
        if fault := _not_finite_reason(loss, grad_norm, fp16_scale):
            optimizer.zero_grad()
            raise NotFinite(fault)
        skipped = not math.isfinite(grad_norm)
        if skipped:
            # Not left to optimizer.step(): Accelerate does not notice that a fused AdamW was skipped.
            accelerator.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return StepResult(loss, grad_norm, bool(stops), fp16_scale, skipped)


def _not_finite_reason(loss: float, grad_norm: float, loss_scale: float | None) -> str | None:
    """What forbids to go on. Gradients that overflow fp16 do not while a smaller loss scale is left to be tried."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    if loss_scale is None or not math.isfinite(loss):
        return f"loss {loss}, gradient norm {grad_norm}"
    if loss_scale / 2 < FLOOR:
        return f"gradients overflow fp16 even at a loss scale of {loss_scale:g} (mixed_precision: bf16 has the range)"
    return None


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """A norm over sharded gradients comes as a sharded tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _seed_dropout(device: torch.device, seed: int) -> None:
    """torch.manual_seed for the device in use alone: for each absent kind that one queues a call, with its stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def evaluate(accelerator: Accelerator, model: nn.Module, rows: Rows, plan: BatchPlan) -> float:
    """Mean loss over all supervised tokens of `rows`, exact for any number of ranks: one sum, one division.

    Raises NotFinite, on every rank.
    """
    tally = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    model.eval()
    with torch.no_grad():
        for batch in prefetch(_in_order(rows, plan), accelerator.device, non_blocking=True):
            tally[0] += model(**batch)
            tally[1] += len(batch["supervised"])
    model.train()
    loss_sum, tokens = accelerator.reduce(tally, reduction="sum").tolist()
    loss = float(loss_sum / tokens)
    if not math.isfinite(loss):
        remedy = "look at the held-out rows, lower training.learning_rate, or lengthen the warmup"
        raise NotFinite(f"the held-out loss is {loss}: not finite; earlier checkpoints are intact; {remedy}")
    return loss


def train(run: Run, state: TrainState) -> bool:
    """Train from `state.step` to the end, or to a signal. Returns whether the end was reached.

    Everything is saved when it returns. Raises NotFinite naming the step and its rows.
    """
    recipe, plan = run.recipe, run.plan
    batches = prefetch(_stream(run, state.step), run.accelerator.device, recipe.training.non_blocking)
    stopped = False
    while not (stopped or _finished(run, state)):
        stopped = _step_and_record(run, state, batches)
        last = state.step == plan.total_steps
        logging = last or state.step % recipe.logging_steps == 0
        if logging:
            _flush(run, state)
        if run.eval_rows is not None and (last or state.step % recipe.eval_steps == 0):
            _evaluate_and_compare(run, state)
        saving = _finished(run, state) or stopped or state.step % recipe.save_steps == 0
        if saving:
            with run.phases("save"):
                state.loss_scaler = scaler_state(run.accelerator)
                run.save(state)
        if logging or saving:
            _write_phases(run, state)
    return _finished(run, state)


def _finished(run: Run, state: TrainState) -> bool:
    """Whether no step is left, or early stopping ended the run: known from the state alone, so also after a resume."""
    return state.step == run.plan.total_steps or _early_stopped(run, state)


def _early_stopped(run: Run, state: TrainState) -> bool:
    patience = run.recipe.training.early_stopping_patience
    return patience is not None and state.worse_evaluations >= patience


def _stream(run: Run, first_step: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches from a step on, to the end of the run."""
    for step in range(first_step, run.plan.total_steps):
        yield from run.plan.micro_batches(run.train_rows, run.plan.rows_of(step))


def _in_order(rows: Rows, plan: BatchPlan) -> Iterator[MicroBatch]:
    """This rank's micro-batches of all rows, one at a time."""
    share = plan.per_device_batch_size * plan.world_size
    for first in range(0, len(rows), share):
        yield from plan.micro_batches(rows, np.arange(first, min(first + share, len(rows))))


def _step_and_record(run: Run, state: TrainState, batches: Iterator[MicroBatch]) -> bool:
    """One optimizer step with its learning rate; returns whether a rank was asked to stop."""
    plan, began = run.plan, time.perf_counter()
    indices = plan.rows_of(state.step)
    rate = run.learning_rate(state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    supervised = int(run.train_rows.supervised[indices].sum())
    wait = _Waiting(batches)
    try:
        result = optimizer_step(
            run.accelerator,
            run.model,
            run.optimizer,
            wait,
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
            data_wait_seconds=wait.seconds,
            loss_scale=result.loss_scale,
            skipped_steps=state.skipped_steps,
        )
    )
    return result.stop


class _Waiting:
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
    """A seed for this step and rank; micro-steps add their index, so steps are far apart."""
    return int(np.random.SeedSequence([plan.seed, step, plan.rank]).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _name_rows(run: Run, step: int, indices: Sequence[int] | np.ndarray, what: str) -> str:
    places = [place for index in indices for place in run.train_rows.places(int(index))]
    shown = ", ".join(places[:16]) + (f" and {len(places) - 16} more" if len(places) > 16 else "")
    return (
        f"step {step + 1}: {what}: not finite; the weights are those of step {step}; look at its rows, {shown}, "
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
        loss = evaluate(run.accelerator, run.model, run.eval_rows, run.plan)
    except NotFinite as error:
        raise NotFinite(f"step {state.step}: {error}") from error
    line = eval_line(state.step, loss)
    run.write_metrics(line)
    run.terminal.log(f"step {state.step}: held-out loss {loss:.4f}, perplexity {line['perplexity']:.2f}")
    better = loss < state.best_eval_loss
    state.worse_evaluations = 0 if better else state.worse_evaluations + 1
    state.best_eval_loss = min(loss, state.best_eval_loss)
    if _early_stopped(run, state):
        run.terminal.log(f"early stopping: {state.worse_evaluations} evaluations without a better loss")
        if state.window.records:
            _flush(run, state)
