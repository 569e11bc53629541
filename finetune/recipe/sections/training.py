"""The training itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finetune.recipe.sections.base import MOST, Count, CrossCheck, Section, WholeNumber, refuse
from finetune.recipe.yaml_text import shown

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
# Each schedule's arguments, by transformers' names.
SCHEDULER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "warmup_stable_decay": tuple(
        "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles".split()
    ),
}
MOST_CYCLES = 1000  # limit for a schedule's cycles and its power: 0.5 ** 1000 is 1e-301, near the smallest float
CURVE_SHAPES = ("linear", "cosine", "1-sqrt")  # values for warmup_type and decay_type
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Objective = Literal["supervised", "dpo", "kto"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
Recomputation = bool | int | Literal["auto", "selective"]
# The choices for `activation_checkpointing: auto`, from the least recomputation to the most. The second and the third
# need about the same memory. Compiled layers do not support the second.
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "selective", 2, True)
RECOMPUTATIONS_IF_COMPILED: tuple[Recomputation, ...] = (False, 2, True)


class Training(Section):
    """The training itself: the same for every strategy and number of GPUs."""

    objective: Objective = Field(
        "supervised",
        description="supervised: answers and texts. dpo: pairs of a chosen and a rejected answer (section dpo). kto: "
        "answers that are wanted or not (section kto).",
    )
    global_batch_size: Count = Field(
        16, description="Rows per optimizer step over all ranks; accumulation is derived. dpo: pairs."
    )
    per_device_batch_size: Count | Literal["auto"] = Field(
        1,
        description="Rows of one forward on one rank. auto: the most that fit by the closed form, first without "
        "recomputation, up to 16,384 tokens; 1 without a closed form (dropout, ZeRO, pipelines).",
    )
    num_train_epochs: float = Field(1.0, gt=0, le=1e6, description="Passes over the rows; max_steps wins.")
    max_steps: Count | None = Field(None, description="Optimizer steps; null: from num_train_epochs.")
    learning_rate: float = Field(2e-4, gt=0, description="Peak of the schedule.")
    lr_scheduler_type: Scheduler = Field("cosine", description="Shape of the schedule, by transformers' names.")
    lr_scheduler_kwargs: dict[str, Any] = Field({}, description="The shape's own arguments, by transformers' names.")
    warmup_ratio: Fraction = Field(0.03, description="Share of the steps spent warming up.")
    warmup_steps: WholeNumber | None = Field(None, description="Steps of warming up; wins over warmup_ratio.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay; none on biases and norms.")
    adam_beta1: Decay = Field(0.9, description="AdamW's decay of the gradient's running mean.")
    adam_beta2: Decay = Field(0.999, description="AdamW's decay of the squared gradient's running mean.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Added to that mean's root, by which AdamW divides.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient's global norm to this; null: never.")
    optim: Optimizer = Field("adamw", description="AdamW: fused, or in 8 bits; paged: on CUDA, not sharded.")
    mixed_precision: Literal["auto", "bf16", "fp16", "no"] = Field(
        "auto",
        description="Number format for computation. auto: bf16 if the device has arithmetic for it; else fp16 on a "
        "GPU, no on a CPU. A run keeps its choice. no: float32. fp16: losses are scaled.",
    )
    pure_bf16: bool = Field(
        False, description="Trained weights and AdamW's state in bfloat16 too, with stochastic rounding."
    )
    activation_checkpointing: bool | Count | Literal["auto", "selective"] = Field(
        "auto",
        description="Layers that backward recomputes. true: all. false: none. n: every n-th. selective: all, but "
        "they keep products and attention outputs. auto: the least that fits by the closed form (on a CPU, into free "
        "host memory); true without a closed form.",
    )
    activation_offloading: bool = Field(
        False,
        description="Hidden states of recomputed layers wait for backward in pinned host memory, for long rows. It "
        "takes 2 bytes x hidden size for each token and layer there, over PCIe twice. auto recomputes all layers then.",
    )
    mlp_tile_tokens: Count | None = Field(
        None,
        description="Each layer's dense MLP runs over so many tokens at a time, and once more in backward, so memory "
        "holds one tile's wide tensors. 4096 is a good size for rows of 16,384 tokens or more. null: the whole row.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Decoder layers as fused kernels (torch.compile), and on a GPU pure_bf16's update as one. auto: on "
        "a GPU, if it can compile.",
    )
    non_blocking: bool = Field(True, description="Pinned memory and copies one batch ahead.")
    seed: int = Field(42, ge=0, le=2**63 - 1, description="Seed of row order, adapter initialisation and dropout.")
    deterministic: bool = Field(
        False,
        description="On a GPU: kernels that sum in one order, so that a resumed run is bitwise. Attention is slower.",
    )
    resume: Literal["auto", "never"] = Field("auto", description="auto: continue the run folder's newest checkpoint.")
    early_stopping_patience: Count | None = Field(
        None, description="Evaluations without a better metric_for_best_model before the end."
    )
    load_best_model_at_end: bool | None = Field(
        None, description="Export the best evaluation's weights, not the last. null: if early_stopping_patience is set."
    )
    metric_for_best_model: str = Field(
        "eval_loss",
        description="eval_loss: all held-out rows; eval_NAME_loss: the data.eval set NAME; eval_METRIC: a score of "
        "eval.generate.metrics, or under dpo and kto eval_reward_accuracy or eval_reward_margin.",
    )

    @property
    def rows_at_once(self) -> int:
        """Rows of one forward on one rank. `auto` counts as 1 until a run resolves it."""
        if self.per_device_batch_size == "auto":
            return 1
        return self.per_device_batch_size

    @property
    def recompute_every(self) -> int:
        """n, if backward recomputes every n-th layer; 0: none. `auto` counts as 1 until a run resolves it."""
        if isinstance(self.activation_checkpointing, str):
            return 1
        return int(self.activation_checkpointing)

    @property
    def keeps_products(self) -> bool:
        """Whether recomputed layers keep their matrix products and attention outputs."""
        return self.activation_checkpointing == "selective"

    @property
    def exports_best(self) -> bool:
        """Whether the best evaluation's weights are exported, rather than the last step's."""
        if self.load_best_model_at_end is None:
            return self.early_stopping_patience is not None
        return self.load_best_model_at_end

    @model_validator(mode="after")
    def known_schedule(self) -> Training:
        refuse(_schedule_mistakes(self))
        return self

    def warmup_of(self, total_steps: int) -> int:
        """The warmup in optimizer steps: `warmup_steps`, or `warmup_ratio` times the run, rounded up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps)

    def rows_of_run(self, rows: int) -> int:
        """The rows that a whole run trains on, with repeats. `rows`: one epoch's."""
        if self.max_steps is not None:
            return self.max_steps * self.global_batch_size
        return math.ceil(self.num_train_epochs * rows)


