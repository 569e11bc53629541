"""The end of an optimizer step: the only place that clips gradients and updates weights.

There are two ways. `updates_on_device` chooses:

    on the device   torch's fused AdamW clips as it updates and refuses what is not finite. Nothing waits for the host.
    on the host     every other optimizer: clip, read five numbers, then update, skip (fp16) or refuse.

torch's fused AdamW divides each gradient by its attribute `grad_scale` as it reads it. Where `found_inf` is exactly 1
it leaves weights, moments and step count as they are. So no separate pass clips the gradients (8 bytes a weight: 64 GB
for 8B), and a gradient that is not finite is refused before anyone has read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from finetune.errors import NotFinite
from finetune.model.optimizer import unwrap_optimizer
from finetune.strategies.accelerator import loss_scale, lowest_scale
from finetune.training.objectives import Objective
from finetune.training.run import StepParts


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step, read from the device once."""

    loss: float  # mean over the step's units (supervised tokens) on all ranks
    grad_norm: float  # before clipping
    stop: bool  # some rank received a signal to stop
    loss_scale: float | None  # in this step, under fp16
    skipped: bool  # an fp16 gradient overflowed: no update, and the next step has half the loss scale
    metrics: Mapping[str, float] = field(default_factory=dict)  # the objective's


class PendingStep:
    """A step that the host has queued. The device may still be computing it."""

    def __init__(self, facts: Tensor, planned_count: int, objective: Objective | None = None) -> None:
        """
        Args:
            facts: float64 on the device: loss sum, count, stop flags, gradient norm, refusal flag, metrics.
            planned_count: The units that the step should have counted.
            objective: Names the metrics and their means; None: the step has no metrics.
        """
        self._facts, self._planned_count, self._objective = facts, planned_count, objective
        self._copied: Any = None  # a stream's event
        self._result: StepResult | None = None

    @classmethod
    def finished(cls, result: StepResult) -> PendingStep:
        """A step whose update had to wait for its figures."""
        step = cls(torch.empty(0), 0)
        step._result = result
        return step

    @property
    def is_ready(self) -> bool:
        """Whether the figures are on the host, so that `result` does not wait."""
        return self._result is not None

    def enqueue_copy(self) -> None:
        """Copy the figures to the host as soon as the device has them. `result` then waits for this step alone, and not
        for steps queued after it."""
        if self._result is None and self._facts.device.type != "cpu":
            host = torch.empty(len(self._facts), dtype=torch.float64, pin_memory=True)
            stream: Any = torch.get_device_module(self._facts.device).current_stream()
            self._facts = host.copy_(self._facts, non_blocking=True)
            self._copied = stream.record_event()

    def result(self) -> StepResult:
        """Wait for the step. Raises NotFinite if its loss or gradient norm was not finite on any rank. Then neither
        this step nor any later one has changed a weight."""
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            loss_sum, count, stops, grad_norm, refused, *metrics = self._facts.tolist()
            if refused:
                raise NotFinite("an earlier step's loss or gradient norm")
            figures = (loss_sum, count, stops, grad_norm)
            self._result = _result(figures, self._planned_count, _means(self._objective, metrics, count))
        return self._result


def clip_and_update(parts: StepParts, tally: Tensor, planned_count: int) -> PendingStep:
    """Clip the gradients, update the weights, and free the gradients.

    Args:
        tally: float64 [3 + metrics], this rank's: loss sum, counted units, stop flags, the objective's metrics.
        planned_count: The step's units over all ranks.

    Raises NotFinite before the update, where the host decides.
    """
    if updates_on_device(parts.accelerator, parts.optimizer):
        facts = _update_on_device(parts, tally)
        return PendingStep(facts, planned_count, parts.objective)
    return PendingStep.finished(_update_on_host(parts, tally, planned_count))


def updates_on_device(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's fused AdamW, over weights on the accelerator's device.

    DeepSpeed's engine clips by itself, fp16's scaler decides on the host, bitsandbytes and RoundedAdamW have kernels of
    their own. For weights in host memory, the host would have to wait for the device's flag.
    """
    if accelerator.scaler is not None or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return False
    inner = unwrap_optimizer(optimizer)
    return type(inner) is torch.optim.AdamW and all(
        group["fused"] and group["params"][0].device.type == accelerator.device.type for group in inner.param_groups
    )


def keep_refusal_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Give the optimizer its flag, if it has none yet: 1 from the first refused step until the process ends."""
    inner = unwrap_optimizer(optimizer)
    if not hasattr(inner, "found_inf"):
        inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)


