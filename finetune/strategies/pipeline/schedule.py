"""A pipeline of stages: the micro-batches of a step through all of them, by torch.distributed.pipelining.

torch's schedules send and receive hidden states and their gradients, [1, tokens, hidden] a micro-batch, in tensors that
a stage allocates once: every micro-batch has the same number of tokens (training/batch_plan.py pads it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finetune.measure.phases import Phases
from finetune.strategies.pieces import Elsewhere
from finetune.strategies.pipeline.holding import Holding
from finetune.strategies.pipeline.recorder import StageRecorder
from finetune.strategies.pipeline.stage import Given, Stage

_CLASSES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "naive": ScheduleGPipe}


class Pipeline(nn.Module):
    """This rank's stage and the way to the others. As a module it computes the loss of one micro-batch."""

    def __init__(
        self,
        stage: Stage,
        layers: Sequence[range],
        schedule: str,
        holding: Holding,
        shared: Sequence[nn.Parameter],
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        """
        Args:
            layers: Those of each stage; ranks are in order.
            schedule: gpipe, 1f1b or naive.
            shared: This stage's trained weights that another stage has too, in the order of `holding`.
            timeout: How long the stages of such a weight wait for each other.
        """
        super().__init__()
        self.stage, self.layers, self.schedule, self.holding = stage, layers, schedule, holding
        self._device, self._made = device, dict[tuple[int, int, bool], Any]()
        self._scale, self._loss_sum = 1.0, torch.zeros(())
        self._recorder: StageRecorder | None = None
        names = [name for name, where in holding.stages.items() if len(where) > 1]
        sets = dict.fromkeys(holding.stages[name] for name in names)
        groups = {where: dist.new_group(list(where), timeout=timeout) for where in sets}  # every rank makes all
        own = [holding.stages[name] for name in names if stage.index in holding.stages[name]]
        self._shared = [(weight, groups[where], where[0]) for weight, where in zip(shared, own, strict=True)]

    def record(self) -> StageRecorder:
        """Record from now on when this stage computes each micro-batch of a step."""
        self._recorder = StageRecorder(self.stage.index, self._device)
        self._made.clear()  # those made before are not watched
        return self._recorder

    def forward(self, **batch: Any) -> Tensor:
        """The summed loss of a micro-batch, float32 [], on the last stage; 0 on the others. Every rank calls it.

        Without gradients. A stage is free for the next call when it has sent its hidden states, so calls overlap.
        """
        self.stage.expect([batch])
        self._run(1, _tokens(batch), train=False)
        return torch.zeros((), device=self._device) if self.stage.loss is None else self.stage.loss

    def forward_and_backward(
        self,
        batches: Iterable[Given],
        *,
        supervised_tokens: int,
        loss_sum: Tensor,
        before_each: Callable[[int], None],
        phases: Phases,
    ) -> int:
        """Forward and backward of a step's micro-batches; returns of how many tokens this stage computed the loss.

        Args:
            supervised_tokens: Of the step; the loss is divided by them.
            loss_sum: float64 []; the last stage adds the loss of each micro-batch.
            before_each: Called with a micro-batch's number before its forward.
        """
        step = list(batches)
        self.stage.expect(step, before_each)
        self._scale, self._loss_sum = 1 / supervised_tokens, loss_sum
        at_once = 1 if self.schedule == "naive" else len(step)
        if self._recorder is not None:
            self._recorder.begin_step()
        with phases("backward"):  # and forward: a stage computes both in turn
            for _ in range(0, len(step), at_once):
                self._run(at_once, _tokens(step[0]), train=True)
            self._sum_shared()
        self.stage.expect(())
        return sum(len(batch["supervised"]) for batch in step)

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """The norm over the gradients of all stages, float32 []; a weight that two of them have counts once."""
        again = {id(weight) for weight, _, first in self._shared if first != self.stage.index}
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in again]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            square += get_total_norm(gradients).double().square()
        dist.all_reduce(square)
        return square.sqrt().float()

    def clip_gradients(self, optimizer: Any, max_grad_norm: float) -> Tensor:
        """Scale the gradients of all stages down to this norm where theirs is larger; returns theirs."""
        norm = self.gradient_norm(optimizer)
        clip_grads_with_norm_(
            [weight for group in optimizer.param_groups for weight in group["params"]], max_grad_norm, norm
        )
        return norm

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """For the receipt, read off what the stages hold; every rank calls it.

        `bytes`: of the weights on each stage; `shared_tensors`: trained weights that two stages have.
        """
        held = sum(weight.nbytes for weight in model.parameters() if not isinstance(weight, Elsewhere))
        each = torch.zeros(len(self.layers), dtype=torch.int64, device=self._device)
        each[self.stage.index] = held
        dist.all_reduce(each)
        return {
            "schedule": self.schedule,
            "layers": [[layers.start, layers.stop - 1] for layers in self.layers],  # first and last
            "bytes": each.tolist(),
            "shared_tensors": sum(len(where) > 1 for where in self.holding.stages.values()),
        }

    def _sum_shared(self) -> None:
        """Add up the gradients of a weight over the stages that have it: of tied ones, as embeddings and as head."""
        for weight, group, _ in self._shared:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def _run(self, micro_batches: int, tokens: int, *, train: bool) -> None:
        """The next micro-batches that the stage expects, through all stages."""
        first = (torch.empty(micro_batches),) if self.stage.is_first else ()  # unused, but asked for
        targets = torch.empty(micro_batches) if train and self.stage.is_last else None  # so is this
        self._schedule(micro_batches, tokens, train).step(*first, target=targets, return_outputs=False)

    def _schedule(self, micro_batches: int, tokens: int, train: bool) -> Any:
        """torch's schedule for so many micro-batches, with tensors of its own to receive them in.

        All shapes are given, so that torch does not run a micro-batch only to see them.
        """
        key = micro_batches, tokens, train
        if key not in self._made:
            stage, wide = self.stage, self.stage.decoder.config.get_text_config().hidden_size
            hidden = torch.empty((1, tokens, wide), dtype=stage.dtype, device="meta", requires_grad=True)
            loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
            unused = torch.empty(1, device="meta")
            made = PipelineStage(
                stage,
                stage.index,
                len(self.layers),
                self._device,
                input_args=unused if stage.is_first else hidden,
                output_args=loss if stage.is_last else hidden,
            )
            if train and self._recorder is not None:
                self._recorder.watch(made)
            # 1F1B cannot order fewer micro-batches than stages, as the last step may have; GPipe then holds no more.
            ordered = train and micro_batches >= len(self.layers)
            kind = _CLASSES[self.schedule] if ordered else ScheduleGPipe
            self._made[key] = kind(made, micro_batches, loss_fn=self._loss if train else None, scale_grads=False)
        return self._made[key]

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """What backward begins with: the summed loss over the step's supervised tokens."""
        value = loss.detach()
        self._loss_sum.add_(value)
        # A loss that is not finite makes the gradients of all stages nan, as in the loop over micro-batches.
        return loss * (self._scale + 0.0 * value)


def _tokens(batch: Given) -> int:
    return int(batch["input_ids"].shape[1])
