"""The training: one optimizer step, one evaluation, one loop around them.

An optimizer step is the unit of every log, schedule, checkpoint and claim. Its loss is the sum over its supervised
tokens on all ranks and micro-batches, over their number. A method is a way to build a model and a strategy a way to
build an Accelerator; neither shows here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from finetune.batches import MicroBatch, Rows, micro_batches, prefetch, rows_of_step
from finetune.errors import FinetuneError
from finetune.metrics import StepRecord, Terminal, Window, eval_line
from finetune.phases import Phases
from finetune.recipe import Recipe


class NotFinite(FinetuneError):
    """A loss or gradient norm is not finite; the weights are those before the step."""


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run, fixed before its first step."""

    rows: int  # training rows of one epoch
    total_rows: int  # rows of the whole run
    total_steps: int
    global_batch_size: int
    per_device_batch_size: int
    world_size: int
    rank: int
    seed: int
    flat: bool  # micro-batches are one flat row of documents

    def rows_of(self, step: int) -> np.ndarray:
        """The rows of step `step`, counted from 0; the same on every rank."""
        return rows_of_step(
            step,
            rows=self.rows,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            total_rows=self.total_rows,
        )

    def micro_batches(self, rows: Rows, indices: np.ndarray) -> list[MicroBatch]:
        """This rank's share of these rows."""
        return micro_batches(
            rows,
            indices,
            rank=self.rank,
            world_size=self.world_size,
            per_device_batch_size=self.per_device_batch_size,
            flat=self.flat,
        )

    def micro_steps(self, rows: int) -> int:
        """Forwards of one rank for this many rows."""
        return math.ceil(rows / (self.per_device_batch_size * self.world_size))

    def facts(self) -> dict[str, int]:
        """The batch arithmetic, for the receipt and the terminal."""
        micro_steps = self.micro_steps(self.global_batch_size)
        return {
            "rows": self.rows,
            "global_batch_size": self.global_batch_size,
            "per_device_batch_size": self.per_device_batch_size,
            "world_size": self.world_size,
            "micro_steps": micro_steps,
            "total_rows": self.total_rows,
            "total_steps": self.total_steps,
        }


def make_plan(recipe: Recipe, rows: int, *, world_size: int, rank: int, flat: bool) -> Plan:
    """Steps and rows of the run. The last step of the last epoch may be short; nothing is dropped or doubled."""
    training = recipe.training
    wanted = math.ceil(training.num_train_epochs * rows)
    if training.max_steps is not None:
        wanted = training.max_steps * training.global_batch_size
    return Plan(
        rows=rows,
        total_rows=wanted,
        total_steps=math.ceil(wanted / training.global_batch_size),
        global_batch_size=training.global_batch_size,
        per_device_batch_size=training.per_device_batch_size,
        world_size=world_size,
        rank=rank,
        seed=training.seed,
        flat=flat,
    )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gives back to the host, read from the device once."""

    loss: float  # mean over the step's supervised tokens of all ranks
    grad_norm: float  # before clipping
    stop: bool  # some rank was asked to stop


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
) -> StepResult:
    """Forward and backward of `micro_steps` micro-batches, one clip, one update.

    `supervised_tokens` is the step's count over all ranks, known to each from the tokenised rows. Every rank reduces
    gradients to a mean over ranks, hence the factor. One collective beside the strategy's own: loss, count and stop
    flag together. Raises NotFinite before the update if the loss or the gradient norm of any rank is not finite.
    """
    scale = accelerator.num_processes / supervised_tokens
    tally = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss sum, supervised tokens, stop flags
    tally[2] = float(stop)
    for index, batch in enumerate(islice(batches, micro_steps)):
        last = index == micro_steps - 1
        accelerator.sync_gradients = last
        # Dropout follows from (seed, step, rank, micro-step) alone, so that a resumed run needs no generator state.
        torch.manual_seed(seed + index)
        with nullcontext() if last else accelerator.no_sync(model):
            with phases("forward"):
                loss = model(**batch)
            tally[0] += loss.detach()
            tally[1] += (batch["shift_labels"] != -100).sum()
            with phases("backward"):
                # 0 * inf and 0 * nan are nan: a bad loss on one rank spoils the reduced gradients of all of them,
                # so that the one check below speaks for every rank, without a collective of its own.
                accelerator.backward(loss * (scale + 0.0 * loss.detach()))
    with phases("step"):
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
        tally = accelerator.reduce(tally, reduction="sum")  # [3]
        # The step's one wait for the device.
        loss_sum, counted, stops, grad_norm = torch.cat([tally, norm.double().reshape(1).to(tally)]).tolist()
        assert counted == supervised_tokens, f"{counted} supervised tokens seen, {supervised_tokens} planned"
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            optimizer.zero_grad()
            raise NotFinite(f"loss {loss_sum / supervised_tokens}, gradient norm {grad_norm}")
        optimizer.step()
        optimizer.zero_grad()
    return StepResult(loss_sum / supervised_tokens, grad_norm, bool(stops))


def evaluate(accelerator: Accelerator, model: nn.Module, rows: Rows, plan: Plan) -> float:
    """Mean loss over all supervised tokens of `rows`, exact for any number of ranks: one sum, one division."""
    tally = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    model.eval()
    with torch.no_grad():
        for batch in prefetch(_in_order(rows, plan), accelerator.device, non_blocking=True):
            tally[0] += model(**batch)
            tally[1] += (batch["shift_labels"] != -100).sum()
    model.train()
    loss_sum, tokens = accelerator.reduce(tally, reduction="sum").tolist()
    return float(loss_sum / tokens)


@dataclass
class TrainState:
    """Everything that a resumed run must know besides weights and optimizer."""

    step: int = 0  # finished optimizer steps: the one integer that says where the run is
    best_eval_loss: float = math.inf
    worse_evaluations: int = 0
    window: Window = field(default_factory=Window)

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint; JSON has no infinity, so no evaluation yet is null."""
        best = self.best_eval_loss if math.isfinite(self.best_eval_loss) else None
        return {**asdict(self), "best_eval_loss": best}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state that `as_json` gave."""
        best = math.inf if saved["best_eval_loss"] is None else float(saved["best_eval_loss"])
        records = [StepRecord(**record) for record in saved["window"]["records"]]
        return cls(int(saved["step"]), best, int(saved["worse_evaluations"]), Window(records))


@dataclass(frozen=True)
class Run:
    """The parts of a run, put together by train.py."""

    recipe: Recipe
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_rows: Rows
    eval_rows: Rows | None
    plan: Plan
    learning_rate: Callable[[int], float]
    terminal: Terminal
    phases: Phases
    stop_requested: Callable[[], bool]
    write_metrics: Callable[[dict[str, Any]], None]
    save: Callable[[TrainState], None]


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
        if last or state.step % recipe.logging_steps == 0:
            _flush(run, state)
        if run.eval_rows is not None and (last or state.step % recipe.eval_steps == 0):
            _evaluate_and_compare(run, state)
        if _finished(run, state) or stopped or state.step % recipe.save_steps == 0:
            with run.phases("save"):
                run.save(state)
    return _finished(run, state)


def _finished(run: Run, state: TrainState) -> bool:
    """Whether no step is left, or early stopping ended the run: known from the state alone, so also after a resume."""
    return state.step == run.plan.total_steps or _gave_up(run, state)


def _gave_up(run: Run, state: TrainState) -> bool:
    patience = run.recipe.training.early_stopping_patience
    return patience is not None and state.worse_evaluations >= patience


def _stream(run: Run, first_step: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches from a step on, to the end of the run."""
    for step in range(first_step, run.plan.total_steps):
        yield from run.plan.micro_batches(run.train_rows, run.plan.rows_of(step))


