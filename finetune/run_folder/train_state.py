"""What a checkpoint keeps besides weights and optimizer: where the run is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.measure.metrics import StepRecord, Window


@dataclass
class TrainState:
    """Everything that a resumed run must know besides weights and optimizer."""

    step: int = 0  # finished optimizer steps: the one integer that says where the run is
    best_eval_loss: float = math.inf
    worse_evaluations: int = 0
    skipped_steps: int = 0  # whose fp16 gradients overflowed
    loss_scaler: dict[str, Any] | None = None  # fp16's, as of the latest save
    # Of each trained tensor before the first step; empty where an earlier release began the run.
    start_checksums: dict[str, str] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint; JSON has no infinity, so no evaluation yet is null."""
        best = self.best_eval_loss if math.isfinite(self.best_eval_loss) else None
        return {**asdict(self), "best_eval_loss": best}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state that `as_json` gave."""
        best = math.inf if saved["best_eval_loss"] is None else float(saved["best_eval_loss"])
        records = [StepRecord(**record) for record in saved["window"]["records"]]
        return cls(
            step=int(saved["step"]),
            best_eval_loss=best,
            worse_evaluations=int(saved["worse_evaluations"]),
            skipped_steps=int(saved.get("skipped_steps", 0)),
            loss_scaler=saved.get("loss_scaler"),
            start_checksums=dict(saved.get("start_checksums", {})),
            window=Window(records),
        )
