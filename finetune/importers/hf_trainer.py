"""The keys of transformers' TrainingArguments, which TRL's and LLaMA-Factory's configurations share."""

from __future__ import annotations

from typing import Any

from finetune.importers.foreign_config import ForeignConfig, positive_or_none, whole
from finetune.importers.shared import batch, checkpointing, every, hub, optimizer, scheduler, strategy, warmup

# What transformers does where nothing is said (TrainingArguments of 5.23).
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
}


def training(theirs: ForeignConfig, *, learning_rate: float, recompute: bool) -> str:
    """The training section and what is kept of a run; returns the strategy's name. The two arguments are the tool's
    own defaults where they are not transformers'."""
    name = strategy(theirs)
    batch(theirs, "per_device_train_batch_size", DEFAULTS["per_device_train_batch_size"])
    steps = theirs.get("max_steps")
    if steps is not None and steps > 0:
        theirs.write("training.max_steps", whole(steps), "max_steps")
        if theirs.get("num_train_epochs") is not None:
            theirs.leave("num_train_epochs", "same", "max_steps wins over it")
    else:
        theirs.carry("training.num_train_epochs", "num_train_epochs", default=DEFAULTS["num_train_epochs"])
    theirs.carry("training.learning_rate", "learning_rate", default=learning_rate)
    scheduler(theirs, "lr_scheduler_type", DEFAULTS["lr_scheduler_type"])
    warmup(theirs)
    theirs.carry("training.weight_decay", "weight_decay", default=DEFAULTS["weight_decay"])
    norm = DEFAULTS["max_grad_norm"]
    theirs.carry("training.max_grad_norm", "max_grad_norm", default=norm, change=positive_or_none)
    optimizer(theirs, "optim", DEFAULTS["optim"])
    keys = ("gradient_checkpointing", "activation_checkpointing")
    checkpointing(theirs, *keys, default=recompute)
    theirs.carry("training.seed", "seed", default=DEFAULTS["seed"])
    _kept(theirs)
    if theirs.get("average_tokens_across_devices") is False:
        reason = "every token of a step weighs the same, on whatever rank it lies"
        theirs.leave("average_tokens_across_devices", "differs", reason)
    return name


def _kept(theirs: ForeignConfig) -> None:
    theirs.carry("logging_steps", "logging_steps", change=whole)
    every(theirs, "eval_steps", "eval_steps")
    if str(theirs.get("save_strategy", "steps")) == "steps":
        every(theirs, "save_steps", "save_steps")
        if theirs.peek("save_steps") is None:
            theirs.default("save_steps", DEFAULTS["save_steps"])
    else:
        theirs.leave("save_strategy", "same", "checkpoints are written every save_steps, so that a run can go on")
    theirs.carry("save_total_limit", "save_total_limit", change=whole)
    theirs.carry("output_dir", "output_dir")
    hub(theirs, push=bool(theirs.get("push_to_hub")))


def precision(theirs: ForeignConfig, default: str) -> str:
    """training.mixed_precision, and with fp16 the formats that go with it; returns bf16, fp16 or no."""
    said = {key: theirs.get(key) for key in ("bf16", "fp16")}
    key = next((key for key, value in said.items() if value is True), None)
    if key:
        theirs.write("training.mixed_precision", key, key)
    else:
        off = next((name for name, value in said.items() if value is False), None)
        default = "no" if default == "bf16" and said["bf16"] is False else default
        theirs.write("training.mixed_precision", default, f"{off}: false" if off else f"{theirs.tool}'s default")
    return key or default