def _update_on_device(parts: StepParts, tally: Tensor) -> Tensor:
    """Update without a read. The device refuses a step if loss or gradient is not finite on any rank, and
    every step after it.

    Returns float64 [5 + metrics]: loss sum, count, stop flags, gradient norm, 1 if an earlier step was refused,
    metrics.
    """
    tally = parts.accelerator.reduce(tally, reduction="sum")
    inner = unwrap_optimizer(parts.optimizer)
    norm_of = gradient_norm if parts.pipeline is None else parts.pipeline.gradient_norm
    norm = norm_of(inner).to(tally.device)
    keep_refusal_flag(inner, tally.device)
    facts = torch.cat([tally[:3], norm.reshape(1), inner.found_inf.reshape(1)])  # the flag as earlier steps left it
    step_is_finite = torch.isfinite(facts).all()
    inner.found_inf.copy_(inner.found_inf.bool() | ~step_is_finite)  # once raised, the flag stays
    inner.grad_scale = None
    if parts.max_grad_norm is not None:
        # torch's clip_grad_norm_ multiplies by max / (norm + 1e-6) where that is below 1.
        inner.grad_scale = norm.add(1e-6).div_(parts.max_grad_norm).clamp_(min=1.0)
    inner.step()  # Accelerate's own step would look for a library each time, and its zero_grad inspect a signature
    inner.zero_grad()
    inner.grad_scale = None
    if len(tally) == 3:
        return facts
    return torch.cat([facts, tally[3:]])


def _update_on_host(parts: StepParts, tally: Tensor, planned_count: int) -> StepResult:
    """Update where the host has to decide. Raises NotFinite before the update."""
    accelerator, optimizer = parts.accelerator, parts.optimizer
    most = math.inf if parts.max_grad_norm is None else parts.max_grad_norm
    if parts.pipeline is not None:
        norm = parts.pipeline.gradient_norm(optimizer)
        clip_grads_with_norm_([weight for group in optimizer.param_groups for weight in group["params"]], most, norm)
    else:
        # DeepSpeed's engine measures, clips, drops what is not finite and updates in this call (strategies/zero.py).
        norm = accelerator.clip_grad_norm_(parts.model.parameters(), most)
    tally = accelerator.reduce(tally, reduction="sum")
    # The step's one wait for the device: all numbers in one read.
    facts = [tally[:3], unsharded(norm).double().reshape(1).to(tally), loss_scale(accelerator), tally[3:]]
    loss_sum, count, stops, grad_norm, scale, *metrics = torch.cat(facts).tolist()
    scales = None if accelerator.scaler is None else (scale, lowest_scale(accelerator))
    means = _means(parts.objective, metrics, count)
    try:
        result = _result((loss_sum, count, stops, grad_norm), planned_count, means, scales)
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


def _means(objective: Objective | None, sums: Sequence[float], count: float) -> dict[str, float]:
    """The objective's metrics, from their sums over all ranks."""
    if objective is None or not sums:
        return {}
    return objective.means(dict(zip(objective.metric_names, sums, strict=True)), count)


def _result(
    figures: tuple[float, float, float, float],
    planned_count: int,
    means: Mapping[str, float],
    scales: tuple[float, float] | None = None,
) -> StepResult:
    """The result from loss sum, count, stop flags and gradient norm. Raises NotFinite where the run must end.

    `scales`: fp16's loss scale in this step, and the lowest one. Gradients that overflow fp16 are no reason to end
    while a smaller scale is left to try.
    """
    loss_sum, count, stops, grad_norm = figures
    assert count == planned_count, f"{count:g} units counted, {planned_count} planned"
    loss = loss_sum / planned_count
    if not math.isfinite(loss) or (scales is None and not math.isfinite(grad_norm)):
        raise NotFinite(f"loss {loss}, gradient norm {grad_norm}")
    skipped = not math.isfinite(grad_norm)
    if scales is not None and skipped and scales[0] / 2 < scales[1]:
        raise NotFinite(
            f"gradients overflow fp16 even at a loss scale of {scales[0]:g} (mixed_precision: bf16 has the range)"
        )
    return StepResult(loss, grad_norm, bool(stops), None if scales is None else scales[0], skipped, means)


def gradient_norm(optimizer: Any) -> Tensor:
    """The norm over all gradients on all ranks, float32 []. Sharded gradients are reduced once for each mesh."""
    meshes: dict[Any, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [unsharded(torch.nn.utils.get_total_norm(gradients)) for gradients in meshes.values()]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    return norm.float()


def unsharded(norm: Tensor) -> Tensor:
    """The gradient norm as a plain tensor. For sharded gradients torch returns a DTensor."""
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm
