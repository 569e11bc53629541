"""The keys of transformers' TrainingArguments, which TRL's and LLaMA-Factory's configurations share."""

from __future__ import annotations

from typing import Any

from finetune.importers.foreign_config import ForeignConfig, as_count, positive_or_none
from finetune.importers.shared import (
    carry_batch_size,
    carry_checkpointing,
    carry_hub,
    carry_optimizer,
    carry_scheduler,
    carry_strategy,
    carry_trackers,
    carry_warmup,
    leave_end_token,
)

# Defaults of transformers (TrainingArguments of 5.23).
TRAINER_DEFAULTS: dict[str, Any] = {
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


def carry_training(foreign: ForeignConfig, *, learning_rate: float, recompute: bool) -> None:
    """The training section, and what is kept of a run. The two arguments are the tool's own defaults, because they are
    not transformers'."""
    carry_strategy(foreign)
    carry_batch_size(foreign, "per_device_train_batch_size", TRAINER_DEFAULTS["per_device_train_batch_size"])
    steps = foreign.get("max_steps")
    if isinstance(steps, bool) or not isinstance(steps, (int, float, type(None))):
        foreign.refuse("max_steps", "write a whole number")
    if steps is not None and steps > 0:
        foreign.write("training.max_steps", as_count(steps), "max_steps")
        if foreign.get("num_train_epochs") is not None:
            foreign.leave("num_train_epochs", "same", "max_steps wins over it")
    else:
        foreign.carry("training.num_train_epochs", "num_train_epochs", default=TRAINER_DEFAULTS["num_train_epochs"])
    foreign.carry("training.learning_rate", "learning_rate", default=learning_rate)
    carry_scheduler(foreign, "lr_scheduler_type", TRAINER_DEFAULTS["lr_scheduler_type"])
    carry_warmup(foreign)
    foreign.carry("training.weight_decay", "weight_decay", default=TRAINER_DEFAULTS["weight_decay"])
    norm = TRAINER_DEFAULTS["max_grad_norm"]
    foreign.carry("training.max_grad_norm", "max_grad_norm", default=norm, change=positive_or_none)
    carry_optimizer(foreign, "optim", TRAINER_DEFAULTS["optim"])
    keys = ("gradient_checkpointing", "activation_checkpointing")
    carry_checkpointing(foreign, *keys, default=recompute)
    foreign.carry("training.seed", "seed", default=TRAINER_DEFAULTS["seed"])

    foreign.carry("logging_steps", "logging_steps", change=as_count)
    foreign.carry("eval_steps", "eval_steps", change=as_count)
    if str(foreign.get("save_strategy", "steps")) == "steps":
        foreign.carry("save_steps", "save_steps", change=as_count)
        if foreign.peek("save_steps") is None:
            foreign.default("save_steps", TRAINER_DEFAULTS["save_steps"])
    else:
        foreign.leave("save_strategy", "same", "checkpoints are written every save_steps, so that a run can resume")
    foreign.carry("save_total_limit", "save_total_limit", change=as_count)
    foreign.carry("output_dir", "output_dir")
    carry_hub(foreign, push=bool(foreign.get("push_to_hub")))

    leave_end_token(foreign, "eos_token")
    for key in ("router_aux_loss_coef", "moe_aux_loss_coef"):
        if foreign.peek(key) == 0:
            foreign.carry("model.router_aux_loss_coef", key)
    reported = [name.lower() for name in foreign.names("report_to")]
    if "all" in reported:  # in transformers: every tracker that is installed
        foreign.leave("report_to", "look", "names no tracker; write report_to: [wandb], or those that you use")
    carry_trackers(foreign, {name: "report_to" for name in reported if name not in ("all", "none")})
    if foreign.get("average_tokens_across_devices") is False:
        reason = "every token of a step has the same weight, on every rank"
        foreign.leave("average_tokens_across_devices", "differs", reason)


def carry_precision(foreign: ForeignConfig, default: str) -> str:
    """training.mixed_precision; returns bf16, fp16 or no."""
    values = {key: foreign.get(key) for key in ("bf16", "fp16")}
    for key, value in values.items():
        if value is True:
            foreign.write("training.mixed_precision", key, key)
            return key
    if default == "bf16" and values["bf16"] is False:
        default = "no"
    switched_off = [key for key, value in values.items() if value is False]
    origin = f"{switched_off[0]}: false" if switched_off else f"{foreign.tool}'s default"
    foreign.write("training.mixed_precision", default, origin)
    return default
