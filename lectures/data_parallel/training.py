"""The same few steps under DataParallel, in one process, and under DDP, in a process for each rank.

Both learn from the same rows of random token ids, without dropout, so that their losses can be compared step by step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from finetune.measure.live_tensors import LiveTensors
from lectures.data_parallel.four_steps import FourSteps, bytes_of, on_gpus, one_thread_each, played

PLAYED_RATE = 1e-3
_WARM_UP = 1  # steps that are not timed
STEP_TIMES = ("scatter", "replicate", "forward", "gather", "loss", "backward", "step")


@dataclass(frozen=True)
class Job:
    """What both train."""

    model: Path  # a small model's folder
    replicas: int
    rows: int  # of a step, over all replicas
    tokens: int  # of a row
    steps: int

    def ids(self, step: int, vocabulary: int) -> Tensor:
        """The rows of one step, [rows, tokens]."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(vocabulary, (self.rows, self.tokens), generator=generator)


class Logits(nn.Module):
    """A causal language model as DataParallel is taught: token ids in, logits out, and the loss outside."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, vocabulary]."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean over all tokens but the first of each row."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Trained:
    """One of the two rows: seconds and bytes of a step by part, and memory by device."""

    losses: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of one step, the mean
    sent: dict[str, int] = field(default_factory=dict)  # bytes of a step into and out of the busiest device
    memory: dict[str, list[int]] = field(default_factory=dict)  # bytes of each replica after a part of the last step
    parameter_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "step_seconds": self.step_seconds}


class Clock:
    """Seconds by part; on a GPU each part waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.seconds.setdefault(part, []).append(time.perf_counter() - began)

    def mean(self) -> dict[str, float]:
        """Without the first steps, which warm up."""
        return {part: sum(times[_WARM_UP:]) / len(times[_WARM_UP:]) for part, times in self.seconds.items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def train_data_parallel(job: Job, *, gpus: bool) -> Trained:
    """Train in this process, over GPUs or, played, over threads; one more step at the end is watched for its memory."""
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    module = Logits(job.model).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), PLAYED_RATE)
    trained, clock = Trained(parameter_bytes=bytes_of(list(module.parameters()))), Clock(device)
    with one_thread_each():
        steps = on_gpus(module, range(job.replicas)) if gpus else played(module, job.replicas)
        for step in range(job.steps):
            ids = job.ids(step, module.vocabulary).to(device)
            trained.losses.append(_step(steps, optimizer, ids, clock, trained))
        trained.seconds = clock.mean()
        ids = job.ids(job.steps, module.vocabulary).to(device)
        ledgers = [LiveTensors() for _ in range(job.replicas)]
        if not gpus:
            states = [each for state in optimizer.state.values() for each in state.values()]
            ledgers[0].see([*module.parameters(), *states])
            steps = played(module, job.replicas, ledgers)
        watched = _Memory(trained, ledgers, gpus=gpus)
        _step(steps, optimizer, ids, Clock(device), trained, watched)
    return trained


@dataclass(frozen=True)
class _Memory:
    """Notes the bytes of each replica after a part of a step."""

    trained: Trained
    ledgers: list[LiveTensors]
    gpus: bool

    def note(self, part: str) -> None:
        if self.gpus:
            found = [torch.cuda.memory_allocated(device) for device in range(len(self.ledgers))]
        else:
            found = [ledger.live("cpu") for ledger in self.ledgers]
        self.trained.memory[part] = found


def _step(
    steps: FourSteps,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    clock: Clock,
    trained: Trained,
    memory: _Memory | None = None,
) -> float:
    """One step of DataParallel; returns its loss."""

    def note(part: str) -> None:
        if memory is not None:
            memory.note(part)

    with clock("scatter"):
        parts = steps.scatter(ids)
    with clock("replicate"):
        replicas = steps.replicate()
    with clock("forward"):
        outputs = steps.forward(replicas, parts)
    note("forward")
    with clock("gather"):
        logits = steps.gather(outputs)
    note("gather")
    trained.sent = {
        "scatter": bytes_of(parts[1:]),
        "replicate": sum(bytes_of(list(each.weights.values())) for each in replicas[1:]),
        "gather": bytes_of(outputs[1:]),
    }
    trained.sent["reduce"] = trained.sent["replicate"]  # a gradient for each weight that was sent
    del outputs
    with steps.on_master():
        with clock("loss"):
            loss = next_token_loss(logits, ids)
        note("loss")
        with clock("backward"):
            loss.backward()
        del logits, replicas, parts
        with clock("step"):
            optimizer.step()
            value = float(loss.detach())
            del loss
            optimizer.zero_grad()
    note("step")
    return value