def _in_order(rows: Rows, plan: Plan) -> Iterator[MicroBatch]:
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
        )
    except NotFinite as error:
        raise NotFinite(_name_rows(run, state.step, indices, str(error))) from error
    state.step += 1
    state.window.records.append(
        StepRecord(
            step=state.step,
            epoch=min(state.step * plan.global_batch_size, plan.total_rows) / plan.rows,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            supervised_tokens=supervised,
            tokens=int(run.train_rows.lengths[indices].sum()),
            seconds=time.perf_counter() - began,
            data_wait_seconds=wait.seconds,
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


def _step_seed(plan: Plan, step: int) -> int:
    """A seed for this step and rank; micro-steps add their index, so steps are far apart."""
    return int(np.random.SeedSequence([plan.seed, step, plan.rank]).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _name_rows(run: Run, step: int, indices: Sequence[int] | np.ndarray, what: str) -> str:
    shown = ", ".join(str(int(index)) for index in indices[:16]) + (", ..." if len(indices) > 16 else "")
    return (
        f"step {step + 1}: {what}: not finite; its training rows: {shown}; the weights are those of step {step}. "
        "Look at these rows, lower training.learning_rate, or lengthen the warmup"
    )


def _flush(run: Run, state: TrainState) -> None:
    line = state.window.flush(run.accelerator.device)
    run.write_metrics(line)
    run.terminal.step(line)
    for name, phase in run.phases.take().items():
        gib = {"peak_gib": phase.peak_bytes / 2**30, "allocated_gib": phase.allocated_bytes / 2**30}
        run.write_metrics({"kind": "phase", "step": state.step, "phase": name, **gib, "seconds": phase.seconds})


def _evaluate_and_compare(run: Run, state: TrainState) -> None:
    assert run.eval_rows is not None
    loss = evaluate(run.accelerator, run.model, run.eval_rows, run.plan)
    line = eval_line(state.step, loss)
    run.write_metrics(line)
    run.terminal.say(f"step {state.step}: held-out loss {loss:.4f}, perplexity {line['perplexity']:.2f}")
    better = loss < state.best_eval_loss
    state.worse_evaluations = 0 if better else state.worse_evaluations + 1
    state.best_eval_loss = min(loss, state.best_eval_loss)
    if _gave_up(run, state):
        run.terminal.say(f"early stopping: {state.worse_evaluations} evaluations without a better loss")
        if state.window.records:
            _flush(run, state)