def _schedule_mistakes(training: Training) -> Iterator[CrossCheck]:
    shape, arguments = training.lr_scheduler_type, training.lr_scheduler_kwargs
    known = SCHEDULER_ARGUMENTS[shape]
    for name, value in arguments.items():
        key = f"lr_scheduler_kwargs.{name}"
        if name not in known:
            remedy = "it has none; remove them"
            if known:
                remedy = f"its arguments are {', '.join(known)}"
            yield CrossCheck(key, f"{shape} has no argument {name}", remedy)
        elif name.endswith("_type"):
            if value not in CURVE_SHAPES:
                yield CrossCheck(key, "is not a curve's shape", f"choose one of {', '.join(CURVE_SHAPES)}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            yield CrossCheck(key, "is not a number", "write a number")
        elif remedy := _out_of_range(name, value, training):
            yield CrossCheck(key, f"is {shown(value)}", remedy)
    # Without these arguments transformers raises an error, but only after the model is loaded.
    if shape == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(arguments)) != 1:
        remedy = "add lr_scheduler_kwargs: {min_lr_rate: 0.1}"
        yield CrossCheck("lr_scheduler_type", "cosine_with_min_lr needs one of min_lr and min_lr_rate", remedy)
    if shape == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        remedy = "add lr_scheduler_kwargs: {num_decay_steps: 100}"
        yield CrossCheck("lr_scheduler_type", "warmup_stable_decay needs num_decay_steps", remedy)


def _out_of_range(name: str, value: float, training: Training) -> str:
    """The remedy for a number that makes the rate negative, rising or impossible to compute; empty for other numbers.

    The limits are far beyond any useful value.
    """
    rate = training.learning_rate
    match name:
        case "num_cycles" | "power" if not 0 < value <= MOST_CYCLES:
            return f"write a number above 0, at most {MOST_CYCLES:,}"
        case "timescale" if not 1 <= value <= MOST:
            return "write the number of steps, 1 or more"
        case "num_decay_steps" | "num_stable_steps" if not 0 <= value <= MOST or value != int(value):
            return "write a whole number of steps, 0 or more"
        case "min_lr_rate" | "min_lr_ratio" if not 0 <= value <= 1:
            return "write a share of the learning rate, from 0 to 1"
        case "lr_end" if not 0 <= value < rate:
            return f"write a rate from 0 to below training.learning_rate, {rate:g}"
        case "min_lr" if not 0 <= value <= rate:
            return f"write a rate from 0 to training.learning_rate, {rate:g}"
    return ""
