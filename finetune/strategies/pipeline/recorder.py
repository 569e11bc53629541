"""When this rank's stage really computed each micro-batch. Off unless `Pipeline.record` is called: it waits for the
device before and after each forward and backward."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from finetune.strategies.pipeline.timeline import BACKWARD, FORWARD, Computation


class StageRecorder:
    """The latest step's spans, on a clock that all processes on a machine share."""

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
