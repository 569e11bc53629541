"""The optimizer steps of a run: begun one after another, read in the same order, recorded when they are read.

On a GPU a step is read after the next one has begun, so that the device never waits for the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.errors import NotFinite
from finetune.measure.metrics import StepRecord
from finetune.model.optimizer import set_learning_rate
from finetune.run_folder.train_state import TrainState
from finetune.tokens.batches import MicroBatch
from finetune.training.run import Run
from finetune.training.step.optimizer_step import StepInFlight, optimizer_step
from finetune.training.step.seeds import Seeds


@dataclass(frozen=True)
class _Begun:
    """A step that was given to the device, and what the host knows of it."""

    step: int  # finished before it
    rows: np.ndarray
    supervised_tokens: int
    learning_rate: float
    began: float
    given: float  # all of it
    data_wait_seconds: float
    flight: StepInFlight


class Steps:
    """The steps of a run from `state.step` on; `state` follows those that were read."""

    def __init__(self, run: Run, state: TrainState, batches: Iterator[MicroBatch], *, late: bool) -> None:
        """`late`: a step may be read after the next one has begun."""
        self._run, self._state, self._late = run, state, late
        self._batches = _Timed(batches)
        self._seeds = Seeds(run.plan, run.accelerator.device, state.step, run.terminal.log)
        self._begun: deque[_Begun] = deque()
        self._computed = 0.0  # when the step that was read last had been

    @property
    def started(self) -> int:
        """The steps of the run that have begun, read or not."""
        return self._state.step + self.unread

    @property
    def unread(self) -> int:
        """Those of them that were not read yet."""
        return len(self._begun)

    def begin(self) -> None:
        """Give the next step to the device, at its learning rate. Raises NotFinite, before the update, where the host
        decides on it."""
        run, step, began = self._run, self.started, time.perf_counter()
        rows, waited = run.plan.rows_of(step), self._batches.seconds
        micro_steps, supervised = run.plan.micro_steps(len(rows)), int(run.train_rows.supervised[rows].sum())
        rate = run.learning_rate(step)
        set_learning_rate(run.optimizer, rate)
        try:
            flight = optimizer_step(
                run.accelerator,
                run.model,
                run.optimizer,
                self._batches,
                micro_steps=micro_steps,
                supervised_tokens=supervised,
                max_grad_norm=run.recipe.training.max_grad_norm,
                seed=self._seeds.of(step),
                stop=run.stop_requested(),
                phases=run.phases,
                skip_gradient_sync=run.skip_gradient_sync,
                weights=run.weights,
                through=run.pipeline,
            )
        except NotFinite as error:
            raise NotFinite(_name_rows(run, step, rows, str(error))) from error
        self._seeds.look(step, micro_steps)
        if self._late:
            flight.send()
        given = time.perf_counter()
        self._begun.append(_Begun(step, rows, supervised, rate, began, given, self._batches.seconds - waited, flight))

    def to_read(self, *, everything: bool) -> bool:
        """Whether a step should be read before the next one begins; `everything`: no step may stay unread."""
        newest_has_landed = self.unread > 0 and self._begun[-1].flight.has_landed
        return self.unread > 0 and (everything or not self._late or self.unread > 1 or newest_has_landed)

    def read(self) -> bool:
        """Wait for the oldest step that was not read and record it in the state; returns whether a rank was asked to
        stop. Raises NotFinite, which names the step and its rows."""
        run, state, begun = self._run, self._state, self._begun.popleft()
        try:
            result = begun.flight.read()
        except NotFinite as error:
            raise NotFinite(_name_rows(run, begun.step, begun.rows, str(error))) from error
        # A CPU has computed a step when the host has gone through it; a GPU when its figures have come.
        computed = begun.given if run.accelerator.device.type == "cpu" else time.perf_counter()
        seconds, self._computed = computed - max(begun.began, self._computed), computed
        state.step += 1
        state.skipped_steps += result.skipped
        state.window.records.append(
            StepRecord(
                step=state.step,
                epoch=min(state.step * run.plan.global_batch_size, run.plan.total_rows) / run.plan.rows,
                loss=result.loss,
                grad_norm=None if result.skipped else result.grad_norm,
                learning_rate=begun.learning_rate,
                supervised_tokens=begun.supervised_tokens,
                tokens=int(run.train_rows.lengths[begun.rows].sum()),
                seconds=seconds,
                data_wait_seconds=begun.data_wait_seconds,
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


def _name_rows(run: Run, step: int, indices: Sequence[int] | np.ndarray, reason: str) -> str:
    """The message of a step that was not finite: where its rows come from, and what to change."""
    places = [place for index in indices for place in run.train_rows.places(int(index))]
    names = ", ".join(places[:16]) + (f" and {len(places) - 16} more" if len(places) > 16 else "")
    return (
        f"step {step + 1}: {reason}: not finite; the weights are those of step {step}; look at its rows, {names}, "
        "lower training.learning_rate, or lengthen the warmup"
    )
