"""One optimizer step: forward and backward of its micro-batches, one clip, one update.

An optimizer step is the unit of every log, schedule, checkpoint and claim. Its loss is the sum over its supervised
tokens on all ranks and micro-batches, divided once by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.errors import NotFinite
from finetune.measure.phases import Phases
from finetune.strategies.loss_scaling import loss_scale, lowest_scale
from finetune.tokens.batches import MicroBatch
from finetune.training.step.cast_weights import AS_THEY_ARE, CastWeights
from finetune.training.step.micro_batches import InTurn, MicroBatches
from finetune.training.step.seeds import seed_generators
from finetune.training.step.update import FACTS, clip_and_update, unsharded, updates_on_device


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step, read from the device once."""

    loss: float  # mean over the step's supervised tokens of all ranks
    grad_norm: float  # before clipping
    stop: bool  # some rank received a signal to stop
    loss_scale: float | None  # of this step, under fp16
    skipped: bool  # an fp16 gradient overflowed: no update, and the next step has half the loss scale


class StepInFlight:
    """A step that was given to the device, which may still compute it."""

    def __init__(self, facts: Tensor, supervised_tokens: int) -> None:
        self._facts, self._supervised_tokens = facts, supervised_tokens
        self._sent: Any = None
        self._result: StepResult | None = None

    @classmethod
    def landed(cls, result: StepResult) -> StepInFlight:
        """A step whose update had to wait for its figures."""
        step = cls(torch.empty(0), 0)
        step._result = result
        return step

    @property
    def has_landed(self) -> bool:
        """Whether its figures are on the host, so that reading them waits for nothing."""
        return self._result is not None

    def send(self) -> None:
        """Have the device send the figures as soon as it has them, so that `read` waits for this step alone and not for
        those given to the device after it."""
        if self._result is None and self._facts.device.type != "cpu":
            host = torch.empty(FACTS, dtype=torch.float64, pin_memory=True)
            stream: Any = torch.get_device_module(self._facts.device).current_stream()
            self._facts = host.copy_(self._facts, non_blocking=True)
            self._sent = stream.record_event()

    def read(self) -> StepResult:
        """Wait for the step. Raises NotFinite if its loss or gradient norm was not finite on any rank: it changed no
        weight then, and neither does any step after it."""
        if self._result is None:
            if self._sent is not None:
                self._sent.synchronize()
            loss_sum, counted, stops, grad_norm, refused = self._facts.tolist()
            if refused:
                raise NotFinite("an earlier step's loss or gradient norm")
            self._result = _result((loss_sum, counted, stops, grad_norm), self._supervised_tokens)
        return self._result


def optimizer_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[MicroBatch],
    *,
    micro_steps: int,
    supervised_tokens: int,
    max_grad_norm: float | None,
    seed: int | None,
    stop: bool,
    phases: Phases,
    skip_gradient_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    weights: CastWeights = AS_THEY_ARE,
    through: MicroBatches | None = None,
) -> StepInFlight:
    """Forward and backward of `micro_steps` micro-batches, one clip, one update.

    `supervised_tokens` is the step's count over all ranks, which each rank knows from the tokenised rows.
    `skip_gradient_sync` is entered for every micro-batch but the last: a strategy that reduces once a step does not
    reduce there. `through`: what the micro-batches are handed to; None: one after another through `model`. `seed`: of
    the first micro-batch's random numbers; None where the model draws none. `weights`: the copies that forward and
    backward compute with. One collective besides the strategy's own: loss, count and stop flag together.

    Nothing is read to the host where the device can refuse the update itself. Elsewhere this raises NotFinite before
    the update; under fp16 gradients may overflow until the loss scale has come down to 1, and the step is skipped.
    """
    computing = through or InTurn(accelerator, model, micro_steps, skip_gradient_sync)
    tally = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss sum, supervised tokens, stop flags

    def seed_micro_batch(index: int) -> None:
        if seed is not None:
            seed_generators(accelerator.device, seed + index)

    def forward_and_backward() -> int:
        return computing.forward_and_backward(
            islice(batches, micro_steps),
            supervised_tokens=supervised_tokens,
            loss_sum=tally[0],
            before_each=seed_micro_batch,
            phases=phases,
        )

    counted = weights.during(forward_and_backward, phases("forward"))
    with phases("step"):
        tally[1] = counted
        if stop:
            tally[2] = 1
        if not updates_on_device(accelerator, optimizer):
            result = _read_and_update(accelerator, computing, optimizer, tally, max_grad_norm, supervised_tokens)
            return StepInFlight.landed(result)
        tally = accelerator.reduce(tally, reduction="sum")  # [3]
        facts = clip_and_update(optimizer, tally, max_grad_norm, computing.gradient_norm)
        return StepInFlight(facts, supervised_tokens)


def _read_and_update(
    accelerator: Accelerator,
    computing: MicroBatches,
    optimizer: torch.optim.Optimizer,
    tally: Tensor,
    max_grad_norm: float | None,
    supervised_tokens: int,
) -> StepResult:
    """The update where the host has to decide on it. Raises NotFinite before it."""
    norm = computing.clip_gradients(optimizer, math.inf if max_grad_norm is None else max_grad_norm)
    tally = accelerator.reduce(tally, reduction="sum")  # [3]
    # The step's one wait for the device: five numbers in one read.
    facts = [tally, unsharded(norm).double().reshape(1).to(tally), loss_scale(accelerator)]
    *figures, scaled_by = torch.cat(facts).tolist()
    try:
        scales = None if accelerator.scaler is None else (scaled_by, lowest_scale(accelerator))
        result = _result(figures, supervised_tokens, scales)
    except NotFinite:
        optimizer.zero_grad()
        raise
    if result.skipped:
        # We skip the update ourselves: Accelerate does not notice when the scaler skips a fused AdamW.
        accelerator.scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return result


def _result(figures: Sequence[float], supervised_tokens: int, scales: tuple[float, float] | None = None) -> StepResult:
    """The step of these loss sum, supervised tokens, stop flags and gradient norm; `scales`: fp16's in force and its
    lowest. Raises NotFinite."""
    loss_sum, counted, stops, grad_norm = figures
    assert counted == supervised_tokens, f"{counted} supervised tokens seen, {supervised_tokens} planned"
    loss = loss_sum / supervised_tokens
    if fault := _not_finite_reason(loss, grad_norm, scales):
        raise NotFinite(fault)
    return StepResult(loss, grad_norm, bool(stops), scales and scales[0], skipped=not math.isfinite(grad_norm))


def _not_finite_reason(loss: float, grad_norm: float, scales: tuple[float, float] | None) -> str | None:
    """Why the run must end here; None where it may continue.

    Gradients that overflow fp16 are not a reason while a smaller loss scale is left to try.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    if scales is None or not math.isfinite(loss):
        return f"loss {loss}, gradient norm {grad_norm}"
    scale, lowest = scales
    if scale / 2 < lowest:
        return f"gradients overflow fp16 even at a loss scale of {scale:g} (mixed_precision: bf16 has the range)"
    return None
