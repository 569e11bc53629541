"""A pipeline of stages: a step's micro-batches go through all of them, by torch.distributed.pipelining.

torch's schedules send and receive hidden states and their gradients, [1, tokens, hidden] per micro-batch, in tensors
that a run of layers allocates once. So every micro-batch has the same number of tokens (training/batch_plan.py pads
it).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from finetune.measure.phases import Phases
from finetune.recipe.sections.pipelines import can_interleave
from finetune.strategies.pieces import Elsewhere
from finetune.strategies.pipeline.holding import Holding
from finetune.strategies.pipeline.ranks import GradientSums
from finetune.strategies.pipeline.stage import Given, LayerRun
from finetune.strategies.pipeline.timeline import BACKWARD, FORWARD, Computation

_CLASSES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "naive": ScheduleGPipe}


class Pipeline(nn.Module):
    """This rank's stage and the way to the others. As a module it computes the loss of one micro-batch."""

    def __init__(
        self,
        runs: Sequence[LayerRun],
        layers: Sequence[range],
        schedule: str,
        holding: Holding,
        trained: Mapping[str, nn.Parameter],
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        """Every rank calls it.

        Args:
            runs: This stage's runs of layers.
            layers: The layers in each run of all stages; the stages have the runs in turn.
            schedule: One of SCHEDULES.
            trained: This stage's trained weights, by name.
            timeout: How long ranks with the same weight wait for each other.
        """
        super().__init__()
        self.runs: Sequence[LayerRun] = nn.ModuleList(runs)  # type: ignore[assignment]
        self.layers, self.schedule, self.holding, self.place = layers, schedule, holding, holding.place
        self._device, self._made = device, dict[tuple[int, int, bool], Any]()
        self._scale, self._loss_sum = 1.0, torch.zeros(())
        self._recorder: StageRecorder | None = None
        self._own_copy = self.place.own_copy(timeout)
        self._sums = GradientSums(self.place, holding.stages, trained, timeout)

    @property
    def own_layers(self) -> tuple[range, ...]:
        """The layers in this stage's runs."""
        return tuple(self.layers[run.index] for run in self.runs)

    def record(self) -> StageRecorder:
        """Record from now on when this stage computes each micro-batch of a step."""
        self._recorder = StageRecorder(self.place.stage, self._device)
        self._made.clear()  # those made before are not watched
        return self._recorder

    def forward(self, **batch: Any) -> Tensor:
        """The summed loss of a micro-batch, float32 [], on the last stage; 0 on the others. Every rank calls it.

        Without gradients. A stage is free for the next call when it has sent its hidden states, so calls overlap.
        """
        for run in self.runs:
            run.expect([batch])
        self._run(1, _tokens(batch), train=False)
        loss = self.runs[-1].loss
        if loss is None:
            return torch.zeros((), device=self._device)
        return loss

    def forward_and_backward(
        self,
        batches: Iterable[Given],
        *,
        divisor: int,
        loss_sum: Tensor,
        before_each: Callable[[int], None],
        phases: Phases,
    ) -> None:
        """Forward and backward of a step's micro-batches.

        Args:
            divisor: The step's units (supervised tokens); the loss is divided by them.
            loss_sum: float64 []; the last stage adds each micro-batch's loss.
            before_each: Called with a micro-batch's number before its forward.
        """
        step = list(batches)
        for later, run in enumerate(reversed(self.runs)):  # the last forward is the last run's, whose numbers are plain
            run.expect(step, before_each, later * len(step))
        self._scale, self._loss_sum = 1 / divisor, loss_sum
        at_once = 1 if self.schedule == "naive" else len(step)
        if self._recorder is not None:
            self._recorder.begin_step()
        with phases("backward"):  # and forward: a stage computes both in turn
            for _ in range(0, len(step), at_once):
                self._run(at_once, _tokens(step[0]), train=True)
            self._sums.add_up()
        for run in self.runs:
            run.expect(())

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """The norm over all stages' gradients, float32 []. A weight that two stages have counts once."""
        again = self._sums.counted_before
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in again]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            square += get_total_norm(gradients).double().square()
        dist.all_reduce(square, group=self._own_copy)
        return square.sqrt().float()

    @contextmanager
    def answering(self, decoder: PreTrainedModel) -> Iterator[None]:
        """Within the block `decoder.generate` computes with all stages: every rank in this copy calls it alike.

        The last stage gives the others its scores, so that all choose the same next token. Nothing is cached: each new
        token computes all tokens again.
        """
        whole: Callable[..., Any] = decoder.forward

        @wraps(whole)  # generation reads the signature
        def forward(**given: Any) -> CausalLMOutput:
            return CausalLMOutput(logits=self._scores(given, whole, decoder))

        decoder.forward = forward
        try:
            yield
        finally:
            decoder.forward = whole

    def _scores(self, given: Given, whole: Callable[..., Any], decoder: PreTrainedModel) -> Tensor:
        """The next token's logits, float32 [rows, 1, vocabulary], on all ranks of this copy."""
        stages, own = self.place.stages, list(self.runs)
        ranks = self.place.own_ranks
        rows, tokens = given["input_ids"].shape
        scores: Tensor | None = None
        for index in range(len(self.layers)):
            if index % stages != self.place.stage:
                continue
            run, received = own.pop(0), None
            if index > 0:
                wide = decoder.config.get_text_config().hidden_size
                received = torch.empty((rows, tokens, wide), dtype=run.dtype, device=self._device)
                dist.recv(received, src=ranks[(index - 1) % stages], group=self._own_copy)
            given_on = run.answer(received, given, whole)
            if run.is_last:
                scores = given_on
            else:
                dist.send(given_on, dst=ranks[(index + 1) % stages], group=self._own_copy)
        if scores is None:
            vocabulary = decoder.get_output_embeddings().weight.shape[0]
            scores = torch.empty((rows, 1, vocabulary), dtype=torch.float32, device=self._device)
        dist.broadcast(scores, src=ranks[(len(self.layers) - 1) % stages], group=self._own_copy)
        return scores

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """Facts for the receipt, read from the stages; every rank calls it.

        `layers`: each run's first and last; the stages have the runs in turn. `bytes`: each stage's weights.
        `shared_tensors`: trained weights that two stages have.
        """
        held = sum(weight.nbytes for weight in model.parameters() if not isinstance(weight, Elsewhere))
        stage_bytes = torch.zeros(self.place.stages, dtype=torch.int64, device=self._device)
        stage_bytes[self.place.stage] = held
        dist.all_reduce(stage_bytes, group=self._own_copy)
        return {
            "schedule": self.schedule,
            "stages": self.place.stages,
            "copies": self.place.copies,
            "layers": [[layers.start, layers.stop - 1] for layers in self.layers],
            "bytes": stage_bytes.tolist(),
            "shared_tensors": sum(len(where) > 1 for where in self.holding.stages.values()),
        }

    def _run(self, micro_batches: int, tokens: int, *, train: bool) -> None:
        """The next micro-batches that the runs expect, through all stages."""
        first = (torch.empty(micro_batches),) if self.runs[0].is_first else ()  # unused, but asked for
        targets = torch.empty(micro_batches) if train and self.runs[-1].is_last else None  # so is this
        self._schedule(micro_batches, tokens, train).step(*first, target=targets, return_outputs=False)

    def _schedule(self, micro_batches: int, tokens: int, train: bool) -> Any:
        """torch's schedule for so many micro-batches, with tensors of its own to receive them in.

        The last step may have micro-batches that 1F1B cannot order, and an evaluation has one at a time: all forwards,
        then all backwards, as GPipe does, then hold no more.
        """
        key = micro_batches, tokens, train
        if key in self._made:
            return self._made[key]
        made = []
        for run in self.runs:  # all shapes are given, so that torch does not run a micro-batch only to see them
            width = run.decoder.config.get_text_config().hidden_size
            hidden = torch.empty((1, tokens, width), dtype=run.dtype, device="meta", requires_grad=True)
            loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
            stage = PipelineStage(
                run,
                run.index,
                len(self.layers),
                self._device,
                input_args=torch.empty(1, device="meta") if run.is_first else hidden,
                output_args=loss if run.is_last else hidden,
                group=self._own_copy,
            )
            made.append(stage)
        if train and self._recorder is not None:
            self._recorder.watch(made)
        kind: Any = ScheduleGPipe
        if len(made) > 1:
            interleaves = train and can_interleave(self.place.stages, micro_batches)
            kind = ScheduleInterleaved1F1B if interleaves else ScheduleLoopedBFS
        elif train and micro_batches >= self.place.stages:
            kind = _CLASSES[self.schedule]
        stages, loss_of_batch = made if len(made) > 1 else made[0], self._loss if train else None
        self._made[key] = kind(stages, micro_batches, loss_fn=loss_of_batch, scale_grads=False)
        return self._made[key]

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """The start of backward: the summed loss over the step's units."""
        value = loss.detach()
        self._loss_sum.add_(value)
        # A loss that is not finite makes the gradients of all stages nan, as in the loop over micro-batches.
        return loss * (self._scale + 0.0 * value)


