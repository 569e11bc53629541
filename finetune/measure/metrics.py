"""A run's progress: lines in metrics.jsonl and on the terminal.

The optimizer step gives plain numbers, read from the device once per step. This module touches no tensor.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from finetune.measure.phases import peak_bytes
from finetune.output_stream import lasting, wrapped
from finetune.recipe.sections.preferences import is_own_reference
from finetune.wording import GIB, duration

BARS = "▁▂▃▄▅▆▇█"
FEWEST_BARS, MOST_BARS = 8, 24
SLOW_DATA = 0.05  # of a step; a narrow terminal drops a smaller share first


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step's figures. Counts are over all ranks, seconds are this rank's."""

    step: int  # finished optimizer steps
    epoch: float
    loss: float  # mean over the step's supervised tokens
    grad_norm: float | None  # before clipping; None: skipped, the gradients overflowed fp16
    learning_rate: float
    supervised_tokens: int
    tokens: int
    seconds: float
    data_wait_seconds: float
    loss_scale: float | None = None  # under fp16
    skipped_steps: int = 0  # of the run, up to this step
    units: int = 0  # that `loss` is a mean over, if not supervised tokens: preference pairs or judged answers
    metrics: dict[str, float] = field(default_factory=dict)  # the objective's: rewards of preferences


@dataclass
class Window:
    """The steps since the last metrics line. A line averages losses over supervised tokens and adds up seconds."""

    records: list[StepRecord] = field(default_factory=list)

    def flush(self, device: torch.device) -> dict[str, Any]:
        """The metrics.jsonl line for these steps, which are dropped. A single step keeps its own figures."""
        records, self.records = self.records, []
        last = records[-1]
        supervised = sum(record.supervised_tokens for record in records)
        tokens = sum(record.tokens for record in records)
        seconds = sum(record.seconds for record in records)
        weights = [record.units or record.supervised_tokens for record in records]
        loss, metrics = last.loss, last.metrics
        if len(records) > 1:
            weighted = [*zip(records, weights, strict=True)]
            loss, metrics = math.fsum(record.loss * weight for record, weight in weighted) / sum(weights), {}
            for name in dict.fromkeys(name for record in records for name in record.metrics):
                # The mean over the steps that have it, by their units.
                having = [(record.metrics[name], weight) for record, weight in weighted if name in record.metrics]
                total = sum(weight for _, weight in having)
                metrics[name] = math.fsum(value * weight for value, weight in having) / total
        norms = [record.grad_norm for record in records if record.grad_norm is not None]
        line = {
            "kind": "train",
            "step": last.step,
            "epoch": round(last.epoch, 6),
            "loss": loss,
            "grad_norm": norms[-1] if norms else None,
            "learning_rate": last.learning_rate,
            "supervised_tokens": supervised,
            "tokens": tokens,
            "step_seconds": seconds / len(records),
            "tokens_per_second": tokens / seconds,
            "data_wait_fraction": sum(record.data_wait_seconds for record in records) / seconds,
            "peak_memory_gib": peak_bytes(device) / GIB,
            **metrics,
        }
        if last.loss_scale is not None:
            line |= {"loss_scale": last.loss_scale, "skipped_steps": last.skipped_steps}
        return line


def eval_line(step: int, losses: Mapping[str, float]) -> dict[str, Any]:
    """An evaluation's line in metrics.jsonl: `loss`, and `NAME_loss` for each data set if there are several; rewards of
    preferences, or else the loss's perplexity."""
    line = {"kind": "eval", "step": step, **losses}
    if "reward_accuracy" not in losses:
        line["perplexity"] = math.exp(min(losses["loss"], 700.0))
    return line


def evaluation_in_words(line: Mapping[str, Any]) -> str:
    """An evaluation's figures for the terminal: the mean loss, its perplexity, and each data set's loss if there are
    several.
    """
    sets = "".join(f", {key.removesuffix('_loss')} {loss:.4f}" for key, loss in line.items() if key.endswith("_loss"))
    if "perplexity" in line:
        return f"held-out loss {line['loss']:.4f}, perplexity {line['perplexity']:.2f}{sets}"
    rewards = f"reward accuracy {line['reward_accuracy']:.0%}"
    if is_own_reference(line):
        rewards = "rewards 0 as long as the model is its reference"
    elif "reward_margin" in line:
        rewards += f", margin {line['reward_margin']:.3g}"
    return f"held-out loss {line['loss']:.4f}, {rewards}{sets}"


