"""The state of a run that a checkpoint keeps besides weights and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.measure.metrics import StepRecord, Window
from finetune.untrusted.library_words import words_of


def state_problem(saved: Mapping[str, Any]) -> str | None:
    """The fault in a checkpoint's state that was saved as a TrainState; None if it can be read."""
    if "window" not in saved:  # of tests and tools that keep other things besides tensors
        return None
    try:
        state = TrainState.from_json(saved)
    except Exception as error:  # of the wrong kind, at any depth
        return f"is not what a run saves ({words_of(error, 80)})"
    numbers = (state.step, state.worse_evaluations, state.skipped_steps)
    scale, sums = state.loss_scaler, saved.get("start_checksums", {})
    whole = (
        type(saved["step"]) is int
        and all(number >= 0 for number in numbers)
        and (scale is None or isinstance(scale, dict))
        and all(value is None or _is_number(value) for value in (state.best_step, state.last_eval_loss))
        and all(map(_is_record, state.window.records))
        and isinstance(sums, dict)
        and all(isinstance(each, str) for each in sums.values())
    )
    if whole:
        return None
    return "is not what a run saves"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_record(record: StepRecord) -> bool:
    """Whether the figures of a step can be averaged."""
    values = vars(record)
    absent = [name for name in ("grad_norm", "loss_scale") if values[name] is None]
    return all(_is_number(value) for name, value in values.items() if name not in absent)


@dataclass
class TrainState:
    """Everything that a resumed run needs besides weights and optimizer."""

    step: int = 0  # finished optimizer steps: rows, learning rate and dropout seeds follow from this integer
    best_eval_loss: float = math.inf  # of evaluations from step 1 on, by training.metric_for_best_model
    best_step: int | None = None  # of that evaluation
    last_eval_loss: float | None = None  # by the same metric
    worse_evaluations: int = 0
    skipped_steps: int = 0  # steps whose fp16 gradients overflowed
    loss_scaler: dict[str, Any] | None = None  # that of fp16 at the latest save
    # A checksum of each trained tensor before the first step; empty where an earlier release began the run.
    start_checksums: dict[str, str] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    def compare(self, loss: float) -> None:
        """Take in the evaluation after `step` steps; of equal losses the first is the best."""
        better = loss < self.best_eval_loss
        self.worse_evaluations = 0 if better else self.worse_evaluations + 1
        self.last_eval_loss = loss
        if better:
            self.best_eval_loss, self.best_step = loss, self.step

    def as_json(self) -> dict[str, Any]:
        """The state for a checkpoint; before the first evaluation the best loss is null, as JSON has no infinity."""
        best = self.best_eval_loss if math.isfinite(self.best_eval_loss) else None
        return {**asdict(self), "best_eval_loss": best}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state from `as_json`'s result."""
        best = math.inf if saved["best_eval_loss"] is None else float(saved["best_eval_loss"])
        records = [StepRecord(**record) for record in saved["window"]["records"]]
        return cls(
            step=int(saved["step"]),
            best_eval_loss=best,
            best_step=saved.get("best_step"),
            last_eval_loss=saved.get("last_eval_loss"),
            worse_evaluations=int(saved["worse_evaluations"]),
            skipped_steps=int(saved.get("skipped_steps", 0)),
            loss_scaler=saved.get("loss_scaler"),
            start_checksums=dict(saved.get("start_checksums", {})),
            window=Window(records),
        )