class StageRecorder:
    """When this rank's stage computed each micro-batch of the latest step, on a clock that all processes on a machine
    share. Off unless `Pipeline.record` is called: it waits for the device before and after each forward and backward.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.spans: list[Computation] = []
        self._stage, self._device = stage, device
        self._before: Counter[tuple[str, int]] = Counter()  # by kind and run; each goes through micro-batches in order

    def begin_step(self) -> None:
        """Forget the step before."""
        self.spans = []
        self._before.clear()

    def watch(self, runs: Sequence[PipelineStage]) -> None:
        """Time torch's calls of this stage's runs, in place. Waiting before and after is not included."""
        for run, made in enumerate(runs):
            timed: Any = made
            timed.forward_one_chunk = self._timed(FORWARD, run, made.forward_one_chunk)
            timed.backward_one_chunk = self._timed(BACKWARD, run, made.backward_one_chunk)

    def _timed(self, kind: str, run: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = call(*args, **kwargs)
            self.spans.append(Computation(self._stage, kind, self._before[kind, run], begin, self._now(), run))
            self._before[kind, run] += 1
            return result

        return timed

    def _now(self) -> float:
        torch.get_device_module(self._device).synchronize(self._device)  # nothing on a CPU
        return time.monotonic()


def _tokens(batch: Given) -> int:
    return int(batch["input_ids"].shape[1])