def sparkline(values: list[float], width: int = MOST_BARS) -> str:
    """The last `width` values as bars between their own smallest and largest."""
    values = [value for value in values if math.isfinite(value)][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


class Terminal:
    """One line that is redrawn on a tty, plain lines elsewhere; nothing where `silent`: on every rank but rank 0."""

    def __init__(
        self,
        total_steps: int,
        *,
        silent: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._silent = silent
        self._stream = lasting(stream or sys.stdout)  # sys.stdout of this moment, not of the import
        self._live = self._stream.isatty()
        self._losses: deque[float] = deque(maxlen=120)
        self._clock = clock
        self._began: tuple[float, int] | None = None
        self._drawn = False  # a step's line is drawn: the next output redraws it, or goes below it
        self._passing = False  # the next output overwrites a line of `progress`
        self.memory_of = "process"  # what `peak_memory_gib` is the peak of; on a GPU its tensors

    def say(self, text: str) -> None:
        """Print a line that stays; an empty text prints nothing."""
        if self._silent or not text:
            return
        self._erase()
        self._stream.write(wrapped(text, self._stream) + "\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """On a tty, show a line that the next output overwrites, during work of some seconds that is not a step."""
        if self._silent or not self._live:
            return
        self._erase()
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[2K{text[:width]}")
        self._stream.flush()
        self._passing = True

    def clear(self) -> None:
        """Erase a line of `progress`."""
        self._erase()
        self._stream.flush()

    def step(self, line: dict[str, Any]) -> None:
        """Show a training line of metrics."""
        if self._silent:
            return
        self._losses.append(line["loss"])
        if self._began is None:  # the first step compiles and warms up; time is counted from its end
            self._began = (self._clock(), line["step"])
        parts = self._parts(line)
        if not self._live:
            self._stream.write("  ".join(parts.values()) + "\n")
        else:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[2K" + self._fitted(parts, width, line["data_wait_fraction"] < SLOW_DATA))
            self._drawn, self._passing = True, False
        self._stream.flush()

    def _parts(self, line: dict[str, Any]) -> dict[str, str]:
        rewards = {}
        if "reward_accuracy" in line:
            rewards["accuracy"] = f"accuracy {line['reward_accuracy']:.0%}"
        assert self._began is not None
        began, first = self._began
        steps_done = line["step"] - first
        step_seconds = (self._clock() - began) / steps_done if steps_done else line["step_seconds"]
        norm = "overflow" if line["grad_norm"] is None else f"{line['grad_norm']:.3g}"
        if "loss_scale" in line:
            norm += f"  scale {line['loss_scale']:.0f}, {line['skipped_steps']} skipped"
        return {
            "step": f"step {line['step']}/{self._total}",
            "loss": f"loss {line['loss']:.4f}",
            **rewards,
            "norm": f"norm {norm}",
            "speed": f"{line['tokens_per_second']:,.0f} tok/s",
            "memory": f"{self.memory_of} {line['peak_memory_gib']:.1f} GiB",
            "wait": f"data wait {line['data_wait_fraction']:.0%}",
            "ETA": f"ETA {duration(step_seconds * (self._total - line['step']))}",
        }

    def _fitted(self, parts: dict[str, str], width: int, data_are_quick: bool) -> str:
        """Fit into `width` columns: step, loss, ETA, other parts if there is room, and the losses as bars in the
        rest."""
        order = ["wait", "norm", "memory", "speed"] if data_are_quick else ["norm", "memory", "speed", "wait"]
        while len("  ".join(parts.values())) + 1 + FEWEST_BARS > width and order:
            del parts[order.pop(0)]
        bars = min(MOST_BARS, width - 1 - len("  ".join(parts.values())))
        if bars >= FEWEST_BARS:
            parts["loss"] += f" {sparkline(list(self._losses), bars)}"
        return "  ".join(parts.values())[:width]

    def _erase(self) -> None:
        if self._passing:
            self._stream.write("\r\x1b[2K")
            self._passing = False
        if self._drawn:  # keep the last redrawn line above the next one
            self._stream.write("\n")
            self._drawn = False
