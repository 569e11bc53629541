"""A step's micro-batches: forward and backward of one after another, or of all through a pipeline.

`optimizer_step` hands them to one of the two and knows no more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from finetune.measure.phases import Phases
from finetune.training.step.update import gradient_norm


class MicroBatches(Protocol):
    """What computes the gradients of a step, and knows whose norm they have together.

    `Pipeline` of strategies/pipeline is one.
    """

    def forward_and_backward(
        self,
        batches: Iterable[Any],
        *,
        supervised_tokens: int,
        loss_sum: Tensor,
        before_each: Callable[[int], None],
        phases: Phases,
    ) -> int:
        """Add the gradient of the batches' summed loss over `supervised_tokens` to the weights'.

        Args:
            batches: All micro-batches of this rank.
            supervised_tokens: Of the step, on all ranks.
            loss_sum: float64 []; this rank's losses are added to it.
            before_each: Called with a micro-batch's number before its forward.

        Returns how many supervised tokens the losses of this rank are the sum of.
        """

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """The norm over all gradients of all ranks, float32 []."""

    def clip_gradients(self, optimizer: Any, max_grad_norm: float) -> Tensor:
        """Scale the gradients down to this norm where theirs is larger; returns theirs."""


@dataclass(frozen=True)
class InTurn:
    """One micro-batch after another."""

    accelerator: Accelerator
    model: nn.Module
    micro_steps: int
    skip_gradient_sync: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward_and_backward(
        self,
        batches: Iterable[Any],
        *,
        supervised_tokens: int,
        loss_sum: Tensor,
        before_each: Callable[[int], None],
        phases: Phases,
    ) -> int:
        """As of MicroBatches. Strategies reduce gradients to a mean over ranks; `num_processes` undoes that."""
        scale, counted = self.accelerator.num_processes / supervised_tokens, 0
        for index, batch in enumerate(batches):
            last = index == self.micro_steps - 1
            self.accelerator.sync_gradients = last
            before_each(index)
            with nullcontext() if last else self.skip_gradient_sync():
                with phases("forward"):
                    loss = self.model(**batch)
                value = loss.detach()
                loss_sum.add_(value)
                counted += len(batch["supervised"])
                with phases("backward"):
                    # 0 * inf and 0 * nan are nan: a loss that is not finite on one rank makes the reduced gradients of
                    # all ranks nan, so the one check of the step covers every rank without another collective.
                    self._backward(loss, scale + 0.0 * value)
                del loss  # free its graph before the next forward allocates
        return counted

    def _backward(self, loss: Tensor, scale: Tensor) -> None:
        """Backward of loss * scale; that product is not computed where backward can begin with the scale itself."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # its engine takes a loss alone
            self.accelerator.backward(loss * scale)
        else:
            self.accelerator.backward(loss, gradient=scale)

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """As of MicroBatches."""
        return gradient_norm(optimizer)

    def clip_gradients(self, optimizer: Any, max_grad_norm: float) -> Tensor:
        """As of MicroBatches; DeepSpeed's engine clips by itself, and says the norm."""
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        return norm
