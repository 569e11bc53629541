"""The state of a run that a checkpoint keeps besides weights and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.library_errors import words_of
from finetune.measure.metrics import StepRecord, Window


def state_problem(saved: Mapping[str, Any]) -> str | None:
    """The fault in a checkpoint's saved TrainState; None if it can be read."""
    if "window" not in saved:  # tests and tools keep other things besides tensors
        return None
    try:
        state = TrainState.from_json(saved)
    except Exception as error:  # a value has the wrong type, at any depth
        return f"is not what a run saves ({words_of(error, 80)})"
    counts = (state.step, state.worse_evaluations, state.skipped_steps)
    scaler, sums = state.loss_scaler, saved.get("start_checksums", {})
    valid = (
        type(saved["step"]) is int
        and all(count >= 0 for count in counts)
        and (scaler is None or isinstance(scaler, dict))
        and all(value is None or _is_number(value) for value in (state.best_step, state.last_eval_loss))
        and isinstance(sums, dict)
        and all(isinstance(checksum, str) for checksum in sums.values())
    )
    # Every figure in a step's record must be a number, so that the window can average it. These two may be absent.
    for record in state.window.records:
        for name, value in vars(record).items():
            if name == "metrics":
                valid = valid and all(_is_number(figure) for figure in value.values())
                continue
            may_be_absent = name in ("grad_norm", "loss_scale") and value is None
            valid = valid and (may_be_absent or _is_number(value))
    return None if valid else "is not what a run saves"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass
class TrainState:
    """Everything that a resumed run needs besides weights and optimizer."""

    step: int = 0  # finished optimizer steps: rows, learning rate and dropout seeds follow from this integer
    best_eval_loss: float = math.inf  # from step 1 on, by training.metric_for_best_model
    best_step: int | None = None  # the best evaluation's step
    last_eval_loss: float | None = None  # by the same metric
    worse_evaluations: int = 0  # in a row since the best one
    skipped_steps: int = 0  # steps with overflown fp16 gradients
    loss_scaler: dict[str, Any] | None = None  # fp16's scaler at the latest save
    # Each trained tensor's checksum before the first step.
    start_checksums: dict[str, str] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    def compare(self, value: float, *, higher_is_better: bool = False) -> None:
        """Record the evaluation after `step` steps: a loss, or a score. If values are equal, the first is the best."""
        self.last_eval_loss = value
        is_first = self.best_step is None
        if is_first or (value > self.best_eval_loss if higher_is_better else value < self.best_eval_loss):
            self.best_eval_loss, self.best_step = value, self.step
            self.worse_evaluations = 0
        else:
            self.worse_evaluations += 1

    def as_json(self) -> dict[str, Any]:
        """The state for a checkpoint. JSON has no infinity: before the first evaluation the best loss is null."""
        saved = asdict(self)
        if not math.isfinite(self.best_eval_loss):
            saved["best_eval_loss"] = None
        return saved

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
