"""The shapes of the learning rate's schedule, and the arguments of each."""

from __future__ import annotations

# The arguments that each shape of the schedule knows, by transformers' names.
SCHEDULER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}

SCHEDULER_SHAPES = ("linear", "cosine", "1-sqrt")  # of warmup_type and decay_type
